"""Tiles of rows on a device (tiles.cuh), and sweeps over their columns: sweeps.cu, in order; refine.cu, scales jointly.

    error_feedback         chooses all levels with error feedback; sets levels, v, e and loss
    residuals    before best    sets e, and the loss of v, f64 [rows], in both
    refine       passes repeats fits neighbour_scales    optimizes levels and scales of windows of columns

Besides, all take the arguments of all tiles (sweeps.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback import Rounding
from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.levels import Levels, all_levels

F32 = npt.NDArray[np.float32]
#: Rows of a tile; columns that a block of threads multiplies at once, and those of them that a warp does.
ROWS, WIDE = 32, 64
_FILE = "feedback/sweeps.cu"
#: Levels of a codebook whose distances differ.
_MOST = 64


def tiles(rows: int) -> int:
    """Return the number of tiles for a number of rows."""
    return -(-rows // ROWS)


def is_even(levels: F32) -> bool:
    """Return whether levels are equally far from each other."""
    return len(set(np.diff(np.unique(levels)).tolist())) == 1


def codebook(levels: F32) -> F32:
    """Return levels as sweeps.cuh reads them (Codebook), as 32-bit words."""
    ascending = np.unique(levels).astype(np.float32)
    out = np.zeros(8 + 2 * _MOST, np.float32)
    if is_even(levels):
        step = ascending[1] - ascending[0]
        out[:4] = ascending[0], step, np.float32(1) / step, len(ascending) - 1
        return out
    out[0] = ascending[0]
    out[4:5].view(np.int32)[:] = 1 << (len(ascending) - 1).bit_length() >> 1
    ends, values = out[8 : 8 + _MOST], out[8 + _MOST :]
    ends[:] = np.inf
    ends[: len(ascending) - 1] = (ascending[1:] + ascending[:-1]) / 2
    values[: len(ascending)] = ascending
    return out


def error_feedback(rows: int, even: bool) -> Shape:
    """Return the kernel and grid that choose the levels of rows."""
    return Shape(Kernel(_FILE, "error_feedback").bind(EVEN=int(even)), (tiles(rows), 1, 1))


def residuals(rows: int, even: bool) -> Shape:
    """Return the kernel and grid that compute the loss of rows."""
    return Shape(Kernel(_FILE, "residuals").bind(EVEN=int(even)), (tiles(rows), 1, 1))


def _width(layout: Levels, rounding: Rounding) -> int:
    return max(rounding.width, layout.span)


def scratch_lines(layout: Levels, rounding: Rounding) -> int:
    """Return the lines of a tile's scratch: LINES of refine.cu."""
    width, span = _width(layout, rounding), layout.span
    small = width <= WIDE and span <= 32
    return width + 2 * span + (0 if small else width + 4 * span)


def refine(rows: int, layout: Levels, rounding: Rounding) -> Shape:
    """Return the kernel and grid that refine rows."""
    kernel = Kernel("feedback/refine.cu", "refine")
    bound = kernel.bind(EVEN=int(is_even(layout.codebook)), SPAN=layout.span, WIDTH=_width(layout, rounding))
    return Shape(bound, (tiles(rows), 1, 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of both files."""
    layouts = [layout for layout in all_levels().values() if layout.grid is None]
    for even in sorted({is_even(layout.codebook) for layout in layouts}):
        yield error_feedback(1, even).kernel
        yield residuals(1, even).kernel
    yield from dict.fromkeys(refine(1, layout, Rounding()).kernel for layout in layouts)
