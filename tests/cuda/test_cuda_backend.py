"""Whole models on CUDA devices, the host shim's where there is no GPU: logits, placements, memory, sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from refusals import refuses

from libllama import nmse
from quantkit.cli import cli
from quantkit.errors import ResourceError
from quantkit.model.engine import Model, load
from quantkit.model.fusion import Fusion, summary
from quantkit.model.observers import (
    CovarianceRequest,
    covariances,
    every_token,
    inputs,
    observe,
    similarity,
    up_to_layer,
)
from quantkit.model.ops import Attention, Glu, Graph, MulMat, MulMatId, Observe, Op, UpGateId
from quantkit.model.placement import ALL_LAYERS, Placement, parse_rules
from zoo import NAMES
from zoo import expected as tokens_and_logits

BOUND = 1e-8
Zoo = Callable[[str], Path]
Devices = tuple[str, ...]


def everywhere(*devices: str, rules: str = "") -> Placement:
    """All layers and the embeddings on CUDA devices, but for what rules say."""
    return Placement(ALL_LAYERS, parse_rules([rules] if rules else []), devices, embeddings=True)


def open_zoo(zoo: Zoo, name: str, placement: Placement, **options: Any) -> Model:
    return load(zoo(name), kv_type=options.pop("kv_type", "f32"), placement=placement, **options)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_llama_cpps(zoo: Zoo, name: str, cuda_devices: Devices) -> None:
    """Of a tile of tokens; or so many that windows, of 32, hide the first."""
    tokens, logits = tokens_and_logits(name)
    with open_zoo(zoo, name, everywhere("CUDA0")) as model:
        assert {segment.device for segment in model.segments} == {"CUDA0"}
        n = 40 if any(isinstance(op, Attention) and op.window == 32 for op in model.graph.ops) else 24
        n = len(tokens) if model.is_bidirectional else n
        assert nmse(model.forward(tokens[:n]), logits[:n]) <= BOUND


@pytest.mark.parametrize("name", ["qwen3moe-moe", "gpt-oss-moe", "deepseek2-moe", "gemma2-dense", "gemma4-dense"])
def test_single_tokens_equal_a_batch(zoo: Zoo, name: str, cuda_devices: Devices) -> None:
    """Launches of one token are recorded and run again at other positions; pieces of other sizes between."""
    tokens, logits = tokens_and_logits(name)
    with open_zoo(zoo, name, everywhere("CUDA0")) as model:
        session = model.session(300)  # enough cells to split attention into parts
        pieces = [tokens[i : i + 1] for i in range(4)] + [tokens[4:14], *(tokens[i : i + 1] for i in range(14, 17))]
        actual = np.concatenate([session.decode(piece) for piece in pieces])
        assert nmse(actual, logits[:17]) <= BOUND
        session.rewind(0, 6)
        assert nmse(session.decode(tokens[6:17]), logits[6:17]) <= BOUND


@pytest.mark.parametrize(
    "name",
    ["qwen3moe-moe", "gpt-oss-moe", "llama4-moe", "gemma3-dense", "gemma4-dense", "gemma4-moe", "starcoder-dense"],
)
def test_fused_and_unfused_agree(zoo: Zoo, name: str, cuda_devices: Devices) -> None:
    tokens = tokens_and_logits(name)[0]
    actual = []
    for fusion in (Fusion(), Fusion.none()):
        with open_zoo(zoo, name, everywhere("CUDA0"), fusion=fusion) as model:
            session = model.session(40)
            actual.append(np.concatenate([session.decode(part) for part in (tokens[:12], tokens[12:15])]))
    assert nmse(actual[0], actual[1]) <= 1e-10


@pytest.mark.parametrize("name", ["qwen3moe-moe", "gpt-oss-moe"])
def test_merged_experts_give_the_same_logits(zoo: Zoo, name: str, cuda_devices: Devices) -> None:
    tokens, logits = tokens_and_logits(name)
    with open_zoo(zoo, name, everywhere("CUDA0"), merge_up_gate=True) as model:
        assert any("gate_up_exps" in m.tensor.name for op in model.graph.ops for m in op.matrices())
        for n in (2, 12):
            assert nmse(model.forward(tokens[:n]), logits[:n]) <= BOUND


@pytest.mark.parametrize("name", ["qwen3next-moe", "olmo2-dense"])
def test_sequences_are_independent(zoo: Zoo, name: str, cuda_devices: Devices) -> None:
    tokens, logits = tokens_and_logits(name)
    with open_zoo(zoo, name, everywhere("CUDA0")) as model:
        session = model.session(32, n_seq=3)
        both = np.stack([tokens[:16], tokens[:16]], 1).reshape(-1)
        actual = session.decode(both, np.tile(np.array([2, 0], np.int32), 16))
        assert nmse(actual[0::2], logits[:16]) <= BOUND
        assert nmse(actual[1::2], logits[:16]) <= BOUND
        session.clear(2)
        assert nmse(session.decode(tokens[:9], 2), logits[:9]) <= BOUND
        assert nmse(session.decode(tokens[16:20], 0), logits[16:20]) <= BOUND


@pytest.mark.parametrize(("name", "kv_type"), [("qwen3moe-moe", "q8_0"), ("gemma2-dense", "f16")])
def test_caches_of_other_types_agree_with_the_cpus(zoo: Zoo, name: str, kv_type: str, cuda_devices: Devices) -> None:
    tokens = tokens_and_logits(name)[0][:24]
    actual = []
    for placement in (everywhere("CUDA0"), Placement()):
        with open_zoo(zoo, name, placement, kv_type=kv_type) as model:
            session = model.session(200)
            actual.append(np.concatenate([session.decode(part) for part in (tokens[:14], tokens[14:15], tokens[15:])]))
    assert nmse(actual[0], actual[1]) <= 1e-7


# ---------------------------------------------------------------- placements


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("qwen3moe-moe", r"ffn_down=CPU"),
        ("llama-moe", r"ffn_(up|gate)_exps=CPU"),
        ("qwen3moe-moe", r"ffn_up_exps=CPU"),
        ("llama-moe", r"ffn_up_exps=CUDA1"),
        ("qwen3moe-moe", r"blk\.1\..*=CUDA1,attn=CPU"),
        ("qwen3moe-moe", r"attn_(q|k)=CPU,output=CPU"),
        ("llama-moe", r"ffn_gate_inp=CPU"),
    ],
)
def test_any_tensor_on_any_device(zoo: Zoo, name: str, rules: str, cuda_devices: Devices) -> None:
    if len(cuda_devices) < 2 and "CUDA1" in rules:
        pytest.skip("needs a CUDA device more")
    tokens, logits = tokens_and_logits(name)
    with open_zoo(zoo, name, everywhere("CUDA0", rules=rules)) as model:
        assert len(model.segments) > 1
        session = model.session(32)
        actual = np.concatenate([session.decode(part) for part in (tokens[:10], tokens[10:11], tokens[11:12])])
        assert nmse(actual, logits[:12]) <= BOUND


def test_issue_861_up_and_gate_on_the_gpu_down_on_the_cpu(zoo: Zoo, cuda_devices: Devices) -> None:
    """ik_llama.cpp's first fused kernel stopped with "unexpected situation" where down was on another device."""
    tokens, logits = tokens_and_logits("qwen3moe-moe")
    with open_zoo(zoo, "qwen3moe-moe", everywhere("CUDA0", rules=r"ffn_down_exps=CPU")) as model:
        assert all(d.fused for d in model.decisions if d.kind == "moe")
        assert sum(isinstance(op, UpGateId) for op in model.graph.ops) == model.n_layer
        for n in (1, 12):
            assert nmse(model.forward(tokens[:n]), logits[:n]) <= BOUND


