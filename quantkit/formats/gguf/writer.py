"""Lay out GGUF files: header and offsets are fixed before any data exists."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.byte_order import big_endian_field, check_swap
from quantkit.formats.gguf.fields import Field, checked_alignment
from quantkit.formats.gguf.rules import (
    ALIGNMENT_KEY,
    MAGIC,
    MAX_FIELDS,
    MAX_TENSORS,
    check_key,
    checked_bytes,
    n_dims,
    short,
)
from quantkit.types import TensorType, type_by_id
from quantkit.units import round_up


@dataclass(frozen=True, slots=True)
class Layout:
    """A file before it is written: its whole header, and the place of each tensor.

    Zeros fill the gaps between tensors, and after the last one up to ``nbytes``.
    """

    header: bytes
    offsets: tuple[int, ...]
    nbytes: int


def layout_gguf(
    fields: Iterable[Field],
    tensors: Sequence[tuple[str, tuple[int, ...], TensorType]],
    *,
    version: int = 3,
    alignment: int | None = None,
    all_dims: bool = False,
    pad_header: bool = True,
    big_endian: bool = False,
) -> Layout:
    """Lay out a file as llama.cpp's writer does (b11434 gguf.cpp, gguf_write_out).

    Args:
        fields: the metadata, in order.
        tensors: name, shape (innermost first) and type of each.
        version: 2 or 3.
        all_dims: write all dimensions, as convert_hf_to_gguf.py does; llama.cpp's writer drops trailing ones and writes
            a scalar as [1].
        pad_header: False: a file without tensors ends with its last key.
        big_endian: write numbers of the header in this order; data are then written by ``byte_order.swap``.
        alignment: that of the field general.alignment, or 32 without one; another value is refused.

    Raises:
        FormatError: duplicate keys or names, an invalid name, shape, version or alignment.
        TypeNotSupported: a type cannot hold a tensor of this shape, or has no big-endian form.
    """
    entries: dict[str, Field] = {}
    for item in fields:
        if item.key in entries:
            raise FormatError(f"cannot write the key {short(item.key)} twice", "QK-E107")
        entries[item.key] = item
    if len(entries) > MAX_FIELDS or len(tensors) > MAX_TENSORS:
        counts = f"{len(entries)} keys and {len(tensors)} tensors"
        raise FormatError(f"cannot write {counts}; at most {MAX_FIELDS} and {MAX_TENSORS} are supported", "QK-E102")
    if version not in (2, 3):
        raise FormatError(f"cannot write GGUF version {version}; only 2 and 3", "QK-E102")
    try:
        of_field = checked_alignment(entries.get(ALIGNMENT_KEY))
    except ValueError as e:
        raise FormatError(f"cannot write this file: {e}", "QK-E102") from None
    if alignment not in (None, of_field):
        raise FormatError(
            f"cannot align to {alignment}: a reader would use {of_field}, from {ALIGNMENT_KEY} or the default",
            "QK-E102",
        )
    order = ">" if big_endian else "<"
    if big_endian:
        for name, _, tensor_type in tensors:
            check_swap(tensor_type, f"tensor {short(name)}")
    infos, relative, size = _layout_tensors(tensors, of_field, all_dims, order)
    head = struct.pack(f"{order}4sIQQ", MAGIC, version, len(tensors), len(entries))
    fields_as_bytes = (big_endian_field(e) if big_endian else e.encode() for e in entries.values())
    header = b"".join((head, *fields_as_bytes, infos))
    start = round_up(len(header), of_field) if tensors or pad_header else len(header)
    return Layout(header.ljust(start, b"\0"), tuple(start + r for r in relative), start + size)


def _layout_tensors(
    tensors: Sequence[tuple[str, tuple[int, ...], TensorType]], alignment: int, all_dims: bool, order: str
) -> tuple[bytes, list[int], int]:
    """Return the tensor infos' bytes, the offsets within the data, and the data's size."""
    parts = []
    offsets = []
    size = 0
    names = set()
    for name, shape, tensor_type in tensors:
        data = check_key(name, "tensor name", FormatError)
        if name in names:
            raise FormatError(f"cannot write the tensor {short(name)} twice", "QK-E107")
        names.add(name)
        try:
            nbytes = checked_bytes(type_by_id(tensor_type.id), shape)
        except ValueError as e:
            raise FormatError(f"tensor {short(name)}: {e}", "QK-E102") from None
        except TypeNotSupported as e:
            raise TypeNotSupported(f"tensor {short(name)}: {e.message}", "QK-E303") from None
        n = len(shape) if all_dims else n_dims(shape)
        dims = struct.pack(f"{order}I{n}Q", n, *(*shape, 1)[:n])
        end = struct.pack(f"{order}IQ", tensor_type.id, size)
        parts.append(b"".join((struct.pack(f"{order}Q", len(data)), data, dims, end)))
        offsets.append(size)
        size += round_up(nbytes, alignment)
        if size >= 1 << 63:
            raise FormatError(f"tensor {short(name)}: the file would be larger than 63 bits can count", "QK-E102")
    return b"".join(parts), offsets, size


def write_gguf(
    path: str | os.PathLike[str],
    fields: Iterable[Field],
    tensors: Iterable[tuple[str, tuple[int, ...], TensorType, Any]],
    *,
    version: int = 3,
) -> None:
    """Write a whole file at once; for small files. Each tensor is name, shape, type and its bytes-like data.

    Raises:
        FormatError, TypeNotSupported: as ``layout_gguf``, or the size of the data is not that of the tensor.
    """
    entries = list(tensors)
    layout = layout_gguf(fields, [(name, shape, kind) for name, shape, kind, _ in entries], version=version)
    views = [memoryview(data).cast("B") for _, _, _, data in entries]
    for (name, shape, kind, _), view in zip(entries, views, strict=True):
        if len(view) != kind.tensor_bytes(shape):
            raise FormatError(
                f"tensor {short(name)}: {len(view)} bytes given, {kind.tensor_bytes(shape)} needed", "QK-E106"
            )
    ends = (*layout.offsets, layout.nbytes)[1:]
    with open(path, "wb") as file:
        file.write(layout.header)
        for view, offset, end in zip(views, layout.offsets, ends, strict=True):
            file.write(view)
            file.write(bytes(end - offset - len(view)))
