"""Rows that are awkward to encode, and ggml itself to compare with (ctypes on libggml-base.so)."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from peer_cache import array_answer, peer
from type_params import UNWEIGHTED

from quantkit.kernels.formats import FORMATS
from quantkit.types import TensorType

NO_WEIGHTS = np.empty(0, np.float32)


def awkward_rows(n: int, seed: int, huge: float = 1e30) -> np.ndarray:
    """Return float32 [rows, n]: whole rows of each kind, then rows that mix all kinds, 32 values of a kind at a
    time."""
    rng = np.random.default_rng(seed)
    kinds = np.array(list(_kinds(n, rng, huge).values()), np.float64).astype(np.float32)
    pick = rng.integers(len(kinds), size=(12, -(-n // 32))).repeat(32, axis=1)[:, :n]
    return np.concatenate([kinds, np.take_along_axis(kinds, pick, 0)])


def _kinds(n: int, rng: np.random.Generator, huge: float) -> dict[str, Any]:
    gauss, sign = rng.standard_normal(n), rng.choice([-1.0, 1.0], n)
    spike = np.zeros(n)
    spike[rng.integers(n, size=1 + n // 97)] = -3.0
    zeros = np.where(rng.random(n) < 0.5, -0.0, 0.0)
    by_16 = rng.standard_normal(-(-n // 16)).repeat(16)[:n]
    step = (n // 7 + 1) * 2.0**-149
    return {
        "gauss": gauss,
        "lognormal": sign * np.exp(2 * gauss),
        "zero": np.zeros(n),
        "both zeros": zeros,
        "zeros below": np.where(rng.random(n) < 0.5, zeros, abs(gauss)),
        "zeros above": np.where(rng.random(n) < 0.5, zeros, -abs(gauss)),
        "constant": np.full(n, 0.7),
        "negative constant": np.full(n, -0.3),
        "two ties": sign,
        "ties": rng.integers(-4, 5, n) / 4,
        "halves": rng.integers(-31, 32, n) / 2,
        "denormal": rng.integers(-40, 41, n) * 2.0**-149,
        "small denormal": rng.integers(-2, 3, n) * 2.0**-149,
        "near denormal": gauss * step * 1e3,
        "tiny": gauss * 1e-20,
        "at the threshold": np.sign(gauss) * rng.choice([0.9e-15, 1.1e-15], n),
        "f16 denormal": gauss * 1e-6,
        "big": gauss * 1e4,
        "huge": np.clip(gauss, -3, 3) * huge,
        "1e7, beyond f16": gauss * 1e7,
        "1e18": gauss * 1e18,
        "heavy tails": rng.standard_cauchy(n),
        "two values": np.where(rng.random(n) < 0.5, -3.0, 1.0),
        "constant sub-blocks": by_16,
        "denormal sub-blocks": gauss * np.where(by_16 > 0, 1e-39, 1),
        "sub-blocks of all sizes": gauss * np.exp(3 * by_16),
        "sub-blocks of absurd sizes": gauss * np.exp(12 * np.clip(by_16, -3, 3)),
        "few sub-blocks": gauss * (by_16 > 1.3),
        "spike": spike,
        "single spike": np.where(np.arange(n) == rng.integers(n), 1.0, 0),
        "outlier": np.where(rng.random(n) < 0.01, gauss * 1e5, gauss),
        "positive": abs(gauss),
        "negative": -abs(gauss),
        "offset": 100 + gauss * 1e-4,
        "negative offset": -1 + gauss * 1e-6,
        "narrow, far from 0": -5 + gauss * 1e-2,
        "narrow": 1 + rng.integers(0, 3, n) * 2.0**-23,
        "sparse": np.where(rng.random(n) < 0.9, 0, gauss),
        "ternary": rng.integers(-1, 2, n) * 0.02,
        "ramp": np.linspace(-1, 1, n),
        "bf16": (gauss.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
    }


def awkward_imatrix(n: int, seed: int) -> np.ndarray:
    """Return float32 [n], with zeros, whole blocks of zeros, tiny and huge entries."""
    rng = np.random.default_rng(seed)
    weights = np.exp(2 * rng.standard_normal(n))
    weights[rng.random(n) < 0.1] = 0
    weights[rng.random(n) < 0.02] = 1e-30
    weights[rng.random(n) < 0.02] = 1e12
    blocks = rng.random(-(-n // 32)) < 0.15
    weights[blocks.repeat(32)[:n]] = 0
    return weights.astype(np.float32)


def weights_for(t: TensorType, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return no weights, unless the type requires them, and the given ones, even if it ignores them."""
    return ((NO_WEIGHTS,) if t in UNWEIGHTED else ()) + ((weights,) if t.is_quantized else ())


