"""libmtmd of llama.cpp b11434 opens the mmproj file of every class with a text model, and encodes an image or sound.

The files have the bytes of the reference's (test_mmproj.py), so it computes the same embeddings from both.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from libmtmd import Embeddings, Libmtmd
from tensor_names import rename_tensors
from test_mmproj import EXPECTED, ROUNDED, options_of

import checkpoints
from gguf_digests import digests
from libllama import LibllamaError
from quantkit.convert import ConvertOptions, convert, convert_mmproj, plan_mmproj
from quantkit.formats.gguf import open_gguf
from quantkit.formats.gguf.projectors import image_tokens, text_width

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("services_in_process")]

#: Checkpoints whose encoders the reference converts.
CONVERTED = [name for name, row in EXPECTED.items() if "error" not in row["f16"]]

#: Towers of the only width that the converter accepts: digests of the reference's file.
WIDE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/wide-sha256.json").read_text())
#: Width and height of their image: Step 3 VL does not cut squares into tiles.
SQUARE = (24, 24)
#: The class of their checkpoint, and another of the same encoders.
TWINS = {
    "wide-radio": ("RADIOModel", "NemotronH_Nano_VL_V2"),
    "wide-step3-vl": ("StepVLForConditionalGeneration", "Step3p7ForConditionalGeneration"),
}

#: Checkpoints whose files the library does not encode, also those of the reference: words of its message.
REFUSED = {
    # clip.cpp, line 3513, requires a norm by a name that gguf-py's tensor_mapping.py, line 2698, does not give it.
    **dict.fromkeys(("mm-granite-speech", "mm-granite-speech-plus"), "unable to find tensor a.blk.0.conv_norm.weight"),
    # clip.cpp, line 2805, requires the row of a token that the converter finds only outside of language_model.
    **dict.fromkeys(("mm-mistral3", "mm-pixtral"), "unable to find tensor v.token_embd.img_break"),
    # Scales of layers have one axis in files, three in its computation; real checkpoints have them.
    "mm-gemma3n": "GGML_ASSERT(ggml_can_repeat(b, a)) failed",
    # Embeddings of images include those of deepstack, embeddings of sounds do not.
    "mm-qwen3-omni-moe": "mismatch between vision and audio mmproj (n_embd_v = 192, n_embd_a = 64)",
    # Its code requires a bias, which config.json can turn off.
    "mm-lfm2-vl-feature": "unable to find tensor mm.1.bias",
    # The converter writes the number and the width of the layers of the only models; WIDE has those.
    **dict.fromkeys(("mm-nemotron-nano-vl", "mm-radio"), "unable to find tensor v.blk.3.attn_out.weight"),
    **dict.fromkeys(("mm-step3-vl", "mm-step3p7"), "unable to find tensor v.blk.3.attn_out.weight"),
}
#: Classes of which no file of the converter opens: its name of one tensor (test_the_name_alone_is_wrong).
REFUSED_CLASSES = {"GraniteSpeechForConditionalGeneration", "GraniteSpeechPlusForConditionalGeneration"}
#: Checkpoints whose text model is another's, of the same width: the reason.
OTHER_TEXTS = {
    "mm-clef": "the head of the decision is narrower than llama.cpp's",
    "mm-cogvlm": "llama.cpp requires the projections of the visual expert",
    "mm-gemma3n": "narrower than llama.cpp's Gemma 3n",
    "mm-gemma3n-unscaled": "narrower than llama.cpp's Gemma 3n",
    "mm-glm5-next": "two hyper-connections, of which llama.cpp has four",
    "mm-meralion2": "no class of text models",
    "mm-nemotron-nano-vl": "a vocabulary of another size",
    "mm-qwen3-tts": "fewer tokens than llama.cpp's Qwen3-TTS",
    "mm-radio": "a vocabulary of another size",
    "mm-ultravox": "no class of text models",
    "mm-youtu-vl": "without experts",
}
#: Its random weights exceed what f16 holds.
OUTTYPES = {"mm-pocket-tts": "f32"}

#: Inputs and the encoders for them.
KINDS = {"image": "vision", "audio": "audio"}
#: Its code has no computation of Gemma 3n's encoder for sound.
WITHOUT = {"mm-gemma3n-unscaled": {"audio"}}


@pytest.fixture(scope="module")
def other_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model of 64 values."""
    return convert_text("mm-qwen2-vl", tmp_path_factory.mktemp("text"))


def convert_text(name: str, folder: Path, checkpoint: Path | None = None) -> Path:
    """Convert the text model of a checkpoint."""
    source = checkpoint or checkpoints.write_checkpoint(name, folder)
    options = ConvertOptions(**checkpoints.describe(name).convert_keywords() | {"outtype": "bf16"})
    (path,) = convert(source, folder / "text.gguf", None, options).paths
    return path


