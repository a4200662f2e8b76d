"""ik_llama.cpp's encoders of types that both trees have: its bytes, and what they are good for.

What holds for every encoder, ranges of rows and batches, is in test_encode.py.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from peer_cache import array_answer, peer
from refusals import refuses
from type_params import IK_ENCODED, UNWEIGHTED

from conftest import DATA
from edge_rows import NO_WEIGHTS, assert_same_bytes, encode
from quantkit.errors import RecipeError
from quantkit.kernels import dequantize, quantize
from quantkit.kernels.cpu.interleave import interleave_rows
from quantkit.kernels.formats import encoder_for
from quantkit.kernels.interleave import BASES, base_of
from quantkit.types import BY_NAME, TensorType

Golden = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def golden_ik() -> Golden:
    """ik_llama.cpp's bytes for the rows of ``golden``, where they are not llama.cpp's."""
    return dict(np.load(DATA / "golden-ik-shared.npz"))


@pytest.mark.parametrize("t", IK_ENCODED, ids=str)
def test_golden_encoding_of_ik(golden: Golden, golden_ik: Golden, t: TensorType) -> None:
    weighted, expected = quantize(golden["x"], t, golden["imatrix"], encoder="ik"), golden_ik[f"{t.name}+imatrix"]
    if t.name == "IQ1_M":
        weighted, expected = (data[~with_dead_sub_blocks(golden["x"])] for data in by_block(t, weighted, expected))
        assert len(expected) > 150
    assert_same_bytes(weighted, expected, t)
    if t.name in golden:
        plain = quantize(golden["x"], t, encoder="ik")
        assert_same_bytes(plain, golden_ik[t.name] if t.name in golden_ik else golden[t.name], t)


def by_block(t: TensorType, *data: np.ndarray) -> list[np.ndarray]:
    return [rows.reshape(-1, t.block_bytes) for rows in data]


def with_dead_sub_blocks(x: np.ndarray) -> np.ndarray:
    """Return which super-blocks have some sub-blocks of zeros, where ik's IQ1_M repeats shifts of an earlier one."""
    dead = (np.abs(x).reshape(-1, 16, 16).max(axis=2) < 1e-7).sum(axis=1)
    return (dead > 0) & (dead < 16)


def test_iq1_m_shifts_sub_blocks_of_zeros_up(golden: Golden, golden_ik: Golden) -> None:
    """ik's bytes for them depend on the rows before: only their shifts and the fit of d to them may differ."""
    t, selection = BY_NAME["IQ1_M"], with_dead_sub_blocks(golden["x"])
    actual = quantize(golden["x"], t, golden["imatrix"], encoder="ik")
    actual, expected = (data[selection] for data in by_block(t, actual, golden_ik["IQ1_M+imatrix"]))
    assert np.array_equal(actual[:, :32], expected[:, :32])
    assert np.array_equal(actual[:, 32:48] & 0x77, expected[:, 32:48] & 0x77)
    dead = np.abs(golden["x"]).reshape(-1, 16, 16).max(axis=2)[selection] < 1e-7
    assert np.array_equal(actual[:, 32:48][~dead], expected[:, 32:48][~dead])
    assert not (actual[:, 32:48][dead] & 0x88).any()


def test_the_golden_file_has_the_types_with_two_encoders(golden_ik: Golden) -> None:
    assert {key.partition("+")[0] for key in golden_ik} == {t.name for t in IK_ENCODED}


def test_types_with_one_encoder_ignore_the_option() -> None:
    x = np.random.default_rng(3).standard_normal((2, 512)).astype(np.float32)
    for name, default_encoder in (("Q8_0", "mainline"), ("IQ4_KS", "ik")):
        for encoder in (None, "ik", "mainline"):
            assert encoder_for(BY_NAME[name], encoder) == default_encoder
            assert np.array_equal(quantize(x, name, encoder=encoder), quantize(x, name))
    with refuses(RecipeError, "QK-E203 best"):
        quantize(x, "Q8_0", encoder="best")


def symmetric_q4_0(x: np.ndarray) -> np.ndarray:
    """Q4_0 as ik_llama.cpp 8337e4cd3 encodes it with --symmetric-q40 (quantize_row_q4_0_symmetric)."""
    blocks = x.reshape(-1, 32)
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(7)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(d > 0, np.float32(1) / d, np.float32(0))
        shifted = blocks * inverse + np.float32(8.5)
    # A block so small that 1 / d is infinite: in C its levels become 0.
    levels = np.where(np.isfinite(shifted), np.minimum(shifted, 15), 0).astype(np.uint8)
    nibbles = levels[:, :16] | levels[:, 16:] << 4
    return np.concatenate([d.astype(np.float16).view(np.uint8), nibbles], axis=1).reshape(len(x), -1)


def test_symmetric_q4_0(golden: Golden) -> None:
    """Also interleaved; importance is ignored, and the lowest level never used."""
    x, t = golden["x"], BY_NAME["Q4_0"]
    want = symmetric_q4_0(x)
    assert_same_bytes(quantize(x, t, golden["imatrix"], encoder="symmetric"), want, t)
    interleaved = np.empty_like(want)
    interleave_rows(BY_NAME["Q4_0_R8"], want, interleaved)
    assert_same_bytes(quantize(x, "Q4_0_R8", encoder="symmetric"), interleaved, BY_NAME["Q4_0_R8"])
    nonzero = np.abs(x).reshape(-1, 32).max(axis=1) > 1e-30
    assert (want.reshape(-1, 18)[nonzero, 2:] & 15).min() == (want.reshape(-1, 18)[nonzero, 2:] >> 4).min() == 1


