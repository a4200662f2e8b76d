"""MiniCPM 1 to 3, PLM, whose heads are projected from a latent like MiniCPM 3's, and the encoder of MiniCPM-V 4.6.

Facts of llama.cpp b11434, conversion/minicpm.py, conversion/plm.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Constant
from quantkit.checkpoint.hf_encoders import USUAL_COUNTS, HfEncoders, add_token_ids, image_values, of_text_class
from quantkit.checkpoint.key_rows import BLOCK_COUNT, FILE_TYPE, VOCAB_SIZE, Computed, Copied, KeyGroup, SetKeys
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.mmproj import USE_GELU, Key, Mmproj, MmprojConfig, layer_norm_epsilon, projector
from quantkit.checkpoint.models import llama, qwen3_next
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import Drop
from quantkit.checkpoint.tensors import Tensor
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


def _set_scales(keys: Keys, config: Config) -> None:
    """Set MiniCPM's scales of embeddings, residuals and logits."""
    keys.f32(".embedding_scale", float(config["scale_emb"]))
    keys.f32(".residual_scale", config["scale_depth"] / config.layers**0.5)
    keys.f32(".logit_scale", config["hidden_size"] / config["dim_model_base"])


def _set_scales_config(meta: ModelMetadata, config: Json) -> None:
    root = meta.number(".block_count") ** 0.5
    residual = float(meta.get(".residual_scale") or 1.0)
    config |= {
        "scale_emb": meta.get(".embedding_scale"),
        "scale_depth": config_values.shortest_argument(residual * root, lambda x: x / root),
        "dim_model_base": config_values.shortest_argument(
            config["hidden_size"] / float(meta.get(".logit_scale") or 1.0), lambda x: x
        ),
    }


def _set_head_widths(meta: ModelMetadata, config: Json) -> None:
    """Set the head widths of latent attention, whose projections the file stores as one matrix."""
    rope = meta.number(".rope.dimension_count")
    config |= {"qk_rope_head_dim": rope, "qk_nope_head_dim": meta.number(".attention.key_length") - rope}
    output = meta.model.tensors.get("blk.0.attn_output.weight")
    if output is not None:
        config["v_head_dim"] = output.shape[0] // max(1, meta.number(".attention.head_count"))
    config.setdefault("q_lora_rank", None)


_KV_RANK = Copied(".attention.kv_lora_rank", "kv_lora_rank", required=True)
_KEY_WIDTH = Computed(
    ".attention.key_length",
    lambda config: config.number("qk_nope_head_dim") + config.number("qk_rope_head_dim"),
    inverse=_set_head_widths,
)
_ROPE_WIDTH = Computed(".rope.dimension_count", lambda config: config.number("qk_rope_head_dim"))

MINICPM3_BASE: tuple[SetKeys, ...] = (
    FILE_TYPE,
    Copied(".context_length", "max_position_embeddings", required=True),
    Copied(".embedding_length", "hidden_size", required=True),
    BLOCK_COUNT,
    Copied(".feed_forward_length", "intermediate_size", required=True),
    Copied(".attention.head_count", "num_attention_heads", required=True),
    Copied(".attention.head_count_kv", "num_key_value_heads", required=True),
    Copied(".attention.layer_norm_rms_epsilon", "rms_norm_eps", "f32", required=True),
    VOCAB_SIZE,
    Copied(".attention.q_lora_rank", "q_lora_rank"),
    _KV_RANK,
    _KEY_WIDTH,
    _ROPE_WIDTH,
)
PLM_KEYS: tuple[SetKeys, ...] = (
    VOCAB_SIZE,
    _KV_RANK,
    _KEY_WIDTH,
    Copied(".attention.value_length", "v_head_dim", required=True),
    _ROPE_WIDTH,
)


def rope_factors(config: Config) -> Iterable[Tensor]:
    """Yield MiniCPM's long and short rope factors, one for every two rotated values of a head."""
    width = config.number("qk_rope_head_dim") if "qk_rope_head_dim" in config else config.without("head_dim").head_dim
    kinds = [(kind, config.rope.get(f"{kind}_factor")) for kind in ("long", "short")]
    if not any(factors for _, factors in kinds):
        return
    for kind, factors in kinds:
        if not isinstance(factors, list) or 2 * len(factors) != width:
            raise FormatError(f"{config.path}: {kind}_factor of rope is not a list of {width // 2} factors", "QK-E112")
        name = f"rope_factors_{kind}.weight"
        yield Tensor(name, Constant(tuple(float(factor) for factor in factors)), None, name)


