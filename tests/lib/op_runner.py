"""Run one operation on arrays, with guard bytes after every output."""

from __future__ import annotations

import numpy as np

from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team

GUARD = np.float32(-12345.0)


def run_operation(operation, out_shape, *, threads=1, tokens=None, batch=None, **slots):
    """Return the values that ``operation`` writes to ``out``; arrays among the slots become their addresses.

    ``batch``: arguments of Batch.set; by default as many tokens as out has rows.
    """
    team = Team(threads)
    n = int(np.prod(out_shape))
    buffer = np.full(n + 32, GUARD, np.float32)
    block_batch = Batch(team, 1024)
    block_batch.set(**(batch or {"tokens": np.zeros(out_shape[0] if tokens is None else tokens, np.int32)}))
    values = {k: address_of(v) if isinstance(v, np.ndarray) else v for k, v in slots.items()}
    out = address_of(buffer)
    for name, value in values.items():
        if value == "out":
            buffer[:n] = slots["start_with"].reshape(-1)
            values[name] = out
    values.pop("start_with", None)
    block = operation.block(batch=block_batch.address, out=out, **values)
    Tape(team, block_batch, [(operation, block)]).run()
    assert (buffer[n:] == GUARD).all(), "bytes beyond the value were written"
    return buffer[:n].reshape(out_shape)
