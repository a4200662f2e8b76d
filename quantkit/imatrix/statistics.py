"""Statistics of a model's activations: those of llama-imatrix --show-statistics.

Per weight, over the columns j of all experts e with tokens, with a = E[x] (E[x^2] for a file without sums of x)::

    sum_sq    sum of E[x^2]                    mean, std_deviation, skewness, kurtosis   moments of a
    h_norm    entropy of E[x^2] as shares, in percent of log2(columns): 100 is even, 0 all in one column
    gain      sqrt(mean E[x^2] / that of the same weight in the previous layer)
    l2_dist, cossim, pearson, covariance       of a and that of the previous layer

Per layer, the same over all its weights. The previous layer is the nearest one that has the weight; prediction layers
(NextN, MTP) are compared among themselves.

Source: llama.cpp b11434 tools/imatrix/imatrix.cpp (compute_vector_statistics, compute_tensor_statistics,
compute_layer_statistics); f64 inside, f32 where it has f32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from quantkit.formats.imatrix import DEFAULT_CHUNK_SIZE, Imatrix, ImatrixEntry
from quantkit.names import group_notes

F64Array = npt.NDArray[np.float64]

#: imatrix.stats_schema: the order of the twelve numbers in a file's .stats tensors.
SCHEMA = (
    "sum_sq", "mean", "elements", "std_deviation", "skewness", "kurtosis", "gain", "h_norm", "l2_dist", "cossim",
    "pearson", "covariance",
)  # fmt: skip
_NAN = math.nan
_LAYER = re.compile(r"(?:^|\.)blk\.(\d{1,9})\.")


@dataclass(frozen=True)
class Pair:
    """Sums over the columns that a weight shares with that of the previous layer."""

    n: int = 0
    dot: float = 0.0
    norm1: float = 0.0
    norm2: float = 0.0
    l2: float = 0.0
    covariance: float = 0.0
    variance1: float = 0.0
    variance2: float = 0.0
    #: Sum and elements of the previous layer; 0 elements if its sum is 0.
    sum_before: float = 0.0
    elements_before: int = 0

    @property
    def cossim(self) -> float:
        return _cosine(self.dot, self.norm1, self.norm2)

    @property
    def pearson(self) -> float:
        return _cosine(self.covariance, self.variance1, self.variance2)


@dataclass(frozen=True)
class TensorStatistics:
    """The figures of one weight; NaN without a previous layer."""

    name: str
    #: Its layer, None outside layers; and llama-imatrix's label: a number, mtpN, or "-".
    layer: int | None
    label: str
    sum_sq: float
    mean: float
    elements: int
    std_deviation: float
    skewness: float
    kurtosis: float
    h_norm: float
    gain: float = _NAN
    l2_dist: float = _NAN
    cossim: float = _NAN
    pearson: float = _NAN
    covariance: float = _NAN
    #: True: moments of E[x]; False: of E[x^2], as the file has no sums of x.
    of_activations: bool = True
    pair: Pair = field(default=Pair(), repr=False)

    def row(self) -> npt.NDArray[np.float32]:
        """Return the figures as a file's .stats tensor, float32 [12]."""
        return np.array([getattr(self, name) for name in SCHEMA], np.float32)


@dataclass(frozen=True)
class LayerStatistics:
    """The figures of a layer, over all its weights; ``layer`` is None for the output."""

    layer: int | None
    label: str
    sum_sq: float
    gain: float = _NAN
    l2_dist: float = _NAN
    cossim: float = _NAN
    pearson: float = _NAN
    covariance: float = _NAN


@dataclass(frozen=True)
class Statistics:
    """All weights, by layer and name, and all layers."""

    tensors: tuple[TensorStatistics, ...]
    layers: tuple[LayerStatistics, ...]
    notes: tuple[str, ...] = ()

    @property
    def of_activations(self) -> bool:
        """Whether all moments are those of E[x]; otherwise llama-imatrix omits L2 Dist."""
        return all(t.of_activations for t in self.tensors)


