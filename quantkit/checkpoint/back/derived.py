"""Values of config.json that are more than copies of keys: what rows compute from them (``families``), backwards.

Each is a function that changes config.json by what a file says; a class names those it needs (``classes``). Some values
are in no file, for llama.cpp (b11434, src/models/*.cpp) has them in its code: they come from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from quantkit.checkpoint.back.said import Said, plain
from quantkit.checkpoint.expressions import Constant, Shaped
from quantkit.checkpoint.tensors import Tensor
from quantkit.errors import TypeNotSupported

Json = dict[str, Any]
Derive = Callable[[Said, Json], None]


def _as_stored(value: float, function: Callable[[float], float]) -> float:
    """Return the argument of the fewest digits for which ``function`` gives float32 ``value``."""
    inverse = value
    for digits in range(17):
        inverse = float(f"{value:.{digits}e}")
        if np.float32(function(inverse)) == np.float32(function(value)):
            return inverse
    return inverse


# --- attention -------------------------------------------------------------------------------------------------------


def kinds_of_layers(said: Said, config: Json) -> None:
    """Name the layers with a window, where the file lists them."""
    slides = said.flags(".attention.sliding_window_pattern")
    if slides is not None:
        config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in slides]


def no_layer_slides(said: Said, config: Json) -> None:
    """Say of every layer that it has no window, where the file knows of none (EXAONE 4)."""
    if config["sliding_window"] is None:
        config["layer_types"] = ["full_attention"] * said.number(".block_count")


def window_or_none(said: Said, config: Json) -> None:
    """A window of 0 is none."""
    config["sliding_window"] = config.get("sliding_window") or None


def only_full_attention(said: Said, config: Json) -> None:
    """Say that no layer has a window if the file says that it is 0 (Llama 4)."""
    if config.pop("sliding_window", None) == 0:
        config["layer_types"] = ["full_attention"] * said.number(".block_count")


@dataclass(frozen=True)
class QueryScale:
    """Queries are divided by the square root of this: the width of a head, of models with ``wide`` layers another."""

    wide: int

    def __call__(self, said: Said, config: Json) -> None:
        width = said.head
        if said.number(".block_count") == self.wide:
            width = said.number(".embedding_length") // said.number(".attention.head_count")
        config["query_pre_attn_scalar"] = width


def rotary_part(said: Said, config: Json) -> None:
    """Say which part of a head rope turns."""
    turned, width = said.number(".rope.dimension_count"), said.head
    config["partial_rotary_factor"] = turned / width if width else 1.0


def latent(said: Said, config: Json) -> None:
    """Say how wide the parts of heads are that a latent makes (DeepSeek)."""
    rope = said.number(".rope.dimension_count")
    config |= {
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": said.number(".attention.key_length_mla") - rope,
        "v_head_dim": said.number(".attention.value_length_mla"),
        "num_key_value_heads": said.number(".attention.head_count"),
    }
    config.pop("head_dim", None)
    config.setdefault("q_lora_rank", None)
    log = said.get(".rope.scaling.yarn_log_multiplier")
    if log is not None and "rope_scaling" in config:
        # llama.cpp knows one of the two; released models have the same for both.
        scale = _as_stored(log * 10, lambda x: 0.1 * x)
        config["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale}


def temperature(said: Said, config: Json) -> None:
    """Say how YaRN and the temperature of attention are scaled (Ministral 3)."""
    if "rope_scaling" in config:
        scale, beta = said.get(".rope.scaling.yarn_log_multiplier"), said.get(".attention.temperature_scale")
        config["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": beta}


def indexer(said: Said, config: Json) -> None:
    """Name the layers that choose tokens for themselves, where the file lists them (GLM 5)."""
    types = said.flags(".attention.indexer.types")
    if types is not None:
        config["indexer_types"] = ["full" if each else "shared" for each in types]


def has_head_norms(said: Said, config: Json) -> None:
    config["use_qk_norm"] = said.has("attn_q_norm.weight")


def kq_norm(said: Said, config: Json) -> None:
    """Heads are normalized, but in the model of 128 experts (Llama 4)."""
    config["use_qk_norm"] = said.get(".expert_count") != 128


# --- rope ------------------------------------------------------------------------------------------------------------


def untruncated(said: Said, config: Json) -> None:
    """YaRN's bounds are not rounded to whole dimensions (gpt-oss)."""
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False


