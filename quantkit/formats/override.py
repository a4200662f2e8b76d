"""Metadata that a user sets: ``--override-kv KEY=TYPE:VALUE``, of a file that is written and of a model that runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import Field, ValueType
from quantkit.formats.outputs import read_whole

#: Value types by their names in KEY=TYPE:VALUE; an int is as wide as it needs to be.
VALUE_TYPES = {
    "int": ValueType.UINT32,
    "float": ValueType.FLOAT32,
    "bool": ValueType.BOOL,
    "str": ValueType.STRING,
}
#: GGUF's value types by name, for keys that need a particular type.
VALUE_TYPES |= {t.name.lower().replace("uint", "u").replace("int", "i"): t for t in ValueType if "INT" in t.name}
VALUE_TYPES |= {"f32": ValueType.FLOAT32, "f64": ValueType.FLOAT64, "string": ValueType.STRING}
_OVERRIDE = re.compile(r"([^=]+)=([a-z0-9]+):(.*)", re.DOTALL)
#: The largest text file of a value; chat templates have some kilobytes.
_MAX_BYTES = 16 << 20
#: Separator in a list of overrides, as in llama.cpp.
_NEXT = re.compile(r",(?=[^=,:]+=[a-z0-9]+:)")


def parse_overrides(texts: Iterable[str]) -> dict[str, Field]:
    """Return the fields of several options by key, each KEY=TYPE:VALUE or a list of these; the last of a key counts."""
    fields = [parse_override(text) for texts_of_one in texts for text in _NEXT.split(texts_of_one)]
    return {field.key: field for field in fields}


def parse_override(text: str) -> Field:
    """Return the field of ``--override-kv KEY=TYPE:VALUE``.

    TYPE is int (stored as UINT32, INT32 when negative, 64 bits when larger), float (FLOAT32), bool or str, or a GGUF
    type (u8 .. i64, f32, f64). llama-quantize stores abs(VALUE) of a negative int; quantkit keeps its sign.
    ik_llama.cpp stores every int as INT32, which no loader, not even its own, accepts as a count of layers. A str of
    @FILE is the text of a file; @@TEXT is the text @TEXT.
    """
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        raise RecipeError(f"--override-kv {text!r}: write KEY=TYPE:VALUE, such as general.name=str:MyModel", "QK-E203")
    key = match[1]
    kind = match[2]
    value = match[3]
    value_type = VALUE_TYPES.get(kind)
    if value_type is None:
        raise RecipeError(
            f"--override-kv {key}: unknown type {kind!r}; use int, float, bool, str or u8 .. f64", "QK-E203"
        )
    if key.startswith("split."):
        raise RecipeError(f"--override-kv {key}: set split.* keys with --keep-split or --split-max-size", "QK-E201")
    try:
        return _override(key, kind, value_type, value)
    except ValueError:
        raise RecipeError(f"--override-kv {key}: {value!r} is not of type {kind}", "QK-E203") from None


def _override(key: str, kind: str, value_type: ValueType, value: str) -> Field:
    if value_type is ValueType.STRING:
        path = _file_of(value)
        return Field.of(key, value.removeprefix("@") if path is None else _text_of(key, path), value_type)
    if value_type is ValueType.BOOL:
        if value not in ("true", "false"):
            raise ValueError(value)
        return Field.of(key, value == "true", value_type)
    if value_type in (ValueType.FLOAT32, ValueType.FLOAT64):
        return Field.of(key, float(value), value_type)
    return Field.of(key, int(value, 0), None if kind == "int" else value_type)


def override_file(text: str) -> Path | None:
    """Return the file whose text ``--override-kv KEY=str:@FILE`` stores; None if the option holds the value itself."""
    match = _OVERRIDE.fullmatch(text)
    return _file_of(match[3]) if match and VALUE_TYPES.get(match[2]) is ValueType.STRING else None


def _file_of(value: str) -> Path | None:
    return Path(value[1:]) if value.startswith("@") and not value.startswith("@@") else None


def _text_of(key: str, path: Path) -> str:
    prefix = (
        f"--override-kv {key}: str:@FILE reads the value from a file; for a text that starts with @, write str:@@TEXT"
    )
    try:
        return read_whole(path, _MAX_BYTES).decode()
    except FormatError as e:
        raise RecipeError(f"{prefix}: {e.message}", e.code) from None
    except UnicodeDecodeError as e:
        raise RecipeError(f"{prefix}: {path} is not a text file (byte {e.start} is not UTF-8)", "QK-E121") from None
