"""Whether blocks decode to the numbers of their source: exactly, or to numbers that its type rounds to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.core.jit import helper, kernel
from quantkit.kernels.cpu.core.simd import any_lane, cast, f32x16, hmax, hmin, i32x16, load, splat, vmax, vmin
from quantkit.kernels.cpu.encode.lattice import are_representable, far_from
from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows
from quantkit.types import TensorType

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

#: How exact a block is: also in the signs of its zeros, which are those of scales.
EXACT, SAME_SIGNS = 1, 2


@helper
def _exactness(x: Any, y: Any, begin: Any, y_begin: Any, block: Any, bits: Any) -> Any:
    """Return the exactness of y from ``y_begin`` on for x from ``begin`` on: 0, EXACT or SAME_SIGNS."""
    result = SAME_SIGNS
    for i in range(0, block, 16):
        a, b = load(f32x16, x, 4 * (begin + i)), load(f32x16, y, 4 * (y_begin + i))
        differs = cast(i32x16, a) != cast(i32x16, b)
        if not any_lane(differs):
            continue
        if any_lane((a != b) & far_from(a, b, bits)):
            return 0
        if any_lane(differs & (a == b)):
            result = EXACT
    return result


@kernel
def mark_exact(x: Any, y: Any, indices: Any, block: int, precisions: Any, exact: Any) -> None:
    """Store how exact the blocks of y are, rounded to the source's type, or to a narrower one that holds all values.

    x: float32 [n]. y: float32, the decoded values of the blocks ``indices``, int64, of x, one after another.
    """
    for b in range(indices.size):
        exact[b] = 0
        for p in range(precisions.size):
            if p > 0 and not are_representable(x, indices[b] * block, block, precisions[p]):
                break
            exact[b] = _exactness(x, y, indices[b] * block, b * block, block, precisions[p])
            if exact[b]:
                break


@kernel
def mark_ambiguous_signs(x: Any, block: int, span: int, ambiguous: Any) -> None:
    """Store whether a sub-block of each block of x allows both signs of its scale.

    Encoders give the value of largest magnitude a level of the longer side. Where two of opposite signs are the
    largest, numbers do not tell which; a zero has the sign of the scale, if level 0 made it.
    """
    for b in range(ambiguous.size):
        ambiguous[b] = False
        for j in range(b * block, (b + 1) * block, span):
            low, high = splat(f32x16, np.float32(np.inf)), splat(f32x16, np.float32(-np.inf))
            has_zero = False
            for i in range(j, j + span, 16):
                value = load(f32x16, x, 4 * i)
                low, high = vmin(value, low), vmax(value, high)
                has_zero |= any_lane(value == np.float32(0))
            if not has_zero and hmax(high) == -hmin(low):
                ambiguous[b] = True
                break


def exactness(t: TensorType, precisions: Ints, x: F32, indices: Ints, blocks: U8) -> U8:
    """Return the exactness with which blocks of type ``t`` decode to blocks of x: 0, EXACT or SAME_SIGNS.

    x: float32 [n]. indices: int64 [blocks], the numbers of the blocks. blocks: uint8 [blocks, block bytes].
    """
    y = np.empty((1, len(blocks) * t.block), np.float32)
    dequantize_rows(t, blocks.reshape(1, -1), y)
    exact = np.empty(len(blocks), np.uint8)
    mark_exact(x, y.reshape(-1), indices, t.block, precisions, exact)
    return exact
