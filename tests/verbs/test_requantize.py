"""Sources of any type: what re-quantizing them costs is measured and told, and every decodable type can be one."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from type_params import DECODABLE

from quantkit.formats.gguf import write_gguf
from quantkit.kernels import dequantize, quantize
from quantkit.kernels.formats import has_encoder
from quantkit.kernels.interleave import base_of
from quantkit.pipeline.quality import QUALITY
from quantkit.quantize import QuantizeOptions, plan_quantize
from quantkit.quantize import quantize as quantize_file
from quantkit.types import BY_NAME, TYPES, TensorType
from small_models import llama_fields, tensor_bytes

N = 512


def model(path: Path, t: TensorType) -> tuple[Path, np.ndarray]:
    """Write a model whose one matrix is of type ``t``; return its values, too."""
    x = np.random.default_rng(3).standard_t(6, (96, N)).astype(np.float32)
    data = quantize(x, t, np.ones(N, np.float32))
    write_gguf(path, llama_fields(), [("blk.0.ffn_up.weight", (N, 96), t, data.tobytes())])
    return path, dequantize(data, t, N)


@pytest.mark.parametrize("t", [t for t in TYPES if has_encoder(t) and t.is_quantized], ids=str)
def test_any_type_is_a_source(t: TensorType, tmp_path: Path) -> None:
    source, x = model(tmp_path / "m.gguf", t)
    second_type = "Q5_0" if base_of(t).name == "Q4_0" else "Q4_0"
    result = quantize_file(source, tmp_path / "o.gguf", second_type, QuantizeOptions(allow_requantize=True))
    data = np.frombuffer(tensor_bytes(tmp_path / "o.gguf")["blk.0.ffn_up.weight"][1], np.uint8).reshape(96, -1)
    assert np.array_equal(data, quantize(x, second_type))
    (note,) = [n for n in result.plan.notes if "re-quantizing" in n]
    error = 100 * np.linalg.norm(dequantize(data, second_type, N)[16:80] - x[16:80]) / np.linalg.norm(x[16:80])
    assert f"1 tensor from {t} to {second_type} adds an error of {error:.3g} % (measured)" in note
    assert re.search(rf"typically [\d.]+ %; {second_type} of the original weights loses [\d.]+ %$", note)


@pytest.mark.parametrize(("target", "encoder"), [("Q6_K_R4", None), ("Q6_K_R4", "mainline"), ("Q6_K", "ik")])
def test_the_originals_error_uses_the_same_encoder(tmp_path: Path, target: str, encoder: str | None) -> None:
    source, _ = model(tmp_path / "m.gguf", BY_NAME["Q8_K_R8"])
    options = QuantizeOptions(allow_requantize=True, encoder=encoder)
    (note,) = plan_quantize(source, tmp_path / "o.gguf", target, options).notes
    best = QUALITY["Q6_K" if encoder == "mainline" else "Q6_K_R4"].error
    assert note.endswith(f"{QUALITY['Q8_K_R8'].error:.3g} %; {target} of the original weights loses {best:.3g} %")


def test_lossless_requantization_is_not_mentioned(tmp_path: Path) -> None:
    names = {t.name: t for t in DECODABLE}
    for t, target in (("F16", "Q4_0"), ("Q8_0", "F16"), ("Q8_0", "COPY")):
        source, _ = model(tmp_path / f"{t}.gguf", names[t])
        plan = plan_quantize(source, tmp_path / "o.gguf", target, QuantizeOptions(allow_requantize=True))
        assert not [n for n in plan.notes if "re-quantizing" in n]
