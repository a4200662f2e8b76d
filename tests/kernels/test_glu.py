"""Activation functions and gated linear units against numpy, gelu with the roundings of ggml's table."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from glu_cases import KINDS, activated, close, gated

from quantkit.kernels.cpu.core.functions import erf, exp, sigmoid, softplus, tanh
from quantkit.kernels.cpu.core.jit import kernel, specialize
from quantkit.kernels.cpu.core.simd import f32x16, load, store
from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.layer.glu import activate, glu, limits
from quantkit.model.backends import reference
from quantkit.model.ops import Activation

F32 = npt.NDArray[np.float32]


function = None  # bound below


def run_function(x: F32, y: F32) -> None:
    for i in range(0, x.size, 16):
        store(y, 4 * i, function(load(f32x16, x, 4 * i)))


run_exp, run_sigmoid, run_tanh, run_erf, run_softplus = (
    specialize(run_function, name, kernel, function=op)
    for name, op in (("exp", exp), ("sigmoid", sigmoid), ("tanh", tanh), ("erf", erf), ("softplus", softplus))
)


@pytest.mark.parametrize(
    ("run", "exact", "low", "high", "ulps"),
    [
        (run_exp, np.exp, -103.9, 88.7, 1.0),
        (run_sigmoid, lambda x: 1 / (1 + np.exp(-x)), -86, 86, 2.5),
        (run_tanh, np.tanh, -12, 12, 2.0),
        (run_erf, np.vectorize(math.erf), -5, 5, 2.5),
        (run_softplus, lambda x: np.logaddexp(0, x), -86, 86, 3.0),
    ],
    ids=["exp", "sigmoid", "tanh", "erf", "softplus"],
)
def test_functions_are_within_their_error_bounds(run, exact, low, high, ulps) -> None:
    x = np.linspace(low, high, 1 << 17).astype(np.float32)
    y = np.empty_like(x)
    run(x, y)
    truth = exact(x.astype(np.float64))
    assert np.max(np.abs(y - truth) / np.spacing(np.abs(truth.astype(np.float32)))) <= ulps


def test_exp_at_the_ends() -> None:
    x = np.full(16, -np.inf, np.float32)
    x[:7] = np.nan, np.inf, 88.8, 0, -0.0, -104.1, -1000
    y = np.empty_like(x)
    run_exp(x, y)
    assert np.isnan(y[0])
    assert y[1:].tolist() == [np.inf, np.inf, 1, 1] + 11 * [0]


def run(operation, tokens: int, threads: int = 2, **slots: float) -> None:
    team = Team(threads)
    batch = Batch(team, max(tokens, 1))
    batch.set(np.zeros(tokens, np.int32))
    Tape(team, batch, [(operation, operation.block(batch=batch.address, rows_of=0, **slots))]).run()


def values(seed: int, *shape: int) -> F32:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32) * 3
    x.flat[::7] *= 5
    return x


@pytest.mark.parametrize("a", [*KINDS, Activation("softplus")], ids=str)
def test_the_reference_agrees_with_numpy(a: Activation) -> None:
    gate, up = values(1, 6, 1061), values(2, 6, 1061)
    close(a, reference.activate(a, gate), activated(a, gate), tolerance=3e-6)
    close(a, reference.gate(a, gate, up), gated(a, gate, up), tolerance=3e-5)


@pytest.mark.parametrize("a", KINDS, ids=str)
def test_glu_of_two_values(a: Activation) -> None:
    gate, up = values(1, 6, 1061), values(2, 6, 1061)
    out = np.full_like(gate, np.nan)
    run(
        glu(a), 3, out=address_of(out), gate=address_of(gate), up=address_of(up),
        width=1061, gate_width=1061, per=2, **limits(a),
    )  # fmt: skip
    close(a, out, gated(a, gate, up))


@pytest.mark.parametrize("width", [1, 15, 16, 17, 1024, 2100])
def test_glu_of_merged_halves(width: int) -> None:
    a = Activation("silu")
    both = values(3, 5, 2 * width)
    out = np.full((6, width), 7, np.float32)
    run(glu(a), 5, out=address_of(out), gate=address_of(both), up=0, width=width, gate_width=width, per=1, **limits(a))
    close(a, out[:5], gated(a, both[:, :width], both[:, width:]))
    assert (out[5] == 7).all()  # the row behind is not touched


@pytest.mark.parametrize("repeat", [3, 16, 96, 1500])
def test_a_narrow_gate_repeats(repeat: int) -> None:
    a = Activation("sigmoid")
    gate, up = values(4, 4, 3), values(5, 4, 3 * repeat)
    out = np.full_like(up, np.nan)
    run(
        glu(a), 4, 3, out=address_of(out), gate=address_of(gate), up=address_of(up),
        width=3 * repeat, gate_width=3, per=1, **limits(a),
    )  # fmt: skip
    close(a, out, gated(a, np.repeat(gate, repeat, axis=1), up))


@pytest.mark.parametrize("a", KINDS[:8], ids=str)
def test_activate(a: Activation) -> None:
    x = values(6, 7, 83)
    out = np.full((8, 83), 7, np.float32)
    run(activate(a), 7, out=address_of(out), x=address_of(x), width=83, per=1, **limits(a))
    close(a, out[:7], activated(a, x))
    assert (out[7] == 7).all()


def test_gelu_beyond_its_table() -> None:
    a = Activation("gelu")
    x = np.array([[-np.inf, -10, -9.999, 9.999, 10.0001, 12345.678, np.inf, 0]], np.float32)
    out = np.empty_like(x)
    run(activate(a), 1, 1, out=address_of(out), x=address_of(x), width=8, per=1, **limits(a))
    assert out[0].tolist() == [0, 0, 0, 10, x[0, 4], x[0, 5], np.inf, 0]


def test_operations_are_compiled_once() -> None:
    assert glu(Activation("silu")) is glu(Activation("silu", act_limit=3))
