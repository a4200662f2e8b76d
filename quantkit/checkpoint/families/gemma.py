"""Gemma 1, 2, 3, 3n and 4 (text).

Facts of llama.cpp b11434, conversion/gemma.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from quantkit.checkpoint.config import Config, optional_json
from quantkit.checkpoint.expressions import Constant, Expression, Zeros, joined, stacked, taken
from quantkit.checkpoint.keys import Keys, layers_in_file
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Context, Dropped, Experts, Named, Renamed, Tensor, plus_one
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

#: Norms multiply by one more than their weights.
NORMS = Changed(r"norm\.weight$", plus_one)
#: The head is the embedding; some tools store it once more.
TIED_HEAD = Dropped(r"^lm_head\.weight$")


def set_gemma_keys(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of Gemma 1 and 2: an order of their own."""
    heads = config["num_attention_heads"]
    keys.u32(".context_length", config["max_position_embeddings"])
    keys.u32(".embedding_length", config["hidden_size"])
    keys.u32(".block_count", layers)
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32(".attention.head_count", heads)
    keys.u32(".attention.head_count_kv", config.get("num_key_value_heads", heads))
    keys.f32(".attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    keys.u32(".attention.key_length", config["head_dim"])
    keys.u32(".attention.value_length", config["head_dim"])
    keys.u32("general.file_type", file_type)


GEMMA2_KEYS: tuple[SetKeys, ...] = (
    Copied(".attn_logit_softcapping", "attn_logit_softcapping", "f32", needed=True),
    Copied(".final_logit_softcapping", "final_logit_softcapping", "f32", needed=True),
    Copied(".attention.sliding_window", "sliding_window", needed=True),
)


def set_gemma3_keys(keys: Keys, config: Config) -> None:
    """Set the keys of Gemma 3: some of the base ones have defaults of their own."""
    keys.u32(".context_length", config.get("max_position_embeddings", 131072))
    keys.u32(".attention.head_count", config.get("num_attention_heads", 8))
    keys.f32(".attention.layer_norm_rms_epsilon", config.get("rms_norm_eps", 1e-6))
    keys.u32(".attention.key_length", config.get("head_dim", 256))
    keys.u32(".attention.value_length", config.get("head_dim", 256))
    keys.f32(".rope.freq_base", config.full_rope.get("rope_theta", 1e6))
    if config.get("attn_logit_softcapping") is not None:
        raise FormatError(f"{config.path}: attn_logit_softcapping, which this architecture does not have")
    Copied(".final_logit_softcapping", "final_logit_softcapping", "f32", unless_zero=True)(keys, config)
    if config.get("sliding_window_pattern") != 1:
        keys.u32(".attention.sliding_window", config["sliding_window"])
    keys.count(".attention.head_count_kv", config.get("num_key_value_heads", 4))


def known_tokens(tensor: Tensor, context: Context) -> Expression:
    """Leave out the rows of embeddings that no token has (Gemma3Model.modify_tensors)."""
    config = context.config
    folder = config.path.parent
    tokenizer = {} if (folder / "tokenizer.model").is_file() else optional_json(folder / "tokenizer.json") or {}
    model = tokenizer.get("model")
    if isinstance(model, dict):
        n = len(model.get("vocab") or ()) + len(tokenizer.get("added_tokens") or ())
    else:
        n = config.find("vocab_size_per_layer_input", "vocab_size")
    return taken(tensor.x, 0, range(n)) if isinstance(n, int) and 0 < n < tensor.x.shape[0] else tensor.x


TOKENS = Changed(r"embed_tokens\.weight", known_tokens)

# --- Gemma 3n --------------------------------------------------------------------------------------------------------

#: Parameters that are stored without a suffix.
GEMMA3N_STORED = (Renamed(r"_scale$", "_scale.weight"),)


def filled_up(tensor: Tensor, context: Context) -> Expression:
    """Add rows of zeros for tokens that stand for pictures and sounds."""
    n, (rows, width) = context.config.number("vocab_size"), tensor.x.shape
    return joined([tensor.x, Zeros((n - rows, width), tensor.x.type)]) if rows < n else tensor.x


@dataclass(frozen=True)
class Projections:
    """Three projections become one tensor."""

    pattern: str = r"(altup_(unembed_)?projections)\.([012])\.weight$"

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.search(self.pattern, tensor.name)
        if match is None:
            return None
        held = context.held.setdefault((id(self), -1 if match[2] else -2), {})
        held[match[3]] = tensor
        if len(held) < 3:
            return ()
        return (replace(tensor, name=f"model.{match[1]}.weight", x=stacked([held.pop(i).x for i in "012"])),)


GEMMA3N_RULES = (Changed(r"embed_tokens(\.weight|_per_layer)", filled_up), Projections())


def _set_altup(keys: Keys, config: Config) -> None:
    if config["altup_num_inputs"] != 4:
        raise FormatError(f"{config.path}: altup_num_inputs is {short(config['altup_num_inputs'])}; only 4 is run")
    keys.u32(".altup.active_idx", config["altup_active_idx"])
    keys.u32(".altup.num_inputs", 4)
    keys.u32(".embedding_length_per_layer_input", config["hidden_size_per_layer_input"])
    keys.u32(".attention.shared_kv_layers", config["num_kv_shared_layers"])
    sparse = [NormalDist().inv_cdf(s) if s else -math.inf for s in config["activation_sparsity_pattern"]]
    keys.array(".activation_sparsity_scale", sparse)
    kinds = config["layer_types"]
    keys.array(".attention.sliding_window_pattern", [kind == "sliding_attention" for kind in kinds])


GEMMA3N_KEYS: tuple[SetKeys, ...] = (set_gemma3_keys, _set_altup)

# --- Gemma 4 ---------------------------------------------------------------------------------------------------------

#: Parameters that are stored without a suffix.
GEMMA4_STORED = (
    Renamed(r"(per_dim_scale|layer_scalar)$", r"\1.weight"),
    Renamed(r"^(.*\.experts\.(?!.*\.(weight|(weight|input)_\w+|g_idx|q\w+|scales)$).*)$", r"\1.weight"),
)
#: Experts that are stored each on its own, as quantizers write them.
_GEMMA4_EXPERTS = Experts(
    name="model.layers.{layer}.experts.{expert}.{weight}.weight",
    merged="model.layers.{layer}.mlp.experts.{weight}.weight",
)
GEMMA4_RULES = (
    TOKENS,
    _GEMMA4_EXPERTS,
    Named(r"router\.scale$", "*ffn_gate_inp", ".scale", "model.layers.*.router.scale"),
    Named(r"\.per_expert_scale", "*ffn_down_exps", ".scale", "model.layers.*.router.per_expert_scale"),
)


def _of_full_layer(config: Config, name: str, key: str) -> Any:
    """Return a value of the layers that attend to everything: ``name``, or what the first of them says of ``key``."""
    if (found := config.get(name)) is not None:
        return found
    layers, kinds = config.get("per_layer_config") or {}, config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise FormatError(f"{config.path}: layer_types is {short(kinds)}, not a list")
    if not isinstance(layers, dict) or not all(str(n).isdecimal() and isinstance(v, dict) for n, v in layers.items()):
        raise FormatError(f"{config.path}: per_layer_config is {short(layers)}, not a table by layer")
    of_kind = (v for n, v in layers.items() if int(n) < len(kinds) and kinds[int(n)] == "full_attention")
    return next((v[key] for v in of_kind if key in v), None)


def _full_head(config: Config) -> int:
    width = _of_full_layer(config, "global_head_dim", "head_dim")
    if not isinstance(width, int) or isinstance(width, bool) or not 0 < width < 1 << 20:
        raise FormatError(f"{config.path}: it does not say how wide the heads of full attention are (global_head_dim)")
    if width > 1 << 16:
        raise FormatError(f"{config.path}: heads of {width} values")
    return width


def gemma4_rope(config: Config) -> Iterable[Tensor]:
    """Give layers of full attention a rope that turns a part of each head: ggml's turns the rest by next to nothing."""
    rope = config.full_rope
    if rope.get("rope_type") != "proportional":
        raise FormatError(f"{config.path}: rope of full attention is {short(rope)}, not a proportional one")
    width = _full_head(config)
    turned = int(width * config.rotary_part(1.0, of=rope) / 2)
    factors = (1.0,) * turned + (1e30,) * (width // 2 - turned)
    yield Tensor("rope_freqs.weight", Constant(factors), None, "rope_freqs.weight")


def set_gemma4_keys(keys: Keys, config: Config) -> None:
    """Set what layers of the two kinds of attention have: widths, heads, rope, feed forward."""
    shared, layers = config.number("num_kv_shared_layers"), config.layers
    keys.u32(".attention.shared_kv_layers", shared)
    keys.u32(".embedding_length_per_layer_input", config.get("hidden_size_per_layer_input") or 0)
    kinds = config["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise FormatError(f"{config.path}: layer_types is {short(kinds)}, not a list of {layers} kinds")
    slides = [kind == "sliding_attention" for kind in kinds]
    keys.array(".attention.sliding_window_pattern", slides)
    full, sliding = _full_head(config), config.number("head_dim")
    keys.u32(".attention.key_length", full)
    keys.u32(".attention.value_length", full)
    keys.u32(".attention.key_length_swa", sliding)
    keys.u32(".attention.value_length_swa", sliding)
    Copied(".expert_feed_forward_length", "expert_intermediate_size moe_intermediate_size")(keys, config)
    if config.get("use_double_wide_mlp", False):
        width = config.number("intermediate_size")
        keys.array(".feed_forward_length", [width if i < layers - shared else 2 * width for i in range(layers)])
    heads, full_heads = (
        config.get("num_key_value_heads"),
        _of_full_layer(config, "num_global_key_value_heads", "num_key_value_heads"),
    )
    if heads is not None and full_heads is not None:
        keys.array(".attention.head_count_kv", [heads if slide else full_heads for slide in slides])
    keys.u32(".rope.dimension_count", full)
    keys.u32(".rope.dimension_count_swa", int(sliding * config.rotary_part(1.0)))


GEMMA4_KEYS: tuple[SetKeys, ...] = (set_gemma3_keys, set_gemma4_keys)


def _set_suppressed(keys: Keys, config: Config) -> None:
    found = (optional_json(config.path.parent / "generation_config.json") or {}).get("suppress_tokens")
    if found is not None:
        keys.array("tokenizer.ggml.suppress_tokens", found)


UNIFIED_KEYS: tuple[SetKeys, ...] = (*GEMMA4_KEYS, _set_suppressed)


def _set_assistant(keys: Keys, config: Config) -> None:
    keys.u32(".embedding_length_out", config["backbone_hidden_size"])
    keys.u32(".nextn_predict_layers", layers_in_file(keys))


#: Of drafts, which share keys and values of the model that they draft for.
ASSISTANT_STORED = (Dropped(r"masked_embedding"), *GEMMA4_STORED)
ASSISTANT_KEYS: tuple[SetKeys, ...] = (*GEMMA4_KEYS, _set_assistant)
