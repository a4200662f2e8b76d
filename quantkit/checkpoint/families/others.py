"""OLMo, EXAONE, StarCoder, StableLM: models of which a rule or a few keys are their own.

Facts of llama.cpp b11434, conversion/olmo.py, exaone.py, starcoder.py, stablelm.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import read_f32, size_of, stacked
from quantkit.checkpoint.families.deepseek import predicting_layers
from quantkit.checkpoint.families.llama import rope_factors
from quantkit.checkpoint.families.qwen import set_pooling
from quantkit.checkpoint.keys import GATING, Keys
from quantkit.checkpoint.row import Always, Copied, SetKeys
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.errors import FormatError

# --- OLMo ------------------------------------------------------------------------------------------------------------


def set_every_fourth(keys: Keys, config: Config) -> None:
    """Set the window of OLMo 3, and which layers have it: all but every fourth, if the configuration does not say.

    A window of null is none, as of OLMo 2; convert_hf_to_gguf.py stops there.
    """
    if config.get("sliding_window") is None:
        return
    keys.u32(".attention.sliding_window", config["sliding_window"])
    kinds = config.get("layer_types")
    slides = [(i + 1) % 4 != 0 for i in range(config.layers)]
    if isinstance(kinds, list):
        slides = [kind == "sliding_attention" for kind in kinds]
    keys.array(".attention.sliding_window_pattern", slides)


def set_epsilon(keys: Keys, config: Config) -> None:
    """OLMoE's norms have this epsilon whatever its configuration says."""
    keys.f32(".attention.layer_norm_rms_epsilon", 1e-5)


def set_olmo_norms(keys: Keys, config: Config) -> None:
    """The norms of the first OLMo have no weights, but an epsilon."""
    keys.f32(".attention.layer_norm_epsilon", 1e-5)
    Copied(".attention.clamp_kqv", "clip_qkv", "f32")(keys, config)


# --- EXAONE ----------------------------------------------------------------------------------------------------------


def set_exaone_window(keys: Keys, config: Config) -> None:
    """Set the window of EXAONE 4, and which layers have it: a list of kinds, a word such as LLLG, or a period."""
    if config.get("sliding_window") is None:
        return
    keys.u32(".attention.sliding_window", config["sliding_window"])
    kinds, pattern, layers = config.get("layer_types"), config.get("sliding_window_pattern"), config.layers
    if isinstance(kinds, list):
        keys.array(".attention.sliding_window_pattern", [kind == "sliding_attention" for kind in kinds])
    elif isinstance(pattern, str) and pattern:
        keys.array(".attention.sliding_window_pattern", [pattern[i % len(pattern)] == "L" for i in range(layers)])
    elif isinstance(pattern, int) and pattern > 0:
        keys.array(".attention.sliding_window_pattern", [(i + 1) % pattern != 0 for i in range(layers)])


EXAONE4_KEYS: tuple[SetKeys, ...] = (Copied(".vocab_size", "vocab_size", needed=True), set_exaone_window)
#: The factors of its rope, if the configuration does not say by how much.
exaone4_rope = partial(rope_factors, factor=16.0)


_BESIDE = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}


@dataclass(frozen=True)
class LayersBehind:
    """Layers that predict more tokens are stored under mtp.; what is beside them is of each (ExaoneMoEModel)."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.match(r"mtp\.(?:layers\.(\d{1,4})|(\w+))\.(.+)$", tensor.name)
        if match is None:
            return None
        n, config = context.config.layers, context.config
        if match[1] is not None:
            shared = range(predicting_layers(config)) if config.get("mtp_share_layers") else (int(match[1]),)
            return [replace(tensor, name=f"model.layers.{n + i}.{match[3]}") for i in shared]
        if match[2] not in _BESIDE:
            return None
        name = f"{_BESIDE[match[2]]}.{match[3]}"
        return [replace(tensor, name=f"model.layers.{i}.{name}") for i in range(n, n + predicting_layers(config))]


def _set_exaone_mixture(keys: Keys, config: Config) -> None:
    width, shared = config.number("moe_intermediate_size"), config.number("num_shared_experts")
    keys.u32(".expert_feed_forward_length", width)
    keys.u32(".expert_shared_count", shared)
    keys.u32(".expert_shared_feed_forward_length", width * shared)
    keys.f32(".expert_weights_scale", config["routed_scaling_factor"])
    keys.flag(".expert_weights_norm", config["norm_topk_prob"])
    dense = config.find("first_k_dense_replace", "first_last_k_dense_replace")
    keys.u32(".leading_dense_block_count", dense or 0)
    keys.u32(".nextn_predict_layers", predicting_layers(config))


EXAONE_MOE_KEYS: tuple[SetKeys, ...] = (_set_exaone_mixture, Always(".rope.scaling.type", "none", "text"))


def set_exaone_rope(keys: Keys, config: Config) -> None:
    """Set how much of a head rope turns (EXAONE 3)."""
    width = config.number("hidden_size") // max(1, config.number("num_attention_heads"))
    keys.u32(".rope.dimension_count", int(config.rotary_part(1.0) * width))


# --- StarCoder -------------------------------------------------------------------------------------------------------


def set_starcoder_keys(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of the first StarCoder, whose heads of queries have one of keys and values."""
    set_n_embd_keys(keys, config, layers, file_type, 1)


