"""The sweep over tiles that optimizes levels and scales jointly: refine.cu.

    refine    passes repeats fits neighbour_scales

Besides, it takes the arguments of all tiles (sweeps.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cpu.feedback.options import Rounding
from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.feedback.sweeps import WIDE, is_even, tiles
from quantkit.kernels.levels import Levels, all_levels


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
    """Yield every kernel of this file."""
    required = [refine(1, layout, Rounding()).kernel for layout in all_levels().values() if layout.grid is None]
    yield from dict.fromkeys(required)
