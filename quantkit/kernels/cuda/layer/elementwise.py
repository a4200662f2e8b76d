"""Kernels on single elements, or rows: elementwise.cu.

    select_outputs    batch x out width rows            rows: of the outputs; width: all columns of a token
    lookup            batch table out width rows        table: int32 [n_vocab, width]
    add               a b out width rows
    scale shift clamp softcap    x out width rows by
    xielu             x out width rows alpha_n alpha_p beta eps
    scale_by_position batch x out width rows rows_of per floor_scale alpha offset
    multiply_by plus_vector    x vector out n width rows
    take              x out width x_width start period rows
    join              a b out a_width b_width period_a period_b rows

rows: all rows of a value, those of experts counted one by one. Except for those that move (select_outputs, take,
join), out may be x or a. Values begin at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape

FILE = "layer/elementwise.cu"

#: Elements of a block of threads (each.cuh).
PART = 1024


def over_all(kernel: Kernel, width: int, rows: int) -> Shape:
    """Return the grid of a kernel over all elements in order."""
    return Shape(kernel, (max(1, -(-width * rows // PART)), 1, 1))


def over_rows(kernel: Kernel, width: int, rows: int) -> Shape:
    """Return the grid of a kernel whose blocks are (row, part of the columns)."""
    return Shape(kernel, (max(1, rows), -(-width // PART), 1))


def _over(launch: Callable[[Kernel, int, int], Shape], name: str) -> Callable[[int, int], Shape]:
    def shape(width: int, rows: int) -> Shape:
        return launch(Kernel(FILE, name), width, rows)

    shape.__name__, shape.__doc__ = name, f"Return how to launch ``{name}``; width: columns of out."
    return shape


add = _over(over_all, "add")
scale = _over(over_all, "scale")
shift = _over(over_all, "shift")
clamp = _over(over_all, "clamp")
softcap = _over(over_all, "softcap")
xielu = _over(over_all, "xielu")
scale_by_position = _over(over_rows, "scale_by_position")
multiply_by = _over(over_rows, "multiply_by")
plus_vector = _over(over_rows, "plus_vector")
take = _over(over_rows, "take")
join = _over(over_rows, "join")
select_outputs = _over(over_rows, "select_outputs")


def lookup(width: int, rows: int) -> Shape:
    """Return the kernel and grid of ``lookup``."""
    return Shape(Kernel(FILE, "lookup"), (max(1, -(-rows * width // 256)), 1, 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    of_elements = (add, scale, shift, clamp, softcap, xielu)
    for shape in (*of_elements, scale_by_position, multiply_by, plus_vector, take, join, select_outputs, lookup):
        yield shape(1, 1).kernel
