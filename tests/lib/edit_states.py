"""Intermediate states of a GGUF header that an edit in place overwrites: after each write and each page of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from quantkit.formats.gguf.header_journal import Write
from quantkit.formats.gguf.header_writes import PAGE
from quantkit.formats.gguf.rules import EDIT_MAGIC, PADDING_KEY

#: Keys with the kinds and the value of each, and tensors with type, shape and offset.
Metadata = tuple[dict[str, tuple[Any, ...]], list[tuple[Any, ...]]]


def header_states(old: bytes, writes: Sequence[Write]) -> Iterator[tuple[int, bytes]]:
    """Yield each header that a process killed between two pages leaves, with the number of complete writes."""
    state = bytearray(old)
    for number, write in enumerate(writes):
        for end in (write.offset, *range((write.offset // PAGE + 1) * PAGE, write.end, PAGE)):
            state[write.offset : end] = write.data[: end - write.offset]
            yield number, bytes(state)
        state[write.offset : write.end] = write.data
    yield len(writes), bytes(state)


def read_as_gguf_py(path: Path) -> Metadata | None:
    """Return the metadata that gguf-py reads, without padding; None if it refuses the magic of an edit.

    Decodes every value. Raises what gguf-py raises for a damaged file.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
    try:
        reader = GGUFReader(path)
    except ValueError:
        if magic == EDIT_MAGIC:
            return None
        raise
    fields = {
        key: (field.types, field.contents())
        for key, field in reader.fields.items()
        if not key.startswith((PADDING_KEY, "GGUF."))
    }
    # A padding of text is text: transformers decodes the values of all keys.
    for key in (key for key in reader.fields if key.startswith(PADDING_KEY)):
        reader.fields[key].contents()
    tensors = [(t.name, t.tensor_type, tuple(t.shape.tolist()), t.data_offset) for t in reader.tensors]
    return fields, tensors
