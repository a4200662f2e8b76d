"""The covariance file: a GGUF of general.type "covariance" whose offsets are known before the first pass.

W is the first of the weights that share an input; quantkit.covariance.inputs lists the others ("W: W2 W3"),
quantkit.covariance.model is a digest of the model's files. All tensors are F32, raw sums accumulated in float64::

    W.cov         [n, n, n_mat]   sum of x x^T; n_mat: experts, or heads      W.counts  [n_mat]  tokens
                                  of a weight by head, else 1
    W.cov_router  [n, n, n_mat]   of experts: sum of w^2 x x^T, w the         W.weight  [n_mat]  sum of w^2
                                  token's router weight for the expert

It is written as OUT.part and renamed when complete.
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
from quantkit.imatrix.collect import with_shared_inputs
from quantkit.model.observers import CovarianceRequest, Input, covariances
from quantkit.model.ops import Covariance, Graph
from quantkit.types import BY_NAME

INPUTS_KEY = "quantkit.covariance.inputs"
#: A digest of the model's files, by which a finished file is recognized.
MODEL_KEY = "quantkit.covariance.model"
#: 64 characters, as a SHA-256 has, to compute the size of a file before its digest is known.
NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class CovarianceLayout:
    """The header, the offset of every tensor, and the size of the file."""

    header: bytes
    offsets: dict[str, int]
    nbytes: int

    def matches(self, path: Path) -> bool:
        """Return whether a file has this header and size."""
        with path.open("rb") as file:
            return path.stat().st_size == self.nbytes and file.read(len(self.header)) == self.header


def layout(
    graph: Graph, weight_inputs: Sequence[Input], names: Collection[str], weighting: str, model: str = NO_DIGEST
) -> CovarianceLayout:
    """Lay out the file of some inputs.

    Args:
        graph: of the model. names: of all its tensors. weighting: tokens, router or both. model: a digest of its files.
    """
    weighted = set(_router_weighted(graph, weight_inputs)) if weighting != "tokens" else set()
    tensors: list[tuple[str, tuple[int, ...]]] = []
    for item in weight_inputs:
        name = item.names[0]
        n = item.n
        n_mat = item.n_mat
        routed = name in weighted
        if weighting != "router" or not routed:
            tensors.append((f"{name}.cov", (n, n, n_mat)))
        if routed:
            tensors += [(f"{name}.cov_router", (n, n, n_mat)), (f"{name}.weight", (n_mat,))]
        tensors.append((f"{name}.counts", (n_mat,)))
    lines = [
        f"{item.names[0]}: {' '.join(with_shared_inputs(item.names, names)[1:])}".rstrip() for item in weight_inputs
    ]
    fields = [
        Field.of("general.type", "covariance"),
        Field.of(INPUTS_KEY, lines, ValueType.ARRAY, ValueType.STRING),
        Field.of(MODEL_KEY, model),
    ]
    f32 = BY_NAME["F32"]
    file = layout_gguf(fields, [(name, shape, f32) for name, shape in tensors])
    return CovarianceLayout(
        file.header, {n: offset for (n, _), offset in zip(tensors, file.offsets, strict=True)}, file.nbytes
    )


def _router_weighted(graph: Graph, weight_inputs: Sequence[Input]) -> list[str]:
    """Return the inputs that are also weighted by the router."""
    requests = [CovarianceRequest(item.names[0], (0, item.n_mat)) for item in weight_inputs if item.ids is not None]
    observed = covariances(graph, requests, process_output=True)
    return [op.names[0] for op in observed.ops if isinstance(op, Covariance) and op.weights is not None]


class Target:
    """The file being written; a context manager that keeps it open."""

    def __init__(
        self,
        path: Path,
        graph: Graph,
        weight_inputs: Sequence[Input],
        names: Collection[str],
        weighting: str,
        model: str,
    ) -> None:
        self.path, self.part = path, part_path(path)
        self.layout = layout(graph, weight_inputs, names, weighting, model)
        self.file: BinaryIO

    def begin(self) -> None:
        """Create the file: header, and space for everything."""
        self.part.unlink(missing_ok=True)
        reserve(self.part, self.layout.nbytes)
        write_range(self.part, np.frombuffer(self.layout.header, np.uint8), 0)
        sync(self.part)

    def write(self, op: Covariance, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Write the sums of some experts."""
        name = op.names[0]
        first = op.experts[0]
        n = op.x.width // op.heads
        for suffix, array, size in (
            ("cov", arrays.get("sums"), n * n),
            ("cov_router", arrays.get("weighted"), n * n),
            ("weight", arrays.get("weight"), 1),
            ("counts", arrays["counts"], 1),
        ):
            if array is not None:
                self.file.seek(self.layout.offsets[f"{name}.{suffix}"] + 4 * size * first)
                for row in array:
                    self.file.write(np.asarray(row, "<f4").tobytes())

    def sync(self) -> None:
        """Write buffered data to the disk."""
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
    def hold_open(self) -> Iterator[None]:
        """Hold the unfinished file open."""
        with os.fdopen(os.open(self.part, os.O_WRONLY), "wb") as self.file:  # never read: see ``target.OpenFiles``
            yield

    def open_shared(self) -> None:
        """Open an unfinished file of another process; it stays open. Raises OSError, FormatError."""
        with self.part.open("rb") as file:
            if file.read(len(self.layout.header)) != self.layout.header:
                raise FormatError(f"{self.part} is not the file that the interrupted run started", "QK-E109")
        self.file = os.fdopen(os.open(self.part, os.O_WRONLY), "wb")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open file."""
        return {name: value for name, value in self.__dict__.items() if name != "file"} | {"part": self.part.absolute()}
