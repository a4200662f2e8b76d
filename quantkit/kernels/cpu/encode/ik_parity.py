"""Levels of 4 bits in groups of four with an even number of bits set, so that 15 bits hold them.

Of 32 values, group k is 2k, 2k + 16, 2k + 1, 2k + 17. All are rounded to the nearest level; where the bits of a group
are odd, one level moves by one or two to the best of those with other parity: the least w ((d q' - x)^2 - (d q - x)^2),
in which the reference takes q plain and d positive, even where values are shifted or -d is tried. The 16 bits of a
group are stored as g with g ^ 2 g = them, which leaves a bit free, the lowest, for one of the scale's.

The scale of 32 values: 15 candidates for 1 / d, tried as in ik_search.py, for plain and shifted values. When it is a
multiple of the row's, the better of plain and shifted values is taken.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_row_iq4_kss_impl, prune_iq4ks, scramble_table.
"""

from __future__ import annotations

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline
from quantkit.kernels.cpu.core.simd import (
    convert,
    f32x16,
    i32x8,
    i32x16,
    load,
    make_table,
    select,
    splat,
    stack_bytes,
    store,
    transpose16,
    u16x8,
)
from quantkit.kernels.cpu.encode.ik_levels import IQ4, find_bucket, limit
from quantkit.kernels.cpu.encode.ik_rows import SUMQ2, SUMQX, TERMS, TERMS2, W, X, multiples_8_bit
from quantkit.kernels.cpu.encode.ik_search import add_in_order, keep_better
from quantkit.kernels.cpu.encode.tiles import TILE, largest
from quantkit.kernels.tables import table

F, I32 = np.float32, np.int32
LOWEST = F(IQ4.lowest)
RAISE = F(IQ4.shift_by)
PER_UNIT = IQ4.per_unit
REACH = F(130)
_level_plain, _level_shifted = IQ4.level

# ---------------------------------------------------------------- groups with an even number of bits


def _levels_of_other_parity(level: int) -> list[int]:
    """Return the levels at most two away whose bits have the other parity, upwards; three, the last one repeated."""
    reachable = range(max(level - 2, 0), min(level + 2, 15) + 1)
    levels = [q for q in reachable if (q.bit_count() - level.bit_count()) % 2]
    return levels + [levels[-1]] * (3 - len(levels))


_values = table("kvalues_iq4nl").tolist()
_level0, _level1, _level2 = (
    make_table([_levels_of_other_parity(q)[i] for q in range(16)], f"ik_parity_level{i}") for i in range(3)
)
_value0, _value1, _value2 = (
    make_table([_values[_levels_of_other_parity(q)[i]] for q in range(16)], f"ik_parity_value{i}") for i in range(3)
)


@inline
def _loss(x, w, d, value, square):
    """Return the increase of a value's error over one with this square of the difference."""
    difference = d * value - x
    return w * (difference * difference - square)


@inline
def _best_move(x, w, d, level, value, up):
    """Return the least loss of moving a level to another of other parity, that level, and its value."""
    difference = d * (value - up) - x
    square, index = difference * difference, convert(i32x16, level)
    moved, moved_value = _level0(index), _value0(index) + up
    least = _loss(x, w, d, moved_value, square)
    candidate = _value1(index) + up
    loss = _loss(x, w, d, candidate, square)
    less = loss < least
    least = select(less, loss, least)
    moved = select(less, _level1(index), moved)
    moved_value = select(less, candidate, moved_value)
    candidate = _value2(index) + up
    loss = _loss(x, w, d, candidate, square)
    less = loss < least
    return select(less, loss, least), select(less, _level2(index), moved), select(less, candidate, moved_value)


@inline
def _is_odd(levels):
    """Return the lanes in which the levels of a group have an odd number of bits set: by a table of 16 bits."""
    a, b, c, d = levels
    bits = convert(i32x16, a) ^ convert(i32x16, b) ^ convert(i32x16, c) ^ convert(i32x16, d)
    return ((splat(i32x16, I32(0x6996)) >> bits) & I32(1)) != I32(0)