def set_n_embd_keys(keys: Keys, config: Config, layers: int, file_type: int, heads_kv: int) -> None:
    """Set the keys of decoders that name their sizes as GPT-2 does, with ``heads_kv`` heads of keys and values."""
    width = config.number("n_embd")
    keys.u32(".context_length", config["n_positions"])
    keys.u32(".embedding_length", width)
    keys.u32(".feed_forward_length", 4 * width)
    keys.u32(".block_count", layers)
    keys.u32(".attention.head_count", config["n_head"])
    keys.u32(".attention.head_count_kv", heads_kv)
    keys.f32(".attention.layer_norm_epsilon", config["layer_norm_epsilon"])
    keys.u32("general.file_type", file_type)


# --- StableLM --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadNorms:
    """Norms of single heads become one tensor, a row for each.

    convert_hf_to_gguf.py means to do that and drops them: it converts no StableLM that has them (2-12B).
    """

    pattern: str = r"(self_attn\.[qk]_layernorm)\.norms\.(\d{1,6})\.weight$"

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.search(self.pattern, tensor.name)
        if match is None:
            return None
        name = tensor.name[: match.end(1)] + ".weight"
        of_keys = match[1].endswith("k_layernorm")
        n = context.config.number("num_key_value_heads" if of_keys else "num_attention_heads")
        held = context.held.setdefault((id(self), (tensor.layer or 0) * 2 + of_keys), {})
        held[match[2]] = tensor
        if len(held) < n:
            return ()
        missing = next((i for i in range(n) if str(i) not in held), None)
        if missing is not None:
            raise context.fail(tensor, f"there are {n} heads, but the norm of head {missing} is missing")
        norms = [held.pop(str(i)) for i in range(n)]
        if len({norm.x.shape for norm in norms}) > 1:
            raise context.fail(tensor, "the norms of the heads are not of one shape")
        return (replace(tensor, name=name, x=stacked([norm.x for norm in norms])),)


