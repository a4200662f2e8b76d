"""The encoders of Gemma 3, 3n and 4.

Facts of llama.cpp b11434, conversion/gemma.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.encoder_rules import (
    ForceType,
    NameInFile,
    NameRanges,
    add_axes,
    convolution_to_linear,
    linear_to_convolution,
    remove_axis,
)
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.expressions import F32, TYPE_F16, TYPE_F32, ByValue, Expression, Gathered, Shaped, Transposed
from quantkit.checkpoint.hf_encoders import USUAL_COUNTS, HfEncoders, add_token_ids, image_values, of_text_class
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.mmproj import (
    AUDIO_KEYS,
    USE_GELU,
    VISION_KEYS,
    EncoderKey,
    Key,
    Mmproj,
    MmprojConfig,
    Projector,
    SetMmprojKeys,
    constant,
    layer_norm_epsilon,
    projector,
)
from quantkit.checkpoint.models import gemma
from quantkit.checkpoint.rules import Change, Drop, Rename, Transform, minus_one, plus_one, unsqueeze_channels
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.checkpoint.torch_math import inverse_softplus, softplus
from quantkit.errors import FormatError

_VISION, _AUDIO = "clip.vision.projector_type", "clip.audio.projector_type"


def _image_tokens(config: MmprojConfig) -> int:
    """Return the number of tokens of an image."""
    name, part = "image_seq_length", config.preprocessor
    tokens = part.number(name) if name in part else 256
    if not tokens:
        raise FormatError(f"{part.path}: {name} is 0", "QK-E112")
    return tokens


# --- Gemma 3 --------------------------------------------------------------------------------------------------------


def _scale_factor(config: MmprojConfig) -> int | None:
    """Return the number of patches on a side of a token; None for that of the published models, 4."""
    patch = config.vision.number("patch_size")
    if not patch:
        raise FormatError(f"{config.path}: patch_size is 0", "QK-E112")
    factor = config.vision.number("image_size") // patch // math.isqrt(_image_tokens(config))
    return factor if factor not in (0, 4) else None


_GEMMA_3 = Mmproj(
    (
        projector("gemma3"),
        layer_norm_epsilon("layer_norm_eps", 1e-6),
        USE_GELU,
        Key(".vision.projector.scale_factor", _scale_factor),
    ),
    tensors=r"^(multi_?modal_projector|vision_tower|vision_model)\.",
    stored=(
        Drop(r"vision_model\.head\."),
        Rename("mm_input_projection_weight", "mm_input_projection.weight"),
        Rename("_weight", ".weight", foreign=True),
    ),
    rules=(
        ForceType(r"\.embeddings\.", TYPE_F32),
        ForceType(r"input_projection", TYPE_F16),
        Transform(r"soft_emb_norm\.weight", plus_one, minus_one),
    ),
)


# --- Gemma 3n -------------------------------------------------------------------------------------------------------


def _patch_3n(config: MmprojConfig) -> None:
    """State the sizes of MobileNetV5, which its configuration lacks, and rename those of the conformer."""
    vision, audio, processor = config.vision.values, config.audio, config.preprocessor
    vision["n_layers"] = 128
    vision["intermediate_size"] = vision.get("intermediate_size", 2048) * 4
    vision["num_attention_heads"] = vision.get("num_attention_heads", 8)
    vision["image_size"] = processor.get("size", {"height": 768})["height"]
    vision["patch_size"] = vision["image_size"] // _image_tokens(config)
    processor.values |= {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]}
    for name, own_name in _NAMES_3N:
        audio.values[name] = audio[own_name]
    audio.values.setdefault("intermediate_size", 6144)


_NAMES_3N = (
    ("n_layers", "conf_num_hidden_layers"),
    ("num_attention_heads", "conf_num_attention_heads"),
    ("feat_in", "input_feat_size"),
)
#: What is below a block of MobileNetV5.
_BLOCK = (
    "bn1|bn2|norm|conv_exp|conv_pwl|(dw_start|dw_mid|pw_exp|pw_proj)\\.(conv|bn)|attn\\.(query|key|value|output)\\.proj"
    "|attn\\.(key|value)\\.(down_conv|norm)"
)
#: Convolutions of a conformer are in full precision.
CONFORMER_CONVOLUTIONS = ForceType(
    r"^(?=.*(audio|codebook|conformer|depth_embedding|depthformer|depth_linear)).*(\.conv|_conv.*\.weight|\.weight.*_conv)",
    TYPE_F32,
)
_GEMMA_3N = Mmproj(
    (
        projector("gemma3nv", _VISION),
        layer_norm_epsilon("layer_norm_eps", 1e-6),
        projector("gemma3na", _AUDIO),
        EncoderKey(".audio.num_mel_bins", "feat_in", section="audio"),
        constant(".audio.attention.layer_norm_epsilon", 1e-5, "f32"),
    ),
    tensors=r"audio|^model\.(embed_vision|vision_tower)\.",
    rules=(
        CONFORMER_CONVOLUTIONS,
        ForceType(r"\.embeddings\.|stem", TYPE_F32),
        ForceType(r"input_proj", TYPE_F16),
        Rename(r"model\.audio_tower\.conformer\.", "conformer.layers."),
        Transform(r"^conformer\..*conv\.depthwise_conv.*\.weight$", remove_axis(1), None),
        NameInFile(
            rf"^model\.vision_tower\.timm_model\.blocks\.(\d+\.\d+\.(({_BLOCK})\.weight|layer_scale\.gamma))$",
            r"v.blk.\1",
        ),
        Transform(r"conv_stem\.conv\.bias$", add_axes(1, 2), None),
        NameRanges(),
    ),
    audio=True,
    patch_config=_patch_3n,
)


# --- Gemma 4 --------------------------------------------------------------------------------------------------------


def _patch_4(config: MmprojConfig) -> None:
    """State a size of images, which is not used, and the sizes of the audio encoder, if there is one."""
    config.vision.values["image_size"] = 224
    audio = config.audio.values
    if audio:
        audio["feat_in"] = audio.get("input_feat_size", 128)
        if "hidden_size" in audio:
            audio["intermediate_size"] = audio["hidden_size"] * 4


@dataclass(frozen=True)
class _WithAudio:
    """A key that is set only if there is an audio encoder."""

    key: SetMmprojKeys

    @property
    def projectors(self) -> Mapping[str, tuple[str, ...]]:
        """The types that each key may have."""
        return self.key.projectors if isinstance(self.key, Projector) else {}

    def __call__(self, keys: Keys, config: MmprojConfig) -> None:
        if config.audio.values:
            self.key(keys, config)


@dataclass(frozen=True)
class _Softplus(ByValue):
    """The softplus of each value."""

    def compute(self, x: F32) -> F32:
        return softplus(x)


@dataclass(frozen=True)
class _InverseSoftplus(ByValue):
    """The value of each softplus: a BF16 value if there is one, as in a checkpoint."""

    def compute(self, x: F32) -> F32:
        return inverse_softplus(x)


def _softplus(tensor: Tensor, context: Context) -> Expression:
    """Return the scale of queries or keys, which is stored before its softplus."""
    return _Softplus(tensor.x)


def _inverse_softplus(tensor: Tensor, context: Context) -> Expression:
    """Return the scale before its softplus."""
    return _InverseSoftplus(tensor.x)


@dataclass(frozen=True)
class _DropLinear(Rule):
    """Drops the name of the layer within a clipped one. ``clipped``: the names of those that have one."""

    pattern: str
    clipped: str

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        name = re.sub(r"\.linear\.", ".", tensor.name) if re.search(self.pattern, tensor.name) else tensor.name
        return None if name == tensor.name else (replace(tensor, name=name),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        name = re.sub(rf"({self.pattern}.*\.({self.clipped}))\.weight$", r"\1.linear.weight", tensor.name)
        return None if name == tensor.name else (replace(tensor, name=name),)


def _convolve_patches(tensor: Tensor, context: Context) -> Expression:
    """Return the linear layer of patches with three colours as a convolution."""
    return linear_to_convolution(tensor.x, math.isqrt(tensor.x.shape[1] // 3), 3)


def _flatten_patches(tensor: Tensor, context: Context) -> Expression:
    """Return the convolution of patches as a linear layer again."""
    return convolution_to_linear(tensor.x)


_CONFORMER = r"^(conformer|model\.embed_audio)\."
_GEMMA_4 = Mmproj(
    (
        projector("gemma4v", _VISION),
        layer_norm_epsilon("layer_norm_eps", 1e-6),
        *(
            _WithAudio(key)
            for key in (
                projector("gemma4a", _AUDIO),
                EncoderKey(".audio.num_mel_bins", "feat_in", section="audio"),
                layer_norm_epsilon("layer_norm_eps", 1e-6, section="audio"),
            )
        ),
    ),
    base=(*VISION_KEYS, *(_WithAudio(key) for key in AUDIO_KEYS)),
    rules=(
        ForceType(r"position_embedding_table", TYPE_F32),
        ForceType(r"^(?=.*(audio_tower|embed_audio)).*(\.conv|_conv.*\.weight|\.weight.*_conv)", TYPE_F32),
        Rename(r"model\.audio_tower\.", "conformer."),
        _DropLinear(_CONFORMER, r"ffw_layer_[12]|linear_(start|end)|[qkv]_proj|post"),
        Rename(r"(per_dim_scale|per_dim_key_scale)$", r"\1.weight"),
        Transform(r"per_dim(_key)?_scale\.weight$", _softplus, _inverse_softplus),
        Transform(r"lconv1d\.depthwise_conv1d.*\.weight$", remove_axis(1), unsqueeze_channels),
        Rename(r"model\.vision_tower\.encoder\.", "vision_model.model."),
        _DropLinear(r"^vision_model\.model\.layers\.", r"\w+_proj"),
        Rename(r"(layer_scalar|position_embedding_table)$", r"\1.weight"),
        Transform(r"patch_embedder\.input_proj\.weight$", _convolve_patches, _flatten_patches),
        NameRanges(),
    ),
    audio=True,
    patch_config=_patch_4,
)


# --- Gemma 4 Unified ------------------------------------------------------------------------------------------------


def _patch_unified(config: MmprojConfig) -> None:
    """State the sizes of encoders without layers."""
    _patch_4(config)
    for encoder, width in ((config.vision, "mm_embed_dim"), (config.audio, "audio_embed_dim")):
        encoder.values["hidden_size"] = encoder.number(width)
        encoder.values |= dict.fromkeys(("intermediate_size", "num_layers", "num_attention_heads"), 0)


def _colours_first(last: int, *, inverse: bool = False) -> Change:
    """Return the change from colours of pixels to pixels of colours, in the last dimension of ``last``."""

    def change(tensor: Tensor, context: Context) -> Expression:
        assert isinstance(context.config, MmprojConfig)
        vision = context.config.vision
        if "model_patch_size" in vision:
            side = vision.number("model_patch_size")
        else:
            side = vision.number("patch_size") * vision.number("pooling_kernel_size")
        outer, pixels = tensor.x.shape[:last], (side * side, 3)
        x = Shaped(tensor.x, (*outer, *(pixels[::-1] if inverse else pixels)))
        return Shaped(Transposed(x), (*outer, side * side * 3))

    return change


def _axes_first(tensor: Tensor, context: Context) -> Expression:
    """Return position embeddings of [positions, axes, width] as [axes, positions, width], or the reverse."""
    positions, axes, width = tensor.x.shape
    rows = Shaped(tensor.x, (positions * axes, width))
    columns = tuple(range(axis, positions * axes, axes) for axis in range(axes))
    return Shaped(Gathered(rows, 0, columns), (axes, positions, width))


_GEMMA_4_UNIFIED = replace(
    _GEMMA_4,
    keys=(*_GEMMA_4.keys, projector("gemma4uv", _VISION), projector("gemma4ua", _AUDIO)),
    rules=(
        Transform(r"pos_embedding$", _axes_first, _axes_first),
        Rename(r"pos_embedding$", "pos_embedding.weight"),
        Rename(r"\.pos_norm\.", ".patch_ln3."),
        Transform(r"patch_dense\.weight", _colours_first(1), _colours_first(1, inverse=True)),
        Transform(r"patch_ln1\.(weight|bias)", _colours_first(0), _colours_first(0, inverse=True)),
        *_GEMMA_4.rules,
    ),
    patch_config=_patch_unified,
)

MMPROJ: dict[str, Mmproj] = {
    "Gemma3ForConditionalGeneration": _GEMMA_3,
    "Gemma3nForConditionalGeneration": _GEMMA_3N,
    "Gemma4ForConditionalGeneration": _GEMMA_4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA_4_UNIFIED,
}


# --- export ---------------------------------------------------------------------------------------------------------


def _set_gemma3(meta: ClipMetadata, config: Json) -> None:
    vision = meta.counts(USUAL_COUNTS) | {"model_type": "siglip_vision_model", "vision_use_head": False}
    config["vision_config"] = vision | {"layer_norm_eps": meta.get(".vision.attention.layer_norm_epsilon")}
    config["mm_tokens_per_image"] = _tokens_of(meta)
    add_token_ids(
        meta,
        config,
        image_token_index="<image_soft_token>",
        boi_token_index="<start_of_image>",
        eoi_token_index="<end_of_image>",
    )


def _tokens_of(meta: ClipMetadata) -> int:
    scale = meta.get(".vision.projector.scale_factor") or 4
    side = meta.number(".vision.image_size") // max(1, meta.number(".vision.patch_size")) // scale
    return int(side**2)


def _gemma3_preprocessor(meta: ClipMetadata) -> Json:
    size = meta.number(".vision.image_size")
    sizes = {"size": {"height": size, "width": size}, "image_seq_length": _tokens_of(meta)}
    return image_values(meta, "Gemma3ImageProcessor") | sizes


def _set_gemma4(meta: ClipMetadata, config: Json) -> None:
    """Describe the tower of Gemma 4; its heads are those of the norms of queries."""
    vision = {name: count for name, count in meta.counts(USUAL_COUNTS).items() if name != "image_size"}
    config["vision_config"] = vision | {
        "model_type": "gemma4_vision",
        "head_dim": meta.shape("v.blk.0.attn_q_norm.weight")[0],
        "num_key_value_heads": vision["num_attention_heads"],
        "position_embedding_size": meta.shape("v.position_embd.weight")[1],
        "rms_norm_eps": meta.get(".vision.attention.layer_norm_epsilon"),
        "layer_norm_eps": meta.get(".vision.attention.layer_norm_epsilon"),
        "standardize": meta.has("v.std_bias") or meta.has("v.std_scale"),
        "use_clipped_linears": _is_clipped(meta, "v."),
    }
    config["audio_config"] = _gemma4_audio(meta) if meta.get(".has_audio_encoder") else None
    _add_gemma4_tokens(meta, config)


def _is_clipped(meta: ClipMetadata, prefix: str) -> bool:
    """Return whether an encoder's activations have ranges."""
    return any(name.startswith(prefix) and name.endswith(".input_max") for name in meta.model.tensors)


