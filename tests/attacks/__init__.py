"""Broken GGUF files, each a named change to one small valid file, with words its refusal must contain.

``Tiny`` builds the bytes by hand, not with quantkit's writer, so that any part can be made wrong. Names say what
an attacker, a broken download or a broken writer did. ``ATTACKS`` is the table; tests/formats/test_gguf.py opens them
all, scripts/fuzz_gguf.py starts from them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def string(data: bytes, length: int | None = None) -> bytes:
    """A GGUF string; ``length`` lies about it."""
    return u64(len(data) if length is None else length) + data


def kv(key: bytes, value_type: int, value: bytes) -> bytes:
    return string(key) + u32(value_type) + value


def array(item_type: int, count: int, items: bytes) -> bytes:
    return u32(item_type) + u64(count) + items


def tensor(name: bytes, shape: tuple[int, ...], type_id: int, offset: int, n_dims: int | None = None) -> bytes:
    dims = u32(len(shape) if n_dims is None else n_dims) + b"".join(u64(ne) for ne in shape)
    return string(name) + dims + u32(type_id) + u64(offset)


@dataclass
class Tiny:
    """A valid file: one field of each kind, an F32 tensor of 128 bytes and a Q8_0 tensor of 68."""

    magic: bytes = b"GGUF"
    version: bytes = u32(3)
    n_tensors: int | None = None
    n_kv: int | None = None
    fields: list[bytes] = field(
        default_factory=lambda: [
            kv(b"general.architecture", STR, string(b"llama")),
            kv(b"a.bool", BOOL, b"\1"),
            kv(b"a.u8", U8, b"\xff"),
            kv(b"a.i64", I64, struct.pack("<q", -(1 << 63))),
            kv(b"a.f32", F32, struct.pack("<f", 0.5)),
            kv(b"a.tokens", ARR, array(STR, 3, string(b"a") + string(b"") + string(b"\xe2\x96\x81b"))),
            kv(b"a.scores", ARR, array(F32, 2, struct.pack("<2f", -1, 2))),
            kv(b"a.flags", ARR, array(BOOL, 2, b"\0\1")),
        ]
    )
    tensors: list[bytes] = field(
        default_factory=lambda: [tensor(b"a.weight", (32,), 0, 0), tensor(b"b.weight", (32, 2), 8, 128)]
    )
    alignment: int = 32
    data: bytes = bytes(range(128)) + bytes(68)

    def bytes(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_kv = len(self.fields) if self.n_kv is None else self.n_kv
        head = self.magic + self.version + u64(n_tensors) + u64(n_kv) + b"".join(self.fields + self.tensors)
        return head + bytes(-len(head) % self.alignment) + self.data


def header(**parts: bytes | int) -> bytes:
    """The tiny file with another magic, version or count."""
    return Tiny(**parts).bytes()  # type: ignore[arg-type]


def with_field(*fields: bytes) -> bytes:
    """The tiny file with more fields after its own."""
    return Tiny(fields=[*Tiny().fields, *fields]).bytes()


def with_tensor(*tensors: bytes, data: bytes = bytes(4096)) -> bytes:
    """The tiny file with other tensors."""
    return Tiny(tensors=list(tensors), data=data).bytes()


def aligned(value: bytes, value_type: int = U32) -> bytes:
    return with_field(kv(b"general.alignment", value_type, value))


def last_field(value_type: int, value: bytes) -> bytes:
    """A file that ends in one field, so that the value can point beyond the end."""
    return Tiny(fields=[kv(b"k", value_type, value)], tensors=[], data=b"", alignment=1).bytes()


BIG = (1 << 64) - 1
F32_32 = (32,)

#: name -> (bytes, what the message must say).
ATTACKS: dict[str, tuple[bytes, str]] = {
    # not GGUF at all
    "empty file": (b"", "empty"),
    "one byte": (b"G", "not a GGUF file"),
    "magic alone": (b"GGUF", "the version needs 4 bytes"),
    "other magic": (header(magic=b"GGML"), "not a GGUF file: it starts with b'GGML'"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
    "html page": (b"<!DOCTYPE html><html></html>", "HTML page"),
    "zip archive": (b"PK\x03\x04" + bytes(100), "zip archive"),
    "ggjt": (b"tjgg" + bytes(100), "GGJT"),
    "zeros": (bytes(1000), "not a GGUF file"),
    # header
    "version 0": (header(version=u32(0)), "GGUF version 0"),
    "version 1": (header(version=u32(1)), "GGUF version 1"),
    "version 4": (header(version=u32(4)), "GGUF version 4"),
    "big-endian version alone": (header(version=struct.pack(">I", 3)), f"{8 << 56} keys"),
    "big-endian version 4": (header(version=struct.pack(">I", 4)), "GGUF version 4"),
    "tensor count 2^64-1": (header(n_tensors=BIG), f"{BIG} tensors"),
    "tensor count 2^63": (header(n_tensors=1 << 63), f"{1 << 63} tensors"),
    "one tensor too many": (Tiny(n_tensors=3, alignment=1, data=b"").bytes(), "tensor 2"),
    "key count 2^64-1": (header(n_kv=BIG), f"{BIG} keys"),
    "key count 2^32": (header(n_kv=1 << 32), f"{1 << 32} keys"),
    "one key too many": (header(n_kv=9), "the name of tensor 0 is 0 bytes long"),
    "one key too few": (header(n_kv=7), "dimensions"),
    # keys
    "empty key": (with_field(kv(b"", U8, b"\0")), "key 8 is 0 bytes long"),
    "key longer than the file": (with_field(string(b"k", 60000)), "key 8 needs 60000 bytes"),
    "key length 2^64-1": (with_field(string(b"k", BIG)), f"key 8 is {BIG} bytes long"),
    "key of 65536 bytes": (with_field(kv(b"k" * 65536, U8, b"\0")), "key 8 is 65536 bytes long"),
    "key not UTF-8": (with_field(kv(b"k\xff\xfe", U8, b"\0")), "is not UTF-8"),
    "key with a surrogate": (with_field(kv(b"k\xed\xa0\x80", U8, b"\0")), "is not UTF-8"),
    "key with NUL": (with_field(kv(b"k\0x", U8, b"\0")), "NUL"),
    "key twice": (with_field(kv(b"a.u8", U8, b"\1")), "key 'a.u8' occurs twice"),
    # values
    "value type 13": (with_field(kv(b"k", 13, bytes(8))), "'k' has the unknown type 13"),
    "value type 2^32-1": (with_field(kv(b"k", 0xFFFFFFFF, bytes(8))), "unknown type 4294967295"),
    "bool 2": (with_field(kv(b"k", BOOL, b"\2")), "'k' is a boolean of 2"),
    "bool 255 in an array": (with_field(kv(b"k", ARR, array(BOOL, 3, b"\0\1\xff"))), "a boolean of 255"),
    "u64 value cut": (last_field(U64, bytes(7)), "'k' needs 8 bytes, but the file ends after 7"),
    "string longer than the file": (last_field(STR, string(b"abc", 4)), "'k' needs 4 bytes"),
    "string length 2^64-1": (last_field(STR, string(b"abc", BIG)), f"'k' needs {BIG} bytes"),
    "string length cut": (last_field(STR, bytes(7)), "the length of the value of 'k' needs 8 bytes"),
    # arrays
    "array header cut": (last_field(ARR, u32(U8) + bytes(4)), "the count of the value of 'k' needs 8"),
    "array of unknown items": (
        last_field(ARR, array(99, 0, b"")),
        "an item of the value of 'k' has the unknown type 99",
    ),
    "array of arrays": (last_field(ARR, array(ARR, 1, array(U8, 1, b"\0"))), "array of arrays"),
    "array count 2^64-1": (last_field(ARR, array(U8, BIG, bytes(9))), f"has {BIG} items of UINT8"),
    "array size wraps to 8": (last_field(ARR, array(U64, (1 << 61) + 1, bytes(8))), "items of UINT64"),
    "array one item short": (last_field(ARR, array(U16, 3, bytes(5))), "has 3 items of UINT16"),
    "strings beyond the file": (last_field(ARR, array(STR, 2, string(b"") + string(b"x", 2))), "one of 2 strings ends"),
    "first string swallows all": (last_field(ARR, array(STR, 2, string(b"x", 99) + string(b""))), "one of 2 strings"),
    "string in array 2^64-1": (last_field(ARR, array(STR, 2, string(b"", BIG) + string(b""))), "one of 2 strings"),
    "string in array 2^63": (last_field(ARR, array(STR, 2, string(b"", 1 << 63) + string(b""))), "one of 2 strings"),
    "string lengths wrap around": (
        last_field(ARR, array(STR, 3, string(b"", BIG - 7) + string(b"") + string(b""))),
        "one of 3 strings",
    ),
    "last string length cut": (last_field(ARR, array(STR, 1, bytes(7))), "has 1 items of STRING"),
    "string count 2^60": (last_field(ARR, array(STR, 1 << 60, bytes(80))), f"has {1 << 60} items of STRING"),
    # alignment
    "alignment 0": (aligned(u32(0)), "general.alignment is 0"),
    "alignment 48": (aligned(u32(48)), "general.alignment is 48"),
    "alignment 2^31": (aligned(u32(1 << 31)), "general.alignment is 2147483648"),
    "alignment as string": (aligned(string(b"32"), STR), "general.alignment is STRING"),
    "alignment as u64": (aligned(u64(32), U64), "general.alignment is UINT64"),
    "alignment as array": (aligned(array(U32, 1, u32(32)), ARR), "general.alignment is ARRAY of 1 UINT32"),
    "alignment moves the data away": (
        Tiny(fields=[kv(b"general.alignment", U32, u32(4096))], tensors=[tensor(b"t", F32_32, 0, 0)]).bytes(),
        "'t' needs bytes up to 4224",
    ),
    "offset misaligned for 256": (aligned(u32(256)), "its offset 128 is not a multiple of 256"),
    # tensor names
    "empty name": (with_tensor(tensor(b"", F32_32, 0, 0)), "the name of tensor 0 is 0 bytes long"),
    "name longer than the file": (with_tensor(string(b"t", 50000) + bytes(60)), "the name of tensor 0 needs 50000"),
    "name length 2^64-1": (with_tensor(string(b"t", BIG) + bytes(60)), f"tensor 0 is {BIG} bytes long"),
    "name not UTF-8": (with_tensor(tensor(b"\xc3(", F32_32, 0, 0)), "is not UTF-8"),
    "name with NUL": (with_tensor(tensor(b"t\0", F32_32, 0, 0)), "NUL"),
    "name twice": (with_tensor(tensor(b"t", F32_32, 0, 0), tensor(b"t", F32_32, 0, 128)), "tensor 't' occurs twice"),
    # shapes
    "nine dimensions": (with_tensor(tensor(b"t", (32, *[1] * 8), 0, 0)), "'t' has 9 dimensions"),
    "2^32-1 dimensions": (with_tensor(tensor(b"t", F32_32, 0, 0, n_dims=0xFFFFFFFF)), "has 4294967295 dimensions"),
    "dimension 0 of many": (with_tensor(tensor(b"t", (BIG, 0), 0, 0)), "more values than 63 bits"),
    "values overflow to 0": (with_tensor(tensor(b"t", (1 << 32, 1 << 32), 0, 0)), "more values than 63 bits"),
    "values overflow to 32": (with_tensor(tensor(b"t", (32, (1 << 59) + 1), 24, 0)), "more values than 63 bits"),
    "dimension -1": (with_tensor(tensor(b"t", (BIG,), 24, 0)), "more values than 63 bits"),
    "bytes overflow": (with_tensor(tensor(b"t", ((1 << 62) + 8,), 0, 0)), "more bytes than 63 bits"),
    "row does not divide": (with_tensor(tensor(b"t", (33,), 8, 0)), "a row of 33 is not a multiple"),
    "rows do not interleave": (with_tensor(tensor(b"t", (32, 3), 202, 0)), "Q4_0_R8 interleaves 8 rows"),
    # types
    "type removed": (with_tensor(tensor(b"t", F32_32, 4, 0)), "'t': type id 4 (Q4_2) was removed"),
    "type unknown": (with_tensor(tensor(b"t", F32_32, 1000, 0)), "type id 1000 is unknown"),
    "type -1": (with_tensor(tensor(b"t", F32_32, 0xFFFFFFFF, 0)), "type id 4294967295 is unknown"),
    "type Q8_K": (with_tensor(tensor(b"t", (256,), 15, 0)), "type id 15 (Q8_K) has two sizes"),
    # places
    "offset misaligned": (with_tensor(tensor(b"t", F32_32, 0, 16)), "its offset 16 is not a multiple of 32"),
    "offset beyond the file": (with_tensor(tensor(b"t", F32_32, 0, 1 << 40)), "'t' needs bytes up to"),
    "offset 2^64-32": (with_tensor(tensor(b"t", F32_32, 0, BIG - 31)), "'t' needs bytes up to"),
    "tensor larger than the file": (with_tensor(tensor(b"t", (1 << 40,), 0, 0)), "'t' needs bytes up to"),
    "same place twice": (with_tensor(tensor(b"t", F32_32, 0, 0), tensor(b"u", F32_32, 0, 0)), "'t' and 'u' overlap"),
    # u ends at byte 64 of the data, t begins at 32; the message names the first in the file first
    "tensors overlap": (with_tensor(tensor(b"t", F32_32, 0, 32), tensor(b"u", (16,), 0, 0)), "'u' and 't' overlap"),
    "data cut by one byte": (Tiny().bytes()[:-1], "'b.weight' needs bytes up to"),
    "no data": (Tiny(data=b"").bytes(), "'a.weight' needs bytes up to"),
}
