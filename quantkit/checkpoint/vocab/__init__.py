"""Vocabularies: the tokenizer of a checkpoint as tokenizer.* keys.

``WRITERS`` names the kinds; each is a function of a ``Vocabulary`` that sets keys, in the order of the class of
convert_hf_to_gguf.py (b11434) that it is named after. A new kind is a function here, or in a file of its own beside
``bpe`` and ``sentencepiece``, and a row in the table.
"""

from __future__ import annotations

from collections.abc import Callable

from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.families import (
    write_gemma,
    write_gemma1,
    write_gemma4,
    write_mamba,
    write_phi,
    write_sentencepiece_or_bpe,
)
from quantkit.checkpoint.vocab.llama_hf import is_llama_hf, write_llama_hf
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.checkpoint.vocab.special import special_tokens
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError


def write_llama(v: Vocabulary) -> None:
    """SentencePiece, Llama's pieces in a tokenizer.json, or BPE: the first that there is (LlamaModel)."""
    if v.has("tekken.json") and not v.has("tokenizer.json"):
        raise FormatError(f"{v.folder}: only tekken.json says what its tokens are; add the tokenizer.json of the model")
    if v.tokenizer_config.get("add_prefix_space") is not None:
        v.keys.flag("tokenizer.ggml.add_space_prefix", v.tokenizer_config["add_prefix_space"])
    if v.has("tokenizer.model"):
        write_sentencepiece(v)
    elif is_llama_hf(v):
        write_llama_hf(v)
    else:
        write_bpe(v)
    size = v.config.get("vocab_size", 32000)
    if size == 32016:  # CodeLlama
        special = special_tokens(v.folder, kinds=("prefix", "suffix", "middle", "eot"))
        for kind, number in (("prefix", 32007), ("suffix", 32008), ("middle", 32009), ("eot", 32010)):
            special.set(kind, number)
        special.write(v.keys)
    if size == 49152:  # small Granite
        v.keys.flag("tokenizer.ggml.add_bos_token", False)


WRITERS: dict[str, Callable[[Vocabulary], None]] = {
    "bpe": write_bpe,
    "sentencepiece": write_sentencepiece,
    "sentencepiece or bpe": write_sentencepiece_or_bpe,
    "llama": write_llama,
    "gemma": write_gemma,
    "gemma 1": write_gemma1,
    "gemma 4": write_gemma4,
    "phi": write_phi,
    "mamba": write_mamba,
}
