from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from refusals import check_refused, refuses

from attacks import ATTACKS
from quantkit.cli import cli
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import Field, ValueType, layout_gguf, open_gguf, split_fields, split_path, write_gguf
from quantkit.inspect import file_type_name, first_items, inspect
from quantkit.merge import merge_up_gate
from quantkit.pipeline.runtimes import runtimes
from quantkit.types import BY_NAME
from small_models import llama_fields, llama_tensors, write_model


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["inspect", *map(str, arguments)])


def run_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    output: dict[str, Any] = json.loads(result.output)
    return output


def write_split(path: Path) -> list[Path]:
    """Write a model of three shards, one tensor each, the metadata in the first."""
    paths = [split_path(path / "model", i, 3) for i in range(3)]
    for i, shard in enumerate(paths):
        fields = [*(llama_fields() if i == 0 else ()), *split_fields(i, 3, 3)]
        write_gguf(shard, fields, [(f"blk.{i}.ffn_up.weight", (64,), BY_NAME["F32"], bytes(256))])
    return paths


def test_the_tiny_moe_has_its_known_figures(tiny_moe: Path) -> None:
    summary = inspect(tiny_moe)
    assert (summary.version, summary.alignment, summary.file_bytes) == (3, 32, 18526240)
    assert (summary.architecture, summary.name, summary.file_type, summary.file_type_name) == (
        "qwen3moe",
        "tiny-moe",
        32,
        "BF16",
    )
    assert {f.label: f.value for f in summary.facts}.items() >= {"layers": 4, "experts": 8, "vocabulary": 4096}.items()
    assert [(g.name, g.tensors, g.bpw) for g in summary.by_type] == [("BF16", 30, 16.0), ("F32", 21, 32.0)]
    assert summary.total.nbytes == sum(g.nbytes for g in summary.by_class) == sum(t.nbytes for t in summary.tensors)
    # 8 experts, 2 used: of 3 x 256 x 256 x 8 x 4 weights of experts a quarter is active.
    assert summary.active_values == summary.total.values - 3 * 256 * 256 * 8 * 4 * 3 // 4
    assert (summary.merged_layers, summary.unmerged_layers) == (0, 4)
    assert all(runtime.loads for runtime in summary.runtimes)


def test_the_text_shows_all_sections(tiny_moe: Path) -> None:
    result = run(tiny_moe)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    for line in (
        "architecture qwen3moe",
        "experts used 2",
        "weights 9.19 M in 51 tensors; 4.47 M active per token",
        "tensor data 17.54 MiB, 16.019 bits per weight",
        "in ik_llama.cpp loads, on CPU and CUDA",
        "tokenizer.ggml.token_type INT32[4096] 3, 1, 1, 1, 1, 1, 1, 1, …",
        "blk.3.ffn_down_exps.weight 256 x 256 x 8 BF16 1.00 MiB 17477664",
        "F32 21 11.01 K 43.00 KiB 32.000",
        "ffn_gate_inp F32 4 8.19 K 32.00 KiB 32.000",
        "total BF16, F32 51 9.19 M 17.54 MiB 16.019",
    ):
        assert line in lines
    assert max(map(len, result.output.splitlines())) <= 120


def test_sections_can_be_selected(tiny_moe: Path) -> None:
    brief = run(tiny_moe, "--no-tensors", "--metadata", "none").output
    assert "general.architecture" not in brief
    assert "blk.0." not in brief
    assert "ffn_down_exps" in brief
    experts = run(tiny_moe, "--tensors", "_exps", "--metadata", "none").output
    assert "6.29 M in 12 of 51 tensors" in experts
    assert "token_embd.weight" not in experts
    full = run(tiny_moe, "--metadata", "full", "--no-tensors").output
    assert "<|endoftext|>" in full
    assert "…" not in full


