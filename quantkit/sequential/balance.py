"""Activation equalization: factors moved from matrices to the norms or matrices that produce their inputs.

A norm's weight times s, with the columns of the following matrices divided by s, is the same model; so are rows of up
projections times s and columns of down projections divided by s. But blocks of a quantized matrix share a scale, and
runtimes round inputs to 8 bits with one scale for up to 256 columns: both lose less if no column is much larger than
its neighbours. s is the inverse fourth root of a column's mean square, so a quarter of the logarithmic differences
moves to the weights (AWQ, Lin et al. 2023, arXiv:2306.00978, searches such exponents). With half of them, texts unlike
the calibration text lose more than this one gains (docs/explanation/error-feedback.md).
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

from quantkit.formats.gguf import TensorInfo, open_model
from quantkit.formats.ranges import U8
from quantkit.model.engine import load
from quantkit.model.observers import every_token
from quantkit.model.ops import Graph, Observe, Op
from quantkit.model.scale_sites import ScaleSite, find_scale_sites
from quantkit.pipeline.source import SourceView
from quantkit.types import BY_NAME

F32 = npt.NDArray[np.float32]

#: Share of the logarithmic differences that moves to the weights.
SHARE = 0.25
#: Number of tokens from which column magnitudes are estimated; the maximum factor, and the inverse of the minimum.
_TOKENS, _MAX_FACTOR = 4096, 64.0
#: Types whose values can be multiplied by a factor.
_SCALABLE_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
}


@dataclass(frozen=True, eq=False)
class Factors:
    """Factors of one input: ``values``, float32 [matrices, n].

    The outputs of tensor ``takes`` are multiplied by them, the columns of tensors ``gives`` divided. rows: they apply
    to rows of ``takes``.
    """

    takes: str
    gives: tuple[str, ...]
    values: F32
    rows: bool


def factors_of(squares: npt.NDArray[np.float64]) -> F32:
    """Return the factors of columns by their sums of squares, float32 [n]; 1 for columns of zeros."""
    used = squares > 0
    if not used.any():
        return np.ones(len(squares), np.float32)
    sizes = np.log2(np.where(used, squares, 1)) / 2
    factors = np.exp2(SHARE * (sizes[used].mean() - sizes))
    return np.where(used, np.clip(factors, 1 / _MAX_FACTOR, _MAX_FACTOR), 1).astype(np.float32)


def balance_factors(model: Path, windows: npt.NDArray[np.int32], at_once: int) -> list[Factors]:
    """Return the factors that equalize a model's activations.

    Args:
        model: a GGUF file.
        windows: tokens of a text, int32 [windows, n_ctx], ``at_once`` of which run together.
    """
    n_ctx = windows.shape[1]
    sample = windows[: max(1, _TOKENS // n_ctx)]
    squares: dict[str, npt.NDArray[np.float64]] = {}
    scalables: dict[str, ScaleSite] = {}

    def observe(name: str, x: F32, ids: Any) -> None:
        sums = squares.setdefault(name, np.zeros((scalables[name].n_mat, x.shape[-1])))
        values = np.square(x.reshape(-1, x.shape[-1]), dtype=np.float64)
        for e in range(len(sums)):
            sums[e] += (values if scalables[name].ids is None else values[ids.reshape(-1) == e]).sum(axis=0)

    def rewrite(graph: Graph) -> Graph:
        graph = every_token(graph)
        tensors = {m.tensor.name: m.tensor for op in graph.ops for m in op.matrices()}
        scalables.clear()
        scalables.update({item.producer: item for item in find_scale_sites(graph, names) if _can_scale(item, tensors)})
        return replace(graph, ops=tuple(_add_observers(graph, scalables.values())))

    with open_model(model) as file:
        names = set(file.tensors)
    with load(model, n_ctx=n_ctx, n_ubatch=at_once * n_ctx, observer=observe, rewrite=rewrite) as loaded:
        norms = {name for name, item in scalables.items() if len(file.tensors[name].shape) == 1}
        for first in range(0, len(sample), at_once):
            batch = sample[first : first + at_once]
            sequences = np.repeat(np.arange(len(batch), dtype=np.int32), n_ctx)
            loaded.session(n_ctx, at_once).decode(batch.reshape(-1), sequences, np.zeros(batch.size, bool))
    factors = [
        Factors(
            name,
            item.consumers,
            np.stack([factors_of(matrix_squares) for matrix_squares in squares[name]]),
            name not in norms,
        )
        for name, item in scalables.items()
        if name in squares
    ]
    return [item for item in factors if (item.values != 1).any()]


def _can_scale(item: ScaleSite, tensors: Mapping[str, TensorInfo]) -> bool:
    return all(tensors[name].type.name in _SCALABLE_DTYPES for name in (item.producer, *item.consumers))


def _add_observers(graph: Graph, scalables: Iterable[ScaleSite]) -> list[Op]:
    by_value = {item.x: item for item in scalables}
    ops: list[Op] = []
    for op in graph.ops:
        ops.append(op)
        matches = [by_value[v] for v in op.outputs() if v in by_value]
        ops += [Observe(layer=op.layer, x=item.x, label=item.producer, ids=item.ids) for item in matches]
    return ops


@dataclass(frozen=True, eq=False)
class BalancedSource(SourceView):
    """A source whose values are multiplied by ``factors``."""

    factors: Sequence[Factors]

    @cached_property
    def _tensor_factors(self) -> dict[str, list[tuple[F32, bool]]]:
        """Factors of each tensor: by column, or by row."""
        result: dict[str, list[tuple[F32, bool]]] = {}
        for item in self.factors:
            result.setdefault(item.takes, []).append((item.values, item.rows))
            for name in item.gives:
                result.setdefault(name, []).append((np.reciprocal(item.values), False))
        return result

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors; those with factors are F32."""
        return {name: self._as_f32(tensor) for name, tensor in self.source.tensors.items()}

    def _as_f32(self, tensor: TensorInfo) -> TensorInfo:
        if tensor.name not in self._tensor_factors:
            return tensor
        return replace(tensor, type=BY_NAME["F32"], nbytes=BY_NAME["F32"].tensor_bytes(tensor.shape))

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.source.fingerprint().encode())
        for item in self.factors:
            digest.update(" ".join((item.takes, *item.gives)).encode() + item.values.tobytes())
        return digest.hexdigest()

    def read(self, tensor: TensorInfo, out: U8, offset: int, readahead: int = 0) -> None:
        """Fill ``out`` from byte ``offset`` of a tensor on, whole values, multiplied."""
        if tensor.name not in self._tensor_factors:
            self.source.read(tensor, out, offset, readahead)
            return
        stored, n = self.source.tensors[tensor.name], tensor.shape[0]
        dtype = _SCALABLE_DTYPES[stored.type.name]
        values = out.view(np.float32)
        first = offset // 4
        raw = np.empty(len(values), dtype)
        self.source.read(stored, raw.view(np.uint8), first * dtype.itemsize, readahead // 4 * dtype.itemsize)
        values[...] = (raw.astype(np.uint32) << 16).view(np.float32) if dtype == np.uint16 else raw
        rows = np.arange(first // n, -(-(first + len(values)) // n))
        scale = np.ones((len(rows), n), np.float32)
        row_count = tensor.shape[1] if len(tensor.shape) > 1 else 1
        for factors, by_row in self._tensor_factors[tensor.name]:
            matrix = rows // row_count % len(factors)
            scale *= factors[matrix, rows % row_count][:, None] if by_row else factors[matrix]
        values *= scale.reshape(-1)[first - n * int(rows[0]) :][: len(values)]

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        return None if tensor.name in self._tensor_factors else self.source.place(tensor)
