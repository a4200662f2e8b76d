"""Rows by their own statistics, and groups of columns mixed, on the CPU and on the device, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from meaning import matrix, meaning
from operations import run_operation

from quantkit.kernels.cpu.core.tape import N_TOKENS, Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.layer import mixing as cpu
from quantkit.kernels.cuda.layer import mixing as cuda
from quantkit.model.ops import Exceed, Mix, StreamWeights, ToLength, Value

ROWS = [1, 3]
#: Columns of a group: one, less than a vector, odd, whole vectors.
GROUPS = [1, 6, 33, 64, 1030]
threads = pytest.mark.parametrize("threads", [1, 2, 3])


def values(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(0.5, 2, shape).astype(np.float32)


def on_cpu(operation: Any, width: int, rows: int, n_threads: int, slots: dict[str, Any]) -> Any:
    shape = (rows, width)
    return run_operation(operation, shape, threads=n_threads, width=width, rows_of=N_TOKENS, per=1, **slots)


def on_device(memory: Memory, launch: Any, width: int, rows: int, slots: dict[str, Any]) -> Any:
    to = memory.room((rows + 1, width))
    at = {k: memory.put(v) if isinstance(v, np.ndarray) else v for k, v in slots.items()}
    memory.run(launch, out=to, width=width, rows=rows, **at)
    got = memory.get(to, (rows + 1, width))
    assert np.isnan(got[-1]).all(), "a row behind the value was written"
    return got[:-1]


def exceed(rows: int, width: int) -> tuple[dict[str, Any], Any]:
    x = values(rows, width)
    v = Value("x", width)
    return {"x": x, "factor": 0.625}, meaning(Exceed(out=Value("out", width), x=v, factor=0.625), {v: x}, rows=rows)


def to_length(rows: int, group: int, n: int) -> tuple[dict[str, Any], Any]:
    x, like = values(rows, n * group), values(rows, group, seed=2)
    v, w = Value("x", n * group), Value("like", group)
    op = ToLength(out=Value("out", n * group), x=v, like=w, group=group)
    return {"x": x, "like": like, "group": group}, meaning(op, {v: x, w: like}, rows=rows)


def mix(rows: int, group: int, n: int, m: int) -> tuple[dict[str, Any], Any]:
    given = {
        "x": values(rows, n * group),
        "weights": values(rows, n * m, seed=2),
        "base": values(rows, m * group, seed=3),
    }
    named = {name: Value(name, array.shape[1]) for name, array in given.items()}
    op = Mix(out=Value("out", m * group), n=n, offset=0.75, **named)
    want = meaning(op, {named[name]: array for name, array in given.items()}, rows=rows)
    return given | {"group": group, "n": n, "offset": 0.75}, want


def stream_weights(rows: int) -> tuple[dict[str, Any], list[Any]]:
    x, scale, base = values(rows, 24), values(3, seed=2), values(24, seed=3)
    v, weights = Value("x", 24), {matrix(scale, "scale"): scale, matrix(base, "base"): base}
    outs = {name: Value(name, n) for name, n in (("before", 4), ("after", 4), ("across", 16))}
    of_scale, of_base = weights
    op = StreamWeights(**outs, x=v, scale=of_scale, base=of_base, eps=1e-3, rounds=4)
    want = meaning(op, {v: x}, rows=rows, weights=weights)
    return {"x": x, "scale": scale, "base": base, "eps": 1e-3, "rounds": 4}, want


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=4e-6)


@threads
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", GROUPS[1:])
def test_exceed(width: int, rows: int, threads: int) -> None:
    slots, want = exceed(rows, width)
    assert (want == 0).any()
    assert (want > 0).any()
    close(on_cpu(cpu.exceed, width, rows, threads, slots), want)


@threads
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("group", GROUPS)
def test_to_length(group: int, rows: int, threads: int) -> None:
    slots, want = to_length(rows, group, 3)
    close(on_cpu(cpu.to_length, 3 * group, rows, threads, slots), want)


@threads
@pytest.mark.parametrize(("n", "m"), [(4, 4), (1, 4), (3, 2)])
@pytest.mark.parametrize("group", GROUPS)
def test_mix(group: int, n: int, m: int, threads: int) -> None:
    slots, want = mix(3, group, n, m)
    close(on_cpu(cpu.mix, m * group, 3, threads, slots), want)


@threads
@pytest.mark.parametrize("rows", [1, 5])
def test_stream_weights(rows: int, threads: int) -> None:
    slots, want = stream_weights(rows)
    across = want[2].reshape(rows, 4, 4)
    assert np.abs(across.sum(2) - 1).max() < 0.02  # columns were the last, and are rows here
    made = {"before": np.zeros((rows, 4), np.float32), "after": np.zeros((rows, 4), np.float32)}
    team = Team(threads)
    batch, made["across"] = Batch(team, rows), np.zeros((rows, 16), np.float32)
    batch.set(np.zeros(rows))
    of = {k: address_of(v) if isinstance(v, np.ndarray) else v for k, v in (slots | made).items()}
    block = cpu.stream_weights.block(batch=batch.address, rows_of=N_TOKENS, per=1, **of)
    Tape(team, batch, [(cpu.stream_weights, block)]).run()
    for got, wanted in zip(made.values(), want, strict=True):
        close(got, wanted)


def test_stream_weights_on_the_device(memory: Memory) -> None:
    for rows in (1, 9):
        slots, want = stream_weights(rows)
        outs = {name: memory.room((rows + 1, n)) for name, n in (("before", 4), ("after", 4), ("across", 16))}
        at = {k: memory.put(v) if isinstance(v, np.ndarray) else v for k, v in slots.items()}
        memory.run(cuda.stream_weights(rows), rows=rows, **outs, **at)
        for (name, out), wanted in zip(outs.items(), want, strict=True):
            got = memory.get(out, (rows + 1, 16 if name == "across" else 4))
            assert np.isnan(got[-1]).all()
            close(got[:-1], wanted)


@pytest.mark.parametrize("group", GROUPS)
def test_on_the_device(memory: Memory, group: int) -> None:
    for rows in ROWS:
        if group > 1:
            slots, want = exceed(rows, group)
            close(on_device(memory, cuda.exceed(rows), group, rows, slots), want)
        slots, want = to_length(rows, group, 3)
        close(on_device(memory, cuda.to_length(3, rows), 3 * group, rows, slots), want)
        for n, m in ((4, 4), (1, 4), (3, 2)):
            slots, want = mix(rows, group, n, m)
            close(on_device(memory, cuda.mix(m * group, rows), m * group, rows, slots), want)
