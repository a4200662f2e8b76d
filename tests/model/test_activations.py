"""``Model.hidden`` and ``Model.covariances``: compared with what observing operations see in an unfused graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

import quantkit
from quantkit.errors import FormatError, RecipeError
from quantkit.model import ops
from quantkit.model.observers import every_token, inputs
from quantkit.model.ops import Graph, Value
from zoo import expected

TOKENS = expected("qwen3moe-moe")[0]
ARCHS = ("qwen3moe-moe", "gemma3-dense", "deepseek2-moe", "qwen3next-moe", "mamba2-dense", "starcoder-dense")


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.square(a.astype(np.float64) - b).sum() / np.square(b.astype(np.float64)).sum())


def observe_values(path: Path, values_of: Callable[[Graph], Mapping[str, Value]]) -> dict[str, np.ndarray]:
    """Return values of a forward pass over TOKENS by label, [tokens, width], as Observe operations see them."""
    blocks: dict[str, list[np.ndarray]] = {}

    def rewrite(graph: Graph) -> Graph:
        graph = every_token(graph)
        labels = {value: label for label, value in values_of(graph).items()}
        result: list[ops.Op] = []
        for op in graph.ops:
            result.append(op)
            for value in op.outputs():
                if value in labels:
                    result.append(ops.Observe(layer=op.layer, x=value, label=labels[value]))
        return replace(graph, ops=tuple(result))

    def observer(label: str, rows: np.ndarray, ids: np.ndarray | None) -> None:
        blocks.setdefault(label, []).append(rows.copy())

    with quantkit.load(path, kv_type="f32", rewrite=rewrite, observer=observer) as model:
        model.forward(TOKENS)
    return {label: np.concatenate(rows).reshape(len(TOKENS), -1) for label, rows in blocks.items()}


def layer_outs(graph: Graph) -> dict[str, Value]:
    return {str(op.layer): v for op in graph.ops for v in op.outputs() if v.name.endswith(".layer_out")}


@pytest.mark.parametrize("name", ARCHS)
def test_hidden_has_the_output_of_each_layer(zoo: Callable[[str], Path], name: str) -> None:
    path = zoo(name)
    outs = observe_values(path, layer_outs)
    with quantkit.load(path, kv_type="f32") as model:
        hidden = model.hidden_states(TOKENS)
        assert hidden.shape == (model.n_layer, len(TOKENS), model.n_embd)
        assert len(outs) == model.n_layer
        for layer, rows in enumerate(hidden):
            assert nmse(rows, outs[str(layer)]) <= 1e-11
        assert nmse(model.forward(TOKENS), expected(name)[1]) <= 1e-8  # the model is as it was


def test_the_last_layer_gives_the_logits(tiny_moe: Path) -> None:
    tokens = np.arange(1, 40)
    with quantkit.load(tiny_moe) as model, quantkit.open_gguf(tiny_moe) as file:
        [x] = model.hidden_states(tokens, [model.n_layer - 1]).astype(np.float64)
        epsilon = file.get(f"{model.arch}.attention.layer_norm_rms_epsilon")
        normed = x / np.sqrt(np.square(x).mean(1, keepdims=True) + epsilon) * file.values("output_norm.weight")
        name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        assert nmse(normed @ file.values(name).T, model.forward(tokens)) < 1e-4  # activations are rounded to BF16


def test_layers_in_any_order_and_batches_of_any_size(zoo: Callable[[str], Path]) -> None:
    with quantkit.load(zoo("qwen3moe-moe"), kv_type="f32", n_ubatch=7) as model:
        all_layers = model.hidden_states(TOKENS)
        assert np.array_equal(model.hidden_states(TOKENS, [1, 0, 1]), all_layers[[1, 0, 1]])
        assert nmse(model.hidden_states(TOKENS[:9]), all_layers[:, :9]) <= 1e-11
        assert model.hidden_states(TOKENS, []).shape == (0, len(TOKENS), model.n_embd)
        with refuses(RecipeError, "QK-E203", model.n_layer):
            model.hidden_states(TOKENS, [model.n_layer])
        with refuses(FormatError, "QK-E203", model.n_vocab):
            model.hidden_states([model.n_vocab])
        with refuses(FormatError, "QK-E203"):
            model.hidden_states([])


@pytest.mark.parametrize("name", ["qwen3moe-moe", "gemma3-dense", "qwen3next-moe"])
def test_covariances_are_sums_over_the_inputs_of_weights(zoo: Callable[[str], Path], name: str) -> None:
    path = zoo(name)
    weight_inputs = {}

    def values_of(graph: Graph) -> dict[str, Value]:
        weight_inputs.update({i.names[0]: i for i in inputs(graph)})
        return {i.names[0]: i.x for i in weight_inputs.values() if i.ids is None and i.heads == 1}

    rows = observe_values(path, values_of)
    with quantkit.load(path, kv_type="f32") as model:
        records = model.covariances(TOKENS)
    assert records.keys() == {weight for item in weight_inputs.values() for weight in item.names}
    for first, x in rows.items():
        wide = x.astype(np.float64)
        for weight in weight_inputs[first].names:
            assert records[weight].counts.tolist() == [len(TOKENS)]
            assert nmse(records[weight].sums[0], wide.T @ wide) <= 1e-10
            assert np.array_equal(records[weight].mean, records[weight].sums / len(TOKENS))


def test_covariances_of_experts(zoo: Callable[[str], Path]) -> None:
    """Each token counts for its experts, and all experts together for the router's input."""
    with quantkit.load(zoo("qwen3moe-moe"), kv_type="f32") as model:
        names = ["blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_exps.weight"]
        up, router, gate = model.covariances(TOKENS, names).values()
        assert gate.sums is up.sums
        used = model.source.get(f"{model.arch}.expert_used_count")
        assert up.counts.sum() == used * len(TOKENS)
        assert len(up.counts) == model.source.get(f"{model.arch}.expert_count")
        assert nmse(up.sums.sum(0), used * router.sums[0]) <= 1e-10
        assert not up.sums[up.counts == 0].any()


