"""The experts in an entry, whose number a .dat does not store.

A .dat entry of n_expert experts is one array of n_expert * n_in means times ncall. n_in follows from other entries of
the layer, since the router and the up and gate experts have the same input:

    n_expert = values(ffn_up_exps) / values(ffn_gate_inp);  ffn_down_exps has as many experts as its up or gate

Without a router's entry the attention's is used (q, k, v or qkv: also n_embd wide), or the shapes of a model. An expert
without tokens is written as ones (llama.cpp, ik_llama.cpp) or zeros (ik's conversion script): no activations look like
that, so both mean "no tokens" here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.experts import GATE, MERGED, UP
from quantkit.formats.imatrix import DEFAULT_CHUNK_SIZE, Imatrix, ImatrixEntry
from quantkit.pipeline.facts import TensorLike

F64Array = npt.NDArray[np.float64]

#: A tensor with this in its name contains experts; other 3-D weights (heads of MLA) have one count for all.
EXPERTS = "_exps."
DOWN = "ffn_down_exps"
#: Weights whose input is n_embd wide, in order of preference.
_N_EMBD_WIDE = ("ffn_gate_inp", "attn_q", "attn_qkv", "attn_q_a", "attn_k", "ssm_in")


def expert_counts(entries: Iterable[str], tensors: Iterable[TensorLike]) -> dict[str, int]:
    """Return the number of experts of each entry according to a model's tensors; 1 for weights without experts."""
    shapes = {t.name: t.shape for t in tensors}
    counts = {}
    for name in entries:
        shape = shapes.get(name)
        if shape is None and MERGED in name:
            shape = shapes.get(name.replace(MERGED, UP))
        if shape is None:
            shape = shapes.get(name.replace(UP, MERGED).replace(GATE, MERGED))
        if shape is not None:
            counts[name] = shape[2] if EXPERTS in name and len(shape) > 2 else 1
    return counts


def inferred_experts(imatrix: Imatrix, name: str) -> int | None:
    """Return the number of experts of entry ``name`` of a .dat, from other entries of its layer; None if unknown."""
    if EXPERTS not in name:
        return 1
    prefix, _, kind = name.removesuffix(".weight").rpartition(".")
    embd_wide = [f"{prefix}.{kind_name}.weight" for kind_name in _N_EMBD_WIDE]
    expert_names = [name] if kind != DOWN else [f"{prefix}.{kind_name}.weight" for kind_name in (UP, GATE, MERGED)]
    size = next((imatrix.entries[n].sums.size for n in expert_names if n in imatrix.entries), None)
    n_embd = next((imatrix.entries[n].sums.size for n in embd_wide if n in imatrix.entries), None)
    if size is None or n_embd is None or size % n_embd or imatrix.entries[name].sums.size % (size // n_embd):
        return None
    return size // n_embd


def split_experts(entry: ImatrixEntry, n_mat: int) -> ImatrixEntry:
    """Return raw data of one count as ``n_mat`` experts, each with that count, or 0 if it has no tokens.

    The count is an upper bound: a .dat only has that of the busiest expert. Raises ValueError if the values do not
    divide.
    """
    if entry.counts.size == n_mat:
        return entry
    if entry.counts.size != 1 or entry.sums.size % n_mat:
        raise ValueError(f"{entry.sums.size} values and {entry.counts.size} counts do not match {n_mat} experts")
    count = int(entry.counts[0])
    sums = entry.sums.reshape(n_mat, -1)
    empty = (sums == np.float32(count)).all(axis=1) | (sums == 0).all(axis=1)
    in_sum = None if entry.in_sum is None else entry.in_sum.reshape(n_mat, -1)
    counts = np.where(empty, 0, count).astype(np.int64)
    return ImatrixEntry(np.where(empty[:, None], np.float32(0), sums), counts, in_sum, None)


def raw(imatrix: Imatrix, *, chunk_size: int | None = None, experts: Mapping[str, int] | None = None) -> Imatrix:
    """Return ``imatrix`` as raw sums and token counts; one from a GGUF is returned unchanged.

    Args:
        chunk_size: tokens per call of a .dat (default 512, as llama-imatrix).
        experts: known numbers of experts (expert_counts), which are not inferred.

    Raises FormatError if sums times chunk_size exceed float32, or experts do not divide an entry. Entries of a .dat
    whose number of experts is unknown keep one count.
    """
    if imatrix.format == "gguf":
        return imatrix
    size = chunk_size or imatrix.chunk_size or DEFAULT_CHUNK_SIZE
    entries = {}
    for name, entry in imatrix.entries.items():
        n_mat = (experts or {}).get(name) or inferred_experts(imatrix, name) or 1
        if entry.sums.size % n_mat:
            raise FormatError(
                f"{imatrix.path}: entry {name!r}: {entry.sums.size} values do not match {n_mat} experts; it was "
                "computed on another model",
                "QK-E119",
            )
        entries[name] = _raw_entry(imatrix, name, entry, size, n_mat)
    return Imatrix(imatrix.path, entries, imatrix.datasets, imatrix.chunk_count, size, "gguf")


def _raw_entry(imatrix: Imatrix, name: str, entry: ImatrixEntry, chunk_size: int, n_mat: int) -> ImatrixEntry:
    with np.errstate(over="ignore"):
        sums = entry.sums * np.float32(chunk_size)
    if np.isfinite(entry.sums).all() and not np.isfinite(sums).all():
        raise FormatError(
            f"{imatrix.path}: entry {name!r}: sums times chunk_size {chunk_size} exceed float32; choose a smaller one",
            "QK-E203",
        )
    return split_experts(ImatrixEntry(sums, np.maximum(entry.counts, 1) * chunk_size), n_mat)


def means(entry: ImatrixEntry) -> F64Array:
    """Return E[x^2] of raw data, float64 [n_mat, n]; NaN for experts without tokens."""
    counts = np.where(entry.counts > 0, entry.counts, np.nan).astype(np.float64)
    result: F64Array = entry.sums.astype(np.float64) / counts[:, None]
    return result
