"""Options of convert_hf_to_gguf.py: each is there, or refused with what to do instead; and what they make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from refusals import refuses
from tiny_checkpoints import moe_arrays, moe_config, write_checkpoint

import checkpoints
from quantkit.checkpoint import registry
from quantkit.checkpoint.expressions import Stored, concatenate, read_values, stack
from quantkit.checkpoint.key_rows import Copied
from quantkit.cli import cli
from quantkit.cli.convert import command
from quantkit.convert import ConvertOptions, convert, plan_convert
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import open_gguf
from quantkit.formats.safetensors import StoredTensor

PEER_OPTIONS = json.loads((Path(__file__).parents[1] / "data/convert-hf-options.json").read_text())["options"]
PRE = ConvertOptions(pre="gpt-2")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "Small-Moe")


@pytest.mark.parametrize("name", PEER_OPTIONS)
def test_every_option_is_supported_or_refused(name: str, moe: Path) -> None:
    options = {n: p for p in command.params if isinstance(p, click.Option) for n in (*p.opts, *p.secondary_opts)}
    assert name in options
    if (reason := getattr(options[name], "reason", None)) is None:
        return
    value = [] if options[name].is_flag else ["x"]
    result = CliRunner().invoke(cli, ["convert", str(moe), name, *value])
    assert result.exit_code == 2
    assert reason in result.stderr


def test_options_without_effect_are_noted(moe: Path, tmp_path: Path) -> None:
    arguments = ["--no-lazy", "--use-temp-file", "--verbose", "--dry-run", "--pre", "gpt-2", "--outfile"]
    result = CliRunner().invoke(cli, ["convert", str(moe), *arguments, str(tmp_path / "x.gguf")])
    assert result.exit_code == 0
    assert result.stderr.count("has no effect") == 3
    assert "x.gguf" in result.stdout
    two = CliRunner().invoke(cli, ["convert", str(moe), "y.gguf", "--outfile", "x.gguf"])
    assert two.exit_code == 2


def test_a_vocabulary_alone(moe: Path, tmp_path: Path) -> None:
    options = replace(PRE, vocab_only=True)
    (path,) = convert(moe, tmp_path, None, options).paths
    assert path.name == "Small-Moe-vocab.gguf"
    weightless = write_checkpoint(tmp_path / "Small-Moe")
    (weightless / "model.safetensors").unlink()
    convert(weightless, tmp_path / "x.gguf", None, replace(options, outtype="bf16"))
    convert(moe, tmp_path / "whole.gguf", None, PRE)
    with open_gguf(path) as file, open_gguf(tmp_path / "whole.gguf") as full:
        assert not file.tensors
        assert list(file.fields) == [key for key in full.fields if key != "general.size_label"]
        assert path.read_bytes() == (tmp_path / "x.gguf").read_bytes()
        size = 24 + sum(len(field.encode()) for field in file.fields.values())
    assert path.stat().st_size == size  # the reference writes nothing behind the last key


def test_fused_queries_keys_and_values(moe: Path, tmp_path: Path) -> None:
    convert(moe, tmp_path / "x.gguf", None, replace(PRE, fuse_qkv=True))
    arrays = moe_arrays()
    with open_gguf(tmp_path / "x.gguf") as file:
        for i in range(2):
            separate = [arrays[f"model.layers.{i}.self_attn.{w}_proj.weight"].tobytes() for w in "qkv"]
            assert file.data(f"blk.{i}.attn_qkv.weight").tobytes() == b"".join(separate)
        assert not any(name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight")) for name in file.tensors)


def test_layers_that_lack_a_part_are_not_fused(tmp_path: Path) -> None:
    biases = {"model.layers.0.self_attn.q_proj.bias": np.zeros(256, np.float32)}
    folder = write_checkpoint(tmp_path / "m", arrays={**moe_arrays(), **biases})
    plan = plan_convert(folder, tmp_path / "x.gguf", None, replace(PRE, fuse_qkv=True))
    names = {t.name for t in plan.tensors}
    assert {"blk.0.attn_q.weight", "blk.0.attn_q.bias", "blk.1.attn_qkv.weight"} <= names


def test_fused_gate_and_up(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(PRE, fuse_gate_up_exps=True)
    with refuses(RecipeError, "QK-E211 qwen3moe ffn_gate_up_exps"):
        plan_convert(moe, tmp_path / "x.gguf", None, options)
    kinds = "quantkit.checkpoint.tensor_names.KINDS"
    from quantkit.checkpoint.tensor_names import KINDS

    monkeypatch.setattr(kinds, {**KINDS, "qwen3moe": KINDS["qwen3moe"] + " *ffn_gate_up_exps"})
    convert(moe, tmp_path / "x.gguf", None, options)
    arrays = moe_arrays()
    with open_gguf(tmp_path / "x.gguf") as file:
        parts = [
            arrays[f"model.layers.1.mlp.experts.{e}.{w}_proj.weight"].tobytes()
            for e in range(4)
            for w in ("gate", "up")
        ]
        assert file.data("blk.1.ffn_gate_up_exps.weight").tobytes() == b"".join(parts)
        assert file.tensors["blk.1.ffn_gate_up_exps.weight"].shape == (256, 512, 4)


def _write_mtp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint whose last layer predicts ahead, and enter its row."""
    row = registry.ARCHITECTURES["Qwen3MoeForCausalLM"]
    changed = replace(
        row,
        nextn=True,
        layers=lambda config: config.layers + 1,
        keys=(*row.keys, Copied(".nextn_predict_layers", "num_nextn_predict_layers")),
    )
    monkeypatch.setitem(registry.ARCHITECTURES, "Qwen3MoeForCausalLM", changed)
    return write_checkpoint(tmp_path / "Ahead", moe_config(num_nextn_predict_layers=1), moe_arrays(layers=3))