@inline
def _make_even(x, w, d, up, levels, values):
    """Return the levels and values of a group with one level moved where their bits are odd."""
    odd = _is_odd(levels)
    loss0, level0, value0 = _best_move(x[0], w[0], d, levels[0], values[0], up)
    loss1, level1, value1 = _best_move(x[1], w[1], d, levels[1], values[1], up)
    loss2, level2, value2 = _best_move(x[2], w[2], d, levels[2], values[2], up)
    loss3, level3, value3 = _best_move(x[3], w[3], d, levels[3], values[3], up)
    of_1, of_3 = loss1 < loss0, loss3 < loss2
    last = select(of_3, loss3, loss2) < select(of_1, loss1, loss0)
    move0 = odd & ~last & ~of_1
    move1 = odd & ~last & of_1
    move2 = odd & last & ~of_3
    move3 = odd & last & of_3
    return (
        select(move0, level0, levels[0]), select(move1, level1, levels[1]),
        select(move2, level2, levels[2]), select(move3, level3, levels[3]),
    ), (
        select(move0, value0, values[0]), select(move1, value1, values[1]),
        select(move2, value2, values[2]), select(move3, value3, values[3]),
    )  # fmt: skip


@inline
def _load_group(tile, k):
    """Return the four vectors of group k."""
    offset = 128 * k
    return (
        load(f32x16, tile, offset), load(f32x16, tile, offset + TILE),
        load(f32x16, tile, offset + 64), load(f32x16, tile, offset + 64 + TILE),
    )  # fmt: skip


@inline
def _level(x, inverse, shifted, anywhere):
    v = limit(inverse * x, REACH) if anywhere else inverse * x
    bucket = find_bucket(v, PER_UNIT)
    return _level_shifted(v, bucket) if shifted else _level_plain(v, bucket)


@inline
def _round_group(x, w, inverse, d, shifted, anywhere):
    """Return levels and values of a group, nearest to x * inverse, then made even; anywhere: x may be of any size."""
    up = RAISE if shifted else F(0)
    level0, value0 = _level(x[0], inverse, shifted, anywhere)
    level1, value1 = _level(x[1], inverse, shifted, anywhere)
    level2, value2 = _level(x[2], inverse, shifted, anywhere)
    level3, value3 = _level(x[3], inverse, shifted, anywhere)
    return _make_even(x, w, d, up, (level0, level1, level2, level3), (value0, value1, value2, value3))


# ---------------------------------------------------------------- the search for 16 scales


@inline
def _rate(xt, wt, inverse, d, shifted):
    """Return sum(w q x) and sum(w q q) for the values of levels that x * inverse becomes."""
    qx = q2 = splat(f32x16, F(0))
    for k in range(8):
        x, w = _load_group(xt, k), _load_group(wt, k)
        _, q = _round_group(x, w, inverse, d, shifted, False)
        wq = (w[0] * q[0], w[1] * q[1], w[2] * q[2], w[3] * q[3])
        qx = (((qx + wq[0] * x[0]) + wq[1] * x[1]) + wq[2] * x[2]) + wq[3] * x[3]
        q2 = (((q2 + wq[0] * q[0]) + wq[1] * q[1]) + wq[2] * q[2]) + wq[3] * q[3]
    return qx, q2


@helper
def _rate_plain(xt, wt, inverse, d):
    return _rate(xt, wt, inverse, d, False)


@helper
def _rate_shifted(xt, wt, inverse, d):
    return _rate(xt, wt, inverse, d, True)


@helper
def search_even(xt, wt, scales, shifts):
    """Write the scales of 16 sub-blocks, 0 where all |x| < 1e-16."""
    amax, top = largest(xt, 32)
    d = top / -LOWEST
    best = splat(f32x16, F(0))
    shifted = splat(f32x16, F(0))
    for itry in range(-7, 8):
        inverse = F(itry + LOWEST) / top
        qx, q2 = _rate_plain(xt, wt, inverse, F(1) / inverse)
        minus_qx, minus_q2 = _rate_plain(xt, wt, -inverse, F(1) / inverse)
        best, d, shifted = keep_better(best, d, shifted, qx, q2, 0)
        best, d, shifted = keep_better(best, d, shifted, minus_qx, minus_q2, 0)
        inverse = F(itry + LOWEST + RAISE) / top
        qx, q2 = _rate_shifted(xt, wt, inverse, F(1) / inverse)
        minus_qx, minus_q2 = _rate_shifted(xt, wt, -inverse, F(1) / inverse)
        best, d, shifted = keep_better(best, d, shifted, qx, q2, 0)
        best, d, shifted = keep_better(best, d, shifted, minus_qx, minus_q2, 0)
    store(scales, 0, select(amax < F(1e-16), F(0), d))
    store(shifts, 0, shifted)