def long_rope(said: Said, config: Json) -> None:
    """Take the factors of rope for long and short texts from the tensors that hold them."""
    if not said.has("rope_factors_long.weight"):
        config["rope_scaling"] = None
        return
    rope: Json = {"type": "longrope"}
    for name in ("long", "short"):
        rope[f"{name}_factor"] = said.values(f"rope_factors_{name}.weight")
    config["rope_scaling"] = rope


def unscaled_rope(said: Said, config: Json) -> None:
    """Factors of rope for long texts do not scale attention (MiniCPM)."""
    if rope := config["rope_scaling"]:
        rope |= {"factor": 1.0, "original_max_position_embeddings": said.number(".context_length")}


def long_rope_scale(said: Said, config: Json) -> None:
    """What Phi's mixture of experts multiplies attention by, for both kinds of text."""
    if rope := config["rope_scaling"]:
        scale = said.get(".rope.scaling.attn_factor")
        rope |= {"rope_type": "longrope", "long_mscale": scale, "short_mscale": scale}
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]


def scaled_base(said: Said, config: Json) -> None:
    """A base that was scaled by alpha stands for a scale (Hunyuan)."""
    base = said.get(".rope.freq_base")
    if said.get(".rope.scaling.type") != "none" or base is None:
        return
    width, theta = said.head, 10000.0
    power = width / (width - 2) if width > 2 else 1.0
    alpha = _as_stored((base / theta) ** (1 / power), lambda x: theta * x**power)
    config |= {"rope_theta": theta, "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": alpha}}
    config["rope_scaling"]["rope_type"] = "dynamic"


def as_parameters(said: Said, config: Json) -> None:
    """Say what rope does as transformers 5 does: in one object."""
    rope: Json = {"rope_type": "default", **(config.pop("rope_scaling", None) or {})}
    rope["rope_theta"] = config.pop("rope_theta", 10000.0)
    if (part := config.pop("partial_rotary_factor", None)) is not None:
        rope["partial_rotary_factor"] = part
    config["rope_parameters"] = rope


def interleaved_sections(said: Said, config: Json) -> None:
    """Positions of several dimensions are interleaved (Qwen3-VL and later)."""
    if "mrope_section" in (config.get("rope_scaling") or {}):
        config["rope_scaling"]["mrope_interleaved"] = True


def small_tower(said: Said, config: Json) -> None:
    """Describe a vision tower, which is in no file of a text model, as small as can be (Qwen3-VL)."""
    n = said.get(".n_deepstack_layers") or 0
    config["vision_config"] = {
        **{"depth": max(1, n), "hidden_size": 64, "intermediate_size": 64, "num_heads": 2},
        **{"out_hidden_size": said.number(".embedding_length"), "deepstack_visual_indexes": list(range(n))},
    }


@dataclass(frozen=True)
class Tower:
    """Describe a vision tower, which is in no file of a text model, as small as can be.

    ``others``: of it, beside what such towers have in common. ``out``: what the width of what it gives is called.
    """

    others: Json
    out: str = ""

    def __call__(self, said: Said, config: Json) -> None:
        tower = {"hidden_size": 64, "intermediate_size": 64, **self.others}
        config["vision_config"] = tower | ({self.out: said.number(".embedding_length")} if self.out else {})


# --- layers ----------------------------------------------------------------------------------------------------------


def layers_ahead(said: Said, config: Json) -> None:
    """Layers that predict more tokens are not counted among the others."""
    config["num_hidden_layers"] -= said.get(".nextn_predict_layers") or 0


