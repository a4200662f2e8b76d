"""The keys that the lightning indexer selects, on the device: against exact sums, equal scores by position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from indexer_cases import CASES, Case

from quantkit.kernels import quantize
from quantkit.kernels.cuda.attention.lightning_indexer import indexer_scores, indexer_select, scratch_bytes
from quantkit.types import BY_NAME


def run(
    memory: Memory,
    case: Case,
    keys: Any,
    q: Any,
    weights: Any,
    positions: Any,
    sequences: Any,
    n_ctx: int,
    n_at_once: int,
) -> Any:
    """Return the selected positions, ``n_at_once`` tokens at a time."""
    n = len(q)
    cache = keys if case.kind == "f32" else quantize(keys, BY_NAME[case.kind.upper()])
    shared = {"batch": memory.batch(np.zeros(n), positions, sequences, n_ctx=n_ctx), "rows": n}
    shared |= {
        "n_selected": case.n_selected,
        "ratio": case.ratio,
        "scores": memory.allocate((scratch_bytes(n_ctx, n_at_once),), np.uint8),
    }
    out = memory.allocate((n, case.n_selected), np.int32)
    slots: dict[str, Any] = {"q": memory.put(q), "weights": memory.put(weights), "k_cache": memory.put(cache)}
    slots |= {"n_head": case.n_head, "scale": case.scale}
    for first in range(0, n + n_at_once, n_at_once):  # once more than there are
        scores, select = (
            indexer_scores(case.kind, case.head, n_ctx, first, n_at_once, n),
            indexer_select(first, n_at_once, n),
        )
        assert (scores is None) == (select is None) == (first >= n)
        if scores is not None and select is not None:
            memory.run(scores, first=first, **slots, **shared)
            memory.run(select, first=first, out=out, **shared)
    return memory.get(out, (n, case.n_selected), np.int32)


def check(memory: Memory, case: Case, positions: Any, n_ctx: int, n_at_once: int) -> None:
    keys = case.draw(2 * n_ctx, 1)[2]
    q, weights, _ = case.draw(len(positions), len(positions))
    sequences = np.arange(len(q)) % 2
    actual = run(memory, case, keys, q, weights, positions, sequences, n_ctx, n_at_once)
    rows = zip(q, weights, positions, sequences, strict=True)
    want = [case.select(x, w, case.visible_keys(keys, s, p, n_ctx)) for x, w, p, s in rows]
    np.testing.assert_array_equal(actual, np.array(want))


@pytest.mark.parametrize("name", CASES)
def test_positions(memory: Memory, name: str) -> None:
    check(memory, CASES[name], [6, 149, 19, 20, 64, 63], 150, 4)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_cache_types(memory: Memory, kind: str) -> None:
    check(memory, replace(CASES["plain"], kind=kind), [10, 99], 100, 2)


def test_more_keys_than_a_thread_block(memory: Memory) -> None:
    check(memory, replace(CASES["equal"], n_selected=300), [4999], 5000, 1)
