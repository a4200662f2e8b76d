"""Headers replaced in place: each header that a killed process leaves is read as the old or the new one, or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from edit_states import Metadata, header_states, read_as_gguf_py
from libllama import Libllama
from quantkit.errors import FormatError
from quantkit.formats.gguf import Field, layout_gguf, open_gguf
from quantkit.formats.gguf.header import Header
from quantkit.formats.gguf.header_journal import Write, _inverse, journal_path, replace_header, settle
from quantkit.formats.gguf.header_writes import PAGE, atomic_writes, writes_without_magic
from quantkit.formats.gguf.reader import read_shard
from quantkit.formats.gguf.rules import EDIT_MAGIC, PADDING_KEY
from quantkit.types import BY_NAME

#: Ids whose bytes are not UTF-8, and texts beyond a page.
FIELDS = [
    Field.of("general.architecture", "x"),
    Field.of("user.ids", list(range(200, 1000))),
    Field.of("general.name", "näme" * 700),
    Field.of("user.n", 7),
    Field.of("user.texts", ["ä", "b" * 3000]),
    Field.of("tokenizer.chat_template", "ß" * 900),
]
DATA = bytes(range(251)) * 4


def header_of(fields: list[Field], room: int = 0, alignment: int = 32) -> Header:
    if alignment != 32:
        fields = [Field.of("general.alignment", alignment), *fields]
    tensors = [(f"t{i}", (32, i + 1), BY_NAME["F32"]) for i in range(3)]
    layout = layout_gguf(fields, tensors)
    begin = layout.header.index(b"t0") - 8
    infos = layout.header[begin : layout.header.index(b"t2") + 2 + 4 + 16 + 4 + 8]
    plain = Header(3, alignment, tuple(fields), infos, len(tensors), len(layout.header))
    assert plain.encode() == layout.header
    return plain.with_fields(fields, room=room) if room else plain


def set_field(key: str, value: object) -> Callable[[list[Field]], list[Field]]:
    """Return a change of fields: a new value in the key's place, or a new key at the end."""

    def change(fields: list[Field]) -> list[Field]:
        new = Field.of(key, value)
        return [new if f.key == key else f for f in fields] + [new] * (key not in {f.key for f in fields})

    return change


def without(key: str) -> Callable[[list[Field]], list[Field]]:
    return lambda fields: [f for f in fields if f.key != key]


def plan_writes(old: Header, new: Header) -> tuple[tuple[Write, ...], bool]:
    writes = atomic_writes(old, new)
    return (writes_without_magic(old.encode(), new.encode()), False) if writes is None else (writes, True)


def write_file(path: Path, header: bytes) -> Path:
    path.write_bytes(header + DATA)
    return path


def text_to_cross(key: str, crossing: bool) -> Callable[[list[Field]], list[Field]]:
    """Return a change of a text by which the padding's head, behind all keys, crosses a page, or does not."""

    def change(fields: list[Field]) -> list[Field]:
        end = header_of(set_field(key, "")(fields)).infos_begin
        return set_field(key, "y" * ((-end - 20 if crossing else -end + 500) % PAGE))(fields)

    return change


# fmt: off
CASES = {
    "a number, no room": (0, set_field("user.n", 8), True),
    "the last text": (4096, set_field("tokenizer.chat_template", "template" * 90), True),
    "the last text, shorter": (4096, set_field("tokenizer.chat_template", "short"), True),
    "the first text": (30000, set_field("general.name", "x" * 4000), True),
    "another key": (30000, set_field("user.new", "x"), True),
    "a key less": (30000, without("general.name"), True),
    "little room, the first text": (1000, set_field("general.name", "x" * 3000), False),
    "little room, another key": (1000, set_field("user.new", "x"), False),
    "no room left": (1000, set_field("tokenizer.chat_template", "x" * 2500), False),
    "old padding on two pages": (30000, set_field("user.new", "x"), False),
    "new padding on two pages": (30000, text_to_cross("user.other", True), False),
}
# fmt: on


def headers_of(case: str) -> tuple[Header, Header]:
    room, change, _ = CASES[case]
    fields = text_to_cross("user.other", case.startswith("old padding"))(FIELDS)
    old = header_of(fields, room)
    new = old.fit(change(fields))
    assert new is not None
    assert len(new.encode()) == len(old.encode())
    return old, new


@pytest.mark.parametrize("case", CASES)
def test_every_state_is_old_or_new_or_refused(tmp_path: Path, case: str) -> None:
    """By gguf-py and by quantkit's own reader, without the journal."""
    old, new = headers_of(case)
    writes, is_atomic = plan_writes(old, new)
    assert is_atomic == CASES[case][2]
    path = tmp_path / "m.gguf"
    before, after = (read_as_gguf_py(write_file(path, header.encode())) for header in (old, new))
    assert before != after
    results = list[Metadata | None]()
    for number, header in header_states(old.encode(), writes):
        results.append(read_as_gguf_py(write_file(path, header)))
        if is_atomic:
            shard = read_shard(path, 0, header_only=True)
            assert {k: f.value for k, f in shard.fields.items() if not k.startswith(PADDING_KEY)} in [
                {f.key: f.value for f in side.fields if f.key != PADDING_KEY} for side in (old, new)
            ]
        elif 0 < number < len(writes):
            with refuses(FormatError, "QK-E101"):
                open_gguf(path)
    assert header == new.encode()
    assert results[0] == before
    if is_atomic:
        first = results.index(after)
        assert all(result == before for result in results[:first])
        assert all(result == after for result in results[first:])
    else:
        refused = [header[:4] == EDIT_MAGIC for _, header in header_states(old.encode(), writes)]
        assert [result is None for result in results] == refused
        assert refused == [False, *[True] * (len(refused) - 2), False]
        assert results[-1] == after


