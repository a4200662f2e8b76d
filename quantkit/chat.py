"""Conversations, and the model's chat template, which renders them.

A conversation is a line of JSON, in one of three forms::

    {"messages": [{"role": "user", "content": "..."}, ...]}         or only the list
    {"conversations": [{"from": "human", "value": "..."}, ...]}     ShareGPT's

The template runs in a separate process (``foreign``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from quantkit.errors import FormatError
from quantkit.extras import CHAT, missing_packages
from quantkit.foreign.child import Child, Limits
from quantkit.formats.gguf import GGUFFile
from quantkit.formats.outputs import read_text

Message = dict[str, Any]

_TEMPLATE = "tokenizer.chat_template"
#: Limits of a model's template.
LIMITS = Limits()
#: Roles of ShareGPT.
_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}


class Pieces(Protocol):
    """The part of a tokenizer that a template uses."""

    bos: int | None
    eos: int | None

    def piece(self, token: int) -> bytes: ...


def conversations(path: Path) -> Iterator[list[Message]]:
    """Yield the conversations of a JSON Lines file. Raises FormatError naming the line."""
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            yield _conversation(path, number, line)


def _conversation(path: Path, number: int, line: bytes) -> list[Message]:
    def fail(problem: str) -> FormatError:
        return FormatError(
            f'{path}, line {number}: {problem}; a line is {{"messages": [{{"role": "user", "content": "..."}}, ...]}}',
            "QK-E111",
        )

    try:
        content = json.loads(line)
    except ValueError as e:
        raise fail(f"invalid JSON ({e})") from None
    if isinstance(content, dict):
        content = content.get("messages", content.get("conversations"))
    if not isinstance(content, list) or not content:
        raise fail("no list of messages")
    messages = [_message(item) for item in content]
    if None in messages:
        raise fail(f"message {messages.index(None) + 1} has no role or no content")
    return [m for m in messages if m is not None]


def _message(item: Any) -> Message | None:
    if not isinstance(item, dict):
        return None
    if isinstance(item.get("from"), str) and isinstance(item.get("value"), str):
        return {"role": _ROLES.get(item["from"], item["from"]), "content": item["value"]}
    return item if isinstance(item.get("role"), str) and ("content" in item or "tool_calls" in item) else None


def has_chat_template(source: GGUFFile) -> bool:
    """Return whether a file has a chat template."""
    return isinstance(source.get(_TEMPLATE), str)


def chat_template(source: GGUFFile, tokenizer: Pieces) -> Child:
    """Return a child process that renders conversations by the file's template: a ``foreign.template.Template``.

    Raises FormatError if the template is missing, ResourceError without jinja2.
    """
    where = source.paths[0]
    template = source.get(_TEMPLATE)
    if not isinstance(template, str):
        raise FormatError(f"{where} has no {_TEMPLATE}: apply a template yourself and give the text with -f", "QK-E123")
    if CHAT.missing():
        raise missing_packages(CHAT)
    tokens = {
        f"{name}_token": tokenizer.piece(token).decode("utf-8", "replace") if token is not None else ""
        for name, token in (("bos", tokenizer.bos), ("eos", tokenizer.eos))
    }
    return Child("quantkit.foreign.template:Template", f"{where}: {_TEMPLATE}", template, tokens, limits=LIMITS)
