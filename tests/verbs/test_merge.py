"""Merging up and gate experts, and taking them apart again: the identity, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import check_refused, refuses

from quantkit.cli import cli
from quantkit.errors import RecipeError
from quantkit.formats.gguf import Field, open_gguf, split_fields, split_path, write_gguf
from quantkit.formats.imatrix import read_imatrix
from quantkit.kernels import dequantize
from quantkit.merge import (
    MergePlan,
    merge_imatrix_entries,
    plan_merge_up_gate,
    plan_split_up_gate,
    run_merge,
    split_imatrix_entries,
)
from quantkit.quantize import QuantizeOptions, quantize
from quantkit.types import BY_NAME, TYPES, TensorType
from small_models import tensor_bytes

STORED = [t for t in TYPES if t.in_files and t.name != "I2_S"]
FIELDS = [Field.of("general.architecture", "qwen3moe"), Field.of("qwen3moe.block_count", 2)]
Tensor = tuple[str, tuple[int, ...], TensorType, bytes]


def random_tensor(name: str, shape: tuple[int, ...], t: TensorType, seed: int) -> Tensor:
    """Return a tensor of random bytes in which no scale is infinite."""
    data = np.random.default_rng(seed).integers(0, 64, t.tensor_bytes(shape), np.uint8)
    return name, shape, t, data.tobytes()


def experts(
    t: TensorType, n_ff: int, n_expert: int, *, n_embd: int | None = None, bias: bool = True, layers: int = 2
) -> list[Tensor]:
    n_embd, tensors = n_embd or t.block, []
    tensors.append(random_tensor("token_embd.weight", (8, 4), BY_NAME["F32"], 99))
    for i in range(layers):
        for j, half in enumerate(("down", "gate", "up")):
            shape = (n_embd, n_ff, n_expert)
            tensors.append(random_tensor(f"blk.{i}.ffn_{half}_exps.weight", shape, t, 10 * i + j))
            if bias:
                tensors.append(
                    random_tensor(f"blk.{i}.ffn_{half}_exps.bias", (n_ff, n_expert), BY_NAME["F32"], 10 * i + j + 5)
                )
        tensors.append(random_tensor(f"blk.{i}.ffn_norm.weight", (8,), BY_NAME["F32"], i))
    return tensors


def carry_out(merge: MergePlan) -> Path:
    run_merge(merge, threads=2, overwrite=True)
    return merge.plan.shards[0].path


def round_trip(source: Path, folder: Path) -> tuple[Path, Path]:
    merged = carry_out(plan_merge_up_gate(source, folder / "merged.gguf"))
    return merged, carry_out(plan_split_up_gate(merged, folder / "back.gguf"))


@pytest.mark.parametrize("t", STORED, ids=str)
def test_merge_then_split_is_the_identity_for_every_type(tmp_path: Path, t: TensorType) -> None:
    source = tmp_path / "s.gguf"
    # Q8_K_R8 is taken apart in units of 256 values, BF16_R16 in pairs.
    write_gguf(source, FIELDS, experts(t, 2 * t.interleave, 3, n_embd=256 if t.interleave > 1 else None))
    merged, split_path = round_trip(source, tmp_path)
    before, after = tensor_bytes(source), tensor_bytes(merged)
    assert split_path.read_bytes() == source.read_bytes()
    half = len(before["blk.0.ffn_gate_exps.weight"][1]) // 3
    for e in range(3):
        gate = before["blk.0.ffn_gate_exps.weight"][1][e * half : (e + 1) * half]
        up = before["blk.0.ffn_up_exps.weight"][1][e * half : (e + 1) * half]
        assert after["blk.0.ffn_gate_up_exps.weight"][1][2 * e * half : 2 * (e + 1) * half] == gate + up


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["F32", "BF16", "Q4_0", "Q6_K", "IQ4_KS", "Q4_K_R4", "Q8_KV"]),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([None, 200, 5000]),
    st.booleans(),
)
def test_the_identity_holds_for_any_shape_and_over_shards(
    tmp_path: Path, name: str, rows: int, n_expert: int, blocks: int, bias: bool, shard: int | None, keep: bool
) -> None:
    t, source = BY_NAME[name], tmp_path / "s.gguf"
    for old in tmp_path.iterdir():
        old.unlink()
    write_gguf(source, FIELDS, experts(t, rows * t.interleave, n_expert, n_embd=blocks * t.block, bias=bias))
    shards: Sequence[Path] = [source]
    if shard is not None:
        options = QuantizeOptions(split_max_size=shard, no_provenance=True)
        shards = quantize(source, tmp_path / "many.gguf", "COPY", options).paths
    merged = plan_merge_up_gate(shards[-1], tmp_path / "merged.gguf", keep_split=keep)
    carry_out(merged)
    split_plan = plan_split_up_gate(merged.plan.shards[0].path, tmp_path / "back.gguf")
    carry_out(split_plan)
    assert len(split_plan.plan.shards) == len(shards)
    for split_shard, original in zip(split_plan.plan.shards, shards, strict=True):
        assert split_shard.path.read_bytes() == original.read_bytes()


def test_split_then_merge_is_the_identity_too(tmp_path: Path) -> None:
    """A file that was merged elsewhere: other tensors between, without quantkit's record."""
    merged = tmp_path / "m.gguf"
    t = BY_NAME["Q8_0"]
    tensors = [
        random_tensor("blk.0.ffn_gate_up_exps.weight", (32, 6, 4), t, 1),
        random_tensor("blk.0.x", (8,), BY_NAME["F32"], 2),
    ]
    write_gguf(merged, FIELDS, [*tensors, random_tensor("blk.1.ffn_gate_up_exps.weight", (32, 6, 4), t, 3)])
    separate = carry_out(plan_split_up_gate(merged, tmp_path / "s.gguf"))
    assert list(tensor_bytes(separate)) == [
        *("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight", "blk.0.x"),
        *("blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"),
    ]
    merged_again = carry_out(plan_merge_up_gate(separate, tmp_path / "again.gguf"))
    assert merged_again.read_bytes() == merged.read_bytes()


