"""A digest of bytes at the speed of memory, to detect changes since they were read.

It is not cryptographic: it detects data that was overwritten, truncated or replaced by another file's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.core.jit import kernel

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_STEP = np.uint64(0x9E3779B97F4A7C15)


@kernel
def _mix(words: npt.NDArray[np.uint64], seed: Any) -> Any:
    """Return the sum of words, their halves swapped, and of the products of the halves of each with its own key."""
    total, key = np.uint64(seed), _STEP
    for i in range(len(words)):
        word = words[i]
        keyed = word ^ key
        total += (keyed & _LOW) * (keyed >> _HALF) + ((word << _HALF) | (word >> _HALF))
        key += _STEP
    return total


def digest_of(data: npt.NDArray[np.uint8]) -> int:
    """Return a digest of contiguous bytes, of 64 bits."""
    body_size = data.size // 8 * 8
    tail = int.from_bytes(data[body_size:].tobytes(), "little")
    words = data[:body_size].view(np.uint64)
    seed = np.uint64(tail << 8 | data.size - body_size)
    return int(_mix(words if words.flags.aligned else words.copy(), seed))
