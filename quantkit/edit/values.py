"""Values of metadata as they are typed or given in Python, as fields with the type of the present value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import Field, ValueType
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_whole
from quantkit.formats.override import VALUE_TYPES
from quantkit.names import printable, shorten
from quantkit.options.edit import ValueText

_INTEGERS = frozenset(t for t in ValueType if "INT" in t.name)
_FLOATS = frozenset({ValueType.FLOAT32, ValueType.FLOAT64})
#: The largest file of a value: a vocabulary as JSON.
_MAX_BYTES = 256 << 20


def field_of(key: str, value: Any, present: Field | None) -> Field:
    """Return a field with a value, of the type of the present one, else of its own.

    Raises RecipeError: the value has no type, or does not fit it; FormatError: a file cannot be read.
    """
    if isinstance(value, Field):
        return Field(key, value.type, value.item_type, value.raw)
    value_type, is_array = (None, False) if present is None else (present.item_type or present.type, _is_array(present))
    if isinstance(value, ValueText):
        value, value_type = _parse(key, value.text, value_type, is_array=is_array)
    if not isinstance(value, (list, tuple)):
        return Field.of(key, value, _fit(value, value_type))
    return Field.of(key, list(value), ValueType.ARRAY, _fit(value[0] if value else None, value_type))


def _is_array(present: Field) -> bool:
    return present.type is ValueType.ARRAY


def _fit(value: Any, value_type: ValueType | None) -> ValueType | None:
    """Return the type for a value: None, to be inferred, where the present type is of another kind."""
    kinds = (
        (bool, frozenset({ValueType.BOOL})),
        (int, _INTEGERS | _FLOATS),
        (float, _FLOATS),
        (str, frozenset({ValueType.STRING})),
    )
    types = next((types for kind, types in kinds if isinstance(value, kind)), frozenset[ValueType](ValueType))
    return value_type if value_type in types else None


def _parse(key: str, text: str, present: ValueType | None, *, is_array: bool) -> tuple[Any, ValueType | None]:
    """Return a typed value, and its type if the text or the present value states it."""
    kind, colon, remainder = text.partition(":")
    explicit = VALUE_TYPES.get(kind) if colon else None
    if explicit is not None:
        if kind in ("int", "float"):  # as wide as the present value, if it is of this kind
            explicit = present if present in (_INTEGERS if kind == "int" else _FLOATS) else explicit
        parse = _items if explicit is not ValueType.STRING and remainder.startswith("[") else _scalar
        return parse(key, remainder, explicit), None if kind == "int" and explicit is not present else explicit
    if text.startswith("["):
        return _items(key, text, present), present
    if text.startswith("@") and not text.startswith("@@"):
        content = _read(key, Path(text[1:]))
        return (_items(key, content, present), present) if is_array else (content, ValueType.STRING)
    if present is None:
        example = shorten(printable(text), 40)
        raise RecipeError(
            f"the file has no {key}: write the type of the new value, {key}=str:{example}, or int, float, bool, u8 to "
            "f64",
            "QK-E203",
        )
    if is_array:
        raise RecipeError(f"{key} is an array: write {key}=[ITEM, ITEM], or {key}=@FILE.json", "QK-E203")
    return _scalar(key, text, present), present


def _scalar(key: str, text: str, value_type: ValueType) -> Any:
    if value_type is ValueType.STRING:
        if text.startswith("@") and not text.startswith("@@"):
            return _read(key, Path(text[1:]))
        return text.removeprefix("@") if text.startswith("@@") else text
    try:
        if value_type is ValueType.BOOL:
            return {"true": True, "false": False}[text.lower()]
        return float(text) if value_type in _FLOATS else int(text, 0)
    except (ValueError, KeyError):
        raise RecipeError(f"{key}: {short(text)} does not fit {value_type.name}", "QK-E203") from None


def _items(key: str, text: str, item_type: ValueType | None) -> list[Any]:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise RecipeError(f"{key}: {short(text)} is not a JSON array: {e}", "QK-E203") from None
    if not isinstance(items, list):
        raise RecipeError(f"{key}: {short(text)} is not a JSON array", "QK-E203")
    if item_type in _FLOATS:
        return [float(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in items]
    return items


def _read(key: str, path: Path) -> str:
    try:
        return read_whole(path, _MAX_BYTES).decode()
    except FormatError as e:
        raise RecipeError(f"{key}=@FILE: {e.message}; for a text that begins with @, write @@", e.code) from None
    except UnicodeDecodeError as e:
        raise RecipeError(f"{key}=@FILE: {path} is not a text file (byte {e.start} is not UTF-8)", "QK-E121") from None
