"""Pairs by expert on the device: plan.cuh against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_products import plan_for
from device_memory import Memory
from matmul_cases import routed
from refusals import refuses

from quantkit.errors import ResourceError
from quantkit.kernels.cuda.core.kernel import shared_of_block
from quantkit.kernels.cuda.matmul import moe
from quantkit.kernels.parameters import MAX_EXPERTS


def read_plan(plan: Any, pairs: int, n_expert: int, tokens: int) -> tuple[Any, Any]:
    """Return the list of pairs, and the tiles as (expert, its pairs)."""
    pairs_listed = plan[16 : 16 + pairs]
    tiles_begin = 16 + -(-pairs // 4) * 4 + (0 if tokens == 32 else 4 * moe.most_tiles(pairs, n_expert, 32))
    count = plan[moe.TILES.index(tokens)]
    tiles = plan[tiles_begin : tiles_begin + 4 * count].reshape(-1, 4)
    return pairs_listed, [(e, pairs_listed[first : first + n].tolist()) for e, first, n, _ in tiles]


@pytest.mark.parametrize(
    ("rows", "n_used", "n_expert", "n_chosen"),
    [(9, 2, 8, 8), (150, 3, 40, 33), (333, 1, 3, 1), (1, 4, 70, 70), (70, 8, 128, 128)],
)
def test_a_plan_has_every_pair_once_by_expert(
    memory: Memory, rows: int, n_used: int, n_expert: int, n_chosen: int
) -> None:
    rng = np.random.default_rng(5)
    # Some experts have no pair; of one alone, it is the last.
    experts = rng.permutation(n_expert)[:n_chosen] if n_chosen > 1 else np.array([n_expert - 1])
    ids, size = routed(rows, n_used, experts, rng), moe.plan_bytes(n_expert, n_used, rows)
    actual, flat = memory.get(plan_for(memory, ids, n_expert)["plan"], (size // 4,), np.int32), ids.ravel()
    for tokens in moe.TILES:
        plan_pairs, tiles = read_plan(actual, flat.size, n_expert, tokens)
        np.testing.assert_array_equal(plan_pairs, np.argsort(flat, kind="stable"))
        assert len(tiles) <= moe.most_tiles(flat.size, n_expert, tokens)
        want = [
            (e, pairs[i : i + tokens].tolist())
            for e in range(n_expert)
            for pairs in [np.flatnonzero(flat == e)]
            for i in range(0, len(pairs), tokens)
        ]
        assert tiles == sorted(want, key=lambda tile: len(tile[1]) < tokens)  # stable: by expert


def test_many_experts_reduce_the_number_of_runs(memory: Memory) -> None:
    """A counter a warp and expert is 272 KiB for the most that can be routed to, more than any card has."""
    for card in (75, 86, 90, 100, 120):
        assert moe.bucket(512, card).shared == 4 * 17 * 512 or card == 75
        assert all(moe.bucket(n, card).shared <= shared_of_block(card) for n in range(1, MAX_EXPERTS + 1))
    with refuses(ResourceError, "QK-E306 20000"):
        moe.bucket(20000, 86)
    rows, n_used, n_expert = 40, 3, MAX_EXPERTS
    ids = routed(rows, n_used, n_expert, np.random.default_rng(5))
    plan = plan_for(memory, ids, n_expert)["plan"]
    actual = memory.get(plan, (moe.plan_bytes(n_expert, n_used, rows) // 4,), np.int32)
    pairs, tiles = read_plan(actual, ids.size, n_expert, 32)
    np.testing.assert_array_equal(pairs, np.argsort(ids.ravel(), kind="stable"))
    assert [e for e, _ in tiles] == np.unique(ids).tolist()


@pytest.mark.parametrize("per_token", [True, False])
def test_gather_and_scatter_are_inverse(memory: Memory, per_token: bool) -> None:
    rows, n_used, n_expert, width, rng = 21, 3, 5, 70, np.random.default_rng(6)
    ids = routed(rows, n_used, n_expert, rng)
    pairs, order = rows * n_used, np.argsort(ids.ravel(), kind="stable")
    plan_slots = plan_for(memory, ids, n_expert)
    plan, ids_address = plan_slots["plan"], plan_slots["ids"]
    x = rng.standard_normal((rows if per_token else pairs, width)).astype(np.float32)
    x_per, gathered = n_used if per_token else 1, memory.allocate((pairs, width), np.uint16)
    memory.run(moe.gather(pairs), plan=plan, x=memory.put(x), out=gathered, rows=pairs, x_per=x_per, width=width)
    bits = x.view(np.uint32)[order // x_per]
    np.testing.assert_array_equal(
        memory.get(gathered, (pairs, width), np.uint16), (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    )

    y, out = rng.standard_normal((pairs, width)).astype(np.float32), memory.allocate((pairs, width))
    bias = rng.standard_normal((n_expert, width + 1)).astype(np.float32)
    scale = rng.standard_normal(n_expert).astype(np.float32)
    b, s, experts = memory.put(bias), memory.put(scale), ids.ravel()[order]
    for scaling, want in (((0, 0), y), ((b, s), y * scale[experts, None] + bias[experts, :width])):
        memory.run(
            moe.scatter(pairs), plan=plan, ids=ids_address, x=memory.put(y), out=out, rows=pairs, width=width,
            bias=scaling[0], bias_stride=4 * (width + 1), scale=scaling[1],
        )  # fmt: skip
        np.testing.assert_array_equal(memory.get(out, (pairs, width))[order], want)
