"""Dataclasses from JSON values, checked field by field, because quantkit's own files may be damaged or edited."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from quantkit.types import TensorType, type_by_name

#: Errors of reading a damaged record, besides those of the file system.
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)


def record(kind: Any, value: Any, where: str = "") -> Any:
    """Return the JSON value ``value`` as the type ``kind``: a dataclass, a tuple, a mapping, or a plain type.

    Integers have at most 63 bits, other numbers are finite. Raises TypeError or ValueError, naming the place.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _union(arguments, value, where)
    if origin is list:
        return list(_tuple((arguments[0], ...), value, where))
    if origin is tuple:
        return _tuple(arguments, value, where)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise TypeError(f"{where} is not a table")
        return {name: record(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if kind is TensorType:
        return type_by_name(record(str, value, where))
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**_fields(kind, value, where))
    if isinstance(kind, type) and issubclass(kind, tuple):
        hints = _hints(kind)
        return kind(*_tuple(tuple(hints.values()), value, where))
    return _plain(kind, value, where)


def _union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """Return the value as the first of several kinds that it matches."""
    if value is None and type(None) in kinds:
        return None
    *first, last = [kind for kind in kinds if kind is not type(None)]
    for kind in first:
        with suppress(TypeError, ValueError):
            return record(kind, value, where)
    return record(last, value, where)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{where} is not a list")
    if len(arguments) == 2 and arguments[1] is ...:
        return tuple(record(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(arguments) != len(value):
        raise TypeError(f"{where} has {len(value)} values")
    return tuple(record(a, item, where) for a, item in zip(arguments, value, strict=True))


def _fields(kind: Any, value: Any, where: str) -> dict[str, Any]:
    hints = _hints(kind)
    if not isinstance(value, dict) or value.keys() - hints.keys():
        raise TypeError(f"{where or 'it'} has an unexpected form")
    for f in fields(kind):
        if f.name not in value and f.default is MISSING and f.default_factory is MISSING:
            raise TypeError(f"{where or 'it'} has no {f.name}")
    return {f.name: record(hints[f.name], value[f.name], f"{where}.{f.name}") for f in fields(kind) if f.name in value}


def _plain(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}")
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{where} is not of type {kind.__name__}")
    if kind is int and value.bit_length() > 63:
        raise ValueError(f"{where} is too large")
    return value