@pytest.mark.parametrize("case", CASES)
def test_every_state_is_undone(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where pages of a write reached the disk in another order."""
    old, new = headers_of(case)
    path = write_file(tmp_path / "m.gguf", old.encode())
    writes, _ = plan_writes(old, new)
    monkeypatch.setattr("quantkit.formats.gguf.header_journal._remove", lambda journal: None)
    replace_header(path, old.encode(), writes)
    monkeypatch.undo()
    assert path.read_bytes() == new.encode() + DATA
    journal = journal_path(path).read_bytes()
    states = [header for _, header in header_states(old.encode(), writes)]
    draw, complete = random.Random(0), bytearray(old.encode())
    for write in writes:
        before = complete[write.offset : write.end]
        complete[write.offset : write.end] = bytes(map(draw.choice, zip(before, write.data, strict=True)))
        states.append(bytes(complete))
        complete[write.offset : write.end] = write.data
    for header in states:
        write_file(path, header)
        journal_path(path).write_bytes(journal)
        settle(path)
        assert path.read_bytes() == old.encode() + DATA
        assert not journal_path(path).exists()


TEXT = st.tuples(st.sampled_from(["", "a", "ä"]), st.integers(0, 5000)).map(lambda pair: pair[0] * pair[1])
KEYS = st.dictionaries(st.sampled_from(["user.a", "user.b", "user.c", "user.d"]), TEXT, max_size=4)


@settings(max_examples=150)
@given(KEYS, KEYS, st.integers(32, 40000), st.sampled_from([8, 32, 64]))
def test_any_headers(keys: dict[str, str], changed: dict[str, str], room: int, alignment: int) -> None:
    """Any edit that fits: every state is the old or the new header, and so is every state of its undoing."""
    fields, new_fields = (
        [Field.of("general.architecture", "x"), *(Field.of(key, text) for key, text in entries.items())]
        for entries in (keys, changed)
    )
    old = header_of(fields, room, alignment)
    new = old.fit([*old.fields[: 1 + (alignment != 32)], *new_fields[1:]])
    if new is None or new == old:
        return
    assert new.size == old.size
    assert 0 <= new.size - new.end < alignment
    writes, is_atomic = plan_writes(old, new)
    if not writes:
        return
    values = [keys_of(header.encode()) for header in (old, new)]
    for _, header in header_states(old.encode(), writes):
        inverse = _inverse(old.encode(), writes, header)
        assert inverse is not None
        for _, state in header_states(header, inverse):
            assert keys_of(state) in values if is_atomic else state[:4] == EDIT_MAGIC or keys_of(state) in values
        assert state == old.encode()
    assert header == new.encode()


def keys_of(header: bytes) -> tuple[dict[str, bytes], int] | None:
    """Return the keys of a header without padding, and where its data begin; None for another magic."""
    if header[:4] != b"GGUF":
        return None
    position, keys = 24, dict[str, bytes]()
    for _ in range(int.from_bytes(header[16:24], "little")):
        nbytes = int.from_bytes(header[position : position + 8], "little")
        key = header[position + 8 : position + 8 + nbytes].decode()
        begin = position = position + 8 + nbytes
        kind = int.from_bytes(header[begin : begin + 4], "little")
        if kind == 8:
            position += 12 + int.from_bytes(header[begin + 4 : begin + 12], "little")
            assert key != PADDING_KEY or not header[begin + 12 : position].strip(b" ")
            header[begin + 12 : position].decode()
        elif kind == 9:
            assert header[begin + 4] == 10
            position += 16 + 8 * int.from_bytes(header[begin + 8 : begin + 16], "little")
        else:
            assert kind == 4
            position += 8
        if not key.startswith(PADDING_KEY):
            assert key not in keys
            keys[key] = header[begin:position]
    return keys, position


@pytest.mark.peer
@pytest.mark.parametrize("runtime", ["llama_bin", "ik_lib"])
@pytest.mark.parametrize("room", [1 << 18, 4096])
def test_a_runtime_loads_every_state_or_refuses_it(
    tiny_moe: Path, tmp_path: Path, room: int, runtime: str, request: pytest.FixtureRequest
) -> None:
    """The file after each write, and after the first page of each."""
    library = Libllama(request.getfixturevalue(runtime), ik=runtime == "ik_lib")
    shard = read_shard(tiny_moe, 0, header_only=True)
    plain = Header.from_shard(shard)
    old = plain.with_fields(plain.fields, room=room)
    fields = [f for f in old.fields if f.key not in (PADDING_KEY, "general.name")]
    new = old.fit([*fields, Field.of("general.name", "Another"), Field.of("general.license", "mit")])
    assert new is not None
    writes, is_atomic = plan_writes(old, new)
    assert is_atomic == (room > 4096)
    nbytes = tiny_moe.stat().st_size - plain.size
    states = dict[int, list[bytes]]()
    for number, header in header_states(old.encode(), writes):
        states.setdefault(number, []).append(header)
    for number, headers in states.items():
        for header in headers[:2]:
            path = tmp_path / "m.gguf"
            path.write_bytes(header)
            with open(path, "r+b") as file:
                file.truncate(len(header) + nbytes)
            is_complete = is_atomic or number in (0, len(writes)) and header[:4] != EDIT_MAGIC
            assert library.load(path, header).loads == is_complete, number
