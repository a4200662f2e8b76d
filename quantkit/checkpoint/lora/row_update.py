"""A weight whose rows an adapter changes while they are read, in float32."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from quantkit.checkpoint.expressions import F32, TYPE_F32, Expression, read_f32
from quantkit.checkpoint.quantized.rows import RowWise
from quantkit.formats.ranges import U8
from quantkit.types import TensorType


@dataclass(frozen=True)
class RowUpdate(RowWise):
    """A weight ``x`` [rows, columns] with an update of its rows: subclasses have ``update`` and ``parts``."""

    x: Expression

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.x.shape

    @property
    def type(self) -> TensorType:
        return TYPE_F32

    def fill(self, first: int, rows: U8) -> None:
        values = rows.view(np.float32)
        values.reshape(-1)[...] = read_f32(self.x, first * values.shape[1], values.size)
        self.update(first, values)

    @abstractmethod
    def update(self, first: int, values: F32) -> None:
        """Change ``values`` [n, columns], rows ``first`` and on, in place."""
