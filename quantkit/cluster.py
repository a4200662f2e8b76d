"""A Ray cluster: its nodes, and work in batches that they pull.

Ray runs and retries; this module decides how much each node gets. A node has at most ``BATCHES_PER_WORKER`` batches for
each worker, one that runs and one that waits, so fast nodes get more and queues stay short. The list of nodes is
refreshed all the time, so nodes that join late are used. A batch may run twice and must give the same result.

Only this module imports ``ray``, and only for --ray.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol

from quantkit import errors
from quantkit.errors import ClusterError, QuantkitError, ResourceError
from quantkit.mapping import guard_mappings
from quantkit.process import no_collection
from quantkit.version import __version__

#: Batches of a worker: one runs, one waits.
BATCHES_PER_WORKER = 2
#: Attempts per batch after a worker was killed: on one node (by Ray), and over several nodes.
RETRIES, ATTEMPTS = 2, 3
#: Seconds to wait for a node when none is left.
PATIENCE = 60.0
#: Threads of a worker process that encodes: few because of the interpreter's lock, many because of memory
#: (docs/explanation/cluster.md).
WIDTH = 8
_LOOK_SECONDS = 1.0
_WAIT_SECONDS = 0.5
_TAKE_SECONDS = 1.0
#: Seconds in which a cluster must accept a connection.
_ANSWER_SECONDS = 10.0


class NodeRefusal(Exception):
    """A node cannot be used; the message is the reason."""


@dataclass(eq=False)
class Node:
    """A node; ``cpus`` and ``gpus`` are the resources that Ray may assign."""

    id: str
    name: str
    cpus: int
    gpus: int
    #: CPUs of a worker, and the number of workers.
    width: int = 1
    workers: int = 1
    #: Batches in flight.
    in_flight: int = 0
    #: Bytes, or other units, of finished work.
    progress: int = 0
    #: Whether this process runs on it, and the CPUs that it uses itself.
    is_local: bool = False
    own_cpus: int = 0

    def divide(self, cpus: int, width: int, *, gpus: bool = False) -> None:
        """Divide ``cpus`` CPUs among workers, at most ``width`` each; on the driver's node, one is this process.

        gpus: on a node with GPUs, one worker gets all CPUs and GPUs.
        """
        if gpus and self.gpus:
            self.width = cpus
            return
        self.workers = -(-cpus // width)
        self.width, self.gpus = cpus // self.workers, 0
        if self.is_local:
            self.workers, self.own_cpus = self.workers - 1, self.width


class Work(Protocol):
    """Work for a cluster: every worker process gets ``begin`` and ``shared`` once, then single batches.

    ``begin(shared, threads)`` returns a function from a batch to its result. It raises ``NodeRefusal`` if the node
    cannot be used, and QuantkitError if no node can do the work.
    """

    @property
    def begin(self) -> Callable[[Any, int], Callable[[Any], Any]]: ...

    @property
    def shared(self) -> Any: ...

    @property
    def is_stopping(self) -> bool:
        """Whether the work ends early."""

    def fit(self, node: Node) -> None:
        """Set the workers of a new node, and their width."""

    def batch(self, node: Node) -> Any | None:
        """Return a batch for a node; None if all are assigned."""

    def finish(self, node: Node, batch: Any, result: Any) -> None:
        """Take the result of a batch."""

    def say(self, text: str) -> None:
        """Show a message to the user."""


class LocalWorker(Protocol):
    """The share of the work that this process does itself, as one of the workers of its node."""

    @property
    def busy(self) -> bool:
        """Whether it works, or waits for batches that nodes may return."""

    def take_back(self, batch: Any) -> None:
        """Take a batch for which no other worker is left."""

    def wait(self, seconds: float) -> None:
        """Wait for ``seconds``, or until it is no longer busy."""


class _Reply(NamedTuple):
    """The reply of a worker: ``kind`` is done, refused, failed, disk or broken."""

    kind: str
    value: Any


@dataclass
class _Flight:
    """A batch under way."""

    node: Node
    batch: Any
    attempt: int


@dataclass
class _Run:
    """The state of one ``Cluster.run``."""

    work: Work
    task: Callable[[Node, Any], Any]
    local: LocalWorker | None
    nodes: dict[str, Node] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    flights: dict[Any, _Flight] = field(default_factory=dict)
    #: Batches to retry, and their attempts so far.
    retries: deque[tuple[Any, int]] = field(default_factory=deque)
    refreshed_at: float = 0.0
    no_nodes_since: float | None = None


def _ray() -> ModuleType:
    try:
        with no_collection():
            import ray
    except ImportError as e:
        raise ResourceError(
            f"--ray needs the package ray, which is not installed ({e}): pip install 'gguf-quantkit[ray]'",
            "QK-E410",
        ) from None
    return ray  # type: ignore[no-any-return]


def _check_answers(address: str) -> bool:
    """Return True if something listens at an address, False if unknown; Ray itself would try for minutes.

    Raises ResourceError if nothing listens.
    """
    if address == "local":
        return False
    where = address if address != "auto" else os.environ.get("RAY_ADDRESS", "")
    if not where or where == "auto":
        with suppress(ImportError, AttributeError, OSError):
            where = importlib.import_module("ray._private.utils").read_ray_address() or ""
    host, colon, port = where.rpartition(":")
    if not colon or not port.isdecimal():
        return False  # Ray resolves it
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
    except (OSError, OverflowError) as e:
        suffix = "" if address == where else f" (that is {where})"
        raise ResourceError(
            f"--ray {address}{suffix}: no cluster answers at this address ({getattr(e, 'strerror', None) or e}); "
            "start one with `ray start --head`, or use --ray local for a temporary one on this machine",
            "QK-E450",
        ) from None
    return True


def _print_to_stderr(data: dict[str, Any], **_: Any) -> None:
    # Only the first sentence of each message; the rest is about Ray's logs.
    sys.stderr.write("".join(f"ray: {line.partition('. ')[0]}\n" for line in data.get("lines", ())))


@cache
def _sources() -> str:
    """Return the version, and a hash of all modules: other versions could write other bytes."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{__version__} ({digest.hexdigest()[:12]})"


