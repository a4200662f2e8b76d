"""Activations that later layers read, for all windows, in files: memory does not grow with the text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import ResourceError
from quantkit.formats.ranges import reserve
from quantkit.model.ops import Value


class ActivationStore:
    """Activations of one run of a model. ``rows``: scored positions of a window."""

    def __init__(self, folder: Path, windows: int, n_ctx: int, rows: int) -> None:
        self._folder = folder
        self._windows = windows
        self._n_ctx = n_ctx
        self._rows = rows
        self._files: dict[Value, npt.NDArray[Any]] = {}
        self._count = 0
        folder.mkdir(exist_ok=True)

    def _window_rows(self, value: Value) -> int:
        return (self._rows if value.outputs else self._n_ctx) * value.per

    def write(self, value: Value, window: int, rows: npt.NDArray[Any]) -> None:
        """Store the rows of the windows from ``window`` on."""
        if value not in self._files:
            self._files[value] = self._file((self._windows * self._window_rows(value), value.width), rows.dtype)
        begin = window * self._window_rows(value)
        self._files[value][begin : begin + len(rows)] = rows

    def _file(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        path = self._folder / f"value-{self._count}"
        self._count += 1
        try:
            reserve(path, shape[0] * shape[1] * dtype.itemsize)  # writing to one without room ends the process
        except OSError as e:
            raise ResourceError(f"{path}: {e.strerror or e}; what is measured can be resumed", "QK-E406") from e
        return np.memmap(path, dtype, "r+", shape=shape)

    def read(self, value: Value, window: int, count: int) -> npt.NDArray[Any]:
        """Return the rows of ``count`` windows from ``window`` on."""
        per = self._window_rows(value)
        return self._files[value][window * per : (window + count) * per]

    def keep_only(self, values: Iterable[Value]) -> None:
        """Remove all values but these."""
        keep = frozenset(values)
        for value in [v for v in self._files if v not in keep]:
            Path(str(self._files.pop(value).filename)).unlink()  # type: ignore[attr-defined]
