"""Keys and values rounded to a type are those that llama.cpp's quantize_row_*_ref and dequantize_row_* give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quantkit.kernels import dequantize, quantize
from quantkit.kernels.cpu.attention.cache_rounding import round_part
from quantkit.kernels.cpu.core.jit import kernel
from quantkit.kernels.cpu.encode.i_quants import VALUES
from quantkit.model.kv_types import KV_TYPES, has_blocks, is_rounded, join_kv_types, split_kv_type, stored_type
from quantkit.types import BY_NAME

F = np.float32


@kernel
def _round_rows(x: Any, out: Any, kind: int) -> None:
    for i in range(x.shape[0]):
        round_part(x.ctypes.data + 128 * i, 32, kind, out.ctypes.data + 128 * i)


def _rows() -> Any:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((2000, 32)) * np.exp(2 * rng.standard_normal((2000, 1)))).astype(F)
    x[0], x[1], x[2, 5:] = 0, -x[3], 0
    return x


def _rounded(x: Any, name: str) -> Any:
    out = np.empty_like(x)
    _round_rows(x, out, BY_NAME[name].id)
    return out


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_values_are_those_of_the_encoder(name: str) -> None:
    x = _rows()
    expected = dequantize(quantize(x, name), name, 32).reshape(x.shape)
    np.testing.assert_array_equal(_rounded(x, name), expected)


def test_iq4_nl_fits_one_scale() -> None:
    """quantize_row_iq4_nl_ref tries no scales besides the first, which the encoder of llama-quantize does."""
    x, levels = _rows(), np.array(VALUES, F)
    for row, values in zip(x, _rounded(x, "IQ4_NL"), strict=True):
        largest = row[np.abs(row).argmax()]
        if abs(largest) < 1e-15:
            assert not values.any()
            continue
        inverse = F(1) / (largest / levels[0])
        q = levels[np.abs(inverse * row[:, None] - levels).argmin(axis=1)]
        scale = F(np.float16((row * row * q * row).sum() / (row * row * q * q).sum()))
        np.testing.assert_allclose(values, scale * q, rtol=2e-3)


def test_names_of_cache_types() -> None:
    assert [name for name in KV_TYPES if not is_rounded(name)] == ["f32", "f16", "q8_0"]
    assert split_kv_type("q8_0/q4_0") == ("q8_0", "q4_0")
    assert split_kv_type("f16") == ("f16", "f16")
    assert join_kv_types("f16", "f16") == "f16"
    assert stored_type("q8_0/f16") == "f32"
    assert stored_type("q8_0") == "q8_0"
    assert has_blocks("f16/iq4_nl")
    assert not has_blocks("bf16")
