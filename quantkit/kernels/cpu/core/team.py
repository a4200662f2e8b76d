"""A team of threads that runs one compiled function (SPMD), without numba's thread layer.

    team = Team(2); team.launch(function_address, block_address)    # function(block, thread, threads) on every thread

Thread 0 is the caller. The others are Python threads that stay in compiled code without the GIL: after a launch they
poll for the next one (in generation the next token follows within microseconds), then sleep on a lock. Within a launch
they meet at spin barriers of LLVM atomics, 0.1 us each; a thread that waits long yields its time slice, because on an
oversubscribed machine the thread it waits for may need the CPU.

The control block is int64 words, each group in its own pair of cache lines (the prefetcher fetches pairs):

    0 arrivals at the barrier   16 generation of the barrier, 17 failed   32 number of the launch, 33 function,
    34 block, 35 threads        48 + 16 t: 1 while thread t sleeps
"""

from __future__ import annotations

import os
import platform
import threading
import time
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.core.simd import _call, emits

_I64 = ir.IntType(64)
_X86 = platform.machine() in ("x86_64", "AMD64", "i686")

ARRIVALS = 0
GENERATION = 16
FAILURE = 17
LAUNCH = 32
FUNCTION = 33
BLOCK = 34
THREADS = 35
SLEEPS = 48
#: Polls of a barrier before the thread yields (about 6 us). On a busy machine two threads may share a CPU, and every
#: barrier then takes this long: 250 polls were 3 to 10 times faster there than 4000, or than sleeping, after which the
#: scheduler also tends to keep both on one CPU; on a quiet machine there is no difference.
SPINS = 250
#: Time-stamp counter cycles for which a thread awaits the next launch: about 30 us spinning, then 1 ms yielding, then
#: it sleeps. Waking it takes 20 to 200 us.
ALERT, AWAKE = (100_000, 3_000_000) if _X86 else (800, 25_000)

# ---------------------------------------------------------------- atomics; addresses are integers, words are int64


def word_at(b: Any, address: Any, index: Any) -> Any:
    """Emit the pointer to the index-th int64 at an address."""
    return b.gep(b.inttoptr(address, _I64.as_pointer()), [index])


@emits(lambda address, index, value: types.int64(*[types.int64] * 3))
def atomic_add(b, sig, address, index, value):
    """atomic_add(address, word, v): add to an int64 and return its old value."""
    return b.atomic_rmw("add", word_at(b, address, index), value, "seq_cst")


@emits(lambda address, index, value: types.int64(*[types.int64] * 3))
def atomic_exchange(b, sig, address, index, value):
    """atomic_exchange(address, word, v): write an int64 and return its old value."""
    return b.atomic_rmw("xchg", word_at(b, address, index), value, "seq_cst")


@emits(lambda address, index: types.int64(types.int64, types.int64))
def atomic_load(b, sig, address, index):
    """atomic_load(address, word): read an int64, sequentially consistent."""
    return b.load_atomic(word_at(b, address, index), "seq_cst", 8)


@emits(lambda address, index, value: types.void(*[types.int64] * 3))
def atomic_store(b, sig, address, index, value):
    """atomic_store(address, word, v): write an int64 with release ordering."""
    b.store_atomic(value, word_at(b, address, index), "release", 8)


@emits(lambda: types.void())
def pause(b, sig):
    """Hint to the core that this is a spin loop."""
    if _X86:
        _call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])


@emits(lambda: types.void())
def give_way(b, sig):
    """Yield the rest of this time slice (sched_yield, where it exists)."""
    if os.name == "posix":
        _call(b, "sched_yield", ir.IntType(32), [])


@emits(lambda: types.int64())
def cycles(b, sig):
    """Read the time-stamp counter (x86) or the virtual timer (AArch64); see ``nanoseconds_per_cycle``."""
    return _call(b, "llvm.readcyclecounter" if _X86 else "llvm.readsteadycounter", _I64, [])


@emits(lambda function, block, tid, nth: types.void(*[types.int64] * 4))
def call_operation(b, sig, function, block, tid, nth):
    """call_operation(function, block, tid, nth): call compiled code by its address."""
    signature = ir.FunctionType(ir.VoidType(), [_I64] * 3)
    b.call(b.inttoptr(function, signature.as_pointer()), [block, tid, nth])


@inline
def barrier(ctl, nth):
    """Wait for all ``nth`` threads; writes before are visible to all after."""
    if nth == 1:
        return
    generation = atomic_load(ctl, GENERATION)
    if atomic_add(ctl, ARRIVALS, 1) == nth - 1:
        atomic_store(ctl, ARRIVALS, 0)
        atomic_add(ctl, GENERATION, 1)
        return
    looks = 0
    while atomic_load(ctl, GENERATION) == generation:
        pause()
        looks += 1
        if looks > SPINS:
            give_way()
            if atomic_load(ctl, FAILURE) != 0:
                return


# ---------------------------------------------------------------- the threads


@kernel
def _take_part(ctl: int, tid: int) -> None:
    """Run thread 0's share of a launch."""
    nth = atomic_load(ctl, THREADS)
    call_operation(atomic_load(ctl, FUNCTION), atomic_load(ctl, BLOCK), tid, nth)
    barrier(ctl, nth)


