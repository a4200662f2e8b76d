"""Neighbours in one launch: fewer launches, the same values, and everything that somebody looks at is still there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from libllama import nmse
from quantkit.kernels.cuda import device
from quantkit.kernels.cuda.device import Launch
from quantkit.model.engine import Model, load
from quantkit.model.ops import Graph, Observe, Op, Value
from quantkit.model.placement import ALL_LAYERS, Placement
from zoo import expected

Zoo = Callable[[str], Path]
Devices = tuple[str, ...]


EVERYTHING = Placement(ALL_LAYERS, (), ("CUDA0",), embeddings=True)


def opened(path: Path, **options: Any) -> Model:
    return load(path, kv_type=options.pop("kv_type", "f32"), placement=EVERYTHING, **options)


def apart(ops: Sequence[Op], *_: Any) -> list[Op]:
    """Join nothing."""
    return list(ops)


# ---------------------------------------------------------------- how many launches


def names_of_a_token(monkeypatch: pytest.MonkeyPatch, path: Path, n_ctx: int = 16) -> list[str]:
    """Return the kernels that a batch of one token launches."""
    names, kept = list[str](), device.open_device("CUDA0")

    def run(launches: Sequence[Launch], real: Any = kept.run) -> None:
        names.extend(launch.operation.name for launch in launches)
        real(launches)

    monkeypatch.setattr(kept, "run", run)
    with opened(path) as model:
        session = model.session(n_ctx)
        names.clear()
        session.decode(np.array([1], np.int32))
    return names


#: Of models of two layers, the embeddings, the selection of outputs and the logits included.
MOST = {
    "qwen3moe-moe": 27,
    "llama-dense": 31,
    "qwen2-dense": 23,
    "gemma3-dense": 23,
    "granitemoe-moe": 31,
    "bailingmoe2-moe": 27,
}


@pytest.mark.parametrize("name", MOST)
def test_a_token_takes_few_launches(
    zoo: Zoo, name: str, cuda_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(names_of_a_token(monkeypatch, zoo(name))) <= MOST[name]


def test_a_layer_of_quantized_experts(
    zoo: Zoo, tmp_path: Path, cuda_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "q8.gguf"
    quantkit.quantize(zoo("qwen3moe-moe"), path, "Q8_0")
    names = names_of_a_token(monkeypatch, path, 256)
    layer = (
        "mul_mats parts attention attention_combine_to mul_mat stage mul_mat route up_gate_id quantize mul_mat_id stage"
    )
    assert [n for n in names if n != "rope_table"][2:-1][:12] == layer.split()


def test_q_k_and_v_may_be_of_two_types(
    zoo: Zoo, tmp_path: Path, cuda_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "q4.gguf"
    quantkit.quantize(zoo("qwen2-dense"), path, "Q4_K_S")
    with opened(path) as model:
        types = {
            m.tensor.type.name
            for op in model.graph.ops
            if op.layer == 0
            for m in op.matrices()
            if "attn_" in m.tensor.name
        }
        assert {"Q4_K", "Q5_K"} <= types
    names = names_of_a_token(monkeypatch, path)
    assert [names.count(name) for name in ("mul_mats", "mul_mat")] == [2, 2 * 2 + 1]


# ---------------------------------------------------------------- the same values


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
@pytest.mark.parametrize(
    "name", ["qwen3moe-moe", "gemma2-dense", "granitemoe-moe", "hunyuan-moe-moe", "stablelm-dense", "deepseek2-moe"]
)
def test_joined_and_apart_agree(
    zoo: Zoo, name: str, kv_type: str, cuda_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = expected(name)[0][:14]
    found = []
    for joined in (True, False):
        if not joined:
            monkeypatch.setattr("quantkit.model.backends.cuda.join", apart)
        with opened(zoo(name), kv_type=kv_type) as model:
            session = model.session(16)
            found.append(np.concatenate([session.decode(part) for part in (tokens[:12], tokens[12:13], tokens[13:])]))
    assert nmse(found[0], found[1]) <= 1e-12


@pytest.mark.parametrize(
    ("name", "preset"), [("qwen3moe-moe", "Q8_0"), ("qwen3moe-moe", "Q5_1"), ("qwen2-dense", "Q4_K_S")]
)
def test_quantized_weights_find_their_activations(
    zoo: Zoo, tmp_path: Path, name: str, preset: str, cuda_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last bit of a norm may make a level another; such a step is small."""
    path = tmp_path / "quantized.gguf"
    quantkit.quantize(zoo(name), path, preset)
    tokens = expected(name)[0][:14]
    found = []
    for joined in (True, False):
        if not joined:
            monkeypatch.setattr("quantkit.model.backends.cuda.join", apart)
        with opened(path) as model:
            session = model.session(16)
            found.append(np.concatenate([session.decode(part) for part in (tokens[:12], tokens[12:13], tokens[13:])]))
    assert nmse(found[0], found[1]) <= 1e-5


@pytest.mark.parametrize("preset", ["F32", "Q8_0"])
def test_a_cache_in_several_parts(zoo: Zoo, tmp_path: Path, preset: str, cuda_devices: Devices) -> None:
    """Attention's parts are put together by another launch, which also makes the format of the next weights."""
    path = tmp_path / "model.gguf"
    quantkit.quantize(zoo("qwen3moe-moe"), path, preset)
    tokens = np.tile(expected("qwen3moe-moe")[0], 4)[:90]
    found = []
    for placement in (EVERYTHING, Placement()):
        with load(path, kv_type="f32", placement=placement) as model:
            session = model.session(256)
            found.append(np.concatenate([session.decode(part) for part in (tokens[:87], *tokens[87:, None])]))
    assert nmse(found[0], found[1]) <= (1e-10 if preset == "F32" else 1e-5)


# ---------------------------------------------------------------- who looks on


def watched(graph: Graph, values: set[str]) -> Graph:
    """Let an observer see these values, as soon as they are made."""
    ops: list[Op] = []
    for op in graph.ops:
        ops.append(op)
        ops += [Observe(layer=op.layer, x=v, of=v.name) for v in op.outputs() if v.name in values]
    return replace(graph, ops=tuple(ops))


@pytest.mark.parametrize("name", ["qwen3moe-moe", "gemma3-dense", "bailingmoe2-moe"])
def test_what_is_looked_at_is_there(zoo: Zoo, name: str, cuda_devices: Devices) -> None:
    """Whatever part of the values somebody sees, they and the logits are those of a run in which all are seen."""
    tokens, every = expected(name)[0][:4], list[Value]()

    def collect(graph: Graph) -> Graph:
        every.extend(v for op in graph.ops for v in op.outputs() if not v.integer)
        return graph

    with opened(zoo(name), rewrite=collect) as model:
        logits = model.forward(tokens)
    names, want = [v.name for v in every], dict[str, Any]()
    for seed in (None, 1, 2, 3):
        chosen = set(names)
        if seed is not None:
            chosen = {
                n for n, take in zip(names, np.random.default_rng(seed).random(len(names)) < 0.2, strict=True) if take
            }
        seen: dict[str, Any] = {}

        def look(of: str, x: Any, ids: Any, seen: dict[str, Any] = seen) -> None:
            seen[of] = np.array(x)

        def some(graph: Graph, chosen: set[str] = chosen) -> Graph:
            return watched(graph, chosen)

        with opened(zoo(name), observer=look, rewrite=some) as model:
            assert nmse(model.forward(tokens), logits) <= 1e-12
        assert seen.keys() == chosen
        want = want or seen
        for key, x in seen.items():
            assert nmse(x, want[key]) <= 1e-12, key
