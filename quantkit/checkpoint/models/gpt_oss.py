"""gpt-oss.

Facts of llama.cpp b11434, conversion/gpt_oss.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import WINDOW, Copied, SetKeys
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import Rename, Split, Transform, transpose, transpose_stored

#: gpt-oss: all experts in one tensor, transposed, with alternating gate and up rows.
SPLIT_EXPERTS = (
    Rename(r"down_proj_bias$", "down_proj.bias"),
    Split(r"gate_up_proj_bias$", ("gate_proj.bias", "up_proj.bias"), -1, interleaved=True),
    Transform(r"experts\.(gate_up|down)_proj$", transpose, transpose_stored),
    Rename(r"down_proj$", "down_proj.weight"),
    Split(r"gate_up_proj$", ("gate_proj.weight", "up_proj.weight"), -2, interleaved=True),
)

GPT_OSS_KEYS: tuple[SetKeys, ...] = (
    WINDOW,
    Copied(".expert_feed_forward_length", "intermediate_size", required=True),
)

ARCHITECTURES: dict[str, Architecture] = {
    "GptOssForCausalLM": Architecture(
        "gpt-oss",
        stored=(Rename(r"(sinks.*)$", r"\1.weight"),),
        rules=SPLIT_EXPERTS,
        keys=GPT_OSS_KEYS,
    ),
}


def set_untruncated(meta: ModelMetadata, config: Json) -> None:
    """YaRN's bounds are not rounded to whole dimensions (gpt-oss)."""
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False


CLASSES: dict[str, HfClass] = {
    "GptOssForCausalLM": HfClass(
        "gpt_oss",
        "model.layers.*.mlp.router",
        config_setters=(set_untruncated,),
        fused=True,
    ),
}
