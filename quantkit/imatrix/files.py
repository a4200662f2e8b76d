"""Merging importance matrices, and converting them to the other format.

E[x^2] over two texts is (sum_a + sum_b) / (count_a + count_b), expert by expert, as in the file of one run over both.
(llama-imatrix adds the same way, in float32; ik_llama.cpp weights whole entries by calls.) A .dat has neither token
counts nor numbers of experts: every expert gets ncall * chunk_size tokens, those marked as empty none. Fills that a
file records are undone before adding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from quantkit.calibration.heldout import HELD_OUT_KEYS, held_out_warning, merge_held_out, read_held_out
from quantkit.calibration.overlap import SKETCH_KEYS, Sketch, merge_sketches, sketch_of
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.experts import GATE, MERGED, UP
from quantkit.formats.gguf import Field
from quantkit.formats.imatrix import DEFAULT_CHUNK_SIZE, Format, Imatrix, ImatrixEntry
from quantkit.imatrix.fill import FILL_KEY, filled_experts, with_entries, without_fill
from quantkit.imatrix.rows import EXPERTS, inferred_experts, raw, split_experts
from quantkit.imatrix.statistics import with_stats
from quantkit.names import group_notes

Names = Literal["merged", "separate", "both"]
#: A digest of the model's files, by which a finished matrix is recognized.
MODEL_KEY = "quantkit.imatrix.model"
#: Keys whose values are merged, not compared.
_TEXT_KEYS = (*SKETCH_KEYS, *HELD_OUT_KEYS)


@dataclass(frozen=True, eq=False)
class MergeResult:
    """A new importance matrix, and notes for the user."""

    imatrix: Imatrix
    notes: tuple[str, ...] = field(default=())


def merge(
    imatrices: Sequence[Imatrix], *, chunk_size: int | None = None, experts: Mapping[str, int] | None = None
) -> MergeResult:
    """Add up importance matrices of one model, of either format.

    Args:
        imatrices: one or more, of the same sizes as the first.
        chunk_size: tokens per call of a .dat, and imatrix.chunk_size of the result; None: that of the first GGUF,
            or 512.
        experts: numbers of experts known from a model (rows.expert_counts), for .dat files without a router's entry.

    Returns the sum in raw form, with statistics as llama-imatrix writes them. Entries that only some files have are
    kept unchanged, with a note. Raises FormatError naming the tensor where shapes differ, RecipeError without files.
    """
    if not imatrices:
        raise RecipeError("merging needs at least one importance matrix", "QK-E202")
    size = chunk_size or next((i.chunk_size for i in imatrices if i.chunk_size), DEFAULT_CHUNK_SIZE)
    notes = list(_notes(imatrices, size, experts or {}))
    parts = [without_fill(raw(i, chunk_size=size, experts=experts)) for i in imatrices]
    names = dict.fromkeys(name for part in parts for name in part.entries)
    entries = {name: _sum(name, [part for part in parts if name in part.entries]) for name in names}
    dropped = sum(
        entry.in_sum is None and any(p.entries[n].in_sum is not None for p in parts if n in p.entries)
        for n, entry in entries.items()
    )
    if dropped:
        notes.append(f"dropped the sums of activations (in_sum) of {dropped} entries: not all files have them")
    dropped = sum(
        entry.saliency is None and any(p.entries[n].saliency is not None for p in parts if n in p.entries)
        for n, entry in entries.items()
    )
    if dropped:
        notes.append(f"dropped the saliency of the experts of {dropped} entries: not all files have it")
    extra, extra_notes = _extra(parts)
    merged = Imatrix(
        imatrices[0].path,
        entries,
        [dataset for part in imatrices for dataset in part.datasets],
        # In chunks of the result's size; the plain sum if all sizes are equal.
        round(sum(part.chunk_count * (part.chunk_size or size) for part in parts) / size),
        size,
        "gguf",
        max(part.n_layer_nextn for part in parts),
        extra=extra,
    )
    return MergeResult(with_stats(merged), (*notes, *extra_notes))


def _notes(imatrices: Sequence[Imatrix], size: int, experts: Mapping[str, int]) -> Iterator[str]:
    """Yield notes on the assumptions of a merge."""
    for imatrix in imatrices:
        if imatrix.format == "dat":
            yield f"{imatrix.path}: {_dat_weights(size)}"
            yield from _unknown_experts(imatrix, experts)
        elif imatrix.chunk_size not in (0, size):
            yield f"{imatrix.path}: chunks of {imatrix.chunk_size} tokens are counted as chunks of {size}"
        if fills := filled_experts(imatrix):
            n = sum(map(len, fills.values()))
            yield f"{imatrix.path}: {n} experts filled by {imatrix.extra[FILL_KEY].value!r} are empty again"
    # A matrix that does not come from a file equals only itself.
    digests = [imatrix.sha256 if imatrix.path.is_file() else str(id(imatrix)) for imatrix in imatrices]
    for i, imatrix in enumerate(imatrices):
        if digests[i] in digests[:i]:
            first = imatrices[digests.index(digests[i])]
            yield f"{imatrix.path}: identical to {first.path}: its tokens are counted twice"
    if len({imatrix.n_layer_nextn for imatrix in imatrices}) > 1:
        yield "the files differ in their number of prediction layers; the largest is used"
    lacking = {
        name: [str(imatrix.path) for imatrix in imatrices if name not in imatrix.entries]
        for name in sorted({name for imatrix in imatrices for name in imatrix.entries})
    }
    yield from group_notes((name, f"no entry in {', '.join(paths)}") for name, paths in lacking.items() if paths)


def _dat_weights(size: int) -> str:
    return (
        f"a .dat has no token counts: each call counts as {size} tokens (--chunk-size), and every expert as the most "
        "frequent"
    )


def _unknown_experts(imatrix: Imatrix, experts: Mapping[str, int]) -> Iterator[str]:
    unknown = [n for n in imatrix.entries if n not in experts and inferred_experts(imatrix, n) is None]
    if unknown:
        yield (
            f"{imatrix.path}: the number of experts of {unknown[0]} is "
            f"unknown{f' ({len(unknown)} such entries)' if len(unknown) > 1 else ''}: one count is used for all; give "
            "-m MODEL to determine it"
        )


def _sum(name: str, parts: Sequence[Imatrix]) -> ImatrixEntry:
    """Add the entries ``name`` of ``parts``, float64, rounded once."""
    first = max(parts, key=lambda part: part.entries[name].counts.size)
    n_mat, n = first.entries[name].sums.shape
    entries = []
    for part in parts:
        entry = part.entries[name]
        if entry.sums.shape != (n_mat, n) and (entry.sums.size != n_mat * n or entry.counts.size != 1):
            raise FormatError(
                f"{part.path}: entry {name!r} is {_shape(entry)}, in {first.path} it is "
                f"{_shape(first.entries[name])}: merge only files of the same model",
                "QK-E207",
            )
        entries.append(split_experts(entry, n_mat) if EXPERTS in name else _one_count(entry, n_mat))
    sums = np.sum([entry.sums.astype(np.float64) for entry in entries], axis=0)
    counts = np.sum([entry.counts for entry in entries], axis=0)
    in_sum = None
    if all(entry.in_sum is not None for entry in entries):
        in_sum = np.sum([np.asarray(entry.in_sum, np.float64) for entry in entries], axis=0).astype(np.float32)
    saliency = None
    if all(entry.saliency is not None for entry in entries):
        saliency = np.sum([np.asarray(entry.saliency, np.float64) for entry in entries], axis=0).astype(np.float32)
    return ImatrixEntry(sums.astype(np.float32), counts.astype(np.int64), in_sum, None, saliency)


def _one_count(entry: ImatrixEntry, n_mat: int) -> ImatrixEntry:
    """Give every matrix of a 3-D weight the entry's only count."""
    if entry.counts.size == n_mat:
        return entry
    in_sum = None if entry.in_sum is None else entry.in_sum.reshape(n_mat, -1)
    return ImatrixEntry(entry.sums.reshape(n_mat, -1), np.repeat(entry.counts, n_mat), in_sum)


