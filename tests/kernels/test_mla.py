"""Latent attention: llama.cpp's logits for every variant, both forms alike, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from refusals import refuses

from libllama import Libllama, nmse
from quantkit.errors import FormatError, QuantkitError, TypeNotSupported
from quantkit.formats.gguf import open_gguf
from quantkit.model.graph import build_graph

HEADS, K, V, ROT, RANK, Q_RANK = 4, 48, 24, 16, 32, 40
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_log_multiplier": 0.0707,
}
GROUPS = {
    "expert_count": 16,
    "expert_used_count": 4,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
}
TEMPERATURE = {"attention.temperature_scale": 0.1, "attention.temperature_length": 8}
#: What a variant changes in the metadata, and in the tensors: absorbed, q_a, probs_b (a bias of the choice).
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "absorbed": ({}, {}),
    "expanded": ({}, {"absorbed": False}),
    "lite": ({"attention.q_lora_rank": 0, "expert_gating_func": None}, {"q_a": False, "probs_b": False}),
    "yarn": (YARN, {}),
    "yarn-expanded": (YARN, {"absorbed": False}),
    "yarn-log-0.1": (YARN | {"rope.scaling.yarn_log_multiplier": 0.1}, {}),
    "yarn-without-log": (YARN | {"rope.scaling.yarn_log_multiplier": 0.0}, {}),
    "linear": ({"rope.scaling.factor": 4.0}, {}),
    "groups": (GROUPS, {}),
    "softmax-groups": (GROUPS | {"expert_gating_func": 1}, {"probs_b": False}),
    "temperature": (TEMPERATURE, {}),
}


def deepseek2(
    path: Path,
    changes: dict[str, Any] | None = None,
    *,
    arch: str = "deepseek2",
    absorbed: bool = True,
    q_a: bool = True,
    probs_b: bool = True,
    seed: int = 1,
    extra_shapes: tiny_models.Shapes | None = None,
    extra_fields: dict[str, Any] | None = None,
) -> Path:
    """Write two layers, the first dense."""
    fields = {
        **{"block_count": 2, "leading_dense_block_count": 1, "attention.head_count": HEADS},
        **{"attention.head_count_kv": 1 if absorbed else HEADS, "attention.kv_lora_rank": RANK},
        **{"attention.key_length": RANK + ROT if absorbed else K, "attention.value_length": RANK if absorbed else V},
        **({"attention.key_length_mla": K, "attention.value_length_mla": V} if absorbed else {}),
        **{"attention.q_lora_rank": Q_RANK, "rope.dimension_count": ROT, "expert_feed_forward_length": 32},
        **{"expert_count": 8, "expert_used_count": 2, "expert_shared_count": 1, "expert_gating_func": 2},
    } | (changes or {})
    shapes = tiny_models.ends()
    for layer in range(2):
        shapes |= attention(layer, absorbed, q_a)
        shapes |= tiny_models.dense(layer) if layer == 0 else tiny_models.experts(layer, fields["expert_count"], 32, 32)
    if probs_b:
        shapes["blk.1.exp_probs_b.bias"] = (fields["expert_count"],)
    return tiny_models.write(path, arch, fields, shapes | (extra_shapes or {}), seed, extra_fields)


def attention(layer: int, absorbed: bool, q_a: bool) -> tiny_models.Shapes:
    e, prefix = tiny_models.N_EMBD, f"blk.{layer}."
    shapes: tiny_models.Shapes = {
        f"{prefix}attn_norm.weight": (e,),
        f"{prefix}ffn_norm.weight": (e,),
        f"{prefix}attn_kv_a_norm.weight": (RANK,),
        f"{prefix}attn_kv_a_mqa.weight": (e, RANK + ROT),
        f"{prefix}attn_output.weight": (HEADS * V, e),
    }
    if q_a:
        shapes |= {f"{prefix}attn_q_a.weight": (e, Q_RANK), f"{prefix}attn_q_a_norm.weight": (Q_RANK,)}
        shapes |= {f"{prefix}attn_q_b.weight": (Q_RANK, HEADS * K)}
    else:
        shapes |= {f"{prefix}attn_q.weight": (e, HEADS * K)}
    if absorbed:
        return shapes | {
            f"{prefix}attn_k_b.weight": (K - ROT, RANK, HEADS),
            f"{prefix}attn_v_b.weight": (RANK, V, HEADS),
        }
    return shapes | {f"{prefix}attn_kv_b.weight": (RANK, HEADS * (K - ROT + V))}


def plain(path: Path, arch: str, changes: dict[str, Any] | None = None, seed: int = 1) -> Path:
    """Write three dense layers of MiniCPM 3 or PLM."""
    small = arch == "plm"
    fields = {
        **{"block_count": 3, "attention.head_count": HEADS, "attention.head_count_kv": HEADS},
        **{"attention.key_length": K, "attention.value_length": V, "attention.kv_lora_rank": RANK},
        **{"attention.q_lora_rank": Q_RANK, "rope.dimension_count": ROT},
    } | (changes or {})
    shapes = tiny_models.ends()
    if small:
        del shapes["output.weight"]
    else:
        shapes |= {"rope_factors_long.weight": (ROT // 2,), "rope_factors_short.weight": (ROT // 2,)}
    for layer in range(3):
        shapes |= attention(layer, absorbed=False, q_a=not small) | tiny_models.dense(layer, gate=not small)
    return tiny_models.write(path, arch, fields, shapes, seed)


def ocr(path: Path, changes: dict[str, Any] | None = None) -> Path:
    """Write two layers of DeepSeek OCR's text."""
    fields = {
        **{"block_count": 2, "leading_dense_block_count": 1, "attention.head_count": 4, "attention.head_count_kv": 4},
        **{"rope.dimension_count": 16, "expert_feed_forward_length": 32, "expert_count": 8, "expert_used_count": 2},
        **{"expert_shared_count": 1},
    } | (changes or {})
    shapes = tiny_models.ends() | tiny_models.dense(0) | tiny_models.experts(1, 8, 32, 32)
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}_norm.weight": (tiny_models.N_EMBD,) for name in ("attn", "ffn")}
        names = ("attn_q", "attn_k", "attn_v", "attn_output")
        shapes |= {f"blk.{layer}.{name}.weight": (tiny_models.N_EMBD, tiny_models.N_EMBD) for name in names}
    return tiny_models.write(path, "deepseek2-ocr", fields, shapes)


