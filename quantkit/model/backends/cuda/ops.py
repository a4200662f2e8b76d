"""Lowering of every operation to launches of a CUDA device; the twin of cpu/ops.py, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quantkit.kernels.cuda.attention import attention, cache, lightning_indexer
from quantkit.kernels.cuda.core.kernel import Shape
from quantkit.kernels.cuda.layer import elementwise, glu, mixing, norms_rope, recurrent, route
from quantkit.kernels.cuda.matmul import activations
from quantkit.kernels.cuda.unpack import dequantize
from quantkit.kernels.parameters import MASKS
from quantkit.model import ops
from quantkit.model.backends import slots
from quantkit.model.backends.arena import Slot
from quantkit.model.backends.cuda import lower_fused, observe, products
from quantkit.model.backends.cuda.fuse.formats import AttentionWithFormat
from quantkit.model.backends.cuda.lowering import CUDALowering, Rows
from quantkit.model.backends.cuda.products import emit_glu
from quantkit.model.backends.distance_bias import has_table
from quantkit.model.backends.lowering import row_bytes_of
from quantkit.model.ops import Op, OpTable, Value

LOWER = OpTable("the cuda backend")

#: Elementwise operations of one input and numbers (``slots.numbers``).
_MAPS = {
    ops.Scale: elementwise.scale,
    ops.Shift: elementwise.shift,
    ops.Softcap: elementwise.softcap,
    ops.Clamp: elementwise.clamp,
    ops.Xielu: elementwise.xielu,
}
#: Operations whose launch has the slots of all devices, and the width of their result.
_LAUNCHES: dict[type[Op], tuple[Callable[[int, int], Shape], Callable[..., slots.Slots]]] = {
    ops.Lookup: (elementwise.lookup, slots.lookup),
    ops.Mix: (mixing.mix, slots.mix),
    ops.Lerp: (mixing.lerp, slots.lerp),
    ops.Take: (elementwise.take, slots.take),
    ops.Join: (elementwise.join, slots.join),
}


@LOWER.register(*_LAUNCHES)
def _launch(b: CUDALowering, op: ops.Map) -> None:
    choose, fill = _LAUNCHES[type(op)]
    b.emit(partial(choose, op.out.width), op.out, **fill(b, op))


# ---------------------------------------------------------------- element by element


@LOWER.register(ops.Embed)
def _embed(b: CUDALowering, op: ops.Embed) -> None:
    t, width = op.weight.tensor.type, op.out.width
    b.limit_ids(op)
    slots: dict[str, Slot] = {"w": b.weight(op.weight), "row_bytes": row_bytes_of(op.weight), "scale": op.scale}
    slots["by_position"] = int(op.by_position)
    out = b.buffer(op.out)
    b.emit(lambda rows: dequantize.embed(t, width, rows), op.out, out=out, n=width, out_stride=4 * width, **slots)


@LOWER.register(ops.SelectOutputs)
def _select_outputs(b: CUDALowering, op: ops.SelectOutputs) -> None:
    width = op.x.width * op.x.per
    out, x = b.buffer(op.out), b.buffer(op.x)
    b.emit(lambda rows: elementwise.select_outputs(width, rows), op.out, 1, out=out, x=x, width=width)


def _map(b: CUDALowering, choose: Callable[[int, int], Shape], out: Value, x: Value, **extra: Slot | Rows) -> None:
    """Emit out = f(x), elementwise; out may overwrite x."""
    width = out.width
    entry = b.emit(lambda rows: choose(width, rows), out, out=b.buffer(out), x=b.buffer(x), width=width, **extra)
    b.may_overwrite(entry, out, x)


@LOWER.register(*_MAPS)
def _elementwise(b: CUDALowering, op: ops.Map) -> None:
    _map(b, _MAPS[type(op)], op.out, op.x, **slots.numbers(op))


@LOWER.register(ops.Add)
def _add(b: CUDALowering, op: ops.Add) -> None:
    width = op.out.width
    slots = {"out": b.buffer(op.out), "a": b.buffer(op.a), "b": b.buffer(op.b)}
    entry = b.emit(lambda rows: elementwise.add(width, rows), op.out, width=width, **slots)
    b.may_overwrite(entry, op.out, op.a)


@LOWER.register(ops.ScaleByPosition)
def _scale_by_position(b: CUDALowering, op: ops.ScaleByPosition) -> None:
    row_slots = {"rows_of": int(op.out.outputs), "per": op.out.per}
    _map(b, elementwise.scale_by_position, op.out, op.x, **slots.numbers(op), **row_slots)


@LOWER.register(ops.MultiplyBy)
def _multiply_by(b: CUDALowering, op: ops.MultiplyBy) -> None:
    choose = elementwise.plus_vector if op.kind == "plus" else elementwise.multiply_by
    _map(b, choose, op.out, op.x, **slots.vector_slots(b, op))


@LOWER.register(ops.Norm)
def _norm(b: CUDALowering, op: ops.Norm) -> None:
    per_row, kind = op.out.width // op.group, op.kind
    entry = b.emit(
        lambda rows: norms_rope.norm(kind, rows * per_row),
        op.out,
        x=b.buffer(op.x),
        out=b.buffer(op.out),
        **b.norm_vectors(op),
        groups=Rows(per_row),
        group=op.group,
        per_row=per_row,
        eps=op.eps,
    )
    b.may_overwrite(entry, op.out, op.x)


@LOWER.register(ops.Glu)
def _glu(b: CUDALowering, op: ops.Glu) -> None:
    if op.up is None:
        emit_glu(b, op.activation, op.out, b.buffer(op.gate), op.out.width, 0)
    else:
        entry = emit_glu(b, op.activation, op.out, b.buffer(op.gate), op.gate.width, b.buffer(op.up))
        b.may_overwrite(entry, op.out, op.up)


@LOWER.register(ops.Activate)
def _activate(b: CUDALowering, op: ops.Activate) -> None:
    activation = op.activation
    constants = {name: value for name, value in glu.limits(activation).items() if name != "up_limit"}
    _map(b, lambda width, rows: glu.activate(activation, width, rows), op.out, op.x, **constants)


@LOWER.register(ops.Exceed)
def _exceed(b: CUDALowering, op: ops.Exceed) -> None:
    _map(b, lambda width, rows: mixing.exceed(rows), op.out, op.x, **slots.numbers(op))


@LOWER.register(ops.ToLength)
def _to_length(b: CUDALowering, op: ops.ToLength) -> None:
    n = op.out.width // op.group
    _map(b, lambda width, rows: mixing.to_length(n, rows), op.out, op.x, like=b.buffer(op.like), group=op.group)


@LOWER.register(ops.StreamWeights)
def _stream_weights(b: CUDALowering, op: ops.StreamWeights) -> None:
    b.emit(mixing.stream_weights, op.x, **slots.stream_weights(b, op))


@LOWER.register(ops.Bonus)
def _bonus(b: CUDALowering, op: ops.Bonus) -> None:
    n = op.x.width // op.head
    entry = b.emit(lambda rows: mixing.bonus(rows * n), op.out, **slots.bonus(b, op))
    b.may_overwrite(entry, op.out, op.x)


# ---------------------------------------------------------------- experts


@LOWER.register(ops.Repeat)
def _repeat(b: CUDALowering, op: ops.Repeat) -> None:
    width, n_used = op.x.width, op.weights.width
    buffers = slots.buffers(b, op, "out", "x", "weights")
    b.emit(partial(route.repeat, width, n_used), op.x, width=width, n_used=n_used, **buffers)


@LOWER.register(ops.Combine)
def _combine(b: CUDALowering, op: ops.Combine) -> None:
    width, buffers = op.out.width, slots.buffers(b, op, "out", "x", "weights")
    b.emit(partial(route.combine, width), op.out, width=width, n_used=op.x.per * op.x.width // width, **buffers)


# ---------------------------------------------------------------- attention


@LOWER.register(ops.RopeTable)
def _rope_table(b: CUDALowering, op: ops.RopeTable) -> None:
    b.emit(lambda rows: norms_rope.rope_table(rows, op.config.n_rot // 2), op.out, **slots.rope_table(b, op))


@LOWER.register(ops.Rope)
def _rope(b: CUDALowering, op: ops.Rope) -> None:
    kind = op.config.kind
    head = op.head
    start = op.start
    n_rot = op.config.n_rot
    _map(
        b,
        lambda width, rows: norms_rope.rope(kind, rows, width, head, n_rot),
        op.out,
        op.x,
        table=b.buffer(op.table),
        head=head,
        start=start,
        n_rot=n_rot,
    )


@LOWER.register(ops.CacheWrite)
def _cache_write(b: CUDALowering, op: ops.CacheWrite) -> None:
    keys, values, kind = b.cache(op.cache)
    widths = op.cache.k_width, op.cache.v_width
    b.emit(
        lambda rows: cache.cache_write(kind, rows, *widths),
        op.k,
        k=b.buffer(op.k),
        v=0 if op.v is None else b.buffer(op.v),
        k_cache=keys,
        v_cache=values,
        k_width=widths[0],
        v_width=widths[1],
    )


@LOWER.register(ops.BlockWrite)
def _block_write(b: CUDALowering, op: ops.BlockWrite) -> None:
    keys, _, kind = b.cache(op.cache)
    b.emit(partial(cache.block_write, kind, op.k.width), op.k, k_cache=keys, **slots.block_write(b, op))


@LOWER.register(ops.WindowAndBlocks)
def _window_and_blocks(b: CUDALowering, op: ops.WindowAndBlocks) -> None:
    b.emit(partial(cache.window_and_blocks, op.out.width), op.out, **slots.window_and_blocks(b, op))


@LOWER.register(ops.LightningIndexer)
def _lightning_indexer(b: CUDALowering, op: ops.LightningIndexer) -> None:
    """Emit two launches for every group of tokens whose scores fit scratch."""
    keys, _, kind = b.cache(op.cache)
    n_ctx, n_ubatch = b.limits.n_ctx, b.limits.n_ubatch
    n_tokens = lightning_indexer.tokens_at_once(n_ctx, n_ubatch)
    scores = b.scratch(lightning_indexer.scratch_bytes(n_ctx, n_tokens))
    common: dict[str, Slot | Rows] = {"scores": scores, "rows": Rows(), "n_selected": op.out.width}
    common |= {"ratio": op.cache.ratio or 1}
    for first in range(0, n_ubatch, n_tokens):
        b.emit(
            partial(lightning_indexer.indexer_scores, kind, op.head, n_ctx, first, n_tokens),
            op.out,
            k_cache=keys,
            n_head=op.n_head,
            scale=op.scale,
            first=first,
            **slots.buffers(b, op, "q", "weights"),
            **common,
        )
        b.emit(
            partial(lightning_indexer.indexer_select, first, n_tokens),
            op.out,
            out=b.buffer(op.out),
            first=first,
            **common,
        )


@LOWER.register(ops.Attention)
def _attention(b: CUDALowering, op: ops.Attention, form: str = "", q_width: int = 0) -> None:
    """Emit attention; form: an activation format that the result is also written in, in rows of q_width."""
    keys, values, kind = b.cache(op.cache)
    selected = 0 if op.selected is None else op.selected.width
    sizes = op.n_head, op.n_head_kv, op.head_k, op.head_v
    layer = attention.AttentionLayer(kind, *sizes, b.limits.n_ctx, not op.cache.v_width, selected, has_table(op))
    choose_kernel = partial(attention.attention, layer, capability=b.device.capability)
    n_ubatch = b.limits.n_ubatch
    scratch = b.scratch(attention.most_scratch(layer, n_ubatch, b.device.capability))
    common: dict[str, Slot] = {"out": b.buffer(op.out), "sinks": b.vector(op.sinks), "scratch": scratch}
    common |= {"n_head": op.n_head}
    entry = b.emit(
        lambda rows: choose_kernel(rows).attend,
        op.out,
        q=b.buffer(op.q),
        k_cache=keys,
        v_cache=values,
        n_head_kv=op.n_head_kv,
        scale=op.scale,
        softcap=op.softcap,
        mask=MASKS.index(op.mask),
        window=op.window,
        alibi=0.0 if has_table(op) else op.alibi,
        biases=b.distance_biases(op),
        selected=0 if op.selected is None else b.buffer(op.selected),
        n_selected=selected,
        ratio=op.cache.ratio if selected else 0,
        **common,
    )
    entry.by_rows = lambda rows: {"splits": choose_kernel(rows).splits}
    common |= {"head_v": op.head_v}
    combine_to = partial(attention.combine_to, head_v=op.head_v)
    rows_of_token = op.out.width // q_width if q_width else 1

    def combine(rows: int) -> Shape | None:
        return None if form and combine_to(choose_kernel(rows)) else choose_kernel(rows).combine

    b.emit(combine, op.out, rows=Rows(op.n_head), **common).by_rows = entry.by_rows
    if not form:
        return
    buffer = b.activation_buffer(op.out, form, q_width)
    format_slots: dict[str, Slot] = {"format": activations.KINDS.index(form), "quantized": buffer, "q_width": q_width}
    format_slots |= {"counters": b.counters(n_ubatch * rows_of_token * -(-q_width // 256)), **common}
    b.emit(
        lambda rows: combine_to(choose_kernel(rows)), op.out, rows=Rows(op.n_head), **format_slots
    ).by_rows = entry.by_rows
    b.convert_activations(op.out, form, q_width, buffer, lambda rows: combine_to(choose_kernel(rows)) is not None)


@LOWER.register(AttentionWithFormat)
def _attention_to(b: CUDALowering, op: AttentionWithFormat) -> None:
    _attention(b, op, op.format, op.q_width)


# ---------------------------------------------------------------- recurrent layers


@LOWER.register(ops.Convolve)
def _convolve(b: CUDALowering, op: ops.Convolve) -> None:
    shape = recurrent.convolve(op.weight.n_in, op.x.width)
    b.emit(lambda rows: shape, op.out, **slots.convolve(b, op))


@LOWER.register(ops.Compress)
def _compress(b: CUDALowering, op: ops.Compress) -> None:
    shape = mixing.compress(op.out.width)
    b.emit(lambda rows: shape, op.out, **slots.compress(b, op))


@LOWER.register(ops.DeltaNet)
def _delta_net(b: CUDALowering, op: ops.DeltaNet) -> None:
    head_k, head_v = op.k.width // op.n_k_head, op.v.width // op.n_v_head
    shape = recurrent.delta_net(op.n_v_head, head_k, head_v, by_row=op.by_row)
    b.emit(lambda rows: shape, op.out, **slots.delta_net(b, op))


@LOWER.register(ops.SsmScan)
def _ssm_scan(b: CUDALowering, op: ops.SsmScan) -> None:
    head, d_state = op.x.width // op.n_head, op.b.width // op.n_group
    shape = recurrent.ssm_scan(op.n_head, head, d_state)
    b.emit(lambda rows: shape, op.out, **slots.ssm_scan(b, op))


@LOWER.register(ops.ColumnScan)
def _column_scan(b: CUDALowering, op: ops.ColumnScan) -> None:
    shape = recurrent.column_scan(op.x.width, op.b.width)
    b.emit(lambda rows: shape, op.out, **slots.column_scan(b, op))


@LOWER.register(ops.Previous)
def _previous(b: CUDALowering, op: ops.Previous) -> None:
    shape = recurrent.convolve(2, op.x.width)
    b.emit(lambda rows: shape, op.out, **slots.previous(b, op))


@LOWER.register(ops.Wkv)
def _wkv(b: CUDALowering, op: ops.Wkv) -> None:
    shape = recurrent.wkv(op.n_head, op.r.width // op.n_head)
    b.emit(lambda rows: shape, op.out, **slots.wkv(b, op))


LOWER |= {**products.LOWER, **lower_fused.LOWER, **observe.LOWER}


def lower(b: CUDALowering, op: Op) -> None:
    """Append the launches of an operation; TypeNotSupported if this backend has none."""
    b.op = op
    LOWER[type(op)](b, op)
