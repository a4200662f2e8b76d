"""GGUF, the file format of llama.cpp and ik_llama.cpp: a reader for any file, a writer as pure layout.

A GGUF file of version 2 or 3 (all integers little-endian; the two versions differ in nothing here)::

    "GGUF"  u32 version  u64 n_tensors  u64 n_kv
    n_kv fields:      string key  u32 value type  value
    n_tensors infos:  string name  u32 n_dims  u64 ne[n_dims]  u32 tensor type  u64 offset
    zeros up to a multiple of the alignment (general.alignment, a power of two; 32 without the key)
    tensor data; an info's offset counts from here and is a multiple of the alignment

    string = u64 length, bytes        array value = u32 item type, u64 count, items

A model may be split into shards named PREFIX-00001-of-00003.gguf, each a GGUF file with the keys split.no,
split.count and split.tensors.count; the other metadata is in the first one. ``open_gguf`` opens any shard as
the whole model.

The reader trusts nothing: every length and count is compared with the bytes that are left before anything is
looped over or allocated, and what is wrong ends in one FormatError with the file, the item and the byte offset.
It refuses what llama.cpp b11434's gguf.cpp refuses, and besides: overlapping tensors, tensors past the end of
the file, dimensions of zero, booleans other than 0 and 1, keys and names that are empty, not UTF-8 or hold a
NUL. It accepts what gguf.cpp refuses but does not misread: names of 64 bytes and more (up to ``MAX_NAME``;
diffusion models have them), gaps between tensors, tensors in any order. Arrays of arrays, which the
specification allows and no runtime reads, are refused. String values may hold any bytes (tokenizers do):
they are decoded with "surrogateescape", which ``Field.of`` turns back into the same bytes.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, RecipeError, TypeNotSupported
from quantkit.types import TensorType, type_by_id

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"

#: Longest key and tensor name in bytes: the specification's bound for keys.
MAX_NAME = 65535
#: Largest alignment: padding must stay small beside a model.
MAX_ALIGNMENT = 1 << 24
#: Most strings in one array (vocabularies have up to a few 100k): bounds the time to walk over them.
MAX_STRINGS = 1 << 26
MAX_DIMS = 4

#: The least bytes a field and a tensor info can take: bounds for the two counts in the header.
_MIN_FIELD, _MIN_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8

#: Shard mappings kept open at once; each holds a file descriptor, and there may be thousands of shards.
_OPEN_MAPS = 64

#: What a file that is not GGUF may be instead.
_OTHER_MAGICS = {
    b"vers": "a Git LFS pointer: fetch the file itself (git lfs pull)",
    b"<!DO": "an HTML page: the download went wrong",
    b"<htm": "an HTML page: the download went wrong",
    b"tjgg": "a GGJT file of 2023: convert the model again",
    b"PK\x03\x04": "a zip archive",
}

_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


class ValueType(IntEnum):
    """The types of metadata values, by their ids in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


#: struct's letter for each type of fixed size; numpy's dtype is "<" + the letter.
_LETTERS: dict[ValueType, str] = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
_SIZES: dict[ValueType, int] = {t: struct.calcsize("<" + letter) for t, letter in _LETTERS.items()}
_BY_DTYPE: dict[np.dtype[Any], ValueType] = {np.dtype(letter): t for t, letter in _LETTERS.items()}
#: Types that an int gets by its range, the first that holds it.
_INT_RANGES: tuple[tuple[ValueType, int, int], ...] = (
    (ValueType.UINT32, 0, 2**32),
    (ValueType.INT32, -(2**31), 2**31),
    (ValueType.UINT64, 0, 2**64),
    (ValueType.INT64, -(2**63), 2**63),
)


# ---------------------------------------------------------------------------------------------- fields