def random_rows(t: TensorType) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of trained models' kind, heavy-tailed and of many sizes, and an importance."""
    rng = np.random.default_rng(t.id)
    x = rng.standard_t(5, (96, 1024)) * np.exp(rng.standard_normal((96, 1)))
    return x.astype(np.float32), rng.chisquare(2, 1024).astype(np.float32)


def weighted_error(t: TensorType, x: np.ndarray, data: np.ndarray, weights: np.ndarray) -> float:
    off = (dequantize(data, t, x.shape[1]) - x).astype(np.float64)
    return float((weights * off**2).sum())


@pytest.mark.parametrize("t", IK_ENCODED, ids=str)
def test_the_weighted_error_is_no_larger_than_mainlines(t: TensorType) -> None:
    """Scales of super-blocks and fudge factors stand between the search and this error, hence the margin."""
    x, weights = random_rows(t)
    actual, mainlines = (
        weighted_error(t, x, encode(t, x, weights, encoder), weights) for encoder in ("ik", "mainline")
    )
    assert actual < 1.01 * mainlines


# ---------------------------------------------------------------- beside the wheel's library


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@pytest.fixture(scope="module")
def wheel(ik_bin: Path) -> Path:
    """The folder of the wheel's libggml."""
    return ik_bin.parent / "lib"


@cache
def opened(folder: Path) -> ctypes.CDLL:
    """The wheel's libggml, which takes 10 seconds to make the tables of IQ1_S's grid.

    It is built with FMA, which decides a few searches differently: nearly the same bytes and error.
    """
    lib = ctypes.CDLL(str(folder / "libggml.so"))
    lib.ggml_init.argtypes, lib.ggml_init.restype = [InitParams], ctypes.c_void_p
    assert lib.ggml_init(InitParams(1 << 20, None, False))  # makes the table that halves are widened by
    pointer, i64 = ctypes.c_void_p, ctypes.c_int64
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, i64, i64, i64, pointer, pointer]
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    return lib


def encoded_there(wheel: Path, t: TensorType, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    def encode_with_wheel() -> np.ndarray:
        out = np.empty((len(x), t.row_bytes(x.shape[1])), np.uint8)
        weights_address = weights.ctypes.data if weights.size else None
        opened(wheel).ggml_quantize_chunk(t.id, x.ctypes.data, out.ctypes.data, 0, *x.shape, weights_address, None)
        return out

    return array_answer(encode_with_wheel, peer(wheel), t.id, x, weights)


@pytest.mark.peer
@pytest.mark.parametrize("t", IK_ENCODED, ids=str)
def test_random_rows_equal_the_wheels(wheel: Path, t: TensorType) -> None:
    x, importance = random_rows(t)
    for weights in (importance, *((NO_WEIGHTS,) if t in UNWEIGHTED else ())):
        actual, expected = encode(t, x, weights, "ik"), encoded_there(wheel, t, x, weights)
        assert (actual == expected).mean() > 0.92
        errors = [weighted_error(t, x, data, weights if weights.size else np.ones(1024)) for data in (actual, expected)]
        assert errors[0] == pytest.approx(errors[1], rel=2e-2)


@pytest.mark.peer
@pytest.mark.parametrize("name", ["IQ1_S_R4", "IQ1_M_R4"])
@pytest.mark.parametrize("weighted", [False, True])
def test_converted_formats_nearly_equal_the_wheels(wheel: Path, name: str, weighted: bool) -> None:
    """Rows of 32 times 37 values, as neither IQ1_S nor IQ1_M has."""
    rng, n = np.random.default_rng(7), 32 * 37
    x = (rng.standard_t(5, (96, n)) * np.exp(rng.standard_normal((96, 1)))).astype(np.float32)
    weights = rng.chisquare(2, n).astype(np.float32) if weighted else NO_WEIGHTS
    actual = quantize(x, name, weights if weighted else None)
    expected = encoded_there(wheel, BY_NAME[name], x, weights)
    assert (actual == expected).mean() > 0.97
    w = weights if weighted else np.ones(n)
    errors = [weighted_error(BY_NAME[name], x, data, w) for data in (actual, expected)]
    assert errors[0] == pytest.approx(errors[1], rel=5e-3)


# ---------------------------------------------------------------- interleaved


INTERLEAVED = [t for t in map(BY_NAME.__getitem__, BASES) if base_of(t) in IK_ENCODED]


@pytest.mark.parametrize("t", INTERLEAVED, ids=str)
def test_interleaved_types_use_their_base_types_encoder(t: TensorType) -> None:
    """By default; llama.cpp's if it is asked for."""
    x, weights = random_rows(t)
    for encoder in (None, "ik", "mainline"):
        want = np.empty((len(x), t.row_bytes(x.shape[1])), np.uint8)
        interleave_rows(t, encode(base_of(t), x, weights, encoder or "ik"), want)
        assert_same_bytes(encode(t, x, weights, encoder), want, t)
