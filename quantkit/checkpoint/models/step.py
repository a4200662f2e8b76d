"""Step 3.5 and 3.7; the encoders of Step 3 VL.

Facts of llama.cpp b11434, conversion/step3.py .
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.encoder_rules import NameInFile
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import TYPE_F32, Constant, Expression
from quantkit.checkpoint.hf_encoders import REMOTE_NOTE, HfEncoders, add_token_ids, image_values
from quantkit.checkpoint.key_rows import WINDOW, Computed, Copied, SetKeys, SwigluLimits
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.mmproj import SCALE_FACTOR, Mmproj, MmprojConfig, constant, layer_norm_epsilon, projector
from quantkit.checkpoint.models import qwen
from quantkit.checkpoint.nextn import NEXTN_IF_ANY, layers_with_nextn
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Rename, Transform, identity, minus_one, plus_one, squeeze
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

STORED = (
    Rename(r"(\.moe\.router_bias)$", r"\1.bias"),
    Rename(r"(\.layers\.\d+)\.transformer\.", r"\1.", foreign=True),  # of some layers: see ``renames``
    Rename(r"shared_head\.output", "shared_head.head"),
)


def squeeze_ones(tensor: Tensor, context: Context) -> Expression:
    """Remove dimensions of one from matrices that have none in releases."""
    return squeeze(tensor, context)


RULES = (
    Transform(r"norm\.weight$", plus_one, minus_one),
    Transform(r"\.(self_attn\.g_proj|moe\.(gate|up_proj|gate_proj|down_proj))\.weight$", squeeze_ones, identity),
)


def split_theta(config: Config) -> None:
    """Split two rope bases: the second is that of sliding-window layers."""
    theta = config.get("rope_theta")
    if isinstance(theta, list):
        config.rope |= {"rope_theta": float(theta[0]), "sliding_attention": {"rope_theta": float(theta[1])}}


def _set_heads(keys: Keys, config: Config) -> None:
    """Set the heads and windows of layers, the MTP layers included."""
    n, sliding_config = keys.layers, config.get("attention_other_setting") or {}
    slides = [kind == "sliding_attention" for kind in _pad(config.get("layer_types"), n, "full_attention")]
    turned = _pad(config.get("partial_rotary_factors"), n, 0.5)
    if turned != [1.0 if slide else 0.5 for slide in slides]:
        raise FormatError(
            f"{config.path}: rope must rotate all of a head with a window, and half of a head without", "QK-E305"
        )
    for key, name in ((".attention.head_count", "heads"), (".attention.head_count_kv", "groups")):
        full = config.number(f"num_attention_{name}")
        sliding = sliding_config.get(f"num_attention_{name}", full)
        keys.array(key, [sliding if slide else full for slide in slides])
    WINDOW(keys, config)
    keys.array(".attention.sliding_window_pattern", slides)


def _dense_layers(config: Config) -> int:
    layer_list = config.get("moe_layers_enum")
    layers = [int(i) for i in layer_list.split(",")] if isinstance(layer_list, str) and layer_list.strip() else [0]
    return max(0, min(layers))


KEYS: tuple[SetKeys, ...] = (
    _set_heads,
    Copied(".attention.value_length", "head_dim", required=True),
    Copied(".expert_count", "moe_num_experts", required=True),
    Copied(".expert_used_count", "moe_top_k", required=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Copied(".expert_shared_feed_forward_length", "share_expert_dim", required=True),
    Copied(".expert_weights_scale", "moe_router_scaling_factor", "f32"),
    Copied(".expert_weights_norm", "norm_expert_weight", "flag"),
    Computed(".leading_dense_block_count", _dense_layers),
    Computed(".moe_every_n_layers", lambda config: int(config.get("moe_every_n_layer", 1)), names="moe_every_n_layer"),
    Copied(".attention.layer_norm_rms_epsilon", "rms_norm_eps", "f32", default=1e-5),
    SwigluLimits(".swiglu_clamp_exp", "swiglu_limits"),
    SwigluLimits(".swiglu_clamp_shexp", "swiglu_limits_shared"),
    NEXTN_IF_ANY,
)


def rope_factors(config: Config) -> Iterable[Tensor]:
    """The factors of Llama 3's rope for the part of a head that layers without a window rotate; 1 for the rest."""
    rope = config.full_rope
    if str(rope.get("rope_type") or "").lower() != "llama3":
        return
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            values = _rope_factors(rope, config)
    except (TypeError, ValueError, ArithmeticError) as e:
        raise FormatError(
            f"{config.path}: invalid values of Llama 3 rope scaling: {short(str(e))}", "QK-E112"
        ) from None
    yield Tensor("rope_freqs.weight", Constant(values), None, "rope_freqs.weight")


