"""NVFP4 beside a scale of the tensor: its search is as good as trying every code of a block's scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kernels import dequantize, quantize
from quantkit.kernels.formats import SCALED, encoder_for
from quantkit.kernels.reference import decode_nvfp4
from quantkit.types import BY_NAME

F32 = npt.NDArray[np.float32]
T = BY_NAME["NVFP4"]
#: E2M1's magnitudes, and the values of E4M3's bytes below its NaN, from the decoder of single blocks.
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def scales_of_codes() -> npt.NDArray[np.float64]:
    """Return the value of each code of a scale, by a block whose first level is 1."""
    block = np.zeros((127, 36), np.uint8)
    block[:, 0], block[:, 4] = np.arange(127), 2
    return np.array(decode_nvfp4(block).reshape(127, -1)[:, 0], np.float64)


def least_errors(x: F32, weights: F32) -> npt.NDArray[np.float64]:
    """Return the least weighted square error of each 16 values over all codes of their scale."""
    values, w = np.abs(x.reshape(-1, 16)).astype(np.float64), weights.reshape(-1, 16).astype(np.float64)
    best = np.full(len(values), np.inf)
    for scale in scales_of_codes():
        nearest = np.abs(values[:, :, None] - MAGNITUDES * scale).min(axis=2)
        best = np.minimum(best, (w * nearest**2).sum(axis=1))
    return best


def errors(x: F32, data: npt.NDArray[np.uint8], weights: F32) -> npt.NDArray[np.float64]:
    y = dequantize(data, T, x.shape[1]).astype(np.float64)
    return np.asarray((weights.astype(np.float64) * (y - x) ** 2).reshape(-1, 16).sum(axis=1))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_scale_has_nearly_the_least_error_of_all_codes(weighted: bool) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((20, 256), np.float32) * 40
    weights = rng.gamma(1, size=256).astype(np.float32) if weighted else np.ones(256, np.float32)
    data = quantize(x, T, weights if weighted else None, SCALED)
    actual, least = errors(x, data, weights), least_errors(x, np.tile(weights, (20, 1)))
    assert (actual >= least * (1 - 1e-5)).all()
    assert actual.sum() <= (1.01 if weighted else 1.0001) * least.sum()


def test_weights_decide_where_the_error_is() -> None:
    x = np.random.default_rng(6).standard_normal((64, 64), np.float32) * 40
    weights = np.where(np.arange(64) % 16 < 4, 1, 1e-3).astype(np.float32)
    weighted, plain = (errors(x, quantize(x, T, w, SCALED), weights).sum() for w in (weights, None))
    assert weighted < 0.8 * plain


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1e-3, 1.0, 300.0, 2688.0]))
def test_no_value_is_worse_than_with_the_largest_magnitudes_scale(seed: int, size: float) -> None:
    """The code of the largest magnitude / 6 is among those that are tried."""
    x = (np.random.default_rng(seed).standard_t(2, (3, 192)) * size).astype(np.float32).clip(-2688, 2688)
    ones = np.ones(192, np.float32)
    base = np.abs(x.reshape(-1, 16)).max(axis=1) / 6
    codes = scales_of_codes()
    nearest = codes[np.abs(base[:, None] - codes).argmin(axis=1)]
    values = np.abs(x.reshape(-1, 16)).astype(np.float64)
    bound = (np.abs(values[:, :, None] - MAGNITUDES * nearest[:, None, None]).min(axis=2) ** 2).sum(axis=1)
    assert (errors(x, quantize(x, T, None, SCALED), ones) <= bound * (1 + 1e-4) + 1e-60).all()


@pytest.mark.parametrize("rows", [np.zeros((1, 64)), np.full((1, 64), 2688), np.full((2, 128), -1e-20)])
def test_edge_rows(rows: Any) -> None:
    x = rows.astype(np.float32)
    y = dequantize(quantize(x, T, None, SCALED), T, x.shape[1])
    assert (y == (x if np.abs(x).max() != np.float32(1e-20) else 0)).all()


def test_other_types_have_their_own_encoder() -> None:
    assert encoder_for(T, SCALED) == SCALED
    assert encoder_for(BY_NAME["Q4_0"], SCALED) == encoder_for(BY_NAME["Q4_0"])
    assert encoder_for(T) == "mainline"
