"""Tokenizers from GGUF metadata, their ids equal to those of llama.cpp b11434's llama_tokenize.

A text becomes ids in four steps::

    special.py      cuts out special tokens; the rest continues piece by piece
    pre.py split.py BPE only: words, by the patterns that tokenizer.ggml.pre names
    bpe.py spm.py   the model (tokenizer.ggml.model): merges by rank, merges by score,
    wordpiece.py    or longest matches; merge.py is the loop of the first two, and caches words
    tokenizer.py    adds the tokens that begin and end a sequence

vocab.py reads and corrects the vocabulary, unicode.py classifies characters, ids.py reads explicit ids.
"""

from __future__ import annotations

from quantkit.formats.tokenizer.ids import read_token_ids
from quantkit.formats.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer", "read_token_ids"]
