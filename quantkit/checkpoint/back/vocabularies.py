"""Vocabularies of single families: Unigram (T5, XLM-RoBERTa), PLaMo's and RWKV's lists, and Qwen 1's ranks.

Facts of transformers 4.57.6 (convert_slow_tokenizer.py) and of the files of those models.
"""

from __future__ import annotations

import ast
import base64
import json

from quantkit.checkpoint.back.pieces import Normalizing, model_file, pieces_of
from quantkit.checkpoint.back.tokens import META, Json, Tokens, template, tokenizer_json
from quantkit.checkpoint.vocab.sentencepiece import Piece
from quantkit.checkpoint.vocab.spelling import letters
from quantkit.checkpoint.vocab.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

# --- Unigram ---------------------------------------------------------------------------------------------------------

#: Architectures of XLM-RoBERTa, and what its tokens begin with, which its model's file has in another order.
_XLM = ("bert", "nomic-bert-moe")
_FIRST = ["<s>", "<pad>", "</s>", "<unk>"]
#: Spaces but the last before a word.
_NOT_SINGLE = r"^ +| +(?= )| +$"


def unigram(tokens: Tokens) -> tuple[Json, dict[str, bytes]]:
    """Pieces with their scores: tokenizer.json, and the file of the model by the name that its class reads."""
    scores, of_xlm = tokens.scores(), tokens.model.get("general.architecture") in _XLM
    charsmap = bytes(tokens.octets("precompiled_charsmap"))
    prefix, removes = (tokens.flag(name) is not False for name in ("add_space_prefix", "remove_extra_whitespaces"))
    how, pieces = Normalizing(prefix, removes, charsmap), pieces_of(tokens, scores)
    of_file = _xlm_file(tokens, pieces, how) if of_xlm else {}
    steps: list[Json] = []
    if charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    always = removes or prefix
    if prefix and not removes and (of_file or not of_xlm):  # else a map that is not alone would not be seen
        steps.append({"type": "Prepend", "prepend": META})
        always = False
    space: Json = {"type": "Metaspace", "replacement": META, "prepend_scheme": "always" if always else "never"}
    single: Json = {"type": "Split", "pattern": {"Regex": _NOT_SINGLE}, "behavior": "Removed", "invert": False}
    parts = [single, {**space, "split": False}]
    made = tokenizer_json(
        tokens,
        normalizer={"type": "Sequence", "normalizers": steps} if len(steps) > 1 else steps[0] if steps else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": parts} if removes else parts[1],
        post_processor=template(tokens, (False, True), separates=of_xlm),
        decoder={**space, "prepend_scheme": "always" if prefix or removes else "never", "split": False},
        model={},
    )
    made["model"] = {
        "type": "Unigram",
        "unk_id": next((i for i, piece in enumerate(pieces) if piece.type == UNKNOWN), None),
        "vocab": [[piece.text, piece.score] for piece in pieces],
        "byte_fallback": False,  # as llama.cpp, and transformers
    }
    if of_xlm:
        return made, of_file
    added = {piece.text: i for i, piece in enumerate(pieces) if piece.type == USER_DEFINED}
    files = {"spiece.model": model_file(tokens, pieces, how, unigram=True)}
    if added:
        files["added_tokens.json"] = (json.dumps(added, indent=2, ensure_ascii=False) + "\n").encode()
    return made, files


def _xlm_file(tokens: Tokens, pieces: list[Piece], how: Normalizing) -> dict[str, bytes]:
    """Return the model's file, if the vocabulary comes of one: what fills it up is counted otherwise then.

    The file has three pieces where the vocabulary has four others.
    """
    last = len(tokens.texts) - 1
    if tokens.texts[:4] != _FIRST or tokens.texts[last] != f"[PAD{last - 1}]" or USER_DEFINED in tokens.types:
        return {}
    while len(pieces) > 4 and pieces[-1].type == UNUSED:
        pieces = pieces[:-1]
    first = [Piece(text, 0.0, kind) for text, kind in (("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL))]
    return {"sentencepiece.bpe.model": model_file(tokens, first + pieces[4:], how, unigram=True)}


def unigram_config(tokens: Tokens) -> Json:
    """Return what tokenizer_config.json says: `quantkit convert` reads what is done to spaces from it, as llama.cpp's
    converter does.
    """
    if tokens.model.get("general.architecture") not in _XLM:
        return {}
    return {
        "add_prefix_space": tokens.flag("add_space_prefix") is not False,
        "clean_up_tokenization_spaces": tokens.flag("remove_extra_whitespaces") is not False,
    }


# --- PLaMo -----------------------------------------------------------------------------------------------------------

_PLAMO_TYPES = {UNKNOWN: "UNKNOWN", CONTROL: "CONTROL", BYTE: "BYTE"}


def plamo(tokens: Tokens) -> dict[str, bytes]:
    """A line for each token: its text, its score, its type."""
    scores = tokens.scores()
    size = len(tokens.texts)
    while size and tokens.types[size - 1] == UNUSED:
        size -= 1
    rows = [[tokens.texts[i], scores[i], _PLAMO_TYPES.get(tokens.types[i], "NORMAL"), None] for i in range(size)]
    return {"tokenizer.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()}


# --- RWKV ------------------------------------------------------------------------------------------------------------


def rwkv(tokens: Tokens) -> dict[str, bytes]:
    """A line for each token but the first: its number, a literal of Python, how many bytes it has."""
    lines = []
    for number, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True)):
        if number == 0 or kind == UNUSED:
            continue
        token = _bytes_of(tokens, text)
        try:
            literal = repr(token.decode())
        except UnicodeDecodeError:
            literal = repr(token)
        lines.append(f"{number} {literal} {len(token)}\n")
    return {"rwkv_vocab_v20230424.txt": "".join(lines).encode()}


def _bytes_of(tokens: Tokens, text: str) -> bytes:
    """Return the bytes that Python writes as ``text``, between quotes of either kind."""
    for quote in ("'", '"'):
        try:
            token = ast.literal_eval(f"b{quote}{text}{quote}")
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(token, bytes) and repr(token)[2:-1] == text:
            return token
    raise FormatError(f"{tokens.where}: the token {short(text)} is not written as Python writes bytes")


# --- Qwen 1 ----------------------------------------------------------------------------------------------------------


def ranks(tokens: Tokens) -> dict[str, bytes]:
    """A line for each plain token: its bytes in Base64, and its id."""
    lines = (
        base64.b64encode(letters(text)) + b" %d\n" % number
        for number, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True))
        if kind == NORMAL
    )
    return {"qwen.tiktoken": b"".join(lines)}
