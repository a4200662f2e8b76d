"""Stages of a graph, for sequential calibration: each ends where the inputs of some weights are complete.

    find_cuts            cut points, and the inputs that are complete there
    split_stages         the operations between cut points, with the values that cross them
    with_given_routing   a graph that also computes the inputs of experts under the routing of another run

A stage runs for all tokens before the next one starts, so that the weights of a stage can be quantized by the inputs
that earlier stages compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from quantkit.model import ops
from quantkit.model.observers import BY_ROW, Input, inputs, map_values
from quantkit.model.ops import Cache, Graph, Op, Value


@dataclass(frozen=True, eq=False)
class CutPoint:
    """A point before operation ``index`` of a graph, where ``inputs`` are computed and not yet multiplied."""

    index: int
    inputs: tuple[Input, ...]


@dataclass(frozen=True, eq=False)
class Stage:
    """A part of a graph: ``graph.inputs`` enter from earlier stages, ``graph.leaves`` leave to later ones."""

    graph: Graph
    #: Values of this stage and of earlier ones that later stages read.
    live: frozenset[Value]


def find_cuts(graph: Graph, weights: Set[str]) -> list[CutPoint]:
    """Return the fewest cut points such that ``weights`` are only used after the cut point of their input.

    If a weight is used several times, only its first input counts.
    """
    waiting: list[Input] = []
    covered = set[str]()
    for item in inputs(graph, process_output=True):
        if not covered.issuperset(weights & set(item.names)):
            waiting.append(item)
        covered.update(item.names)
    result: list[CutPoint] = []
    available = set[Value]()
    for index, op in enumerate(graph.ops):
        if any(_needs(op, item, weights) for item in waiting):
            ready = tuple(i for i in waiting if i.x in available and (i.ids is None or i.ids in available))
            result.append(CutPoint(index, ready))
            waiting = [i for i in waiting if i not in ready]
        available.update(op.outputs())
    return result


def _needs(op: Op, item: Input, weights: Set[str]) -> bool:
    """Return whether an operation selects rows of an input, or multiplies it by one of the weights."""
    if item.x not in op.inputs():
        return False
    selects = isinstance(op, ops.SelectOutputs)
    return selects or any(m.tensor.name in weights and m.tensor.name in item.names for m in op.matrices())


def find_addends(graph: Graph, cut_point: CutPoint) -> list[list[tuple[Value, float]]]:
    """Return, for each input of a cut point, the available values that its product is added to, and its factor.

    These are the residual stream and outputs of other experts; none if a norm comes between. Where n products are added
    to the same value, factors are n times as large, so that each product has its share.
    """
    readers: dict[Value, list[Op]] = {}
    for op in graph.ops:
        for value in op.inputs():
            readers.setdefault(value, []).append(op)
    available = {value for op in graph.ops[: cut_point.index] for value in op.outputs()}
    addends = [_find_addends(item, readers, available) for item in cut_point.inputs]
    times = Counter(value for pairs in addends for value, _ in pairs)
    return [[(value, factor * times[value]) for value, factor in pairs] for pairs in addends]


def _find_addends(item: Input, readers: Mapping[Value, list[Op]], available: Set[Value]) -> list[tuple[Value, float]]:
    value, factor = next(iter(item.reader.outputs())), 1.0
    addends: list[tuple[Value, float]] = []
    while len(readers.get(value, ())) == 1:
        op = readers[value][0]
        if isinstance(op, ops.Scale):
            factor *= op.factor
        elif isinstance(op, ops.Add):
            addend = op.b if op.a is value else op.a
            addends += [(addend, factor)] if addend in available else []
        elif not isinstance(op, ops.Combine):
            return []
        value = next(iter(op.outputs()))
    return addends


def split_stages(graph: Graph, ends: Sequence[int], observed: Sequence[Collection[Value]] = ()) -> list[Stage]:
    """Return the stages that end before the operations ``ends`` of a graph.

    observed: for every stage, values that are read when it ends. Tables of rope angles, which depend on positions only,
    are computed in every stage that reads them.
    """
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    source = {value: op for op in graph.ops if isinstance(op, ops.RopeTable) for value in op.outputs()}
    writes = graph.cache_writes()
    parts = [_complete(graph.ops[begin:end], source, writes) for begin, end in bounds]
    outputs = [{v for op in part for v in op.outputs()} for part in parts]
    takes = [
        _distinct(v for op in part for v in op.inputs() if v not in part_outputs)
        for part, part_outputs in zip(parts, outputs, strict=True)
    ]
    result: list[Stage] = []
    for k, part in enumerate(parts):
        later = {v for values in (*takes[k + 1 :], *observed[k:]) for v in values}
        leaves = tuple(v for op in part for v in op.outputs() if v in later and v not in source)
        live = frozenset(v for part_outputs in outputs[: k + 1] for v in part_outputs if v in later and v not in source)
        result.append(Stage(replace(graph, ops=tuple(part), inputs=tuple(takes[k]), leaves=leaves), live))
    return result


def _distinct(values: object) -> list[Value]:
    return list(dict.fromkeys(values))  # type: ignore[call-overload]


def _complete(part: Sequence[Op], source: dict[Value, ops.RopeTable], writes: Mapping[Cache, Sequence[Op]]) -> list[Op]:
    """Return a stage's operations with the rope tables and cache writes of earlier stages that it reads."""
    result: list[Op] = []
    tables, stored = set[Value](), set[tuple[type[Op], Cache | None]]()
    for op in part:
        for value in op.inputs():
            if value in source and value not in tables:
                tables.add(value)
                result += [source[value]] if source[value] not in part else []
        if isinstance(op, ops.CacheWrite | ops.BlockWrite):
            stored.add((type(op), op.cache))
        read = op.cache if isinstance(op, ops.Attention | ops.LightningIndexer) else None
        for write in writes[read] if read is not None else ():
            if (type(write), read) not in stored:
                stored.add((type(write), read))
                result.append(replace(write, layer=op.layer))
        result.append(op)
    return result