def test_issue_861_up_and_gate_on_different_devices(zoo: Zoo, cuda_devices: Devices) -> None:
    """Then they are not fused, only in that layer, and it is said why."""
    tokens, logits = tokens_and_logits("qwen3moe-moe")
    with open_zoo(zoo, "qwen3moe-moe", everywhere("CUDA0", rules=r"blk\.1\.ffn_up_exps=CPU")) as model:
        kinds = {layer: [type(op) for op in model.graph.ops if op.layer == layer] for layer in range(model.n_layer)}
        assert UpGateId in kinds[0]
        assert UpGateId not in kinds[1]
        assert kinds[1].count(MulMatId) == 3
        assert Glu in kinds[1]
        assert "1 not: gate and up are on CPU and CUDA0" in " ".join(summary(model.decisions))
        assert any("are on CPU and CUDA0" in note for note in model.notes)
        for n in (1, 12):
            assert nmse(model.forward(tokens[:n]), logits[:n]) <= BOUND


def test_layers_are_shared_by_several_devices(zoo: Zoo, cuda_devices: Devices) -> None:
    if len(cuda_devices) < 2:
        pytest.skip("needs a CUDA device more")
    tokens, logits = tokens_and_logits("llama-dense")
    with open_zoo(zoo, "llama-dense", everywhere(*cuda_devices)) as model:
        assert [segment.device for segment in model.segments] == list(cuda_devices)
        assert nmse(model.forward(tokens), logits) <= BOUND


