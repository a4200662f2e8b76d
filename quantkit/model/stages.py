"""A graph cut into stages, each of which ends where some weights' inputs are all there: for what goes layer by layer.

    cuts           where to cut, and which inputs are complete there
    stages         the operations between cuts, with the values that cross them
    as_routed_by   a graph that also computes what its experts see where another run of the model routes the tokens

A stage runs by itself, for all tokens, before the next one does. So weights that a later stage multiplies by may be
made of the inputs that earlier stages give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from quantkit.model import ops
from quantkit.model.observers import BY_ROW, Input, inputs, mapped, norms
from quantkit.model.ops import Cache, Graph, Op, Value


@dataclass(frozen=True, eq=False)
class Cut:
    """A place before operation ``at`` of a graph, where ``inputs`` are there and nothing has multiplied by them."""

    at: int
    inputs: tuple[Input, ...]


@dataclass(frozen=True, eq=False)
class Stage:
    """A part of a graph: ``graph.given`` enters from earlier stages, ``graph.leaves`` leaves to later ones."""

    graph: Graph
    #: Values of this stage and of earlier ones that later stages read.
    live: frozenset[Value]


def cuts(graph: Graph, weights: Set[str]) -> list[Cut]:
    """Return the fewest cuts so that no operation before one multiplies by ``weights`` of its inputs, or of later ones.

    Weights may be of matrices, and of norms.
    Of a weight that is used several times, only the first input counts.
    """
    waiting: list[Input] = []
    known = set[str]()
    for item in (*norms(graph), *inputs(graph, process_output=True)):
        if not known.issuperset(weights & set(item.names)):
            waiting.append(item)
        known.update(item.names)
    found: list[Cut] = []
    made = set[Value]()
    for at, op in enumerate(graph.ops):
        if any(_needs(op, item, weights) for item in waiting):
            ready = tuple(i for i in waiting if i.x in made and (i.ids is None or i.ids in made))
            found.append(Cut(at, ready))
            waiting = [i for i in waiting if i not in ready]
        made.update(op.outputs())
    return found


def _needs(op: Op, item: Input, weights: Set[str]) -> bool:
    """Tell whether an operation reads an input, or chooses rows of it, to multiply by one of the weights."""
    if item.x not in op.inputs():
        return False
    chosen = isinstance(op, ops.SelectOutputs)
    return chosen or any(m.tensor.name in weights and m.tensor.name in item.names for m in op.matrices())


def added_to(graph: Graph, cut: Cut) -> list[list[tuple[Value, float]]]:
    """Return, for each input of a cut, what its product is added to and is there, and by what factor it is scaled.

    That is the residual stream, and perhaps what other experts gave; nothing where a norm comes between. Where several
    products are added to the same, each counts for its share: factors are that many times as large.
    """
    readers: dict[Value, list[Op]] = {}
    for op in graph.ops:
        for value in op.inputs():
            readers.setdefault(value, []).append(op)
    made = {value for op in graph.ops[: cut.at] for value in op.outputs()}
    found = [_added_to(item, readers, made) for item in cut.inputs]
    times = Counter(value for each in found for value, _ in each)
    return [[(value, factor * times[value]) for value, factor in each] for each in found]


def _added_to(item: Input, readers: Mapping[Value, list[Op]], made: Set[Value]) -> list[tuple[Value, float]]:
    if isinstance(item.at, ops.Norm):
        return []
    value, factor = next(iter(item.at.outputs())), 1.0
    found: list[tuple[Value, float]] = []
    while len(readers.get(value, ())) == 1:
        op = readers[value][0]
        if isinstance(op, ops.Scale):
            factor *= op.factor
        elif isinstance(op, ops.Add):
            other = op.b if op.a is value else op.a
            found += [(other, factor)] if other in made else []
        elif not isinstance(op, ops.Combine):
            return []
        value = next(iter(op.outputs()))
    return found


def stages(graph: Graph, at: Sequence[int], seen: Sequence[Collection[Value]] = ()) -> list[Stage]:
    """Return the stages that end before the operations ``at`` of a graph.

    ``seen``: for every stage, values that are read when it ends. Operations that read no value but the tokens'
    positions are repeated wherever they are needed.
    """
    bounds = list(zip([0, *at[:-1]], at, strict=True))
    source = {value: op for op in graph.ops if isinstance(op, ops.RopeTable) for value in op.outputs()}
    writes = graph.cache_writes()
    parts = [_whole(graph.ops[begin:end], source, writes) for begin, end in bounds]
    made = [{v for op in part for v in op.outputs()} for part in parts]
    takes = [
        _distinct(v for op in part for v in op.inputs() if v not in own) for part, own in zip(parts, made, strict=True)
    ]
    found: list[Stage] = []
    for k, part in enumerate(parts):
        later = {v for each in takes[k + 1 :] for v in each} | {v for each in seen[k:] for v in each}
        leaves = tuple(v for op in part for v in op.outputs() if v in later and v not in source)
        live = frozenset(v for own in made[: k + 1] for v in own if v in later and v not in source)
        found.append(Stage(replace(graph, ops=tuple(part), given=tuple(takes[k]), leaves=leaves), live))
    return found


def _distinct(values: object) -> list[Value]:
    return list(dict.fromkeys(values))  # type: ignore[call-overload]


def _whole(part: Sequence[Op], source: dict[Value, ops.RopeTable], writes: Mapping[Cache, Sequence[Op]]) -> list[Op]:
    """Return operations with those that earlier ones did once and that must be done in every stage."""
    listed: list[Op] = []
    tables, kept = set[Value](), set[tuple[type[Op], Cache | None]]()
    for op in part:
        for value in op.inputs():
            if value in source and value not in tables:
                tables.add(value)
                listed += [source[value]] if source[value] not in part else []
        if isinstance(op, ops.CacheWrite | ops.BlockWrite):
            kept.add((type(op), op.cache))
        read = op.cache if isinstance(op, ops.Attention | ops.LightningIndexer) else None
        for write in writes[read] if read is not None else ():
            if (type(write), read) not in kept:
                kept.add((type(write), read))
                listed.append(replace(write, layer=op.layer))
        listed.append(op)
    return listed


# ---------------------------------------------------------------- experts

#: What makes values of experts of others, row by row.
_OF_EXPERTS = tuple(kind for kind in BY_ROW if kind not in (ops.Combine, ops.MulMat, ops.MulMatHeads, ops.Route))


@dataclass(frozen=True, eq=False)
class Routed:
    """A graph with what experts see by another run's routing.

    given: the ids and weights that it takes, by those of its own. seen: by a value of its own that depends on the
    routing, the one that it has by the other's. at: by the number of an operation of the graph before, its number now.
    """

    graph: Graph
    given: dict[Value, Value]
    seen: dict[Value, Value]
    at: list[int]


def as_routed_by(graph: Graph, found: Sequence[Input]) -> Routed:
    """Return a graph that also makes the inputs ``found`` by given ids and weights, where they depend on routing."""
    routes = {op.ids: op for op in graph.ops if isinstance(op, ops.Route)}
    place = {value: i for i, op in enumerate(graph.ops) for value in op.outputs()}
    given: dict[Value, Value] = {}
    renamed: dict[Value, Value] = {}
    added: dict[int, list[Op]] = {}

    def other(value: Value) -> Value:
        """Return the value as it is by the other's routing, with the operations that make it so."""
        if value in renamed:
            return renamed[value]
        if value not in place:
            return value
        op = graph.ops[place[value]]
        if isinstance(op, ops.Route):
            given[value] = renamed[value] = replace(value, name=f"{value.name}_given")
            return renamed[value]
        if not isinstance(op, _OF_EXPERTS):
            return value
        new = {v: other(v) for v in op.inputs()}
        if all(a is b for a, b in new.items()):
            renamed[value] = value
            return value
        new |= {v: replace(v, name=f"{v.name}_routed") for v in op.outputs()}
        renamed.update({v: new[v] for v in op.outputs()})
        added.setdefault(place[value], []).append(mapped(op, lambda v: new.get(v, v)))
        return renamed[value]

    seen = {i.x: other(i.x) for i in found if i.ids in routes}
    seen = {x: new for x, new in seen.items() if new is not x}
    listed: list[Op] = []
    at: list[int] = []
    for i, op in enumerate(graph.ops):
        at.append(len(listed))
        listed += [op, *added.get(i, ())]
    at.append(len(listed))
    made = replace(graph, ops=tuple(listed), given=(*graph.given, *given.values()))
    return Routed(made, given, seen, at)
