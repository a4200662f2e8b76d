"""A metadata field: the bytes of its value as in the file, decoded on first use, or built from Python values."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import RecipeError
from quantkit.formats.gguf.rules import ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAX_ALIGNMENT, check_key, short

_u64 = struct.Struct("<Q").unpack_from


class ValueType(IntEnum):
    """The types of metadata values, by their ids in the file."""

    UINT8, INT8, UINT16, INT16, UINT32, INT32 = range(6)
    FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(6, 13)


#: struct's letter for each type of fixed size; numpy's dtype is "<" + the letter.
_LETTERS = {t: letter for t, letter in zip(ValueType, "BbHhIif?--Qqd", strict=True) if letter != "-"}
SIZES: dict[ValueType, int] = {t: struct.calcsize("<" + letter) for t, letter in _LETTERS.items()}
_BY_DTYPE: dict[np.dtype[Any], ValueType] = {np.dtype(letter): t for t, letter in _LETTERS.items()}
#: Types for an int, the first that holds it.
_INT_RANGES: tuple[tuple[ValueType, int, int], ...] = (
    (ValueType.UINT32, 0, 2**32),
    (ValueType.INT32, -(2**31), 2**31),
    (ValueType.UINT64, 0, 2**64),
    (ValueType.INT64, -(2**63), 2**63),
)


@dataclass(frozen=True)
class Field:
    """A metadata field; ``raw`` has the value's bytes exactly as in the file, so copying copies bytes.

    For an array ``raw`` begins with the item type and the count, and ``item_type`` is set. ``value`` and
    ``array`` decode on first use.
    """

    key: str
    type: ValueType
    item_type: ValueType | None
    raw: bytes | memoryview = field(repr=False)

    @classmethod
    def of(
        cls,
        key: str,
        value: Any,
        type: ValueType | None = None,  # noqa: A002
        item_type: ValueType | None = None,
    ) -> Field:
        """Return a field with a Python value.

        Args:
            key: the key, 1 to 65535 bytes of UTF-8.
            value: bool, int, float, str, or a list, tuple or 1-D numpy array of one of them.
            type: the value type; without it bool is BOOL, str STRING, float FLOAT32, an int the first of
                UINT32, INT32, UINT64, INT64 that holds it, a sequence ARRAY, a numpy scalar its own type.
            item_type: the type of an array's items, inferred in the same way; an empty list needs it.

        Raises:
            RecipeError: the key or value cannot be stored; the message names the key.
        """
        check_key(key)
        if isinstance(value, np.ndarray) and value.ndim != 1:
            raise RecipeError(f"key {short(key)}: an array must have one dimension, not {value.ndim}", "QK-E203")
        is_array = isinstance(value, (list, tuple, np.ndarray))
        if is_array != (type is ValueType.ARRAY) and type is not None:
            raise RecipeError(f"key {short(key)}: {short(value)} does not fit {type.name}", "QK-E203")
        if not is_array:
            if item_type is not None:
                raise RecipeError(
                    f"key {short(key)}: an item type was given, but {short(value)} is not an array", "QK-E203"
                )
            numpy_type = _BY_DTYPE.get(value.dtype) if isinstance(value, np.generic) else None
            explicit_type = type if type is not None else numpy_type
            chosen_type = explicit_type if explicit_type is not None else _infer(key, [value])
            return cls(key, chosen_type, None, _pack(key, chosen_type, [value]))
        if item_type is None:
            item_type = _BY_DTYPE.get(value.dtype) if isinstance(value, np.ndarray) else None
        items = list(value) if not isinstance(value, np.ndarray) else value.tolist()
        item_type = item_type if item_type is not None else _infer(key, items)
        head = struct.pack("<IQ", item_type, len(items))
        array = cls(key, ValueType.ARRAY, item_type, head + _pack(key, item_type, items))
        if item_type is ValueType.STRING and _is_unicode(items):
            array.__dict__["value"] = items  # decoding a vocabulary takes longer than all checks of it
        return array

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """Pickle a copy of the bytes, which may belong to a mapped file."""
        return Field, (self.key, self.type, self.item_type, bytes(self.raw))

    @property
    def count(self) -> int:
        """The number of an array's items, 1 for a scalar."""
        return int(_u64(self.raw, 4)[0]) if self.type is ValueType.ARRAY else 1

    @property
    def array(self) -> npt.NDArray[Any]:
        """The items of an array of numbers or booleans as a read-only numpy array, not copied."""
        if self.item_type is None or self.item_type is ValueType.STRING:
            raise TypeError(f"{self.key} is {self.describe()}, not an array of numbers")
        items: npt.NDArray[Any] = np.frombuffer(self.raw, "<" + _LETTERS[self.item_type], self.count, 12)
        return items

    @cached_property
    def value(self) -> Any:
        """The value as bool, int, float, str, or a list of one of them."""
        if self.item_type is ValueType.STRING:
            return _decode_strings(self.raw, self.count)
        if self.item_type is not None:
            return self.array.tolist()
        if self.type is ValueType.STRING:
            return str(self.raw[8:], "utf-8", "surrogateescape")
        return struct.unpack("<" + _LETTERS[self.type], self.raw)[0]

    def describe(self) -> str:
        """Return the type as text: "UINT32", "ARRAY of 250 STRING"."""
        return self.type.name if self.item_type is None else f"ARRAY of {self.count} {self.item_type.name}"

    def encode(self) -> bytes:
        """Return the whole entry as in a file: key, type, value."""
        key = check_key(self.key)
        return b"".join((struct.pack("<Q", len(key)), key, struct.pack("<I", self.type), self.raw))


