"""Refact.

Facts of llama.cpp b11434, conversion/refact.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, HfClass, prefixed
from quantkit.checkpoint.rules import Rename, Split
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.special import special_tokens
from quantkit.checkpoint.vocab.tokenizer import Vocabulary


def _refact_width(config: Config) -> int:
    """Return the feed-forward width, which config.json lacks."""
    return -(int(8 * config.number("n_embd") / 3) // -256) * 256


def _key_and_value(config: Config) -> tuple[int, int]:
    width = config.number("n_embd") // max(1, config.number("n_head"))
    return width, width


REFACT_RULES = (
    Split(r"attn\.kv\.weight$", ("attn.k_proj.weight", "attn.v_proj.weight"), sizes=_key_and_value, always=True),
    Rename(r"attn\.q\.weight$", "attn.q_proj.weight"),
    Split(
        r"mlp\.gate_up_proj\.weight$",
        ("mlp.linear_1.weight", "mlp.linear_3.weight"),
        sizes=lambda config: (_refact_width(config), _refact_width(config)),
        always=True,
    ),
)


def set_refact_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of Refact."""
    keys.u32(".context_length", config["n_positions"])
    keys.u32(".embedding_length", config["n_embd"])
    keys.u32(".feed_forward_length", _refact_width(config))
    keys.u32(".block_count", layers)
    keys.u32(".attention.head_count", config["n_head"])
    keys.u32(".attention.head_count_kv", 1)
    keys.f32(".attention.layer_norm_rms_epsilon", config["layer_norm_epsilon"])
    keys.u32("general.file_type", file_type)


def write_refact(v: Vocabulary) -> None:
    """Write a BPE vocabulary with fill-in-the-middle tokens, whose keys are deprecated (RefactModel)."""
    write_bpe(v)
    special = special_tokens(v.folder, kinds=("prefix", "suffix", "middle", "eot"))
    special.template = None
    special.write(v.keys)


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "GPTRefactForCausalLM": Architecture("refact", rules=REFACT_RULES, base=set_refact_base, vocab=write_refact),
}

_LAYER = "transformer.h.*."

_REFACT_CLASS = HfClass(
    "gpt_refact",
    "transformer.wte ln_f "
    + prefixed(
        _LAYER,
        "ln_1 ln_2 attn.q_proj attn.k_proj attn.v_proj attn.c_proj mlp.linear_1 mlp.linear_3 mlp.c_proj",
    ),
    keys={
        ".block_count": "n_layer",
        ".context_length": "n_positions",
        ".embedding_length": "n_embd",
        ".feed_forward_length": "",
        ".attention.head_count": "n_head",
        ".attention.head_count_kv": "",
        ".attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    },
    defaults={"multi_query": True, "do_sample": True},
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "GPTRefactForCausalLM": _REFACT_CLASS,
}
