"""Families of checkpoints: what convert_hf_to_gguf.py stops at or gets wrong, and what is refused.

Bytes and logits of whole checkpoints are in test_convert_goldens.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refuses

import checkpoints
from quantkit.checkpoint import Checkpoint, OpenOptions, open_checkpoint
from quantkit.checkpoint.checkpoint import ConvertedTensor
from quantkit.checkpoint.expressions import read_f32, size_of
from quantkit.errors import FormatError, RecipeError

Json = dict[str, Any]


def opened(
    description: checkpoints.Description,
    out: Path,
    *,
    without: tuple[str, ...] = (),
    changes: Json | None = None,
    **options: Any,
) -> Checkpoint:
    """Return a checkpoint of which config.json lacks some keys and has more."""
    config = {key: value for key, value in description.config.items() if key not in without} | (changes or {})
    path = checkpoints.write_description(replace(description, config=config), out)
    return open_checkpoint(
        path, OpenOptions(pre=description.vocab.get("pre") or "gpt-2", allow_other_ids=True, **options)
    )


def values(converted: ConvertedTensor) -> np.ndarray:
    """Return a tensor as float32."""
    return read_f32(converted.expr, 0, size_of(converted.expr)).reshape(converted.expr.shape)


# --- Qwen3-Next, Qwen 3.5 --------------------------------------------------------------------------------------------


def test_prediction_layers_are_the_stored_ones(tmp_path: Path) -> None:
    checkpoint = opened(checkpoints.describe("qwen3-next-mtp"), tmp_path)
    assert (checkpoint.get("qwen3next.block_count"), checkpoint.get("qwen3next.nextn_predict_layers")) == (5, 1)
    assert len(checkpoint.get("qwen3next.attention.recurrent_layers")) == 5
    assert "blk.4.nextn.eh_proj.weight" in checkpoint.tensors


@pytest.mark.parametrize(("name", "arch"), [("qwen3-next", "qwen3next"), ("qwen3.5", "qwen35")])
def test_a_model_without_prediction_layers_needs_no_option(name: str, arch: str, tmp_path: Path) -> None:
    checkpoint = opened(checkpoints.describe(name), tmp_path, changes={"mtp_num_hidden_layers": 1})
    assert (checkpoint.get(f"{arch}.block_count"), checkpoint.get(f"{arch}.nextn_predict_layers")) == (4, None)


def test_no_nextn_drops_prediction_layers(tmp_path: Path) -> None:
    checkpoint = opened(checkpoints.describe("qwen3-next-mtp"), tmp_path, nextn="without")
    assert (checkpoint.get("qwen3next.block_count"), checkpoint.get("qwen3next.nextn_predict_layers")) == (4, None)
    assert not [name for name in checkpoint.tensors if name.startswith("blk.4.")]


def test_value_heads_that_are_no_multiple_of_key_heads_are_refused(tmp_path: Path) -> None:
    with refuses(FormatError, "QK-E112 3 2"):
        opened(checkpoints.describe("qwen3.5"), tmp_path, changes={"linear_num_value_heads": 3})


def test_projections_of_wrong_size_name_the_tensor(tmp_path: Path) -> None:
    with refuses(FormatError, "QK-E106 in_proj_qkvz 2 512"):
        opened(checkpoints.describe("qwen3-next"), tmp_path, changes={"linear_value_head_dim": 96})


# --- StableLM --------------------------------------------------------------------------------------------------------


def with_norms(heads: int) -> checkpoints.Description:
    description = checkpoints.describe("stablelm")
    norms = {
        f"model.layers.{{0-2}}.self_attn.{letter}_layernorm.norms.{{0-{heads - 1}}}.weight": [64]
        for letter in ("q", "k")
    }
    return replace(description, tensors=description.tensors | norms)


def test_norms_of_heads_become_one_tensor(tmp_path: Path) -> None:
    description = with_norms(4)
    checkpoint = opened(description, tmp_path)
    for kind, letter in (("attn_q_norm", "q"), ("attn_k_norm", "k")):
        converted = checkpoint.converted[f"blk.1.{kind}.weight"]
        stored = [f"model.layers.1.self_attn.{letter}_layernorm.norms.{i}.weight" for i in range(4)]
        expected = [checkpoints.draw(f"{description.name}/{name}", name, (64,)) for name in stored]
        assert np.allclose(values(converted), np.stack(expected), rtol=2**-8)


def test_a_missing_norm_is_named(tmp_path: Path) -> None:
    with refuses(FormatError, "QK-E105 norms.0.weight"):
        opened(with_norms(3), tmp_path)


# --- Phi -------------------------------------------------------------------------------------------------------------


def test_phimoe_with_names_of_transformers(tmp_path: Path) -> None:
    description = checkpoints.describe("phimoe")
    checkpoint = opened(description, tmp_path, changes={"architectures": ["PhimoeForCausalLM"]})
    assert checkpoint.get("general.architecture") == "phimoe"


def test_phimoe_without_rope_scaling_keeps_its_context_length(tmp_path: Path) -> None:
    description = checkpoints.describe("phimoe")
    checkpoint = opened(description, tmp_path, without=("rope_scaling", "original_max_position_embeddings"))
    assert (
        checkpoint.get("phimoe.rope.scaling.original_context_length")
        == checkpoint.get("phimoe.context_length")
        == 131072
    )
    assert "rope_factors_long.weight" not in checkpoint.tensors


@pytest.mark.parametrize("wrong", [[1.0] * 31, "1.0", [1.0] * 31 + ["x"]])
def test_rope_factors_of_wrong_length_are_refused(wrong: Any, tmp_path: Path) -> None:
    description = checkpoints.describe("phi3-long")
    rope = description.config["rope_scaling"] | {"short_factor": wrong}
    with refuses(FormatError, "QK-E112 short_factor 32"):
        opened(description, tmp_path, changes={"rope_scaling": rope})


# --- others ----------------------------------------------------------------------------------------------------------


def test_cohere_rotates_whole_heads_by_default(tmp_path: Path) -> None:
    description = checkpoints.describe("cohere2")
    assert opened(description, tmp_path / "a", without=("rotary_pct",)).get("cohere2.rope.dimension_count") == 64
    assert opened(description, tmp_path / "b", changes={"rotary_pct": 0.5}).get("cohere2.rope.dimension_count") == 32


def test_a_nonzero_bias_without_a_tensor_is_refused(tmp_path: Path) -> None:
    description = checkpoints.describe("cohere2")
    with refuses(FormatError, "QK-E106 q_proj.bias"):
        opened(
            replace(description, tensors=description.tensors | {"model.layers.0.self_attn.q_proj.bias": [256]}),
            tmp_path,
        )


@pytest.mark.parametrize(
    ("changes", "without"), [({"mamba_norm_before_gate": True}, ()), ({}, ("mamba_norm_before_gate",))]
)
def test_norms_before_the_gate_are_refused(changes: Json, without: tuple[str, ...], tmp_path: Path) -> None:
    """A missing switch defaults to true in transformers; it has no meaning without such norms."""
    description = checkpoints.describe("falcon-h1")
    with refuses(FormatError, "QK-E305 mamba_norm_before_gate"):
        opened(description, tmp_path / "a", changes=changes, without=without)
    plain = replace(
        description, tensors={name: shape for name, shape in description.tensors.items() if "mamba.norm" not in name}
    )
    opened(plain, tmp_path / "b", changes=changes | {"mamba_rms_norm": False}, without=without)


@pytest.mark.parametrize(
    ("name", "tensor", "factor"),
    [("q", "attn_q", 1.0), ("k", "attn_k", 0.3), ("v", "attn_v", 1.0), ("o", "attn_output", 1.1)],
)
def test_input_multipliers_do_not_scale_biases(name: str, tensor: str, factor: float, tmp_path: Path) -> None:
    """transformers multiplies what a layer reads (0.9), a bias does not see it; the reference multiplies both."""
    description = checkpoints.describe("falcon-h1")
    source = f"model.layers.0.self_attn.{name}_proj"
    size = dict(checkpoints.expand(description.tensors))[f"{source}.weight"][0]
    biased = replace(description, tensors=description.tensors | {f"{source}.bias": [size]})
    changes = {"attention_bias": True, "attention_in_multiplier": 0.9, "key_multiplier": 0.3}
    checkpoint = opened(biased, tmp_path, changes=changes | {"attention_out_multiplier": 1.1})
    expected = checkpoints.draw(f"falcon-h1/{source}.bias", f"{source}.bias", (size,))
    np.testing.assert_allclose(values(checkpoint.converted[f"blk.0.{tensor}.bias"]), expected * factor, rtol=1e-2)


def test_olmo_with_a_null_window_has_no_window(tmp_path: Path) -> None:
    checkpoint = opened(checkpoints.describe("olmo3"), tmp_path, changes={"sliding_window": None})
    assert checkpoint.get("olmo2.attention.sliding_window") is None


def test_bitnet_with_names_of_transformers(tmp_path: Path) -> None:
    description = checkpoints.describe("bitnet")
    renamed = {
        name.replace("inner_attn_ln", "attn_sub_norm").replace("ffn_layernorm", "ffn_sub_norm"): shape
        for name, shape in description.tensors.items()
    }
    checkpoint = opened(replace(description, tensors=renamed), tmp_path)
    assert {"blk.0.attn_sub_norm.weight", "blk.0.ffn_sub_norm.weight"} <= checkpoint.tensors.keys()
    for name in ("blk.0.attn_q.weight", "blk.2.ffn_down.weight"):
        assert len(np.unique(values(checkpoint.converted[name]))) == 3


def test_gemma_4_without_head_sizes_is_refused(tmp_path: Path) -> None:
    description = checkpoints.describe("gemma4")
    with refuses(FormatError, "QK-E112 global_head_dim"):
        opened(description, tmp_path, without=("per_layer_config", "global_head_dim"))


def test_a_qwen_with_rwkv_other_than_7_is_refused(tmp_path: Path) -> None:
    with refuses(FormatError, "QK-E305 wkv_version 6 7"):
        opened(checkpoints.describe("arwkv7"), tmp_path, changes={"wkv_version": 6})


# --- tensors made one ------------------------------------------------------------------------------------------------


def test_gate_and_up_of_experts_are_concatenated(tmp_path: Path) -> None:
    description = checkpoints.describe("qwen3-next")
    separate, fused = opened(description, tmp_path), opened(description, tmp_path, fuse=["--fuse-gate-up-exps"])
    gate, up = (values(separate.converted[f"blk.1.ffn_{part}_exps.weight"]) for part in ("gate", "up"))
    assert np.array_equal(values(fused.converted["blk.1.ffn_gate_up_exps.weight"]), np.concatenate([gate, up], axis=1))
    assert not [name for name in fused.tensors if "ffn_gate_exps" in name or "ffn_up_exps" in name]


def test_gate_and_up_that_cannot_be_merged_stay_separate(tmp_path: Path) -> None:
    with refuses(RecipeError, "QK-E211 --fuse-gate-up-exps"):
        opened(checkpoints.describe("olmoe"), tmp_path, fuse=["--fuse-gate-up-exps"])


def test_q_k_and_v_are_fused_only_with_all_biases(tmp_path: Path) -> None:
    description = checkpoints.describe("qwen2")
    fused = opened(description, tmp_path / "all", fuse=["--fuse-qkv"])
    assert {"blk.0.attn_qkv.weight", "blk.0.attn_qkv.bias"} <= fused.tensors.keys()
    tensors = {name: shape for name, shape in description.tensors.items() if not name.endswith("k_proj.bias")}
    separate = opened(replace(description, tensors=tensors), tmp_path / "some", fuse=["--fuse-qkv"])
    assert {"blk.0.attn_q.weight", "blk.0.attn_q.bias"} <= separate.tensors.keys()
    assert "blk.0.attn_qkv.weight" not in separate.tensors