def test_merged_experts_replace_the_first_half(tmp_path: Path, zoo: Callable[[str], Path]) -> None:
    """In the zoo, ffn_down_exps lies between the two."""
    run_merge(plan_merge_up_gate(zoo("qwen3moe-moe"), tmp_path / "m.gguf"))
    with open_gguf(tmp_path / "m.gguf") as merged:
        names = [name.removeprefix("blk.0.") for name in merged.tensors if name.startswith("blk.0.")]
    assert names[-3:] == ["ffn_gate_inp.weight", "ffn_gate_up_exps.weight", "ffn_down_exps.weight"]


def test_only_recorded_merges_are_split(tmp_path: Path) -> None:
    t, source = BY_NAME["F16"], tmp_path / "s.gguf"
    tensors = experts(t, 4, 2, layers=1, bias=False)
    write_gguf(source, FIELDS, [*tensors, random_tensor("blk.1.ffn_gate_up_exps.weight", (1, 8, 2), t, 7)])
    _, split_path = round_trip(source, tmp_path)
    assert split_path.read_bytes() == source.read_bytes()


def test_a_quantized_merge_is_split_in_source_order(tmp_path: Path, tiny_moe: Path) -> None:
    merged = carry_out(plan_merge_up_gate(tiny_moe, tmp_path / "m.gguf"))
    quantize(merged, tmp_path / "q.gguf", "Q8_0", QuantizeOptions(no_provenance=True))
    separate = carry_out(plan_split_up_gate(tmp_path / "q.gguf", tmp_path / "s.gguf"))
    quantize(tiny_moe, tmp_path / "direct.gguf", "Q8_0", QuantizeOptions(no_provenance=True))
    assert list(tensor_bytes(separate)) == list(tensor_bytes(tiny_moe))
    assert tensor_bytes(separate) == tensor_bytes(tmp_path / "direct.gguf")


def test_up_first_experts_are_swapped(tmp_path: Path) -> None:
    source = tmp_path / "old.gguf"
    write_gguf(source, FIELDS, [random_tensor("blk.0.ffn_up_gate_exps.weight", (32, 4, 2), BY_NAME["Q8_0"], 1)])
    turned = tensor_bytes(carry_out(plan_merge_up_gate(source, tmp_path / "new.gguf")))
    raw = tensor_bytes(source)["blk.0.ffn_up_gate_exps.weight"][1]
    rows = [raw[i * 34 : (i + 1) * 34] for i in range(8)]
    want = b"".join(rows[i] for i in (2, 3, 0, 1, 6, 7, 4, 5))
    assert turned == {"blk.0.ffn_gate_up_exps.weight": ("Q8_0", want)}


