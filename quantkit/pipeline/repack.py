"""--repack and --unrepack: interleave rows, or undo it, without changing a value.

As in ik_llama.cpp 8337e4cd3 (iqk_repacked_type) every tensor of a type that has an interleaved one is repacked if its
number of rows is a multiple of the group and it is not an embedding. Only F16 remains unchanged: ik may convert it to
BF16_R16, which loses bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from quantkit.kernels.interleave import can_interleave, interleaved_of, is_interleaved, plain_of
from quantkit.kernels.tensor_scale import ROW_SCALED, TENSOR_SCALED
from quantkit.patterns import Pattern
from quantkit.pipeline.facts import TOKEN_EMBD_NAMES, TensorLike
from quantkit.pipeline.type_rules import Reason
from quantkit.types import BY_NAME, TensorType

#: The reason why F16 is not repacked.
_LOSSY = Reason("repack", "BF16_R16 would lose bits", case="lossy")
#: Commas between regular expressions: not those of {1,2} and [a,b].
_COMMA = re.compile(r",(?![^{}]*\}|[^\[\]]*\])")


def _reason(text: str) -> Reason:
    return Reason("repack", text)


class Repack:
    """A request to interleave rows (``interleaved``) or to undo that, of tensors whose name one of ``patterns``
    matches.

    An item of ``patterns`` may be several regular expressions, with commas between them.
    """

    def __init__(self, interleaved: bool, patterns: Sequence[str] = ()) -> None:
        self.interleaved = interleaved
        texts = (text for item in patterns for text in _COMMA.split(item) if text)
        self.patterns = [Pattern(text, "--repack-pattern") for text in texts]

    def choose(self, t: TensorLike, rows: int) -> tuple[TensorType, Reason]:
        """Return a tensor's type and the reason; ``rows``: the rows that every cut keeps together."""
        if self.patterns and not any(pattern.search(t.name) for pattern in self.patterns):
            return t.type, _reason("not matched by --repack-pattern")
        return self._interleave(t, rows) if self.interleaved else self._deinterleave(t)

    def _interleave(self, t: TensorLike, rows: int) -> tuple[TensorType, Reason]:
        interleaved = BY_NAME["BF16_R16"] if t.type.name == "F16" else interleaved_of(t.type)
        if interleaved is None:
            if is_interleaved(t.type):
                return t.type, _reason("already interleaved")
            return t.type, _reason(f"{t.type} has no interleaved type")
        if t.name in TOKEN_EMBD_NAMES:
            return t.type, _reason("embeddings are read row by row")
        if not can_interleave(interleaved, t.shape[0], rows):
            return t.type, _reason(f"{rows} rows of {t.shape[0]} are not a multiple of {interleaved.interleave} rows")
        return (t.type, _LOSSY) if t.type.name == "F16" else (interleaved, _reason("--repack"))

    def _deinterleave(self, t: TensorLike) -> tuple[TensorType, Reason]:
        if t.type is TENSOR_SCALED:
            return ROW_SCALED, _reason("--unrepack: the tensor's scale becomes that of every row")
        if not is_interleaved(t.type):
            return t.type, _reason(f"{t.type}: rows are not interleaved")
        plain = plain_of(t.type)
        if plain is None:
            return t.type, _reason(f"{t.type} has no equivalent type without interleaving")
        if t.shape[0] % plain.block:  # IQ1_S_R4 has blocks of 32, IQ1_S of 256
            return t.type, _reason(f"rows of {t.shape[0]} are not a multiple of {plain}'s blocks of {plain.block}")
        return plain, _reason("--unrepack")

    def notes(self, changed: Sequence[tuple[TensorType, TensorType]], reasons: Iterable[Reason]) -> list[str]:
        """Return notes for the user; ``changed``: the types of all tensors, before and after."""
        if self.interleaved:
            idle = "--repack is ignored: no tensor has a type and a number of rows that can be interleaved"
        else:
            idle = "--unrepack is ignored: no tensor can be deinterleaved"
        if self.patterns:
            idle += ", and a name that --repack-pattern matches"
        notes = [] if any(have is not want for have, want in changed) else [idle]
        if n := sum(reason.case == "lossy" for reason in reasons):
            subject = "1 tensor remains" if n == 1 else f"{n} tensors remain"
            notes.append(
                f"{subject} F16: ik_llama.cpp, where it is built for AVX512-BF16, converts it to BF16_R16, which "
                "loses 3 bits of each value; to do the same, quantize to BF16 first"
            )
        return notes


def bf16_r16_notes(changed: Iterable[tuple[TensorType, TensorType]]) -> list[str]:
    """Return notes on tensors that become BF16_R16."""
    sources = {have.name for have, want in changed if want.name == "BF16_R16" and have is not want}
    notes = ["BF16_R16 runs in ik_llama.cpp on CPUs with AVX512-BF16 only"] * bool(sources)
    if sources - {"BF16"}:
        notes.append(
            "BF16_R16 truncates values, as in ik_llama.cpp; to round them, quantize to BF16 first, then use --repack"
        )
    return notes
