"""Files of ranks as read by the tiktoken package: Kimi's tiktoken.model, Hunyuan's hy.tiktoken.

A line is a token, in Base64, and its rank, which is its id. Merges are not stored: for each token, they are the two
parts that remain when its bytes are joined by ranks below its own (HunYuanMoEModel.set_vocab and
DeepseekV2Model.set_vocab of llama.cpp b11434). The pre-tokenizer and most special tokens are in Python code of the
checkpoint, which quantkit does not run, so a table has their names.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.config import MAX_JSON
from quantkit.checkpoint.vocab.special import SpecialTokens, special_tokens
from quantkit.checkpoint.vocab.tokenizer import CONTROL, MAX_PADDING, MAX_TOKENS, NORMAL, UNUSED, Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_whole

#: Maximum bytes of a token, ten times that of the longest known one.
MAX_TOKEN = 1280

Ranks = dict[bytes, int]


@dataclass(frozen=True)
class RankFile:
    """A kind of such files: its name, its pre-tokenizer, and the special tokens after the ranks.

    ``special``: the name of a special token by its place and id; there are at most ``max_special``.
    """

    file: str
    pre: str
    special: Callable[[int, int], str]
    max_special: int


_HUNYUAN_SPECIAL = ("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>")


def _hunyuan_special(place: int, number: int) -> str:
    n = len(_HUNYUAN_SPECIAL)
    return _HUNYUAN_SPECIAL[place] if place < n else f"<|extra_{place - n}|>"


_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _qwen_special(place: int, number: int) -> str:
    n = len(_QWEN_SPECIAL)
    return _QWEN_SPECIAL[place] if place < n else f"<|extra_{place - n}|>"


#: tokenization_kimi.py and tokenization_hy.py beside the files, and tokenization_qwen.py, name these.
KIMI = RankFile("tiktoken.model", "kimi-k2", lambda place, number: f"<|reserved_token_{number}|>", 256)
HUNYUAN = RankFile("hy.tiktoken", "hunyuan", _hunyuan_special, MAX_TOKENS)
QWEN = RankFile("qwen.tiktoken", "qwen2", _qwen_special, 208)

#: Completes special tokens, by the ids of texts.
Complete = Callable[[SpecialTokens, dict[str, int]], None]


def read_ranks(path: Path) -> Ranks:
    """Return the tokens in a file and their ranks. Raises FormatError."""
    ranks: Ranks = {}
    for line_number, line in enumerate(read_whole(path, MAX_JSON).splitlines(), 1):
        try:
            text, rank = line.split()
            token, number = base64.b64decode(text, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise FormatError(
                f"{path}: line {line_number} is not a Base64 token with its rank: {short(line)}", "QK-E114"
            ) from None
        if not 0 < len(token) <= MAX_TOKEN or not 0 <= number < MAX_TOKENS:
            raise FormatError(
                f"{path}: line {line_number}: a token of {len(token)} bytes with rank {number}", "QK-E114"
            )
        ranks[token] = number
    return ranks


def merges_of(ranks: Ranks) -> Iterator[str]:
    """Yield the two parts of every token that is a merge."""
    for token, rank in ranks.items():
        if len(token) > 1:
            parts = merge_token(ranks, token, rank)
            if len(parts) == 2:
                yield f"{to_letters(parts[0])} {to_letters(parts[1])}"


def merge_token(ranks: Ranks, token: bytes, below: int) -> list[bytes]:
    """Return the parts of a token after all merges of ranks less than ``below``, the lowest first."""
    parts = [token[i : i + 1] for i in range(len(token))]
    ranks_of_pairs = [_rank(ranks, parts, i, below) for i in range(len(parts) - 1)]
    while ranks_of_pairs:
        lowest = min(ranks_of_pairs)
        if lowest == below:
            break
        i = ranks_of_pairs.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del ranks_of_pairs[i]
        for j in (i - 1, i):
            if 0 <= j < len(ranks_of_pairs):
                ranks_of_pairs[j] = _rank(ranks, parts, j, below)
    return parts


def _rank(ranks: Ranks, parts: list[bytes], i: int, below: int) -> int:
    return min(below, ranks.get(parts[i] + parts[i + 1], below))


def write_ranks(v: Vocabulary, kind: RankFile, complete: Complete = lambda special, ids: None) -> None:
    """Set the keys of such a vocabulary."""
    path = v.folder / kind.file
    if not path.exists():
        raise FormatError(
            f"{v.folder}: has neither tokenizer.json nor {kind.file}, so the vocabulary is missing", "QK-E114"
        )
    v.source = f"{kind.file} needs the checkpoint's own Python code to split text, which quantkit does not run"
    ranks = read_ranks(path)
    size = v.config.number("vocab_size")
    if not max(ranks.values(), default=0) < size <= min(MAX_TOKENS, len(ranks) + MAX_PADDING):
        raise FormatError(f"{path}: has {len(ranks)} tokens, but vocab_size of config.json is {size}", "QK-E114")
    first = len(ranks)
    last = min(size, first + kind.max_special)
    special = {number: kind.special(number - first, number) for number in range(first, last)}
    special |= {number: entry["content"] for number, entry in v.decoder_entries if number < size}
    ids = {to_letters(token): rank for token, rank in ranks.items()} | {text: n for n, text in sorted(special.items())}
    texts = {number: text for text, number in ids.items()}
    controls = {number for number in special if texts.get(number) == special[number]}
    v.keys.text("tokenizer.ggml.model", "gpt2")
    v.keys.text("tokenizer.ggml.pre", v.pre or kind.pre)
    v.keys.array("tokenizer.ggml.tokens", [texts.get(number, f"[PAD{number}]") for number in range(size)])
    v.keys.array(
        "tokenizer.ggml.token_type",
        [(CONTROL if n in controls else NORMAL) if n in texts else UNUSED for n in range(size)],
    )
    v.keys.array("tokenizer.ggml.merges", list(merges_of(ranks)))
    config_tokens = special_tokens(v.folder)
    complete(config_tokens, ids)
    config_tokens.write(v.keys)


_PLAIN = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_UNPRINTABLE = [byte for byte in range(256) if byte not in _PLAIN]
_LETTERS = {byte: chr(byte) for byte in _PLAIN} | {byte: chr(256 + i) for i, byte in enumerate(_UNPRINTABLE)}
_BYTES = {letter: byte for byte, letter in _LETTERS.items()}


def to_letters(token: bytes) -> str:
    """Return bytes as byte-level BPE spells them."""
    return token.decode("latin-1").translate(_LETTERS)


def to_bytes(text: str) -> bytes:
    """Return the bytes of a token of byte-level BPE. Raises ValueError if it is not one."""
    try:
        return bytes(_BYTES[letter] for letter in text)
    except KeyError as e:
        raise ValueError(f"{text!r} is not a token of byte-level BPE") from e
