"""Coverage of a model by an importance matrix: the entries, matrices and columns without statistics.

Checked for every weight that can be quantized: an entry exists, under its own name or that of a weight with the same
input; every expert has enough tokens; every value is finite. An estimate of E[x^2] from n tokens has a relative
standard error of about sqrt(2 / n), 14 % at 100: below ``hardly`` tokens an expert counts as hardly hit.

The table by tensor class shows what a calibration run never recorded (ik_llama.cpp's fused operations lose ffn_gate),
the table by layer the layers that it did not reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, QualityGate
from quantkit.formats.gguf.rules import n_dims
from quantkit.formats.imatrix import Imatrix, ImatrixEntry
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.imatrix.fill import without_fill
from quantkit.imatrix.rows import EXPERTS, expert_counts, raw, split_experts
from quantkit.model.arch import ARCHS
from quantkit.names import tensor_class
from quantkit.pipeline.facts import TOKEN_EMBD_NAMES, TensorLike, layer_of, unquantized_reason
from quantkit.pipeline.importance import TINY, Importance

#: With fewer tokens, the standard error of E[x^2] is at least 14 %.
HARDLY = 100
#: Embeddings are looked up, not multiplied; the second tensor is that of a prediction layer.
_EMBEDDINGS = (*TOKEN_EMBD_NAMES, "nextn.embed_tokens.weight", "compressor_ape.weight")


@dataclass(frozen=True)
class TensorCoverage:
    """The coverage of one weight."""

    name: str
    #: Whether the model needs it: None without a model, False for an entry that matches none of its weights.
    expected: bool | None
    #: Its entry, under any name, or None.
    entry: str | None
    #: Tokens per matrix, that is per expert; empty without an entry.
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    #: Counts from a .dat: 0 is certain, others are upper bounds.
    estimated: bool = False
    n_mat: int = 1
    never: int = 0
    hardly: int = 0
    #: NaN, Inf and negative sums of squares, and the first expert that has one.
    bad_values: int = 0
    bad_expert: int | None = None
    #: Matrices with tokens, but only zeros (or subnormal numbers).
    zeros: int = 0
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Its class: ffn_down_exps."""
        return tensor_class(self.name)

    @property
    def experts(self) -> int:
        """Number of experts; 0 for other weights."""
        return self.n_mat if EXPERTS in self.name else 0


@dataclass(frozen=True)
class CoverageGroup:
    """The weights of a class, or of a layer."""

    name: str
    #: Both None without a model; missing: expected but without an entry.
    expected: int | None
    present: int
    missing: int
    experts: int
    never: int
    hardly: int
    #: Minimum and median tokens per expert, or per weight without experts; None if a .dat has no counts.
    tokens_min: int | None
    tokens_median: float | None
    bad_values: int


