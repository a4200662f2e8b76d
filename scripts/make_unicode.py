"""Write quantkit/formats/tokenizer/unicode.npz from Unicode 15.1, reproducibly.

Needs ``pip install unicodedata2==15.1.0``: Python's own tables change with its version, but token ids must not. Names,
shapes and meaning are listed in quantkit/formats/tokenizer/unicode.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import unicodedata2  # type: ignore[import-not-found]

TARGET = Path(__file__).parent.parent / "quantkit/formats/tokenizer/unicode.npz"
COUNT = 0x110000


def runs(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the positions where runs of equal values begin."""
    return np.flatnonzero(np.diff(values, prepend=values[0] - 1))


def tables() -> dict[str, npt.NDArray[np.uint32] | npt.NDArray[np.uint8]]:
    """Return every table by name."""
    kinds = [unicodedata2.category(chr(c)) for c in range(COUNT)]
    category = np.array([0 if k == "Cn" else ord(k[0]) for k in kinds])
    lower = {c: ord(low[0]) for c in range(COUNT) if (low := chr(c).lower())[0] != chr(c)}
    first = np.array([ord(unicodedata2.normalize("NFD", chr(c))[0]) for c in range(COUNT)])
    moved = np.where(first == np.arange(COUNT), -1, first)
    starts, bases = runs(category), runs(moved)
    return {
        "starts": starts.astype(np.uint32),
        "categories": category[starts].astype(np.uint8),
        "lower": np.array([*lower.items()], np.uint32),
        "base_starts": bases.astype(np.uint32),
        "bases": np.where(moved[bases] < 0, 0, moved[bases]).astype(np.uint32),
    }


def main() -> None:
    if unicodedata2.unidata_version != "15.1.0":
        sys.exit(f"unicodedata2 has Unicode {unicodedata2.unidata_version}; wanted 15.1.0")
    np.savez(TARGET, **tables())  # type: ignore[arg-type]
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
