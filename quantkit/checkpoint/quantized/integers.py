"""Integer weights with scales and zero points of groups: what compressed-tensors, GPTQ and AWQ have in common."""

from __future__ import annotations

from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.quantized.blocks import as_blocks
from quantkit.checkpoint.quantized.found import Found
from quantkit.checkpoint.quantized.matrices import Grid, Matrix, fail
from quantkit.checkpoint.quantized.rows import Integers, Scaled, Step
from quantkit.formats.safetensors import StoredTensor


def integers(
    found: Found,
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
    """Return a weight of integers: (code - offset - zero point) * scale, as blocks where that is asked for and exact.

    Args:
        found: says whether it is.
        shape: of the weight.
        codes: by rows, one in each element.
        offset: what stands for zero, where there are no ``zeros``.
        scales: by rows.
        group: columns of a scale.
        zeros: by rows; the offset counts, too.
        index: the group of each column, where columns are not in order (g_idx).
        bits: of a code.
        raw: the codes as they are packed, by rows.
    """
    width = group if index is None else 0
    steps = [Step("multiply", scales, width, index)]
    if zeros is not None:
        steps.insert(0, Step("subtract", zeros, width, index))
    x = Scaled(shape, Integers(codes, offset), tuple(steps))
    one = len(shape) == 2 and zeros is None and index is None and bits in (4, 8)
    if not one or shape[-1] % 32 or (group % 32 and scales.cells.shape[1] > 1):
        return x
    found.could += 1
    blocks = as_blocks(x, bits, raw if raw is not None else codes, offset, scales, group) if found.lossless else None
    return x if blocks is None else blocks


def groups_of(scale: StoredTensor, shape: tuple[int, int], have: tuple[int, ...], group: int) -> int:
    """Return how many columns share a scale, of scales ``have``, [rows or 1, groups]. Raises FormatError.

    ``group`` is what the configuration says; 0 or less: a row.
    """
    rows, columns = shape
    group = group if 0 < group < columns else columns
    if have != (rows, -(-columns // group)):
        raise fail(scale, f"scales {list(scale.shape)} do not fit a weight {list(shape)} in groups of {group}")
    return group
