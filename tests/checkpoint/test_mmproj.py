"""The encoders of every checkpoint are converted to the bytes of convert_hf_to_gguf.py --mmproj."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from refusals import refuses

import checkpoints
from gguf_digests import differences, digests
from quantkit.checkpoint.registry import MMPROJ
from quantkit.cli import cli
from quantkit.convert import (
    ENCODERS_NOTE,
    ConvertOptions,
    convert_mmproj,
    encoder_classes,
    plan_convert,
    plan_mmproj,
)
from quantkit.convert import convert as convert_checkpoint
from quantkit.errors import FormatError, QuantkitError, TypeNotSupported
from quantkit.formats.gguf import open_gguf
from quantkit.formats.gguf.mmproj import projectors
from quantkit.inspect import inspect
from quantkit.quantize import quantize

pytestmark = pytest.mark.usefixtures("services_in_process")

EXPECTED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/mmproj-sha256.json").read_text())
OUTTYPES = ("f32", "f16", "bf16", "q8_0", "auto")
#: The only tensors that differ, in the last bit: torch's square root, which depends on its CPU.
ROUNDED = {
    **dict.fromkeys(("mm-granite-speech", "mm-granite-speech-plus"), r"a\.blk\.\d+\.conv_norm_var\.(weight|bias)"),
    "mm-lfm2-audio": r"a\.blk\.\d+\.conv_norm\.(weight|bias)",
}

#: Encoders in FP8, which the reference does not decode: their bytes are those of the decoded weights.
FP8 = {"mm-qwen3-vl-fp8-towers"}
#: Text in AWQ, which the reference does not decode.
AWQ = {"mm-qwen3-vl-awq"}
#: Encoders of fewer layers than the converter writes for the only models.
SHALLOW = {"mm-nemotron-nano-vl", "mm-radio", "mm-step3-vl", "mm-step3p7"}


def options_of(name: str, outtype: str) -> ConvertOptions:
    """Return the options of the encoders' conversion that the reference needs."""
    native = "--mistral-format" in checkpoints.describe(name).options
    return ConvertOptions(outtype=outtype, mistral_format=native, allow_incomplete=name in SHALLOW)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A checkpoint, generated once for all tests of it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    yield checkpoints.write_checkpoint(request.param, folder)
    shutil.rmtree(folder)


def with_checkpoint(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test by checkpoints."""
    return pytest.mark.parametrize(
        ("name", "checkpoint"), [(n, n) for n in names], indirect=["checkpoint"], ids=names, scope="module"
    )


@with_checkpoint(*(name for name in EXPECTED if name not in FP8))
def test_the_bytes_are_the_references(name: str, checkpoint: Path, tmp_path: Path) -> None:
    row, wrong = EXPECTED[name], {}
    assert checkpoints.digest(checkpoint) == row["checkpoint"], "the reference converted another checkpoint"
    for outtype in OUTTYPES:
        expected = row[outtype]
        if "error" in expected:
            with pytest.raises(QuantkitError):
                plan_mmproj(checkpoint, tmp_path, None, options_of(name, outtype))
            continue
        (path,) = convert_mmproj(checkpoint, tmp_path, None, options_of(name, outtype), overwrite=True).paths
        assert path.name == expected["file"]
        with open_gguf(path) as file:
            difference = differences(expected, digests(path), list(file.tensors))
            assert set(projectors(file)) <= set(encoder_classes()[row["class"]])
        parts = [part for part in difference.split("; ") if part]
        if not all(re.fullmatch(f"{ROUNDED.get(name, '')} differs", part) for part in parts):
            wrong[outtype] = difference
    assert wrong == {}


@with_checkpoint(*EXPECTED)
def test_the_text_model_is_the_references(name: str, checkpoint: Path, tmp_path: Path) -> None:
    expected, options = EXPECTED[name]["text"], checkpoints.describe(name).convert_keywords()
    if "error" in expected:
        if name not in AWQ:
            with refuses(TypeNotSupported, "QK-E304"):
                plan_convert(checkpoint, tmp_path, None, ConvertOptions(**options))
        return
    (path,) = convert_checkpoint(checkpoint, tmp_path, None, ConvertOptions(**options | {"outtype": "bf16"})).paths
    assert path.name == expected["file"]
    with open_gguf(path) as file:
        assert differences(expected, digests(path), list(file.tensors)) == ""


@with_checkpoint(*FP8)
def test_encoders_in_fp8_are_decoded(name: str, checkpoint: Path, tmp_path: Path) -> None:
    floats = checkpoints.decode_weights(checkpoints.describe(name))
    plain = checkpoints.write_description(floats, tmp_path)
    actual, expected = (
        digests(convert_mmproj(folder, tmp_path / f"{i}.gguf", None, ConvertOptions(outtype="f16")).paths[0])
        for i, folder in enumerate((checkpoint, plain))
    )
    assert (actual["infos"], actual["tensors"]) == (expected["infos"], expected["tensors"])


def test_every_class_is_converted() -> None:
    """The classes of the reference's map of --mmproj (68), each with a checkpoint."""
    assert {row["class"] for row in EXPECTED.values()} <= MMPROJ.keys()
    assert len(MMPROJ) >= 68


@with_checkpoint("mm-qwen2-vl")
@pytest.mark.parametrize("type_name", ["Q6_K", "Q4_0"])
def test_a_quantized_file_is_that_of_quantize(type_name: str, name: str, checkpoint: Path, tmp_path: Path) -> None:
    """Both programs in one pass: conversion as stored, then llama-quantize."""
    (plain,) = convert_mmproj(checkpoint, tmp_path / "plain.gguf").paths
    two, one = (
        digests(result.paths[0])
        for result in (
            quantize(plain, tmp_path / "two.gguf", type_name),
            convert_mmproj(checkpoint, tmp_path / "one.gguf", type_name),
        )
    )
    assert (one["infos"], one["tensors"]) == (two["infos"], two["tensors"])


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["convert", *map(str, arguments)])


