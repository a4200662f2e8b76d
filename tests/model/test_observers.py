"""Observing operations: sums that lose nothing, the same on both backends; the graph stays what it was."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import test_mla
from observer_cases import N_EXPERT, N_USED, ROWS, check_by_expert, check_sums, experts, random_rows
from refusals import refuses
from tiny_models import ids as token_ids

from libllama import nmse
from quantkit.errors import RecipeError
from quantkit.formats.gguf import Field, open_gguf, write_gguf
from quantkit.kernels.cpu import observe as observe_kernels
from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.matmul import moe
from quantkit.model.arch import ARCHS
from quantkit.model.backends.accumulators import padded_width
from quantkit.model.engine import Model, load
from quantkit.model.fusion import Fusion, fuse
from quantkit.model.graph import build_graph
from quantkit.model.observers import (
    ALL_EXPERTS,
    CovarianceRequest,
    covariances,
    every_token,
    fewest_rows,
    inputs,
    observe,
    similarity,
    up_to_layer,
)
from quantkit.model.ops import MulMat, MulMatId, Route, SelectOutputs, Similarity, SumColumns
from quantkit.model.placement import Placement
from zoo import NAMES, ZOO, expected, write_zoo


def batch_of(team: Team) -> Batch:
    batch = Batch(team, 128)
    batch.set(np.zeros(ROWS, np.int32))
    return batch


@pytest.mark.parametrize("width", [1, 24, 40, 63, 256])
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_of_columns_are_exact(width: int, threads: int) -> None:
    x, team = random_rows(width), Team(threads)
    sums, count, bad = np.zeros((1, 4, padded_width(width))), np.zeros(1, np.int64), np.zeros(threads, np.int64)
    batch = batch_of(team)
    slots = {"sums": address_of(sums), "count": address_of(count), "bad": address_of(bad)}
    block = observe_kernels.sum_columns.block(
        batch=batch.address, x=address_of(x), width=width, rows_of=0, per=1, **slots
    )
    tape = Tape(team, batch, [(observe_kernels.sum_columns, block)])
    tape.run()
    check_sums(sums[0], x)
    assert (count[0], bad.any()) == (ROWS, False)
    x[41, width - 1] = np.nan
    x[50, width - 1] = np.inf
    tape.run()
    assert [b - 1 for b in bad if b] == [41]


@pytest.mark.parametrize("one_row_a_token", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_sums_by_expert_are_exact(one_row_a_token: bool, threads: int) -> None:
    width, team, ids = 40, Team(threads), experts()
    x = random_rows(width, ROWS if one_row_a_token else ROWS * N_USED)
    plan = np.zeros(moe.plan_bytes(N_EXPERT, N_USED, 128) // 4, np.int32)
    sums, counts = np.zeros((N_EXPERT, 4, width)), np.zeros(N_EXPERT, np.int64)
    bad, batch = np.zeros(threads, np.int64), batch_of(team)
    slots = {"plan": address_of(plan), "n_expert": N_EXPERT}
    sort = moe.bucket.block(batch=batch.address, ids=address_of(ids), n_used=N_USED, rows_of=0, **slots)
    add = observe_kernels.sum_columns_id.block(
        batch=batch.address,
        x=address_of(x),
        width=width,
        x_per=N_USED if one_row_a_token else 1,
        sums=address_of(sums),
        counts=address_of(counts),
        bad=address_of(bad),
        **slots,
    )
    tape = Tape(team, batch, [(moe.bucket, sort), (observe_kernels.sum_columns_id, add)])
    tape.run()
    check_by_expert(sums, counts, x, ids)
    x[17 if one_row_a_token else 17 * N_USED + 2, 8] = -np.inf
    tape.run()
    assert {(int(b) - 1) // N_USED for b in bad if b} == {17}


# ---------------------------------------------------------------- in graphs


def open_zoo(tmp_path: Path, name: str, rewrite, device: str = "CPU", fusion: Fusion | None = None) -> Model:
    path = tmp_path / f"{name}.gguf"
    if not path.exists():
        write_zoo(name, path)
    place = Placement(rules=((".*", device),))
    return load(path, kv_type="f32", threads=2, fusion=fusion or Fusion.none(), rewrite=rewrite, placement=place)


def everything(graph):
    return similarity(observe(graph, process_output=True, all_experts=True))


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_compared_with_its_input(name: str) -> None:
    with open_gguf(ZOO / "headers" / f"{name}.head", header_only=True) as source:
        graph = similarity(build_graph(source))
    actual = {op.label: op for op in graph.ops if isinstance(op, Similarity)}
    n_layer = max(op.layer for op in graph.ops)
    row = ARCHS[name.rpartition("-")[0]]
    parts = ("layer",) if row.single_block else ("attention", "feed-forward", "layer")
    required = {f"{part} {i}" for part in parts for i in range(n_layer)}
    if row.optional_attention:  # a feed-forward layer alone, and nothing at all
        required -= {"attention 2", "feed-forward 2", "attention 3", "feed-forward 3", "layer 3"}
    if row.residual_attention:  # what a layer with a checkpoint adds attention to is another sum
        required -= {f"feed-forward {i}" for i in range(0, n_layer, 2)}
    assert actual.keys() == required
    assert actual["layer 0"].a.name == "embeddings"
    layers = [i for i in range(n_layer) if f"layer {i}" in required]
    assert [actual[f"layer {i}"].b.name for i in layers] == [f"{i}.layer_out" for i in layers]
    for last, i in pairwise(layers):
        assert actual[f"layer {i}"].a is actual[f"layer {last}"].b
        if name == "gemma3n-dense":  # one of several streams
            assert actual[f"attention {i}"].a.name == f"{i}.active"
        elif f"attention {i}" in required:
            assert actual[f"attention {i}"].a is actual[f"layer {i}"].a


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3moe-moe", "deepseek2-moe", "cohere2-dense", "qwen3next-moe", "gpt-oss-moe", "llama4-moe"),
        *("gemma4-dense", "gemma4-moe", "starcoder-dense", "olmo-dense"),
    ],
)
def test_backends_agree_and_observers_do_not_change_logits(name: str, tmp_path: Path) -> None:
    tokens, logits = expected(name)
    actual = {}
    for device in ("CPU", "REFERENCE"):
        with open_zoo(tmp_path, name, everything, device) as model:
            session = model.session(64)
            selection = session.decode(tokens, outputs=np.arange(64) % 3 == 1)
            assert nmse(selection, logits[np.arange(64) % 3 == 1]) < 1e-8  # type: ignore[arg-type]
            assert not session.take_not_finite()
            actual[device] = {label: {k: v.copy() for k, v in a.items()} for label, a in session.accumulators.items()}
    cpu_sums, reference_sums = actual["CPU"], actual["REFERENCE"]
    assert cpu_sums.keys() == reference_sums.keys()
    for label, accumulator in cpu_sums.items():
        assert np.array_equal(accumulator["counts"], reference_sums[label]["counts"])
        if "total" in accumulator:
            assert accumulator["total"] == pytest.approx(reference_sums[label]["total"], rel=1e-5)
        else:
            assert nmse(accumulator["sums"][:, :2].sum(1), reference_sums[label]["sums"][:, :2].sum(1)) < 1e-8
    assert all(a["counts"][0] == 64 for a in cpu_sums.values() if a["counts"].size == 1)


@pytest.mark.parametrize("name", ["qwen3moe-moe", "deepseek2-moe"])
def test_all_experts_includes_the_chosen_ones(name: str, tmp_path: Path) -> None:
    tokens = expected(name)[0]
    with open_zoo(tmp_path, name, everything) as model:
        session = model.session(64)
        session.decode(tokens)
        labels = [label for label in session.accumulators if label.startswith(ALL_EXPERTS) and "down" in label]
        assert labels
        for label in labels:
            accumulator, routed = session.accumulators[label], session.accumulators[label.removeprefix(ALL_EXPERTS)]
            assert (accumulator["counts"] == 64).all()
            assert routed["counts"].sum() < 64 * routed["counts"].size
            assert (accumulator["sums"][:, 0] >= routed["sums"][:, 0] * (1 - 1e-6) - 1e-9).all()


def choosing(name: str, n_used: int | None, path: Path) -> Path:
    """Write a zoo model whose router chooses so many experts, or all of them."""
    with open_gguf(write_zoo(name, path.with_suffix(".zoo"))) as source:
        arch = source.get("general.architecture")
        used, n = f"{arch}.expert_used_count", n_used or source.get(f"{arch}.expert_count")
        fields = [Field.of(key, n, f.type) if key == used else f for key, f in source.fields.items()]
        data = [(t.name, t.shape, t.type, source.data(t).tobytes()) for t in source.tensors.values()]
    write_gguf(path, fields, data)
    return path


@pytest.mark.parametrize("n_used", [1, 3])
@pytest.mark.parametrize("name", ["qwen3moe-moe", "llama4-moe", "gpt-oss-moe"])
def test_all_experts_equals_a_model_that_chooses_all(name: str, n_used: int, tmp_path: Path) -> None:
    """Only in the first layer with experts; later layers get another model's results."""
    tokens, actual, ids_by_layer = expected(name)[0], [], {}
    for path in (choosing(name, n_used, tmp_path / "some.gguf"), choosing(name, None, tmp_path / "all.gguf")):
        with load(path, kv_type="f32", threads=2, fusion=Fusion.none(), rewrite=everything) as model:
            session = model.session(64)
            session.decode(tokens)
            actual.append({label: {k: v.copy() for k, v in a.items()} for label, a in session.accumulators.items()})
            sums = [op for op in model.graph.ops if isinstance(op, SumColumns) and not op.label.startswith(ALL_EXPERTS)]
            ids_by_layer = {name: op.label for op in sums for name in op.names}
    all_sums, routed_sums = actual
    layer = min(int(label.split(".")[1]) for label in routed_sums if label.startswith("blk.") and "down_exps" in label)
    compared = [label for label in all_sums if label.startswith(f"{ALL_EXPERTS}blk.{layer}.")]
    assert len(compared) == 2
    for label in compared:
        a, b = all_sums[label], routed_sums[ids_by_layer[label.removeprefix(ALL_EXPERTS)]]
        assert (a["counts"] == 64).all()
        assert (b["counts"] == 64).all()
        np.testing.assert_allclose(np.broadcast_to(a["sums"], b["sums"].shape)[:, 0], b["sums"][:, 0], rtol=1e-6)


