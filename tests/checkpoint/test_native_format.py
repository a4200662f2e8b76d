"""Mistral's own format, dense layers of embedding models, classes that are known by their files: refusals and notes.

test_convert_goldens.py compares the bytes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refuses

import checkpoints
from quantkit.checkpoint.registry import ARCHITECTURES
from quantkit.checkpoint.torch_math import fma
from quantkit.convert import ConvertOptions, plan_convert
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.kernels.cpu.linear import blocks, multiply
from quantkit.kernels.cpu.low_rank import strips

pytestmark = pytest.mark.usefixtures("services_in_process")


def native(**changes: Any) -> ConvertOptions:
    return ConvertOptions(**{"mistral_format": True, "allow_other_ids": True, "pre": "tekken"} | changes)


def change_json(path: Path, **changes: Any) -> None:
    """Change values of a JSON file; None removes a key."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def test_params_json_alone_names_the_option(tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint("mistral-native", tmp_path)
    assert plan_convert(folder, tmp_path / "x.gguf", None, native()).tensors
    (folder / "config.json").unlink()
    assert plan_convert(folder, tmp_path / "x.gguf", None, native()).tensors
    with refuses(FormatError, "QK-E101 params.json --mistral-format"):
        plan_convert(folder, tmp_path / "x.gguf")


