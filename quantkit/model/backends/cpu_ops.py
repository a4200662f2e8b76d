"""From operations of the graph to entries of a tape: one small function for each kind, in the table ``LOWER``.

A function names the slots of a compiled operation (kernels/cpu/*.py say what they mean) through a Lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quantkit.errors import TypeNotSupported
from quantkit.kernels.cpu import attention, cache, elementwise, glu, matmul, moe, norms, recurrent, rope, route
from quantkit.kernels.cpu.tape import Operation
from quantkit.kernels.rope_constants import rope_constants, rope_scalars
from quantkit.model.backends import looking_on
from quantkit.model.backends.arena import Slot, Within
from quantkit.model.backends.cpu_lowering import CPULowering, rows
from quantkit.model.backends.lowering import LINE, expert_bytes_of, row_bytes_of
from quantkit.model.ops import (
    Activate,
    Add,
    Attention,
    CacheWrite,
    Clamp,
    Combine,
    Convolve,
    DeltaNet,
    Embed,
    Glu,
    Join,
    Matrix,
    MulMat,
    MulMatHeads,
    MulMatId,
    MulMats,
    MultiplyBy,
    Norm,
    Op,
    Repeat,
    Rope,
    RopeTable,
    Route,
    Scale,
    ScaleByPosition,
    SelectOutputs,
    Softcap,
    Take,
    UpGate,
    UpGateId,
    Value,
)

# ---------------------------------------------------------------- element by element


def _embed(b: CPULowering, op: Embed) -> None:
    t, width = op.weight.tensor.type, op.out.width
    each = elementwise.embed_scratch_bytes(t, width)
    b.n_vocab = op.weight.n_out
    b.emit(
        elementwise.embed(t),
        out=b.buffer(op.out),
        weight=b.weight(op.weight),
        row_bytes=row_bytes_of(op.weight),
        width=width,
        scale=op.scale,
        scratch=b.array(np.zeros(max(1, each * b.threads), np.uint8)),
        scratch_bytes=each,
    )


def _select_outputs(b: CPULowering, op: SelectOutputs) -> None:
    b.emit(elementwise.select_outputs, out=b.buffer(op.out), x=b.buffer(op.x), width=op.x.width * op.x.per)


def _add(b: CPULowering, op: Add) -> None:
    shared = op.a if b.buffer(op.a).nbytes == b.buffer(op.out).nbytes else op.b
    slots = {"out": b.buffer(op.out), "a": b.buffer(op.a), "b": b.buffer(op.b)}
    entry = b.emit(elementwise.add, width=op.out.width, **slots, **rows(op.out))
    b.may_overwrite(entry, op.out, shared)


def _map(b: CPULowering, operation: Operation, out: Value, x: Value, **more: Slot) -> None:
    entry = b.emit(operation, out=b.buffer(out), x=b.buffer(x), width=out.width, **rows(out), **more)
    b.may_overwrite(entry, out, x)


def _scale(b: CPULowering, op: Scale) -> None:
    _map(b, elementwise.scale, op.out, op.x, by=op.factor)


def _scale_by_position(b: CPULowering, op: ScaleByPosition) -> None:
    numbers = {"floor_scale": float(op.floor_scale), "alpha": op.alpha, "offset": op.offset}
    _map(b, elementwise.scale_by_position, op.out, op.x, **numbers)


def _multiply_by(b: CPULowering, op: MultiplyBy) -> None:
    vector = b.vector_values(op.vector)
    operation = elementwise.plus_vector if op.add else elementwise.multiply_by
    _map(b, operation, op.out, op.x, vector=b.array(vector), n=len(vector))


def _softcap(b: CPULowering, op: Softcap) -> None:
    _map(b, elementwise.softcap, op.out, op.x, by=op.cap)


def _clamp(b: CPULowering, op: Clamp) -> None:
    _map(b, elementwise.clamp, op.out, op.x, by=op.limit)


def _norm(b: CPULowering, op: Norm) -> None:
    parts = {name: b.vector_values(m) for name, m in (("weight", op.weight), ("bias", op.bias)) if m is not None}
    n_weight = max([op.group, *(len(v) for v in parts.values())]) if parts else 0
    # One that is shorter, than a group or than the other, is written out: np.resize repeats.
    addresses = {name: b.array(v if len(v) == n_weight else np.resize(v, n_weight)) for name, v in parts.items()}
    more = {"weight": 0, "bias": 0, **addresses, "group": op.group, "n_weight": n_weight}
    _map(b, norms.norm(op.kind), op.out, op.x, eps=op.eps, **more)


def _glu(b: CPULowering, op: Glu) -> None:
    both = op.up is None
    entry = b.emit(
        glu.glu(op.activation),
        out=b.buffer(op.out),
        gate=b.buffer(op.gate),
        up=0 if op.up is None else b.buffer(op.up),
        width=op.out.width,
        gate_width=op.out.width if both else op.gate.width,
        **rows(op.out),
        **glu.limits(op.activation),
    )
    if op.up is not None:
        b.may_overwrite(entry, op.out, op.up)


def _activate(b: CPULowering, op: Activate) -> None:
    if op.activation.kind == "softplus":
        _map(b, elementwise.softplus, op.out, op.x)
        return
    operation = glu.activate(op.activation)
    limits = {name: value for name, value in glu.limits(op.activation).items() if name in operation.slots}
    _map(b, operation, op.out, op.x, **limits)


def _take(b: CPULowering, op: Take) -> None:
    slots: dict[str, Slot] = {"out": b.buffer(op.out), "x": b.buffer(op.x), "width": op.out.width}
    b.emit(elementwise.take, x_width=op.x.width, start=op.start, period=op.period, **slots, **rows(op.out))


def _join(b: CPULowering, op: Join) -> None:
    b.emit(
        elementwise.join,
        out=b.buffer(op.out),
        a=b.buffer(op.a),
        b=b.buffer(op.b),
        a_width=op.a.width,
        b_width=op.b.width,
        period_a=op.period_a,
        period_b=op.period_b,
        **rows(op.out),
    )


# ---------------------------------------------------------------- matrices


def _multiply(
    b: CPULowering,
    out: Value,
    x: Value,
    weight: Matrix,
    bias: Matrix | None,
    scale: Matrix | None,
    each: int,
    independent: bool = False,
) -> None:
    """out = scale * (weight x) + bias; each: bytes of scratch of a thread, the same for entries that run together."""
    activations, stride = b.activations(x, weight)
    entry = b.emit(
        matmul.mul_mat,
        products=matmul.products_of(weight.tensor.type),
        x=activations,
        x_stride=stride,
        w=b.weight(weight),
        row_bytes=row_bytes_of(weight),
        n_in=weight.n_in,
        n_out=weight.n_out,
        out=b.buffer(out),
        out_stride=4 * out.width,
        bias=b.vector(bias),
        scale=b.vector(scale),
        scratch=b.scratch(each * b.threads),
        scratch_bytes=each,
        **rows(x),
    )
    entry.independent, entry.weights = independent, (weight,)


def _scratch_of(weights: Iterable[Matrix]) -> int:
    most = max(matmul.scratch_bytes(w.tensor.type, w.n_in) for w in weights)
    return -(-most // LINE) * LINE


def _mul_mat(b: CPULowering, op: MulMat) -> None:
    _multiply(b, op.out, op.x, op.weight, op.bias, op.scale, _scratch_of([op.weight]))


def _mul_mats(b: CPULowering, op: MulMats) -> None:
    for weight in op.weights:
        b.activations(op.x, weight)  # all before the first product: those do not wait for each other
    each = _scratch_of(op.weights)
    for out, weight, bias, scale in zip(op.outs, op.weights, op.biases, op.scales, strict=True):
        _multiply(b, out, op.x, weight, bias, scale, each, independent=out is not op.outs[-1])


def _up_gate(b: CPULowering, op: UpGate) -> None:
    slots: dict[str, Slot] = {}
    parts = (("up", op.up, op.up_bias, op.up_scale), ("gate", op.gate, op.gate_bias, op.gate_scale))
    for name, weight, bias, scale in parts:
        activations, stride = b.activations(op.x, weight)
        slots |= {
            name: b.weight(weight),
            f"{name}_row_bytes": row_bytes_of(weight),
            f"{name}_products": matmul.products_of(weight.tensor.type),
            f"{name}_x": activations,
            f"{name}_x_stride": stride,
            f"{name}_bias": b.vector(bias),
            f"{name}_scale": b.vector(scale),
        }
    each = matmul.up_gate_scratch_bytes(op.up.tensor.type, op.gate.tensor.type, op.up.n_in)
    each = -(-each // LINE) * LINE
    entry = b.emit(
        matmul.up_gate(op.activation),
        n_in=op.up.n_in,
        n_out=op.up.n_out,
        out=b.buffer(op.out),
        out_stride=4 * op.out.width,
        scratch=b.scratch(each * b.threads),
        scratch_bytes=each,
        **rows(op.x),
        **slots,
        **glu.limits(op.activation),
    )
    entry.weights = (op.up, op.gate)


def _mul_mat_heads(b: CPULowering, op: MulMatHeads) -> None:
    """An entry for each head: they do not wait for each other."""
    weight, heads = op.weight, op.x.width // op.weight.n_in
    t, start = weight.tensor.type, b.weight(op.weight)
    activations, stride = b.activations(op.x, weight)
    each = _scratch_of([weight])
    for head in range(heads):
        entry = b.emit(
            matmul.mul_mat,
            products=matmul.products_of(t),
            x=Within(activations, stride * head),
            x_stride=stride * heads,
            w=start + head * expert_bytes_of(weight),
            row_bytes=row_bytes_of(weight),
            n_in=weight.n_in,
            n_out=weight.n_out,
            out=Within(b.buffer(op.out), 4 * weight.n_out * head),
            out_stride=4 * op.out.width,
            bias=0,
            scale=0,
            scratch=b.scratch(each * b.threads),
            scratch_bytes=each,
            **rows(op.x),
        )
        entry.independent = head + 1 < heads
        entry.weights = (replace(weight, tensor=replace(weight.tensor, shape=weight.tensor.shape[:2])),)


# ---------------------------------------------------------------- experts


def _by_expert(b: CPULowering, out: Value, x: Value, ids: Value, weight: Matrix) -> dict[str, Slot]:
    """Return the slots that both kinds of products by expert have."""
    t = weight.tensor.type
    activations, stride = b.activations(x, weight)
    each = -(-moe.scratch_bytes(t, weight.n_in) // LINE) * LINE
    return {
        "out": b.buffer(out),
        "x": activations,
        "x_stride": stride,
        "x_per": ids.width if x.per == 1 else 1,
        "plan": b.plan(ids, weight.n_matrices),
        "n_expert": weight.n_matrices,
        "n_used": ids.width,
        "products": moe.products_of(t),
        "row_bytes": row_bytes_of(weight),
        "n_in": weight.n_in,
        "n_out": weight.n_out,
        "scratch": b.scratch(each * b.threads),
        "scratch_bytes": each,
    }


def _mul_mat_id(b: CPULowering, op: MulMatId) -> None:
    slots = _by_expert(b, op.out, op.x, op.ids, op.weight)
    entry = b.emit(
        moe.mul_mat_id,
        w=b.weight(op.weight),
        expert_bytes=expert_bytes_of(op.weight),
        bias=b.vector(op.bias),
        bias_stride=4 * op.weight.n_out,
        scale=b.vector(op.scale),
        **slots,
    )
    entry.weights = (op.weight,)


def _up_gate_id(b: CPULowering, op: UpGateId) -> None:
    slots = _by_expert(b, op.out, op.x, op.ids, op.up)
    entry = b.emit(
        moe.up_gate_id(op.activation),
        up=b.weight(op.up),
        gate=b.weight(op.gate),
        up_expert_bytes=expert_bytes_of(op.up),
        gate_expert_bytes=expert_bytes_of(op.gate),
        up_bias=b.vector(op.up_bias),
        gate_bias=b.vector(op.gate_bias),
        up_bias_stride=4 * op.up.n_out,
        gate_bias_stride=4 * op.gate.n_out,
        up_scale=b.vector(op.up_scale),
        gate_scale=b.vector(op.gate_scale),
        **slots,
        **glu.limits(op.activation),
    )
    entry.weights = (op.up, op.gate)


def _route(b: CPULowering, op: Route) -> None:
    b.emit(
        route.route,
        ids=b.buffer(op.ids),
        weights=b.buffer(op.weights),
        logits=b.buffer(op.logits),
        bias=b.vector(op.bias),
        rows_of=int(op.logits.outputs),
        **route.route_block(op.routing),
    )


def _repeat(b: CPULowering, op: Repeat) -> None:
    slots: dict[str, Slot] = {"out": b.buffer(op.out), "x": b.buffer(op.x), "weights": b.buffer(op.weights)}
    b.emit(route.repeat, width=op.x.width, n_used=op.out.per, rows_of=int(op.x.outputs), **slots)


def _combine(b: CPULowering, op: Combine) -> None:
    weights: Slot = 0 if op.weights is None else b.buffer(op.weights)
    slots: dict[str, Slot] = {"out": b.buffer(op.out), "x": b.buffer(op.x), "weights": weights}
    b.emit(route.combine, width=op.x.width, n_used=op.x.per, rows_of=int(op.x.outputs), **slots)


# ---------------------------------------------------------------- attention


def _rope_table(b: CPULowering, op: RopeTable) -> None:
    factors = None if op.factors is None else b.vector_values(op.factors)
    constants = rope_constants(op.config, factors)
    slots = rope_scalars(op.config)
    b.emit(rope.rope_table, out=b.buffer(op.out), pairs=op.config.n_rot // 2, constants=b.array(constants), **slots)


def _rope(b: CPULowering, op: Rope) -> None:
    part = {"head": op.head, "start": op.start, "n_rot": op.config.n_rot}
    _map(b, rope.rope(op.config.kind), op.out, op.x, table=b.buffer(op.table), **part)


def _cache_write(b: CPULowering, op: CacheWrite) -> None:
    keys, values, kind = b.cache(op.cache)
    b.emit(
        cache.cache_write,
        k=b.buffer(op.k),
        v=0 if op.v is None else b.buffer(op.v),
        k_cache=keys,
        v_cache=values,
        k_type=kind,
        v_type=kind,
        k_width=op.cache.k_width,
        v_width=op.cache.v_width,
    )


def _attention(b: CPULowering, op: Attention) -> None:
    keys, values, kind = b.cache(op.cache)
    numbers = {name: getattr(op, name) for name in ("n_head", "n_head_kv", "head_k", "head_v", "window")}
    floats = {name: getattr(op, name) for name in ("scale", "softcap", "alibi")}
    b.emit(
        attention.attention,
        q=b.buffer(op.q),
        out=b.buffer(op.out),
        k_cache=keys,
        v_cache=values,
        k_type=kind,
        v_type=kind,
        sinks=b.vector(op.sinks),
        mask=attention.MASKS[op.mask],
        scratch=b.scratch(attention.scratch_bytes(op.head_k, op.head_v, b.threads)),
        **numbers,
        **floats,
    )


# ---------------------------------------------------------------- recurrent layers


def _convolve(b: CPULowering, op: Convolve) -> None:
    slots: dict[str, Slot] = {"x": b.buffer(op.x), "out": b.buffer(op.out), "taps": op.weight.n_in}
    b.emit(recurrent.convolve, weight=b.vector(op.weight), state=b.state(op.state), width=op.x.width, **slots)


def _delta_net(b: CPULowering, op: DeltaNet) -> None:
    values: dict[str, Slot] = {name: b.buffer(getattr(op, name)) for name in ("q", "k", "v", "g", "beta", "out")}
    b.emit(
        recurrent.delta_net,
        state=b.state(op.state),
        n_k_head=op.n_k_head,
        n_v_head=op.n_v_head,
        head_k=op.k.width // op.n_k_head,
        head_v=op.v.width // op.n_v_head,
        scale=op.scale,
        tiled=int(op.tiled),
        **values,
    )


LOWER: Mapping[type[Op], Callable[[CPULowering, Any], None]] = {
    Embed: _embed,
    SelectOutputs: _select_outputs,
    Add: _add,
    Scale: _scale,
    ScaleByPosition: _scale_by_position,
    MultiplyBy: _multiply_by,
    Softcap: _softcap,
    Clamp: _clamp,
    Norm: _norm,
    Glu: _glu,
    Activate: _activate,
    Take: _take,
    Join: _join,
    MulMat: _mul_mat,
    MulMats: _mul_mats,
    UpGate: _up_gate,
    MulMatHeads: _mul_mat_heads,
    MulMatId: _mul_mat_id,
    UpGateId: _up_gate_id,
    Route: _route,
    Repeat: _repeat,
    Combine: _combine,
    RopeTable: _rope_table,
    Rope: _rope,
    CacheWrite: _cache_write,
    Attention: _attention,
    Convolve: _convolve,
    DeltaNet: _delta_net,
    **looking_on.LOWER,
}


def lower(b: CPULowering, op: Op) -> None:
    """Append the entries of an operation; TypeNotSupported if this backend has none for it."""
    if type(op) not in LOWER:
        raise TypeNotSupported(f"the cpu backend has no {type(op).__name__}")
    b.op = op
    LOWER[type(op)](b, op)
