"""MiMo V2.

Facts of llama.cpp b11434, conversion/mimo.py (MimoV2Model).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import WINDOW, Copied, KeyGroup, SetKeys, rotary_width
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.nextn import subtract_nextn_layers
from quantkit.checkpoint.row import LAYER, Architecture, HfClass
from quantkit.checkpoint.rules import STACK_GATE_FIRST, Rename
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.errors import FormatError, TypeNotSupported

STORED = (Rename(r"(attention_sink(?!.*\.weight$).*)$", r"\1.weight"),)
#: Prediction layers (MTP) of all releases; their configurations lack the number.
_MTP = 3


def layers_with_mtp(config: Config) -> int:
    """Return the number of layers, including prediction layers (MTP)."""
    return config.layers + _MTP


@dataclass(frozen=True)
class RenameMtpLayers(Rule):
    """Rename mtp.* to layers after the last."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        before, separator, name = tensor.name.partition("model.mtp.layers.")
        if before or not separator:
            return None
        number, _, tail = name.partition(".")
        if not number.isdecimal() or int(number) >= _MTP:
            raise context.fail(tensor, f"expected {_MTP} prediction layers (MTP)")
        return (replace(tensor, name=f"model.layers.{context.config.layers + int(number)}.{tail}"),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", tensor.name)
        number = -1 if match is None else int(match[1]) - context.config.layers
        return None if match is None or number < 0 else (replace(tensor, name=f"model.mtp.layers.{number}.{match[2]}"),)


def refuse_sharded(config: Config, names: Collection[str]) -> None:
    """Refuse tensors stored in parts for several devices, with scales per part, which the generic rules misread."""
    quantization = config.get("quantization_config") or {}
    if any(name.endswith("qkv_proj.weight_scale_inv") for name in names):
        raise TypeNotSupported(f"{config.path}: float8 qkv_proj split over several devices is not supported", "QK-E305")
    if isinstance(quantization, dict) and quantization.get("store_dtype") == "mxfp4":
        raise TypeNotSupported(
            f"{config.path}: MXFP4 experts of this model are not supported by this version", "QK-E305"
        )


def refuse_settings(keys: Keys, config: Config) -> None:
    """Refuse sliding-window layers with heads of another width or number, and unknown routers."""
    for name in ("head_dim", "num_attention_heads", "v_head_dim"):
        if config[f"swa_{name}"] != config[name]:
            raise FormatError(f"{config.path}: swa_{name} differs from {name}", "QK-E112")
    if config["topk_method"] != "noaux_tc":
        raise FormatError(f"{config.path}: topk_method is not noaux_tc", "QK-E305")


def _set_layers(keys: Keys, config: Config) -> None:
    slides = [*config["hybrid_layer_pattern"], *[1] * _MTP][: keys.layers]
    full, sliding = config["num_key_value_heads"], config["swa_num_key_value_heads"]
    keys.array(".attention.head_count_kv", [sliding if slide == 1 else full for slide in slides])
    WINDOW(keys, config)
    keys.array(".attention.sliding_window_pattern", slides)


def _set_nextn(keys: Keys, config: Config) -> None:
    if keys.layers > config.layers:
        keys.u32(".nextn_predict_layers", _MTP)


KEYS: tuple[SetKeys, ...] = (
    refuse_settings,
    _set_layers,
    Copied(".attention.value_length", "v_head_dim", required=True),
    Copied(".expert_count", "n_routed_experts", required=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    rotary_width(None, lambda config: config.number("head_dim")),
    Copied(".attention.layer_norm_rms_epsilon", "layernorm_epsilon", "f32", default=1e-5),
    Copied(".attention.value_scale", "attention_value_scale", "f32"),
    KeyGroup(_set_nextn, subtract_nextn_layers),
)

_MIMO_2 = Architecture(
    "mimo2",
    stored=(*STORED, RenameMtpLayers()),
    rules=(STACK_GATE_FIRST,),
    keys=KEYS,
    layers=layers_with_mtp,
    inspect_tensors=refuse_sharded,
    nextn=True,
)

ARCHITECTURES: dict[str, Architecture] = {
    "MiMoV2FlashForCausalLM": _MIMO_2,
    "MiMoV2ForCausalLM": _MIMO_2,
}


def set_hybrid_windows(meta: ModelMetadata, config: Json) -> None:
    """Set heads of layers with and without a window (MiMo V2)."""
    slides = (meta.flags(".attention.sliding_window_pattern") or [])[: config["num_hidden_layers"]]
    heads = config["num_key_value_heads"]
    of_kind = dict(zip(slides, heads, strict=False)) if isinstance(heads, list) else {}
    kv_heads = {item: of_kind.get(item, max(heads) if isinstance(heads, list) else heads) for item in (False, True)}
    config |= {
        "hybrid_layer_pattern": [int(slide) for slide in slides],
        "num_key_value_heads": kv_heads[False],
        "swa_num_key_value_heads": kv_heads[True],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
    }


CLASSES: dict[str, HfClass] = {
    "MiMoV2FlashForCausalLM": HfClass(
        "mimo_v2_flash",
        f"{LAYER}self_attn.attention_sink_bias",
        keys={
            ".rope.freq_base_swa": "swa_rope_theta",
            ".attention.sliding_window": "sliding_window",
        },
        defaults={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
        config_setters=(set_hybrid_windows,),
        renames=((r"(\.attention_sink_bias)\.weight$", r"\1"),),
    ),
}
