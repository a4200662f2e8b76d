"""Read the header of one file: a cursor that never leaves the file and checks everything it reads."""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError, TypeNotSupported, os_error_code
from quantkit.formats.files import check_unchanged, hold, open_input
from quantkit.formats.gguf.byte_order import swapped_value
from quantkit.formats.gguf.fields import SIZES, Field, ValueType, checked_alignment
from quantkit.formats.gguf.header_journal import is_edited, settle
from quantkit.formats.gguf.rules import (
    ALIGNMENT_KEY,
    EDIT_MAGIC,
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
from quantkit.formats.remote.reader import Prefix
from quantkit.mapping import map_descriptor
from quantkit.types import TensorType, type_by_id
from quantkit.units import round_up

#: Minimum bytes of a field and of a tensor info, to bound the two counts in the header.
_MIN_FIELD, _MIN_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 4 + 8

#: Likely kinds of a file that is not GGUF.
_OTHER_MAGICS = {
    b"vers": "a Git LFS pointer: fetch the file itself (git lfs pull)",
    b"<!DO": "an HTML page: the download failed",
    b"<htm": "an HTML page: the download failed",
    b"tjgg": "a GGJT file of 2023: convert the model again",
    b"PK\x03\x04": "a zip archive",
    EDIT_MAGIC: "a file whose edit was interrupted: quantkit restores it with FILE.quantkit-header, which is not here",
}

#: Maximum number of reads of a file whose header other processes replace.
_ATTEMPTS = 5

_U32 = {False: struct.Struct("<I").unpack_from, True: struct.Struct(">I").unpack_from}
_U64 = {False: struct.Struct("<Q").unpack_from, True: struct.Struct(">Q").unpack_from}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's name, type and place. ``shape`` is in ggml's order, innermost first; ``offset`` counts from the
    beginning of the file ``paths[shard]``."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    nbytes: int
    offset: int
    shard: int


class _NeedMore(Exception):
    """The header needs bytes up to ``end`` that have not been read yet."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end


class _Cursor:
    """Reads one file's bytes, never past their end; ``fail`` raises every error.

    ``buf`` may have only the first of the file's ``size`` bytes; ``_More`` requests others.
    """

    def __init__(self, path: Path, buf: memoryview, size: int) -> None:
        self.path = path
        self.buf = buf
        self.size = size
        self.pos = 0
        self.big_endian = False

    @property
    def left(self) -> int:
        return self.size - self.pos

    def fail(self, problem: str, offset: int | None = None, code: str = "QK-E102") -> FormatError:
        """Return an error at byte ``offset``; default: the cursor's."""
        return FormatError(f"{self.path}: {problem}, at byte {self.pos if offset is None else offset}", code)

    def skip(self, n: int, item: str) -> None:
        if n > self.left:
            message = f"{item} needs {n} bytes, but the file ends after {self.left} more (truncated?)"
            raise self.fail(message, code="QK-E103")
        self.pos += n
        if self.pos > len(self.buf):
            raise _NeedMore(self.pos)

    def u32(self, item: str) -> int:
        self.skip(4, item)
        return int(_U32[self.big_endian](self.buf, self.pos - 4)[0])

    def u64(self, item: str) -> int:
        self.skip(8, item)
        return int(_U64[self.big_endian](self.buf, self.pos - 8)[0])

    def name(self, item: str) -> str:
        """Read a key or a tensor name."""
        start = self.pos
        n = self.u64(f"the length of {item}")
        if not 0 < n <= MAX_NAME:
            raise self.fail(f"{item} is {n} bytes long; 1 to {MAX_NAME} are allowed", start)
        self.skip(n, item)
        data = bytes(self.buf[self.pos - n : self.pos])
        if 0 in data:
            raise self.fail(f"{item} {short(data)} contains a NUL byte", start + 8)
        try:
            return data.decode()
        except UnicodeDecodeError as e:
            raise self.fail(f"{item} {short(data)} is not UTF-8", start + 8 + e.start) from None


def _read_header(cur: _Cursor) -> tuple[int, int, int]:
    """Read magic, version and counts; return version, n_tensors, n_kv."""
    magic = bytes(cur.buf[:4])
    if magic != MAGIC:
        likely_kind = _OTHER_MAGICS.get(magic)
        raise cur.fail(
            f"not a GGUF file: it starts with {magic!r}" + (f"; it looks like {likely_kind}" if likely_kind else ""),
            0,
            "QK-E101",
        )
    cur.pos = 4
    version = cur.u32("the version")
    if version and version & 0xFFFF == 0:
        cur.pos, cur.big_endian = 4, True
        version = cur.u32("the version")
    if version not in (2, 3):
        raise cur.fail(f"GGUF version {version}; only versions 2 and 3 are supported", 4)
    n_tensors = cur.u64("the number of tensors")
    n_kv = cur.u64("the number of keys")
    if n_kv > min(cur.left // _MIN_FIELD, MAX_FIELDS):
        raise cur.fail(
            f"{n_kv} keys, but only {cur.left} bytes follow, and at most {MAX_FIELDS} keys are supported", 16
        )
    if n_tensors > min((cur.left - n_kv * _MIN_FIELD) // _MIN_TENSOR, MAX_TENSORS):
        raise cur.fail(
            f"{n_tensors} tensors, but only {cur.left} bytes follow, and at most {MAX_TENSORS} tensors are supported", 8
        )
    return version, n_tensors, n_kv


def _read_field(cur: _Cursor, index: int) -> Field:
    key = cur.name(f"key {index}")
    item = f"the value of {short(key)}"
    value_type = _read_value_type(cur, item)
    start, item_type = cur.pos, None
    if value_type is ValueType.ARRAY:
        item_type = _skip_array(cur, item)
    elif value_type is ValueType.STRING:
        cur.skip(cur.u64(f"the length of {item}"), item)
    else:
        cur.skip(SIZES[value_type], item)
        if value_type is ValueType.BOOL and cur.buf[start] > 1:
            raise cur.fail(f"{item} is a boolean of {cur.buf[start]}, neither 0 nor 1", start)
    raw: bytes | memoryview = cur.buf[start : cur.pos]
    if cur.big_endian:
        raw = swapped_value(raw, value_type, item_type, big=True)
    return Field(key, value_type, item_type, raw)


def _read_value_type(cur: _Cursor, item: str) -> ValueType:
    code = cur.u32(f"the type of {item}")
    try:
        return ValueType(code)
    except ValueError:
        raise cur.fail(f"{item} has the unknown type {code}", cur.pos - 4) from None


def _skip_array(cur: _Cursor, item: str) -> ValueType:
    """Skip an array, checking its bounds; return its item type."""
    item_type = _read_value_type(cur, f"an item of {item}")
    count_at = cur.pos
    count = cur.u64(f"the count of {item}")
    if item_type is ValueType.ARRAY:
        raise cur.fail(f"{item} is an array of arrays, which no runtime reads", count_at - 4)
    if count > cur.left // SIZES.get(item_type, 8):
        raise cur.fail(
            f"{item} has {count} items of {item_type.name}, more than the remaining {cur.left} bytes", count_at
        )
    if item_type is ValueType.STRING:
        if count > MAX_STRINGS:
            raise cur.fail(f"{item} has {count} strings; at most {MAX_STRINGS} are supported", count_at)
        _skip_strings(cur, count, item)
        return item_type
    start = cur.pos
    cur.skip(count * SIZES[item_type], item)
    if item_type is ValueType.BOOL and count:
        items = np.frombuffer(cur.buf, np.uint8, count, start)
        if items.max() > 1:
            raise cur.fail(f"{item} contains a boolean of {items.max()}, neither 0 nor 1", start + int(items.argmax()))
    return item_type


def _skip_strings(cur: _Cursor, count: int, item: str) -> None:
    """Skip ``count`` strings, without calls in the loop, for large vocabularies."""
    buf = cur.buf
    pos = cur.pos
    read_u64 = _U64[cur.big_endian]
    last = len(cur.buf) - 8
    start = pos
    for _ in range(count):
        if pos > last:
            break
        start = pos
        pos += 8 + read_u64(buf, start)[0]
    else:
        if pos <= len(buf):
            cur.pos = pos
            return
    if len(buf) < cur.size and pos <= cur.size:
        raise _NeedMore(pos + 8)
    raise cur.fail(f"{item}: one of {count} strings ends beyond the file", start)


def _read_tensor(cur: _Cursor, index: int, shard: int) -> TensorInfo:
    """Read one tensor info; its ``offset`` still counts from the beginning of the data."""
    start = cur.pos
    name = cur.name(f"the name of tensor {index}")
    item = f"tensor {short(name)}"
    n_dims = cur.u32(f"the number of dimensions of {item}")
    if n_dims > MAX_DIMS:
        raise cur.fail(f"{item} has {n_dims} dimensions; up to {MAX_DIMS} are allowed", cur.pos - 4)
    shape = tuple(cur.u64(f"a dimension of {item}") for _ in range(n_dims))
    type_at = cur.pos
    type_id = cur.u32(f"the type of {item}")
    offset = cur.u64(f"the offset of {item}")
    try:
        tensor_type = type_by_id(type_id)
        nbytes = checked_bytes(tensor_type, shape)
    except TypeNotSupported as e:
        raise cur.fail(f"{item}: {e.message}", type_at, e.code) from None
    except ValueError as e:
        raise cur.fail(f"{item}: {e}", start) from None
    return TensorInfo(name, shape, tensor_type, nbytes, offset, shard)


@dataclass(frozen=True, slots=True)
class Shard:
    """The header of one file."""

    path: Path
    version: int
    alignment: int
    fields: dict[str, Field]
    tensors: list[TensorInfo]
    #: Whether numbers in the file are big-endian; those of ``fields`` are not.
    big_endian: bool = False


def map_file(path: Path) -> memoryview:
    """Map a file, or a copy of a store's object, read-only. Raises FormatError if that is not possible."""
    if isinstance(path, URL):
        try:
            with path.open("rb") as file:
                return map_descriptor(file.fileno(), os.fstat(file.fileno()).st_size)
        except OSError as e:
            raise FormatError(f"{path}: cannot be opened: {e.strerror or e}", os_error_code(e)) from None
    try:
        with open_input(path) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                is_folder = stat.S_ISDIR(status.st_mode)
                kind = "a directory; give the .gguf file in it" if is_folder else "not a regular file"
                raise FormatError(f"{path}: {kind}", "QK-E120")
            if status.st_size == 0:
                raise FormatError(f"{path}: the file is empty", "QK-E103")
            return map_descriptor(fd, status.st_size)
    except OSError as e:
        raise FormatError(f"{path}: cannot be opened: {e.strerror or e}", os_error_code(e)) from None
    except ValueError as e:
        raise FormatError(f"{path}: cannot be opened: {e}", "QK-E405") from None


def read_shard(path: Path, shard: int, header_only: bool) -> Shard:
    """Read and check the header of one file, which is then held; with ``header_only`` its tensor data may be missing.

    Of an object of a store only the beginning is read, in growing pieces until the header is complete.
    """
    if not isinstance(path, URL):
        return _read_settled(path, shard, header_only)
    try:
        beginning, end = Prefix(path), 24
        while True:
            if not (data := beginning.read_to(end)):
                raise FormatError(f"{path}: the file is empty", "QK-E103")
            try:
                return _read_shard(_Cursor(path, memoryview(data), beginning.size), shard, header_only)
            except _NeedMore as more:
                end = more.end
    except OSError as e:
        raise FormatError(f"{path}: cannot be opened: {e.strerror or e}", os_error_code(e)) from None


def _read_settled(path: Path, shard: int, header_only: bool) -> Shard:
    """Read a local file; again if its header was replaced meanwhile."""
    for attempt in range(_ATTEMPTS):
        settle(path)
        try:
            file = hold(path)
        except OSError as e:
            raise FormatError(f"{path}: cannot be opened: {e.strerror or e}", os_error_code(e)) from None
        view = map_file(file)
        try:
            result = _read_shard(_Cursor(file, view, len(view)), shard, header_only)
            check_unchanged([file])
        except FormatError:
            if attempt + 1 < _ATTEMPTS and _has_changed(file):
                continue
            raise
        if not is_edited(path):
            return result
    raise FormatError(f"{path}: its header changes all the time; wait for the other process", "QK-E109")


def _has_changed(path: Path) -> bool:
    try:
        check_unchanged([path])
    except FormatError:
        return True
    return is_edited(path)


def _read_shard(cur: _Cursor, shard: int, header_only: bool) -> Shard:
    path = cur.path
    version, n_tensors, n_kv = _read_header(cur)
    fields: dict[str, Field] = {}
    for i in range(n_kv):
        start = cur.pos
        item = _read_field(cur, i)
        if item.key in fields:
            raise cur.fail(f"key {short(item.key)} occurs twice", start, "QK-E107")
        fields[item.key] = item
        if item.key == ALIGNMENT_KEY:
            try:
                checked_alignment(item)
            except ValueError as e:
                raise cur.fail(str(e), start) from None
    alignment = checked_alignment(fields.get(ALIGNMENT_KEY))
    tensors, names = [], set()
    for i in range(n_tensors):
        start = cur.pos
        tensor = _read_tensor(cur, i, shard)
        if tensor.name in names:
            raise cur.fail(f"tensor {short(tensor.name)} occurs twice", start, "QK-E107")
        if tensor.offset % alignment:
            problem = f"tensor {short(tensor.name)}: its offset {tensor.offset} is not a multiple of {alignment}"
            raise cur.fail(problem, cur.pos - 8)
        names.add(tensor.name)
        tensors.append(tensor)
    return Shard(path, version, alignment, fields, _place(cur, tensors, alignment, header_only), cur.big_endian)


def _place(cur: _Cursor, tensors: list[TensorInfo], alignment: int, header_only: bool) -> list[TensorInfo]:
    """Make offsets absolute; refuse overlaps and, unless ``header_only``, data beyond the file."""
    start = round_up(cur.pos, alignment)
    placed = [replace(t, offset=start + t.offset) for t in tensors]
    for tensor in placed:
        end = tensor.offset + tensor.nbytes
        if end > cur.size and tensor.nbytes and not header_only or end >= 1 << 63:
            problem = f"tensor {short(tensor.name)} needs bytes up to {end}, but the file has {cur.size} (truncated?)"
            raise cur.fail(problem, tensor.offset, "QK-E103")
    for a, b in pairwise(sorted((t for t in placed if t.nbytes), key=lambda t: t.offset)):
        if a.offset + a.nbytes > b.offset:
            raise cur.fail(f"tensors {short(a.name)} and {short(b.name)} overlap", b.offset)
    return placed
