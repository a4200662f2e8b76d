"""Pairs by expert on the device: plan.cuh against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_memory import Memory

from quantkit.kernels.cuda import moe


def read_plan(plan: Any, pairs: int, n_expert: int, tokens: int) -> tuple[Any, Any]:
    """Return the list of pairs, and the tiles as (expert, its pairs)."""
    listed = plan[16 : 16 + pairs]
    at = 16 + -(-pairs // 4) * 4 + (0 if tokens == 32 else 4 * moe.most_tiles(pairs, n_expert, 32))
    count = plan[moe.TILES.index(tokens)]
    tiles = plan[at : at + 4 * count].reshape(-1, 4)
    return listed, [(e, listed[first : first + n].tolist()) for e, first, n, _ in tiles]


@pytest.mark.parametrize(
    ("rows", "n_used", "n_expert", "chosen"),
    [(9, 2, 8, 8), (150, 3, 40, 33), (333, 1, 3, 1), (1, 4, 70, 70), (70, 8, 128, 128)],
)
def test_a_plan_has_every_pair_once_by_expert(
    memory: Memory, rows: int, n_used: int, n_expert: int, chosen: int
) -> None:
    rng = np.random.default_rng(5)
    # Some experts have no pair; of one alone, it is the last.
    of = rng.permutation(n_expert)[:chosen] if chosen > 1 else np.array([n_expert - 1])
    ids = np.stack([rng.permutation(of)[:n_used] for _ in range(rows)]).astype(np.int32)
    size = moe.plan_bytes(n_expert, n_used, rows)
    plan = memory.room((size,), np.uint8)
    memory.run(moe.bucket(n_expert), plan=plan, ids=memory.put(ids), rows=rows, n_used=n_used, n_expert=n_expert)
    got, flat = memory.get(plan, (size // 4,), np.int32), ids.ravel()
    for tokens in moe.TILES:
        listed, tiles = read_plan(got, flat.size, n_expert, tokens)
        np.testing.assert_array_equal(listed, np.argsort(flat, kind="stable"))
        assert len(tiles) <= moe.most_tiles(flat.size, n_expert, tokens)
        want = [
            (e, pairs[i : i + tokens].tolist())
            for e in range(n_expert)
            for pairs in [np.flatnonzero(flat == e)]
            for i in range(0, len(pairs), tokens)
        ]
        assert tiles == want
