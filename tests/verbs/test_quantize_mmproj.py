"""quantize writes mmproj files as llama-quantize does, of every projector."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from libmtmd import Libmtmd
from peer_cache import program_answer
from refusals import refuses

import checkpoints
from quantkit.convert import ConvertOptions, convert, convert_mmproj
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import open_gguf
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, write_imatrix
from quantkit.pipeline.importance import NO_MATRIX
from quantkit.quantize import QuantizeOptions, plan_quantize, quantize

pytestmark = pytest.mark.usefixtures("services_in_process")

TYPES = ("Q4_K_M", "Q8_0", "Q6_K")
#: Rows of blocks of 256, which k-quants need; others fall back to smaller blocks.
WIDE = "mm-qwen3-vl-wide"
#: A checkpoint of each projector.
NAMES = (
    *(WIDE, "mm-audio-flamingo3", "mm-bailing-moe-v3-vl", "mm-cogvlm", "mm-deepseek-ocr", "mm-deepseek-ocr2"),
    *("mm-deepseek-v4", "mm-dots-ocr", "mm-exaone4.5", "mm-gemma3", "mm-gemma4", "mm-gemma4-unified", "mm-glm-asr"),
    *("mm-glm4v", "mm-glm5-next", "mm-glm5v", "mm-granite-speech", "mm-granite4-vision", "mm-internvl3", "mm-janus"),
    *("mm-kimi-vl", "mm-lfm2-vl", "mm-lighton-ocr", "mm-llama4", "mm-meralion2", "mm-mimo-v2", "mm-minicpm-v4.6"),
    *("mm-minimax-m3", "mm-mistral3", "mm-muse-glimmer", "mm-nemotron-nano-vl", "mm-paddleocr", "mm-phi4"),
    *("mm-pocket-tts", "mm-qwen2-audio", "mm-qwen2-vl", "mm-qwen2.5-omni", "mm-qwen3-asr", "mm-qwen3-omni-moe"),
    *("mm-qwen3-tts", "mm-smolvlm", "mm-ultravox", "mm-voxtral", "mm-youtu-vl"),
)
#: Those on which llama-quantize aborts: it counts three of the four axes of a convolution that it converts to F16.
ABORTED = (
    "mm-dots3-note",
    "mm-gemma3n",
    "mm-gemma4-audio",
    "mm-hunyuan-vl",
    "mm-lfm2-audio",
    "mm-radio",
    "mm-step3-vl",
)


@pytest.fixture
def mmproj(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The mmproj file of a checkpoint, as stored."""
    checkpoint = checkpoints.write_checkpoint(request.param, tmp_path)
    (path,) = convert_mmproj(
        checkpoint, tmp_path / "mmproj.gguf", None, ConvertOptions(outtype="bf16", allow_incomplete=True)
    ).paths
    return path


def with_mmproj(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test by checkpoints."""
    return pytest.mark.parametrize(("name", "mmproj"), [(n, n) for n in names], indirect=["mmproj"], ids=names)


def quantized(mmproj: Path, type_name: str) -> Path:
    """Quantize without quantkit's own keys."""
    (path,) = quantize(
        mmproj, mmproj.with_name(f"{type_name}.gguf"), type_name, QuantizeOptions(no_provenance=True)
    ).paths
    return path


@pytest.mark.peer
@with_mmproj(*NAMES)
def test_bytes_are_those_of_llama_quantize(name: str, mmproj: Path, llama_bin: Path, tmp_path: Path) -> None:
    """All types of wide rows; each of the others has one of the three."""
    expected = tmp_path / "expected.gguf"
    for type_name in TYPES if name == WIDE else TYPES[NAMES.index(name) % 3 :][:1]:
        command = [llama_bin / "llama-quantize", mmproj, expected, type_name, "2"]
        assert program_answer(command, [expected]).code == 0
        assert quantized(mmproj, type_name).read_bytes() == expected.read_bytes(), type_name


@pytest.mark.peer
@with_mmproj(*ABORTED)
def test_files_on_which_llama_quantize_aborts_are_quantized(name: str, mmproj: Path, llama_bin: Path) -> None:
    out = mmproj.with_name("expected.gguf")
    answer = program_answer([llama_bin / "llama-quantize", mmproj, out, "Q8_0", "2"], [out])
    assert "GGML_ASSERT(gguf_get_tensor_size" in answer.text
    with open_gguf(quantized(mmproj, "Q8_0")) as file, open_gguf(mmproj) as source:
        assert file.tensors.keys() == source.tensors.keys()
        assert {t.type.name for t in file.tensors.values()} <= {"Q8_0", "F16", "F32"}


@pytest.mark.peer
@pytest.mark.parametrize("name", ["mm-gemma4-audio", "mm-hunyuan-vl", "mm-lfm2-audio", WIDE])
def test_libmtmd_encodes_quantized_files(name: str, llama_bin: Path, tmp_path: Path) -> None:
    checkpoint = checkpoints.write_checkpoint(name, tmp_path)
    options = ConvertOptions(**checkpoints.describe(name).convert_keywords() | {"outtype": "bf16"})
    (text,) = convert(checkpoint, tmp_path / "text.gguf", None, options).paths
    exact, small = (
        Libmtmd(llama_bin).encode(convert_mmproj(checkpoint, tmp_path / f"{kind}.gguf", kind).paths[0], text)
        for kind in ("f16", "Q8_0")
    )
    assert exact.keys() == small.keys()
    for kind, x in exact.items():
        error = np.square(small[kind] - x).sum() / np.square(x).sum()
        assert 0 < error < 0.01, kind


@with_mmproj("mm-qwen2-vl")
def test_encoders_have_no_importance_matrix(name: str, mmproj: Path) -> None:
    entry = ImatrixEntry(np.ones((1, 64), np.float32), np.array([1]))
    imatrix = mmproj.with_name("imatrix.gguf")
    write_imatrix(imatrix, Imatrix(imatrix, {"blk.0.attn_q.weight": entry}, ["calibration.txt"], 1, 512))
    out = mmproj.with_name("out.gguf")
    with refuses(FormatError, f"QK-E119 {mmproj.name} --imatrix"):
        plan_quantize(mmproj, out, "Q4_K_M", QuantizeOptions(imatrix=imatrix))
    with refuses(RecipeError, "QK-E212 IQ2_XS"):
        plan_quantize(mmproj, out, "IQ2_XS", QuantizeOptions(pure=True))
    assert NO_MATRIX in plan_quantize(mmproj, out, "Q8_0").notes
    assert NO_MATRIX not in plan_quantize(mmproj, out, "F16").notes
