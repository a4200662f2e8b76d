"""Files of torch.save: a zip archive of a pickle and of one entry a storage, read without unpickling.

::

    NAME/data.pkl     a pickle (protocol 2) of the saved object; its tensors refer to storages by key
    NAME/data/KEY     the bytes of a storage
    NAME/byteorder    little or big (absent in old files: little)
    NAME/version      3

The pickle runs in an interpreter of the opcodes that torch.save writes for numbers, texts, containers and tensors: no
global is imported and nothing is called. Any other opcode or global is an error, as is an entry that is compressed,
damaged or outside the file. Facts of torch 2.13 (torch.serialization, torch._utils).
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError, os_error_code
from quantkit.formats.files import hold
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_whole
from quantkit.formats.safetensors import DTYPES, StoredTensor
from quantkit.names import printable

#: Limits of a file, and of its pickle.
MAX_FILE, MAX_PICKLE = 1 << 28, 1 << 20
_LOCAL_HEADER, _LOCAL_SIGNATURE = 30, b"PK\3\4"
_MAX_DIMS, _MAX_DIM = 16, 1 << 48
#: Classes of storages -> safetensors' dtypes.
_STORAGES = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_TENSOR, _PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
_ORDERED_DICT = "collections OrderedDict"
#: All globals that a pickle may name.
_GLOBALS = {_TENSOR, _PARAMETER, _ORDERED_DICT, *(f"torch {name}" for name in _STORAGES)}


def read_torch_file(path: Path) -> Any:
    """Return the object in a file of torch.save, with tensors as ``StoredTensor`` in this file.

    The object consists of dicts, lists, tuples, texts, numbers, bools, None, and contiguous tensors of floats or
    integers (outermost dimension first, of any shape and storage offset). Raises FormatError (QK-E110) for any other.
    """
    try:
        file = hold(path)
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror or e}", os_error_code(e)) from None
    archive = _Archive.parse(file, read_whole(path, MAX_FILE))
    if (order := archive.optional("byteorder")) not in (None, b"little"):
        raise FormatError(f"{path}: its numbers are {short(printable(str(order)))}, not little-endian", "QK-E110")
    data = archive.read("data.pkl")
    if len(data) > MAX_PICKLE:
        raise FormatError(f"{path}: data.pkl has {len(data)} bytes; at most {MAX_PICKLE} are supported", "QK-E110")
    return _Unpickler(archive, data).run()


@dataclass(frozen=True)
class _Archive:
    """A zip archive of stored entries, all in one directory, and the bytes of its file."""

    path: Path
    data: bytes
    #: Entry without the directory -> offset of its local header, bytes, CRC.
    entries: dict[str, tuple[int, int, int]]

    @classmethod
    def parse(cls, path: Path, data: bytes) -> _Archive:
        """Read the central directory. Raises FormatError."""
        try:
            with zipfile.ZipFile(BytesIO(data)) as file:
                infos = file.infolist()
        except Exception as e:  # zipfile raises errors of many classes on damaged archives
            raise FormatError(f"{path}: not a file of torch.save (a zip archive): {e}", "QK-E110") from None
        root = infos[0].filename.partition("/")[0] if infos else ""
        entries: dict[str, tuple[int, int, int]] = {}
        for info in infos:
            folder, _, name = info.filename.partition("/")
            if folder != root or name in entries:
                raise FormatError(f"{path}: the entry {short(info.filename)} is in no file of torch.save", "QK-E110")
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise FormatError(f"{path}: the entry {short(info.filename)} is compressed or encrypted", "QK-E110")
            entries[name] = info.header_offset, info.file_size, info.CRC
        return cls(path, data, entries)

    def optional(self, name: str) -> bytes | None:
        """Return the bytes of an entry, None if absent."""
        return self.read(name) if name in self.entries else None

    def read(self, name: str) -> bytes:
        """Return the bytes of an entry. Raises FormatError."""
        start, nbytes = self.place(name)
        return self.data[start : start + nbytes]

    def place(self, name: str) -> tuple[int, int]:
        """Return the offset of an entry's bytes in the file, and their number. Raises FormatError."""
        if name not in self.entries:
            raise FormatError(f"{self.path}: has no entry {short(name)}", "QK-E110")
        header, nbytes, checksum = self.entries[name]
        local = self.data[header : header + _LOCAL_HEADER] if header >= 0 else b""
        if len(local) < _LOCAL_HEADER or not local.startswith(_LOCAL_SIGNATURE):
            raise FormatError(f"{self.path}: the entry {short(name)} has no header: damaged", "QK-E110")
        start = header + _LOCAL_HEADER + sum(int.from_bytes(local[i : i + 2], "little") for i in (26, 28))
        if start + nbytes > len(self.data):
            raise FormatError(f"{self.path}: the entry {short(name)} exceeds the file: truncated", "QK-E110")
        if zlib.crc32(memoryview(self.data)[start : start + nbytes]) != checksum:
            raise FormatError(f"{self.path}: the checksum of the entry {short(name)} is wrong: damaged", "QK-E110")
        return start, nbytes


