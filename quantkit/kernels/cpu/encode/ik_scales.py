"""Scales of sub-blocks as multiples of one: shared by types with a scale per super-block and those with one per row.

Scales are f32 at an address; a fit tries 19 inverses, a lane each.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, make_qx_quants.
"""

from __future__ import annotations

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline
from quantkit.kernels.cpu.core.simd import (
    convert,
    f32x16,
    load,
    make_constant,
    nearest_int,
    splat,
    stack_bytes,
    store,
    vmax,
    vmin,
)

F, I32 = np.float32, np.int32


@inline
def largest_scale(scales, count):
    """Return the scale of the largest magnitude, the first of equals."""
    largest, top = F(0), F(0)
    for i in range(0, 4 * count, 4):
        scale = load(types.float32, scales, i)
        if abs(scale) > largest:
            largest, top = abs(scale), scale
    return top


@inline
def nearest_multiple(v, low, high):
    """Return the integer nearest to v, from low to high."""
    return vmax(vmin(nearest_int(v), I32(high)), I32(low))


#: Candidates for minus the multiple of the largest scale, minus the number of levels: 0, then k / 10.
_tenths = [0.0, *(float(F(0.1) * F(k)) for k in range(-9, 10) if k)]
_tries0 = make_constant(f32x16, _tenths[:16], "ik_scales_tries0")
_tries1 = make_constant(f32x16, _tenths[16:] + 13 * [0.0], "ik_scales_tries1")


@helper
def fit_multiples(scales, weights, count, levels):
    """Return d and 1 / d so that its multiples -levels .. levels - 1 fit ``count`` scales, both 0 if all scales are 0.

    Multiples are what scales times 1 / d round to; d was fitted to them afterwards.
    """
    top = largest_scale(scales, count)
    if top == F(0):
        return F(0), F(0)
    inverse0, inverse1 = -(_tries0() + F(levels)) / top, -(_tries1() + F(levels)) / top
    qx0 = qx1 = q20 = q21 = splat(f32x16, F(0))
    for i in range(0, 4 * count, 4):
        x, w = load(types.float32, scales, i), load(types.float32, weights, i)
        wx, w_each = splat(f32x16, w * x), splat(f32x16, w)
        q = convert(f32x16, nearest_multiple(inverse0 * x, -levels, levels - 1))
        qx0, q20 = qx0 + wx * q, q20 + w_each * q * q
        q = convert(f32x16, nearest_multiple(inverse1 * x, -levels, levels - 1))
        qx1, q21 = qx1 + wx * q, q21 + w_each * q * q
    s = stack_bytes(384)
    store(s, 0, qx0)
    store(s, 64, qx1)
    store(s, 128, q20)
    store(s, 192, q21)
    store(s, 256, inverse0)
    store(s, 320, inverse1)
    qx = load(types.float32, s, 0)
    q2 = load(types.float32, s, 128)
    inverse = load(types.float32, s, 256)
    d = qx / q2 if q2 != F(0) else F(0)
    best = d * qx
    for i in range(4, 76, 4):
        qx, q2 = load(types.float32, s, i), load(types.float32, s, 128 + i)
        if q2 > F(0) and qx * qx > best * q2:
            d, inverse = qx / q2, load(types.float32, s, 256 + i)
            best = d * qx
    return d, inverse
