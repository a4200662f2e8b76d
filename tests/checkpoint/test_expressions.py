"""Expressions over stored tensors: any run of values is that of numpy's array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tiny_checkpoints import write_safetensors

from quantkit.checkpoint import expressions as ex
from quantkit.formats.safetensors import read_header

_RNG = np.random.default_rng(0)
ARRAYS: dict[str, npt.NDArray[Any]] = {
    "a": _RNG.normal(size=(6, 8, 10)).astype(np.float32),
    "half": _RNG.normal(size=(4, 6)).astype(np.float16),
    "whole": _RNG.integers(-9, 9, (4, 6)),
    "q": _RNG.normal(size=(16, 12)).astype(np.float32),
    "v": _RNG.normal(size=16).astype(np.float32),
}


def permuted(w: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


A, Q, V, HALF = (ARRAYS[name] for name in ("a", "q", "v", "half"))
CASES: dict[str, tuple[Any, npt.NDArray[Any]]] = {
    "transposed": (lambda t: ex.Transposed(t["a"]), A.swapaxes(1, 2)),
    "integers": (lambda t: t["whole"], ARRAYS["whole"].astype(np.float32)),
    "heads": (lambda t: ex.permute_heads(t["q"], 2), permuted(Q, 2)),
    "heads of a bias": (lambda t: ex.permute_heads(t["v"], 4), permuted(V, 4)),
    "half": (lambda t: ex.chunk(t["a"], 1, 1, 2), A[:, 4:]),
    "every other": (lambda t: ex.take(t["a"], -1, range(1, 10, 2)), A[..., 1::2]),
    "every other, transposed": (
        lambda t: ex.take(ex.Transposed(t["a"]), 1, range(0, 10, 2)),
        A.swapaxes(1, 2)[:, ::2],
    ),
    "transposed half": (lambda t: ex.Transposed(ex.chunk(t["a"], 2, 0, 2)), A[..., :5].swapaxes(1, 2)),
    "stacked": (lambda t: ex.stack([t["q"], ex.Mapped(t["q"], "plus one")]), np.stack([Q, Q + np.float32(1)])),
    "joined": (lambda t: ex.concatenate([t["a"], t["a"]]), np.concatenate([A, A])),
    "plus one in F16": (lambda t: ex.Mapped(t["half"], "plus one"), HALF + np.float16(1)),
    "shaped": (lambda t: ex.Shaped(t["a"], (48, 10)), A.reshape(48, 10)),
}


@pytest.mark.parametrize("name", CASES)
def test_any_range_of_values_is_evaluated(tmp_path: Path, name: str) -> None:
    stored = read_header(write_safetensors(tmp_path / "x.safetensors", ARRAYS))
    make, expected = CASES[name]
    x = make({key: ex.Stored(tensor) for key, tensor in stored.items()})
    assert x.shape == expected.shape
    flat, rng = np.ascontiguousarray(expected).reshape(-1).astype(np.float32), np.random.default_rng(1)
    for _ in range(80):
        start = int(rng.integers(0, flat.size))
        n = int(rng.integers(1, flat.size - start + 1))
        assert (ex.read_f32(x, start, n) == flat[start : start + n]).all()
    assert {part.name for part in x.parts()} <= stored.keys()


def test_rounding_keeps_nan_and_rounds_to_even() -> None:
    x = np.array([1.00390625, 1.01171875, np.nan, -0.0, 3.4e38, 65504.0], np.float32)
    out = np.empty(12, np.uint8)
    ex.from_f32(ex.TYPE_BF16, x, out)
    assert out.view(np.uint16).tolist() == [0x3F80, 0x3F82, 0x7FC0, 0x8000, 0x7F80, 0x4780]
    ex.from_f32(ex.TYPE_F16, x[:2], out[:4])
    assert out[:4].view(np.float16).tolist() == x[:2].astype(np.float16).tolist()


def test_float8() -> None:
    tables = [ex.float8_values(name) for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0")]
    e4m3, e5m2, e8m0 = (np.asarray(table) for table in tables)
    assert (e4m3[0x7E], e4m3[0x01], e4m3[0xB8]) == (448.0, 2.0**-9, -1.0)
    assert np.isnan(e4m3[[0x7F, 0xFF]]).all()
    assert (e5m2[0x7B], e5m2[0x7C], e5m2[0x01]) == (57344.0, np.inf, 2.0**-16)
    assert (e8m0[127], e8m0[0]) == (1.0, 2.0**-127)


@pytest.mark.parametrize("special", [(), (np.inf, -np.inf, 65519.0, 65520.0, 2.0**-24, 2.0**-25), (np.nan, np.inf)])
def test_long_runs_are_rounded_to_f16_as_by_numpy(special: tuple[float, ...]) -> None:
    """Every bit pattern of a float's upper half, so all F16 values, ties between them, and denormals."""
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    ties = (np.arange(1 << 16, dtype=np.uint32) * 0x2000 + 0x38001000).view(np.float32)
    values = np.concatenate([values, ties, values[::-1]])
    values = np.concatenate([values[np.isfinite(values)], np.array(special, np.float32), np.zeros(1 << 17, np.float32)])
    out = np.empty(2 * values.size, np.uint8)
    ex.from_f32(ex.TYPE_F16, values, out)
    with np.errstate(over="ignore", invalid="ignore"):
        assert out.tobytes() == values.astype(np.float16).tobytes()
