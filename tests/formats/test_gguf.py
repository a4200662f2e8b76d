"""quantkit.formats.gguf: bytes pinned, round trips, shards, real files, the peers' readers, and every attack."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refuses

from attacks import ARR, ATTACKS, STR, U32, Tiny, array, kv, string, tensor, u32
from quantkit.errors import FormatError, RecipeError, TypeNotSupported
from quantkit.formats.gguf import (
    Field,
    GGUFFile,
    ValueType,
    layout_gguf,
    open_gguf,
    parse_split_path,
    split_fields,
    split_path,
    write_gguf,
)
from quantkit.types import BY_NAME, TYPES, TensorType
from small_models import ODD_SHAPES, write_odd_shapes

V = ValueType
F32 = BY_NAME["F32"]
Q8_0 = BY_NAME["Q8_0"]

Tensor = tuple[str, tuple[int, ...], TensorType, bytes]


# ------------------------------------------------------------------------------------------ pinned bytes

FIELDS = [
    Field.of("general.architecture", "llama"),
    Field.of("a.bool", True),
    Field.of("a.u8", 255, V.UINT8),
    Field.of("a.i64", -(1 << 63)),
    Field.of("a.f32", 0.5),
    Field.of("a.tokens", ["a", "", "▁b"]),
    Field.of("a.scores", [-1.0, 2.0]),
    Field.of("a.flags", [False, True]),
]
TENSORS: list[Tensor] = [("a.weight", (32,), F32, bytes(range(128))), ("b.weight", (32, 2), Q8_0, bytes(68))]


def test_a_whole_file_as_a_literal(tmp_path: Path) -> None:
    write_gguf(tmp_path / "t.gguf", [Field.of("k", 7), Field.of("s", "é")], [("t", (2,), F32, b"01234567")])
    assert (tmp_path / "t.gguf").read_bytes() == (
        b"GGUF\x03\0\0\0"  # magic, version
        b"\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0"  # one tensor, two fields
        b"\x01\0\0\0\0\0\0\0k\x04\0\0\0\x07\0\0\0"  # k: UINT32 7
        b"\x01\0\0\0\0\0\0\0s\x08\0\0\0\x02\0\0\0\0\0\0\0\xc3\xa9"  # s: STRING of two bytes
        b"\x01\0\0\0\0\0\0\0t\x01\0\0\0\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"  # t: [2], F32, offset 0
        b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"  # up to 128
        b"01234567\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"  # data, up to 160
    )


def test_the_writer_equals_a_handmade_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "t.gguf", FIELDS, TENSORS)
    data = Tiny().bytes()
    assert (tmp_path / "t.gguf").read_bytes() == data + bytes(-len(data) % 32)


def test_a_handmade_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    path.write_bytes(Tiny().bytes())
    with open_gguf(path) as file:
        assert (file.paths, file.version, file.alignment) == ((path,), 3, 32)
        assert list(file.fields.values()) == FIELDS
        assert [f.value for f in file.fields.values()] == [
            "llama", True, 255, -(1 << 63), 0.5, ["a", "", "▁b"], [-1.0, 2.0], [False, True],
        ]  # fmt: skip
        assert [(t.name, t.shape, t.type, t.nbytes, t.shard) for t in file.tensors.values()] == [
            ("a.weight", (32,), F32, 128, 0),
            ("b.weight", (32, 2), Q8_0, 68, 0),
        ]
        assert file.data("a.weight").tobytes() == bytes(range(128))
        assert file.get("a.u8") == 255
        assert file.get("nothing") is None
        assert file.get("nothing", 3) == 3
        assert repr(file.fields["a.u8"]) == "Field(key='a.u8', type=<ValueType.UINT8: 0>, item_type=None)"


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "attack.gguf"
    data, expected = ATTACKS[name]
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert expected in message
    assert ", at byte " in message or not data
    assert len(message) < 500


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    data = Tiny().bytes()
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(FormatError):
            open_gguf(path)


def test_every_changed_byte_is_read_or_refused(tmp_path: Path) -> None:
    """No change of one byte may end in anything but a model or one FormatError."""
    path = tmp_path / "flip.gguf"
    data = Tiny().bytes()
    opened = 0
    for i in range(len(data) - len(Tiny().data)):
        for flip in (0x01, 0x80, 0xFF):
            path.write_bytes(data[:i] + bytes([data[i] ^ flip]) + data[i + 1 :])
            try:
                file = open_gguf(path)
            except FormatError:
                continue
            opened += 1
            assert [f.value for f in file.fields.values()]
            assert all(file.data(t).nbytes == t.nbytes for t in file.tensors.values())
    assert opened > 100


def test_a_huge_sparse_file_costs_nothing(tmp_path: Path) -> None:
    """Counts that the file's (apparent) size would allow are still bounded."""
    path = tmp_path / "sparse.gguf"
    for counts, refusal in [
        ((1 << 30, 0), "QK-E102 1073741824"),
        ((0, 1 << 30), "QK-E102 1073741824"),
        ((1000, 0), "QK-E102 0"),
        ((0, 1000), "QK-E102 0"),
    ]:
        with open(path, "wb") as f:
            f.write(b"GGUF" + u32(3) + struct.pack("<QQ", *counts))
            f.truncate(1 << 40)
        with refuses(FormatError, refusal):
            open_gguf(path)
    with open(path, "wb") as f:
        f.write(Tiny(fields=[kv(b"k", ARR, array(STR, 1 << 30, b""))], tensors=[], data=b"").bytes())
        f.truncate(1 << 40)
    with refuses(FormatError, "QK-E102 1073741824"):
        open_gguf(path)
    with open(path, "wb") as f:
        f.write(Tiny(fields=[kv(b"k", ARR, array(U32, 1 << 30, b""))], tensors=[], n_kv=1, data=b"").bytes())
        f.truncate(1 << 40)
    assert open_gguf(path).fields["k"].count == 1 << 30  # four GiB of zeros, mapped and not read