def _gemma4_audio(meta: ClipMetadata) -> Json:
    epsilon = meta.get(".audio.attention.layer_norm_epsilon")
    return {
        "model_type": "gemma4_audio",
        "hidden_size": meta.number(".audio.embedding_length"),
        "num_hidden_layers": meta.number(".audio.block_count"),
        "num_attention_heads": meta.number(".audio.attention.head_count"),
        "input_feat_size": meta.number(".audio.num_mel_bins"),
        "subsampling_conv_channels": [meta.shape(f"a.conv1d.{i}.weight")[0] for i in range(2)],
        "conv_kernel_size": meta.shape("a.blk.0.conv_dw.weight")[-1],
        "output_proj_dims": meta.shape("a.pre_encode.out.weight")[0],
        "rms_norm_eps": epsilon,
        "layer_norm_eps": epsilon,
        "use_clipped_linears": _is_clipped(meta, "a."),
    }


def _add_gemma4_tokens(meta: ClipMetadata, config: Json) -> None:
    add_token_ids(
        meta,
        config,
        image_token_id="<|image|>",
        boi_token_id="<|image>",
        eoi_token_id="<image|>",
        video_token_id="<|video|>",
        audio_token_id="<|audio|>",
        boa_token_id="<|audio>",
        eoa_token_index="<audio|>",
    )


