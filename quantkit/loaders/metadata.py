"""Metadata as the loaders read it: a key has one kind, or the file is refused.

Source: llama_model_loader::get_key, get_arr, get_arr_n and get_key_or_arr in src/llama-model-loader.cpp of llama.cpp
b11434; ik_llama.cpp 8337e4cd3 has the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from quantkit.formats.gguf import Field, ValueType
from quantkit.loaders.hyperparameters import MAX_LAYERS

_SCALARS = {
    "u32": ValueType.UINT32,
    "i32": ValueType.INT32,
    "f32": ValueType.FLOAT32,
    "bool": ValueType.BOOL,
    "str": ValueType.STRING,
    "u64": ValueType.UINT64,
}
#: Types of items that each kind of array accepts.
_ITEMS = {
    "u32": {ValueType.UINT32, ValueType.INT32},
    "i32": {ValueType.UINT32, ValueType.INT32},
    "u64": {ValueType.UINT64},
    "f32": {ValueType.FLOAT32},
    "str": {ValueType.STRING},
    "bool": {ValueType.UINT32, ValueType.INT32, ValueType.BOOL},
}
_FIXED = re.compile(r"(\w+)\[(.+)\]$")


class WrongKind(Exception):
    """A key of a kind, or a length, that the loader refuses."""


def read_key(fields: Mapping[str, Field], key: str, kind: str, length: int | None) -> Any:
    """Return a key's value as a loader reads it, None if the loader treats it as missing.

    ``kind`` is as in a table: "u32", "u32 array", "u32 vector", "u32[n]" (a scalar or n items), "u32 scalar", "length".
    ``length`` is n. Raises WrongKind where the loader refuses.
    """
    field = fields.get(key)
    if field is None:
        return None
    base, _, form = kind.partition(" ")
    if kind == "length":
        if field.type is not ValueType.ARRAY:
            raise WrongKind(f"{field.describe()}, not an array")
        return field.count
    if form == "scalar":
        return None if field.type is ValueType.ARRAY else _scalar(field, base)
    if form in ("array", "vector"):
        return _array(field, base, fixed=form == "array") if field.type is ValueType.ARRAY else None
    if fixed := _FIXED.match(kind):
        if (length or 0) > MAX_LAYERS:
            raise WrongKind(f"a value for each of {length} layers, more than {MAX_LAYERS}")
        if field.type is not ValueType.ARRAY:
            return [_scalar(field, fixed[1])] * (length or 0) + [0] * (MAX_LAYERS - (length or 0))
        if field.count != length:
            raise WrongKind(f"an array of {field.count} items, not of {length}")
        return _array(field, fixed[1], fixed=True)
    return _scalar(field, kind)


def _scalar(field: Field, kind: str) -> Any:
    if field.type is not _SCALARS[kind]:
        raise WrongKind(f"{field.describe()}, not {_SCALARS[kind].name}")
    return field.value


def _array(field: Field, kind: str, *, fixed: bool) -> list[Any]:
    """Return an array's items; one of fixed size takes booleans for integers and is padded."""
    boolean = fixed and field.item_type is ValueType.BOOL and kind in ("u32", "i32", "bool")
    if field.item_type not in _ITEMS[kind] and not boolean:
        raise WrongKind(f"{field.describe()}, not an array of {_SCALARS[kind].name}")
    if field.item_type is ValueType.STRING:
        return list(field.value)
    if fixed and field.count > MAX_LAYERS:
        raise WrongKind(f"an array of {field.count} items, more than {MAX_LAYERS}")
    sign = {"i32": np.int32, "u32": np.uint32}.get(kind, field.array.dtype)
    items: list[Any] = field.array.astype(sign).tolist()
    return items + [0] * (MAX_LAYERS - len(items)) if fixed else items