def linear_attention(said: Said, config: Json) -> None:
    """Say what layers of linear attention have, and which they are (Qwen3-Next)."""
    heads = said.number(".ssm.time_step_rank")
    config["linear_value_head_dim"] = said.number(".ssm.inner_size") // max(1, heads)
    recurrent = said.flags(".attention.recurrent_layers")
    if recurrent is not None:
        kinds = ("full_attention", "linear_attention")
        config["layer_types"] = [kinds[each] for each in recurrent[: config["num_hidden_layers"]]]


def mamba(said: Said, config: Json) -> None:
    """Say what layers of Mamba have, and which they are."""
    heads, inner = said.number(".ssm.time_step_rank"), said.number(".ssm.inner_size")
    listed = said.of_layers(".attention.head_count_kv")
    config |= {
        "num_key_value_heads": max(listed),
        "layer_types": ["attention" if each else "mamba" for each in listed],
        "mamba_d_head": inner // max(1, heads),
        "mamba_expand": inner // max(1, said.number(".embedding_length")),
        "mamba_conv_bias": said.some(".ssm_conv1d.bias"),
        "mamba_proj_bias": said.some(".ssm_in.bias"),
    }


def positions(said: Said, config: Json) -> None:
    """Say whether there is rope (Granite's hybrids)."""
    config["position_embedding_type"] = "rope" if said.get(".rope.scaling.finetuned") else "nope"


def attention_indices(said: Said, config: Json) -> None:
    """Name the layers of attention by their numbers (Bamba)."""
    kinds = config.pop("layer_types")
    if said.get(".attention.key_length") is None:
        config.pop("head_dim", None)
    config["attn_layer_indices"] = [i for i, kind in enumerate(kinds) if kind == "attention"]


# --- feed forward ----------------------------------------------------------------------------------------------------


def sparse_layers(said: Said, config: Json) -> None:
    """Name the layers without experts (Qwen)."""
    layers = range(config["num_hidden_layers"])
    config["mlp_only_layers"] = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in said.model.tensors]
    config["decoder_sparse_step"] = 1


def greedy_groups(said: Said, config: Json) -> None:
    """How experts are chosen (DeepSeek V2)."""
    config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"


def shared_experts(said: Said, config: Json) -> None:
    """Say how wide shared experts are, if not as wide as others (Bailing)."""
    width = said.get(".expert_shared_feed_forward_length")
    if width is not None and width != config["moe_intermediate_size"] * config["num_shared_experts"]:
        config["moe_shared_expert_intermediate_size"] = width


def expert_lists(said: Said, config: Json) -> None:
    """Say the same of every layer (Hunyuan)."""
    for name in ("moe_topk", "moe_intermediate_size", "num_shared_expert"):
        config[name] = [config[name]] * config["num_hidden_layers"]


# --- flags -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """``name`` of config.json is true if there is such a tensor: of the whole model, or of its first layer."""

    name: str
    tensor: str

    def __call__(self, said: Said, config: Json) -> None:
        config[self.name] = said.has(self.tensor)


def two_kinds(said: Said, config: Json) -> None:
    """What layers of the two kinds of attention have (Gemma 4)."""
    kinds_of_layers(said, config)
    kinds, shared = config["layer_types"], said.number(".attention.shared_kv_layers")
    config["head_dim"] = said.number(".attention.key_length_swa")
    config["global_head_dim"] = said.number(".attention.key_length")
    heads, width = said.get(".attention.head_count_kv"), said.get(".feed_forward_length")
    if isinstance(heads, list):
        of_kind = dict(zip(kinds, heads, strict=True))
        config["num_key_value_heads"] = of_kind.get("sliding_attention", heads[0])
        config["num_global_key_value_heads"] = of_kind.get("full_attention", heads[0])
    if isinstance(width, list):
        config |= {"intermediate_size": width[0], "use_double_wide_mlp": len(set(width)) > 1}
    own = range(said.number(".block_count") - shared)
    config["attention_k_eq_v"] = any(f"blk.{i}.attn_v.weight" not in said.model.tensors for i in own)
    config["enable_moe_block"] = said.get(".expert_count") is not None
    if (table := said.model.tensors.get("per_layer_token_embd.weight")) is not None:
        config["vocab_size_per_layer_input"] = table.shape[1]


