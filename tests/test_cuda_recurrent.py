"""Convolution and the gated delta rule on the device: against float64, sequences in pieces, mixed and restarted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from meaning import batch_of, matrix, program

from quantkit.kernels.cuda.layer.recurrent import HEADS, TAPS, convolve, delta_net
from quantkit.model.ops import Convolve, DeltaNet, State, Value

#: Batches of (sequence, position): one sequence in pieces;
#: two interleaved, restarted (side by side too), one beginning late.
ALONE = [[(1, i) for i in range(37)], [(1, 37)], [(1, 38)], [(1, i) for i in range(39, 45)]]
MIXED = [
    [(0, 0), (2, 0), (0, 1), (2, 1), (0, 2)],
    [(2, 2), (2, 3), (2, 4), (0, 3), (1, 0), (1, 1)],
    [(0, 4), (1, 2), (2, 5)],
    [(0, 0), (0, 1), (2, 6), (0, 2), (1, 3)],
    [(2, 7), (2, 0), (2, 1), (2, 2), (0, 3), (0, 4), (0, 5), (0, 6), (0, 0)],
    [(0, 1), (2, 3)],
]
batches = pytest.mark.parametrize("batches", [ALONE, MIXED], ids=["alone", "mixed"])
N_SEQ = 3


def nmse(got: Any, want: Any) -> float:
    return float(((got - want) ** 2).sum() / (want**2).sum())


class Layer:
    """An operation, its state on the device; the state begins as NaN, which position 0 must not see."""

    def __init__(self, memory: Memory, shape: Any, n_out: int, n_state: int, **slots: Any) -> None:
        self.memory, self.shape, self.n_out, self.slots = memory, shape, n_out, slots
        self.n_state, self.state = n_state, memory.room((N_SEQ, n_state))

    def run(self, tokens: list[tuple[int, int]], **values: Any) -> Any:
        n = len(tokens)
        out = self.memory.room((n + 1, self.n_out))
        self.memory.run(
            self.shape,
            batch=self.memory.batch(np.zeros(n), [p for _, p in tokens], [s for s, _ in tokens]),
            out=out,
            state=self.state,
            rows=n,
            **{name: self.memory.put(x) for name, x in values.items()},
            **self.slots,
        )
        got = self.memory.get(out, (n + 1, self.n_out))
        assert np.isnan(got[-1]).all()
        return got[:-1]

    def kept(self) -> Any:
        return self.memory.get(self.state, (N_SEQ, self.n_state))


def convolve_layer(memory: Memory, width: int, taps: int, weight: Any) -> Layer:
    slots = {"taps": taps, "width": width, "weight": memory.put(weight)}
    return Layer(memory, convolve(taps, width), width, (taps - 1) * width, **slots)


@batches
@pytest.mark.parametrize(("width", "taps"), [(64, 4), (5, 3), (70, 2), (40, TAPS), (33, 1)])
def test_convolve(memory: Memory, width: int, taps: int, batches: Any) -> None:
    rng = np.random.default_rng(width)
    weight = rng.normal(0, 1, (width, taps)).astype(np.float32)
    layer = convolve_layer(memory, width, taps, weight)
    rows: dict[int, list[Any]] = {}
    for tokens in batches:
        x = rng.normal(0, 1, (len(tokens), width)).astype(np.float32)
        want = []
        for (s, p), row in zip(tokens, x, strict=True):
            rows[s] = [*(rows[s] if p else [np.zeros(width)] * (taps - 1)), row.astype(np.float64)]
            want.append(sum(weight[:, i] * rows[s][i - taps] for i in range(taps)))
        assert nmse(layer.run(tokens, x=x), np.array(want)) < 1e-13
    kept = layer.kept()
    for s, line in rows.items():
        np.testing.assert_array_equal(kept[s], np.array(line[len(line) - taps + 1 :]).reshape(-1))
    assert np.isnan(kept[[s for s in range(N_SEQ) if s not in rows]]).all()


def delta_layer(memory: Memory, heads: tuple[int, int], head_k: int, head_v: int, tiled: bool) -> Layer:
    n_k, n_v = heads
    slots = {"n_k_head": n_k, "n_v_head": n_v, "head_k": head_k, "head_v": head_v, "tiled": int(tiled)}
    state = n_v * head_k * head_v
    return Layer(memory, delta_net(n_v, head_k, head_v), n_v * head_v, state, scale=head_k**-0.5, **slots)


def drawn(rng: Any, n: int, heads: tuple[int, int], head_k: int, head_v: int) -> dict[str, Any]:
    """Keys of length 1 and decays as models have them, so that S stays of one size."""
    n_k, n_v = heads
    k = rng.normal(0, 1, (n, n_k, head_k))
    values = {
        "q": rng.normal(0, 1, (n, n_k * head_k)),
        "k": (k / np.linalg.norm(k, axis=-1, keepdims=True)).reshape(n, -1),
        "v": rng.normal(0, 1, (n, n_v * head_v)),
        "g": -np.exp(rng.normal(-2, 1, (n, n_v))),
        "beta": rng.uniform(0, 1, (n, n_v)),
    }
    return {name: x.astype(np.float32) for name, x in values.items()}


def step(s: Any, x: dict[str, Any], t: int, heads: tuple[int, int], tiled: bool) -> tuple[Any, Any]:
    """Return S of all heads and out, after token t, in float64."""
    n_k, n_v = heads
    _, head_k, head_v = s.shape
    out, s = [], s.copy()
    for h in range(n_v):
        at = h % n_k if tiled else h // (n_v // n_k)
        q, k = (x[name][t].reshape(n_k, head_k)[at].astype(np.float64) for name in ("q", "k"))
        v = x["v"][t].reshape(n_v, head_v)[h].astype(np.float64)
        s[h] *= np.exp(float(x["g"][t, h]))
        s[h] += np.outer(k, float(x["beta"][t, h]) * (v - s[h].T @ k))
        out.append(s[h].T @ (q * head_k**-0.5))
    return s, np.concatenate(out)


@batches
@pytest.mark.parametrize(
    ("heads", "head_k", "head_v", "tiled"),
    [
        ((2, 4), 128, 40, True),
        ((1, 2), 64, 64, False),
        ((1, 1), 256, 3, False),
        ((1, 3), 32, 33, True),
        ((3, 6), 22, 23, False),
        ((2, 2), 16, 8, False),
    ],
)
def test_delta_net(memory: Memory, heads: tuple[int, int], head_k: int, head_v: int, tiled: bool, batches: Any) -> None:
    layer = delta_layer(memory, heads, head_k, head_v, tiled)
    rng, states = np.random.default_rng(head_v), dict[int, Any]()
    for tokens in batches:
        x, want = drawn(rng, len(tokens), heads, head_k, head_v), []
        for t, (sequence, position) in enumerate(tokens):
            s = states[sequence] if position else np.zeros((heads[1], head_k, head_v))
            states[sequence], out = step(s, x, t, heads, tiled)
            want.append(out)
        assert nmse(layer.run(tokens, **x), np.array(want)) < 1e-12
    kept = layer.kept()
    for sequence, s in states.items():
        assert nmse(kept[sequence], s.reshape(-1)) < 1e-12
    assert np.isnan(kept[[s for s in range(N_SEQ) if s not in states]]).all()


def test_as_the_reference_does(memory: Memory) -> None:
    heads, head_k, head_v, taps = (2, 4), 16, 8, 4
    rng = np.random.default_rng(3)
    weight = rng.normal(0, 1, (heads[1] * head_v, taps)).astype(np.float32)
    names = ("q", "k", "v", "g", "beta")
    widths = (heads[0] * head_k, heads[0] * head_k, heads[1] * head_v, heads[1], heads[1])
    value = {name: Value(name, width) for name, width in zip(names, widths, strict=True)}
    w, out = matrix(weight), Value("out", heads[1] * head_v)
    ops = (
        DeltaNet(
            out=out, **value, state=State("s", heads[1] * head_k * head_v),
            n_k_head=heads[0], n_v_head=heads[1], scale=head_k**-0.5,
        ),
        Convolve(out=out, x=value["v"], weight=w, state=State("c", (taps - 1) * out.width)),
    )  # fmt: skip
    layers = delta_layer(memory, heads, head_k, head_v, False), convolve_layer(memory, out.width, taps, weight)
    programs = [program(op, {w: weight}) for op in ops]
    for tokens in MIXED[:4]:
        x = drawn(rng, len(tokens), heads, head_k, head_v)
        for p, layer, inputs in zip(programs, layers, (x, {"x": x["v"]}), strict=True):
            p.values.update({value[name]: array for name, array in x.items()})
            p.run(batch_of([at for _, at in tokens], [s for s, _ in tokens]))
            assert nmse(layer.run(tokens, **inputs), p.values[out]) < 1e-12


def test_what_there_is_no_room_for() -> None:
    with pytest.raises(ValueError, match=f"1 to {TAPS}"):
        convolve(TAPS + 1, 8)
    with pytest.raises(ValueError, match=f"1 to {HEADS[-1]}"):
        delta_net(2, HEADS[-1] + 1, 8)