def test_all_experts_is_refused_for_normalized_weights(tmp_path: Path) -> None:
    def share(graph):
        ops = [replace(op, routing=replace(op.routing, norm=True)) if isinstance(op, Route) else op for op in graph.ops]
        return everything(replace(graph, ops=tuple(ops)))

    with refuses(RecipeError, "QK-E200 --all-experts blk.1.ffn_gate_exps.weight"):
        open_zoo(tmp_path, "llama4-moe", share)


def test_both_forms_of_latent_attention_record_the_same(tmp_path: Path) -> None:
    heads, k, rot, rank = (getattr(test_mla, name) for name in ("HEADS", "K", "ROT", "RANK"))
    paths = test_mla.both_forms(tmp_path)
    actual = []
    for path in paths:
        with load(path, kv_type="f32", threads=2, fusion=Fusion.none(), rewrite=observe) as model:
            session = model.session(40)
            session.decode(token_ids(40))
            actual.append({label: a["sums"][:, 0].copy() for label, a in session.accumulators.items()})
    for name in ("attn_k_b", "attn_v_b", "attn_kv_b"):
        for layer in range(2):
            label = f"blk.{layer}.{name}.weight"
            assert nmse(actual[0][label], actual[1][label]) < 1e-9, label
    of_heads = {"attn_k_b": (heads, k - rot), "attn_v_b": (heads, rank), "attn_kv_b": (1, rank)}
    sums = actual[0]
    required = [
        CovarianceRequest(f"blk.{i}.{name}.weight", (0, n)) for name, (n, _) in of_heads.items() for i in range(2)
    ]
    actual = []
    for path in paths:
        see = partial(covariances, requests=required)
        with load(path, kv_type="f32", threads=2, fusion=Fusion.none(), rewrite=see) as model:
            session = model.session(40)
            session.decode(token_ids(40))
            actual.append({label: a["sums"].copy() for label, a in session.accumulators.items()})
            assert all((a["counts"] == 40).all() for a in session.accumulators.values())
    for name, (n, columns) in of_heads.items():
        for layer in range(2):
            label = f"blk.{layer}.{name}.weight"
            a, b = (form_sums[f"{label} 0"] for form_sums in actual)
            assert a.shape == b.shape == (n, columns, columns)
            assert nmse(a, b) < 1e-9, label
            # The diagonal is what an importance matrix has, head by head side by side.
            np.testing.assert_allclose(
                np.diagonal(a, axis1=1, axis2=2).ravel(), sums[label][0, : n * columns], rtol=1e-6
            )