def _name_of(node: Mapping[str, Any]) -> str:
    """Return a node's name: `ray start --node-name`, or that of its host."""
    name = node.get("NodeName")
    return str(name if name and name != node["NodeManagerAddress"] else node["NodeManagerHostname"])


#: Held while this process connects or disconnects.
_TURN = threading.Lock()


def prestart_workers(address: str, threads: int | None, *, gpus: bool = False) -> None:
    """Start the workers of ``pipeline.ray_tasks.RayExecutor`` and preload their kernels; return at once.

    gpus: nodes that have GPUs may use them. Raises ResourceError if no cluster answers.
    """
    connect_async(address, lambda c: c.prepare("quantkit.pipeline.ray_tasks:load", threads, WIDTH, gpus=gpus))


def connect_async(address: str, callback: Callable[[Cluster], None]) -> None:
    """Connect in the background and call ``callback``; the next ``Cluster`` waits for the connection.

    Raises ResourceError at once if nothing answers; the next ``Cluster`` raises other failures.
    """
    if address == "local":  # Ray ends its processes together with this one only if it is started in the main thread
        callback(Cluster(address))
        return
    _check(address)
    _check_answers(address)

    def connect() -> None:
        try:
            with suppress(Exception):
                callback(Cluster(address, _turn=nullcontext()))
        finally:
            _TURN.release()

    _TURN.acquire()
    threading.Thread(target=connect, name="connect").start()