@kernel
def _begin(ctl: int, function: int, block: int) -> int:
    """Announce a launch; return a bit mask of the threads to wake."""
    atomic_store(ctl, FUNCTION, function)
    atomic_store(ctl, BLOCK, block)
    atomic_add(ctl, LAUNCH, 1)
    sleepers = 0
    for t in range(1, atomic_load(ctl, THREADS)):
        if atomic_exchange(ctl, SLEEPS + 16 * t, 0) == 1:
            sleepers |= 1 << t
    return sleepers


@kernel
def _work(ctl: int, tid: int, generation: int) -> int:
    """Take part in launches until none comes for a while; return the number of the last one, or -1 at the end.

    The thread then acquires its lock: either it is marked asleep, or the mark is gone and the lock is being released.
    """
    nth = atomic_load(ctl, THREADS)
    while True:
        since = cycles()
        while atomic_load(ctl, LAUNCH) == generation:
            pause()
            waited = cycles() - since
            if waited > ALERT:
                give_way()
            if waited > AWAKE:
                atomic_exchange(ctl, SLEEPS + 16 * tid, 1)
                if atomic_load(ctl, LAUNCH) == generation or atomic_exchange(ctl, SLEEPS + 16 * tid, 0) == 0:
                    return generation
                break
        generation += 1
        function = atomic_load(ctl, FUNCTION)
        if function == 0:
            return -1
        call_operation(function, atomic_load(ctl, BLOCK), tid, nth)
        barrier(ctl, nth)


class Team:
    """``threads`` threads (at most 62), including the caller; the others are daemons, started at the first launch.

    ``pin`` gives each thread a CPU. By default none is pinned: next to other programs a pinned team waits for the one
    thread whose CPU is taken. Concurrent launches are serialized; a forked process starts its own threads.
    """

    def __init__(self, threads: int, pin: Sequence[int] | None = None) -> None:
        if not 1 <= threads <= 62:
            raise ValueError(f"a team has 1 to 62 threads, not {threads}")
        if pin is not None and len(pin) != threads:
            raise ValueError(f"a team of {threads} is pinned to {threads} CPUs, not {len(pin)}")
        self.threads = threads
        self._pin = pin
        self._words = np.zeros(SLEEPS + 16 * threads + 16, np.int64)
        start: int = self._words.__array_interface__["data"][0]
        self.control: int = (start + 127) // 128 * 128  #: address of the control block
        self._launching = threading.Lock()
        self._locks: list[threading.Lock] = []
        self._failures: list[BaseException] = []
        self._process = 0

    def launch(self, function: int, block: int) -> None:
        """Run function(block, thread, threads) on every thread and wait for all; RuntimeError if a thread failed."""
        with self._launching:
            if self._process != os.getpid():
                self._start()
            _wake(self.control, self._locks, function, block)
            _take_part(self.control, 0)
        if self._failures:
            raise RuntimeError("a thread of the team has failed") from self._failures[0]

    def _start(self) -> None:
        self._process = os.getpid()
        self._words[:] = 0
        atomic_set(self.control, THREADS, self.threads)
        self._locks = [threading.Lock() for _ in range(self.threads)]
        _work.compile((types.int64,) * 3)  # type: ignore[attr-defined]
        for t in range(1, self.threads):
            self._locks[t].acquire()
            atomic_set(self.control, SLEEPS + 16 * t, 1)
            cpu = None if self._pin is None else self._pin[t]
            # No reference to the team, which would keep it from garbage collection.
            shared = (self._words, self.control, t, self._locks[t], self._failures, cpu)
            threading.Thread(target=_serve, args=shared, name=f"quantkit-{t}", daemon=True).start()
        if self._pin is not None:
            os.sched_setaffinity(0, {self._pin[0]})
        if self.threads > 1:
            weakref.finalize(self, _end, self._words, self.control, self._locks).atexit = False


def _wake(control: int, locks: list[threading.Lock], function: int, block: int) -> None:
    """Announce a launch (function 0: the end) and wake the sleeping threads."""
    sleepers = _begin(control, function, block)
    if sleepers:
        for t in range(1, len(locks)):
            if sleepers >> t & 1:
                locks[t].release()


def _end(words: Any, control: int, locks: list[threading.Lock]) -> None:
    """End the threads of a collected team; ``words`` keeps the control block alive."""
    _wake(control, locks, 0, 0)


def _serve(words: Any, control: int, t: int, lock: Any, failures: list[BaseException], cpu: int | None) -> None:
    """Run as thread ``t`` until the end; ``words`` keeps the control block alive."""
    generation = 0
    try:
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})
        while generation >= 0:
            lock.acquire()
            generation = _work(control, t, generation)
    except BaseException as failure:  # the other threads wait at a barrier and must be released
        failures.append(failure)
        atomic_set(control, FAILURE, 1)


@kernel
def atomic_set(control: int, index: int, value: int) -> None:
    """Call atomic_store from Python."""
    atomic_store(control, index, value)


@cache
def nanoseconds_per_cycle() -> float:
    """Measure the unit of ``cycles`` against the system clock (10 ms, once)."""
    _read_cycles()  # compiles
    start, before = time.perf_counter_ns(), _read_cycles()
    while time.perf_counter_ns() - start < 10_000_000:
        pass
    return (time.perf_counter_ns() - start) / float(_read_cycles() - before)


@kernel
def _read_cycles() -> int:
    now: int = cycles()
    return now
