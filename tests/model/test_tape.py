"""Operations, blocks and tapes; the thread team and its barriers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from numba.core import types

from quantkit.kernels.cpu.core.simd import load, store
from quantkit.kernels.cpu.core.tape import (
    Batch,
    Tape,
    TapeOp,
    address_of,
    arg,
    batch_word,
    farg,
    first_of,
    operation,
)
from quantkit.kernels.cpu.core.team import Team, atomic_add, barrier

step = 1.0


@operation("batch x n factor:f")
def add_scaled(args, tid, nth):
    x, n = arg(args, 1), arg(args, 2)
    for i in range(first_of(n, tid, nth), first_of(n, tid + 1, nth)):
        store(x, 4 * i, types.float32(load(types.float32, x, 4 * i) + farg(args, 3) * types.float32(step)))


@operation("batch x n")
def shift_left(args, tid, nth):
    """x[i] = x[i + 1] as it was: needs what all threads wrote before, and a barrier inside."""
    x, n, ctl = arg(args, 1), arg(args, 2), batch_word(args, 7)
    i = first_of(n, tid + 1, nth)
    after = load(types.float32, x, 4 * (i if i < n else 0))
    barrier(ctl, nth)
    for i in range(first_of(n, tid, nth), first_of(n, tid + 1, nth) - 1):
        store(x, 4 * i, load(types.float32, x, 4 * i + 4))
    store(x, 4 * (first_of(n, tid + 1, nth) - 1), after)


@operation("batch total")
def count(args, tid, nth):
    atomic_add(arg(args, 1), 0, 1)


def test_a_block_has_integers_and_float_bits():
    block = add_scaled.block(batch=1, x=2, n=3, factor=0.5)
    assert block.tolist()[:3] == [1, 2, 3]
    assert block[3:].view(np.float64) == 0.5
    assert add_scaled.slots == ("batch", "x", "n", "factor")


def test_blocks_name_every_slot():
    with pytest.raises(ValueError, match=r"missing: \['n'\], unknown: \['m'\]"):
        add_scaled.block(batch=1, x=2, m=3, factor=0.5)
    with pytest.raises(TypeError, match="slot n must be an integer"):
        add_scaled.block(batch=1, x=2, n=3.0, factor=0.5)
    with pytest.raises(ValueError, match="begin with batch"):
        TapeOp(lambda args, tid, nth: None, "x batch")


def test_other_bindings_compile_another_operation():
    twice = add_scaled.bind("by2", step=2.0)
    assert twice.name == "add_scaled_by2"
    assert add_scaled.bind("by2", step=2.0) is twice
    with pytest.raises(ValueError, match="stepp"):
        add_scaled.bind("by3", stepp=3.0)
    team, x = Team(1), np.zeros(8, np.float32)
    batch = Batch(team, 1)
    entries = [(op, op.block(batch=batch.address, x=address_of(x), n=8, factor=10.0)) for op in (add_scaled, twice)]
    Tape(team, batch, entries).run()
    np.testing.assert_array_equal(x, 30)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_entries_read_the_writes_of_all_threads(threads):
    team, n = Team(threads), 60
    batch, x = Batch(team, 1), np.arange(n, dtype=np.float32)
    ones = add_scaled.block(batch=batch.address, x=address_of(x), n=n, factor=1.0)
    left = shift_left.block(batch=batch.address, x=address_of(x), n=n)
    tape = Tape(team, batch, [(add_scaled, ones), (shift_left, left)] * 300)
    for launch in range(3):
        tape.run()
        want = np.roll(np.arange(n), -300 * (launch + 1) % n) + 300 * (launch + 1)
        np.testing.assert_array_equal(x, want)


def test_more_threads_than_cpus_do_not_deadlock():
    team = Team(4 * (os.cpu_count() or 1) + 1)
    batch, total = Batch(team, 1), np.zeros(1, np.int64)
    tape = Tape(team, batch, [(count, count.block(batch=batch.address, total=address_of(total)))] * 50)
    start = time.perf_counter()
    tape.run()
    assert total[0] == 50 * team.threads
    assert time.perf_counter() - start < 20


def test_launches_wake_sleeping_threads():
    team = Team(3)
    batch, total = Batch(team, 1), np.zeros(1, np.int64)
    tape = Tape(team, batch, [(count, count.block(batch=batch.address, total=address_of(total)))])
    for i in range(300):
        tape.run()
        if i % 10 == 0:
            time.sleep(0.0005 * (i % 3))
    assert total[0] == 900


def test_independent_entries_need_no_barrier():
    team = Team(2)
    batch, total = Batch(team, 1), np.zeros(1, np.int64)
    block = count.block(batch=batch.address, total=address_of(total))
    Tape(team, batch, [(count, block, True)] * 10 + [(count, block)]).run()
    assert total[0] == 22


def test_timing_gives_nanoseconds_of_each_entry():
    team, n = Team(2), 1 << 20
    batch, x, total = Batch(team, 1), np.zeros(n, np.float32), np.zeros(1, np.int64)
    slow = add_scaled.block(batch=batch.address, x=address_of(x), n=n, factor=1.0)
    quick = count.block(batch=batch.address, total=address_of(total))
    tape = Tape(team, batch, [(count, quick), (add_scaled, slow), (count, quick)])
    tape.run_timed()
    runs = []
    for _ in range(20):
        start = time.perf_counter_ns()
        runs.append(tape.run_timed())
        assert 0 < runs[-1].sum() < 1.2 * (time.perf_counter_ns() - start)
    times = np.min(runs, axis=0)  # others use this machine, too
    assert (times > 0).all()
    assert times[1] > times[0] + times[2]
    assert x[0] == 21
    assert total[0] == 21 * 4


def test_threads_end_with_the_team():
    before = set(threading.enumerate())
    team = Team(3)
    batch, total = Batch(team, 1), np.zeros(1, np.int64)
    Tape(team, batch, [(count, count.block(batch=batch.address, total=address_of(total)))]).run()
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    del team
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_launches_from_several_threads_take_turns():
    team = Team(2)
    batch, total = Batch(team, 1), np.zeros(1, np.int64)
    tape = Tape(team, batch, [(count, count.block(batch=batch.address, total=address_of(total)))] * 20)
    callers = [threading.Thread(target=lambda: [tape.run() for _ in range(50)]) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert total[0] == 2 * 20 * 50 * 3


FORK = """
import os, sys
import numpy as np
import test_tape as t
team = t.Team(2)
batch, total = t.Batch(team, 1), np.zeros(1, np.int64)
tape = t.Tape(team, batch, [(t.count, t.count.block(batch=batch.address, total=t.address_of(total)))] * 5)
tape.run()
child = os.fork()
tape.run()
if child:
    sys.exit(0 if os.waitpid(child, 0)[1] == 0 and total[0] == 20 else 1)
