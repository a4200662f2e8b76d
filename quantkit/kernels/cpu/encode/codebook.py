"""Rounding to a codebook of unevenly spaced levels by table lookup.

Boundaries between adjacent levels divide the line; buckets of equal width each hold at most one boundary. So the bucket
of v, v / width rounded, gives a boundary and the levels on either side, and one comparison with v decides. The bucket
may be off by one near its edges if no boundary is near, so v / width need not be exact. 32 buckets, numbered -16..15,
are two vectors: the low 5 bits of ``v / width + MAGIC`` are the index; so for other powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Adding it to an f32 below 2^22 leaves the nearest integer in the low bits.
MAGIC = np.float32(12582912.0)


def bucket_tables(
    boundaries: Sequence[float], width: float, count: int = 32
) -> tuple[list[float], list[int], list[int]]:
    """Return, at n mod ``count`` for each bucket n, its boundary and the levels below and above it.

    A level is the number of boundaries <= v. Empty buckets have an infinite boundary. Raises ValueError if a bucket
    holds two boundaries, or if one is within 1 % of a bucket's edge or beyond the buckets.
    """
    boundary = [float("inf")] * count
    below = [0] * count
    above = [0] * count
    for n in range(-count // 2, count // 2):
        low, high = (n - 0.5) * width, (n + 0.5) * width
        members = [m for m in boundaries if low <= m < high]
        if len(members) > 1 or any(min(m - low, high - m) < 0.01 * width for m in members):
            raise ValueError(f"buckets of {width} do not separate the boundaries {members}")
        level = sum(m < low for m in boundaries)
        boundary[n % count] = members[0] if members else float("inf")
        below[n % count], above[n % count] = level, level + len(members)
    if max(abs(m) for m in boundaries) > (count / 2 - 1) * width:
        raise ValueError(f"{count} buckets of {width} do not reach the boundaries")
    return boundary, below, above