def test_the_last_layers_go_to_the_device(zoo: Zoo, cuda_devices: Devices) -> None:
    tokens, logits = tokens_and_logits("llama-dense")
    with open_zoo(zoo, "llama-dense", Placement(2)) as model:
        assert [segment.device for segment in model.segments] == ["CPU", "CUDA0"]
        assert nmse(model.forward(tokens[:20]), logits[:20]) <= BOUND


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_caches_shared_by_layers_on_two_devices(zoo: Zoo, layers: int, cuda_devices: Devices) -> None:
    """Layers 4 and 5 read what 2 and 3 keep: on the CPU, or on both devices."""
    tokens, logits = tokens_and_logits("gemma4-dense")
    with open_zoo(zoo, "gemma4-dense", Placement(layers)) as model:
        session = model.session(32)
        actual = np.concatenate([session.decode(part) for part in (tokens[:9], tokens[9:10], tokens[10:14])])
        assert nmse(actual, logits[:14]) <= BOUND


@pytest.mark.parametrize("budget", [0, 2_000_000])
def test_weights_beyond_the_budget_are_uploaded_per_batch(zoo: Zoo, budget: int, cuda_devices: Devices) -> None:
    tokens, logits = tokens_and_logits("qwen3moe-moe")
    with open_zoo(zoo, "qwen3moe-moe", everywhere("CUDA0"), max_vram=budget) as model:
        assert any("more than --max-vram" in note for note in model.notes)
        session = model.session(64)
        actual = np.concatenate([session.decode(part) for part in (tokens[:12], tokens[12:13], tokens[13:14])])
        assert nmse(actual, logits[:14]) <= BOUND
        weights = model.backend("CUDA0").weights  # type: ignore[attr-defined]
        assert weights.nbytes <= budget
        assert weights._staged


def test_device_memory_is_freed(zoo: Zoo, cuda_devices: Devices) -> None:
    from quantkit.kernels.cuda.core import device

    opened = device.open_device("CUDA0")
    if not hasattr(opened, "_sizes"):
        pytest.skip("CuPy's pool keeps its own books: needs no CUDA device")
    before = len(opened._sizes)
    with open_zoo(zoo, "llama-dense", everywhere("CUDA0")) as model:
        model.forward(tokens_and_logits("llama-dense")[0][:4])
        assert len(opened._sizes) > before
    assert len(opened._sizes) == before


# ---------------------------------------------------------------- observers


def everything(graph: Any) -> Any:
    return similarity(observe(graph, process_output=True))


@pytest.mark.parametrize("name", ["qwen3moe-moe", "deepseek2-moe", "cohere2-dense"])
def test_sums_equal_the_references(zoo: Zoo, name: str, cuda_devices: Devices) -> None:
    tokens = tokens_and_logits(name)[0][:24]
    actual = []
    for placement in (everywhere("CUDA0"), everywhere("REFERENCE")):
        with open_zoo(zoo, name, placement, fusion=Fusion.none(), rewrite=everything) as model:
            session = model.session(64)
            for part in (tokens[:14], tokens[14:15], tokens[15:]):
                session.decode(part)
            assert not session.take_not_finite()
            actual.append({label: {k: v.copy() for k, v in a.items()} for label, a in session.accumulators.items()})
    sums, expected = actual
    assert sums.keys() == expected.keys()
    for label, arrays in sums.items():
        assert np.array_equal(arrays["counts"], expected[label]["counts"])
        for key in arrays.keys() - {"counts"}:
            a, b = (x[:, ::2] + x[:, 1::2] if key == "sums" else x for x in (arrays[key], expected[label][key]))
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_cleared_sums_start_at_zero(zoo: Zoo, cuda_devices: Devices) -> None:
    tokens = tokens_and_logits("cohere2-dense")[0]
    with open_zoo(zoo, "cohere2-dense", everywhere("CUDA0"), fusion=Fusion.none(), rewrite=observe) as model:
        session = model.session(64)
        session.decode(tokens[:16])
        once = {label: a["sums"].copy() for label, a in session.accumulators.items()}
        for arrays in session.accumulators.values():
            for array in arrays.values():
                array[:] = 0
        session.clear()
        session.decode(tokens[:16])
        for label, arrays in session.accumulators.items():
            assert np.array_equal(arrays["sums"], once[label])


