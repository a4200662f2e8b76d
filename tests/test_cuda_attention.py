"""Attention and the cache on the device: against float64 written from the operations' docstrings (model/ops.py)."""

from __future__ import annotations

import numpy as np
import pytest
from device_memory import Memory

from quantkit.kernels import quantize
from quantkit.kernels.cuda import cache
from quantkit.types import BY_NAME


@pytest.mark.parametrize("kind", cache.TYPES)
def test_cache_bytes_are_ggmls(memory: Memory, kind: str) -> None:
    n_ctx, n, widths = 16, 12, (288, 64)
    rng = np.random.default_rng(3)
    k, v = (rng.normal(0, 1.5, (n, w)).astype(np.float32) for w in widths)
    k[3], k[4], k[5, :32], k[6] = 0, -7, 1e-42, k[6] * 1e4
    k[7], v[8, 5], v[9] = -0.0, 6e4, np.round(v[9]) / 2
    positions, sequences = rng.permutation(n_ctx)[:n], rng.integers(0, 3, n)
    caches = [memory.room((3 * n_ctx, cache.row_bytes(kind, w)), np.uint8) for w in widths]
    memory.run(
        cache.cache_write(kind, n, *widths),
        batch=memory.batch(np.zeros(n), positions, sequences, n_ctx=n_ctx),
        **dict(zip(("k", "v", "k_cache", "v_cache"), (memory.put(k), memory.put(v), *caches), strict=True)),
        k_width=widths[0],
        v_width=widths[1],
    )
    cells = sequences * n_ctx + positions
    for address, x in zip(caches, (k, v), strict=True):
        got = memory.get(address, (3 * n_ctx, cache.row_bytes(kind, x.shape[1])), np.uint8)
        want = x.view(np.uint8) if kind == "f32" else quantize(x, BY_NAME[kind.upper()])
        np.testing.assert_array_equal(got[cells], want)
        assert (np.delete(got, cells, axis=0) == 255).all()


def test_rows_of_odd_widths_and_without_values(memory: Memory) -> None:
    x = np.random.default_rng(1).normal(0, 1, (3, 60)).astype(np.float32)
    address = memory.room((8, 60), np.float16)
    memory.run(
        cache.cache_write("f16", 3, 60, 0),
        batch=memory.batch(np.zeros(3), [5, 0, 2], n_ctx=8),
        k=memory.put(x),
        v=0,
        k_cache=address,
        v_cache=0,
        k_width=60,
        v_width=0,
    )
    got = memory.get(address, (8, 60), np.float16)
    np.testing.assert_array_equal(got[[5, 0, 2]], x.astype(np.float16))
    assert np.isnan(got[[1, 3, 4, 6, 7]]).all()
