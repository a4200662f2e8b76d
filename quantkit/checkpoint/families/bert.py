"""Encoders: BERT and what has its layers (conversion/bert.py)."""

from __future__ import annotations

from typing import Any

from quantkit.checkpoint.config import Config, optional_json
from quantkit.checkpoint.expressions import Expression, Shaped, Transposed, taken
from quantkit.checkpoint.families.qwen import set_pooling
from quantkit.checkpoint.keys import Keys, set_base_keys
from quantkit.checkpoint.row import Always, Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Context, Dropped, Renamed, Rule, Tensor
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.rules import short

#: Embeddings are all they are made for: no heads, and no layer that pools for one.
STORED: tuple[Rule, ...] = (
    Renamed(r"^bert\.", ""),
    Renamed(r"\.gamma$", ".weight", foreign=True),
    Renamed(r"\.beta$", ".bias", foreign=True),
    Dropped(r"^embeddings\.position_ids$"),
    Dropped(r"^pooler\.dense\.(weight|bias)$"),
    Dropped(r"^cls\.(predictions|seq_relationship)"),
)


def labels(config: Config) -> dict[Any, Any]:
    """Return the labels of a classifier; those that every configuration has are none."""
    found = config.get("id2label") or {}
    if not isinstance(found, dict):
        raise FormatError(f"{config.path}: id2label is {short(found)}, not an object")
    first = found.get(0, found.get("0"))
    return {} if len(found) == 2 and first == "LABEL_0" else found


#: A classifier with labels has no other layer before it.
HEAD = Renamed(r"^classifier\.(weight|bias)$", r"classifier.out_proj.\1", when=lambda config: bool(labels(config)))


def _set_labels(keys: Keys, config: Config) -> None:
    keys.array(".classifier.output_labels", [text for _, text in sorted(labels(config).items())])


KEYS: tuple[SetKeys, ...] = (Always(".attention.causal", False, "flag"), set_pooling, _set_labels)


def set_distil_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the base keys behind the epsilon of DistilBERT's norms, which it does not store (DistilBertModel)."""
    keys.f32(".attention.layer_norm_epsilon", 1e-12)
    set_base_keys(keys, config, layers, file_type)


def offset(config: Config) -> int:
    """Return the number of the first position: behind the padding's."""
    return 0 if config.get("pad_token_id") is None else 1 + config.number("pad_token_id")


def cut_positions(config: Config) -> None:
    """Leave positions that no token has out of the context (RobertaModel)."""
    if "max_position_embeddings" in config:
        config.values["max_position_embeddings"] = config.number("max_position_embeddings") - offset(config)


def prepare_xlm(config: Config) -> None:
    """The same; adapters in the file, each of which would be a file of its own, are not converted."""
    if config.get("lora_adaptations"):
        raise TypeNotSupported(
            f"{config.path}: it has adapters (lora_adaptations), which this version does not convert"
        )
    cut_positions(config)


def used_positions(tensor: Tensor, context: Context) -> Expression:
    return taken(tensor.x, 0, range(min(offset(context.config), tensor.x.shape[0]), tensor.x.shape[0]))


POSITIONS = Changed(r"^embeddings\.position_embeddings\.weight$", used_positions)

#: What configurations of Nomic BERT must say, with experts or without.
_NOMIC = {
    **{"causal": False, "prenorm": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False},
    "rotary_emb_scale_base": None,
}


def has_experts(config: Config) -> bool:
    """Tell whether some of its layers have experts (Nomic BERT)."""
    return bool(config.get("moe_every_n_layers"))


def _is_unigram(config: Config) -> bool:
    model = (optional_json(config.path.parent / "tokenizer.json") or {}).get("model")
    return isinstance(model, dict) and model.get("type") == "Unigram"


def prepare_nomic(config: Config) -> None:
    """Set the context for which it was trained; refuse what llama.cpp does not run (NomicBertModel)."""
    if _is_unigram(config):
        cut_positions(config)
    experts = has_experts(config)
    wanted = _NOMIC | {"activation_function": "gelu" if experts else "swiglu"}
    wanted |= dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), experts)
    for key, value in wanted.items():
        if config[key] != value:
            raise FormatError(f"{config.path}: {key} is {short(config[key])}; only {value} is known")
    positions, trained = config.number("n_positions"), config.get("max_trained_positions", 2048)
    if positions not in (2048, 8192) or trained != 2048:
        raise FormatError(
            f"{config.path}: n_positions is {positions} and max_trained_positions {short(trained)}; known are 2048 or "
            "8192, and 2048"
        )
    config.values["n_positions"] = 2048 if positions == 8192 else 512


def by_expert(tensor: Tensor, context: Context) -> Expression:
    number = context.config.number
    return Shaped(tensor.x, (number("num_local_experts", "num_experts"), number("n_inner"), number("n_embd")))


def turned_by_expert(tensor: Tensor, context: Context) -> Expression:
    return Transposed(by_expert(tensor, context))


NOMIC_STORED: tuple[Rule, ...] = (Dropped(r"mlp\.experts\.bias"), *STORED)
NOMIC_EXPERTS: tuple[Rule, ...] = (
    Changed(r"mlp\.experts\.mlp\.w1", by_expert),
    Changed(r"mlp\.experts\.mlp\.w2", turned_by_expert),
    Renamed(r"(mlp\.experts\.mlp\.w[12])$", r"\1.weight"),
)
NOMIC_EXPERT_KEYS: tuple[SetKeys, ...] = (
    Copied(".moe_every_n_layers", "moe_every_n_layers", needed=True),
    Copied(".expert_used_count", "moe_top_k", needed=True),
)


def set_neo(keys: Keys, config: Config) -> None:
    """Set what NeoBERT's configuration does not say, or says of two matrices in one (NeoBert)."""
    keys.u32(".feed_forward_length", int(2 * config.number("intermediate_size") / 3))
    keys.f32(".rope.freq_base", 10000.0)
    keys.text(".rope.scaling.type", "none")
    keys.f32(".attention.layer_norm_rms_epsilon", config.get("norm_eps", 1e-6))
    keys.u32(".pooling_type", 2)


MODERN_KEYS: tuple[SetKeys, ...] = (
    Copied(".attention.sliding_window", "local_attention", needed=True),
    Copied(".attention.sliding_window_pattern", "global_attn_every_n_layers"),
    Always(".rope.scaling.type", "none", "text"),
    Copied(".vocab_size", "vocab_size", needed=True),
    Copied(".hidden_activation", "hidden_activation", "text"),
)
EURO_KEYS: tuple[SetKeys, ...] = (
    Always(".attention.causal", False, "flag"),
    Always(".rope.scaling.type", "none", "text"),
    set_pooling,
)