@with_checkpoint("mm-qwen2-vl")
def test_one_command_writes_the_text_model_and_its_encoders(name: str, checkpoint: Path, tmp_path: Path) -> None:
    row, out = EXPECTED[name], tmp_path / "model.gguf"
    options = ("--pre", checkpoints.describe(name).vocab["pre"])
    result = convert(checkpoint, out, "--outtype", "bf16", "--mmproj", *options)
    assert result.exit_code == 0, result.output
    assert ENCODERS_NOTE not in result.stderr
    assert digests(out)["sha256"] == row["text"]["sha256"]
    assert digests(tmp_path / row["f16"]["file"])["sha256"] == row["f16"]["sha256"]
    arguments = (checkpoint, tmp_path / "q4_0.gguf", "Q4_0", *options, "--mmproj", tmp_path / "mm.gguf")
    result = convert(*arguments, "--mmproj-type", "q8_0", "--json")
    assert result.exit_code == 0, result.output
    assert digests(tmp_path / "mm.gguf")["sha256"] == row["q8_0"]["sha256"]
    record = json.loads(result.stdout)
    paths = [file["path"] for part in (record, record["mmproj"]) for file in part["files"]]
    assert paths == [str(arguments[1]), str(tmp_path / "mm.gguf")]


@pytest.mark.parametrize(
    "name", ["mm-qwen2-vl", "mm-gemma3", "mm-qwen3-omni-moe", "mm-voxtral", "llama-class-adds-bos"]
)
def test_a_text_model_without_its_encoders_has_a_note(name: str, tmp_path: Path) -> None:
    source = checkpoints.write_checkpoint(name, tmp_path)
    options = ConvertOptions(**checkpoints.describe(name).convert_keywords())
    notes = plan_convert(source, tmp_path / "x.gguf", None, options).notes
    assert (ENCODERS_NOTE in notes) == name.startswith("mm-")


