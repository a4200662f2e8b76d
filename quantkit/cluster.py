"""A Ray cluster: its nodes, and work in batches that they pull.

Ray runs and retries; what is here decides which node gets how much. A node has at most ``AHEAD`` batches for each
worker, one that runs and one that waits, so the fast get more and little lies in queues. Nodes are looked at anew all
the time, so those that join late are used. A batch may run twice, and must do the same both times.

``ray`` is imported here only, and only when a cluster is asked for.
"""

from __future__ import annotations

import atexit
import gc
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
from quantkit.version import __version__

#: Batches of a worker: one runs, one waits.
AHEAD = 2
#: How often the kernel's killing of a worker is borne for one batch, on one node (by Ray) and on several.
RETRIES, ATTEMPTS = 2, 3
#: Seconds to wait for a node when none is left.
PATIENCE = 60.0
#: Threads of a worker process that encodes: few for the interpreter's lock, many for memory; see docs/cluster.md.
WIDTH = 8
_LOOK_SECONDS, _WAIT_SECONDS, _TAKE_SECONDS = 1.0, 0.5, 1.0
#: How long a cluster may take to accept a connection.
_ANSWER_SECONDS = 10.0


class Refused(Exception):
    """Raised on a node that cannot take part, and says why."""


@dataclass(eq=False)
class Node:
    """A node; ``cpus`` and ``gpus`` are those that Ray may give away."""

    id: str
    name: str
    cpus: int
    gpus: int
    #: CPUs of a worker, and how many workers there are.
    width: int = 1
    workers: int = 1
    #: Batches it has.
    flying: int = 0
    #: Bytes, or what else counts, that it has done.
    done: int = 0
    #: Whether this process runs there, and how many CPUs it uses itself.
    here: bool = False
    own: int = 0

    def divide(self, cpus: int, width: int, *, cards: bool = False) -> None:
        """Give ``cpus`` of its CPUs to workers, at most ``width`` to each; where this process runs, it is one of them.

        cards: let one worker have all, with the GPUs, where there are some.
        """
        if cards and self.gpus:
            self.width = cpus
            return
        self.workers = -(-cpus // width)
        self.width, self.gpus = cpus // self.workers, 0
        if self.here:
            self.workers, self.own = self.workers - 1, self.width


class Work(Protocol):
    """What a cluster is to do: ``begin`` and ``shared`` go to every worker process, batches one by one.

    ``begin(shared, threads)`` returns a function from a batch to its result. It raises ``Refused`` where a node cannot
    take part, and QuantkitError for what no node can do.
    """

    @property
    def begin(self) -> Callable[[Any, int], Callable[[Any], Any]]: ...

    @property
    def shared(self) -> Any: ...

    @property
    def stopped(self) -> bool:
        """Whether the work is to end early."""

    def fit(self, node: Node) -> None:
        """Set the workers of a new node, and their width."""

    def batch(self, node: Node) -> Any | None:
        """Return a batch for a node; None if all are given out."""

    def done(self, node: Node, batch: Any, result: Any) -> None:
        """Take the result of a batch."""

    def say(self, text: str) -> None:
        """Tell the user."""


class Here(Protocol):
    """What this process does of the work itself, as one of the workers of its node."""

    @property
    def busy(self) -> bool:
        """Whether it does something, or waits for what nodes may bring back."""

    def keep(self, batch: Any) -> None:
        """Take a batch for which no other worker is left."""

    def rest(self, seconds: float) -> None:
        """Wait so long, or until it is busy no more."""


class _Reply(NamedTuple):
    """What comes back: ``kind`` is done, refused, failed, disk or broken."""

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
    here: Here | None
    nodes: dict[str, Node] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    flights: dict[Any, _Flight] = field(default_factory=dict)
    #: Batches that came back undone, and how often they were tried.
    again: deque[tuple[Any, int]] = field(default_factory=deque)
    looked: float = 0.0
    alone_since: float | None = None


def _ray() -> ModuleType:
    collects = gc.isenabled()
    gc.disable()  # saves a seventh of the time: modules are no garbage
    try:
        import ray
    except ImportError as e:
        raise ResourceError(
            f"--ray needs the package ray, which is not installed here ({e}): pip install 'gguf-quantkit[ray]'"
        ) from None
    finally:
        if collects:
            gc.enable()
    return ray  # type: ignore[no-any-return]


def _check_answers(address: str) -> bool:
    """Tell whether an address is known and something listens there; Ray itself would try for minutes.

    Raises ResourceError if nothing does.
    """
    if address == "local":
        return False
    where = address if address != "auto" else os.environ.get("RAY_ADDRESS", "")
    if not where or where == "auto":
        with suppress(ImportError, AttributeError, OSError):
            where = importlib.import_module("ray._private.utils").read_ray_address() or ""
    host, colon, port = where.rpartition(":")
    if not colon or not port.isdecimal():
        return False  # Ray knows better
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
    except (OSError, OverflowError) as e:
        named = "" if address == where else f" (that is {where})"
        raise ResourceError(
            f"--ray {address}{named}: no cluster answers there ({getattr(e, 'strerror', None) or e}); "
            f"`ray start --head` starts one, --ray local one of this machine for this run alone"
        ) from None
    return True


def _print_to_stderr(data: dict[str, Any], **_: Any) -> None:
    # Of each message the first sentence; the rest is advice about Ray's logs.
    sys.stderr.write("".join(f"ray: {line.partition('. ')[0]}\n" for line in data.get("lines", ())))


@cache
def _sources() -> str:
    """Return the version, and a hash of all modules: nodes with others could make other bytes."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{__version__} ({digest.hexdigest()[:12]})"


def _name_of(node: Mapping[str, Any]) -> str:
    """Return what a user calls a node: the name that it was started by (`ray start --node-name`), or its host's."""
    given = node.get("NodeName")
    return str(given if given and given != node["NodeManagerAddress"] else node["NodeManagerHostname"])


#: Held by who connects this process, or disconnects it.
_TURN = threading.Lock()


def connect_ahead(address: str, then: Callable[[Cluster], None]) -> None:
    """Connect while this process does something else, and call ``then``; the next ``Cluster`` waits for it.

    Raises ResourceError at once if nothing answers; what else fails, the next ``Cluster`` raises.
    """
    if address == "local":  # what it starts is to end with this process: Ray sees to it in the main thread only
        then(Cluster(address))
        return
    _check(address)
    _check_answers(address)

    def connect() -> None:
        try:
            with suppress(Exception):
                then(Cluster(address, _turn=nullcontext()))
        finally:
            _TURN.release()

    _TURN.acquire()
    threading.Thread(target=connect, name="connect").start()


def _check(address: str) -> ModuleType:
    """Return Ray. Raises ResourceError without it, and for an address that cannot be."""
    ray = _ray()
    if address.startswith("ray://"):
        raise ResourceError(f"--ray {address}: run on a machine of the cluster, by its address HOST:PORT, or auto")
    return ray


class Cluster:
    """A connection to a cluster, which lasts until the process ends, or leaves.

    ``address`` is HOST:PORT, or "auto" for the cluster that this machine belongs to ($RAY_ADDRESS, if it is set), or
    "local" for one of this machine and process alone.
    """

    #: Whether it was one of these that has connected this process.
    _ours: ClassVar[bool] = False

    def __init__(self, address: str = "auto", *, _turn: AbstractContextManager[Any] = _TURN) -> None:
        self._ray = ray = _check(address)
        with _turn:
            self._connect(ray, address)

    def _connect(self, ray: ModuleType, address: str) -> None:
        if not ray.is_initialized():
            own: dict[str, Any] = {}
            if address == "local":
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                own["include_dashboard"] = False
            answers = _check_answers(address)
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
            except (ConnectionError, RuntimeError, ValueError, OSError) as e:
                reasons = [str(each).strip() or type(each).__name__ for each in (e, e.__cause__) if each is not None]
                reason = ": ".join(each.splitlines()[0].partition(". ")[0].rstrip(".") for each in reasons)
                if answers:
                    raise ResourceError(
                        f"--ray {address}: {reason}; something answers there, but does not let us in: it is another "
                        f"version than Ray {ray.__version__}, wants a token (RAY_AUTH_MODE=token and the cluster's "
                        "~/.ray/auth_token), or is no Ray"
                    ) from None
                raise ResourceError(
                    f"--ray {address}: {reason}; `ray start --head` starts a cluster, --ray local one of this "
                    "machine for this run alone"
                ) from None
            Cluster._ours = True
            # Ray's own hook, which runs after this one, would first sleep for half a second.
            atexit.register(ray.shutdown)
            # What Ray says of nodes and memory would go to standard output, which is that of --json.
            with suppress(AttributeError):
                ray._private.worker.print_to_stdstream = _print_to_stderr

    def leave(self) -> None:
        """Disconnect this process, if one of these has connected it, while it does something else."""
        if not Cluster._ours:
            return
        Cluster._ours = False

        def disconnect() -> None:
            try:
                self._ray.shutdown()
            finally:
                _TURN.release()

        _TURN.acquire()
        threading.Thread(target=disconnect, name="disconnect").start()

    def nodes(self) -> dict[str, Node]:
        """Return the living nodes that have CPUs, by id."""
        found = [n for n in self._ray.nodes() if n["Alive"] and int(n["Resources"].get("CPU", 0)) > 0]
        hosts, own = [_name_of(n) for n in found], self._ray.get_runtime_context().get_node_id()
        return {
            n["NodeID"]: Node(
                n["NodeID"],
                host if hosts.count(host) == 1 else f"{host}/{n['NodeID'][:8]}",
                int(n["Resources"]["CPU"]),
                int(n["Resources"].get("GPU", 0)),
                here=n["NodeID"] == own,
            )
            for n, host in zip(found, hosts, strict=True)
        }

    def prepare(self, function: str, threads: int | None, width: int, *, cards: bool = False) -> None:
        """Start the workers that ``Node.divide`` makes of each node, and call ``function``, MODULE:NAME, in them.

        It returns at once; batches that come meanwhile wait, each for the worker that it will run in.
        """
        send = self._task("", lambda: None)
        for node in self.nodes().values():
            node.divide(min(node.cpus, threads or node.cpus), width, cards=cards)
            for _ in range(node.workers):
                send(node, function)

    @contextmanager
    def taken(self, node: Node, cpus: int, wanted: Callable[[], bool]) -> Iterator[bool]:
        """Let this process have CPUs of its node, which Ray gives to nobody meanwhile.

        Waits for them; gives False if they are not ``wanted`` any more.
        """
        from ray.util import placement_group, placement_group_table, remove_placement_group

        while wanted():
            # The node is a wish: where it has no room, the group waits, or is made elsewhere.
            group = placement_group([{"CPU": cpus}], strategy="STRICT_PACK", _soft_target_node_id=node.id)
            try:
                while not (ready := group.wait(_TAKE_SECONDS)) and wanted():
                    pass
                if ready and placement_group_table(group)["bundles_to_node_id"][0] == node.id:
                    yield True
                    return
            finally:
                remove_placement_group(group)
            time.sleep(_WAIT_SECONDS)
        yield False

    def run(self, work: Work, here: Here | None = None) -> dict[str, Node]:
        """Do work on all nodes; return those that took part. On return no batch is under way.

        here: what this process does itself, for which its node has ``own`` CPUs.

        Raises what a batch raised on a node, with the node's name, and ClusterError when no node is left.
        """
        shared = cache(lambda: self._ray.put((work.begin, work.shared)))  # nobody needs it where there is no worker
        run = _Run(work, self._task(secrets.token_hex(16), shared), here)
        try:
            while not work.stopped:
                self._look(run)
                self._give(run)
                if not (run.flights or run.again or run.here and run.here.busy or self._is_left(run)):
                    break
                self._take(run)
        finally:
            self._end(run)
        return run.nodes

    def _task(self, run: str, shared: Callable[[], Any]) -> Callable[[Node, Any], Any]:
        """Return a function that sends a batch of a run to a node; "" is the run of what comes before one."""
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

    def _look(self, run: _Run) -> None:
        """Learn which nodes there are."""
        now = time.monotonic()
        if now - run.looked < _LOOK_SECONDS:
            return
        run.looked, there = now, self.nodes()
        for gone in run.nodes.keys() - there.keys() - run.refused.keys():
            if run.nodes[gone].cpus:
                run.work.say(f"node {run.nodes[gone].name} is gone; others do what it had")
                run.nodes[gone].cpus = 0
        for new in there.keys() - run.nodes.keys():
            run.work.fit(there[new])
            run.nodes[new] = there[new]

    def _usable(self, run: _Run) -> list[Node]:
        return [node for node in run.nodes.values() if node.cpus and node.id not in run.refused]

    def _give(self, run: _Run) -> None:
        """Fill up the nodes, every worker's first batch before the second."""
        if run.here is not None and run.here.busy and not any(node.workers for node in self._usable(run)):
            while run.again:
                run.here.keep(run.again.popleft()[0])
        for depth in range(1, AHEAD + 1):
            for node in self._usable(run):
                while node.flying < depth * node.workers:
                    batch, attempt = run.again.popleft() if run.again else (run.work.batch(node), 0)
                    if batch is None:
                        return
                    run.flights[run.task(node, batch)] = _Flight(node, batch, attempt + 1)
                    node.flying += 1

    def _is_left(self, run: _Run) -> bool:
        """Tell whether there is work, though no node has any: wait for nodes then. Raises ClusterError in the end."""
        if self._usable(run):
            return False
        if run.refused and not any(node.id not in run.refused for node in run.nodes.values()):
            raise ClusterError(f"no node can be used: {'; '.join(run.refused.values())}")
        now = time.monotonic()
        run.alone_since = run.alone_since or now
        if now - run.alone_since > PATIENCE:
            raise ClusterError(f"no node of the cluster has been there for {PATIENCE:.0f} s")
        return True

    def _take(self, run: _Run) -> None:
        """Wait for results, and take them."""
        if not run.flights:
            if run.here is not None and run.here.busy:
                run.here.rest(_WAIT_SECONDS)
            else:
                self._is_left(run)
                time.sleep(_WAIT_SECONDS)
            return
        run.alone_since = None
        ready, _ = self._ray.wait(list(run.flights), timeout=_WAIT_SECONDS)
        for ref in ready:
            flight = run.flights.pop(ref)
            flight.node.flying -= 1
            self._reply(run, flight, self._reply_of(ref))

    def _reply_of(self, ref: Any) -> _Reply:
        from ray import exceptions

        try:
            return _Reply(*self._ray.get(ref))
        except exceptions.RayTaskError as e:  # before our code ran: it is not there, or cannot be read
            return _Reply("refused", f"it cannot run quantkit {_sources()}: {e.cause or e}".splitlines()[0])
        except exceptions.RayError as e:
            return _Reply("lost", str(e).strip().splitlines()[0])

    def _reply(self, run: _Run, flight: _Flight, reply: _Reply) -> None:
        node, value = flight.node, reply.value
        if reply.kind == "done":
            run.work.done(node, flight.batch, value)
            return
        if reply.kind == "failed":
            kind, message = value
            raise getattr(errors, kind, QuantkitError)(f"{message} (on node {node.name})")
        if reply.kind == "broken":
            raise RuntimeError(f"on node {node.name}:\n{value}")
        attempt = flight.attempt
        if reply.kind == "refused":
            attempt -= 1
            if node.id not in run.refused:
                run.refused[node.id] = f"node {node.name}: {value}"
                run.work.say(f"warning: node {node.name} is not used: {value}")
        else:
            run.looked = 0.0
            self._look(run)
            attempt -= not node.cpus  # any number of nodes may die
        run.again.append((flight.batch, attempt))
        if attempt >= ATTEMPTS:
            raise ClusterError(f"node {node.name}: {value}; it was tried {attempt} times")

    def _end(self, run: _Run) -> None:
        """Stop what is under way, and wait until it has ended."""
        for ref in run.flights:
            self._ray.cancel(ref, force=True)
        with suppress(KeyboardInterrupt):
            self._ray.wait(list(run.flights), num_returns=len(run.flights), timeout=30) if run.flights else None


# ---------------------------------------------------------------- on the nodes

#: The run that this worker process has begun, and its function.
_BEGUN: dict[tuple[str, int], Callable[[Any], Any]] = {}


def _work(sources: str, run: str, shared: list[Any], threads: int, batch: Any) -> tuple[str, Any]:
    """Do a batch in a worker process, which keeps what it has begun; nothing is raised, Ray would try again."""
    try:
        if sources != _sources():
            return "refused", f"it has quantkit {_sources()}, not {sources}"
        if not run:
            module, _, name = batch.partition(":")
            getattr(importlib.import_module(module), name)()
            return "done", None
        if (run, threads) not in _BEGUN:
            _BEGUN.clear()
            begin, given = _ray().get(shared[0])
            _BEGUN[run, threads] = begin(given, threads)
        return "done", _BEGUN[run, threads](batch)
    except Refused as e:
        return "refused", str(e)
    except QuantkitError as e:
        return "failed", (type(e).__name__, e.message)
    except OSError as e:
        return "disk", f"{e.filename or 'the disk'}: {e.strerror or e}"
    except Exception:
        return "broken", traceback.format_exc()
