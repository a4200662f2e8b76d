"""Matrices of a metric on a device: sums of products, their factor, and both packed for sweeps.

packing.cu: matrices packed as kernels/cpu/feedback/tiles.py packs them, and blocks of groups and corrections.

    pack_columns    matrix diagonal out n apart transposed
    pack_upper      r out pivots n
    diagonal        matrix out n
    blocks          matrix order out n size
    to_float        matrix out n rows first apart

Matrices are f64, packed ones f32 [n / 4, n, 4].

products.cu: sums of products, and targets corrected by them, the bits of kernels/cpu/feedback/products.py.

    products          x z c rows n m upper             x f32 [rows, n], z f32 [rows, m], c f64 [n, m]
    mirror            c n
    not_finite_sum    x flag n                        x f64 [n], flag int32 [1]
    correct           x correction offset out rows n   correction packed f32 [n / 4, n, 4]; offset f32 [rows, n], or 0

n is a multiple of 32, m of 16. The CPU has the sum of z^T x, [m, n]; here it is x^T z, the right-hand sides, solved
column by column: a product does not depend on the order of its factors.

factor.cu: the factor of a covariance, bit for bit that of kernels/cpu/feedback/factor.py.

    permute         matrix diagonal order r n              matrix, r f64 [n, n]; diagonal f64 [n]; order int32 [n]
    factor_block    r by inverse n begin count bad         by, inverse f64 [n]; bad int64 [1]
    solve_block     x r by width n begin count first last backwards
    subtract        c p q width q_row q_column begin count row end_row column end_column upper

No library: its sums would depend on the GPU and on its version. Three launches take BLOCK rows: their own columns, by
one thread block; the rest of these rows; and the updates of all other rows, which are nearly all of the work.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel

#: Number of rows whose products are summed in float32; bits depend on it.
ROWS_AT_ONCE = 256
#: Rows that are factored or solved at a time, as on the CPU: the sums of backward substitution depend on it.
BLOCK = 64
#: Threads of packing; columns of a strip; rows and columns of a product, and of a mirrored matrix; sums of a check.
_THREADS, _STRIP, _TILE, _MIRROR_TILE, _PART = 256, 4, 64, 32, 1024
#: Columns of a block of threads of ``solve_block``, and of ``permute``.
_SOLVE_COLUMNS, _PERMUTE_COLUMNS = 32, 256

_COLUMNS, _UPPER, _DIAGONAL, _BLOCKS, _TO_FLOAT = (
    Kernel("feedback/packing.cu", name) for name in ("pack_columns", "pack_upper", "diagonal", "blocks", "to_float")
)
_PRODUCTS, _MIRROR, _NOT_FINITE, _CORRECT = (
    Kernel("feedback/products.cu", name) for name in ("products", "mirror", "not_finite_sum", "correct")
)
_PERMUTE, _FACTOR, _SOLVE, _SUBTRACT = (
    Kernel("feedback/factor.cu", name) for name in ("permute", "factor_block", "solve_block", "subtract")
)


def pack_columns(
    matrix: int, out: int, n: int, diagonal: int = 0, *, stride: int = 0, transposed: bool = False
) -> Launch:
    """Return the launch that packs a matrix [n, n], with another diagonal if given; rows are ``stride``, or n, long."""
    block = _COLUMNS.block(matrix=matrix, diagonal=diagonal, out=out, n=n, apart=stride or n, transposed=transposed)
    return Launch(_COLUMNS, (_over(n), n // _STRIP, 1), block)


def pack_upper(r: int, out: int, pivots: int, n: int) -> Launch:
    """Return the launch that packs U and D of a matrix whose factor, last row and column first, is r."""
    return Launch(_UPPER, (_over(n), n // _STRIP, 1), _UPPER.block(r=r, out=out, pivots=pivots, n=n))


def diagonal(matrix: int, out: int, n: int) -> Launch:
    """Return the launch that copies the diagonal of a matrix [n, n]."""
    return Launch(_DIAGONAL, (_over(n), 1, 1), _DIAGONAL.block(matrix=matrix, out=out, n=n))


def blocks(matrix: int, order: int, out: int, n: int, size: int) -> Launch:
    """Return the launch that copies the blocks f64 [n / size, size, size] of a matrix [n, n]: columns by ``order``."""
    return Launch(_BLOCKS, (_over(n * size), 1, 1), _BLOCKS.block(matrix=matrix, order=order, out=out, n=n, size=size))


def to_f32(matrix: int, out: int, n: int, rows: int, first: int, stride: int) -> Launch:
    """Return the launch that transposes columns ``first`` to ``first + rows`` of a matrix [n, stride], as f32."""
    block = _TO_FLOAT.block(matrix=matrix, out=out, n=n, rows=rows, first=first, apart=stride)
    return Launch(_TO_FLOAT, (_over(n), rows, 1), block)


def _over(n: int) -> int:
    return -(-n // _THREADS)


def products(x: int, z: int, c: int, rows: int, n: int, m: int) -> Launch:
    """Return the launch that adds x^T z to c; of x and itself the upper triangle only."""
    block = _PRODUCTS.block(x=x, z=z, c=c, rows=rows, n=n, m=m, upper=x == z)
    return Launch(_PRODUCTS, (-(-m // _TILE), -(-n // _TILE), 1), block)


def mirror(c: int, n: int) -> Launch:
    """Return the launch that copies the upper triangle of c, f64 [n, n], to the lower."""
    tiles = -(-n // _MIRROR_TILE)
    return Launch(_MIRROR, (tiles, tiles, 1), _MIRROR.block(c=c, n=n))


def not_finite_sum(x: int, flag: int, n: int) -> Launch:
    """Return the launch that sets ``flag`` to 1 if one of n sums is not finite."""
    return Launch(_NOT_FINITE, (max(1, -(-n // _PART)), 1, 1), _NOT_FINITE.block(x=x, flag=flag, n=n))


def correct(x: int, correction: int, offset: int, out: int, rows: int, n: int) -> Launch:
    """Return the launch that sets ``out`` to the targets of rows x."""
    block = _CORRECT.block(x=x, correction=correction, offset=offset, out=out, rows=rows, n=n)
    return Launch(_CORRECT, (-(-n // _TILE), -(-rows // _TILE), 1), block)


def permute(matrix: int, diagonal: int, order: int, r: int, n: int) -> Launch:
    """Return the launch that sets the upper triangle of r to a matrix in an order, with another diagonal."""
    block = _PERMUTE.block(matrix=matrix, diagonal=diagonal, order=order, r=r, n=n)
    return Launch(_PERMUTE, (-(-n // _PERMUTE_COLUMNS), n, 1), block)


def cholesky(r: int, pivots: int, bad: int, n: int) -> Iterator[Launch]:
    """Yield the launches that make a matrix at r, f64 [n, n], the upper triangular R with R^T R = the matrix, in place.

    Elements below the diagonal are ignored. pivots: room for f64 [2, n], of which the second row becomes 1 over the
    diagonal of R. bad: int64, zero before; one more than the first row that is not positive, if there is one.
    """
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        block = _FACTOR.block(r=r, by=pivots, inverse=pivots + 8 * n, n=n, begin=begin, count=end - begin, bad=bad)
        yield Launch(_FACTOR, (1, 1, 1), block)
        if end < n:
            yield _solve(r, r, pivots, (n, n), (begin, end), (end, n))
            yield _subtract(r, r, (n, 1), n, (begin, end), (end, n), (end, n), upper=True)


def solve(x: int, r: int, inverse: int, m: int, n: int) -> Iterator[Launch]:
    """Yield the launches that solve R^T R X = B for X, f64 [n, m], B before; inverse: 1 over the diagonal of R."""
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        yield _solve(x, r, inverse, (m, n), (begin, end), (0, m))
        if end < n:
            yield _subtract(x, r, (n, 1), m, (begin, end), (end, n), (0, m))
    for begin in reversed(range(0, n, BLOCK)):
        end = min(begin + BLOCK, n)
        yield _solve(x, r, inverse, (m, n), (begin, end), (0, m), backwards=True)
        if begin:
            yield _subtract(x, r, (1, n), m, (begin, end), (0, begin), (0, m))


#: The first and the last + 1 of rows, or of columns.
_Range = tuple[int, int]


def _solve(
    x: int, r: int, pivots: int, widths: tuple[int, int], rows: _Range, columns: _Range, backwards: bool = False
) -> Launch:
    """Return the launch that solves for some rows and columns of x; widths: of rows of x and of r."""
    (width, n), (begin, end), (first, last) = widths, rows, columns
    block = _SOLVE.block(
        x=x, r=r, by=pivots, width=width, n=n, begin=begin, count=end - begin, first=first, last=last,
        backwards=backwards,
    )  # fmt: skip
    return Launch(_SOLVE, (-(-(last - first) // _SOLVE_COLUMNS), 1, 1), block)


def _subtract(
    c: int,
    q: int,
    strides: tuple[int, int],
    width: int,
    terms: _Range,
    rows: _Range,
    columns: _Range,
    upper: bool = False,
) -> Launch:
    """Return the launch that subtracts products, sums over ``terms``, from some rows and columns of c."""
    block = _SUBTRACT.block(
        c=c, p=c, q=q, width=width, q_row=strides[0], q_column=strides[1], begin=terms[0], count=terms[1] - terms[0],
        row=rows[0], end_row=rows[1], column=columns[0], end_column=columns[1], upper=upper,
    )  # fmt: skip
    high, wide = (-(-(last - first) // _TILE) for first, last in (rows, columns))
    return Launch(_SUBTRACT, (wide, high, 1), block)


def metric_kernels(corrected: bool) -> list[Kernel]:
    """Return the kernels that compute a metric; corrected: and targets."""
    required = [_PERMUTE, _FACTOR, _SOLVE, _SUBTRACT, _COLUMNS, _UPPER, _DIAGONAL, _BLOCKS, _TO_FLOAT]
    return [*required, _PRODUCTS, _MIRROR, _NOT_FINITE, _CORRECT] if corrected else required


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of these files."""
    yield from metric_kernels(corrected=True)
