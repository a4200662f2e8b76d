"""How streams that mix count, on the CPU and on the device, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from reference_op import matrix, meaning

from quantkit.kernels.cpu.core.tape import N_TOKENS, Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.layer import streams as cpu
from quantkit.kernels.cuda.layer import mixing as cuda
from quantkit.model.ops import StreamWeights, Value


def values(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(0.5, 2, shape).astype(np.float32)


def close(actual: Any, want: Any) -> None:
    np.testing.assert_allclose(actual, want, rtol=2e-6, atol=4e-6)


def stream_weights(rows: int) -> tuple[dict[str, Any], list[Any]]:
    x, scale, base = values(rows, 24), values(3, seed=2), values(24, seed=3)
    v, weights = Value("x", 24), {matrix(scale, "scale"): scale, matrix(base, "base"): base}
    outs = {name: Value(name, n) for name, n in (("before", 4), ("after", 4), ("mixing", 16))}
    of_scale, of_base = weights
    op = StreamWeights(**outs, x=v, scale=of_scale, base=of_base, eps=1e-3, rounds=4)
    want = meaning(op, {v: x}, rows=rows, weights=weights)
    return {"x": x, "scale": scale, "base": base, "eps": 1e-3, "rounds": 4}, want


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 5])
def test_stream_weights(rows: int, threads: int) -> None:
    slots, want = stream_weights(rows)
    mixing = want[2].reshape(rows, 4, 4)
    assert np.abs(mixing.sum(2) - 1).max() < 0.02  # columns were the last, and are rows here
    outs = {"before": np.zeros((rows, 4), np.float32), "after": np.zeros((rows, 4), np.float32)}
    team = Team(threads)
    batch, outs["across"] = Batch(team, rows), np.zeros((rows, 16), np.float32)
    batch.set(np.zeros(rows))
    slots_by_name = {k: address_of(v) if isinstance(v, np.ndarray) else v for k, v in (slots | outs).items()}
    block = cpu.stream_weights.block(batch=batch.address, rows_of=N_TOKENS, per=1, **slots_by_name)
    Tape(team, batch, [(cpu.stream_weights, block)]).run()
    for actual, expected in zip(outs.values(), want, strict=True):
        close(actual, expected)


def test_stream_weights_on_the_device(memory: Memory) -> None:
    for rows in (1, 9):
        slots, want = stream_weights(rows)
        outs = {name: memory.allocate((rows + 1, n)) for name, n in (("before", 4), ("after", 4), ("across", 16))}
        addresses = {k: memory.put(v) if isinstance(v, np.ndarray) else v for k, v in slots.items()}
        memory.run(cuda.stream_weights(rows), rows=rows, **outs, **addresses)
        for (name, out), expected in zip(outs.items(), want, strict=True):
            actual = memory.get(out, (rows + 1, 16 if name == "across" else 4))
            assert np.isnan(actual[-1]).all()
            close(actual[:-1], expected)
