"""Rotary positions on the device against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from device_memory import Memory
from layer_cases import ROPES, TURNS, turn

from quantkit.kernels.cuda.layer import norms_rope
from quantkit.kernels.rope_constants import rope_constants, rope_scalars
from quantkit.model.backends.reference import rope_angles

f32 = np.float32


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("with_factors", [False, True])
def test_angles(memory: Memory, name: str, with_factors: bool) -> None:
    config, pairs = ROPES[name], ROPES[name].n_rot // 2
    factors = np.linspace(1, 8, pairs).astype(f32) if with_factors else None
    positions = np.array([0, 1, 2, 77, 1000, 4095, 131071], np.int32)
    period, inverse = (5, 1) if with_factors else (1, 0)
    out = memory.allocate((len(positions), pairs, 2))
    memory.run(
        norms_rope.rope_table(len(positions), pairs),
        batch=memory.batch(np.zeros(len(positions)), positions),
        out=out,
        rows=len(positions),
        pairs=pairs,
        each=period,
        back=inverse,
        constants=memory.put(rope_constants(config, factors)),
        **rope_scalars(config),
    )
    actual = memory.get(out, (len(positions), pairs, 2))
    cos, sin = rope_angles(config, positions // period * period, factors)
    want = np.stack([cos, -sin if inverse else sin], -1)
    np.testing.assert_allclose(actual[:6], want[:6], atol=2e-6)
    np.testing.assert_allclose(actual[6], want[6], atol=2e-2)  # a step of its angle is 2^-6 itself


@pytest.mark.parametrize("kind", norms_rope.ROPE_KINDS)
@pytest.mark.parametrize(("rows", "heads", "head", "start", "n_rot"), TURNS)
def test_rotation(memory: Memory, kind: str, rows: int, heads: int, head: int, start: int, n_rot: int) -> None:
    x, angles, want = turn(kind, rows, heads, head, start, n_rot)
    table = memory.put(angles)
    for in_place in (False, True):
        source = memory.put(x)
        out = source if in_place else memory.allocate(x.shape)
        slots = {"width": heads * head, "head": head, "start": start, "n_rot": n_rot}
        memory.run(norms_rope.rope(kind, rows, heads * head, head, n_rot), out=out, x=source, table=table, **slots)
        np.testing.assert_allclose(memory.get(out, x.shape), want, atol=1e-6)
