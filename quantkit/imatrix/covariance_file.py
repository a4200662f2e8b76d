"""The file of covariances: a GGUF of general.type "covariance" whose offsets are known before the first pass.

W is the first of the weights that share an input; quantkit.covariance.inputs lists the others ("W: W2 W3"). All
tensors are F32, raw sums accumulated in float64::

    W.cov         [n, n, n_mat]   sum of x x^T; n_mat: experts, or heads      W.counts  [n_mat]  tokens
                                  of a weight by head, else 1
    W.cov_router  [n, n, n_mat]   of experts: sum of w^2 x x^T, w the         W.weight  [n_mat]  sum of w^2
                                  token's router weight for the expert

It grows as OUT.part and is renamed when complete.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.gguf import Field, ValueType, layout_gguf
from quantkit.formats.outputs import part_path
from quantkit.formats.ranges import reserve, sync, write_range
from quantkit.imatrix.collect import also_read
from quantkit.model.observers import Input, Wanted, covariances
from quantkit.model.ops import Covariance, Graph
from quantkit.types import BY_NAME

INPUTS_KEY = "quantkit.covariance.inputs"


@dataclass(frozen=True)
class CovarianceLayout:
    """The header, the offset of every tensor, and the size of the file."""

    header: bytes
    offsets: dict[str, int]
    nbytes: int

    def is_of(self, path: Path) -> bool:
        """Tell whether a file has this header, and this size."""
        with path.open("rb") as file:
            return path.stat().st_size == self.nbytes and file.read(len(self.header)) == self.header


def layout(graph: Graph, found: Sequence[Input], names: Collection[str], weighting: str) -> CovarianceLayout:
    """Lay out the file of some inputs.

    Args:
        graph: of the model; names: of all its tensors; weighting: tokens, router or both.
    """
    weighted = set(_weighted(graph, found)) if weighting != "tokens" else set()
    tensors: list[tuple[str, tuple[int, ...]]] = []
    for item in found:
        name, n, n_mat = item.names[0], item.n, item.n_mat
        routed = name in weighted
        if weighting != "router" or not routed:
            tensors.append((f"{name}.cov", (n, n, n_mat)))
        if routed:
            tensors += [(f"{name}.cov_router", (n, n, n_mat)), (f"{name}.weight", (n_mat,))]
        tensors.append((f"{name}.counts", (n_mat,)))
    lines = [f"{item.names[0]}: {' '.join(also_read(item.names, names)[1:])}".rstrip() for item in found]
    fields = [Field.of("general.type", "covariance"), Field.of(INPUTS_KEY, lines, ValueType.ARRAY, ValueType.STRING)]
    f32 = BY_NAME["F32"]
    made = layout_gguf(fields, [(name, shape, f32) for name, shape in tensors])
    return CovarianceLayout(made.header, {n: at for (n, _), at in zip(tensors, made.offsets, strict=True)}, made.nbytes)


def _weighted(graph: Graph, found: Sequence[Input]) -> list[str]:
    """Return the inputs that are also weighted by the router."""
    wanted = [Wanted(item.names[0], (0, item.n_mat)) for item in found if item.ids is not None]
    seen = covariances(graph, wanted, process_output=True)
    return [op.names[0] for op in seen.ops if isinstance(op, Covariance) and op.weights is not None]


class Target:
    """The file being written; a context manager that keeps it open."""

    def __init__(
        self, path: Path, graph: Graph, found: Sequence[Input], names: Collection[str], weighting: str
    ) -> None:
        self.path, self.part = path, part_path(path)
        self.layout = layout(graph, found, names, weighting)
        self.file: BinaryIO

    def begin(self) -> None:
        """Create the file: header, and space for everything."""
        self.part.unlink(missing_ok=True)
        reserve(self.part, self.layout.nbytes)
        write_range(self.part, np.frombuffer(self.layout.header, np.uint8), 0)
        sync(self.part)

    def write(self, op: Covariance, found: dict[str, npt.NDArray[Any]]) -> None:
        """Write the sums of some experts."""
        name, first, n = op.names[0], op.experts[0], op.x.width // op.heads
        for suffix, array, size in (
            ("cov", found.get("sums"), n * n),
            ("cov_router", found.get("weighted"), n * n),
            ("weight", found.get("weight"), 1),
            ("counts", found["counts"], 1),
        ):
            if array is not None:
                self.file.seek(self.layout.offsets[f"{name}.{suffix}"] + 4 * size * first)
                for row in array:
                    self.file.write(np.asarray(row, "<f4").tobytes())

    def sync(self) -> None:
        """Sync what has been written."""
        self.file.flush()
        os.fdatasync(self.file.fileno())

    def finish(self) -> None:
        """Give the file its final name."""
        self.sync()
        os.replace(self.part, self.path)
        sync(self.path.parent)

    def discard(self) -> None:
        """Remove the unfinished file."""
        self.part.unlink(missing_ok=True)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the unfinished file open."""
        with os.fdopen(os.open(self.part, os.O_WRONLY), "wb") as self.file:  # never read: see ``target.OpenFiles``
            yield

    def share(self) -> None:
        """Open an unfinished file that another process has begun; it stays open. Raises OSError, FormatError."""
        with self.part.open("rb") as file:
            if file.read(len(self.layout.header)) != self.layout.header:
                raise FormatError(f"{self.part} is not the file that was begun")
        self.file = os.fdopen(os.open(self.part, os.O_WRONLY), "wb")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open file."""
        return {name: value for name, value in self.__dict__.items() if name != "file"} | {"part": self.part.absolute()}
