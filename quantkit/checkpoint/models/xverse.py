"""XVERSE.

Facts of llama.cpp b11434, conversion/xverse.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Always, Architecture, HfClass, SetKeys
from quantkit.checkpoint.rules import Transform, permute_rows, restore_rows
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.checkpoint.vocab.bpe import is_byte_level, write_bpe
from quantkit.checkpoint.vocab.special import special_tokens
from quantkit.checkpoint.vocab.tokenizer import BYTE, CONTROL, NORMAL, USER_DEFINED, Vocabulary, checked_size
from quantkit.errors import FormatError


@dataclass(frozen=True)
class PermuteHeads:
    """Undoes the permutation of queries, or of ``keys``, for rope.

    Where keys are fewer than queries, they are taken for another number of heads, as there.
    """

    keys: bool = False
    inverse: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Expression:
        heads = context.config.number("num_attention_heads")
        key_heads = context.config.get("num_key_value_heads", heads) if self.keys else heads
        n = heads if key_heads in (None, heads) else heads // max(1, key_heads)
        return (restore_rows if self.inverse else permute_rows)(tensor, n)


XVERSE_RULES = (
    Transform(r"q_proj\.weight$", PermuteHeads(), PermuteHeads(inverse=True)),
    Transform(r"k_proj\.weight$", PermuteHeads(keys=True), PermuteHeads(keys=True, inverse=True)),
)


def _set_rope(keys: Keys, config: Config) -> None:
    width = config.number("hidden_size") // max(1, config.number("num_attention_heads"))
    keys.u32(".rope.dimension_count", width)


XVERSE_KEYS: tuple[SetKeys, ...] = (Always(".tensor_data_layout", "Meta AI original pth", "text"), _set_rope)
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def write_xverse(v: Vocabulary) -> None:
    """Pieces of a tokenizer.json, without scores (XverseModel), or byte-level BPE."""
    v.run()
    if is_byte_level(v):
        write_bpe(v)
        return
    size = checked_size(v, v.config.get("vocab_size", len(v.by_id)), max(v.by_id, default=0))
    missing = next((number for number in range(size) if number not in v.by_id), None)
    if missing is not None:
        raise FormatError(f"{v.where}: it has no token {missing}, and vocab_size of config.json is {size}", "QK-E114")
    pieces = [_type_token(v, v.by_id[number]) for number in range(size)]
    v.keys.text("tokenizer.ggml.model", "llama")
    v.keys.text("tokenizer.ggml.pre", "default")
    v.keys.array("tokenizer.ggml.tokens", [text for text, _ in pieces])
    v.keys.array("tokenizer.ggml.token_type", [kind for _, kind in pieces])
    special_tokens(v.folder, n_tokens=size).write(v.keys)


def _type_token(v: Vocabulary, text: str) -> tuple[str, int]:
    if text == "\0":
        return "<b'\\x00'>", BYTE
    if _BYTE.fullmatch(text):
        return text, BYTE
    if text in v.added:
        return text, CONTROL if v.added[text].special else USER_DEFINED
    return text, NORMAL


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "XverseForCausalLM": Architecture("xverse", rules=XVERSE_RULES, keys=XVERSE_KEYS, vocab=write_xverse),
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "XverseForCausalLM": HfClass("xverse"),
}
