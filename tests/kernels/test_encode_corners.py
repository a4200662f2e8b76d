"""Encoders at the corners of single types: ties, ends of ranges, scales that overflow, what zeros become."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from edge_rows import NO_WEIGHTS, boundary_bits, encode
from quantkit.kernels.cpu.encode.fp4 import MAGNITUDES
from quantkit.kernels.cpu.encode.i_quants import VALUES
from quantkit.kernels.cpu.encode.search import MAGIC, bucket_tables
from quantkit.types import BY_NAME

f32 = np.float32

# ---------------------------------------------------------------- floats: rounded as ggml rounds


@pytest.mark.parametrize("n", [1, 15, 16, 17, 100])
def test_f32_copies_bits(n: int) -> None:
    x = boundary_bits()[: 7 * n].reshape(7, n).view(f32)
    assert encode(BY_NAME["F32"], x).tobytes() == x.tobytes()


@pytest.mark.parametrize(("name", "dtype"), [("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_golden_rounding_of_numbers(name: str, dtype: Any) -> None:
    x = boundary_bits().view(f32).reshape(1, -1)
    x = x[:, ~np.isnan(x[0])]
    with np.errstate(over="ignore"):
        want = x.astype(dtype)
    assert np.array_equal(encode(BY_NAME[name], x).view(np.uint16), want.view(np.uint16))


def test_nan_has_ggmls_bits() -> None:
    x = np.array([[0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC12345] * 5], np.uint32).view(f32)
    assert encode(BY_NAME["F16"], x).view(np.uint16)[0, :4].tolist() == [0x7E00, 0xFE00, 0x7E00, 0xFE00]
    assert encode(BY_NAME["BF16"], x).view(np.uint16)[0, :4].tolist() == [0x7FC0, 0xFFC0, 0x7FFF, 0xFFC1]
    for name in ("F16", "BF16"):
        out = encode(BY_NAME[name], x).view(np.uint16)
        assert out[0, 16:].tolist() == out[0, :4].tolist(), "the last, partial vector differs from a full one"


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize(("name", "level"), [("Q4_0", 8), ("Q5_0", 16)])
def test_first_of_equal_magnitudes_sets_the_sign(name: str, level: int) -> None:
    x = np.zeros((2, 32), f32)
    x[0, 5], x[0, 20] = 1, -1
    x[1, 5], x[1, 20] = -1, 1
    d = encode(BY_NAME[name], x)[:, :2].copy().view(np.float16)[:, 0]
    assert d.tolist() == [-1 / level, 1 / level]


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_a_row_of_fp4_values_is_exact(name: str) -> None:
    rng = np.random.default_rng(4)
    magnitudes, t = np.array(MAGNITUDES), BY_NAME[name]
    levels = rng.integers(0, 16, (3, 2, 64))
    levels[levels == 8] = 0
    levels[..., ::16] = 7
    x = magnitudes[levels & 7] * np.where(levels > 7, -0.5, 0.5)
    data = encode(t, x.reshape(3, 128).astype(f32))
    if name == "MXFP4":
        blocks, half = data.reshape(3, 4, 17), 16
        assert (blocks[..., 0] == 127).all()
        nibbles = blocks[..., 1:].reshape(-1, half)
    else:
        blocks, half = data.reshape(3, 2, 36), 8
        assert (blocks[..., :4] == 7 << 3).all()
        nibbles = blocks[..., 4:].reshape(-1, half)
    actual = np.concatenate([nibbles & 15, nibbles >> 4], axis=1)
    assert np.array_equal(actual.ravel(), levels.ravel())


def test_ties_round_to_the_lower_magnitude_without_minus_zero() -> None:
    x = np.zeros((1, 32), f32)
    x[0, :9] = [6, 0.25, -0.25, -0.0, 0.75, -0.75, 2.5, -3.5, 5]
    assert (encode(BY_NAME["MXFP4"], x)[0, 1:10] & 15).tolist() == [7, 0, 0, 0, 1, 9, 4, 13, 6]


@pytest.mark.parametrize(("name", "header"), [("IQ4_NL", (0, 0)), ("IQ4_XS", (0, 0x80, 0xAA, 0xAA, 0, 0, 0, 0))])
def test_zeros_give_a_zero_scale_and_the_level_nearest_to_zero(name: str, header: tuple[int, ...]) -> None:
    """IQ4_XS: d is -0 (the largest scale over -32), the scales are 32, stored as high bits 2."""
    t = BY_NAME[name]
    block = encode(t, np.zeros((1, t.block), f32))[0].tolist()
    assert tuple(block[: len(header)]) == header
    assert set(block[len(header) :]) == {0x88}


def test_partitions_with_overflowing_sums_are_tried() -> None:
    """The scale then is infinite, as the reference's, and the row refused: it does not become zeros."""
    rng = np.random.default_rng(1)
    x, weights = rng.standard_normal((1, 768)) * 1e18, np.exp(6 * rng.standard_normal(768))
    assert not np.isfinite(encode(BY_NAME["IQ2_KS"], x.astype(f32), weights.astype(f32))[0, :2].view(np.float16))


def test_buckets_give_the_level_of_every_value() -> None:
    boundaries = [(a + b) / 2 for a, b in zip(VALUES, VALUES[1:], strict=False)]
    boundary, below, above = (np.array(table) for table in bucket_tables(boundaries, 10))
    v = np.concatenate([np.linspace(-150, 150, 100001), boundaries, np.nextafter(boundaries, -200)]).astype(f32)
    bucket = (v * f32(0.1) + MAGIC).view(np.int32) & 31
    level = np.where(v >= boundary[bucket], above[bucket], below[bucket])
    assert np.array_equal(level, np.searchsorted(boundaries, v, side="right"))


@pytest.mark.parametrize(("boundaries", "width"), [([0, 1], 5), ([5.01], 10), ([0, 200], 10)])
def test_buckets_of_wrong_width_are_refused(boundaries: list[float], width: float) -> None:
    with pytest.raises(ValueError, match="buckets"):
        bucket_tables(boundaries, width)


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_a_ternary_row_keeps_its_trits(name: str) -> None:
    t, trits = BY_NAME[name], np.random.default_rng(4).integers(-1, 2, (5, 512))
    data = encode(t, (trits * 0.25).astype(f32)).reshape(5, 2, -1)
    assert (data[..., -2:].copy().view(np.float16) == 0.25).all()
    if name == "TQ2_0":
        levels = data[..., :64].reshape(5, 2, 2, 1, 32) >> np.array([0, 2, 4, 6])[:, None] & 3
    else:
        qs, qh = data[..., :48].astype(int), data[..., 48:52].astype(int)
        digits = [q * 3**n % 256 * 3 // 256 for q in (qs, qh) for n in range(5)]
        groups = [digits[n][..., :32] for n in range(5)] + [digits[n][..., 32:] for n in range(5)] + digits[5:9]
        levels = np.concatenate(groups, axis=-1)
    assert np.array_equal(levels.reshape(5, 512).astype(int) - 1, trits)


def test_binary_bits_are_signs_and_both_zeros_are_positive() -> None:
    x = np.tile(np.array([1, -1, 0.0, -0.0, -2, 2, -1e-40, 1e-40], f32), 16)[None]
    data = encode(BY_NAME["Q1_0"], x, NO_WEIGHTS)
    assert data[0, :2].copy().view(np.float16)[0] == 0.75
    assert set(data[0, 2:].tolist()) == {0b10101101}
