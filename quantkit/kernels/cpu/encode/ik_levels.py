"""Rounding to the levels of ik_llama.cpp's types: uneven values, plain or shifted, and both signs at once.

An index of 2, 3, 4, 5 or 6 bits stands for one of ``values``, or, where a bit of the sub-block says so, for that value
plus ``raise``::

    IQ2  -31 -13 1 17                       shifted by 5
    IQ3  -63 -40 -23 -10 1 13 28 47         shifted by 4
    IQ4  as in IQ4_NL                       shifted by 4
    IQ5  -126 -114 ... 109 121              shifted by 2
    IQ6  -127 -121 ... 115 121              shifted by 1

The reference takes the value below v if ``v - below < above - v``, in f32. Among plain values that is v < the middle of
the two; among shifted ones a middle near zero is a few ulp lower, so there the same two subtractions are made. (Of
plain IQ5 values, the reference looks an interval up in a table, so the middle decides even where f32 would round
otherwise.)

Buckets (search.py: bucket_tables) find the two values. A search also rounds -v: that is minus the nearest of the
mirrored values, which lie in the same bucket as v.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, best_index_iq2nl to best_index_iq6nl.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.jit import inline, specialize
from quantkit.kernels.cpu.core.simd import cast, convert, i32x16, make_table, muladd, select, vmax, vmin
from quantkit.kernels.cpu.encode.search import MAGIC, bucket_tables
from quantkit.kernels.tables import table

F = np.float32

# ---------------------------------------------------------------- functions over tables, which are bound below

#: Intrinsics: the values below and above the boundary in a bucket, their levels.
below: Any = None
above: Any = None
level_below: Any = None
level_above: Any = None


def _nearest(v, bucket):
    """Return the value nearest to v, which lies in ``bucket``, as f32."""
    low, high = below(bucket), above(bucket)
    return select(v + v >= low + high, high, low)


def _nearest_shifted(v, bucket):
    low, high = below(bucket), above(bucket)
    return select(v - low < high - v, low, high)


def _mirror(v, bucket):
    """Return minus the value nearest to -v. ``below`` and ``above`` are of mirrored values."""
    low, high = below(bucket), above(bucket)
    return select(v + v <= low + high, low, high)


def _mirror_shifted(v, bucket):
    low, high = below(bucket), above(bucket)
    return select(high - v < v - low, high, low)


def _level(v, bucket):
    """Return the level nearest to v, and its value, as f32."""
    low, high = below(bucket), above(bucket)
    upper = v + v >= low + high
    return select(upper, level_above(bucket), level_below(bucket)), select(upper, high, low)


def _level_shifted(v, bucket):
    low, high = below(bucket), above(bucket)
    lower = v - low < high - v
    return select(lower, level_below(bucket), level_above(bucket)), select(lower, low, high)


#: Buckets of a set of levels: number per unit, and the magnitude that they cover.
per_unit = reach = F(0)
level_plain: Any = None
level_shifted: Any = None


@inline
def find_bucket(x, inverse_per_width):
    """Return the bucket of x * inverse, given inverse / width."""
    return cast(i32x16, muladd(x, inverse_per_width, MAGIC))


@inline
def limit(v, reach):
    """Return v clamped to +-``reach``. C converts values beyond int to INT_MIN: level 0."""
    return vmax(vmin(select(v < F(2.0**31), v, -reach), reach), -reach)


def _round_any(v, shifted):
    """Return the level nearest to any v, as i32, and its value, as f32."""
    v = limit(v, reach)
    bucket = find_bucket(v, per_unit)
    level, value = level_plain(v, bucket)
    level_up, value_up = level_shifted(v, bucket)
    return convert(i32x16, select(shifted, level_up, level)), select(shifted, value_up, value)


# ---------------------------------------------------------------- the sets of levels


@dataclass(frozen=True)
class Levels:
    """A set of levels; searches are specialized by it."""

    #: The lowest value, and the offset of shifted ones.
    lowest: int
    shift_by: int
    #: Buckets per unit.
    per_unit: np.float32
    #: round_any(v, mask of shifted lanes): (level i32, value f32) of any v.
    round_any: Callable[..., Any]
    #: level(v, bucket): (level, value), as f32; of plain and of shifted values.
    level: tuple[Callable[..., Any], Callable[..., Any]]
    #: nearest(v, bucket), and mirrored(v, bucket), minus the value nearest to -v: of plain and of shifted values.
    plain: tuple[Callable[..., Any], Callable[..., Any]]
    shifted: tuple[Callable[..., Any], Callable[..., Any]]


def _tables(values: list[int], width: float, count: int, name: str) -> dict[str, Any]:
    middles = [(a + b) / 2 for a, b in zip(values, values[1:], strict=False)]
    _, low, high = bucket_tables(middles, width, count)
    return {
        "below": make_table([values[i] for i in low], f"{name}_below"),
        "above": make_table([values[i] for i in high], f"{name}_above"),
        "level_below": make_table(low, f"{name}_level_below"),
        "level_above": make_table(high, f"{name}_level_above"),
    }


def _make(name: str, values: list[int], shift_by: int, width: float, count: int) -> Levels:
    bound: dict[str, Any] = {"per_unit": F(1 / width), "reach": F((count // 2 - 1) * width)}
    by_kind = {}
    for kind, functions, codebook in (
        ("plain", (_nearest, _mirror, _level), values),
        ("shifted", (_nearest_shifted, _mirror_shifted, _level_shifted), [v + shift_by for v in values]),
    ):
        nearest, mirrored, nearest_level = functions
        tables = _tables(codebook, width, count, f"{name}_{kind}")
        minus = _tables([-v for v in reversed(codebook)], width, count, f"{name}_{kind}_minus")
        pairs = {k: minus[k] for k in ("below", "above")}
        by_kind[kind] = (
            specialize(nearest, name, below=tables["below"], above=tables["above"]),
            specialize(mirrored, name, **pairs),
        )
        bound[f"level_{kind}"] = specialize(nearest_level, name, **tables)
    round_any = specialize(_round_any, name, **bound)
    both = bound["level_plain"], bound["level_shifted"]
    return Levels(values[0], shift_by, bound["per_unit"], round_any, both, by_kind["plain"], by_kind["shifted"])


#: These widths keep all boundaries, plain and shifted, at least 4 % of a bucket away from its edges.
IQ2 = _make("iq2", table("kvalues_iq2nl").tolist(), 5, 10.0, 16)
IQ3 = _make("iq3", table("kvalues_iq3nl").tolist(), 4, 12.13, 16)
IQ4 = _make("iq4", table("kvalues_iq4nl").tolist(), 4, 11.64, 32)
IQ5 = _make("iq5", table("kvalues_iq5nl").tolist(), 2, 4.5, 64)
IQ6 = _make("iq6", table("kvalues_iq6nl").tolist(), 1, 2.5, 128)
