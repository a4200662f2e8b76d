"""Matrices packed on a device as kernels/cpu/feedback/tiles.py packs them, and blocks of groups and corrections.

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
    block = _NARROWED.block(matrix=matrix, out=out, n=n, rows=rows, first=first, apart=stride)
    return Launch(_NARROWED, (_over(n), rows, 1), block)


def _over(n: int) -> int:
    return -(-n // _THREADS)


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield from (_COLUMNS, _UPPER, _DIAGONAL, _BLOCKS, _NARROWED)
