"""Llama 1 to 4, and classes that are Llama under another name; the encoders of Llama 4, SmolVLM and Janus.

Facts of llama.cpp b11434, conversion/llama.py, conversion/llama4.py, conversion/nanbeige.py, conversion/januspro.py,
conversion/smolvlm.py, conversion/cogvlm.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.draft import WriteTargetIds, merge_layer_config, put_ids_last, target_of
from quantkit.checkpoint.encoder_rules import ForceType, NameInFile
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import TYPE_F32, Constant
from quantkit.checkpoint.hf_encoders import USUAL_COUNTS, HfEncoders, add_token_ids, image_values
from quantkit.checkpoint.key_rows import VOCAB_SIZE, Computed, Copied, SetKeys
from quantkit.checkpoint.mmproj import (
    OPTIONAL_ACTIVATION,
    SCALE_FACTOR,
    USE_GELU,
    Activation,
    EncoderKey,
    Key,
    Mmproj,
    MmprojConfig,
    inverse_scale,
    layer_norm_epsilon,
    projector,
)
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import (
    AssignKind,
    Drop,
    Rename,
    Split,
    StackExperts,
    Transform,
    permute_keys,
    permute_queries,
    restore_keys,
    restore_queries,
    transpose,
    transpose_stored,
)
from quantkit.checkpoint.tensors import Tensor
from quantkit.checkpoint.vocab.bpe import GLM_4_SPECIAL, write_bpe, write_tokenizer_json
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.checkpoint.vocab.special import special_tokens
from quantkit.checkpoint.vocab.tekken import write_tekken
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

ROPE_PERMUTED = (
    Transform(r"q_proj\.(weight|bias)$", permute_queries, restore_queries),
    Transform(r"k_proj\.(weight|bias)$", permute_keys, restore_keys),
)

STACK_MIXTRAL_EXPERTS = StackExperts(
    weights=("w1", "w2", "w3"),
    name="model.layers.{layer}.block_sparse_moe.experts.{expert}.{weight}.weight",
    merged="layers.{layer}.feed_forward.experts.{weight}.weight",
)


def rope_factors(config: Config, factor: float = 8.0) -> Iterable[Tensor]:
    """The factors of Llama 3's rope, as a tensor (LlamaModel.generate_extra_tensors).

    torch computes a scalar divided by a tensor as the reciprocal times the scalar, in float32; so does quantkit, with
    powers in float64, rounded: equal for all released models.
    """
    rope = config.full_rope
    if str(rope.get("rope_type", "")).lower() != "llama3":
        return
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            values = _rope_factors(rope, config.head_dim, factor)
    except (TypeError, ValueError, ArithmeticError) as e:
        raise FormatError(
            f"{config.path}: invalid values of Llama 3 rope scaling: {short(str(e))}", "QK-E112"
        ) from None
    yield Tensor("rope_freqs.weight", Constant(tuple(values)), None, "rope_freqs.weight")


def _set_head_dim(meta: ModelMetadata, config: Json) -> None:
    """Set the head width, if the rotary dimensions show that it is not hidden size / heads."""
    width = meta.get(".rope.dimension_count")
    if width is not None and width != meta.head_width:
        config.setdefault("head_dim", width)


#: All dimensions of a head are rotary (LlamaModel).
ROPE_WIDTH = Computed(".rope.dimension_count", lambda config: config.head_dim, inverse=_set_head_dim)
LLAMA_KEYS: tuple[SetKeys, ...] = (VOCAB_SIZE, ROPE_WIDTH)


def _rope_factors(rope: Json, width: int, factor: float) -> list[float]:
    f32 = np.float32
    base = float(rope.get("rope_theta", 10000.0))
    factor = rope.get("factor", factor)
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    length = rope.get("original_max_position_embeddings", 8192)
    long_wave, short_wave = length / low, length / high
    exponents = np.arange(0, width, 2, dtype=f32) / f32(width)
    frequencies = f32(1) / np.power(base, exponents.astype(np.float64)).astype(f32)
    values = []
    for frequency in frequencies:
        wave = f32(1) / frequency * f32(2 * math.pi)
        if wave < short_wave:
            values.append(1.0)
        elif wave > long_wave:
            values.append(float(factor))
        else:
            smooth = (f32(1) / wave * f32(length) - f32(low)) / f32(high - low)
            inverse = (f32(1) - smooth) / f32(factor) + smooth
            values.append(float(f32(1) / inverse))
    return values


SPLIT_EXPERTS = (
    Transform(r"experts\.(gate_up|down)_proj$", transpose, transpose_stored),
    Split(r"experts\.gate_up_proj$", ("experts.gate_proj.weight", "experts.up_proj.weight"), -2),
    Rename(r"experts\.down_proj$", "experts.down_proj.weight"),
)


def swap_widths(config: Config) -> None:
    """Swap to the usual keys: here intermediate_size is the experts' width, intermediate_size_mlp the dense layers'."""
    config.values["intermediate_size_moe"] = config["intermediate_size"]
    config.values["intermediate_size"] = config["intermediate_size_mlp"]


def _no_window(config: Config) -> int | None:
    """Return a window of 0 if no layer has chunked attention (MobileLLM)."""
    types = config.get("layer_types")
    return 0 if isinstance(types, list) and all(item == "full_attention" for item in types) else None


def _set_full_attention(meta: ModelMetadata, config: Json) -> None:
    if meta.get(".attention.sliding_window") == 0:
        config["layer_types"] = ["full_attention"] * meta.number(".block_count")


LLAMA4_KEYS: tuple[SetKeys, ...] = (
    Copied(".interleave_moe_layer_step", "interleave_moe_layer_step", required=True),
    Copied(".expert_feed_forward_length", "intermediate_size_moe", required=True, exported="intermediate_size"),
    Computed(".attention.sliding_window", _no_window, inverse=_set_full_attention),
)
#: Of Nanbeige: the number of loops over its layers.
LOOPS: tuple[SetKeys, ...] = (
    Computed(".num_loops", lambda config: max(1, int(config.get("num_loops", 1) or 1)), names="num_loops"),
    Copied(".skip_loop_final_norm", "skip_loop_final_norm", "flag", default=False),
)


#: Models saved without their head have names without a prefix.
BARE_NAMES = (Rename(r"^", "model."),)

DROP_JANUS_PARTS = Drop(
    r"^model\.(vision_model|aligner|vqmodel|generation_(embeddings|aligner|head))\.",
)


def write_llama(v: Vocabulary) -> None:
    """Write SentencePiece, Llama's pieces of a tokenizer.json, or BPE: the first available (LlamaModel)."""
    if (v.config.outer.get("architectures") or [None])[0] == "GlmasrModel":
        write_bpe(v, special=GLM_4_SPECIAL)
        return
    if v.has("tekken.json") and not v.has("tokenizer.json"):
        write_tekken(v)
        return
    if v.tokenizer_config.get("add_prefix_space") is not None:
        v.keys.flag("tokenizer.ggml.add_space_prefix", v.tokenizer_config["add_prefix_space"])
    if v.has("tokenizer.model"):
        write_sentencepiece(v)
    else:
        write_tokenizer_json(v)
    size = v.config.get("vocab_size", 32000)
    if size == 32016:  # CodeLlama
        special = special_tokens(v.folder, kinds=("prefix", "suffix", "middle", "eot"))
        for kind, number in (("prefix", 32007), ("suffix", 32008), ("middle", 32009), ("eot", 32010)):
            special.set(kind, number)
        special.write(v.keys)
    if size == 49152:  # small Granite
        v.keys.flag("tokenizer.ggml.add_bos_token", False)


