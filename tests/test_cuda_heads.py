"""Heads on the device: norm, rotary positions and cache at once give the same bits as one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_memory import Memory

from quantkit.kernels.cuda import cache, heads, norms, rope

ROWS, N_CTX, N_SEQ = 3, 8, 2


def norm(memory: Memory, x: int, width: int, head: int, weight: int, n_weight: int, kind: str) -> int:
    out, groups = memory.room((ROWS, width)), ROWS * width // head
    slots = {"groups": groups, "group": head, "per_row": width // head, "n_weight": n_weight, "bias": 0, "eps": 1e-5}
    memory.run(norms.norm(kind, groups), x=x, out=out, weight=weight, **slots)
    return out


def turn(memory: Memory, x: int, width: int, head: int, table: int, start: int, n_rot: int, kind: str) -> int:
    out = memory.room((ROWS, width))
    slots = {"width": width, "head": head, "table": table, "start": start, "n_rot": n_rot}
    memory.run(rope.rope(kind, ROWS, width, head, n_rot), x=x, out=out, **slots)
    return out


@pytest.mark.parametrize("when", [heads.NEVER, heads.BEFORE, heads.AFTER])
@pytest.mark.parametrize(
    ("kv", "head", "v_head", "start", "n_rot", "kind"),
    [("f32", 24, 20, 4, 16, "normal"), ("f16", 64, 32, 0, 64, "neox"), ("q8_0", 96, 64, 0, 32, "neox")],
)
def test_all_at_once(
    memory: Memory, when: int, kv: str, head: int, v_head: int, start: int, n_rot: int, kind: str
) -> None:
    rng, n_head, n_kv = np.random.default_rng(head), 6, 3
    widths = n_head * head, n_kv * head, n_kv * v_head
    # One product's row: q's heads with a gap after each, then k, then v.
    stride = 2 * widths[0] + widths[1] + widths[2]
    joined = rng.standard_normal((ROWS, stride)).astype(np.float32)
    q = np.ascontiguousarray(joined[:, : 2 * widths[0]].reshape(ROWS, n_head, 2 * head)[:, :, :head])
    k, v = joined[:, 2 * widths[0] : -widths[2]], joined[:, -widths[2] :]
    x, table = memory.put(joined), memory.put(rng.standard_normal((ROWS, n_rot)).astype(np.float32))
    w_q, w_k = (memory.put(rng.standard_normal(n).astype(np.float32)) for n in (widths[0], head))
    batch = memory.batch([1, 2, 3], [5, 0, 6], [0, 1, 0], n_ctx=N_CTX)

    def part(x: int, width: int, weight: int, n_weight: int) -> int:
        if when == heads.BEFORE:
            x = norm(memory, x, width, head, weight, n_weight, "layer")
        x = turn(memory, x, width, head, table, start, n_rot, kind)
        return norm(memory, x, width, head, weight, n_weight, "layer") if when == heads.AFTER else x

    want_q = part(memory.put(q), widths[0], w_q, widths[0])
    want_k, want_v = part(memory.put(k), widths[1], w_k, head), memory.put(v)
    sizes = [(N_SEQ * N_CTX, cache.row_bytes(kv, width)) for width in widths[1:]]
    want = [memory.room(size, np.uint8) for size in sizes]
    found = [memory.room(size, np.uint8) for size in sizes]
    slots: dict[str, Any] = {"batch": batch, "k": want_k, "v": want_v, "k_cache": want[0], "v_cache": want[1]}
    memory.run(cache.cache_write(kv, ROWS, *widths[1:]), k_width=widths[1], v_width=widths[2], **slots)

    out_q, out_k = memory.room((ROWS, widths[0])), memory.room((ROWS, widths[1]))
    k_at, v_at = x + 8 * widths[0], x + 8 * widths[0] + 4 * widths[1]
    slots = {**heads.NOTHING, "batch": batch, "rows": ROWS, "table": table, "start": start, "n_rot": n_rot}
    slots |= {"neox": rope.KINDS.index(kind), "kind": norms.KINDS.index("layer"), "eps": 1e-5}
    slots |= {"head": head, "v_head": v_head, "q_norm": when, "k_norm": when, "q_turn": 1, "k_turn": 1}
    slots |= {
        "q": x,
        "q_heads": n_head,
        "q_stride": stride,
        "q_step": 2 * head,
        "q_weight": w_q,
        "q_n_weight": widths[0],
    }
    slots |= {"k": k_at, "k_heads": n_kv, "k_stride": stride, "k_step": head, "k_weight": w_k, "k_n_weight": head}
    slots |= {"v": v_at, "v_heads": n_kv, "v_stride": stride, "v_step": v_head}
    slots |= {"q_out": out_q, "k_out": out_k, "k_cache": found[0], "v_cache": found[1]}
    memory.run(heads.heads(kv, ROWS, n_head + 2 * n_kv, max(head, v_head)), **slots)
    for ours, theirs, size in ((out_q, want_q, (ROWS, widths[0])), (out_k, want_k, (ROWS, widths[1]))):
        assert np.array_equal(memory.get(ours, size, np.uint32), memory.get(theirs, size, np.uint32))
    for ours, theirs, size in zip(found, want, sizes, strict=True):
        assert np.array_equal(memory.get(ours, size, np.uint8), memory.get(theirs, size, np.uint8))


def test_values_alone(memory: Memory) -> None:
    rng = np.random.default_rng(1)
    v = rng.standard_normal((ROWS, 40)).astype(np.float32)
    batch, to = memory.batch([1, 2, 3], [5, 0, 6], n_ctx=N_CTX), memory.room((N_CTX, 40))
    slots = {**heads.NOTHING, "batch": batch, "rows": ROWS, "v": memory.put(v), "v_heads": 2, "v_stride": 40}
    slots |= {"v_step": 20, "v_head": 20, "v_cache": to}
    memory.run(heads.heads("f32", ROWS, 2, 20), **slots)
    assert np.array_equal(memory.get(to, (N_CTX, 40))[[5, 0, 6]], v)
