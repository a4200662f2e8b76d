"""ERNIE 4.5, dense and with experts, and PaddleOCR-VL with its vision encoder.

Facts of llama.cpp b11434, conversion/ernie.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.key_rows import Computed, Copied, SetKeys
from quantkit.checkpoint.mmproj import PIXELS, USE_GELU, Mmproj, MmprojConfig, layer_norm_epsilon, projector
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import STACK_GATE_FIRST, Drop, Rename, Split
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.checkpoint.vocab.tokenizer import Vocabulary

RENAME_MODEL = Rename(r"ernie\.", "model.", foreign=True)


def _heads(config: Config) -> tuple[int, ...]:
    """Return the rows of queries, keys and values in one matrix."""
    width, shared = config.head_dim, config.number("num_key_value_heads")
    return (config.number("num_attention_heads") * width, shared * width, shared * width)


SPLIT_FUSED = (
    Split(r"qkv_proj\.weight$", ("q_proj.weight", "k_proj.weight", "v_proj.weight"), sizes=_heads),
    Split(r"up_gate_proj\.weight$", ("gate_proj.weight", "up_proj.weight")),
)

#: The prediction layers (MTP) are not converted.
DROP_MTP = Drop(r"^model\.mtp_(block|emb_norm|hidden_norm|linear_proj)\.\d+")


def _shared_width(config: Config) -> int | None:
    """Return the width of shared experts, intermediate_size / KV heads as in the converter."""
    width, heads = config.get("intermediate_size"), config.get("num_key_value_heads")
    if not config.get("moe_num_shared_experts") or width is None or not heads:
        return None
    return config.number("intermediate_size") // config.number("num_key_value_heads")


MOE_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_count", "moe_num_experts", required=True),
    Copied(".expert_used_count", "moe_k", required=True),
    Copied(".interleave_moe_layer_step", "moe_layer_interval", required=True),
    Copied(".leading_dense_block_count", "moe_layer_start_index", required=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size"),
    Copied(".expert_shared_count", "moe_num_shared_experts"),
    Computed(".expert_shared_feed_forward_length", _shared_width),
)


def write_ernie(v: Vocabulary) -> None:
    """Write a SentencePiece vocabulary, and whether a space precedes a text (Ernie4_5Model)."""
    write_sentencepiece(v)
    if "add_prefix_space" in v.tokenizer_config:
        v.keys.flag("tokenizer.ggml.add_space_prefix", v.tokenizer_config["add_prefix_space"])


_ERNIE = Architecture("ernie4_5", stored=(RENAME_MODEL,), rules=SPLIT_FUSED, vocab=write_ernie)

ARCHITECTURES: dict[str, Architecture] = {
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_ForCausalLM": _ERNIE,
    "Ernie4_5_MoeForCausalLM": replace(
        _ERNIE,
        arch="ernie4_5-moe",
        stored=(DROP_MTP, RENAME_MODEL),
        rules=(STACK_GATE_FIRST,),
        keys=MOE_KEYS,
    ),
    "PaddleOCRVLForConditionalGeneration": Architecture(
        "paddleocr", stored=(RENAME_MODEL,), rules=SPLIT_FUSED, vocab=write_ernie
    ),
}

_IMAGE_SIZES = {"image_size": 28, "patch_size": 14}

CLASSES: dict[str, HfClass] = {
    "Ernie4_5ForCausalLM": HfClass("ernie4_5"),
    "Ernie4_5_MoeForCausalLM": HfClass(
        "ernie4_5_moe",
        "model.layers.*.mlp.moe_statics.e_score_correction",
    ),
    "PaddleOCRVLForConditionalGeneration": HfClass(
        "paddleocr_vl",
        config_setters=(config_values.AddTower({"num_hidden_layers": 1, "num_attention_heads": 2, **_IMAGE_SIZES}),),
    ),
}


# --- The vision encoder of PaddleOCR-VL -----------------------------------------------------------------------------


def _patch_paddle(config: MmprojConfig) -> None:
    """Derive the size of images from their most pixels."""
    config.vision.values["image_size"] = isqrt(config.preprocessor.number("max_pixels"))


MMPROJ: dict[str, Mmproj] = {
    "PaddleOCRVisionModel": Mmproj(
        (projector("paddleocr"), *reversed(PIXELS), USE_GELU, layer_norm_epsilon("rms_norm_eps", 1e-6)),
        tensors=r"^(?!.*(packing_position_embedding|vision_model\.head)).*(vision_model|mlp_AR)",
        stored=(Rename(r"visual\.", "model."),),
        patch_config=_patch_paddle,
    ),
}
