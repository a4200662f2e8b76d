"""Limits of GPUs, by compute capability (CUDA C++ Programming Guide, "Compute Capabilities")."""

from __future__ import annotations

#: KiB of shared memory of a multiprocessor, of the largest capability not above.
_KIB = {0: 48, 75: 64, 80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 120: 100}

#: Of those, what each block takes besides what it asks for; from 8.0 on.
BLOCK_TAKES = 1024


def shared_of_multiprocessor(capability: int) -> int:
    """Return the bytes of shared memory of a multiprocessor, which its blocks share."""
    return _KIB[max(c for c in _KIB if c <= capability)] << 10


def shared_of_block(capability: int) -> int:
    """Return the bytes of shared memory that a block may have."""
    return shared_of_multiprocessor(capability) - (BLOCK_TAKES if capability >= 80 else 0)