@dataclass(frozen=True)
class Field:
    """One metadata entry; ``raw`` holds the value's bytes exactly as in the file, so copying copies bytes.

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
        """Make a field of a Python value.

        Args:
            key: the key, 1 to 65535 bytes of UTF-8.
            value: bool, int, float, str, or a list, tuple or 1-D numpy array of one of them.
            type: the value type; without it bool is BOOL, str STRING, float FLOAT32, an int the first of
                UINT32, INT32, UINT64, INT64 that holds it, a sequence ARRAY, a numpy scalar its own type.
            item_type: the type of an array's items, inferred in the same way; an empty list needs it.

        Raises:
            RecipeError: the key or the value cannot be written so; the message names the key.
        """
        check_key(key)
        if isinstance(value, np.ndarray) and value.ndim != 1:
            raise RecipeError(f"key {_short(key)}: an array must have one dimension, not {value.ndim}")
        is_array = isinstance(value, (list, tuple, np.ndarray))
        if is_array != (type is ValueType.ARRAY) and type is not None:
            raise RecipeError(f"key {_short(key)}: {_short(value)} does not fit {type.name}")
        if not is_array:
            if item_type is not None:
                raise RecipeError(f"key {_short(key)}: an item type was given, but {_short(value)} is no array")
            type = type if type is not None else _infer(key, [value])  # noqa: A001
            return cls(key, type, None, _pack(key, type, [value]))
        if item_type is None:
            item_type = _BY_DTYPE.get(value.dtype) if isinstance(value, np.ndarray) else None
        items = list(value) if not isinstance(value, np.ndarray) else value.tolist()
        item_type = item_type if item_type is not None else _infer(key, items)
        head = struct.pack("<IQ", item_type, len(items))
        return cls(key, ValueType.ARRAY, item_type, head + _pack(key, item_type, items))

    def __len__(self) -> int:
        """Return the number of an array's items, 1 for a scalar."""
        return int(_u64(self.raw, 4)[0]) if self.type is ValueType.ARRAY else 1

    @property
    def array(self) -> npt.NDArray[Any]:
        """The items of an array of numbers or booleans as a read-only numpy array, not copied."""
        if self.item_type is None or self.item_type is ValueType.STRING:
            raise TypeError(f"{self.key} is {self.describe()}, not an array of numbers")
        items: npt.NDArray[Any] = np.frombuffer(self.raw, "<" + _LETTERS[self.item_type], len(self), 12)
        return items

    @cached_property
    def value(self) -> Any:
        """The value as bool, int, float, str, or a list of one of them."""
        if self.item_type is ValueType.STRING:
            return _decode_strings(self.raw, len(self))
        if self.item_type is not None:
            return self.array.tolist()
        if self.type is ValueType.STRING:
            return str(self.raw[8:], "utf-8", "surrogateescape")
        return struct.unpack("<" + _LETTERS[self.type], self.raw)[0]

    def describe(self) -> str:
        """Return the type in words: "UINT32", "ARRAY of 250 STRING"."""
        return self.type.name if self.item_type is None else f"ARRAY of {len(self)} {self.item_type.name}"

    def encode(self) -> bytes:
        """Return the whole entry as it stands in a file: key, type, value."""
        key = check_key(self.key)
        return b"".join((struct.pack("<Q", len(key)), key, struct.pack("<I", self.type), self.raw))


def check_key(key: str, what: str = "key", error: type[FormatError | RecipeError] = RecipeError) -> bytes:
    """Return a key or tensor name as the file's bytes; raise ``error`` if it cannot be one."""
    try:
        data = key.encode()
    except UnicodeEncodeError:
        raise error(f"{what} {_short(key)} is not valid Unicode") from None
    if not data or len(data) > MAX_NAME or 0 in data:
        raise error(f"{what} {_short(key)} must have 1 to {MAX_NAME} bytes and no NUL")
    return data


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else repr(value[:80])
    return text if len(text) <= 90 else text[:87] + "..."


