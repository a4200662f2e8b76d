"""Every operation of the graph as launches of a CUDA device; the twin of cpu_ops.py, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from quantkit.errors import TypeNotSupported
from quantkit.kernels.cuda import (
    activations,
    attention,
    cache,
    dequantize,
    elementwise,
    glu,
    norms,
    recurrent,
    rope,
    route,
)
from quantkit.kernels.cuda.operation import Shape
from quantkit.kernels.rope_constants import rope_constants, rope_scalars
from quantkit.model.backends import cuda_joined, cuda_looking_on, cuda_products
from quantkit.model.backends.arena import Slot
from quantkit.model.backends.cuda_formats import AttentionTo
from quantkit.model.backends.cuda_lowering import CUDALowering, Rows
from quantkit.model.backends.cuda_products import gated
from quantkit.model.backends.lowering import row_bytes_of
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
    MultiplyBy,
    Norm,
    Op,
    Repeat,
    Rope,
    RopeTable,
    Scale,
    ScaleByPosition,
    SelectOutputs,
    Softcap,
    Take,
    Value,
)

# ---------------------------------------------------------------- element by element


def _embed(b: CUDALowering, op: Embed) -> None:
    t, width = op.weight.tensor.type, op.out.width
    b.n_vocab = op.weight.n_out
    slots: dict[str, Slot] = {"w": b.weight(op.weight), "row_bytes": row_bytes_of(op.weight), "scale": op.scale}
    out = b.buffer(op.out)
    b.emit(lambda rows: dequantize.embed(t, width, rows), op.out, out=out, n=width, out_stride=4 * width, **slots)


def _select_outputs(b: CUDALowering, op: SelectOutputs) -> None:
    width = op.x.width * op.x.per
    out, x = b.buffer(op.out), b.buffer(op.x)
    b.emit(lambda rows: elementwise.select_outputs(width, rows), op.out, 1, out=out, x=x, width=width)


def _map(b: CUDALowering, choose: Callable[[int, int], Shape], out: Value, x: Value, **more: Slot | Rows) -> None:
    """out = f(x), element by element: the output may lie where the input does."""
    width = out.width
    entry = b.emit(lambda rows: choose(width, rows), out, out=b.buffer(out), x=b.buffer(x), width=width, **more)
    b.may_overwrite(entry, out, x)


def _add(b: CUDALowering, op: Add) -> None:
    width = op.out.width
    slots = {"out": b.buffer(op.out), "a": b.buffer(op.a), "b": b.buffer(op.b)}
    entry = b.emit(lambda rows: elementwise.add(width, rows), op.out, width=width, **slots)
    b.may_overwrite(entry, op.out, op.a)


def _scale(b: CUDALowering, op: Scale) -> None:
    _map(b, elementwise.scale, op.out, op.x, by=op.factor)


def _scale_by_position(b: CUDALowering, op: ScaleByPosition) -> None:
    numbers = {"floor_scale": float(op.floor_scale), "alpha": op.alpha, "offset": op.offset}
    of = {"rows_of": int(op.out.outputs), "per": op.out.per}
    _map(b, elementwise.scale_by_position, op.out, op.x, **numbers, **of)


def _multiply_by(b: CUDALowering, op: MultiplyBy) -> None:
    vector = b.vector_values(op.vector)
    choose = elementwise.plus_vector if op.add else elementwise.multiply_by
    _map(b, choose, op.out, op.x, vector=b.array(vector), n=len(vector))


def _softcap(b: CUDALowering, op: Softcap) -> None:
    _map(b, elementwise.softcap, op.out, op.x, by=op.cap)


def _clamp(b: CUDALowering, op: Clamp) -> None:
    _map(b, elementwise.clamp, op.out, op.x, by=op.limit)


def _norm(b: CUDALowering, op: Norm) -> None:
    per_row, kind = op.out.width // op.group, op.kind
    entry = b.emit(
        lambda rows: norms.norm(kind, rows * per_row),
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


def _glu(b: CUDALowering, op: Glu) -> None:
    if op.up is None:
        gated(b, op.activation, op.out, b.buffer(op.gate), op.out.width, 0)
    else:
        entry = gated(b, op.activation, op.out, b.buffer(op.gate), op.gate.width, b.buffer(op.up))
        b.may_overwrite(entry, op.out, op.up)


def _activate(b: CUDALowering, op: Activate) -> None:
    activation = op.activation
    constants = {name: value for name, value in glu.limits(activation).items() if name != "up_limit"}
    _map(b, lambda width, rows: glu.activate(activation, width, rows), op.out, op.x, **constants)


def _take(b: CUDALowering, op: Take) -> None:
    width = op.out.width
    slots: dict[str, Slot] = {"out": b.buffer(op.out), "x": b.buffer(op.x), "x_width": op.x.width}
    choose = elementwise.take
    b.emit(lambda rows: choose(width, rows), op.out, width=width, start=op.start, period=op.period, **slots)


def _join(b: CUDALowering, op: Join) -> None:
    width = op.out.width
    b.emit(
        lambda rows: elementwise.join(width, rows),
        op.out,
        out=b.buffer(op.out),
        a=b.buffer(op.a),
        b=b.buffer(op.b),
        a_width=op.a.width,
        b_width=op.b.width,
        period_a=op.period_a,
        period_b=op.period_b,
    )


# ---------------------------------------------------------------- experts


def _repeat(b: CUDALowering, op: Repeat) -> None:
    slots: dict[str, Slot] = {"out": b.buffer(op.out), "x": b.buffer(op.x), "weights": b.buffer(op.weights)}
    width, n_used = op.x.width, op.out.per
    b.emit(lambda rows: route.repeat(width, n_used, rows), op.x, width=width, n_used=n_used, **slots)


def _combine(b: CUDALowering, op: Combine) -> None:
    weights: Slot = 0 if op.weights is None else b.buffer(op.weights)
    slots: dict[str, Slot] = {"out": b.buffer(op.out), "x": b.buffer(op.x), "weights": weights}
    width, n_used = op.x.width, op.x.per
    b.emit(lambda rows: route.combine(width, rows), op.out, width=width, n_used=n_used, **slots)


# ---------------------------------------------------------------- attention


def _rope_table(b: CUDALowering, op: RopeTable) -> None:
    factors = None if op.factors is None else b.vector_values(op.factors)
    constants, pairs = rope_constants(op.config, factors), op.config.n_rot // 2
    b.emit(
        lambda rows: rope.rope_table(rows, pairs),
        op.out,
        out=b.buffer(op.out),
        pairs=pairs,
        constants=b.array(constants),
        **rope_scalars(op.config),
    )


def _rope(b: CUDALowering, op: Rope) -> None:
    kind, head, start, n_rot = op.config.kind, op.head, op.start, op.config.n_rot
    _map(
        b,
        lambda width, rows: rope.rope(kind, rows, width, head, n_rot),
        op.out,
        op.x,
        table=b.buffer(op.table),
        head=head,
        start=start,
        n_rot=n_rot,
    )


def _cache_write(b: CUDALowering, op: CacheWrite) -> None:
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


def _attention(b: CUDALowering, op: Attention, form: str = "", q_width: int = 0) -> None:
    """form: a format of activations that the result is made in, too, rows of q_width."""
    keys, values, kind = b.cache(op.cache)
    n_ctx, mla, card = b.limits.n_ctx, not op.cache.v_width, b.device.capability
    sizes = kind, op.n_head, op.n_head_kv, op.head_k, op.head_v

    def way(rows: int) -> attention.Attention:
        return attention.attention(*sizes, rows, n_ctx, mla=mla, capability=card)

    scratch = b.scratch(attention.most_scratch(*sizes, b.limits.n_ubatch, n_ctx, mla=mla, capability=card))
    common: dict[str, Slot] = {"out": b.buffer(op.out), "sinks": b.vector(op.sinks), "scratch": scratch}
    common |= {"n_head": op.n_head}
    entry = b.emit(
        lambda rows: way(rows).attend,
        op.out,
        q=b.buffer(op.q),
        k_cache=keys,
        v_cache=values,
        n_head_kv=op.n_head_kv,
        scale=op.scale,
        softcap=op.softcap,
        mask=attention.MASKS[op.mask],
        window=op.window,
        alibi=op.alibi,
        **common,
    )
    entry.by_rows = lambda rows: {"splits": way(rows).splits}
    common |= {"head_v": op.head_v}
    joined = partial(attention.combine_to, head_v=op.head_v)
    rows_of_token = op.out.width // q_width if q_width else 1

    def combine(rows: int) -> Shape | None:
        return None if form and joined(way(rows)) else way(rows).combine

    b.emit(combine, op.out, rows=Rows(op.n_head), **common).by_rows = entry.by_rows
    if not form:
        return
    made = b.made_activations(op.out, form, q_width)
    to: dict[str, Slot] = {"format": activations.KINDS.index(form), "quantized": made, "q_width": q_width}
    to |= {"counters": b.counters(b.limits.n_ubatch * rows_of_token * -(-q_width // 256)), **common}
    b.emit(lambda rows: joined(way(rows)), op.out, rows=Rows(op.n_head), **to).by_rows = entry.by_rows
    b.remade(op.out, form, q_width, made, lambda rows: joined(way(rows)) is not None)


def _attention_to(b: CUDALowering, op: AttentionTo) -> None:
    _attention(b, op, op.format, op.q_width)


# ---------------------------------------------------------------- recurrent layers


def _convolve(b: CUDALowering, op: Convolve) -> None:
    width, taps = op.x.width, op.weight.n_in
    b.emit(
        lambda rows: recurrent.convolve(taps, width),
        op.out,
        x=b.buffer(op.x),
        out=b.buffer(op.out),
        taps=taps,
        weight=b.vector(op.weight),
        state=b.state(op.state),
        width=width,
    )


def _delta_net(b: CUDALowering, op: DeltaNet) -> None:
    values: dict[str, Slot] = {name: b.buffer(getattr(op, name)) for name in ("q", "k", "v", "g", "beta", "out")}
    head_k, head_v = op.k.width // op.n_k_head, op.v.width // op.n_v_head
    b.emit(
        lambda rows: recurrent.delta_net(op.n_v_head, head_k, head_v),
        op.out,
        state=b.state(op.state),
        n_k_head=op.n_k_head,
        n_v_head=op.n_v_head,
        head_k=head_k,
        head_v=head_v,
        scale=op.scale,
        tiled=int(op.tiled),
        **values,
    )


LOWER: Mapping[type[Op], Callable[[CUDALowering, Any], None]] = {
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
    Repeat: _repeat,
    Combine: _combine,
    RopeTable: _rope_table,
    Rope: _rope,
    CacheWrite: _cache_write,
    Attention: _attention,
    AttentionTo: _attention_to,
    Convolve: _convolve,
    DeltaNet: _delta_net,
    **cuda_products.LOWER,
    **cuda_joined.LOWER,
    **cuda_looking_on.LOWER,
}


def lower(b: CUDALowering, op: Op) -> None:
    """Append the launches of an operation; TypeNotSupported if this backend has none for it."""
    if type(op) not in LOWER:
        raise TypeNotSupported(f"the cuda backend has no {type(op).__name__}")
    b.op = op
    LOWER[type(op)](b, op)
