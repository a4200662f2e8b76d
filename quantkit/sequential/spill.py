"""Activations of all tokens in files: one file per value of a stream, rows in token order."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import ResourceError
from quantkit.formats.ranges import read_range, write_range
from quantkit.pipeline.content import Origin
from quantkit.records import DAMAGE

Rows = npt.NDArray[Any]

#: Bytes that are read at a time to check a file.
_PIECE = 16 << 20


@dataclass(frozen=True)
class Place:
    """The file of a value: ``per`` rows of ``width`` per token; float32 or int32."""

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
    """A directory of such files, and ``state.json``, which lists its files after each stage.

    The directory of a killed run is reused if its ``identity`` and model agree and no file in it has changed.
    """

    def __init__(self, folder: Path, identity: str, model: Sequence[Path]) -> None:
        self.folder = folder
        self.identity = identity
        self.model = Origin(model)
        self._sums: dict[str, int] = {}

    @property
    def _state(self) -> Path:
        return self.folder / "state.json"

    def begin(self) -> int:
        """Return the stage whose activations the files hold, -1 if none; remove unusable files."""
        try:
            state = json.loads(self._state.read_bytes())
            is_whole = state["identity"] == self.identity and all(self._sum(n) == s for n, s in state["files"].items())
            if is_whole and self.model.matches(state["model"]):
                self._sums = dict(state["files"])
                self._clean()
                return int(state["stage"])
        except (OSError, *DAMAGE):
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
        """Write the rows of tokens from ``token`` on; rows of a value come in order."""
        data = np.ascontiguousarray(rows, place.dtype).reshape(-1).view(np.uint8)
        try:
            write_range(self.folder / place.file, data, token * place.token_bytes, make=True)
        except OSError as e:
            raise ResourceError(
                f"{self.folder}: {e.strerror}; it needs space for the activations of all tokens: calibrate on "
                f"fewer, or free some space",
                "QK-E406",
            ) from e
        self._sums[place.file] = ((self._sums[place.file] if token else 0) + _sum(data)) % 2**64

    def read(self, place: Place, token: int, count: int) -> Rows:
        """Return the rows of ``count`` tokens, [count * per, width]."""
        data = np.empty(count * place.token_bytes, np.uint8)
        read_range(self.folder / place.file, data, token * place.token_bytes)
        return data.view(place.dtype).reshape(count * place.per, place.width)

    def map_rows(self, place: Place, tokens: int) -> Rows:
        """Return all rows, memory-mapped: only pages in use count as memory of this process."""
        with open(self.folder / place.file, "rb") as file:
            mapped = mmap.mmap(file.fileno(), tokens * place.token_bytes, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapped, place.dtype).reshape(tokens * place.per, place.width)

    def commit(self, stage: int, files: Collection[str]) -> None:
        """Record that ``files`` hold the values after stage ``stage``, and remove all others."""
        self._sums = {name: checksum for name, checksum in self._sums.items() if name in files}
        model = asdict(self.model.record())
        state = {"identity": self.identity, "model": model, "stage": stage, "files": self._sums}
        new = self.folder / "state.part"
        new.write_text(json.dumps(state))
        os.replace(new, self._state)
        self._clean()

    def _clean(self) -> None:
        for path in self.folder.iterdir():
            if path.name not in self._sums and path != self._state:
                path.unlink()

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _sum(data: npt.NDArray[np.uint8]) -> int:
    """Return the sum of the 32-bit words: as fast as memory, and different if pages were never written."""
    return int(np.add.reduce(data.view(np.uint32), dtype=np.uint64))