def _gemma4_preprocessor(meta: ClipMetadata) -> Json:
    return image_values(meta, "Gemma4ImageProcessor") | {"patch_size": meta.number(".vision.patch_size")}


def _set_unified(meta: ClipMetadata, config: Json) -> None:
    """Describe the embedders of Gemma 4 Unified; a patch of the model is a square of pooled patches of colours."""
    width, values = meta.shape("v.patch_embd.weight")[:2]
    patch, side = meta.number(".vision.patch_size"), math.isqrt(values // 3)
    vision_epsilon, audio_epsilon = (meta.get(f".{part}.attention.layer_norm_epsilon") for part in ("vision", "audio"))
    config["vision_config"] = {
        "model_type": "gemma4_unified_vision",
        "mm_embed_dim": width,
        "output_proj_dims": meta.shape("mm.input_projection.weight")[1],
        "patch_size": patch,
        "pooling_kernel_size": side // max(1, patch),
        "model_patch_size": side,
        "mm_posemb_size": meta.shape("v.position_embd.weight")[1],
        "rms_norm_eps": vision_epsilon,
        "layer_norm_eps": vision_epsilon,
    }
    config["audio_config"] = {
        "model_type": "gemma4_unified_audio",
        "audio_embed_dim": meta.number(".audio.embedding_length"),
        "rms_norm_eps": audio_epsilon,
        "layer_norm_eps": audio_epsilon,
    }
    _add_gemma4_tokens(meta, config)


#: Names of Gemma 4's conformer; others are of Gemma 3n's.
_GEMMA4_AUDIO = (
    "conformer.layers.*.self_attn.q conformer.layers.*.self_attn.k conformer.layers.*.self_attn.v "
    "conformer.layers.*.self_attn.post conformer.layers.*.self_attn.per_dim conformer.layers.*.self_attn.relative "
    "conformer.layers.*.feed_forward1.ffw conformer.layers.*.feed_forward1.p "
    "conformer.layers.*.feed_forward2.ffw conformer.layers.*.feed_forward2.p "
    "conformer.layers.*.lconv1d. conformer.layers.*.norm_out conformer.layers.*.norm_p conformer.output_proj "
    "conformer.subsample_conv_projection. model.embed_audio."
)
HF_ENCODERS: dict[str, HfEncoders] = {
    "Gemma4ForConditionalGeneration": HfEncoders(
        "gemma4v",
        of_text_class(gemma.CLASSES["Gemma4ForCausalLM"], "gemma4", "model.language_model."),
        "vision_model.model.layers.*.mlp.up_proj vision_model.model.layers.*.mlp.down_proj vision_model.model. "
        "model.vision_tower.patch_embedder.input_proj model.vision_tower.patch_embedder. model.vision_tower.std_ "
        f"model.embed_vision. {_GEMMA4_AUDIO}",
        _set_gemma4,
        _gemma4_preprocessor,
        {"v.*ln2": "vision_model.model.layers.*.pre_feedforward_layernorm"},
        audio_projector="gemma4a",
    ),
    "Gemma4UnifiedForConditionalGeneration": HfEncoders(
        "gemma4uv",
        of_text_class(
            gemma.CLASSES["Gemma4ForCausalLM"],
            "gemma4_unified",
            "model.language_model.",
            model_type="gemma4_unified_text",
        ),
        "model.vision_embedder. model.embed_vision. model.embed_audio.",
        _set_unified,
        _gemma4_preprocessor,
        audio_projector="gemma4ua",
    ),
    "Gemma3ForConditionalGeneration": HfEncoders(
        "gemma3",
        replace(gemma.CLASSES["Gemma3ForCausalLM"], renames=((r"^", "language_model."),), outer_type="gemma3"),
        "vision_tower.vision_model. multi_modal_projector.",
        _set_gemma3,
        _gemma3_preprocessor,
    ),
}