def _infer(key: str, items: list[Any]) -> ValueType:
    """Return the value type that holds all of ``items``."""
    if not items:
        raise RecipeError(f"key {short(key)}: an empty list has no item type; give item_type", "QK-E203")
    if all(isinstance(v, (bool, np.bool_)) for v in items):
        return ValueType.BOOL
    if all(isinstance(v, str) for v in items):
        return ValueType.STRING
    if all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in items):
        low, high = min(items), max(items)
        for value_type, start, stop in _INT_RANGES:
            if start <= low and high < stop:
                return value_type
        raise RecipeError(f"key {short(key)}: {short(high if high > 0 else low)} does not fit in 64 bits", "QK-E203")
    if all(isinstance(v, (int, float, np.integer, np.floating)) and not isinstance(v, bool) for v in items):
        return ValueType.FLOAT32
    names = sorted({type(v).__name__ for v in items})
    raise RecipeError(f"key {short(key)}: no GGUF type holds {short(items)} ({', '.join(names)})", "QK-E203")


def _pack(key: str, value_type: ValueType, items: list[Any]) -> bytes:
    """Return the bytes of ``items``, all of one scalar type."""
    if value_type is ValueType.STRING:
        return _pack_strings(key, items)
    if value_type not in _LETTERS:
        raise RecipeError(f"key {short(key)}: arrays of arrays are not supported; no runtime reads them", "QK-E203")
    bools = [isinstance(v, (bool, np.bool_)) for v in items]
    if not all(bools) if value_type is ValueType.BOOL else any(bools):
        raise RecipeError(f"key {short(key)}: {short(items)} does not fit {value_type.name}", "QK-E203")
    try:
        return struct.pack(f"<{len(items)}{_LETTERS[value_type]}", *items)
    except (struct.error, OverflowError, TypeError) as e:
        raise RecipeError(f"key {short(key)}: {short(items)} does not fit {value_type.name} ({e})", "QK-E203") from None


def _is_unicode(items: list[str]) -> bool:
    """Return whether strings have no surrogates, which represent bytes that are not UTF-8."""
    try:
        "".join(items).encode()
    except UnicodeEncodeError:
        return False
    return True


def _pack_strings(key: str, items: list[Any]) -> bytes:
    try:
        strings = list(map(str.encode, items))
    except (TypeError, UnicodeEncodeError):
        return b"".join(_pack_string(key, item) for item in items)
    parts = [b""] * (2 * len(strings))
    parts[::2] = map(struct.Struct("<Q").pack, map(len, strings))
    parts[1::2] = strings
    return b"".join(parts)


def _pack_string(key: str, text: object) -> bytes:
    if not isinstance(text, str):
        raise RecipeError(f"key {short(key)}: {short(text)} does not fit STRING", "QK-E203")
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise RecipeError(f"key {short(key)}: {short(text)} is not valid Unicode", "QK-E203") from None
    return struct.pack("<Q", len(data)) + data


def _decode_strings(raw: bytes | memoryview, count: int) -> list[str]:
    data = bytes(raw)
    pos = 12
    strings = []
    for _ in range(count):
        start = pos + 8
        pos = start + _u64(data, pos)[0]
        strings.append(data[start:pos].decode("utf-8", "surrogateescape"))
    return strings


def checked_alignment(alignment: Field | None) -> int:
    """Return the alignment; raise ValueError unless the field is a UINT32 power of two within bounds."""
    if alignment is None:
        return DEFAULT_ALIGNMENT
    if alignment.type is not ValueType.UINT32:
        raise ValueError(f"{ALIGNMENT_KEY} is {alignment.describe()}; it must be UINT32")
    n = int(alignment.value)
    if n == 0 or n & (n - 1) or n > MAX_ALIGNMENT:
        raise ValueError(f"{ALIGNMENT_KEY} is {n}; it must be a power of two up to {MAX_ALIGNMENT}")
    return n
