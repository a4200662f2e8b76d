"""Helpers without dependencies of their own: sizes, durations, names, checksums, CPUs."""

from __future__ import annotations

import os
import re
from functools import lru_cache

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_UNITS |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


def parse_size(text: str) -> int:
    """Return the bytes of "48G", "512MiB" or "1000": plain letters are decimal, as in llama-gguf-split.

    Raises ValueError on anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text, re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write 48G, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def round_up(n: int, multiple: int) -> int:
    """Return the next multiple, or n if it is one."""
    return -(-n // multiple) * multiple


def format_size(n: float) -> str:
    """Return a number of bytes for people: 17.35 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"


def format_count(n: float) -> str:
    """Return a number of weights for people: 9.19 M."""
    for unit in ("", " K", " M", " B"):
        if abs(n) < 1000:
            return f"{n:.0f}{unit}" if unit == "" else f"{n:.2f}{unit}"
        n /= 1000
    return f"{n:.2f} T"


def format_seconds(seconds: float) -> str:
    """Return a duration for people: 3.2 s, 4 min 05 s, 2 h 03 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def tensor_class(name: str) -> str:
    """Return the class of a tensor: its name without layer and suffix (ffn_down_exps)."""
    parts = [p for p in name.split(".") if not p.isdecimal() and p != "blk"]
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] in ("weight", "bias") else ".".join(parts)


def printable(text: object) -> str:
    """Return a text or path on one line, control characters and invalid UTF-8 escaped: it may come from any file."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def shorten(text: str, width: int) -> str:
    """Return ``text`` cut to ``width`` characters, ending in "…" if anything is missing."""
    return text if len(text) <= width else text[: width - 1] + "…"


def available_cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
