"""Lowering of every operation to entries of a tape, in the table ``LOWER``.

A function fills the slots of a compiled operation, which kernels/cpu/*.py document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from quantkit.kernels.cpu.attention import attention, cache, lightning_indexer
from quantkit.kernels.cpu.core.tape import TapeOp
from quantkit.kernels.cpu.layer import compress, elementwise, glu, mixing, norms, recurrent, rope, route, streams
from quantkit.kernels.cpu.matmul import matmul, moe
from quantkit.kernels.parameters import MASKS
from quantkit.model import ops
from quantkit.model.backends import slots
from quantkit.model.backends.arena import BufferOffset, Slot
from quantkit.model.backends.cpu import observe
from quantkit.model.backends.cpu.lowering import CPULowering, rows
from quantkit.model.backends.distance_bias import has_table
from quantkit.model.backends.lowering import LINE, expert_bytes_of, row_bytes_of
from quantkit.model.ops import Matrix, Op, OpTable, Value
from quantkit.units import round_up

LOWER = OpTable("the cpu backend")

#: Elementwise operations of one input and numbers (``slots.numbers``).
_MAPS = {
    ops.Scale: elementwise.scale,
    ops.Shift: elementwise.shift,
    ops.ScaleByPosition: elementwise.scale_by_position,
    ops.Softcap: elementwise.softcap,
    ops.Clamp: elementwise.clamp,
    ops.Xielu: elementwise.xielu,
    ops.Exceed: mixing.exceed,
}
#: Operations whose entry has the slots of all devices, and the rows of a value, if a field is named.
_ENTRIES: dict[type[Op], tuple[TapeOp, Callable[..., slots.Slots], str]] = {
    ops.Lookup: (elementwise.lookup, slots.lookup, ""),
    ops.Mix: (mixing.mix, slots.mix, "out"),
    ops.StreamWeights: (streams.stream_weights, slots.stream_weights, "x"),
    ops.Lerp: (mixing.lerp, slots.lerp, "out"),
    ops.Take: (elementwise.take, slots.take, "out"),
    ops.Join: (elementwise.join, slots.join, "out"),
    ops.RopeTable: (rope.rope_table, slots.rope_table, ""),
    ops.WindowAndBlocks: (cache.window_and_blocks, slots.window_and_blocks, ""),
    ops.Convolve: (recurrent.convolve, slots.convolve, ""),
    ops.Previous: (recurrent.convolve, slots.previous, ""),
    ops.Compress: (compress.compress, slots.compress, ""),
    ops.SsmScan: (recurrent.ssm_scan, slots.ssm_scan, ""),
    ops.ColumnScan: (recurrent.column_scan, slots.column_scan, ""),
    ops.Wkv: (recurrent.wkv, slots.wkv, ""),
}


@LOWER.register(*_ENTRIES)
def _entry(b: CPULowering, op: Op) -> None:
    operation, fill, field = _ENTRIES[type(op)]
    b.emit(operation, **fill(b, op), **(rows(getattr(op, field)) if field else {}))


# ---------------------------------------------------------------- element by element


@LOWER.register(ops.Embed)
def _embed(b: CPULowering, op: ops.Embed) -> None:
    t, width = op.weight.tensor.type, op.out.width
    thread_bytes = elementwise.embed_scratch_bytes(t, width)
    b.limit_ids(op)
    b.emit(
        elementwise.embed(t),
        out=b.buffer(op.out),
        weight=b.weight(op.weight),
        row_bytes=row_bytes_of(op.weight),
        width=width,
        scale=op.scale,
        scratch=b.array(np.zeros(max(1, thread_bytes * b.threads), np.uint8)),
        scratch_bytes=thread_bytes,
        rows_by=elementwise.ROWS_BY["position" if op.by_position else "token"],
    )


@LOWER.register(ops.SelectOutputs)
def _select_outputs(b: CPULowering, op: ops.SelectOutputs) -> None:
    b.emit(elementwise.select_outputs, out=b.buffer(op.out), x=b.buffer(op.x), width=op.x.width * op.x.per)


@LOWER.register(ops.Add)
def _add(b: CPULowering, op: ops.Add) -> None:
    shared = op.a if b.buffer(op.a).nbytes == b.buffer(op.out).nbytes else op.b
    slots = {"out": b.buffer(op.out), "a": b.buffer(op.a), "b": b.buffer(op.b)}
    entry = b.emit(elementwise.add, width=op.out.width, **slots, **rows(op.out))
    b.may_overwrite(entry, op.out, shared)


def _map(b: CPULowering, operation: TapeOp, out: Value, x: Value, **extra: Slot) -> None:
    entry = b.emit(operation, out=b.buffer(out), x=b.buffer(x), width=out.width, **rows(out), **extra)
    b.may_overwrite(entry, out, x)


@LOWER.register(*_MAPS)
def _elementwise(b: CPULowering, op: ops.Map) -> None:
    _map(b, _MAPS[type(op)], op.out, op.x, **slots.numbers(op))


@LOWER.register(ops.MultiplyBy)
def _multiply_by(b: CPULowering, op: ops.MultiplyBy) -> None:
    operation = elementwise.plus_vector if op.kind == "plus" else elementwise.multiply_by
    _map(b, operation, op.out, op.x, **slots.vector_slots(b, op))


@LOWER.register(ops.Norm)
def _norm(b: CPULowering, op: ops.Norm) -> None:
    _map(b, norms.norm(op.kind), op.out, op.x, eps=op.eps, group=op.group, **b.norm_vectors(op))


@LOWER.register(ops.Glu)
def _glu(b: CPULowering, op: ops.Glu) -> None:
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


@LOWER.register(ops.Activate)
def _activate(b: CPULowering, op: ops.Activate) -> None:
    if op.activation.kind == "softplus":
        _map(b, elementwise.softplus, op.out, op.x, by=0.0)
        return
    operation = glu.activate(op.activation)
    limits = {name: value for name, value in glu.limits(op.activation).items() if name in operation.slots}
    _map(b, operation, op.out, op.x, **limits)


@LOWER.register(ops.ToLength)
def _to_length(b: CPULowering, op: ops.ToLength) -> None:
    _map(b, mixing.to_length, op.out, op.x, like=b.buffer(op.like), group=op.group)


@LOWER.register(ops.Bonus)
def _bonus(b: CPULowering, op: ops.Bonus) -> None:
    entry = b.emit(mixing.bonus, **slots.bonus(b, op), **rows(op.out))
    b.may_overwrite(entry, op.out, op.x)


# ---------------------------------------------------------------- matrices


def _multiply(
    b: CPULowering,
    out: Value,
    x: Value,
    weight: Matrix,
    bias: Matrix | None,
    scale: Matrix | None,
    thread_bytes: int,
    independent: bool = False,
) -> None:
    """Emit out = scale * (weight x) + bias; thread_bytes: scratch of a thread, equal for entries that run together."""
    activations, stride = b.activations(x, weight)
    entry = b.emit(
        matmul.mul_mat,
        products=b.products_of(weight),
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
        scratch=b.scratch(thread_bytes * b.threads),
        scratch_bytes=thread_bytes,
        at_once=matmul.cached_rows(stride),
        **rows(x),
    )
    entry.independent, entry.weights = independent, (weight,)


def _scratch_of(b: CPULowering, weights: Iterable[Matrix]) -> int:
    most = max(matmul.scratch_bytes(b.multiplied_type(w), w.n_in) for w in weights)
    return round_up(most, LINE)


@LOWER.register(ops.MulMat)
def _mul_mat(b: CPULowering, op: ops.MulMat) -> None:
    _multiply(b, op.out, op.x, op.weight, op.bias, op.scale, _scratch_of(b, [op.weight]))


@LOWER.register(ops.MulMats)
def _mul_mats(b: CPULowering, op: ops.MulMats) -> None:
    for weight in op.weights:
        b.activations(op.x, weight)  # all before the first product, so that products do not wait for each other
    thread_bytes = _scratch_of(b, op.weights)
    for out, weight, bias, scale in zip(op.outs, op.weights, op.biases, op.scales, strict=True):
        _multiply(b, out, op.x, weight, bias, scale, thread_bytes, independent=out is not op.outs[-1])


@LOWER.register(ops.UpGate)
def _up_gate(b: CPULowering, op: ops.UpGate) -> None:
    slots: dict[str, Slot] = {}
    parts = (("up", op.up, op.up_bias, op.up_scale), ("gate", op.gate, op.gate_bias, op.gate_scale))
    for name, weight, bias, scale in parts:
        activations, stride = b.activations(op.x, weight)
        slots |= {
            name: b.weight(weight),
            f"{name}_row_bytes": row_bytes_of(weight),
            f"{name}_products": b.products_of(weight),
            f"{name}_x": activations,
            f"{name}_x_stride": stride,
            f"{name}_bias": b.vector(bias),
            f"{name}_scale": b.vector(scale),
        }
    types = b.multiplied_type(op.up), b.multiplied_type(op.gate)
    thread_bytes = round_up(matmul.up_gate_scratch_bytes(*types, op.up.n_in), LINE)
    entry = b.emit(
        matmul.up_gate(op.activation),
        n_in=op.up.n_in,
        n_out=op.up.n_out,
        out=b.buffer(op.out),
        out_stride=4 * op.out.width,
        scratch=b.scratch(thread_bytes * b.threads),
        scratch_bytes=thread_bytes,
        at_once=matmul.cached_rows(stride),
        **rows(op.x),
        **slots,
        **glu.limits(op.activation),
    )
    entry.weights = (op.up, op.gate)


@LOWER.register(ops.MulMatHeads)
def _mul_mat_heads(b: CPULowering, op: ops.MulMatHeads) -> None:
    """Emit an entry for each head; they do not wait for each other."""
    weight, heads = op.weight, op.x.width // op.weight.n_in
    start = b.weight(op.weight)
    activations, stride = b.activations(op.x, weight)
    thread_bytes = _scratch_of(b, [weight])
    for head in range(heads):
        entry = b.emit(
            matmul.mul_mat,
            products=b.products_of(weight),
            x=BufferOffset(activations, stride * head),
            x_stride=stride * heads,
            w=start + head * expert_bytes_of(weight),
            row_bytes=row_bytes_of(weight),
            n_in=weight.n_in,
            n_out=weight.n_out,
            out=BufferOffset(b.buffer(op.out), 4 * weight.n_out * head),
            out_stride=4 * op.out.width,
            bias=0,
            scale=0,
            scratch=b.scratch(thread_bytes * b.threads),
            scratch_bytes=thread_bytes,
            at_once=matmul.cached_rows(stride),
            **rows(op.x),
        )
        entry.independent = head + 1 < heads
        entry.weights = (replace(weight, tensor=replace(weight.tensor, shape=weight.tensor.shape[:2])),)


# ---------------------------------------------------------------- experts


def _expert_slots(b: CPULowering, out: Value, x: Value, ids: Value, weight: Matrix) -> dict[str, Slot]:
    thread_bytes = round_up(moe.scratch_bytes(b.multiplied_type(weight), weight.n_in), LINE)
    scratch_slots: dict[str, Slot] = {
        "products": b.products_of(weight),
        "scratch": b.scratch(thread_bytes * b.threads),
        "scratch_bytes": thread_bytes,
    }
    return slots.expert_slots(b, out, x, ids, weight) | scratch_slots


@LOWER.register(ops.MulMatId)
def _mul_mat_id(b: CPULowering, op: ops.MulMatId) -> None:
    expert_slots = _expert_slots(b, op.out, op.x, op.ids, op.weight) | slots.expert_vector_slots(
        b, op.weight, op.bias, op.scale
    )
    b.emit(moe.mul_mat_id, w=b.weight(op.weight), **expert_slots).weights = (op.weight,)


@LOWER.register(ops.UpGateId)
def _up_gate_id(b: CPULowering, op: ops.UpGateId) -> None:
    expert_slots = _expert_slots(b, op.out, op.x, op.ids, op.up) | {"up": b.weight(op.up), "gate": b.weight(op.gate)}
    expert_slots |= slots.expert_vector_slots(b, op.up, op.up_bias, op.up_scale, "up_")
    expert_slots |= slots.expert_vector_slots(b, op.gate, op.gate_bias, op.gate_scale, "gate_")
    entry = b.emit(moe.up_gate_id(op.activation), **expert_slots, **glu.limits(op.activation))
    entry.weights = (op.up, op.gate)


@LOWER.register(ops.Route)
def _route(b: CPULowering, op: ops.Route) -> None:
    b.emit(route.route, rows_of=int(op.logits.outputs), **slots.route(b, op), **slots.given_ids(b, op))


@LOWER.register(ops.Repeat)
def _repeat(b: CPULowering, op: ops.Repeat) -> None:
    sizes = {"width": op.x.width, "n_used": op.weights.width, "rows_of": int(op.x.outputs)}
    b.emit(route.repeat, **slots.buffers(b, op, "out", "x", "weights"), **sizes)


@LOWER.register(ops.Combine)
def _combine(b: CPULowering, op: ops.Combine) -> None:
    n_used = op.x.per * op.x.width // op.out.width
    sizes = {"width": op.out.width, "n_used": n_used, "rows_of": int(op.x.outputs)}
    b.emit(route.combine, **slots.buffers(b, op, "out", "x", "weights"), **sizes)


# ---------------------------------------------------------------- attention


@LOWER.register(ops.Rope)
def _rope(b: CPULowering, op: ops.Rope) -> None:
    part = {"head": op.head, "start": op.start, "n_rot": op.config.n_rot}
    _map(b, rope.rope(op.config.kind), op.out, op.x, table=b.buffer(op.table), **part)


@LOWER.register(ops.CacheWrite)
def _cache_write(b: CPULowering, op: ops.CacheWrite) -> None:
    keys, values, _ = b.cache(op.cache)
    k_type, v_type = b.written_types()
    b.emit(
        cache.cache_write,
        k=b.buffer(op.k),
        v=0 if op.v is None else b.buffer(op.v),
        k_cache=keys,
        v_cache=values,
        k_type=k_type,
        v_type=v_type,
        k_width=op.cache.k_width,
        v_width=op.cache.v_width,
    )


@LOWER.register(ops.BlockWrite)
def _block_write(b: CPULowering, op: ops.BlockWrite) -> None:
    keys, _, _ = b.cache(op.cache)
    b.emit(cache.block_write, k_cache=keys, k_type=b.written_types()[0], **slots.block_write(b, op))


@LOWER.register(ops.LightningIndexer)
def _lightning_indexer(b: CPULowering, op: ops.LightningIndexer) -> None:
    keys, _, kind = b.cache(op.cache)
    scratch = lightning_indexer.scratch_bytes(op.n_head, op.head, b.limits.n_ctx, b.threads)
    sizes = {"n_head": op.n_head, "head": op.head, "n_selected": op.out.width, "scale": op.scale}
    sizes |= {"ratio": op.cache.ratio or 1}
    b.emit(
        lightning_indexer.lightning_indexer,
        k_cache=keys,
        k_type=kind,
        scratch=b.scratch(scratch),
        **sizes,
        **slots.buffers(b, op, "out", "q", "weights"),
    )


@LOWER.register(ops.Attention)
def _attention(b: CPULowering, op: ops.Attention) -> None:
    keys, values, kind = b.cache(op.cache)
    numbers = {name: getattr(op, name) for name in ("n_head", "n_head_kv", "head_k", "head_v", "window")}
    floats = {"scale": op.scale, "softcap": op.softcap, "alibi": 0.0 if has_table(op) else op.alibi}
    b.emit(
        attention.attention,
        q=b.buffer(op.q),
        out=b.buffer(op.out),
        k_cache=keys,
        v_cache=values,
        k_type=kind,
        v_type=kind,
        sinks=b.vector(op.sinks),
        mask=MASKS.index(op.mask),
        biases=b.distance_biases(op),
        selected=0 if op.selected is None else b.buffer(op.selected),
        n_selected=0 if op.selected is None else op.selected.width,
        ratio=0 if op.selected is None else op.cache.ratio,
        scratch=b.scratch(attention.scratch_bytes(op.head_k, op.head_v, b.threads, op.selected is not None)),
        **numbers,
        **floats,
    )


# ---------------------------------------------------------------- recurrent layers


@LOWER.register(ops.DeltaNet)
def _delta_net(b: CPULowering, op: ops.DeltaNet) -> None:
    b.emit(recurrent.delta_net_by_row if op.by_row else recurrent.delta_net, **slots.delta_net(b, op))


LOWER |= observe.LOWER


def lower(b: CPULowering, op: Op) -> None:
    """Append the entries of an operation. Raises TypeNotSupported if this backend has none."""
    b.op = op
    LOWER[type(op)](b, op)
