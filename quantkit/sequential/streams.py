"""Two runs of a model in parallel, stage by stage: the original, and one with the weights encoded so far."""

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
from quantkit.formats.gguf import GGUFFile
from quantkit.model.backends import Limits
from quantkit.model.batch import Batch
from quantkit.model.engine import Model, Programs, load
from quantkit.model.observers import Input, every_token
from quantkit.model.ops import Graph, Repeat, Route, Value
from quantkit.model.selection import without_selection
from quantkit.model.stages import Stage, find_addends, find_cuts, split_stages, with_given_routing
from quantkit.sequential.spill import Place, Spill

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class SpilledInput:
    """An input of weights in both streams, in files.

    x: of the quantized stream; plain: of the original one. ids, weights: of the routing in the quantized stream;
    weights is None where x includes them. heads: inputs side by side in a row.
    """

    entry: str
    x: Place
    plain: Place
    ids: Place | None
    weights: Place | None
    matrices: int
    heads: int
    #: Values of both streams to which its product is added, and the factor of the product.
    added_to: tuple[tuple[Place, Place, float], ...] = ()

    @property
    def n(self) -> int:
        """The columns of a matrix."""
        return self.x.width // self.heads


@dataclass(frozen=True)
class Tokens:
    """The text: int32 [windows, n_ctx], ``at_once`` of which run together; BOS, if any, included."""

    windows: I32
    at_once: int

    @property
    def count(self) -> int:
        return int(self.windows.size)


