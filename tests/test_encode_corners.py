"""Encoders at the corners of single types: ties, ends of ranges, scales that overflow, what zeros become."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from awkward import NO_WEIGHTS, assert_same_bytes, awkward_imatrix, encode, ggml, ggml_encode
from quantkit.kernels.cpu.encode.codebook import MAGIC, bucket_tables
from quantkit.kernels.cpu.encode.fp4 import MAGNITUDES
from quantkit.kernels.cpu.encode.i_quants import VALUES
from quantkit.kernels.formats import FORMATS
from quantkit.types import BY_NAME

f32 = np.float32
MAX = float(np.finfo(f32).max)

# ---------------------------------------------------------------- rows at the corners, against ggml

#: Rows, and weights for them; or no weights.
Corner = Iterator[tuple[np.ndarray, np.ndarray]]


def scales_of_every_power(rng: Any) -> Corner:
    """From the smallest denormal to the largest float; where the inverse is infinite, C converts NaN to integers."""
    x = np.clip(rng.standard_normal((278, 256)) / 3, -1, 1)
    x[:, ::64] = rng.choice([-1, 1], (278, 4))
    x[:, 1::5] = 0
    yield (x * 1.9 * 2.0 ** np.arange(-150, 128)[:, None]).astype(f32), NO_WEIGHTS


def around_half_the_scale(rng: Any) -> Corner:
    x = np.empty((512, 256), f32)
    for row in x:
        d = f32(np.exp(rng.standard_normal()))
        half = f32(0.5) * d
        row[:] = rng.choice(
            [half, -half, np.nextafter(half, d), np.nextafter(half, 0 * d), -np.nextafter(half, d)], 256
        )
        row[::64] = d
    yield x, NO_WEIGHTS


def tops_around_every_power(rng: Any) -> Corner:
    """log2f of a float just below 2^k may be k: how many do so depends on k. From denormals to the largest float."""
    bits = np.concatenate([np.arange(23), (np.arange(1, 256) << 23) - 1])
    bits[:23] = 1 << bits[:23]
    near = (bits[:, None] + np.concatenate([np.arange(-100, 4, 3), np.arange(-12, 4)])).ravel()
    tops = near[(near >= 0) & (near < 0x7F800000)].astype(np.uint32).view(f32)
    x = np.clip(rng.standard_normal((len(tops), 64)) / 3, -1, 1).astype(f32) * tops[:, None]
    x[:, ::16] = rng.choice([-1, 1], (len(tops), 4)) * tops[:, None]
    yield x, NO_WEIGHTS


def scales_of_every_size(rng: Any) -> Corner:
    for spread in (1, 2.0**12, 2.0**40):
        tops = 2.0 ** rng.uniform(-150, 127.9, (4000, 1))
        x = np.clip(rng.standard_normal((4000, 64)) / 3, -1, 1) * tops / spread
        x[:, ::16] = tops
        yield x.astype(f32), NO_WEIGHTS


def fp4_middles(rng: Any) -> Corner:
    """Multiples of each level and of each middle for scales near top / 12 and top / 8, and their neighbours in f32."""
    levels = np.array(MAGNITUDES, float)
    of_one = np.concatenate([levels, (levels[1:] + levels[:-1]) / 2])
    for top in (MAX, 2.0**127, 3e9, 2.0**24, 3000.0, 2689.0, 2688.0, 6.0, 1.0, 0.02, 1e-30, 1e-40):
        scales = np.concatenate([2.0 ** (np.floor(np.log2(top)) - 3), np.arange(8, 16) / 15 * top / 12], axis=None)
        points = (of_one[:, None] * scales).ravel()
        points = points[points <= top].astype(f32)
        points = np.concatenate([points, np.nextafter(points, f32(top)), np.nextafter(points, f32(0))])
        x = rng.choice(points, (400, 192)) * rng.choice(f32([-1, 1]), (400, 192))
        x[:, ::16] = f32(top)
        yield x, NO_WEIGHTS


def codebook_middles(rng: Any) -> Corner:
    """Multiples of a level, of the middle between two, and their neighbours in f32, under a scale of about 1."""
    points = np.array(VALUES + tuple((a + b) / 2 for a, b in zip(VALUES, VALUES[1:], strict=False)), f32)
    points = np.concatenate([points, np.nextafter(points, f32(200)), np.nextafter(points, f32(-200))])
    x = rng.choice(points, (500, 256))
    x[:, ::32] = rng.choice([-127, 113, 127], (500, 8))
    for weights in (NO_WEIGHTS, awkward_imatrix(256, 3)):
        yield x, weights


def fitted_to_the_smallest_values(rng: Any) -> Corner:
    """All weight on tiny values: x / d then lies far outside the levels, or is infinite, or NaN."""
    weights = np.zeros(256, f32)
    weights[::16] = 1
    for tiny in (1e-3, 1e-12, 1e-30, 1e-42, 0.0):
        x = rng.standard_normal((64, 256)).astype(f32)
        x[:, ::16] *= f32(tiny)
        yield x, weights


def grid_middles(rng: Any) -> Corner:
    """Odd multiples of a scale of about 1, which are levels, even ones, between two, and their neighbours in f32."""
    points = np.arange(1, 16, dtype=f32)
    points = np.concatenate([points, np.nextafter(points, f32(99)), np.nextafter(points, f32(0))])
    for top in (5, 15):
        x = rng.choice(points[points <= top], (300, 256)) * rng.choice(f32([-1, 1]), (300, 256))
        x[:, ::16] = top
        for weights in (np.ones(256, f32), awkward_imatrix(256, 3)):
            yield x, weights


def grid_scales_of_every_size(rng: Any) -> Corner:
    """From the smallest denormal, under weights that make sums of products underflow, too."""
    x = np.clip(rng.standard_normal((170, 256)) / 3, -1, 1)
    x[:, ::5] = 0
    x = (x * 2.0 ** np.arange(-150, 20)[:, None]).astype(f32)
    for size in (1, 1e-20, 1e-38, 1e-44):
        yield x, (size * rng.chisquare(2, 256)).astype(f32)


def grid_sub_blocks_of_zeros(rng: Any) -> Corner:
    x = rng.standard_normal((200, 16, 16)) * (rng.random((200, 16, 1)) < 0.6)
    x[::2, ::2] = x[::2, 1::2] * 0
    x[::2, 1::2] *= rng.random((100, 8, 1)) < 0.5
    yield x.reshape(200, 256).astype(f32), np.ones(256, f32)


GRID = tuple(f.type.name for f in FORMATS.values() if f.grid and f.type.trees == "both")
TERNARY, FP4, CODEBOOK = ("TQ1_0", "TQ2_0", "Q2_0", "Q1_0"), ("MXFP4", "NVFP4"), ("IQ4_NL", "IQ4_XS")
CORNERS: dict[Callable[[Any], Corner], tuple[str, ...]] = {
    scales_of_every_power: TERNARY,
    around_half_the_scale: TERNARY,
    tops_around_every_power: FP4,
    scales_of_every_size: FP4,
    fp4_middles: FP4,
    codebook_middles: CODEBOOK,
    fitted_to_the_smallest_values: CODEBOOK + GRID,
    grid_middles: GRID,
    grid_scales_of_every_size: GRID,
    grid_sub_blocks_of_zeros: GRID,
}


@pytest.mark.peer
@pytest.mark.parametrize(
    ("corner", "name"),
    [pytest.param(c, name, id=f"{c.__name__}-{name}") for c, names in CORNERS.items() for name in names],
)
def test_corners_equal_ggml(llama_bin: Path, corner: Callable[[Any], Corner], name: str) -> None:
    t = BY_NAME[name]
    for x, weights in corner(np.random.default_rng(3)):
        assert np.isfinite(x).all()
        assert_same_bytes(encode(t, x, weights), ggml_encode(llama_bin, t, x, weights), t)


# ---------------------------------------------------------------- floats: rounded as ggml rounds


def boundary_bits() -> np.ndarray:
    """Return f32 bits around every value and every middle of two values of F16 and BF16, both signs, NaN too."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(f32).view(np.uint32)
    brains = np.arange(1 << 16, dtype=np.uint32) << 16
    middles = np.concatenate([halves + np.uint32(0x1000), brains + np.uint32(0x8000)])
    centers = np.concatenate([halves, brains, middles])
    return np.concatenate([centers - np.uint32(1), centers, centers + np.uint32(1)])