def layer_of(name: str) -> int | None:
    """Return N of blk.N., or None."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def statistics(imatrix: Imatrix) -> Statistics:
    """Compute the statistics of all entries with tokens; notes name the others."""
    entries = {name: _as_loaded(imatrix, entry) for name, entry in imatrix.entries.items()}
    by_name = {
        name: figures for name, entry in entries.items() if (figures := _vector_statistics(name, entry)) is not None
    }
    first_nextn = _first_nextn(by_name, imatrix.n_layer_nextn)
    before = _previous(by_name.values(), first_nextn)
    by_name = {name: _with_pair(before.get(name), entries, t) for name, t in by_name.items()}
    tensors = sorted((replace(t, label=_label(t.layer, first_nextn)) for t in by_name.values()), key=_order)
    notes = group_notes((name, "no tokens, no statistics") for name in entries if name not in by_name)
    unpaired = [t.name for t in tensors if _has_previous(t, first_nextn) and not t.pair.n]
    notes += group_notes((name, "no earlier layer has it") for name in unpaired)
    layers: tuple[LayerStatistics, ...] = ()
    numbers = sorted({t.layer for t in tensors if t.layer is not None and t.layer < first_nextn})
    if numbers and numbers[-1] - numbers[0] + 1 != len(numbers):
        notes.append(f"layers are missing between {numbers[0]} and {numbers[-1]}: no statistics of layers")
    else:
        layers = _layers(tensors, first_nextn)
    return Statistics(tuple(tensors), layers, tuple(notes))


def with_stats(imatrix: Imatrix) -> Imatrix:
    """Return ``imatrix``, which is raw, with every entry's .stats and their schema, as llama-imatrix writes them."""
    rows = {t.name: t.row() for t in statistics(imatrix).tensors}
    none = np.zeros(len(SCHEMA), np.float32)
    entries = {name: replace(entry, stats=rows.get(name, none)) for name, entry in imatrix.entries.items()}
    return replace(imatrix, entries=entries, stats_schema=list(SCHEMA))


def _as_loaded(imatrix: Imatrix, entry: ImatrixEntry) -> ImatrixEntry:
    """Return raw data as llama-imatrix loads it: a .dat has one count, and calls of its default chunk size."""
    if imatrix.format == "gguf":
        return entry
    size = imatrix.chunk_size or DEFAULT_CHUNK_SIZE
    with np.errstate(over="ignore"):
        return ImatrixEntry(entry.sums * np.float32(size), entry.counts * size)


def _order(t: TensorStatistics) -> tuple[float, str]:
    """Sort key: layers by number, then other weights, the output last; within a layer by name."""
    position = math.inf if "output" in t.name else 1e9
    parts = t.name.split(".")
    short = ".".join(parts[2:-1]) if len(parts) > 4 and parts[0] == "blk" else t.name
    return (position if t.layer is None else t.layer, short)


def _first_nextn(figures: Mapping[str, TensorStatistics], n_layer_nextn: int) -> int | float:
    """Return the first prediction layer; infinity without one."""
    layers = [t.layer for t in figures.values() if t.layer is not None]
    if n_layer_nextn > 0 and layers:
        return max(0, max(layers) + 1 - n_layer_nextn)
    return min((t.layer for t in figures.values() if t.layer is not None and ".nextn." in t.name), default=math.inf)


def _label(layer: int | None, first_nextn: float) -> str:
    if layer is None:
        return "-"
    return f"mtp{layer - int(first_nextn)}" if layer >= first_nextn else str(layer)


# --- one weight ---


def _vector_statistics(name: str, entry: ImatrixEntry) -> TensorStatistics | None:
    """Compute the moments; None for an entry without a finite value."""
    used = entry.counts > 0
    # llama.cpp's order: the count as float32, its inverse as double, then a product.
    inverse = 1.0 / entry.counts[used].astype(np.float32).astype(np.float64)[:, None]
    squares = entry.sums[used].astype(np.float64) * inverse
    values = squares if entry.in_sum is None else entry.in_sum[used].astype(np.float64) * inverse
    finite = np.isfinite(squares) & np.isfinite(values)
    squares, values = squares[finite], values[finite]
    n = squares.size
    if n == 0:
        return None
    mean = float(values.mean())
    centred = values - mean
    m2 = float(np.square(centred).sum()) / n if n > 1 else 0.0
    with np.errstate(over="ignore"):  # infinite in llama.cpp as well
        deviation = float(np.sqrt(np.float32(max(m2, 0.0))))
    skewness = kurtosis = 0.0
    if deviation > np.float32(1e-10):
        skewness = float((centred**3).sum()) / n / (m2 * math.sqrt(m2))
        kurtosis = float((centred**4).sum()) / n / (m2 * m2) - 3.0
    return TensorStatistics(
        name,
        layer_of(name),
        "-",
        float(squares.sum()),
        _f32(mean),
        n,
        deviation,
        _f32(skewness),
        _f32(kurtosis),
        _h_norm(squares),
        of_activations=entry.in_sum is not None,
    )


def _h_norm(squares: F64Array) -> float:
    if squares.size < 2:
        return _NAN
    energy = squares[squares > 0]
    shares = energy / energy.sum()
    shares = shares[shares > 1e-10]
    entropy = _f32(float(-(shares * np.log(shares)).sum() / math.log(2.0)))
    return _f32(100.0 * (entropy / _f32(math.log2(squares.size))))


# --- and the same in the previous layer ---


def _has_previous(t: TensorStatistics, first_nextn: float) -> bool:
    return t.layer is not None and t.layer > 0 and t.layer != first_nextn


