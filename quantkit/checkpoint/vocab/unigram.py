"""Unigram: pieces as llama.cpp's "t5" vocabulary, of T5 (T5Model) and XLM-RoBERTa (XLMRobertaModel)."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from quantkit.checkpoint.vocab.bpe import set_token_types, write_nomic_words
from quantkit.checkpoint.vocab.sentencepiece import (
    Piece,
    PieceModel,
    add_added_tokens,
    plain_tokens,
    read_model,
    set_pieces,
    write_sentencepiece,
)
from quantkit.checkpoint.vocab.special import special_tokens
from quantkit.checkpoint.vocab.tokenizer import (
    CONTROL,
    MAX_PADDING,
    MAX_TOKENS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
)
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

#: Names of T5's file, and XLM-RoBERTa's.
_T5, _XLM = ("tokenizer.model", "spiece.model"), "sentencepiece.bpe.model"
#: XLM-RoBERTa's replacements of the first three pieces; it lacks the last one.
_FIRST = (("<s>", CONTROL), ("<pad>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN))
#: A token of Nomic's MoE that the file lacks.
_MASK = 250001


def write_t5(v: Vocabulary) -> None:
    """Write pieces with their scores; older models are SentencePiece BPE."""
    file = next((name for name in _T5 if v.has(name)), None)
    if file is None:
        raise FormatError(f"{v.folder}: has neither {' nor '.join(_T5)}, so the vocabulary is missing", "QK-E114")
    model = read_model(v.folder / file)
    if not model.is_unigram and file == _T5[0]:
        write_sentencepiece(v)
        return
    if not model.is_unigram:
        raise FormatError(f"{v.folder / file}: not a Unigram model", "QK-E114")
    tokens = plain_tokens(v, file=file)
    add_added_tokens(v, tokens)
    set_pieces(v, tokens, "t5")
    v.keys.flag("tokenizer.ggml.add_space_prefix", model.adds_prefix)
    v.keys.flag("tokenizer.ggml.remove_extra_whitespaces", model.removes_spaces)
    v.keys.octets("tokenizer.ggml.precompiled_charsmap", model.charsmap)
    special_tokens(v.folder, n_tokens=len(tokens)).write(v.keys)


def write_xlm(v: Vocabulary) -> None:
    """Write pieces with their scores, from the model's file or, without one, from tokenizer.json."""
    if v.has(_XLM):
        v.source = f"quantkit does not run SentencePiece, which {_XLM} needs"
        model = read_model(v.folder / _XLM)
        if not model.is_unigram:
            raise FormatError(f"{v.folder / _XLM}: not a Unigram model", "QK-E114")
        tokens = _reorder(v, model.pieces)
    else:
        v.run()
        model, tokens = _in_json(v)
    set_pieces(v, tokens, "t5")
    v.keys.flag("tokenizer.ggml.add_space_prefix", model.adds_prefix)
    set_token_types(v)
    v.keys.flag("tokenizer.ggml.remove_extra_whitespaces", model.removes_spaces)
    v.keys.octets("tokenizer.ggml.precompiled_charsmap", model.charsmap)
    special_tokens(v.folder, n_tokens=len(tokens)).write(v.keys)


def write_nomic(v: Vocabulary) -> None:
    """Write the WordPiece or Unigram vocabulary of tokenizer.json (NomicBertModel)."""
    if v.model_type == "Unigram":
        write_xlm(v)
    else:
        write_nomic_words(v)


def _size(v: Vocabulary, n: int) -> int:
    """Return the vocabulary size: the larger of ``n`` and the configuration's."""
    size = v.config.get("vocab_size", 0)
    if not isinstance(size, int) or isinstance(size, bool) or size > min(MAX_TOKENS, n + MAX_PADDING):
        raise FormatError(f"{v.config.path}: vocab_size is {short(size)}, but there are {n} tokens", "QK-E112")
    return max(size, n)


def _padding(first: int, size: int) -> list[Piece]:
    return [Piece(f"[PAD{i}]", -10000.0, UNUSED) for i in range(first, size)]


def _reorder(v: Vocabulary, pieces: list[Piece]) -> list[Piece]:
    """Return the tokens of a model's file, which XLM-RoBERTa orders differently."""
    tokens = pieces + _padding(len(pieces), _size(v, len(pieces)))
    tokens = [Piece(text, 0.0, kind) for text, kind in _FIRST] + tokens[3:-1]
    if v.keys.arch == "nomic-bert-moe":
        if len(tokens) <= _MASK:
            raise FormatError(
                f"{v.folder / _XLM}: {len(tokens)} tokens; Nomic models have more than {_MASK}", "QK-E114"
            )
        tokens[_MASK] = Piece("<mask>", 0.0, CONTROL)
    return tokens


def _in_json(v: Vocabulary) -> tuple[PieceModel, list[Piece]]:
    """Return the model of tokenizer.json, with its normalizer, and its tokens."""
    entries = v.model.get("vocab")
    if v.model.get("type") != "Unigram" or not isinstance(entries, list):
        raise FormatError(
            f"{v.where}: its model is {short(v.model.get('type'))}, but this class needs Unigram", "QK-E114"
        )
    unknown_text = v.tokenizer_config.get("unk_token")
    added = {t.number: t for t in v.added.values()}
    unknown_token = v.added.get(unknown_text) if isinstance(unknown_text, str) else None
    unknown = v.model.get("unk_id", 3) if unknown_token is None else unknown_token.number
    special = {t.number for t in v.added.values() if t.special and t.text in v.special_texts}
    tokens = []
    for number, entry in enumerate(entries):
        text, score = _pair(v, entry)
        kind = USER_DEFINED if number in added else NORMAL
        if number == unknown:
            kind = UNKNOWN
        elif number in special:
            kind = CONTROL
        tokens.append(Piece(text, score, kind))
    tokens += _padding(len(tokens), _size(v, len(tokens)))
    config = v.tokenizer_config
    model = PieceModel(
        charsmap=_charsmap(v),
        adds_prefix=bool(config.get("add_prefix_space", False)),
        removes_spaces=bool(config.get("clean_up_tokenization_spaces", False)),
    )
    return model, tokens


def _pair(v: Vocabulary, entry: Any) -> tuple[str, float]:
    if not isinstance(entry, list) or len(entry) != 2:
        raise FormatError(f"{v.where}: model.vocab: {short(entry)} is not a text with a score", "QK-E114")
    text, score = entry
    if not isinstance(text, str) or isinstance(score, bool) or not isinstance(score, (int, float)):
        raise FormatError(f"{v.where}: model.vocab: {short(entry)} is not a text with a score", "QK-E114")
    return text, float(score)


def _charsmap(v: Vocabulary) -> bytes:
    normalizer = v.json.get("normalizer")
    text = normalizer.get("precompiled_charsmap") if isinstance(normalizer, dict) else None
    try:
        return base64.b64decode(text or "", validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise FormatError(f"{v.where}: precompiled_charsmap of its normalizer is not Base64", "QK-E114") from None