@pytest.mark.parametrize("n", [1, 15, 16, 17, 100])
def test_f32_copies_bits(n: int) -> None:
    x = boundary_bits()[: 7 * n].reshape(7, n).view(f32)
    assert encode(BY_NAME["F32"], x).tobytes() == x.tobytes()


@pytest.mark.parametrize(("name", "dtype"), [("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_golden_rounding_of_what_is_no_nan(name: str, dtype: Any) -> None:
    x = boundary_bits().view(f32).reshape(1, -1)
    x = x[:, ~np.isnan(x[0])]
    with np.errstate(over="ignore"):
        want = x.astype(dtype)
    assert np.array_equal(encode(BY_NAME[name], x).view(np.uint16), want.view(np.uint16))


def test_nan_becomes_ggmls() -> None:
    x = np.array([[0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC12345] * 5], np.uint32).view(f32)
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
    x = boundary_bits().view(f32).reshape(1, -1)
    want = np.empty((1, 2 * x.size), np.uint8)
    getattr(ggml(llama_bin), function)(x.ctypes.data, want.ctypes.data, x.size)
    assert_same_bytes(encode(BY_NAME[name], x), want, BY_NAME[name])


# ---------------------------------------------------------------- what a block holds


@pytest.mark.parametrize(("name", "level"), [("Q4_0", 8), ("Q5_0", 16)])
def test_first_of_equal_magnitudes_sets_the_sign(name: str, level: int) -> None:
    x = np.zeros((2, 32), f32)
    x[0, 5], x[0, 20] = 1, -1
    x[1, 5], x[1, 20] = -1, 1
    d = encode(BY_NAME[name], x)[:, :2].copy().view(np.float16)[:, 0]
    assert d.tolist() == [-1 / level, 1 / level]


@pytest.mark.parametrize("name", FP4)
def test_a_row_of_fp4_values_is_kept(name: str) -> None:
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
    got = np.concatenate([nibbles & 15, nibbles >> 4], axis=1)
    assert np.array_equal(got.ravel(), levels.ravel())


def test_a_tie_goes_to_the_lower_magnitude_and_minus_zero_is_never_written() -> None:
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


def test_buckets_find_the_level_of_every_value() -> None:
    boundaries = [(a + b) / 2 for a, b in zip(VALUES, VALUES[1:], strict=False)]
    boundary, below, above = (np.array(table) for table in bucket_tables(boundaries, 10))
    v = np.concatenate([np.linspace(-150, 150, 100001), boundaries, np.nextafter(boundaries, -200)]).astype(f32)
    bucket = (v * f32(0.1) + MAGIC).view(np.int32) & 31
    level = np.where(v >= boundary[bucket], above[bucket], below[bucket])
    assert np.array_equal(level, np.searchsorted(boundaries, v, side="right"))


@pytest.mark.parametrize(("boundaries", "width"), [([0, 1], 5), ([5.01], 10), ([0, 200], 10)])
def test_buckets_too_wide_or_too_narrow_are_refused(boundaries: list[float], width: float) -> None:
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
