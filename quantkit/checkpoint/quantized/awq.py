"""AWQ, layout of AutoAWQ's GEMM kernels: qweight I32 [columns, rows / 8], qzeros I32 [groups, rows / 8], scales.

A word has the codes of eight rows (outputs), in the order 0 2 4 6 1 3 5 7 from the lowest bits on. Values are
(code - zero point) * scale of the column's group. convert_hf_to_gguf.py does not read it; facts of AutoAWQ's packing.
"""

from __future__ import annotations

from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.quantized.integers import decode_integers, groups_of
from quantkit.checkpoint.quantized.matrices import Columns, Grid, Packing, UnpackedColumns, fail
from quantkit.checkpoint.quantized.scheme import SchemeReader, matrix_shape
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor

#: Position of each of eight rows in a word.
_PACKING = Packing(4, order=(0, 4, 1, 5, 2, 6, 3, 7))


def decode(reader: SchemeReader) -> None:
    """quant_method awq."""
    version, bits = str(reader.settings.get("version", "gemm")).lower(), reader.number("bits", 4)
    if version != "gemm" or bits != 4:
        raise TypeNotSupported(
            f"{reader.config.path}: AWQ with {bits} bits in layout {short(version)}; only 4 bits in the GEMM layout "
            "are supported"
        )
    for base, codes in reader.with_suffix(".qweight"):
        reader.add(f"{base}.qweight", f"{base}.weight", _weight(reader, base, codes))


def _weight(reader: SchemeReader, base: str, codes: StoredTensor) -> Expression:
    scales, zeros = reader.tensor(f"{base}.scales", codes), reader.optional(f"{base}.qzeros")
    if len(codes.shape) != 2 or codes.dtype != "I32":
        raise fail(codes, f"{codes.dtype} {list(codes.shape)}, not words of a matrix")
    columns, words = matrix_shape(codes)
    rows = 8 * words
    if len(scales.shape) != 2 or scales.dtype not in ("F16", "BF16", "F32"):
        raise fail(scales, f"{scales.dtype} {list(scales.shape)}, not scales [groups, rows]")
    group = groups_of(scales, (rows, columns), scales.shape[::-1], reader.number("group_size", -1))
    if zeros is None and reader.settings.get("zero_point", True):
        reader.tensor(f"{base}.qzeros", codes)
    if zeros is not None and (zeros.dtype != "I32" or zeros.shape != (scales.shape[0], words)):
        raise fail(zeros, f"{zeros.dtype} {list(zeros.shape)}, but scales are {list(scales.shape)}")
    return decode_integers(
        reader,
        (rows, columns),
        UnpackedColumns(Columns(codes), _PACKING, rows),
        8 if zeros is None else 0,
        Grid(Columns(scales), 1, rows),
        group=group,
        zeros=None if zeros is None else Grid(UnpackedColumns(Columns(zeros), _PACKING, rows), 1, rows),
    )
