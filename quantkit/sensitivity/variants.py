"""A model with one group of tensors replaced: runs only the operations that depend on it.

The graph is cut where layers begin. In a layer with a replaced tensor only the dependent operations run, with the
base's activations as inputs; then the unchanged later layers run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import GGUFFile, TensorInfo
from quantkit.model.backends import Limits
from quantkit.model.batch import Batch
from quantkit.model.engine import Model, Programs
from quantkit.model.ops import (
    Attention,
    BlockWrite,
    Cache,
    CacheWrite,
    Graph,
    LightningIndexer,
    Matrix,
    Op,
    RopeTable,
    Value,
)
from quantkit.model.stages import Stage, split_stages

Values = dict[Value, npt.NDArray[Any]]
#: Replaced tensors by name: their tensor info and bytes.
Overrides = dict[str, tuple[TensorInfo, npt.NDArray[np.uint8]]]


class OverlaidFile:
    """A GGUFFile with some tensors replaced by ``overrides``, in memory and in another type."""

    def __init__(self, source: GGUFFile) -> None:
        self.source = source
        self.overrides: Overrides = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def data(self, tensor: TensorInfo | str) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes."""
        if not isinstance(tensor, str):
            override = self.overrides.get(tensor.name)
            if override is not None and override[0] is tensor:
                return override[1]
        return self.source.data(tensor)


def layer_bounds(graph: Graph) -> list[int]:
    """Return the index of the first operation of each layer but the first, and the number of operations."""
    bounds, last = list[int](), graph.ops[0].layer
    for index, op in enumerate(graph.ops):
        if op.layer > last:
            last = op.layer
            bounds.append(index)
    return [*bounds, len(graph.ops)]


@dataclass(frozen=True, eq=False)
class Layer:
    """Operations ``begin`` to ``end`` of a graph, and the rest of the graph as ``tail``, None for the last layer."""

    begin: int
    end: int
    #: Its inputs from earlier layers and outputs to later ones.
    stage: Stage
    tail: Stage | None


def layers_of(graph: Graph) -> list[Layer]:
    """Return the layers of a graph; the first one includes the operations before it."""
    bounds = layer_bounds(graph)
    n = len(graph.ops)
    layers = list[Layer]()
    begin = 0
    for end in bounds:
        points = [point for point in (begin, end, n) if point]
        parts = split_stages(graph, list(dict.fromkeys(points)))
        index = int(begin > 0)
        layers.append(Layer(begin, end, parts[index], parts[index + 1] if end < n else None))
        begin = end
    return layers


def first_layer(layers: Sequence[Layer], graph: Graph, names: Set[str]) -> int | None:
    """Return the first layer with an operation that reads one of the tensors; None if there is none."""
    for number, layer in enumerate(layers):
        if reads_tensor(graph.ops[layer.begin : layer.end], names):
            return number
    return None


def reads_tensor(ops: Iterable[Op], names: Set[str]) -> bool:
    """Return whether an operation reads one of the tensors."""
    return any(m.tensor.name in names for op in ops for m in op.matrices())


def variant_of(graph: Graph, layer: Layer, names: Set[str]) -> tuple[Stage, bool]:
    """Return the part of a layer that runs again when tensors change, and whether it extends to the end of the graph.

    It does if later layers also read the tensors.
    """
    extends_to_end = layer.tail is not None and reads_tensor(graph.ops[layer.end :], names)
    first, after = graph.ops[: layer.begin], graph.ops[layer.end :]
    ops = (*graph.ops[layer.begin : layer.end], *(after if extends_to_end else ()))
    remainder = () if extends_to_end else after
    clean, dirty = _split_dependent(ops, names)
    points = [len(first) + len(clean), len(first) + len(ops)]
    parts = split_stages(
        replace(graph, ops=(*first, *clean, *dirty, *remainder)), [*points, *([len(graph.ops)] if remainder else [])]
    )
    return parts[1], extends_to_end