def _infer(key: str, items: list[Any]) -> ValueType:
    """Return the value type that holds all of ``items``."""
    if not items:
        raise RecipeError(f"key {_short(key)}: an empty list tells no item type; give item_type")
    if isinstance(items[0], np.generic) and len(items) == 1 and items[0].dtype in _BY_DTYPE:
        return _BY_DTYPE[items[0].dtype]
    if all(isinstance(v, (bool, np.bool_)) for v in items):
        return ValueType.BOOL
    if all(isinstance(v, str) for v in items):
        return ValueType.STRING
    if all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in items):
        low, high = min(items), max(items)
        for value_type, start, stop in _INT_RANGES:
            if start <= low and high < stop:
                return value_type
        raise RecipeError(f"key {_short(key)}: {_short(high if high > 0 else low)} does not fit in 64 bits")
    if all(isinstance(v, (int, float, np.integer, np.floating)) and not isinstance(v, bool) for v in items):
        return ValueType.FLOAT32
    names = sorted({type(v).__name__ for v in items})
    raise RecipeError(f"key {_short(key)}: no GGUF type holds {_short(items)} ({', '.join(names)})")


def _pack(key: str, value_type: ValueType, items: list[Any]) -> bytes:
    """Return the bytes of ``items``, all of one scalar type."""
    if value_type is ValueType.STRING:
        return b"".join(_pack_string(key, v) for v in items)
    if value_type not in _LETTERS:
        raise RecipeError(f"key {_short(key)}: arrays of arrays are not written; no runtime reads them")
    bools = [isinstance(v, (bool, np.bool_)) for v in items]
    if not all(bools) if value_type is ValueType.BOOL else any(bools):
        raise RecipeError(f"key {_short(key)}: {_short(items)} does not fit {value_type.name}")
    try:
        return struct.pack(f"<{len(items)}{_LETTERS[value_type]}", *items)
    except (struct.error, OverflowError, TypeError) as e:
        raise RecipeError(f"key {_short(key)}: {_short(items)} does not fit {value_type.name} ({e})") from None


def _pack_string(key: str, text: object) -> bytes:
    if not isinstance(text, str):
        raise RecipeError(f"key {_short(key)}: {_short(text)} does not fit STRING")
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise RecipeError(f"key {_short(key)}: {_short(text)} is not valid Unicode") from None
    return struct.pack("<Q", len(data)) + data


def _decode_strings(raw: bytes | memoryview, count: int) -> list[str]:
    data, pos, strings = bytes(raw), 12, []
    for _ in range(count):
        start = pos + 8
        pos = start + _u64(data, pos)[0]
        strings.append(data[start:pos].decode("utf-8", "surrogateescape"))
    return strings


# -------------------------------------------------------------------------------------- reading one file


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is. ``shape`` is in ggml's order, innermost first; ``offset`` counts from the
    beginning of the file ``paths[shard]``."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    nbytes: int
    offset: int
    shard: int


class _Cursor:
    """Reads from one file's bytes, never past their end; ``fail`` words every refusal."""

    def __init__(self, path: Path, buf: memoryview) -> None:
        self.path, self.buf, self.pos = path, buf, 0

    @property
    def left(self) -> int:
        return len(self.buf) - self.pos

    def fail(self, what: str, at: int | None = None) -> FormatError:
        return FormatError(f"{self.path}: {what}, at byte {self.pos if at is None else at}")

    def skip(self, n: int, what: str) -> None:
        if n > self.left:
            raise self.fail(f"{what} takes {n} bytes, but the file ends after {self.left} more (truncated?)")
        self.pos += n

    def u32(self, what: str) -> int:
        self.skip(4, what)
        return int(_u32(self.buf, self.pos - 4)[0])

    def u64(self, what: str) -> int:
        self.skip(8, what)
        return int(_u64(self.buf, self.pos - 8)[0])

    def name(self, what: str) -> str:
        """Read a key or a tensor name."""
        at = self.pos
        n = self.u64(f"the length of {what}")
        if not 0 < n <= MAX_NAME:
            raise self.fail(f"{what} is {n} bytes long; 1 to {MAX_NAME} are allowed", at)
        self.skip(n, what)
        data = bytes(self.buf[self.pos - n : self.pos])
        if 0 in data:
            raise self.fail(f"{what} {_short(data)} holds a NUL byte", at + 8)
        try:
            return data.decode()
        except UnicodeDecodeError as e:
            raise self.fail(f"{what} {_short(data)} is not UTF-8", at + 8 + e.start) from None