def _shape(entry: ImatrixEntry) -> str:
    n_mat, n = entry.sums.shape
    return f"{n} values" if n_mat == 1 else f"{n_mat} x {n} values"


def _extra(parts: Sequence[Imatrix]) -> tuple[dict[str, Field], list[str]]:
    """Keep quantkit's keys on which all files agree, and join the sketches of the texts."""
    notes = []
    extra = {
        key: value
        for key, value in parts[0].extra.items()
        if key != MODEL_KEY and all((p.extra.get(key) and bytes(p.extra[key].raw)) == bytes(value.raw) for p in parts)
    }
    dropped = sorted({key for p in parts for key in p.extra} - extra.keys() - {*_TEXT_KEYS, MODEL_KEY})
    if dropped:
        notes.append(f"dropped keys that differ between the files: {', '.join(dropped)}")
    sketches = [sketch_of(part) for part in parts]
    known_sketches = [sketch for sketch in sketches if isinstance(sketch, Sketch)]
    extra = {key: value for key, value in extra.items() if key not in _TEXT_KEYS}
    if known_sketches:
        # Only of the known texts: a warning about one is valid regardless of the others.
        extra |= merge_sketches(known_sketches).fields()
        if len(known_sketches) < len(parts):
            notes.append(
                f"{len(parts) - len(known_sketches)} of {len(parts)} files have no record of their text: overlap "
                "checks do not cover it"
            )
    held_out = merge_held_out(
        [part_held_out for part in parts if (part_held_out := read_held_out(part.path, part.extra)) is not None]
    )
    if held_out is not None:
        extra |= held_out.fields()
        warning = held_out_warning(Path("the merged importance matrix"), extra)
        notes += [] if warning is None else [warning]
    return extra, notes


