"""Products computed by ik_llama.cpp's libggml.so, through ctypes.

The wheel ik-llama-cpp-python is built for AVX2. Products are ``iqk_mul_mat`` of ggml/src/iqk/iqk_mul_mat.cpp:
activations are converted to the format ``activations_of(t)`` (``vec_dot_type``); for about 32 and more rows of
activations, weights of most types are first rounded again, to 8 bits with one scale for 256 or 32 values (``repacked``,
is_dequant_better).
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, c_bool, c_char_p, c_int, c_int64, c_long, c_size_t, c_void_p
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.types import TYPES, TensorType

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

BY_ID = {t.id: t for t in TYPES}
FROM_FLOAT = CFUNCTYPE(None, c_void_p, c_void_p, c_int64)


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class Traits(ctypes.Structure):
    """ggml_type_traits_t of ik_llama.cpp."""

    _fields_ = (
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", c_void_p),
        ("from_float", c_void_p),
        ("from_float_ref", c_void_p),
        ("from_float_to_mat", c_void_p),
        ("vec_dot", c_void_p),
        ("vec_dot_type", c_int),
        ("nrows", c_int64),
        ("ncols", c_int64),
        ("gemv", c_void_p),
        ("gemm", c_void_p),
        ("row_meta_size", c_int64),
    )


#: Bytes of a block of activations, values in it; fields: kind and offset of d, offset of the levels.
LAYOUTS = {
    "Q8_2_X4": ("<u2", 0, 4, 16, 128),
    "Q8_K": ("<f4", 0, 1, 8, 256),
    "Q8_K32": ("<f4", 0, 1, 8, 256),
    "Q8_KR8": ("<f4", 0, 1, 8, 256),
    "Q8_K128": ("<f4", 0, 1, 12, 128),
}


class IkGgml:
    """libggml.so in the folder ``lib``."""

    def __init__(self, lib: Path) -> None:
        self.c = ctypes.CDLL(str(lib / "libggml.so"))
        self.c.ggml_init.argtypes, self.c.ggml_init.restype = [InitParams], c_void_p
        assert self.c.ggml_init(InitParams(1 << 20, None, False))  # initializes the table of f16 conversions
        self.c.ggml_internal_get_type_traits.restype = Traits
        self.c.ggml_row_size.argtypes, self.c.ggml_row_size.restype = [c_int, c_int64], c_size_t
        product = self.c.iqk_mul_mat
        product.argtypes = [*[c_long] * 3, *[c_int, c_void_p, c_long] * 2, c_void_p, c_long, c_int, c_int]
        product.restype = c_bool
        self.c.iqk_dequant_type.argtypes, self.c.iqk_dequant_type.restype = [c_int, c_int], c_int

    @property
    def has_vnni(self) -> bool:
        """Return whether it is built for AVX-512 with VNNI."""
        return bool(self.c.ggml_cpu_has_avx512_vnni())

    def activations_of(self, t: TensorType) -> TensorType:
        """Return the format of activations that weights of type ``t`` multiply."""
        return BY_ID[self.c.ggml_internal_get_type_traits(t.id).vec_dot_type]

    def repacked(self, t: TensorType, rows: int) -> TensorType:
        """Return the type to which weights are converted for a product with ``rows`` rows of activations."""
        return BY_ID[self.c.iqk_dequant_type(t.id, rows)]

    def to_format(self, x: F32, kind: TensorType) -> U8:
        """Return rows of x in a format of activations, uint8 [rows, bytes]."""
        convert = FROM_FLOAT(self.c.ggml_internal_get_type_traits(kind.id).from_float)
        out = np.zeros((len(x), self.c.ggml_row_size(kind.id, x.shape[1])), np.uint8)
        for row, row_out in zip(x, out, strict=True):
            row = np.ascontiguousarray(row)
            convert(row.ctypes.data, row_out.ctypes.data, x.shape[1])
        return out

    def values(self, rows: U8, kind: TensorType, n: int) -> F64:
        """Return the decoded values of ``n`` activations in a format, float64 [rows, n]."""
        dtype, offset, scales, levels, block = LAYOUTS[kind.name]
        blocks = rows.reshape(len(rows) * n // block, -1)
        d = np.ascontiguousarray(blocks[:, offset : offset + scales * np.dtype(dtype).itemsize]).view(dtype)
        if dtype == "<u2":  # bfloat16
            d = (d.astype(np.uint32) << 16).view(np.float32)
        q = np.ascontiguousarray(blocks[:, levels : levels + block]).view(np.int8)
        decoded_values: F64 = (q.astype(np.float64) * np.repeat(d.astype(np.float64), block // scales, axis=1)).reshape(
            -1, n
        )
        return decoded_values

    def product(self, w: U8, t: TensorType, x: F32) -> F32:
        """Return x w^T of rows of weights, uint8 [n_out, row_bytes], and of activations, float32 [rows, n]."""
        kind = self.activations_of(t)
        y, out = self.to_format(x, kind), np.zeros((len(x), len(w)), np.float32)
        w, n = np.ascontiguousarray(w), x.shape[1]
        a, b = (t.id, w.ctypes.data, w.shape[1]), (kind.id, y.ctypes.data, y.shape[1])
        status = self.c.iqk_mul_mat(len(w), len(x), n, *a, *b, out.ctypes.data, len(w), 0, 1)
        assert status, f"iqk_mul_mat refuses {t} with {kind}"
        return out
