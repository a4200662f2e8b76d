"""Factors that go from matrices to what makes their inputs, so that columns of these come to more alike sizes.

A norm's weight times s, and the columns of the matrices behind it over s, are the same model; so are rows of up
projections times s, and columns of down projections over s. But blocks of a quantized matrix share their scale, and
runtimes round inputs to 8 bits, up to 256 columns with one scale: both lose less where no column is much larger than
its neighbours. s is the inverse fourth root of a column's size: a quarter of the differences, as logarithms, go to the
weights, the rest stays (AWQ, Lin et al. 2023, arXiv:2306.00978, searches such exponents). With half of them texts of
other kinds than that which was calibrated on lose more than this text gains (docs/error-feedback.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import Field, TensorInfo, open_model
from quantkit.formats.ranges import U8
from quantkit.model.engine import load
from quantkit.model.observers import every_token
from quantkit.model.ops import Graph, Observe, Op
from quantkit.model.scalable import Scalable, scalable
from quantkit.pipeline.source import Source
from quantkit.types import BY_NAME

F32 = npt.NDArray[np.float32]

#: How much of the differences goes to the weights.
SHARE = 0.25
#: Tokens that say how large columns are; factors are this large at most, or their inverses.
_TOKENS, _MOST = 4096, 64.0
#: Types whose values can take a factor.
_PLAIN: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
}


@dataclass(frozen=True, eq=False)
class Factors:
    """``by``, float32 [matrices, n]: what the tensor ``takes`` makes of n columns is multiplied by them, what ``gives``
    have in these columns is divided. rows: they are of the rows of ``takes``."""

    takes: str
    gives: tuple[str, ...]
    by: F32
    rows: bool


def factors_of(squares: npt.NDArray[np.float64]) -> F32:
    """Return the factors of columns by the sums of their squares, float32 [n]; 1 for those of zeros."""
    used = squares > 0
    if not used.any():
        return np.ones(len(squares), np.float32)
    sizes = np.log2(np.where(used, squares, 1)) / 2
    by = np.exp2(SHARE * (sizes[used].mean() - sizes))
    return np.where(used, np.clip(by, 1 / _MOST, _MOST), 1).astype(np.float32)


def balanced(model: Path, windows: npt.NDArray[np.int32], at_once: int) -> list[Factors]:
    """Return the factors that balance a model's inputs.

    Args:
        model: a GGUF file.
        windows: tokens of a text, int32 [windows, n_ctx], ``at_once`` of which run together.
    """
    n_ctx = windows.shape[1]
    few = windows[: max(1, _TOKENS // n_ctx)]
    squares: dict[str, npt.NDArray[np.float64]] = {}
    found: dict[str, Scalable] = {}

    def look(of: str, x: F32, ids: Any) -> None:
        into = squares.setdefault(of, np.zeros((found[of].n_mat, x.shape[-1])))
        values = np.square(x.reshape(-1, x.shape[-1]), dtype=np.float64)
        for e in range(len(into)):
            into[e] += (values if found[of].ids is None else values[ids.reshape(-1) == e]).sum(axis=0)

    def rewrite(graph: Graph) -> Graph:
        graph = every_token(graph)
        tensors = {m.tensor.name: m.tensor for op in graph.ops for m in op.matrices()}
        found.clear()
        found.update({each.takes: each for each in scalable(graph, names) if _can_scale(each, tensors)})
        return replace(graph, ops=tuple(_observed(graph, found.values())))

    with open_model(model) as file:
        names = set(file.tensors)
    with load(model, n_ctx=n_ctx, n_ubatch=at_once * n_ctx, observer=look, rewrite=rewrite) as loaded:
        norms = {name for name, each in found.items() if len(file.tensors[name].shape) == 1}
        for first in range(0, len(few), at_once):
            some = few[first : first + at_once]
            of = np.repeat(np.arange(len(some), dtype=np.int32), n_ctx)
            loaded.session(n_ctx, at_once).decode(some.reshape(-1), of, np.zeros(some.size, bool))
    made = [
        Factors(name, each.gives, np.stack([factors_of(own) for own in squares[name]]), name not in norms)
        for name, each in found.items()
        if name in squares
    ]
    return [each for each in made if (each.by != 1).any()]


def _can_scale(each: Scalable, tensors: Mapping[str, TensorInfo]) -> bool:
    return all(tensors[name].type.name in _PLAIN for name in (each.takes, *each.gives))


def _observed(graph: Graph, found: Iterable[Scalable]) -> list[Op]:
    wanted = {each.x: each for each in found}
    listed: list[Op] = []
    for op in graph.ops:
        listed.append(op)
        some = [wanted[v] for v in op.outputs() if v in wanted]
        listed += [Observe(layer=op.layer, x=each.x, of=each.takes, ids=each.ids) for each in some]
    return listed


@dataclass(frozen=True, eq=False)
class Balanced:
    """A source with its values multiplied by ``factors``."""

    source: Source
    factors: Sequence[Factors]

    @cached_property
    def _by(self) -> dict[str, list[tuple[F32, bool]]]:
        """What the values of tensors are multiplied by: by column, or by row."""
        found: dict[str, list[tuple[F32, bool]]] = {}
        for each in self.factors:
            found.setdefault(each.takes, []).append((each.by, each.rows))
            for name in each.gives:
                found.setdefault(name, []).append((np.reciprocal(each.by), False))
        return found

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.source.paths

    @property
    def inputs(self) -> tuple[Path, ...]:
        return self.source.inputs

    @property
    def fields(self) -> dict[str, Field]:
        return self.source.fields

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors; multiplied, they are F32."""
        return {name: self._as_f32(tensor) for name, tensor in self.source.tensors.items()}

    def _as_f32(self, tensor: TensorInfo) -> TensorInfo:
        if tensor.name not in self._by:
            return tensor
        return replace(tensor, type=BY_NAME["F32"], nbytes=BY_NAME["F32"].tensor_bytes(tensor.shape))

    def stored(self, tensor: TensorInfo) -> TensorInfo:
        """Return the tensor of the source."""
        return self.source.stored(self.source.tensors[tensor.name])

    def get(self, key: str, default: Any = None) -> Any:
        return self.source.get(key, default)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.source.fingerprint().encode())
        for each in self.factors:
            digest.update(" ".join((each.takes, *each.gives)).encode() + each.by.tobytes())
        return digest.hexdigest()

    def read(self, tensor: TensorInfo, into: U8, at: int, ahead: int = 0) -> None:
        """Fill ``into`` from byte ``at`` of a tensor on, whole values, multiplied."""
        if tensor.name not in self._by:
            self.source.read(tensor, into, at, ahead)
            return
        stored, n = self.source.tensors[tensor.name], tensor.shape[0]
        dtype, values, first = _PLAIN[stored.type.name], into.view(np.float32), at // 4
        raw = np.empty(len(values), dtype)
        self.source.read(stored, raw.view(np.uint8), first * dtype.itemsize, ahead // 4 * dtype.itemsize)
        values[...] = (raw.astype(np.uint32) << 16).view(np.float32) if dtype == np.uint16 else raw
        rows = np.arange(first // n, -(-(first + len(values)) // n))
        by = np.ones((len(rows), n), np.float32)
        per = tensor.shape[1] if len(tensor.shape) > 1 else 1
        for factors, of_rows in self._by[tensor.name]:
            matrix = rows // per % len(factors)
            by *= factors[matrix, rows % per][:, None] if of_rows else factors[matrix]
        values *= by.reshape(-1)[first - n * int(rows[0]) :][: len(values)]

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        return None if tensor.name in self._by else self.source.place(tensor)

    def where(self, tensor: TensorInfo) -> str:
        return self.source.where(tensor)
