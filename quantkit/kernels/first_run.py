"""The first run: compile missing kernels on all CPUs, inform the user, and exclude the time from measurements.

``working_seconds`` is a clock that stops during compilation, so that no figure depends on the state of the cache.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from quantkit.cpus import available_cpus
from quantkit.process import no_collection

Job = Callable[[], object]

#: More processes are hardly faster, and each takes some 200 MB.
_PROCESSES = 8


class NotCached(Exception):
    """A kernel is not in the cache."""


class _Compiling:
    """State of compilations: the threads that compile, since when, and the seconds before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.since = 0.0
        self.seconds = 0.0
        self.is_disabled = self.is_reported = False
        self.listener: Callable[[str], None] | None = None

    def enter(self) -> None:
        with self.lock:
            if self.depth == 0:
                self.since = time.perf_counter()
                self.say("compiling kernels (first use on this machine)")
            self.depth += 1

    def leave(self) -> None:
        with self.lock:
            self.depth -= 1
            if self.depth == 0:
                self.seconds += time.perf_counter() - self.since
                self.say("")

    def say(self, text: str) -> None:
        """Report once to the user, or each time to a listener."""
        if self.listener is not None:
            if text:
                self.listener(text)
        elif text and not self.is_reported:
            erase = "\r\033[K" if sys.stderr.isatty() else ""  # a bar that is being drawn
            sys.stderr.write(f"{erase}{text}\n")
            sys.stderr.flush()
        self.is_reported = True


_STATE = _Compiling()


def mute() -> None:
    """Compile silently where stderr is not a terminal."""
    _STATE.is_reported = True


def tell(listener: Callable[[str], None]) -> None:
    """Call ``listener`` with a line for each kernel that this process compiles, instead of writing to stderr."""
    _STATE.listener = listener


def working_seconds() -> float:
    """Return the seconds of a clock that stops while kernels compile."""
    with _STATE.lock:
        now = _STATE.since if _STATE.depth else time.perf_counter()
        return now - _STATE.seconds


@contextmanager
def compilation() -> Iterator[None]:
    """Mark compilation: report it once and stop the clock. Raises NotCached while only the cache may be used."""
    if _STATE.is_disabled:
        raise NotCached
    with no_collection():
        _STATE.enter()
        try:
            yield
        finally:
            _STATE.leave()


def compile_in_order(jobs: Sequence[Job]) -> None:
    """Run jobs that each load or compile a kernel, those not in the cache in several processes.

    Processes take one job at a time; children only fill the cache. Where fork is not available, this process compiles
    everything.
    """
    missing = [job for job in jobs if not _in_cache(job)]
    if len(missing) > 1 and hasattr(os, "fork"):
        with compilation():
            _share(missing)
    for job in missing:
        job()


def _in_cache(job: Job) -> bool:
    _STATE.is_disabled = True
    try:
        job()
    except NotCached:
        return False
    finally:
        _STATE.is_disabled = False
    return True


def _share(jobs: list[Job]) -> None:
    """Compile jobs in this process and forked ones, which read the number of the next job from a pipe."""
    numbers, end = os.pipe()
    os.write(end, b"".join(i.to_bytes(2, "little") for i in range(len(jobs))))
    os.close(end)
    children = [_fork(jobs, numbers) for _ in range(min(available_cpus(), len(jobs), _PROCESSES) - 1)]
    try:
        _work(jobs, numbers)
        while children:
            os.waitpid(children[-1], 0)
            children.pop()
    finally:
        os.close(numbers)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _fork(jobs: list[Job], numbers: int) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads hold no lock that compilation takes
        child = os.fork()
    if child == 0:
        try:
            mute()
            _STATE.listener = None
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            _work(jobs, numbers)
        finally:
            os._exit(0)
    return child


def _work(jobs: list[Job], numbers: int) -> None:
    while number := os.read(numbers, 2):
        i = int.from_bytes(number, "little")
        _STATE.say(f"compiling kernels (first use on this machine): {i + 1} of {len(jobs)}")
        jobs[i]()
