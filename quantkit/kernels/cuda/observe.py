"""Sums over the rows of a value, kept on the device from run to run: observe.cu.

    sum_columns     x width rows sums count bad                         rows: all rows of x
    sum_columns_id  x ids width rows n_used x_per sums counts bad       bad: a pair (token * n_used + slot)
    covariance      x ids weights width rows n_used x_per first sums counts weight
    similarity      a b width rows cosines bad                          then add_cosines: cosines rows total count
    not_finite      x width rows bad
    count_up        out first n_used rows

Arrays are those of accumulators.py, on the device: sums float64 [n_mat, 4, width rounded up to 8] (covariance:
[experts, width, width]), counts int64 [n_mat], weight float64 [experts], total float64 [1]. All begin as zeros. bad:
int64 [1], one more than the least row that is not finite; 0 for none.

By expert: ids int32 [rows, n_used]; x_per: n_used if x has a row per token, 1 if it has one per pair. No ids: address
0, n_used and x_per 1, rows all rows of x. Covariance adds to one set of sums a launch: plain (weights, weight 0), or
weighted by the squares of ``weights``; counts (or 0) in one of the two. It does not look for values that are not
finite.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape

FILE = "observe.cu"

#: Columns of a block of sum_columns and of sum_columns_id, of a tile of covariance; rows of a block of not_finite.
_COLUMNS = 32
_ID_COLUMNS = 128
_TILE = 64
_ROWS = 8


def sum_columns(width: int) -> Shape:
    """Return the kernel and grid that add up the columns of all rows."""
    return Shape(Kernel(FILE, "sum_columns"), (-(-width // _COLUMNS), 1, 1))


def sum_columns_id(width: int, n_expert: int) -> Shape:
    """Return the kernel and grid that add up the columns of the rows of every expert."""
    return Shape(Kernel(FILE, "sum_columns_id"), (-(-width // _ID_COLUMNS), n_expert, 1))


def covariance(width: int, experts: int = 1) -> Shape:
    """Return the kernel and grid that sum x x^T for each expert."""
    tiles = -(-width // _TILE)
    return Shape(Kernel(FILE, "covariance"), (tiles, tiles, experts))


def similarity(rows: int) -> Shape:
    """Return the kernel and grid that compute the cosines of ``rows`` pairs of rows."""
    return Shape(Kernel(FILE, "similarity"), (max(1, rows), 1, 1))


def add_cosines() -> Shape:
    """Return the kernel and grid that add cosines to their total."""
    return Shape(Kernel(FILE, "add_cosines"), (1, 1, 1))


def not_finite(rows: int) -> Shape:
    """Return the kernel and grid that look for rows that are not finite."""
    return Shape(Kernel(FILE, "not_finite"), (max(1, -(-rows // _ROWS)), 1, 1))


def count_up(n_used: int, rows: int) -> Shape:
    """Return the kernel and grid that write ids that count up."""
    return Shape(Kernel(FILE, "count_up"), (max(1, -(-rows * n_used // 256)), 1, 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    of_columns = sum_columns(1), sum_columns_id(1, 1), covariance(1)
    for shape in (*of_columns, similarity(1), add_cosines(), not_finite(1), count_up(1, 1)):
        yield shape.kernel
