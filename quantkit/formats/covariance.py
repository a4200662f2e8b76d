"""Reader of files of ``quantkit imatrix --covariance``: sums of x x^T over the inputs of weights.

``imatrix/covariance_file.py`` describes and writes it.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.gguf import open_model
from quantkit.formats.gguf.model import GGUFFile

F64 = npt.NDArray[np.float64]

#: Bytes of sums that are digested at a time.
_CHUNK = 1 << 24
INPUTS_KEY = "quantkit.covariance.inputs"


class Covariances:
    """An open covariance file.

    Raises FormatError if it is not one. ``entries``: for every weight, the name of its covariance's entry.
    """

    def __init__(self, path: str | Path) -> None:
        self._file: GGUFFile = open_model(path)
        self.path = self._file.paths[0]
        lines = self._file.get(INPUTS_KEY)
        if self._file.get("general.type") != "covariance" or not isinstance(lines, list):
            raise FormatError(
                f"{self.path}: not a covariance file; `quantkit imatrix --covariance FILE` writes one",
                "QK-E118",
            )
        self._digests: dict[str, str] = {}
        self.entries: dict[str, str] = {}
        for line in lines:
            first, _, aliases = str(line).partition(":")
            self.entries |= dict.fromkeys((first, *aliases.split()), first)

    @cached_property
    def identity(self) -> str:
        """A SHA-256 that identifies these covariances: over the header, the counts and samples of the sums."""
        digest = hashlib.sha256(self._file.fingerprint().encode())
        for entry in dict.fromkeys(self.entries.values()):
            digest.update(self.tokens(entry).tobytes())
        return digest.hexdigest()

    def shape(self, entry: str) -> tuple[int, int]:
        """Return the columns n and the matrices of an entry."""
        info = self._file.tensors[self._sums(entry)]
        n, m, *matrices = (*info.shape, 1)
        if n != m or info.type.name != "F32":
            raise FormatError(
                f"{self.path}: {info.name} is not a square float32 matrix but {list(info.shape)}", "QK-E118"
            )
        return n, matrices[0]

    def _sums(self, entry: str) -> str:
        """Return the tensor of an entry's sums: those weighted by the router, if present."""
        for name in (f"{entry}.cov_router", f"{entry}.cov"):
            if name in self._file.tensors:
                return name
        raise FormatError(f"{self.path}: the sums of {entry} are missing", "QK-E118")

    def is_weighted(self, entry: str) -> bool:
        """Return whether tokens are weighted by their squared router weight."""
        return self._sums(entry).endswith("router")

    def tokens(self, entry: str) -> npt.NDArray[np.float32]:
        """Return the number of tokens of each matrix of an entry, float32 [matrices]."""
        try:
            info = self._file.tensors[f"{entry}.counts"]
        except KeyError:
            raise FormatError(f"{self.path}: the counts of {entry} are missing", "QK-E118") from None
        counts = np.empty(info.nbytes, np.uint8)
        self._file.read(info, counts, 0)
        return counts.view("<f4")

    def digest(self, entry: str) -> str:
        """Return the SHA-256 of an entry's sums, which are read once."""
        if entry not in self._digests:
            info, sha256 = self._file.tensors[self._sums(entry)], hashlib.sha256()
            for offset in range(0, info.nbytes, _CHUNK):
                part = np.empty(min(_CHUNK, info.nbytes - offset), np.uint8)
                self._file.read(info, part, offset)
                sha256.update(part.data)
            self._digests[entry] = sha256.hexdigest()
        return self._digests[entry]

    def matrix(self, entry: str, number: int) -> F64:
        """Return one matrix of an entry, float64 [n, n]. Raises FormatError unless finite with a diagonal >= 0."""
        n, _ = self.shape(entry)
        raw = np.empty(4 * n * n, np.uint8)
        self._file.read(self._file.tensors[self._sums(entry)], raw, number * raw.size)
        matrix = raw.view("<f4").reshape(n, n).astype(np.float64)
        if not np.isfinite(matrix).all() or (np.diagonal(matrix) < 0).any():
            raise FormatError(
                f"{self.path}: matrix {number} of {entry} is not a valid covariance: record it again", "QK-E118"
            )
        return matrix