# ---------------------------------------------------------------- experts

#: Operations between routing and the sum of experts, row by row.
_OF_EXPERTS = tuple(kind for kind in BY_ROW if kind not in (ops.Combine, ops.MulMat, ops.MulMatHeads, ops.Route))


@dataclass(frozen=True, eq=False)
class Routed:
    """A graph that also computes the inputs of experts under given routing.

    inputs: the given ids and weights, by those of the graph's own routing. observed: by a value that depends on the own
    routing, the one under the given routing. new_index: by the index of an operation of the original graph, its index.
    """

    graph: Graph
    inputs: dict[Value, Value]
    observed: dict[Value, Value]
    new_index: list[int]


def with_given_routing(graph: Graph, observed_inputs: Sequence[Input]) -> Routed:
    """Return a graph that also computes ``observed_inputs`` under given routing, where they depend on it."""
    routes = {op.ids: op for op in graph.ops if isinstance(op, ops.Route)}
    place = {value: i for i, op in enumerate(graph.ops) for value in op.outputs()}
    routing_inputs: dict[Value, Value] = {}
    renamed: dict[Value, Value] = {}
    added: dict[int, list[Op]] = {}

    def reroute(value: Value) -> Value:
        """Return the value under the given routing, adding the operations that compute it."""
        if value in renamed:
            return renamed[value]
        if value not in place:
            return value
        op = graph.ops[place[value]]
        if isinstance(op, ops.Route):
            routing_inputs[value] = renamed[value] = replace(value, name=f"{value.name}_given")
            return renamed[value]
        if not isinstance(op, _OF_EXPERTS):
            return value
        new = {v: reroute(v) for v in op.inputs()}
        if all(a is b for a, b in new.items()):
            renamed[value] = value
            return value
        new |= {v: replace(v, name=f"{v.name}_routed") for v in op.outputs()}
        renamed.update({v: new[v] for v in op.outputs()})
        added.setdefault(place[value], []).append(map_values(op, lambda v: new.get(v, v)))
        return renamed[value]

    observed = {i.x: reroute(i.x) for i in observed_inputs if i.ids in routes}
    observed = {x: new for x, new in observed.items() if new is not x}
    result: list[Op] = []
    new_index: list[int] = []
    for i, op in enumerate(graph.ops):
        new_index.append(len(result))
        result += [op, *added.get(i, ())]
    new_index.append(len(result))
    routed = replace(graph, ops=tuple(result), inputs=(*graph.inputs, *routing_inputs.values()))
    return Routed(routed, routing_inputs, observed, new_index)
