"""Hostile checkpoints: a short run of the fuzzer, and what it found."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from refusals import refuses
from tiny_checkpoints import moe_arrays, moe_config, write_checkpoint

import checkpoints
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, plan_convert
from quantkit.errors import FormatError, QuantkitError

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz_checkpoint.py"


def test_fuzz_script() -> None:
    """A thousand changed files: neither crash nor hang nor big allocation (10^6 by hand)."""
    command = [sys.executable, str(SCRIPT), "--mutations", "1000", "--seed", "7"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "0 failures" in process.stdout


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 0},
        {"architectures": ["x" * 3000]},
        {"scoring_func": ["softmax"]},
        {"vocab_size": (1 << 24) - 1},
        {"head_dim": [64]},
        {"rope_scaling": {"rope_type": "yarn", "factor": "x", "original_max_position_embeddings": 1}},
    ],
    ids=str,
)
def test_values_of_wrong_kinds_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path / "m", moe_config(**changes), moe_arrays(layers=1))
    with pytest.raises(QuantkitError) as e:
        plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2"))
    assert str(folder) in e.value.message
    assert len(e.value.message) < 1000


def _json(name: str, **values: Any) -> Callable[[Path], None]:
    """Return a change of a JSON file of a checkpoint."""

    def change(folder: Path) -> None:
        path = folder / name
        config = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**config, **values}))

    return change


def _card(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "README.md").write_text(f"---\n{text}\n---\n")

    return change


@pytest.mark.parametrize(
    ("change", "file", "name"),
    [
        (_json("tokenizer_config.json", eos_token="<|nope|>"), "tokenizer_config.json", "<|nope|>"),
        (_json("config.json", pad_token_id=-1), "config.json", "pad_token_id"),
        (_json("generation_config.json", temperature="hot"), "generation_config.json", "temp"),
        (_json("generation_config.json", top_k=1e30), "generation_config.json", "top_k"),
        (_json("generation_config.json", temperature=math.nan), "generation_config.json", "temp"),
        (_json("config.json", rms_norm_eps=math.nan), "config.json", "epsilon"),
        (_card("license: 5"), "README.md", "license"),
        (_card("tags: [1, a]"), "README.md", "tags"),
        (_json("config.json", num_experts=8), "config.json", "experts.4.down_proj"),
        (_json("config.json", num_experts=3), "config.json", "experts.3.down_proj"),
        (_json("config.json", num_experts=2), "config.json", "experts.2."),
        (_json("config.json", num_hidden_layers=1), "config.json", "layers.1."),
    ],
)
def test_an_error_names_the_file(tmp_path: Path, change: Callable[[Path], None], file: str, name: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    change(folder)
    with pytest.raises(FormatError) as e:
        plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2"))
    assert str(folder / file) in e.value.message
    assert name in e.value.message


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    arrays = {key: x for key, x in moe_arrays().items() if key != name}
    folder = write_checkpoint(tmp_path / "m", None, arrays)
    with refuses(FormatError, f"QK-E105 {name}"):
        plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2"))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_missing_shard_is_detected_by_file_names(tmp_path: Path, number: int) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=3)
    (folder / "model.safetensors.index.json").unlink()
    (folder / f"model-{number:05}-of-00003.safetensors").rename(tmp_path / "lost")
    with refuses(FormatError, f"QK-E104 1 3 model-{number:05}-of-00003.safetensors"):
        plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2"))
    plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2", vocab_only=True))


@pytest.mark.parametrize("index", [True, False])
def test_present_shards_are_converted_on_request(tmp_path: Path, index: bool) -> None:
    folder, options = write_checkpoint(tmp_path / "m", shards=3), ConvertOptions(pre="gpt-2", allow_incomplete=True)
    names = {t.name for t in plan_convert(folder, tmp_path / "x.gguf", None, options).tensors}
    (folder / "model-00003-of-00003.safetensors").unlink()
    if not index:
        (folder / "model.safetensors.index.json").unlink()
    remainder = {t.name for t in plan_convert(folder, tmp_path / "x.gguf", None, options).tensors}
    assert set() < remainder < names


def test_a_missing_shard_with_only_the_output_is_detected(tmp_path: Path) -> None:
    """Without it a runtime takes the embeddings for the output."""
    arrays = moe_arrays()
    del arrays["lm_head.weight"]
    folder = write_checkpoint(tmp_path / "m", None, arrays)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with refuses(FormatError, "QK-E104 1 2 model-00002-of-00002.safetensors"):
        plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2"))


def test_an_empty_tokenizer_model_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint("llama", tmp_path)
    (folder / "tokenizer.model").write_bytes(b"")
    with refuses(FormatError, "QK-E114 tokenizer.model"):
        plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2"))


def test_the_list_has_models_and_drafts() -> None:
    lines = CliRunner().invoke(cli, ["convert", "--list"]).stdout.splitlines()
    rows = {tuple(line.split()[:2]) for line in lines[2:]}
    assert rows >= {("DeepseekV4ForCausalLM", "deepseek4"), ("Eagle3DraftModel", "eagle3")}


@pytest.mark.parametrize("file", ["x" * 3000, "\ud800", "a/b", "..", ""])
def test_file_names_in_the_index_are_checked(tmp_path: Path, file: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with refuses(QuantkitError, "QK-E110 model.safetensors.index.json model.norm.weight"):
        plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2"))