def _pad(values: Any, n: int, filler: Any) -> list[Any]:
    return [*(values or []), *[filler] * n][:n]


def _rope_factors(rope: Json, config: Config) -> tuple[float, ...]:
    width, theta = config.head_dim, config.get("rope_theta", 10000.0)
    base = float(theta[0] if isinstance(theta, list) else theta)
    kinds = zip(config.get("layer_types") or [], config.get("partial_rotary_factors") or [], strict=False)
    part = next((float(f) for kind, f in kinds if kind == "full_attention"), 0.5)
    if not 0 < part <= 1:
        raise ValueError(f"rope rotates a share of {part} of a head")
    turned = int(width * part)
    factor = float(rope.get("factor", 8.0))
    low, high = float(rope.get("low_freq_factor", 1.0)), float(rope.get("high_freq_factor", 4.0))
    length = int(rope.get("original_max_position_embeddings", 8192))
    exponents = np.arange(0, turned, 2, dtype=np.float32) / np.float32(turned)
    powers = np.power(base, exponents.astype(np.float64)).astype(np.float32)
    values = []
    for frequency in (np.float32(1) / powers).tolist():
        wave = 2 * math.pi / frequency
        if wave < length / high:
            values.append(1.0)
        elif wave > length / low:
            values.append(factor)
        else:
            smooth = (length / wave - low) / (high - low)
            values.append(1.0 / ((1.0 - smooth) / factor + smooth))
    values += [1.0] * (width // 2 - len(values))
    return tuple(float(np.float32(v)) for v in values)


_STEP = Architecture(
    "step35",
    stored=STORED,
    rules=RULES,
    keys=KEYS,
    layers=layers_with_nextn,
    patch_config=split_theta,
    synthetic=rope_factors,
    nextn=True,
)

ARCHITECTURES: dict[str, Architecture] = {
    "Step3p5ForCausalLM": _STEP,
    "Step3p7ForConditionalGeneration": _STEP,
}


def _set_step_layers(meta: ModelMetadata, config: Json) -> None:
    """Set heads, rope and experts of layers with and without a window."""
    slides = meta.flags(".attention.sliding_window_pattern") or []
    sliding_config = {"attention_type": "sliding_attention", "head_dim": config["head_dim"]}
    for name, key in (("heads", ".attention.head_count"), ("groups", ".attention.head_count_kv")):
        of_kind = dict(zip(slides, meta.per_layer(key), strict=False))
        largest = max(of_kind.values(), default=0)
        config[f"num_attention_{name}"] = of_kind.get(False, largest)
        sliding_config[f"num_attention_{name}"] = of_kind.get(True, largest)
    theta = config.pop("rope_theta", 10000.0)
    bases = (theta, config.pop("rope_local_base_freq", theta))
    config |= {
        "attention_other_setting": sliding_config,
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "partial_rotary_factors": [1.0 if slide else 0.5 for slide in slides],
        "rope_theta": [bases[slide] for slide in slides],
        "moe_layers_enum": ",".join(map(str, meta.layers_with("ffn_gate_inp.weight"))),
    }


_STEP_CLASS = HfClass(
    "step3p5",
    add_prefix(
        LAYER,
        "self_attn.g_proj moe.gate moe.router_bias moe.gate_proj moe.up_proj moe.down_proj share_expert.gate_proj "
        "share_expert.up_proj share_expert.down_proj",
    ),
    keys={
        ".attention.head_count_kv": "",
        ".expert_gating_func": "moe_router_activation",
        ".attention.sliding_window": "sliding_window",
    },
    # Constants of llama.cpp's graph.
    defaults={"use_head_wise_attn_gate": True, "use_moe_router_bias": True, "yarn_only_types": ["full_attention"]},
    config_setters=(_set_step_layers,),
    renames=((r"(\.layers\.\d+)\.(shared_head\.)", r"\1.transformer.\2"),),
)

CLASSES: dict[str, HfClass] = {
    "Step3p7ForConditionalGeneration": replace(
        _STEP_CLASS,
        config_setters=(
            *_STEP_CLASS.config_setters,
            config_values.AddTower({"layers": 1, "heads": 2, "width": 64, "image_size": 56, "patch_size": 14}),
        ),
        not_null=("pad_token_id",),
        outer_type="step3p7",
    ),
    "Step3p5ForCausalLM": _STEP_CLASS,
}


# --- Encoders of Step 3 VL and Step 3.7 -------------------------------------------------------------------------------

#: The sizes that llama.cpp computes: the projector's stride, images, width, layers.
_STEP_SIZES = (2, 728, 1536, 47)


def _patch_step(config: MmprojConfig) -> None:
    """Refuse other sizes than those of the release; set the values that its configuration lacks."""
    vision = config.vision.values
    width = vision.get("hidden_size", vision.get("width"))
    layers = vision.get("num_hidden_layers", vision.get("layers"))
    sizes = (config.model.get("understand_projector_stride"), vision.get("image_size"), width, layers)
    if sizes != _STEP_SIZES:
        raise FormatError(
            f"{config.path}: stride of the projector, image size, width and layers are {short(sizes)}; supported are "
            f"{_STEP_SIZES}, those of Step3-VL-10B",
            "QK-E305",
        )
    if not vision.get("intermediate_size"):
        vision["intermediate_size"] = round(float(width or 0) * float(vision.get("mlp_ratio", 8960 / 1536)))
    config.preprocessor.values.setdefault("image_mean", [0.48145466, 0.4578275, 0.40821073])
    config.preprocessor.values.setdefault("image_std", [0.26862954, 0.26130258, 0.27577711])


def _downsampler_name(match: re.Match[str]) -> str:
    return f"mm.{int(match[1]) - 1}.{match[2]}"


_STEP_VL = Mmproj(
    (
        projector("step3vl"),
        layer_norm_epsilon("layer_norm_eps", 1e-5),
        constant(SCALE_FACTOR, _STEP_SIZES[0] ** 2),
        constant(".vision.preproc_image_size", 3024),
    ),
    tensors=r"^(vision_model\.|vit_large_projector\.weight$)",
    rules=(
        NameInFile(r"^vision_model\.vit_downsampler(\d+)\.(weight|bias).*$", _downsampler_name),
        NameInFile(r"^vit_large_projector\.weight$", "mm.model.fc.weight"),
        Rename(r"^vision_model\.positional_embedding$", "vision_model.positional_embedding.weight"),
        Rename(r"(\.ls_.*)\.gamma$", r"\1.weight"),
        Rename(r"attn\.in_proj_(weight|bias)", r"attn.in_proj.\1"),
    ),
    forced=((".position_embd.", TYPE_F32), ("mm.0.weight", None), ("mm.1.weight", None)),
    patch_config=_patch_step,
)
MMPROJ: dict[str, Mmproj] = dict.fromkeys(
    ("StepVLForConditionalGeneration", "Step3p7ForConditionalGeneration"), _STEP_VL
)


# --- export ----------------------------------------------------------------------------------------------------------


def _set_step(meta: ClipMetadata, config: Json) -> None:
    """Describe the perception encoder of Step, whose feed-forward width is a ratio."""
    width = meta.number(".vision.embedding_length")
    config["vision_config"] = {
        "model_type": "perception_encoder",
        "width": width,
        "layers": meta.number(".vision.block_count"),
        "heads": meta.number(".vision.attention.head_count"),
        "image_size": meta.number(".vision.image_size"),
        "patch_size": meta.number(".vision.patch_size"),
        "mlp_ratio": meta.number(".vision.feed_forward_length") / max(1, width),
        "hidden_act": "quick_gelu",
        "layer_norm_eps": meta.get(".vision.attention.layer_norm_epsilon"),
    }
    config["understand_projector_stride"] = math.isqrt(meta.number(SCALE_FACTOR))
    add_token_ids(meta, config, image_token_id="<im_patch>")


_STEP_ENCODERS = HfEncoders(
    "step3vl",
    CLASSES["Step3p7ForConditionalGeneration"],
    "vision_model.transformer.resblocks. vision_model.conv1 vision_model.positional_embedding vision_model.ln_pre",
    _set_step,
    lambda meta: image_values(meta, "Step3VisionProcessor"),
    {
        "v.position_embd": "vision_model.positional_embedding",
        "mm.0": "vision_model.vit_downsampler1",
        "mm.1": "vision_model.vit_downsampler2",
        "mm.model.fc": "vit_large_projector",
    },
)
HF_ENCODERS: dict[str, HfEncoders] = {
    "Step3p7ForConditionalGeneration": _STEP_ENCODERS,
    "StepVLForConditionalGeneration": replace(
        _STEP_ENCODERS,
        text=replace(
            qwen.CLASSES["Qwen3ForCausalLM"],
            outer_type="step_robotics",
            note=f"StepVLForConditionalGeneration {REMOTE_NOTE}",
        ),
        text_class="Qwen3ForCausalLM",
    ),
}
