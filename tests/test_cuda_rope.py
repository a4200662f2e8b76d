"""Rotary positions on the device against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from test_norms_rope import CONFIGS

from quantkit.kernels.cuda import rope
from quantkit.kernels.rope_constants import rope_constants, rope_scalars
from quantkit.model.backends.reference import rope_angles

f32 = np.float32


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("with_factors", [False, True])
def test_angles(memory: Memory, name: str, with_factors: bool) -> None:
    config, pairs = CONFIGS[name], CONFIGS[name].n_rot // 2
    factors = np.linspace(1, 8, pairs).astype(f32) if with_factors else None
    positions = np.array([0, 1, 2, 77, 1000, 4095, 131071], np.int32)
    out = memory.room((len(positions), pairs, 2))
    memory.run(
        rope.rope_table(len(positions), pairs),
        batch=memory.batch(np.zeros(len(positions)), positions),
        out=out,
        rows=len(positions),
        pairs=pairs,
        constants=memory.put(rope_constants(config, factors)),
        **rope_scalars(config),
    )
    got = memory.get(out, (len(positions), pairs, 2))
    want = np.stack(rope_angles(config, positions, factors), -1)
    np.testing.assert_allclose(got[:6], want[:6], atol=2e-6)
    np.testing.assert_allclose(got[6], want[6], atol=2e-2)  # a step of its angle is 2^-6 itself


def turned(x: Any, angles: Any, kind: str, heads: int, start: int, n_rot: int) -> Any:
    """Every pair as a complex number times e^(i angle)."""
    want = x.reshape(len(x), heads, -1).astype(np.float64)
    part = want[..., start : start + n_rot].copy()
    a, b = (part[..., 0::2], part[..., 1::2]) if kind == "normal" else np.split(part, 2, -1)
    y = (a + 1j * b) * np.exp(1j * angles)[:, None, :]
    pair = np.stack([y.real, y.imag], -1 if kind == "normal" else -2)
    want[..., start : start + n_rot] = pair.reshape(len(x), heads, n_rot)
    return want.reshape(x.shape)


@pytest.mark.parametrize("kind", rope.KINDS)
@pytest.mark.parametrize(
    ("rows", "heads", "head", "start", "n_rot"),
    [(1, 32, 128, 0, 128), (7, 4, 96, 0, 32), (3, 3, 24, 4, 20), (3, 2, 192, 128, 64), (2, 1, 6, 0, 6)],
)
def test_turning(memory: Memory, kind: str, rows: int, heads: int, head: int, start: int, n_rot: int) -> None:
    rng = np.random.default_rng(6)
    x = rng.normal(0, 1, (rows, heads * head)).astype(f32)
    angles = rng.uniform(-3, 3, (rows, n_rot // 2))
    table = memory.put(np.stack([np.cos(angles), np.sin(angles)], -1).astype(f32))
    for in_place in (False, True):
        source = memory.put(x)
        out = source if in_place else memory.room(x.shape)
        slots = {"width": heads * head, "head": head, "start": start, "n_rot": n_rot}
        memory.run(rope.rope(kind, rows, heads * head, head, n_rot), out=out, x=source, table=table, **slots)
        np.testing.assert_allclose(memory.get(out, x.shape), turned(x, angles, kind, heads, start, n_rot), atol=1e-6)