def test_the_option_needs_the_files(tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint("llama-tied", tmp_path)
    with refuses(FormatError, "QK-E101 params.json --mistral-format"):
        plan_convert(folder, tmp_path / "x.gguf", None, native())
    (folder / "params.json").write_text('{"dim": 64}')
    with refuses(FormatError, "QK-E101 consolidated"):
        plan_convert(folder, tmp_path / "x.gguf", None, native())


@pytest.mark.parametrize(
    ("name", "file", "changes", "refusal"),
    [
        ("mistral-native-v15", "params.json", {}, "QK-E114 v15 --disable-mistral-community-chat-template"),
        ("mistral-native", "params.json", {"quantization": {"qformat_weight": "int4"}}, "QK-E304 int4"),
        ("mistral-native", "params.json", {"yarn": {"factor": 2.0}}, "QK-E112 params.json"),
        ("mistral-native", "params.json", {"head_dim": None, "dim": 64}, "QK-E112 params.json hidden_size"),
        ("mistral-native-moe", "params.json", {"yarn": None}, "QK-E112 yarn"),
        ("mistral-native-moe", "params.json", {"moe": {}}, "QK-E112 n_routed_experts"),
        ("mistral-native-moe", "params.json", {"moe": []}, "QK-E112 moe"),
    ],
)
def test_wrong_settings_are_named(name: str, file: str, changes: Any, refusal: str, tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint(name, tmp_path)
    change_json(folder / file, **changes)
    with refuses((FormatError, TypeNotSupported), refusal):
        plan_convert(folder, tmp_path / "x.gguf", None, native())


def test_dense_layers_that_are_left_out_are_noted(tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint("gemma-embedding-dense", tmp_path)
    plan = plan_convert(folder, tmp_path / "x.gguf")
    assert (
        sum("2_Dense, 3_Dense" in note and "--sentence-transformers-dense-modules" in note for note in plan.notes) == 1
    )
    assert not {"dense_2.weight", "dense_3.weight"} & {t.name for t in plan.tensors}
    options = ConvertOptions(sentence_transformers_dense_modules=True)
    plan = plan_convert(folder, tmp_path / "x.gguf", None, options)
    assert {"dense_2.weight", "dense_3.weight"} <= {t.name for t in plan.tensors}
    assert not any("Dense" in note for note in plan.notes)


def test_a_dense_layer_outside_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint("gemma-embedding-dense", tmp_path)
    modules = [{"path": "../2_Dense", "type": "sentence_transformers.models.Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with refuses(FormatError, "QK-E111 modules.json"):
        plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(sentence_transformers_dense_modules=True))


@pytest.mark.parametrize(
    ("name", "file", "changes", "refusal"),
    [
        ("mm-clef", "joint_head_config.json", {"heads": "x"}, "QK-E112 heads"),
        ("mm-clef", "joint_head_config.json", {"layers": 1}, "QK-E107"),
        ("laya", "rl_agent_config.json", {"temperature": ["hot"]}, "QK-E112 temperature choice"),
        ("laya", "rl_agent_config.json", {"head_layers": None}, "QK-E112 head_layers"),
        ("hrm-text", "config.json", {"L_cycles": None}, "QK-E112 L_cycles"),
        ("granite-switch", "config.json", {"num_key_value_heads": 3}, "QK-E106"),
        ("mm-qwen4-exp", "config.json", {"text_config": None}, "QK-E112"),
    ],
)
def test_wrong_settings_of_other_classes_are_named(
    name: str, file: str, changes: Any, refusal: str, tmp_path: Path
) -> None:
    folder = checkpoints.write_checkpoint(name, tmp_path)
    change_json(folder / file, **changes)
    options = ConvertOptions(**checkpoints.describe(name).convert_keywords())
    with refuses((FormatError, TypeNotSupported), refusal):
        plan_convert(folder, tmp_path / "x.gguf", None, options)


@pytest.mark.parametrize(
    ("name", "changes", "refusal"),
    [
        ("mm-glm5-next", {"mla_use_nope": False}, "QK-E305 mla_use_nope"),
        ("mm-glm5-next", {"layer_types": ["linear_attention"]}, "QK-E112 layer_types"),
        ("mm-qwen4-exp", {"split_ngram_parts": 9}, "QK-E105 split_ngram_parts"),
        ("mm-qwen4-exp", {"eos_token_id": None}, "QK-E112 eos_token_id"),
    ],
)
def test_wrong_settings_of_text_models_are_named(name: str, changes: Any, refusal: str, tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint(name, tmp_path)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change_json(folder / "config.json", text_config=text | changes)
    options = ConvertOptions(**checkpoints.describe(name).convert_keywords())
    with refuses(FormatError, refusal):
        plan_convert(folder, tmp_path / "x.gguf", None, options)


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint("mm-clef", tmp_path)
    (folder / "joint_head.safetensors").unlink()
    options = ConvertOptions(**checkpoints.describe("mm-clef").convert_keywords())
    with refuses(FormatError, "QK-E401 joint_head.safetensors"):
        plan_convert(folder, tmp_path / "x.gguf", None, options)


@pytest.mark.parametrize("name", ["mm-pocket-tts", "laya"])
def test_classes_without_a_configuration_are_known_by_their_files(name: str, tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint(name, tmp_path)
    options = ConvertOptions(**checkpoints.describe(name).convert_keywords())
    expected = plan_convert(folder, tmp_path / "x.gguf", None, options)
    (folder / "config.json").unlink()
    plan = plan_convert(folder, tmp_path / "x.gguf", None, options)
    assert [t.name for t in plan.tensors] == [t.name for t in expected.tensors]


def test_a_class_with_encoders_alone_says_so(tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint("mm-ultravox", tmp_path)
    with refuses(TypeNotSupported, "QK-E304 UltravoxModel --mmproj-only"):
        plan_convert(folder, tmp_path / "x.gguf")
    assert len(ARCHITECTURES) >= 258
    shutil.rmtree(folder)


@pytest.mark.parametrize(("rows", "terms", "columns"), [(1, 1, 1), (5, 64, 17), (3, 200, 16), (4, 400, 33)])
def test_products_are_chains_of_fused_operations(rows: int, terms: int, columns: int) -> None:
    """In parts of at most 192 terms, or two halves, whose sums are added: as sgemm of torch computes them."""
    random = np.random.default_rng(rows)
    x, a = (random.standard_normal(shape, dtype=np.float32) for shape in ((rows, terms), (terms, columns)))
    expected = np.zeros((rows, columns), np.float32)
    for block in blocks(terms):
        total = np.zeros_like(expected)
        for k in block:
            total = fma(x[:, k : k + 1], a[k], total)
        expected = expected + total
    assert np.array_equal(multiply(x, strips(a), columns), expected)
