"""StarCoder 1 and 2, CodeShell and Refact, which name their sizes as GPT-2 does.

Facts of llama.cpp b11434, conversion/starcoder.py, conversion/codeshell.py, conversion/refact.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.key_rows import FILE_TYPE, Always, Computed, Copied, KeyRow, SetKeys, block_count
from quantkit.checkpoint.models import gpt2
from quantkit.checkpoint.row import Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Rename, Split
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.special import special_tokens
from quantkit.checkpoint.vocab.tokenizer import Vocabulary


def _refact_width(config: Config) -> int:
    """Return Refact's feed-forward width, which config.json lacks."""
    return -(int(8 * config.number("n_embd") / 3) // -256) * 256


def _refact_widths(config: Config) -> tuple[int, int]:
    return _refact_width(config), _refact_width(config)


def _key_and_value(config: Config) -> tuple[int, int]:
    width = config.number("n_embd") // max(1, config.number("n_head"))
    return width, width


REFACT_RULES = (
    Split(r"attn\.kv\.weight$", ("attn.k_proj.weight", "attn.v_proj.weight"), sizes=_key_and_value, always=True),
    Rename(r"attn\.q\.weight$", "attn.q_proj.weight"),
    Split(
        r"mlp\.gate_up_proj\.weight$",
        ("mlp.linear_1.weight", "mlp.linear_3.weight"),
        sizes=_refact_widths,
        always=True,
    ),
)


def base_keys(
    feed_forward: KeyRow, kv_heads: KeyRow, epsilon: str = ".attention.layer_norm_epsilon"
) -> tuple[SetKeys, ...]:
    """Return the rows of GPT-2's names, with the feed-forward width and the KV heads."""
    return (
        Copied(".context_length", "n_positions", required=True),
        Copied(".embedding_length", "n_embd", required=True),
        feed_forward,
        block_count("n_layer"),
        Copied(".attention.head_count", "n_head", required=True),
        kv_heads,
        Copied(epsilon, "layer_norm_epsilon", "f32", required=True),
        FILE_TYPE,
    )


_FOURFOLD = Computed(".feed_forward_length", lambda config: 4 * config.number("n_embd"))
_SINGLE = Always(".attention.head_count_kv", 1)

CODESHELL_BASE: tuple[SetKeys, ...] = (
    *base_keys(_FOURFOLD, Copied(".attention.head_count_kv", "num_query_groups", required=True)),
    Always(".rope.freq_base", 10000.0, "f32", "rope_theta"),
    Always(".rope.scaling.type", "linear", "text"),
    Always(".rope.scaling.factor", 1.0, "f32"),
)
REFACT_BASE = base_keys(
    Computed(".feed_forward_length", _refact_width), _SINGLE, epsilon=".attention.layer_norm_rms_epsilon"
)


def write_refact(v: Vocabulary) -> None:
    """Write a BPE vocabulary with fill-in-the-middle tokens, whose keys are deprecated (RefactModel)."""
    write_bpe(v)
    special = special_tokens(v.folder, kinds=("prefix", "suffix", "middle", "eot"))
    special.template = None
    special.write(v.keys)


ARCHITECTURES: dict[str, Architecture] = {
    "GPTBigCodeForCausalLM": Architecture("starcoder", base=base_keys(_FOURFOLD, _SINGLE)),
    "Starcoder2ForCausalLM": Architecture("starcoder2"),
    "CodeShellForCausalLM": Architecture("codeshell", base=CODESHELL_BASE),
    "GPTRefactForCausalLM": Architecture("refact", rules=REFACT_RULES, base=REFACT_BASE, vocab=write_refact),
}

CLASSES: dict[str, HfClass] = {
    "GPTBigCodeForCausalLM": HfClass(
        "gpt_bigcode", gpt2.GPT_2_NAMES, keys={".feed_forward_length": "n_inner"}, defaults={"multi_query": True}
    ),
    "Starcoder2ForCausalLM": HfClass("starcoder2", "model.layers.*.mlp.c_fc model.layers.*.mlp.c_proj"),
    "CodeShellForCausalLM": HfClass("codeshell", gpt2.GPT_2_NAMES),
    "GPTRefactForCausalLM": HfClass(
        "gpt_refact",
        "transformer.wte ln_f "
        + add_prefix(
            "transformer.h.*.",
            "ln_1 ln_2 attn.q_proj attn.k_proj attn.v_proj attn.c_proj mlp.linear_1 mlp.linear_3 mlp.c_proj",
        ),
        defaults={"multi_query": True, "do_sample": True},
    ),
}
