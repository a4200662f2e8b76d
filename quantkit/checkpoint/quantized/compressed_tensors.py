"""compressed-tensors: integers packed into words, plain ones, 8-bit floats, MXFP4 and NVFP4, also in one model.

pack-quantized: weight_packed I32 [rows, words] holds code + 2^(bits - 1), low bits first, as many as fit in a word (or
contiguous across words); weight_scale [rows, groups]; weight_shape; weight_zero_point, packed down the rows;
weight_g_idx, the group of each column. Its shapes determine which bits and groups of config_groups a weight has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.quantized.fp4 import EXPONENTS, add_nvfp4, is_nvfp4, mxfp4_of
from quantkit.checkpoint.quantized.fp8 import ACTIVATIONS, read_block_size, scale_weight
from quantkit.checkpoint.quantized.integers import decode_integers
from quantkit.checkpoint.quantized.matrices import (
    Grid,
    Packing,
    Rows,
    UnpackedColumns,
    UnpackedRows,
    fail,
    read_all,
)
from quantkit.checkpoint.quantized.rows import group_index
from quantkit.checkpoint.quantized.scheme import SchemeReader, block_grid, matrix_shape
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor

#: Orders of columns (actorder) for which the group of each is stored; the others keep columns in order.
_INDEXED = (True, "group", "dynamic")
#: The settings of weights in config_groups: "weights" of each group.
Arguments = dict[str, Any]


def decode(reader: SchemeReader) -> None:
    """quant_method compressed-tensors."""
    groups = _groups(reader)
    for base, codes in reader.with_suffix(".weight_packed"):
        stored_name = f"{base}.weight_packed"
        scale = reader.tensor(f"{base}.weight_scale", codes)
        if codes.dtype == "I32":
            reader.add(stored_name, f"{base}.weight", _decode_packed(reader, base, codes, scale, groups), "last")
        elif is_nvfp4(codes, scale):
            add_nvfp4(reader, stored_name, base, codes, scale)
        elif codes.dtype == "U8" and scale.dtype in EXPONENTS:
            reader.add(stored_name, f"{base}.weight", mxfp4_of(codes, scale), "first")
        else:
            raise fail(codes, f"{codes.dtype} with {short(scale.name)} {scale.dtype}: not a supported scheme")
    blocks = [read_block_size(reader, group.get("block_structure")) for group in groups]
    for base, scale in reader.with_suffix(".weight_scale"):
        name = f"{base}.weight"
        reader.optional(f"{base}.weight_scale")
        weight = reader.peek(name)
        if weight is None:
            raise fail(scale, f"{short(name)}, which it scales, is missing")
        zero = reader.optional(f"{base}.weight_zero_point")
        if zero is None and weight.dtype == "I8" and all(group.get("symmetric") is False for group in groups):
            reader.tensor(f"{base}.weight_zero_point", weight)
        reader.add(name, name, _plain(reader, weight, scale, blocks, zero))
    reader.drop(*ACTIVATIONS, ".input_global_scale")


def _groups(reader: SchemeReader) -> list[Arguments]:
    """Return the arguments of the weights of each group."""
    where = f"{reader.config.path}: quantization_config"
    groups = reader.settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise FormatError(
            f"{where}: config_groups is {short(groups)}, so the format of the weights is unknown", "QK-E112"
        )
    sparsity = reader.settings.get("sparsity_config") or {"format": "dense"}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise FormatError(f"{where}: sparse weights are not supported", "QK-E112")
    weights = []
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("weights") or {}, dict):
            raise FormatError(f"{where}: the group {short(name)} is {short(group)}", "QK-E112")
        weights.append(group.get("weights") or {})
    return weights


def _plain(
    reader: SchemeReader,
    weight: StoredTensor,
    scale: StoredTensor,
    blocks: list[tuple[int, int] | None],
    zero: StoredTensor | None,
) -> Expression:
    """Return a weight of 8-bit floats or integers, one in each element."""
    shape = matrix_shape(weight)
    rows, columns = shape[-2:]
    tiled = [b for b in blocks if b is not None and scale.shape[-2:] == (-(-rows // b[0]), -(-columns // b[1]))]
    if weight.dtype == "I8" and scale.shape == (rows, scale.shape[-1]) and len(shape) == 2:
        grids = [_grid_of(t, weight, scale.shape) for t in (scale, zero) if t is not None]
        if columns % scale.shape[-1] == 0 and not tiled:
            zeros = grids[1] if zero is not None else None
            group = columns // scale.shape[-1]
            return decode_integers(reader, shape, Rows(weight), 0, grids[0], group=group, zeros=zeros, bits=8)
    common_block = blocks[0] if None not in blocks else None
    return scale_weight(weight, scale, tiled[0] if tiled else common_block, zero)


def _grid_of(t: StoredTensor, weight: StoredTensor, shape: tuple[int, ...]) -> Grid:
    if t.shape != shape:
        raise fail(t, f"{list(t.shape)}, but {short(weight.name)} has scales {list(shape)}")
    return Grid(Rows(t), 1, shape[0])


def _decode_packed(
    reader: SchemeReader, base: str, codes: StoredTensor, scale: StoredTensor, groups: list[Arguments]
) -> Expression:
    """Return a weight of packed integers."""
    matrix_shape(codes)
    shape_tensor = reader.tensor(f"{base}.weight_shape", codes)
    shape = tuple(int(n) for n in read_all(shape_tensor)) if shape_tensor.dtype in ("I64", "I32") else ()
    if len(shape) < 2 or min(shape) < 1 or len(shape) != len(codes.shape) or shape[:-1] != codes.shape[:-1]:
        raise fail(
            shape_tensor,
            f"its value is {list(shape)[:4]}, which does not match {short(codes.name)} {list(codes.shape)}",
        )
    if shape[-1] > 32 * codes.shape[-1]:
        raise fail(
            shape_tensor, f"its value is {list(shape)}, more than {short(codes.name)} {list(codes.shape)} contains"
        )
    columns, index = shape[-1], reader.optional(f"{base}.weight_g_idx")
    for bits, group, arguments in _candidates(reader, groups, columns):
        packing = _packing_of(bits, columns, codes.shape[-1])
        cells = -(-columns // group)
        n_scales = cells * codes.n_values // codes.shape[-1]
        if packing is None or scale.n_values not in ((1, n_scales) if cells == 1 else (n_scales,)):
            continue
        zero = reader.optional(f"{base}.weight_zero_point")
        if zero is None and arguments.get("symmetric") is False:
            reader.tensor(f"{base}.weight_zero_point", codes)
        if index is None and arguments.get("actorder") in _INDEXED:
            reader.tensor(f"{base}.weight_g_idx", codes)
        if scale.n_values == 1:
            scales = block_grid(codes, shape, scale, None)
        elif scale.shape == (*shape[:-1], cells) or (cells == 1 and scale.shape == shape[:-1]):
            scales = Grid(Rows(_as_cells(scale, cells)), 1, shape[-2])
        else:
            continue
        if index is not None and group_index(index, columns, cells).tolist() == [i // group for i in range(columns)]:
            index = None
        zeros = None if zero is None else _zeros(zero, shape, cells, packing)
        offset = 1 << (bits - 1)
        if zeros is not None and zeros.tensor.dtype == "I32":
            offset = 0  # zero points have such a shape tensor, too
        return decode_integers(
            reader,
            shape,
            UnpackedRows(Rows(codes), packing, columns),
            offset,
            scales,
            group=columns if scale.n_values == 1 else group,
            zeros=zeros,
            index=index,
            bits=bits,
            raw=Rows(codes),
        )
    raise fail(
        scale,
        f"{short(codes.name)} {list(codes.shape)} for {list(shape)} with scales {list(scale.shape)} matches no group "
        "of config_groups",
    )


def _as_cells(scale: StoredTensor, cells: int) -> StoredTensor:
    shape = (scale.n_values // cells, cells)
    return StoredTensor(scale.name, scale.dtype, shape, scale.path, scale.offset, scale.nbytes)


def _candidates(reader: SchemeReader, groups: list[Arguments], columns: int) -> Iterator[tuple[int, int, Arguments]]:
    """Yield bits and columns of a scale, of each group of integers."""
    for arguments in groups:
        if arguments.get("type", "int") != "int":
            continue
        bits = reader.number("num_bits", table=arguments)
        if not 1 <= bits <= 8:
            raise FormatError(f"{reader.config.path}: quantization_config: integers of {bits} bits", "QK-E112")
        size = arguments.get("group_size")
        size = columns if size is None else reader.number("group_size", table=arguments)
        yield bits, size if 0 < size < columns else columns, arguments


def _packing_of(bits: int, columns: int, words: int) -> Packing | None:
    """Return the packing of columns into words, None if their numbers do not match."""
    return next((p for p in (Packing(bits), Packing(bits, dense=True)) if p.words_of(columns) == words), None)


def _zeros(t: StoredTensor, shape: tuple[int, ...], cells: int, packing: Packing) -> Grid:
    """Return zero points: packed down the rows, or one in each element."""
    rows = shape[0]
    if t.dtype == "I8" and t.shape == (rows, cells):
        return Grid(Rows(t), 1, rows)
    if t.dtype != "I32" or len(shape) != 2 or t.shape != (packing.words_of(rows), cells):
        raise fail(t, f"zero points {t.dtype} {list(t.shape)} do not match a weight {list(shape)} with {cells} groups")
    return Grid(UnpackedColumns(Rows(t), packing, rows), 1, rows)
