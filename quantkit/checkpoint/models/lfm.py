"""LFM 2: short convolutions between layers of attention; also with experts, and with encoders.

Facts of llama.cpp b11434, conversion/lfm2.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quantkit.checkpoint.batch_norm import FoldBatchNorm
from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.encoder_rules import (
    add_axes,
    convolution_to_linear,
    linear_to_convolution,
    remove_axis,
)
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Stored
from quantkit.checkpoint.hf_encoders import USUAL_COUNTS, HfEncoders, add_token_ids, image_values
from quantkit.checkpoint.key_rows import BASE, VOCAB_SIZE, Always, Computed, Copied, SetKeys, WithConfig
from quantkit.checkpoint.keys import GATING
from quantkit.checkpoint.mmproj import (
    LAYER_COUNTS,
    USE_GELU,
    EncoderKey,
    Key,
    Mmproj,
    MmprojConfig,
    constant,
    layer_norm_epsilon,
    projector,
)
from quantkit.checkpoint.models.gemma_vl import CONFORMER_CONVOLUTIONS
from quantkit.checkpoint.pooling import set_pooling
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, has_key
from quantkit.checkpoint.rules import ROUTER_BIAS, Drop, Rename, StackExperts, Transform, squeeze, unsqueeze_channels
from quantkit.checkpoint.tensors import Tensor
from quantkit.checkpoint.vocab.tokenizer import write_none
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import read_header

#: Of models with an audio encoder.
LFM_STORED = (
    Drop(r"audio|codebook|conformer|depth_embedding|depthformer|depth_linear"),
    Rename(r"lfm\.", "model.", foreign=True),
)

SQUEEZE_CONVOLUTIONS = Transform(r"conv\.conv", squeeze, unsqueeze_channels)


def _with_kv_heads(config: Config) -> Config:
    """Return a configuration with the KV heads of each layer, 0 for convolutions."""
    heads = config.number("num_key_value_heads")
    return config.with_values(
        {"num_key_value_heads": [0 if kind == "conv" else heads for kind in config["layer_types"]]}
    )


HYBRID_BASE: tuple[SetKeys, ...] = (WithConfig(BASE, _with_kv_heads),)


def _width(config: Config) -> int:
    """Return the feed-forward width."""
    width = config.number("block_ff_dim", "intermediate_size")
    if config["block_auto_adjust_ff_dim"]:
        width, multiple = int(2 * width / 3), config.number("block_multiple_of")
        if (factor := config["block_ffn_dim_multiplier"]) is not None:
            width = int(factor * width)
        width = multiple * ((width + multiple - 1) // multiple)
    return width


LFM_KEYS: tuple[SetKeys, ...] = (
    VOCAB_SIZE,
    Copied(".shortconv.l_cache", "conv_L_cache", required=True),
    Copied(".attention.layer_norm_rms_epsilon", "norm_eps", "f32", required=True),
    Computed(".feed_forward_length", _width, names="intermediate_size"),
)

BARE_NAMES = (Rename(r"^lfm2\.", ""), Rename(r"^(?!dense_2)", "model.", foreign=True))
#: The last layer, in a separate file.
_DENSE_NAME = "dense_2.weight"


def dense_tensors(config: Config) -> Iterable[Tensor]:
    """Yield the dense layer that narrows the embeddings, if present (LFM2ColBertModel)."""
    if (x := _stored_dense(config)) is not None:
        yield Tensor(_DENSE_NAME, x, None, _DENSE_NAME)


def _dense_width(config: Config) -> int | None:
    """Return the width of the embeddings after that layer."""
    x = _stored_dense(config)
    return None if x is None else x.shape[0]


def _causal(config: Config) -> bool | None:
    return None if config.architecture == "Lfm2Model" else False


EMBEDDING_KEYS: tuple[SetKeys, ...] = (*LFM_KEYS, Computed(".attention.causal", _causal, "flag"), set_pooling)

STACK_EXPERTS = StackExperts(
    weights=("w1", "w2", "w3"),
    name="model.layers.{layer}.feed_forward.experts.{expert}.{weight}.weight",
    merged="layers.{layer}.feed_forward.experts.{weight}.weight",
)

MOE_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Copied(".leading_dense_block_count", "num_dense_layers", required=True),
    Always(".expert_gating_func", GATING["sigmoid"]),
    *LFM_KEYS[:2],
)


def _stored_dense(config: Config) -> Stored | None:
    path = config.path.parent / "1_Dense" / "model.safetensors"
    if not path.exists():
        return None
    weight = read_header(path).get("linear.weight")
    if weight is None:
        raise FormatError(f"{path}: has no linear.weight", "QK-E114")
    return Stored(weight)


_LFM_2 = Architecture("lfm2", stored=LFM_STORED, rules=(SQUEEZE_CONVOLUTIONS,), base=HYBRID_BASE, keys=LFM_KEYS)

_LFM_2_EMBEDDING = replace(
    _LFM_2,
    rules=(*BARE_NAMES, SQUEEZE_CONVOLUTIONS),
    keys=EMBEDDING_KEYS,
    synthetic=dense_tensors,
    head_keys=(Computed(".embedding_length_out", _dense_width),),
)

ARCHITECTURES: dict[str, Architecture] = {
    "Lfm2Model": _LFM_2_EMBEDDING,
    "Lfm2BidirectionalModel": _LFM_2_EMBEDDING,
    "Lfm2BidirectionalForMaskedLM": _LFM_2_EMBEDDING,
    "Lfm2ForCausalLM": _LFM_2,
    "LFM2ForCausalLM": _LFM_2,
    "Lfm2MoeForCausalLM": replace(
        _LFM_2,
        arch="lfm2moe",
        stored=(ROUTER_BIAS,),
        rules=(SQUEEZE_CONVOLUTIONS, STACK_EXPERTS),
        keys=MOE_KEYS,
    ),
    "Lfm25AudioTokenizer": replace(
        _LFM_2,
        stored=(Drop(r"^istft\.window$|^emb\.emb"), Rename(r"^lin", "dense_2_out"), *LFM_STORED),
        keys=(
            *LFM_KEYS,
            Copied(".attention.sliding_window", "sliding_window", required=True),
            Copied(".embedding_length_out", "output_size", required=True),
        ),
        vocab=write_none,
    ),
}


def set_convolution_layers(meta: ModelMetadata, config: Json) -> None:
    """List the attention layers, which have KV heads (LFM 2)."""
    heads = config["num_key_value_heads"]
    heads_of_layers = heads if isinstance(heads, list) else [heads] * meta.number(".block_count")
    config |= {
        "num_key_value_heads": max(heads_of_layers),
        "layer_types": ["full_attention" if item else "conv" for item in heads_of_layers],
        "conv_bias": meta.has_in_any_layer(".shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }
    if "rope_theta" in config and config["model_type"] == "lfm2_moe":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}


_LFM_NAMES = (
    "model.embedding_norm "
    + " ".join(f"{LAYER}feed_forward.{name}" for name in ("w1", "w2", "w3", "gate", "expert_bias"))
    + f" {LAYER}ffn_norm {LAYER}operator_norm "
    + " ".join(f"{LAYER}self_attn.{name}" for name in ("q_layernorm", "k_layernorm", "out_proj"))
    + " "
    + " ".join(f"layers.*.feed_forward.experts.{name}" for name in ("w1", "w2", "w3"))
)

_LFM_2_CLASS = HfClass("lfm2", _LFM_NAMES, config_setters=(set_convolution_layers,))

CLASSES: dict[str, HfClass] = {
    "Lfm2BidirectionalForMaskedLM": replace(
        _LFM_2_CLASS,
        renames=((r"^model\.", "lfm2."),),
        matches=lambda meta: meta.get(".attention.causal") is False and meta.get(".pooling_type") is None,
    ),
    "Lfm2BidirectionalModel": replace(
        _LFM_2_CLASS, renames=((r"^model\.", ""),), matches=lambda meta: meta.get(".attention.causal") is False
    ),
    "Lfm2Model": replace(_LFM_2_CLASS, renames=((r"^model\.", ""),), matches=has_key("pooling_type")),
    "Lfm2ForCausalLM": _LFM_2_CLASS,
    "Lfm2MoeForCausalLM": HfClass(
        "lfm2_moe",
        _LFM_NAMES,
        keys={".expert_count": "num_experts"},
        defaults={"norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0},
        config_setters=(set_convolution_layers,),
    ),
}


# --- Encoders -------------------------------------------------------------------------------------------------------


def _patch_vision(config: MmprojConfig) -> None:
    """State a size of images, which is dynamic."""
    config.vision.values["image_size"] = 256


def _vision_layers(config: MmprojConfig) -> int:
    """Return the number of layers up to that whose output the text model gets."""
    last = config.model.get("vision_feature_layer", -1)
    if type(last) is not int:
        raise FormatError(f"{config.path}: vision_feature_layer is {short(last)}, not a layer", "QK-E112")
    return config.vision.number(*LAYER_COUNTS.split()) + last + 1


_LFM_2_VL = Mmproj(
    (
        projector("lfm2"),
        layer_norm_epsilon("layer_norm_eps"),
        EncoderKey(".vision.projector.scale_factor", "downsample_factor", section="model", default=2),
        USE_GELU,
        Key(".vision.block_count", _vision_layers),
    ),
    stored=(Rename(r"model\.(vision_tower|multi_modal_projector)\.", r"\1."),),
    rules=(
        Transform(
            r"patch_embedding\.weight",
            lambda tensor, context: linear_to_convolution(tensor.x, 16, 3),
            lambda tensor, context: convolution_to_linear(tensor.x),
        ),
    ),
    patch_config=_patch_vision,
)


def _patch_audio(config: MmprojConfig) -> None:
    """Copy the sizes of the conformer to their usual names."""
    audio = config.audio
    audio.values |= {
        "hidden_size": audio["d_model"],
        "intermediate_size": audio["d_model"],
        "num_attention_heads": audio["n_heads"],
    }


_LFM_2_AUDIO = Mmproj(
    (
        projector("lfm2a"),
        EncoderKey(".audio.num_mel_bins", "feat_in", section="audio"),
        constant(".audio.attention.layer_norm_epsilon", 1e-5, "f32"),
    ),
    stored=(
        Drop(r"^lfm\."),
        Drop(r"audio_loss_weight|codebook_offsets|depth_embeddings|depth_linear|depthformer"),
    ),
    rules=(
        CONFORMER_CONVOLUTIONS,
        FoldBatchNorm(r"^conformer\.layers\.\d+\.conv\.batch_norm\.", 5),
        Transform(r"^conformer\.pre_encode\.conv\..*\.bias$", add_axes(0, 2), None),
        Transform(r"conv\.depthwise_conv.*\.weight$", remove_axis(1), None),
        Transform(r"conv\.pointwise_conv.*\.weight$", remove_axis(2), None),
    ),
    vision=False,
    audio=True,
    audio_config=lambda outer: outer.get("encoder"),
    patch_config=_patch_audio,
)

MMPROJ: dict[str, Mmproj] = {
    "Lfm2VlForConditionalGeneration": _LFM_2_VL,
    "Lfm2AudioForConditionalGeneration": _LFM_2_AUDIO,
}


# --- export ---------------------------------------------------------------------------------------------------------


def _set_lfm2(meta: ClipMetadata, config: Json) -> None:
    """Describe SigLIP 2, whose last layer's output the text model gets."""
    counts = {key: name for key, name in USUAL_COUNTS.items() if key != "image_size"}
    config["vision_config"] = meta.counts(counts) | {
        "model_type": "siglip2_vision_model",
        "layer_norm_eps": meta.get(".vision.attention.layer_norm_epsilon"),
        "num_patches": meta.shape("v.position_embd.weight")[0],
        "vision_use_head": False,
    }
    config |= {
        "downsample_factor": meta.number(".vision.projector.scale_factor"),
        "projector_hidden_size": meta.shape("mm.1.weight")[0],
        "projector_bias": meta.has("mm.1.bias"),
        "projector_use_layernorm": meta.has("mm.input_norm.weight"),
    }
    add_token_ids(meta, config, image_token_id="<image>")


def _lfm2_preprocessor(meta: ClipMetadata) -> Json:
    factor = meta.number(".vision.projector.scale_factor")
    return image_values(meta, "Lfm2VlImageProcessorFast") | {"downsample_factor": factor}


HF_ENCODERS: dict[str, HfEncoders] = {
    "Lfm2VlForConditionalGeneration": HfEncoders(
        "lfm2",
        replace(_LFM_2_CLASS, renames=((r"^model\.", "model.language_model."),), outer_type="lfm2_vl"),
        "vision_tower.vision_model. multi_modal_projector.layer_norm multi_modal_projector.",
        _set_lfm2,
        _lfm2_preprocessor,
        text_class="Lfm2ForCausalLM",
    )
}
