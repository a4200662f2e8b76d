"""Convolution, the gated delta rule, scans and RWKV in float64, batch by batch, for the CPU and CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from attention_cases import nmse

Tokens = list[tuple[int, int]]
Arrays = dict[str, npt.NDArray[np.float32]]
N_SEQ = 3


def alone(*sizes: int) -> list[Tokens]:
    """Return batches of (sequence, position): one sequence in pieces."""
    return [[(1, int(i)) for i in piece] for piece in np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])]


#: Two interleaved sequences, restarted ones (also side by side), one that begins late.
MIXED: list[Tokens] = [
    [(0, 0), (2, 0), (0, 1), (2, 1), (0, 2)],
    [(2, 2), (2, 3), (2, 4), (0, 3), (1, 0), (1, 1)],
    [(0, 4), (1, 2), (2, 5)],
    [(0, 0), (0, 1), (2, 6), (0, 2), (1, 3)],
    [(2, 7), (2, 0), (2, 1), (2, 2), (0, 3), (0, 4), (0, 5), (0, 6), (0, 0)],
    [(0, 1), (2, 3)],
]


@dataclass
class Convolution:
    """A convolution of the last rows of a sequence; its state is the previous rows, oldest first."""

    width: int
    taps: int
    biased: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.width)
        self.weights = {"weight": rng.normal(0, 1, (self.width, self.taps)).astype(np.float32)}
        if self.biased:
            self.weights["bias"] = rng.normal(0, 1, self.width).astype(np.float32)
        self.slots: dict[str, Any] = {"taps": self.taps, "width": self.width} | ({} if self.biased else {"bias": 0})
        self.widths, self.n_out, self.empty = {"x": self.width}, self.width, np.zeros((self.taps - 1, self.width))

    def draw(self, rng: np.random.Generator, n: int) -> Arrays:
        return {"x": rng.normal(0, 1, (n, self.width)).astype(np.float32)}

    def step(self, state: Any, x: Any) -> tuple[Any, Any]:
        """Return the state and out after one token."""
        rows = np.vstack([state, x])
        return rows[1:], (rows * self.weights["weight"].T).sum(0) + self.weights.get("bias", 0)


@dataclass
class DeltaRule:
    """A delta net of n_k and n_v heads; its state is S of every head."""

    heads: tuple[int, int]
    head_k: int
    head_v: int
    tiled: bool = False
    by_row: bool = False

    def __post_init__(self) -> None:
        n_k, n_v = self.heads
        self.weights: Arrays = {}
        self.slots: dict[str, Any] = {"n_k_head": n_k, "n_v_head": n_v, "head_k": self.head_k, "head_v": self.head_v}
        self.slots |= {"tiled": int(self.tiled), "scale": self.head_k**-0.5}
        keys, values = n_k * self.head_k, n_v * self.head_v
        n_g = n_v * self.head_k if self.by_row else n_v
        self.widths, self.n_out = {"q": keys, "k": keys, "v": values, "g": n_g, "beta": n_v}, values
        self.empty = np.zeros((n_v, self.head_k, self.head_v))

    def draw(self, rng: np.random.Generator, n: int) -> Arrays:
        """Generate keys of length 1 and decays like those of models, so that S does not grow."""
        values = {name: rng.normal(0, 1, (n, width)) for name, width in self.widths.items()}
        k = values["k"].reshape(n, -1, self.head_k)
        values["k"] = (k / np.linalg.norm(k, axis=-1, keepdims=True)).reshape(n, -1)
        values["g"] = -np.exp(rng.normal(-2, 1, values["g"].shape))
        values["beta"] = rng.uniform(0, 1, values["beta"].shape)
        return {name: x.astype(np.float32) for name, x in values.items()}

    def step(self, state: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[Any, Any]:
        """Return S of all heads and out, after one token."""
        n_k, n_v = self.heads
        key_heads = np.arange(n_v) % n_k if self.tiled else np.arange(n_v) // (n_v // n_k)
        q, k = (x.reshape(n_k, self.head_k)[key_heads].astype(np.float64) for x in (q, k))
        s = state * np.exp(g.astype(np.float64)).reshape(n_v, -1, 1)
        error = beta[:, None] * (v.reshape(n_v, self.head_v) - np.einsum("hkv,hk->hv", s, k))
        s += k[:, :, None] * error[:, None, :]
        return s, np.einsum("hkv,hk->hv", s, q * np.float32(self.head_k**-0.5)).reshape(-1)


@dataclass
class Scan:
    """Mamba 2's scan of n_group groups of heads; its state is S of every head."""

    groups: tuple[int, int]
    head: int
    d_state: int
    plain: bool = False

    def __post_init__(self) -> None:
        n_group, n_head = self.groups
        rng = np.random.default_rng(n_head)
        values = {
            "dt_bias": rng.normal(-2, 3, n_head),
            "a": -np.exp(rng.normal(0, 1, n_head)),
            "d": rng.normal(1, 1, n_head),
        }
        self.weights: Arrays = {name: x.astype(np.float32) for name, x in values.items()}
        self.slots: dict[str, Any] = {"n_head": n_head, "n_group": n_group, "head": self.head, "d_state": self.d_state}
        shared, self.n_out = n_group * self.d_state, n_head * self.head
        self.widths = {"x": self.n_out, "z": self.n_out, "dt": n_head, "b": shared, "c": shared}
        self.empty = np.zeros((n_head, self.d_state, self.head))
        if self.plain:  # steps of 1, no gate
            del self.weights["dt_bias"], self.weights["d"], self.widths["z"], self.widths["dt"]
            self.slots |= dict.fromkeys(("dt_bias", "d", "z", "dt"), 0)

    def draw(self, rng: np.random.Generator, n: int) -> Arrays:
        return {name: rng.normal(0, 1, (n, width)).astype(np.float32) for name, width in self.widths.items()}

    def step(self, state: Any, x: Any, b: Any, c: Any, z: Any = None, dt: Any = None) -> tuple[Any, Any]:
        """Return S of all heads and out, after one token."""
        n_group, n_head = self.groups
        groups, x = np.arange(n_head) // (n_head // n_group), x.reshape(n_head, -1).astype(np.float64)
        b, c = (v.reshape(n_group, -1)[groups].astype(np.float64) for v in (b, c))
        steps = np.ones(n_head) if dt is None else np.logaddexp(0, dt.astype(np.float64) + self.weights["dt_bias"])
        s = state * np.exp(steps * self.weights["a"])[:, None, None]
        s += b[:, :, None] * (x * steps[:, None])[:, None, :]
        y = np.einsum("hsv,hs->hv", s, c).reshape(-1)
        if z is None:
            return s, y
        y += (x * self.weights["d"][:, None]).reshape(-1)
        return s, y * z / (1 + np.exp(-z.astype(np.float64)))