def test_not_a_file(tmp_path: Path) -> None:
    with refuses(FormatError, "QK-E401 missing.gguf"):
        open_gguf(tmp_path / "missing.gguf")
    with refuses(FormatError, "QK-E120 .gguf"):
        open_gguf(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with refuses(FormatError, "QK-E120"):
        open_gguf(tmp_path / "fifo")
    with refuses(FormatError, "QK-E405"):
        open_gguf(str(tmp_path / "nul\0.gguf"))


# ------------------------------------------------------------------------------------------ what is accepted


def opened(path: Path, data: bytes) -> GGUFFile:
    path.write_bytes(data)
    return open_gguf(path)


def test_unusual_valid_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    long_name = b"n" * 200
    backwards = [tensor(b"u", (32,), 0, 512), tensor(long_name, (32,), 0, 0)]  # a gap, the later first, no end padding
    file = opened(path, Tiny(version=u32(2), tensors=backwards, data=bytes(512) + b"\1" * 128).bytes())
    assert file.version == 2
    assert list(file.tensors) == ["u", long_name.decode()]
    assert file.data("u").tobytes() == b"\1" * 128
    assert opened(path, Tiny(tensors=[], fields=[], data=b"", alignment=1).bytes()).tensors == {}


def test_scalars_empty_tensors_and_five_dimensions(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    data = write_odd_shapes(path, "wan")
    file = open_gguf(path)
    peer = {str(t.name): t for t in gguf.GGUFReader(path).tensors}
    for name, raw in data.items():
        info = file.tensors[name]
        assert info.shape == tuple(peer[name].shape.tolist())
        assert info.shape == ODD_SHAPES.get(name, info.shape)
        assert (info.nbytes, info.offset) == (peer[name].n_bytes, peer[name].data_offset)
        assert file.data(name).tobytes() == peer[name].data.tobytes() == raw
    assert file.fingerprint() == open_gguf(path).fingerprint()
    last = Tiny(tensors=[tensor(b"t", (0,), 0, 0)], data=b"").bytes()  # an empty one at the end
    assert opened(tmp_path / "t.gguf", last).data("t").size == 0
    same_place = [tensor(b"t", (32,), 0, 0), tensor(b"u", (0,), 0, 0)]
    assert len(opened(tmp_path / "t.gguf", Tiny(tensors=same_place, data=bytes(128)).bytes()).tensors) == 2


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096, 1 << 20])
def test_alignment(alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    fields = [Field.of("general.alignment", alignment)]
    write_gguf(path, fields, TENSORS)
    with open_gguf(path) as file:
        assert file.alignment == alignment
        assert all(t.offset % alignment == 0 for t in file.tensors.values())
        assert file.data("a.weight").tobytes() == TENSORS[0][3]
    assert path.stat().st_size % alignment == 0
    with refuses(FormatError, "QK-E102", alignment):
        layout_gguf(fields, [], alignment=2)


def test_any_bytes_in_string_values(tmp_path: Path) -> None:
    odd = bytes(range(256))
    fields = [kv(b"s", STR, string(odd)), kv(b"l", ARR, array(STR, 2, string(odd) + string(b"\xff")))]
    file = opened(tmp_path / "t.gguf", Tiny(fields=fields).bytes())
    for item in file.fields.values():
        assert Field.of(item.key, item.value) == item
    assert file.get("l")[1].encode("utf-8", "surrogateescape") == b"\xff"


def test_header_only(tmp_path: Path) -> None:
    path = tmp_path / "head.gguf"
    path.write_bytes(Tiny(data=b"").bytes())
    file = open_gguf(path, header_only=True)
    assert file.tensors["b.weight"].offset == 512
    with refuses(FormatError, "QK-E103 head.gguf"):
        file.data("b.weight")


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_every_type(kind: TensorType, tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    shape = (2 * kind.block, 2 * kind.interleave)
    if not kind.in_files:
        with refuses(TypeNotSupported, "QK-E303 t 15"):
            layout_gguf([], [("t", shape, kind)])
        return
    data = np.random.default_rng(kind.id).bytes(kind.tensor_bytes(shape))
    write_gguf(path, [], [("t", shape, kind, data), ("u", (1,), F32, b"next")])
    with open_gguf(path) as file:
        assert file.tensors["t"].type is kind
        assert file.data("t").tobytes() == data
        assert file.data("u").tobytes() == b"next"


def test_views_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    write_gguf(path, FIELDS, TENSORS)
    with open_gguf(path) as file:
        view, fields = file.data(file.tensors["a.weight"]), file.fields
    path.unlink()
    del file
    gc.collect()
    assert view.tobytes() == TENSORS[0][3]
    assert fields["a.tokens"].value == ["a", "", "▁b"]
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_data_of_a_closed_or_shrunk_file(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    write_gguf(path, [], TENSORS)
    file = open_gguf(path)
    with pytest.raises(KeyError):
        file.data("nothing")
    path.write_bytes(path.read_bytes()[:200])
    with refuses(FormatError, "QK-E109 t.gguf 200 352"):
        file.data("b.weight")
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.data("a.weight")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_forget_takes_pages_out_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    layout = layout_gguf([], [("small", (8,), F32), ("big", (1 << 23,), F32)])
    with open(path, "wb") as f:
        f.write(layout.header)
        f.truncate(layout.nbytes)
        f.seek(-1, os.SEEK_END)
        f.write(b"\7")
    with open_gguf(path) as file:
        view = file.data("big")
        before = resident_file_pages()
        assert view.sum() == 7
        touched = resident_file_pages()
        file.forget("big")
        assert touched - before > 20 << 10
        assert resident_file_pages() < before + (4 << 10)
        assert view[-1] == 7
        file.forget("small")
    file.forget("big")  # closed: nothing to do


def resident_file_pages() -> int:
    """Return the KiB of mapped files in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))


def test_a_big_vocabulary_is_decoded_lazily(tmp_path: Path) -> None:
    tokens = [f"▁token{i}" for i in range(250_000)]
    write_gguf(tmp_path / "t.gguf", [Field.of("tokens", tokens), Field.of("ids", list(range(250_000))), *FIELDS], [])
    file = open_gguf(tmp_path / "t.gguf")
    assert "value" not in file.fields["tokens"].__dict__
    assert file.get("tokens") == tokens
    assert file.get("tokens") is file.get("tokens")
    assert file.fields["ids"].array[-1] == 249_999
    assert file.get("a.f32") == 0.5


# ------------------------------------------------------------------------------------------ fields


@pytest.mark.parametrize(
    ("value", "kind", "raw"),
    [
        (True, V.BOOL, b"\1"),
        (np.bool_(False), V.BOOL, b"\0"),
        (0, V.UINT32, bytes(4)),
        (2**32 - 1, V.UINT32, b"\xff" * 4),
        (-1, V.INT32, b"\xff" * 4),
        (2**32, V.UINT64, b"\0\0\0\0\1\0\0\0"),
        (2**64 - 1, V.UINT64, b"\xff" * 8),
        (-(2**31) - 1, V.INT64, b"\xff\xff\xff\x7f\xff\xff\xff\xff"),
        (1.0, V.FLOAT32, b"\0\0\x80?"),
        (math.inf, V.FLOAT32, b"\0\0\x80\x7f"),
        (np.int8(-2), V.INT8, b"\xfe"),
        (np.float64(1), V.FLOAT64, b"\0\0\0\0\0\0\xf0?"),
        ("", V.STRING, bytes(8)),
    ],
)
def test_inferred_scalars(value: Any, kind: ValueType, raw: bytes) -> None:
    field = Field.of("k", value)
    assert (field.type, field.item_type, field.raw, field.count) == (kind, None, raw, 1)
    assert field.value == value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([True, False], V.BOOL),
        ((1, 2), V.UINT32),
        ([1, -1], V.INT32),
        ([0, 2**32], V.UINT64),
        ([-1, 2**32], V.INT64),
        ([1, 2.5], V.FLOAT32),
        (["a"], V.STRING),
        (np.array([1, 2], np.uint8), V.UINT8),
        (np.array([1, 2], np.int64), V.INT64),
        (np.array([], np.float64), V.FLOAT64),
        (np.array([1, 2], np.float16), V.FLOAT32),
    ],
)
def test_inferred_arrays(value: Any, kind: ValueType) -> None:
    field = Field.of("k", value)
    assert (field.type, field.item_type, field.count) == (V.ARRAY, kind, len(value))
    assert field.value == list(value)


@pytest.mark.parametrize(
    ("key", "value", "kwargs", "refusal"),
    [
        ("k", 256, {"type": V.UINT8}, "QK-E203 k UINT8"),
        ("k", -1, {"type": V.UINT64}, "QK-E203 k"),
        ("k", 1.5, {"type": V.INT32}, "QK-E203 k"),
        ("k", "1", {"type": V.INT32}, "QK-E203 k"),
        ("k", 1, {"type": V.STRING}, "QK-E203 k 1 STRING"),
        ("k", 1, {"type": V.BOOL}, "QK-E203 BOOL"),
        ("k", True, {"type": V.UINT8}, "QK-E203 UINT8"),
        ("k", 1e39, {"type": V.FLOAT32}, "QK-E203 FLOAT32"),
        ("k", 1e39, {}, "QK-E203 FLOAT32"),
        ("k", 2**64, {}, "QK-E203 64"),
        ("k", [-1, 2**64 - 1], {}, "QK-E203 64"),
        ("k", None, {}, "QK-E203 GGUF"),
        ("k", b"bytes", {}, "QK-E203 GGUF"),
        ("k", {"a": 1}, {}, "QK-E203 GGUF"),
        ("k", [1, "a"], {}, "QK-E203 GGUF"),
        ("k", [1, True], {}, "QK-E203 GGUF"),
        ("k", [[1]], {}, "QK-E203 GGUF"),
        ("k", [[1]], {"item_type": V.ARRAY}, "QK-E203 k"),
        ("k", [], {}, "QK-E203 item_type"),
        ("k", [300], {"item_type": V.UINT8}, "QK-E203 UINT8"),
        ("k", [1], {"type": V.UINT8}, "QK-E203 UINT8"),
        ("k", 1, {"type": V.ARRAY}, "QK-E203 ARRAY"),
        ("k", 1, {"item_type": V.UINT8}, "QK-E203 k 1"),
        ("k", np.zeros((2, 2)), {}, "QK-E203 2"),
        ("k", "\ud800", {}, "QK-E203"),
        ("", 1, {}, "QK-E203 1 65535"),
        ("k\0", 1, {}, "QK-E203 NUL"),
        ("k" * 65536, 1, {}, "QK-E203 1 65535"),
        ("\udcff", 1, {}, "QK-E203"),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: Any, kwargs: dict[str, Any], refusal: str) -> None:
    with refuses(RecipeError, refusal):
        Field.of(key, value, **kwargs)


def test_array_is_for_numbers() -> None:
    assert Field.of("k", [True, False]).array.tolist() == [True, False]
    for field in (Field.of("k", 1), Field.of("k", ["a"])):
        with pytest.raises(TypeError, match="not an array of numbers"):
            _ = field.array


# ------------------------------------------------------------------------------------------ round trips

KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
ARRAYS = st.one_of(
    st.lists(st.booleans(), min_size=1),
    st.lists(st.integers(0, 2**64 - 1), min_size=1),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1),
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1),
)
METADATA = st.dictionaries(KEYS.filter(lambda k: k != "general.alignment"), SCALARS | ARRAYS, max_size=8)
FILE_TYPES = [t for t in TYPES if t.in_files]


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    """Draw small tensors of any types, with any bytes in them."""
    items = []
    for name in draw(st.lists(KEYS, max_size=4, unique=True)):
        kind = draw(st.sampled_from(FILE_TYPES))
        blocks, outer = draw(st.integers(1, 3)), draw(st.lists(st.integers(1, 3), max_size=2))
        shape = (kind.block * blocks, kind.interleave * draw(st.integers(1, 2)), *outer)
        data = np.random.default_rng(blocks).bytes(kind.tensor_bytes(shape))
        items.append((name, shape, kind, data))
    return items


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(METADATA, tensors(), st.sampled_from([None, 1, 2, 16, 32, 128]), st.sampled_from([2, 3]))
def test_round_trip(
    tmp_path: Path, metadata: dict[str, Any], given_tensors: list[Tensor], alignment: int | None, version: int
) -> None:
    path = tmp_path / "t.gguf"
    fields = [Field.of(k, v) for k, v in metadata.items()]
    fields += [Field.of("general.alignment", alignment)] if alignment else []
    write_gguf(path, fields, given_tensors, version=version)
    with open_gguf(path) as file:
        assert (file.version, file.alignment) == (version, alignment or 32)
        assert list(file.fields.values()) == fields
        assert {k: f.value for k, f in file.fields.items() if k in metadata} == metadata
        assert [(t.name, t.type) for t in file.tensors.values()] == [(n, t) for n, _, t, _ in given_tensors]
        for name, shape, _, data in given_tensors:
            read = file.tensors[name].shape
            assert (*read, 1, 1, 1)[:4] == (*shape, 1, 1, 1)[:4]
            assert len(read) == 1 or read[-1] > 1
            assert file.data(name).tobytes() == data
        actual = [(t.name, t.shape, t.type) for t in file.tensors.values()]
        layout = layout_gguf(file.fields.values(), actual, version=file.version, alignment=file.alignment)
    raw = path.read_bytes()
    assert layout.header == raw[: len(layout.header)]
    assert layout.offsets == tuple(t.offset for t in file.tensors.values())
    assert layout.nbytes == len(raw)


# ------------------------------------------------------------------------------------------ refusals of the writer


@pytest.mark.parametrize(
    ("fields", "given_tensors", "kwargs", "refusal"),
    [
        ([Field.of("k", 1), Field.of("k", 2)], [], {}, "QK-E107 k"),
        ([FIELDS[0], FIELDS[0]], [], {}, "QK-E107 general.architecture"),
        ((Field.of(f"k{i}", 1) for i in range(65537)), [], {}, "QK-E102 65537"),
        ([], [("t", (1,), F32)] * 262145, {}, "QK-E102 0 262145"),
        ([], [("t", (1,), F32), ("t", (2,), F32)], {}, "QK-E107 t"),
        ([], [("", (1,), F32)], {}, "QK-E107 1 65535"),
        ([], [("t", (1,) * 9, F32)], {}, "QK-E102 t 9"),
        ([], [("t", (1, -1), F32)], {}, "QK-E102 t 0"),
        ([], [("t", (1 << 40, 1 << 40), F32)], {}, "QK-E102 t 63"),
        ([], [("t", (1 << 60,), F32), ("u", (1 << 60,), F32)], {}, "QK-E102 u"),
        ([], [], {"version": 1}, "QK-E102 GGUF 1"),
        ([], [], {"alignment": 64}, "QK-E102 64"),
        ([], [], {"alignment": 0}, "QK-E102 0"),
        ([Field.of("general.alignment", 48)], [], {}, "QK-E102 general.alignment 48"),
        ([Field.of("general.alignment", 32, V.UINT64)], [], {}, "QK-E102 UINT32"),
    ],
)
def test_layout_refuses(fields: Any, given_tensors: Any, kwargs: dict[str, Any], refusal: str) -> None:
    with refuses(FormatError, refusal):
        layout_gguf(fields, given_tensors, **kwargs)


def test_layout_refuses_rows_of_partial_blocks() -> None:
    with refuses(TypeNotSupported, "QK-E303 t Q8_0 32"):
        layout_gguf([], [("t", (33,), Q8_0)])


def test_write_refuses_data_of_another_size(tmp_path: Path) -> None:
    with refuses(FormatError, "QK-E106 t 7 8"):
        write_gguf(tmp_path / "t.gguf", [], [("t", (2,), F32, bytes(7))])
    assert not (tmp_path / "t.gguf").exists()


# ------------------------------------------------------------------------------------------ shards


def write_shards(prefix: Path, count: int = 3, **overrides: Any) -> list[Path]:
    """Write one tensor per shard; ``overrides`` are split.* values of the last shard."""
    paths = [split_path(prefix, no, count) for no in range(count)]
    for no, path in enumerate(paths):
        fields = [*(FIELDS if no == 0 else []), *split_fields(no, count, count)]
        if no == count - 1:
            fields = [Field.of(f.key, overrides.get(f.key.replace(".", "_"), f.value)) for f in fields]
        fields = [f for f in fields if not (isinstance(f.value, str) and f.value == "none")]
        name = overrides.get("name", f"t{no}") if no == count - 1 else f"t{no}"
        write_gguf(path, fields, [(name, (8,), F32, bytes([no % 256] * 32))])
    return paths


def test_split_names() -> None:
    assert str(split_path("dir/m", 1, 3)) == "dir/m-00002-of-00003.gguf"
    assert parse_split_path("dir/m-00002-of-00003.gguf") == ("dir/m", 1, 3)
    assert parse_split_path("m-2-of-3.gguf") is None
    assert [(f.key, f.type, f.value) for f in split_fields(1, 3, 9)] == [
        ("split.no", V.UINT16, 1),
        ("split.count", V.UINT16, 3),
        ("split.tensors.count", V.INT32, 9),
    ]


def test_any_shard_opens_the_model(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "m")
    for path in paths:
        with open_gguf(path) as file:
            assert file.paths == tuple(paths)
            assert file.get("general.architecture") == "llama"
            assert file.get("split.no") == 0
            assert [(t.name, t.shard) for t in file.tensors.values()] == [("t0", 0), ("t1", 1), ("t2", 2)]
            assert [int(file.data(n)[0]) for n in file.tensors] == [0, 1, 2]


def test_missing_shards_are_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "m")
    paths[1].unlink()
    with refuses(FormatError, "QK-E104 1 3 m-00002-of-00003.gguf"):
        open_gguf(paths[0])
    with refuses(FormatError, "QK-E401 m-00002-of-00003.gguf"):
        open_gguf(paths[1])


@pytest.mark.parametrize(
    ("overrides", "refusal"),
    [
        ({"split_no": 1}, "QK-E104 m-00003-of-00003.gguf 2 3"),
        ({"split_count": 4}, "QK-E104 3 4"),
        ({"split_no": "none"}, "QK-E104 split.no"),
        ({"split_no": True}, "QK-E123 split.no"),
        ({"split_no": -1}, "QK-E123 split.no -1"),
        ({"split_no": [2]}, "QK-E123 split.no [2]"),
        ({"split_tensors_count": 4}, "QK-E104 split.tensors.count 4 3"),
        ({"name": "t0"}, "QK-E107 t0 m-00001-of-00003.gguf"),
    ],
)
def test_contradictory_shards_are_refused(overrides: dict[str, Any], refusal: str, tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "m", **overrides)
    with refuses(FormatError, refusal):
        open_gguf(paths[0])


def test_a_renamed_shard(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "m")
    with refuses(FormatError, "QK-E104 2 3 PREFIX-00002-of-00003.gguf"):
        open_gguf(paths[1].rename(tmp_path / "renamed.gguf"))


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "m")
    paths[2].write_bytes(paths[2].read_bytes()[:100])
    with refuses(FormatError, "QK-E103 m-00003-of-00003.gguf"):
        open_gguf(paths[0])


def read_first_bytes(file: GGUFFile, count: int, first_bytes: list[int]) -> None:
    for name in list(file.tensors)[:count]:
        first_bytes.append(int(file.data(name)[0]))


@pytest.mark.skipif(sys.platform != "linux", reason="counts /proc/self/fd")
def test_hundreds_of_shards_need_few_descriptors(tmp_path: Path) -> None:
    write_shards(tmp_path / "m", 300)
    before = len(os.listdir("/proc/self/fd"))
    with open_gguf(split_path(tmp_path / "m", 7, 300)) as file:
        first_bytes: list[int] = []
        readers = [threading.Thread(target=read_first_bytes, args=(file, 256, first_bytes)) for _ in range(2)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert sorted(first_bytes) == sorted(list(range(256)) * 2)
        assert len(os.listdir("/proc/self/fd")) - before <= 200
    del file
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


# ------------------------------------------------------------------------------------------ real files and peers


def assert_laid_out_again(path: Path) -> None:
    """The layout of a file's content must give its header and offsets, bit for bit."""
    with open_gguf(path) as file:
        given_tensors = [(t.name, t.shape, t.type) for t in file.tensors.values()]
        layout = layout_gguf(file.fields.values(), given_tensors, version=file.version)
        assert layout.offsets == tuple(t.offset for t in file.tensors.values())
    with open(path, "rb") as f:
        assert f.read(len(layout.header)) == layout.header
        assert os.fstat(f.fileno()).st_size == layout.nbytes
    with open_gguf(path) as file:
        remade = [Field.of(f.key, f.value, f.type, f.item_type) for f in file.fields.values()]
        assert remade == list(file.fields.values())


@pytest.mark.parametrize("name", ["tiny-moe-bf16.gguf", "tiny-moe-imatrix.gguf"])
def test_a_real_file_keeps_its_layout(name: str, data: Path) -> None:
    assert_laid_out_again(data / name)


@pytest.mark.peer
def test_smollm2_keeps_its_layout(smollm2: Path) -> None:
    assert_laid_out_again(smollm2)


def test_equal_to_pypi_gguf(tiny_moe: Path) -> None:
    """Every field and tensor of a real file, as PyPI gguf reads them."""
    reader = gguf.GGUFReader(tiny_moe)
    with open_gguf(tiny_moe) as file:
        expected = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        assert {k: f.value for k, f in file.fields.items()} == expected
        assert len(file.tensors) == len(reader.tensors)
        for peer, tensor in zip(reader.tensors, file.tensors.values(), strict=True):
            assert (tensor.name, tensor.type.id, tensor.nbytes, tensor.offset) == (
                peer.name, int(peer.tensor_type), peer.n_bytes, peer.data_offset,
            )  # fmt: skip
            assert tensor.shape == tuple(int(ne) for ne in peer.shape)
            assert np.array_equal(file.data(tensor), peer.data.reshape(-1).view(np.uint8))


def test_pypi_gguf_reads_the_written_file(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    write_gguf(path, FIELDS, TENSORS)
    reader = gguf.GGUFReader(path)
    assert {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")} == {
        f.key: f.value for f in FIELDS
    }
    assert [t.data.tobytes() for t in reader.tensors] == [t[3] for t in TENSORS]


@pytest.fixture(scope="session")
def ggml(llama_bin: Path) -> ctypes.CDLL:
    """llama.cpp's own reader and writer of GGUF."""
    lib = ctypes.CDLL(str(llama_bin / "libggml-base.so"))
    lib.gguf_init_from_file.restype = ctypes.c_void_p
    lib.gguf_write_to_file.restype = ctypes.c_bool
    lib.gguf_write_to_file.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_bool]
    lib.gguf_free.argtypes = [ctypes.c_void_p]
    return lib


class InitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


MAINLINE = [t for t in FILE_TYPES if t.is_in("mainline") and t.family != "activation"]
VALUES: dict[ValueType, list[Any]] = {
    V.BOOL: [True, False],
    V.STRING: ["", "a", "▁b\n"],
    V.FLOAT32: [0.5, -math.inf],
    V.FLOAT64: [1e300],
}


@pytest.mark.peer
@pytest.mark.parametrize("alignment", [None, 16, 64, 4096])
def test_header_equals_llama_cpp_writers(alignment: int | None, ggml: ctypes.CDLL, tmp_path: Path) -> None:
    """Our header, read and written again by gguf.cpp, comes back unchanged: all value types, types, ranks."""
    scalars = [t for t in V if t is not V.ARRAY]
    fields = [Field.of(f"s.{t.name}", VALUES.get(t, [100])[-1], t) for t in scalars]
    fields += [Field.of(f"a.{t.name}", VALUES.get(t, [1, 2, 3]), None, t) for t in scalars]
    fields += [Field.of(f"e.{t.name}", [], None, t) for t in scalars]
    fields += [Field.of("general.alignment", alignment)] if alignment else []
    shapes = [(1,), (3, 1), (1, 1, 1, 1), (2, 1, 3), (1, 5, 1, 1), (2, 3, 4, 5)]
    given_tensors = [(f"blk.{i}.{t.name}", (t.block * s[0], *s[1:]), t) for t in MAINLINE for i, s in enumerate(shapes)]
    layout = layout_gguf(fields, given_tensors)
    source, copy = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    source.write_bytes(layout.header.ljust(layout.nbytes, b"\0"))
    context = ggml.gguf_init_from_file(os.fsencode(source), InitParams(True, None))
    assert context, "llama.cpp refuses our file"
    assert ggml.gguf_write_to_file(context, os.fsencode(copy), True)
    ggml.gguf_free(context)
    assert copy.read_bytes() == layout.header


@pytest.mark.peer
def test_llama_quantize_output_keeps_its_layout(llama_bin: Path, tiny_moe: Path, tmp_path: Path) -> None:
    out = tmp_path / "q.gguf"
    run(llama_bin, "llama-quantize", tiny_moe, out, "Q4_0", "1")
    assert_laid_out_again(out)


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["Q8_KV", "Q4_K_R4"])
def test_ik_quantize_output_keeps_its_layout(kind: str, ik_bin: Path, tiny_moe: Path, tmp_path: Path) -> None:
    """Row headers and interleaved rows: ik's writer places its tensors where our sizes say."""
    out = tmp_path / "q.gguf"
    libs = [ik_bin.parents[1] / "ik_llama_cpp_python.libs", ik_bin.parent / "lib"]
    run(ik_bin, "llama-quantize", "--pure", tiny_moe, out, kind, "1", libraries=libs)
    with open_gguf(out) as file:
        assert BY_NAME[kind] in {t.type for t in file.tensors.values()}
    assert_laid_out_again(out)


@pytest.mark.peer
def test_shards_of_llama_gguf_split(llama_bin: Path, tiny_moe: Path, tmp_path: Path) -> None:
    """llama-gguf-split's shards open as one model, and it merges quantkit's shards."""
    run(llama_bin, "llama-gguf-split", "--split", "--split-max-tensors", "20", tiny_moe, tmp_path / "theirs")
    with open_gguf(tiny_moe) as full, open_gguf(split_path(tmp_path / "theirs", 1, 3)) as parts:
        assert list(parts.tensors) == list(full.tensors)
        assert all(np.array_equal(parts.data(n), full.data(n)) for n in full.tensors)
        for i, path in enumerate(parts.paths):
            assert_same_shard(path, i, parts, tmp_path / "ours")
    run(llama_bin, "llama-gguf-split", "--merge", split_path(tmp_path / "ours", 0, 3), tmp_path / "merged.gguf")
    with open_gguf(tiny_moe) as full, open_gguf(tmp_path / "merged.gguf") as merged:
        assert all(np.array_equal(merged.data(n), full.data(n)) for n in full.tensors)


def assert_same_shard(path: Path, no: int, model: GGUFFile, prefix: Path) -> None:
    """Write shard ``no`` ourselves; it must have the bytes of theirs."""
    number, count, total = split_fields(no, len(model.paths), len(model.tensors))
    # gguf-split sets the count last; the first shard's fields are copied as they are
    fields = [number, total, count] if no else list(model.fields.values())
    actual = [(t.name, t.shape, t.type, model.data(t)) for t in model.tensors.values() if t.shard == no]
    out = split_path(prefix, no, len(model.paths))
    write_gguf(out, fields, actual)
    assert out.read_bytes() == path.read_bytes()


def run(folder: Path, program: str, *args: object, libraries: Sequence[Path] = ()) -> None:
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, libraries))} if libraries else None
    command = [str(folder / program), *map(str, args)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert process.returncode == 0, process.stderr[-2000:]


# ------------------------------------------------------------------------------------------ the fuzz script


def test_fuzz_script(tmp_path: Path) -> None:
    """Two thousand mutated headers: neither crash nor hang nor big allocation (10^6 by hand)."""
    script = Path(__file__).parents[2] / "scripts" / "fuzz_gguf.py"
    process = subprocess.run(
        [sys.executable, str(script), "--mutations", "2000", "--seed", "7"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "2000 mutated headers" in process.stdout
    assert "0 failures" in process.stdout
