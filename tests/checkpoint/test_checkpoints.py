"""Checkpoints are generated identically everywhere, and quantized ones decode to their weights.

A forgotten step of CONTRIBUTING.md, "Add a class to `convert`", fails here.
"""

from __future__ import annotations

import json
import struct
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
from refusals import refuses

import checkpoints
import quantized_checkpoints
from guide import step
from quantkit.checkpoint import models
from quantkit.checkpoint.class_defaults import DEFAULTS
from quantkit.checkpoint.export.classes import of_architecture
from quantkit.checkpoint.registry import ARCHITECTURES, CLASSES, HF_ENCODERS, MMPROJ
from quantkit.checkpoint.tensor_names import KINDS
from quantkit.convert import ConvertOptions, plan_convert
from quantkit.errors import TypeNotSupported

DATA = Path(__file__).parents[1] / "data"
ROOT = Path(__file__).parents[2]
EXPECTED: dict[str, Any] = json.loads((DATA / "convert-sha256.json").read_text())
NAMES = sorted(EXPECTED)


ENCODERS: dict[str, Any] = json.loads((DATA / "mmproj-sha256.json").read_text())
#: The class of each described checkpoint.
DESCRIBED = {(checkpoints.describe(name).config.get("architectures") or [""])[0] for name in checkpoints.NAMES}
DESCRIBED |= {ENCODERS[name]["class"] for name in NAMES if name in checkpoints.TOWERS}
DESCRIBED |= {
    checkpoints.describe(name).config["architectures"][0] for name in (*checkpoints.DRAFTS, *checkpoints.ADAPTERS)
}
#: Architectures that are not exported, and why.
NOT_EXPORTED = {
    "clef": "its head is another file",
    "cogvlm": "files of text models lack the weights that the model has for images",
    "dflash": "a draft model, which has its target's vocabulary",
    "eagle3": "a draft model, which has its target's vocabulary",
    "glm5-next": "its attention is split and its padding of A_log dropped",
    "graniteswitch": "a class of remote code",
    "hrm_text": "a class of remote code",
    "pockettts": "the embeddings contain what the latents were projected to",
    "qwen3tts": "two layers are folded into the embeddings",
    "qwen4exp": "the shards of the embeddings of n-grams are joined",
    "wavtokenizer-dec": "a class of remote code",
}
#: Classes without a checkpoint whose row is no other's: text models that are converted as another class's, by what they
#: leave out or call otherwise.
WITHOUT_CHECKPOINT = {
    "BailingMoeV3VLForConditionalGeneration": "BailingMoeV3ForCausalLM, with sections of rope, without a projector",
    "GlmOcrForConditionalGeneration": "Glm4ForCausalLM, with a prediction layer as GLM 4.5 has it",
    "Qwen2Model": "Qwen2ForCausalLM, by bare names",
    "Qwen3Model": "Qwen3ForCausalLM, by bare names",
    "Sarashina2VisionForCausalLM": "LlamaForCausalLM, by names that begin with llm.",
    "SolarOpenForCausalLM": "Glm4MoeForCausalLM, with other special tokens",
    "VLlama3ForCausalLM": "LlamaForCausalLM, with 32 heads where config.json does not say",
}
#: Model types of transformers 4 without defaults: config.json says all that is read, or a stand-in runs them.
# fmt: off
WITHOUT_DEFAULTS = {
    "Dream", "PanguEmbedded", "baichuan", "bailing_moe", "bamba", "codeshell", "deci", "exaone", "falcon_h1",
    "falcon_mamba", "gemma3n_text", "granitemoehybrid", "hunyuan_vl", "internlm2", "internlm3", "kimi_k2", "llada",
    "maincoder", "mamba", "mamba2", "minicpm", "minimax_m1", "nanbeige", "nemotron-nas", "orion", "qwen", "sarvam_moe",
    "xverse",
}
# fmt: on
guide_step = partial(step, "Add a class to `convert`")


def rows_of(module: Any) -> dict[str, Any]:
    """Return the text models of a family's module; some have only encoders."""
    rows: dict[str, Any] = getattr(module, "ARCHITECTURES", {})
    return rows


def test_every_row_has_a_checkpoint() -> None:
    rows = {id(ARCHITECTURES[name]) for name in DESCRIBED & ARCHITECTURES.keys()}
    missing = {name for name, row in ARCHITECTURES.items() if id(row) not in rows}
    assert missing == WITHOUT_CHECKPOINT.keys(), f"{missing ^ WITHOUT_CHECKPOINT.keys()}: {guide_step(4)}"