def proportional_rope(said: Said, config: Json) -> None:
    """Say what rope does in layers of the two kinds of attention (Gemma 4)."""
    factors = said.values("rope_freqs.weight")
    full = {"rope_type": "proportional", "partial_rotary_factor": factors.count(1.0) / len(factors)}
    config["rope_parameters"] = {
        "full_attention": {**full, "rope_theta": config.pop("rope_theta")},
        "sliding_attention": {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq", 10000.0)},
    }
    config.pop("rope_scaling", None)


# --- classes that are only converted (``named``) ---------------------------------------------------------------------


def kinds_of_feed_forward(said: Said, config: Json) -> None:
    """Name the layers with experts."""
    layers = range(config["num_hidden_layers"])
    sparse = (f"blk.{i}.ffn_gate_inp.weight" in said.model.tensors for i in layers)
    config["mlp_layer_types"] = ["sparse" if each else "dense" for each in sparse]


@dataclass(frozen=True)
class EveryFourth:
    """Name the layers with a window, if there is one: all but every fourth, from the first on or the ``last``."""

    last: bool = False

    def __call__(self, said: Said, config: Json) -> None:
        slides = bool(said.get(".attention.sliding_window"))
        places = (i + self.last for i in range(config["num_hidden_layers"]))
        config["layer_types"] = ["sliding_attention" if slides and i % 4 else "full_attention" for i in places]


def shared_count(said: Said, config: Json) -> None:
    """Say how many experts are shared by how wide they are together (Hunyuan 3)."""
    width = said.number(".expert_shared_feed_forward_length")
    config["num_shared_experts"] = width // max(1, said.number(".expert_feed_forward_length"))


def window_layout(said: Said, config: Json) -> None:
    """List which layers have a window and rope, all but every fourth from the first, and how experts are chosen."""
    layers, slides = range(said.number(".block_count")), said.get(".attention.sliding_window") is not None
    config |= {
        "moe_primary_router_apply_softmax": said.get(".expert_gating_func") == 1,
        "sliding_window_layout": [int(slides and i % 4 != 0) for i in layers],
        "rope_layout": [int(not slides or i % 4 != 0) for i in layers],
    }


def hybrid_windows(said: Said, config: Json) -> None:
    """Say what layers with and without a window have (MiMo V2)."""
    slides = (said.flags(".attention.sliding_window_pattern") or [])[: config["num_hidden_layers"]]
    heads = config["num_key_value_heads"]
    of_kind = dict(zip(slides, heads, strict=False)) if isinstance(heads, list) else {}
    given = {each: of_kind.get(each, max(heads) if isinstance(heads, list) else heads) for each in (False, True)}
    config |= {
        "hybrid_layer_pattern": [int(each) for each in slides],
        "num_key_value_heads": given[False],
        "swa_num_key_value_heads": given[True],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
    }


def rope_layers(said: Said, config: Json) -> None:
    """Name the layers with rope, where the file lists them (Granite with windows)."""
    turned = said.flags(".attention.rope_pattern")
    if turned is not None:
        config["no_rope_layers"] = [int(each) for each in turned]


def heads_per_layer(said: Said, config: Json) -> None:
    """Say how many heads each layer has; gates are of heads, or of single values (Laguna)."""
    heads = said.get(".attention.head_count")
    listed = heads if isinstance(heads, list) else [heads] * said.number(".block_count")
    config |= {"num_attention_heads": listed[0], "num_attention_heads_per_layer": listed}
    gate = said.model.tensors.get("blk.0.attn_gate.weight")
    config["gating"] = "per-head" if gate is not None and gate.shape[1] == listed[0] else "per-element"


def two_ropes(said: Said, config: Json) -> None:
    """Say what rope does in layers with and without a window."""
    theta = config.pop("rope_theta", 10000.0)
    full: Json = {"rope_type": "default", **(config.pop("rope_scaling", None) or {}), "rope_theta": theta}
    sliding: Json = {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq", theta)}
    for rope, key in ((full, ".rope.dimension_count"), (sliding, ".rope.dimension_count_swa")):
        if (turned := said.get(key)) is not None:
            rope["partial_rotary_factor"] = turned / said.head
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}


def tower_of_two(said: Said, config: Json) -> None:
    """Describe a vision tower, which is in no file of a text model, as small as can be (Qwen2-VL)."""
    width = said.number(".embedding_length")
    config["vision_config"] = {"depth": 1, "num_heads": 2} | (
        {"embed_dim": 64, "hidden_size": width}
        if config["model_type"] == "qwen2_vl"
        else {"hidden_size": 64, "intermediate_size": 64, "out_hidden_size": width, "fullatt_block_indexes": [0]}
    )
    config.setdefault("rope_scaling", {})


def chat_rope(said: Said, config: Json) -> None:
    """Say what ChatGLM calls otherwise, beside the names of transformers."""
    theta = config.get("rope_theta") or 10000.0
    ratio = _as_stored(theta / 10000.0, lambda x: 10000 * x)
    config |= {"layernorm_epsilon": config["rms_norm_eps"], "rope_ratio": ratio, "head_dim": said.head}
    config["seq_length"] = config["max_position_embeddings"]
    rotary_part(said, config)


def short_convolutions(said: Said, config: Json) -> None:
    """Name the layers of attention: those with heads of keys (LFM 2)."""
    heads = config["num_key_value_heads"]
    listed = heads if isinstance(heads, list) else [heads] * said.number(".block_count")
    config |= {
        "num_key_value_heads": max(listed),
        "layer_types": ["full_attention" if each else "conv" for each in listed],
        "conv_bias": said.some(".shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }
    if "rope_theta" in config and config["model_type"] == "lfm2_moe":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}


def latent_heads(said: Said, config: Json) -> None:
    """Say how wide the parts of heads are that a latent makes, which the file has in one matrix (PLM, MiniCPM 3)."""
    rope = said.number(".rope.dimension_count")
    config |= {"qk_rope_head_dim": rope, "qk_nope_head_dim": said.number(".attention.key_length") - rope}
    output = said.model.tensors.get("blk.0.attn_output.weight")
    if output is not None:
        config["v_head_dim"] = output.shape[0] // max(1, said.number(".attention.head_count"))
    config.pop("head_dim", None)
    config.setdefault("q_lora_rank", None)


def only_mamba(said: Said, config: Json) -> None:
    """Say what layers of Mamba have, of models that have no others."""
    inner, width = said.number(".ssm.inner_size"), said.number(".embedding_length")
    config |= {"expand": inner // max(1, width), "intermediate_size": inner}
    heads = said.get(".ssm.time_step_rank")
    if said.get(".ssm.group_count") is not None:
        config |= {"num_heads": heads, "head_dim": inner // max(1, heads)}
        config.pop("intermediate_size")
    config["use_conv_bias"] = said.has("ssm_conv1d.bias")
    config["use_bias"] = said.has("ssm_in.bias")


def sparse_attention(said: Said, config: Json) -> None:
    """Say how blocks of keys are chosen, and which layers have experts (MiniMax M3)."""
    names = {
        **{"head_count": "sparse_num_index_heads", "key_length": "sparse_index_dim", "top_k": "sparse_topk_blocks"},
        **{"block_size": "sparse_block_size", "local_blocks": "sparse_local_block"},
    }
    config["sparse_attention_config"] = {name: said.get(f".attention.indexer.{key}") for key, name in names.items()}
    dense, layers = said.number(".leading_dense_block_count"), range(said.number(".block_count"))
    sparse = [int(f"blk.{i}.indexer.q_proj.weight" in said.model.tensors) for i in layers]
    config["sparse_attention_config"]["sparse_attention_freq"] = sparse
    config["moe_layer_freq"] = [int(i >= dense) for i in layers]
    shared = next((t for name, t in said.model.tensors.items() if name.endswith(".ffn_up_shexp.weight")), None)
    if shared is not None:
        config["shared_intermediate_size"] = shared.shape[1]


def activations(said: Said) -> Iterable[Tensor]:
    """Make the parameters of each layer's xIELU tensors again (Apertus)."""
    for name, shape in (("alpha_n", (1,)), ("alpha_p", (1,)), ("beta", ()), ("eps", ())):
        found = said.model.get(f"xielu.{name}")
        values = [] if found is None else list(plain(found))
        if len(values) != said.number(".block_count"):
            raise TypeNotSupported(f"{said.where}: it does not say xielu.{name} of each layer, without which none runs")
        for layer, value in enumerate(values):
            x = Shaped(Constant((float(value),)), shape)
            yield Tensor(f"model.layers.{layer}.mlp.act_fn.{name}", x, layer)


def altup(said: Said, config: Json) -> None:
    """Say what is particular of Gemma 3n's layers."""
    kinds_of_layers(said, config)
    normal = NormalDist()

    def scale(part: float) -> float:
        return normal.inv_cdf(part) if 0 < part < 1 else -math.inf

    scales = said.get(".activation_sparsity_scale") or []
    parts = [0.0 if math.isinf(each) else _as_stored(normal.cdf(each), scale) for each in scales]
    config["activation_sparsity_pattern"] = parts
    if (low := said.model.tensors.get("blk.0.laurel_l.weight")) is not None:
        config["laurel_rank"] = low.shape[1]
    if (table := said.model.tensors.get("per_layer_token_embd.weight")) is not None:
        config["vocab_size_per_layer_input"] = table.shape[1]


def two_norms(said: Said, config: Json) -> None:
    """Refuse the first Falcons, whose layers have one norm for both: they are spelled otherwise."""
    if not said.has("attn_norm_2.weight"):
        raise TypeNotSupported(f"{said.where}: a Falcon of the first architecture is not exported by this version")


def two_ends(said: Said, config: Json) -> None:
    """Name the token that ends a turn beside the one that ends a text (Laguna)."""
    ids = [said.model.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eos")]
    if None not in ids:
        config["eos_token_id"] = ids


def mask_token(said: Said, config: Json) -> None:
    """Name the token that stands for one to be filled in."""
    config["mask_token_id"] = said.model.get("tokenizer.ggml.mask_token_id")


def table_length(said: Said, config: Json) -> None:
    """Say how many positions the table of them has, which may be more than the model is made for (GPT-2)."""
    table = said.model.tensors.get("position_embd.weight")
    config["n_positions"] = config["n_ctx"] if table is None else table.shape[1]


def turned_part(said: Said, config: Json) -> None:
    """Say which part of a head rope turns, as GPT-NeoX does."""
    config["rotary_pct"] = said.number(".rope.dimension_count") / said.head


def scales(said: Said, config: Json) -> None:
    """Say what embeddings, layers and logits are multiplied by (MiniCPM)."""
    root = said.number(".block_count") ** 0.5
    residual = float(said.get(".residual_scale") or 1.0)
    config |= {
        "scale_emb": said.get(".embedding_scale"),
        "scale_depth": _as_stored(residual * root, lambda x: x / root),
        "dim_model_base": _as_stored(config["hidden_size"] / float(said.get(".logit_scale") or 1.0), lambda x: x),
    }