@dataclass(frozen=True)
class _Global:
    """A class or function that a pickle names."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """A storage: its dtype, and the place of its values."""

    dtype: str
    count: int
    offset: int


_MARK = object()


class _Unpickler:
    """An interpreter of the opcodes in ``_OPCODES``."""

    def __init__(self, archive: _Archive, data: bytes) -> None:
        self.archive, self.data, self.position = archive, data, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Return the object of the pickle. Raises FormatError."""
        while (code := self.take(1)[0]) != ord("."):
            operation = _OPCODES.get(code)
            if operation is None:
                raise self.fail(f"the opcode {code:#04x}, which torch.save does not write for tensors")
            operation(self)
        if len(self.stack) != 1:
            raise self.fail(f"{len(self.stack)} objects instead of one")
        return self.pop()

    def fail(self, problem: str) -> FormatError:
        """Return an error about the pickle."""
        return FormatError(f"{self.archive.path}: data.pkl has {problem}; nothing in it is run", "QK-E110")

    def take(self, n: int) -> bytes:
        """Return the next ``n`` bytes."""
        data = self.data[self.position : self.position + n]
        if len(data) < n:
            raise self.fail("no end: truncated")
        self.position += n
        return data

    def count(self, n: int) -> int:
        """Return a number of ``n`` bytes without sign."""
        return int.from_bytes(self.take(n), "little")

    def integer(self, n: int) -> int:
        """Return a number of ``n`` bytes with sign."""
        return int.from_bytes(self.take(n), "little", signed=True)

    def real(self) -> float:
        """Return a number of 8 bytes, big-endian."""
        return float(struct.unpack(">d", self.take(8))[0])

    def check_protocol(self) -> None:
        """Refuse pickles of another protocol than torch.save's."""
        if (protocol := self.count(1)) != 2:
            raise self.fail(f"the protocol {protocol}, not 2")

    def line(self) -> str:
        """Return the text up to the end of the line."""
        end = self.data.find(b"\n", self.position)
        text = self.take(max(0, end - self.position)).decode("ascii", "replace")
        self.take(1)
        return text

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        """Return the top of the stack."""
        if not self.stack or self.stack[-1] is _MARK:
            raise self.fail("an operation without operand")
        return self.stack.pop()

    def pop_marked(self) -> list[Any]:
        """Return the objects after the last mark."""
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                values = self.stack[i + 1 :]
                del self.stack[i:]
                return values
        raise self.fail("no mark")

    def pop_tuple(self, n: int) -> None:
        """Push the tuple of the ``n`` objects at the top."""
        self.push(tuple(reversed([self.pop() for _ in range(n)])))

    def text(self) -> str:
        """Return a text and its length before it."""
        try:
            return self.take(self.count(4)).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self.fail("a text that is not UTF-8") from None

    def remember(self, key: int) -> None:
        """Keep the top of the stack under a number."""
        value = self.pop()
        self.memo[key] = value
        self.push(value)

    def recall(self, key: int) -> None:
        """Push the object of a number."""
        if key not in self.memo:
            raise self.fail("a reference to nothing")
        self.push(self.memo[key])

    def name_global(self) -> None:
        """Push a class or function by its name."""
        name = f"{self.line()} {self.line()}"
        if name not in _GLOBALS:
            raise self.fail(f"the Python object {short(printable(name.replace(' ', '.', 1)))}")
        self.push(_Global(name))

    def set_items(self, pairs: list[Any]) -> None:
        """Set keys and values, in turn, of the dict at the top."""
        target = self.pop()
        if not isinstance(target, dict) or len(pairs) % 2:
            raise self.fail("items without a dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, (str, int)):
                raise self.fail(f"the key {short(printable(str(type(key).__name__)))}")
            target[key] = value
        self.push(target)

    def append(self, values: list[Any]) -> None:
        """Append values to the list at the top."""
        target = self.pop()
        if not isinstance(target, list):
            raise self.fail("items without a list")
        target.extend(values)
        self.push(target)

    def set_item(self) -> None:
        """Set one item of the dict at the top."""
        value = self.pop()
        self.set_items([self.pop(), value])

    def storage(self) -> None:
        """Push the storage that a persistent id names: ("storage", class, key, device, count)."""
        match self.pop():
            case ("storage", _Global(name=name), str() as key, str(), int() as count) if name.startswith("torch "):
                dtype = _STORAGES.get(name.removeprefix("torch "), "")
            case _:
                raise self.fail("a reference that is not a storage")
        start, nbytes = self.archive.place(f"data/{key}")
        if not dtype or 8 * nbytes != count * DTYPES[dtype]:
            raise self.fail(f"a storage {short(printable(key))} of {count} values, but it has {nbytes} bytes")
        self.push(_Storage(dtype, count, start))

    def call(self) -> None:
        """Push what one of the known functions would return."""
        arguments, function = self.pop(), self.pop()
        match function, arguments:
            case _Global(name=name), () if name == _ORDERED_DICT:
                self.push({})
            case _Global(name=name), (StoredTensor() as tensor, bool(), dict()) if name == _PARAMETER:
                self.push(tensor)
            case _Global(name=name), (
                _Storage() as storage,
                int() as offset,
                tuple() as shape,
                tuple() as strides,
                *_,
            ) if name == _TENSOR:
                self.push(self.tensor(storage, offset, shape, strides))
            case _:
                raise self.fail("a call that torch.save does not write for tensors")

    def tensor(self, storage: _Storage, offset: int, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> StoredTensor:
        """Return a tensor of a storage. Raises FormatError if it is not contiguous or exceeds the storage."""
        sizes = (*shape, *strides, offset)
        if len(shape) > _MAX_DIMS or not all(type(n) is int and 0 <= n <= _MAX_DIM for n in sizes):
            raise self.fail("a tensor whose shape is not a few counts")
        expected = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        if len(strides) != len(shape) or any(
            n > 1 and stride != step for n, stride, step in zip(shape, strides, expected, strict=True)
        ):
            raise self.fail(f"a tensor of the shape {list(shape)} with the strides {list(strides)}: not contiguous")
        count, width = math.prod(shape), DTYPES[storage.dtype] // 8
        if offset + count > storage.count:
            raise self.fail(f"a tensor of {count} values at {offset} in a storage of {storage.count}")
        place = storage.offset + offset * width
        return StoredTensor("", storage.dtype, shape, self.archive.path, place, count * width)


def _literal(value: Any) -> Callable[[_Unpickler], None]:
    return lambda u: u.push(value)


#: The opcodes that torch.save writes.
_OPCODES: dict[int, Callable[[_Unpickler], None]] = {
    0x80: lambda u: u.check_protocol(),
    **{ord(code): _literal(value) for code, value in (("N", None), (")", ()))},
    0x88: _literal(True),
    0x89: _literal(False),
    ord("}"): lambda u: u.push({}),
    ord("]"): lambda u: u.push([]),
    ord("("): lambda u: u.push(_MARK),
    ord("K"): lambda u: u.push(u.count(1)),
    ord("M"): lambda u: u.push(u.count(2)),
    ord("J"): lambda u: u.push(u.integer(4)),
    0x8A: lambda u: u.push(u.integer(u.count(1))),
    ord("G"): lambda u: u.push(u.real()),
    ord("X"): lambda u: u.push(u.text()),
    ord("c"): lambda u: u.name_global(),
    ord("q"): lambda u: u.remember(u.count(1)),
    ord("r"): lambda u: u.remember(u.count(4)),
    ord("h"): lambda u: u.recall(u.count(1)),
    ord("j"): lambda u: u.recall(u.count(4)),
    ord("t"): lambda u: u.push(tuple(u.pop_marked())),
    0x85: lambda u: u.pop_tuple(1),
    0x86: lambda u: u.pop_tuple(2),
    0x87: lambda u: u.pop_tuple(3),
    ord("Q"): lambda u: u.storage(),
    ord("R"): lambda u: u.call(),
    ord("s"): lambda u: u.set_item(),
    ord("u"): lambda u: u.set_items(u.pop_marked()),
    ord("a"): lambda u: u.append([u.pop()]),
    ord("e"): lambda u: u.append(u.pop_marked()),
}