def test_every_checkpoint_has_a_model_class() -> None:
    assert ARCHITECTURES.keys() >= DESCRIBED, f"{DESCRIBED - ARCHITECTURES.keys()}: {guide_step(1)}"


def test_every_model_type_has_defaults() -> None:
    """Those of transformers 5 are not known to the version whose defaults llama.cpp relies on."""
    described = map(checkpoints.describe, checkpoints.NAMES)
    types = {description.config.get("model_type") for description in described if description.transformers == 4}
    missing = types - DEFAULTS.keys()
    assert missing == WITHOUT_DEFAULTS, f"{missing ^ WITHOUT_DEFAULTS}: {guide_step(3)}"


def test_every_architecture_is_exported() -> None:
    missing = {row.arch for row in ARCHITECTURES.values() if not of_architecture(row.arch)}
    assert missing == NOT_EXPORTED.keys(), f"{missing ^ NOT_EXPORTED.keys()}: {guide_step(7)}"


def families() -> dict[str, str]:
    """Return a checkpoint for each module of models, the one with the shortest description."""
    names: dict[str, str] = {}
    for name in sorted(checkpoints.NAMES, key=lambda name: (DATA / "checkpoints" / f"{name}.json").stat().st_size):
        (model,) = checkpoints.describe(name).config["architectures"]
        module = next(m for m in iter_modules(models.__path__) if model in rows_of(family_of(m.name)))
        names.setdefault(module.name, name)
    return names


def family_of(name: str) -> Any:
    return import_module(f"quantkit.checkpoint.models.{name}")


@pytest.mark.parametrize("name", [pytest.param(name, id=family) for family, name in sorted(families().items())])
def test_a_family_has_a_plan(name: str, tmp_path: Path) -> None:
    """test_convert_goldens.py checks the bytes."""
    description = checkpoints.describe(name)
    folder = checkpoints.write_description(description, tmp_path)
    plan = plan_convert(folder, tmp_path / "o.gguf", None, ConvertOptions(**description.convert_keywords()))
    assert plan.tensors


def test_every_checkpoint_was_converted_by_the_reference() -> None:
    missing = set(checkpoints.NAMES) - set(NAMES)
    assert not missing, f"{missing}: {guide_step(5)}"


def _names_only() -> list[str]:
    """Return the classes that are another class under a name of their own, and not exported."""
    rows = list(ARCHITECTURES.values())
    return [name for name, row in ARCHITECTURES.items() if name not in CLASSES and sum(r is row for r in rows) > 1]


#: Classes that are looked for by name, because their text_config names another class.
_OUTER = {"StepVLForConditionalGeneration", "UnlimitedOCRForCausalLM"}


_BESIDE_TEXT = ("checkpoint_table_towers", "checkpoint_table_drafts")


def test_an_alias_class_needs_two_table_rows() -> None:
    """One row in its family's module, one in a table of checkpoints."""
    product = [path.read_text() for path in sorted((ROOT / "quantkit").rglob("*.py"))]
    # Towers and drafts of a class are rows of other tables.
    paths = [path for path in sorted((ROOT / "scripts").glob("checkpoint_table*.py")) if path.stem not in _BESIDE_TEXT]
    tables = [path.read_text() for path in paths]
    names = _names_only()
    assert len(names) > 50
    for name in names:
        places = [sum(text.count(f'"{name}"') for text in texts) for texts in (product, tables)]
        assert places[0] == 1 + (name in _OUTER) + (name in MMPROJ) + (name in HF_ENCODERS), name
        assert places[1] <= 1, name


def test_every_architecture_has_kinds_of_tensors() -> None:
    archs = {row.arch for row in ARCHITECTURES.values()} | {arch for row in CLASSES.values() for arch in row.archs}
    assert archs <= KINDS.keys(), guide_step(2, arch=" ".join(archs - KINDS.keys()))
    kinds = {kind.partition(":")[0] for text in KINDS.values() for kind in text.split()}
    assert {"token_embd", "*attn_q", "*ffn_down_exps"} <= kinds


def test_an_architecture_without_tensor_kinds_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(KINDS, "qwen3moe")
    with refuses(TypeNotSupported, "QK-E304 qwen3moe") as error:
        plan_convert(checkpoints.write_checkpoint("qwen3-moe", tmp_path), tmp_path / "o.gguf")
    assert error.value.code == "QK-E304"