@dataclass(frozen=True)
class Coverage(HtmlTable):
    """The coverage of a model by an importance matrix."""

    tensors: tuple[TensorCoverage, ...]
    #: Whether the expected entries are those of a model.
    of_model: bool
    hardly: int = HARDLY

    @property
    def missing(self) -> tuple[TensorCoverage, ...]:
        """Weights of the model without an entry."""
        return tuple(t for t in self.tensors if t.expected and t.entry is None)

    @property
    def strangers(self) -> tuple[TensorCoverage, ...]:
        """Entries that serve no expected weight of the model."""
        return tuple(t for t in self.tensors if t.expected is False)

    @property
    def aliased(self) -> tuple[TensorCoverage, ...]:
        """Weights served by an entry of another name."""
        return tuple(t for t in self.tensors if t.expected and t.entry is not None and t.entry != t.name)

    @property
    def share(self) -> float:
        """Share of the expected matrices, counting each expert, with tokens and without bad values."""
        counted_tensors = [t for t in self.tensors if t.expected or not self.of_model]
        total = sum(t.n_mat for t in counted_tensors)
        good = sum(int((t.counts > 0).sum()) for t in counted_tensors if not t.bad_values)
        return good / total if total else 0.0

    def by_class(self) -> tuple[CoverageGroup, ...]:
        """Return the table by tensor class, sorted by name."""
        return self._groups(lambda t: t.kind)

    def by_layer(self) -> tuple[CoverageGroup, ...]:
        """Return the table by layer; "-" is the row of tensors outside layers."""
        return self._groups(lambda t: "-" if layer_of(t.name) < 0 else str(layer_of(t.name)))

    def _groups(self, key: Callable[[TensorCoverage], str]) -> tuple[CoverageGroup, ...]:
        groups: dict[str, list[TensorCoverage]] = {}
        for t in self.tensors:
            groups.setdefault(key(t), []).append(t)
        names = sorted(groups, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
        return tuple(_group(name, groups[name], self.of_model) for name in names)

    def check(self, floor: float) -> None:
        """Raise QualityGate if the share is below ``floor`` (0 to 1); the message lists the gaps first."""
        if self.share >= floor:
            return
        problems = [f"{t.name} has no entry" for t in self.missing]
        problems += [
            f"{t.name}: {t.bad_values} values are negative or not finite" for t in self.tensors if t.bad_values
        ]
        problems += [f"{t.name}: {t.never} of {t.n_mat} experts without tokens" for t in self.tensors if t.never]
        omitted = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise QualityGate(
            f"coverage is {100 * self.share:.2f} %, less than the required {100 * floor:g} %: "
            f"{'; '.join(problems[:3])}{omitted}; calibrate on more text, or lower --require-coverage"
        )

    def as_table(self) -> Table:
        """Return expected and present entries, and tokens of experts, by class of tensors."""
        rows = (
            (g.name, g.expected, g.present, g.missing, g.experts, g.never, g.hardly, g.tokens_min, g.tokens_median)
            for g in self.by_class()
        )
        header = "class, expected, entries, missing, experts, without tokens, hardly hit, fewest tokens, median tokens"
        return table_of(header, rows, f"coverage {100 * self.share:.2f} %")


#: Tensors of encoders that multiply pooled rows, or none.
_BESIDE_ENCODER = ("cls.", "dense_2.", "dense_3.", "dec.", "output.")


def expected_tensors(
    tensors: Iterable[TensorLike], arch: str = "", *, process_output: bool = False
) -> tuple[TensorLike, ...]:
    """Return the weights of a model that an importance matrix should have an entry for.

    These are all matrices that can be quantized, including the router (--ffn-gate-inp-type), except embeddings, which
    see no activations; the output only with ``process_output``, as in llama-imatrix (tied embeddings are the output).
    Encoders have no output, and their heads, biases by distance and unused decoder no entries.
    """
    tensors = tuple(tensors)
    is_encoder = arch in ARCHS and ARCHS[arch].encoder
    if is_encoder:
        tensors = tuple(t for t in tensors if not t.name.startswith(_BESIDE_ENCODER) and "attn_rel_b" not in t.name)
    tied = set() if is_encoder else {"token_embd.weight"}
    output = {"output.weight"} & {t.name for t in tensors} or tied
    return tuple(
        t
        for t in tensors
        if n_dims(t.shape) >= 2
        and unquantized_reason(t.name, arch) is None
        and not _is_excluded(t.name, output, process_output)
    )


def _is_excluded(name: str, output: set[str], process_output: bool) -> bool:
    if name in output or name == "output.weight":
        return not process_output
    return name.endswith(_EMBEDDINGS)


def coverage(
    imatrix: Imatrix,
    tensors: Iterable[TensorLike] | None = None,
    *,
    arch: str = "",
    process_output: bool = False,
    hardly: int = HARDLY,
) -> Coverage:
    """Return the coverage of a model by ``imatrix``, or without a model that of its own entries.

    Args:
        imatrix: of either format; filled experts count as empty.
        tensors: all tensors of the model. arch: general.architecture.
        process_output: expect an entry for the output.
        hardly: experts with fewer tokens count as hardly hit.
    """
    model = None if tensors is None else tuple(tensors)
    n_experts = {} if model is None else expert_counts(imatrix.entries, model)
    estimated = imatrix.format == "dat"
    imatrix = without_fill(raw(imatrix, experts=n_experts))
    if model is None:
        rows = [_entry(n, e, None, 0, estimated, hardly) for n, e in imatrix.entries.items()]
    else:
        expected = expected_tensors(model, arch, process_output=process_output)
        rows = _model_coverage(imatrix, model, expected, estimated, hardly)
    return Coverage(tuple(sorted(rows, key=lambda t: (layer_of(t.name), t.name))), model is not None, hardly)


def _model_coverage(
    imatrix: Imatrix, model: Sequence[TensorLike], expected_weights: Sequence[TensorLike], estimated: bool, hardly: int
) -> list[TensorCoverage]:
    # Importance rejects NaN and Inf, which are findings here, and only names matter. 0.5 differs from the 1 of an
    # expert without tokens and the 0 of an unusable entry.
    names = {n: ImatrixEntry(np.full_like(e.sums, 0.5), e.counts) for n, e in imatrix.entries.items()}
    importance = Importance(replace(imatrix, entries=names))
    rows, used = [], set()
    for t in expected_weights:
        n_mat = math.prod(t.shape[2:]) if EXPERTS in t.name else 1
        try:
            lookup = importance.lookup(t.name, t.shape)
        except FormatError as e:
            used.add(t.name)
            rows.append(TensorCoverage(t.name, True, None, n_mat=n_mat, notes=(e.message,)))
            continue
        if lookup.entry is None:
            rows.append(TensorCoverage(t.name, True, None, n_mat=n_mat, notes=lookup.notes))
            continue
        used.add(lookup.entry)
        row = _entry(t.name, imatrix.entries[lookup.entry], True, n_mat, estimated, hardly)
        rows.append(replace(row, entry=lookup.entry, notes=(*lookup.notes, *row.notes)))
    # An entry of a weight that needs none (the output, an unused alias) still belongs to the model.
    strangers = set(importance.coverage((t.name for t in model), ()).unused)
    for name in imatrix.entries.keys() - used:
        expected = False if name in strangers else None
        rows.append(_entry(name, imatrix.entries[name], expected, 0, estimated, hardly))
    return rows


def _entry(
    name: str, entry: ImatrixEntry, expected: bool | None, n_mat: int, estimated: bool, hardly: int
) -> TensorCoverage:
    notes: tuple[str, ...] = ()
    if n_mat > 1 and entry.counts.size == 1:
        # One count for all experts: a GGUF file converted from a .dat.
        entry, estimated = split_experts(entry, n_mat), True
    counts = entry.counts
    bad = ~((entry.sums >= 0) & (entry.sums < np.inf))
    first = int(np.flatnonzero(bad.any(axis=1))[0]) if bad.any() else None
    never = int((counts == 0).sum())
    hardly_hit = 0 if estimated else int(((counts > 0) & (counts < hardly)).sum())
    zeros = int(((counts > 0) & (entry.sums.max(axis=1, initial=0) < TINY * np.maximum(counts, 1))).sum())
    return TensorCoverage(
        name, expected, name, counts, estimated, counts.size, never, hardly_hit, int(bad.sum()), first, zeros, notes
    )


def _group(name: str, tensors: Sequence[TensorCoverage], of_model: bool) -> CoverageGroup:
    counts = np.concatenate([t.counts for t in tensors])
    has_counts = counts.size and not any(t.estimated for t in tensors)
    return CoverageGroup(
        name,
        sum(t.expected is True for t in tensors) if of_model else None,
        sum(t.entry is not None for t in tensors),
        sum(t.entry is None for t in tensors),
        sum(t.experts for t in tensors),
        sum(t.never for t in tensors if t.experts),
        sum(t.hardly for t in tensors if t.experts),
        int(counts.min()) if has_counts else None,
        float(np.median(counts)) if has_counts else None,
        sum(t.bad_values for t in tensors),
    )
