"""The input of a calibration: texts, conversations and token ids, cut into chunks of one context.

Each text is cut into chunks by itself and its rest is dropped, so one run over several texts equals the merge of a
run over each. A conversation is a line of JSON, in one of three forms::

    {"messages": [{"role": "user", "content": "..."}, ...]}         or only the list
    {"conversations": [{"from": "human", "value": "..."}, ...]}     ShareGPT's

The model's own chat template, in jinja2's sandbox, makes a text of each, with special tokens; the texts of a file are
concatenated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quantkit.calibration.heldout import HeldOut, held_out_beside, merge_held_out
from quantkit.calibration.overlap import Sketch, merge_sketches, sketch
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError
from quantkit.formats.gguf import GGUFFile
from quantkit.formats.outputs import read_text

I32 = npt.NDArray[np.int32]

_TEMPLATE = "tokenizer.chat_template"
#: ShareGPT's names of roles.
_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}


class Tokenizer(Protocol):
    """What a calibration needs of a tokenizer."""

    bos: int | None
    eos: int | None

    def encode(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> I32: ...

    def piece(self, token: int) -> bytes: ...


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks int32 [n, n_ctx], the names of their sources, a sketch of the texts, if any, and what their corpora
    held out.
    """

    windows: I32
    datasets: tuple[str, ...]
    sketch: Sketch | None
    notes: tuple[str, ...]
    held_out: HeldOut | None = None


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """The tokens of one source, its text if there is one, and what its corpus held out."""

    name: str
    tokens: I32
    text: bytes | None
    held_out: HeldOut | None = None


def text_part(path: Path, tokenizer: Tokenizer, parse_special: bool) -> TokenizedText:
    """Read a text as llama-imatrix does: its bytes as they are, without one newline at the end."""
    raw = read_text(path)
    part = text_of(str(path), raw.removesuffix(b"\n"), tokenizer, parse_special)
    # The recorded hash is that of the file.
    return replace(part, text=raw, held_out=held_out_beside(path, raw))


def text_of(name: str, text: bytes, tokenizer: Tokenizer, parse_special: bool) -> TokenizedText:
    """Return a text unchanged. Raises RecipeError, naming it, if it cannot be tokenized."""
    try:
        return TokenizedText(name, tokenizer.encode(text, parse_special=parse_special), text)
    except RecipeError as e:
        raise RecipeError(f"{name}: {e.message}") from None


def chat_part(path: Path, tokenizer: Tokenizer, source: GGUFFile) -> TokenizedText:
    """Read conversations and make a text of them by the model's template.

    Raises:
        FormatError: a line is no conversation, or the model has no template.
        ResourceError: jinja2 is not installed.
    """
    render = chat_template(source, tokenizer)
    rendered = [render(messages) for messages in conversations(path)]
    if not rendered:
        raise FormatError(f"{path}: there is no conversation in it")
    ids = [tokenizer.encode(text, add_special=False, parse_special=True) for text in rendered]
    return TokenizedText(str(path), np.concatenate(ids), "".join(rendered).encode("utf-8", "surrogateescape"))


def cut(parts: Iterable[TokenizedText], n_ctx: int, from_chunk: int = 0, chunks: int | None = None) -> Chunks:
    """Cut texts into chunks; skip the first ``from_chunk`` of them and take ``chunks``.

    Raises QuantkitError if none is left.
    """
    if n_ctx < 4:
        raise RecipeError(f"-c {n_ctx}: a chunk has at least 4 tokens")
    windows, names, texts, notes = [np.empty((0, n_ctx), np.int32)], [], [], []
    held_out = []
    total = 0
    for part in parts:
        n = len(part.tokens) // n_ctx
        names.append(part.name)
        total += len(part.tokens)
        if n == 0:
            notes.append(f"{part.name}: {len(part.tokens)} tokens are not one chunk of {n_ctx}: nothing of it is used")
            continue
        windows.append(part.tokens[: n * n_ctx].reshape(n, n_ctx))
        if part.text is not None:
            texts.append(sketch(part.text))
        if part.held_out is not None:
            held_out.append(part.held_out)
    every = np.concatenate(windows)
    left = every[from_chunk:][:chunks]
    if not len(left):
        what = f"; --chunk {from_chunk} leaves none of its {len(every)} chunks" if len(every) else ""
        raise QuantkitError(f"{total} tokens are not one chunk of {n_ctx}{what}: use more text, or a smaller -c")
    merged = merge_sketches(texts) if texts else None
    return Chunks(left, tuple(names), merged, tuple(notes), merge_held_out(held_out))


# ---------------------------------------------------------------- conversations

Message = dict[str, Any]


def conversations(path: Path) -> Iterator[list[Message]]:
    """Yield the conversations of a JSON Lines file. Raises FormatError naming the line."""
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            yield _conversation(path, number, line)


def _conversation(path: Path, number: int, line: bytes) -> list[Message]:
    def fail(what: str) -> FormatError:
        return FormatError(
            f'{path}, line {number}: {what}; a line is {{"messages": [{{"role": "user", "content": "..."}}, ...]}}'
        )

    try:
        found = json.loads(line)
    except ValueError as e:
        raise fail(f"no JSON ({e})") from None
    if isinstance(found, dict):
        found = found.get("messages", found.get("conversations"))
    if not isinstance(found, list) or not found:
        raise fail("no list of messages")
    messages = [_message(item) for item in found]
    if None in messages:
        raise fail(f"message {messages.index(None) + 1} has no role or no content")
    return [m for m in messages if m is not None]


def _message(item: Any) -> Message | None:
    if not isinstance(item, dict):
        return None
    if isinstance(item.get("from"), str) and isinstance(item.get("value"), str):
        return {"role": _ROLES.get(item["from"], item["from"]), "content": item["value"]}
    return item if isinstance(item.get("role"), str) and ("content" in item or "tool_calls" in item) else None


class Render(Protocol):
    """Makes a text from messages."""

    def __call__(self, messages: Sequence[Message]) -> str: ...


def chat_template(source: GGUFFile, tokenizer: Tokenizer) -> Render:
    """Return a function that makes a text from a conversation, by the template in the file.

    Raises FormatError if the template is missing or invalid, ResourceError without jinja2.
    """
    where = source.paths[0]
    template = source.get(_TEMPLATE)
    if not isinstance(template, str):
        raise FormatError(f"{where} has no {_TEMPLATE}: apply the template yourself and give the text with -f")
    try:
        import jinja2
        import jinja2.sandbox
    except ImportError:
        raise ResourceError("chat templates need jinja2: pip install 'gguf-quantkit[run]'") from None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime(2025, 1, 1).strftime(form)  # reproducible
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateError as e:
        raise FormatError(f"{where}: {_TEMPLATE} cannot be read: {e}") from None
    tokens = {
        f"{name}_token": tokenizer.piece(token).decode("utf-8", "replace") if token is not None else ""
        for name, token in (("bos", tokenizer.bos), ("eos", tokenizer.eos))
    }

    def render(messages: Sequence[Message]) -> str:
        try:
            return str(compiled.render(messages=list(messages), add_generation_prompt=False, **tokens))
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as e:
            raise FormatError(f"{where}: {_TEMPLATE} refuses a conversation: {e}") from None

    return render
