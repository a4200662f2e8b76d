"""AWQ, layout of AutoAWQ's GEMM kernels: qweight I32 [columns, rows / 8], qzeros I32 [groups, rows / 8], scales.

A word has the codes of eight rows (outputs), in the order 0 2 4 6 1 3 5 7 from the lowest bits on. Values are
(code - zero point) * scale of the column's group. convert_hf_to_gguf.py does not read it; facts of AutoAWQ's packing.
"""

from __future__ import annotations

from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.quantized.found import Found, matrix_shape
from quantkit.checkpoint.quantized.integers import groups_of, integers
from quantkit.checkpoint.quantized.matrices import Columns, Grid, Packing, UnpackedDown, fail
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor

#: Where each of eight rows is in a word.
_PACKING = Packing(4, order=(0, 4, 1, 5, 2, 6, 3, 7))


def decode(found: Found) -> None:
    """quant_method awq."""
    version, bits = str(found.given.get("version", "gemm")).lower(), found.number("bits", 4)
    if version != "gemm" or bits != 4:
        raise TypeNotSupported(
            f"{found.config.path}: AWQ of {bits} bits in the layout {short(version)}; 4 bits in that of GEMM are read"
        )
    for base, codes in found.ending(".qweight"):
        found.put(f"{base}.qweight", f"{base}.weight", _weight(found, base, codes))


def _weight(found: Found, base: str, codes: StoredTensor) -> Expression:
    scales, zeros = found.tensor(f"{base}.scales", codes), found.optional(f"{base}.qzeros")
    if len(codes.shape) != 2 or codes.dtype != "I32":
        raise fail(codes, f"{codes.dtype} {list(codes.shape)}, not words of a matrix")
    columns, words = matrix_shape(codes)
    rows = 8 * words
    if len(scales.shape) != 2 or scales.dtype not in ("F16", "BF16", "F32"):
        raise fail(scales, f"{scales.dtype} {list(scales.shape)}, not scales [groups, rows]")
    group = groups_of(scales, (rows, columns), scales.shape[::-1], found.number("group_size", -1))
    if zeros is None and found.given.get("zero_point", True):
        found.tensor(f"{base}.qzeros", codes)
    if zeros is not None and (zeros.dtype != "I32" or zeros.shape != (scales.shape[0], words)):
        raise fail(zeros, f"{zeros.dtype} {list(zeros.shape)}, but scales are {list(scales.shape)}")
    return integers(
        found,
        (rows, columns),
        UnpackedDown(Columns(codes), _PACKING, rows),
        8 if zeros is None else 0,
        Grid(Columns(scales), 1, rows),
        group=group,
        zeros=None if zeros is None else Grid(UnpackedDown(Columns(zeros), _PACKING, rows), 1, rows),
    )
