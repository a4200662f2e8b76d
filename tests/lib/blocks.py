"""Random bytes as rows of any tensor type with finite scales: including edge cases, or only moderate ones."""

from __future__ import annotations

from math import floor, log2
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.types import TensorType

U8 = npt.NDArray[np.uint8]


def random_rows(
    t: TensorType, *shape: int, seed: Any = 0, scale: tuple[float, float] | None = None
) -> npt.NDArray[np.uint8]:
    """Return random bytes as rows of type ``t``, uint8 [..., row_bytes], for values of ``shape`` [..., n].

    All scales are in the range ``scale``; by default they are any finite numbers, including zeros and denormals.
    ``seed``: a seed, or a generator.
    """
    rng, (*outer, n) = np.random.default_rng(seed), shape
    rows = rng.integers(0, 256, (*outer, t.row_bytes(n)), dtype=np.uint8)
    blocks = rows[..., t.row_header :].reshape(-1, t.block_bytes)
    heads = rows[..., : t.row_header].reshape(-1, max(1, t.row_header))
    for of_row, kind, offset in t.fields:
        part = heads if of_row else blocks
        _finite(part, kind, offset, rng) if scale is None else _sensible(part, kind, offset, rng, scale)
    rows[..., : t.row_header] = heads.reshape(*outer, t.row_header)
    rows[..., t.row_header :] = blocks.reshape(*outer, -1)
    return rows


def blocks_of(t: TensorType, rows: U8) -> U8:
    """Return the blocks of rows, uint8 [blocks, block_bytes]."""
    return np.ascontiguousarray(rows[..., t.row_header :]).reshape(-1, t.block_bytes)


def row_scales(t: TensorType, rows: U8) -> npt.NDArray[np.float32]:
    """Return the scale at the beginning of each row, float32 [rows, 1]: ones if there is none."""
    if not t.row_scale:
        return np.ones((len(rows), 1), np.float32)
    dtype = {"f32": np.float32, "f16": np.float16}[t.row_scale]
    return np.ascontiguousarray(rows[:, : np.dtype(dtype).itemsize]).view(dtype).astype(np.float32)


def _sensible(data: U8, kind: str, offset: int, rng: Any, scale: tuple[float, float]) -> None:
    values = rng.uniform(*scale, len(data))
    low, high = floor(log2(scale[0])), floor(log2(scale[1]))
    if kind == "nibbles":  # IQ1_M: the four digits of an f16 are the top bits of four words
        words, halves = data[:, offset : offset + 8].view("<u2"), values.astype(np.float16).view(np.uint16)
        words[:] = (words & 0x0FFF) | ((halves[:, None] >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12)
    elif kind == "e8m0":
        data[:, offset] = rng.integers(128 + low, 129 + high, len(data))
    elif kind == "ue4m3":
        data[:, offset] = rng.integers(max(8, 64 + 8 * low), max(32, 72 + 8 * high), len(data))
    else:
        dtype = {"f16": np.float16, "f32": np.float32, "bf16": None}[kind]
        bits = values.astype(dtype) if dtype else (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        data[:, offset : offset + bits.itemsize] = bits[:, None].view(np.uint8)


def _finite(blocks: U8, kind: str, offset: int, rng: Any) -> None:
    special = rng.random(len(blocks)) < 0.1
    if kind == "nibbles":  # IQ1_M: the top digits of four words
        words = blocks[:, offset : offset + 8].view("<u2")
        words[:, 3] = np.where((words[:, 3] & 0x7000) == 0x7000, words[:, 3] & 0xBFFF, words[:, 3])
    elif kind == "e8m0":  # from 253 on, the largest values overflow
        blocks[blocks[:, offset] > 252, offset] = 252
        blocks[special, offset] = rng.integers(0, 3, special.sum())
    elif kind == "ue4m3":
        blocks[special, offset] = rng.choice([0, 1, 7, 8, 0x7E, 0x7F, 0x80, 0x88, 0xFF], special.sum())
    elif kind == "f32":
        bits = blocks[:, offset : offset + 4].view("<u4")[:, 0]
        bits[...] = np.where((bits & 0x78000000) == 0x78000000, bits & 0xBFFFFFFF, bits)  # also times a level
    else:
        inf = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
        bits = blocks[:, offset : offset + 2].view("<u2")[:, 0]
        bits[special] = rng.choice([0, 0x8000, 1, 0x8001, inf - 1, 0x8000 | (inf - 1)], special.sum())
        bits[...] = np.where((bits & inf) == inf, bits & 0xBFFF, bits)
