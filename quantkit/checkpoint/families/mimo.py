"""MiMo V2.

Facts of llama.cpp b11434, conversion/mimo.py (MimoV2Model).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import Keys, layers_in_file
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Context, Renamed, Tensor
from quantkit.errors import FormatError, TypeNotSupported

#: Layers that predict more tokens: of all releases, whose configurations do not say it.
_AHEAD = 3

STORED = (Renamed(r"(attention_sink(?!.*\.weight$).*)$", r"\1.weight"),)


def layers_with_ahead(config: Config) -> int:
    """Return the number of layers, those that predict ahead included."""
    return config.layers + _AHEAD


@dataclass(frozen=True)
class LayersAhead:
    """Layers that predict ahead are stored under mtp.; they follow the others."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        before, found, name = tensor.name.partition("model.mtp.layers.")
        if before or not found:
            return None
        number, _, rest = name.partition(".")
        if not number.isdecimal() or int(number) >= _AHEAD:
            raise context.fail(tensor, f"there are {_AHEAD} layers that predict more tokens")
        return (replace(tensor, name=f"model.layers.{context.config.layers + int(number)}.{rest}"),)


def refuse_sharded(config: Config, names: Collection[str]) -> None:
    """Refuse what is stored in parts for several devices, scales of each part: the generic rules misread it."""
    given = config.get("quantization_config") or {}
    if any(name.endswith("qkv_proj.weight_scale_inv") for name in names):
        raise TypeNotSupported(f"{config.path}: float8 qkv_proj in parts of several devices is not converted")
    if isinstance(given, dict) and given.get("store_dtype") == "mxfp4":
        raise TypeNotSupported(f"{config.path}: MXFP4 experts of this model are not converted by this version")


def _set_layers(keys: Keys, config: Config) -> None:
    for name in ("head_dim", "num_attention_heads", "v_head_dim"):
        if config[f"swa_{name}"] != config[name]:
            raise FormatError(f"{config.path}: swa_{name} is not {name}")
    if config["topk_method"] != "noaux_tc":
        raise FormatError(f"{config.path}: topk_method is not noaux_tc")
    slides = [*config["hybrid_layer_pattern"], *[1] * _AHEAD][: layers_in_file(keys)]
    full, sliding = config["num_key_value_heads"], config["swa_num_key_value_heads"]
    keys.array(".attention.head_count_kv", [sliding if each == 1 else full for each in slides])
    keys.u32(".attention.sliding_window", config["sliding_window"])
    keys.array(".attention.sliding_window_pattern", slides)


def _set_rope(keys: Keys, config: Config) -> None:
    keys.u32(".rope.dimension_count", int(config.number("head_dim") * config.rotary_part(None)))
    keys.f32(".attention.layer_norm_rms_epsilon", config.get("layernorm_epsilon", 1e-5))
    if (scale := config.get("attention_value_scale")) is not None:
        keys.f32(".attention.value_scale", float(scale))
    if layers_in_file(keys) > config.layers:
        keys.u32(".nextn_predict_layers", _AHEAD)


KEYS: tuple[SetKeys, ...] = (
    _set_layers,
    Copied(".attention.value_length", "v_head_dim", needed=True),
    Copied(".expert_count", "n_routed_experts", needed=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", needed=True),
    _set_rope,
)