def _read_header(cur: _Cursor) -> tuple[int, int, int]:
    """Read magic, version and counts; return version, n_tensors, n_kv."""
    magic = bytes(cur.buf[:4])
    if magic != MAGIC:
        other = _OTHER_MAGICS.get(magic)
        raise cur.fail(f"not a GGUF file: it begins with {magic!r}" + (f"; it looks like {other}" if other else ""), 0)
    cur.pos = 4
    version = cur.u32("the version")
    if version and version & 0xFFFF == 0:
        raise cur.fail("a big-endian GGUF file; only little-endian ones are read (convert the model again)", 4)
    if version not in (2, 3):
        raise cur.fail(f"GGUF version {version}; only versions 2 and 3 are read", 4)
    n_tensors = cur.u64("the number of tensors")
    n_kv = cur.u64("the number of keys")
    if n_kv > cur.left // _MIN_FIELD:
        raise cur.fail(f"{n_kv} keys cannot fit in the {cur.left} bytes that follow", 16)
    if n_tensors > (cur.left - n_kv * _MIN_FIELD) // _MIN_TENSOR:
        raise cur.fail(f"{n_tensors} tensors cannot fit in the {cur.left} bytes that follow", 8)
    return version, n_tensors, n_kv


def _read_field(cur: _Cursor, index: int) -> Field:
    key = cur.name(f"key {index}")
    what = f"the value of {_short(key)}"
    value_type = _read_value_type(cur, what)
    start, item_type = cur.pos, None
    if value_type is ValueType.ARRAY:
        item_type = _skip_array(cur, what)
    elif value_type is ValueType.STRING:
        cur.skip(cur.u64(f"the length of {what}"), what)
    else:
        cur.skip(_SIZES[value_type], what)
        if value_type is ValueType.BOOL and cur.buf[start] > 1:
            raise cur.fail(f"{what} is a boolean of {cur.buf[start]}, neither 0 nor 1", start)
    return Field(key, value_type, item_type, cur.buf[start : cur.pos])


def _read_value_type(cur: _Cursor, what: str) -> ValueType:
    code = cur.u32(f"the type of {what}")
    if code > max(ValueType):
        raise cur.fail(f"{what} has the unknown type {code}", cur.pos - 4)
    return ValueType(code)


def _skip_array(cur: _Cursor, what: str) -> ValueType:
    """Step over an array, checking its bounds; return its item type."""
    item_type = _read_value_type(cur, f"the items of {what}")
    count_at = cur.pos
    count = cur.u64(f"the count of {what}")
    if item_type is ValueType.ARRAY:
        raise cur.fail(f"{what} is an array of arrays, which no runtime reads", count_at - 4)
    if count > cur.left // _SIZES.get(item_type, 8):
        raise cur.fail(
            f"{what} counts {count} items of {item_type.name}, more than the {cur.left} bytes left", count_at
        )
    if item_type is ValueType.STRING:
        if count > MAX_STRINGS:
            raise cur.fail(f"{what} counts {count} strings; at most {MAX_STRINGS} are read", count_at)
        _skip_strings(cur, count, what)
        return item_type
    start = cur.pos
    cur.skip(count * _SIZES[item_type], what)
    if item_type is ValueType.BOOL and count:
        items = np.frombuffer(cur.buf, np.uint8, count, start)
        if items.max() > 1:
            raise cur.fail(f"{what} holds a boolean of {items.max()}, neither 0 nor 1", start + int(items.argmax()))
    return item_type


def _skip_strings(cur: _Cursor, count: int, what: str) -> None:
    """Step over ``count`` strings: the one loop that a big vocabulary feels, hence bare of calls."""
    buf, pos, end = cur.buf, cur.pos, len(cur.buf) - 8
    for i in range(count):
        if pos > end:
            break
        pos += 8 + _u64(buf, pos)[0]
    else:
        i = count
    if i < count or pos > len(buf):
        cur.pos = min(cur.pos, len(buf))
        raise cur.fail(f"string {min(i, count - 1)} of {count} in {what} ends beyond the file", cur.pos)
    cur.pos = pos


