"""The first decoders: GPT-2, GPT-NeoX, BLOOM, Falcon, and others whose keys have an order of their own.

Facts of llama.cpp b11434, conversion/gpt2.py, conversion/gptneox.py, conversion/bloom.py, conversion/falcon.py,
conversion/orion.py, conversion/codeshell.py, conversion/minicpm.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Constant, Expression, taken
from quantkit.checkpoint.families.others import set_n_embd_keys
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.tensors import Changed, Context, Tensor, transposed
from quantkit.errors import FormatError

GPT2_RULES = (Changed(r"\.(c_attn|c_proj|c_fc)\.weight$", transposed),)


def set_gpt2_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of GPT-2."""
    width = config.number("n_embd")
    keys.u32(".block_count", layers)
    keys.u32(".context_length", config["n_ctx"])
    keys.u32(".embedding_length", width)
    keys.u32(".feed_forward_length", 4 * width)
    keys.u32(".attention.head_count", config["n_head"])
    keys.f32(".attention.layer_norm_epsilon", config["layer_norm_epsilon"])
    keys.u32("general.file_type", file_type)


def _grouped(x: Expression, groups: int, each: int) -> Expression:
    """Put queries, keys and values apart: they are stored by groups of ``each`` heads, the last two key and value."""
    width, left = divmod(x.shape[0], groups * each)
    if left:
        raise ValueError(f"{x.shape[0]} rows make no {groups} groups of {each} heads")
    places = ((range(each - 2)), range(each - 2, each - 1), range(each - 1, each))
    heads = [group * each + i for part in places for group in range(groups) for i in part]
    return taken(x, 0, *(range(head * width, (head + 1) * width) for head in heads))


def by_head(tensor: Tensor, context: Context) -> Expression:
    """Put queries, keys and values of all heads apart, which are stored head by head."""
    return _grouped(tensor.x, context.config.number("n_head", "num_attention_heads"), 3)


def by_head_back(tensor: Tensor, context: Context) -> Expression:
    """Put them together again: undoes ``by_head``."""
    return _woven(tensor.x, context.config.number("n_head", "num_attention_heads"), 3)


def _woven(x: Expression, groups: int, each: int) -> Expression:
    """Undo ``_grouped``."""
    width, left = divmod(x.shape[0], groups * each)
    if left:
        raise ValueError(f"{x.shape[0]} rows make no {groups} groups of {each} heads")
    n = groups * (each - 2)
    heads = [
        head for i in range(groups) for head in (*range(i * (each - 2), (i + 1) * (each - 2)), n + i, n + groups + i)
    ]
    return taken(x, 0, *(range(head * width, (head + 1) * width) for head in heads))


def by_key(tensor: Tensor, context: Context) -> Expression:
    """Put queries, keys and values apart, which are stored by heads of keys."""
    return _grouped(tensor.x, *_groups(context.config))


def by_key_back(tensor: Tensor, context: Context) -> Expression:
    """Put them together again: undoes ``by_key``."""
    return _woven(tensor.x, *_groups(context.config))


def _groups(config: Config) -> tuple[int, int]:
    """Return how many groups there are, and how many heads are in each."""
    heads, keys = config.number("num_attention_heads", "n_head"), config.find("num_kv_heads", "n_head_kv") or 1
    return keys, heads // keys + 2


BY_HEAD = (Changed(r"attention\.query_key_value\.(weight|bias)$", by_head),)
BY_KEY = (Changed(r"query_key_value", by_key),)


def set_neox_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of GPT-NeoX; it says no file type."""
    width, heads = config.number("hidden_size"), config.number("num_attention_heads")
    keys.u32(".context_length", config["max_position_embeddings"])
    keys.u32(".embedding_length", width)
    keys.u32(".block_count", layers)
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32(".rope.dimension_count", int(config["rotary_pct"] * (width // max(1, heads))))
    keys.u32(".attention.head_count", heads)
    keys.flag(".use_parallel_residual", config.get("use_parallel_residual", True))
    keys.f32(".attention.layer_norm_epsilon", config["layer_norm_eps"])


def set_bloom_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of BLOOM."""
    width, heads = config.number("hidden_size", "n_embed"), config.number("n_head", "num_attention_heads")
    keys.u32(".context_length", config.get("seq_length", width))
    keys.u32(".embedding_length", width)
    keys.u32(".feed_forward_length", 4 * width)
    keys.u32(".block_count", layers)
    keys.u32(".attention.head_count", heads)
    keys.u32(".attention.head_count_kv", heads)
    keys.f32(".attention.layer_norm_epsilon", config["layer_norm_epsilon"])
    keys.u32("general.file_type", file_type)


