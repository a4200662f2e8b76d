"""Tiles of rows on a device: tiles.cuh, and the arguments that kernels over tiles share (sweeps.cuh)."""

from __future__ import annotations

#: Rows of a tile; columns that a block of threads multiplies at once, and those of them that a warp does.
ROWS, WIDE = 32, 64


def tiles(rows: int) -> int:
    """Return how many tiles rows are."""
    return -(-rows // ROWS)