def agrees(path: Path, llama_bin: Path, n: int = 40) -> None:
    tokens = tiny_models.ids(n)
    assert nmse(tiny_models.logits(path, tokens), Libllama(llama_bin).logits(path, tokens)) < 1e-11


@pytest.mark.peer
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_llama_cpp(variant: str, tmp_path: Path, llama_bin: Path) -> None:
    changes, tensors = VARIANTS[variant]
    agrees(deepseek2(tmp_path / "model.gguf", changes, seed=len(variant), **tensors), llama_bin)


@pytest.mark.peer
@pytest.mark.parametrize(
    "changes", [TEMPERATURE, YARN, YARN | GROUPS, YARN | {"rope.scaling.yarn_log_multiplier": 0.1}]
)
def test_mistral4_is_deepseek2_with_different_yarn(changes: dict[str, Any], tmp_path: Path, llama_bin: Path) -> None:
    agrees(deepseek2(tmp_path / "model.gguf", changes, arch="mistral4"), llama_bin)


@pytest.mark.peer
@pytest.mark.parametrize("arch", ["minicpm3", "plm"])
@pytest.mark.parametrize("changes", [{}, YARN, {"rope.scaling.original_context_length": 512}])
def test_plain_latent_attention_agrees(arch: str, changes: dict[str, Any], tmp_path: Path, llama_bin: Path) -> None:
    agrees(plain(tmp_path / "model.gguf", arch, changes), llama_bin)


@pytest.mark.peer
@pytest.mark.parametrize("changes", [{}, {"expert_gating_func": 2, "expert_weights_norm": True}])
def test_deepseek_ocr_agrees(changes: dict[str, Any], tmp_path: Path, llama_bin: Path) -> None:
    agrees(ocr(tmp_path / "model.gguf", changes), llama_bin)


@pytest.mark.parametrize(
    ("layers", "tokens", "gating"), [(47, 154880, "sigmoid"), (48, 154880, "sigmoid"), (47, 128, "softmax")]
)
def test_old_files_of_glm_4_7_lite_route_by_sigmoid(layers: int, tokens: int, gating: str, tmp_path: Path) -> None:
    """Checked once against llama.cpp with a model of these sizes (NMSE 3e-11), which is too large for a test."""
    shapes = tiny_models.ends() | {"token_embd.weight": (64, tokens), "output.weight": (64, tokens)}
    for layer in range(layers):
        shapes |= attention(layer, absorbed=False, q_a=True) | tiny_models.experts(layer, 8, 32, 32)
    path = deepseek2(tmp_path / "two.gguf", absorbed=False)
    with open_gguf(path) as source:
        values = {
            key.removeprefix("deepseek2."): f.value for key, f in source.fields.items() if key.startswith("deepseek2.")
        }
    values |= {"block_count": layers, "expert_gating_func": None, "leading_dense_block_count": 0}
    zeros = {name: np.zeros(ne[::-1], np.float32) for name, ne in shapes.items()}
    with open_gguf(
        tiny_models.write(tmp_path / "model.gguf", "deepseek2", values, shapes, extra_fields=zeros)
    ) as source:
        gatings = {op.routing.gating for op in build_graph(source).ops if type(op).__name__ == "Route"}
    assert gatings == {gating}


