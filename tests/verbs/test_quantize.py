"""The verb quantize: outputs and refusals."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from peer_cache import file_answer
from refusals import check_values, refuses

from conftest import DATA
from quantkit.cli import cli
from quantkit.compare import compare
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError, TypeNotSupported
from quantkit.formats.gguf import Field, open_gguf, write_gguf
from quantkit.formats.imatrix import read_imatrix, write_imatrix
from quantkit.formats.outputs import Output, part_path
from quantkit.kernels.formats import has_encoder
from quantkit.pipeline import encoding, jobs, row_slices
from quantkit.pipeline import run as run_module
from quantkit.pipeline import target as target_module
from quantkit.pipeline.choose import ModelFacts, Request, choose_types, iteration_order
from quantkit.pipeline.presets import PRESETS, Preset, preset_by_name
from quantkit.quantize import QuantizeOptions, plan_quantize, quantize
from quantkit.types import BY_NAME, TYPES
from small_models import ODD_SHAPES, llama_fields, llama_tensors, tensor_bytes, write_model, write_odd_shapes


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "llama.gguf", llama_tensors())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("threads", "piece", "job"), [(1, 1 << 17, 1 << 20), (2, 300, 1000), (5, 256, 256)])
def test_the_bytes_do_not_depend_on_threads_or_memory(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, piece: int, job: int
) -> None:
    full = tmp_path / "whole.gguf"
    quantize(llama, full, "Q4_K_M", threads=1)
    monkeypatch.setattr(encoding, "PIECE", piece)
    monkeypatch.setattr(jobs, "JOB", job)
    truncated_path = tmp_path / "cut.gguf"
    quantize(llama, truncated_path, "Q4_K_M", threads=threads)
    assert sha256(full) == sha256(truncated_path)


def test_the_plan_is_the_file(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    plan = plan_quantize(llama, out, "Q5_K_M")
    assert not out.exists()
    quantize(llama, out, "Q5_K_M")
    assert out.stat().st_size == plan.nbytes
    assert out.read_bytes()[: len(plan.shards[0].layout.header)] == plan.shards[0].layout.header
    with open_gguf(out) as file:
        assert {t.name: (t.type, t.offset) for t in file.tensors.values()} == {
            t.name: (t.type, t.offset) for t in plan.tensors
        }


def test_only_the_output_remains(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "o.gguf", "Q8_0")
    assert [p.name for p in tmp_path.iterdir()] == ["o.gguf"]


def test_measured_error_equals_the_decoded_difference(llama: Path, tmp_path: Path) -> None:
    from quantkit.kernels import dequantize

    out = tmp_path / "o.gguf"
    result = quantize(llama, out, "Q4_0", QuantizeOptions(pure=True), measure_error=True)
    with open_gguf(llama) as a, open_gguf(out) as b:
        x = a.data("blk.0.ffn_up.weight").view(np.float16).astype(np.float64).reshape(512, 256)
        y = dequantize(b.data("blk.0.ffn_up.weight").reshape(512, -1), b.tensors["blk.0.ffn_up.weight"].type, 256)
    sums = result.run.sums["blk.0.ffn_up.weight"]
    assert sums.square == pytest.approx((x**2).sum(), rel=1e-12)
    assert sums.error == pytest.approx(((x - y) ** 2).sum(), rel=1e-12)
    assert sums.weighted_error == sums.error


# ---------------------------------------------------------------- shards


def test_shards_have_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "one.gguf", "Q4_0")
    result = quantize(llama, tmp_path / "many.gguf", "Q4_0", QuantizeOptions(split_max_size=60_000))
    assert len(result.paths) > 3
    assert result.paths[0].name == f"many-00001-of-{len(result.paths):05d}.gguf"
    assert tensor_bytes(result.paths[1]) == tensor_bytes(tmp_path / "one.gguf")
    for path in result.paths:
        with open_gguf(path, header_only=True) as file:
            assert file.get("split.count") == len(result.paths)


def test_keep_split_keeps_the_shards(llama: Path, tmp_path: Path) -> None:
    split = quantize(llama, tmp_path / "src.gguf", "COPY", QuantizeOptions(split_max_size=300_000))
    result = quantize(split.paths[0], tmp_path / "kept.gguf", "Q8_0", QuantizeOptions(keep_split=True))
    assert len(result.paths) == len(split.paths)
    with open_gguf(split.paths[0]) as a, open_gguf(result.paths[0]) as b:
        assert {t.name: t.shard for t in a.tensors.values()} == {t.name: t.shard for t in b.tensors.values()}
    merged = quantize(split.paths[1], tmp_path / "merged.gguf", "Q8_0")
    assert tensor_bytes(merged.paths[0]) == tensor_bytes(result.paths[0])
    with open_gguf(merged.paths[0]) as file:
        assert file.get("split.count") is None


@pytest.mark.parametrize("type_name", ["COPY", "Q8_0"])
def test_files_of_image_models_keep_their_dimensions(tmp_path: Path, type_name: str) -> None:
    """Scalars, empty tensors, five dimensions, trailing ones; llama-quantize's form for what llama.cpp loads."""
    data = write_odd_shapes(tmp_path / "image.gguf", "wan")
    split = quantize(
        tmp_path / "image.gguf", tmp_path / "o.gguf", type_name, QuantizeOptions(split_max_size=1000)
    ).paths
    assert len(split) > 1
    with open_gguf(split[0]) as file:
        assert {name: file.tensors[name].shape for name in ODD_SHAPES} == ODD_SHAPES
        assert {name: file.data(name).tobytes() for name in ODD_SHAPES} == {name: data[name] for name in ODD_SHAPES}
        assert file.tensors["img.weight"].type.name == ("F32" if type_name == "COPY" else "Q8_0")
    result = compare(tmp_path / "image.gguf", split[0])
    assert {t.name: t.identical for t in result.tensors} == dict.fromkeys(ODD_SHAPES, True) | {
        "img.weight": type_name == "COPY"
    }
    write_odd_shapes(tmp_path / "text.gguf", "llama")
    quantize(tmp_path / "text.gguf", tmp_path / "p.gguf", type_name)
    with open_gguf(tmp_path / "p.gguf") as file:
        shapes = {name: file.tensors[name].shape for name in ODD_SHAPES}
    assert shapes == ODD_SHAPES | {"scale": (1,), "last": (2,)}
    text = CliRunner().invoke(cli, ["inspect", str(split[0])]).output
    assert {"scalar", "3 x 3 x 2 x 4 x 5"} <= set(re.split("  +", text))


