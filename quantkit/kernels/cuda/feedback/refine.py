"""The sweep over tiles that chooses levels and scales together: refine.cu.

    refine    passes repeats fits beside

Besides, it takes the arguments of all tiles (sweeps.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cpu.feedback.options import Rounding
from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.feedback.sweeps import is_even
from quantkit.kernels.cuda.feedback.tiles import WIDE, tiles
from quantkit.kernels.levels import Levels, all_levels


def _width(of: Levels, how: Rounding) -> int:
    return max(how.width, of.span)


def scratch_lines(of: Levels, how: Rounding) -> int:
    """Return the lines of a tile's scratch: LINES of refine.cu."""
    width, span = _width(of, how), of.span
    small = width <= WIDE and span <= 32
    return width + 2 * span + (0 if small else width + 4 * span)


def refine(rows: int, of: Levels, how: Rounding) -> Shape:
    """Return how to refine rows."""
    kernel = Kernel("feedback/refine.cu", "refine")
    bound = kernel.bind(EVEN=int(is_even(of.codebook)), SPAN=of.span, WIDTH=_width(of, how))
    return Shape(bound, (tiles(rows), 1, 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    found = [refine(1, of, Rounding()).kernel for of in all_levels().values() if of.grid is None]
    yield from dict.fromkeys(found)
