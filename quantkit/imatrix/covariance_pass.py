"""A pass over the text for some inputs of weights, on this machine or on a node of a cluster.

The result of a pass depends on the text alone, so nodes take whole passes, each with the inputs that fit its memory,
and write their sums into one file. It is the file of one machine, however inputs are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantkit.cluster import Cluster, Node, NodeRefusal
from quantkit.cpus import available_memory
from quantkit.errors import FormatError, QuantkitError
from quantkit.evaluate.on_nodes import NodeModel
from quantkit.evaluate.passes import I32, bos_of, run_windows, text_windows
from quantkit.imatrix.covariance_file import Target
from quantkit.model.backends.accumulators import Accumulator
from quantkit.model.engine import Model, Session, load
from quantkit.model.observers import CovarianceRequest, covariances, fewest_rows, up_to_layer
from quantkit.model.ops import Covariance, Graph
from quantkit.units import format_size


class Unit(NamedTuple):
    """Some experts or heads of a weight's input: the work item of a pass."""

    name: str
    first: int
    end: int


@dataclass(frozen=True)
class CovarianceRecording:
    """The part that all passes share: the text, int32 [chunks, n_ctx], the settings, and the file."""

    windows: I32
    n_batch: int
    process_output: bool
    weighting: str
    #: The layer of every input.
    layers: Mapping[str, int]
    target: Target

    @property
    def n_ctx(self) -> int:
        return int(self.windows.shape[1])

    def rewrite(self, units: Sequence[Unit]) -> Callable[[Graph], Graph]:
        """Return a function that adds the observing operations of ``units`` to a graph and cuts it after them."""
        requests = [CovarianceRequest(unit.name, (unit.first, unit.end)) for unit in units]
        last = max(self.layers[unit.name] for unit in units)

        def rewrite(graph: Graph) -> Graph:
            observed = covariances(
                graph,
                requests,
                process_output=self.process_output,
                plain=self.weighting != "router",
                weighted=self.weighting != "tokens",
            )
            return fewest_rows(up_to_layer(observed, last) if last < graph.ops[-1].layer else observed)

        return rewrite

    def session(self, model: Model, chunks: int) -> Session:
        """Return a session for passes over a number of chunks."""
        return model.session(self.n_ctx, min(chunks, max(1, self.n_batch // self.n_ctx)))

    def run(
        self,
        model: Model,
        session: Session,
        chunks: Sequence[int],
        threads: int | None,
        on_chunks: Callable[[int, int], None] = lambda begin, end: None,
    ) -> None:
        """Run chunks and call ``on_chunks(begin, end)``. Raises QuantkitError for a chunk that is not finite."""

        def check(begin: int, end: int) -> None:
            for where in session.take_not_finite():
                raise QuantkitError(
                    f"chunk {chunks[begin + where.sequence] + 1}, position {where.position}: the input of "
                    f"{where.label.split()[0]} is NaN or infinite; omit this chunk (quantkit imatrix does so)",
                    "QK-E108",
                )
            on_chunks(begin, end)

        run_windows(
            model,
            text_windows(self.windows[list(chunks)], self.n_ctx - 1),
            lambda *_: None,
            check,
            n_batch=self.n_batch,
            bos=bos_of(model, []),
            threads=threads,
            session=session,
        )

    def write(self, model: Model, sums: Mapping[str, Accumulator]) -> None:
        """Write the sums of a pass, and return when they are on the disk."""
        for op in model.graph.ops:
            if isinstance(op, Covariance):
                self.target.write(op, sums[op.label])
        self.target.sync()


# ---------------------------------------------------------------- on the nodes of a cluster


@dataclass(frozen=True)
class PassContext:
    """The data of every worker process: the model, the recording, its chunks, and the bytes of a unit's sums."""

    model: NodeModel
    recording: CovarianceRecording
    chunks: tuple[int, ...]
    sizes: Mapping[str, int]


class _Passes:
    """Passes as work for a cluster."""

    is_stopping = False

    def __init__(
        self,
        shared: PassContext,
        passes: Sequence[list[Unit]],
        on_pass: Callable[[list[Unit]], None],
        say: Callable[[str], None],
    ) -> None:
        self.begin, self.shared = start_worker, shared
        self._remaining = list(passes)
        self._on_pass = on_pass
        self._say = say

    def fit(self, node: Node) -> None:
        """Give one process the whole node, as for other passes of the engine."""
        where = self.shared.model.nodes
        node.width = min(node.cpus, where.threads or node.cpus)
        node.gpus = node.gpus if where.uses_gpus else 0

    def batch(self, node: Node) -> list[Unit] | None:
        return self._remaining.pop(0) if self._remaining else None

    def finish(self, node: Node, batch: list[Unit], result: str) -> None:
        if result and not node.progress:
            self._say(f"node {node.name}: {result}")
        node.progress += len(batch)
        self._on_pass(batch)

    def say(self, text: str) -> None:
        self._say(text)


def run_on_nodes(
    shared: PassContext,
    passes: Callable[[int], Sequence[list[Unit]]],
    on_pass: Callable[[list[Unit]], None],
    say: Callable[[str], None],
) -> None:
    """Run passes on all nodes. ``passes(n)`` divides them for n nodes; ``on_pass`` is called after each is written."""
    cluster = Cluster(shared.model.nodes.address)
    cluster.run(_Passes(shared, passes(max(1, len(cluster.nodes()))), on_pass, say))


def start_worker(shared: PassContext, threads: int) -> Callable[[list[Unit]], str]:
    """Open the file in a worker process; return a function that runs a pass and returns the device as text."""
    recording = shared.recording
    options = shared.model.load_options(threads)
    choice = shared.model.placement_note()
    try:
        recording.target.open_shared()
    except (OSError, FormatError) as e:
        raise NodeRefusal(f"{recording.target.part} cannot be written on this node: {e}") from None

    def run(units: list[Unit]) -> str:
        need, free = sum(shared.sizes[u.name] * (u.end - u.first) for u in units), available_memory()
        if need > free:
            raise NodeRefusal(
                f"a pass needs {format_size(need)}, but this node has {format_size(free)} free: lower --max-ram"
            )
        with load(shared.model.path, n_ctx=recording.n_ctx, rewrite=recording.rewrite(units), **options) as model:
            session = recording.session(model, len(shared.chunks))
            recording.run(model, session, shared.chunks, threads)
            recording.write(model, session.accumulators)
        return choice

    return run


__all__ = ["CovarianceRecording", "PassContext", "Unit", "start_worker", "run_on_nodes"]
