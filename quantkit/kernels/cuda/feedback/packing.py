"""Matrices packed on a device as kernels/cpu/feedback/tiles.py packs them, and what frames and corrections need.

    pack_columns    matrix diagonal out n apart transposed
    pack_upper      r out pivots n
    diagonal        matrix out n
    blocks          matrix order out n size
    narrowed        matrix out n rows first apart

Matrices are f64, what is packed f32 [n / 4, n, 4].
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel

_FILE = "feedback/packing.cu"
_THREADS, _STRIP = 256, 4

_COLUMNS, _UPPER, _DIAGONAL, _BLOCKS, _NARROWED = (
    Kernel(_FILE, name) for name in ("pack_columns", "pack_upper", "diagonal", "blocks", "narrowed")
)


def pack_columns(
    matrix: int, out: int, n: int, diagonal: int = 0, *, apart: int = 0, transposed: bool = False
) -> Launch:
    """Return what packs a matrix [n, n], with another diagonal if one is given; its rows are ``apart``, without: n."""
    block = _COLUMNS.block(matrix=matrix, diagonal=diagonal, out=out, n=n, apart=apart or n, transposed=transposed)
    return Launch(_COLUMNS, (_over(n), n // _STRIP, 1), block)


def pack_upper(r: int, out: int, pivots: int, n: int) -> Launch:
    """Return what packs U, and gives D, of a matrix whose factor, last row and column first, is r."""
    return Launch(_UPPER, (_over(n), n // _STRIP, 1), _UPPER.block(r=r, out=out, pivots=pivots, n=n))


def diagonal(matrix: int, out: int, n: int) -> Launch:
    """Return what copies the diagonal of a matrix [n, n]."""
    return Launch(_DIAGONAL, (_over(n), 1, 1), _DIAGONAL.block(matrix=matrix, out=out, n=n))


def blocks(matrix: int, order: int, out: int, n: int, size: int) -> Launch:
    """Return what copies f64 [n / size, size, size] out of a matrix [n, n]: groups of the columns of ``order``."""
    return Launch(_BLOCKS, (_over(n * size), 1, 1), _BLOCKS.block(matrix=matrix, order=order, out=out, n=n, size=size))


def narrowed(matrix: int, out: int, n: int, rows: int, first: int, apart: int) -> Launch:
    """Return what makes columns ``first`` to ``first + rows`` of a matrix [n, apart] rows of f32 [rows, n]."""
    block = _NARROWED.block(matrix=matrix, out=out, n=n, rows=rows, first=first, apart=apart)
    return Launch(_NARROWED, (_over(n), rows, 1), block)


def _over(n: int) -> int:
    return -(-n // _THREADS)


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield from (_COLUMNS, _UPPER, _DIAGONAL, _BLOCKS, _NARROWED)
