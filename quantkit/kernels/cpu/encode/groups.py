"""Sixteen blocks at a time: what encoders with one lane per block share.

Rows of a C-contiguous matrix are one run of blocks, so 16 blocks may cross from row to row; what remains at the end
is copied into a buffer of 16 whose rest is zeros. Addresses are plain integers: one body serves both.
"""

from __future__ import annotations

import numpy as np

from quantkit.kernels.cpu.jit import inline
from quantkit.kernels.cpu.simd import load, store, u8x64


@inline
def address(a):
    """Return where an array's data lie, as a signed integer: plus an index, it stays an integer."""
    return np.intp(a.ctypes.data)


@inline
def copy(source, target, nbytes):
    """Copy a multiple of 64 bytes between addresses."""
    for at in range(0, nbytes, 64):
        store(target, at, load(u8x64, source, at))
