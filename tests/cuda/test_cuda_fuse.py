"""Fused launches: the same values, and whatever is observed is there; every decision has a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_delta_net
import test_mamba
import test_mla
import tiny_models

import quantkit
from libllama import nmse
from quantkit.model.engine import Model, load
from quantkit.model.fusion import SWITCHED_OFF, Fusion, summary
from quantkit.model.ops import Graph, Observe, Op, Value
from quantkit.model.placement import ALL_LAYERS, Placement
from quantkit.quantize import QuantizeOptions
from zoo import expected

Zoo = Callable[[str], Path]
Devices = tuple[str, ...]


EVERYTHING = Placement(ALL_LAYERS, (), ("CUDA0",), embeddings=True)


def opened(path: Path, **options: Any) -> Model:
    return load(path, kv_type=options.pop("kv_type", "f32"), placement=EVERYTHING, **options)


def fused_and_not(path: Path, tokens: Any, **options: Any) -> list[Any]:
    """Return the logits of a batch and two tokens after it, launches fused, and not."""
    results, parts = list[Any](), (tokens[:-2], tokens[-2:-1], tokens[-1:])
    for launches in (True, False):
        with opened(path, fusion=Fusion(launches=launches), **options) as model:
            assert any(d.fused for d in model.decisions if d.kind == "row_epilogue") == launches
            session = model.session(16)
            results.append(np.concatenate([session.decode(part) for part in parts]))
    return results


# ---------------------------------------------------------------- the same values


@pytest.mark.parametrize(
    ("name", "kv_type"),
    [
        ("qwen3moe-moe", "q8_0"),
        ("gemma2-dense", "f32"),
        ("granitemoe-moe", "f32"),
        ("hunyuan-moe-moe", "q8_0"),
        ("stablelm-dense", "f32"),
        ("deepseek2-moe", "q8_0"),
        ("deepseek2-moe", "f32"),
    ],
)
def test_fused_and_unfused_results_agree(zoo: Zoo, name: str, kv_type: str, cuda_devices: Devices) -> None:
    assert nmse(*fused_and_not(zoo(name), expected(name)[0][:14], kv_type=kv_type)) <= 1e-12


LATENT = ("expanded", "lite", "temperature")
DELTA = ("next-ssm-in", "next-fused-qkv")
MAMBA = ("groups", "moe")


@pytest.mark.parametrize("variant", [*LATENT, "minicpm3", *DELTA, *MAMBA])
def test_other_forms_fused_and_unfused_agree(variant: str, tmp_path: Path, cuda_devices: Devices) -> None:
    """Latent attention whose keys are expanded, or without latent queries; delta nets of old files; hybrids."""
    path = tmp_path / "model.gguf"
    if variant in DELTA:
        arch, changes, tensors = test_delta_net.VARIANTS[variant]
        test_delta_net.qwen(path, arch, changes, **tensors)
    elif variant in MAMBA:
        changes, tensors = test_mamba.VARIANTS[variant]
        test_mamba.hybrid(path, changes, **tensors)
    elif variant in LATENT:
        changes, tensors = test_mla.VARIANTS[variant]
        test_mla.deepseek2(path, changes, **tensors)
    else:
        test_mla.plain(path, variant)
    assert nmse(*fused_and_not(path, tiny_models.ids(12))) <= 1e-12


#: Experts of one format of activations; the others, and halves, of dense models.
QUANTIZED = [("qwen3moe-moe", "Q8_0"), ("llama4-moe", "Q8_0"), ("deepseek2-moe", "Q8_0"), ("qwen3next-moe", "Q4_0")]
QUANTIZED += [("qwen2-dense", "Q5_1"), ("qwen2-dense", "Q4_K_S"), ("gemma2-dense", "BF16"), ("stablelm-dense", "F16")]
QUANTIZED += [("qwen3moe-moe", "Q8_KV"), ("qwen2-dense", "Q8_KV")]  # scales of whole rows


@pytest.mark.parametrize(("name", "preset"), QUANTIZED)
def test_quantized_weights_reuse_converted_activations(
    zoo: Zoo, tmp_path: Path, name: str, preset: str, cuda_devices: Devices
) -> None:
    """A last bit of a norm may make a level another; such a step is small."""
    path = tmp_path / "quantized.gguf"
    quantkit.quantize(zoo(name), path, preset)
    assert nmse(*fused_and_not(path, expected(name)[0][:14])) <= 1e-5


@pytest.mark.parametrize("preset", ["F32", "Q8_0"])
def test_a_cache_in_several_parts(zoo: Zoo, tmp_path: Path, preset: str, cuda_devices: Devices) -> None:
    """Attention's parts are put together by another launch, which also makes the format of the next weights."""
    path = tmp_path / "model.gguf"
    quantkit.quantize(zoo("qwen3moe-moe"), path, preset)
    tokens = np.tile(expected("qwen3moe-moe")[0], 4)[:90]
    results = []
    for placement in (EVERYTHING, Placement()):
        with load(path, kv_type="f32", placement=placement) as model:
            session = model.session(256)
            results.append(np.concatenate([session.decode(part) for part in (tokens[:87], *tokens[87:, None])]))
    assert nmse(results[0], results[1]) <= (1e-10 if preset == "F32" else 1e-5)


