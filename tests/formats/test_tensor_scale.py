"""I2_S: one scale behind the rows of a tensor, which --unrepack gives to every row."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import write_gguf
from quantkit.kernels import dequantize
from quantkit.pipeline import jobs as jobs_module
from quantkit.quantize import QuantizeOptions, plan_quantize, quantize
from quantkit.types import BY_NAME
from small_models import llama_fields, tensor_bytes

UNREPACK = QuantizeOptions(unrepack=True)
N, ROWS = 384, 24


def random_rows(rows: int = ROWS, n: int = N, scale: float = 0.37) -> np.ndarray:
    """Return the bytes of a tensor of I2_S: random levels, a scale, padding."""
    rng = np.random.default_rng(5)
    levels = rng.integers(0, 256, rows * n // 4, dtype=np.uint8)
    return np.concatenate([levels, np.array([scale], "<f4").view(np.uint8), np.zeros(28, np.uint8)])


def values(data: np.ndarray, count: int) -> np.ndarray:
    """Decode as ggml does: of 32 bytes, the high bits of all first."""
    scale = data[count // 4 : count // 4 + 4].view("<f4")[0]
    groups = data[: count // 4].reshape(-1, 1, 32) >> np.array([6, 4, 2, 0], np.uint8)[:, None] & 3
    return np.float32(scale) * (groups.reshape(-1).astype(np.float32) - 1)


def model(path: Path, data: np.ndarray, shape: tuple[int, ...] = (N, ROWS)) -> Path:
    write_gguf(path, llama_fields(), [("blk.0.ffn_up.weight", shape, BY_NAME["I2_S"], data.tobytes())])
    return path


@pytest.mark.peer
def test_the_values_equal_iks(ik_bin: Path) -> None:
    lib = ctypes.CDLL(str(ik_bin.parent / "lib/libggml.so"))
    data, out = random_rows(), np.empty(N * ROWS, np.float32)
    lib.dequantize_row_ms_i2s(
        data.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(out.size)
    )
    np.testing.assert_array_equal(values(data, out.size), out)


@pytest.mark.parametrize("shape", [(N, ROWS), (N, ROWS // 3, 3)])
def test_unrepack_keeps_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr(jobs_module, "JOB", 5 * N)  # several jobs, each with the same tail
    quantize(model(tmp_path / "a.gguf", random_rows(), shape), tmp_path / "b.gguf", "COPY", UNREPACK)
    kind, data = tensor_bytes(tmp_path / "b.gguf")["blk.0.ffn_up.weight"]
    assert kind == "IQ2_BN"
    actual = dequantize(np.frombuffer(data, np.uint8).reshape(ROWS, -1), "IQ2_BN", N)
    np.testing.assert_array_equal(actual.reshape(-1), values(random_rows(), N * ROWS))


def test_other_types_are_encoded_from_the_values(tmp_path: Path) -> None:
    source = model(tmp_path / "a.gguf", random_rows())
    with refuses(TypeNotSupported, "QK-E209 --allow-requantize"):
        plan_quantize(source, tmp_path / "b.gguf", "F32")
    quantize(source, tmp_path / "b.gguf", "F32", QuantizeOptions(allow_requantize=True))
    kind, data = tensor_bytes(tmp_path / "b.gguf")["blk.0.ffn_up.weight"]
    assert kind == "F32"
    np.testing.assert_array_equal(np.frombuffer(data, np.float32), values(random_rows(), N * ROWS))


def test_rows_that_share_a_block_are_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "a.gguf", random_rows(8, 64), (64, 8))
    with refuses(TypeNotSupported, "QK-E303 64 128"):
        quantize(source, tmp_path / "b.gguf", "COPY", UNREPACK)


def test_a_nonfinite_scale_is_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "a.gguf", random_rows(scale=np.nan))
    with refuses(FormatError, "QK-E108 blk.0.ffn_up.weight"):
        quantize(source, tmp_path / "b.gguf", "COPY", UNREPACK)
    assert not (tmp_path / "b.gguf").exists()