os._exit(0 if total[0] == 20 else 1)
"""


FOLDER = Path(__file__).parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_starts_its_own_threads():
    env = {**os.environ, "PYTHONPATH": f"{os.getcwd()}:{FOLDER}:{FOLDER.parent}/lib"}
    subprocess.run([sys.executable, "-c", FORK], env=env, check=True, timeout=60)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
def test_a_failing_thread_is_reported():
    before = os.sched_getaffinity(0)
    team = Team(2, pin=[min(before), 1 << 20])
    batch, total = Batch(team, 1), np.zeros(1, np.int64)
    tape = Tape(team, batch, [(count, count.block(batch=batch.address, total=address_of(total)))])
    try:
        with pytest.raises(RuntimeError, match="a thread of the team has failed") as failure:
            tape.run()
    finally:
        os.sched_setaffinity(0, before)
    assert isinstance(failure.value.__cause__, (OSError, ValueError))


def test_a_team_needs_threads():
    with pytest.raises(ValueError, match="1 to 62"):
        Team(0)
    with pytest.raises(ValueError, match="pinned to 2 CPUs"):
        Team(2, pin=[0])


def test_batches_are_checked():
    batch = Batch(Team(1), 4)
    batch.set([5, 6, 7], outputs=[2])
    assert batch.words[:2].tolist() == [3, 1]
    with pytest.raises(ValueError, match="1 to 4 tokens"):
        batch.set([1] * 5)
    with pytest.raises(ValueError, match="outputs are rows"):
        batch.set([1, 2], outputs=[2])


SCRIPT = """
import sys
from quantkit.kernels.cpu.core.tape import operation, run_tape
import example
print(example.double.address != 0, example.double.bind("b", step=2).address != 0, run_tape.address != 0)
print(example.double.from_cache, example.double.bind("b", step=2).from_cache, run_tape.from_cache)
print("numba.np.linalg" in sys.modules)
print(example.double.bind("c", step=int(sys.argv[1])).address != 0)
"""
EXAMPLE = """
from quantkit.kernels.cpu.core.tape import operation, arg
from quantkit.kernels.cpu.core.simd import store
step = 1
@operation("batch x")
def double(args, tid, nth):
    store(arg(args, 1), 0, step)
"""


def test_a_second_process_finds_compiled_operations_on_disk(tmp_path):
    """And imports what numba needs to compile only when it compiles another one."""
    (tmp_path / "example.py").write_text(EXAMPLE)
    env = {**os.environ, "QUANTKIT_CACHE": str(tmp_path / "cache"), "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT, step], env=env, capture_output=True, text=True, check=True)
        for step in "34"
    ]
    outputs = [run.stdout for run in runs]
    assert outputs == [
        "True True True\nFalse False False\nTrue\nTrue\n",
        "True True True\nTrue True True\nFalse\nTrue\n",
    ]
    assert [run.stderr for run in runs] == ["compiling kernels (first use on this machine)\n"] * 2