# ---------------------------------------------------------------- decisions


def test_every_decision_has_a_reason(zoo: Zoo, tmp_path: Path, cuda_devices: Devices) -> None:
    path = tmp_path / "quantized.gguf"
    quantkit.quantize(zoo("qwen2moe-moe"), path, "Q8_0", QuantizeOptions(custom_q=("ffn_down_shexp=q5_1",)))
    summaries = ("up+gate: 2", "MoE up+gate: 2", "q/k/v: 4", "router and selection: 2", "per-head operations: 2")
    summaries += ("row epilogues: 5", "activation formats: 6")
    with opened(path) as model:
        *lines, of_shared_experts = summary(model.decisions)
        assert model.notes == (of_shared_experts,)
    assert lines == [f"fused {line} of {line[-1]}" for line in summaries]
    assert of_shared_experts == "fused shared experts: 2 of 4 (2 not: no kernel multiplies by Q8_0 and Q5_1)"
    with opened(path, fusion=Fusion(launches=False)) as model:
        off = {d.kind for d in model.decisions if d.reason == SWITCHED_OFF}
        assert not off.intersection(d.kind for d in model.decisions if d.fused and d.kind != "qkv")
    assert off == {"qkv", "route", "per_head", "row_epilogue", "format", "shared_expert"}
    with opened(path, cublas=True) as model:
        assert {d.reason for d in model.decisions if d.kind == "row_epilogue"} == {"--cublas uses rows of bf16"}
        assert not any("cublas" in note for note in model.notes)


# ---------------------------------------------------------------- observers


def watched(graph: Graph, values: set[str]) -> Graph:
    """Let an observer see these values, as soon as they are made."""
    ops: list[Op] = []
    for op in graph.ops:
        ops.append(op)
        ops += [Observe(layer=op.layer, x=v, label=v.name) for v in op.outputs() if v.name in values]
    return replace(graph, ops=tuple(ops))


@pytest.mark.parametrize("name", ["qwen3moe-moe", "gemma3-dense", "bailingmoe2-moe", "deepseek2-moe", "qwen3next-moe"])
def test_observed_values_are_available(zoo: Zoo, name: str, cuda_devices: Devices) -> None:
    """For any subset of observed values, they and the logits equal those of a run that observes all."""
    tokens, values = expected(name)[0][:4], list[Value]()

    def collect(graph: Graph) -> Graph:
        values.extend(v for op in graph.ops for v in op.outputs() if not v.integer)
        return graph

    with opened(zoo(name), rewrite=collect) as model:
        logits = model.forward(tokens)
    names, want = [v.name for v in values], dict[str, Any]()
    for seed in (None, 1, 2, 3):
        labels = set(names)
        if seed is not None:
            labels = {
                n for n, take in zip(names, np.random.default_rng(seed).random(len(names)) < 0.2, strict=True) if take
            }
        records: dict[str, Any] = {}

        def look(label: str, x: Any, ids: Any, records: dict[str, Any] = records) -> None:
            records[label] = np.array(x)

        def observe(graph: Graph, labels: set[str] = labels) -> Graph:
            return watched(graph, labels)

        with opened(zoo(name), observer=look, rewrite=observe) as model:
            assert nmse(model.forward(tokens), logits) <= 1e-12
        assert records.keys() == labels
        want = want or records
        for key, x in records.items():
            assert nmse(x, want[key]) <= 1e-12, key
