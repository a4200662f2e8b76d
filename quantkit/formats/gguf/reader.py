"""Read the header of one file: a cursor that never leaves the file and checks everything it reads."""

from __future__ import annotations

import mmap
import os
import stat
import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.fields import SIZES, Field, ValueType, checked_alignment
from quantkit.formats.gguf.rules import (
    ALIGNMENT_KEY,
    MAGIC,
    MAX_DIMS,
    MAX_FIELDS,
    MAX_NAME,
    MAX_STRINGS,
    MAX_TENSORS,
    checked_bytes,
    short,
)
from quantkit.formats.remote import URL
from quantkit.formats.remote.reader import Growing
from quantkit.types import TensorType, type_by_id
from quantkit.units import round_up

#: Fewest bytes of a field and a tensor info: bounds for the two counts in the header.
_MIN_FIELD, _MIN_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8

#: What a file that is not GGUF may be.
_OTHER_MAGICS = {
    b"vers": "a Git LFS pointer: fetch the file itself (git lfs pull)",
    b"<!DO": "an HTML page: the download went wrong",
    b"<htm": "an HTML page: the download went wrong",
    b"tjgg": "a GGJT file of 2023: convert the model again",
    b"PK\x03\x04": "a zip archive",
}

_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


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


class _More(Exception):
    """The header goes on behind the bytes at hand: those up to ``end`` are needed."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end


class _Cursor:
    """Reads one file's bytes, never past their end; ``fail`` raises every error.

    Of a file of ``size`` bytes ``buf`` may hold only the first ones; ``_More`` asks for others.
    """

    def __init__(self, path: Path, buf: memoryview, size: int) -> None:
        self.path, self.buf, self.size, self.pos = path, buf, size, 0

    @property
    def left(self) -> int:
        return self.size - self.pos

    def fail(self, what: str, at: int | None = None) -> FormatError:
        return FormatError(f"{self.path}: {what}, at byte {self.pos if at is None else at}")

    def skip(self, n: int, what: str) -> None:
        if n > self.left:
            raise self.fail(f"{what} takes {n} bytes, but the file ends after {self.left} more (truncated?)")
        self.pos += n
        if self.pos > len(self.buf):
            raise _More(self.pos)

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
            raise self.fail(f"{what} {short(data)} holds a NUL byte", at + 8)
        try:
            return data.decode()
        except UnicodeDecodeError as e:
            raise self.fail(f"{what} {short(data)} is not UTF-8", at + 8 + e.start) from None


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
    if n_kv > min(cur.left // _MIN_FIELD, MAX_FIELDS):
        raise cur.fail(f"{n_kv} keys; {cur.left} bytes follow, and at most {MAX_FIELDS} keys are read", 16)
    if n_tensors > min((cur.left - n_kv * _MIN_FIELD) // _MIN_TENSOR, MAX_TENSORS):
        raise cur.fail(f"{n_tensors} tensors; {cur.left} bytes follow, and at most {MAX_TENSORS} tensors are read", 8)
    return version, n_tensors, n_kv


def _read_field(cur: _Cursor, index: int) -> Field:
    key = cur.name(f"key {index}")
    what = f"the value of {short(key)}"
    value_type = _read_value_type(cur, what)
    start, item_type = cur.pos, None
    if value_type is ValueType.ARRAY:
        item_type = _skip_array(cur, what)
    elif value_type is ValueType.STRING:
        cur.skip(cur.u64(f"the length of {what}"), what)
    else:
        cur.skip(SIZES[value_type], what)
        if value_type is ValueType.BOOL and cur.buf[start] > 1:
            raise cur.fail(f"{what} is a boolean of {cur.buf[start]}, neither 0 nor 1", start)
    return Field(key, value_type, item_type, cur.buf[start : cur.pos])


def _read_value_type(cur: _Cursor, what: str) -> ValueType:
    code = cur.u32(f"the type of {what}")
    try:
        return ValueType(code)
    except ValueError:
        raise cur.fail(f"{what} has the unknown type {code}", cur.pos - 4) from None


def _skip_array(cur: _Cursor, what: str) -> ValueType:
    """Step over an array, checking its bounds; return its item type."""
    item_type = _read_value_type(cur, f"an item of {what}")
    count_at = cur.pos
    count = cur.u64(f"the count of {what}")
    if item_type is ValueType.ARRAY:
        raise cur.fail(f"{what} is an array of arrays, which no runtime reads", count_at - 4)
    if count > cur.left // SIZES.get(item_type, 8):
        raise cur.fail(
            f"{what} counts {count} items of {item_type.name}, more than the {cur.left} bytes left", count_at
        )
    if item_type is ValueType.STRING:
        if count > MAX_STRINGS:
            raise cur.fail(f"{what} counts {count} strings; at most {MAX_STRINGS} are read", count_at)
        _skip_strings(cur, count, what)
        return item_type
    start = cur.pos
    cur.skip(count * SIZES[item_type], what)
    if item_type is ValueType.BOOL and count:
        items = np.frombuffer(cur.buf, np.uint8, count, start)
        if items.max() > 1:
            raise cur.fail(f"{what} holds a boolean of {items.max()}, neither 0 nor 1", start + int(items.argmax()))
    return item_type


def _skip_strings(cur: _Cursor, count: int, what: str) -> None:
    """Step over ``count`` strings; without calls in the loop, for large vocabularies."""
    buf, pos, last = cur.buf, cur.pos, len(cur.buf) - 8
    at = pos
    for _ in range(count):
        if pos > last:
            break
        at = pos
        pos += 8 + _u64(buf, at)[0]
    else:
        if pos <= len(buf):
            cur.pos = pos
            return
    if len(buf) < cur.size and pos <= cur.size:
        raise _More(pos + 8)
    raise cur.fail(f"{what}: one of {count} strings ends beyond the file", at)


def _read_tensor(cur: _Cursor, index: int, shard: int) -> TensorInfo:
    """Read one tensor info; its ``offset`` still counts from the beginning of the data."""
    at = cur.pos
    name = cur.name(f"the name of tensor {index}")
    what = f"tensor {short(name)}"
    n_dims = cur.u32(f"the number of dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cur.fail(f"{what} has {n_dims} dimensions; 1 to {MAX_DIMS} are allowed", cur.pos - 4)
    shape = tuple(cur.u64(f"a dimension of {what}") for _ in range(n_dims))
    type_at = cur.pos
    type_id = cur.u32(f"the type of {what}")
    offset = cur.u64(f"the offset of {what}")
    try:
        tensor_type = type_by_id(type_id)
        nbytes = checked_bytes(tensor_type, shape)
    except TypeNotSupported as e:
        raise cur.fail(f"{what}: {e.message}", type_at) from None
    except ValueError as e:
        raise cur.fail(f"{what}: {e}", at) from None
    return TensorInfo(name, shape, tensor_type, nbytes, offset, shard)


@dataclass(frozen=True, slots=True)
class Shard:
    """The header of one file."""

    path: Path
    version: int
    alignment: int
    fields: dict[str, Field]
    tensors: list[TensorInfo]


def map_file(path: Path) -> memoryview:
    """Map a file read-only, of an object of a store a copy; raise FormatError if that is not possible."""
    if isinstance(path, URL):
        try:
            with path.open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as e:
            raise FormatError(f"{path}: cannot be opened: {e.strerror or e}") from None
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory; name the .gguf file in it" if stat.S_ISDIR(mode) else "not a regular file"
            raise FormatError(f"{path}: {kind}")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise FormatError(f"{path}: the file is empty")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise FormatError(f"{path}: cannot be opened: {reason}") from None


def read_shard(path: Path, shard: int, header_only: bool) -> Shard:
    """Read and check the header of one file; with ``header_only`` its tensor data may be missing.

    Of an object of a store only the beginning is read, more and more of it until the header is there.
    """
    if not isinstance(path, URL):
        view = map_file(path)
        return _read_shard(_Cursor(path, view, len(view)), shard, header_only)
    try:
        beginning, end = Growing(path), 24
        while True:
            if not (data := beginning.upto(end)):
                raise FormatError(f"{path}: the file is empty")
            try:
                return _read_shard(_Cursor(path, memoryview(data), beginning.size), shard, header_only)
            except _More as more:
                end = more.end
    except OSError as e:
        raise FormatError(f"{path}: cannot be opened: {e.strerror or e}") from None


def _read_shard(cur: _Cursor, shard: int, header_only: bool) -> Shard:
    path = cur.path
    version, n_tensors, n_kv = _read_header(cur)
    fields: dict[str, Field] = {}
    for i in range(n_kv):
        at = cur.pos
        item = _read_field(cur, i)
        if item.key in fields:
            raise cur.fail(f"key {short(item.key)} appears twice", at)
        fields[item.key] = item
        if item.key == ALIGNMENT_KEY:
            try:
                checked_alignment(item)
            except ValueError as e:
                raise cur.fail(str(e), at) from None
    alignment = checked_alignment(fields.get(ALIGNMENT_KEY))
    tensors, names = [], set()
    for i in range(n_tensors):
        at = cur.pos
        tensor = _read_tensor(cur, i, shard)
        if tensor.name in names:
            raise cur.fail(f"tensor {short(tensor.name)} appears twice", at)
        if tensor.offset % alignment:
            what = f"tensor {short(tensor.name)}: its offset {tensor.offset} is no multiple of {alignment}"
            raise cur.fail(what, cur.pos - 8)
        names.add(tensor.name)
        tensors.append(tensor)
    return Shard(path, version, alignment, fields, _place(cur, tensors, alignment, header_only))


def _place(cur: _Cursor, tensors: list[TensorInfo], alignment: int, header_only: bool) -> list[TensorInfo]:
    """Make offsets absolute; refuse overlaps and, unless ``header_only``, data beyond the file."""
    start = round_up(cur.pos, alignment)
    placed = [replace(t, offset=start + t.offset) for t in tensors]
    for tensor in placed:
        end = tensor.offset + tensor.nbytes
        if end > cur.size and not header_only or end >= 1 << 63:
            what = f"tensor {short(tensor.name)} needs bytes up to {end}, but the file has {cur.size} (truncated?)"
            raise cur.fail(what, tensor.offset)
    for a, b in pairwise(sorted(placed, key=lambda t: t.offset)):
        if a.offset + a.nbytes > b.offset:
            raise cur.fail(f"tensors {short(a.name)} and {short(b.name)} overlap", b.offset)
    return placed
