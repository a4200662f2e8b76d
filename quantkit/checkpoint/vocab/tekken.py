"""tekken.json, Mistral's vocabularies: the keys that TextModel._set_vocab_mistral (llama.cpp b11434) sets.

A file has a list of tokens, as bytes in Base64, by rank, of which the first 256 are the bytes themselves; special
tokens precede them; the file has their number. Merges are not stored: every two tokens that form a third are one.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

import regex

from quantkit.checkpoint.config import Json, read_json
from quantkit.checkpoint.templates import TEMPLATES
from quantkit.checkpoint.vocab.pre_tokenizers import TEXT
from quantkit.checkpoint.vocab.sentencepiece import read_model
from quantkit.checkpoint.vocab.special import SpecialTokens, special_tokens, template_file, write_template
from quantkit.checkpoint.vocab.tiktoken import merge_token, to_letters
from quantkit.checkpoint.vocab.tokenizer import CONTROL, MAX_PADDING, MAX_TOKENS, NORMAL, UNKNOWN, Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

FILE = "tekken.json"
#: Maximum bytes of a token, far more than any has.
_MAX_TOKEN = 4096
#: Special tokens of files that list none.
_SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
#: Templates that llama.cpp has by name, by the version of the tokenizer.
_TEMPLATES = {"v3": "mistral-v3-tekken", "v7": "mistral-v7-tekken"}


def write_tekken(v: Vocabulary) -> None:
    """Set the keys of such a vocabulary.

    The chat template is one that llama.cpp has by name, or else that of the checkpoint; convert_hf_to_gguf.py uses
    its own templates from version 11 on.
    """
    path = v.folder / FILE
    data = read_json(path)
    config = data.get("config")
    if not isinstance(config, dict):
        raise FormatError(f"{path}: has no config", "QK-E114")
    size, n = (_count(v, config, key) for key in ("default_vocab_size", "default_num_special_tokens"))
    if n > MAX_PADDING:
        raise FormatError(f"{path}: has {n} special tokens", "QK-E114")
    special = _special(v, data, n)
    ranks = _ranks(v, data, size - n)
    v.source = lambda: (TEXT, _ids(v, config.get("pattern"), ranks, n))
    keys = v.keys
    keys.text("tokenizer.ggml.model", "gpt2")
    keys.text("tokenizer.ggml.pre", "tekken")
    keys.array("tokenizer.ggml.merges", _merges(v, ranks))
    ids = {text: i for i, text in reversed(list(enumerate(special)))}
    for key, text in (("bos", "<s>"), ("eos", "</s>"), ("unknown", "<unk>"), ("padding", "<pad>")):
        if text not in ids:
            raise FormatError(f"{path}: has no special token {text}", "QK-E114")
        keys.u32(f"tokenizer.ggml.{key}_token_id", ids[text])
    keys.array("tokenizer.ggml.tokens", [*special, *map(to_letters, ranks)])
    keys.array("tokenizer.ggml.scores", [0] * size)
    keys.array("tokenizer.ggml.token_type", [CONTROL] * n + [NORMAL] * (size - n))
    keys.u32(".vocab_size", size)
    keys.flag("tokenizer.ggml.add_bos_token", True)
    keys.flag("tokenizer.ggml.add_eos_token", False)
    if v.config.is_native:
        _write_native_template(v, str(config.get("version")), "tekken")
        return
    template = _TEMPLATES.get(str(config.get("version")))
    write_template(keys, template if template is not None else _own_template(v))


#: The templates of SentencePiece's models, by the version of the tokenizer.
_PIECE_TEMPLATES = {"v1": "mistral-v1", "v3": "mistral-v3", "v7": "mistral-v7"}
#: Names of such a model: a version may end by that of its images.
_PIECE_FILE = re.compile(r".*\.model(?:\.(v1|v2|v3|v7|v11|v13|v15)(?:m\d+)?)?")


def write_native(v: Vocabulary) -> None:
    """Write the vocabulary of a checkpoint in Mistral's own format: tekken.json, else a model of SentencePiece.

    The chat template is chat_template.jinja, else one that convert_hf_to_gguf.py has for the tokenizer's version.
    """
    if v.has(FILE):
        write_tekken(v)
        return
    names = sorted(path.name for path in v.folder.glob("*.model*") if _PIECE_FILE.fullmatch(path.name))
    if not names:
        raise FormatError(f"{v.folder}: has neither {FILE} nor tokenizer.model.VERSION: no vocabulary", "QK-E114")
    match = _PIECE_FILE.fullmatch(names[-1])
    pieces, path, keys = read_model(v.folder / names[-1]).pieces, v.folder / names[-1], v.keys
    v.source = f"quantkit does not run SentencePiece, which {names[-1]} needs"
    ids = {piece.text: i for i, piece in reversed(list(enumerate(pieces)))}
    unknown = next((i for i, piece in enumerate(pieces) if piece.type == UNKNOWN), None)
    if unknown is None or "<s>" not in ids or "</s>" not in ids:
        raise FormatError(f"{path}: has no pieces <unk>, <s> and </s>", "QK-E114")
    keys.text("tokenizer.ggml.model", "llama")
    keys.u32("tokenizer.ggml.bos_token_id", ids["<s>"])
    keys.u32("tokenizer.ggml.eos_token_id", ids["</s>"])
    keys.u32("tokenizer.ggml.unknown_token_id", unknown)
    keys.u32("tokenizer.ggml.padding_token_id", ids.get("<pad>", ids["</s>"]))
    keys.array("tokenizer.ggml.tokens", [piece.text for piece in pieces])
    keys.array("tokenizer.ggml.scores", [piece.score for piece in pieces])
    keys.array("tokenizer.ggml.token_type", [piece.type for piece in pieces])
    keys.u32(".vocab_size", len(pieces))
    keys.flag("tokenizer.ggml.add_bos_token", True)
    keys.flag("tokenizer.ggml.add_eos_token", False)
    _write_native_template(v, (match[1] if match else None) or "v1", "pieces")


def _write_native_template(v: Vocabulary, version: str, kind: str) -> None:
    """Set the chat template of a checkpoint in Mistral's own format, if it has one, or llama.cpp's for its version."""
    if v.has("chat_template.jinja"):
        write_template(v.keys, template_file(v.folder), "chat_template.jinja")
        return
    if not v.community_template:
        return
    names = {**(_TEMPLATES if kind == "tekken" else _PIECE_TEMPLATES)}
    names |= {key: TEMPLATES[f"mistral-{key}"] for key in ("v11", "v13")}
    if version not in names:
        raise FormatError(
            f"{v.folder}: has no chat_template.jinja, and there is no other template for a tokenizer of version "
            f"{short(version)}: download the file, or use --disable-mistral-community-chat-template",
            "QK-E114",
        )
    write_template(v.keys, names[version])


def _ids(v: Vocabulary, pattern: Any, ranks: dict[bytes, int], n: int) -> list[int]:
    """Return the ids of the test text, as computed by the tiktoken package."""
    try:
        words = regex.findall(pattern, TEXT)
    except (TypeError, regex.error) as e:
        raise FormatError(f"{v.folder / FILE}: its pattern is {short(pattern)}: {e}", "QK-E114") from None
    return [n + rank for word in words for rank in _word_ids(ranks, word.encode())]


def _word_ids(ranks: dict[bytes, int], word: bytes) -> list[int]:
    return [ranks[word]] if word in ranks else [ranks[part] for part in merge_token(ranks, word, len(ranks))]


def _count(v: Vocabulary, config: Json, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
        raise FormatError(f"{v.folder / FILE}: {key} is {short(value)}", "QK-E114")
    return value


def _own_template(v: Vocabulary) -> Any:
    special: SpecialTokens = special_tokens(v.folder, kinds=())
    return special.template


def _special(v: Vocabulary, data: Json, n: int) -> list[str]:
    """Return the special tokens, padded to ``n``."""
    path, specials = v.folder / FILE, data.get("special_tokens")
    if specials is None:
        texts: list[Any] = list(_SPECIAL)
    elif isinstance(specials, list):
        texts = [entry.get("token_str") if isinstance(entry, dict) else None for entry in specials]
    else:
        raise FormatError(f"{path}: special_tokens is {short(specials)}, not a list", "QK-E114")
    texts += [f"<SPECIAL_{i}>" for i in range(len(texts), n)]
    if len(texts) != n or not all(isinstance(text, str) for text in texts) or len(set(texts)) < n:
        raise FormatError(f"{path}: its special tokens must be {n} different texts", "QK-E114")
    return texts


def _ranks(v: Vocabulary, data: Json, n: int) -> dict[bytes, int]:
    """Return the ranks of the first ``n`` tokens."""
    path, entries = v.folder / FILE, data.get("vocab")
    if not isinstance(entries, list) or not 256 <= n <= len(entries):
        raise FormatError(f"{path}: its vocab does not contain {n} tokens", "QK-E114")
    ranks: dict[bytes, int] = {}
    for i, entry in enumerate(entries[:n]):
        try:
            token = base64.b64decode(entry["token_bytes"], validate=True)
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise FormatError(f"{path}: token {i} has no bytes in Base64: {short(entry)}", "QK-E114") from None
        if entry.get("rank") != i or (i < 256 and token != bytes([i])) or not 0 < len(token) <= _MAX_TOKEN:
            raise FormatError(f"{path}: token {i} does not have this rank: {short(entry)}", "QK-E114")
        if token in ranks:
            raise FormatError(f"{path}: tokens {ranks[token]} and {i} are the same", "QK-E114")
        ranks[token] = i
    return ranks


def _merges(v: Vocabulary, ranks: dict[bytes, int]) -> list[str]:
    """Return every pair of tokens that forms a third, in the order of the third, then of the parts."""
    merges: list[str] = []
    for token in list(ranks)[256:]:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = sorted((ranks[a], ranks[b], a, b) for a, b in cuts if a in ranks and b in ranks)
        if not pairs:
            raise FormatError(
                f"{v.folder / FILE}: token {ranks[token]} is not a merge of two other tokens: {short(token)}", "QK-E114"
            )
        merges += [f"{to_letters(a)} {to_letters(b)}" for _, _, a, b in pairs]
    return merges
