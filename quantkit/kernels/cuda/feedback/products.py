"""Sums of products on a device, and targets corrected by them: the bits of kernels/cpu/feedback/products.py.

    products          x z c rows n m upper             x f32 [rows, n], z f32 [rows, m], c f64 [n, m]
    mirrored          c n
    not_finite_sum    x found n                        x f64 [n], found int32 [1]
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
_TILE, _MIRRORED, _PART = 64, 32, 1024

_PRODUCTS, _MIRROR, _NOT_FINITE, _CORRECT = (
    Kernel(_FILE, name) for name in ("products", "mirrored", "not_finite_sum", "corrected")
)


def products(x: int, z: int, c: int, rows: int, n: int, m: int) -> Launch:
    """Return what adds x^T z to c; of x and itself only what is on and above the diagonal."""
    block = _PRODUCTS.block(x=x, z=z, c=c, rows=rows, n=n, m=m, upper=x == z)
    return Launch(_PRODUCTS, (-(-m // _TILE), -(-n // _TILE), 1), block)


def mirrored(c: int, n: int) -> Launch:
    """Return what copies what is above the diagonal of c, f64 [n, n], below it."""
    tiles = -(-n // _MIRRORED)
    return Launch(_MIRROR, (tiles, tiles, 1), _MIRROR.block(c=c, n=n))


def not_finite_sum(x: int, found: int, n: int) -> Launch:
    """Return what sets ``found`` to 1 if one of n sums is not finite."""
    return Launch(_NOT_FINITE, (max(1, -(-n // _PART)), 1, 1), _NOT_FINITE.block(x=x, found=found, n=n))


def corrected(x: int, correction: int, offset: int, out: int, rows: int, n: int) -> Launch:
    """Return what sets ``out`` to what rows x are to come near to."""
    block = _CORRECT.block(x=x, correction=correction, offset=offset, out=out, rows=rows, n=n)
    return Launch(_CORRECT, (-(-n // _TILE), -(-rows // _TILE), 1), block)


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield from (_PRODUCTS, _MIRROR, _NOT_FINITE, _CORRECT)