def test_halves_of_different_types_are_kept_or_reencoded(tmp_path: Path) -> None:
    source, shape = tmp_path / "s.gguf", (64, 3, 2)
    rng = np.random.default_rng(1)
    gate, up = (rng.normal(0, 0.1, shape[::-1]).astype(np.float32) for _ in range(2))
    tensors_of_file = [("blk.0.ffn_gate_exps.weight", shape, BY_NAME["F32"], gate.tobytes())]
    tensors_of_file.append(("blk.0.ffn_up_exps.weight", shape, BY_NAME["F16"], up.astype(np.float16).tobytes()))
    write_gguf(source, FIELDS, [*tensors_of_file, *experts(BY_NAME["F32"], 2, 2, layers=2, bias=False)[5:]])
    left = plan_merge_up_gate(source, tmp_path / "o.gguf")
    assert [layer.prefix for layer in left.refused] == ["blk.0."]
    assert "--reencode" in left.refused[0].refusal
    out = carry_out(plan_merge_up_gate(source, tmp_path / "o.gguf", reencode="q8_0"))
    t, raw = tensor_bytes(out)["blk.0.ffn_gate_up_exps.weight"]
    values = dequantize(np.frombuffer(raw, np.uint8).reshape(12, -1), BY_NAME[t], 64).reshape(2, 6, 64)
    assert np.allclose(values, np.concatenate([gate, up], axis=1), atol=0.01)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda t: [x for x in t if "ffn_up" not in x[0]], "QK-E211 ffn_up_exps.weight"),
        (lambda t: [x for x in t if "gate_exps.bias" not in x[0]], "QK-E211 s.gguf"),
        (lambda t: [x for x in t if "_exps" not in x[0]], "QK-E211 ffn_gate_exps ffn_up_exps"),
        (
            lambda t: [*t, random_tensor("blk.0.ffn_gate_exps.scale", (2,), BY_NAME["F32"], 1)],
            "QK-E211 blk.0.ffn_gate_exps.scale",
        ),
        (
            lambda t: [*t, random_tensor("blk.0.ffn_gate_exps.zero", (2,), BY_NAME["F32"], 1)],
            "QK-E211 blk.0.ffn_gate_exps.zero",
        ),
        (
            lambda t: [*t, random_tensor("blk.0.ffn_gate_up_exps.weight", (1, 4, 2), BY_NAME["F32"], 1)],
            "QK-E211 ffn_gate_up_exps",
        ),
        (
            lambda t: [
                random_tensor(f"blk.0.ffn_{half}_exps.weight", (1, 2, 2, 2), BY_NAME["F32"], 1)
                for half in ("gate", "up")
            ],
            "QK-E211 blk.0.ffn_gate_exps.weight",
        ),
    ],
)
def test_unmergeable_tensors_are_named(tmp_path: Path, change: object, refusal: str) -> None:
    source = tmp_path / "s.gguf"
    assert callable(change)
    write_gguf(source, FIELDS, change(experts(BY_NAME["F32"], 2, 2, layers=1)))
    with refuses(RecipeError, refusal):
        plan_merge_up_gate(source, tmp_path / "o.gguf")


def test_interleaved_rows_must_form_whole_groups(tmp_path: Path) -> None:
    t = BY_NAME["Q4_K_R4"]
    merged = [random_tensor("blk.0.ffn_gate_up_exps.weight", (256, 4, 2), t, 1)]
    write_gguf(tmp_path / "m.gguf", FIELDS, merged)
    with refuses(RecipeError, "QK-E211 m.gguf blk.0.ffn_gate_up_exps.weight 4"):
        plan_split_up_gate(tmp_path / "m.gguf", tmp_path / "o.gguf")


def test_merging_twice_is_noted(tmp_path: Path, tiny_moe: Path) -> None:
    merged = carry_out(plan_merge_up_gate(tiny_moe, tmp_path / "m.gguf"))
    with refuses(RecipeError, "QK-E211 m.gguf"):
        plan_merge_up_gate(merged, tmp_path / "o.gguf")
    with refuses(RecipeError, "QK-E211 ffn_gate_up_exps"):
        plan_split_up_gate(tiny_moe, tmp_path / "o.gguf")


def test_the_second_half_may_be_in_a_later_shard(tmp_path: Path) -> None:
    tensors_of_file = [
        random_tensor(f"blk.0.{n}.weight", (8, 2, 2), BY_NAME["F32"], 1) for n in ("ffn_up_exps", "a", "ffn_gate_exps")
    ]
    shards = [split_path(tmp_path / "s", no, 3) for no in range(3)]
    for no, tensor in enumerate(tensors_of_file):
        write_gguf(shards[no], [*(FIELDS if no == 0 else ()), *split_fields(no, 3, 3)], [tensor])
    merged = plan_merge_up_gate(shards[0], tmp_path / "m.gguf", keep_split=True)
    assert [(x.name, x.shard) for x in merged.plan.tensors] == [
        ("blk.0.ffn_gate_up_exps.weight", 0),
        ("blk.0.a.weight", 1),
    ]
    carry_out(merged)
    split_plan = plan_split_up_gate(merged.plan.shards[1].path, tmp_path / "back.gguf")
    carry_out(split_plan)
    assert [s.path.read_bytes() for s in split_plan.plan.shards] == [path.read_bytes() for path in shards]


