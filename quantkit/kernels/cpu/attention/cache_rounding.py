"""Rounding of keys and values to a type, which are then stored as float32.

The values are those of llama.cpp's quantize_row_*_ref, with which it writes its caches, and dequantize_row_*. Source:
llama.cpp b11434 ggml-quants.c.
"""

from __future__ import annotations

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline
from quantkit.kernels.cpu.core.simd import f16_to_f32, f32_to_f16, load, store
from quantkit.kernels.cpu.encode.i_quants import VALUES
from quantkit.types import BY_NAME

F = np.float32
_F16, _BF16, _Q8_0, _Q4_0, _Q4_1, _Q5_0, _Q5_1, _IQ4_NL = (
    BY_NAME[name].id for name in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
)
#: kvalues_iq4nl, which are a constant of the kernels.
_LEVELS = VALUES
#: GROUP_MAX_EPS: a block of smaller values becomes 0.
_LEAST = F(1e-15)


@inline
def _get(x, j):
    return load(types.float32, x, 4 * j)


@inline
def _as_f16(x):
    return f16_to_f32(f32_to_f16(x))


@inline
def _largest(x, n):
    """Return the first value of largest magnitude."""
    largest = F(0)
    for j in range(n):
        if abs(_get(x, j)) > abs(largest):
            largest = _get(x, j)
    return largest


@helper
def _symmetric(x, n, half, out):
    """Q4_0 (half 8) and Q5_0 (half 16)."""
    d = _largest(x, n) / F(-half)
    inverse = F(1) / d if d != F(0) else F(0)
    scale = _as_f16(d)
    for j in range(n):
        level = min(2 * half - 1, int(_get(x, j) * inverse + (F(half) + F(0.5))))
        store(out, 4 * j, F(level - half) * scale)


@helper
def _affine(x, n, top, out):
    """Q4_1 (top level 15) and Q5_1 (31)."""
    low = high = _get(x, 0)
    for j in range(1, n):
        low, high = min(low, _get(x, j)), max(high, _get(x, j))
    d = (high - low) / F(top)
    inverse = F(1) / d if d != F(0) else F(0)
    scale, minimum = _as_f16(d), _as_f16(low)
    for j in range(n):
        level = min(top, int((_get(x, j) - low) * inverse + F(0.5)))
        store(out, 4 * j, F(level) * scale + minimum)


@helper
def _q8_0(x, n, out):
    d = abs(_largest(x, n)) / F(127)
    inverse = F(1) / d if d != F(0) else F(0)
    scale = _as_f16(d)
    for j in range(n):
        y = _get(x, j) * inverse
        level = int(abs(y) + F(0.5))
        store(out, 4 * j, F(level if y >= F(0) else -level) * scale)


@inline
def _nearest_level(x):
    """Return the level of IQ4_NL nearest to x, the upper of two equally near (best_index_int8)."""
    best = _LEVELS[0]
    for i in range(1, 16):
        if abs(x - F(_LEVELS[i])) <= abs(x - F(best)):
            best = _LEVELS[i]
    return F(best)


@helper
def _iq4_nl(x, n, out):
    largest = _largest(x, n)
    if abs(largest) < _LEAST:
        for j in range(n):
            store(out, 4 * j, F(0))
        return
    inverse = F(1) / (largest / F(_LEVELS[0]))
    sum_qx = sum_q2 = F(0)
    for j in range(n):
        value = _get(x, j)
        q = _nearest_level(inverse * value)
        w = value * value
        sum_qx += w * q * value
        sum_q2 += w * q * q
    scale = _as_f16(sum_qx / sum_q2 if sum_q2 > F(0) else F(0))
    for j in range(n):
        store(out, 4 * j, scale * _nearest_level(inverse * _get(x, j)))


@helper
def _floats(x, n, kind, out):
    for j in range(n):
        if kind == _F16:
            store(out, 4 * j, _as_f16(_get(x, j)))
            continue
        bits = types.int64(load(types.uint32, x, 4 * j))
        if kind == _BF16 and bits & 0x7FFFFFFF <= 0x7F800000:
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        store(out, 4 * j, types.uint32(bits))


@helper
def round_part(x, n, kind, out):
    """Write up to 32 values as float32, rounded to a type (its ggml id); exactly 32 for types with blocks."""
    if kind == _Q4_0:
        _symmetric(x, n, 8, out)
    elif kind == _Q5_0:
        _symmetric(x, n, 16, out)
    elif kind == _Q4_1:
        _affine(x, n, 15, out)
    elif kind == _Q5_1:
        _affine(x, n, 31, out)
    elif kind == _Q8_0:
        _q8_0(x, n, out)
    elif kind == _IQ4_NL:
        _iq4_nl(x, n, out)
    else:
        _floats(x, n, kind, out)