def test_prediction_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _write_mtp(tmp_path, monkeypatch)
    plain = write_checkpoint(
        tmp_path / "plain" / "Ahead",
        arrays={name: x for name, x in moe_arrays(layers=3).items() if ".layers.2." not in name},
    )
    for name, source, options in (
        ("all", folder, {}),
        ("without", folder, {"no_nextn": True}),
        ("plain", plain, {"no_nextn": True}),
        ("only", folder, {"mtp": True}),
    ):
        settings: dict[str, Any] = options
        convert(source, tmp_path / f"{name}.gguf", None, replace(PRE, **settings))
    files = {name: open_gguf(tmp_path / f"{name}.gguf") for name in ("all", "without", "only")}
    assert (tmp_path / "without.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()
    assert [f.get("qwen3moe.block_count") for f in files.values()] == [3, 2, 3]
    assert [f.get("qwen3moe.nextn_predict_layers") for f in files.values()] == [1, None, 1]
    assert {name.split(".")[1] for name in files["only"].tensors if name.startswith("blk")} == {"2"}
    assert {"token_embd.weight", "output.weight", "output_norm.weight"} <= set(files["only"].tensors)
    (path,) = plan_convert(folder, tmp_path, None, replace(PRE, mtp=True)).shards
    assert path.path.name == "mtp-Ahead-BF16.gguf"


def test_a_model_without_prediction_layers(moe: Path, tmp_path: Path) -> None:
    for options, option in (({"mtp": True}, "QK-E206 --mtp"), ({"no_nextn": True}, "QK-E206 --no-nextn")):
        with refuses(RecipeError, option):
            plan_convert(moe, tmp_path / "x.gguf", None, replace(PRE, **options))
    with refuses(RecipeError, "QK-E201 --mtp --no-nextn"):
        plan_convert(moe, tmp_path / "x.gguf", None, replace(PRE, mtp=True, no_nextn=True))


def test_only_prediction_layers_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_mtp(tmp_path, monkeypatch)
    folder = write_checkpoint(tmp_path / "none", moe_config(num_nextn_predict_layers=1))
    with refuses(FormatError, "QK-E206 --mtp"):
        plan_convert(folder, tmp_path / "x.gguf", None, replace(PRE, mtp=True))


@pytest.mark.parametrize("name", ["fp8_as_q8", "vocab_only"])
def test_options_with_default_type(moe: Path, tmp_path: Path, name: str) -> None:
    settings: dict[str, Any] = {name: True}
    with refuses(RecipeError, "QK-E201 TYPE"):
        plan_convert(moe, tmp_path / "x.gguf", "Q8_0", replace(PRE, **settings))


def test_experts_joined_along_another_dimension(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=(3, n, 8)).astype(np.float32) for n in (2, 5, 1)]
    path, offset, parts = tmp_path / "x", 0, []
    path.write_bytes(b"".join(a.tobytes() for a in arrays))
    for a in arrays:
        parts.append(Stored(StoredTensor("x", "F32", a.shape, path, offset, a.nbytes)))
        offset += a.nbytes
    full = np.concatenate(arrays, 1).reshape(-1)
    x = concatenate(parts, 1)
    assert x.shape == (3, 8, 8)
    for start, n in ((0, full.size), (5, 40), (63, 2), (100, 92)):
        assert (read_values(x, start, n).view(np.float32) == full[start : start + n]).all()
    twice = stack([parts[0], parts[0]])
    assert (read_values(twice, 0, 96).view(np.float32) == np.stack([arrays[0]] * 2).reshape(-1)).all()


@pytest.mark.parametrize("type_name", [None, "Q4_K_M", "IQ4_XS", "MXFP4_MOE"])
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v32", "gemma3n", "t5", "plamo2"])
def test_a_dry_run_prints_the_written_size(name: str, type_name: str | None, tmp_path: Path) -> None:
    """Also where all weights are holes (all checkpoints: scripts/check_dry_run.py)."""
    description, out = checkpoints.describe(name), tmp_path / "out.gguf"
    checkpoint = checkpoints.write_description(description, tmp_path)
    options = ConvertOptions(**description.convert_keywords(), outtype="auto" if type_name else "f16")
    nbytes = plan_convert(checkpoint, out, type_name, options).shards[0].layout.nbytes
    convert(checkpoint, out, type_name, options)
    assert out.stat().st_size == nbytes
    out.unlink()
    for path in checkpoint.glob("*.safetensors"):
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(8 + int.from_bytes(file.read(8), "little"))
            file.truncate(size)
    assert plan_convert(checkpoint, out, type_name, options).shards[0].layout.nbytes == nbytes
