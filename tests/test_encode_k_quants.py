"""Encoders of the K-quants: llama.cpp's bytes, whatever the rows, the batches and the partial vectors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from quantkit.kernels.cpu.encode import encoder
from quantkit.types import BY_NAME

K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
#: Root mean square error relative to that of the rows, for normal_rows: a little above what ggml gets.
ERROR = {"Q2_K": 0.36, "Q3_K": 0.19, "Q4_K": 0.09, "Q5_K": 0.045, "Q6_K": 0.0235}

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
NONE = np.zeros(0, np.float32)


def encode(name: str, x: Floats, weights: Floats = NONE) -> Bytes:
    t = BY_NAME[name]
    out = np.full((x.shape[0], t.row_bytes(x.shape[1])), 0xAA, np.uint8)
    encoder(t)(x, weights, out, 0, x.shape[0])
    return out


def normal_rows(rows: int, n: int, seed: int = 0) -> tuple[Floats, Floats]:
    r = np.random.default_rng(seed)
    x = r.standard_normal((rows, n)) * np.exp(r.standard_normal(n) / 2)
    return x.astype(np.float32), np.exp(r.standard_normal(n)).astype(np.float32)


def _by_16(r: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
    return r.standard_normal(n // 16).repeat(16)


AWKWARD: dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.float64]]] = {
    "normal": lambda r, n: r.standard_normal(n),
    "heavy tails": lambda r, n: r.standard_cauchy(n),
    "zeros": lambda r, n: np.zeros(n),
    "negative zeros": lambda r, n: np.full(n, -0.0),
    "constant": lambda r, n: np.full(n, r.standard_normal()),
    "constant sub-blocks": _by_16,
    "nearly constant, negative": lambda r, n: -1 + 1e-6 * r.standard_normal(n),
    "nearly constant, positive": lambda r, n: 1 + 1e-6 * r.standard_normal(n),
    "narrow, far from 0": lambda r, n: -5 + 1e-2 * r.standard_normal(n),
    "denormal": lambda r, n: 1e-40 * r.standard_normal(n),
    "smallest denormals": lambda r, n: 3e-45 * r.integers(-3, 4, n),
    "denormal sub-blocks": lambda r, n: r.standard_normal(n) * np.where(_by_16(r, n) > 0, 1e-39, 1),
    "1e-30": lambda r, n: 1e-30 * r.standard_normal(n),
    "at the limit of zero": lambda r, n: 1e-15 * r.standard_normal(n),
    "1e7, beyond f16": lambda r, n: 1e7 * r.standard_normal(n),
    "1e10": lambda r, n: 1e10 * r.standard_normal(n),
    "1e18": lambda r, n: 1e18 * r.standard_normal(n),
    "1e30": lambda r, n: 1e30 * r.standard_normal(n),
    "largest": lambda r, n: 3.4e38 * np.clip(r.standard_normal(n), -1, 1),
    "ties": lambda r, n: r.integers(-8, 8, n) / 2,
    "ternary": lambda r, n: r.integers(-1, 2, n) * 1.0,
    "two values": lambda r, n: np.where(r.random(n) < 0.5, -3.0, 1.0),
    "spikes": lambda r, n: np.where(r.random(n) < 1 / 200, r.standard_normal(n), 0),
    "single spike": lambda r, n: np.where(np.arange(n) == r.integers(n), 1.0, 0),
    "outliers": lambda r, n: r.standard_normal(n) * np.where(r.random(n) < 1 / 64, 1e6, 1),
    "all negative": lambda r, n: -np.abs(r.standard_normal(n)),
    "all positive": lambda r, n: np.abs(r.standard_normal(n)),
    "sub-blocks of all sizes": lambda r, n: r.standard_normal(n) * np.exp(3 * _by_16(r, n)),
    "sub-blocks of absurd sizes": lambda r, n: r.standard_normal(n) * np.exp(12 * np.clip(_by_16(r, n), -3, 3)),
    "few sub-blocks": lambda r, n: r.standard_normal(n) * (_by_16(r, n) > 1.3),
}

IMPORTANCE: dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.float64] | None]] = {
    "none": lambda r, n: None,
    "ones": lambda r, n: np.ones(n),
    "lognormal": lambda r, n: np.exp(r.standard_normal(n)),
    "wild": lambda r, n: np.exp(6 * r.standard_normal(n)),
    "zero entries": lambda r, n: np.exp(r.standard_normal(n)) * (r.random(n) < 0.7),
    "zero sub-blocks": lambda r, n: np.exp(r.standard_normal(n)) * (_by_16(r, n) > 0),
    "zero super-blocks": lambda r, n: np.exp(r.standard_normal(n)) * (np.arange(n) >= n // 2),
    "zeros": lambda r, n: np.zeros(n),
    "tiny": lambda r, n: 1e-30 * np.exp(r.standard_normal(n)),
    "denormal": lambda r, n: 1e-41 * np.exp(r.standard_normal(n)),
    "huge": lambda r, n: 1e30 * np.exp(r.standard_normal(n)),
}


@pytest.mark.parametrize("imatrix", [False, True])
@pytest.mark.parametrize("name", K_QUANTS)
def test_golden_bytes(name: str, imatrix: bool, golden: dict[str, npt.NDArray[np.float32]]) -> None:
    expected = golden[f"{name}+imatrix" if imatrix else name]
    np.testing.assert_array_equal(encode(name, golden["x"], golden["imatrix"] if imatrix else NONE), expected)


@pytest.mark.parametrize("imatrix", [False, True])
@pytest.mark.parametrize("name", K_QUANTS)
def test_blocks_do_not_depend_on_their_batch(name: str, imatrix: bool) -> None:
    """43 super-blocks, as one matrix of 1 full and 1 partial batch and one by one."""
    x, weights = normal_rows(1, 43 * 256)
    x[0, 5 * 256 : 6 * 256] = 0
    whole = encode(name, x, weights if imatrix else NONE).reshape(43, -1)
    for b in range(43):
        part = slice(b * 256, b * 256 + 256)
        alone = encode(name, np.ascontiguousarray(x[:, part]), weights[part] if imatrix else NONE)
        np.testing.assert_array_equal(alone[0], whole[b])


@pytest.mark.parametrize("blocks", [1, 3, 5, 40])
@pytest.mark.parametrize("name", K_QUANTS)
def test_any_rows_give_the_bytes_of_the_whole(name: str, blocks: int) -> None:
    """The importance row begins anew with each row, wherever in a batch that is."""
    x, weights = normal_rows(37, blocks * 256, seed=blocks)
    whole, t = encode(name, x, weights), BY_NAME[name]
    out = np.zeros_like(whole)
    for row0, row1 in ((0, 1), (1, 1), (1, 14), (14, 37)):
        encoder(t)(x, weights, out, row0, row1)
    np.testing.assert_array_equal(out, whole)


def test_only_the_rows_asked_for_are_written() -> None:
    x, weights = normal_rows(9, 768)
    for name in K_QUANTS:
        out = np.full((9, BY_NAME[name].row_bytes(768)), 0xAA, np.uint8)
        encoder(BY_NAME[name])(x, weights, out, 3, 5)
        assert (out[:3] == 0xAA).all()
        assert (out[5:] == 0xAA).all()
        np.testing.assert_array_equal(out[3:5], encode(name, x, weights)[3:5])


@pytest.mark.parametrize("name", K_QUANTS)
def test_decoded_rows_are_near(name: str) -> None:
    x, weights = normal_rows(16, 1024)

    def error(w: Floats, measure: Floats) -> float:
        decoded = gguf.quants.dequantize(encode(name, x, w), gguf.GGMLQuantizationType[name])
        return float(np.sqrt((measure * (decoded - x) ** 2).sum() / (measure * x**2).sum()))

    assert error(NONE, np.ones_like(weights)) < ERROR[name]
    assert error(weights, weights) < 0.97 * error(NONE, weights)


@pytest.mark.peer
@pytest.mark.parametrize("importance", IMPORTANCE)
@pytest.mark.parametrize("name", K_QUANTS)
def test_awkward_rows_as_ggml(name: str, importance: str, llama_bin: Path) -> None:
    quantize = ctypes.CDLL(str(llama_bin / "libggml-base.so")).ggml_quantize_chunk
    quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    r = np.random.default_rng([K_QUANTS.index(name), list(IMPORTANCE).index(importance)])
    for n in (256, 1280):
        with np.errstate(all="ignore"):
            x = np.array([make(r, n) for make in AWKWARD.values()]).astype(np.float32)
            made = IMPORTANCE[importance](r, n)
        weights = NONE if made is None else made.astype(np.float32)
        ours = encode(name, x, weights)
        theirs = np.zeros_like(ours)
        importance_row = None if made is None else weights.ctypes.data
        quantize(BY_NAME[name].id, x.ctypes.data, theirs.ctypes.data, 0, *x.shape, importance_row)
        wrong = [kind for kind, a, b in zip(AWKWARD, ours, theirs, strict=True) if not np.array_equal(a, b)]
        assert wrong == [], f"rows of {n} values differ from libggml-base's: {wrong}"
