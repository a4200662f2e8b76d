"""Rotary positions: pairs of columns turned by an angle that grows with the position.

Pair i of n_rot / 2 turns by theta_i = position * freq_base^(-2i / n_rot). As in ggml (llama.cpp b11434
ggml-cpu/ops.cpp ggml_compute_forward_rope, ggml.c ggml_rope_yarn_corr_dims) theta is a running product in f32, divided
by the pair's factor (long contexts, by tensor) and interpolated (YaRN)::

    theta' = freq_scale * theta * (1 - mix_i) + theta * mix_i     mix_i = ext_factor * (1 - ramp(i)), 0 without YaRN
    ramp(i) = clamp((i - low) / max(0.001, high - low), 0, 1)     low, high: pairs that turn beta_fast, beta_slow times
    cos, sin = mscale * (cos theta', sin theta')                  mscale = attn_factor [* 1 + 0.1 ln(1 / freq_scale)]

M-RoPE: of a text the positions in time, height and width are all the token's; the fourth is 0, its pairs stay.

    rope_table   batch out pairs constants step:f freq_scale:f mscale:f       constants: f32 [3, pairs], see below
    rope(kind)   batch out x table width head start n_rot rows_of per         kind normal: pairs (2i, 2i + 1);
                                                                              neox: (i, i + n_rot / 2). out may be x
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import types

from quantkit.kernels.cpu.elementwise import copy, share
from quantkit.kernels.cpu.jit import inline
from quantkit.kernels.cpu.simd import f32x16, load, make_shuffle, make_shuffle2, store
from quantkit.kernels.cpu.tape import N_TOKENS, POSITIONS, Operation, arg, batch_word, farg, first_of, operation

f32 = np.float32
Config = Any  # a RopeConfig; kernels do not know model/

# ---------------------------------------------------------------- the table


def rope_constants(config: Config, factors: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
    """Return what the table needs of each pair, float32 [3, n_rot / 2]: 1 if it turns, its factor, its YaRN mix."""
    pairs = config.n_rot // 2
    made = np.zeros((3, pairs), f32)
    made[0] = 1 if not config.sections else _turns(config, pairs)
    made[1] = 1 if factors is None else factors[:pairs]
    if config.ext_factor:
        low, high = _yarn_range(config)
        y = (np.arange(pairs, dtype=f32) - low) / max(f32(0.001), high - low)
        made[2] = (1 - np.clip(y, f32(0), f32(1))) * f32(config.ext_factor)
    return made


def rope_scalars(config: Config) -> dict[str, float]:
    """Return the slots step, freq_scale and mscale of rope_table."""
    mscale = f32(config.attn_factor)
    if config.ext_factor:
        mscale *= f32(1) + f32(0.1) * f32(math.log(f32(1) / f32(config.freq_scale)))
    step = math.pow(f32(config.freq_base), f32(-2) / f32(config.n_rot))
    return {"step": step, "freq_scale": config.freq_scale, "mscale": float(mscale)}


def _turns(config: Config, pairs: int) -> npt.NDArray[np.bool_]:
    """M-RoPE: which pairs take one of the first three positions."""
    t, h, w = config.sections[:3]
    sector = np.arange(pairs) % sum(config.sections)
    last = 3 * np.array([t, h, w])[sector % 3] if config.interleaved else t + h + w
    return np.asarray(sector < last)


def _yarn_range(config: Config) -> tuple[np.float32, np.float32]:
    """Return the pairs between which YaRN goes over from extrapolation to interpolation."""

    def pair(turns: float) -> float:
        length = f32(config.n_ctx_orig) / (f32(turns) * 2 * f32(math.pi))
        return float(config.n_rot * f32(math.log(length)) / (2 * f32(math.log(f32(config.freq_base)))))

    low, high = math.floor(pair(config.beta_fast)), math.ceil(pair(config.beta_slow))
    return f32(max(0, low)), f32(min(config.n_rot - 1, high))


_OUT, _PAIRS, _CONSTANTS, _STEP, _FREQ_SCALE, _MSCALE = range(1, 7)


@operation("batch out pairs constants step:f freq_scale:f mscale:f")
def rope_table(args, tid, nth):
    """cos, sin, cos, sin, ... of a token's angles; cos and sin in double, so that they are rounded as glibc's are."""
    pairs, constants = arg(args, _PAIRS), arg(args, _CONSTANTS)
    step, freq_scale, mscale = farg(args, _STEP), farg(args, _FREQ_SCALE), farg(args, _MSCALE)
    tokens, positions = batch_word(args, N_TOKENS), batch_word(args, POSITIONS)
    for t in range(first_of(tokens, tid, nth), first_of(tokens, tid + 1, nth)):
        running = types.float32(load(types.int32, positions, 4 * t))
        out = arg(args, _OUT) + 8 * pairs * t
        for i in range(pairs):
            turns, factor = load(types.float32, constants, 4 * i), load(types.float32, constants, 4 * (pairs + i))
            mix = load(types.float32, constants, 4 * (2 * pairs + i))
            theta = running * turns / factor
            theta = freq_scale * theta * (types.float32(1.0) - mix) + theta * mix
            store(out, 8 * i, types.float32(math.cos(types.float64(theta))) * mscale)
            store(out, 8 * i + 4, types.float32(math.sin(types.float64(theta))) * mscale)
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
    """Columns a and b by angle i."""
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


#: (out, x, table, pairs): turn the pairs of one head; bound anew for each kind.
turn: Any = None

_X, _TABLE, _WIDTH, _HEAD, _START, _N_ROT, _ROWS_OF, _PER = range(2, 10)


@operation("batch out x table width head start n_rot rows_of per")
def _rope(args, tid, nth):
    """Turn columns start ... start + n_rot of every head; the others are copied. A unit of work is a head."""
    head, start, n_rot = arg(args, _HEAD), arg(args, _START), arg(args, _N_ROT)
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


def rope(kind: str) -> Operation:
    """Return the operation of ops.Rope for ``normal`` or ``neox`` pairs."""
    return _rope.bind(kind, turn={"normal": _normal, "neox": _neox}[kind])
