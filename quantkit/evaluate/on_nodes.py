"""Windows of a text on the nodes of a Ray cluster: each worker process maps the model and runs whole passes.

A pass has the windows that it has on one machine, and results are taken in the order of the windows, so whatever is
made of them is the same. A node refuses if the model there is not the one that the driver has opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quantkit.cluster import Cluster, Node, Refused
from quantkit.errors import FormatError, ResourceError
from quantkit.evaluate.passes import I32, EvaluationOptions, LoadOptions, Nodes
from quantkit.formats.gguf import open_model

if TYPE_CHECKING:
    from quantkit.model.placement import Placement

#: Seconds that a batch of passes is to take.
SECONDS = 2.0


@dataclass(frozen=True)
class There:
    """A model that is to be opened on nodes."""

    path: Path
    fingerprint: str
    nodes: Nodes
    options: LoadOptions

    @classmethod
    def of(cls, path: str | Path, nodes: Nodes, options: LoadOptions) -> There:
        """Return the model at ``path``, as this machine sees it, to be loaded with ``options``."""
        return cls(Path(path).absolute(), fingerprint_of(path), nodes, options)

    def check(self) -> None:
        """Raise Refused if the file is not here, or is another."""
        try:
            found = fingerprint_of(self.path)
        except (OSError, FormatError) as e:
            raise Refused(f"{self.path} cannot be read there: {getattr(e, 'strerror', None) or e}") from None
        if found != self.fingerprint:
            raise Refused(f"{self.path} is not the same file there: an older one, or another")

    def options_here(self, threads: int) -> LoadOptions:
        """Return how this node loads the model. Raises Refused if it is not here, or cannot be run here."""
        from quantkit.model.devices import check_devices

        self.check()
        placement, _ = self._placed()
        try:
            check_devices(placement)
        except ResourceError as e:
            raise Refused(e.message) from None
        return {**self.options, "threads": threads, "placement": placement}

    def choice_here(self) -> str:
        """Return a sentence that says what runs the model on this node; "" if there was nothing to choose."""
        return self._placed()[1]

    def _placed(self) -> tuple[Placement, str]:
        """Return where this node places the model, and what it chose for --backend."""
        from quantkit.kernels.cuda.core.device import why_none
        from quantkit.model.devices import cuda_devices
        from quantkit.model.placement import placement_of

        wanted = self.nodes
        devices = cuda_devices() if wanted.uses_cards else ()
        backend = ("cuda" if devices else "cpu") if wanted.backend == "auto" else wanted.backend
        layers = wanted.gpu_layers if devices or backend == "cuda" else None
        chosen = ", ".join(devices) or f"the CPU, as {why_none()}"
        note = f"--backend {wanted.backend}: {chosen}" if wanted.uses_cards else ""
        return placement_of(backend, layers, wanted.rules, devices), note


def fingerprint_of(path: str | Path) -> str:
    """Return the fingerprint of a model's file."""
    with open_model(path) as source:
        return source.fingerprint()


class Pass(NamedTuple):
    """Windows ``begin`` .. ``begin + len(windows)``, int32 [n, n_ctx], which run together."""

    begin: int
    windows: I32


class Share(NamedTuple):
    """What a batch of passes gave, the seconds that it took, and what the node runs the model on."""

    value: Any
    seconds: float
    choice: str


class _Passes:
    """Passes as work for a cluster; ``take(begin, end, value)`` gets the results in order."""

    def __init__(
        self,
        nodes: Nodes,
        begin: Callable[[Any, int], Callable[[Any], Any]],
        shared: Any,
        passes: Sequence[Pass],
        take: Callable[[int, int, Any], None],
        say: Callable[[str], None],
        seconds: float,
    ) -> None:
        self.begin, self.shared = begin, shared
        self._where, self._passes, self._take, self._say, self._seconds = nodes, passes, take, say, seconds
        self._nodes: list[Node] = []
        #: Passes given out, and taken; results that wait for those before them; seconds of a pass, by node.
        self._given, self._taken = 0, 0
        self._waiting: dict[int, tuple[int, Any]] = {}
        self._pace: dict[str, float] = {}

    @property
    def stopped(self) -> bool:
        return False

    def fit(self, node: Node) -> None:
        """Let one process have the whole node: the engine has threads of its own, and maps the model once."""
        node.width = min(node.cpus, self._where.threads or node.cpus)
        node.gpus = node.gpus if self._where.uses_cards else 0
        self._nodes.append(node)

    def batch(self, node: Node) -> tuple[int, list[Pass]] | None:
        """Return some passes: one where nothing is known, then for some seconds, fewer towards the end."""
        first, left = self._given, len(self._passes) - self._given
        if not left:
            return None
        n = int(self._seconds / self._pace[node.id]) if node.id in self._pace else 1
        n = max(1, min(n, left // (2 * max(1, sum(each.cpus > 0 for each in self._nodes)))))
        self._given += n
        return first, list(self._passes[first : first + n])

    def done(self, node: Node, batch: tuple[int, list[Pass]], result: Share) -> None:
        first, passes = batch
        if result.choice and node.id not in self._pace:
            self._say(f"node {node.name}: {result.choice}")
        self._pace[node.id] = result.seconds / len(passes)
        node.done += sum(each.windows.size for each in passes)
        self._waiting[first] = len(passes), result.value
        while self._taken in self._waiting:
            n, value = self._waiting.pop(self._taken)
            done = self._passes[self._taken : self._taken + n]
            self._taken += n
            self._take(done[0].begin, done[-1].begin + len(done[-1].windows), value)

    def say(self, text: str) -> None:
        self._say(text)


def run_on_nodes(
    nodes: Nodes,
    begin: Callable[[Any, int], Callable[[list[Pass]], Any]],
    shared: Any,
    windows: I32,
    n_seq: int,
    take: Callable[[int, int, Any], None],
    say: Callable[[str], None],
    *,
    seconds: float = SECONDS,
) -> None:
    """Run windows, int32 [n, n_ctx], ``n_seq`` in a pass, on all nodes.

    Args:
        begin: called as begin(shared, threads) in every worker process; returns a function from passes to their value.
        shared: for all worker processes; its ``model`` is a ``There``.
        take: called with begin, end and value for runs of windows, in order; what it raises ends the run.
        say: told what happens to nodes.
        seconds: that a batch of passes is to take.
    """
    passes = [Pass(at, np.ascontiguousarray(windows[at : at + n_seq])) for at in range(0, len(windows), n_seq)]
    Cluster(nodes.address).run(_Passes(nodes, _Timed(begin), shared, passes, take, say, seconds))


@dataclass(frozen=True)
class _Timed:
    """Measures what ``begin`` returns."""

    begin: Callable[[Any, int], Callable[[list[Pass]], Any]]

    def __call__(self, shared: Any, threads: int) -> Callable[[tuple[int, list[Pass]]], Share]:
        run, there = self.begin(shared, threads), shared.model
        choice = there.choice_here()

        def timed(batch: tuple[int, list[Pass]]) -> Share:
            began = time.perf_counter()
            return Share(run(batch[1]), time.perf_counter() - began, choice)

        return timed


def without_nodes(options: EvaluationOptions) -> tuple[Nodes | None, LoadOptions]:
    """Return the nodes to run on, if any, and the options by which this machine opens the model.

    With nodes, it opens the model to look at it, and places nothing.
    """
    own = options.copy()
    nodes = own.pop("nodes", None)
    if nodes is not None:
        nodes = replace(nodes, threads=own.pop("threads", None) or nodes.threads)
        own["placement"] = None
    return nodes, own
