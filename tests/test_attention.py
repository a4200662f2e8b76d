"""Attention and the cache: against float64 written from the operations' docstrings (model/ops.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from quantkit.kernels import dequantize, quantize
from quantkit.kernels.cpu.attention import MASKS, attention, scratch_bytes
from quantkit.kernels.cpu.cache import cache_write
from quantkit.kernels.cpu.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.team import Team
from quantkit.types import BY_NAME

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """An attention operation; ``mla``: the cache has no values."""

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
    k_type: str = "F32"
    v_type: str = "F32"

    @property
    def scale(self) -> float:
        return self.head_k**-0.5


class Model:
    """One layer: a cache in the operation's form, and the keys and values that were written, exact."""

    def __init__(self, case: Case, n_seq: int = 1, n_ctx: int = 512, threads: int = 2, n_max: int = 512) -> None:
        self.case, self.n_ctx = case, n_ctx
        self.team = Team(threads)
        self.batch = Batch(self.team, n_max, n_ctx)
        k_width, v_width = case.n_head_kv * case.head_k, case.n_head_kv * case.head_v
        self.k_type, self.v_type = BY_NAME[case.k_type], BY_NAME[case.v_type]
        # What was never written must never matter: NaN.
        self.k_cache = np.full((n_seq * n_ctx, self.k_type.row_bytes(k_width)), 255, np.uint8)
        self.v_cache = np.full((n_seq * n_ctx, self.v_type.row_bytes(v_width)), 255, np.uint8)
        self.k, self.v = (np.zeros((n_max, w), np.float32) for w in (k_width, v_width))
        self.q = np.zeros((n_max, case.n_head * case.head_k), np.float32)
        self.out = np.zeros((n_max, case.n_head * case.head_v), np.float32)
        self.sinks = np.random.default_rng(7).normal(0, 2, case.n_head).astype(np.float32)
        self.scratch = np.full(scratch_bytes(case.head_k, case.head_v, threads) + 64, 255, np.uint8)
        caches = {"k_cache": address_of(self.k_cache), "k_type": self.k_type.id, "v_type": self.v_type.id}
        v_cache = 0 if case.mla else address_of(self.v_cache)
        shared = {"batch": self.batch.address, **caches, "v_cache": v_cache}
        write = cache_write.block(
            **shared,
            k=address_of(self.k),
            v=address_of(self.v),
            k_width=k_width,
            v_width=0 if case.mla else v_width,
        )
        attend = attention.block(
            **shared,
            q=address_of(self.q),
            out=address_of(self.out),
            n_head=case.n_head,
            n_head_kv=case.n_head_kv,
            head_k=case.head_k,
            head_v=case.head_v,
            scale=case.scale,
            softcap=case.softcap,
            sinks=address_of(self.sinks) if case.sinks else 0,
            mask=MASKS[case.mask],
            window=case.window,
            alibi=case.alibi,
            scratch=-(-address_of(self.scratch) // 64) * 64,
        )
        self.tape = Tape(self.team, self.batch, [(cache_write, write), (attention, attend)])

    def run(self, q: Array, k: Array, v: Array, positions: npt.ArrayLike, sequences: npt.ArrayLike = 0) -> Array:
        n = len(q)
        self.q[:n], self.k[:n], self.v[:n] = q, k, v
        self.batch.set(np.zeros(n), positions, sequences)
        self.out[:] = np.nan
        self.tape.run()
        assert not self.batch.words[8:].any()
        assert np.isnan(self.out[n:]).all()
        return self.out[:n].copy()

    def kept(self, which: str, cells: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """What the cache holds of some cells, float64 [cells, n_head_kv, head]."""
        case = self.case
        data, t = (self.k_cache, self.k_type) if which == "k" else (self.v_cache, self.v_type)
        head = case.head_k if which == "k" else case.head_v
        rows = np.ascontiguousarray(data[cells])
        n = case.n_head_kv * head
        values = rows.view(np.float32) if t.name == "F32" else dequantize(rows, t, n)
        return values.reshape(len(cells), case.n_head_kv, head).astype(np.float64)

    def expected(self, q: Array, positions: npt.ArrayLike, sequences: npt.ArrayLike = 0) -> npt.NDArray[np.float64]:
        n = len(q)
        positions, sequences = np.broadcast_to(positions, n), np.broadcast_to(sequences, n)
        rows = [self._row(q[i], int(positions[i]), int(sequences[i])) for i in range(n)]
        return np.array(rows)

    def _row(self, q: Array, position: int, sequence: int) -> npt.NDArray[np.float64]:
        case = self.case
        first = 0
        if case.mask == "sliding":
            first = max(0, position - case.window + 1)
        elif case.mask == "chunked":
            first = position // case.window * case.window
        seen = np.arange(first, position + 1)
        k = self.kept("k", sequence * self.n_ctx + seen)
        v = k[:, :, : case.head_v] if case.mla else self.kept("v", sequence * self.n_ctx + seen)
        heads = q.reshape(case.n_head, case.head_k).astype(np.float64)
        out = []
        for h in range(case.n_head):
            kv = h // (case.n_head // case.n_head_kv)
            s = k[:, kv] @ heads[h] * np.float32(case.scale)
            if case.softcap:
                s = case.softcap * np.tanh(s / case.softcap)
            if case.alibi:
                s = s + slope(case.alibi, h, case.n_head) * (seen - position)
            largest = max(s.max(), self.sinks[h]) if case.sinks else s.max()
            p = np.exp(s - largest)
            total = p.sum() + (np.exp(self.sinks[h] - largest) if case.sinks else 0.0)
            out.append(p @ v[:, kv] / total)
        return np.concatenate(out)


def slope(largest: float, head: int, n_head: int) -> float:
    n = 1 << (n_head.bit_length() - 1)
    if head < n:
        return float((2.0 ** (-largest / n)) ** (head + 1))
    return float((2.0 ** (-largest / 2 / n)) ** (2 * (head - n) + 1))


def draw(case: Case, n: int, seed: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    widths = (case.n_head * case.head_k, case.n_head_kv * case.head_k, case.n_head_kv * case.head_v)
    q, k, v = (rng.normal(0, 1.5, (n, w)).astype(np.float32) for w in widths)
    return q, k, v


def nmse(got: npt.NDArray[np.floating], want: npt.NDArray[np.float64]) -> float:
    return float(((got - want) ** 2).sum() / (want**2).sum())


def check(case: Case, batches: tuple[int, ...], n_ctx: int = 512, threads: int = 2) -> None:
    """Feed one sequence in batches and compare every output."""
    model, done = Model(case, 2, n_ctx, threads), 0
    for i, n in enumerate(batches):
        q, k, v = draw(case, n, i)
        positions = np.arange(done, done + n)
        got = model.run(q, k, v, positions, 1)
        assert nmse(got, model.expected(q, positions, 1)) < 1e-12, (case, n)
        done += n


BASE = Case()
FEATURES = {
    "plain": BASE,
    "sliding": replace(BASE, mask="sliding", window=50),
    "one": replace(BASE, mask="sliding", window=1),
    "chunked": replace(BASE, mask="chunked", window=48),
    "softcap": replace(BASE, softcap=3.0),
    "sinks": replace(BASE, sinks=True),
    "alibi": replace(BASE, alibi=8.0, n_head=6),
    "all": replace(BASE, mask="sliding", window=70, softcap=5.0, sinks=True, alibi=8.0, n_head=12, n_head_kv=4),
    "chunked_all": replace(BASE, mask="chunked", window=100, softcap=20.0, sinks=True, alibi=4.0),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    check(FEATURES[name], (1, 3, 17, 90, 1, 1, 130, 2))