def test_json_has_every_tensor_and_full_arrays_on_demand(tiny_moe: Path) -> None:
    output = run_json(tiny_moe)
    assert len(output["tensors"]) == output["model_tensors"] == 51
    assert output["tensors"][0] == {
        "name": "token_embd.weight",
        "shape": [256, 4096],
        "type": "BF16",
        "bytes": 2097152,
        "offset": 132128,
        "shard": 0,
    }
    tokens = {f["key"]: f for f in output["metadata"]}["tokenizer.ggml.tokens"]
    assert (tokens["count"], len(tokens["value"]), tokens["cut"]) == (4096, 8, True)
    tokens = {f["key"]: f for f in run_json(tiny_moe, "--metadata", "full")["metadata"]}["tokenizer.ggml.tokens"]
    assert (len(tokens["value"]), tokens["cut"]) == (4096, False)
    assert not {"metadata", "tensors"} & set(run_json(tiny_moe, "--metadata", "none", "--no-tensors"))


def test_an_importance_matrix(data: Path) -> None:
    summary = inspect(data / "tiny-moe-imatrix.gguf")
    assert (summary.kind, summary.architecture, summary.active_values) == ("imatrix", "", None)
    assert {f.label: f.value or f.counts for f in summary.facts} == {
        "calibration data": (("calibration.txt", 1),),
        "chunks": 343,
        "chunk size": 256,
    }
    output = run(data / "tiny-moe-imatrix.gguf").output
    assert "59.89 K in 128 tensors" in output
    assert "llama.cpp" not in output


