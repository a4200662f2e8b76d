"""MXFP4 and NVFP4: byte for byte as ggml."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from awkward import assert_same_bytes, awkward_imatrix, awkward_rows, encode, ggml_encode
from quantkit.kernels.cpu.encode.fp4 import MAGNITUDES
from quantkit.types import BY_NAME

NAMES = ["MXFP4", "NVFP4"]
MAX = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("name", NAMES)
def test_golden_bytes(golden: np.lib.npyio.NpzFile, name: str) -> None:
    t = BY_NAME[name]
    assert_same_bytes(encode(t, golden["x"]), golden[name], t)
    assert_same_bytes(encode(t, golden["x"], golden["imatrix"]), golden[f"{name}+imatrix"], t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("blocks", [1, 3, 17])
def test_awkward_rows_equal_ggml(llama_bin: Path, name: str, blocks: int) -> None:
    t, n = BY_NAME[name], blocks * BY_NAME[name].block
    for seed, huge in enumerate((1e30, 1e12, 1.1e38)):
        x, weights = awkward_rows(n, seed, huge), awkward_imatrix(n, seed)
        assert_same_bytes(encode(t, x), ggml_encode(llama_bin, t, x), t)
        assert_same_bytes(encode(t, x, weights), ggml_encode(llama_bin, t, x, weights), t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
def test_largest_magnitudes_around_every_power_of_two_equal_ggml(llama_bin: Path, name: str) -> None:
    """log2f of a float just below 2^k may be k: how many do so depends on k. From denormals to the largest float."""
    t, rng = BY_NAME[name], np.random.default_rng(1)
    bits = np.concatenate([np.arange(23), (np.arange(1, 256) << 23) - 1])
    bits[:23] = 1 << bits[:23]
    near = (bits[:, None] + np.concatenate([np.arange(-100, 4, 3), np.arange(-12, 4)])).ravel()
    tops = near[(near >= 0) & (near < 0x7F800000)].astype(np.uint32).view(np.float32)
    x = np.clip(rng.standard_normal((len(tops), 64)) / 3, -1, 1).astype(np.float32) * tops[:, None]
    x[:, ::16] = rng.choice([-1, 1], (len(tops), 4)) * tops[:, None]
    assert_same_bytes(encode(t, x), ggml_encode(llama_bin, t, x), t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
def test_scales_of_every_size_equal_ggml(llama_bin: Path, name: str) -> None:
    t, rng = BY_NAME[name], np.random.default_rng(2)
    for spread in (1, 2.0**12, 2.0**40):
        tops = 2.0 ** rng.uniform(-150, 127.9, (4000, 1))
        x = np.clip(rng.standard_normal((4000, 64)) / 3, -1, 1) * tops / spread
        x[:, ::16] = tops
        assert_same_bytes(encode(t, x), ggml_encode(llama_bin, t, x), t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("top", [MAX, 2.0**127, 3e9, 2.0**24, 3000.0, 2689.0, 2688.0, 6.0, 1.0, 0.02, 1e-30, 1e-40])
def test_values_at_the_middles_between_levels_equal_ggml(llama_bin: Path, name: str, top: float) -> None:
    """Multiples of each level and of each middle for scales near top / 12 and top / 8, and their neighbours in f32."""
    t, rng = BY_NAME[name], np.random.default_rng(3)
    levels = np.array(MAGNITUDES, float)
    points = np.concatenate([levels, (levels[1:] + levels[:-1]) / 2])
    scales = np.concatenate([2.0 ** (np.floor(np.log2(top)) - 3), np.arange(8, 16) / 15 * top / 12], axis=None)
    points = (points[:, None] * scales).ravel()
    points = points[points <= top].astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(top)), np.nextafter(points, np.float32(0))])
    x = rng.choice(points, (400, 192)) * rng.choice(np.float32([-1, 1]), (400, 192))
    x[:, ::16] = np.float32(top)
    assert_same_bytes(encode(t, x), ggml_encode(llama_bin, t, x), t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
def test_many_random_blocks_equal_ggml(llama_bin: Path, name: str) -> None:
    t, rng = BY_NAME[name], np.random.default_rng(11)
    x = (rng.standard_t(3, (257, 1024)) * np.exp(rng.standard_normal((257, 1)))).astype(np.float32)
    assert_same_bytes(encode(t, x), ggml_encode(llama_bin, t, x), t)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_fp4_values_is_kept(name: str) -> None:
    rng = np.random.default_rng(4)
    magnitudes, t = np.array(MAGNITUDES), BY_NAME[name]
    levels = rng.integers(0, 16, (3, 2, 64))
    levels[levels == 8] = 0
    levels[..., ::16] = 7
    x = magnitudes[levels & 7] * np.where(levels > 7, -0.5, 0.5)
    data = encode(t, x.reshape(3, 128).astype(np.float32))
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
    x = np.zeros((1, 32), np.float32)
    x[0, :9] = [6, 0.25, -0.25, -0.0, 0.75, -0.75, 2.5, -3.5, 5]
    assert (encode(BY_NAME["MXFP4"], x)[0, 1:10] & 15).tolist() == [7, 0, 0, 0, 1, 9, 4, 13, 6]
