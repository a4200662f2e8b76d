"""MXFP4: 4-bit floats (E2M1), 32 of which share a power of two. It becomes ggml's MXFP4: bits only move.

* gpt-oss (quant_method mxfp4): NAME_blocks U8 [experts, rows, columns / 32, 16] and NAME_scales U8 [experts, rows,
  columns / 32], where NAME itself would be [experts, columns, rows].
* compressed-tensors (mxfp4-pack-quantized: Kimi) and others: weight_packed or weight U8 [rows, columns / 2], exponents
  [rows, columns / 32].

In all of them byte i has values 2 i and 2 i + 1, and codes are those of ggml.
"""

from __future__ import annotations

from quantkit.checkpoint.expressions import Transposed
from quantkit.checkpoint.quantized.blocks import Mxfp4
from quantkit.checkpoint.quantized.found import Found, matrix_shape
from quantkit.checkpoint.quantized.matrices import Rows, fail
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor

#: Dtypes of exponents.
EXPONENTS = ("U8", "F8_E8M0")


def decode(found: Found) -> None:
    """quant_method mxfp4."""
    for base, blocks in found.ending("_blocks"):
        scales = found.tensor(f"{base}_scales", blocks)
        if blocks.dtype != "U8" or len(blocks.shape) < 3 or 0 in blocks.shape or blocks.shape[-1] != 16:
            raise fail(blocks, f"{blocks.dtype} {list(blocks.shape)} are no blocks of 16 bytes")
        _check_scales(blocks, scales, blocks.shape[:-1])
        shape = (*blocks.shape[:-2], blocks.shape[-2] * 32)
        x = Mxfp4(shape, Rows(_flat(blocks, shape[-1] // 2)), Rows(scales))
        found.put(f"{base}_blocks", base, Transposed(x), "first")


def mxfp4_of(codes: StoredTensor, scales: StoredTensor) -> Mxfp4:
    """Return a weight of bytes [..., columns / 2] and their exponents. Raises FormatError."""
    stored = matrix_shape(codes)
    shape = (*stored[:-1], stored[-1] * 2)
    if codes.dtype not in ("U8", "I8") or shape[-1] % 32:
        raise fail(codes, f"{codes.dtype} {list(stored)} are not two codes a byte in groups of 32")
    _check_scales(codes, scales, (*shape[:-1], shape[-1] // 32))
    return Mxfp4(shape, Rows(codes), Rows(scales))


def _check_scales(codes: StoredTensor, scales: StoredTensor, shape: tuple[int, ...]) -> None:
    if scales.dtype not in EXPONENTS or scales.shape != shape:
        raise fail(
            scales,
            f"{scales.dtype} {list(scales.shape)}, but {short(codes.name)} {list(codes.shape)} needs exponents "
            f"{list(shape)}",
        )


def _flat(t: StoredTensor, columns: int) -> StoredTensor:
    return StoredTensor(t.name, t.dtype, (t.n_values // columns, columns), t.path, t.offset, t.nbytes)
