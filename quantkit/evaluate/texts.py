"""The texts of a measurement: files, conversations and tokens, cut into windows, each of one text.

A file is cut into chunks as by ``perplexity``. A conversation is a window of its own, rendered by the model's chat
template; of its tokens those of the answers are scored (what the model would have to generate, the end of its turn
included), or all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from quantkit.chat import Message, chat_template, conversations
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluate.likelihood import split_chunks
from quantkit.evaluate.passes import I32, Model, Window, scored_range, text_tokens
from quantkit.foreign.child import Child
from quantkit.formats.outputs import read_text
from quantkit.names import printable

Bools = npt.NDArray[np.bool_]

#: What is scored in conversations.
SCORED = ("answers", "all")
#: The smallest range of positions.
_LEAST_RANGE = 16


class Tokenizer(Protocol):
    """The part of a tokenizer that texts use."""

    bos: int | None
    eos: int | None
    add_bos: bool

    def encode(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> I32: ...

    def piece(self, token: int) -> bytes: ...


@dataclass(frozen=True)
class Texts:
    """The texts to measure: paths of text files (``files``) and of JSON Lines (``chat``), a text, tokens int32 [n].

    parse_special: treat "<|im_end|>" and the like in files as control tokens. scored: of conversations, the tokens of
    "answers", or "all".
    """

    files: tuple[Path, ...] = ()
    chat: tuple[Path, ...] = ()
    prompt: str | None = None
    tokens: I32 | None = None
    parse_special: bool = False
    scored: str = "answers"


@dataclass(frozen=True, eq=False)
class Text:
    """A text as windows; ``first``: positions before it are evaluated, but not part of the text's statistics.

    content: the text itself, if there is one, and all its ``tokens`` int32 [n]. is_cut: the windows are chunks.
    """

    name: str
    windows: tuple[Window, ...]
    first: int
    content: str | bytes | None
    tokens: I32
    is_cut: bool = True


def read_texts(
    texts: Texts, model: Model, n_ctx: int, chunks: int | None, notes: list[str], *, all_positions: bool
) -> list[Text]:
    """Return the texts, in windows of at most ``n_ctx`` tokens.

    Args:
        chunks: the number of windows to use of each text; None: all.
        notes: gets a note on conversations that are cut or left out.
        all_positions: evaluate all positions of chunks, not only their second half.

    Raises:
        QuantkitError: no text, or one that is shorter than a chunk.
    """
    if texts.scored not in SCORED:
        raise RecipeError(f"unknown part of conversations {texts.scored!r}: choose {' or '.join(SCORED)}", "QK-E203")
    result = []
    for name, content, tokens in _plain_texts(texts):
        try:
            ids = _tokens_of(model, content, tokens, parse_special=texts.parse_special)
            result.append(_split(name, content, ids, n_ctx, chunks, all_positions=all_positions))
        except QuantkitError as e:
            raise type(e)(f"{name}: {e.message}", e.code) from None
    for path in texts.chat:
        result.append(_chat(path, model, n_ctx, chunks, texts.scored == "all", notes))
    if not result:
        raise QuantkitError("give a text: -f FILE, --chat JSONL, -p TEXT or --tokens IDS", "QK-E201")
    return result


def _plain_texts(texts: Texts) -> Iterator[tuple[str, str | bytes | None, I32 | None]]:
    """Yield name, text and tokens of the texts that are cut into chunks; a file without its final newline."""
    for path in texts.files:
        yield printable(os.fspath(path)), read_text(path).removesuffix(b"\n"), None
    if texts.prompt is not None:
        yield "text", texts.prompt, None
    if texts.tokens is not None:
        yield "tokens", None, texts.tokens


def _tokens_of(model: Model, content: str | bytes | None, tokens: I32 | None, *, parse_special: bool) -> I32:
    if content is None or not parse_special:
        return text_tokens(model, content, tokens)
    return cast(Tokenizer, model.tokenizer).encode(content, parse_special=True)


def _split(
    name: str, content: str | bytes | None, ids: I32, n_ctx: int, chunks: int | None, *, all_positions: bool
) -> Text:
    first = n_ctx // 2
    mask = scored_range(n_ctx, 0 if all_positions else first)
    windows = tuple(Window(tokens, mask) for tokens in split_chunks(ids, n_ctx, chunks))
    return Text(name, windows, first, content, ids)


def with_bos(window: Window, text: Text, bos: int | None) -> Window:
    """Return a window of a text as it is evaluated: a chunk with BOS in place of its first token, as by llama.cpp."""
    if bos is None or not text.is_cut:
        return window
    tokens = window.tokens.copy()
    tokens[0] = bos
    return Window(tokens, window.is_scored)


def position_ranges(n_ctx: int) -> list[tuple[int, int]]:
    """Return ranges of positions, first and end, each half as long as the next; the last is the scored half."""
    edges = [n_ctx]
    while edges[-1] // 2 >= _LEAST_RANGE:
        edges.append(edges[-1] // 2)
    edges = [0, *edges[::-1]]
    return list(zip(edges[:-1], edges[1:], strict=True))


# ---------------------------------------------------------------- conversations


def _chat(path: Path, model: Model, n_ctx: int, chunks: int | None, score_all: bool, notes: list[str]) -> Text:
    """Return the conversations of a file, one a window."""
    name = printable(os.fspath(path))
    tokenizer = cast(Tokenizer, model.tokenizer)
    windows, contents = list[Window](), list[str]()
    n_cut = n_without = 0
    with chat_template(cast(Any, model).source, tokenizer) as template:
        for messages in conversations(path):
            content, answers = _render(template, messages)
            tokens, is_scored = _scored_tokens(tokenizer, content, None if score_all else answers)
            n_cut += len(tokens) > n_ctx
            tokens, is_scored = tokens[:n_ctx], is_scored[:n_ctx].copy()
            is_scored[-1] = False
            if not is_scored.any():
                n_without += 1
                continue
            windows.append(Window(tokens, is_scored))
            contents.append(content)
            if len(windows) == chunks:
                break
    if n_cut:
        notes.append(f"{name}: {n_cut} conversations are cut to {n_ctx} tokens; a larger -c has all of them")
    if n_without:
        notes.append(f"{name}: {n_without} conversations are left out: nothing in them is scored")
    if not windows:
        raise QuantkitError(f"{name}: no conversation has an answer within {n_ctx} tokens: use a larger -c", "QK-E203")
    ids = np.concatenate([window.tokens for window in windows])
    return Text(name, tuple(windows), 0, "".join(contents).encode("utf-8", "surrogateescape"), ids, False)


def _render(template: Child, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and first and end of each answer in it, without the space after it.

    An answer is what follows the beginning of an answer that the template adds to the messages before. Templates may
    change earlier messages later (reasoning is removed): what then differs is not part of the answer.
    """
    content: str = template.call("render", messages)
    answers = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt: str = template.call("render", messages[:i], True)
        answer: str = template.call("render", messages[: i + 1])
        first, end = (len(os.path.commonprefix([part, content])) for part in (prompt, answer.rstrip()))
        answers += [(first, end)] if end > first else []
    return content, answers


def _scored_tokens(tokenizer: Tokenizer, content: str, answers: Sequence[tuple[int, int]] | None) -> tuple[I32, Bools]:
    """Return the tokens of a conversation, and a mask of positions whose next token is scored; answers None: all."""

    def encode(text: str) -> I32:
        return tokenizer.encode(text, add_special=False, parse_special=True)

    tokens = encode(content)
    is_answer = np.full(len(tokens), answers is None)
    for first, end in answers or ():
        before, after = (_common_length(encode(content[:part]), tokens) for part in (first, end))
        is_answer[before:after] = True
    if tokenizer.add_bos and tokenizer.bos is not None and tokens[:1].tolist() != [tokenizer.bos]:
        tokens = np.concatenate([np.array([tokenizer.bos], np.int32), tokens])
        is_answer = np.concatenate([[False], is_answer])
    return tokens, np.concatenate([is_answer[1:], [False]])


def _common_length(a: I32, b: I32) -> int:
    """Return the length of the common beginning of two arrays of tokens."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n
