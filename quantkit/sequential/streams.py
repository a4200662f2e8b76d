"""Two runs of a model side by side, stage by stage: as it is, and with the weights that are encoded so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from quantkit.errors import TypeNotSupported
from quantkit.model.backends import Limits
from quantkit.model.batch import Batch
from quantkit.model.engine import Model, Programs, load
from quantkit.model.observers import Input, every_token
from quantkit.model.ops import Graph, Repeat, Route, Value
from quantkit.model.selection import without_selection
from quantkit.model.stages import Stage, added_to, as_routed_by, cuts, stages
from quantkit.sequential.spill import Place, Spill

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Seen:
    """An input of weights as both streams have it, in the files.

    x: of the quantized stream; of the plain one, ``plain``. ids, weights: of the routing, as the quantized stream has
    it; no weights where x has them in it. heads: inputs side by side in a row.
    """

    entry: str
    x: Place
    plain: Place
    ids: Place | None
    weights: Place | None
    matrices: int
    heads: int
    #: What its product is added to, in both streams, and the factor that the product is scaled by.
    added_to: tuple[tuple[Place, Place, float], ...] = ()

    @property
    def n(self) -> int:
        """The columns of a matrix."""
        return self.x.width // self.heads


@dataclass(frozen=True)
class Tokens:
    """The text: int32 [windows, n_ctx], ``at_once`` of which run together; BOS, if any, is in its place."""

    windows: I32
    at_once: int

    @property
    def count(self) -> int:
        return int(self.windows.size)


class Streams:
    """Both runs of a model, cut where its ``weights`` need their inputs."""

    def __init__(self, model: Path, weights: Set[str], tokens: Tokens, spill: Spill, threads: int) -> None:
        self.tokens, self._spill, self._threads = tokens, spill, threads
        self._stack = ExitStack()
        self._source = self._stack.enter_context(_opened(model, threads, tokens))
        self._cuts = cuts(self._source.whole, weights)

    def __len__(self) -> int:
        return len(self._cuts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def open(self, output: Path, weights: Set[str]) -> None:
        """Open the file that grows, with the names that the weights have there: tensors are read when they are used.

        Raises TypeNotSupported if its operations do not have the same inputs in the same order.
        """
        made = self._stack.enter_context(_opened(output, self._threads, self.tokens))
        graph, source = made.whole, self._source.whole
        named = {name: v for v, name in _names(graph).items()}
        twins = {v: named[name] for v, name in _names(source).items() if name in named}
        self._observed = [
            [_Observed(item, graph, twins, a) for item, a in zip(cut.inputs, added_to(source, cut), strict=True)]
            for cut in self._cuts
        ]
        others = cuts(graph, weights)
        if [[o.x for o in cut] for cut in self._observed] != [[item.x for item in cut.inputs] for cut in others]:
            raise TypeNotSupported(
                f"{output}: what is written runs in other steps than its source, so that they cannot go side by side; "
                "do without --merge-up-gate or --split-up-gate, which can be done afterwards without loss"
            )
        routed = as_routed_by(source, [o.item for cut in self._observed for o in cut])
        for cut in self._observed:
            for each in cut:
                each.plain = routed.seen.get(each.item.x, each.item.x)
        plain = stages(
            routed.graph,
            [routed.at[cut.at] for cut in self._cuts],
            [[v for o in cut for v in (o.plain, *(own for own, _, _ in o.added_to))] for cut in self._observed],
        )
        # What the plain stream is given of the other must be there when a stage runs.
        given = {new: twins[own] for own, new in routed.given.items()}
        needed = [[given[v] for v in stage.graph.given if v in given] for stage in plain]
        seen = [
            [*(v for o in cut for v in o.values()), *need] for cut, need in zip(self._observed, needed, strict=True)
        ]
        self._quantized = _Stream("quantized", made, stages(graph, [cut.at for cut in others], seen), self._spill)
        self._plain = _Stream("plain", self._source, plain, self._spill, given)

    def seen(self, stage: int) -> list[Seen]:
        """Return the inputs that are there when a stage has run."""
        of, found = self._quantized.place, []
        for o in self._observed[stage]:
            ids, weights = (None if v is None else of(v) for v in (o.ids, o.weights))
            places = of(o.x), self._plain.place(o.plain), ids, weights
            added = tuple((of(b), self._plain.place(a), factor) for a, b, factor in o.added_to)
            found.append(Seen(o.item.names[0], *places, o.item.n_mat, o.item.heads, added))
        return found

    def run(self, stage: int, progress: Callable[[int], None]) -> None:
        """Run a stage in both streams, over all tokens; ``progress`` is told how many are done."""
        n_ctx = self.tokens.windows.shape[1]
        both = [stream.programs(stage, self.tokens) for stream in (self._quantized, self._plain)]
        for first in range(0, len(self.tokens.windows), self.tokens.at_once):
            windows = self.tokens.windows[first : first + self.tokens.at_once]
            batch = _batch(windows)
            made = self._quantized.run(both[0], stage, batch, first * n_ctx)
            self._plain.run(both[1], stage, batch, first * n_ctx, made, self._quantized)
            progress((first + len(windows)) * n_ctx)
        live = [(stream, v) for stream in (self._quantized, self._plain) for v in stream.stages[stage].live]
        self._spill.settle(stage, {stream.place(v).file for stream, v in live})


class _Observed:
    """An input as the graph of the output has it: its routing, too, and the value to compare with of the other."""

    def __init__(
        self, item: Input, graph: Graph, twins: Mapping[Value, Value], added_to: Sequence[tuple[Value, float]]
    ) -> None:
        self.added_to = [(value, twins[value], factor) for value, factor in added_to]
        self.item, self.plain = item, item.x
        self.x = twins[item.x]
        self.ids = None if item.ids is None else twins[item.ids]
        routed = next((op.weights for op in graph.ops if isinstance(op, Route) and op.ids is self.ids), None)
        # Inputs that are weighted (Llama 4) already include the weights.
        repeated = any(isinstance(op, Repeat) and op.weights is routed for op in graph.ops)
        self.weights = None if repeated else routed

    def values(self) -> list[Value]:
        return [v for v in (self.x, self.ids, self.weights, *(b for _, b, _ in self.added_to)) if v is not None]


class _Stream:
    """One run of a model: its stages, and where their values lie."""

    def __init__(
        self, name: str, model: Model, parts: Sequence[Stage], spill: Spill, given: Mapping[Value, Value] | None = None
    ) -> None:
        self.name, self.model, self.stages, self._spill, self._given = name, model, parts, spill, given or {}
        self._numbers = {v: i for i, v in enumerate(v for stage in parts for v in stage.graph.leaves)}

    def place(self, value: Value) -> Place:
        return Place(f"{self.name}-{self._numbers[value]}", value.width, value.per, value.integer)

    def programs(self, stage: int, tokens: Tokens) -> Programs:
        """Return a stage, compiled."""
        n_ctx, at_once = tokens.windows.shape[1], tokens.at_once
        return self.model.part(self.stages[stage].graph, Limits(n_ctx, at_once, n_ctx * at_once, self.model.kv_type))

    def read(self, value: Value, batch: Batch, token: int) -> Any:
        """Return what an earlier stage left of a value for the tokens of a batch, the first being ``token``."""
        return self._spill.read(self.place(value), token, len(batch.tokens))

    def run(
        self,
        programs: Programs,
        stage: int,
        batch: Batch,
        token: int,
        made: Mapping[Value, Any] | None = None,
        other: _Stream | None = None,
    ) -> dict[Value, Any]:
        """Run a stage for some tokens and return its values; ``made`` are those of the ``other`` stream."""
        values: dict[Value, Any] = {}
        for value in self.stages[stage].graph.given:
            if value not in self._given:
                values[value] = self.read(value, batch, token)
                continue
            assert made is not None
            assert other is not None
            own = self._given[value]
            values[value] = made[own] if own in made else other.read(own, batch, token)
        programs.clear()
        programs.run(batch, values)
        for value in self.stages[stage].graph.leaves:
            values[value] = programs.read(value).reshape(len(batch.tokens) * value.per, value.width).copy()
            self._spill.write(self.place(value), token, values[value])
        return values


def _names(graph: Graph) -> dict[Value, tuple[str, int]]:
    """Return the name of each value, and how many before it have the same."""
    met = Counter[str]()
    found: dict[Value, tuple[str, int]] = {}
    for value in (v for op in graph.ops for v in op.outputs()):
        found[value] = value.name, met[value.name]
        met[value.name] += 1
    return found


def _opened(path: Path, threads: int, tokens: Tokens) -> Model:
    n_ctx = tokens.windows.shape[1]

    def rewrite(graph: Graph) -> Graph:
        return without_selection(every_token(graph), n_ctx)

    return load(path, threads=threads, n_ctx=n_ctx, n_ubatch=n_ctx * tokens.at_once, rewrite=rewrite)


def _batch(windows: I32) -> Batch:
    n, n_ctx = windows.shape
    positions = np.tile(np.arange(n_ctx, dtype=np.int32), n)
    sequences = np.repeat(np.arange(n, dtype=np.int32), n_ctx)
    return Batch(windows.reshape(-1), positions, sequences, np.empty(0, np.int32))