def _previous(tensors: Iterable[TensorStatistics], first_nextn: float) -> dict[str, TensorStatistics]:
    """Return, by name, the same weight in the nearest previous layer that has it, never across to prediction layers."""
    kinds: dict[tuple[str, bool], list[TensorStatistics]] = {}
    for t in tensors:
        if t.layer is not None:
            kinds.setdefault((t.name.replace(f"blk.{t.layer}.", "blk.", 1), t.layer >= first_nextn), []).append(t)
    pairs = (pairwise(sorted(kind, key=lambda t: t.layer or 0)) for kind in kinds.values())
    return {after.name: before for kind in pairs for before, after in kind}


def _with_pair(
    before: TensorStatistics | None, entries: Mapping[str, ImatrixEntry], t: TensorStatistics
) -> TensorStatistics:
    if before is None:
        return t
    activations = t.of_activations and before.of_activations
    one, two = (_averages(entries[name], activations) for name in (t.name, before.name))
    if one.size != two.size or not (np.isfinite(one) & np.isfinite(two)).any():
        return t
    pair = _pair(one, two, before)
    return replace(
        t,
        gain=_gain(t, before),
        l2_dist=_f32(math.sqrt(pair.l2)),
        cossim=pair.cossim,
        pearson=pair.pearson,
        covariance=_f32(pair.covariance / pair.n) if pair.n > 1 else _NAN,
        pair=pair,
    )


def _averages(entry: ImatrixEntry, activations: bool) -> F64Array:
    """Return the averages that llama.cpp compares, products in float32; NaN for experts without tokens."""
    sums = entry.in_sum if activations and entry.in_sum is not None else entry.sums
    counts = np.where(entry.counts > 0, entry.counts, np.nan).astype(np.float32)
    scale = (np.float32(1) / counts)[:, None]
    return (sums * scale).astype(np.float64).reshape(-1)


def _pair(one: F64Array, two: F64Array, before: TensorStatistics) -> Pair:
    both = np.isfinite(one) & np.isfinite(two)
    one, two = one[both], two[both]
    d1, d2 = one - one.mean(), two - two.mean()
    counts = before.sum_sq > np.float32(1e-10)
    return Pair(
        one.size,
        float(one @ two),
        float(one @ one),
        float(two @ two),
        float(np.square(one - two).sum()),
        float(d1 @ d2),
        float(d1 @ d1),
        float(d2 @ d2),
        before.sum_sq if counts else 0.0,
        before.elements if counts else 0,
    )


def _gain(t: TensorStatistics, before: TensorStatistics) -> float:
    if before.sum_sq > np.float32(1e-10):
        return _f32(math.sqrt(t.sum_sq / t.elements) / math.sqrt(before.sum_sq / before.elements))
    return 1.0 if t.sum_sq <= np.float32(1e-10) else _NAN


def _cosine(dot: float, square1: float, square2: float) -> float:
    """Return dot / sqrt(square1 square2), in -1..1; 0 if one vector is null, NaN if both are."""
    if square1 > 0 and square2 > 0:
        return min(1.0, max(-1.0, _f32(dot / (math.sqrt(square1) * math.sqrt(square2)))))
    return _NAN if square1 == square2 == 0 else 0.0


# --- layers ---


def _layers(tensors: list[TensorStatistics], first_nextn: float) -> tuple[LayerStatistics, ...]:
    groups: dict[int | None, list[TensorStatistics]] = {}
    for t in tensors:
        if t.layer is not None or "output" in t.name:
            groups.setdefault(t.layer, []).append(t)
    return tuple(_layer(layer, group, _label(layer, first_nextn)) for layer, group in groups.items())


def _layer(layer: int | None, group: list[TensorStatistics], label: str) -> LayerStatistics:
    total = np.float32(0)
    for t in group:
        total = np.float32(float(total) + t.sum_sq)
    pairs = [t for t in group if t.pair.norm1 or t.pair.norm2 or t.pair.l2]
    if not layer or not pairs:
        return LayerStatistics(layer, label, float(total))

    def pair_sum(name: str) -> float:
        return math.fsum(getattr(t.pair, name) for t in pairs)

    n = int(pair_sum("n"))
    return LayerStatistics(
        layer,
        label,
        float(total),
        _layer_gain([t for t in pairs if t.pair.elements_before > 0]),
        _f32(math.sqrt(pair_sum("l2"))),
        _cosine(pair_sum("dot"), pair_sum("norm1"), pair_sum("norm2")),
        _cosine(pair_sum("covariance"), pair_sum("variance1"), pair_sum("variance2")),
        _f32(pair_sum("covariance") / n) if n else _NAN,
    )


def _layer_gain(pairs: list[TensorStatistics]) -> float:
    now, elements = math.fsum(t.sum_sq for t in pairs), sum(t.elements for t in pairs)
    before, elements_before = math.fsum(t.pair.sum_before for t in pairs), sum(t.pair.elements_before for t in pairs)
    if not elements or not elements_before or before <= 0:
        return _NAN
    return _f32(math.sqrt(now / elements) / math.sqrt(before / elements_before))


def _f32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))