@with_checkpoint("mm-qwen2-vl")
def test_the_encoders_alone(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """By --mmproj-only, and by the reference's own command line."""
    row = EXPECTED[name]
    for arguments in (
        (checkpoint, tmp_path / "a.gguf", "f16", "--mmproj-only"),
        ("--mmproj", checkpoint, "--outtype", "f16", "--outfile", tmp_path / "b.gguf"),
        ("--mmproj-only", "--mmproj-type", "f16", checkpoint, tmp_path / "c.gguf"),
    ):
        result = convert(*arguments)
        assert result.exit_code == 0, result.output
    assert {digests(path)["sha256"] for path in tmp_path.glob("*.gguf")} == {row["f16"]["sha256"]}
    assert len(list(tmp_path.glob("*.gguf"))) == 3


@with_checkpoint("mm-qwen2-vl")
@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (("out.gguf", "--mmproj-type", "f16"), 2),
        (("out.gguf", "Q4_0", "--mmproj", "out.gguf"), 1),
        (("out.gguf", "--mmproj", "exists.gguf"), 1),
        (("out.gguf", "f16", "--mmproj-only", "--mmproj", "other.gguf"), 2),
        (("out.gguf", "Q4_0", "--mmproj-only", "--pure"), 2),
        (("out.gguf", "--mmproj", "--mmproj-type", "Q9"), 1),
    ],
)
def test_wrong_command_lines_write_nothing(
    arguments: tuple[str, ...], exit_code: int, name: str, checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("exists.gguf").write_bytes(b"x")
    result = convert(checkpoint, *arguments, *(() if "Q4_0" in arguments else ("--pre", "qwen2")))
    assert result.exit_code == exit_code, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["exists.gguf"]


def replace_file(checkpoint: Path, folder: Path, file: str, text: str | None) -> Path:
    """Return a copy of a checkpoint with another file; None: without it."""
    copy = folder / "copy"
    shutil.copytree(checkpoint, copy)
    if text is None:
        (copy / file).unlink()
    else:
        (copy / file).write_text(text)
    return copy


@with_checkpoint("mm-qwen2-vl")
@pytest.mark.parametrize(
    ("file", "text", "refusal"),
    [
        ("preprocessor_config.json", None, "QK-E112 image_mean"),
        ("preprocessor_config.json", "[]", "QK-E111 preprocessor_config.json"),
        ("preprocessor_config.json", '{"image_mean": [NaN, 0, 0], "image_std": [1, 1, 1]}', "QK-E112 image_mean"),
        ("preprocessor_config.json", '{"image_mean": "x", "image_std": [1]}', "QK-E112 image_mean"),
        ("processor_config.json", "{", "QK-E111 processor_config.json"),
        ("processor_config.json", '{"image_processor": {"image_std": null}}', "QK-E112 image_std"),
        ("preprocessor_config.json", '{"image_mean": [1e999, 0, 0], "image_std": [1, 1, 1]}', "QK-E112 image_mean"),
        ("preprocessor_config.json", '{"image_mean": [0.5], "image_std": [1, 1, 1]}', "QK-E112 image_mean"),
        ("preprocessor_config.json", '{"image_mean": [0, 0, 0], "image_std": [1, 0, 1]}', "QK-E112 image_std"),
        ("preprocessor_config.json", '{"max_pixels": 0}', "QK-E112 max_pixels"),
        ("preprocessor_config.json", '{"min_pixels": true}', "QK-E112 min_pixels"),
        ("preprocessor_config.json", '{"size": {"longest_edge": -1}}', "QK-E112 longest_edge"),
        ("preprocessor_config.json", "\0", "QK-E111 preprocessor_config.json"),
        ("config.json", '{"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": 3}', "QK-E112"),
    ],
)
def test_a_broken_preprocessor_is_one_error(
    file: str, text: str | None, refusal: str, name: str, checkpoint: Path, tmp_path: Path
) -> None:
    with refuses(FormatError, refusal):
        plan_mmproj(replace_file(checkpoint, tmp_path, file, text), tmp_path)


@with_checkpoint("mm-qwen2-vl")
def test_integers_for_channels_have_a_note(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """The reference writes them as integers, too, and libmtmd opens no such file."""
    settings = json.loads((checkpoint / "preprocessor_config.json").read_text())
    text = json.dumps(settings | {"image_mean": [0, 0, 0], "image_std": [1.0, 1.0, 1.0]})
    notes = plan_mmproj(replace_file(checkpoint, tmp_path, "preprocessor_config.json", text), tmp_path).notes
    assert ["image_mean" in note for note in notes] == [True]
    assert plan_mmproj(checkpoint, tmp_path).notes == ()


@with_checkpoint("mm-qwen2-vl")
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_encoders_cut_by_a_shard_are_one_error(damage: str, name: str, checkpoint: Path, tmp_path: Path) -> None:
    """The encoders are in both shards."""
    shutil.copytree(checkpoint, copy := tmp_path / "copy")
    shard = copy / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    assert b'"visual.' in data
    assert b'"visual.' in (copy / "model-00001-of-00002.safetensors").read_bytes()
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(b"" if damage == "empty" else data[:-1])
    with refuses(FormatError, "QK-E103|QK-E104", shard.name):
        plan_mmproj(copy, tmp_path / "out.gguf")
    result = convert(copy, tmp_path / "text.gguf", "Q4_0", "--pre", "qwen2", "--mmproj")
    assert result.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@with_checkpoint("mm-qwen2-vl")
def test_tensors_that_are_missing_are_named(name: str, checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    text_only = replace_file(
        checkpoint, tmp_path, "config.json", json.dumps(config | {"architectures": ["LlamaForCausalLM"]})
    )
    with refuses(TypeNotSupported, "QK-E304 LlamaForCausalLM"):
        plan_mmproj(text_only, tmp_path)


#: Patterns of tensors that a checkpoint lacks, and what its encoders then lack in the file.
INCOMPLETE = [
    ("mm-qwen2-vl", r"visual\.blocks\.2\.", "v.blk.2.*"),
    ("mm-qwen2-vl", r"visual\.blocks\.\d", "v.blk.0.*"),
    ("mm-qwen2-vl", r"visual\.blocks\.1\.norm1\.bias", "v.blk.1.ln1.bias"),
    ("mm-qwen2-vl", r"visual\.merger\.mlp\.0\.weight", "mm.0.weight"),
    ("mm-gemma3", r"mm_soft_emb_norm", "mm.soft_emb_norm.weight"),
    ("mm-internvl3", r"vision_model\.encoder\.layers\.0\.", "v.blk.0.*"),
    ("mm-voxtral", r"audio_tower\.layers\.1\.fc2\.weight", "a.blk.1.ffn_down.weight"),
    ("mm-gemma4-audio", r"audio_tower\.layers\.1\.", "a.blk.1.*"),
    ("mm-dots3-note", r"vision_encoder\.blocks\.1\.attn\.proj", "v.blk.1.attn_out.weight"),
]


@pytest.mark.parametrize(("name", "pattern", "lacks"), INCOMPLETE)
def test_encoders_without_layers_or_tensors_are_refused(name: str, pattern: str, lacks: str, tmp_path: Path) -> None:
    description = checkpoints.describe(name)
    shapes = {key: list(shape) for key, shape in checkpoints.expand(description.tensors) if not re.search(pattern, key)}
    checkpoint = checkpoints.write_description(replace(description, tensors=shapes), tmp_path)
    with refuses(FormatError, "QK-E105", lacks, "--allow-incomplete"):
        plan_mmproj(checkpoint, tmp_path / "out.gguf")
    with refuses(FormatError, "QK-E105", lacks):
        plan_mmproj(checkpoint, tmp_path / "out.gguf", "Q8_0")
    plan_mmproj(checkpoint, tmp_path / "out.gguf", None, ConvertOptions(allow_incomplete=True))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mm-gemma4", ["pooling_kernel_size"]),
        ("mm-qwen2.5-vl", ["window_size"]),
        ("mm-gemma4-unified", []),
        ("mm-pixtral", []),
    ],
)
def test_settings_that_llama_cpp_fixes_have_a_note(name: str, settings: list[str], tmp_path: Path) -> None:
    checkpoint = checkpoints.write_checkpoint(name, tmp_path)
    notes = plan_mmproj(checkpoint, tmp_path / "out.gguf").notes
    assert re.findall(r"vision_config has (\w+)", "\n".join(notes)) == settings
    if settings:
        with refuses(TypeNotSupported, f"QK-E305 {settings[0]}"):
            plan_mmproj(checkpoint, tmp_path / "out.gguf", None, ConvertOptions(strict=True))


def test_layers_that_config_json_claims_are_refused_at_once(tmp_path: Path) -> None:
    description = checkpoints.describe("mm-qwen2-vl")
    vision = description.config["vision_config"] | {"depth": 10**9}
    changed = replace(description, config=description.config | {"vision_config": vision})
    with refuses(FormatError, "QK-E105", "v.blk.3.*"):
        plan_mmproj(checkpoints.write_description(changed, tmp_path), tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("mm-mistral3", "v.token_embd.img_break"),
        ("mm-lfm2-vl-feature", "mm.1.bias"),
        ("mm-granite-speech", "a.blk.*.conv_norm.weight"),
        ("mm-lfm2-vl", ""),
    ],
)
def test_files_that_libmtmd_does_not_open_have_a_note(name: str, lacks: str, tmp_path: Path) -> None:
    notes = plan_mmproj(checkpoints.write_checkpoint(name, tmp_path), tmp_path / "out.gguf").notes
    assert any(lacks in note for note in notes) if lacks else notes == ()


@with_checkpoint("mm-qwen2-vl")
def test_inspect_shows_the_encoders(name: str, checkpoint: Path, tmp_path: Path) -> None:
    (path,) = convert_mmproj(checkpoint, tmp_path / "mm.gguf").paths
    facts = {fact.label: fact.value for fact in inspect(path).facts}
    assert facts["projector"] == "qwen2vl_merger"
    assert facts["text embedding length"] == 64
    assert facts["tokens per image"] == "8 to 4096, by size"
