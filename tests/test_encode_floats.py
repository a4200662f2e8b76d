"""F32, F16, BF16: rounded as ggml rounds."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from awkward import assert_same_bytes, awkward_rows, encode, ggml, ggml_encode
from quantkit.types import BY_NAME


def boundary_bits() -> np.ndarray:
    """Return f32 bits around every value and every middle of two values of F16 and BF16, both signs, NaN too."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    brains = np.arange(1 << 16, dtype=np.uint32) << 16
    middles = np.concatenate([halves + np.uint32(0x1000), brains + np.uint32(0x8000)])
    centers = np.concatenate([halves, brains, middles])
    return np.concatenate([centers - np.uint32(1), centers, centers + np.uint32(1)])


def boundary_rows() -> np.ndarray:
    return boundary_bits().view(np.float32).reshape(1, -1)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 100])
def test_f32_copies_bits(n: int) -> None:
    x = boundary_bits()[: 7 * n].reshape(7, n).view(np.float32)
    assert encode(BY_NAME["F32"], x).tobytes() == x.tobytes()


def test_f16_equals_numpy_where_finite_or_infinite() -> None:
    x = boundary_rows()
    x = x[:, ~np.isnan(x[0])]
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    assert np.array_equal(encode(BY_NAME["F16"], x).view(np.uint16), want.view(np.uint16))


def test_bf16_equals_ml_dtypes_where_finite_or_infinite() -> None:
    x = boundary_rows()
    x = x[:, ~np.isnan(x[0])]
    want = x.astype(ml_dtypes.bfloat16)
    assert np.array_equal(encode(BY_NAME["BF16"], x).view(np.uint16), want.view(np.uint16))


def test_nan_becomes_ggmls() -> None:
    x = np.array([[0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC12345] * 5], np.uint32).view(np.float32)
    assert encode(BY_NAME["F16"], x).view(np.uint16)[0, :4].tolist() == [0x7E00, 0xFE00, 0x7E00, 0xFE00]
    assert encode(BY_NAME["BF16"], x).view(np.uint16)[0, :4].tolist() == [0x7FC0, 0xFFC0, 0x7FFF, 0xFFC1]
    for name in ("F16", "BF16"):
        out = encode(BY_NAME[name], x).view(np.uint16)
        assert out[0, 16:].tolist() == out[0, :4].tolist(), "the last, partial vector differs from a full one"


@pytest.mark.peer
@pytest.mark.parametrize(
    ("name", "function"), [("F16", "ggml_fp32_to_fp16_row"), ("BF16", "ggml_fp32_to_bf16_row_ref")]
)
def test_every_boundary_equals_ggml(llama_bin: Path, name: str, function: str) -> None:
    x = boundary_rows()
    want = np.empty((1, 2 * x.size), np.uint8)
    getattr(ggml(llama_bin), function)(x.ctypes.data, want.ctypes.data, x.size)
    assert_same_bytes(encode(BY_NAME[name], x), want, BY_NAME[name])


@pytest.mark.peer
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("n", [1, 31, 33, 256])
def test_awkward_rows_equal_ggml(llama_bin: Path, name: str, n: int) -> None:
    x = awkward_rows(n, 3)
    assert_same_bytes(encode(BY_NAME[name], x), ggml_encode(llama_bin, BY_NAME[name], x), BY_NAME[name])
