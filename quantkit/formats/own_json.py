"""quantkit's own JSON files: one kind of error for damaged or edited ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from quantkit.errors import FormatError, QuantkitError
from quantkit.formats.outputs import read_whole
from quantkit.names import printable, shorten
from quantkit.records import DAMAGE

T = TypeVar("T")

#: Maximum size of a file that is read: sensitivities of a thousand groups and forty types have 10 MiB.
_MAX_BYTES = 256 << 20


def read_own_json(path: Path, kind: str, make: Callable[[Any], T], max_bytes: int = _MAX_BYTES) -> T:
    """Return ``make`` of the value in a file; errors such as TypeError mean that the file is damaged.

    Raises FormatError: "PATH: not WHAT (reason)".
    """
    data = read_whole(path, max_bytes)
    try:
        return make(json.loads(data))
    except (*DAMAGE, QuantkitError) as e:
        raise FormatError(f"{path}: not {kind} ({shorten(printable(_damage(e)), 200)})", "QK-E122") from None


def _damage(error: Exception) -> str:
    """Return a description of the damage in terms of the file, not of a Python operation."""
    if isinstance(error, QuantkitError):
        return error.message
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON in line {error.lineno}: {error.msg}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    if isinstance(error, RecursionError):
        return "lists or objects are nested too deeply"
    if isinstance(error, KeyError):
        return f"missing key {error.args[0]!r}"
    if isinstance(error, AttributeError | LookupError):
        return "a value has the wrong type"
    return str(error)