@dataclass
class Columns:
    """Mamba's scan of columns; its state is S of every column, row by row of them all."""

    width: int
    d_state: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.width)
        rates = -np.exp(rng.normal(0, 1, (self.d_state, self.width)))
        values = {"a": rates, "d": rng.normal(1, 1, self.width)}
        self.weights: Arrays = {name: x.astype(np.float32) for name, x in values.items()}
        self.slots: dict[str, Any] = {"width": self.width, "d_state": self.d_state}
        self.n_out, self.widths = self.width, dict.fromkeys(("x", "z", "dt"), self.width)
        self.widths |= {"b": self.d_state, "c": self.d_state}
        self.empty = np.zeros((self.d_state, self.width))

    def draw(self, rng: np.random.Generator, n: int) -> Arrays:
        return {name: rng.normal(0, 1, (n, width)).astype(np.float32) for name, width in self.widths.items()}

    def step(self, state: Any, x: Any, z: Any, dt: Any, b: Any, c: Any) -> tuple[Any, Any]:
        """Return S of all columns and out, after one token."""
        dt, x, z = np.logaddexp(0, dt.astype(np.float64)), x.astype(np.float64), z.astype(np.float64)
        s = state * np.exp(dt * self.weights["a"]) + b.astype(np.float64)[:, None] * (x * dt)
        return s, (c.astype(np.float64) @ s + x * self.weights["d"]) * z / (1 + np.exp(-z))


