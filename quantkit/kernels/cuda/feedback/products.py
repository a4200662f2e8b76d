"""Sums of products on a device, and targets corrected by them: the bits of kernels/cpu/feedback/products.py.

    products          x z c rows n m upper             x f32 [rows, n], z f32 [rows, m], c f64 [n, m]
    mirrored          c n
    not_finite_sum    x flag n                        x f64 [n], flag int32 [1]
    corrected         x correction offset out rows n   correction packed f32 [n / 4, n, 4]; offset f32 [rows, n], or 0

n is a multiple of 32, m of 16. The CPU has the sum of z^T x, [m, n]; here it is x^T z, what is solved for column by
column: a product does not depend on the order of its factors.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel

_FILE = "feedback/products.cu"
#: Rows whose products are added in float32: where such sums end, so bits depend on it.
ROWS_AT_ONCE = 256
_TILE = 64
_MIRRORED = 32
_PART = 1024

_PRODUCTS, _MIRROR, _NOT_FINITE, _CORRECT = (
    Kernel(_FILE, name) for name in ("products", "mirrored", "not_finite_sum", "corrected")
)


def products(x: int, z: int, c: int, rows: int, n: int, m: int) -> Launch:
    """Return the launch that adds x^T z to c; of x and itself the upper triangle only."""
    block = _PRODUCTS.block(x=x, z=z, c=c, rows=rows, n=n, m=m, upper=x == z)
    return Launch(_PRODUCTS, (-(-m // _TILE), -(-n // _TILE), 1), block)


def mirror(c: int, n: int) -> Launch:
    """Return the launch that copies the upper triangle of c, f64 [n, n], to the lower."""
    tiles = -(-n // _MIRRORED)
    return Launch(_MIRROR, (tiles, tiles, 1), _MIRROR.block(c=c, n=n))


def not_finite_sum(x: int, flag: int, n: int) -> Launch:
    """Return the launch that sets ``flag`` to 1 if one of n sums is not finite."""
    return Launch(_NOT_FINITE, (max(1, -(-n // _PART)), 1, 1), _NOT_FINITE.block(x=x, flag=flag, n=n))


def correct(x: int, correction: int, offset: int, out: int, rows: int, n: int) -> Launch:
    """Return the launch that sets ``out`` to the targets of rows x."""
    block = _CORRECT.block(x=x, correction=correction, offset=offset, out=out, rows=rows, n=n)
    return Launch(_CORRECT, (-(-n // _TILE), -(-rows // _TILE), 1), block)


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield from (_PRODUCTS, _MIRROR, _NOT_FINITE, _CORRECT)