@pytest.mark.parametrize("name", CONVERTED)
def test_the_library_encodes(name: str, other_text: Path, llama_bin: Path, tmp_path: Path) -> None:
    checkpoint, outtype = checkpoints.write_checkpoint(name, tmp_path), OUTTYPES.get(name, "f16")
    options = options_of(name, outtype)
    (mmproj,) = convert_mmproj(checkpoint, tmp_path / "mm.gguf", None, options).paths
    assert name in ROUNDED or digests(mmproj)["sha256"] == EXPECTED[name][outtype]["sha256"]
    text = other_text if name in OTHER_TEXTS else convert_text(name, tmp_path, checkpoint)
    if name in REFUSED:
        with pytest.raises(LibllamaError) as refusal:
            Libmtmd(llama_bin).encode(mmproj, text)
        assert REFUSED[name] in refusal.value.log
        return
    check(Libmtmd(llama_bin).encode(mmproj, text), mmproj, WITHOUT.get(name, set()))


def check(embeddings: Embeddings, mmproj: Path, without: set[str] | None = None) -> None:
    """Check that every encoder of a file has embeddings; ``without``: those that the library does not compute."""
    with open_gguf(mmproj) as file:
        kinds = {kind for kind, encoder in KINDS.items() if file.get(f"clip.has_{encoder}_encoder")}
        tokens = image_tokens({key: field.value for key, field in file.fields.items()}, file.tensors)
        width = text_width({key: field.value for key, field in file.fields.items()}, file.tensors)
    assert embeddings.keys() == kinds - (without or set())
    for x in embeddings.values():
        assert np.isfinite(x).all()
        assert x.shape[0] > 0
        assert x.std() > 0
        assert width is None or x.shape[1] % width == 0
    if "image" in embeddings:
        check_tokens(tokens, embeddings["image"].shape[0])


def check_tokens(expected: int | str | None, tokens: int) -> None:
    """Check the number of tokens that ``inspect`` shows against the library's."""
    if isinstance(expected, int):
        assert tokens == expected
        return
    assert expected is not None
    if match := re.match(r"(\d+) to (\d+)", expected):
        assert int(match[1]) <= tokens <= int(match[2])
    elif match := re.match(r"(\d+) per tile", expected):
        assert tokens >= int(match[1])


@pytest.mark.parametrize("name", WIDE)
def test_towers_of_real_width(name: str, other_text: Path, llama_bin: Path, tmp_path: Path) -> None:
    """The bytes are the reference's, and the other class of these encoders has the same tensors and keys."""
    checkpoint, options = checkpoints.write_checkpoint(name, tmp_path), ConvertOptions(outtype="f16")
    (mmproj,) = convert_mmproj(checkpoint, tmp_path / "mm.gguf", None, options).paths
    assert digests(mmproj)["sha256"] == WIDE[name]["f16"]["sha256"]
    check(Libmtmd(llama_bin).encode(mmproj, other_text, SQUARE), mmproj)
    architecture, twin = TWINS[name]
    config = checkpoint / "config.json"
    assert f'"{architecture}"' in config.read_text()
    plans = []
    for _ in range(2):
        plan = plan_mmproj(checkpoint, tmp_path / "plan.gguf", None, options)
        fields = {field.key: field.value for field in plan.fields}
        plans.append(([(t.name, t.type, t.shape, t.offset) for t in plan.tensors], fields))
        config.write_text(config.read_text().replace(f'"{architecture}"', f'"{twin}"'))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("name", [name for name in REFUSED if EXPECTED[name]["class"] in REFUSED_CLASSES])
def test_the_name_alone_is_wrong(name: str, other_text: Path, llama_bin: Path, tmp_path: Path) -> None:
    """The library encodes the file of a class that it refuses, once the tensors have the names that it asks for."""
    source, options = checkpoints.write_checkpoint(name, tmp_path), options_of(name, "f16")
    (mmproj,) = convert_mmproj(source, tmp_path / "mm.gguf", None, options).paths
    mended = rename_tensors(mmproj, tmp_path / "mended.gguf", lambda x: x.replace("conv_norm_var", "conv_norm"))
    check(Libmtmd(llama_bin).encode(mended, other_text), mended)


def test_every_class_is_encoded_or_refused_for_a_reason() -> None:
    classes = {EXPECTED[name]["class"] for name in CONVERTED if name not in REFUSED}
    classes |= {architecture for name in WIDE for architecture in TWINS[name]}
    assert {row["class"] for row in EXPECTED.values()} - classes == REFUSED_CLASSES
