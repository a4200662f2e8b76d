"""Fewer experts: the slices of numpy, the logits of masked routers, the saliency of REAP, companions, refusals."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from refusals import refuses
from tiny_checkpoints import moe_arrays, moe_config, write_checkpoint
from tiny_models import ids, logits

from libllama import Libllama, nmse
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError
from quantkit.formats.experts import BY_EXPERT
from quantkit.formats.gguf import Field, open_gguf, open_model, write_gguf
from quantkit.formats.imatrix import read_imatrix
from quantkit.imatrix import imatrix, merge_imatrix
from quantkit.imatrix.covariance import covariance
from quantkit.merge import merge_up_gate
from quantkit.model import ops
from quantkit.model.backends import Limits
from quantkit.model.backends.reference import Reference
from quantkit.model.batch import Batch
from quantkit.model.graph import build_graph
from quantkit.model.observers import every_token
from quantkit.model.saliency import SALIENCY, observe_saliency
from quantkit.options.imatrix import ImatrixOptions
from quantkit.prune import plan_prune_experts, prune_experts
from quantkit.quantize import QuantizeOptions, quantize
from quantkit.split import split
from quantkit.types import BY_NAME
from zoo import draw, write_zoo

EXPERTS = dict.fromkeys(range(4), (0, 2, 3, 4, 6, 7))
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def saliency(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imatrix") / "imatrix.gguf"
    imatrix(tiny_moe, [DATA / "tiny-moe-calibration.txt"], path, options=ImatrixOptions(saliency=True, chunks=2))
    return path


def arrays_of(path: Path) -> dict[str, tuple[tuple[int, ...], str, npt.NDArray[np.uint8]]]:
    with open_model(path) as file:
        return {t.name: (t.shape, t.type.name, file.data(t).copy()) for t in file.tensors.values()}


def sliced(path: Path, experts: Mapping[int, tuple[int, ...]]) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """Return all tensors, those by expert as numpy indexes them."""
    result = {}
    for name, (shape, kind, data) in arrays_of(path).items():
        if match := BY_EXPERT.fullmatch(name):
            remaining = experts[int(match[1])]
            data, shape = data.reshape(shape[-1], -1)[list(remaining)], (*shape[:-1], len(remaining))
        result[name] = (shape, kind, data.tobytes())
    return result


def as_bytes(path: Path) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    return {name: (shape, kind, data.tobytes()) for name, (shape, kind, data) in arrays_of(path).items()}


def write_moe(path: Path, name: str, n: int, layers: dict[str, Any], **keys: Any) -> Path:
    """Write a model of the zoo with n experts; ``layers``: further tensors of every layer with experts."""
    write_zoo(name, path)
    with open_gguf(path) as file:
        arch, fields = file.get("general.architecture"), dict(file.fields)
        values = {"expert_count": n, "expert_used_count": 2} | keys
        for key, value in values.items():
            fields[f"{arch}.{key}"] = Field.of(f"{arch}.{key}", value)
        tensors = {}
        for t in file.tensors.values():
            shape = (*t.shape[:-1], n) if BY_EXPERT.fullmatch(t.name) else t.shape
            kind = t.type.name
            data = draw(t.name, shape, 3).tobytes() if shape != t.shape else file.data(t).tobytes()
            tensors[t.name] = (t.name, shape, BY_NAME[kind], data)
            if t.name.endswith("ffn_gate_inp.weight"):
                for suffix in layers:
                    extra = t.name.replace("ffn_gate_inp.weight", suffix)
                    tensors[extra] = (extra, (n,), BY_NAME["F32"], draw(extra, (n,), 3).tobytes())
    write_gguf(path, list(fields.values()), list(tensors.values()))
    return path


def masked(path: Path, out: Path, experts: Mapping[int, tuple[int, ...]]) -> Path:
    """Write the model with a router that never selects other experts."""
    with open_gguf(path) as file:
        tensors = {t.name: (t.name, t.shape, t.type, file.data(t).copy()) for t in file.tensors.values()}
        fields = list(file.fields.values())
    for layer, remaining in experts.items():
        n = tensors[f"blk.{layer}.ffn_gate_inp.weight"][1][-1]
        mask = np.where(np.isin(np.arange(n), remaining), np.float32(0), np.float32(-1e30))
        for name in (f"blk.{layer}.ffn_gate_inp.bias", f"blk.{layer}.exp_probs_b.bias"):
            if name in tensors or "gate_inp" in name:
                old = tensors[name][3].view("<f4") if name in tensors else np.float32(0)
                tensors[name] = (name, (n,), BY_NAME["F32"], np.asarray(old + mask, "<f4"))
    write_gguf(out, fields, [(name, shape, t, data.tobytes()) for name, shape, t, data in tensors.values()])
    return out


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("kinds", ["Q4_K Q6_K", "IQ4_KS_R4 Q4_0_R8"])
def test_the_bytes_are_those_that_numpy_slices(tiny_moe: Path, tmp_path: Path, kinds: str) -> None:
    up, down = kinds.split()
    options = QuantizeOptions(custom_q=(f"ffn_(up|gate)_exps={up},ffn_down_exps={down},gate_inp=q8_0",))
    quantize(tiny_moe, tmp_path / "q.gguf", "Q4_0", options)
    shards = [s.path for s in split_of(tmp_path / "q.gguf", tmp_path / "s.gguf")]
    merge_up_gate(tmp_path / "q.gguf", tmp_path / "m.gguf")
    for source in (shards[0], tmp_path / "m.gguf"):
        plan = prune_experts(source, tmp_path / "p.gguf", experts=EXPERTS, keep_split=True, overwrite=True)
        expected = sliced(source, EXPERTS)
        assert as_bytes(plan.plan.shards[0].path) == expected
        assert expected["blk.1.ffn_down_exps.weight"][1] == down
    assert len(prune_experts(shards[0], tmp_path / "k.gguf", experts=EXPERTS, keep_split=True).plan.shards) == len(
        shards
    )


def split_of(path: Path, out: Path) -> Any:
    from quantkit.split import plan_split

    split(path, out, max_tensors=20)
    return plan_split(path, out, max_tensors=20).shards


def test_keys_and_record_follow(tiny_moe: Path, tmp_path: Path) -> None:
    prune_experts(tiny_moe, tmp_path / "a.gguf", experts=EXPERTS)
    prune_experts(tmp_path / "a.gguf", tmp_path / "b.gguf", experts=dict.fromkeys(range(4), (1, 2, 5)))
    with open_gguf(tmp_path / "b.gguf") as file:
        assert file.get("qwen3moe.expert_count") == 3
        assert file.get("quantkit.prune.experts") == [f"blk.{layer}: 2 3 7" for layer in range(4)]
        assert file.get("quantkit.prune.expert_count") == 8
    prune_experts(tiny_moe, tmp_path / "c.gguf", experts=tmp_path / "b.gguf")
    prune_experts(tmp_path / "a.gguf", tmp_path / "d.gguf", experts=tmp_path / "b.gguf")
    assert as_bytes(tmp_path / "c.gguf") == as_bytes(tmp_path / "d.gguf") == as_bytes(tmp_path / "b.gguf")


@pytest.mark.parametrize("kind", [None, "Q4_K"])
def test_a_checkpoint_is_pruned_while_it_is_converted(tmp_path: Path, kind: str | None) -> None:
    folder = write_checkpoint(tmp_path / "model", moe_config(num_experts=4), moe_arrays())
    (tmp_path / "e.json").write_text('{"0": [0, 2, 3], "1": [1, 2, 3]}')
    convert(folder, tmp_path / "all.gguf", kind, ConvertOptions(pre="gpt-2"))
    prune_experts(tmp_path / "all.gguf", tmp_path / "expected.gguf", experts=tmp_path / "e.json")
    convert(folder, tmp_path / "p.gguf", kind, ConvertOptions(pre="gpt-2", prune_experts=tmp_path / "e.json"))
    assert as_bytes(tmp_path / "p.gguf") == as_bytes(tmp_path / "expected.gguf")
    with open_gguf(tmp_path / "p.gguf") as file:
        assert file.get("quantkit.prune.experts") == ["blk.0: 0 2 3", "blk.1: 1 2 3"]
        assert file.get("qwen3moe.expert_count") == 3


# ---------------------------------------------------------------- logits

GROUPED = (0, 2, 3, 5, 6, 7)
MODELS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "plain": ("qwen3moe-moe", (), {}),
    "biases": ("gpt-oss-moe", (), {}),
    "groups": (
        "deepseek2-moe",
        ("exp_probs_b.bias",),
        {"expert_group_count": 3, "expert_group_used_count": 2, "expert_gating_func": 2},
    ),
}


@pytest.mark.parametrize("model", [*MODELS, "merged"])
def test_logits_are_those_of_a_masked_router(tmp_path: Path, model: str) -> None:
    name, extra, keys = MODELS.get(model, MODELS["plain"])
    path = write_moe(tmp_path / "m.gguf", name, 9, dict.fromkeys(extra), **keys)
    layers = sorted({int(m[1]) for t in arrays_of(path) if (m := BY_EXPERT.fullmatch(t))})
    experts = dict.fromkeys(layers, GROUPED)
    expected = logits(masked(path, tmp_path / "masked.gguf", experts), ids(24))
    if model == "merged":
        merge_up_gate(path, tmp_path / "merged.gguf")
        path = tmp_path / "merged.gguf"
    prune_experts(path, tmp_path / "p.gguf", experts=experts)
    pruned = logits(tmp_path / "p.gguf", ids(24))
    assert nmse(pruned, expected) < 1e-10
    assert nmse(logits(path, ids(24)), expected) > 1e-4


@pytest.mark.peer
def test_llama_cpp_computes_the_same(llama_bin: Path, tiny_moe: Path, saliency: Path, tmp_path: Path) -> None:
    prune_experts(tiny_moe, tmp_path / "p.gguf", "75%", imatrix=saliency)
    tokens = ids(32)
    assert nmse(logits(tmp_path / "p.gguf", tokens), Libllama(llama_bin).logits(tmp_path / "p.gguf", tokens)) < 1e-4


# ---------------------------------------------------------------- scores


@pytest.mark.parametrize("name", ["qwen3moe-moe", "gpt-oss-moe", "llama4-moe"])
def test_saliency_is_the_gate_times_the_norm(tmp_path: Path, name: str) -> None:
    path = write_zoo(name, tmp_path / "m.gguf")
    tokens, n = ids(20), 20
    with open_gguf(path) as source:
        graph = observe_saliency(every_token(build_graph(source)))
        program = Reference(source).compile(graph.ops, Limits(n))
        positions = np.arange(n, dtype=np.int32)
        program.run(Batch(tokens, positions, np.zeros(n, np.int32), positions))
        downs = {op.out: op for op in graph.ops if isinstance(op, ops.MulMatId)}
        combined = [op for op in graph.ops if isinstance(op, ops.Combine)]
        assert combined
        for op in combined:
            down = downs[op.x]
            norms = np.linalg.norm(program.values[op.x].astype(np.float64), axis=1)
            gates = 1.0 if op.weights is None else program.values[op.weights].reshape(-1).astype(np.float64)
            expected = np.bincount(program.values[down.ids].reshape(-1), gates * norms, down.weight.n_matrices)
            sums = program.accumulators[SALIENCY + down.weight.tensor.name]["sums"]
            np.testing.assert_allclose((sums[:, 2] + sums[:, 3]).sum(axis=1), expected, rtol=1e-5)


def test_scores_choose(tiny_moe: Path, saliency: Path, tmp_path: Path) -> None:
    matrix = read_imatrix(saliency)
    for criterion in ("reap", "frequency"):
        plan = plan_prune_experts(tiny_moe, tmp_path / "p.gguf", 5, criterion=criterion, imatrix=saliency)
        for layer, experts in plan.experts.items():
            entry = matrix.entries[f"blk.{layer}.ffn_down_exps.weight"]
            assert entry.saliency is not None
            score = entry.counts if criterion == "frequency" else entry.saliency / entry.counts
            assert set(experts) == set(np.argsort(-score, kind="stable")[:5].tolist())
    path = write_moe(tmp_path / "g.gguf", "deepseek2-moe", 8, {}, expert_group_count=2, expert_group_used_count=1)
    imatrix(path, tokens=ids(64), output=tmp_path / "g.imatrix", options=ImatrixOptions(saliency=True, n_ctx=32))
    for experts in plan_prune_experts(path, tmp_path / "p.gguf", 0.7, imatrix=tmp_path / "g.imatrix").experts.values():
        assert [e // 4 for e in experts] == [0, 0, 0, 1, 1, 1]


def test_saliency_changes_nothing_else(tiny_moe: Path, saliency: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.gguf"
    imatrix(tiny_moe, [DATA / "tiny-moe-calibration.txt"], plain, options=ImatrixOptions(chunks=2))
    tensors = {name: t for name, t in as_bytes(saliency).items() if not name.endswith(".saliency")}
    assert tensors == as_bytes(plain)
    merged = merge_imatrix([saliency, saliency]).imatrix.entries["blk.0.ffn_down_exps.weight"]
    once = read_imatrix(saliency).entries["blk.0.ffn_down_exps.weight"]
    assert merged.saliency is not None
    assert np.array_equal(merged.saliency / 2, once.saliency)
    assert merge_imatrix([saliency, plain]).imatrix.entries["blk.0.ffn_down_exps.weight"].saliency is None


@pytest.mark.peer
def test_llama_quantize_reads_it(llama_bin: Path, tiny_moe: Path, saliency: Path, tmp_path: Path) -> None:
    command = [llama_bin / "llama-quantize", "--imatrix", saliency, tiny_moe, tmp_path / "r.gguf", "IQ3_XXS"]
    subprocess.run(command, check=True, capture_output=True)
    quantize(tiny_moe, tmp_path / "q.gguf", "IQ3_XXS", QuantizeOptions(imatrix=saliency))
    assert as_bytes(tmp_path / "q.gguf") == as_bytes(tmp_path / "r.gguf")


# ---------------------------------------------------------------- companions


def test_companions_follow(tiny_moe: Path, saliency: Path, tmp_path: Path) -> None:
    prune_experts(tiny_moe, tmp_path / "p.gguf", experts=EXPERTS)
    prune_experts(saliency, tmp_path / "i.gguf", experts=tmp_path / "p.gguf")
    matrix, before = read_imatrix(tmp_path / "i.gguf"), read_imatrix(saliency)
    entry, old = (m.entries["blk.2.ffn_down_exps.weight"] for m in (matrix, before))
    remaining = list(EXPERTS[2])
    assert np.array_equal(entry.sums, old.sums[remaining])
    assert np.array_equal(entry.counts, old.counts[remaining])
    assert entry.saliency is not None
    assert old.saliency is not None
    assert np.array_equal(entry.saliency, old.saliency[remaining])
    quantize(tmp_path / "p.gguf", tmp_path / "q.gguf", "IQ3_XXS", QuantizeOptions(imatrix=tmp_path / "i.gguf"))
    text = DATA / "tiny-moe-calibration.txt"
    covariance(tiny_moe, [text], tmp_path / "c.gguf", options=ImatrixOptions(chunks=1))
    prune_experts(tmp_path / "c.gguf", tmp_path / "cp.gguf", experts=tmp_path / "p.gguf")
    name = "blk.2.ffn_down_exps.weight"
    old_sums, new_sums = (arrays_of(tmp_path / f"{c}.gguf") for c in ("c", "cp"))
    for part in ("cov_router", "weight", "counts"):
        expected = old_sums[f"{name}.{part}"][2].reshape(8, -1)[remaining]
        assert np.array_equal(new_sums[f"{name}.{part}"][2].reshape(6, -1), expected)


# ---------------------------------------------------------------- refusals, the command


def test_refusals(tiny_moe: Path, saliency: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"0": [1, 1]}')
    out, plain = tmp_path / "p.gguf", DATA / "tiny-moe-imatrix.gguf"
    chunks, hashed = write_zoo("grovemoe-moe", tmp_path / "g.gguf"), write_zoo("deepseek4-moe", tmp_path / "h.gguf")
    dense = write_zoo("llama-dense", tmp_path / "d.gguf")
    groups = write_moe(tmp_path / "8.gguf", "deepseek2-moe", 8, {}, expert_group_count=2, expert_group_used_count=1)
    layer = next(int(m[1]) for t in arrays_of(groups) if (m := BY_EXPERT.fullmatch(t)))
    cases: list[tuple[Path, dict[str, Any], type[QuantkitError], str]] = [
        (tiny_moe, {}, RecipeError, "QK-E202"),
        (tiny_moe, {"keep": 6}, RecipeError, "QK-E202"),
        (tiny_moe, {"keep": "x", "imatrix": saliency}, RecipeError, "QK-E203"),
        (tiny_moe, {"keep": 8, "imatrix": saliency}, RecipeError, "QK-E203 8"),
        (tiny_moe, {"keep": 6, "imatrix": plain}, RecipeError, "QK-E202 saliency"),
        (tiny_moe, {"criterion": "list"}, RecipeError, "QK-E202"),
        (tiny_moe, {"experts": EXPERTS, "imatrix": saliency}, RecipeError, "QK-E201"),
        (tiny_moe, {"experts": EXPERTS, "keep": 5}, RecipeError, "QK-E203 5"),
        (tiny_moe, {"experts": {0: (0, 1)}}, RecipeError, "QK-E203 1"),
        (tiny_moe, {"experts": EXPERTS | {3: (0, 1)}}, RecipeError, "QK-E203 2 6"),
        (tiny_moe, {"experts": dict.fromkeys(range(4), (0, 8))}, RecipeError, "QK-E203 8"),
        (tiny_moe, {"experts": tmp_path / "bad.json"}, FormatError, "QK-E122"),
        (tiny_moe, {"experts": tiny_moe}, FormatError, "QK-E123"),
        (chunks, {"experts": EXPERTS}, RecipeError, "QK-E211 blk.0.ffn_gate_chexps.weight"),
        (hashed, {"experts": EXPERTS}, RecipeError, "QK-E211 ffn_gate_tid2eid.weight"),
        (dense, {"experts": EXPERTS}, RecipeError, "QK-E211"),
        (groups, {"experts": {layer: (0, 1, 2, 4)}}, RecipeError, "QK-E203"),
    ]
    for source, options, kind, refusal in cases:
        with refuses(kind, refusal):
            prune_experts(source, out, **options)
    with refuses(ResourceError, "QK-E403"):
        prune_experts(tiny_moe, tiny_moe, experts=EXPERTS, overwrite=True)
    assert not out.exists()


def test_the_command(tiny_moe: Path, saliency: Path, tmp_path: Path) -> None:
    arguments = ["prune-experts", str(tiny_moe), str(tmp_path / "p.gguf")]
    scores = ["--keep", "75%", "--imatrix", str(saliency)]
    dry = CliRunner().invoke(cli, [*arguments, *scores, "--dry-run", "--json"])
    assert dry.exit_code == 0, dry.output
    assert not (tmp_path / "p.gguf").exists()
    assert json.loads(dry.stdout)["written"] is False
    (tmp_path / "e.json").write_text(dry.stdout)
    result = CliRunner().invoke(cli, [*arguments, "--experts", str(tmp_path / "e.json")])
    assert result.exit_code == 0, result.output
    experts = {int(layer): tuple(e) for layer, e in json.loads(dry.stdout)["experts"].items()}
    assert as_bytes(tmp_path / "p.gguf") == sliced(tiny_moe, experts)
