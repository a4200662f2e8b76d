"""A text model and its mmproj file as one checkpoint: that from which both were converted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from loadable import STEP_SIZES, describe_loadable
from refusals import check_refused, refuses

import checkpoints
from quantkit.checkpoint.hf_encoders import NOT_EXPORTED
from quantkit.checkpoint.mmproj import read_preprocessor
from quantkit.checkpoint.models import step
from quantkit.checkpoint.registry import ARCHITECTURES, HF_ENCODERS, MMPROJ, NATIVE_MMPROJ
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert, convert_mmproj
from quantkit.errors import QuantkitError, TypeNotSupported
from quantkit.export import ExportOptions, export, exported_encoders, plan_export, run_export
from quantkit.formats.gguf import Field, open_gguf, write_gguf
from quantkit.formats.safetensors import read_checkpoint

pytestmark = pytest.mark.usefixtures("services_in_process")

#: Checkpoint -> the classes it may be exported as, the default first.
CLASSES = {
    "mm-qwen2-vl": ["Qwen2VLForConditionalGeneration"],
    "mm-qwen2.5-vl": ["Qwen2_5_VLForConditionalGeneration"],
    "mm-qwen3-vl": ["Qwen3VLForConditionalGeneration"],
    "mm-qwen3-vl-wide": ["Qwen3VLForConditionalGeneration"],
    "mm-qwen3-vl-moe": ["Qwen3VLMoeForConditionalGeneration"],
    "mm-qwen3.5": ["Qwen3_5ForConditionalGeneration"],
    "mm-qwen3.5-moe": ["Qwen3_5MoeForConditionalGeneration"],
    "mm-gemma3": ["Gemma3ForConditionalGeneration"],
    "mm-mistral3": ["Mistral3ForConditionalGeneration"],
    "mm-pixtral": ["LlavaForConditionalGeneration"],
    "mm-llama4": ["Llama4ForConditionalGeneration"],
    "mm-lfm2-vl": ["Lfm2VlForConditionalGeneration"],
    "mm-idefics3": ["Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"],
    "mm-smolvlm": ["Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"],
    "mm-glm4v": ["Glm4vForConditionalGeneration"],
    "mm-glm4v-moe": ["Glm4vMoeForConditionalGeneration"],
    "mm-glm-ocr": ["GlmOcrForConditionalGeneration"],
    "mm-intern-s1": ["InternVLForConditionalGeneration", "InternVLChatModel"],
    "mm-internvl3": ["InternVLForConditionalGeneration", "InternVLChatModel"],
    "mm-kimi-vl": ["KimiVLForConditionalGeneration"],
    "mm-kimi-k2.5": ["KimiK25ForConditionalGeneration"],
    "mm-minimax-m3": ["MiniMaxM3SparseForConditionalGeneration"],
    "mm-gemma4": ["Gemma4ForConditionalGeneration"],
    "mm-gemma4-audio": ["Gemma4ForConditionalGeneration"],
    "mm-gemma4-unified": ["Gemma4UnifiedForConditionalGeneration"],
    "mm-exaone4.5": ["Exaone4_5_ForConditionalGeneration"],
    "mm-granite4-vision": ["Granite4VisionForConditionalGeneration"],
    "mm-granite-speech": ["GraniteSpeechForConditionalGeneration"],
    "mm-granite-speech-plus": ["GraniteSpeechPlusForConditionalGeneration"],
    "mm-deepseek-ocr": ["DeepseekOCRForCausalLM"],
    "mm-unlimited-ocr": ["UnlimitedOCRForCausalLM"],
    "mm-deepseek-ocr2": ["DeepseekOCR2ForCausalLM"],
    "mm-deepseek-v4": ["DeepseekV4ForCausalLM"],
    "mm-dots-ocr": ["DotsOCRForCausalLM"],
    "mm-youtu-vl": ["YoutuVLForConditionalGeneration"],
    "mm-bailing-moe-v3-vl": ["BailingMoeV3VLForConditionalGeneration"],
    "mm-dots3-note": ["Dots3NoteForCausalLM"],
    "mm-step3-vl": ["StepVLForConditionalGeneration"],
    "mm-step3p7": ["Step3p7ForConditionalGeneration"],
    "mm-glm-asr": ["GlmasrModel"],
    "mm-qwen3-asr": ["Qwen3ASRForConditionalGeneration"],
    "mm-lighton-ocr": ["LightOnOCRForConditionalGeneration"],
    "mm-minicpm-v4.6": ["MiniCPMV4_6ForConditionalGeneration"],
    "mm-voxtral": ["VoxtralForConditionalGeneration"],
    "mm-qwen2-audio": ["Qwen2AudioForConditionalGeneration"],
    "mm-audio-flamingo3": ["AudioFlamingo3ForConditionalGeneration"],
}
#: Classes whose encoders are exported as those of another class.
SAME_ENCODERS = {
    "Dots3NoteForConditionalGeneration": "Dots3NoteForCausalLM",
    "InternVisionModel": "InternVLForConditionalGeneration",
    "MiniMaxM3VLForConditionalGeneration": "MiniMaxM3SparseForConditionalGeneration",
    "OpenJevModel": "Qwen3_5ForConditionalGeneration",
    "Qwen2VLModel": "Qwen2VLForConditionalGeneration",
}
#: Checkpoints of remote code, which are exported as a class of transformers unless theirs is requested.
REQUESTED = {"mm-internvl3": "InternVLChatModel"}
#: Other text models beside InternViT or MoonViT, and the rows of their classes.
TEXTS = {
    "qwen3": ["InternVLForConditionalGeneration-Qwen3", "InternVLChatModel-Qwen3"],
    "qwen3-moe": ["InternVLForConditionalGeneration-Qwen3Moe", "InternVLChatModel-Qwen3Moe"],
    "internlm2": ["InternVLChatModel-InternLM2"],
    "glm-moe-dsa": ["Glm5vForConditionalGeneration"],
}
#: Encoders of checkpoints whose text model has other values: quantized, or with scaled norms.
ENCODERS = {
    "mm-deepseek-v4": ("vision.", "aligner.", "image_"),
    "mm-dots3-note": ("vision_encoder.", "audio_encoder."),
}
#: Tensors of a checkpoint that transformers' class lacks, and that neither file has: beginnings of names.
UNUSED = (
    "vision_tower.vision_model.head.",
    "model.vision_tower.vision_model.head.",
    "mtp.",
    "siglip2.vision_model.embeddings.unknown.",
)


def contents(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of each tensor of a checkpoint, without batch norms, whose statistics are lost."""
    stored = {
        name: t
        for shard in read_checkpoint(folder)
        for name, t in shard.items()
        if not name.startswith(UNUSED) and ".batch_norm." not in name
    }
    return {
        name: (t.dtype, tuple(t.shape), t.path.read_bytes()[t.offset : t.offset + t.nbytes])
        for name, t in stored.items()
    }


