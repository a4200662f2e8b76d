"""Evaluation of windows on the nodes of a Ray cluster: each worker process maps the model and runs whole passes.

Passes have the same windows as on one machine, and results are taken in the order of the windows, so the final result
is the same. A node refuses a model that differs from the driver's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from quantkit.cluster import Cluster, Node, NodeRefusal
from quantkit.errors import FormatError, ResourceError
from quantkit.evaluate.passes import I32, EvaluationOptions, LoadOptions, Nodes, choose_activations
from quantkit.formats.gguf import open_model
from quantkit.formats.remote import locate

if TYPE_CHECKING:
    from quantkit.model.placement import Placement

#: The target duration of a batch of passes, in seconds.
SECONDS = 2.0


@dataclass(frozen=True)
class NodeModel:
    """A model to be opened on nodes: its path, fingerprint, placement and options."""

    path: Path
    fingerprint: str
    nodes: Nodes
    options: LoadOptions

    @classmethod
    def from_path(cls, path: str | Path, nodes: Nodes, options: LoadOptions) -> NodeModel:
        """Return the model at ``path``, with the fingerprint that this machine computes."""
        return cls(locate(path).absolute(), fingerprint_of(path), nodes, options)

    def check(self) -> None:
        """Raise NodeRefusal if this node's file is missing or another."""
        try:
            fingerprint = fingerprint_of(self.path)
        except (OSError, FormatError) as e:
            raise NodeRefusal(f"{self.path} cannot be read on this node: {getattr(e, 'strerror', None) or e}") from None
        if fingerprint != self.fingerprint:
            raise NodeRefusal(f"{self.path} is another file on this node")

    def load_options(self, threads: int) -> LoadOptions:
        """Return the options of quantkit.load on this node. Raises NodeRefusal if the model cannot be run here."""
        from quantkit.model.placement import check_devices

        self.check()
        placement, _ = self._place()
        try:
            check_devices(placement)
        except ResourceError as e:
            raise NodeRefusal(e.message) from None
        return {**self.options, "threads": threads, "placement": placement}

    def placement_note(self) -> str:
        """Return a note on the device that --backend selects on this node; "" if there was no choice."""
        return self._place()[1]

    def _place(self) -> tuple[Placement, str]:
        """Return the placement on this node, and a note on --backend."""
        from quantkit.kernels.cuda.core.device import why_none
        from quantkit.model.placement import cuda_devices, placement_of

        nodes = self.nodes
        devices = cuda_devices() if nodes.uses_gpus else ()
        backend = nodes.backend
        if backend == "auto":
            backend = "cuda" if devices else "cpu"
        layers = nodes.gpu_layers if devices or backend == "cuda" else None
        choice = ", ".join(devices) or f"the CPU ({why_none()})"
        note = f"--backend {nodes.backend}: {choice}" if nodes.uses_gpus else ""
        return placement_of(backend, layers, nodes.rules, devices), note


def fingerprint_of(path: str | Path) -> str:
    """Return the fingerprint of a model's file."""
    with open_model(path) as source:
        return source.fingerprint()


class Pass(NamedTuple):
    """Windows ``begin`` .. ``begin + len(windows)``, int32 [n, n_ctx], which run together."""

    begin: int
    windows: I32


class PassResult(NamedTuple):
    """The value of a batch of passes, its duration in seconds, and the note on the node's device."""

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
        self._options = nodes
        self._passes = passes
        self._take = take
        self._say = say
        self._seconds = seconds
        self._nodes: list[Node] = []
        #: Passes assigned, and passes taken; results waiting for earlier ones; seconds of a pass, by node id.
        self._n_assigned, self._n_taken = 0, 0
        self._pending: dict[int, tuple[int, Any]] = {}
        self._seconds_per_pass: dict[str, float] = {}

    @property
    def is_stopping(self) -> bool:
        return False

    def fit(self, node: Node) -> None:
        """Give the whole node to one process: the engine has its own threads and maps the model once."""
        node.width = min(node.cpus, self._options.threads or node.cpus)
        node.gpus = node.gpus if self._options.uses_gpus else 0
        self._nodes.append(node)

    def batch(self, node: Node) -> tuple[int, list[Pass]] | None:
        """Return the next passes: one at first, then as many as take the target duration, fewer towards the end."""
        first, left = self._n_assigned, len(self._passes) - self._n_assigned
        if not left:
            return None
        n = int(self._seconds / self._seconds_per_pass[node.id]) if node.id in self._seconds_per_pass else 1
        n = max(1, min(n, left // (2 * max(1, sum(peer.cpus > 0 for peer in self._nodes)))))
        self._n_assigned += n
        return first, list(self._passes[first : first + n])

    def finish(self, node: Node, batch: tuple[int, list[Pass]], result: PassResult) -> None:
        first, passes = batch
        if result.choice and node.id not in self._seconds_per_pass:
            self._say(f"node {node.name}: {result.choice}")
        self._seconds_per_pass[node.id] = result.seconds / len(passes)
        node.progress += sum(part.windows.size for part in passes)
        self._pending[first] = len(passes), result.value
        while self._n_taken in self._pending:
            n, value = self._pending.pop(self._n_taken)
            group = self._passes[self._n_taken : self._n_taken + n]
            self._n_taken += n
            self._take(group[0].begin, group[-1].begin + len(group[-1].windows), value)

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
        shared: for all worker processes; its ``model`` is a ``NodeModel``.
        take: called with begin, end and value for runs of windows, in order; its exceptions end the run.
        say: called with messages about nodes.
        seconds: the target duration of a batch of passes.
    """
    passes = [
        Pass(start, np.ascontiguousarray(windows[start : start + n_seq])) for start in range(0, len(windows), n_seq)
    ]
    Cluster(nodes.address).run(_Passes(nodes, _TimedBegin(begin), shared, passes, take, say, seconds))


@dataclass(frozen=True)
class _TimedBegin:
    """``begin`` with a timer around its result."""

    begin: Callable[[Any, int], Callable[[list[Pass]], Any]]

    def __call__(self, shared: Any, threads: int) -> Callable[[tuple[int, list[Pass]]], PassResult]:
        run, model = self.begin(shared, threads), shared.model
        choice = model.placement_note()

        def run_timed(batch: tuple[int, list[Pass]]) -> PassResult:
            began = time.perf_counter()
            return PassResult(run(batch[1]), time.perf_counter() - began, choice)

        return run_timed


def split_nodes(options: EvaluationOptions) -> tuple[Nodes | None, LoadOptions]:
    """Return the nodes to run on, or None, and the options with which this machine opens the model.

    With nodes, this machine only reads the model's metadata, without placement.
    """
    load_options = options.copy()
    nodes = load_options.pop("nodes", None)
    if nodes is not None:
        nodes = replace(nodes, threads=load_options.pop("threads", None) or nodes.threads)
        load_options["placement"] = None
    return nodes, load_options


def nodes_and_activations(
    model: object, options: EvaluationOptions, default: str
) -> tuple[Nodes | None, LoadOptions, list[str]]:
    """Return ``split_nodes`` with the activations of a model that is to be loaded, and notes on them."""
    nodes, load_options = split_nodes(options)
    if not isinstance(model, (str, Path)):
        return nodes, load_options, []
    placed = cast(LoadOptions, {name: value for name, value in options.items() if name != "nodes"})
    result, notes = choose_activations(placed, default, nodes)
    return nodes, {**load_options, "activations": result["activations"]}, notes
