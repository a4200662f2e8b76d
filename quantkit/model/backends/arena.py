"""Memory planning: one block of memory in which each buffer has an offset as long as entries of the tape use it.

Entries form groups, within which threads do not wait for each other, so a group must not write what it reads, and a
buffer is freed only after the group of its last reader. An elementwise entry may write where it reads (``in_place``),
if it is that buffer's last reader.
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
    """Memory that entries use. live_at_start: set before the run; live_at_end: read after it."""

    name: str
    nbytes: int
    live_at_end: bool = False
    live_at_start: bool = False
    offset: int = -1
    uses: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class BufferOffset:
    """An address within a buffer."""

    buffer: Buffer
    byte: int


#: The content of a slot before addresses are known.
Slot = int | float | Buffer | BufferOffset


@dataclass(eq=False)
class Entry:
    """A step of a program: an operation with its slots, or a Python function (``call``) between two tapes.

    independent: the next entry does not wait for this one. uses: buffers that a call reads. weights: those that the
    operation multiplies by, for profiles.
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
        """Return the buffers that it uses."""
        targets = [s.buffer if isinstance(s, BufferOffset) else s for s in self.slots.values()]
        return [*(s for s in targets if isinstance(s, Buffer)), *self.uses]

    def resolve(self, start: int) -> dict[str, int | float]:
        """Return the slots with addresses in memory at ``start``."""
        slots: dict[str, int | float] = {}
        for name, slot in self.slots.items():
            if isinstance(slot, BufferOffset):
                slots[name] = start + slot.buffer.offset + slot.byte
            else:
                slots[name] = start + slot.offset if isinstance(slot, Buffer) else slot
        return slots


def place(entries: Sequence[Entry]) -> int:
    """Set the offset of every buffer; return the size of the block in bytes."""
    group = _groups(entries)
    for i, entry in enumerate(entries):
        for buffer in entry.buffers():
            buffer.uses.append(i)
    space = _Space()
    for buffer in _all_buffers(entries):
        if buffer.live_at_start:
            buffer.offset = space.allocate(buffer.nbytes)
    live: set[Buffer] = {b for b in _all_buffers(entries) if b.live_at_start}
    for i, entry in enumerate(entries):
        for buffer in entry.buffers():
            if buffer.offset >= 0:
                continue
            source = _reuse(entry, buffer, i, group)
            if source is not None:
                buffer.offset = source.offset
                live.discard(source)
            else:
                buffer.offset = space.allocate(buffer.nbytes)
            live.add(buffer)
        if i + 1 == len(entries) or group[i + 1] != group[i]:
            for buffer in [b for b in live if not b.live_at_end and b.uses[-1] <= i]:
                space.free(buffer.offset, buffer.nbytes)
                live.discard(buffer)
    return space.end


def _groups(entries: Sequence[Entry]) -> list[int]:
    """Return each entry's group."""
    numbers, number = [], 0
    for entry in entries:
        numbers.append(number)
        number += not entry.independent
    return numbers


def _all_buffers(entries: Sequence[Entry]) -> list[Buffer]:
    return list(dict.fromkeys(b for entry in entries for b in entry.buffers()))


def _reuse(entry: Entry, buffer: Buffer, i: int, group: Sequence[int]) -> Buffer | None:
    """Return the buffer whose memory entry i may reuse for ``buffer``, or None."""
    if entry.in_place is None or entry.in_place[0] is not buffer:
        return None
    source = entry.in_place[1]
    other_uses = [use for use in source.uses if use != i]
    last = source.uses[-1] == i and all(group[use] != group[i] for use in other_uses)
    return source if last and not source.live_at_end and source.nbytes == buffer.nbytes else None


class _Space:
    """Best-fit allocator of a block that grows at its end."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # offset, size; sorted, never adjacent

    def allocate(self, nbytes: int) -> int:
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

    def free(self, offset: int, nbytes: int) -> None:
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
    """The block itself; pages that no run touches take no memory."""

    def __init__(self, nbytes: int) -> None:
        self._bytes: npt.NDArray[np.uint8] = np.zeros(nbytes + ALIGNMENT, np.uint8)
        self._shift = -self._bytes.ctypes.data % ALIGNMENT
        self.start = self._bytes.ctypes.data + self._shift

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a range of its bytes."""
        return self._bytes[self._shift + offset : self._shift + offset + nbytes]
