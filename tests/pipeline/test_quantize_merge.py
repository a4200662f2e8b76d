"""quantize --merge-up-gate and --split-up-gate: one pass writes what two passes write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refuses

from quantkit.cli import cli
from quantkit.errors import QuantkitError, RecipeError, TypeNotSupported
from quantkit.formats.gguf import Field, open_gguf, write_gguf
from quantkit.formats.imatrix import write_imatrix
from quantkit.kernels import quantize as encode
from quantkit.merge import merge_imatrix_entries, merge_up_gate, split_up_gate
from quantkit.quantize import QuantizeOptions, plan_quantize, quantize
from quantkit.types import BY_NAME
from small_models import tensor_bytes

FIELDS = [Field.of("general.architecture", "qwen3moe"), Field.of("qwen3moe.block_count", 3)]
PLAIN = QuantizeOptions(no_provenance=True)
Verb = str


def model(
    path: Path,
    gate: str = "F16",
    up: str | None = None,
    *,
    shape: tuple[int, int, int] = (64, 3, 2),
    bias: bool = False,
    mixed_layers: tuple[int, ...] = (0, 1, 2),
    fields: list[Field] = FIELDS,
) -> Path:
    """Write three layers of experts; in ``mixed_layers`` up has a type of its own."""
    n_embd, n_ff, n_expert = shape
    rng, tensors = np.random.default_rng(7), []

    def add(name: str, ne: tuple[int, ...], type_name: str) -> None:
        t, x = BY_NAME[type_name], rng.normal(0, 0.05, (int(np.prod(ne[1:])), ne[0])).astype(np.float32)
        tensors.append((name, ne, t, encode(x, t, None).tobytes()))

    add("token_embd.weight", (n_embd, 8), "F32")
    for i in range(3):
        for half in ("up", "gate"):
            type_name = up if half == "up" and up is not None and i in mixed_layers else gate
            add(f"blk.{i}.ffn_{half}_exps.weight", shape, type_name)
            if bias:
                add(f"blk.{i}.ffn_{half}_exps.bias", (n_ff, n_expert), "F32")
        add(f"blk.{i}.ffn_down_exps.weight", (n_embd, n_ff, n_expert), gate)
    write_gguf(path, fields, tensors)
    return path


def in_shards(source: Path, size: int) -> Path:
    return quantize(source, source.with_name("shards.gguf"), "COPY", replace(PLAIN, split_max_size=size)).paths[0]


def assert_one_pass_is_two(
    folder: Path, source: Path, type_name: str, options: QuantizeOptions, verb: Verb = "merge"
) -> None:
    """Quantize what merge-up-gate (or its inverse) writes, and the source itself with the option."""
    (folder / "two").mkdir(parents=True)
    (folder / "one").mkdir()
    pass_one = merge_up_gate if verb == "merge" else split_up_gate
    between = pass_one(source, folder / "between.gguf", keep_split=options.keep_split).plan.shards[0].path
    two = quantize(between, folder / "two" / "o.gguf", type_name, options)
    flag = replace(options, merge_up_gate=verb == "merge", split_up_gate=verb == "split")
    one = quantize(source, folder / "one" / "o.gguf", type_name, flag)
    assert [p.name for p in one.paths] == [p.name for p in two.paths]
    assert [p.read_bytes() for p in one.paths] == [p.read_bytes() for p in two.paths]
    merged = any("ffn_gate_up_exps" in t.name for t in one.plan.tensors)
    assert merged == (verb == "merge")


# ---------------------------------------------------------------- one pass is two


@pytest.mark.parametrize(
    ("type_name", "imatrix"),
    [("Q4_K_M", True), ("Q4_K_M", False), ("IQ4_XS", True), ("Q8_0", False), ("MXFP4_MOE", True), ("COPY", False)],
)
def test_tiny_moe(tmp_path: Path, data: Path, tiny_moe: Path, type_name: str, imatrix: bool) -> None:
    options = replace(PLAIN, imatrix=data / "tiny-moe-imatrix.gguf" if imatrix else None)
    assert_one_pass_is_two(tmp_path / "merge", tiny_moe, type_name, options)
    assert_one_pass_is_two(tmp_path / "split", tmp_path / "merge" / "between.gguf", type_name, options, "split")


@pytest.mark.parametrize(
    "changes",
    [
        {"prune_layers": (1,)},
        {"split_max_size": 1_000_000},
        {"custom_q": (r"ffn_(up|gate)_exps=q6_K,\.1\..*exps=q5_0,.*=q4_1",)},
        {"ffn_up_type": "q5_1", "override_kv": ("general.name=str:Mine",)},
        {"keep_split": True},
        {"keep_split": True, "prune_layers": (0, 3)},
    ],
    ids=str,
)
def test_options_have_the_same_effect(tmp_path: Path, data: Path, tiny_moe: Path, changes: dict[str, object]) -> None:
    source = quantize(tiny_moe, tmp_path / "s.gguf", "COPY", replace(PLAIN, split_max_size=3_000_000)).paths[2]
    options = replace(PLAIN, imatrix=data / "tiny-moe-imatrix.gguf", **changes)  # type: ignore[arg-type]
    assert_one_pass_is_two(tmp_path / "merge", source, "Q4_K_M", options)
    merged = next(p for p in (tmp_path / "merge").glob("between*.gguf"))
    assert_one_pass_is_two(tmp_path / "split", merged, "Q4_K_M", options, "split")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["F32", "F16", "BF16", "Q8_0"]),
    st.tuples(st.sampled_from([32, 96]), st.integers(1, 5), st.integers(1, 4)),
    st.booleans(),
    st.sampled_from([None, 500, 3000]),
    st.booleans(),
    st.sampled_from([(), (0,), (1, 2)]),
    st.sampled_from(["Q4_0", "Q8_0", "COPY", "BF16", "Q4_K_M"]),
    st.integers(0, 1 << 30),
)
def test_any_model(
    tmp_path: Path,
    type_name: str,
    shape: tuple[int, int, int],
    bias: bool,
    shard: int | None,
    keep: bool,
    prune: tuple[int, ...],
    target: str,
    run: int,
) -> None:
    folder = tmp_path / f"{run}-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    source = model(folder / "s.gguf", type_name, shape=shape, bias=bias)
    source = source if shard is None else in_shards(source, shard)
    options = replace(PLAIN, keep_split=keep, prune_layers=prune, allow_requantize=True)
    assert_one_pass_is_two(folder / "merge", source, target, options)
    merged = sorted((folder / "merge").glob("between*.gguf"))[0]
    assert_one_pass_is_two(folder / "split", merged, target, options, "split")


def test_importance_may_have_either_name(tmp_path: Path, data: Path, tiny_moe: Path) -> None:
    separate, merged = data / "tiny-moe-imatrix.gguf", tmp_path / "merged.gguf"
    write_imatrix(merged, merge_imatrix_entries(separate), "gguf")
    outputs = []
    for name, path in (("a", separate), ("b", merged)):
        options = QuantizeOptions(imatrix=path, merge_up_gate=True)
        outputs.append(tensor_bytes(quantize(tiny_moe, tmp_path / name, "Q4_K_M", options).paths[0]))
    assert outputs[0] == outputs[1]
    without = quantize(tiny_moe, tmp_path / "c", "Q4_K_M", QuantizeOptions(merge_up_gate=True))
    name = "blk.0.ffn_gate_up_exps.weight"
    assert tensor_bytes(without.paths[0])[name] != outputs[0][name]


def test_experts_merged_during_quantization_can_be_split(tmp_path: Path, tiny_moe: Path) -> None:
    """Even where layers were pruned on the way: the record follows."""
    for prune in ((), (1,)):
        options = replace(PLAIN, prune_layers=prune)
        merged = quantize(tiny_moe, tmp_path / "m", "Q8_0", replace(options, merge_up_gate=True), overwrite=True)
        path = split_up_gate(merged.paths[0], tmp_path / "s", overwrite=True).plan.shards[0].path
        direct = quantize(tiny_moe, tmp_path / "d", "Q8_0", options, overwrite=True).paths[0]
        assert tensor_bytes(path) == tensor_bytes(direct)
        with open_gguf(path) as file, open_gguf(tiny_moe) as source:
            assert not any(key.startswith("quantkit.") for key in file.fields)
            if not prune:
                assert list(file.tensors) == list(source.tensors)


@pytest.mark.parametrize("record", [["blk.7.ffn_up_exps.weight"], [1, 2], "text", 5], ids=str)
def test_a_stale_merge_record_is_dropped_by_pruning(tmp_path: Path, record: object) -> None:
    source = model(tmp_path / "s.gguf", fields=[*FIELDS, Field.of("quantkit.merge.tensors", record)])
    path = quantize(source, tmp_path / "o.gguf", "Q8_0", QuantizeOptions(prune_layers=(1,))).paths[0]
    with open_gguf(path) as file:
        assert file.get("quantkit.merge.tensors") is None


def test_the_file_records_the_merge(tmp_path: Path, tiny_moe: Path) -> None:
    merged = quantize(tiny_moe, tmp_path / "m", "Q8_0", QuantizeOptions(merge_up_gate=True)).paths[0]
    with open_gguf(merged) as file:
        assert file.get("quantkit.quantize.recipe") == "Q8_0\n--merge-up-gate"
    path = quantize(merged, tmp_path / "s", "COPY", QuantizeOptions(split_up_gate=True)).paths[0]
    with open_gguf(path) as file:
        assert file.get("quantkit.quantize.recipe") == "Q8_0\n--merge-up-gate"
        assert file.get("quantkit.copy.recipe") == ["COPY\n--split-up-gate"]


# ---------------------------------------------------------------- halves of different types


@pytest.mark.parametrize(("gate", "up"), [("F16", "F32"), ("BF16", "Q8_0"), ("Q8_0", "Q4_0")])
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "F16"])
def test_halves_of_different_types_are_encoded_separately(tmp_path: Path, gate: str, up: str, type_name: str) -> None:
    """As if both had been decoded first; but a half that has the type already is a copy."""
    source = model(tmp_path / "s.gguf", gate, up, mixed_layers=(0, 2))
    options = replace(PLAIN, allow_requantize=True)
    wide = merge_up_gate(source, tmp_path / "w.gguf", reencode="F32").plan.shards[0].path
    want = tensor_bytes(quantize(wide, tmp_path / "a.gguf", type_name, options).paths[0])
    result = quantize(source, tmp_path / "b.gguf", type_name, replace(options, merge_up_gate=True))
    actual, halves = tensor_bytes(result.paths[0]), tensor_bytes(source)
    for name, (t, raw) in actual.items():
        if type_name not in (gate, up) or "gate_up" not in name:
            assert (t, raw) == want[name], name
    for layer in (0, 2):
        t, raw = actual[f"blk.{layer}.ffn_gate_up_exps.weight"]
        size = len(raw) // 4
        for position, half in enumerate(("gate", "up")):
            was, before = halves[f"blk.{layer}.ffn_{half}_exps.weight"]
            if was == t:
                assert [raw[2 * e * size + position * size :][:size] for e in (0, 1)] == [before[:size], before[size:]]
    tensor = next(t for t in result.plan.tensors if t.name == "blk.0.ffn_gate_up_exps.weight")
    assert tensor.reason.startswith(f"merged from {gate} and {up}; ")


def test_halves_with_different_types_are_not_merged(tmp_path: Path) -> None:
    """COPY gives them no type; a rule does."""
    source = model(tmp_path / "s.gguf", "F16", "F32", mixed_layers=(1, 2))
    options = replace(PLAIN, merge_up_gate=True)
    plan = plan_quantize(source, tmp_path / "o.gguf", "COPY", options)
    assert {t.name for t in plan.tensors if t.name.startswith("blk.1.")} == {
        f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up", "down")
    }
    [note] = [note for note in plan.notes if "not changed" in note]
    assert "blk.1, blk.2: not changed: COPY leaves gate as F16 and up as F32" in note
    ruled = plan_quantize(source, tmp_path / "o.gguf", "COPY", replace(options, tensor_type=("gate_up=bf16",)))
    assert [t.type.name for t in ruled.tensors if "gate_up" in t.name] == ["BF16"] * 3
    alone = model(tmp_path / "t.gguf", "F16", "F32")
    with refuses(RecipeError, "QK-E211 --merge-up-gate COPY"):
        plan_quantize(alone, tmp_path / "o.gguf", "COPY", options)


def test_a_quantized_half_is_not_requantized_by_default(tmp_path: Path) -> None:
    source = model(tmp_path / "s.gguf", "F16", "Q8_0")
    options = replace(PLAIN, merge_up_gate=True)
    with refuses(TypeNotSupported, "QK-E209 F16 Q8_0 Q4_0 --allow-requantize"):
        plan_quantize(source, tmp_path / "o.gguf", "Q4_0", options)
    plan_quantize(source, tmp_path / "o.gguf", "Q8_0", options)  # that half is a copy


# ---------------------------------------------------------------- refusals


def refused(refusal: str, source: Path, type_name: str = "Q8_0", **options: object) -> None:
    with refuses(QuantkitError, refusal):
        plan_quantize(source, source.with_name("o.gguf"), type_name, QuantizeOptions(**options))  # type: ignore[arg-type]


def test_impossible_requests_are_refused(tmp_path: Path, tiny_moe: Path, data: Path) -> None:
    merged = merge_up_gate(tiny_moe, tmp_path / "m.gguf").plan.shards[0].path
    refused("QK-E211 --merge-up-gate", merged, merge_up_gate=True)
    refused("QK-E211 --split-up-gate ffn_gate_up_exps", tiny_moe, split_up_gate=True)
    refused("QK-E201 --merge-up-gate --split-up-gate", tiny_moe, merge_up_gate=True, split_up_gate=True)
    refused("QK-E123 tiny-moe-imatrix.gguf general.architecture", data / "tiny-moe-imatrix.gguf", merge_up_gate=True)


def test_unmergeable_layers_are_named(tmp_path: Path) -> None:
    source = model(tmp_path / "s.gguf")
    with open_gguf(source) as file:
        tensors = [(t.name, t.shape, t.type, file.data(t).tobytes()) for t in file.tensors.values()]
    tensors.append(("blk.1.ffn_up_exps.scale", (2,), BY_NAME["F32"], np.ones(2, np.float32).tobytes()))
    write_gguf(tmp_path / "t.gguf", FIELDS, tensors)
    plan = plan_quantize(tmp_path / "t.gguf", tmp_path / "o.gguf", "Q8_0", QuantizeOptions(merge_up_gate=True))
    assert any("blk.1: not changed: blk.1.ffn_up_exps.scale: no runtime" in note for note in plan.notes)
    assert {t.name for t in plan.tensors} > {"blk.1.ffn_up_exps.weight", "blk.1.ffn_up_exps.scale"}


@pytest.mark.parametrize(
    "options",
    [
        {"custom_q": ("ffn_up_exps=q4_0,ffn_gate_exps=q5_0",)},
        {"custom_q": ("ffn_up_exps=q4_0,exps=q5_0",)},
        {"ffn_up_type": "q4_0", "ffn_gate_type": "q5_0"},
    ],
    ids=str,
)
def test_halves_with_two_target_types_are_not_merged(tmp_path: Path, options: dict[str, object]) -> None:
    source = model(tmp_path / "s.gguf")
    refused("QK-E211 --merge-up-gate", source, merge_up_gate=True, **options)
    merged = merge_up_gate(source, tmp_path / "m.gguf").plan.shards[0].path
    plan = plan_quantize(merged, tmp_path / "o.gguf", "Q8_0", QuantizeOptions(**options))  # type: ignore[arg-type]
    assert any(note.startswith(("QK-W012", "QK-W013")) for note in plan.notes)


# ---------------------------------------------------------------- the command


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["quantize", *map(str, args)])


def test_a_dry_run_shows_merges_and_compatible_runtimes(tmp_path: Path, tiny_moe: Path) -> None:
    result = run("--dry-run", "--merge-up-gate", tiny_moe, tmp_path / "o.gguf", "Q4_K_M")
    assert result.exit_code == 0, result.output
    assert "--merge-up-gate merges up and gate experts of 4 layers (blk.0 .. blk.3)" in result.stderr
    assert (
        "runtimes that load merged experts of qwen3moe: llama.cpp b11434: no, ik_llama.cpp 8337e4cd3: yes"
        in result.stderr
    )
    assert "merged; base of Q4_K_M" in result.stdout
    plan = json.loads(run("--dry-run", "--json", "--merge-up-gate", tiny_moe, tmp_path / "o", "Q4_K_M").stdout)
    [tensor] = [t for t in plan["tensors"] if t["name"] == "blk.0.ffn_gate_up_exps.weight"]
    assert tensor["sources"] == ["blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"]
    assert list(tmp_path.iterdir()) == []


def test_it_can_be_interrupted_and_resumed(tmp_path: Path, tiny_moe: Path) -> None:
    class StopAfter:
        left = 20

        def on_resume(self, tensors: int, nbytes: int) -> None:
            raise AssertionError("nothing to resume")

        def on_write(self, nbytes: int) -> None:
            pass

        def on_tensor(self, tensor: object) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    out, options = tmp_path / "o.gguf", QuantizeOptions(merge_up_gate=True)
    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_moe, out, "Q4_K_M", options, threads=1, observer=StopAfter())
    assert quantize(tiny_moe, out, "Q4_K_M", options, resume=True).run.resumed > 10
    full = quantize(tiny_moe, tmp_path / "w.gguf", "Q4_K_M", options).paths[0]
    assert out.read_bytes() == full.read_bytes()