def both_files(name: str, folder: Path, outtype: str = "bf16") -> tuple[Path, Path, Path]:
    """Return a checkpoint, its text model and its mmproj file."""
    checkpoint = checkpoints.write_description(describe_loadable(name), folder)
    options = ConvertOptions(outtype="bf16", **checkpoints.describe(name).convert_keywords())
    (text,) = convert(checkpoint, folder / "text.gguf", None, options).paths
    (mmproj,) = convert_mmproj(checkpoint, folder / "mmproj.gguf", outtype).paths
    return checkpoint, text, mmproj


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return both_files("mm-qwen2-vl", tmp_path_factory.mktemp("qwen"))


@pytest.mark.parametrize("name", CLASSES)
def test_the_checkpoint_is_that_of_the_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_STEP_SIZES", STEP_SIZES)
    checkpoint, text, mmproj = both_files(name, tmp_path)
    out = tmp_path / "out"
    export(text, out, ExportOptions(mmproj=mmproj, architecture=REQUESTED.get(name)))
    before, after = contents(checkpoint), contents(out)
    if name in ENCODERS:
        before, after = (
            {key: x for key, x in values.items() if key.startswith(ENCODERS[name])} for values in (before, after)
        )
    assert after == before
    expected = REQUESTED.get(name, CLASSES[name][0])
    assert json.loads((out / "config.json").read_text())["architectures"] == [expected]
    stored, exported = map(read_preprocessor, (checkpoint, out))
    for key in {"image_mean", "image_std"} & stored.keys():
        assert np.float32(exported[key]).tolist() == np.float32(stored[key]).tolist()
    options = ConvertOptions(outtype="bf16", **checkpoints.describe(name).convert_keywords())
    (text_again,) = convert(out, tmp_path / "text-2.gguf", None, options).paths
    (mmproj_again,) = convert_mmproj(out, tmp_path / "mmproj-2.gguf", "bf16").paths
    for file, copy in ((text, text_again), (mmproj, mmproj_again))[name in ENCODERS :]:
        assert tensors_of(copy) == tensors_of(file)
    assert clip_keys(mmproj_again) == clip_keys(mmproj)


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in TEXTS.items() for row in rows])
def test_encoders_beside_several_classes_of_text_models(name: str, row: str, tmp_path: Path) -> None:
    description = checkpoints.describe(name)
    width = description.config["hidden_size"]
    if row.startswith("Glm5v"):
        encoders, part = checkpoints.describe("mm-glm5v"), "text_config"
        shapes = {"mm_projector.linear_2.weight": [width, 256], "mm_projector.linear_2.bias": [width]}
    else:
        encoders, part = checkpoints.describe("mm-internvl3"), "llm_config"
        shapes = {"mlp1.1.weight": [width, 256], "mlp1.3.weight": [width, width]}
        shapes |= {f"mlp1.{i}.bias": [width] for i in (1, 3)}
    config = encoders.config | {part: encoders.config[part] | {"hidden_size": width}}
    encoders = replace(encoders, config=config, tensors=encoders.tensors | shapes)
    checkpoint = checkpoints.write_description(encoders, tmp_path)
    (mmproj,) = convert_mmproj(checkpoint, tmp_path / "m.gguf", "bf16").paths
    options = ConvertOptions(outtype="bf16", **description.convert_keywords())
    (text,) = convert(checkpoints.write_description(description, tmp_path), tmp_path / "t.gguf", None, options).paths
    out = tmp_path / "out"
    export(text, out, ExportOptions(mmproj=mmproj, architecture=row))
    towers = {key: x for key, x in contents(checkpoint).items() if key.startswith(("vision_tower.", "mm_projector."))}
    assert towers.items() <= contents(out).items()
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [row.partition("-")[0]]
    assert plan_export(text, tmp_path / "x", ExportOptions(mmproj=mmproj, architecture=row.partition("-")[0]))
    (text_again,) = convert(out, tmp_path / "t-2.gguf", None, options).paths
    (mmproj_again,) = convert_mmproj(out, tmp_path / "m-2.gguf", "bf16").paths
    assert tensors_of(text_again) == tensors_of(text)
    assert (tensors_of(mmproj_again), clip_keys(mmproj_again)) == (tensors_of(mmproj), clip_keys(mmproj))


