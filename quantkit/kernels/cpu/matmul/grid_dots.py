"""The dot product for one token of IQ2 types, with a grid of magnitudes, and signs; used by type_dots.py.

The signs go to the activations. Magnitudes are at most 43, so products are added in pairs to i16, multiplied by the
integer scales and summed over a super-block before conversion to f32.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.jit import inline, specialize
from quantkit.kernels.cpu.core.simd import (
    cast,
    convert,
    dot2,
    f32x16,
    i8x64,
    i16x16,
    i32x16,
    load,
    maddubs,
    muladd,
    opaque,
    select,
    splat,
    u8x64,
)
from quantkit.kernels.cpu.matmul.activations import SCALES
from quantkit.kernels.cpu.matmul.stored_order import scales_0123, scales_89ab, scales_4567, scales_cdef
from quantkit.kernels.cpu.unpack import i_quants

#: Rebound for each type: magnitudes, signs, scales and d of a super-block.
fields: Any = None


@inline
def pair_products(g: Any, minus: Any, y: Any) -> Any:
    """Return sums of two products each of magnitudes and activations, these negated under a mask."""
    return maddubs(cast(u8x64, g), select(minus, -y, y))


def dot_grid(block: int, act: int, acc: Any) -> Any:
    """A super-block."""
    (g0, g1, g2, g3), signs, s, d = fields(block, 0)
    m0, m1, m2, m3 = i_quants.minus_bits(signs)
    s = opaque(convert(i16x16, (s << 1) | 1))
    x = dot2(splat(i32x16, 0), pair_products(g0, m0, load(i8x64, act, 0)), scales_0123(s))
    x = dot2(x, pair_products(g1, m1, load(i8x64, act, 64)), scales_4567(s))
    x = dot2(x, pair_products(g2, m2, load(i8x64, act, 128)), scales_89ab(s))
    x = dot2(x, pair_products(g3, m3, load(i8x64, act, 192)), scales_cdef(s))
    return muladd(convert(f32x16, x), splat(f32x16, d * load(types.float32, act, SCALES)), acc)


#: Types with one sum (type_dots.py).
GRIDS = {
    name: specialize(dot_grid, name, fields=getattr(i_quants, f"fields_{name}"))
    for name in ("iq2_xxs", "iq2_xs", "iq2_s")
}