def _check(address: str) -> ModuleType:
    """Return the ray module. Raises ResourceError if it is missing, or the address is invalid."""
    ray = _ray()
    if address.startswith("ray://"):
        raise ResourceError(
            f"--ray {address}: run this command on a machine of the cluster and give the cluster's HOST:PORT, or auto",
            "QK-E203",
        )
    return ray


class Cluster:
    """A connection to a cluster, which lasts until the process disconnects or ends.

    ``address`` is HOST:PORT, or "auto" for the cluster that this machine belongs to ($RAY_ADDRESS, if it is set), or
    "local" for a temporary cluster of this machine and process.
    """

    #: Whether a ``Cluster`` has connected this process.
    _connected_here: ClassVar[bool] = False

    def __init__(self, address: str = "auto", *, _turn: AbstractContextManager[Any] = _TURN) -> None:
        self._ray = ray = _check(address)
        with _turn:
            self._connect(ray, address)

    def _connect(self, ray: ModuleType, address: str) -> None:
        if not ray.is_initialized():
            options: dict[str, Any] = {}
            if address == "local":
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                options["include_dashboard"] = False
            answers = _check_answers(address)
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
            except (ConnectionError, RuntimeError, ValueError, OSError) as e:
                reasons = [
                    str(error).strip() or type(error).__name__ for error in (e, e.__cause__) if error is not None
                ]
                reason = ": ".join(text.splitlines()[0].partition(". ")[0].rstrip(".") for text in reasons)
                if answers:
                    raise ResourceError(
                        f"--ray {address}: {reason}; the address answers but rejects the connection: it runs another "
                        f"version than Ray {ray.__version__}, requires a token (set RAY_AUTH_MODE=token and copy the "
                        "cluster's ~/.ray/auth_token), or is not a Ray cluster",
                        "QK-E450",
                    ) from None
                raise ResourceError(
                    f"--ray {address}: {reason}; start a cluster with `ray start --head`, or use --ray local for a "
                    "temporary one on this machine",
                    "QK-E450",
                ) from None
            Cluster._connected_here = True
            guard_mappings()  # Ray has installed its own handlers of signals
            # Ray's own hook, which runs after this one, would first sleep for half a second.
            atexit.register(ray.shutdown)
            # Ray's messages on nodes and memory would go to standard output, which is reserved for --json.
            with suppress(AttributeError):
                ray._private.worker.print_to_stdstream = _print_to_stderr

    def leave(self) -> None:
        """Disconnect this process in the background, if it is connected."""
        if not Cluster._connected_here:
            return
        Cluster._connected_here = False

        def disconnect() -> None:
            try:
                self._ray.shutdown()
            finally:
                _TURN.release()

        _TURN.acquire()
        threading.Thread(target=disconnect, name="disconnect").start()

    def nodes(self) -> dict[str, Node]:
        """Return the living nodes that have CPUs, by id."""
        alive = [n for n in self._ray.nodes() if n["Alive"] and int(n["Resources"].get("CPU", 0)) > 0]
        hosts, own_id = [_name_of(n) for n in alive], self._ray.get_runtime_context().get_node_id()
        return {
            n["NodeID"]: Node(
                n["NodeID"],
                host if hosts.count(host) == 1 else f"{host}/{n['NodeID'][:8]}",
                int(n["Resources"]["CPU"]),
                int(n["Resources"].get("GPU", 0)),
                is_local=n["NodeID"] == own_id,
            )
            for n, host in zip(alive, hosts, strict=True)
        }

    def prepare(self, function: str, threads: int | None, width: int, *, gpus: bool = False) -> None:
        """Start the workers of ``Node.divide`` on each node, and call ``function``, MODULE:NAME, in them.

        It returns at once; batches sent before a worker is ready wait for it.
        """
        send = self._task("", lambda: None)
        for node in self.nodes().values():
            node.divide(min(node.cpus, threads or node.cpus), width, gpus=gpus)
            for _ in range(node.workers):
                send(node, function)

    @contextmanager
    def reserve_cpus(self, node: Node, cpus: int, is_needed: Callable[[], bool]) -> Iterator[bool]:
        """Reserve CPUs of its node for this process.

        Waits for them; yields False once ``is_needed`` returns False.
        """
        from ray.util import placement_group, placement_group_table, remove_placement_group

        while is_needed():
            # The node is a preference: without free CPUs there, the group waits or is placed elsewhere.
            group = placement_group([{"CPU": cpus}], strategy="STRICT_PACK", _soft_target_node_id=node.id)
            try:
                while not (ready := group.wait(_TAKE_SECONDS)) and is_needed():
                    pass
                if ready and placement_group_table(group)["bundles_to_node_id"][0] == node.id:
                    yield True
                    return
            finally:
                remove_placement_group(group)
            time.sleep(_WAIT_SECONDS)
        yield False

    def run(self, work: Work, local: LocalWorker | None = None) -> dict[str, Node]:
        """Run work on all nodes and return the nodes that took part. No batch is in flight on return.

        local: the share of this process, for which ``own_cpus`` are reserved on its node.

        Raises what a batch raised on a node, with the node's name, and ClusterError when no node is left.
        """
        shared = cache(lambda: self._ray.put((work.begin, work.shared)))  # not needed without workers
        run = _Run(work, self._task(secrets.token_hex(16), shared), local)
        try:
            while not work.is_stopping:
                self._refresh_nodes(run)
                self._send_batches(run)
                if not (run.flights or run.retries or run.local and run.local.busy or self._is_left(run)):
                    break
                self._take_results(run)
        finally:
            self._end(run)
        return run.nodes

    def _task(self, run: str, shared: Callable[[], Any]) -> Callable[[Node, Any], Any]:
        """Return a function that sends a batch of a run to a node; run "" is the preparation before any run."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        remote = self._ray.remote(_work)

        def send(node: Node, batch: Any) -> Any:
            placed = remote.options(
                num_cpus=node.width,
                num_gpus=node.gpus / node.workers,
                max_retries=RETRIES,
                scheduling_strategy=On(node.id, soft=False),
            )
            return placed.remote(_sources(), run, [shared()], node.width, batch)

        return send

    def _refresh_nodes(self, run: _Run) -> None:
        """Update the list of nodes."""
        now = time.monotonic()
        if now - run.refreshed_at < _LOOK_SECONDS:
            return
        run.refreshed_at, alive = now, self.nodes()
        for node_id in run.nodes.keys() - alive.keys() - run.refused.keys():
            if run.nodes[node_id].cpus:
                run.work.say(f"node {run.nodes[node_id].name} is lost; other nodes take over its work")
                run.nodes[node_id].cpus = 0
        for new_id in alive.keys() - run.nodes.keys():
            run.work.fit(alive[new_id])
            run.nodes[new_id] = alive[new_id]

    def _usable(self, run: _Run) -> list[Node]:
        return [node for node in run.nodes.values() if node.cpus and node.id not in run.refused]

    def _send_batches(self, run: _Run) -> None:
        """Send batches to all nodes, every worker's first before its second."""
        if run.local is not None and run.local.busy and not any(node.workers for node in self._usable(run)):
            while run.retries:
                run.local.take_back(run.retries.popleft()[0])
        for depth in range(1, BATCHES_PER_WORKER + 1):
            for node in self._usable(run):
                while node.in_flight < depth * node.workers:
                    batch, attempt = run.retries.popleft() if run.retries else (run.work.batch(node), 0)
                    if batch is None:
                        return
                    run.flights[run.task(node, batch)] = _Flight(node, batch, attempt + 1)
                    node.in_flight += 1

    def _is_left(self, run: _Run) -> bool:
        """Return whether work remains but no node is usable, so that the caller must wait.

        Raises ClusterError after ``PATIENCE``.
        """
        if self._usable(run):
            return False
        if run.refused and not any(node.id not in run.refused for node in run.nodes.values()):
            raise ClusterError(f"no usable node: {'; '.join(run.refused.values())}")
        now = time.monotonic()
        run.no_nodes_since = run.no_nodes_since or now
        if now - run.no_nodes_since > PATIENCE:
            raise ClusterError(f"no node of the cluster has been available for {PATIENCE:.0f} s")
        return True

    def _take_results(self, run: _Run) -> None:
        """Wait for results, and take them."""
        if not run.flights:
            if run.local is not None and run.local.busy:
                run.local.wait(_WAIT_SECONDS)
            else:
                self._is_left(run)
                time.sleep(_WAIT_SECONDS)
            return
        run.no_nodes_since = None
        ready, _ = self._ray.wait(list(run.flights), timeout=_WAIT_SECONDS)
        for ref in ready:
            flight = run.flights.pop(ref)
            flight.node.in_flight -= 1
            self._reply(run, flight, self._reply_of(ref))

    def _reply_of(self, ref: Any) -> _Reply:
        from ray import exceptions

        try:
            return _Reply(*self._ray.get(ref))
        except exceptions.RayTaskError as e:  # before our code ran: it is missing, or cannot be imported
            return _Reply("refused", f"it cannot run quantkit {_sources()}: {e.cause or e}".splitlines()[0])
        except exceptions.RayError as e:
            return _Reply("lost", str(e).strip().splitlines()[0])

    def _reply(self, run: _Run, flight: _Flight, reply: _Reply) -> None:
        node, value = flight.node, reply.value
        if reply.kind == "done":
            run.work.finish(node, flight.batch, value)
            return
        if reply.kind == "failed":
            kind, message, code = value
            raise getattr(errors, kind, QuantkitError)(f"{message} (on node {node.name})", code)
        if reply.kind == "broken":
            raise RuntimeError(f"on node {node.name}:\n{value}")
        attempt = flight.attempt
        if reply.kind == "refused":
            attempt -= 1
            if node.id not in run.refused:
                run.refused[node.id] = f"node {node.name}: {value}"
                run.work.say(f"warning: node {node.name} is not used: {value}")
        else:
            run.refreshed_at = 0.0
            self._refresh_nodes(run)
            attempt -= not node.cpus  # any number of nodes may die
        run.retries.append((flight.batch, attempt))
        if attempt >= ATTEMPTS:
            raise ClusterError(f"node {node.name}: {value}; failed after {attempt} attempts")

    def _end(self, run: _Run) -> None:
        """Cancel the batches in flight and wait for their end."""
        for ref in run.flights:
            self._ray.cancel(ref, force=True)
        with suppress(KeyboardInterrupt):
            self._ray.wait(list(run.flights), num_returns=len(run.flights), timeout=30) if run.flights else None


# ---------------------------------------------------------------- on the nodes

#: The open run of this worker process, and its function.
_RUNNING: dict[tuple[str, int], Callable[[Any], Any]] = {}


def _work(sources: str, run: str, shared: list[Any], threads: int, batch: Any) -> tuple[str, Any]:
    """Run a batch in a worker process, which keeps its open run; never raises, because Ray would retry."""
    try:
        if sources != _sources():
            return "refused", f"it has quantkit {_sources()}, not {sources}"
        if not run:
            module, _, name = batch.partition(":")
            getattr(importlib.import_module(module), name)()
            return "done", None
        if (run, threads) not in _RUNNING:
            _RUNNING.clear()
            begin, payload = _ray().get(shared[0])
            _RUNNING[run, threads] = begin(payload, threads)
        return "done", _RUNNING[run, threads](batch)
    except NodeRefusal as e:
        return "refused", str(e)
    except QuantkitError as e:
        return "failed", (type(e).__name__, e.message, e.code)
    except OSError as e:
        return "disk", f"{e.filename or 'the disk'}: {e.strerror or e}"
    except Exception:
        return "broken", traceback.format_exc()
