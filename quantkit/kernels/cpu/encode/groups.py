"""Sixteen blocks at a time: shared by encoders with one lane per block.

Rows of a C-contiguous matrix form one run of blocks, so 16 blocks may span rows; the remainder at the end is copied
into a zero-padded buffer of 16. Addresses are plain integers: one body serves both.
"""

from __future__ import annotations

import numpy as np

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import load, store, u8x64


@inline
def address(a):
    """Return an array's address as a signed integer: adding an index keeps it an integer."""
    return np.intp(a.ctypes.data)


@inline
def copy(source, target, nbytes):
    """Copy a multiple of 64 bytes between addresses."""
    for at in range(0, nbytes, 64):
        store(target, at, load(u8x64, source, at))
