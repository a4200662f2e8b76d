"""Values that enter and leave a program, for backends that keep values in buffers."""

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
    """The part of a program that ``read`` and ``write`` are; a subclass has ``_view`` and ``_store``.

    takes: values that other programs make. leaves: those asked for, and those that nothing in the program reads.
    """

    def __init__(self, ops: Sequence[Op], leaves: Sequence[Value]) -> None:
        made = {value for op in ops for value in op.outputs()}
        read = {value for op in ops for value in op.inputs()}
        self._takes, self._leaves = read - made, set(leaves) | (made - read)
        self._made = made

    def _settle(self, low: Lowering) -> None:
        """Keep the place of what enters from the beginning, and of what leaves to the end."""
        self._values = low.values
        for value in self._takes:
            low.buffer(value).set_before = True
        for value in self._leaves & self._made:
            low.buffer(value).kept_after = True

    @abstractmethod
    def _view(self, value: Value) -> Any:
        """Return a value of the last run, [rows, width]."""

    @abstractmethod
    def _store(self, buffer: Buffer, data: npt.NDArray[Any]) -> None:
        """Copy an array to the beginning of a buffer."""

    def read(self, value: Value) -> Any:
        """Return a value that leaves the program, [rows, width], valid until the next run; KeyError for others."""
        if value not in self._leaves:
            raise KeyError(f"{value} does not leave this program: name it in leaves")
        return self._view(value)

    def write(self, value: Value, array: Any) -> None:
        """Set a value that another program made, for the next run."""
        if value not in self._takes:
            raise KeyError(f"{value} is not taken by this program")
        data = np.ascontiguousarray(array, np.int32 if value.integer else np.float32).reshape(-1)
        buffer = self._values[value]
        if data.nbytes > buffer.nbytes:
            raise ValueError(f"{value}: {data.nbytes} bytes, and there is room for {buffer.nbytes}")
        self._store(buffer, data)