@dataclass
class Wkv:
    """RWKV with a number of heads and key heads; version 6, ``7`` or ``q`` (QRWKV); its state is S of every head."""

    heads: tuple[int, int]
    head: int
    version: str = "6"

    def __post_init__(self) -> None:
        n, n_kv = self.heads
        self.weights: Arrays = {}
        extra = {"6": {"earlier": 1}, "7": {"bound": 0.606531}, "q": {"complement": 1, "scale": self.head**-0.5}}
        settings: dict[str, Any] = {"earlier": 0, "complement": 0, "scale": 1.0, "bound": 0.0, **extra[self.version]}
        self.flags = {key: type(value)(settings[key]) for key, value in (("earlier", True), ("complement", True))}
        self.flags |= {key: settings[key] for key in ("scale", "bound")}
        self.slots: dict[str, Any] = {"n_head": n, "n_kv_head": n_kv, "head": self.head} | settings
        self.n_out, keys = n * self.head, n_kv * self.head
        self.widths = {"r": self.n_out, "g": self.n_out, "k": keys, "v": keys}
        if self.version == "7":
            self.widths |= {"removed": self.n_out, "rate": self.n_out}
        else:
            self.slots |= {"removed": 0, "rate": 0}
        self.empty = np.zeros((n, self.head, self.head))

    def draw(self, rng: np.random.Generator, n: int) -> Arrays:
        """Generate ``removed`` of length 1 and rates up to 1, so that S does not grow."""
        values = {name: rng.normal(0, 1, (n, width)) for name, width in self.widths.items()}
        if self.version == "7":
            removed = values["removed"].reshape(n, -1, self.head)
            values["removed"] = (removed / np.linalg.norm(removed, axis=-1, keepdims=True)).reshape(n, -1)
            values["rate"] = rng.uniform(0, 1, values["rate"].shape)
        return {name: x.astype(np.float32) for name, x in values.items()}

    def step(self, state: Any, r: Any, g: Any, k: Any, v: Any, removed: Any = None, rate: Any = None) -> Any:
        """Return S of all heads and out, after one token."""
        n, n_kv = self.heads
        r, g, k, v = (x.reshape(-1, self.head).astype(np.float64) for x in (r, g, k, v))
        k, v = (np.repeat(x, n // n_kv, axis=0) for x in (k, v))
        bound = self.slots["bound"]
        w = np.exp(-bound / (1 + np.exp(-g))) if bound else np.exp(-np.exp(g))
        k = k * (1 - w) if self.slots["complement"] else k
        s = w[:, :, None] * state + k[:, :, None] * v[:, None, :]
        if removed is not None:
            removed, rate = (x.reshape(-1, self.head).astype(np.float64) for x in (removed, rate))
            s -= (removed * rate)[:, :, None] * np.einsum("hkv,hk->hv", state, removed)[:, None, :]
        visible_state = state if self.slots["earlier"] else s
        return s, np.einsum("hkv,hk->hv", visible_state, r * self.slots["scale"]).reshape(-1)


Case = Convolution | DeltaRule | Scan | Columns | Wkv


class Layer(Protocol):
    """An operation with its state, [N_SEQ, ...], initially NaN: position 0 must not read it."""

    def run(self, tokens: Tokens, values: Arrays) -> Any: ...

    def read_state(self) -> Any: ...


def check(layer: Layer, case: Case, batches: list[Tokens], error: float, of_state: float) -> None:
    """Compare a layer's outputs, batch after batch, and its final states."""
    rng, states = np.random.default_rng(case.n_out), dict[int, Any]()
    for tokens in batches:
        inputs, want = case.draw(rng, len(tokens)), []
        for t, (sequence, position) in enumerate(tokens):
            state = states[sequence] if position else case.empty
            states[sequence], out = case.step(state, **{name: x[t] for name, x in inputs.items()})
            want.append(out)
        assert nmse(layer.run(tokens, inputs), np.array(want)) < error
    final_state = layer.read_state()
    for sequence, state in states.items():
        assert ((final_state[sequence] - state.reshape(-1)) ** 2).sum() <= of_state * (state**2).sum()
    assert np.isnan(final_state[[s for s in range(N_SEQ) if s not in states]]).all()
