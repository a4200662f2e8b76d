"""Every checkpoint that can be exported: converted, exported and converted again, it is the same file.

What is exported of a plain checkpoint is that checkpoint, tensor for tensor.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from refusals import refuses
from test_convert_goldens import options_of

import checkpoints
import vocabs
from quantkit.checkpoint.export.classes import find_class
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Stored, read_f32, size_of
from quantkit.checkpoint.registry import ARCHITECTURES
from quantkit.checkpoint.registry import CLASSES as HF_CLASSES
from quantkit.convert import convert
from quantkit.errors import TypeNotSupported
from quantkit.export import export, plan_export
from quantkit.formats.gguf import GGUFFile, TensorInfo, open_gguf
from quantkit.formats.safetensors import StoredTensor, read_checkpoint
from quantkit.kernels import dequantize
from quantkit.options.export import ExportOptions

pytestmark = pytest.mark.usefixtures("services_in_process")

#: Checkpoints of which no file holds all, and how what they become is refused.
REFUSED = {
    "bert-classifier": "QK-E305 pooler.dense",
    "gemma-embedding-dense": "QK-E305 gemma-embedding.dense_2_feat_in",
    "granite-switch": "QK-E304 graniteswitch",
    **dict.fromkeys(("hrm-text", "hrm-text-stacks"), "QK-E304 hrm_text"),
    **dict.fromkeys(("laya", "julia"), "QK-E305 classifier.out_proj.bias"),
    "lfm2.5-audio-tokenizer": "QK-E305 none",
    "mistral-native-moe": "QK-E305 deepseek2.attention.temperature_scale",
    "mistral-native-v13": "QK-E305 llama.rope.scaling.yarn_log_multiplier",
    "wavtokenizer": "QK-E304 wavtokenizer-dec",
}
#: In Mistral's own format, which is exported as transformers' class.
NATIVE = [name for name in checkpoints.NAMES if name.startswith("mistral-native") and name not in REFUSED]
NAMES = [name for name in checkpoints.NAMES if name not in (*REFUSED, *NATIVE)]
#: Checkpoints whose pre-tokenizer no tokenizer.json can say: their own files are taken.
OWN_TOKENIZER = {"modernbert-classifier", "modernbert-classifier-sparse"}
ADD_BOS, ADD_EOS, ADD_SEP = (f"tokenizer.ggml.add_{kind}_token" for kind in ("bos", "eos", "sep"))
#: Files of ranks and tokenizer.model do not say what is put around texts, tokenizer.json does: what runtimes do anyway.
WITH_BOS = {ADD_BOS: (None, True)}
WITHOUT_BOS = {ADD_BOS: (None, False), ADD_EOS: (None, False)}
#: Checkpoint -> keys that are different after all, with both values.
KEYS: dict[str, dict[str, tuple[Any, Any]]] = {
    **dict.fromkeys(
        (
            *(
                "byte-fallback",
                "ernie4.5",
                "ernie4.5-fused",
                "ernie4.5-moe",
                "gemma",
                "gemma2",
                "gemma3",
                "gemma3n-deep",
            ),
            "llama-tied",
            *("bitnet", "gemma3n", "internlm3", "jamba", "minicpm", "minicpm3", "mistral", "nemotron", "orion"),
            *("paddleocr", "pangu", "phi3", "phi3-long", "phimoe", "user-pieces"),
            *("baichuan", "deci", "deci-7b", "gemma-embedding", "grok-1", "internlm2", "openelm", "plamo", "xverse"),
        ),
        WITH_BOS,
    ),
    **dict.fromkeys(
        ("hunyuan-moe", "kimi-k2", "kimi-k2-ct-int4", "kimi-k2-ct-mxfp4", "kimi-linear", "qwen"), WITHOUT_BOS
    ),
    **dict.fromkeys(("mt5", "t5", "t5-encoder", "umt5"), {ADD_EOS: (None, True), ADD_SEP: (None, False)}),
    "xlm-roberta": {ADD_EOS: (None, True), ADD_SEP: (None, True)},
    # The class of the text model does not read what is never to be said: places of pictures and sounds.
    "gemma4-unified": {"tokenizer.ggml.suppress_tokens": ([258883, 258882], None)},
    # No key is what runtimes take for this.
    "camembert": {"tokenizer.ggml.normalizer.lowercase": (None, True)},
    # Its template for pairs has nothing between them; ours does not either, and says so.
    "llama-class-drops-bos": {ADD_SEP: (None, False)},
    # Only a tokenizer.json says what is put around texts, and that letters lose case.
    **dict.fromkeys(
        ("bert-masked", "bert-masked-sparse"),
        {
            **{ADD_BOS: (None, True), "tokenizer.ggml.normalizer.lowercase": (None, True)},
        },
    ),
}
#: Tensors of checkpoints that no file of the text model has, and layers that some converters leave out.
OTHER_PARTS = (
    *("visual.", "vision", "multi_modal_projector.", "mm_projector.", "mtp.", "mtp_layers.", "audio_tower."),
    *("talker.", "code2wav.", "pooler.", "cls.predictions.", "model.aligner.", "model.generation_", "model.merger."),
    *("sam_model.", "model.projector.", "vqmodel.", "vit.", "masked_embedding.", ".rotary_emb.inv_freq"),
)
#: Biases of routers that converters leave out, or move.
DROPPED = {"grove-moe": ".mlp.expert_bias", "sarvam-moe": ".expert_bias"}
#: Checkpoints whose tensors are fused where transformers has several, or the reverse.
FUSED = {"ernie4.5-fused", "exaone4.5", "qwen3-omni-moe", "rwkv7-plain"}
#: Checkpoints whose names are not those that transformers gives them, and some without their last layers.
OTHER_NAMES = {
    *FUSED,
    *("bitnet", "gemma3-vl", "granite-moe-swa", "janus", "llama-model", "llava", "minicpm-v4.6", "mistral3"),
}
#: Prefixes of names that either the checkpoint or the class of transformers has.
WRAPPED = {
    **{
        "gemma3n": "language_model.",
        "gemma3n-deep": "language_model.",
        "minimax-m3": "language_model.",
        "neobert": "model.",
    },
    **dict.fromkeys(("bert-masked", "bert-masked-sparse", "jina-bert"), "bert."),
}
#: Tensors that have taken what config.json said: multipliers, products of two, rows of zeros for what is not used.
CHANGED = {
    "falcon-h1": r"_proj\.weight$|lm_head|embed_tokens",
    "kimi-k3": r"_res_(norm|proj)\.weight$",
    "dots3-note": r"\.(q|kv)_a_layernorm\.weight$",
    **dict.fromkeys(("gemma3n", "gemma3n-deep"), r"embed_tokens_per_layer"),
    **dict.fromkeys(
        ("roberta", "roberta-sparse", "roberta-classifier", "xlm-roberta", "xlm-roberta-classifier"),
        r"position_embeddings\.weight$",
    ),
    **dict.fromkeys(("nomic-bert-moe", "nomic-bert-xlm"), r"experts\.bias$"),
    "chameleon": r"_norm\.(weight|bias)$",
    "jais": r"lm_head|wte|slopes",
}
#: Quantized ones whose architecture no plain one has, or whose blocks a file keeps.
QUANTIZED_ALONE = {"deepseek-v4", "gpt-oss-mxfp4", "qwen3-moe-nvfp4"}
#: Checkpoints of a class that is exported as another: one of the same tensors and keys, or the text model of a whole.
CLASSES = {
    **dict.fromkeys(("bert-masked", "bert-masked-sparse", "camembert"), "BertModel"),
    **dict.fromkeys(("internlm3", "janus", "llama-model", "llava"), "LlamaForCausalLM"),
    "bitnet": "BitNetForCausalLM",
    "ernie4.5-fused": "Ernie4_5ForCausalLM",
    "gemma3-vl": "Gemma3ForCausalLM",
    "gemma4-unified": "Gemma4ForCausalLM",
    "grok-1": "GrokForCausalLM",
    "jina-bert": "JinaBertModel",
    "minicpm-v4.6": "Qwen3_5ForCausalLM",
    "minimax-m3": "MiniMaxM3SparseForConditionalGeneration",
    "mpt": "MptForCausalLM",
    "mt5": "T5ForConditionalGeneration",
    "phimoe": "PhimoeForCausalLM",
    "qwen3-omni-moe": "Qwen3VLMoeForConditionalGeneration",
    "rwkv7-plain": "RWKV7ForCausalLM",
    "sarvam-moe": "BailingMoeV2ForCausalLM",
    "step3p5": "Step3p7ForConditionalGeneration",
}
LAST_LEFT_OUT = {"deepseek-v3", "deepseek-v3-sparse", "glm4-moe-no-nextn", "qwen3.5-moe-no-nextn"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # pytest would keep gigabytes of them


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, folder: Path) -> None:
    description = checkpoints.describe(name)
    checkpoint = checkpoints.write_checkpoint(name, folder / "drawn")
    for outtype in outtypes(description):
        output = there_and_back(description, checkpoint, outtype, folder / outtype)
        config = json.loads((output / "config.json").read_text())
        assert config["architectures"] == [CLASSES.get(name, description.config["architectures"][0])]
        if description.quantized is None:
            assert differences(description, stored_in(checkpoint), stored_in(output)) == []


def outtypes(description: checkpoints.Description) -> tuple[str, ...]:
    """Return bf16, as which plain checkpoints are stored; f32 where values are computed; both where one may hide."""
    if description.name in QUANTIZED_ALONE or description.name in CHANGED:
        return ("f32", "bf16")
    plain = description.quantized is None and not description.name.endswith("-sparse") and description.name != "plamo"
    return ("bf16",) if plain and description.dtype == "bfloat16" else ("f32",)


def there_and_back(description: checkpoints.Description, checkpoint: Path, outtype: str, folder: Path) -> Path:
    """Convert, export and convert again; return what was exported."""
    folder.mkdir()
    options = replace(options_of(description), outtype=outtype)
    convert(checkpoint, folder / "a.gguf", None, options, threads=1)
    has_tokenizer = description.name in OWN_TOKENIZER
    export(folder / "a.gguf", folder / "back", ExportOptions(outtype=outtype, tokenizer=not has_tokenizer), threads=1)
    for path in checkpoint.glob("tokenizer*.json") if has_tokenizer else ():
        shutil.copy(path, folder / "back")
    with open_gguf(folder / "a.gguf") as a:
        has_name = a.get("tokenizer.ggml.model") in ("gpt2", "bert")
        options = replace(options, pre=a.get("tokenizer.ggml.pre") if has_name else None)
        convert(folder / "back", folder / "b.gguf", None, options, threads=1)
        with open_gguf(folder / "b.gguf") as b:
            assert differing_tensors(a, b) == []
            assert differing_keys(a, b) == KEYS.get(description.name, {})
    return folder / "back"


def differing_tensors(a: GGUFFile, b: GGUFFile) -> list[str]:
    """Return the names of tensors that are not in both, or not the same there; blocks of the first as values."""
    scales = {name for name in a.tensors if name.endswith((".scale", ".input_scale")) and name not in b.tensors}
    names = dict.fromkeys((*a.tensors, *b.tensors))
    return [name for name in names if name not in scales and not is_same(a, b, name, f"{name[:-6]}scale" in scales)]


def is_same(a: GGUFFile, b: GGUFFile, name: str, scaled: bool) -> bool:
    if name not in a.tensors or name not in b.tensors or a.tensors[name].shape != b.tensors[name].shape:
        return False
    one, second = a.tensors[name], b.tensors[name]
    if one.type is second.type:
        return a.data(one).tobytes() == b.data(second).tobytes()
    values = decode_tensor(a, one)
    if scaled:
        scales = a.data(f"{name[:-6]}scale").view(np.float32)
        values = (values.reshape(scales.size, -1) * scales[:, None]).reshape(-1)
    expected = decode_tensor(b, second)
    if second.type.name == "BF16":
        values = bf16(values)
    return one.type.block > 1 and np.array_equal(values, expected)


def bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    bits = x.view(np.uint32)
    rounded: npt.NDArray[np.float32] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).view(np.float32)
    return rounded


def decode_tensor(file: GGUFFile, t: TensorInfo) -> npt.NDArray[np.float32]:
    rows = file.data(t).reshape(-1, t.type.row_bytes(t.shape[0]))
    return dequantize(rows, t.type, t.shape[0]).reshape(-1)


def differing_keys(a: GGUFFile, b: GGUFFile) -> dict[str, tuple[Any, Any]]:
    keys = [key for key in {**a.fields, **b.fields} if not key.startswith("general.")]
    values = {key: [file.fields[key].encode() if key in file.fields else b"" for file in (a, b)] for key in keys}
    return {key: (a.get(key), b.get(key)) for key, (one, second) in values.items() if one != second}


def stored_in(path: Path) -> dict[str, StoredTensor]:
    return {name: tensor for file in read_checkpoint(path) for name, tensor in file.items()}


def differences(
    description: checkpoints.Description, a: dict[str, StoredTensor], b: dict[str, StoredTensor]
) -> list[str]:
    """Return tensors of a checkpoint that were not exported, or are something else, and those it does not have."""
    a = {name: t for name, t in a.items() if not any(part in name for part in OTHER_PARTS) or name in b}
    a, b = (
        {name.replace(WRAPPED.get(description.name, "\0"), ""): t for name, t in tensors.items()} for tensors in (a, b)
    )
    if (ending := DROPPED.get(description.name)) is not None:
        a, b = ({name: t for name, t in tensors.items() if not name.endswith(ending)} for tensors in (a, b))
    if description.name in LAST_LEFT_OUT:
        a = {name: t for name, t in a.items() if name in b}
    if description.config.get("tie_word_embeddings"):
        a.pop("lm_head.weight", None)
    if description.name in OTHER_NAMES:
        return [] if len(a) == len(b) or description.name in FUSED else [f"{len(a)} tensors, {len(b)}"]
    names = [name for name in {**a, **b} if (name in a) != (name in b)]
    differ = [name for name in a if name in b and not equal(Stored(a[name]), Stored(b[name]))]
    return names + [name for name in differ if not re.search(CHANGED.get(description.name, r"$^"), name)]


def equal(x: Stored, y: Stored) -> bool:
    return x.shape == y.shape and np.array_equal(read_f32(x, 0, size_of(x)), read_f32(y, 0, size_of(y)))


def test_unsupported_exports_are_refused(folder: Path) -> None:
    refusal = "QK-E304 rwkv5 --list"
    path = vocabs.write_vocab(folder / "a.gguf")
    with open_gguf(path, header_only=True) as file, refuses(TypeNotSupported, refusal):
        find_class(ModelMetadata(file, "rwkv5"))


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_missing_from_the_file_are_refused(name: str, folder: Path) -> None:
    convert(checkpoints.write_checkpoint(name, folder), folder / "a.gguf", None, options_of(checkpoints.describe(name)))
    with refuses(TypeNotSupported, REFUSED[name]):
        plan_export(folder / "a.gguf", folder / "back")


@pytest.mark.parametrize("name", NATIVE)
def test_mistrals_own_format_is_exported_as_a_class(name: str, folder: Path) -> None:
    options = options_of(checkpoints.describe(name))
    convert(checkpoints.write_checkpoint(name, folder), folder / "a.gguf", None, options)
    export(folder / "a.gguf", folder / "back", ExportOptions(outtype="bf16"), threads=1)
    plain = replace(options, mistral_format=False, disable_mistral_community_chat_template=False)
    convert(folder / "back", folder / "b.gguf", None, plain)
    with open_gguf(folder / "a.gguf") as a, open_gguf(folder / "b.gguf") as b:
        assert differing_tensors(a, b) == []


def test_every_exported_class_is_converted() -> None:
    assert HF_CLASSES.keys() <= ARCHITECTURES.keys()


@pytest.mark.parametrize(("name", "error"), [("qwen3-moe-nvfp4", 1e-6), ("llama-nvfp4", 1e-6), ("gpt-oss-mxfp4", 0)])
def test_decoded_blocks_are_the_intended_floats(name: str, error: float, folder: Path) -> None:
    """NVFP4's up to the order of two products."""
    description = checkpoints.describe(name)
    checkpoint = checkpoints.write_checkpoint(name, folder / "drawn")
    convert(checkpoint, folder / "a.gguf", None, options_of(description))
    export(folder / "a.gguf", folder / "back", ExportOptions(outtype="f32"))
    expected = stored_in(checkpoints.write_description(checkpoints.decode_weights(description), folder / "meant"))
    actual = stored_in(folder / "back")
    assert expected.keys() == actual.keys()
    for key, tensor in expected.items():
        x, y = (read_f32(Stored(t), 0, t.n_values) for t in (tensor, actual[key]))
        assert np.allclose(x, y, rtol=error, atol=0), key