def test_any_shard_shows_the_whole_model(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    summary = inspect(paths[1])
    assert [s.path for s in summary.shards] == paths
    assert [(t.name, t.shard) for t in summary.tensors] == [(f"blk.{i}.ffn_up.weight", i) for i in range(3)]
    output = run(paths[2]).output
    assert "3 shards" in output
    assert " ".join(output.splitlines()[4].split()) == "shard 3 model-00003-of-00003.gguf: 1 tensors, 416 B"
    assert run_json(paths[0])["tensors"][2]["shard"] == 2


def test_types_of_one_project_and_long_names_are_reported(tmp_path: Path) -> None:
    path, long = tmp_path / "ik.gguf", "blk.0." + "x" * 60
    tensors = [
        ("blk.0.ffn_up.weight", (256, 4), BY_NAME["IQ4_KS"], bytes(4 * 140)),
        ("blk.0.ffn_down.weight", (256, 4), BY_NAME["NVFP4"], bytes(4 * 144)),
        (long, (4,), BY_NAME["F32"], bytes(16)),
    ]
    write_gguf(path, llama_fields(), tensors)
    mainline, ik = inspect(path).runtimes
    assert (mainline.unknown_types, ik.unknown_types) == (("IQ4_KS",), ("NVFP4",))
    assert mainline.long_names == ik.long_names == (long,)
    output = run(path).output
    assert "in llama.cpp" in output
    assert "does not load: no tensor type IQ4_KS; " in output
    assert "1 tensor names are longer than 63 bytes" in output


def verdicts(path: Path, name: str = "", type_name: str = "", **fields: Any) -> list[str]:
    """Return both runtimes' verdicts on a model with a changed tensor, or changed keys."""
    with open_gguf(path, header_only=True) as file:
        types = {t.name: BY_NAME[type_name] if t.name == name else t.type for t in file.tensors.values()}
        changed = {key.replace("__", "."): Field.of(key.replace("__", "."), value) for key, value in fields.items()}
        entries = [(t.name, types[t.name], t.shape) for t in file.tensors.values()]
        return [str(r) for r in runtimes({**file.fields, **changed}, entries)]


LOADS = "loads, on CPU and CUDA"


def test_runtime_verdicts_on_types(tiny_moe: Path) -> None:
    tensor = "blk.0.attn_output.weight"
    assert verdicts(tiny_moe) == verdicts(tiny_moe, tensor, "Q4_K") == [LOADS, LOADS]
    cpu = "loads; on CUDA, {} stays on the CPU"
    refused = "does not load: no tensor type {}"
    assert verdicts(tiny_moe, tensor, "TQ2_0") == [cpu.format("TQ2_0"), refused.format("TQ2_0")]
    assert verdicts(tiny_moe, tensor, "IQ4_K_R4") == [refused.format("IQ4_K_R4"), LOADS]
    assert verdicts(tiny_moe, tensor, "Q4_K_R4") == [refused.format("Q4_K_R4"), cpu.format("Q4_K_R4")]


def test_runtime_verdicts_on_headers(tiny_moe: Path, zoo: Callable[[str], Path], tmp_path: Path) -> None:
    assert verdicts(zoo("olmoe-moe"))[1] == "does not load: no architecture olmoe"
    for verdict in verdicts(tiny_moe, qwen3moe__expert_used_count=0, qwen3moe__embedding_length=128):
        assert verdict.startswith("does not load: ")
    with open_gguf(tiny_moe) as file:
        entries = [(t.name, t.type, t.shape) for t in file.tensors.values()]
        first = next(e for e in entries if e[0] == "blk.0.attn_q.weight")
        for less in (entries[1:], [e for e in entries if e is not first], [e for e in entries if "blk.3." not in e[0]]):
            assert not any(r.loads for r in runtimes(file.fields, less))
        assert not any(r.loads for r in runtimes(file.fields, [*entries, ("extra.weight", BY_NAME["F32"], (4,))]))
        merges = {k: v for k, v in file.fields.items() if k != "tokenizer.ggml.merges"}
        assert not any(r.loads for r in runtimes(merges, entries))
        extra = runtimes(file.fields, [*entries, ("output_extra.weight", BY_NAME["F32"], (256, 4096))])
        assert all("no output_extra.weight for this architecture" in r.problems for r in extra)
    merge_up_gate(tiny_moe, tmp_path / "merged.gguf")
    refused = "does not load: no merged up and gate experts for this architecture (quantkit split-up-gate)"
    assert verdicts(tmp_path / "merged.gguf") == [refused, LOADS]


def test_an_unchecked_verdict_is_marked(data: Path) -> None:
    """An importance matrix has no verdict; an architecture alone has one only on types."""
    field = Field.of("general.architecture", "qwen3")
    verdicts = runtimes({field.key: field}, [("a", BY_NAME["Q4_K"], (256, 4))])
    assert [r.loads for r in verdicts] == [False, False]
    assert [r.as_dict()["loads"] for r in verdicts] == [None, None]
    assert all(str(r).startswith("not checked: ") for r in verdicts)
    clip = Field.of("general.architecture", "clip")
    assert all(str(r).startswith("not checked: ") for r in runtimes({clip.key: clip}, []))


def test_provenance_and_per_layer_values(tmp_path: Path) -> None:
    fields = [
        *llama_fields(layers=3, quantize__imatrix__file="im.gguf", quantkit__quantize__recipe="Q4_K_M\nx = Q8_0"),
        Field.of("llama.attention.sliding_window", [8, 8, 16]),
        Field.of("llama.expert_count", 0),
    ]
    path = write_model(tmp_path / "m.gguf", {"output_norm.weight": ((4,), "F32")}, fields)
    summary = inspect(path)
    assert summary.provenance == (
        ("quantize.imatrix.file", "im.gguf"),
        ("quantkit.quantize.recipe", "Q4_K_M\nx = Q8_0"),
    )
    lines = [" ".join(line.split()) for line in run(path).output.splitlines()]
    assert "sliding window 8 (x 2), 16 (x 1)" in lines
    assert "quantkit.quantize.recipe Q4_K_M\\nx = Q8_0" in lines
    assert "experts 0" not in lines


def test_control_characters_of_a_file_are_escaped(tmp_path: Path) -> None:
    fields = [
        Field.of("general.architecture", "a\x1b[2J\nb"),
        Field.of("general.name", b"\xff\x07".decode("utf-8", "surrogateescape")),
        Field.of("general.weird\x1b", float("nan")),
        Field.of("general.file_type", "no number"),
        Field.of("tokenizer.ggml.tokens", ["\r", "a,b"]),
    ]
    path = tmp_path / "m.gguf"
    write_gguf(path, fields, [("evil\x1b[31m", (4,), BY_NAME["F32"], bytes(16))])
    result = run(path)
    assert result.exit_code == 0
    assert all(line.isprintable() for line in result.output.split("\n"))
    assert "a\\x1b[2J\\nb" in result.output
    assert run_json(path)["metadata"][2]["value"] == "nan"


def test_missing_data_is_only_allowed_with_header_only(tmp_path: Path) -> None:
    path = tmp_path / "head.gguf"
    path.write_bytes(layout_gguf(llama_fields(), [("a.weight", (1 << 20,), BY_NAME["F32"])]).header)
    result = run(path)
    assert result.exit_code == 1
    check_refused(result.output, "QK-E103 a.weight")
    assert len(result.output.splitlines()) == 1
    assert run_json(path, "--header-only")["total"]["weights"] == 1 << 20


def test_damaged_files_and_patterns(tmp_path: Path, tiny_moe: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(7))
    with refuses(FormatError, "QK-E102 broken.gguf"):
        inspect(path)
    assert run(path).exit_code == run(tmp_path / "none.gguf").exit_code == run(tmp_path).exit_code == 1
    with refuses(RecipeError, "QK-E206 51"):
        inspect(tiny_moe, tensors="nothing")
    assert run(tiny_moe, "--tensors", "(").exit_code == 2
    assert run().exit_code == 2


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_files_are_one_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(ATTACKS[name][0])
    result = run(path)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {path}: ")
    assert len(result.output.splitlines()) == 1


def test_metadata_of_unexpected_types(tmp_path: Path) -> None:
    fields = [
        Field.of("general.architecture", "llama"),
        Field.of("general.type", 3),
        Field.of("general.name", ["a"]),
        Field.of("general.file_type", True),
        Field.of("llama.block_count", float("nan")),
        Field.of("llama.expert_count", "many"),
        Field.of("llama.expert_used_count", [1, 2]),
        Field.of("llama.context_length", [7] * 5000),
        Field.of("tokenizer.ggml.tokens", 12),
    ]
    path = tmp_path / "odd.gguf"
    write_gguf(path, fields, [("a.weight", (4,), BY_NAME["F32"], bytes(16))])
    summary = inspect(path)
    assert (summary.kind, summary.name, summary.file_type, summary.active_values) == ("", "", None, None)
    lines = [" ".join(line.split()) for line in run(path).output.splitlines()]
    assert {"layers nan", "experts many", "experts used 1, 2"} <= set(lines)
    assert run_json(path)["facts"]["llama.block_count"] == "nan"


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "vocab.gguf"
    write_gguf(path, llama_fields(), [])
    assert inspect(path).total.bpw == 0
    assert run(path).exit_code == 0


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (0, "F32"),
        (15, "Q4_K_M"),
        (38, "MXFP4_MOE or MXFP4"),
        (39, "NVFP4"),
        (1024, "a mix of types without a preset number"),
        (1024 | 7, "Q8_0, guessed"),
        (9999, "unknown, guessed"),
        (500, "unknown"),
    ],
)
def test_file_types_have_names(number: int, name: str) -> None:
    assert file_type_name(number) == name


@pytest.mark.parametrize("values", [["a", "", "ünï"], [1, 2, 3], [True, False, True], [0.5, -1.0, 2.0]])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_first_items(values: list[Any], count: int) -> None:
    assert first_items(Field.of("k", values), count) == values[:count]


def test_first_items_of_nothing() -> None:
    assert first_items(Field.of("k", [], item_type=ValueType.STRING), 5) == []


def test_sums_of_a_model(tmp_path: Path) -> None:
    tensors = llama_tensors(layers=2)
    summary = inspect(write_model(tmp_path / "m.gguf", tensors))
    sizes = {n: int(np.prod(shape)) * (4 if t == "F32" else 2) for n, (shape, t) in tensors.items()}
    assert summary.total.nbytes == sum(sizes.values())
    by_class = {g.name: g for g in summary.by_class}
    assert by_class["attn_q"].nbytes == sizes["blk.0.attn_q.weight"] + sizes["blk.1.attn_q.weight"]
    assert by_class["attn_q"].types == ("F16",)
