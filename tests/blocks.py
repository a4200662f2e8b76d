"""Random bytes as blocks of any tensor type, their scales finite, awkward ones among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.types import TensorType


def random_blocks(t: TensorType, count: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return random bytes as blocks of type ``t`` whose scales are finite, zeros and denormals among them."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, t.block_bytes), dtype=np.uint8)
    for kind, at in (field.split("@") for field in t.scales.split()):
        _finite(blocks, kind, int(at), rng)
    return blocks


def _finite(blocks: npt.NDArray[np.uint8], kind: str, at: int, rng: Any) -> None:
    special = rng.random(len(blocks)) < 0.1
    if kind == "nibbles":  # IQ1_M: the top digits of four words
        words = blocks[:, at : at + 8].view("<u2")
        words[:, 3] = np.where((words[:, 3] & 0x7000) == 0x7000, words[:, 3] & 0xBFFF, words[:, 3])
    elif kind == "e8m0":  # from 253 on, the largest values overflow
        blocks[blocks[:, at] > 252, at] = 252
        blocks[special, at] = rng.integers(0, 3, special.sum())
    elif kind == "ue4m3":
        blocks[special, at] = rng.choice([0, 1, 7, 8, 0x7E, 0x7F, 0x80, 0x88, 0xFF], special.sum())
    elif kind == "f32":
        bits = blocks[:, at : at + 4].view("<u4")[:, 0]
        bits[...] = np.where((bits & 0x7F800000) == 0x7F800000, bits & 0xBFFFFFFF, bits)
    else:
        inf = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
        bits = blocks[:, at : at + 2].view("<u2")[:, 0]
        bits[special] = rng.choice([0, 0x8000, 1, 0x8001, inf - 1, 0x8000 | (inf - 1)], special.sum())
        bits[...] = np.where((bits & inf) == inf, bits & 0xBFFF, bits)
