"""The writes by which one header replaces another of the same size, in an order that is safe for every reader.

A process can be killed between two pages of a write, and the file is then what other programs read. Writes here are of
two kinds: *switches*, of a few bytes within one page, which reach the file as a whole, and *fillings*, of any size, of
bytes that no reader interprets at that moment. Before and after each switch the file is complete.

``atomic_writes`` needs padding that can hold a second copy of all keys from the first that changes on. The infos of
tensors stay where they are:

    old    counts | same keys | old keys | padding: ................... | infos
           the padding is an array: a text would have to be UTF-8                                     (switch)
           the new keys are copied to the end of the padding                                          (filling)
    copy   counts | same keys | padding: old keys, ......... | new keys | infos                       (switch)
           the new keys are written in their own place, which is now inside the padding               (filling)
    new    counts | same keys | new keys | padding: ..........,new keys | infos                       (switch)
           spaces replace the copy                                                                    (filling)
           the padding is a text again                                                                (switch)

``writes_without_magic`` needs no padding: the first switch breaks the magic, so that readers refuse the file, and the
last one restores it.
"""

from __future__ import annotations

import struct

import numpy as np

from quantkit.formats.gguf.fields import Field, ValueType
from quantkit.formats.gguf.header import COUNTS_SIZE, Header
from quantkit.formats.gguf.header_journal import Write
from quantkit.formats.gguf.rules import EDIT_MAGIC, MAGIC, PADDING_KEY

#: Bytes that a killed process, or a disk without power, writes as a whole if they do not cross a multiple of it.
PAGE = 4096
#: Bytes of the padding as an empty array: length, key, type, type of items, their number.
_MIN_ARRAY = 8 + len(PADDING_KEY) + 4 + 4 + 8


def atomic_writes(old: Header, new: Header) -> tuple[Write, ...] | None:
    """Return writes between any two of which, and within each, every reader has the old or the new metadata.

    None if the padding is too small, if it is not the last key of both headers, or if a switch would cross a page (one
    edit in a hundred).
    """
    before, after = old.encode(), new.encode()
    writes = [_difference(before, after)]
    if not _is_switch(writes[0]):
        if old.end != new.end or not (_ends_in_padding(old) and _ends_in_padding(new)):
            return None
        writes = _writes_by_copy(old, new, after)
    return tuple(write for write in writes if write.data) if writes else None


def writes_without_magic(old: bytes, new: bytes) -> tuple[Write, ...]:
    """Return writes during which every reader refuses the file, because of its magic."""
    return Write(0, EDIT_MAGIC), _difference(old, new), Write(0, MAGIC)


def _writes_by_copy(old: Header, new: Header, after: bytes) -> list[Write]:
    """Return the writes of an edit with a copy of the new keys; none if they are not atomic."""
    infos, old_pad, new_pad = old.infos_begin, _last_begin(old), _last_begin(new)
    old_array, new_array = _array_head(infos - old_pad), _array_head(infos - new_pad)
    for begin in _switch_points(old, new):
        copied = after[begin:new_pad]
        copy = infos - len(copied)
        if copy < max(old_pad + len(old_array), new_pad + len(new_array)):
            return []  # the copies of earlier points are even longer
        head = _array_head(copy - begin)
        # The number of keys changes in the same write as the padding's place.
        first = begin if len(old.fields) == len(new.fields) else 0
        complete = bytearray(after)
        complete[new_pad : new_pad + len(new_array)] = new_array
        complete[copy:infos] = copied
        switches = [
            Write(old_pad, old_array),
            Write(first, after[first:begin] + head),
            Write(begin, bytes(complete[begin : begin + len(head)])),
            Write(new_pad, after[new_pad : new_pad + len(new_array)]),
        ]
        fillings = [
            Write(copy, copied),
            Write(begin + len(head), bytes(complete[begin + len(head) : copy])),
            Write(copy, after[copy:infos]),
        ]
        if all(map(_is_switch, switches)):
            return [switches[0], fillings[0], switches[1], fillings[1], switches[2], fillings[2], switches[3]]
    return []


def _switch_points(old: Header, new: Header) -> list[int]:
    """Return the offsets of keys before which both headers are the same, the last one first.

    Only the first key if the number of keys changes: their number is beside it.
    """
    begin = COUNTS_SIZE
    points = [begin]
    if len(old.fields) == len(new.fields):
        for old_field, new_field in zip(old.fields[:-1], new.fields[:-1], strict=True):
            key = new_field.encode()
            if old_field.encode() != key:
                break
            begin += len(key)
            points.append(begin)
    return points[::-1]


def _array_head(nbytes: int) -> bytes:
    """Return the beginning of a key that spans ``nbytes``, at least ``_MIN_ARRAY``: an array of any bytes.

    Items have 8 bytes, which gguf-py reads several times faster than as many single bytes; the key's name is longer by
    the remainder.
    """
    count, remainder = divmod(nbytes - _MIN_ARRAY, 8)
    name = PADDING_KEY.encode() + b"." * remainder
    kinds = ValueType.ARRAY, ValueType.UINT64
    return struct.pack(f"<Q{len(name)}sIIQ", len(name), name, *kinds, count)


def _difference(before: bytes, after: bytes) -> Write:
    """Return the write of all bytes that differ."""
    places = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
    if not len(places):
        return Write(0, b"")
    first, last = int(places[0]), int(places[-1])
    return Write(first, after[first : last + 1])


def _is_switch(write: Write) -> bool:
    return not write.data or write.offset // PAGE == (write.end - 1) // PAGE


def _ends_in_padding(header: Header) -> bool:
    """Return whether the last key is padding that can be an array."""
    last: Field | None = header.fields[-1] if header.fields else None
    is_padding = last is not None and last.key == PADDING_KEY and last.type is ValueType.STRING
    return is_padding and header.infos_begin - _last_begin(header) >= _MIN_ARRAY


def _last_begin(header: Header) -> int:
    """Return the offset of the last key."""
    return header.infos_begin - len(header.fields[-1].encode())