def tensors_of(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return type, shape and bytes of each tensor of a GGUF file."""
    with open_gguf(path) as file:
        return {name: (t.type.name, t.shape, file.data(name).tobytes()) for name, t in file.tensors.items()}


def clip_keys(path: Path) -> dict[str, bytes]:
    with open_gguf(path) as file:
        return {key: field.encode() for key, field in file.fields.items() if key.startswith("clip.")}


def test_both_files_count_as_the_source(qwen: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, text, mmproj = qwen
    arguments = ["export", text, tmp_path / "out", "--mmproj", mmproj, "--dry-run", "--json"]
    result = json.loads(CliRunner().invoke(cli, list(map(str, arguments))).stdout)
    assert result["source"]["files"] == [str(text), str(mmproj)]
    sizes = [len(data) for path in (text, mmproj) for _, _, data in tensors_of(path).values()]
    assert result["source"]["bytes"] == sum(sizes)


def test_every_class_has_a_checkpoint() -> None:
    assert {name for rows in (CLASSES, TEXTS) for names in rows.values() for name in names} == HF_ENCODERS.keys()
    classes = exported_encoders()
    assert {name for names in classes.values() for name in names} == HF_ENCODERS.keys()
    rows = [line.split() for line in CliRunner().invoke(cli, ["export", "--list"]).stdout.splitlines()]
    (row,) = [row for row in rows if row[:1] == ["mistral3"]]
    assert row[-1] == "Mistral3ForConditionalGeneration"


def test_every_projector_has_a_class_or_a_reason() -> None:
    """And no reason is of a projector that convert does not write, or beside an architecture that has a class."""
    exported = {kind for row in HF_ENCODERS.values() for kind in row.projectors}
    converted = {kind for row in (*MMPROJ.values(), *NATIVE_MMPROJ.values()) for kind in row.projectors}
    reasons = {place.partition(" ")[0] for place in NOT_EXPORTED}
    assert converted == exported | reasons
    pairs = {f"{row.projector} {ARCHITECTURES[row.text_class or name].arch}" for name, row in HF_ENCODERS.items()}
    assert not pairs & NOT_EXPORTED.keys()


def test_every_class_has_a_row_or_a_reason() -> None:
    """By its own name, or because one of its projectors has a reason, or its files are another's."""
    names = {row.architecture or name for name, row in HF_ENCODERS.items()}
    archs = {name: ARCHITECTURES[name].arch if name in ARCHITECTURES else "" for name in MMPROJ}
    places = {
        name: {place for kind in row.projectors for place in (kind, f"{kind} {archs[name]}")}
        for name, row in MMPROJ.items()
    }
    assert {name for name in MMPROJ.keys() - names if not places[name] & NOT_EXPORTED.keys()} == SAME_ENCODERS.keys()
    assert {name.partition("-")[0] for name in SAME_ENCODERS.values()} <= names


def test_another_class_of_the_same_files(tmp_path: Path) -> None:
    checkpoint, text, mmproj = both_files("mm-smolvlm", tmp_path)
    options = ExportOptions(mmproj=mmproj, architecture="SmolVLMForConditionalGeneration")
    export(text, tmp_path / "out", options)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["vision_config"]["model_type"]) == ("smolvlm", "smolvlm_vision")
    assert contents(tmp_path / "out") == contents(checkpoint)