# --- the other format, the other names ---


def convert(
    imatrix: Imatrix,
    format: Format,  # noqa: A002
    *,
    chunk_size: int | None = None,
    experts: Mapping[str, int] | None = None,
) -> MergeResult:
    """Return ``imatrix`` prepared for write_imatrix in ``format``, and notes on losses.

    To GGUF: counts per expert, statistics. To .dat: write_imatrix does the arithmetic (mean times ncall).
    """
    if format == imatrix.format:
        return MergeResult(imatrix)
    size = chunk_size or imatrix.chunk_size or DEFAULT_CHUNK_SIZE
    if format == "dat":
        return MergeResult(replace(imatrix, chunk_size=size), tuple(_dat_losses(imatrix)))
    notes = [_dat_weights(size), *_unknown_experts(imatrix, experts or {})]
    return MergeResult(with_stats(raw(imatrix, chunk_size=size, experts=experts)), tuple(notes))


def _dat_losses(imatrix: Imatrix) -> Iterator[str]:
    experts = sum(entry.counts.size > 1 for entry in imatrix.entries.values())
    losses = ["chunk size"]
    if experts:
        losses.insert(0, f"tokens per expert of {experts} entries")
    if any(entry.in_sum is not None for entry in imatrix.entries.values()):
        losses.append("sums of activations (in_sum)")
    if any(entry.saliency is not None for entry in imatrix.entries.values()):
        losses.append("saliency of experts")
    if imatrix.stats_schema:
        losses.append("statistics")
    if len(imatrix.datasets) > 1:
        losses.append(f"all but the last of {len(imatrix.datasets)} datasets")
    losses += sorted(imatrix.extra)
    if imatrix.n_layer_nextn:
        losses.append("number of prediction layers")
    yield f"lost, because a .dat file cannot store it: {', '.join(losses)}"
    without = sorted(name for name, entry in imatrix.entries.items() if not entry.counts.any())
    if without:
        yield f"omitted {len(without)} entries without tokens: {', '.join(without)}"
    partial = sum(bool((e.counts == 0).any() and e.counts.any()) for e in imatrix.entries.values())
    if partial:
        yield f"filled experts without tokens with ones in {partial} entries"


def with_names(imatrix: Imatrix, names: str) -> Imatrix:
    """Return ``imatrix`` with up and gate experts named "merged" (ffn_gate_up_exps), "separate", or "both".

    Both halves see the same input and routing, so their data are equal; should they differ by rounding, the merged
    name gets the gate's. Statistics of renamed entries are recomputed.
    """
    if names not in ("merged", "separate", "both"):
        raise RecipeError(f"names must be merged, separate or both, not {names!r}", "QK-E203")
    renamed = with_entries(imatrix, lambda entries: _rename_experts(entries, names))
    return with_stats(renamed) if imatrix.stats_schema and imatrix.format == "gguf" else renamed


def _rename_experts(entries: Mapping[str, ImatrixEntry], names: str) -> dict[str, ImatrixEntry]:
    result: dict[str, ImatrixEntry] = {}
    for name, entry in sorted(entries.items()):
        stem = next((half for half in (MERGED, GATE, UP) if f".{half}." in f".{name}"), None)
        for name_part in _other_names(stem, names):
            target = name if stem is None else name.replace(stem, name_part)
            # An existing name takes precedence over a derived one; of two derived ones, that of the gate, which sorts
            # first.
            if target == name or target not in entries and target not in result:
                result[target] = replace(entry, stats=entry.stats if target == name else None)
    return result


def _other_names(stem: str | None, names: str) -> tuple[str, ...]:
    if stem is None:
        return ("",)
    return {"merged": (MERGED,), "separate": (GATE, UP), "both": (MERGED, GATE, UP)}[names]
