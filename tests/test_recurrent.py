"""Convolution and the gated delta rule: against float64 written from the operations' docstrings (model/ops.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from quantkit.kernels.cpu.core.tape import Batch, Tape, TapeOp, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.layer.recurrent import convolve, delta_net

Array = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

#: Batches of (sequence, position): one sequence in pieces;
#: two interleaved, restarted (side by side too), one beginning late.
ALONE = [[(1, i) for i in range(9)], [(1, 9)], [(1, 10)], [(1, i) for i in range(11, 60)]]
MIXED = [
    [(0, 0), (2, 0), (0, 1), (2, 1), (0, 2)],
    [(2, 2), (2, 3), (2, 4), (0, 3), (1, 0), (1, 1)],
    [(0, 4), (1, 2), (2, 5)],
    [(0, 0), (0, 1), (2, 6), (0, 2), (1, 3)],
    [(2, 7), (2, 0), (2, 1), (2, 2), (0, 3), (0, 4), (0, 5), (0, 6), (0, 0)],
]
N_SEQ, N_MAX = 3, 64


class Layer:
    """An operation with its inputs, output and state; the state begins as NaN, which position 0 must not see."""

    def __init__(
        self, operation: TapeOp, inputs: dict[str, int], outs: int, states: int, threads: int, **slots: float
    ) -> None:
        self.team = Team(threads)
        self.batch = Batch(self.team, N_MAX)
        self.inputs = {name: np.zeros((N_MAX, w), np.float32) for name, w in inputs.items()}
        self.out = np.zeros((N_MAX, outs), np.float32)
        self.state = np.full((N_SEQ, states), np.nan, np.float32)
        arrays = {**self.inputs, "out": self.out, "state": self.state}
        addresses = {name: address_of(a) for name, a in arrays.items()}
        block = operation.block(batch=self.batch.address, **addresses, **slots)
        self.tape = Tape(self.team, self.batch, [(operation, block)])

    def run(self, tokens: Sequence[tuple[int, int]], values: dict[str, Array]) -> Array:
        n = len(tokens)
        self.batch.set(np.zeros(n), [p for _, p in tokens], [s for s, _ in tokens])
        for name, x in values.items():
            self.inputs[name][:n] = x
        self.out[:] = np.nan
        self.tape.run()
        assert np.isnan(self.out[n:]).all()
        return self.out[:n].copy()


def nmse(got: npt.NDArray[np.floating], want: Float64) -> float:
    return float(((got - want) ** 2).sum() / (want**2).sum())


# ---------------------------------------------------------------- convolution


def convolve_layer(width: int, taps: int, weight: Array, threads: int) -> Layer:
    slots = {"weight": address_of(weight), "taps": taps, "width": width}
    return Layer(convolve, {"x": width}, width, (taps - 1) * width, threads, **slots)


def convolved(rows: dict[int, list[Float64]], weight: Array, sequence: int) -> Float64:
    """out of the last row of a sequence."""
    n = weight.shape[1]
    before = [np.zeros(len(weight))] * n + rows[sequence]
    return sum(weight[:, i].astype(np.float64) * before[len(before) - n + i] for i in range(n))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("batches", [ALONE, MIXED], ids=["alone", "mixed"])
@pytest.mark.parametrize(("width", "taps"), [(64, 4), (200, 4), (5, 3), (1000, 2), (70, 16), (33, 1)])
def test_convolve(width: int, taps: int, batches: list[list[tuple[int, int]]], threads: int) -> None:
    rng = np.random.default_rng(width)
    weight = rng.normal(0, 1, (width, taps)).astype(np.float32)
    layer = convolve_layer(width, taps, weight, threads)
    rows: dict[int, list[Float64]] = {}
    for tokens in batches:
        x = rng.normal(0, 1, (len(tokens), width)).astype(np.float32)
        want = []
        for (s, p), row in zip(tokens, x, strict=True):
            rows[s] = [*(rows[s] if p else []), row.astype(np.float64)]
            want.append(convolved(rows, weight, s))
        assert nmse(layer.run(tokens, {"x": x}), np.array(want)) < 1e-13
    for s, kept in rows.items():
        before = np.array(([np.zeros(width)] * taps + kept)[-taps + 1 :] if taps > 1 else []).reshape(-1)
        np.testing.assert_array_equal(layer.state[s], before.astype(np.float32))


# ---------------------------------------------------------------- the gated delta rule


def delta_layer(heads: tuple[int, int], head_k: int, head_v: int, tiled: bool, threads: int) -> Layer:
    n_k, n_v = heads
    inputs = {"q": n_k * head_k, "k": n_k * head_k, "v": n_v * head_v, "g": n_v, "beta": n_v}
    slots = {"n_k_head": n_k, "n_v_head": n_v, "head_k": head_k, "head_v": head_v}
    return Layer(
        delta_net, inputs, n_v * head_v, n_v * head_k * head_v, threads, **slots, scale=head_k**-0.5, tiled=int(tiled)
    )


def drawn(layer: Layer, n: int, head_k: int, rng: np.random.Generator) -> dict[str, Array]:
    """Keys of length 1 and decays as models have them, so that S stays of one size."""
    values = {name: rng.normal(0, 1, (n, x.shape[1])) for name, x in layer.inputs.items()}
    k = values["k"].reshape(n, -1, head_k)
    values["k"] = (k / np.linalg.norm(k, axis=-1, keepdims=True)).reshape(n, -1)
    values["g"] = -np.exp(rng.normal(-2, 1, values["g"].shape))
    values["beta"] = rng.uniform(0, 1, values["beta"].shape)
    return {name: x.astype(np.float32) for name, x in values.items()}


def step(s: Float64, x: dict[str, Array], t: int, heads: tuple[int, int], tiled: bool) -> tuple[Float64, Float64]:
    """Return S of all heads and out, after token t."""
    n_k, n_v = heads
    _, head_k, head_v = s.shape
    out = []
    s = s.copy()
    for h in range(n_v):
        at = h % n_k if tiled else h // (n_v // n_k)
        q, k = (x[name][t].reshape(n_k, head_k)[at].astype(np.float64) for name in ("q", "k"))
        v = x["v"][t].reshape(n_v, head_v)[h].astype(np.float64)
        s[h] *= np.exp(float(x["g"][t, h]))
        s[h] += np.outer(k, float(x["beta"][t, h]) * (v - s[h].T @ k))
        out.append(s[h].T @ (q * np.float32(head_k**-0.5)))
    return s, np.concatenate(out)


@pytest.mark.parametrize("batches", [ALONE, MIXED], ids=["alone", "mixed"])
@pytest.mark.parametrize(
    ("heads", "head_k", "head_v", "tiled"),
    [
        ((2, 4), 128, 128, False),
        ((2, 4), 128, 128, True),
        ((2, 2), 64, 64, False),
        ((1, 3), 32, 80, True),
        ((3, 6), 20, 23, False),
    ],
)
def test_delta_net(
    heads: tuple[int, int], head_k: int, head_v: int, tiled: bool, batches: list[list[tuple[int, int]]]
) -> None:
    layer = delta_layer(heads, head_k, head_v, tiled, 2)
    rng, states = np.random.default_rng(head_v), {}
    for tokens in batches:
        x, want = drawn(layer, len(tokens), head_k, rng), []
        for t, (sequence, position) in enumerate(tokens):
            s = states[sequence] if position else np.zeros((heads[1], head_k, head_v))
            states[sequence], out = step(s, x, t, heads, tiled)
            want.append(out)
        assert nmse(layer.run(tokens, x), np.array(want)) < 1e-12
    for sequence, s in states.items():
        assert nmse(layer.state[sequence], s.reshape(-1)) < 1e-12


def run_both(threads: int, size: int) -> Array:
    """Outputs of 40 tokens, in batches of ``size``."""
    delta = delta_layer((2, 4), 64, 128, False, threads)
    x = drawn(delta, 40, 64, np.random.default_rng(0))
    weight = np.random.default_rng(1).normal(0, 1, (512, 4)).astype(np.float32)
    conv = convolve_layer(512, 4, weight, threads)
    outs = []
    for i in range(0, 40, size):
        tokens = [(0, p) for p in range(i, min(40, i + size))]
        part = {name: values[i : i + size] for name, values in x.items()}
        outs.append(np.hstack([delta.run(tokens, part), conv.run(tokens, {"x": part["v"]})]))
    return np.concatenate(outs)


def test_every_thread_count_gives_the_same_bits() -> None:
    first = run_both(1, 40)
    for threads in (2, 3, 5):
        np.testing.assert_array_equal(first, run_both(threads, 40))


def test_batches_of_one_and_of_many_agree() -> None:
    first = run_both(1, 40)
    for size in (1, 7, 16):
        assert nmse(run_both(1, size), first.astype(np.float64)) < 1e-13