def test_a_class_is_in_one_module() -> None:
    modules = [import_module(f"quantkit.checkpoint.models.{m.name}") for m in iter_modules(models.__path__)]
    names = [name for module in modules for name in rows_of(module)]
    assert sorted(names) == sorted(ARCHITECTURES)
    for module in modules:
        assert getattr(module, "CLASSES", {}).keys() <= rows_of(module).keys(), module.__name__


def test_logits_belong_to_described_checkpoints() -> None:
    with np.load(DATA / "convert-logits.npz") as logits:
        runs = {name for name in checkpoints.NAMES if checkpoints.describe(name).transformers}
        assert set(logits) == runs, f"{set(logits) ^ runs}: {guide_step(6)}"
        for name in runs:
            config = checkpoints.describe(name).config
            assert logits[name].shape == (4, config.get("text_config", config)["vocab_size"])
            assert max(checkpoints.PROMPT) < logits[name].shape[1]


def test_shards_match_the_index(tmp_path: Path) -> None:
    path = checkpoints.write_checkpoint("qwen3-moe", tmp_path)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    actual: dict[str, str] = {}
    total = 0
    for file in sorted(path.glob("model-*.safetensors")):
        data = file.read_bytes()
        (n,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + n])
        del header["__metadata__"]
        actual |= dict.fromkeys(header, file.name)
        assert len(data) == 8 + n + max(info["data_offsets"][1] for info in header.values())
        total += len(data) - 8 - n
    assert actual == index["weight_map"]
    assert total == index["metadata"]["total_size"]


def test_patterns_expand_to_full_grids_in_layer_order() -> None:
    names = checkpoints.expand({"b.{0,2}.x.{9-10}.w": [2], "a": [1], "b.{1}.y": [3]})
    assert names == [
        ("a", (1,)),
        ("b.0.x.9.w", (2,)),
        ("b.0.x.10.w", (2,)),
        ("b.1.y", (3,)),
        ("b.2.x.9.w", (2,)),
        ("b.2.x.10.w", (2,)),
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_stored_floats_are_rounded_to_nearest(dtype: str) -> None:
    x = checkpoints.draw("key", "w", (64, 64))
    kind, shape, data = checkpoints.encode(x, dtype)
    if kind == "BF16":
        decoded_values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        decoded_values = np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[kind]).astype(np.float32)
    bound = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 0.0}[kind]
    assert shape == x.shape
    assert np.all(np.abs(decoded_values - x.ravel()) <= np.maximum(np.abs(x.ravel()), 2.0**-14) * bound)


#: Relative errors of schemes, root mean square, of evenly spread weights.
ERRORS = {"fp8": 0.04, "mxfp4": 0.15, "nvfp4": 0.13, "int8": 0.006, "packed": 0.08, "gptq": 0.09, "awq": 0.08}


#: The schemes of every checkpoint that has some; "numbers" are no weights.
SCHEMES = [
    pytest.param(name, scheme, id=f"{name}-{scheme['method']}")
    for name in checkpoints.NAMES
    if (quantized := checkpoints.describe(name).quantized)
    for scheme in quantized.get("each", [quantized])
    if scheme["method"] != "numbers"
]


@pytest.mark.parametrize(("name", "scheme"), SCHEMES)
def test_quantized_weights_are_close_to_the_originals(name: str, scheme: dict[str, Any]) -> None:
    scheme = dict(scheme)
    method, bits = scheme.pop("method"), scheme.get("bits", 4)
    stacked = method == "mxfp4" and not scheme.get("packed")
    x = checkpoints.draw(name, "w", (2, 256, 64) if stacked else (128, 256))
    options = {key: value for key, value in scheme.items() if key not in ("method", "targets", "but")}
    _, weights = quantized_checkpoints.METHODS[method](x, **options)
    error = float(np.sqrt(((weights - x) ** 2).mean() / (x**2).mean()))
    bound = 0.7 if method == "bitnet" else ERRORS[method] * 2.0 ** max(0, 4 - bits)
    assert error < (bound * 2 if "E5M2" in scheme.get("codes", "") else bound)


def test_packed_words_are_a_bit_stream() -> None:
    values = np.arange(64).reshape(2, 32) % 8
    words = quantized_checkpoints._words(values, 3, 1).view(np.uint32)
    streams = [sum(int(word) << 32 * i for i, word in enumerate(row)) for row in words]
    assert [[stream >> 3 * i & 7 for i in range(32)] for stream in streams] == values.tolist()
