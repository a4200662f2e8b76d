"""Settings that GGUF cannot say are named, each with what llama.cpp takes for it, and nothing else is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from refusals import check_refused, refuses
from tiny_checkpoints import moe_config, write_checkpoint

import checkpoints
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, plan_convert
from quantkit.cook.config import config_from
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.unsupported_settings import SETTINGS, unsupported_settings


def changed(name: str, folder: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint of the goldens with other settings; None leaves one out."""
    description = checkpoints.describe(name)
    values = {key: value for key, value in {**description.config, **config}.items() if value != "left out"}
    return checkpoints.write_description(replace(description, config=values), folder)


def notes_of(name: str, folder: Path, config: dict[str, Any], **options: Any) -> tuple[str, ...]:
    path = changed(name, folder, config)
    pre = checkpoints.describe(name).vocab.get("pre")
    return plan_convert(
        path, folder / "x.gguf", None, ConvertOptions(pre=pre, allow_other_ids=True, allow_incomplete=True, **options)
    ).notes


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **options}}


WINDOW = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1, "layer_types": "left out"}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3-moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("qwen2-moe", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("qwen3-moe", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"hidden_act": "relu"}, "hidden_act"),
    ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings"),  # and it stores no lm_head
    ("gemma3", {"hidden_activation": "silu"}, "hidden_activation"),
    ("gpt2", {"activation_function": "relu"}, "activation_function"),
    ("bert", {"hidden_act": "relu"}, "hidden_act"),
    ("smollm3", {"no_rope_layers": "left out", "no_rope_layer_interval": 3}, "no_rope_layer_interval"),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 1, 1, 1]}, "no_rope_layers"),
    ("gemma3", {"query_pre_attn_scalar": 128}, "query_pre_attn_scalar"),
    ("gemma2", {"query_pre_attn_scalar": 100}, "query_pre_attn_scalar"),
    ("gemma3n", {"final_logit_softcapping": 20.0}, "final_logit_softcapping"),
    ("llama", {"attention_bias": True}, "attention_bias"),  # and it stores no biases
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("olmoe", {"rms_norm_eps": 1e-6}, "rms_norm_eps"),
    ("mistral", {"sliding_window": 1024}, "sliding_window"),
    ("mixtral", {"sliding_window": 1024}, "sliding_window"),
    ("qwen2", WINDOW, "sliding_window"),
    ("qwen3", WINDOW, "sliding_window"),
    ("starcoder2", {"sliding_window": 16}, "sliding_window"),
    ("granite-hybrid", {"position_embedding_type": "rope"}, "position_embedding_type"),
    ("granite-hybrid-attention", {"position_embedding_type": "nope"}, "position_embedding_type"),
    ("gemma3", {"layer_types": ["full_attention"] * 7}, "layer_types"),
    ("gemma3", {"layer_types": "left out", "sliding_window_pattern": 2}, "sliding_window_pattern"),
    ("gpt-oss", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("llama4", {"attention_chunk_size": 4096}, "attention_chunk_size"),
    ("deepseek-v3", {"rope_interleave": False}, "rope_interleave"),
    ("falcon", {"alibi": True}, "alibi"),
    ("qwen", {"use_dynamic_ntk": True}, "use_dynamic_ntk"),
    ("gemma3", {"layer_types": [["x"]]}, "layer_types"),
    ("qwen3-moe", {"norm_topk_prob": {}}, "norm_topk_prob"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
    ("t5", {"relative_attention_max_distance": 64}, "relative_attention_max_distance"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("mamba2", {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
    ("llama", rope("dynamic", factor=2.0), "rope"),
    ("llama", rope("xyz", factor=2.0), "rope"),
    ("llama", rope("proportional"), "rope"),
    ("llama", rope("yarn", original_max_position_embeddings=512), "rope"),
    ("llama", rope("linear"), "rope"),
    ("llama", rope("longrope", factor=4.0), "rope"),
    ("qwen2", rope("llama3", factor=8.0), "rope"),
    ("qwen3", rope("yarn", factor=4.0, original_max_position_embeddings=512, beta_fast=16.0), "beta_fast"),
    ("qwen3", rope("yarn", factor=4.0, original_max_position_embeddings=512, attention_factor=2.0), "attention_factor"),
]


@pytest.mark.parametrize(("name", "config", "setting"), CASES)
def test_a_setting_without_a_key_is_named(name: str, config: dict[str, Any], setting: str, tmp_path: Path) -> None:
    assert checkpoints.settings_in(notes_of(name, tmp_path, config)) - checkpoints.OMISSIONS.get(name, set()) == {
        setting
    }


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen3-moe", {}),
        ("qwen3-moe", {"norm_topk_prob": "left out"}),
        ("mistral", {"sliding_window": 4096}),  # as long as the longest text
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}),
        ("qwen2", {**WINDOW, "max_window_layers": 28}),
        ("llama", {"sliding_window": 16}),  # its class has no windows
        ("llama", {"hidden_act": "swish"}),
        ("llama", {"tie_word_embeddings": False}),  # it stores its lm_head
        ("mpt", {"tie_word_embeddings": False}),
        ("smollm3", {"no_rope_layers": "left out", "no_rope_layer_interval": 4}),
        ("gemma3", {"query_pre_attn_scalar": 64}),
        ("olmo", {"clip_qkv": 8.0}),
        ("olmoe", {"clip_qkv": None}),
        ("granite-hybrid", {"position_embedding_type": None}),
        ("llama", rope("default")),
        ("llama", rope("linear", factor=2.0)),
        ("llama", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
        ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=512, beta_fast=32, beta_slow=1)),
    ],
)
def test_stored_and_unused_settings_are_not_reported(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    config = {**config}
    if name == "llama" and "original_max_position_embeddings" not in config.get("rope_scaling", {}):
        config.setdefault("rope_scaling", None)
    assert checkpoints.settings_in(notes_of(name, tmp_path, config)) == set()


def test_every_row_of_the_table_has_a_name_and_a_value() -> None:
    assert all(setting.names and callable(setting.assumed) for setting in SETTINGS)


def without_a_setting(folder: Path) -> Path:
    return write_checkpoint(folder, moe_config(norm_topk_prob=False))


def with_template(template: object) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = write_checkpoint(folder)
        file = path / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
        return path

    return write


def without_tokenizer_config(folder: Path) -> Path:
    """Write a checkpoint whose tokenizer is of its model's class: Qwen2."""
    path = write_checkpoint(folder)
    (path / "tokenizer_config.json").unlink()
    return path


def with_template_alone(folder: Path) -> Path:
    path = without_tokenizer_config(folder)
    tokens = path / "tokenizer.json"
    tokens.write_text(tokens.read_text().replace("<|end|>", "<|endoftext|>"))
    (path / "chat_template.jinja").write_text("{{ x }}")
    return path


def with_files(**files: str) -> Callable[[Path], Path]:
    """Return a function that writes a checkpoint with these JSON files."""

    def write(folder: Path) -> Path:
        path = write_checkpoint(folder)
        for name, content in files.items():
            (path / f"{name}.json").write_text(content)
        return path

    return write


@pytest.mark.parametrize(
    "write",
    [
        without_a_setting,
        with_template({"default": "{{ x }}"}),
        with_template(5),
        with_template_alone,
        with_template([{"template": "{{ x }}"}]),
        with_files(tokenizer_config='{"tokenizer_class": "X"}', chat_template='{"chat_template": 5}'),
        with_files(generation_config='{"temperature": 0.6,'),
    ],
)
@pytest.mark.parametrize("type_name", [None, "Q8_0"])
def test_strict_turns_the_note_into_an_error(
    write: Callable[[Path], Path], type_name: str | None, tmp_path: Path
) -> None:
    folder, out = write(tmp_path / "m"), tmp_path / "x.gguf"
    plan = plan_convert(folder, out, type_name, ConvertOptions(pre="gpt-2"))
    assert len([note for note in plan.notes if note.startswith(str(folder))]) == 1
    with pytest.raises(TypeNotSupported) as e:
        plan_convert(folder, out, type_name, ConvertOptions(pre="gpt-2", strict=True))
    assert str(folder) in e.value.message
    plan_convert(write_checkpoint(tmp_path / "sound"), out, type_name, ConvertOptions(pre="gpt-2", strict=True))


def test_strict_on_the_command_line_and_in_a_cook(tmp_path: Path) -> None:
    arguments = ["convert", str(without_a_setting(tmp_path / "m")), str(tmp_path / "x.gguf"), "--pre", "gpt-2"]
    noted = CliRunner().invoke(cli, [*arguments, "--dry-run"])
    assert noted.exit_code == 0
    assert "norm_topk_prob" in noted.stderr
    refused = CliRunner().invoke(cli, [*arguments, "--strict"])
    assert refused.exit_code == 1
    check_refused(refused.stderr, "QK-E305 norm_topk_prob")
    assert not (tmp_path / "x.gguf").exists()
    settings = {"model": "m", "targets": ["Q4_K_M"], "convert": {"strict": True}}
    assert config_from(settings, "cook.toml", Path()).convert == ConvertOptions(strict=True)


def test_an_error_in_a_template_names_its_file(tmp_path: Path) -> None:
    for template in ([{"name": "x", "template": "{{ x }}"}, "str"], [{"name": "x", "template": 5}]):
        folder = with_template(template)(tmp_path / "m")
        with refuses(FormatError, "QK-E114 tokenizer_config.json"):
            plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2"))


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "README.md"],
)
def test_a_pipe_is_not_a_missing_file(name: str, tmp_path: Path) -> None:
    """Also not one that the checkpoint can do without."""
    folder = write_checkpoint(tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(FormatError) as e:
        plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2"))
    assert e.value.code == "QK-E120"
    assert name in e.value.message


def test_a_vocabulary_alone_loses_no_setting(tmp_path: Path) -> None:
    folder = without_a_setting(tmp_path / "m")
    plan = plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2", vocab_only=True))
    assert unsupported_settings(plan.source) == []  # type: ignore[arg-type]
