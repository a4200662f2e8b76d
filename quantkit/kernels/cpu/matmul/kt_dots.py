"""Specialized dot products for one token, of ik_llama.cpp's trellis types with indices of 8; entered in type_dots.py.

A level is the sum of the four bytes of a generator's state, less 126. So a state times an activation repeated four
times is, summed, the product itself: levels are never put together. A lane holds the states of one index; the
activations of its values come from BY_EIGHTS (activations.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    cast,
    convert,
    dot4,
    i8x64,
    i32x16,
    load,
    make_constant,
    make_shuffle,
    splat,
    u8x64,
    u16x16,
    u32x16,
)
from quantkit.kernels.cpu.matmul.activations import BY_EIGHTS
from quantkit.kernels.cpu.matmul.stored_order import add_block_sums
from quantkit.kernels.cpu.unpack import trellis

#: FACTOR to the power of 1 to 8, in all lanes.
power_1, power_2, power_3, power_4, power_5, power_6, power_7, power_8 = (
    make_constant(u32x16, [pow(trellis.FACTOR, k, 2**32)] * 16, f"kt_dots.power_{k}") for k in range(1, 9)
)
#: Bytes 0 to 15, 16 to 31 ... four times each.
row_0, row_1, row_2, row_3 = (make_shuffle([16 * k + i // 4 for i in range(64)], f"kt_dots.row_{k}") for k in range(4))


@inline
def add_states(acc: Any, x: Any, y: Any) -> Any:
    """Add (level + 126) * activation, for states x and bytes y, each four times."""
    return dot4(acc, cast(u8x64, x & trellis.MASK), y)


@inline
def products_of_eights(q: Any, act: int) -> Any:
    """Return 16 sums of 8 products: indices q of u32, activations in rows of 16."""
    a = load(i8x64, act, 0)
    b = load(i8x64, act, 64)
    x = q + trellis.FIRST
    s, t = splat(i32x16, 0), splat(i32x16, 0)
    s, t = add_states(s, x * power_1(), row_0(a)), add_states(t, x * power_2(), row_1(a))
    s, t = add_states(s, x * power_3(), row_2(a)), add_states(t, x * power_4(), row_3(a))
    s, t = add_states(s, x * power_5(), row_0(b)), add_states(t, x * power_6(), row_1(b))
    s, t = add_states(s, x * power_7(), row_2(b)), add_states(t, x * power_8(), row_3(b))
    return s + t


@inline
def add_eights(act: int, acc: Any, q0: Any, q1: Any, scales: Any) -> Any:
    """Add the products of 256 values."""
    x, y = products_of_eights(q0, act + BY_EIGHTS), products_of_eights(q1, act + BY_EIGHTS + 128)
    return add_block_sums(act, acc, x, y, scales, scales * np.float32(126))


@inline
def dot_iq1_kt(block: int, act: int, acc: Any) -> Any:
    """A super-block of IQ1_KT; the row's scale is applied last (dots.py)."""
    q0, q1 = trellis.iq1_kt_indices(block, 0)
    return add_eights(act, acc, q0, q1, trellis.iq1_kt_scales(block, 0))


@inline
def dot_iq2_kt(block: int, act: int, acc: Any) -> Any:
    """A super-block of IQ2_KT."""
    q0, q1 = convert(u32x16, load(u16x16, block, 4)), convert(u32x16, load(u16x16, block, 36))
    return add_eights(act, acc, q0, q1, trellis.iq2_kt_scales(block, 0))


TRELLIS = {"iq1_kt": dot_iq1_kt, "iq2_kt": dot_iq2_kt}