def has_visible_error(graph: Graph, layer: Layer, names: Set[str]) -> bool:
    """Return whether a replaced tensor's error shows at the end of its layer: unchanged layers follow."""
    return layer.tail is not None and not reads_tensor(graph.ops[layer.end :], names)


def _split_dependent(ops: Sequence[Op], names: Set[str]) -> tuple[list[Op], list[Op]]:
    """Return the operations that do not depend on the tensors, and those that do."""
    clean, dirty = list[Op](), list[Op]()
    values, caches = set[Value](), set[Cache]()
    for op in ops:
        reads = op.cache in caches if isinstance(op, Attention | LightningIndexer) else False
        if reads or reads_tensor([op], names) or not values.isdisjoint(op.inputs()):
            values.update(op.outputs())
            if isinstance(op, BlockWrite | CacheWrite):
                caches.add(op.cache)
            dirty.append(op)
        else:
            clean.append(op)
    return clean, dirty


def retype(graph: Graph, infos: Mapping[str, TensorInfo]) -> Graph:
    """Return a graph whose operations read other encodings of tensors."""
    return replace(graph, ops=tuple(_retype_op(op, infos) for op in graph.ops))


def _retype_op(op: Op, infos: Mapping[str, TensorInfo]) -> Op:
    changed: dict[str, Any] = {}
    for f in fields(op):
        part = getattr(op, f.name)
        if isinstance(part, Matrix) and part.tensor.name in infos:
            changed[f.name] = replace(part, tensor=infos[part.tensor.name])
    return replace(op, **changed) if changed else op


class Runner:
    """Runs parts of a model for batches of ``windows`` windows. ``first``: the first scored position.

    The model is loaded with ``wrap=OverlaidFile``.
    """

    def __init__(self, model: Model, n_ctx: int, windows: int, first: int) -> None:
        self.model = model
        self.n_ctx = n_ctx
        self.first = first
        self._limits = Limits(n_ctx, windows, n_ctx * windows, model.kv_type)
        assert isinstance(model.source, OverlaidFile)
        self.overlay = model.source

    def compile(self, graph: Graph, overrides: Overrides | None = None) -> Programs:
        """Return a compiled part in which tensors have the encodings of ``overrides``."""
        self.overlay.overrides = overrides or {}
        try:
            part = retype(graph, {name: info for name, (info, _) in self.overlay.overrides.items()})
            return self.model.part(part, self._limits)
        finally:
            self.overlay.overrides = {}

    def batch(self, windows: npt.NDArray[np.int32]) -> Batch:
        """Return windows, int32 [n, n_ctx], as a batch."""
        n, n_ctx = windows.shape
        scored = np.zeros((n, n_ctx), bool)
        scored[:, self.first : n_ctx - 1] = True
        return Batch(
            windows.reshape(-1),
            np.tile(np.arange(n_ctx, dtype=np.int32), n),
            np.repeat(np.arange(n, dtype=np.int32), n_ctx),
            np.flatnonzero(scored).astype(np.int32),
        )

    def run(self, programs: Programs, graph: Graph, batch: Batch, inputs: Mapping[Value, Any]) -> Values:
        """Run a part and return its outputs, valid until its next run."""
        programs.clear()
        programs.run(batch, {value: inputs[value] for value in graph.inputs})
        outputs = {v for op in graph.ops for v in op.outputs()}
        leaves = (*graph.leaves, *((graph.logits,) if graph.logits in outputs else ()))
        return {v: programs.read(v).reshape(batch.rows(v.outputs) * v.per, v.width) for v in leaves}


def with_leaves(graph: Graph, values: Iterable[Value]) -> Graph:
    """Return a part with further outputs: those of ``values`` that it computes."""
    outputs = {v for op in graph.ops if not isinstance(op, RopeTable) for v in op.outputs()}
    return replace(graph, leaves=tuple(dict.fromkeys((*graph.leaves, *(v for v in values if v in outputs)))))