# --- EAGLE-3: a layer whose attention reads an embedding and three hidden states of the target -----------------------


def _is_eagle3(config: Config) -> bool:
    """Return whether a configuration is of EAGLE-3, whatever its class (LlamaModel.__init__)."""
    layer = config.get("transformer_layer_config")
    values = {**config.values, **(layer if isinstance(layer, dict) else {})}
    return "draft_vocab_size" in values and values.get("num_hidden_layers") == 1


def _check_eagle3(config: Config) -> None:
    if not _is_eagle3(config):
        raise FormatError(
            f"{config.path}: EAGLE-3 has one layer and a draft_vocab_size, but num_hidden_layers is "
            f"{short(config.get('num_hidden_layers'))} and draft_vocab_size {short(config.get('draft_vocab_size'))}",
            "QK-E112",
        )
    merge_layer_config(config)


def _target_layers(config: Config) -> list[int]:
    """Return the target's layers whose inputs are read."""
    layers: list[int] | None = config.outer.get("eagle_aux_hidden_state_layer_ids")
    count = target_of(config).config.layers
    return layers or [2, count // 2, count - 3]


def _target_width(config: Config) -> int:
    width: int | None = config.outer.get("target_hidden_size")
    return target_of(config).config.number("hidden_size") if width is None else width


EAGLE3 = Architecture(
    "eagle3",
    stored=(
        Rename(r"text_model\.", ""),
        Rename(r"^midlayer\.", "model.layers.0."),
        Rename(r"^layers\.0\.", "model.layers.0."),
    ),
    rules=(
        Drop(r"^t2d$"),
        WriteTargetIds(lambda config: target_of(config).config.number("vocab_size")),
        AssignKind(r"^input_norm\.weight$", "enc.output_norm", ".weight", "input_norm.weight"),
        AssignKind(r"\.hidden_norm\.weight$", "*attn_norm_2", ".weight", "model.layers.*.hidden_norm.weight"),
        *ROPE_PERMUTED,
    ),
    first_keys=(
        Computed(".target_layers", _target_layers, "array"),
        Computed(".target_hidden_size", _target_width),
        Computed(".norm_before_residual", lambda config: config.outer.get("norm_before_residual", False), "flag"),
        Computed(".norm_before_fc", lambda config: config.outer.get("norm_before_fc", False), "flag"),
    ),
    keys=LLAMA_KEYS,
    vocab=write_llama,
    patch_config=_check_eagle3,
    synthetic=rope_factors,
    reorder=put_ids_last,
    draft=True,
)

LLAMA = Architecture(
    "llama",
    stored=(Rename(r"text_model\.", ""),),
    rules=(*ROPE_PERMUTED, STACK_MIXTRAL_EXPERTS),
    keys=LLAMA_KEYS,
    vocab=write_llama,
    synthetic=rope_factors,
    dispatch=lambda config: EAGLE3 if _is_eagle3(config) else None,
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": LLAMA,
    "LLaMAForCausalLM": LLAMA,
    "IQuestCoderForCausalLM": LLAMA,
    "SmolLM3ForCausalLM": replace(LLAMA, arch="smollm3"),
    **dict.fromkeys(
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        replace(
            LLAMA,
            arch="llama4",
            rules=SPLIT_EXPERTS,
            keys=(*LLAMA_KEYS, *LLAMA4_KEYS),
            vocab=write_bpe,
            patch_config=swap_widths,
        ),
    ),
    "JanusForConditionalGeneration": replace(LLAMA, stored=(DROP_JANUS_PARTS, *LLAMA.stored)),
    "LlamaBidirectionalModel": replace(
        LLAMA,
        arch="llama-embed",
        loss="attention.causal is not in the file, so tokens in llama.cpp ignore later ones: embeddings differ",
    ),
    "LlavaForConditionalGeneration": LLAMA,
    "VLlama3ForCausalLM": replace(
        LLAMA, patch_config=lambda config: config.values.setdefault("num_attention_heads", 32)
    ),
    "LlamaModel": replace(LLAMA, rules=(*BARE_NAMES, *LLAMA.rules)),
    "Sarashina2VisionForCausalLM": replace(LLAMA, stored=(Drop(r"^norm\."), Rename(r"^llm\.", ""), *LLAMA.stored)),
    "NanbeigeForCausalLM": replace(LLAMA, arch="nanbeige", keys=(*LLAMA_KEYS, *LOOPS)),
    "CogVLMForCausalLM": replace(LLAMA, arch="cogvlm"),
    **dict.fromkeys(
        ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"), EAGLE3
    ),
}


def set_qk_norm(meta: ModelMetadata, config: Json) -> None:
    """Set normalized heads, except in the model with 128 experts (Llama 4)."""
    config["use_qk_norm"] = meta.get(".expert_count") != 128


_NO_WINDOW: Json = {"sliding_window": None}
_BARE_NAMES = (r"^model\.", "")


def _set_pooling_name(meta: ModelMetadata, config: Json) -> None:
    """Also set the pooling by this class's own name."""
    config["pooling"] = {1: "avg", 2: "cls", 3: "last"}.get(meta.get(".pooling_type") or 1)


CLASSES: dict[str, HfClass] = {
    "LlamaForCausalLM": HfClass("llama"),
    "SmolLM3ForCausalLM": HfClass("smollm3", defaults=_NO_WINDOW),
    "Llama4ForCausalLM": HfClass(
        "llama4_text",
        " ".join(
            f"model.layers.*.feed_forward.{part}{w}_proj"
            for part in ("", "experts.", "shared_expert.")
            for w in ("gate", "up", "down")
        )
        + " model.layers.*.feed_forward.router",
        keys={".feed_forward_length": "intermediate_size_mlp"},
        config_setters=(set_qk_norm,),
        fused=True,
    ),
    "NanbeigeForCausalLM": HfClass("nanbeige"),
    "LlamaBidirectionalModel": HfClass("llama_bidirec", config_setters=(_set_pooling_name,), renames=(_BARE_NAMES,)),
}


# --- Encoders of Llama 4, Idefics 3, SmolVLM, Janus and CogVLM -------------------------------------------------------


def _default_smolvlm(config: MmprojConfig) -> None:
    """Set the values that configurations of SmolVLM 2 lack."""
    if config.vision["model_type"] == "smolvlm_vision":
        defaults = {"hidden_size": 1152, "num_attention_heads": 16, "intermediate_size": 3072}
        config.vision.values |= defaults | config.vision.values


def _longest_edge(config: MmprojConfig) -> int:
    size = config.preprocessor.table("size") if "size" in config.preprocessor else {}
    return int(size.get("longest_edge", config.vision["image_size"]))


def _derive_janus_width(config: MmprojConfig) -> None:
    vision = config.vision.values
    width, ratio = vision.get("hidden_size"), vision.get("mlp_ratio")
    if "intermediate_size" not in vision and width is not None and ratio is not None:
        vision["intermediate_size"] = round(width * ratio)


def _aligner_name(match: re.Match[str]) -> str:
    """Return the name of a layer of Janus's aligner: fc1 precedes the hidden layers."""
    layer = 0 if match[1] == "fc1" else int(match[2]) + 1
    return f"mm.{layer}.{'bias' if match[0].endswith('.bias') else 'weight'}"


_IDEFICS_3 = Mmproj(
    (
        projector("idefics3"),
        layer_norm_epsilon("layer_norm_eps", 1e-5),
        EncoderKey(SCALE_FACTOR, "scale_factor", section="model", default=2),
        USE_GELU,
        Key(".vision.preproc_image_size", _longest_edge),
    ),
    tensors=r"vision_tower|vision_model|model\.connector",
    rules=(ForceType(r"\.embeddings\.", TYPE_F32),),
    patch_config=_default_smolvlm,
)
MMPROJ: dict[str, Mmproj] = {
    "Llama4ForConditionalGeneration": Mmproj(
        (
            projector("llama4"),
            layer_norm_epsilon("norm_eps"),
            inverse_scale("pixel_shuffle_ratio"),
            Activation(silu=()),
        ),
        tensors=r"multi_modal_projector|vision_model",
        rules=(
            Rename(r"(positional_embedding_vlm)$", r"\1.weight"),
            Rename(r"^(?!.*\.weight)(.*positional_embedding_vlm.*)$", r"\1.weight", foreign=True),
            NameInFile(r"^.*multi_modal_projector\.linear_1.*$", "mm.model.fc.weight"),
        ),
    ),
    "Idefics3ForConditionalGeneration": _IDEFICS_3,
    "SmolVLMForConditionalGeneration": _IDEFICS_3,
    "JanusForConditionalGeneration": Mmproj(
        (projector("janus_pro"), layer_norm_epsilon("layer_norm_eps", 1e-6), OPTIONAL_ACTIVATION),
        tensors=r"^(model\.)?(aligner|vision_model)\.",
        rules=(NameInFile(r"^(?:model\.)?aligner\.(?:(fc1)|hidden_layers\.(\d+))\..*$", _aligner_name),),
        patch_config=_derive_janus_width,
    ),
    "CogVLMForCausalLM": Mmproj(
        (layer_norm_epsilon("layer_norm_eps", 1e-6), projector("cogvlm")),
        tensors=r"^model\.vision\.",
    ),
}


# --- export ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SetIdefics3:
    """Describes the tower of Idefics 3 and SmolVLM; ``kind``: its model type."""

    kind: str

    def __call__(self, meta: ClipMetadata, config: Json) -> None:
        epsilon = {"layer_norm_eps": meta.get(".vision.attention.layer_norm_epsilon")}
        config["vision_config"] = meta.counts(USUAL_COUNTS) | epsilon | {"model_type": self.kind}
        config["scale_factor"] = meta.number(SCALE_FACTOR)
        config["pad_token_id"] = config["text_config"].pop("pad_token_id", None)  # where this class has it
        add_token_ids(meta, config, image_token_id="<image>")


@dataclass(frozen=True)
class _Idefics3Preprocessor:
    processor: str

    def __call__(self, meta: ClipMetadata) -> Json:
        sizes = {"size": ".vision.preproc_image_size", "max_image_size": ".vision.image_size"}
        edges = {name: {"longest_edge": meta.number(key)} for name, key in sizes.items()}
        return image_values(meta, self.processor) | edges | {"do_image_splitting": True}


def _idefics3_encoders(model_type: str, processor: str) -> HfEncoders:
    return HfEncoders(
        "idefics3",
        replace(CLASSES["LlamaForCausalLM"], renames=((r"^model\.", "model.text_model."),), outer_type=model_type),
        "model.vision_model.encoder. model.vision_model. model.connector.",
        _SetIdefics3(f"{model_type}_vision"),
        _Idefics3Preprocessor(processor),
        text_class="LlamaForCausalLM",
    )


def _set_llama4(meta: ClipMetadata, config: Json) -> None:
    """Describe Llama 4's tower, and the adapter, which merges patches."""
    scale = max(1, meta.number(SCALE_FACTOR))
    adapter = meta.shape("mm.model.mlp.1.weight"), meta.shape("mm.model.mlp.2.weight")
    config["vision_config"] = meta.counts(USUAL_COUNTS) | {
        "model_type": "llama4_vision_model",
        "norm_eps": meta.get(".vision.attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "pixel_shuffle_ratio": 1 / scale,
        "intermediate_size": adapter[0][1],
        "projector_input_dim": adapter[0][0],
        "projector_output_dim": adapter[1][0],
        "vision_output_dim": adapter[1][0],
    }
    add_token_ids(
        meta, config, boi_token_index="<|image_start|>", eoi_token_index="<|image_end|>", image_token_index="<|patch|>"
    )


def _llama4_preprocessor(meta: ClipMetadata) -> Json:
    size = meta.number(".vision.image_size")
    return image_values(meta, "Llama4ImageProcessorFast") | {"size": {"height": size, "width": size}}


HF_ENCODERS: dict[str, HfEncoders] = {
    "Llama4ForConditionalGeneration": HfEncoders(
        "llama4",
        replace(CLASSES["Llama4ForCausalLM"], renames=((r"^", "language_model."),), outer_type="llama4"),
        "vision_model. multi_modal_projector.",
        _set_llama4,
        _llama4_preprocessor,
        {"mm.model.fc": "multi_modal_projector.linear_1"},
    ),
    "Idefics3ForConditionalGeneration": _idefics3_encoders("idefics3", "Idefics3ImageProcessor"),
    "SmolVLMForConditionalGeneration": _idefics3_encoders("smolvlm", "SmolVLMImageProcessor"),
}
