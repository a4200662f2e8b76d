"""BitNet: weights -1, 0, 1 in two bits, U8 [rows / 4, columns] with a quarter of the rows at each place of a byte.

weight_scale is one number, and divides: value = float32(code - 1) / float32(scale).
"""

from __future__ import annotations

from quantkit.checkpoint.quantized.found import Found, block_grid, matrix_shape
from quantkit.checkpoint.quantized.matrices import Ternary, fail
from quantkit.checkpoint.quantized.rows import Integers, Scaled, Step


def decode(found: Found) -> None:
    """quant_method bitnet."""
    for base, scale in found.ending(".weight_scale"):
        name = f"{base}.weight"
        weight = found.tensor(name, scale)
        found.optional(f"{base}.weight_scale")
        rows, columns = matrix_shape(weight)[-2:]
        if weight.dtype not in ("U8", "I8") or len(weight.shape) != 2:
            raise fail(weight, f"{weight.dtype} {list(weight.shape)}, not bytes of a matrix")
        shape = (4 * rows, columns)
        if scale.n_values != 1:
            raise fail(scale, f"{list(scale.shape)}, where one scale is due")
        grid = block_grid(weight, shape, scale, None)
        found.put(name, name, Scaled(shape, Integers(Ternary(weight), 1), (Step("divide", grid, columns),)))
