"""Per-head chains on the device: fused, they give the same bits as the kernels one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_memory import Memory

from quantkit.kernels.cuda.attention import cache
from quantkit.kernels.cuda.layer import elementwise, glu, norms_rope, per_head, route
from quantkit.kernels.cuda.matmul import activations
from quantkit.kernels.parameters import Activation

ROWS, N_CTX, N_SEQ = 3, 8, 2
f32 = np.float32


class OneByOne:
    """The kernels that per_head fuses, each by itself, on dense rows."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def map(self, shape: Any, x: int, width: int, **slots: Any) -> int:
        out = self.memory.allocate((ROWS, width))
        self.memory.run(shape, x=x, out=out, width=width, rows=ROWS, **slots)
        return out

    def norm(self, x: int, width: int, group: int, weight: int, n_weight: int, kind: str) -> int:
        out, groups = self.memory.allocate((ROWS, width)), ROWS * width // group
        slots = {"groups": groups, "group": group, "per_row": width // group, "n_weight": n_weight, "bias": 0}
        self.memory.run(norms_rope.norm(kind, groups), x=x, out=out, weight=weight, eps=1e-5, **slots)
        return out

    def turn(self, x: int, width: int, head: int, table: int, start: int, n_rot: int, kind: str) -> int:
        out = self.memory.allocate((ROWS, width))
        slots = {"width": width, "head": head, "table": table, "start": start, "n_rot": n_rot}
        self.memory.run(norms_rope.rope(kind, ROWS, width, head, n_rot), x=x, out=out, **slots)
        return out

    def activate(self, x: int, width: int, kind: str) -> int:
        slots = {"alpha": 0, "gate_limit": 0, "act_limit": 0}
        return self.map(glu.activate(Activation(kind), width, ROWS), x, width, **slots)

    def vector(self, x: int, width: int, vector: int, n: int, add: bool) -> int:
        shape = (elementwise.plus_vector if add else elementwise.multiply_by)(width, ROWS)
        return self.map(shape, x, width, vector=vector, n=n)

    def gated(self, gate: int, x: int, width: int, kind: str) -> int:
        out, limits = self.memory.allocate((ROWS, width)), glu.limits(Activation(kind))
        slots = {"gate": gate, "up": x, "width": width, "gate_width": width, "rows": ROWS}
        self.memory.run(glu.glu(Activation(kind), width, ROWS), out=out, **slots, **limits)
        return out

    def quantize(self, x: int, n: int, rows: int, kind: str) -> Any:
        size = rows, activations.row_bytes(kind, n)
        out = self.memory.allocate(size, np.uint8)
        slots = {"rows": rows, "x": x, "x_stride": 4 * n, "n": n, "out": out}
        self.memory.run(activations.quantize(kind, n, rows), **slots)
        return self.memory.get(out, size, np.uint8)


def run(memory: Memory, kind: str, batch: int, chains: list[dict[str, Any]]) -> None:
    sizes = [(part["width"], part["n"]) for part in chains]
    memory.run(per_head.per_head(kind, ROWS, sizes), batch=batch, rows=ROWS, **per_head.slots(chains))


@pytest.mark.parametrize("when", [per_head.NO_NORM, per_head.BEFORE, per_head.AFTER])
@pytest.mark.parametrize(
    ("kv", "head", "v_head", "start", "n_rot", "kind"),
    [("f32", 24, 20, 4, 16, "normal"), ("f16", 64, 32, 0, 64, "neox"), ("q8_0", 96, 64, 0, 32, "neox")],
)
def test_heads_before_attention(
    memory: Memory, when: int, kv: str, head: int, v_head: int, start: int, n_rot: int, kind: str
) -> None:
    rng, n_head, n_kv, kernels = np.random.default_rng(head), 6, 3, OneByOne(memory)
    widths = n_head * head, n_kv * head, n_kv * v_head
    # One product's row: q's heads with a gap after each, then k, then v.
    stride = 2 * widths[0] + widths[1] + widths[2]
    qkv = rng.standard_normal((ROWS, stride)).astype(f32)
    q = np.ascontiguousarray(qkv[:, : 2 * widths[0]].reshape(ROWS, n_head, 2 * head)[:, :, :head])
    k, v = qkv[:, 2 * widths[0] : -widths[2]], qkv[:, -widths[2] :]
    x, table = memory.put(qkv), memory.put(rng.standard_normal((ROWS, n_rot)).astype(f32))
    w_q, w_k = (memory.put(rng.standard_normal(n).astype(f32)) for n in (widths[0], head))
    batch = memory.batch([1, 2, 3], [5, 0, 6], [0, 1, 0], n_ctx=N_CTX)

    def part(x: int, width: int, weight: int, n_weight: int) -> int:
        if when == per_head.BEFORE:
            x = kernels.norm(x, width, head, weight, n_weight, "layer")
        x = kernels.turn(x, width, head, table, start, n_rot, kind)
        return kernels.norm(x, width, head, weight, n_weight, "layer") if when == per_head.AFTER else x

    want_q = part(memory.put(q), widths[0], w_q, widths[0])
    want_k, want_v = part(memory.put(k), widths[1], w_k, head), memory.put(v)
    sizes = [(N_SEQ * N_CTX, cache.row_bytes(kv, width)) for width in widths[1:]]
    want = [memory.allocate(size, np.uint8) for size in sizes]
    formats = [memory.allocate(size, np.uint8) for size in sizes]
    slots: dict[str, Any] = {"batch": batch, "k": want_k, "v": want_v, "k_cache": want[0], "v_cache": want[1]}
    memory.run(cache.cache_write(kv, ROWS, *widths[1:]), k_width=widths[1], v_width=widths[2], **slots)

    out_q, out_k = memory.allocate((ROWS, widths[0])), memory.allocate((ROWS, widths[1]))
    steps = {"norm": when, "kind": norms_rope.NORM_KINDS.index("layer"), "group": head, "eps": 1e-5, "stride": stride}
    steps |= {
        "table": table,
        "head": head,
        "start": start,
        "n_rot": n_rot,
        "neox": norms_rope.ROPE_KINDS.index(kind),
        "n": head,
    }
    chains = [
        {**steps, "width": widths[0], "x": x, "each": head, "step": 2 * head, "weight": w_q, "n_weight": widths[0]},
        {**steps, "width": widths[1], "x": x + 8 * widths[0], "weight": w_k, "n_weight": head},
        {"width": widths[2], "n": v_head, "stride": stride, "x": x + 8 * widths[0] + 4 * widths[1]},
    ]
    for one, out in zip(chains, (out_q, out_k), strict=False):
        one |= {"out": out, "out_stride": one["width"]}
    for one, place, width in zip(chains[1:], formats, widths[1:], strict=True):
        one |= {"cache": place, "cache_width": width}
    run(memory, kv, batch, chains)
    for actual, expected, size in ((out_q, want_q, (ROWS, widths[0])), (out_k, want_k, (ROWS, widths[1]))):
        assert np.array_equal(memory.get(actual, size, np.uint32), memory.get(expected, size, np.uint32))
    for actual, expected, size in zip(formats, want, sizes, strict=True):
        assert np.array_equal(memory.get(actual, size, np.uint8), memory.get(expected, size, np.uint8))


@pytest.mark.parametrize("form", [kind for kind in activations.KINDS if kind not in activations.OF_ROWS])
@pytest.mark.parametrize(("group", "width"), [(64, 640), (128, 200), (256, 512)])
def test_gated_norms_with_a_format(memory: Memory, form: str, group: int, width: int) -> None:
    """What a delta net ends with: the norm of heads, times silu of a gate that lies among other columns."""
    width, kernels, rng = width // group * group, OneByOne(memory), np.random.default_rng(width)
    x, weight = (rng.standard_normal(size).astype(f32) for size in ((ROWS, width), group))
    both = rng.standard_normal((ROWS, 2 * width)).astype(f32)
    gate = np.ascontiguousarray(both.reshape(ROWS, -1, 2, group)[:, :, 1].reshape(ROWS, width))
    address, w, batch = memory.put(x), memory.put(weight), memory.batch([1, 2, 3], [5, 0, 6])
    want = kernels.gated(memory.put(gate), kernels.norm(address, width, group, w, group, "rms"), width, "silu")
    size = ROWS, activations.row_bytes(form, width)
    out, formats = memory.allocate((ROWS, width)), memory.allocate(size, np.uint8)
    part = {
        "width": width,
        "n": 256,
        "x": address,
        "stride": width,
        "norm": per_head.AFTER,
        "group": group,
        "weight": w,
    }
    part |= {"n_weight": group, "eps": 1e-5, "gating": glu.ACTIVATIONS["silu"], "gate": memory.put(both) + 4 * group}
    part |= {"gate_stride": 2 * width, "gate_each": group, "gate_step": 2 * group, "out": out, "out_stride": width}
    part |= {"quantized": formats, "format": activations.KINDS.index(form), "q_width": width}
    run(memory, "f32", batch, [part])
    assert np.array_equal(memory.get(out, (ROWS, width), np.uint32), memory.get(want, (ROWS, width), np.uint32))
    assert np.array_equal(memory.get(formats, size, np.uint8), kernels.quantize(want, width, ROWS, form))


@pytest.mark.parametrize("kind", [kind for kind in glu.ACTIVATIONS if kind != "swiglu_oai"])
def test_vectors_and_activations(memory: Memory, kind: str) -> None:
    """The rates of a delta net; the position scales the other part, whose heads are rows of a format."""
    width, kernels, rng = 300, OneByOne(memory), np.random.default_rng(6)
    x, y = (memory.put(3 * rng.standard_normal((ROWS, width)).astype(f32)) for _ in range(2))
    addend, times = (memory.put(rng.standard_normal(n).astype(f32)) for n in (300, 100))
    batch = memory.batch([1, 2, 3], [5, 0, 6])
    want = kernels.vector(
        kernels.activate(kernels.vector(x, width, addend, 300, True), width, kind), width, times, 100, False
    )
    scaling = {"floor_scale": 2.0, "alpha": 0.1, "offset": 1.0}
    slots = {**scaling, "batch": batch, "rows_of": 0, "per": 1}
    scaled = kernels.map(elementwise.scale_by_position(width, ROWS), y, width, **slots)
    size = ROWS * 3, activations.row_bytes("q8_0", 100)
    outs, formats = [memory.allocate((ROWS, width)) for _ in range(2)], memory.allocate(size, np.uint8)
    first = {"width": width, "n": 256, "x": x, "stride": width, "plus": addend, "n_plus": 300, "times": times}
    first |= {"n_times": 100, "activation": glu.ACTIVATIONS[kind], "out": outs[0], "out_stride": width}
    second = {"width": width, "n": 100, "x": y, "stride": width, **scaling, "out": outs[1], "out_stride": width}
    second |= {"quantized": formats, "format": activations.KINDS.index("q8_0"), "q_width": 100}
    run(memory, "f32", batch, [first, second])
    for out, one in zip(outs, (want, scaled), strict=True):
        assert np.array_equal(memory.get(out, (ROWS, width), np.uint32), memory.get(one, (ROWS, width), np.uint32))
    assert np.array_equal(memory.get(formats, size, np.uint8), kernels.quantize(scaled, 100, ROWS * 3, "q8_0"))


@pytest.mark.parametrize("group", [96, 1152])
def test_rows_by_a_block(memory: Memory, group: int) -> None:
    """A norm of a whole row, then rotary positions of its heads (OLMo 2); a block adds squares in another order."""
    width, head, kernels, rng = 1152, 96, OneByOne(memory), np.random.default_rng(7)
    x, weight = memory.put(rng.standard_normal((ROWS, width)).astype(f32)), rng.standard_normal(group).astype(f32)
    table, w = memory.put(rng.standard_normal((ROWS, 64)).astype(f32)), memory.put(weight)
    batch, out = memory.batch([1, 2, 3], [5, 0, 6]), memory.allocate((ROWS, width))
    want = kernels.turn(kernels.norm(x, width, group, w, group, "layer"), width, head, table, 8, 64, "neox")
    part = {"width": width, "n": width, "x": x, "stride": width, "norm": per_head.BEFORE, "group": group, "weight": w}
    part |= {"kind": 1, "n_weight": group, "eps": 1e-5, "table": table, "head": head, "start": 8, "n_rot": 64}
    part |= {"neox": 1, "out": out, "out_stride": width}
    run(memory, "f32", batch, [part])
    actual, expected = memory.get(out, (ROWS, width)), memory.get(want, (ROWS, width))
    if group < width:
        assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_repeated_columns(memory: Memory) -> None:
    """One rotated key behind every head's own columns."""
    rng = np.random.default_rng(1)
    columns, shared = (rng.standard_normal((ROWS, n)).astype(f32) for n in (3 * 20, 50))
    batch, state = memory.batch([1, 2, 3], [5, 0, 6], n_ctx=N_CTX), memory.allocate((N_CTX, 3 * 30))
    place = {"cache": state, "cache_width": 90, "cache_step": 30}
    chains = [
        {"width": 60, "n": 256, "x": memory.put(columns), "stride": 60, "cache_each": 20, **place},
        {"width": 30, "n": 20, "x": memory.put(shared) + 4 * 7, "stride": 50, "each": 10, "cache_each": 10, **place},
    ]
    chains[1] |= {"cache_start": 20, "step": 0}
    run(memory, "f32", batch, chains)
    want = np.concatenate([columns.reshape(ROWS, 3, 20), np.tile(shared[:, None, 7:17], (1, 3, 1))], 2)
    assert np.array_equal(memory.get(state, (N_CTX, 90))[[5, 0, 6]], want.reshape(ROWS, 90))


def test_repeated_rows(memory: Memory) -> None:
    """The input of experts that is weighted before them (Llama 4), and its format."""
    width, n_used, kernels, rng = 300, ROWS, OneByOne(memory), np.random.default_rng(8)
    x, weights = rng.standard_normal((1, width)).astype(f32), rng.random(n_used).astype(f32)
    address, w, out = memory.put(x), memory.put(weights), memory.allocate((n_used, width))
    slots = {"x": address, "weights": w, "width": width, "n_used": n_used, "rows": 1}
    memory.run(route.repeat(width, n_used, 1), out=out, **slots)
    size = ROWS, activations.row_bytes("q8_0", width)
    out_rows, formats = memory.allocate((ROWS, width)), memory.allocate(size, np.uint8)
    part = {"width": width, "n": 256, "x": address, "stride": width, "repeat": n_used, "by": w, "out": out_rows}
    part |= {"out_stride": width, "quantized": formats, "format": activations.KINDS.index("q8_0"), "q_width": width}
    run(memory, "f32", memory.batch([1], [0]), [part])
    assert np.array_equal(memory.get(out_rows, (ROWS, width)), memory.get(out, (ROWS, width)))
    assert np.array_equal(memory.get(formats, size, np.uint8), kernels.quantize(out, width, ROWS, "q8_0"))


def test_long_pieces_are_refused() -> None:
    with pytest.raises(ValueError, match="up to 8192 columns"):
        per_head.per_head("f32", 1, [(9000, 9000)])
