"""Encoders from Python: quantize calls them by type, checks their bytes, records them, and keeps them out of caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refuses

import quantkit
from quantkit import QuantizeOptions
from quantkit.errors import FormatError, QuantkitError, RecipeError, TypeNotSupported
from quantkit.inspect import inspect
from quantkit.kernels import dequantize
from quantkit.kernels import quantize as encode
from quantkit.pipeline.gpu.choice import cpu_reason
from quantkit.report.provenance import rebuild_command
from small_models import llama_tensors, tensor_bytes, write_model

KEY = "quantkit.quantize.encoders"


def round_to_nearest(rows: np.ndarray, imatrix: np.ndarray | None) -> np.ndarray:
    """Q8_0 by hand: a scale of f16 and 32 levels a block."""
    blocks = rows.reshape(len(rows), -1, 32)
    scale = (np.abs(blocks).max(axis=2, keepdims=True) / 127).astype(np.float16)
    levels = np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-9)).clip(-127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), levels.view(np.uint8)], axis=2).reshape(len(rows), -1)


class Keyed:
    """Q4_0 by quantkit, and what it was called with."""

    def __init__(self, cache_key: str) -> None:
        self.cache_key = cache_key
        self.calls: list[tuple[tuple[int, ...], np.ndarray | None]] = []

    def __call__(self, rows: np.ndarray, imatrix: np.ndarray | None) -> bytes:
        self.calls.append((rows.shape, imatrix))
        assert rows.dtype == np.float32
        return encode(rows, "Q4_0").tobytes()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", llama_tensors(1))


def quantize(model: Path, out: str, type_name: str, encoders: Any = None, **run: Any) -> Path:
    path = model.with_name(out)
    quantkit.quantize(model, path, type_name, QuantizeOptions(pure=True, encoders=encoders), threads=2, **run)
    return path


def test_custom_bytes_are_in_the_file(model: Path) -> None:
    path = quantize(model, "own.gguf", "Q8_0", {"q8_0": round_to_nearest}, measure_error=True)
    with quantkit.open_gguf(model) as source, quantkit.open_gguf(path) as file:
        names = [name for name, t in file.tensors.items() if t.type.name == "Q8_0"]
        assert len(names) == 9
        for name in names:
            expected = round_to_nearest(source.values(name), None)
            assert np.array_equal(file.data(name), expected.reshape(-1))
            assert np.abs(dequantize(expected, "Q8_0") - source.values(name)).max() < 1e-2
        assert file.get(KEY) == f"Q8_0 = {__name__}.round_to_nearest"


def test_other_types_keep_their_encoder(model: Path) -> None:
    with_unused = tensor_bytes(quantize(model, "own.gguf", "Q4_0", {"Q6_K": lambda rows, imatrix: 1 / 0}))
    assert with_unused == tensor_bytes(quantize(model, "plain.gguf", "Q4_0"))
    plan = quantkit.plan_quantize(
        model, model.with_name("x"), "Q4_0", QuantizeOptions(pure=True, encoders={"Q6_K": len})
    )
    assert any("Q6_K" in note for note in plan.notes)
    assert not plan.custom_encoders


def test_a_custom_encoder_is_recorded_without_a_command(model: Path) -> None:
    plain = quantize(model, "plain.gguf", "Q8_0")
    path = quantize(model, "own.gguf", "Q8_0", {"Q8_0": round_to_nearest})
    with quantkit.open_gguf(plain) as file:
        assert KEY not in file.fields
    assert rebuild_command(inspect(plain))
    assert rebuild_command(inspect(path)) == ""


def test_a_custom_encoder_gets_the_importance(data: Path, tiny_moe: Path, tmp_path: Path) -> None:
    encoder, imatrix = Keyed("1"), data / "tiny-moe-imatrix.gguf"
    options = QuantizeOptions(imatrix=imatrix, pure=True, encoders={"Q4_0": encoder})
    quantkit.quantize(tiny_moe, tmp_path / "own.gguf", "Q4_0", options, threads=2)
    name, matrix = "blk.0.ffn_up_exps.weight", quantkit.read_imatrix(imatrix)
    experts = matrix.values(name).reshape(matrix.entries[name].counts.size, -1)
    importances = [importance for _, importance in encoder.calls if importance is not None]
    assert all(any(np.array_equal(row, importance) for importance in importances) for row in experts)
    assert any(importance is None for _, importance in encoder.calls)  # the embeddings'


@pytest.mark.parametrize(
    "result",
    [
        np.zeros((1, 1), np.uint8),
        np.zeros(5, np.uint8),
        np.zeros((2, 2), np.float32),
        b"",
        None,
    ],
    ids=["shape", "size", "dtype", "bytes", "none"],
)
def test_output_of_wrong_size_is_refused_without_a_file(model: Path, result: object) -> None:
    with refuses(FormatError, "QK-E210", "Q8_0"):
        quantize(model, "own.gguf", "Q8_0", {"Q8_0": lambda rows, imatrix: result})
    assert [path.name for path in model.parent.iterdir() if "lock" not in path.name] == ["m.gguf"]


def test_a_nonfinite_scale_of_the_encoder_is_refused(model: Path) -> None:
    def faulty(rows: np.ndarray, imatrix: np.ndarray | None) -> np.ndarray:
        blocks = round_to_nearest(rows, imatrix)
        blocks[-1, :2] = np.array([np.inf], np.float16).view(np.uint8)
        return blocks

    with refuses(FormatError, "QK-E108", "Q8_0"):
        quantize(model, "own.gguf", "Q8_0", {"Q8_0": faulty})


def test_an_exception_is_chained_with_the_tensors_name(model: Path) -> None:
    def faulty(rows: np.ndarray, imatrix: np.ndarray | None) -> np.ndarray:
        raise ZeroDivisionError("by zero")

    with refuses(QuantkitError, "QK-E400", "Q8_0", "ZeroDivisionError") as caught:
        quantize(model, "own.gguf", "Q8_0", {"Q8_0": faulty})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not model.with_name("own.gguf").exists()


def test_the_cache_needs_an_encoder_key(model: Path, tmp_path: Path) -> None:
    with refuses(RecipeError, "QK-E202", "cache_key"):
        quantize(model, "own.gguf", "Q8_0", {"Q8_0": round_to_nearest}, cache=tmp_path / "cache")
    for key, calls in (("1", True), ("1", False), ("2", True)):
        encoder = Keyed(key)
        quantize(model, "own.gguf", "Q4_0", {"Q4_0": encoder}, cache=tmp_path / "cache", overwrite=True)
        assert bool(encoder.calls) is calls
    path = quantize(model, "plain.gguf", "Q4_0", cache=tmp_path / "cache")
    assert quantkit.show_cache(tmp_path / "cache").hits == 9
    with quantkit.open_gguf(path) as file:
        assert KEY not in file.fields


@pytest.mark.parametrize(
    ("options", "run", "code"),
    [
        ({"feedback": "cov.gguf"}, {}, "QK-E201"),
        ({"calibrate": ["t.txt"]}, {}, "QK-E201"),
        ({"symmetric_q40": True}, {}, "QK-E201"),
        ({"repack": True}, {}, "QK-E201"),
        ({}, {"ray": "local"}, "QK-E201"),
        ({}, {"resume": True}, "QK-E202"),
    ],
    ids=str,
)
def test_incompatible_options_are_refused(model: Path, options: dict[str, Any], run: dict[str, Any], code: str) -> None:
    encoders = {"Q4_0": lambda rows, imatrix: encode(rows, "Q4_0")}
    with refuses(RecipeError, code):
        quantkit.quantize(model, model.with_name("o"), "Q4_0", QuantizeOptions(encoders=encoders, **options), **run)
    assert not model.with_name("o").exists()


def test_unknown_types_and_noncallables_are_refused(model: Path) -> None:
    with refuses(TypeNotSupported, "QK-E301", "Q9"):
        quantize(model, "o", "Q4_0", {"Q9": len})
    with refuses(RecipeError, "QK-E210", "Q4_0"):
        quantize(model, "o", "Q4_0", {"Q4_0": "Q5_0"})


def test_a_custom_encoder_runs_on_the_cpu(model: Path) -> None:
    options = QuantizeOptions(pure=True, encoders={"Q4_0": round_to_nearest})
    plan = quantkit.plan_quantize(model, model.with_name("o"), "Q4_0", options)
    reasons = {part.encoding.custom is not None: cpu_reason(part) for t in plan.tensors for part in t.parts}
    assert reasons[True]
    plain = quantkit.plan_quantize(model, model.with_name("o"), "Q4_0", QuantizeOptions(pure=True))
    assert any(cpu_reason(part) is None for t in plain.tensors for part in t.parts)
