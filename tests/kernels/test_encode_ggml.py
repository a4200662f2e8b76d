"""Encoders beside ggml itself: awkward rows and weights, random blocks, the corners of single types.

All of them in one file, which one process runs: libggml takes 20 seconds to make the tables of its grids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from type_params import GGMLS

from edge_rows import (
    IMPORTANCE,
    NO_WEIGHTS,
    assert_same_bytes,
    awkward_imatrix,
    awkward_rows,
    boundary_bits,
    encode,
    ggml,
    ggml_encode,
    weights_for,
    within_reach,
)
from quantkit.kernels.cpu.encode.fp4 import MAGNITUDES
from quantkit.kernels.cpu.encode.i_quants import VALUES
from quantkit.kernels.formats import FORMATS
from quantkit.types import BY_NAME, TensorType

pytestmark = pytest.mark.peer

f32 = np.float32
MAX = float(np.finfo(f32).max)


def assert_ggmls(llama_bin: Path, t: TensorType, x: np.ndarray, weights: np.ndarray = NO_WEIGHTS) -> None:
    assert_same_bytes(encode(t, x, weights), ggml_encode(llama_bin, t, x, weights), t)


@pytest.mark.parametrize("t", GGMLS, ids=str)
@pytest.mark.parametrize("blocks", [1, 3, 17])
def test_edge_rows_equal_ggml(llama_bin: Path, t: TensorType, blocks: int) -> None:
    """Rows of 1, 3 and 17 blocks: 16 lanes cross from row to row, and some stay empty at the end."""
    n = blocks * t.block if t.is_quantized else 11 * blocks
    for seed, huge in enumerate((1e30, 1e12, 1e20, 1e37, 1.1e38)):  # up to ranges that overflow f32
        for weights in weights_for(t, awkward_imatrix(n, seed)):
            assert_ggmls(llama_bin, t, within_reach(t, awkward_rows(n, seed, huge), weights), weights)


@pytest.mark.parametrize("t", [t for t in GGMLS if t.imatrix != "ignored"], ids=str)
def test_any_importance_equals_ggml(llama_bin: Path, t: TensorType) -> None:
    for seed, (kind, make) in enumerate(IMPORTANCE.items()):
        for n in (256, 1280):
            weights = make(np.random.default_rng(seed), n).astype(np.float32)
            x = within_reach(t, awkward_rows(n, seed), weights)
            actual, expected = encode(t, x, weights), ggml_encode(llama_bin, t, x, weights)
            assert np.array_equal(actual, expected), f"{t.name}, importance: {kind}, rows of {n}"


@pytest.mark.parametrize("t", GGMLS, ids=str)
def test_many_random_blocks_equal_ggml(llama_bin: Path, t: TensorType) -> None:
    rng = np.random.default_rng(11)
    x = (rng.standard_t(3, (129, 1024)) * np.exp(rng.standard_normal((129, 1)))).astype(np.float32)
    for weights in weights_for(t, rng.chisquare(2, 1024).astype(np.float32)):
        assert_ggmls(llama_bin, t, x, weights)


# ---------------------------------------------------------------- rows at the corners

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
    neighbours = (bits[:, None] + np.concatenate([np.arange(-100, 4, 3), np.arange(-12, 4)])).ravel()
    tops = neighbours[(neighbours >= 0) & (neighbours < 0x7F800000)].astype(np.uint32).view(f32)
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


@pytest.mark.parametrize(
    ("corner", "name"),
    [pytest.param(c, name, id=f"{c.__name__}-{name}") for c, names in CORNERS.items() for name in names],
)
def test_corners_equal_ggml(llama_bin: Path, corner: Callable[[Any], Corner], name: str) -> None:
    t = BY_NAME[name]
    for x, weights in corner(np.random.default_rng(3)):
        assert np.isfinite(x).all()
        assert_same_bytes(encode(t, x, weights), ggml_encode(llama_bin, t, x, weights), t)


@pytest.mark.parametrize(
    ("name", "function"), [("F16", "ggml_fp32_to_fp16_row"), ("BF16", "ggml_fp32_to_bf16_row_ref")]
)
def test_every_boundary_equals_ggml(llama_bin: Path, name: str, function: str) -> None:
    x = boundary_bits().view(f32).reshape(1, -1)
    want = np.empty((1, 2 * x.size), np.uint8)
    getattr(ggml(llama_bin), function)(x.ctypes.data, want.ctypes.data, x.size)
    assert_same_bytes(encode(BY_NAME[name], x), want, BY_NAME[name])