@pytest.mark.parametrize(("name", "rounded"), [("mm-gemma3-4x", True), ("mm-gemma3", False)])
def test_a_tensor_in_f16_of_every_file_is_named_if_it_lost_bits(name: str, rounded: bool, tmp_path: Path) -> None:
    checkpoint, text, mmproj = both_files(name, tmp_path)
    plan = plan_export(text, tmp_path / "out", ExportOptions(mmproj=mmproj))
    run_export(plan)
    before, after = contents(checkpoint), contents(tmp_path / "out")
    projection = "multi_modal_projector.mm_input_projection_weight"
    assert any(projection in note and "F16" in note for note in plan.plan.notes) == rounded
    assert [key for key in before if before[key] != after[key]] == [projection] * rounded
    values, exported = (
        (np.frombuffer(x[projection][2], "<u2").astype("<u4") << 16).view("<f4") for x in (before, after)
    )
    assert np.array_equal(exported, values.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(("outtype", "dtypes"), [("f16", {"BF16"}), ("f32", {"BF16"}), ("q8_0", {"BF16"})])
def test_other_types_of_mmproj_files(outtype: str, dtypes: set[str], tmp_path: Path) -> None:
    """Values that BF16 holds are BF16 again; quantized ones are rounded to it, like those of the text model."""
    checkpoint, text, mmproj = both_files("mm-gemma3", tmp_path, outtype)
    export(text, tmp_path / "out", ExportOptions(mmproj=mmproj))
    before, after = contents(checkpoint), contents(tmp_path / "out")
    assert before.keys() == after.keys()
    tower = [name for name in after if name.startswith("vision_tower.")]
    assert {after[name][0] for name in tower} == dtypes
    if outtype == "f32":
        assert [name for name in tower if after[name] != before[name]] == []


def test_a_value_that_bf16_does_not_hold_keeps_its_type(qwen: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, text, mmproj = qwen
    changed = copy_with(mmproj, tmp_path / "changed.gguf", values={"v.blk.0.ln1.weight": 1 + 2**-20})
    export(text, tmp_path / "out", ExportOptions(mmproj=changed))
    after = contents(tmp_path / "out")
    assert after["visual.blocks.0.norm1.weight"][0] == "F32"
    assert set(np.frombuffer(after["visual.blocks.0.norm1.weight"][2], np.float32)) == {np.float32(1 + 2**-20)}
    assert after["visual.blocks.0.norm2.weight"][0] == "BF16"


def copy_with(
    source: Path, out: Path, *, values: dict[str, float] | None = None, keys: dict[str, Any] | None = None,
    without: str = "", renamed: tuple[str, str] = ("", ""),
) -> Path:  # fmt: skip
    """Return a copy of a GGUF file with other values of F32, other keys, or without a tensor."""
    with open_gguf(source) as file:
        fields = {**file.fields, **{key: Field.of(key, value) for key, value in (keys or {}).items()}}
        tensors = []
        for name, info in file.tensors.items():
            data = file.data(name).tobytes()
            if values and name in values:
                data = np.full(info.nbytes // 4, values[name], np.float32).tobytes()
            if name != without:
                tensors.append((renamed[1] if name == renamed[0] else name, info.shape, info.type, data))
        write_gguf(out, list(fields.values()), tensors)
    return out


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"without": "v.blk.1.attn_q.weight"}, "QK-E105"),
        ({"without": "v.blk.1.ln1.weight"}, "QK-E105 v.blk.1.ln1.weight"),
        ({"without": "v.patch_embd.weight.1"}, "QK-E105"),
        ({"without": "mm.0.weight"}, "QK-E105 mm.0.weight"),
        ({"renamed": ("v.blk.1.ln1.weight", "v.blk.1.strange.weight")}, "QK-E305 v.blk.1.strange.weight"),
        ({"renamed": ("v.blk.1.ln1.weight", "v.blk.9.ln1.weight")}, "QK-E107"),
        ({"keys": {"clip.vision.block_count": 4}}, "QK-E105 v.blk.3"),
        ({"keys": {"clip.vision.strange": True}}, "QK-E305 clip.vision.strange"),
        ({"keys": {"clip.vision.projection_dim": 65}}, "QK-E305 clip.vision.projection_dim"),
        ({"keys": {"clip.vision.patch_size": "x"}}, "QK-E123 clip.vision.patch_size"),
        ({"keys": {"clip.projector_type": "gemma3"}}, "QK-E304 gemma3 qwen2vl"),
        ({"keys": {"general.architecture": "llama", "general.type": "model"}}, "QK-E207"),
    ],
)
def test_a_file_that_would_not_come_back_is_refused(
    change: dict[str, Any], refusal: str, qwen: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    _, text, mmproj = qwen
    changed = copy_with(mmproj, tmp_path / "changed.gguf", **change)
    with refuses(QuantkitError, refusal):
        export(text, tmp_path / "out", ExportOptions(mmproj=changed))
    assert not (tmp_path / "out").exists()


def test_refusals_of_the_command(qwen: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, text, mmproj = qwen

    def refused(refusal: str, *arguments: object) -> None:
        result = CliRunner().invoke(cli, ["export", *map(str, arguments)])
        check_refused(result.output, refusal)
        assert not (tmp_path / "out").exists()

    refused("QK-E306 mmproj.gguf", mmproj, tmp_path / "out")
    refused("QK-E207 text.gguf", text, tmp_path / "out", "--mmproj", text)
    refused(
        "QK-E304 Qwen2VLForConditionalGeneration",
        *(text, tmp_path / "out", "--mmproj", mmproj, "--class", "Gemma3ForConditionalGeneration"),
    )
    wide = Path(__file__).parents[1] / "data/tiny-moe-bf16.gguf"
    refused("QK-E207 64", wide, tmp_path / "out", "--mmproj", mmproj)


@pytest.mark.parametrize(
    ("name", "projector"),
    [
        ("mm-janus", "janus_pro"),
        ("mm-gemma3n", "gemma3nv"),
        ("mm-minicpm-v4.6-4x", "minicpmv4_6"),
        ("mm-sarashina2-vision", "qwen2vl_merger llama"),
        ("mm-clef", "qwen3vl_merger clef"),
    ],
)
def test_a_class_without_a_row_is_named(name: str, projector: str, tmp_path: Path) -> None:
    """With what the files lack."""
    _, text, mmproj = both_files(name, tmp_path)
    with refuses(TypeNotSupported, f"QK-E304 {projector}") as error:
        plan_export(text, tmp_path / "out", ExportOptions(mmproj=mmproj))
    assert NOT_EXPORTED[projector] in error.value.message
