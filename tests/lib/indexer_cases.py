"""The lightning indexer as specified in model/ops.py, on values so small that every sum is exact and many are equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Case:
    """An indexer, with blocks of ``ratio`` positions; ``spread``: values are random integers from -spread to spread."""

    n_head: int = 8
    head: int = 64
    n_selected: int = 20
    spread: int = 2
    scale: float = 0.5
    kind: str = "f32"
    ratio: int = 1

    def draw(self, n: int, seed: int) -> tuple[Any, Any, Any]:
        """Return q, weights and keys of n tokens; a cache of any type stores the keys exactly."""
        rng, s = np.random.default_rng(seed), self.spread
        q = rng.integers(-s, s + 1, (n, self.n_head * self.head))
        weights = rng.integers(-s, s + 1, (n, self.n_head))
        keys = rng.integers(-s, s + 1, (n, self.head))
        keys[:, ::32] = 127  # the scale of every block of q8_0 is then 1
        q.reshape(n, self.n_head, self.head)[:, :, ::32] = 0
        return q.astype(np.float32), weights.astype(np.float32), keys.astype(np.float32)

    def visible_keys(self, keys: Any, sequence: int, position: int, n_ctx: int) -> Any:
        """Return the keys visible to a token, of those of all sequences."""
        first = sequence * (n_ctx // self.ratio)
        return keys[first : first + (position + 1) // self.ratio]

    def select(self, q: Any, weights: Any, keys: Any) -> npt.NDArray[np.int32]:
        """Return a token's row; keys: the visible ones."""
        out = np.full(self.n_selected, -1, np.int32)
        scores = np.maximum(keys.astype(np.float64) @ q.reshape(self.n_head, self.head).T.astype(np.float64), 0)
        scores = (scores * weights.astype(np.float64)).sum(-1) * self.scale
        positions = np.sort(np.lexsort((np.arange(len(scores)), -scores))[: self.n_selected])
        out[: len(positions)] = positions
        return out


CASES = {
    "plain": Case(),
    "equal": Case(spread=1, n_head=2, n_selected=7),
    "one": Case(n_selected=1, n_head=1, head=32),
    "heads": Case(n_head=37, head=128, n_selected=64, scale=0.25),
    "odd": Case(n_head=5, head=24, n_selected=33),
    "all": Case(n_selected=500),
    "blocks": Case(ratio=4),
}
