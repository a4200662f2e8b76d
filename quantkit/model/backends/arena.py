"""Places values: one block of memory in which each buffer has its place as long as entries of the tape name it.

Entries come in groups: within one, threads do not wait for each other, so nothing a group reads may be written by
it, and a place is free again only after the group of its last reader. An entry that works element by element may
write where it reads (``in_place``), if it is that buffer's last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.model.ops import Matrix, Op
from quantkit.units import round_up

ALIGNMENT = 128


@dataclass(eq=False)
class Buffer:
    """Memory that entries name in their slots. kept_after: to the end of the run; set_before: from its beginning."""

    name: str
    nbytes: int
    kept_after: bool = False
    set_before: bool = False
    offset: int = -1
    uses: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Within:
    """A place within a buffer."""

    buffer: Buffer
    byte: int


#: What a slot may hold until addresses are known.
Slot = int | float | Buffer | Within


@dataclass(eq=False)
class Entry:
    """A step of a program: an operation with its slots, or a Python function (``call``) between two tapes.

    independent: the next entry need not wait for this one. uses: buffers that a call reads. weights: those the
    operation multiplies by, for reports.
    """

    op: Op | None
    tape_op: Any = None
    slots: dict[str, Slot] = field(default_factory=dict)
    independent: bool = False
    in_place: tuple[Buffer, Buffer] | None = None
    call: Callable[[], None] | None = None
    uses: tuple[Buffer, ...] = ()
    weights: tuple[Matrix, ...] = ()

    def buffers(self) -> list[Buffer]:
        """Return the buffers it names."""
        named = [s.buffer if isinstance(s, Within) else s for s in self.slots.values()]
        return [*(s for s in named if isinstance(s, Buffer)), *self.uses]

    def resolved(self, start: int) -> dict[str, int | float]:
        """Return the slots with addresses, memory beginning at ``start``."""
        slots: dict[str, int | float] = {}
        for name, slot in self.slots.items():
            if isinstance(slot, Within):
                slots[name] = start + slot.buffer.offset + slot.byte
            else:
                slots[name] = start + slot.offset if isinstance(slot, Buffer) else slot
        return slots


def place(entries: Sequence[Entry]) -> int:
    """Give every buffer its offset; return the bytes of the whole."""
    group = _groups(entries)
    for i, entry in enumerate(entries):
        for buffer in entry.buffers():
            buffer.uses.append(i)
    space = _Space()
    for buffer in _distinct(entries):
        if buffer.set_before:
            buffer.offset = space.take(buffer.nbytes)
    live: set[Buffer] = {b for b in _distinct(entries) if b.set_before}
    for i, entry in enumerate(entries):
        for buffer in entry.buffers():
            if buffer.offset >= 0:
                continue
            source = _shared(entry, buffer, i, group)
            if source is not None:
                buffer.offset = source.offset
                live.discard(source)
            else:
                buffer.offset = space.take(buffer.nbytes)
            live.add(buffer)
        if i + 1 == len(entries) or group[i + 1] != group[i]:
            for buffer in [b for b in live if not b.kept_after and b.uses[-1] <= i]:
                space.give(buffer.offset, buffer.nbytes)
                live.discard(buffer)
    return space.end


def _groups(entries: Sequence[Entry]) -> list[int]:
    """Return the number of each entry's group."""
    numbers, number = [], 0
    for entry in entries:
        numbers.append(number)
        number += not entry.independent
    return numbers


def _distinct(entries: Sequence[Entry]) -> list[Buffer]:
    return list(dict.fromkeys(b for entry in entries for b in entry.buffers()))


def _shared(entry: Entry, buffer: Buffer, i: int, group: Sequence[int]) -> Buffer | None:
    """Return the buffer in whose place entry i may write ``buffer``."""
    if entry.in_place is None or entry.in_place[0] is not buffer:
        return None
    source = entry.in_place[1]
    others = [use for use in source.uses if use != i]
    last = source.uses[-1] == i and all(group[use] != group[i] for use in others)
    return source if last and not source.kept_after and source.nbytes == buffer.nbytes else None


class _Space:
    """Free stretches of a block that grows at its end; best fit."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # offset, size; sorted, never touching

    def take(self, nbytes: int) -> int:
        size = round_up(max(1, nbytes), ALIGNMENT)
        fitting = [(length, offset) for offset, length in self._free if length >= size]
        if fitting:
            length, offset = min(fitting)
            self._free.remove((offset, length))
            if length > size:
                self._insert(offset + size, length - size)
            return offset
        grows = bool(self._free) and sum(self._free[-1]) == self.end
        offset = self._free.pop()[0] if grows else self.end
        self.end = offset + size
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        self._insert(offset, round_up(max(1, nbytes), ALIGNMENT))

    def _insert(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (offset, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


class Memory:
    """The block itself; pages that no run touches cost nothing."""

    def __init__(self, nbytes: int) -> None:
        self._bytes: npt.NDArray[np.uint8] = np.zeros(nbytes + ALIGNMENT, np.uint8)
        self._shift = -self._bytes.ctypes.data % ALIGNMENT
        self.start = self._bytes.ctypes.data + self._shift

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return some of its bytes."""
        return self._bytes[self._shift + offset : self._shift + offset + nbytes]
