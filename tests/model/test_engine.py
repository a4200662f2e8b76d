"""Sessions, fusion and placement: the engine around the numbers (which test_engine_zoo.py compares)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refuses

from libllama import nmse
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError, TypeNotSupported
from quantkit.formats.gguf import Field, open_gguf, write_gguf
from quantkit.model.backends.cpu.streaming import pages
from quantkit.model.cost import token_cost
from quantkit.model.engine import Model, load
from quantkit.model.fusion import Fusion, summary
from quantkit.model.ops import MulMatId, UpGateId
from quantkit.model.placement import Placement, parse_rules
from zoo import expected

TOKENS = expected("qwen3moe-moe")[0]
#: Far below the error of a wrong computation, but above that of another order of summation.
MAX_NMSE = 1e-11


def open_zoo(zoo: Callable[[str], Path], name: str, **options: Any) -> Model:
    return load(zoo(name), **{"kv_type": "f32", **options})


# ---------------------------------------------------------------- sessions


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3moe-moe", "gemma3-dense", "deepseek2-moe", "qwen3next-moe", "llama4-moe", "gemma4-dense"),
        "starcoder-dense",
    ],
)
@pytest.mark.parametrize("pieces", [(64,), (1,) * 64, (7, 1, 30, 26), (33, 31)], ids=str)
def test_split_batches_equal_one_batch(zoo: Callable[[str], Path], name: str, pieces: tuple[int, ...]) -> None:
    with open_zoo(zoo, name) as model:
        session = model.session(64)
        parts, start = [], 0
        for n in pieces:
            parts.append(session.decode(TOKENS[start : start + n]))
            start += n
        assert nmse(np.concatenate(parts), expected(name)[1]) <= 1e-8  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["qwen3moe-moe", "qwen3next-moe", "gpt-oss-moe", "gemma4-dense", "starcoder-dense"])
def test_sequences_are_independent(zoo: Callable[[str], Path], name: str) -> None:
    with open_zoo(zoo, name) as model:
        session = model.session(40, n_seq=3)
        sequences = np.tile([2, 0, 1], 20).astype(np.int32)[:60]
        tokens = TOKENS[np.arange(60) % 64]
        mixed = session.decode(tokens, sequences)
        assert mixed is not None
        for sequence in range(3):
            alone = model.forward(tokens[sequences == sequence])
            # gelu is looked up in half precision: a last bit before it may be a step of its table.
            assert nmse(mixed[sequences == sequence], alone) <= (
                1e-8 if model.arch in ("gemma4", "starcoder") else MAX_NMSE
            )


def test_internal_batch_size_does_not_change_logits(zoo: Callable[[str], Path]) -> None:
    with open_zoo(zoo, "llama-moe", n_ubatch=9) as model:
        assert nmse(model.forward(TOKENS), expected("llama-moe")[1]) <= 1e-8


def test_only_requested_logits_are_returned_in_order(zoo: Callable[[str], Path]) -> None:
    with open_zoo(zoo, "qwen3moe-moe", n_ubatch=10) as model:
        all_logits = model.forward(TOKENS)
        mask = np.arange(64) % 3 == 1
        selection = model.session(64).decode(TOKENS, outputs=mask)
        assert selection is not None
        assert nmse(selection, all_logits[mask]) <= MAX_NMSE
        blocks: list[tuple[int, Any]] = []
        result = model.session(64).decode(TOKENS, outputs=mask, consume=lambda i, x: blocks.append((i, x.copy())))
        assert result is None
        assert [i for i, _ in blocks] == np.cumsum([0, *(len(x) for _, x in blocks)])[:-1].tolist()
        assert np.array_equal(np.concatenate([x for _, x in blocks]), selection)


def test_requesting_no_logits_is_valid(zoo: Callable[[str], Path]) -> None:
    with open_zoo(zoo, "qwen3moe-moe") as model:
        session = model.session(64)
        none = session.decode(TOKENS[:40], outputs=np.zeros(40, bool))
        assert none is not None
        assert none.shape == (0, 128)
        remainder = session.decode(TOKENS[40:])
        assert remainder is not None
        assert nmse(remainder, expected("qwen3moe-moe")[1][40:]) <= 1e-8


def test_a_sequence_can_be_rewound(zoo: Callable[[str], Path]) -> None:
    with open_zoo(zoo, "qwen3moe-moe") as model:
        session = model.session(64)
        first = session.decode(TOKENS)
        assert session.rewind(0, 20)
        rerun = session.decode(TOKENS[20:])
        assert first is not None
        assert rerun is not None
        assert nmse(rerun, first[20:]) <= MAX_NMSE


def test_a_recurrent_sequence_can_only_be_restarted(zoo: Callable[[str], Path]) -> None:
    with open_zoo(zoo, "qwen3next-moe") as model:
        session = model.session(64)
        first = session.decode(TOKENS)
        assert not session.rewind(0, 20)
        assert session.rewind(0, 0)
        rerun = session.decode(TOKENS)
        assert first is not None
        assert rerun is not None
        assert np.array_equal(first, rerun)


@pytest.mark.parametrize(
    ("tokens", "sequences", "refusal"),
    [([0, 128], 0, "QK-E203 128"), ([-1], 0, "QK-E203 -1"), ([1], 1, "QK-E203 1"), ([1] * 9, 0, "QK-E203 8")],
)
def test_invalid_batches_are_refused(
    zoo: Callable[[str], Path], tokens: list[int], sequences: int, refusal: str
) -> None:
    with open_zoo(zoo, "qwen3moe-moe") as model, refuses(FormatError, refusal):
        model.session(8).decode(tokens, sequences)


# ---------------------------------------------------------------- fusion


@pytest.mark.parametrize(
    "name",
    ["llama-dense", "qwen3moe-moe", "deepseek2-moe", "gpt-oss-moe", "gemma2-dense", "gemma4-dense", "gemma4-moe"],
)
def test_fused_and_unfused_give_the_same_logits(zoo: Callable[[str], Path], name: str) -> None:
    with open_zoo(zoo, name) as fused, open_zoo(zoo, name, fusion=Fusion.none()) as plain:
        assert any(d.fused for d in fused.decisions)
        assert not any(d.fused for d in plain.decisions)
        assert nmse(fused.forward(TOKENS), plain.forward(TOKENS)) <= 1e-10


@pytest.mark.parametrize("name", ["qwen3moe-moe", "gpt-oss-moe", "deepseek-moe"])
@pytest.mark.parametrize("fusion", [Fusion(), Fusion.none()], ids=["fused", "unfused"])
def test_merged_at_load_is_the_same_model(zoo: Callable[[str], Path], name: str, fusion: Fusion) -> None:
    with open_zoo(zoo, name, merge_up_gate=True, fusion=fusion) as merged:
        assert any("ffn_gate_up_exps" in m.tensor.name for op in merged.graph.ops for m in op.matrices())
        assert nmse(merged.forward(TOKENS), expected(name)[1]) <= 1e-8


def test_every_fusion_reports_its_decision(zoo: Callable[[str], Path]) -> None:
    with open_zoo(zoo, "deepseek-moe") as model:
        assert summary(model.decisions) == [
            "fused up+gate: 2 of 2",
            "fused MoE up+gate: 1 of 1",
            "fused q/k/v: 2 of 2",
        ]
    with open_zoo(zoo, "deepseek-moe", fusion=Fusion(up_gate=True, moe=False, qkv=False)) as model:
        lines = summary(model.decisions)
    assert lines[1:] == [
        "fused MoE up+gate: 0 of 1 (1 not: switched off)",
        "fused q/k/v: 0 of 2 (2 not: switched off)",
    ]


def test_an_observed_run_has_no_fusion(zoo: Callable[[str], Path]) -> None:
    with open_zoo(zoo, "qwen3moe-moe", observer=lambda name, x, ids: None) as model:
        assert not any(d.fused for d in model.decisions)
    with refuses(RecipeError, "QK-E201"):
        open_zoo(zoo, "qwen3moe-moe", observer=lambda name, x, ids: None, fusion=Fusion())


# ---------------------------------------------------------------- placement

#: Placements of every kind; with -ot the first matching rule holds.
PLACEMENTS = {
    "up and gate there, down here (#861)": ("ffn_(up|gate)_exps=REFERENCE",),
    "up and gate on different devices": ("ffn_up_exps=REFERENCE",),
    "experts there": ("_exps=REFERENCE",),
    "a layer there": (r"blk\.1\.=REFERENCE",),
    "k and v there": ("attn_[kv]\\.=REFERENCE",),
    "the output there": ("^output=REFERENCE",),
    "the router there": ("ffn_gate_inp=REFERENCE",),
    "the embeddings there": ("token_embd=REFERENCE",),
    "every other rule": (r"blk\.0\.attn=CPU,blk\.\d\.attn=REFERENCE", "down=REFERENCE"),
}


@pytest.mark.parametrize("rules", PLACEMENTS.values(), ids=PLACEMENTS.keys())
@pytest.mark.parametrize("name", ["qwen3moe-moe", "deepseek2-moe", "gemma4-dense"])
def test_logits_do_not_depend_on_placement(zoo: Callable[[str], Path], name: str, rules: tuple[str, ...]) -> None:
    with open_zoo(zoo, name, placement=Placement(rules=parse_rules(rules))) as model:
        assert nmse(model.forward(TOKENS), expected(name)[1]) <= 1e-8


def test_up_and_gate_on_two_devices_are_not_fused_with_a_note(zoo: Callable[[str], Path]) -> None:
    placement = Placement(rules=parse_rules([r"blk\.0\.ffn_up_exps=REFERENCE"]))
    with open_zoo(zoo, "qwen3moe-moe", placement=placement) as model:
        kinds = [type(op) for op in model.graph.ops if op.layer == 0]
        assert UpGateId not in kinds
        assert kinds.count(MulMatId) == 3
        assert "1 not: gate and up are on CPU and REFERENCE" in summary(model.decisions)[0]


def test_the_last_layers_are_offloaded_first() -> None:
    p = Placement(gpu_layers=3, accelerators=("CUDA0",))
    assert [p.layer_device(i, 4) for i in range(-1, 5)] == ["CPU", "CPU", "CPU", "CUDA0", "CUDA0", "CUDA0"]


@pytest.mark.parametrize(
    ("rules", "error", "refusal"),
    [
        (["exps"], RecipeError, "QK-E204 REGEX=DEVICE"),
        (["(exps=CPU"], RecipeError, "QK-E205 (exps 5"),
        (["exps=CUDA7"], ResourceError, "QK-E411 CUDA7"),
    ],
)
def test_impossible_placements_are_refused(
    zoo: Callable[[str], Path], rules: list[str], error: type[QuantkitError], refusal: str
) -> None:
    with refuses(error, refusal):
        open_zoo(zoo, "qwen3moe-moe", placement=Placement(rules=parse_rules(rules)))


# ---------------------------------------------------------------- models that are refused


def rewritten(zoo: Callable[[str], Path], path: Path, name: str, change: dict[str, Any], drop: str = "") -> Path:
    """Write a zoo model with other metadata, and without the tensors whose name contains ``drop``."""
    with open_gguf(zoo(name)) as source:
        fields = [Field.of(k, change[k]) if k in change else f for k, f in source.fields.items()]
        tensors = [
            (t.name, t.shape, t.type, source.data(t)) for t in source.tensors.values() if not drop or drop not in t.name
        ]
        write_gguf(path, fields, tensors)
    return path


def test_an_unknown_architecture_lists_the_known_ones(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    path = rewritten(zoo, tmp_path / "x.gguf", "llama-dense", {"general.architecture": "llama17"})
    with refuses(QuantkitError, "QK-E123 llama17"):
        load(path)


def test_a_missing_tensor_is_named(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    path = rewritten(zoo, tmp_path / "x.gguf", "llama-dense", {}, drop="blk.1.ffn_down.weight")
    with refuses(FormatError, "QK-E105 blk.1.ffn_down.weight"):
        load(path)


def test_unused_tensors_are_refused(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    with open_gguf(zoo("qwen3moe-moe")) as source:
        tensors = [(t.name, t.shape, t.type, source.data(t)) for t in source.tensors.values()]
        extra = tensors[-1]
        write_gguf(tmp_path / "x.gguf", source.fields.values(), [*tensors, ("blk.0.novelty.weight", *extra[1:])])
    with refuses(TypeNotSupported, "QK-E107 blk.0.novelty.weight"):
        load(tmp_path / "x.gguf")


# ---------------------------------------------------------------- cost


def test_the_cost_of_a_token_counts_the_experts_it_uses(zoo: Callable[[str], Path]) -> None:
    with open_zoo(zoo, "qwen3moe-moe") as model:
        cost, deep = token_cost(model.graph, "f16", 0), token_cost(model.graph, "f16", 100)
        fused = sum(m.tensor.nbytes for op in model.graph.ops for m in op.matrices())
        experts = sum(t.nbytes for t in model.source.tensors.values() if "_exps" in t.name)
        embeddings = model.source.tensors["token_embd.weight"]
        expected_bytes = fused - experts * 6 / 8 - embeddings.nbytes + embeddings.type.row_bytes(model.n_embd)
        assert cost.weight_bytes == pytest.approx(expected_bytes)
        kv_width = sum(c.k_width + c.v_width for c in model.graph.caches)
        assert deep.cache_bytes - cost.cache_bytes == 100 * kv_width * 2


def test_the_cost_of_a_token_counts_states_read_and_written(zoo: Callable[[str], Path]) -> None:
    with open_zoo(zoo, "qwen3next-moe") as model:
        cost, deep = token_cost(model.graph, "f16", 0), token_cost(model.graph, "f16", 100)
        assert cost.state_bytes == deep.state_bytes == 8 * sum(state.width for state in model.graph.states) > 0
        assert cost.bytes == cost.weight_bytes + cost.state_bytes


@pytest.mark.parametrize("merge_up_gate", [False, True])
def test_weights_in_memory_give_the_logits_of_the_mapped_file(zoo: Callable[[str], Path], merge_up_gate: bool) -> None:
    with open_zoo(zoo, "qwen3moe-moe", merge_up_gate=merge_up_gate) as model:
        expected = model.forward(TOKENS)
    with open_zoo(zoo, "qwen3moe-moe", merge_up_gate=merge_up_gate, mmap=False) as model:
        actual = model.forward(TOKENS)
        data = model.source.data("blk.0.attn_q.weight")
        assert pages(data) is None
        assert model.source.data("blk.0.attn_q.weight") is data
    np.testing.assert_array_equal(actual, expected)
    with refuses(RecipeError, "QK-E201 --no-mmap"):
        open_zoo(zoo, "qwen3moe-moe", mmap=False, max_ram=1 << 20)


def test_a_model_reports_failed_fusions_and_merges(zoo: Callable[[str], Path]) -> None:
    with open_zoo(zoo, "qwen3moe-moe") as model:
        assert model.notes == ()
    with open_zoo(zoo, "qwen3moe-moe", fusion=Fusion.none()) as model:
        assert model.notes == ()
    placement = Placement(rules=parse_rules([r"blk\.0\.ffn_up_exps=REFERENCE"]))
    with open_zoo(zoo, "qwen3moe-moe", placement=placement) as model:
        assert model.notes == ("fused MoE up+gate: 1 of 2 (1 not: gate and up are on CPU and REFERENCE)",)
    with open_zoo(zoo, "olmoe-moe", merge_up_gate=True) as model:
        assert len(model.notes) == 2
        assert all("no runtime has a name for the scales of merged experts" in note for note in model.notes)
    with open_zoo(zoo, "qwen3moe-moe", max_ram=1 << 20) as model:
        assert "more than --max-ram 1.00 MiB" in model.notes[0]
