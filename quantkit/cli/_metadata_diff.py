"""Differences of metadata as text and JSON, for ``compare`` and ``edit``."""

from __future__ import annotations

from typing import Any

from quantkit.cli._options import json_value, one_line
from quantkit.formats.gguf import Field
from quantkit.names import printable, shorten

#: Widest value, and widest name.
_WIDTH, _NAME = 40, 64
#: Longest array that is shown; of longer ones only the number of items.
_MAX_ITEMS = 8


def key_name(name: str) -> str:
    """Return the name of a key or tensor, shortened."""
    return shorten(printable(name), _NAME)


def field_dict(item: Field | None) -> dict[str, Any] | None:
    """Return the type and value of a field for JSON."""
    return None if item is None else {"type": item.describe(), "value": json_value(item.value)}


def describe_change(a: Field | None, b: Field | None) -> str:
    """Return the difference between two values of a key; None where a file lacks it."""
    if a is None or b is None:
        return _value(a or b)
    if a.item_type is not None and a.item_type == b.item_type:
        return _array_change(a, b)
    if a.type == b.type and isinstance(a.value, str):
        return _string_change(a.value, b.value)
    if a.type == b.type:
        # %.9g is unique for every float32; values that still look equal (NaN, -0) differ in bits.
        return " -> ".join(f"{v:.9g}" if isinstance(v, float) else one_line(v) for v in (a.value, b.value))
    return f"{a.describe()} {_value(a)} -> {b.describe()} {_value(b)}"


def _value(item: Field | None) -> str:
    if item is None:
        return ""
    if item.item_type is not None:
        return item.describe() if item.count > _MAX_ITEMS else shorten(", ".join(map(_line, item.value)), 2 * _WIDTH)
    return shorten(_line(item.value), 2 * _WIDTH)


def _line(value: object) -> str:
    return one_line(value[: 2 * _WIDTH] if isinstance(value, str) else value)


def _string_change(a: str, b: str) -> str:
    """Show two strings around their first difference."""
    if max(len(a), len(b)) <= _WIDTH:
        return f'"{printable(a)}" -> "{printable(b)}"'
    position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, position - _WIDTH // 4)
    excerpts = [
        shorten(printable(("…" if start else "") + text[start : start + 2 * _WIDTH]), _WIDTH) for text in (a, b)
    ]
    return f'"{excerpts[0]}" -> "{excerpts[1]}" (from character {position}; {len(a)} and {len(b)} characters)'


def _array_change(a: Field, b: Field) -> str:
    differ = [i for i, (x, y) in enumerate(zip(a.value, b.value, strict=False)) if x != y]
    parts = [f"{a.count} items -> {b.count} items"] if a.count != b.count else []
    if differ:
        first = differ[0]
        values = " -> ".join(shorten(one_line(f.value[first]), _WIDTH) for f in (a, b))
        parts.append(f"{len(differ)} of {min(a.count, b.count)} items differ, the first is [{first}]: {values}")
    return "; ".join(parts) or "items differ in bits only"