def set_falcon_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of Falcon."""
    width, groups = config.number("hidden_size"), config.get("num_kv_heads")
    keys.u32(".context_length", 2048)
    keys.text(".tensor_data_layout", "jploski")
    keys.u32(".embedding_length", width)
    keys.u32(".feed_forward_length", 4 * width)
    keys.u32(".block_count", layers)
    keys.u32(".attention.head_count", config.number("num_attention_heads", "n_head"))
    keys.u32(".attention.head_count_kv", config.get("n_head_kv", 1) if groups is None else groups)
    keys.f32(".attention.layer_norm_epsilon", config["layer_norm_epsilon"])
    keys.u32("general.file_type", file_type)


def set_orion_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of Orion, whose rms_norm_eps is of norms that are none of root mean squares."""
    heads = config.number("num_attention_heads")
    keys.u32("general.file_type", file_type)
    keys.text(".tensor_data_layout", "Meta AI original pth")
    keys.u32(".context_length", config.number("max_sequence_length", "max_position_embeddings", "model_max_length"))
    keys.u32(".embedding_length", config["hidden_size"])
    keys.u32(".block_count", layers)
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32(".attention.head_count", heads)
    keys.u32(".attention.head_count_kv", config.get("num_key_value_heads", heads))
    keys.f32(".attention.layer_norm_epsilon", config["rms_norm_eps"])


def set_codeshell_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of CodeShell."""
    set_n_embd_keys(keys, config, layers, file_type, config.number("num_query_groups"))
    keys.f32(".rope.freq_base", 10000.0)
    keys.text(".rope.scaling.type", "linear")
    keys.f32(".rope.scaling.factor", 1.0)


# --- MiniCPM ---------------------------------------------------------------------------------------------------------


def set_minicpm_scales(keys: Keys, config: Config) -> None:
    """Set what MiniCPM multiplies embeddings, layers and logits by."""
    keys.f32(".embedding_scale", float(config["scale_emb"]))
    keys.f32(".residual_scale", config["scale_depth"] / config.layers**0.5)
    keys.f32(".logit_scale", config["hidden_size"] / config["dim_model_base"])


def set_minicpm3_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of MiniCPM 3."""
    keys.u32("general.file_type", file_type)
    keys.u32(".context_length", config["max_position_embeddings"])
    keys.u32(".embedding_length", config["hidden_size"])
    keys.u32(".block_count", layers)
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32(".attention.head_count", config["num_attention_heads"])
    keys.u32(".attention.head_count_kv", config["num_key_value_heads"])
    keys.f32(".attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    keys.u32(".vocab_size", config["vocab_size"])
    if (rank := config.get("q_lora_rank")) is not None:
        keys.u32(".attention.q_lora_rank", rank)
    rope = config.number("qk_rope_head_dim")
    keys.u32(".attention.kv_lora_rank", config["kv_lora_rank"])
    keys.u32(".attention.key_length", config.number("qk_nope_head_dim") + rope)
    keys.u32(".rope.dimension_count", rope)


def rope_factors(config: Config) -> Iterable[Tensor]:
    """The factors of MiniCPM's rope, long and short, for what rope turns of a head."""
    width = config.number("qk_rope_head_dim") if "qk_rope_head_dim" in config else config.without("head_dim").head_dim
    both = [(kind, config.rope.get(f"{kind}_factor")) for kind in ("long", "short")]
    if not any(factors for _, factors in both):
        return
    for kind, factors in both:
        if not isinstance(factors, list) or 2 * len(factors) != width:
            raise FormatError(f"{config.path}: {kind}_factor of rope is no list of {width // 2} factors")
        name = f"rope_factors_{kind}.weight"
        yield Tensor(name, Constant(tuple(float(each) for each in factors)), None, name)
