"""Sizes, counts, durations and errors as text for people; multiples."""

from __future__ import annotations

import re
from collections.abc import Iterable

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_UNITS |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}

#: The meaning of ± after any estimate, and of +/- in llama-perplexity's lines. That of a speed, like that of
#: llama-bench, is named where it is printed.
PLUS_MINUS = "± is one standard error"
_BINARY = (("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0))


def parse_size(text: str) -> int:
    """Return the number of bytes of "48G", "512MiB" or "1000": plain letters are decimal, as in llama-gguf-split.

    Raises ValueError for any other text.
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
    return _scale(n, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def size_unit(n: float) -> tuple[str, int]:
    """Return the unit for a number of bytes and smaller ones, for a column or an axis, and its bytes."""
    return next((name, 1 << shift) for name, shift in _BINARY if n >= 1 << shift or not shift)


def format_count(n: float) -> str:
    """Return a number of weights for people: 9.19 M."""
    return _scale(n, 1000, ("", " K", " M", " B", " T"))


def format_shape(shape: Iterable[int]) -> str:
    """Return the dimensions of a tensor as text: 256 x 64; "scalar" if there is none."""
    return " x ".join(map(str, shape)) or "scalar"


def _scale(n: float, step: int, units: tuple[str, ...]) -> str:
    """Return a number in the unit (each is ``step`` times the previous one) in which it has the fewest digits."""
    for unit in units[:-1]:
        if abs(n) < step:
            return f"{n:.{0 if unit == units[0] else 2}f}{unit}"
        n /= step
    return f"{n:.2f}{units[-1]}"


def format_seconds(seconds: float) -> str:
    """Return a duration for people: 3.2 s, 4 min 05 s, 2 h 03 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