ARCHITECTURES: dict[str, Architecture] = {
    "MiniCPMForCausalLM": Architecture(
        "minicpm",
        rules=llama.ROPE_PERMUTED,
        keys=(KeyGroup(_set_scales, _set_scales_config),),
        vocab=write_sentencepiece,
        synthetic=rope_factors,
    ),
    "MiniCPM3ForCausalLM": Architecture(
        "minicpm3", base=MINICPM3_BASE, vocab=write_sentencepiece, synthetic=rope_factors
    ),
    "PLMForCausalLM": Architecture("plm", keys=PLM_KEYS),
}


def _set_unscaled_rope(meta: ModelMetadata, config: Json) -> None:
    """Set a rope scaling factor of 1: MiniCPM's long factors do not scale attention."""
    config_values.set_long_rope(meta, config)
    if rope := config["rope_scaling"]:
        rope |= {"factor": 1.0, "original_max_position_embeddings": meta.number(".context_length")}


CLASSES: dict[str, HfClass] = {
    "MiniCPMForCausalLM": HfClass("minicpm", config_setters=(_set_unscaled_rope,)),
    "MiniCPM3ForCausalLM": HfClass(
        "minicpm3",
        # Constants of llama.cpp's graph.
        defaults={"scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4},
        config_setters=(_set_unscaled_rope,),
    ),
    "PLMForCausalLM": HfClass("plm"),
}


# --- The vision encoder of MiniCPM-V 4.6 ----------------------------------------------------------------------------


def _patch_vision(config: MmprojConfig) -> None:
    """State the resolution of slices as the size of images; config.json has that of the position embeddings."""
    resolution = config.preprocessor.get("scale_resolution")
    if resolution is not None:
        config.vision.values["image_size"] = int(resolution)


def _scale_factor(config: Config) -> int:
    """Return the number of patches on a side of a token."""
    assert isinstance(config, MmprojConfig)
    mode = config.preprocessor.get("downsample_mode", "16x")
    if mode not in ("4x", "16x"):
        raise FormatError(f"{config.preprocessor.path}: downsample_mode is {short(mode)}, not 4x or 16x", "QK-E305")
    return 2 if mode == "4x" else 4


def _insertion(config: MmprojConfig) -> list[int]:
    """Return the layer after which patches are merged."""
    return [int(config.model.get("insert_layer_id", config.vision.get("insert_layer_id", 6)))]


MMPROJ: dict[str, Mmproj] = {
    "MiniCPMV4_6ForConditionalGeneration": Mmproj(
        (
            projector("minicpmv4_6"),
            Key(".vision.projector.scale_factor", _scale_factor),
            Key(".vision.wa_layer_indexes", _insertion, "array"),
            USE_GELU,
            layer_norm_epsilon("layer_norm_eps", 1e-6),
        ),
        stored=(
            Drop(r"^(lm_head\.|mtp)"),
            Drop(r"\.vit_merger\.", lambda config: _scale_factor(config) == 2),
        ),
        patch_config=_patch_vision,
    )
}


# --- export ----------------------------------------------------------------------------------------------------------


def _set_minicpm_v(meta: ClipMetadata, config: Json) -> None:
    """Describe the encoder; its image size is that of the embeddings of positions."""
    vision = meta.counts(USUAL_COUNTS)
    side = math.isqrt(meta.shape("v.position_embd.weight")[0]) * vision["patch_size"]
    layers = meta.get(".vision.wa_layer_indexes") or [6]
    config["vision_config"] = vision | {
        "model_type": "minicpmv4_6_vision",
        "image_size": side,
        "insert_layer_id": int(layers[0]),
        "layer_norm_eps": meta.get(".vision.attention.layer_norm_epsilon"),
    }
    config |= {"insert_layer_id": int(layers[0]), "downsample_mode": "16x"}
    add_token_ids(meta, config, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>")


def _minicpm_v_preprocessor(meta: ClipMetadata) -> Json:
    sizes = {"patch_size": meta.number(".vision.patch_size"), "scale_resolution": meta.number(".vision.image_size")}
    return image_values(meta, "MiniCPMV4_6ImageProcessor") | sizes | {"downsample_mode": "16x"}


HF_ENCODERS: dict[str, HfEncoders] = {
    "MiniCPMV4_6ForConditionalGeneration": HfEncoders(
        "minicpmv4_6",
        of_text_class(qwen3_next.CLASSES["Qwen3_5ForCausalLM"], "minicpmv4_6", "model.language_model."),
        "model.vision_tower.embeddings. model.vision_tower.encoder.layers. model.vision_tower.post_layernorm "
        "model.vision_tower.vit_merger.",
        _set_minicpm_v,
        _minicpm_v_preprocessor,
        {
            "mm.input_norm": "model.merger.mlp.0.pre_norm",
            "mm.up": "model.merger.mlp.0.linear_1",
            "mm.down": "model.merger.mlp.0.linear_2",
        },
        # At 4x, files lack the merger of the encoder.
        matches=lambda meta: meta.get(".vision.projector.scale_factor") == 4,
    )
}
