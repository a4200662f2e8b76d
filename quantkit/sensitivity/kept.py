"""Values that cross from one layer to later ones, of all windows, in files: memory does not grow with the text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import ResourceError
from quantkit.formats.ranges import reserve
from quantkit.model.ops import Value


class Kept:
    """Values of a run of a model that later layers read. ``rows``: those of a window that are scored."""

    def __init__(self, folder: Path, windows: int, n_ctx: int, rows: int) -> None:
        self._folder, self._windows, self._n_ctx, self._rows = folder, windows, n_ctx, rows
        self._files: dict[Value, npt.NDArray[Any]] = {}
        self._made = 0
        folder.mkdir(exist_ok=True)

    def _per(self, value: Value) -> int:
        return (self._rows if value.outputs else self._n_ctx) * value.per

    def write(self, value: Value, window: int, rows: npt.NDArray[Any]) -> None:
        """Keep the rows of windows from ``window`` on."""
        if value not in self._files:
            self._files[value] = self._file((self._windows * self._per(value), value.width), rows.dtype)
        at = window * self._per(value)
        self._files[value][at : at + len(rows)] = rows

    def _file(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        path = self._folder / f"value-{self._made}"
        self._made += 1
        try:
            reserve(path, shape[0] * shape[1] * dtype.itemsize)  # writing to one without room ends the process
        except OSError as e:
            raise ResourceError(f"{path}: {e.strerror or e}; what is measured can be resumed") from e
        return np.memmap(path, dtype, "r+", shape=shape)

    def read(self, value: Value, window: int, count: int) -> npt.NDArray[Any]:
        """Return the rows of ``count`` windows."""
        per = self._per(value)
        return self._files[value][window * per : (window + count) * per]

    def keep_only(self, values: Iterable[Value]) -> None:
        """Remove all others."""
        keep = frozenset(values)
        for value in [v for v in self._files if v not in keep]:
            Path(str(self._files.pop(value).filename)).unlink()  # type: ignore[attr-defined]
