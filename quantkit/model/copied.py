"""Weights copied to memory instead of mapped from the file: ``--no-mmap``.

Tokens generated one by one read weights as fast as memory gives them. Pages of a mapped file are small and lie where
the page cache put them; numpy's large arrays are of huge pages where the system has them, which the processor looks up
less often. It costs the memory of the weights, and time to read them.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import GGUFFile, TensorInfo
from quantkit.formats.ranges import read_range


class CopiedSource:
    """A GGUFFile whose tensors are read into memory at their first use."""

    def __init__(self, source: GGUFFile) -> None:
        self.source = source
        self._copies: dict[str, npt.NDArray[np.uint8]] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def data(self, tensor: TensorInfo | str) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes, uint8 [nbytes]. Raises FormatError if the file has shrunk, OSError."""
        info = self.source.tensors[tensor] if isinstance(tensor, str) else tensor
        with self._lock:
            if info.name not in self._copies:
                self._copies[info.name] = _read(self.source.paths[info.shard], info)
            return self._copies[info.name]

    def forget(self, tensor: TensorInfo | str) -> None:
        """Let go of a tensor's copy; views stay valid, and ``data`` reads it again."""
        self._copies.pop(tensor if isinstance(tensor, str) else tensor.name, None)

    def close(self) -> None:
        """Close the file; copies stay valid where they are in use."""
        self._copies.clear()
        self.source.close()


def _read(path: Path, info: TensorInfo) -> npt.NDArray[np.uint8]:
    copy = np.empty(info.nbytes, np.uint8)
    read_range(path, copy, info.offset)
    copy.flags.writeable = False
    return copy
