"""The work on whole rows between two products, in one launch: row_epilogue.cu.

    row_epilogue    batch rows width selected x weights n_used post_kind post_weight post_bias post_eps plus plus_too
                    gate by sum kind weight bias eps normed format quantized

rows: of the result. NOTHING has the slots of absent steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.matmul import activations

#: Maximum columns of a row: the capacity of a block's registers.
MAX_WIDTH = 12288

#: Slots of a row epilogue that only copies x; others override some.
NOTHING = {
    "selected": 0, "weights": 0, "n_used": 0, "post_kind": -1, "post_weight": 0, "post_bias": 0, "post_eps": 0,
    "plus": 0, "plus_too": 0, "gate": 0, "by": 1, "sum": 0, "kind": -1, "weight": 0, "bias": 0, "eps": 0, "normed": 0,
    "format": -1, "quantized": 0,
}  # fmt: skip


def row_epilogue(width: int, rows: int) -> Shape:
    """Return the kernel and grid of a row epilogue on rows of at most MAX_WIDTH columns."""
    if width > MAX_WIDTH:
        raise ValueError(f"a row epilogue supports rows of up to {MAX_WIDTH} columns, not {width}")
    units, warps = -(-width // 256), 1
    while warps < min(units, 32):
        warps *= 2
    if units > 32:
        warps = 16  # fewer would need too many registers
    kernel = Kernel("layer/row_epilogue.cu", "row_epilogue").bind(THREADS=32 * warps, UNITS=-(-units // warps))
    return Shape(kernel, (max(1, rows), 1, 1))


def format_of(kind: str) -> int:
    """Return the slot for a format of activations."""
    return activations.KINDS.index(kind)


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for width in (256, 512, 1024, 2048, 4096, 8192, 12288):
        yield row_epilogue(width, 1).kernel
