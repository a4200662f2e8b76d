"""ik_llama.cpp's own types: rounding to their levels, and bytes against a build of the peer with FMA."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numba import njit
from type_params import ENCODABLE

from edge_rows import NO_WEIGHTS, encode
from quantkit.kernels import dequantize
from quantkit.kernels.cpu.core.simd import f32x16, load, store
from quantkit.kernels.cpu.encode import ik_levels
from quantkit.kernels.cpu.encode.ik_levels import Levels
from quantkit.kernels.tables import table
from quantkit.types import TensorType

f32 = np.float32
IK_QUANTS = [t for t in ENCODABLE if t.trees == "ik" and t.family == "ik_quant"]
LEVELS = [(n, getattr(ik_levels, f"IQ{n}")) for n in (2, 3, 4, 5, 6)]


def neighbours_of(points: np.ndarray) -> np.ndarray:
    """Return the points and the floats up to 40 before and after each."""
    parts = [points.astype(f32)]
    for end in (f32(-1e9), f32(1e9)):
        step = parts[0]
        for _ in range(40):
            step = np.nextafter(step, end)
            parts.append(step)
    return np.concatenate(parts)


def ik_level(v: np.ndarray, values: np.ndarray, plain: bool) -> np.ndarray:
    """Return the levels nearest to v: best_index_iq2nl and its like."""
    low = np.clip(np.searchsorted(values, v, side="right") - 1, 0, len(values) - 2)
    below, above = values[low], values[low + 1]
    level: np.ndarray = low + np.where(plain, v >= (below + above) / 2, ~(v - below < above - v))
    return level


@pytest.mark.parametrize(("bits", "levels"), LEVELS, ids=lambda v: str(v) if isinstance(v, int) else "")
@pytest.mark.parametrize("shifted", [False, True])
def test_every_value_gets_its_level(bits: int, levels: Levels, shifted: bool) -> None:
    values = table("kvalues_iq4nl" if bits == 4 else f"kvalues_iq{bits}nl").astype(f32) + f32(shifted * levels.shift_by)
    v = np.concatenate([neighbours_of((values[1:] + values[:-1]) / 2), np.linspace(-140, 140, 100003).astype(f32)])
    v = np.concatenate([v, np.array([1e9, -1e9, -3e38], f32), np.zeros(-(len(v) + 3) % 16, f32)])
    round_any = levels.round_any

    @njit
    def run(v, level, value):  # type: ignore[no-untyped-def]
        for i in range(0, 4 * v.size, 64):
            x = load(f32x16, v, i)
            levels = round_any(x, (x == x) if shifted else (x != x))  # noqa: PLR0124
            store(level, i, levels[0])
            store(value, i, levels[1])

    level, value = np.zeros(len(v), np.int32), np.zeros(len(v), f32)
    run(v, level, value)
    want = ik_level(v, values, not shifted)
    assert np.array_equal(level, want)
    assert np.array_equal(value, values[want])
    # Beyond int, C converts to INT_MIN.
    run(np.full(16, 3e9, f32), level, value)
    assert not level[:16].any()


@pytest.fixture(scope="session")
def ik_encode(ik_bin: Path) -> Callable[[TensorType, np.ndarray, np.ndarray], np.ndarray]:
    library = ctypes.CDLL(str(ik_bin.parent / "lib" / "libggml.so"))
    chunk, pointer, i64 = library.ggml_quantize_chunk, ctypes.c_void_p, ctypes.c_int64
    chunk.restype, chunk.argtypes = ctypes.c_size_t, [ctypes.c_int, pointer, pointer, i64, i64, i64, pointer, pointer]

    def run(t: TensorType, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        out = np.zeros((len(x), t.row_bytes(x.shape[1])), np.uint8)
        importance = weights.ctypes.data if weights.size else None
        chunk(t.id, x.ctypes.data, out.ctypes.data, 0, *x.shape, importance, None)
        return out

    return run


@pytest.mark.peer
@pytest.mark.parametrize("t", IK_QUANTS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_nearly_the_bytes_of_a_build_with_fma(
    t: TensorType, weighted: bool, ik_encode: Callable[[TensorType, np.ndarray, np.ndarray], np.ndarray]
) -> None:
    """Golden bytes are of a build without: there the bytes are equal (test_kernels.py)."""
    rng = np.random.default_rng(7)
    x = (rng.standard_t(4, (48, 1280)) * np.exp(rng.standard_normal((48, 1)))).astype(f32)
    weights = rng.chisquare(2, 1280).astype(f32) if weighted else NO_WEIGHTS
    actual, expected = encode(t, x, weights), ik_encode(t, x, weights)
    assert (actual == expected).mean() > 0.92
    w = weights if weighted else f32(1)
    error, their_error = (float((w * (dequantize(data, t, 1280) - x) ** 2).sum()) for data in (actual, expected))
    assert error < 1.001 * their_error
