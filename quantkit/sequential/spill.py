"""The activations of all tokens in files: a file for each value of a stream, its rows in the order of the tokens."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import ResourceError
from quantkit.formats.ranges import read_range, write_range

Rows = npt.NDArray[Any]

#: Bytes that are read at a time to check a file.
_PIECE = 16 << 20


@dataclass(frozen=True)
class Place:
    """Where a value's rows lie: ``per`` rows of ``width`` a token; float32, or int32."""

    file: str
    width: int
    per: int
    integer: bool

    @property
    def dtype(self) -> npt.DTypeLike:
        return np.int32 if self.integer else np.float32

    @property
    def token_bytes(self) -> int:
        return 4 * self.width * self.per


class Spill:
    """A folder of such files, and ``state.json``, which says what it holds after which stage.

    A folder left by a killed run is taken up if it is of the same ``identity`` and nothing in it has changed.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder, self.identity = folder, identity
        self._sums: dict[str, int] = {}

    @property
    def _state(self) -> Path:
        return self.folder / "state.json"

    def begin(self) -> int:
        """Return the number of the stage whose end the files hold, -1 if there is none; remove what is of no use."""
        try:
            state = json.loads(self._state.read_bytes())
            if state["identity"] == self.identity and all(self._sum(n) == s for n, s in state["files"].items()):
                self._sums = dict(state["files"])
                self._clean()
                return int(state["stage"])
        except (OSError, ValueError, LookupError, TypeError):
            pass
        self.remove()
        self.folder.mkdir(parents=True)
        return -1

    def _sum(self, name: str) -> int:
        total = 0
        with open(self.folder / name, "rb") as file:
            while piece := file.read(_PIECE):
                total += _sum(np.frombuffer(piece, np.uint8))
        return total % 2**64

    def write(self, place: Place, token: int, rows: Rows) -> None:
        """Write the rows of tokens from ``token`` on; those of a value must come in order."""
        data = np.ascontiguousarray(rows, place.dtype).reshape(-1).view(np.uint8)
        try:
            write_range(self.folder / place.file, data, token * place.token_bytes, make=True)
        except OSError as e:
            raise ResourceError(
                f"{self.folder}: {e.strerror}; activations of all tokens go there: calibrate on fewer, or make room"
            ) from e
        self._sums[place.file] = ((self._sums[place.file] if token else 0) + _sum(data)) % 2**64

    def read(self, place: Place, token: int, count: int) -> Rows:
        """Return the rows of ``count`` tokens, [count * per, width]."""
        data = np.empty(count * place.token_bytes, np.uint8)
        read_range(self.folder / place.file, data, token * place.token_bytes)
        return data.view(place.dtype).reshape(count * place.per, place.width)

    def all(self, place: Place, tokens: int) -> Rows:
        """Return all rows, mapped: only what is used is read, and counts as memory of this process."""
        with open(self.folder / place.file, "rb") as file:
            mapped = mmap.mmap(file.fileno(), tokens * place.token_bytes, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapped, place.dtype).reshape(tokens * place.per, place.width)

    def settle(self, stage: int, files: Collection[str]) -> None:
        """Note that ``files`` hold what stage ``stage`` and those before it left, and remove all others."""
        self._sums = {name: each for name, each in self._sums.items() if name in files}
        state = {"identity": self.identity, "stage": stage, "files": self._sums}
        new = self.folder / "state.part"
        new.write_text(json.dumps(state))
        os.replace(new, self._state)
        self._clean()

    def _clean(self) -> None:
        for path in self.folder.iterdir():
            if path.name not in self._sums and path != self._state:
                path.unlink()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _sum(data: npt.NDArray[np.uint8]) -> int:
    """Return the sum of the words: pages that were never written change it, and it is as fast as memory."""
    return int(np.add.reduce(data.view(np.uint32), dtype=np.uint64))