def test_a_fused_graph_has_no_observable_inputs(tmp_path: Path) -> None:
    with open_gguf(write_zoo("qwen3moe-moe", tmp_path / "z.gguf")) as source:
        graph = build_graph(source)
    with refuses(RecipeError, "QK-E201"):
        inputs(fuse(graph, Fusion())[0])


def test_similarity_does_not_depend_on_fusion(tmp_path: Path) -> None:
    tokens, means = expected("qwen3moe-moe")[0], []
    for fusion in (Fusion(), Fusion.none()):
        with open_zoo(tmp_path, "qwen3moe-moe", similarity, fusion=fusion) as model:
            session = model.session(64)
            session.decode(tokens, outputs=np.zeros(64, bool))
            means.append({label: float(a["total"][0]) / 64 for label, a in session.accumulators.items()})
            assert all(a["counts"] == 64 for a in session.accumulators.values())
    assert means[0] == pytest.approx(means[1], rel=1e-6)
    assert {label.split()[0] for label in means[0]} == {"layer", "attention", "feed-forward"}


def test_outputs_are_chosen_just_before_the_output_matrix(tmp_path: Path) -> None:
    with open_gguf(write_zoo("qwen3moe-moe", tmp_path / "z.gguf")) as source:
        graph = build_graph(source)
    assert sum(isinstance(op, SelectOutputs) for op in graph.ops) > 1
    ops = every_token(graph).ops
    indices = [i for i, op in enumerate(ops) if isinstance(op, SelectOutputs)]
    assert indices == [len(ops) - 2]


