"""Reading and writing the values of programs that keep them in buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.model.backends.arena import Buffer
from quantkit.model.backends.lowering import Lowering
from quantkit.model.ops import Op, Value


class Boundary(ABC):
    """``read`` and ``write`` of a program; subclasses implement ``_view`` and ``_store``.

    leaves: the values to read after a run, besides those that no operation of the program reads.
    """

    def __init__(self, ops: Sequence[Op], leaves: Sequence[Value]) -> None:
        outputs = {value for op in ops for value in op.outputs()}
        inputs = {value for op in ops for value in op.inputs()}
        self._takes, self._leaves = inputs - outputs, set(leaves) | (outputs - inputs)
        self._outputs = outputs

    def _pin_values(self, low: Lowering) -> None:
        """Mark buffers of values that enter as live from the start, and of those that leave to the end."""
        self._values = low.values
        for value in self._takes:
            low.buffer(value).live_at_start = True
        for value in self._leaves & self._outputs:
            low.buffer(value).live_at_end = True

    @abstractmethod
    def _view(self, value: Value) -> Any:
        """Return a value of the last run, [rows, width]."""

    @abstractmethod
    def _store(self, buffer: Buffer, data: npt.NDArray[Any]) -> None:
        """Copy an array to the start of a buffer."""

    def read(self, value: Value) -> Any:
        """Return a value that leaves the program, [rows, width], valid until the next run; KeyError for others."""
        if value not in self._leaves:
            raise KeyError(f"{value} is not an output of this program: list it in leaves")
        return self._view(value)

    def write(self, value: Value, array: Any) -> None:
        """Set a value that another program computed, for the next run. Raises KeyError, ValueError."""
        if value not in self._takes:
            raise KeyError(f"{value} is not an input of this program")
        data = np.ascontiguousarray(array, np.int32 if value.integer else np.float32).reshape(-1)
        buffer = self._values[value]
        if data.nbytes > buffer.nbytes:
            raise ValueError(f"{value}: {data.nbytes} bytes, more than {buffer.nbytes}")
        self._store(buffer, data)