def _read_tensor(cur: _Cursor, index: int, shard: int) -> TensorInfo:
    """Read one tensor info; its ``offset`` still counts from the beginning of the data."""
    at = cur.pos
    name = cur.name(f"the name of tensor {index}")
    what = f"tensor {_short(name)}"
    n_dims = cur.u32(f"the number of dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cur.fail(f"{what} has {n_dims} dimensions; 1 to {MAX_DIMS} are allowed", cur.pos - 4)
    shape = tuple(cur.u64(f"a dimension of {what}") for _ in range(n_dims))
    type_at = cur.pos
    type_id = cur.u32(f"the type of {what}")
    offset = cur.u64(f"the offset of {what}")
    try:
        tensor_type, nbytes = type_by_id(type_id), 0
        nbytes = checked_bytes(tensor_type, shape)
    except TypeNotSupported as e:
        raise cur.fail(f"{what}: {e.message}", type_at) from None
    except ValueError as e:
        raise cur.fail(f"{what}: {e}", at) from None
    return TensorInfo(name, shape, tensor_type, nbytes, offset, shard)


def checked_bytes(tensor_type: TensorType, shape: Sequence[int]) -> int:
    """Return a tensor's bytes; raise ValueError for a shape ggml cannot hold, TypeNotSupported for the type's."""
    if not 1 <= len(shape) <= MAX_DIMS:
        raise ValueError(f"{len(shape)} dimensions; 1 to {MAX_DIMS} are allowed")
    n = 1
    for ne in shape:
        if ne < 1:
            raise ValueError(f"shape {list(shape)} has a dimension below 1")
        n *= ne
    if n >= 1 << 63:
        raise ValueError(f"shape {list(shape)} has more values than 63 bits count")
    nbytes = tensor_type.tensor_bytes(shape)
    if nbytes >= 1 << 63:
        raise ValueError(f"shape {list(shape)} takes more bytes than 63 bits count")
    return nbytes


def _check_alignment(alignment: Field | None) -> int:
    """Return the alignment; raise ValueError if the field is not a fit power of two in a UINT32."""
    if alignment is None:
        return DEFAULT_ALIGNMENT
    if alignment.type is not ValueType.UINT32:
        raise ValueError(f"{ALIGNMENT_KEY} is {alignment.describe()}; it must be UINT32")
    n = int(alignment.value)
    if n == 0 or n & (n - 1) or n > MAX_ALIGNMENT:
        raise ValueError(f"{ALIGNMENT_KEY} is {n}; it must be a power of two up to {MAX_ALIGNMENT}")
    return n


@dataclass(frozen=True, slots=True)
class _Shard:
    """The header of one file."""

    path: Path
    version: int
    alignment: int
    fields: dict[str, Field]
    tensors: list[TensorInfo]


def _map(path: Path) -> memoryview:
    """Map a file read-only; raise FormatError if there is none that could be mapped."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory; name the .gguf file in it" if stat.S_ISDIR(mode) else "not a regular file"
            raise FormatError(f"{path}: {kind}, at byte 0")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise FormatError(f"{path}: the file is empty, at byte 0")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise FormatError(f"{path}: cannot be opened: {reason}, at byte 0") from None


def _read_shard(path: Path, shard: int, header_only: bool) -> _Shard:
    cur = _Cursor(path, _map(path))
    version, n_tensors, n_kv = _read_header(cur)
    fields: dict[str, Field] = {}
    for i in range(n_kv):
        at = cur.pos
        item = _read_field(cur, i)
        if item.key in fields:
            raise cur.fail(f"key {_short(item.key)} appears twice", at)
        fields[item.key] = item
        if item.key == ALIGNMENT_KEY:
            try:
                _check_alignment(item)
            except ValueError as e:
                raise cur.fail(str(e), at) from None
    alignment = _check_alignment(fields.get(ALIGNMENT_KEY))
    tensors, names = [], set()
    for i in range(n_tensors):
        at = cur.pos
        tensor = _read_tensor(cur, i, shard)
        if tensor.name in names:
            raise cur.fail(f"tensor {_short(tensor.name)} appears twice", at)
        if tensor.offset % alignment:
            what = f"tensor {_short(tensor.name)}: its offset {tensor.offset} is no multiple of {alignment}"
            raise cur.fail(what, cur.pos - 8)
        names.add(tensor.name)
        tensors.append(tensor)
    return _Shard(path, version, alignment, fields, _place(cur, tensors, alignment, header_only))


def _place(cur: _Cursor, tensors: list[TensorInfo], alignment: int, header_only: bool) -> list[TensorInfo]:
    """Make offsets absolute; refuse overlaps and, unless ``header_only``, data beyond the file."""
    start = _pad(cur.pos, alignment)
    placed = [TensorInfo(t.name, t.shape, t.type, t.nbytes, start + t.offset, t.shard) for t in tensors]
    for tensor in placed:
        end = tensor.offset + tensor.nbytes
        if end > len(cur.buf) and not header_only or end >= 1 << 63:
            what = f"tensor {_short(tensor.name)} needs bytes up to {end}, but the file has {len(cur.buf)} (truncated?)"
            raise cur.fail(what, tensor.offset)
    for a, b in pairwise(sorted(placed, key=lambda t: t.offset)):
        if a.offset + a.nbytes > b.offset:
            raise cur.fail(f"tensors {_short(a.name)} and {_short(b.name)} overlap", b.offset)
    return placed


def _pad(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


# ----------------------------------------------------------------------------------------- whole models


class GGUFFile:
    """An open model: metadata, tensors and their bytes, over all shards. Made by ``open_gguf``.

    Attributes:
        paths: all shards in order; one path for a file that is not split.
        version: 2 or 3, of the first shard.
        alignment: the first shard's.
        fields: the first shard's metadata in file order, split.* included.
        tensors: by name, in the order of shards and, within one, of their infos.

    Closing is safe while views and fields are alive: each keeps its mapping until it is garbage itself. The
    files must not be truncated meanwhile: reading a mapping beyond its file's end kills a process (SIGBUS).
    """

    def __init__(self, shards: Sequence[_Shard], header_only: bool) -> None:
        self.paths: tuple[Path, ...] = tuple(s.path for s in shards)
        self.version: int = shards[0].version
        self.alignment: int = shards[0].alignment
        self.fields: dict[str, Field] = shards[0].fields
        self.tensors: dict[str, TensorInfo] = {t.name: t for s in shards for t in s.tensors}
        self._header_only = header_only
        self._closed = False
        self._maps: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key, or ``default`` if there is none."""
        found = self.fields.get(key)
        return default if found is None else found.value

    def data(self, tensor: TensorInfo | str) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes: a read-only 1-D uint8 view of the mapped file. Safe to call from threads.

        Raises:
            KeyError: no tensor of this name.
            FormatError: the file was opened ``header_only``, or has shrunk since.
            ValueError: the file is closed.
        """
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        if self._header_only:
            raise FormatError(f"{self.paths[info.shard]}: opened for its header only; it has no tensor data here")
        view = self._view(info.shard)
        if info.offset + info.nbytes > len(view):
            raise FormatError(
                f"{self.paths[info.shard]}: the file has shrunk; {info.name} is gone, at byte {len(view)}"
            )
        return np.frombuffer(view, np.uint8, info.nbytes, info.offset)

    def _view(self, shard: int) -> memoryview:
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.paths[shard]} is closed")
            if shard not in self._maps:
                self._maps[shard] = _map(self.paths[shard])
                if len(self._maps) > _OPEN_MAPS:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(shard)
            return self._maps[shard]

    def close(self) -> None:
        """Let go of the files; views that are still alive stay valid."""
        with self._lock:
            self._closed = True
            self._maps.clear()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str], *, header_only: bool = False) -> GGUFFile:
    """Open a GGUF file, or, given any shard of a split one, the whole model.

    Args:
        path: the file; shards are looked for beside it under the names of ``split_path``.
        header_only: accept files whose tensor data is missing or cut off; ``data`` is then refused.

    Raises:
        FormatError: what is wrong with which file, and at which byte.
    """
    named = Path(path)
    shard = _read_shard(named, 0, header_only)
    count = _split_int(shard, "split.count", 0)
    if count <= 1:
        return GGUFFile([shard], header_only)
    no = _split_int(shard, "split.no")
    paths = _shard_paths(named, no, count)
    shards = [_read_shard(p, i, header_only) for i, p in enumerate(paths)]
    _check_shards(shards, count)
    return GGUFFile(shards, header_only)


def _split_int(shard: _Shard, key: str, default: int | None = None) -> int:
    found = shard.fields.get(key)
    if found is None and default is not None:
        return default
    if found is None:
        raise FormatError(f"{shard.path}: a shard without the key {key}, at byte 0")
    if not isinstance(found.value, int) or isinstance(found.value, bool) or not 0 <= found.value < 1 << 31:
        raise FormatError(f"{shard.path}: {key} is {_short(found.value)} ({found.describe()}), not a count, at byte 0")
    return found.value


def _shard_paths(named: Path, no: int, count: int) -> list[Path]:
    """Return the paths of all shards of the one called ``named``; each must exist."""
    split = parse_split_path(named)
    if split is None or split[1:] != (no, count):
        expected = split_path("PREFIX", no, count).name
        raise FormatError(f"{named}: this is shard {no + 1} of {count} and must be named {expected}, at byte 0")
    paths = [split_path(split[0], i, count) for i in range(count)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise FormatError(
            f"{named}: {len(missing)} of {count} shards are missing beside it: {', '.join(missing[:3])}{more}"
        )
    return paths


def _check_shards(shards: Sequence[_Shard], count: int) -> None:
    """Refuse shards that contradict each other."""
    owner: dict[str, Path] = {}
    for i, shard in enumerate(shards):
        no, its_count = _split_int(shard, "split.no"), _split_int(shard, "split.count", count)
        if (no, its_count) != (i, count):
            raise FormatError(
                f"{shard.path}: says shard {no + 1} of {its_count}, its name {i + 1} of {count}, at byte 0"
            )
        for tensor in shard.tensors:
            other = owner.setdefault(tensor.name, shard.path)
            if other is not shard.path:
                raise FormatError(
                    f"{shard.path}: tensor {_short(tensor.name)} is also in {other.name}, at byte {tensor.offset}"
                )
    for shard in shards:
        total = _split_int(shard, "split.tensors.count", len(owner))
        if total != len(owner):
            raise FormatError(
                f"{shard.path}: split.tensors.count is {total}, but the shards hold {len(owner)}, at byte 0"
            )


def split_path(prefix: str | os.PathLike[str], no: int, count: int) -> Path:
    """Return the path of shard ``no`` (from 0) of ``count``, as llama.cpp's llama_split_path names it."""
    return Path(f"{os.fspath(prefix)}-{no + 1:05d}-of-{count:05d}.gguf")


def parse_split_path(path: str | os.PathLike[str]) -> tuple[str, int, int] | None:
    """Return prefix, number (from 0) and count of a shard's path, None for another path."""
    found = re.fullmatch(r"(.+)-(\d{5,10})-of-(\d{5,10})\.gguf", os.fspath(path), re.DOTALL)
    return (found[1], int(found[2]) - 1, int(found[3])) if found else None


def split_fields(no: int, count: int, n_tensors: int) -> list[Field]:
    """Return the three keys of shard ``no`` (from 0), typed and ordered as llama-quantize --keep-split does."""
    return [
        Field.of("split.no", no, ValueType.UINT16),
        Field.of("split.count", count, ValueType.UINT16),
        Field.of("split.tensors.count", n_tensors, ValueType.INT32),
    ]


# ---------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class Layout:
    """A file before it is written: all of its header, and where each tensor goes.

    Zeros fill the gaps between tensors, and after the last one up to ``nbytes``.
    """

    header: bytes
    offsets: tuple[int, ...]
    nbytes: int


def layout_gguf(
    fields: Iterable[Field],
    tensors: Sequence[tuple[str, tuple[int, ...], TensorType]],
    *,
    version: int = 3,
    alignment: int | None = None,
) -> Layout:
    """Lay out a file as llama.cpp's writer does (b11434 gguf.cpp, gguf_write_out).

    Args:
        fields: the metadata, in order.
        tensors: name, shape (innermost first) and type of each; trailing dimensions of 1 are not written.
        version: 2 or 3.
        alignment: that of the field general.alignment, or 32 without one; another value is refused.

    Raises:
        FormatError: duplicate keys or names, a name, shape, version or alignment that no file may have.
        TypeNotSupported: a type cannot hold a tensor of this shape.
    """
    entries: dict[str, Field] = {}
    for item in fields:
        if entries.setdefault(item.key, item) is not item:
            raise FormatError(f"cannot write the key {_short(item.key)} twice")
    if version not in (2, 3):
        raise FormatError(f"cannot write GGUF version {version}; only 2 and 3")
    try:
        of_field = _check_alignment(entries.get(ALIGNMENT_KEY))
    except ValueError as e:
        raise FormatError(f"cannot write this file: {e}") from None
    if alignment not in (None, of_field):
        raise FormatError(
            f"cannot align to {alignment}: a reader would take {of_field} from {ALIGNMENT_KEY} or its default"
        )
    infos, relative, size = _layout_tensors(tensors, of_field)
    head = struct.pack("<4sIQQ", MAGIC, version, len(tensors), len(entries))
    header = b"".join((head, *(e.encode() for e in entries.values()), infos))
    start = _pad(len(header), of_field)
    return Layout(header.ljust(start, b"\0"), tuple(start + r for r in relative), start + size)


def _layout_tensors(
    tensors: Sequence[tuple[str, tuple[int, ...], TensorType]], alignment: int
) -> tuple[bytes, list[int], int]:
    """Return the tensor infos' bytes, the offsets within the data, and the data's size."""
    parts, offsets, size, names = [], [], 0, set()
    for name, shape, tensor_type in tensors:
        data = check_key(name, "tensor name", FormatError)
        if name in names:
            raise FormatError(f"cannot write the tensor {_short(name)} twice")
        names.add(name)
        try:
            nbytes = checked_bytes(type_by_id(tensor_type.id), shape)
        except ValueError as e:
            raise FormatError(f"tensor {_short(name)}: {e}") from None
        except TypeNotSupported as e:
            raise TypeNotSupported(f"tensor {_short(name)}: {e.message}") from None
        n_dims = max((i + 1 for i, ne in enumerate(shape) if ne > 1), default=1)
        dims = struct.pack(f"<I{n_dims}Q", n_dims, *shape[:n_dims])
        parts.append(b"".join((struct.pack("<Q", len(data)), data, dims, struct.pack("<IQ", tensor_type.id, size))))
        offsets.append(size)
        size += _pad(nbytes, alignment)
        if size >= 1 << 63:
            raise FormatError(f"tensor {_short(name)}: the file would be larger than 63 bits count")
    return b"".join(parts), offsets, size


def write_gguf(
    path: str | os.PathLike[str],
    fields: Iterable[Field],
    tensors: Iterable[tuple[str, tuple[int, ...], TensorType, Any]],
    *,
    version: int = 3,
) -> None:
    """Write a whole file at once; for small files. Each tensor is name, shape, type and its bytes-like data.

    Raises:
        FormatError, TypeNotSupported: as ``layout_gguf``, or the data has another size than the tensor.
    """
    given = list(tensors)
    layout = layout_gguf(fields, [(name, shape, kind) for name, shape, kind, _ in given], version=version)
    views = [memoryview(data).cast("B") for _, _, _, data in given]
    for (name, shape, kind, _), view in zip(given, views, strict=True):
        if len(view) != kind.tensor_bytes(shape):
            raise FormatError(f"tensor {_short(name)}: {len(view)} bytes given, {kind.tensor_bytes(shape)} needed")
    with open(path, "wb") as file:
        for chunk in _chunks(layout, views):
            file.write(chunk)


def _chunks(layout: Layout, views: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    yield layout.header
    ends = (*layout.offsets[1:], layout.nbytes)
    for view, offset, end in zip(views, layout.offsets, ends, strict=True):
        yield view
        yield bytes(end - offset - len(view))
