"""TQ1_0, TQ2_0, Q2_0 and Q1_0: byte for byte as ggml."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from awkward import NO_WEIGHTS, assert_same_bytes, awkward_imatrix, awkward_rows, encode, ggml_encode
from quantkit.types import BY_NAME

NAMES = ["TQ1_0", "TQ2_0", "Q2_0", "Q1_0"]


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
def test_scales_from_the_smallest_denormal_to_the_largest_float_equal_ggml(llama_bin: Path, name: str) -> None:
    """Among them those whose inverse is infinite, where C converts NaN and infinity to integers."""
    t, rng = BY_NAME[name], np.random.default_rng(1)
    x = np.clip(rng.standard_normal((278, 256)) / 3, -1, 1)
    x[:, ::64] = rng.choice([-1, 1], (278, 4))
    x[:, 1::5] = 0
    x = (x * 1.9 * 2.0 ** np.arange(-150, 128)[:, None]).astype(np.float32)
    assert np.isfinite(x).all()
    assert_same_bytes(encode(t, x), ggml_encode(llama_bin, t, x), t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
def test_values_around_half_the_scale_equal_ggml(llama_bin: Path, name: str) -> None:
    t, rng = BY_NAME[name], np.random.default_rng(2)
    x = np.empty((512, 256), np.float32)
    for row in x:
        d = np.float32(np.exp(rng.standard_normal()))
        half = np.float32(0.5) * d
        row[:] = rng.choice(
            [half, -half, np.nextafter(half, d), np.nextafter(half, 0 * d), -np.nextafter(half, d)], 256
        )
        row[::64] = d
    assert_same_bytes(encode(t, x), ggml_encode(llama_bin, t, x), t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
def test_many_random_blocks_equal_ggml(llama_bin: Path, name: str) -> None:
    t, rng = BY_NAME[name], np.random.default_rng(11)
    x = (rng.standard_t(3, (257, 2048)) * np.exp(rng.standard_normal((257, 1)))).astype(np.float32)
    assert_same_bytes(encode(t, x), ggml_encode(llama_bin, t, x), t)


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_a_ternary_row_keeps_its_trits(name: str) -> None:
    t, trits = BY_NAME[name], np.random.default_rng(4).integers(-1, 2, (5, 512))
    data = encode(t, (trits * 0.25).astype(np.float32)).reshape(5, 2, -1)
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
    x = np.tile(np.array([1, -1, 0.0, -0.0, -2, 2, -1e-40, 1e-40], np.float32), 16)[None]
    data = encode(BY_NAME["Q1_0"], x, NO_WEIGHTS)
    assert data[0, :2].copy().view(np.float16)[0] == 0.75
    assert set(data[0, 2:].tolist()) == {0b10101101}
