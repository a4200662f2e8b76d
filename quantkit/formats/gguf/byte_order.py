"""Big-endian files, for machines such as s390x: numbers are reversed where files are read and written.

Everything else sees little-endian bytes. The types are those of gguf_convert_endian.py (gguf-py of llama.cpp b11434),
and plain integers. Blocks of other types, which hold packed words, have no defined form on a big-endian machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf.fields import SIZES, Field, ValueType
from quantkit.types import TensorType

U8 = npt.NDArray[np.uint8]

#: Bytes of the numbers of plain types.
_PLAIN = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I8": 1, "I16": 2, "I32": 4, "I64": 8}
#: Types of blocks that hold bytes and float16 alone (``TensorType.fields``), as gguf_convert_endian.py converts them.
_BLOCKS = ("Q1_0", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "TQ2_0", "MXFP4", "NVFP4")


def check_swap(t: TensorType, subject: str) -> None:
    """Raise TypeNotSupported for a type without a big-endian form; ``subject`` names file and tensor."""
    if t.name not in _PLAIN and t.name not in _BLOCKS:
        raise TypeNotSupported(
            f"{subject} is {t}, which has no big-endian form; types that have one: {', '.join((*_PLAIN, *_BLOCKS))}",
            "QK-E300",
        )


def unit_bytes(t: TensorType) -> int:
    """Return the bytes of a block, whose numbers are reversed together."""
    return _PLAIN.get(t.name, t.block_bytes)


def swap(data: U8, t: TensorType) -> None:
    """Reverse the numbers in whole blocks of type ``t``, in place; ``data``: uint8 [n], contiguous."""
    if t.name in _PLAIN:
        if (width := _PLAIN[t.name]) > 1:
            data.view(f"u{width}").byteswap(inplace=True)
        return
    blocks = data.reshape(-1, t.block_bytes)
    for _, kind, offset in t.fields:
        if kind == "f16":
            blocks[:, [offset, offset + 1]] = blocks[:, [offset + 1, offset]]


def swapped_value(raw: bytes | memoryview, value_type: ValueType, item_type: ValueType | None, *, big: bool) -> bytes:
    """Return the bytes of a metadata value in the other order.

    Args:
        raw: as in a file.
        value_type: its type.
        item_type: that of an array's items.
        big: whether ``raw`` is big-endian, to find the lengths of strings.
    """
    data = np.frombuffer(bytearray(raw), np.uint8)
    begin, count, kind = 0, 1, value_type
    if item_type is not None:
        count = int.from_bytes(data[4:12].tobytes(), "big" if big else "little")
        _swap_numbers(data[:4], 4)
        _swap_numbers(data[4:12], 8)
        begin, kind = 12, item_type
    if kind is not ValueType.STRING:
        _swap_numbers(data[begin:], SIZES[kind])
        return data.tobytes()
    for _ in range(count):
        length = data[begin : begin + 8]
        n = int.from_bytes(length.tobytes(), "big" if big else "little")
        length[:] = length[::-1].copy()
        begin += 8 + n
    return data.tobytes()


def _swap_numbers(data: U8, width: int) -> None:
    numbers = data.reshape(-1, width)
    numbers[:] = numbers[:, ::-1].copy()


def big_endian_field(item: Field) -> bytes:
    """Return a whole entry as in a big-endian file: key, type, value."""
    key = item.key.encode()
    parts: list[Any] = [len(key).to_bytes(8, "big"), key, int(item.type).to_bytes(4, "big")]
    return b"".join((*parts, swapped_value(item.raw, item.type, item.item_type, big=False)))
