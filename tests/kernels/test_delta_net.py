"""Qwen3-Next and Qwen3.5: llama.cpp's logits for every variant, sequences in pieces, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from refusals import refuses

from libllama import Libllama, nmse
from quantkit.errors import FormatError
from quantkit.formats.gguf import open_gguf
from quantkit.model import arch as table
from quantkit.model.backends import Limits
from quantkit.model.backends.reference import Reference
from quantkit.model.batch import Batch
from quantkit.model.graph import build_graph
from quantkit.model.ops import Attention, DeltaNet

HEADS, KV_HEADS, HEAD = 4, 2, 32
STATE, K_HEADS, V_HEADS = 16, 2, 4
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
#: What a variant changes in the metadata, and in the tensors.
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "next": ("qwen3next", {}, {}),
    "next-ssm-in": ("qwen3next", {}, {"ssm_in": True}),
    "next-one-key-head": ("qwen3next", {"ssm.group_count": 1}, {"k_heads": 1}),
    "next-partial-rope": ("qwen3next", {"rope.dimension_count": 8}, {}),
    "next-fused-qkv": ("qwen3next", {}, {"fused": True}),
    "next-list": ("qwen3next", {"attention.recurrent_layers": [1, 0, 0, 1]}, {"recurrent": (1, 0, 0, 1)}),
    "next-interval": ("qwen3next", {"full_attention_interval": 2}, {"recurrent": (1, 0, 1, 0)}),
    "next-ignored-keys": ("qwen3next", {"expert_weights_scale": 1.7, "attention.scale": 0.3}, {}),
    "next-yarn": ("qwen3next", YARN, {}),
    "next-scales": ("qwen3next", {}, {"scales": True}),
    "35moe": ("qwen35moe", {}, {}),
    "35moe-partial-rope": ("qwen35moe", {"rope.dimension_count": 16, "rope.dimension_sections": [3, 3, 2, 0]}, {}),
    "35moe-scales": ("qwen35moe", {}, {"scales": True}),
    "35": ("qwen35", {}, {}),
    "35-fourth-section": ("qwen35", {"rope.dimension_sections": [4, 4, 4, 4]}, {}),
    "35-scales": ("qwen35", {}, {"scales": True}),
}


def qwen(
    path: Path,
    arch: str,
    changes: dict[str, Any] | None = None,
    *,
    ssm_in: bool = False,
    fused: bool = False,
    scales: bool = False,
    k_heads: int = K_HEADS,
    recurrent: tuple[int, ...] = (1, 1, 1, 0),
    seed: int = 1,
    extra_shapes: tiny_models.Shapes | None = None,
) -> Path:
    """Write four layers."""
    fields = {
        **{"block_count": 4, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS},
        **{"attention.key_length": HEAD, "attention.value_length": HEAD, "rope.dimension_count": HEAD},
        **{"ssm.inner_size": V_HEADS * STATE, "ssm.state_size": STATE, "ssm.time_step_rank": V_HEADS},
        **{"ssm.group_count": k_heads, "ssm.conv_kernel": 4},
        **({"rope.dimension_sections": [6, 5, 5, 0]} if arch != "qwen3next" else {}),
    }
    if arch != "qwen35":
        fields |= {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
        fields |= {"expert_shared_feed_forward_length": 40}
    shapes = tiny_models.ends()
    for layer, is_recurrent in enumerate(recurrent):
        prefix = f"blk.{layer}."
        shapes |= {
            f"{prefix}attn_norm.weight": (tiny_models.N_EMBD,),
            f"{prefix}post_attention_norm.weight": (tiny_models.N_EMBD,),
        }
        shapes |= delta_net(prefix, arch, ssm_in, k_heads) if is_recurrent else attention(prefix, fused)
        if arch == "qwen35":
            shapes |= tiny_models.dense(layer)
        else:
            shapes |= tiny_models.experts(layer, 8, 32, 40) | {
                f"{prefix}ffn_gate_inp_shexp.weight": (tiny_models.N_EMBD,)
            }
    if scales:
        shapes |= scale_shapes(arch, shapes)
    return tiny_models.write(path, arch, fields | (changes or {}), shapes | (extra_shapes or {}), seed)


def delta_net(prefix: str, arch: str, ssm_in: bool, k_heads: int) -> tiny_models.Shapes:
    e, k, v = tiny_models.N_EMBD, k_heads * STATE, V_HEADS * STATE
    shapes: tiny_models.Shapes = {
        **{
            f"{prefix}ssm_conv1d.weight": (4, 2 * k + v),
            f"{prefix}ssm_dt.bias": (V_HEADS,),
            f"{prefix}ssm_a": (V_HEADS,),
        },
        **{f"{prefix}ssm_norm.weight": (STATE,), f"{prefix}ssm_out.weight": (v, e)},
    }
    if ssm_in:
        shapes |= {f"{prefix}ssm_in.weight": (e, 2 * k + 2 * v)}
    else:
        shapes |= {f"{prefix}attn_qkv.weight": (e, 2 * k + v), f"{prefix}attn_gate.weight": (e, v)}
    if arch == "qwen3next":
        return shapes | {f"{prefix}ssm_ba.weight": (e, 2 * V_HEADS)}
    return shapes | {f"{prefix}ssm_alpha.weight": (e, V_HEADS), f"{prefix}ssm_beta.weight": (e, V_HEADS)}


def attention(prefix: str, fused: bool) -> tiny_models.Shapes:
    e, q, kv = tiny_models.N_EMBD, 2 * HEADS * HEAD, KV_HEADS * HEAD
    shapes: tiny_models.Shapes = {f"{prefix}attn_output.weight": (HEADS * HEAD, e)}
    shapes |= {f"{prefix}attn_q_norm.weight": (HEAD,), f"{prefix}attn_k_norm.weight": (HEAD,)}
    if fused:
        return shapes | {f"{prefix}attn_qkv.weight": (e, q + 2 * kv)}
    return shapes | {
        f"{prefix}attn_q.weight": (e, q),
        f"{prefix}attn_k.weight": (e, kv),
        f"{prefix}attn_v.weight": (e, kv),
    }


def scale_shapes(arch: str, shapes: tiny_models.Shapes) -> tiny_models.Shapes:
    """Return a ``.scale`` for every tensor that llama.cpp reads one of."""
    names = ("attn_qkv", "attn_gate", "attn_q", "attn_output", "ssm_out", "ffn_gate", "ffn_up", "ffn_down")
    names += ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ssm_alpha", "ssm_beta")
    per_expert = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    actual: tiny_models.Shapes = {}
    for tensor in shapes:
        name = tensor.removesuffix(".weight").split(".")[-1]
        if name in names or name in per_expert:
            actual[tensor.removesuffix(".weight") + ".scale"] = (8,) if name in per_expert else (1,)
    return actual


@pytest.mark.peer
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_llama_cpp(variant: str, tmp_path: Path, llama_bin: Path) -> None:
    arch, changes, tensors = VARIANTS[variant]
    path = qwen(tmp_path / "model.gguf", arch, changes, seed=len(variant), **tensors)
    tokens = tiny_models.ids(70)
    assert nmse(tiny_models.logits(path, tokens), Libllama(llama_bin).logits(path, tokens)) < 3e-11


@pytest.mark.parametrize("arch", ["qwen3next", "qwen35moe", "qwen35"])
def test_batches_and_sequences_do_not_matter(arch: str, tmp_path: Path) -> None:
    path, first, second = qwen(tmp_path / "model.gguf", arch), tiny_models.ids(24), tiny_models.ids(24, 2)
    expected = tiny_models.logits(path, first)
    assert nmse(tiny_models.logits(path, first, (5, 1, 2, 16)), expected) < 1e-11
    a, b = tiny_models.logits_of_two(path, first, second)
    assert nmse(a, expected) < 1e-11
    assert nmse(b, tiny_models.logits(path, second)) < 1e-11


def test_a_restarted_sequence_has_an_empty_state(tmp_path: Path) -> None:
    tokens, positions = tiny_models.ids(8), np.arange(8, dtype=np.int32)
    with open_gguf(qwen(tmp_path / "model.gguf", "qwen35")) as source:
        graph = build_graph(source)
        program = Reference(source).compile(graph.ops, Limits(8))
        outputs = []
        for _ in range(2):
            program.run(Batch(tokens, positions, np.zeros(8, np.int32), positions))
            outputs.append(program.read(graph.logits))
    np.testing.assert_array_equal(outputs[0], outputs[1])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, "ddda"), ({"full_attention_interval": 2}, "dada"), ({"attention.recurrent_layers": [0, 1, 1, 0]}, "adda")],
)
def test_the_metadata_select_delta_net_layers(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    recurrent = tuple(int(c == "d") for c in expected)
    with open_gguf(qwen(tmp_path / "model.gguf", "qwen35", changes, recurrent=recurrent)) as source:
        ops = build_graph(source).ops
    kinds = {op.layer: "d" if isinstance(op, DeltaNet) else "a" for op in ops if isinstance(op, DeltaNet | Attention)}
    assert "".join(kinds[layer] for layer in range(4)) == expected


@pytest.mark.parametrize(
    "wrong", [{"rope": "normal"}, {"tiled_heads": False}, {"activation": "gelu"}, {"norm": "layer"}]
)
def test_every_mutation_changes_the_logits(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mutation must matter, or the tests above could miss it; without tiled heads another tensor is required."""
    path, tokens = qwen(tmp_path / "model.gguf", "qwen35moe"), tiny_models.ids(24)
    right = tiny_models.logits(path, tokens)
    monkeypatch.setitem(table.ARCHS, "qwen35moe", replace(table.ARCHS["qwen35moe"], **wrong))
    if "tiled_heads" in wrong:
        with refuses(FormatError, "QK-E105 ssm_ba"):
            tiny_models.logits(path, tokens)
    else:
        assert nmse(tiny_models.logits(path, tokens), right) > 1e-6


@pytest.mark.parametrize(
    ("refusal", "changes", "extra_shapes"),
    [
        ("QK-E123 3 4", {"ssm.group_count": 3}, {}),
        ("QK-E123 2 4", {"ssm.inner_size": 60}, {}),
        ("QK-E123 qwen35.full_attention_interval 0", {"full_attention_interval": 0}, {}),
        ("QK-E123 2", {"attention.recurrent_layers": [1, 1]}, {}),
        ("QK-E123 16", {"attention.value_length": 16}, {}),
        ("QK-E106 attn_gate 70", {}, {"blk.0.attn_gate.weight": (tiny_models.N_EMBD, 70)}),
        ("QK-E106 ssm_conv1d", {}, {"blk.0.ssm_conv1d.weight": (4, 100)}),
        ("QK-E123 ssm.state_size", {"ssm.state_size": None}, {}),
    ],
)
def test_inconsistent_models_are_refused(
    refusal: str, changes: dict[str, Any], extra_shapes: tiny_models.Shapes, tmp_path: Path
) -> None:
    path = qwen(tmp_path / "model.gguf", "qwen35", changes, extra_shapes=extra_shapes)
    with open_gguf(path) as source, refuses(FormatError, refusal):
        build_graph(source)