# ---------------------------------------------------------------- a batch of a row


@inline
def _halve(bits):
    """Return g of 15 bits with g ^ 2 g = bits, of which an even number are set."""
    bits = bits ^ (bits << I32(1))
    bits = bits ^ (bits << I32(2))
    bits = bits ^ (bits << I32(4))
    return (bits ^ (bits << I32(8))) & I32(0x7FFF)


@inline
def _squares(total, x, w, d, q):
    """Add w (x - d q)^2 of a group to total."""
    a = x[0] - d * q[0]
    b = x[1] - d * q[1]
    c = x[2] - d * q[2]
    e = x[3] - d * q[3]
    return (((total + w[0] * a * a) + w[1] * b * b) + w[2] * c * c) + w[3] * e * e


@inline
def _pack_group(levels):
    """Return the 16 bits of a group of levels."""
    low = convert(i32x16, levels[0]) | (convert(i32x16, levels[1]) << I32(4))
    return low | (convert(i32x16, levels[2]) << I32(8)) | (convert(i32x16, levels[3]) << I32(12))


@inline
def _round_tile(s, d, shifted, values, bits):
    """Write the values, group by group, and the bits of 16 sub-blocks to tiles; return sum of w (x - d q)^2."""
    inverse, squares = F(1) / d, splat(f32x16, F(0))
    for k in range(8):
        x, w = _load_group(s + X, k), _load_group(s + W, k)
        levels, q = _round_group(x, w, inverse, d, shifted, True)
        squares = _squares(squares, x, w, d, q)
        store(values, 256 * k, q[0])
        store(values, 256 * k + 64, q[1])
        store(values, 256 * k + 128, q[2])
        store(values, 256 * k + 192, q[3])
        store(bits, 64 * k, _pack_group(levels))
    return squares


@inline
def _store_terms(s, up, factor):
    """Turn plain values in TERMS and shifted ones in TERMS2 into terms of the sums that fit d."""
    for k in range(8):
        x, w = _load_group(s + X, k), _load_group(s + W, k)
        for j in range(4):
            offset = 256 * k + 64 * j
            q = select(up, load(f32x16, s, TERMS2 + offset), load(f32x16, s, TERMS + offset)) * factor
            wq = w[j] * q
            store(s, TERMS + offset, wq * x[j])
            store(s, TERMS2 + offset, wq * q)


@helper
def store_even(s, scale, shifted, d, inverse, count, out):
    """Encode ``count`` sub-blocks, 8 or 16, of X with their weights W, scales and row scale d to blocks at ``out``."""
    multiple, bits = multiples_8_bit(scale, inverse), stack_bytes(1024)
    factor = convert(f32x16, multiple)
    squares = _round_tile(s, d * factor, False, s + TERMS, bits)
    up = _round_tile(s, d * factor, True, s + TERMS2, bits + 512) < squares
    _store_terms(s, up, factor)
    code = (multiple + I32(127)) | select(up, I32(1), splat(i32x16, I32(0)))
    for k in range(8):
        of_group = select(up, load(i32x16, bits, 512 + 64 * k), load(i32x16, bits, 64 * k))
        store(s, X + 64 * k, (_halve(of_group) << I32(1)) | ((code >> I32(k)) & I32(1)))
    transpose16(s, X, 64, s, X)
    for i in range(count):
        store(out, 16 * i, convert(u16x8, load(i32x8, s, X + 64 * i)))
    store(s, SUMQX, add_in_order(load(types.float32, s, SUMQX), s + TERMS, 32, count))
    store(s, SUMQ2, add_in_order(load(types.float32, s, SUMQ2), s + TERMS2, 32, count))
