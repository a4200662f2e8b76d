"""IQ4_NL and IQ4_XS: byte for byte as ggml."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from awkward import NO_WEIGHTS, assert_same_bytes, awkward_imatrix, awkward_rows, encode, ggml_encode
from quantkit.kernels.cpu.encode.codebook import MAGIC, bucket_tables
from quantkit.kernels.cpu.encode.i_quants import VALUES
from quantkit.types import BY_NAME

NAMES = ["IQ4_NL", "IQ4_XS"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [False, True])
def test_golden_bytes(golden: np.lib.npyio.NpzFile, name: str, weighted: bool) -> None:
    weights = golden["imatrix"] if weighted else NO_WEIGHTS
    t, want = BY_NAME[name], golden[f"{name}+imatrix" if weighted else name]
    assert_same_bytes(encode(t, golden["x"], weights), want, t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("blocks", [1, 3, 17])
def test_awkward_rows_equal_ggml(llama_bin: Path, name: str, weighted: bool, blocks: int) -> None:
    """Rows of 1, 3 and 17 blocks: 16 lanes cross from row to row, and some stay empty at the end."""
    t, n = BY_NAME[name], blocks * BY_NAME[name].block
    for seed in range(3):
        x = awkward_rows(n, seed)
        weights = awkward_imatrix(n, seed) if weighted else NO_WEIGHTS
        assert_same_bytes(encode(t, x, weights), ggml_encode(llama_bin, t, x, weights), t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("huge", [1e12, 1e20, 1.1e38])
def test_overflowing_sums_equal_ggml(llama_bin: Path, name: str, huge: float) -> None:
    t, x = BY_NAME[name], awkward_rows(256, 7, huge)
    for weights in (NO_WEIGHTS, awkward_imatrix(256, 7)):
        assert_same_bytes(encode(t, x, weights), ggml_encode(llama_bin, t, x, weights), t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
def test_many_random_blocks_equal_ggml(llama_bin: Path, name: str) -> None:
    t, rng = BY_NAME[name], np.random.default_rng(11)
    x = (rng.standard_t(3, (129, 1024)) * np.exp(rng.standard_normal((129, 1)))).astype(np.float32)
    for weights in (NO_WEIGHTS, rng.chisquare(2, 1024).astype(np.float32)):
        assert_same_bytes(encode(t, x, weights), ggml_encode(llama_bin, t, x, weights), t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
def test_values_at_the_boundaries_between_levels_equal_ggml(llama_bin: Path, name: str) -> None:
    """Multiples of a level, of the middle between two, and their neighbours in f32, under a scale of about 1."""
    t, rng = BY_NAME[name], np.random.default_rng(3)
    points = np.array(VALUES + tuple((a + b) / 2 for a, b in zip(VALUES, VALUES[1:], strict=False)), np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(200)), np.nextafter(points, np.float32(-200))])
    x = rng.choice(points, (500, 256))
    x[:, ::32] = rng.choice([-127, 113, 127], (500, 8))
    for weights in (NO_WEIGHTS, awkward_imatrix(256, 3)):
        assert_same_bytes(encode(t, x, weights), ggml_encode(llama_bin, t, x, weights), t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
def test_scales_fitted_to_the_smallest_values_equal_ggml(llama_bin: Path, name: str) -> None:
    """All weight on tiny values: x / d then lies far outside the levels, or is infinite, or NaN."""
    t, rng = BY_NAME[name], np.random.default_rng(5)
    for tiny in (1e-3, 1e-12, 1e-30, 1e-42, 0.0):
        x = rng.standard_normal((64, 256)).astype(np.float32)
        weights = np.zeros(256, np.float32)
        weights[::16] = 1
        x[:, ::16] *= np.float32(tiny)
        assert_same_bytes(encode(t, x, weights), ggml_encode(llama_bin, t, x, weights), t)


@pytest.mark.parametrize(("name", "header"), [("IQ4_NL", (0, 0)), ("IQ4_XS", (0, 0x80, 0xAA, 0xAA, 0, 0, 0, 0))])
def test_zeros_give_a_zero_scale_and_the_level_nearest_to_zero(name: str, header: tuple[int, ...]) -> None:
    """IQ4_XS: d is -0 (the largest scale over -32), the scales are 32, stored as high bits 2."""
    t = BY_NAME[name]
    block = encode(t, np.zeros((1, t.block), np.float32))[0].tolist()
    assert tuple(block[: len(header)]) == header
    assert set(block[len(header) :]) == {0x88}


def test_buckets_find_the_level_of_every_value() -> None:
    boundaries = [(a + b) / 2 for a, b in zip(VALUES, VALUES[1:], strict=False)]
    boundary, below, above = (np.array(table) for table in bucket_tables(boundaries, 10))
    v = np.concatenate([np.linspace(-150, 150, 100001), boundaries, np.nextafter(boundaries, -200)]).astype(np.float32)
    bucket = (v * np.float32(0.1) + MAGIC).view(np.int32) & 31
    level = np.where(v >= boundary[bucket], above[bucket], below[bucket])
    assert np.array_equal(level, np.searchsorted(boundaries, v, side="right"))


@pytest.mark.parametrize(("boundaries", "width"), [([0, 1], 5), ([5.01], 10), ([0, 200], 10)])
def test_buckets_too_wide_or_too_narrow_are_refused(boundaries: list[float], width: float) -> None:
    with pytest.raises(ValueError, match="buckets"):
        bucket_tables(boundaries, width)