def test_several_sequences_add_up(zoo: Callable[[str], Path]) -> None:
    name = "blk.1.ffn_gate_inp.weight"
    with quantkit.load(zoo("qwen3moe-moe"), kv_type="f32") as model:
        halves = [model.covariances(part, [name])[name] for part in (TOKENS[:32], TOKENS[32:])]
        both = model.covariances(TOKENS.reshape(2, 32), [name])[name]
        assert nmse(both.sums, halves[0].sums + halves[1].sums) <= 1e-11
        assert both.counts.tolist() == [64]
        with refuses(RecipeError, "QK-E206", "blk.0.attn_norm.weight"):
            model.covariances(TOKENS, ["blk.0.attn_norm.weight"])
        assert "output.weight" in model.covariances(TOKENS[:4], ["output.weight"])


def test_covariances_equal_the_file(tiny_moe: Path, tmp_path: Path) -> None:
    """quantkit.covariance puts BOS, here token 1, in the place of each window's first token if the model wants one."""
    tokens = np.arange(1, 129)
    options = quantkit.ImatrixOptions(n_ctx=64)
    quantkit.covariance(tiny_moe, [], tmp_path / "c.gguf", tokens=tokens, options=options, weighting="tokens")
    recorded = quantkit.Covariances(tmp_path / "c.gguf")
    with quantkit.load(tiny_moe) as model:
        windows = tokens.reshape(2, 64)
        if model.tokenizer.add_bos:
            windows[:, 0] = model.tokenizer.bos
        name = "blk.0.ffn_down_exps.weight"
        record = model.covariances(windows, [name])[name]
    assert np.array_equal(recorded.tokens(recorded.entries[name]), record.counts)
    for expert in range(len(record.counts)):
        assert np.allclose(recorded.matrix(recorded.entries[name], expert), record.sums[expert], rtol=1e-5, atol=1e-6)
