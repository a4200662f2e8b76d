"""EXAONE 3 to 4.5 and K-EXAONE.

Facts of llama.cpp b11434, conversion/exaone.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.nextn import MTP_NAMES, MtpRule, layers_with_nextn, nextn_layers, set_nextn_layers
from quantkit.checkpoint.row import LAYER, Always, Architecture, Copied, HfClass, SetKeys, has_key
from quantkit.checkpoint.rules import Drop, StackExperts
from quantkit.checkpoint.tensors import Context, Tensor


def set_exaone_rope(keys: Keys, config: Config) -> None:
    """Set the rotary dimensions of a head (EXAONE 3)."""
    width = config.number("hidden_size") // max(1, config.number("num_attention_heads"))
    keys.u32(".rope.dimension_count", int(config.rotary_part(1.0) * width))


def set_exaone_window(keys: Keys, config: Config) -> None:
    """Set the window of EXAONE 4, and which layers have it: a list of kinds, a word such as LLLG, or a period."""
    if config.get("sliding_window") is None:
        return
    keys.u32(".attention.sliding_window", config["sliding_window"])
    kinds = config.get("layer_types")
    pattern = config.get("sliding_window_pattern")
    layers = config.layers
    if isinstance(kinds, list):
        keys.array(".attention.sliding_window_pattern", [kind == "sliding_attention" for kind in kinds])
    elif isinstance(pattern, str) and pattern:
        keys.array(".attention.sliding_window_pattern", [pattern[i % len(pattern)] == "L" for i in range(layers)])
    elif isinstance(pattern, int) and pattern > 0:
        keys.array(".attention.sliding_window_pattern", [(i + 1) % pattern != 0 for i in range(layers)])


EXAONE4_KEYS: tuple[SetKeys, ...] = (Copied(".vocab_size", "vocab_size", required=True), set_exaone_window)
#: The factors of its rope, if the configuration does not say by how much.
exaone4_rope = partial(llama.rope_factors, factor=16.0)


@dataclass(frozen=True)
class RenameMtpLayers(MtpRule):
    """Rename mtp.* to layers after the last; the tensors that MTP layers share are copied to each (ExaoneMoEModel)."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.match(r"mtp\.(?:layers\.(\d{1,4})|(\w+))\.(.+)$", tensor.name)
        if match is None:
            return None
        n, config = context.config.layers, context.config
        if match[1] is not None:
            shared = range(nextn_layers(config)) if config.get("mtp_share_layers") else (int(match[1]),)
            return [replace(tensor, name=f"model.layers.{n + i}.{match[3]}") for i in shared]
        if match[2] not in MTP_NAMES:
            return None
        name = f"{MTP_NAMES[match[2]]}.{match[3]}"
        return [replace(tensor, name=f"model.layers.{i}.{name}") for i in range(n, n + nextn_layers(config))]


def _set_exaone_moe(keys: Keys, config: Config) -> None:
    width, shared = config.number("moe_intermediate_size"), config.number("num_shared_experts")
    keys.u32(".expert_feed_forward_length", width)
    keys.u32(".expert_shared_count", shared)
    keys.u32(".expert_shared_feed_forward_length", width * shared)
    keys.f32(".expert_weights_scale", config["routed_scaling_factor"])
    keys.flag(".expert_weights_norm", config["norm_topk_prob"])
    dense = config.find("first_k_dense_replace", "first_last_k_dense_replace")
    keys.u32(".leading_dense_block_count", dense or 0)
    keys.u32(".nextn_predict_layers", nextn_layers(config))


EXAONE_MOE_KEYS: tuple[SetKeys, ...] = (_set_exaone_moe, Always(".rope.scaling.type", "none", "text"))
_EXAONE = Architecture("exaone", keys=(set_exaone_rope,), synthetic=llama.rope_factors)
_EXAONE4 = Architecture("exaone4", keys=EXAONE4_KEYS, synthetic=exaone4_rope)

_EXAONE_MOE = Architecture(
    "exaone-moe",
    rules=(RenameMtpLayers(), StackExperts()),
    keys=(*EXAONE4_KEYS, *EXAONE_MOE_KEYS),
    layers=layers_with_nextn,
    synthetic=exaone4_rope,
)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "ExaoneForCausalLM": _EXAONE,
    "Exaone4ForCausalLM": _EXAONE4,
    "ExaoneMoEForCausalLM": _EXAONE_MOE,
    "ExaoneMoeForCausalLM": _EXAONE_MOE,
    "Exaone4_5_ForConditionalGeneration": Architecture(
        "exaone4",
        rules=(Drop(r"^mtp\.", when=lambda config: not nextn_layers(config)), RenameMtpLayers()),
        keys=(*EXAONE4_KEYS, set_nextn_layers),
        layers=layers_with_nextn,
        synthetic=exaone4_rope,
    ),
}


def set_full_attention(meta: ModelMetadata, config: Json) -> None:
    """Set full attention for all layers of a file without a window (EXAONE 4)."""
    if config["sliding_window"] is None:
        config["layer_types"] = ["full_attention"] * meta.number(".block_count")


_NO_WINDOW: Json = {"sliding_window": None}

_EXAONE_TOWER = config_values.AddTower(
    {"depth": 1, "num_heads": 2, "num_key_value_heads": 2, "fullatt_block_indexes": [0]}, "out_hidden_size"
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "ExaoneForCausalLM": HfClass(
        "exaone",
        "transformer.wte transformer.ln_f transformer.h.*.ln_1 transformer.h.*.ln_2 "
        "transformer.h.*.attn.attention.q_proj transformer.h.*.attn.attention.k_proj "
        "transformer.h.*.attn.attention.v_proj transformer.h.*.attn.attention.out_proj "
        "transformer.h.*.mlp.c_fc_0 transformer.h.*.mlp.c_fc_1 transformer.h.*.mlp.c_proj",
        keys={".block_count": "num_layers", ".attention.layer_norm_rms_epsilon": "layer_norm_epsilon"},
    ),
    "Exaone4ForCausalLM": HfClass(
        "exaone4",
        defaults={**_NO_WINDOW, "sliding_window_pattern": None},
        config_setters=(config_values.set_layer_types, set_full_attention),
        matches=lambda meta: not meta.get(".nextn_predict_layers"),
    ),
    "ExaoneMoeForCausalLM": HfClass(
        "exaone_moe",
        f"{LAYER}mlp.e_score_correction",
        keys={".expert_count": "num_experts", ".expert_shared_count": "num_shared_experts"},
        config_setters=(
            config_values.subtract_nextn_layers,
            config_values.set_layer_types,
            config_values.set_mlp_layer_types,
            config_values.set_rope_parameters,
        ),
    ),
    "Exaone4_5_ForConditionalGeneration": HfClass(
        "exaone4",
        defaults={"sliding_window": None, "sliding_window_pattern": None, "mtp_share_layers": False},
        config_setters=(
            config_values.subtract_nextn_layers,
            config_values.set_layer_types,
            set_full_attention,
            _EXAONE_TOWER,
        ),
        renames=((r"^model\.", "model.language_model."),),
        text_key="text_config",
        outer={"model_type": "exaone4_5"},
        matches=has_key("nextn_predict_layers"),
    ),
}