# ---------------------------------------------------------------- metadata


def test_metadata(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    quantize(llama, out, "IQ4_XS", QuantizeOptions(override_kv=("general.name=str:Mine",)))
    with open_gguf(out) as file:
        assert file.get("general.file_type") == 30
        assert file.get("general.quantization_version") == 2
        assert file.get("general.name") == "Mine"
        assert file.get("quantkit.quantize.recipe").startswith("IQ4_XS\n--override-kv")
        assert len(file.get("quantkit.quantize.source.fingerprint")) == 64


def keys_of(path: Path, prefix: str = "quantkit.") -> dict[str, Any]:
    with open_gguf(path) as file:
        return {key: field.value for key, field in file.fields.items() if key.startswith(prefix)}


@pytest.fixture
def quantized(llama: Path, data: Path, tmp_path: Path) -> Path:
    """A file that was made with an importance matrix whose text is known, from folders that tell who made it."""
    home = tmp_path / "home" / "cook"
    home.mkdir(parents=True)
    imatrix = read_imatrix(data / "tiny-moe-imatrix.gguf")
    field = Field.of("quantkit.calibration.scale", 16)
    entries = {"blk.0.attn_q.weight": imatrix.entries["blk.0.attn_q.weight"]}
    matrix = replace(imatrix, entries=entries, datasets=[str(home / "text.txt")], extra={field.key: field})
    write_imatrix(home / "im.gguf", matrix)
    options = QuantizeOptions(imatrix=home / "im.gguf", override_kv=("general.name=str:Mine", "a.b=int:1"))
    quantize(llama, tmp_path / "q.gguf", "Q8_0", options)
    return tmp_path / "q.gguf"


def test_a_copy_keeps_the_sources_provenance(quantized: Path, tmp_path: Path) -> None:
    origin, imatrix = keys_of(quantized), keys_of(quantized, "quantize.imatrix")
    assert origin["quantkit.quantize.recipe"] == "Q8_0\n--override-kv general.name=str:Mine\n--override-kv a.b=int:1"
    assert len(origin["quantkit.quantize.imatrix.sha256"]) == 64
    assert origin["quantkit.calibration.scale"] == 16
    split = quantize(quantized, tmp_path / "s.gguf", "COPY", QuantizeOptions(split_max_size=300_000)).paths
    quantize(split[0], tmp_path / "joined.gguf", "COPY")
    quantize(tmp_path / "joined.gguf", tmp_path / "interleaved.gguf", "REPACK", QuantizeOptions(repack=True))
    for path, recipes, names in (
        (split[0], ["COPY\n--split-max-size 300000"], ["q.gguf"]),
        (tmp_path / "joined.gguf", ["COPY\n--split-max-size 300000", "COPY"], ["q.gguf", split[0].name]),
        (
            tmp_path / "interleaved.gguf",
            ["COPY\n--split-max-size 300000", "COPY", "COPY\n--repack"],
            ["q.gguf", split[0].name, "joined.gguf"],
        ),
    ):
        keys = keys_of(path)
        copy = {key: keys.pop(key) for key in list(keys) if key.startswith("quantkit.copy.")}
        assert keys == origin
        assert keys_of(path, "quantize.imatrix") == imatrix
        assert copy["quantkit.copy.recipe"] == recipes
        assert copy["quantkit.copy.source.name"] == names
        assert [len(digest) for digest in copy["quantkit.copy.source.fingerprint"]] == [64] * len(names)
        assert len(copy["quantkit.copy.version"]) == len(names)


def test_a_requantized_file_keeps_its_sources_provenance(quantized: Path, tmp_path: Path) -> None:
    quantize(quantized, tmp_path / "copy.gguf", "COPY")
    options = QuantizeOptions(allow_requantize=True)
    quantize(tmp_path / "copy.gguf", tmp_path / "again.gguf", "Q4_0", options)
    keys = keys_of(tmp_path / "again.gguf")
    before = keys_of(tmp_path / "copy.gguf")
    moved = {f"quantkit.source.{key.removeprefix('quantkit.')}": value for key, value in before.items()}
    assert moved["quantkit.source.quantize.recipe"].startswith("Q8_0")
    new_keys = {key: value for key, value in keys.items() if key not in moved}
    assert keys == new_keys | moved
    assert sorted(new_keys) == [
        f"quantkit.quantize.{k}" for k in ("recipe", "source.fingerprint", "source.name", "version")
    ]
    assert new_keys["quantkit.quantize.source.name"] == "copy.gguf"
    rule = replace(options, tensor_type=("ffn_down=q4_0",))  # COPY of all others
    quantize(quantized, tmp_path / "part.gguf", "COPY", rule)
    assert keys_of(tmp_path / "part.gguf")["quantkit.quantize.recipe"].startswith("COPY\n--allow-requantize\nffn_down")
    assert keys_of(tmp_path / "part.gguf")["quantkit.source.quantize.recipe"].startswith("Q8_0")


@pytest.mark.parametrize("type_name", ["COPY", "Q4_0"])
def test_no_provenance_writes_no_keys(quantized: Path, tmp_path: Path, type_name: str) -> None:
    options = QuantizeOptions(no_provenance=True, allow_requantize=True)
    quantize(quantized, tmp_path / "o.gguf", type_name, options)
    assert keys_of(tmp_path / "o.gguf") == {}
    assert keys_of(tmp_path / "o.gguf", "quantize.") == keys_of(quantized, "quantize.")


def test_provenance_names_files_not_folders(quantized: Path, llama: Path, tmp_path: Path) -> None:
    assert keys_of(quantized, "quantize.")["quantize.imatrix.file"] == "im.gguf"
    assert keys_of(quantized, "quantize.")["quantize.imatrix.dataset"] == "text.txt"
    assert b"cook" not in quantized.read_bytes()
    imatrix = tmp_path / "home" / "cook" / "im.gguf"
    exact = QuantizeOptions(imatrix=imatrix, no_provenance=True)
    quantize(llama, tmp_path / "exact.gguf", "Q8_0", exact)  # as llama-quantize
    assert keys_of(tmp_path / "exact.gguf", "quantize.")["quantize.imatrix.file"] == str(imatrix)[:127]


@pytest.mark.parametrize("kind", ["str", "string"])
def test_the_text_of_a_file_becomes_a_value(llama: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "home").mkdir()
    template, key = "{{ 'é' }}\n" * 1000, "tokenizer.chat_template"
    (tmp_path / "home" / "t.jinja").write_text(template)
    of_file = f"{key}={kind}:@{tmp_path / 'home' / 't.jinja'}"
    options = QuantizeOptions(override_kv=(of_file, f"x.author={kind}:@@me", f"x.long={kind}:{template}"))
    plan = plan_quantize(llama, tmp_path / "o.gguf", "COPY", options)
    assert any(f"{key}: the text of" in note and str(len(template)) in note for note in plan.notes)
    quantize(llama, tmp_path / "o.gguf", "COPY", options)
    with open_gguf(tmp_path / "o.gguf") as file:
        assert [file.get(k) for k in (key, "x.author", "x.long")] == [template, "@me", template]
        first, one, two, three = file.get("quantkit.copy.recipe")[0].split("\n")
    assert (first, one, two) == ("COPY", f"--override-kv {key}={kind}:@t.jinja", f"--override-kv x.author={kind}:@@me")
    assert len(three) < 150
    refused(ResourceError, "QK-E403 t.jinja", llama, tmp_path / "home" / "t.jinja", "COPY", options)
    for code, bad in (("QK-E405", tmp_path), ("QK-E401", tmp_path / "none"), ("QK-E120", Path("/dev/zero"))):
        bad_options = QuantizeOptions(override_kv=(f"{key}={kind}:@{bad}",))
        refused(RecipeError, f"{code} {bad}", llama, tmp_path / "p.gguf", "COPY", bad_options)
    (tmp_path / "b").write_bytes(b"\xff")
    binary = QuantizeOptions(override_kv=(f"{key}={kind}:@{tmp_path / 'b'}",))
    refused(RecipeError, "QK-E121 UTF-8", llama, tmp_path / "p.gguf", "COPY", binary)


def test_pruned_layers_are_removed_and_counted(tmp_path: Path) -> None:
    fields = llama_fields(layers=4, llama__attention__head_count_kv=[1, 2, 3, 4])
    source = write_model(tmp_path / "s.gguf", llama_tensors(layers=4), fields)
    out = tmp_path / "o.gguf"
    quantize(source, out, "COPY", QuantizeOptions(prune_layers=(1,)))
    before, after = tensor_bytes(source), tensor_bytes(out)
    assert after["blk.1.attn_q.weight"] == before["blk.2.attn_q.weight"]
    assert len(after) == len(before) - 8
    with open_gguf(out) as file:
        assert file.get("llama.block_count") == 3
        assert file.get("llama.attention.head_count_kv") == [1, 3, 4]


# ---------------------------------------------------------------- refusals


def refused(error: type[QuantkitError], refusal: str, *args: Any, **kwargs: Any) -> None:
    with refuses(error, refusal):
        quantize(*args, **kwargs)


def test_destructive_outputs_are_refused(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    out.write_bytes(b"precious")
    refused(ResourceError, "QK-E402 o.gguf --overwrite", llama, out, "Q8_0")
    refused(ResourceError, "QK-E403 llama.gguf", llama, llama, "Q8_0")
    (tmp_path / "link.gguf").symlink_to(llama)
    refused(ResourceError, "QK-E403 llama.gguf", llama, tmp_path / "link.gguf", "Q8_0", overwrite=True)
    refused(ResourceError, "QK-E401 o.gguf", llama, tmp_path / "none" / "o.gguf", "Q8_0")
    refused(ResourceError, "QK-E120", llama, tmp_path, "Q8_0")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(ResourceError, "QK-E120 pipe.gguf", llama, tmp_path / "pipe.gguf", "Q8_0", overwrite=True)
    assert out.read_bytes() == b"precious"
    quantize(llama, out, "Q8_0", overwrite=True)
    assert out.read_bytes()[:4] == b"GGUF"


def test_an_output_link_is_followed(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "o.gguf").symlink_to(tmp_path / "disk" / "real.gguf")
    quantize(llama, tmp_path / "o.gguf", "Q8_0")
    assert (tmp_path / "o.gguf").is_symlink()
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["real.gguf"]


def test_a_full_disk_is_detected_first(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module.shutil, "disk_usage", lambda _: type("U", (), {"free": 1000})())
    refused(ResourceError, "QK-E406 1000", llama, tmp_path / "o.gguf", "Q8_0")
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_an_error(llama: Path, tmp_path: Path) -> None:
    refused(ResourceError, "QK-E407 2", llama, tmp_path / "o.gguf", "Q8_0", threads=2, max_ram=1000)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type_name", ["Q4_K_M", "COPY", "F32"])
def test_a_nonfinite_value_is_located(tmp_path: Path, value: float, type_name: str) -> None:
    source = write_model(tmp_path / "s.gguf", llama_tensors())
    with open_gguf(source) as file:
        offset = file.tensors["blk.1.ffn_up.weight"].offset + (77 * 256 + 5) * 2
    with source.open("r+b") as raw:
        raw.seek(offset)
        raw.write(np.float16(value).tobytes())
    refused(FormatError, "QK-E108 blk.1.ffn_up.weight 77", source, tmp_path / "o.gguf", type_name)
    assert [p.name for p in tmp_path.iterdir()] == ["s.gguf"]


def test_a_shrinking_source_is_detected(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "s.gguf"
    source.write_bytes(llama.read_bytes())
    plan = plan_quantize(source, tmp_path / "o.gguf", "Q8_0")
    with source.open("r+b") as raw:
        raw.truncate(source.stat().st_size - 5000)
    with refuses(FormatError, "QK-E103 s.gguf"):
        run_module.run_plan(plan, threads=2, max_ram=1 << 28)
    assert [p.name for p in tmp_path.iterdir()] == ["s.gguf"]


def test_invalid_requests_are_refused(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    refused(TypeNotSupported, "QK-E301 Q4_K_X", llama, out, "Q4_K_X")
    refused(
        RecipeError,
        "QK-E202 --include-weights",
        llama,
        out,
        "Q8_0",
        QuantizeOptions(include_weights=("x",)),
    )
    refused(RecipeError, "QK-E212 --imatrix", llama, out, "Q2_K_S")
    refused(RecipeError, "QK-E212 --imatrix IQ2_XXS", llama, out, "IQ2_XXS")
    for t in (t for t in TYPES if t.imatrix == "required" and not has_encoder(t)):
        refused(TypeNotSupported, f"QK-E302 {t}", llama, out, t.name)
    for rules, type_name in (("mainline", "IQ4_KS"), ("ik", "TQ1_0")):
        refused(TypeNotSupported, f"QK-E301 --rules {rules}", llama, out, type_name, QuantizeOptions(rules=rules))
    refused(RecipeError, "QK-E203 --rules", llama, out, "Q8_0", QuantizeOptions(rules="other"))
    quantize(llama, out, "Q8_0")
    refused(TypeNotSupported, "QK-E209 output.weight Q8_0", out, tmp_path / "p.gguf", "Q4_K_M")
    assert not (tmp_path / "p.gguf").exists()


@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_every_preset_has_a_plan(preset: Preset, tiny_moe: Path, data: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(imatrix=data / "tiny-moe-imatrix.gguf")
    plan = plan_quantize(tiny_moe, tmp_path / "o.gguf", preset.name, options)
    assert plan.rules == ("ik" if preset.trees == "ik" else "mainline")
    if preset.base is not None:
        assert preset.base in {t.type for t in plan.tensors}
        if preset.trees == "both":
            second_plan = plan_quantize(tiny_moe, tmp_path / "o.gguf", preset.name, replace(options, rules="ik"))
            assert second_plan.rules == "ik"


def test_a_missing_encoder_stops_the_run_not_the_plan(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.pipeline.encoding.has_encoder", lambda t: t.name != "Q6_K")
    plan = plan_quantize(llama, tmp_path / "o.gguf", "Q4_K_M")
    check_values(run_module.refusal(plan) or "", "Q6_K", "Q4_K_M")
    refused(TypeNotSupported, "QK-E302 output.weight Q6_K Q4_K_M", llama, tmp_path / "o.gguf", "Q4_K_M")
    assert not any(tmp_path.iterdir())


def test_rules_of_ik(llama: Path, tmp_path: Path) -> None:
    """Layers are counted in the source's order, and the result says whose rules it follows."""
    options = QuantizeOptions(rules="ik")
    plan = plan_quantize(llama, tmp_path / "o.gguf", "Q3_K_M", options)
    source = list(plan.source.tensors.values())
    facts = ModelFacts.from_metadata(plan.source.get, source, ik=True)
    choices = choose_types(facts, source, Request(preset_by_name("Q3_K_M"), tree="ik"))
    assert {t.name: t.type for t in plan.tensors} == {c.name: c.type for c in choices}
    quantize(llama, tmp_path / "o.gguf", "Q3_K_M", options)
    with open_gguf(tmp_path / "o.gguf") as file:
        assert file.get("quantkit.quantize.recipe") == "Q3_K_M\n--rules ik"


def test_a_file_without_layers_is_quantized(tmp_path: Path) -> None:
    source = write_model(tmp_path / "s.gguf", {"token_embd.weight": ((256, 4), "F16")}, llama_fields(0))
    quantize(source, tmp_path / "o.gguf", "Q4_K_M")
    assert list(tensor_bytes(tmp_path / "o.gguf")) == ["token_embd.weight"]
    refused(RecipeError, "QK-E203 0", source, tmp_path / "p.gguf", "Q8_0", QuantizeOptions(prune_layers=(0,)))


def test_a_file_without_a_model_is_refused(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    refused(FormatError, "QK-E123 tiny-moe-imatrix.gguf", data / "tiny-moe-imatrix.gguf", out, "Q8_0")
    source = write_model(tmp_path / "s.gguf", llama_tensors(), [])
    refused(FormatError, "QK-E123 general.architecture", source, out, "Q8_0")
    quantize(source, out, "Q8_0", QuantizeOptions(override_kv=("general.architecture=str:llama",)))
    with open_gguf(out) as file:
        assert file.get("general.architecture") == "llama"


def test_metadata_of_wrong_type_is_named(tmp_path: Path) -> None:
    heads = "llama.attention.head_count"
    fields = [f for f in llama_fields() if f.key != heads]
    source = write_model(tmp_path / "s.gguf", llama_tensors(), [*fields, Field.of(heads, "x")])
    refused(FormatError, f"QK-E123 {heads} x", source, tmp_path / "o.gguf", "Q4_K_M")
    quantize(source, tmp_path / "o.gguf", "Q4_K_M", QuantizeOptions(override_kv=(f"{heads}=int:4",)))
    fields = [*llama_fields(), Field.of("general.file_type", "x")]
    source = write_model(tmp_path / "t.gguf", llama_tensors(), fields)
    refused(FormatError, "QK-E123 general.file_type x", source, tmp_path / "p.gguf", "COPY")


def test_overrides_affect_the_type_rules(tmp_path: Path) -> None:
    """As in llama-quantize, which loads the source with them: of four layers, only some get more bits."""
    source = write_model(tmp_path / "s.gguf", llama_tensors(4), llama_fields(4))
    plain = plan_quantize(source, tmp_path / "o.gguf", "Q4_K_M")
    options = QuantizeOptions(override_kv=("llama.block_count=int:32",))
    longer = plan_quantize(source, tmp_path / "o.gguf", "Q4_K_M", options)
    assert [t.type for t in plain.tensors] != [t.type for t in longer.tensors]


def test_a_copy_of_an_unnamed_file_type_is_marked_as_a_guess(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "o.gguf", "COPY")
    with open_gguf(tmp_path / "o.gguf") as file:
        assert file.get("general.file_type") == 1024 + 1  # LLAMA_FTYPE_GUESSED, MOSTLY_F16


def test_a_copied_nonfinite_value_is_reported(tmp_path: Path) -> None:
    norm = np.full(256, np.nan, np.float32).tobytes()
    write_gguf(tmp_path / "s.gguf", llama_fields(), [("output_norm.weight", (256,), BY_NAME["F32"], norm)])
    refused(FormatError, "QK-E108 0 F32", tmp_path / "s.gguf", tmp_path / "o.gguf", "Q8_0")


def test_no_resume_hint_without_written_data(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", fails)
    refused(ResourceError, "QK-E406", llama, tmp_path / "o.gguf", "Q8_0")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- interruption


class StopAfter:
    """An observer that interrupts the run after some tensors."""

    def __init__(self, tensors: int) -> None:
        self.left, self.reused = tensors, 0

    def on_resume(self, tensors: int, nbytes: int) -> None:
        self.reused = tensors

    def on_write(self, nbytes: int) -> None:
        pass

    def on_tensor(self, tensor: row_slices.PlannedTensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def interrupted(source: Path, out: Path, tensors: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, "Q4_K_M", threads=1, observer=StopAfter(tensors))
    assert not out.exists()


@pytest.mark.parametrize("tensors", [1, 5, 16])
def test_an_interrupted_run_is_resumed(llama: Path, tmp_path: Path, tensors: int) -> None:
    quantize(llama, tmp_path / "whole.gguf", "Q4_K_M")
    out = tmp_path / "o.gguf"
    interrupted(llama, out, tensors)
    observer = StopAfter(0)
    result = quantize(llama, out, "Q4_K_M", resume=True, observer=observer)
    assert result.run.resumed == observer.reused
    assert observer.reused >= tensors - 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.gguf", "whole.gguf"]
    assert tensor_bytes(out) == tensor_bytes(tmp_path / "whole.gguf")
    assert sha256(out) == sha256(tmp_path / "whole.gguf")


@pytest.mark.parametrize("tensors", range(1, 7))
def test_empty_tensors_are_resumed(tmp_path: Path, tensors: int) -> None:
    source, out, full = (tmp_path / name for name in ("s.gguf", "o.gguf", "whole.gguf"))
    write_odd_shapes(source, "wan")
    quantize(source, full, "Q8_0")
    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, "Q8_0", threads=1, observer=StopAfter(tensors))
    quantize(source, out, "Q8_0", resume=True)
    assert sha256(out) == sha256(full)


def test_damaged_bytes_are_encoded_again(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "whole.gguf", "Q4_K_M")
    out = tmp_path / "o.gguf"
    interrupted(llama, out, 8)
    plan = plan_quantize(llama, out, "Q4_K_M")
    with part_path(out).open("r+b") as raw:
        raw.seek(plan.tensors[0].offset)
        raw.write(b"\xaa" * 16)
    quantize(llama, out, "Q4_K_M", resume=True)
    assert sha256(out) == sha256(tmp_path / "whole.gguf")


@pytest.mark.parametrize("kernel_copies", [True, False])
def test_damaged_copies_are_copied_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_copies: bool
) -> None:
    """With copy_file_range, and where the kernel cannot do it (two file systems)."""
    if not kernel_copies:
        monkeypatch.setattr(target_module, "copy_range", lambda *args: False)
    quantize(llama, tmp_path / "whole.gguf", "COPY")
    assert tensor_bytes(tmp_path / "whole.gguf") == tensor_bytes(llama)
    out = tmp_path / "o.gguf"
    with pytest.raises(KeyboardInterrupt):
        quantize(llama, out, "COPY", threads=1, observer=StopAfter(8))
    plan = plan_quantize(llama, out, "COPY")
    with part_path(out).open("r+b") as raw:
        raw.seek(plan.tensors[0].offset)
        raw.write(b"\xaa" * 16)
    observer = StopAfter(0)
    quantize(llama, out, "COPY", resume=True, observer=observer)
    assert observer.reused == 6  # of the 8, one was damaged and one not yet in the journal
    assert sha256(out) == sha256(tmp_path / "whole.gguf")


def test_an_incomplete_journal_line_is_ignored(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "whole.gguf", "Q4_K_M")
    out = tmp_path / "o.gguf"
    interrupted(llama, out, 8)
    journal = run_module.journal_path(out)
    journal.write_bytes(journal.read_bytes()[:-7])
    quantize(llama, out, "Q4_K_M", resume=True)
    assert sha256(out) == sha256(tmp_path / "whole.gguf")


@pytest.mark.parametrize("line", [b"5", b"[]", b'{"tensor": "a"}', b'{"tensor": [], "crc32": 1, "sums": []}', b"\xff"])
@pytest.mark.parametrize("position", [0, 1])
def test_reading_stops_at_an_invalid_journal_line(llama: Path, tmp_path: Path, line: bytes, position: int) -> None:
    quantize(llama, tmp_path / "whole.gguf", "Q4_K_M")
    out = tmp_path / "o.gguf"
    interrupted(llama, out, 8)
    journal = run_module.journal_path(out)
    lines = journal.read_bytes().splitlines()
    journal.write_bytes(b"\n".join([*lines[:position], line, *lines[position:], b""]))
    quantize(llama, out, "Q4_K_M", resume=True)
    assert sha256(out) == sha256(tmp_path / "whole.gguf")


@pytest.mark.parametrize("left", [None, 1000])
def test_a_damaged_finished_part_is_encoded_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int | None
) -> None:
    """Killed between the last byte and the rename; then the file under the temporary name is cut or removed."""
    quantize(llama, tmp_path / "whole.gguf", "Q4_K_M")
    out = tmp_path / "o.gguf"

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target_module.Files, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            quantize(llama, out, "Q4_K_M")
    part = part_path(out)
    if left is None:
        part.unlink()
    else:
        os.truncate(part, left)
    assert quantize(llama, out, "Q4_K_M", resume=True).run.resumed == 0
    assert sha256(out) == sha256(tmp_path / "whole.gguf")


def test_a_different_request_is_not_resumed(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    interrupted(llama, out, 3)
    refused(ResourceError, "QK-E408 --resume", llama, out, "Q4_K_M")
    refused(ResourceError, "QK-E409 o.gguf.journal", llama, out, "Q5_K_M", resume=True)
    refused(
        ResourceError,
        "QK-E409 o.gguf.journal",
        llama,
        out,
        "Q4_K_M",
        QuantizeOptions(encoder="ik"),
        resume=True,
    )
    quantize(llama, out, "Q5_K_M", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["o.gguf"]


def test_another_encoder_is_not_resumed_even_without_provenance(llama: Path, tmp_path: Path) -> None:
    """The header and all sizes are the same: only the fingerprint distinguishes them."""
    plans = {
        encoder: plan_quantize(
            llama, tmp_path / "o.gguf", "IQ4_XS", QuantizeOptions(encoder=encoder, no_provenance=True)
        )
        for encoder in ("mainline", "ik")
    }
    assert plans["mainline"].shards[0].layout.header == plans["ik"].shards[0].layout.header
    assert plans["mainline"].fingerprint != plans["ik"].fingerprint
    refused(RecipeError, "QK-E203 best", llama, tmp_path / "o.gguf", "COPY", QuantizeOptions(encoder="best"))


def test_resume_without_an_earlier_run_starts_one(llama: Path, tmp_path: Path) -> None:
    assert quantize(llama, tmp_path / "o.gguf", "Q8_0", resume=True).run.resumed == 0


def test_two_runs_do_not_share_an_output(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    with Output(out):
        refused(ResourceError, "QK-E404 o.gguf", llama, out, "Q8_0", overwrite=True)


# ---------------------------------------------------------------- parity with llama-quantize

EXPECTED = json.loads((DATA / "llama-quantize.json").read_text())


@pytest.mark.parametrize("case", EXPECTED)
def test_tiny_moe_has_the_bytes_of_llama_quantize(data: Path, tiny_moe: Path, tmp_path: Path, case: str) -> None:
    """What scripts/make_expected.py recorded, so that machines without llama.cpp hold whole files to it too."""
    type_name, _, imatrix = case.partition("+")
    options = QuantizeOptions(imatrix=data / "tiny-moe-imatrix.gguf" if imatrix else None)
    quantize(tiny_moe, tmp_path / "o.gguf", type_name, options)
    digest = hashlib.sha256()
    for name, (tensor_type, raw) in tensor_bytes(tmp_path / "o.gguf").items():
        digest.update(f"{name} {tensor_type} ".encode() + raw)
    assert digest.hexdigest() == EXPECTED[case]


IK_EXPECTED = json.loads((DATA / "ik-quantize.json").read_text())


@pytest.mark.parametrize("case", IK_EXPECTED)
def test_tiny_moe_equals_ik_llama_quantizes_file(data: Path, tiny_moe: Path, tmp_path: Path, case: str) -> None:
    """Hashes of whole files, made by llama-quantize of ik_llama.cpp 8337e4cd3 built with -mavx2 -ffp-contract=off.

    As it reads no other, the importance matrix was a .dat, hidden, because the header has its path; and IQ2_KS has the
    bytes of --slow-iq2ks. (With FMA, as usual, its bytes differ a little: test_whole_files_equal_ik_llama_quantize.)
    """
    head, *words = case.split()
    type_name, _, imatrix = head.partition("+")
    dat = tmp_path / "i.dat"
    write_imatrix(dat, read_imatrix(data / "tiny-moe-imatrix.gguf"), "dat")
    settings: dict[str, Any] = {"imatrix": dat, "hide_imatrix": True} if imatrix else {}
    if words:
        settings[words[0].removeprefix("--").replace("-", "_")] = words[1] if len(words) > 1 else True
    options = QuantizeOptions(rules="ik", encoder="ik", no_provenance=True, **settings)
    quantize(tiny_moe, tmp_path / "o.gguf", type_name, options)
    assert sha256(tmp_path / "o.gguf") == IK_EXPECTED[case]


# ---------------------------------------------------------------- parity with the programs themselves

#: Whole files, with their metadata; the tensors of all presets are above.
CASES = [("Q4_K_M", False), ("Q4_K_M", True), ("Q8_0", True), ("IQ4_XS", False), ("MXFP4_MOE", True), ("IQ3_M", True)]


@pytest.mark.peer
@pytest.mark.parametrize(("type_name", "imatrix"), CASES)
def test_whole_files_equal_llama_quantize(
    llama_bin: Path, data: Path, tiny_moe: Path, tmp_path: Path, type_name: str, imatrix: bool
) -> None:
    flags = ["--imatrix", str(data / "tiny-moe-imatrix.gguf")] if imatrix else []
    expected, actual = tmp_path / "theirs.gguf", tmp_path / "ours.gguf"
    file_answer([llama_bin / "llama-quantize", *flags, tiny_moe, expected, type_name, "2"], expected)
    options = QuantizeOptions(imatrix=data / "tiny-moe-imatrix.gguf" if imatrix else None, no_provenance=True)
    quantize(tiny_moe, actual, type_name, options)
    assert tensor_bytes(actual) == tensor_bytes(expected)
    assert actual.read_bytes() == expected.read_bytes()


@pytest.mark.peer
def test_a_quantized_source_equals_llama_quantize(llama_bin: Path, smollm2: Path, tmp_path: Path) -> None:
    expected, actual = tmp_path / "theirs.gguf", tmp_path / "ours.gguf"
    file_answer([llama_bin / "llama-quantize", "--allow-requantize", smollm2, expected, "Q4_K_M", "2"], expected)
    quantize(smollm2, actual, "Q4_K_M", QuantizeOptions(allow_requantize=True, no_provenance=True))
    assert actual.read_bytes() == expected.read_bytes()


def _ik(ik_bin: Path, *args: object) -> None:
    libraries = [ik_bin.parent / "lib", ik_bin.parent.parent / "ik_llama_cpp_python.libs"]
    env = {"LD_LIBRARY_PATH": ":".join(map(str, libraries)), "PATH": "/usr/bin:/bin"}
    subprocess.run([ik_bin / "llama-quantize", *args], check=True, capture_output=True, env=env)


#: What the wheel, which is built with FMA, encodes without rounding twice; and options that change the header.
IK_CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    **{t: (t, (), {}) for t in ("Q8_0", "F16", "BF16", "F32", "COPY", "Q8_KV")},
    "imatrix": ("Q8_0", ("--imatrix", "I"), {"imatrix": "I"}),
    "hidden imatrix": (
        "Q8_0",
        ("--imatrix", "I", "--hide-imatrix", "--exclude-weights", "attn"),
        {"imatrix": "I", "hide_imatrix": True, "exclude_weights": ("attn",)},
    ),
    "overrides": (
        "Q8_0",
        ("--override-kv", "general.name=str:Mine", "--override-kv", "general.x=float:0.5"),
        {"override_kv": ("general.name=str:Mine", "general.x=float:0.5")},
    ),
    "types": (
        "Q8_0",
        ("--custom-q", "attn_q=bf16", "--ffn-gate-inp-type", "f16", "--token-embedding-type", "q8_KV"),
        {"custom_q": ("attn_q=bf16",), "ffn_gate_inp_type": "f16", "token_embedding_type": "Q8_KV"},
    ),
}


@pytest.mark.peer
@pytest.mark.parametrize("case", IK_CASES)
def test_whole_files_equal_ik_llama_quantize(
    ik_bin: Path, data: Path, tiny_moe: Path, tmp_path: Path, case: str
) -> None:
    """ik keeps the source's order of tensors and keys, which llama.cpp does not: --rules ik is about the file, too."""
    type_name, flags, options = IK_CASES[case]
    dat, actual, expected = tmp_path / "i.dat", tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    if "imatrix" in options:
        write_imatrix(dat, read_imatrix(data / "tiny-moe-imatrix.gguf"), "dat")
        options = {**options, "imatrix": dat}
    _ik(ik_bin, *(dat if flag == "I" else flag for flag in flags), tiny_moe, expected, type_name, "2")
    quantize(tiny_moe, actual, type_name, QuantizeOptions(rules="ik", no_provenance=True, **options))
    assert tensor_bytes(actual) == tensor_bytes(expected)
    assert actual.read_bytes() == expected.read_bytes()


@pytest.mark.peer
@pytest.mark.parametrize("type_name", ["Q8_0", "COPY"])
@pytest.mark.parametrize("name", ["glm4moe-moe", "gpt-oss-moe", "llama-dense", "phi3-dense", "qwen35moe-moe"])
def test_whole_files_of_the_zoo_equal_ik_llama_quantize(
    ik_bin: Path, zoo: Callable[[str], Path], tmp_path: Path, name: str, type_name: str
) -> None:
    _ik(ik_bin, zoo(name), tmp_path / "theirs.gguf", type_name, "2")
    quantize(zoo(name), tmp_path / "ours.gguf", type_name, QuantizeOptions(rules="ik", no_provenance=True))
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


@pytest.mark.peer
def test_kept_shards_equal_ik_llama_quantize(ik_bin: Path, tiny_moe: Path, tmp_path: Path) -> None:
    plain = QuantizeOptions(split_max_size=5_000_000, no_provenance=True)
    split = quantize(tiny_moe, tmp_path / "s.gguf", "COPY", plain).paths
    _ik(ik_bin, "--keep-split", split[0], tmp_path / "theirs.gguf", "Q8_0", "2")
    options = QuantizeOptions(rules="ik", keep_split=True, no_provenance=True)
    actual = quantize(split[0], tmp_path / "ours.gguf", "Q8_0", options).paths
    assert len(actual) == len(split) > 2
    for path in actual:
        assert path.read_bytes() == Path(str(path).replace("ours", "theirs")).read_bytes()


@pytest.mark.parametrize("type_name", ["Q8_0", "IQ4_KS"])
def test_a_file_by_iks_rules_keeps_the_order_of_the_source(llama: Path, tmp_path: Path, type_name: str) -> None:
    quantize(
        llama, tmp_path / "o.gguf", type_name, QuantizeOptions(rules="ik", override_kv=("llama.block_count=int:2",))
    )
    with open_gguf(llama) as source, open_gguf(tmp_path / "o.gguf") as file:
        assert list(file.tensors) == list(source.tensors) != iteration_order(source.tensors)
        assert list(file.fields)[: len(source.fields)] == list(source.fields)
        assert list(file.fields)[len(source.fields) :][:2] == ["general.quantization_version", "general.file_type"]


@pytest.mark.peer
def test_the_router_equals_ik_llama_quantize(ik_bin: Path, tiny_moe: Path, tmp_path: Path) -> None:
    expected, actual, without = (tmp_path / f"{n}.gguf" for n in ("theirs", "ours", "without"))
    _ik(ik_bin, "--ffn-gate-inp-type", "q8_0", tiny_moe, expected, "Q8_0", "2")
    quantize(tiny_moe, actual, "Q8_0", QuantizeOptions(ffn_gate_inp_type="q8_0"))
    quantize(tiny_moe, without, "Q8_0")
    a, b, c = tensor_bytes(actual), tensor_bytes(expected), tensor_bytes(without)
    routers = [name for name in a if name.endswith("ffn_gate_inp.weight")]
    assert len(routers) == 4
    assert all(a[name] == b[name] and a[name][0] == "Q8_0" for name in routers)
    assert {n: v for n, v in a.items() if n not in routers} == {n: v for n, v in c.items() if n not in routers}
