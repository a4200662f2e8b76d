"""A Ray cluster on this machine: a head, and nodes, each with its own CPUs and compiled kernels.

Nodes can be killed and restarted. Their logs are in ``folder``.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


class LocalCluster:
    """A cluster with a node for each list of CPUs; a context manager. ``address``: the argument of --ray.

    Drivers run on the head, which may have CPUs, too.
    """

    def __init__(
        self, folder: Path, cpus: Sequence[Sequence[int]], *, head: Sequence[int] = (), port: int = 6411
    ) -> None:
        self.folder, self.cpus, self.head = folder, cpus, head
        self.address = f"127.0.0.1:{port}"
        # The cluster's own token, for its nodes and for the drivers that this process starts.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._head: subprocess.Popen[bytes] | None = None
        self._nodes: list[subprocess.Popen[bytes]] = []
        # The folder of sockets, whose paths must be short.
        self._temporary = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))

    def __enter__(self) -> LocalCluster:
        port = self.address.rpartition(":")[2]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nodes have process groups of their own
        try:
            self._head = self._start("head", ["--head", "--port", port, "--include-dashboard=false"], self.head)
            self.wait(0)
            for number in range(len(self.cpus)):  # one by one, because they would take each other's ports
                self._nodes.append(self._start_node(number))
                self.wait(number + 1)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for process in (*self._nodes, self._head):
            if process is not None:
                _kill(process)

    def _start(self, name: str, arguments: Sequence[str], cpus: Sequence[int]) -> subprocess.Popen[bytes]:
        """Start `ray start --block` in its own process group, on its own CPUs."""
        ray = Path(sys.executable).with_name("ray")
        common = ["--block", "--disable-usage-stats", f"--num-cpus={len(cpus)}", "--object-store-memory=100000000"]
        if name == "head":
            common.append(f"--temp-dir={self._temporary}")
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        if cpus and name != "head":
            # A kernel cache of its own, like a separate machine.
            environment["QUANTKIT_CACHE"] = str(self.folder / f"kernels-{name}")
        pinned = ["taskset", "-c", ",".join(map(str, cpus))] if cpus else []
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [*pinned, str(ray), "start", *arguments, *common],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def _start_node(self, number: int) -> subprocess.Popen[bytes]:
        name = f"node-{number}"
        return self._start(name, [f"--address={self.address}", f"--node-name={name}"], self.cpus[number])

    def wait(self, count: int) -> None:
        """Wait until a number of nodes with CPUs has joined, beside the head."""
        count += bool(self.head)
        script = (
            "import ray, time\n"
            f"ray.init(address='{self.address}', log_to_driver=False, logging_level='ERROR')\n"
            f"while sum(n['Alive'] and 'CPU' in n['Resources'] for n in ray.nodes()) != {count}: time.sleep(0.2)"
        )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if subprocess.run([sys.executable, "-c", script], timeout=40, capture_output=True).returncode == 0:
                    return
            for number, process in enumerate(self._nodes):
                if process.poll() is not None:
                    self.restart(number)
        raise RuntimeError(f"the cluster does not start; see {self.folder}/*.log")

    def kill_node(self, rng: random.Random) -> int:
        """Kill a node with everything on it; return its number."""
        number = rng.randrange(len(self._nodes))
        _kill(self._nodes[number])
        return number

    def restart(self, number: int) -> None:
        """Start a node that was killed."""
        self._nodes[number] = self._start_node(number)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all processes of the cluster so far."""
        alive = [process.pid for process in (self._head, *self._nodes) if process is not None]
        return sum(_cpu_seconds(pid) for process in alive for pid in (process, *_descendants(process)))

    def kill_worker(self, rng: random.Random) -> bool:
        """Kill a busy worker process; return False if there is none."""
        busy = [pid for process in self._nodes for pid in _descendants(process.pid) if _title(pid) == "ray::_work"]
        if busy:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(busy), signal.SIGKILL)
        return bool(busy)


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
    except OSError:
        return ""


def _descendants(pid: int) -> list[int]:
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pids += [int(child), *_descendants(int(child))]
    return pids


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a node's processes, workers included, at once."""
    for pid in (process.pid, *_descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