def within_reach(t: TensorType, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return x, clipped for types with a grid: ggml aborts if no neighbour of a point has a finite distance."""
    if not FORMATS[t.name].grid:
        return x
    limit = np.cbrt(1e36 / max(float(weights.max(initial=1)), 1.0))
    clipped: np.ndarray = np.clip(x, -limit, limit).astype(np.float32)
    return clipped


def boundary_bits() -> np.ndarray:
    """Return f32 bits around every value and every midpoint of two values of F16 and BF16, both signs, also NaN."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    brains = np.arange(1 << 16, dtype=np.uint32) << 16
    middles = np.concatenate([halves + np.uint32(0x1000), brains + np.uint32(0x8000)])
    centers = np.concatenate([halves, brains, middles])
    return np.concatenate([centers - np.uint32(1), centers, centers + np.uint32(1)])


#: Kinds of importance: a function of a generator and the columns each.
IMPORTANCE: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "ones": lambda r, n: np.ones(n),
    "lognormal": lambda r, n: np.exp(r.standard_normal(n)),
    "wild": lambda r, n: np.exp(6 * r.standard_normal(n)),
    "zero entries": lambda r, n: np.exp(r.standard_normal(n)) * (r.random(n) < 0.7),
    "zero sub-blocks": lambda r, n: np.exp(r.standard_normal(n)) * (r.standard_normal(n // 16).repeat(16) > 0),
    "zero super-blocks": lambda r, n: np.exp(r.standard_normal(n)) * (np.arange(n) >= n // 2),
    "zeros": lambda r, n: np.zeros(n),
    "tiny": lambda r, n: 1e-30 * np.exp(r.standard_normal(n)),
    "denormal": lambda r, n: 1e-41 * np.exp(r.standard_normal(n)),
    "huge": lambda r, n: 1e30 * np.exp(r.standard_normal(n)),
}


@cache
def ggml(folder: Path) -> ctypes.CDLL:
    """Return libggml-base of ``folder`` with the signatures that the tests use."""
    library = ctypes.CDLL(str(folder / "libggml-base.so"))
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, i64, i64, i64, pointer]
    library.ggml_validate_row_data.restype = ctypes.c_bool
    library.ggml_validate_row_data.argtypes = [ctypes.c_int, pointer, ctypes.c_size_t]
    for name in ("ggml_fp32_to_fp16_row", "ggml_fp32_to_bf16_row_ref"):
        getattr(library, name).argtypes = [pointer, pointer, i64]
    return library


def ggml_encode(folder: Path, t: TensorType, x: np.ndarray, weights: np.ndarray = NO_WEIGHTS) -> np.ndarray:
    """Return ggml_quantize_chunk's bytes, uint8 [rows, row_bytes]."""
    x = np.ascontiguousarray(x, np.float32)

    def encode() -> np.ndarray:
        out = np.empty((len(x), t.row_bytes(x.shape[1])), np.uint8)
        importance = weights.ctypes.data if weights.size else None
        ggml(folder).ggml_quantize_chunk(t.id, x.ctypes.data, out.ctypes.data, 0, *x.shape, importance)
        return out

    # ggml needs seconds for the tables of a grid.
    return array_answer(encode, peer(folder), t.id, x, weights) if FORMATS[t.name].grid else encode()


def encode(t: TensorType, x: np.ndarray, weights: np.ndarray = NO_WEIGHTS, encoder: str | None = None) -> np.ndarray:
    """Return the encoder's bytes, without the checks of quantkit.kernels.quantize."""
    from quantkit.kernels.cpu.encode import encoder as encoder_of

    x = np.ascontiguousarray(x, np.float32)
    out = np.full((len(x), t.row_bytes(x.shape[1])), 0xA5, np.uint8)
    encoder_of(t, encoder)(x, weights, out, 0, len(x))
    return out


def hashes(types: Iterable[TensorType]) -> dict[str, str]:
    """Return a hash of each type's encoded edge rows, with weights and without."""
    digests = {}
    for t in types:
        digest, n = hashlib.sha256(), 3 * t.block if t.is_quantized else 33
        for seed, huge in enumerate((1e30, 1e12, 1e20, 1e37)):
            for weights in weights_for(t, awkward_imatrix(n, seed)):
                x = within_reach(t, awkward_rows(n, seed, huge), weights)
                digest.update(encode(t, x, weights).tobytes())
        digests[t.name] = digest.hexdigest()
    return digests


def assert_same_bytes(actual: np.ndarray, expected: np.ndarray, t: TensorType) -> None:
    """Fail with the row, the block and the bytes of the first difference between two encodings."""
    if np.array_equal(actual, expected):
        return
    row, byte = np.argwhere(actual != expected)[0]
    block = byte // t.block_bytes
    span = slice(block * t.block_bytes, (block + 1) * t.block_bytes)
    count = len(np.unique(np.argwhere(actual != expected)[:, 0]))
    raise AssertionError(
        f"{t.name}: {count} of {len(actual)} rows differ, first row {row}, block {block}:\n"
        f"ours   {actual[row, span].tobytes().hex()}\ntheirs {expected[row, span].tobytes().hex()}"
    )
