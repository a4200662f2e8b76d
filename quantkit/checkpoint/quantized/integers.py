"""Integer weights with scales and zero points of groups (compressed-tensors, GPTQ, AWQ), and BitNet's ternary ones.

BitNet: weights -1, 0, 1 in two bits, U8 [rows / 4, columns] with a quarter of the rows at each place of a byte.
weight_scale is one number, and divides: value = float32(code - 1) / float32(scale).
"""

from __future__ import annotations

from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.quantized.blocks import as_blocks
from quantkit.checkpoint.quantized.matrices import Grid, Matrix, Ternary, fail
from quantkit.checkpoint.quantized.rows import Integers, Scaled, Step
from quantkit.checkpoint.quantized.scheme import SchemeReader, block_grid, matrix_shape
from quantkit.formats.safetensors import StoredTensor


def decode_integers(
    reader: SchemeReader,
    shape: tuple[int, ...],
    codes: Matrix,
    offset: int,
    scales: Grid,
    *,
    group: int,
    zeros: Grid | None = None,
    index: StoredTensor | None = None,
    bits: int = 0,
    raw: Matrix | None = None,
) -> Expression:
    """Return a weight of integers: (code - offset - zero point) * scale, as blocks if that is requested and exact.

    Args:
        reader: whose settings request it or not.
        shape: of the weight.
        codes: by rows, one in each element.
        offset: the code of zero, if there are no ``zeros``.
        scales: by rows.
        group: columns of a scale.
        zeros: by rows, added to the offset.
        index: the group of each column, if columns are not in order (g_idx).
        bits: of a code.
        raw: the packed codes, by rows.
    """
    width = group if index is None else 0
    steps = [Step("multiply", scales, width, index)]
    if zeros is not None:
        steps.insert(0, Step("subtract", zeros, width, index))
    x = Scaled(shape, Integers(codes, offset), tuple(steps))
    can_be_blocks = len(shape) == 2 and zeros is None and index is None and bits in (4, 8)
    if not can_be_blocks or shape[-1] % 32 or (group % 32 and scales.cells.shape[1] > 1):
        return x
    reader.lossless_count += 1
    blocks = as_blocks(x, bits, raw if raw is not None else codes, offset, scales, group) if reader.lossless else None
    return x if blocks is None else blocks


def groups_of(scale: StoredTensor, shape: tuple[int, int], have: tuple[int, ...], group: int) -> int:
    """Return the columns that share a scale, for scales of shape ``have``, [rows or 1, groups]. Raises FormatError.

    ``group``: from the configuration; 0 or less: a row.
    """
    rows, columns = shape
    group = group if 0 < group < columns else columns
    if have != (rows, -(-columns // group)):
        raise fail(scale, f"scales {list(scale.shape)} do not match a weight {list(shape)} in groups of {group}")
    return group


def decode_bitnet(reader: SchemeReader) -> None:
    """quant_method bitnet."""
    for base, scale in reader.with_suffix(".weight_scale"):
        name = f"{base}.weight"
        weight = reader.tensor(name, scale)
        reader.optional(f"{base}.weight_scale")
        rows, columns = matrix_shape(weight)[-2:]
        if weight.dtype not in ("U8", "I8") or len(weight.shape) != 2:
            raise fail(weight, f"{weight.dtype} {list(weight.shape)}, not bytes of a matrix")
        shape = (4 * rows, columns)
        if scale.n_values != 1:
            raise fail(scale, f"{list(scale.shape)}, not a single scale")
        grid = block_grid(weight, shape, scale, None)
        reader.add(name, name, Scaled(shape, Integers(Ternary(weight), 1), (Step("divide", grid, columns),)))