def test_shards_are_kept_without_a_record(tmp_path: Path, tiny_moe: Path) -> None:
    merged = carry_out(plan_merge_up_gate(tiny_moe, tmp_path / "m.gguf"))
    options = QuantizeOptions(split_max_size=4_000_000, no_provenance=True)
    shards = quantize(merged, tmp_path / "q.gguf", "Q8_0", options).paths
    assert len(shards) > 2
    split_plan = plan_split_up_gate(shards[0], tmp_path / "s.gguf", keep_split=True)
    assert len(split_plan.plan.shards) == len(shards)
    carry_out(split_plan)
    one = plan_split_up_gate(shards[0], tmp_path / "s.gguf")
    assert len(one.plan.shards) == 1
    carry_out(one)
    with open_gguf(split_plan.plan.shards[0].path) as sharded, open_gguf(one.plan.shards[0].path) as single:
        assert {n: sharded.data(n).tobytes() for n in sharded.tensors} == {
            n: single.data(n).tobytes() for n in single.tensors
        }
    with refuses(RecipeError, "QK-E201 --keep-split --split-max-size"):
        plan_split_up_gate(shards[0], tmp_path / "s.gguf", keep_split=True, split_max_size=100)


# ---------------------------------------------------------------- importance matrices


def test_importance_is_renamed_both_ways(data: Path) -> None:
    path = data / "tiny-moe-imatrix.gguf"
    merged, before = merge_imatrix_entries(path), read_imatrix(path)
    assert "blk.0.ffn_gate_up_exps.weight" in merged.entries
    assert not any("ffn_up_exps" in name or "ffn_gate_exps" in name for name in merged.entries)
    assert len(merged.entries) == len(before.entries) - 4
    entry = merged.entries["blk.0.ffn_gate_up_exps.weight"]
    for half in ("gate", "up"):
        assert np.array_equal(entry.sums, before.entries[f"blk.0.ffn_{half}_exps.weight"].sums)


# ---------------------------------------------------------------- the commands


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args])


def test_the_commands_undo_each_other(tmp_path: Path, data: Path, tiny_moe: Path) -> None:
    m, s, im, split_path = (tmp_path / n for n in ("m.gguf", "s.gguf", "im.gguf", "back.gguf"))
    imatrix = data / "tiny-moe-imatrix.gguf"
    merged = run("merge-up-gate", "--imatrix", imatrix, "--imatrix-out", im, tiny_moe, m)
    assert merged.exit_code == 0, merged.output
    assert "4 layers" in merged.stdout
    assert "llama.cpp b11434: no, ik_llama.cpp 8337e4cd3: yes" in merged.stdout
    split = run("split-up-gate", "--json", "--imatrix", im, "--imatrix-out", split_path, m, s)
    assert json.loads(split.stdout)["written"]
    assert s.read_bytes() == tiny_moe.read_bytes()
    assert split_path.read_bytes() == imatrix.read_bytes()
    assert split_imatrix_entries(im).entries.keys() == read_imatrix(imatrix).entries.keys()


def test_a_dry_run_and_refusals_write_nothing(tmp_path: Path, tiny_moe: Path) -> None:
    dry = run("merge-up-gate", "--dry-run", tiny_moe, tmp_path / "o.gguf")
    assert "dry run" in dry.stdout
    wrong = run("split-up-gate", tiny_moe, tmp_path / "o.gguf")
    assert wrong.exit_code == 2
    check_refused(wrong.stderr, "QK-E211 ffn_gate_up_exps")
    alone = run("merge-up-gate", "--imatrix", tiny_moe, tiny_moe, tmp_path / "o.gguf")
    assert "give both --imatrix and --imatrix-out" in alone.stderr
    assert list(tmp_path.iterdir()) == []


def test_splitting_restores_metadata_and_removes_the_record(tmp_path: Path, tiny_moe: Path) -> None:
    merged, split_path = round_trip(tiny_moe, tmp_path)
    with open_gguf(merged) as m, open_gguf(split_path) as b, open_gguf(tiny_moe) as t:
        assert m.get("quantkit.merge.tensors") == list(t.tensors)
        assert [f.encode() for f in b.fields.values()] == [f.encode() for f in t.fields.values()]
