"""XVERSE and Baichuan.

Facts of llama.cpp b11434, conversion/xverse.py, conversion/baichuan.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.key_rows import Always, Computed, SetKeys, divided_head_dim
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import Split, Transform, permute_rows, restore_rows
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.checkpoint.vocab.bpe import is_byte_level, write_bpe
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.checkpoint.vocab.special import special_tokens
from quantkit.checkpoint.vocab.tokenizer import BYTE, CONTROL, NORMAL, USER_DEFINED, Vocabulary, checked_size
from quantkit.errors import FormatError


@dataclass(frozen=True)
class PermuteHeads:
    """Undoes the permutation of queries, or of ``keys``, for rope.

    If there are fewer keys than queries, a different number of heads is assumed, as in the reference.
    """

    keys: bool = False
    inverse: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Expression:
        heads = context.config.number("num_attention_heads")
        key_heads = context.config.get("num_key_value_heads", heads) if self.keys else heads
        n = heads if key_heads in (None, heads) else heads // max(1, key_heads)
        return (restore_rows if self.inverse else permute_rows)(tensor, n)


PERMUTE_HEADS = (
    Transform(r"q_proj\.weight$", PermuteHeads(), PermuteHeads(inverse=True)),
    Transform(r"k_proj\.weight$", PermuteHeads(keys=True), PermuteHeads(keys=True, inverse=True)),
)


#: Baichuan's queries, keys and values are stored as one tensor.
SPLIT_W_PACK = Split(r"\.W_pack\.weight$", (".q_proj.weight", ".k_proj.weight", ".v_proj.weight"), always=True)

KEYS: tuple[SetKeys, ...] = (
    Always(".tensor_data_layout", "Meta AI original pth", "text"),
    Computed(".rope.dimension_count", divided_head_dim),
)
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def write_xverse(v: Vocabulary) -> None:
    """Write the pieces of a tokenizer.json, without scores (XverseModel), or byte-level BPE."""
    v.run()
    if is_byte_level(v):
        write_bpe(v)
        return
    size = checked_size(v, v.config.get("vocab_size", len(v.by_id)), max(v.by_id, default=0))
    missing = next((number for number in range(size) if number not in v.by_id), None)
    if missing is not None:
        raise FormatError(f"{v.where}: has no token {missing}, but vocab_size of config.json is {size}", "QK-E114")
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


_BAICHUAN = Architecture("baichuan", rules=(SPLIT_W_PACK, *PERMUTE_HEADS), keys=KEYS, vocab=write_sentencepiece)

ARCHITECTURES: dict[str, Architecture] = {
    "XverseForCausalLM": Architecture("xverse", rules=PERMUTE_HEADS, keys=KEYS, vocab=write_xverse),
    # For these, convert_hf_to_gguf.py recurses without end where it names a tensor.
    "BaichuanForCausalLM": _BAICHUAN,
    "BaiChuanForCausalLM": _BAICHUAN,
}


def _set_model_max_length(meta: ModelMetadata, config: Json) -> None:
    """Also set the context length by Baichuan's own name."""
    config["model_max_length"] = meta.number(".context_length")


CLASSES: dict[str, HfClass] = {
    "XverseForCausalLM": HfClass("xverse"),
    "BaichuanForCausalLM": HfClass("baichuan", config_setters=(_set_model_max_length,)),
}
