"""Rotary positions: rotate pairs of columns by an angle that grows with the position.

The table holds cos and sin of every token's angles, defined in kernels/rope_constants.py.

    rope_table   batch out pairs constants each back step:f freq_scale:f mscale:f
                 constants: f32 [3, pairs]; each: positions per row (the first applies); back: 1 for the inverse
    rope(kind)   batch out x table width head start n_rot rows_of per         kind normal: pairs (2i, 2i + 1);
                                                                              neox: (i, i + n_rot / 2). out may be x
"""

from __future__ import annotations

import math
from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import f32x16, load, make_shuffle, make_shuffle2, store
from quantkit.kernels.cpu.core.tape import N_TOKENS, POSITIONS, TapeOp, arg, batch_word, farg, first_of, operation
from quantkit.kernels.cpu.layer.elementwise import copy, share

# ---------------------------------------------------------------- the table

_OUT, _PAIRS, _CONSTANTS, _EACH, _BACK, _STEP, _FREQ_SCALE, _MSCALE = range(1, 9)


@operation("batch out pairs constants each back step:f freq_scale:f mscale:f")
def rope_table(args, tid, nth):
    """Write cos, sin, cos, sin, ... of each token's angles, computed in double to round as glibc does."""
    pairs, constants = arg(args, _PAIRS), arg(args, _CONSTANTS)
    step = farg(args, _STEP)
    freq_scale = farg(args, _FREQ_SCALE)
    mscale = farg(args, _MSCALE)
    tokens = batch_word(args, N_TOKENS)
    positions = batch_word(args, POSITIONS)
    multiple = arg(args, _EACH)
    sign = types.float32(-1) if arg(args, _BACK) else types.float32(1)
    for t in range(first_of(tokens, tid, nth), first_of(tokens, tid + 1, nth)):
        running = types.float32(types.int64(load(types.int32, positions, 4 * t)) // multiple * multiple)
        out = arg(args, _OUT) + 8 * pairs * t
        for i in range(pairs):
            turns, factor = load(types.float32, constants, 4 * i), load(types.float32, constants, 4 * (pairs + i))
            mix = load(types.float32, constants, 4 * (2 * pairs + i))
            theta = running * turns / factor
            theta = freq_scale * theta * (types.float32(1.0) - mix) + theta * mix
            store(out, 8 * i, types.float32(math.cos(types.float64(theta))) * mscale)
            store(out, 8 * i + 4, types.float32(math.sin(types.float64(theta))) * mscale * sign)
            running *= step


# ---------------------------------------------------------------- turning

_even = make_shuffle2(range(0, 32, 2), "rope_even")
_odd = make_shuffle2(range(1, 32, 2), "rope_odd")
_first = make_shuffle([i // 2 * 2 for i in range(16)], "rope_first")
_second = make_shuffle([i // 2 * 2 + 1 for i in range(16)], "rope_second")
_swap = make_shuffle([i ^ 1 for i in range(16)], "rope_swap")
_alternate = make_shuffle2([i if i % 2 == 0 else 16 + i for i in range(16)], "rope_alternate")


@inline
def _turn_pair(out, x, a, b, table, i):
    """Rotate columns a and b by angle i."""
    cos, sin = load(types.float32, table, 8 * i), load(types.float32, table, 8 * i + 4)
    p, q = load(types.float32, x, 4 * a), load(types.float32, x, 4 * b)
    store(out, 4 * a, p * cos - q * sin)
    store(out, 4 * b, p * sin + q * cos)


@inline
def _normal(out, x, table, pairs):
    for i in range(0, pairs - 7, 8):
        v, angles = load(f32x16, x, 8 * i), load(f32x16, table, 8 * i)
        straight, crossed = v * _first(angles), _swap(v) * _second(angles)
        store(out, 8 * i, _alternate(straight - crossed, crossed + straight))
    for i in range(pairs // 8 * 8, pairs):
        _turn_pair(out, x, 2 * i, 2 * i + 1, table, i)


@inline
def _neox(out, x, table, pairs):
    for i in range(0, pairs - 15, 16):
        low, high = load(f32x16, table, 8 * i), load(f32x16, table, 8 * i + 64)
        cos, sin = _even(low, high), _odd(low, high)
        p, q = load(f32x16, x, 4 * i), load(f32x16, x, 4 * (pairs + i))
        store(out, 4 * i, p * cos - q * sin)
        store(out, 4 * (pairs + i), p * sin + q * cos)
    for i in range(pairs // 16 * 16, pairs):
        _turn_pair(out, x, i, pairs + i, table, i)


#: (out, x, table, pairs): rotate the pairs of one head; bound for each kind.
turn: Any = None

_X, _TABLE, _WIDTH, _HEAD, _START, _N_ROT, _ROWS_OF, _PER = range(2, 10)


@operation("batch out x table width head start n_rot rows_of per")
def _rope(args, tid, nth):
    """Rotate columns start ... start + n_rot of every head and copy the others. A unit of work is a head."""
    head = arg(args, _HEAD)
    start = arg(args, _START)
    n_rot = arg(args, _N_ROT)
    heads = arg(args, _WIDTH) * arg(args, _PER) // head  # of a token
    units = batch_word(args, arg(args, _ROWS_OF)) * heads
    first, end = share(units, head, tid, nth)
    moves = arg(args, _OUT) != arg(args, _X)
    for unit in range(first, end):
        out, x = arg(args, _OUT) + 4 * head * unit, arg(args, _X) + 4 * head * unit
        if moves:
            copy(out, x, start)
            copy(out + 4 * (start + n_rot), x + 4 * (start + n_rot), head - start - n_rot)
        turn(out + 4 * start, x + 4 * start, arg(args, _TABLE) + 4 * n_rot * (unit // heads), n_rot // 2)


def rope(kind: str) -> TapeOp:
    """Return the operation of ops.Rope for ``normal`` or ``neox`` pairs."""
    return _rope.bind(kind, turn={"normal": _normal, "neox": _neox}[kind])
