"""The factor of a covariance on a device, bit for bit that of kernels/cpu/feedback/factor.py: factor.cu.

    arranged        matrix diagonal order r n              matrix, r f64 [n, n]; diagonal f64 [n]; order int32 [n]
    factor_block    r by inverse n begin count bad         by, inverse f64 [n]; bad int64 [1]
    solve_block     x r by width n begin count first last backwards
    subtract        c p q width q_row q_column begin count row end_row column end_column upper

No library: its sums would depend on the GPU and on its version. Three launches take BLOCK rows: their own columns, by
one block of threads, the rest of these rows, and what they leave of all others, which is nearly all of the work.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel

_FILE = "feedback/factor.cu"

#: Rows that are factored or solved at a time, as the CPU does: its sums of what is solved backwards depend on it.
BLOCK = 64
#: Columns of a block of threads of ``solve_block``, and of ``arranged``; rows and columns of one of ``subtract``.
_SOLVED = 32
_ARRANGED = 256
_TILE = 64

_ARRANGE, _FACTOR, _SOLVE, _SUBTRACT = (
    Kernel(_FILE, name) for name in ("arranged", "factor_block", "solve_block", "subtract")
)


def permute(matrix: int, diagonal: int, order: int, r: int, n: int) -> Launch:
    """Return the launch that sets the upper triangle of r to a matrix in an order, with another diagonal."""
    block = _ARRANGE.block(matrix=matrix, diagonal=diagonal, order=order, r=r, n=n)
    return Launch(_ARRANGE, (-(-n // _ARRANGED), n, 1), block)


def cholesky(r: int, pivots: int, bad: int, n: int) -> Iterator[Launch]:
    """Yield the launches that make a matrix at r, f64 [n, n], the upper triangular R with R^T R = the matrix, in place.

    What is below the diagonal is not looked at. pivots: room for f64 [2, n], of which the second row becomes 1 over the
    diagonal of R. bad: int64, zero before; one more than the first row that is not positive, if there is one.
    """
    for begin in range(0, n, BLOCK):
        count, end = min(BLOCK, n - begin), min(begin + BLOCK, n)
        block = _FACTOR.block(r=r, by=pivots, inverse=pivots + 8 * n, n=n, begin=begin, count=count, bad=bad)
        yield Launch(_FACTOR, (1, 1, 1), block)
        if end < n:
            yield _solved(r, r, pivots, n, n, begin, end, end, n)
            yield _subtracted(r, r, (n, 1), n, begin, count, (end, n), (end, n), upper=True)


def solve(x: int, r: int, inverse: int, m: int, n: int) -> Iterator[Launch]:
    """Yield the launches that solve R^T R X = B for X, f64 [n, m], B before; inverse: 1 over the diagonal of R."""
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        yield _solved(x, r, inverse, m, n, begin, end, 0, m)
        if end < n:
            yield _subtracted(x, r, (n, 1), m, begin, end - begin, (end, n), (0, m))
    for begin in reversed(range(0, n, BLOCK)):
        end = min(begin + BLOCK, n)
        yield _solved(x, r, inverse, m, n, begin, end, 0, m, backwards=True)
        if begin:
            yield _subtracted(x, r, (1, n), m, begin, end - begin, (0, begin), (0, m))


def _solved(
    x: int,
    r: int,
    pivots: int,
    width: int,
    n: int,
    begin: int,
    end: int,
    first: int,
    last: int,
    backwards: bool = False,
) -> Launch:
    block = _SOLVE.block(
        x=x,
        r=r,
        by=pivots,
        width=width,
        n=n,
        begin=begin,
        count=end - begin,
        first=first,
        last=last,
        backwards=backwards,
    )
    return Launch(_SOLVE, (-(-(last - first) // _SOLVED), 1, 1), block)


def _subtracted(
    c: int,
    q: int,
    q_apart: tuple[int, int],
    width: int,
    begin: int,
    count: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
    upper: bool = False,
) -> Launch:
    block = _SUBTRACT.block(
        c=c, p=c, q=q, width=width, q_row=q_apart[0], q_column=q_apart[1], begin=begin, count=count, row=rows[0],
        end_row=rows[1], column=columns[0], end_column=columns[1], upper=upper,
    )  # fmt: skip
    high, wide = (-(-(last - first) // _TILE) for first, last in (rows, columns))
    return Launch(_SUBTRACT, (wide, high, 1), block)


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield from (_ARRANGE, _FACTOR, _SOLVE, _SUBTRACT)