def both_forms(folder: Path) -> tuple[Path, Path]:
    """Write one model, expanded and absorbed."""
    rng, absorbed, plain = np.random.default_rng(4), {}, {}
    for layer in range(2):
        k_b = rng.standard_normal((HEADS, K - ROT, RANK)).astype(np.float32) / 6
        v_b = rng.standard_normal((HEADS, V, RANK)).astype(np.float32) / 6
        absorbed[f"blk.{layer}.attn_kv_b.weight"] = np.concatenate([k_b, v_b], 1).reshape(-1, RANK)
        plain |= {f"blk.{layer}.attn_k_b.weight": k_b.transpose(0, 2, 1), f"blk.{layer}.attn_v_b.weight": v_b}
    expanded = deepseek2(folder / "expanded.gguf", YARN, absorbed=False, extra_fields=absorbed)
    return expanded, deepseek2(folder / "absorbed.gguf", YARN, extra_fields=plain)


def test_absorbed_and_expanded_forms_give_the_same_logits(tmp_path: Path) -> None:
    expanded, absorbed = (tiny_models.logits(path, tiny_models.ids(30)) for path in both_forms(tmp_path))
    assert nmse(absorbed, expanded) < 1e-11


@pytest.mark.parametrize("absorbed", [True, False])
def test_batches_and_sequences_do_not_matter(absorbed: bool, tmp_path: Path) -> None:
    path, first, second = (
        deepseek2(tmp_path / "model.gguf", absorbed=absorbed),
        tiny_models.ids(24),
        tiny_models.ids(24, 2),
    )
    expected = tiny_models.logits(path, first)
    assert nmse(tiny_models.logits(path, first, (5, 1, 18)), expected) < 1e-11
    a, b = tiny_models.logits_of_two(path, first, second)
    assert nmse(a, expected) < 1e-11
    assert nmse(b, tiny_models.logits(path, second)) < 1e-11


@pytest.mark.parametrize(
    ("error", "refusal", "changes", "extra_shapes"),
    [
        (FormatError, "QK-E123 value_length_mla 0", {"attention.value_length_mla": 0}, {}),
        (FormatError, "QK-E123 48", {"rope.dimension_count": 48}, {}),
        (FormatError, "QK-E123 temperature_length 0", {"attention.temperature_scale": 0.1}, {}),
        (FormatError, "QK-E123 kv_lora_rank", {"attention.kv_lora_rank": None}, {}),
        (FormatError, "QK-E106 0.attn_kv_a_mqa 48", {"attention.kv_lora_rank": 30}, {}),
        (FormatError, "QK-E106 blk.0.attn_k_b.weight 32", {}, {"blk.0.attn_k_b.weight": (K - ROT, RANK, HEADS - 1)}),
        (TypeNotSupported, "QK-E306 attn_q_a.bias", {}, {"blk.0.attn_q_a.bias": (Q_RANK,)}),
        (TypeNotSupported, "QK-E107 attn_kv_b", {}, {"blk.0.attn_kv_b.weight": (RANK, HEADS * (K - ROT + V))}),
        (QuantkitError, "QK-E123 expert_gating_func", {"expert_gating_func": 5}, {}),
    ],
)
def test_inconsistent_models_are_refused(
    error: type[Exception], refusal: str, changes: dict[str, Any], extra_shapes: tiny_models.Shapes, tmp_path: Path
) -> None:
    with (
        open_gguf(deepseek2(tmp_path / "model.gguf", changes, extra_shapes=extra_shapes)) as source,
        refuses(error, refusal),
    ):
        build_graph(source)


@pytest.mark.parametrize("changes", [YARN, {"rope.freq_base": 5e5}, {"rope.dimension_count": 8}])
def test_deepseek_ocr_with_unknown_rope_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with (
        open_gguf(ocr(tmp_path / "model.gguf", changes)) as source,
        refuses(TypeNotSupported, "QK-E306 model.gguf 16 10000"),
    ):
        build_graph(source)
