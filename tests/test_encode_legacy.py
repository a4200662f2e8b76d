"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: byte for byte as ggml."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from awkward import NO_WEIGHTS, assert_same_bytes, awkward_imatrix, awkward_rows, encode, ggml_encode
from quantkit.types import BY_NAME

NAMES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [False, True])
def test_golden_bytes(golden: np.lib.npyio.NpzFile, name: str, weighted: bool) -> None:
    weights = golden["imatrix"] if weighted else NO_WEIGHTS
    t, want = BY_NAME[name], golden[f"{name}+imatrix" if weighted else name]
    assert_same_bytes(encode(t, golden["x"], weights), want, t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [32, 96, 544, 1056])
def test_awkward_rows_equal_ggml(llama_bin: Path, name: str, weighted: bool, n: int) -> None:
    t = BY_NAME[name]
    for seed in range(4):
        x = awkward_rows(n, seed)
        weights = awkward_imatrix(n, seed) if weighted else NO_WEIGHTS
        assert_same_bytes(encode(t, x, weights), ggml_encode(llama_bin, t, x, weights), t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("huge", [1e20, 1e37, 1.1e38])
def test_overflowing_scales_equal_ggml(llama_bin: Path, name: str, huge: float) -> None:
    """Scales that are no half floats any more, up to ranges that overflow f32: the bytes are still ggml's."""
    t, x = BY_NAME[name], awkward_rows(256, 7, huge)
    for weights in (NO_WEIGHTS, awkward_imatrix(256, 7)):
        assert_same_bytes(encode(t, x, weights), ggml_encode(llama_bin, t, x, weights), t)


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
def test_many_random_blocks_equal_ggml(llama_bin: Path, name: str) -> None:
    t, rng = BY_NAME[name], np.random.default_rng(11)
    x = (rng.standard_t(3, (257, 1024)) * np.exp(rng.standard_normal((257, 1)))).astype(np.float32)
    weights = rng.chisquare(2, 1024).astype(np.float32)
    for w in (NO_WEIGHTS, weights):
        assert_same_bytes(encode(t, x, w), ggml_encode(llama_bin, t, x, w), t)


@pytest.mark.parametrize(("name", "level"), [("Q4_0", 8), ("Q5_0", 16)])
def test_first_of_equal_magnitudes_sets_the_sign(name: str, level: int) -> None:
    t = BY_NAME[name]
    x = np.zeros((2, 32), np.float32)
    x[0, 5], x[0, 20] = 1, -1
    x[1, 5], x[1, 20] = -1, 1
    d = encode(t, x)[:, :2].copy().view(np.float16)[:, 0]
    assert d.tolist() == [-1 / level, 1 / level]
