"""A pass over the text for some inputs of weights, on this machine or on a node of a cluster.

What a pass records depends on nothing but the text, so nodes take whole passes, each with the inputs that fit its
memory, and write their sums into the one file: it is that of one machine, however inputs are divided.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quantkit.cluster import Cluster, Node, Refused
from quantkit.errors import FormatError, QuantkitError
from quantkit.evaluate.on_nodes import There
from quantkit.evaluate.passes import I32, bos_of, run_windows
from quantkit.imatrix.covariance_file import Target
from quantkit.model.backends.accumulators import Accumulator
from quantkit.model.engine import Model, Session, load
from quantkit.model.observers import Wanted, covariances, fewest_rows, up_to_layer
from quantkit.model.ops import Covariance, Graph
from quantkit.units import format_size


class Unit(NamedTuple):
    """Some experts, or heads, of a weight's input: the unit that passes are made of."""

    name: str
    first: int
    end: int


def available() -> int:
    """Return the bytes of memory that this machine can spare."""
    try:
        # Free memory alone would leave out the reclaimable page cache.
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


@dataclass(frozen=True)
class Recording:
    """What all passes share: the text, int32 [chunks, n_ctx], what is recorded of it, and the file."""

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
        """Return what makes a graph observe some units, and nothing after them."""
        wanted = [Wanted(unit.name, (unit.first, unit.end)) for unit in units]
        last = max(self.layers[unit.name] for unit in units)

        def rewrite(graph: Graph) -> Graph:
            seen = covariances(
                graph,
                wanted,
                process_output=self.process_output,
                plain=self.weighting != "router",
                weighted=self.weighting != "tokens",
            )
            return fewest_rows(up_to_layer(seen, last) if last < graph.ops[-1].layer else seen)

        return rewrite

    def session(self, model: Model, chunks: int) -> Session:
        """Return a session for passes over so many chunks."""
        return model.session(self.n_ctx, min(chunks, max(1, self.n_batch // self.n_ctx)))

    def run(
        self,
        model: Model,
        session: Session,
        chunks: Sequence[int],
        threads: int | None,
        done: Callable[[int, int], None] = lambda begin, end: None,
    ) -> None:
        """Run chunks; ``done(begin, end)`` is told how many. Raises QuantkitError for one that is not finite."""

        def checked(begin: int, end: int) -> None:
            for where in session.take_not_finite():
                raise QuantkitError(
                    f"chunk {chunks[begin + where.sequence] + 1}, position {where.position}: the input of "
                    f"{where.of.split()[0]} is NaN or infinite; leave the chunk out (quantkit imatrix does so)"
                )
            done(begin, end)

        run_windows(
            model,
            self.windows[list(chunks)],
            self.n_ctx - 1,
            lambda *_: None,
            checked,
            n_batch=self.n_batch,
            bos=bos_of(model, []),
            threads=threads,
            session=session,
        )

    def write(self, model: Model, sums: Mapping[str, Accumulator]) -> None:
        """Write what a pass came to, and return when it is on the disk."""
        for op in model.graph.ops:
            if isinstance(op, Covariance):
                self.target.write(op, sums[op.of])
        self.target.sync()


# ---------------------------------------------------------------- on the nodes of a cluster


@dataclass(frozen=True)
class Shared:
    """What every worker process needs: the model, the recording, its chunks, and the bytes of the sums of a unit."""

    model: There
    recording: Recording
    chunks: tuple[int, ...]
    sizes: Mapping[str, int]


class _Passes:
    """Passes as work for a cluster."""

    stopped = False

    def __init__(
        self,
        shared: Shared,
        passes: Sequence[list[Unit]],
        done: Callable[[list[Unit]], None],
        say: Callable[[str], None],
    ) -> None:
        self.begin, self.shared = begin, shared
        self._left, self._done, self._say = list(passes), done, say

    def fit(self, node: Node) -> None:
        """Let one process have the whole node, as for other passes of the engine."""
        where = self.shared.model.nodes
        node.width = min(node.cpus, where.threads or node.cpus)
        node.gpus = node.gpus if where.uses_cards else 0

    def batch(self, node: Node) -> list[Unit] | None:
        return self._left.pop(0) if self._left else None

    def done(self, node: Node, batch: list[Unit], result: str) -> None:
        if result and not node.done:
            self._say(f"node {node.name}: {result}")
        node.done += len(batch)
        self._done(batch)

    def say(self, text: str) -> None:
        self._say(text)


def run_on_nodes(
    shared: Shared,
    passes: Callable[[int], Sequence[list[Unit]]],
    done: Callable[[list[Unit]], None],
    say: Callable[[str], None],
) -> None:
    """Run passes on all nodes; ``passes(n)`` makes them for so many nodes, ``done`` is told of each that is written."""
    cluster = Cluster(shared.model.nodes.address)
    cluster.run(_Passes(shared, passes(max(1, len(cluster.nodes()))), done, say))


def begin(shared: Shared, threads: int) -> Callable[[list[Unit]], str]:
    """Open the file in a worker process; return what runs a pass, and says what the model runs on."""
    recording, options, choice = shared.recording, shared.model.options_here(threads), shared.model.choice_here()
    try:
        recording.target.share()
    except (OSError, FormatError) as e:
        raise Refused(f"{recording.target.part} cannot be written there: {e}") from None

    def run(units: list[Unit]) -> str:
        need, free = sum(shared.sizes[u.name] * (u.end - u.first) for u in units), available()
        if need > free:
            raise Refused(f"a pass takes {format_size(need)} and {format_size(free)} are free there: lower --max-ram")
        with load(shared.model.path, n_ctx=recording.n_ctx, rewrite=recording.rewrite(units), **options) as model:
            session = recording.session(model, len(shared.chunks))
            recording.run(model, session, shared.chunks, threads)
            recording.write(model, session.accumulators)
        return choice

    return run


__all__ = ["Recording", "Shared", "Unit", "available", "begin", "run_on_nodes"]
