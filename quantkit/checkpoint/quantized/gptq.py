"""GPTQ: qweight I32 [columns * bits / 32, rows], qzeros I32 [groups, rows * bits / 32], scales [groups, rows], g_idx.

Values are scale * (code - zero point) with those of the column's group; stored zero points are less by one unless
checkpoint_format is gptq_v2. Words have contiguous codes, low bits first; codes of 3 bits cross words. With act order
g_idx has the group of each column in any order. Facts: dequant_gptq of convert_hf_to_gguf.py (b11434), which reads 2, 4
and 8 bits; GPTQModel's qlinear for 3.
"""

from __future__ import annotations

import numpy as np

from quantkit.checkpoint.expressions import I64, Expression
from quantkit.checkpoint.quantized.integers import decode_integers, groups_of
from quantkit.checkpoint.quantized.matrices import Columns, Grid, Packing, UnpackedColumns, UnpackedRows, fail
from quantkit.checkpoint.quantized.rows import group_index
from quantkit.checkpoint.quantized.scheme import SchemeReader, matrix_shape
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor

BITS = (2, 3, 4, 8)


def decode(reader: SchemeReader) -> None:
    """quant_method gptq."""
    form = reader.settings.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise TypeNotSupported(
            f"{reader.config.path}: GPTQ stored as {short(form)}, a kernel-specific layout; only gptq and gptq_v2 are "
            "supported"
        )
    bits = reader.number("bits")
    if bits not in BITS:
        raise FormatError(
            f"{reader.config.path}: quantization_config: GPTQ with {bits} bits; supported are {BITS}", "QK-E112"
        )
    for base, codes in reader.with_suffix(".qweight"):
        # convert_hf_to_gguf.py puts decoded tensors after all others, but not those of 3 bits.
        where = "last" if bits != 3 else "here"
        reader.add(f"{base}.qweight", f"{base}.weight", _weight(reader, base, codes, bits, form == "gptq_v2"), where)


def _weight(reader: SchemeReader, base: str, codes: StoredTensor, bits: int, v2: bool) -> Expression:
    scales = reader.tensor(f"{base}.scales", codes)
    zeros = reader.tensor(f"{base}.qzeros", codes)
    index = reader.optional(f"{base}.g_idx")
    if index is None and reader.settings.get("desc_act") is True:
        reader.tensor(f"{base}.g_idx", codes)
    if len(codes.shape) != 2 or codes.dtype != "I32":
        raise fail(codes, f"{codes.dtype} {list(codes.shape)}, not words of a matrix")
    words, rows = matrix_shape(codes)
    if index is not None and index.n_values and "dynamic" in reader.settings:  # packed on its own
        bits = next((b for b in BITS if _words(b, index.n_values) == words), bits)
    columns = words * 32 // bits if index is None else index.n_values
    if columns * bits != words * 32:
        raise fail(codes, f"{list(codes.shape)} are not {columns} columns of {bits} bits")
    packing = Packing(bits, dense=True)
    if len(scales.shape) != 2 or scales.dtype not in ("F16", "BF16", "F32"):
        raise fail(scales, f"{scales.dtype} {list(scales.shape)}, not scales [groups, rows]")
    group = groups_of(scales, (rows, columns), scales.shape[::-1], reader.number("group_size", -1))
    groups = scales.shape[0]
    if zeros.dtype != "I32" or zeros.shape != (groups, _words(bits, rows)):
        raise fail(zeros, f"{zeros.dtype} {list(zeros.shape)}, but scales are {list(scales.shape)} with {bits} bits")
    if index is not None and (group_index(index, columns, groups) == _in_order(columns, group)).all():
        index = None
    offset = 0 if v2 else 1
    points, middle = Grid(UnpackedColumns(Columns(zeros), packing, rows), 1, rows), 1 << (bits - 1)
    could = index is None and bits in (4, 8)
    symmetric = could and reader.lossless and _only_value(points) == middle - offset
    if could and not reader.lossless and reader.settings.get("sym") is True and columns % 32 == 0:
        reader.lossless_count += 1
    return decode_integers(
        reader,
        (rows, columns),
        UnpackedRows(Columns(codes), packing, columns),
        middle if symmetric else offset,
        Grid(Columns(scales), 1, rows),
        group=group,
        zeros=None if symmetric else points,
        index=index,
        bits=bits,
        raw=Columns(codes),
    )


def _words(bits: int, n: int) -> int:
    return -(-n * bits // 32)


def _in_order(columns: int, group: int) -> I64:
    return np.arange(columns) // group


def _only_value(grid: Grid) -> int | None:
    """Return the common value of all cells of a grid, None if they differ."""
    rows = grid.cells.shape[0]
    first = int(grid.cells.rows(0, 1)[0, 0])
    step = max(1, (1 << 18) // max(1, grid.cells.shape[1]))
    is_constant = all(
        (grid.cells.rows(start, min(step, rows - start)) == first).all() for start in range(0, rows, step)
    )
    return first if is_constant else None