def with_observers(graph: Graph) -> Graph:
    """Let an observer see the input of every product."""
    ops: list[Op] = []
    for op in graph.ops:
        if isinstance(op, MulMat | MulMatId):
            ids = op.ids if isinstance(op, MulMatId) else None
            ops.append(Observe(layer=op.layer, x=op.x, label=op.weight.tensor.name, ids=ids))
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def test_observers_get_the_same_values_as_on_the_cpu(zoo: Zoo, cuda_devices: Devices) -> None:
    tokens = tokens_and_logits("qwen3moe-moe")[0][:10]
    records: list[dict[str, Any]] = []
    for placement in (everywhere("CUDA0"), Placement()):
        names: dict[str, Any] = {}
        records.append(names)

        def look(label: str, x: Any, ids: Any, names: dict[str, Any] = names) -> None:
            names[label] = np.array(x), None if ids is None else np.array(ids)

        with open_zoo(zoo, "qwen3moe-moe", placement, observer=look, rewrite=with_observers) as model:
            model.forward(tokens)
    assert records[0].keys() == records[1].keys()
    assert len(records[0]) > 10
    for name, (x, ids) in records[0].items():
        assert nmse(x, records[1][name][0]) <= 1e-9
        assert (ids is None) == (records[1][name][1] is None)
        assert ids is None or np.array_equal(ids, records[1][name][1])


def test_covariances_equal_the_cpus(zoo: Zoo, cuda_devices: Devices) -> None:
    def record(graph: Graph) -> Graph:
        items = inputs(every_token(graph))
        requests = [CovarianceRequest(item.names[0], (0, item.n_mat)) for item in items if item.reader.layer == 0]
        return up_to_layer(covariances(graph, requests), 0)

    tokens = tokens_and_logits("qwen3moe-moe")[0][:30]
    sums = []
    for placement in (everywhere("CUDA0"), Placement()):
        with open_zoo(zoo, "qwen3moe-moe", placement, fusion=Fusion.none(), rewrite=record) as model:
            session = model.session(64)
            session.decode(tokens, outputs=np.zeros(30, bool))
            sums.append({label: {k: v.copy() for k, v in a.items()} for label, a in session.accumulators.items()})
    assert any("weighted" in arrays for arrays in sums[0].values())
    for label, arrays in sums[0].items():
        for key, array in arrays.items():
            np.testing.assert_allclose(array, sums[1][label][key], rtol=1e-4, atol=1e-5 * np.abs(array).max())


# ---------------------------------------------------------------- the command line


def test_a_missing_device_is_an_error_of_one_line(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.model.placement.cuda_devices", lambda: ())
    monkeypatch.setattr("quantkit.kernels.cuda.core.device.why_none", lambda: "there is no card")
    monkeypatch.setattr("quantkit.extras.Extra.missing", lambda extra: [])
    for options in (["--backend", "cuda"], ["-ot", "exps=CUDA0"]):
        result = CliRunner().invoke(cli, ["perplexity", "-m", str(tiny_moe), "-p", "some words", *options])
        assert result.exit_code == 1
        assert "no device CUDA0; available: CPU, REFERENCE. there is no card." in result.output
        assert len(result.output.strip().splitlines()) == 1
    result = CliRunner().invoke(cli, ["perplexity", "-m", str(tiny_moe), "-p", "some words", "-ngl", "3"])
    assert result.output.startswith("note: -ngl: all layers run on the CPU; there is no card\n")


def test_a_device_that_does_not_exist_is_named(zoo: Zoo, cuda_devices: Devices) -> None:
    with refuses(ResourceError, "QK-E411 CUDA9"):
        open_zoo(zoo, "llama-dense", everywhere("CUDA9"))


def test_commands_accept_the_backend(zoo: Zoo, tmp_path: Path, cuda_devices: Devices) -> None:
    tokens, logits = tokens_and_logits("qwen3moe-moe")
    ids, out = ",".join(map(str, tokens[:12])), tmp_path / "out.npy"
    result = CliRunner().invoke(
        cli,
        [
            "logits",
            "-m",
            str(zoo("qwen3moe-moe")),
            "--backend",
            "cuda",
            "--tokens",
            ids,
            "-o",
            str(out),
            "--kv-type",
            "f32",
        ],
    )
    assert result.exit_code == 0, result.output
    assert nmse(np.load(out), logits[:12]) <= BOUND
