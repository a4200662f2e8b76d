"""Norms and rotary positions against numpy in double."""

from __future__ import annotations

import math

import numpy as np
import pytest
from layer_cases import ROPES, TURNS, normed, turn
from op_runner import run_operation

from quantkit.kernels.cpu.core.tape import N_TOKENS
from quantkit.kernels.cpu.layer.norms import norm
from quantkit.kernels.cpu.layer.rope import rope, rope_table
from quantkit.kernels.rope_constants import rope_constants, rope_scalars
from quantkit.model.backends.reference import rope_angles

f32 = np.float32
threads = pytest.mark.parametrize("threads", [1, 2, 3])


@threads
@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
@pytest.mark.parametrize(
    ("rows", "group", "groups", "n_weight"),
    [(1, 2048, 1, 2048), (5, 64, 6, 64), (3, 20, 4, 80), (40, 577, 1, 577), (300, 128, 2, 0), (2, 7, 3, 7)],
)
def test_norms(kind, rows, group, groups, n_weight, threads):
    rng = np.random.default_rng(5)
    x = (rng.normal(0.5, 3, (rows, groups * group)) * rng.lognormal(0, 3, (rows, 1))).astype(f32)
    weight, bias = rng.normal(1, 0.2, (2, n_weight)).astype(f32)
    with_bias = kind == "layer" and n_weight > 0
    want = normed(x, kind, group, weight if n_weight else None, bias if with_bias else None)
    for slots in ({"x": x}, {"x": "out", "start_with": x}):
        out = run_operation(
            norm(kind),
            x.shape,
            threads=threads,
            width=x.shape[1],
            rows_of=N_TOKENS,
            per=1,
            group=group,
            weight=weight if n_weight else 0,
            bias=bias if with_bias else 0,
            n_weight=n_weight,
            eps=1e-5,
            **slots,
        )
        np.testing.assert_allclose(out, want, rtol=1e-6, atol=2e-6)


def test_norms_of_zeros_and_tiny_rows_are_finite():
    x = np.zeros((2, 32), f32)
    x[1] = 1e-20
    for kind in ("rms", "layer", "l2"):
        slots = {"group": 32, "weight": 0, "bias": 0, "n_weight": 0, "eps": 1e-6}
        out = run_operation(norm(kind), x.shape, x=x, width=32, rows_of=N_TOKENS, per=1, **slots)
        assert np.isfinite(out).all()
        assert (out[0] == 0).all()


def table_of(config, positions, factors=None, threads=1, period=1, inverse=0):
    pairs = config.n_rot // 2
    return run_operation(
        rope_table,
        (len(positions), 2 * pairs),
        threads=threads,
        batch={"tokens": np.zeros(len(positions)), "positions": positions},
        pairs=pairs,
        each=period,
        back=inverse,
        constants=rope_constants(config, factors),
        **rope_scalars(config),
    ).reshape(len(positions), pairs, 2)


@threads
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("with_factors", [False, True])
def test_angles(name, with_factors, threads):
    config = ROPES[name]
    factors = np.linspace(1, 8, config.n_rot // 2).astype(f32) if with_factors else None
    positions = np.array([0, 1, 2, 77, 1000, 4095], np.int32)
    table = table_of(config, positions, factors, threads)
    cos, sin = rope_angles(config, positions, factors)
    np.testing.assert_allclose(table[..., 0], cos, atol=2e-6)
    np.testing.assert_allclose(table[..., 1], sin, atol=2e-6)


def test_angles_of_blocks_and_inverse_rotation():
    config, positions = ROPES["yarn"], np.array([0, 5, 7, 8, 4095], np.int32)
    table = table_of(config, positions, period=4, inverse=1)
    np.testing.assert_array_equal(table, table_of(config, positions // 4 * 4) * np.array([1, -1], f32))


def test_yarn_follows_its_formula():
    """The paper's three ranges, in double: fast pairs keep their angle, slow ones are interpolated, a ramp between."""
    config = ROPES["yarn"]
    table = table_of(config, np.array([5], np.int32))[0]
    mscale = 0.9 * (1 + 0.1 * math.log(32))
    low, high = (
        64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(150000))
        for turns in (config.beta_fast, config.beta_slow)
    )
    low, high = math.floor(low), math.ceil(high)
    assert 0 < low < high < 31
    for i in range(32):
        theta = 5 * 150000 ** (-2 * i / 64)
        ramp = 1 - min(1, max(0, (i - low) / (high - low)))
        theta = theta * ramp + theta / 32 * (1 - ramp)
        np.testing.assert_allclose(table[i], [mscale * math.cos(theta), mscale * math.sin(theta)], rtol=3e-6, atol=1e-6)


def test_pairs_of_the_fourth_section_are_unchanged():
    table = table_of(ROPES["mrope"], np.array([33], np.int32))[0]
    np.testing.assert_array_equal(table[24:], np.tile([f32(1), f32(0)], (8, 1)))
    assert (table[:24, 1] != 0).all()
    table = table_of(ROPES["imrope4"], np.array([33], np.int32))[0]
    stay = table[:, 1] == 0
    sector = np.arange(32)
    assert stay.tolist() == (sector >= 3 * np.array([10, 8, 6])[sector % 3]).tolist()
    assert stay.any()


@threads
@pytest.mark.parametrize("kind", ["normal", "neox"])
@pytest.mark.parametrize(("rows", "heads", "head", "start", "n_rot"), TURNS)
def test_rotation(kind, rows, heads, head, start, n_rot, threads):
    x, table, want = turn(kind, rows, heads, head, start, n_rot)
    slots = {"width": x.shape[1], "head": head, "start": start, "n_rot": n_rot, "rows_of": N_TOKENS, "per": 1}
    for slots_of_x in ({"x": x}, {"x": "out", "start_with": x}):
        out = run_operation(rope(kind), x.shape, threads=threads, table=table.copy(), **slots, **slots_of_x)
        np.testing.assert_allclose(out, want, atol=1e-6)
