"""Lattices of types: the values that a block can hold exactly, as tables for the search of a source's own scales.

A value is ``d * s * level - dmin * m`` (levels.py); here levels and s are integers, each with its code, or s is one of
the factors of a scale without d (MXFP4, NVFP4). Where groups of levels come from a grid of magnitudes (IQ2, IQ3), the
levels are those of all its points; lattice_groups.py looks for the points. Types whose levels are shifted, grids with
shifts or more than one codebook, and types with a scale per row have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from quantkit.kernels.grids import Grid
from quantkit.kernels.levels import Bits, Levels, all_levels, float_bits
from quantkit.types import TensorType

I16 = npt.NDArray[np.int16]
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]

#: Codes are looked up by a level, or an s, plus this.
ZERO = 128
#: Integers of a table of codes: -128 to 128.
_SIZE = 2 * ZERO + 1
#: Numbers of s up to which all are tried.
_MOST_TRIES = 16
#: Types whose encoders never make d negative, so that an extreme value keeps its sign.
_POSITIVE = frozenset({"Q8_0", "TQ2_0", "Q1_0", "MXFP4", "NVFP4"})
#: Mantissa bits, with the implicit one, of the numbers that a source type holds; of wider ones, of narrower numbers in
#: them, too.
PRECISIONS = {"BF16": (8,), "F16": (11, 8), "F32": (24, 11, 8)}


@dataclass(frozen=True, eq=False)
class Lattice:
    """The lattice of a type.

    span: values of a sub-block. tries: levels of the value of largest magnitude, in the order in which they are tried,
    then NaN up to a multiple of 16. follows_sign: they are multiplied by its sign. top: the highest level, where there
    are minimums. level_codes, scale_codes: int16 [257], -1 where there is none. even: int32 [4], the lowest and the
    highest of consecutive levels, what to add to a level for its code, and a mask; of others the lowest is above the
    highest. scales: s of the largest scale, in that order; empty without s. factors: float64, scales without d; empty
    elsewhere. max_m: the highest m; 0: a minimum is a float. runs: int32 [runs, 6], of q, s, m, d and dmin in turn:
    field, byte, shift, first bit, bits, and the number of fields and bytes, one after another, that have the same
    places. ends: int32 [5], where the runs of q, s, m, d and dmin end. codebook: the level of each code, float32. unit:
    a power of two by which values are multiplied, so that levels and s are integers.
    """

    type: TensorType
    span: int
    tries: F32
    follows_sign: bool
    top: int
    level_codes: I16
    scale_codes: I16
    even: I32
    scales: I16
    factors: F64
    max_m: int
    has_minimum: bool
    runs: I32
    ends: I32
    codebook: F32
    unit: float = 1.0
    grid: Grid | None = None

    @property
    def loses_sign(self) -> bool:
        """Whether values of a sub-block may allow both signs of its scale: encoders make either."""
        return not self.follows_sign and not self.has_minimum and self.grid is None


@cache
def lattice_of(t: TensorType) -> Lattice | None:
    """Return the lattice of a type; None if the search knows none."""
    levels = all_levels().get(t.name)
    if levels is None or levels.shift is not None or not _has_block_scale(levels) or not _has_magnitudes(levels):
        return None
    factors = np.zeros(0) if levels.factors is None else levels.factors.astype(np.float64)
    values, has_factors = levels.codebook.astype(np.float64), levels.scale is not None and not levels.d
    if levels.grid is not None:
        values = np.unique(np.concatenate([-levels.grid.points, levels.grid.points])).astype(np.float64)
    of_levels, of_scales = (1.0, 1.0) if levels.grid is None else (_unit(values), _unit(factors))
    codebook = (values * of_levels).astype(np.int64)
    s = np.zeros(0, np.int64) if has_factors else (factors * of_scales).astype(np.int64)
    follows_sign = t.name in _POSITIVE
    return Lattice(
        type=t,
        span=levels.span,
        tries=_pad(_by_magnitude(codebook, follows_sign)),
        follows_sign=follows_sign,
        top=int(codebook.max()),
        level_codes=_codes(codebook),
        even=_even(codebook),
        scale_codes=_codes(s),
        scales=_largest_scales(s),
        factors=factors if has_factors else np.zeros(0),
        max_m=0 if levels.minimum is None else 2 ** levels.minimum.shape[1] - 1,
        has_minimum=bool(levels.dmin),
        **_runs(levels),
        codebook=values.astype(np.float32),
        unit=of_levels * of_scales,
        grid=levels.grid,
    )


def _has_magnitudes(levels: Levels) -> bool:
    """Return whether each value has a level of its own, or those of a grid are magnitudes with signs, in its order."""
    grid = levels.grid
    return grid is None or (grid.signs > 0 and grid.codebooks == 1 and not levels.columns and levels.scale is not None)


def _unit(values: F64) -> float:
    """Return the least power of two that makes integers of all values."""
    unit = 1.0
    while (values * unit != np.rint(values * unit)).any():
        unit *= 2
    return unit


def _has_block_scale(levels: Levels) -> bool:
    return levels.d.startswith("f16") or not levels.d and levels.scale is not None


def _by_magnitude(values: npt.NDArray[np.int64], follows_sign: bool) -> I16:
    """Return the distinct values but 0, the largest and of equals the negative first; without signs, magnitudes."""
    distinct = np.unique(np.abs(values[np.abs(values) < ZERO]) if follows_sign else values)
    distinct = distinct[distinct != 0]
    order = np.lexsort((distinct, -np.abs(distinct)))
    result: I16 = distinct[order].astype(np.int16)
    return result


def _largest_scales(s: npt.NDArray[np.int64]) -> I16:
    """Return the s that the largest scale of a super-block may have: encoders give it the extreme one, or nearly."""
    ordered = _by_magnitude(s, follows_sign=False)
    ordered = ordered if s.min(initial=0) < 0 else ordered[ordered > 0]
    if len(ordered) <= _MOST_TRIES:
        return ordered
    largest: I16 = ordered[4 * np.abs(ordered) >= 3 * np.abs(ordered).max(initial=0)]
    return largest


def _codes(values: npt.NDArray[np.int64]) -> I16:
    codes = np.full(_SIZE, -1, np.int16)
    for code in range(len(values) - 1, -1, -1):  # the first of equal values remains
        codes[values[code] + ZERO] = code
    return codes


def _pad(tries: I16) -> F32:
    result = np.full(-(-len(tries) // 16) * 16, np.nan, np.float32)
    result[: len(tries)] = tries
    return result


def _even(codebook: npt.NDArray[np.int64]) -> I32:
    """Return the rule of the codes of consecutive levels, (level + offset) & mask."""
    codes, lowest, highest, mask = _codes(codebook), int(codebook.min()), int(codebook.max()), len(codebook) - 1
    levels = np.arange(lowest, highest + 1)
    offset = int(codes[ZERO])
    if lowest <= 0 <= highest < ZERO and (codes[levels + ZERO] == (levels + offset & mask)).all():
        return np.array([lowest, highest, offset, mask], np.int32)
    return np.array([1, 0, 0, 0], np.int32)


def _runs(levels: Levels) -> dict[str, I32]:
    """Return the places of all fields of a block as runs of bits within a byte, in as many bytes as follow alike."""
    none = np.zeros((0, 1), np.int64)
    floats = [float_bits(kind) if kind else none for kind in (levels.d, levels.dmin)]
    integers = [none if group is None else group for group in (levels.levels, levels.scale, levels.minimum)]
    runs, ends = list[tuple[int, ...]](), list[int]()
    for group in (*integers, *floats):
        runs += _merge_runs([(i, *run) for i, bits in enumerate(group) for run in _runs_of(bits)])
        ends.append(len(runs))
    return {"runs": np.array(runs, np.int32), "ends": np.array(ends, np.int32)}


def _merge_runs(runs: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the runs with their number of fields: those of the next field, in the next byte, are one with them."""
    counts = dict.fromkeys(runs, 1)
    for run in sorted(runs, reverse=True):
        following = (run[0] + 1, run[1] + 1, *run[2:])
        counts[run] += counts.pop(following, 0)
    return [(*run, count) for run, count in counts.items()]


def _runs_of(bits: Bits) -> list[tuple[int, int, int, int]]:
    runs = list[tuple[int, int, int, int]]()
    for i, bit in enumerate(bits.tolist()):
        if runs and bit % 8 and bit == bits[i - 1] + 1:
            byte, shift, first, count = runs[-1]
            runs[-1] = byte, shift, first, count + 1
        else:
            runs.append((bit // 8, bit % 8, i, 1))
    return runs
