"""The keys that the lightning indexer selects: against exact sums, equal scores by position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from indexer_cases import CASES, Case

from quantkit.kernels import quantize
from quantkit.kernels.cpu.attention.lightning_indexer import lightning_indexer, scratch_bytes
from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.types import BY_NAME

N_CTX = 1500


def run(
    case: Case,
    keys: Any,
    q: Any,
    weights: Any,
    positions: Any,
    sequences: Any = 0,
    threads: int = 2,
    n_ctx: int = N_CTX,
) -> Any:
    """Return the selected positions; keys: [sequences * N_CTX, head], float32."""
    n, team = len(q), Team(threads)
    batch = Batch(team, n, N_CTX)
    batch.set(np.zeros(n), positions, sequences)
    t = BY_NAME[case.kind.upper()]
    cache = keys if case.kind == "f32" else quantize(keys, t)
    out = np.full((n + 1, case.n_selected), -7, np.int32)
    scratch = np.full(scratch_bytes(case.n_head, case.head, N_CTX, threads) + 64, 255, np.uint8)
    block = lightning_indexer.block(
        batch=batch.address,
        out=address_of(out),
        q=address_of(q),
        weights=address_of(weights),
        k_cache=address_of(cache),
        k_type=t.id,
        n_head=case.n_head,
        head=case.head,
        n_selected=case.n_selected,
        ratio=case.ratio,
        scale=case.scale,
        scratch=-(-address_of(scratch) // 64) * 64,
    )
    Tape(team, batch, [(lightning_indexer, block)]).run()
    assert not batch.words[8:].any()
    assert (out[n] == -7).all()
    return out[:n]


def expected(case: Case, keys: Any, q: Any, weights: Any, positions: Any, sequences: Any) -> Any:
    rows = zip(q, weights, positions, np.broadcast_to(sequences, len(q)), strict=True)
    return np.array([case.select(x, w, case.visible_keys(keys, s, p, N_CTX)) for x, w, p, s in rows])


@pytest.mark.parametrize("name", CASES)
def test_positions(name: str) -> None:
    case = CASES[name]
    keys = case.draw(2 * N_CTX, 1)[2]
    for positions in ([1400], np.arange(45), [6, 1499, 19, 20, 700, 512, 511]):
        q, weights, _ = case.draw(len(positions), len(positions))
        sequences = np.arange(len(q)) % 2
        actual = run(case, keys, q, weights, positions, sequences)
        np.testing.assert_array_equal(actual, expected(case, keys, q, weights, positions, sequences))


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_cache_types(kind: str) -> None:
    case = replace(CASES["plain"], kind=kind)
    q, weights, keys = case.draw(N_CTX, 2)
    picks = np.array([10, 99, 1300])
    actual = run(case, keys, q[picks], weights[picks], picks)
    np.testing.assert_array_equal(actual, expected(case, keys, q[picks], weights[picks], picks, 0))


def test_every_thread_count_gives_the_same_bits() -> None:
    """On values whose sums are rounded, and some that are NaN."""
    rng, case = np.random.default_rng(5), replace(CASES["heads"], scale=0.1)
    keys = rng.normal(0, 1, (N_CTX, case.head)).astype(np.float32)
    q = rng.normal(0, 1, (70, case.n_head * case.head)).astype(np.float32)
    weights = rng.normal(0, 1, (70, case.n_head)).astype(np.float32)
    keys[[5, 900]], weights[3, 2] = np.nan, np.nan
    positions = rng.permutation(N_CTX)[:70]
    outputs = [run(case, keys, q, weights, positions, threads=threads) for threads in (1, 2, 5)]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])
    for row, position in zip(outputs[0], positions, strict=True):
        positions_of_row = row[row >= 0]
        assert len(positions_of_row) == min(position + 1, case.n_selected)
        assert (np.diff(positions_of_row) > 0).all()
