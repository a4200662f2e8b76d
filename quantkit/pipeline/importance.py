"""The importance a tensor is quantized with: a row of weights per matrix of the tensor, and its source.

A tensor of ggml shape [n_in, n_out, n_expert] needs n_in * n_expert values, expert by expert. The importance matrix has
them under the tensor's own name or, if calibration saw the same activations under another name (merged or fused
tensors), under that one. Such an *alias* is used only if the file lacks the tensor's own name, and is always reported.
llama-quantize has no aliases; with exact names both use the same weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.imatrix import Imatrix, check_squares
from quantkit.names import group_notes
from quantkit.types import TensorType

F32Array = npt.NDArray[np.float32]

#: Tensors that llama-quantize encodes even without importance.
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
EXEMPT = (*EMBEDDINGS, "output.weight", "output_extra.weight")
EXEMPT_IK = ("token_embd.weight", "output.weight", "output_extra.weight")
#: Why encoders of images and sounds are quantized without importance.
NO_MATRIX = "encoders have no importance matrix, which is computed with the language model alone"
#: Below it a float32 is subnormal, and its products with squares of weights are zero.
TINY = float(np.finfo(np.float32).tiny)
_TREES = {"mainline": "llama.cpp", "ik": "ik_llama.cpp"}


@dataclass(frozen=True)
class Alias:
    """``kind`` may use the data of ``source``; ``exact`` if both have exactly the same inputs."""

    kind: str
    source: str
    exact: bool
    reason: str


def _aliases() -> Iterator[Alias]:
    same_input = "the same input"
    same_routing = "the same input and the same routing"
    # The order is ik_llama.cpp's (src/llama-quantize.cpp, 8337e4cd3): the merged name first.
    yield Alias("ffn_gate_exps", "ffn_gate_up_exps", True, same_routing)
    yield Alias("ffn_gate_exps", "ffn_up_exps", True, same_routing)
    yield Alias("ffn_up_exps", "ffn_gate_up_exps", True, same_routing)
    yield Alias("ffn_up_exps", "ffn_gate_exps", True, same_routing)
    yield Alias("ffn_gate_up_exps", "ffn_up_exps", True, same_routing)
    yield Alias("ffn_gate_up_exps", "ffn_gate_exps", True, same_routing)
    # ik's fused up+gate operations record the up tensor alone.
    for dense in ("ffn_{}", "ffn_{}_shexp"):
        yield Alias(dense.format("gate"), dense.format("up"), True, same_input)
        yield Alias(dense.format("up"), dense.format("gate"), True, same_input)
    for part in ("attn_q", "attn_k", "attn_v"):
        yield Alias(part, "attn_qkv", True, same_input)
    for part in ("attn_q", "attn_k", "attn_v"):
        yield Alias("attn_qkv", part, True, same_input)
    # v_b sees the compressed cache after attention averages it, kv_b before: similar, not equal.
    averaged = "the same compressed cache, before or after attention"
    yield Alias("attn_v_b", "attn_kv_b", False, averaged)
    yield Alias("attn_kv_b", "attn_v_b", False, averaged)


#: All aliases, in the order in which they are tried.
ALIASES: tuple[Alias, ...] = tuple(_aliases())


def matrices_of(name: str, shape: Sequence[int], size: int) -> int:
    """Return the number of matrices in a tensor, one below the other, each with its own input columns.

    That is its third dimension; but DeepSeek V4's attn_output_a has its groups in the second, and only the ``size`` of
    its recorded inputs determines their number. llama-quantize does not use these.
    """
    n_mat = math.prod(shape[2:])
    if name.endswith("attn_output_a.weight") and len(shape) == 2 and size and size % shape[0] == 0:
        groups = size // shape[0]
        return groups if shape[1] % groups == 0 else n_mat
    return n_mat


@dataclass(frozen=True, eq=False)
class RowImportance:
    """The result of one lookup; ``weights`` are computed on demand, so that a plan takes no memory."""

    tensor: str
    #: Number and length of the importance rows that the tensor needs.
    n_mat: int
    n_in: int
    #: The entry used for the tensor, or None.
    entry: str | None
    alias: Alias | None = None
    #: Notes for the user: the alias used, rejected candidates, or the reason why there is no entry.
    notes: tuple[str, ...] = ()
    #: Number of rows of ones, for experts without tokens; number of rows of zeros.
    ones: int = 0
    zeros: int = 0
    imatrix: Imatrix | None = field(default=None, repr=False)
    #: Equalization factors of the input columns since the imatrix was computed, float32 [n_mat or 1, n_in].
    factors: F32Array | None = field(default=None, repr=False)

    @property
    def weights(self) -> F32Array | None:
        """A new, contiguous float32 [n_mat, n_in]; None without an entry."""
        if self.entry is None or self.imatrix is None:
            return None
        values = self.imatrix.values(self.entry).reshape(self.n_mat, self.n_in)
        return values if self.factors is None else values * np.square(self.factors)


class Importance:
    """An importance matrix as quantization uses it: filtered, checked, and looked up tensor by tensor.

    Args:
        imatrix: the result of read_imatrix.
        include, exclude: substrings of entry names (--include-weights, --exclude-weights); not both.
        original_names: names in the output -> names in the source, if layers are pruned and renumbered.

    Raises RecipeError if both filters are given, FormatError if an entry that passes them holds NaN, Inf or a negative
    value (llama-quantize rejects the first two, src/llama-quant.cpp).
    """

    def __init__(
        self,
        imatrix: Imatrix,
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        original_names: Mapping[str, str] | None = None,
    ) -> None:
        if include and exclude:
            raise RecipeError(
                "--include-weights and --exclude-weights are mutually exclusive: omit one of them", "QK-E201"
            )
        self.imatrix = imatrix
        self.include, self.exclude = tuple(include), tuple(exclude)
        self.original_names = original_names or {}
        #: Names of the entries that pass the filters; quantize.imatrix.entries_count is their number.
        self.names = tuple(name for name in imatrix.entries if self._keeps(name))
        #: Notes on the filters, for the report before any work.
        self.notes = tuple(self._filter_notes())
        self._odd = {name: _check_values(imatrix, name) for name in self.names}

    @property
    def n_entries(self) -> int:
        """The number of entries that pass the filters; with 0, llama-quantize works as without an importance matrix."""
        return len(self.names)

    def _keeps(self, name: str) -> bool:
        if self.include:
            return any(part in name for part in self.include)
        return not any(part in name for part in self.exclude)

    def _filter_notes(self) -> Iterator[str]:
        entries = self.imatrix.entries
        option = "--include-weights" if self.include else "--exclude-weights"
        for part in self.include or self.exclude:
            if not any(part in name for name in entries):
                yield f"{option} {part!r} matches none of the {len(entries)} entries of {self.imatrix.path}"
        if not self.names:
            yield "the filters exclude every entry: all tensors are quantized without importance"

    def lookup(self, name: str, shape: Sequence[int]) -> RowImportance:
        """Find the importance of tensor ``name`` of ggml shape ``shape`` (innermost first).

        Raises FormatError if the tensor's own entry has the wrong size, as llama-quantize does; token embeddings then
        have no importance, with a note. An alias of the wrong size is skipped, with a note.
        """
        original = self.original_names.get(name, name)
        n_in, n_mat = shape[0], math.prod(shape[2:])
        if original in self.imatrix.entries:
            n_mat = matrices_of(original, shape, self.imatrix.entries[original].sums.size)
            return self._own_importance(name, original, n_mat, n_in)
        notes: list[str] = []
        for alias, entry in self._candidates(original):
            size = self.imatrix.entries[entry].sums.size
            if size == n_mat * n_in:
                quality = "exact" if alias.exact else "approximate"
                notes.append(f"has no entry and uses that of {entry} ({quality}: {alias.reason})")
                return self._row_importance(name, n_mat, n_in, entry, alias, notes)
            notes.append(f"cannot use {entry} ({alias.reason}): it has {size} values, not {_product(n_in, n_mat)}")
        return RowImportance(name, n_mat, n_in, None, None, (*notes, "no entry in the importance matrix"))

    def _own_importance(self, name: str, entry: str, n_mat: int, n_in: int) -> RowImportance:
        if not self._keeps(entry):
            option = "--include-weights" if self.include else "--exclude-weights"
            return RowImportance(name, n_mat, n_in, None, None, (f"excluded from the importance matrix by {option}",))
        size = self.imatrix.entries[entry].sums.size
        if size == n_mat * n_in:
            return self._row_importance(name, n_mat, n_in, entry, None, [])
        problem = f"entry {entry!r} has {size} values, but tensor {name!r} needs {_product(n_in, n_mat)}"
        if entry in EMBEDDINGS:
            return RowImportance(
                name, n_mat, n_in, None, None, (f"{problem}; it is quantized without importance, as in llama-quantize",)
            )
        raise FormatError(
            f"{self.imatrix.path}: {problem}: it was computed on another model, or on a file with merged or split "
            f"experts; use the matching importance matrix, or exclude the entry with --exclude-weights {entry}",
            "QK-E119",
        )

    def _candidates(self, original: str) -> Iterator[tuple[Alias, str]]:
        """Yield the aliases of a name that the file has and that, like the name itself, pass the filters."""
        stem, _, suffix = original.rpartition(".")
        prefix, dot, kind = stem.rpartition(".")
        if suffix != "weight" or not self._keeps(original):
            return
        for alias in ALIASES:
            entry = f"{prefix}{dot}{alias.source}.weight"
            if alias.kind == kind and entry in self.imatrix.entries and self._keeps(entry):
                yield alias, entry

    def _row_importance(
        self, name: str, n_mat: int, n_in: int, entry: str, alias: Alias | None, notes: list[str]
    ) -> RowImportance:
        ones, zeros = self._odd_rows(entry, n_mat)
        if ones:
            notes = [
                *notes,
                f"{ones} of {n_mat} experts received no calibration token: all their columns are weighted equally",
            ]
        if zeros:
            experts = f" for {zeros} of {n_mat} experts" if n_mat > 1 else ""
            note = (
                f"entry {entry} is all zero{experts}, which makes tensors of types that use importance unusable; "
                f"calibrate "
                f"again, or exclude it with --exclude-weights {entry}"
            )
            notes = [*notes, note]
        return RowImportance(name, n_mat, n_in, entry, alias, tuple(notes), ones, zeros, self.imatrix)

    def _odd_rows(self, entry: str, n_mat: int) -> tuple[int, int]:
        """Count rows of ones, which both formats have for an expert without tokens, and rows of zeros."""
        if not self._odd[entry]:
            return 0, 0
        rows = self.imatrix.values(entry).reshape(n_mat, -1)
        return int((rows == 1).all(axis=1).sum()), int((rows < TINY).all(axis=1).sum())

    def coverage(self, model: Iterable[str], lookups: Iterable[RowImportance]) -> Coverage:
        """Compare the matrix with a model.

        ``model``: the names of all tensors of the source model; ``lookups``: the results of ``lookup`` for those to be
        quantized.
        """
        lookups, model = tuple(lookups), set(model)
        used = {lookup.entry for lookup in lookups if lookup.entry is not None}
        # An entry that could have been used as an alias also belongs to the model.
        names = model | used | {entry for name in model for _, entry in self._candidates(name)}
        return Coverage(
            self,
            used=tuple(name for name in self.names if name in used),
            unused=tuple(name for name in self.names if name not in names),
            without=tuple(lookup for lookup in lookups if lookup.entry is None),
            aliased=tuple(lookup for lookup in lookups if lookup.alias is not None),
            odd=tuple(lookup for lookup in lookups if lookup.ones or lookup.zeros),
            n_matching=sum(name in names for name in self.names),
        )


@dataclass(frozen=True, eq=False)
class Coverage:
    """The fit of an importance matrix to a model."""

    importance: Importance = field(repr=False)
    #: Entries used for a tensor; entries that belong to no tensor of the model.
    used: tuple[str, ...]
    unused: tuple[str, ...]
    #: Quantized tensors without an entry, with an alias, with rows of ones or zeros.
    without: tuple[RowImportance, ...]
    aliased: tuple[RowImportance, ...]
    odd: tuple[RowImportance, ...]
    #: Number of entries that belong to a tensor of the model, as its own or as an alias.
    n_matching: int

    def check(self) -> None:
        """Raise FormatError if the matrix is of a different model."""
        if self.importance.names and not self.n_matching:
            path, first = self.importance.imatrix.path, self.importance.names[0]
            raise FormatError(
                f"{path}: none of its {len(self.importance.names)} entries (the first is {first!r}) matches a tensor "
                "of this model: it was computed on another model",
                "QK-E119",
            )

    def lines(self) -> list[str]:
        """Return the report, one line per finding: a summary, then anything unusual."""
        idle = self.importance.n_entries - len(self.used) - len(self.unused)
        counts = {
            "not needed": idle,
            "of tensors that this model does not have": len(self.unused),
            "tensors quantized without importance": len(self.without),
        }
        summary = f"importance matrix {self.importance.imatrix.path}: {len(self.used)} of {self.importance.n_entries}"
        lines = [", ".join([f"{summary} entries used", *(f"{n} {label}" for label, n in counts.items() if n)])]
        lines += self.importance.notes
        lines += group_notes(
            (name, "the importance matrix has this entry, but the model has no such tensor") for name in self.unused
        )
        unusual: dict[str, RowImportance] = {
            lookup.tensor: lookup for lookup in (*self.without, *self.aliased, *self.odd)
        }
        return lines + group_notes((lookup.tensor, note) for lookup in unusual.values() for note in lookup.notes)


def _product(n_in: int, n_mat: int) -> str:
    return f"{n_in} x {n_mat} = {n_in * n_mat}"


def _check_values(imatrix: Imatrix, name: str) -> bool:
    """Refuse values that a mean of squares cannot have; return whether a row of ones or zeros is possible."""
    values = imatrix.values(name)
    check_squares(imatrix.path, name, values)
    return bool(((values == 1) | (values < TINY)).any())


def importance_requirement(
    tensor: str, target: TensorType, *, preset: str | None = None, ik: bool = False, ignore_rules: bool = False
) -> str | None:
    """Return the reason why ``tensor`` cannot become ``target`` without importance, or None; ``ik``: by ik's rules.

    ``preset`` is the canonical name of the file type. An encoder that requires importance (TensorType.imatrix is
    "required": ggml aborts) always needs it; types that only llama-quantize refuses are allowed with ``ignore_rules``
    (--ignore-imatrix-rules). Rule: llama.cpp b11434 src/llama-quant.cpp tensor_requires_imatrix,
    ik_llama.cpp src/llama-quantize.cpp is_very_low_bpw_quant.
    """
    if target.imatrix == "required":
        return f"the {target} encoder needs importance, even with --ignore-imatrix-rules"
    if ignore_rules or tensor in (EXEMPT_IK if ik else EXEMPT):
        return None
    refusing = [tree for tree in target.needs_imatrix.split("+") if tree == "ik" or (tree and not ik)]
    if refusing:
        trees = " and ".join(f"{_TREES[tree]}'s" for tree in refusing)
        return f"{trees} llama-quantize rejects {target} without importance (--ignore-imatrix-rules allows it)"
    if target.name == "Q2_K" and preset == "Q2_K_S":
        return "llama-quantize rejects Q2_K in a Q2_K_S file without importance (--ignore-imatrix-rules allows it)"
    return None


def check_importance(
    importance: RowImportance | None,
    tensor: str,
    target: TensorType,
    *,
    preset: str | None = None,
    ik: bool = False,
    ignore_rules: bool = False,
    predicts: bool = False,
    mmproj: bool = False,
) -> None:
    """Raise RecipeError if ``tensor`` lacks the importance ``target`` needs.

    ``importance`` is None without a matrix. ``predicts``: the tensor belongs to an MTP layer, which calibration often
    misses. ``mmproj``: it is an encoder's, which has no importance matrix.
    """
    if importance is not None and importance.entry is not None:
        return
    reason = importance_requirement(tensor, target, preset=preset, ik=ik, ignore_rules=ignore_rules)
    if reason is None:
        return
    cause = "no --imatrix was given" if importance is None else "; ".join(importance.notes)
    remedy = "give --imatrix FILE or choose another type"
    if mmproj:
        cause, remedy = NO_MATRIX, "choose another type"
    if predicts and importance is not None:
        layer = re.escape(tensor[: tensor.index(".", 4) + 1])
        remedy = (
            "it belongs to a prediction layer (NextN, MTP); compute the importance matrix with `quantkit imatrix "
            f"--nextn`, or set another type: --tensor-type '{layer}=q4_K'"
        )
    raise RecipeError(f"tensor {tensor!r} cannot be quantized to {target}: {cause}; {reason}; {remedy}", "QK-E212")