class Streams:
    """Both runs of a model, cut at the inputs of its ``weights``."""

    def __init__(self, model: Path, weights: Set[str], tokens: Tokens, spill: Spill, threads: int) -> None:
        self.tokens = tokens
        self._spill = spill
        self._threads = threads
        self._stack = ExitStack()
        self._source = self._stack.enter_context(_open_model(model, threads, tokens))
        self._cuts = find_cuts(self._source.unfused, weights)

    def __len__(self) -> int:
        return len(self._cuts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def open_output(self, output: Path, weights: Set[str]) -> None:
        """Open the unfinished output, in which ``weights`` are the weights' names; tensors are read on use.

        Raises TypeNotSupported if its operations do not have the same inputs in the same order.
        """
        model = self._stack.enter_context(_open_model(output, self._threads, self.tokens, is_growing=True))
        graph, source = model.unfused, self._source.unfused
        by_name = {name: v for v, name in _names(graph).items()}
        counterparts = {v: by_name[name] for v, name in _names(source).items() if name in by_name}
        self._inputs = [
            [
                _StreamInput(item, graph, counterparts, a)
                for item, a in zip(point.inputs, find_addends(source, point), strict=True)
            ]
            for point in self._cuts
        ]
        output_cuts = find_cuts(graph, weights)
        if [[o.x for o in point] for point in self._inputs] != [
            [item.x for item in point.inputs] for point in output_cuts
        ]:
            raise TypeNotSupported(
                f"{output}: the output's steps differ from the source's, so they cannot run side by side; omit "
                "--merge-up-gate or --split-up-gate, and merge or split the output afterwards, without loss",
                "QK-E211",
            )
        routed = with_given_routing(source, [o.item for point in self._inputs for o in point])
        for point in self._inputs:
            for item in point:
                item.plain = routed.observed.get(item.item.x, item.item.x)
        plain = split_stages(
            routed.graph,
            [routed.new_index[point.index] for point in self._cuts],
            [[v for o in point for v in (o.plain, *(value for value, _, _ in o.added_to))] for point in self._inputs],
        )
        # Values that the original stream reads from the quantized one must exist when a stage runs.
        sources = {new: counterparts[value] for value, new in routed.inputs.items()}
        extra = [[sources[v] for v in stage.graph.inputs if v in sources] for stage in plain]
        leaves = [
            [*(v for o in point for v in o.values()), *need] for point, need in zip(self._inputs, extra, strict=True)
        ]
        self._quantized = _Stream(
            "quantized", model, split_stages(graph, [point.index for point in output_cuts], leaves), self._spill
        )
        self._plain = _Stream("plain", self._source, plain, self._spill, sources)

    def inputs(self, stage: int) -> list[SpilledInput]:
        """Return the inputs that are available after a stage."""
        place, result = self._quantized.place, []
        for o in self._inputs[stage]:
            ids, weights = (None if v is None else place(v) for v in (o.ids, o.weights))
            places = place(o.x), self._plain.place(o.plain), ids, weights
            added = tuple((place(b), self._plain.place(a), factor) for a, b, factor in o.added_to)
            result.append(SpilledInput(o.item.names[0], *places, o.item.n_mat, o.item.heads, added))
        return result

    def run(self, stage: int, progress: Callable[[int], None]) -> None:
        """Run a stage in both streams over all tokens; ``progress`` gets the number of finished tokens."""
        n_ctx = self.tokens.windows.shape[1]
        both = [stream.programs(stage, self.tokens) for stream in (self._quantized, self._plain)]
        for first in range(0, len(self.tokens.windows), self.tokens.at_once):
            windows = self.tokens.windows[first : first + self.tokens.at_once]
            batch = _batch(windows)
            values = self._quantized.run(both[0], stage, batch, first * n_ctx)
            self._plain.run(both[1], stage, batch, first * n_ctx, values, self._quantized)
            progress((first + len(windows)) * n_ctx)
        live = [(stream, v) for stream in (self._quantized, self._plain) for v in stream.stages[stage].live]
        self._spill.commit(stage, {stream.place(v).file for stream, v in live})


class _StreamInput:
    """An input in the output's graph: its routing, and the value of the original stream to compare with."""

    def __init__(
        self, item: Input, graph: Graph, twins: Mapping[Value, Value], added_to: Sequence[tuple[Value, float]]
    ) -> None:
        self.added_to = [(value, twins[value], factor) for value, factor in added_to]
        self.item, self.plain = item, item.x
        self.x = twins[item.x]
        self.ids = None if item.ids is None else twins[item.ids]
        routed = next((op.weights for op in graph.ops if isinstance(op, Route) and op.ids is self.ids), None)
        # The inputs of Llama 4's experts already include the router weights.
        repeated = any(isinstance(op, Repeat) and op.weights is routed for op in graph.ops)
        self.weights = None if repeated else routed

    def values(self) -> list[Value]:
        return [v for v in (self.x, self.ids, self.weights, *(b for _, b, _ in self.added_to)) if v is not None]


class _Stream:
    """One run of a model: its stages and the files of their values."""

    def __init__(
        self,
        name: str,
        model: Model,
        parts: Sequence[Stage],
        spill: Spill,
        sources: Mapping[Value, Value] | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.stages = parts
        self._spill = spill
        self._sources = sources or {}
        self._numbers = {v: i for i, v in enumerate(v for stage in parts for v in stage.graph.leaves)}

    def place(self, value: Value) -> Place:
        return Place(f"{self.name}-{self._numbers[value]}", value.width, value.per, value.integer)

    def programs(self, stage: int, tokens: Tokens) -> Programs:
        """Return a stage, compiled."""
        n_ctx, at_once = tokens.windows.shape[1], tokens.at_once
        return self.model.part(self.stages[stage].graph, Limits(n_ctx, at_once, n_ctx * at_once, self.model.kv_type))

    def read(self, value: Value, batch: Batch, token: int) -> Any:
        """Return a value of an earlier stage for the tokens of a batch that starts at ``token``."""
        return self._spill.read(self.place(value), token, len(batch.tokens))

    def run(
        self,
        programs: Programs,
        stage: int,
        batch: Batch,
        token: int,
        peer_values: Mapping[Value, Any] | None = None,
        peer: _Stream | None = None,
    ) -> dict[Value, Any]:
        """Run a stage for a batch and return its values; ``peer_values`` are those of the ``peer`` stream."""
        values: dict[Value, Any] = {}
        for value in self.stages[stage].graph.inputs:
            if value not in self._sources:
                values[value] = self.read(value, batch, token)
                continue
            assert peer_values is not None
            assert peer is not None
            source = self._sources[value]
            values[value] = peer_values[source] if source in peer_values else peer.read(source, batch, token)
        programs.clear()
        programs.run(batch, values)
        for value in self.stages[stage].graph.leaves:
            values[value] = programs.read(value).reshape(len(batch.tokens) * value.per, value.width).copy()
            self._spill.write(self.place(value), token, values[value])
        return values


def _names(graph: Graph) -> dict[Value, tuple[str, int]]:
    """Return each value's name, with the number of earlier values of that name."""
    counts = Counter[str]()
    names: dict[Value, tuple[str, int]] = {}
    for value in (v for op in graph.ops for v in op.outputs()):
        names[value] = value.name, counts[value.name]
        counts[value.name] += 1
    return names


def _open_model(path: Path, threads: int, tokens: Tokens, *, is_growing: bool = False) -> Model:
    n_ctx = tokens.windows.shape[1]

    def expect_writes(file: GGUFFile) -> GGUFFile:
        file.expect_writes()
        return file

    def rewrite(graph: Graph) -> Graph:
        return without_selection(every_token(graph), n_ctx)

    n_ubatch, wrap = n_ctx * tokens.at_once, expect_writes if is_growing else None
    return load(path, threads=threads, n_ctx=n_ctx, n_ubatch=n_ubatch, rewrite=rewrite, wrap=wrap)


def _batch(windows: I32) -> Batch:
    n, n_ctx = windows.shape
    positions = np.tile(np.arange(n_ctx, dtype=np.int32), n)
    sequences = np.repeat(np.arange(n, dtype=np.int32), n_ctx)
    return Batch(windows.reshape(-1), positions, sequences, np.empty(0, np.int32))