@pytest.mark.parametrize("name", ["qwen3moe-moe", "deepseek2-moe", "cohere2-dense", "qwen3next-moe", "llama4-moe"])
@pytest.mark.parametrize("look", [observe, everything])
def test_unobserved_rows_are_skipped_without_effect(name: str, look, tmp_path: Path) -> None:
    tokens, logits = expected(name)
    required, actual = np.arange(64) % 5 == 2, []
    for rewrite in (look, lambda graph: fewest_rows(look(graph))):
        with open_zoo(tmp_path, name, rewrite) as model:
            session = model.session(64)
            assert nmse(session.decode(tokens, outputs=required), logits[required]) < 1e-8  # type: ignore[arg-type]
            actual.append({label: {k: v.copy() for k, v in a.items()} for label, a in session.accumulators.items()})
            down = [op for op in model.graph.ops if isinstance(op, MulMat | MulMatId) and "ffn_down" in str(op.weight)]
            last = max(op.layer for op in down)
            of_all = {op.x.outputs for op in down if op.layer < last}, {op.x.outputs for op in down if op.layer == last}
    # The similarity of layers includes the output of the last one.
    assert of_all == ({False}, {look is observe})
    assert actual[0].keys() == actual[1].keys()
    for label, arrays in actual[0].items():
        for key, array in arrays.items():
            assert np.array_equal(array, actual[1][label][key]), (label, key)


def test_covariances_have_the_sums_of_squares_on_their_diagonal(tmp_path: Path) -> None:
    tokens = expected("qwen3moe-moe")[0]
    with open_zoo(tmp_path, "qwen3moe-moe", observe) as model:
        session = model.session(64)
        session.decode(tokens)
        sums = {label: a["sums"][:, 0].copy() for label, a in session.accumulators.items()}
        actual = inputs(every_token(model.graph))
    required = [CovarianceRequest(item.names[0], (0, item.n_mat)) for item in actual if item.reader.layer == 0]
    with open_zoo(tmp_path, "qwen3moe-moe", lambda graph: up_to_layer(covariances(graph, required), 0)) as model:
        session = model.session(64)
        session.decode(tokens, outputs=np.zeros(64, bool))
        for request in required:
            accumulator = session.accumulators[f"{request.name} {request.experts[0]}"]
            width = accumulator["sums"].shape[1]
            np.testing.assert_allclose(
                np.diagonal(accumulator["sums"], axis1=1, axis2=2), sums[request.name][:, :width], rtol=1e-9
            )
            if "weighted" in accumulator:
                share = accumulator["weight"] / np.maximum(1, accumulator["counts"])
                assert ((share > 0) == (accumulator["counts"] > 0)).all()
                assert (
                    np.trace(accumulator["weighted"], axis1=1, axis2=2)
                    <= np.trace(accumulator["sums"], axis1=1, axis2=2)
                ).all()
