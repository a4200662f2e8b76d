"""Granite hybrids: llama.cpp's logits for every variant, sequences in pieces, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from refusals import refuses
from test_cuda_backend import everywhere
from test_engine_hostile import CHANGES, changed

from libllama import Libllama, nmse
from quantkit.errors import FormatError, QuantkitError
from quantkit.formats.gguf import open_gguf
from quantkit.model import arch as table
from quantkit.model.engine import load
from quantkit.model.fusion import Fusion
from quantkit.model.graph import build_graph
from quantkit.model.ops import Attention, Graph, MulMat, Norm, SsmScan

HEADS, KV_HEADS, HEAD = 4, 2, 16
WIDTH, SSM_HEADS, D_STATE = 2 * tiny_models.N_EMBD, 8, 16
SCALES = {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0, "attention.scale": 0.1}
#: What a variant changes in the metadata, and in the tensors.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "rope": ({"rope.scaling.finetuned": True}, {}),
    "no-scales": (dict.fromkeys(SCALES), {}),
    "groups": ({"ssm.group_count": 4}, {"groups": 4}),
    "wide-heads": ({"ssm.time_step_rank": 2}, {"ssm_heads": 2}),
    "long-state": ({"ssm.state_size": 40}, {"d_state": 40}),
    "two-taps": ({"ssm.conv_kernel": 2}, {"taps": 2}),
    "attention-first": ({"attention.head_count_kv": [KV_HEADS, 0, 0, KV_HEADS]}, {"recurrent": (0, 1, 1, 0)}),
    "biases": ({}, {"biases": True}),
    "moe": ({}, {"n_expert": 8}),
    "moe-without-shared": ({"expert_shared_feed_forward_length": None}, {"n_expert": 8, "shared": False}),
    "moe-ignored-keys": ({"expert_weights_scale": 1.7, "expert_weights_norm": False}, {"n_expert": 8}),
    "scales": ({}, {"n_expert": 8, "scales": True}),
}


def hybrid(
    path: Path,
    changes: dict[str, Any] | None = None,
    *,
    recurrent: tuple[int, ...] = (1, 1, 0, 1),
    groups: int = 1,
    ssm_heads: int = SSM_HEADS,
    d_state: int = D_STATE,
    taps: int = 4,
    n_expert: int = 0,
    shared: bool = True,
    biases: bool = False,
    scales: bool = False,
    seed: int = 1,
    extra_shapes: tiny_models.Shapes | None = None,
) -> Path:
    """Write four layers."""
    kv_heads = [0 if mamba else KV_HEADS for mamba in recurrent]
    fields = {
        **{"block_count": 4, "attention.head_count": HEADS, "attention.head_count_kv": kv_heads},
        **{"rope.dimension_count": HEAD, "rope.scaling.finetuned": False, **SCALES},
        **{"ssm.inner_size": WIDTH, "ssm.state_size": D_STATE, "ssm.time_step_rank": SSM_HEADS},
        **{"ssm.group_count": 1, "ssm.conv_kernel": 4},
    }
    if n_expert:
        fields |= {"expert_count": n_expert, "expert_used_count": 2, "expert_feed_forward_length": 32}
        fields |= {"expert_shared_feed_forward_length": 40, "feed_forward_length": 32}
    shapes = tiny_models.ends()
    for layer, is_mamba in enumerate(recurrent):
        prefix = f"blk.{layer}."
        shapes |= {
            f"{prefix}attn_norm.weight": (tiny_models.N_EMBD,),
            f"{prefix}ffn_norm.weight": (tiny_models.N_EMBD,),
        }
        shapes |= mamba(prefix, groups, ssm_heads, d_state, taps) if is_mamba else attention(prefix, biases)
        shapes |= tiny_models.experts(layer, n_expert, 32, 40) if n_expert else tiny_models.dense(layer)
        if biases:
            shapes |= {
                f"{prefix}ffn_{part}.bias": (tiny_models.N_EMBD if part == "down" else 48,)
                for part in ("gate", "up", "down")
            }
    if not shared:
        shapes = {name: shape for name, shape in shapes.items() if "_shexp" not in name}
    if scales:
        scaled = tuple(f"{name}.weight" for name in ("ssm_in", "ssm_out", "attn_q", "attn_output"))
        shapes |= {f"{name.removesuffix('.weight')}.scale": (1,) for name in shapes if name.endswith(scaled)}
    return tiny_models.write(path, "granitehybrid", fields | (changes or {}), shapes | (extra_shapes or {}), seed)


def mamba(prefix: str, groups: int, heads: int, d_state: int, taps: int) -> tiny_models.Shapes:
    e, mixed = tiny_models.N_EMBD, WIDTH + 2 * groups * d_state
    return {
        **{f"{prefix}ssm_in.weight": (e, WIDTH + mixed + heads), f"{prefix}ssm_out.weight": (WIDTH, e)},
        **{
            f"{prefix}ssm_conv1d.weight": (taps, mixed),
            f"{prefix}ssm_conv1d.bias": (mixed,),
            f"{prefix}ssm_dt.bias": (heads,),
        },
        **{
            f"{prefix}ssm_a": (1, heads),
            f"{prefix}ssm_d": (1, heads),
            f"{prefix}ssm_norm.weight": (WIDTH // groups, groups),
        },
    }


def attention(prefix: str, biases: bool) -> tiny_models.Shapes:
    e, q, kv = tiny_models.N_EMBD, HEADS * HEAD, KV_HEADS * HEAD
    shapes: tiny_models.Shapes = {f"{prefix}attn_output.weight": (q, e), f"{prefix}attn_q.weight": (e, q)}
    shapes |= {f"{prefix}attn_k.weight": (e, kv), f"{prefix}attn_v.weight": (e, kv)}
    if biases:
        shapes |= {f"{prefix}attn_{part}.bias": (n,) for part, n in (("q", q), ("k", kv), ("v", kv), ("output", e))}
    return shapes


@pytest.mark.peer
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_llama_cpp(variant: str, tmp_path: Path, llama_bin: Path) -> None:
    changes, tensors = VARIANTS[variant]
    path = hybrid(tmp_path / "model.gguf", changes, seed=len(variant), **tensors)
    tokens = tiny_models.ids(70)
    assert nmse(tiny_models.logits(path, tokens), Libllama(llama_bin).logits(path, tokens)) < 3e-11


@pytest.mark.parametrize("variant", ["dense", "groups", "moe"])
def test_batches_and_sequences_do_not_matter(variant: str, tmp_path: Path) -> None:
    changes, tensors = VARIANTS[variant]
    path, first, second = (
        hybrid(tmp_path / "model.gguf", changes, **tensors),
        tiny_models.ids(24),
        tiny_models.ids(24, 2),
    )
    expected = tiny_models.logits(path, first)
    assert nmse(tiny_models.logits(path, first, (5, 1, 2, 16)), expected) < 1e-11
    a, b = tiny_models.logits_of_two(path, first, second)
    assert nmse(a, expected) < 1e-11
    assert nmse(b, tiny_models.logits(path, second)) < 1e-11


@pytest.mark.parametrize("variant", ["wide-heads", "moe"])
@pytest.mark.parametrize("fusion", [Fusion(), Fusion.none()], ids=["fused", "unfused"])
def test_the_cpu_gives_the_references_logits(variant: str, fusion: Fusion, tmp_path: Path) -> None:
    changes, tensors = VARIANTS[variant]
    path, tokens = hybrid(tmp_path / "model.gguf", changes, **tensors), tiny_models.ids(24)
    with load(path, kv_type="f32", fusion=fusion, threads=2) as model:
        assert nmse(model.forward(tokens), tiny_models.logits(path, tokens)) < 1e-11


def test_batches_and_sequences_do_not_matter_on_the_cpu(tmp_path: Path) -> None:
    """Prompts, single tokens, two alternating sequences, and a restarted one."""
    path, first, second = hybrid(tmp_path / "model.gguf"), tiny_models.ids(24), tiny_models.ids(24, 2)
    with load(path, kv_type="f32", threads=2) as model:
        expected, session = [model.forward(tokens) for tokens in (first, second)], model.session(64, n_seq=2)
        for _ in range(2):
            actual: list[list[Any]] = [[], []]
            for begin, end in ((0, 5), (5, 6), (6, 7), (7, 24)):
                tokens = np.stack([first[begin:end], second[begin:end]], 1).reshape(-1)
                logits = session.decode(tokens, np.tile(np.arange(2, dtype=np.int32), end - begin))
                assert logits is not None
                actual[0].append(logits[0::2])
                actual[1].append(logits[1::2])
            for rows, logits in zip(actual, expected, strict=True):
                assert nmse(np.concatenate(rows), logits) < 1e-11
            session.clear()


@pytest.mark.parametrize("rules", ["", r"blk\.[13]\.=CPU", "ssm_out=CPU"])
def test_a_gpu_gives_the_references_logits(rules: str, tmp_path: Path, cuda_devices: tuple[str, ...]) -> None:
    """A prompt, a few tokens and single ones; layers, or matrices, on the other device."""
    changes, tensors = VARIANTS["moe"]
    path, tokens = hybrid(tmp_path / "model.gguf", changes, **tensors), tiny_models.ids(16)
    with load(path, kv_type="f32", placement=everywhere("CUDA0", rules=rules)) as model:
        session = model.session(16)
        logits: list[Any] = [session.decode(piece) for piece in np.split(tokens, (10, 14, 15))]
        assert nmse(np.concatenate(logits), tiny_models.logits(path, tokens)) < 1e-11


def test_layers_without_key_heads_are_mamba(tmp_path: Path) -> None:
    changes, tensors = VARIANTS["attention-first"]
    with open_gguf(hybrid(tmp_path / "model.gguf", changes, **tensors)) as source:
        ops = build_graph(source).ops
    kinds = {op.layer: "m" if isinstance(op, SsmScan) else "a" for op in ops if isinstance(op, SsmScan | Attention)}
    assert "".join(kinds[layer] for layer in range(4)) == "amma"


# ---------------------------------------------------------------- what would go unnoticed


def other_groups(op: SsmScan) -> SsmScan:
    return replace(op, b=op.c, c=op.b)


def no_skip(op: SsmScan) -> SsmScan:
    return replace(op, d=op.a)


def other_bias(op: SsmScan) -> SsmScan:
    return replace(op, dt_bias=op.d)


@pytest.mark.parametrize("change", [other_groups, no_skip, other_bias])
def test_every_mutation_of_the_scan_changes_the_logits(
    change: Callable[[SsmScan], SsmScan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokens = hybrid(tmp_path / "model.gguf"), tiny_models.ids(24)
    right = tiny_models.logits(path, tokens)

    def build(source: Any) -> Graph:
        graph = build_graph(source)
        return replace(graph, ops=tuple(change(op) if isinstance(op, SsmScan) else op for op in graph.ops))

    monkeypatch.setattr(tiny_models, "build_graph", build)
    assert nmse(tiny_models.logits(path, tokens), right) > 1e-4


@pytest.mark.parametrize(
    "wrong", [{"rope_rules": table.RopeRules()}, {"scales": frozenset()}, {"logit_scale": ""}, {"activation": "gelu"}]
)
def test_every_mutation_changes_the_logits(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokens = hybrid(tmp_path / "model.gguf"), tiny_models.ids(24)
    right = tiny_models.logits(path, tokens)
    monkeypatch.setitem(table.ARCHS, "granitehybrid", replace(table.ARCHS["granitehybrid"], **wrong))
    assert nmse(tiny_models.logits(path, tokens), right) > 1e-6


def test_the_norm_is_per_group(tmp_path: Path) -> None:
    changes, tensors = VARIANTS["groups"]
    with open_gguf(hybrid(tmp_path / "model.gguf", changes, **tensors)) as source:
        norms = [op for op in build_graph(source).ops if isinstance(op, Norm) and op.out.name.endswith("ssm_norm")]
    assert [op.group for op in norms] == [WIDTH // 4] * 3


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("refusal", "changes", "extra_shapes"),
    [
        ("QK-E123 3 1", {"ssm.time_step_rank": 3}, {}),
        ("QK-E123 8 3", {"ssm.group_count": 3}, {}),
        ("QK-E123 8 0", {"ssm.group_count": 0}, {}),
        ("QK-E123 8 -1", {"ssm.group_count": -1}, {}),
        ("QK-E123 0", {"ssm.state_size": 0}, {}),
        ("QK-E106 model.gguf 0.ssm_in", {"ssm.state_size": 32}, {}),
        ("QK-E106 model.gguf 0.ssm_in", {"ssm.state_size": 1 << 40}, {}),
        ("QK-E106 model.gguf 0.ssm_in", {"ssm.inner_size": 64}, {}),
        ("QK-E123 ssm.inner_size", {"ssm.inner_size": None}, {}),
        ("QK-E123 2", {"attention.head_count_kv": [0, 0]}, {}),
        ("QK-E105 blk.2.ssm_in", {"attention.head_count_kv": [0, 0, 0, 0]}, {}),
        ("QK-E105 blk.0.attn_q", {"attention.head_count_kv": None}, {}),
        ("QK-E106 -2", {"attention.head_count_kv": [0, 0, -2, 0]}, {}),
        ("QK-E106 ssm_conv1d", {}, {"blk.0.ssm_conv1d.weight": (4, 100)}),
        ("QK-E106 ssm_conv1d", {}, {"blk.0.ssm_conv1d.weight": (17, WIDTH + 2 * D_STATE)}),
        ("QK-E106 blk.0.ssm_conv1d.bias 160", {}, {"blk.0.ssm_conv1d.bias": (WIDTH,)}),
        ("QK-E106 8", {}, {"blk.0.ssm_a": (D_STATE, SSM_HEADS)}),
        ("QK-E106 8", {}, {"blk.0.ssm_dt.bias": (1,)}),
        ("QK-E106 ssm_norm", {}, {"blk.0.ssm_norm.weight": (WIDTH // 2,)}),
        ("QK-E106 ssm_out", {}, {"blk.0.ssm_out.weight": (WIDTH // 2, tiny_models.N_EMBD)}),
    ],
)
def test_inconsistent_models_are_refused(
    refusal: str, changes: dict[str, Any], extra_shapes: tiny_models.Shapes, tmp_path: Path
) -> None:
    path = hybrid(tmp_path / "model.gguf", changes, extra_shapes=extra_shapes)
    with open_gguf(path) as source, refuses(FormatError, refusal):
        build_graph(source)


@pytest.mark.parametrize("change", CHANGES)
def test_other_shapes_are_refused_or_harmless(change: str, tmp_path: Path) -> None:
    path, refused = hybrid(tmp_path / "model.gguf"), 0
    with open_gguf(path) as source:
        shapes = {t.name: t.shape for t in source.tensors.values() if t.name.startswith("blk.1.ssm")}
    assert len(shapes) == 8
    for name, shape in shapes.items():
        changed_shape = CHANGES[change](shape)
        if changed_shape == shape or min(changed_shape) < 1:
            continue
        changed(path, tmp_path / "x.gguf", name, changed_shape)
        try:
            with load(tmp_path / "x.gguf", kv_type="f32") as model:
                model.forward([1, 2, 3])
        except QuantkitError:
            refused += 1
    assert refused > 2


def test_an_unused_matrix_of_the_scan_is_refused(tmp_path: Path) -> None:
    """Mamba 1 has more of them."""
    path = hybrid(tmp_path / "model.gguf", extra_shapes={"blk.0.ssm_x.weight": (tiny_models.N_EMBD, 4)})
    with open_gguf(path) as source, refuses(QuantkitError, "QK-E107 ssm_x.weight"):
        build_graph(source)


def test_projections_are_multiplied_once(tmp_path: Path) -> None:
    with open_gguf(hybrid(tmp_path / "model.gguf")) as source:
        names = [op.weight.tensor.name for op in build_graph(source).ops if isinstance(op, MulMat)]
    assert sum("ssm_in" in name for name in names) == sum("ssm_out" in name for name in names) == 3
