"""Attention as specified in model/ops.py, in double, and the features tested on every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """An attention operation; ``mla``: the cache has no values; ``selected``: number of keys per token, 0: all.

    ``end``: the last position of a sequence, to which masks for both directions extend. ``biased``: scores have biases
    by distance.
    """

    n_head: int = 4
    n_head_kv: int = 2
    head_k: int = 64
    head_v: int = 64
    mask: str = "causal"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: float = 0.0
    mla: bool = False
    selected: int = 0
    end: int = 0
    biased: bool = False

    @property
    def scale(self) -> float:
        return self.head_k**-0.5

    def visible(self, position: int) -> npt.NDArray[np.int64]:
        """Return the positions to which a token attends."""
        first = 0
        if self.mask == "sliding":
            first = max(0, position - self.window + 1)
        elif self.mask == "chunked":
            first = position // self.window * self.window
        elif self.mask == "whole":
            return np.arange(self.end + 1)
        elif self.mask == "symmetric":
            half = self.window // 2
            return np.arange(max(0, position - half), min(self.end, position + half) + 1)
        elif 0 < self.selected <= position:
            return np.sort(np.random.default_rng(position).permutation(position + 1)[: self.selected])
        return np.arange(first, position + 1)

    def selection(self, positions: Any) -> npt.NDArray[np.int32]:
        """Return the rows of ``selected``: the positions to which each token attends, then -1."""
        out = np.full((len(positions), self.selected), -1, np.int32)
        for i, position in enumerate(positions if self.selected else ()):
            row_positions = self.visible(int(position))
            out[i, : len(row_positions)] = row_positions
        return out

    def bias_table(self, n_ctx: int) -> npt.NDArray[np.float32]:
        """Return the biases of all distances as kernels take them; what no distance has is NaN."""
        table = np.full((self.n_head, 2 * n_ctx + 64), np.nan, np.float32)
        distances = np.arange(1 - n_ctx, n_ctx)
        for h in range(self.n_head):
            table[h, : len(distances)] = bias(h, distances)
        return table

    def attend(self, q: Any, position: int, k: Doubles, v: Doubles, sinks: Any) -> Doubles:
        """Return a token's output; k and v: [visible, n_head_kv, head], its rows of the cache."""
        out, before = [], self.visible(position) - position
        for h, x in enumerate(q.reshape(self.n_head, self.head_k).astype(np.float64)):
            kv = h // (self.n_head // self.n_head_kv)
            s = k[:, kv] @ x * np.float32(self.scale)
            if self.softcap:
                s = self.softcap * np.tanh(s / self.softcap)
            if self.alibi:
                s = s + slope(self.alibi, h, self.n_head) * before
            if self.biased:
                s = s + bias(h, before)
            largest = max(s.max(), sinks[h]) if self.sinks else s.max()
            p = np.exp(s - largest)
            total = p.sum() + (np.exp(sinks[h] - largest) if self.sinks else 0.0)
            out.append(p @ v[:, kv] / total)
        return np.concatenate(out)


def bias(head: int, distances: npt.NDArray[np.int64]) -> Doubles:
    return np.asarray(3 * np.sin(0.3 * (head + 1) * distances), np.float64)


def slope(largest: float, head: int, n_head: int) -> float:
    n = 1 << (n_head.bit_length() - 1)
    if head < n:
        return float((2.0 ** (-largest / n)) ** (head + 1))
    return float((2.0 ** (-largest / 2 / n)) ** (2 * (head - n) + 1))


def nmse(actual: npt.NDArray[np.floating], want: Doubles) -> float:
    return float(((actual - want) ** 2).sum() / (want**2).sum())


#: Cases whose tokens also attend to later ones.
BOTH_DIRECTIONS: dict[str, dict[str, Any]] = {
    "whole": {"mask": "whole"},
    "biased": {"mask": "whole", "biased": True, "n_head": 6, "n_head_kv": 3},
    "symmetric": {"mask": "symmetric", "window": 22},
    "neighbours": {"mask": "symmetric", "window": 3, "n_head": 6, "n_head_kv": 3, "softcap": 5.0},
}

#: Arguments of a case.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": {"mask": "sliding", "window": 50},
    "one": {"mask": "sliding", "window": 1},
    "chunked": {"mask": "chunked", "window": 48},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": 8.0, "n_head": 6, "n_head_kv": 3},
    "all": {
        "mask": "sliding", "window": 70, "softcap": 5.0, "sinks": True, "alibi": 8.0, "n_head": 12, "n_head_kv": 6,
    },
    "selected": {"selected": 70, "mla": True, "n_head": 6, "n_head_kv": 1, "head_k": 96},
    "chunked_all": {"mask": "chunked", "window": 100, "softcap": 20.0, "sinks": True, "alibi": 4.0},
}  # fmt: skip
