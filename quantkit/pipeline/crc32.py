"""CRC-32 of two texts in a row from those of each."""

from __future__ import annotations

from functools import lru_cache

_POLY = 0xEDB88320


def _crc_multiply(a: int, b: int) -> int:
    """Multiply two polynomials modulo the CRC-32 polynomial (bit-reversed, as zlib keeps them)."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ _POLY if b & 1 else b >> 1
        bit >>= 1
    return product


@lru_cache(maxsize=256)
def _crc_shift(length: int) -> int:
    """Return x^(8 * length): appending ``length`` zero bytes to A multiplies its CRC by that."""
    shift, power, n = 1 << 31, 1 << 30, 8 * length
    while n:
        if n & 1:
            shift = _crc_multiply(power, shift)
        power = _crc_multiply(power, power)
        n >>= 1
    return shift


def crc32_combine(crc1: int, crc2: int, length2: int) -> int:
    """Return the CRC-32 of A + B from those of A and B and the length of B (zlib's crc32_combine)."""
    return _crc_multiply(_crc_shift(length2), crc1) ^ crc2
