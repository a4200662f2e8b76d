"""Tensors that llama.cpp loads a file without, and every layer of the class has: a note, or with --strict an error."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from refusals import check_refused

import checkpoints
from quantkit.checkpoint import optional_tensors
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, plan_convert
from quantkit.loaders.follow import load


def write_without(name: str, pattern: str, config: dict[str, Any], folder: Path) -> tuple[Path, ConvertOptions]:
    """Write a checkpoint without some tensors and with other settings; return it with its options."""
    description = checkpoints.describe(name)
    shapes = {key: list(shape) for key, shape in checkpoints.expand(description.tensors) if not re.search(pattern, key)}
    changed = replace(description, tensors=shapes, config=description.config | config)
    options = ConvertOptions(**description.convert_keywords() | {"allow_incomplete": False})
    return checkpoints.write_description(changed, folder), options


@pytest.mark.parametrize(
    ("name", "pattern", "config", "absent"),
    [
        ("phi3", r"qkv_proj", {}, "attn_qkv.weight"),
        ("talkie", r"(attn|mlp)_gain", {}, "attn_output.scale, ffn_down.scale"),
        ("stablelm", r"post_attention_layernorm", {}, "ffn_norm.bias, ffn_norm.weight"),
        # Models of these settings have no such tensors.
        ("stablelm", r"post_attention_layernorm", {"use_parallel_residual": True}, None),
        ("seed-oss", r"[qkv]_proj\.bias", {"attention_bias": False}, None),
        # One layer lacks them: the layers differ, which is another matter.
        ("phi3", r"layers\.0\..*qkv_proj", {}, None),
    ],
)
def test_tensors_that_no_layer_has(
    name: str, pattern: str, config: dict[str, Any], absent: str | None, tmp_path: Path
) -> None:
    checkpoint, options = write_without(name, pattern, config, tmp_path)
    plan = plan_convert(checkpoint, tmp_path / "x.gguf", None, replace(options, allow_incomplete=True))
    notes = [note for note in plan.notes if "no layer has" in note]
    assert [absent in note for note in notes] == ([] if absent is None else [True])
    if absent is not None:
        fields, shapes = {field.key: field for field in plan.fields}, {key: shape for key, _, shape in plan.entries}
        assert load("llama.cpp", fields, shapes) == ()


def test_strict_refuses_the_file(tmp_path: Path) -> None:
    checkpoint, options = write_without("phi3", "qkv_proj", {}, tmp_path)
    out = tmp_path / "x.gguf"
    arguments = ["convert", str(checkpoint), str(out), "--pre", options.pre or "", "--allow-other-ids"]
    result = CliRunner().invoke(cli, [*arguments, "--strict"])
    assert result.exit_code == 1
    check_refused(result.stderr, "QK-E305 attn_qkv.weight")
    assert not out.exists()
    assert CliRunner().invoke(cli, arguments).exit_code == 0


def test_fused_tensors_take_the_place_of_their_parts(tmp_path: Path) -> None:
    """Biases of queries, keys and values, of which the fused one has another name."""
    options = ConvertOptions(**checkpoints.describe("dream").convert_keywords(), fuse_qkv=True)
    plan = plan_convert(checkpoints.write_checkpoint("dream", tmp_path), tmp_path / "x.gguf", None, options)
    assert "blk.0.attn_qkv.bias" in {name for name, _, _ in plan.entries}
    assert not any("no layer has" in note for note in plan.notes)


def test_the_table_names_classes_with_checkpoints() -> None:
    classes = {checkpoints.describe(name).config["architectures"][0] for name in checkpoints.NAMES}
    assert optional_tensors._table().keys() <= classes
