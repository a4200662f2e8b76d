"""Weights with the magnitudes of DoRA (Liu et al. 2024, arXiv:2402.09353): every row is rescaled to its length.

The result equals PEFT's merge_and_unload (0.17.1, tuners/lora/variants.py) in float32: magnitude / length, times the
value. Lengths are roots of sums in float64, rounded once; torch's sums are float32, in an order that depends on the
CPU, so about every second row differs from PEFT's in the last bits.

Of embeddings PEFT rescales columns: their lengths need all rows, so the weight is read twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from quantkit.checkpoint.expressions import F32, PIECE, Expression, read_f32
from quantkit.checkpoint.lora.row_update import RowUpdate
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor


@dataclass(frozen=True)
class Rescaled(RowUpdate):
    """A weight with its rows, or its columns, rescaled to lengths.

    Args:
        x: the weight with its product added, [rows, columns].
        magnitudes: the lengths, [rows] or [columns].
        name: the weight's name, for errors.
        by_column: columns are rescaled.
    """

    magnitudes: Expression
    name: str
    by_column: bool = False

    def update(self, first: int, values: F32) -> None:
        values *= self._column_factors() if self.by_column else self._row_factors(first, values)

    def parts(self) -> Iterator[StoredTensor]:
        yield from self.x.parts()
        yield from self.magnitudes.parts()

    def _row_factors(self, first: int, x: F32) -> F32:
        squares = np.einsum("ij,ij->i", x, x, dtype=np.float64)
        return self._factors(read_f32(self.magnitudes, first, len(x)), squares)[:, None]

    def _column_factors(self) -> F32:
        key: Any = self  # frozen, so it can be a key
        paths = {part.path for part in self.parts()}
        return _cached_factors(key, tuple(path.stat().st_mtime_ns for path in sorted(paths)))

    def column_factors(self) -> F32:
        """Return the factor of each column: reads all rows."""
        rows, columns = self.shape
        squares = np.zeros(columns)
        step = max(1, PIECE // columns)
        for first in range(0, rows, step):
            n = min(step, rows - first)
            x = read_f32(self.x, first * columns, n * columns).reshape(n, columns)
            squares += np.einsum("ij,ij->j", x, x, dtype=np.float64)
        return self._factors(read_f32(self.magnitudes, 0, columns), squares)

    def _factors(self, magnitudes: F32, squares: Any) -> F32:
        """Return magnitude / length. Raises FormatError for a length of 0, and for values that are not finite."""
        part = next(self.magnitudes.parts())
        if not np.isfinite(magnitudes).all():
            raise FormatError(
                f"{part.path}: tensor {short(part.name)}: a value is infinite or NaN: the adapter is damaged", "QK-E117"
            )
        lengths = np.sqrt(squares).astype(np.float32)
        if not lengths.all():
            raise FormatError(
                f"{part.path}: tensor {short(part.name)}: a {'column' if self.by_column else 'row'} of {self.name} has "
                "length 0, which cannot be rescaled to a magnitude",
                "QK-E117",
            )
        factors: F32 = magnitudes / lengths
        return factors


@lru_cache(maxsize=4)
def _cached_factors(x: Any, changed: tuple[int, ...]) -> F32:
    factors: F32 = x.column_factors()
    return factors