def set_stablelm_keys(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of StableLM: an order of their own."""
    heads = config.number("num_attention_heads")
    keys.u32(".context_length", config["max_position_embeddings"])
    keys.u32(".embedding_length", config["hidden_size"])
    keys.u32(".block_count", layers)
    keys.u32(".feed_forward_length", config["intermediate_size"])
    part = config.rotary_part(0.25)
    keys.u32(".rope.dimension_count", int(part * (config.number("hidden_size") // max(1, heads))))
    keys.u32(".attention.head_count", heads)
    keys.u32(".attention.head_count_kv", config["num_key_value_heads"])
    keys.flag(".use_parallel_residual", config.get("use_parallel_residual", True))
    keys.f32(".attention.layer_norm_epsilon", config.find("layer_norm_eps", "norm_eps"))
    keys.u32("general.file_type", file_type)


# --- SmallThinker ----------------------------------------------------------------------------------------------------


def _set_small_thinker(keys: Keys, config: Config) -> None:
    if (width := config.get("moe_ffn_hidden_size")) is not None:
        keys.u32(".expert_feed_forward_length", width)
        keys.u32(".feed_forward_length", width)
    keys.u32(".expert_gating_func", GATING["softmax" if config.get("moe_primary_router_apply_softmax") else "sigmoid"])
    if any(config.get("sliding_window_layout") or ()) and (window := config.get("sliding_window_size")):
        keys.u32(".attention.sliding_window", window)


SMALL_THINKER_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_count", "moe_num_primary_experts"),
    Copied(".expert_used_count", "moe_num_active_primary_experts"),
    _set_small_thinker,
)


# --- Mellum, Pangu ---------------------------------------------------------------------------------------------------


def set_mellum_window(keys: Keys, config: Config) -> None:
    """Set the window of Mellum, unless it is not used, and which layers have it."""
    used, window = config.get("use_sliding_window"), config.get("sliding_window")
    if used in (True, None) and window is not None:
        keys.u32(".attention.sliding_window", window)
        kinds = config["layer_types"]
        keys.array(".attention.sliding_window_pattern", [kind == "sliding_attention" for kind in kinds])


def set_pangu_heads(keys: Keys, config: Config) -> None:
    """Set the widths of Pangu's heads."""
    keys.u32(".rope.dimension_count", config.head_dim)
    if config.get("head_dim") is None:
        keys.u32(".attention.key_length", config.head_dim)
        keys.u32(".attention.value_length", config.head_dim)


# --- Nemotron --------------------------------------------------------------------------------------------------------


def set_nemotron(keys: Keys, config: Config) -> None:
    """Set the norms and the rope of Nemotron."""
    keys.u32(".vocab_size", config["vocab_size"])
    names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    keys.f32(".attention.layer_norm_epsilon", config.find(*names))
    width, heads = config.number("hidden_size", "n_embd"), config.number("num_attention_heads", "n_head")
    keys.u32(".rope.dimension_count", int(config.rotary_part(None) * width) // max(1, heads))
    factor = config.get("factor") or config.rope.get("factor")
    keys.text(".rope.scaling.type", "none" if factor is None else "linear")
    if factor is not None:
        keys.f32(".rope.scaling.factor", factor)


# --- Apertus ---------------------------------------------------------------------------------------------------------

_XIELU = ("alpha_n", "alpha_p", "beta", "eps")


@dataclass(frozen=True)
class Activations:
    """The parameters of each layer's xIELU become metadata: they are kept in the configuration."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.search(r"\.act_fn\.(\w+)$", tensor.name)
        if match is None or match[1] not in _XIELU or tensor.layer is None:
            return None
        if size_of(tensor.x) != 1:
            raise context.fail(tensor, "a parameter of more than one value")
        context.config.values.setdefault(f"xielu_{match[1]}", {})[tensor.layer] = float(read_f32(tensor.x, 0, 1)[0])
        return ()


def set_activations(keys: Keys, config: Config) -> None:
    """Set the parameters of xIELU, those that all layers have."""
    for name in _XIELU:
        values = config.get(f"xielu_{name}") or {}
        if len(values) == config.layers:
            keys.array(f"xielu.{name}", [values[layer] for layer in sorted(values)])


# --- single keys -----------------------------------------------------------------------------------------------------


def set_loops(keys: Keys, config: Config) -> None:
    """Set how often Nanbeige runs its layers."""
    keys.u32(".num_loops", max(1, int(config.get("num_loops", 1) or 1)))
    keys.flag(".skip_loop_final_norm", config.get("skip_loop_final_norm", False))


def set_plm_heads(keys: Keys, config: Config) -> None:
    """Set the widths of PLM's latent and heads."""
    rope = config.number("qk_rope_head_dim")
    keys.u32(".vocab_size", config["vocab_size"])
    keys.u32(".attention.kv_lora_rank", config["kv_lora_rank"])
    keys.u32(".attention.key_length", config.number("qk_nope_head_dim") + rope)
    keys.u32(".attention.value_length", config["v_head_dim"])
    keys.u32(".rope.dimension_count", rope)


def set_spark(keys: Keys, config: Config) -> None:
    """Set the windows of Spark 2.5, and what rope turns of heads with and without."""
    gate = config.get("gate_attn_act_mode"), config.get("headwise_attn_output_gate"), config.get("hidden_act")
    kinds = config["layer_types"]
    if gate != ("sigmoid", True, "gelu") or len(kinds) != config.layers:
        raise FormatError(f"{config.path}: gates, activation or layer_types are not those that llama.cpp runs")
    keys.u32(".vocab_size", config["vocab_size"])
    keys.u32(".attention.sliding_window", config["sliding_window"])
    keys.array(".attention.sliding_window_pattern", [kind == "sliding_attention" for kind in kinds])
    for key, of in (("", "full_attention"), ("_swa", "sliding_attention")):
        part = config.rotary_part(None, of=config.rope[of])
        keys.u32(f".rope.dimension_count{key}", int(config.number("head_dim") * part))


#: Of models that fill in masked tokens of a text.
DIFFUSION_KEYS: tuple[SetKeys, ...] = (
    Always(".attention.causal", False, "flag"),
    Copied("tokenizer.ggml.mask_token_id", "mask_token_id"),
)


def _set_llada(keys: Keys, config: Config) -> None:
    keys.u32(".vocab_size", config["vocab_size"])
    width, heads = config.number("hidden_size", "d_model"), config.number("num_attention_heads", "n_heads")
    keys.u32(".rope.dimension_count", width // max(1, heads) if config.get("head_dim") is None else config["head_dim"])
    for key, name, default in (
        (".context_length", "max_sequence_length", 4096),
        (".embedding_length", "d_model", 4096),
        (".feed_forward_length", "mlp_hidden_size", 12288),
    ):
        keys.u32(key, config.get(name, default))
    keys.flag(".attention.causal", False)
    keys.flag("diffusion.shift_logits", False)


LLADA_KEYS: tuple[SetKeys, ...] = (set_pooling, _set_llada)
LLADA_MOE_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_feed_forward_length", "expert_intermediate_size"),
    Always("tokenizer.ggml.mask_token_id", 156895),
    Always(".attention.causal", False, "flag"),
    Always("diffusion.shift_logits", False, "flag"),
)
