"""A model with one group of tensors quantized: only what depends on it is computed, from the model's own values.

A graph is cut where a layer begins. Of a layer with a changed tensor run the operations that depend on it, with values
that the model itself gave; then the layers behind, which are as they were.
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
from quantkit.model.stages import Stage, stages

Values = dict[Value, npt.NDArray[Any]]
#: Tensors in another type, by name: what they are, and their bytes.
Held = dict[str, tuple[TensorInfo, npt.NDArray[np.uint8]]]


class Changed:
    """A GGUFFile some of whose tensors are held in memory, in another type: those of ``held``, by name."""

    def __init__(self, source: GGUFFile) -> None:
        self.source = source
        self.held: Held = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def data(self, tensor: TensorInfo | str) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes."""
        if not isinstance(tensor, str):
            own = self.held.get(tensor.name)
            if own is not None and own[0] is tensor:
                return own[1]
        return self.source.data(tensor)


def layer_bounds(graph: Graph) -> list[int]:
    """Return the operations before which a later layer begins, and the number of all."""
    found, last = list[int](), graph.ops[0].layer
    for at, op in enumerate(graph.ops):
        if op.layer > last:
            last = op.layer
            found.append(at)
    return [*found, len(graph.ops)]


@dataclass(frozen=True, eq=False)
class Layer:
    """Operations ``begin`` .. ``end`` of a graph, and what follows them, None behind the last."""

    begin: int
    end: int
    #: What it takes of earlier layers, what it leaves to later ones.
    own: Stage
    tail: Stage | None


def layers_of(graph: Graph) -> list[Layer]:
    """Return the layers of a graph; the first has what comes before layers, too."""
    bounds, n, found, begin = layer_bounds(graph), len(graph.ops), list[Layer](), 0
    for end in bounds:
        at = [each for each in (begin, end, n) if each]
        cut = stages(graph, list(dict.fromkeys(at)))
        index = int(begin > 0)
        found.append(Layer(begin, end, cut[index], cut[index + 1] if end < n else None))
        begin = end
    return found


def first_layer(layers: Sequence[Layer], graph: Graph, names: Set[str]) -> int | None:
    """Return the first layer with an operation that reads one of the tensors; None if nothing does."""
    for number, layer in enumerate(layers):
        if uses(graph.ops[layer.begin : layer.end], names):
            return number
    return None


def uses(ops: Iterable[Op], names: Set[str]) -> bool:
    """Tell whether an operation reads one of the tensors."""
    return any(m.tensor.name in names for op in ops for m in op.matrices())


def variant_of(graph: Graph, layer: Layer, names: Set[str]) -> tuple[Stage, bool]:
    """Return what must run anew of a layer where tensors change, and whether the layers behind are in it.

    They are if the tensors are used there, too.
    """
    through = layer.tail is not None and uses(graph.ops[layer.end :], names)
    first, after = graph.ops[: layer.begin], graph.ops[layer.end :]
    ops = (*graph.ops[layer.begin : layer.end], *(after if through else ()))
    left = () if through else after
    clean, dirty = _apart(ops, names)
    at = [len(first) + len(clean), len(first) + len(ops)]
    found = stages(replace(graph, ops=(*first, *clean, *dirty, *left)), [*at, *([len(graph.ops)] if left else [])])
    return found[1], through


def ends_within(graph: Graph, layer: Layer, names: Set[str]) -> bool:
    """Tell whether a changed tensor's error can be seen where its layer ends: there are layers behind it, unchanged."""
    return layer.tail is not None and not uses(graph.ops[layer.end :], names)


def _apart(ops: Sequence[Op], names: Set[str]) -> tuple[list[Op], list[Op]]:
    """Return operations that do not depend on tensors, and those that do."""
    clean, dirty = list[Op](), list[Op]()
    values, caches = set[Value](), set[Cache]()
    for op in ops:
        reads = op.cache in caches if isinstance(op, Attention | LightningIndexer) else False
        if reads or uses([op], names) or not values.isdisjoint(op.inputs()):
            values.update(op.outputs())
            if isinstance(op, BlockWrite | CacheWrite):
                caches.add(op.cache)
            dirty.append(op)
        else:
            clean.append(op)
    return clean, dirty


def retyped(graph: Graph, infos: Mapping[str, TensorInfo]) -> Graph:
    """Return a graph whose operations read other encodings of tensors."""
    return replace(graph, ops=tuple(_retyped(op, infos) for op in graph.ops))


def _retyped(op: Op, infos: Mapping[str, TensorInfo]) -> Op:
    changed: dict[str, Any] = {}
    for f in fields(op):
        part = getattr(op, f.name)
        if isinstance(part, Matrix) and part.tensor.name in infos:
            changed[f.name] = replace(part, tensor=infos[part.tensor.name])
    return replace(op, **changed) if changed else op


class Runner:
    """Runs parts of a model for batches of ``windows`` windows; ``first``: the first position that is scored.

    The model is loaded with ``wrap=Changed``.
    """

    def __init__(self, model: Model, n_ctx: int, windows: int, first: int) -> None:
        self.model, self.n_ctx, self.first = model, n_ctx, first
        self._limits = Limits(n_ctx, windows, n_ctx * windows, model.kv_type)
        assert isinstance(model.source, Changed)
        self.changed = model.source

    def compile(self, graph: Graph, held: Held | None = None) -> Programs:
        """Return a part, compiled, in which tensors are as they are ``held``."""
        self.changed.held = held or {}
        try:
            part = retyped(graph, {name: info for name, (info, _) in self.changed.held.items()})
            return self.model.part(part, self._limits)
        finally:
            self.changed.held = {}

    def batch(self, windows: npt.NDArray[np.int32]) -> Batch:
        """Return windows, int32 [n, n_ctx], as a batch."""
        n, n_ctx = windows.shape
        wanted = np.zeros((n, n_ctx), bool)
        wanted[:, self.first : n_ctx - 1] = True
        return Batch(
            windows.reshape(-1),
            np.tile(np.arange(n_ctx, dtype=np.int32), n),
            np.repeat(np.arange(n, dtype=np.int32), n_ctx),
            np.flatnonzero(wanted).astype(np.int32),
        )

    def run(self, programs: Programs, graph: Graph, batch: Batch, given: Mapping[Value, Any]) -> Values:
        """Run a part and return what leaves it; values are valid until its next run."""
        programs.clear()
        programs.run(batch, {value: given[value] for value in graph.given})
        made = {v for op in graph.ops for v in op.outputs()}
        leaves = (*graph.leaves, *((graph.logits,) if graph.logits in made else ()))
        return {v: programs.read(v).reshape(batch.rows(v.outputs) * v.per, v.width) for v in leaves}


def with_leaves(graph: Graph, more: Iterable[Value]) -> Graph:
    """Return a part from which further values leave, as far as it makes them."""
    made = {v for op in graph.ops if not isinstance(op, RopeTable) for v in op.outputs()}
    return replace(graph, leaves=tuple(dict.fromkeys((*graph.leaves, *(v for v in more if v in made)))))
