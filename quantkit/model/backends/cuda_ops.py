"""Every operation of the graph as launches of a CUDA device; the twin of cpu_ops.py, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    mat_mat,
    mat_vec,
    mat_vec_several,
    norms,
    recurrent,
    rope,
    route,
)
from quantkit.kernels.cuda.operation import Shape
from quantkit.kernels.parameters import Activation
from quantkit.kernels.rope_constants import rope_constants, rope_scalars
from quantkit.model.backends import cuda_joined, cuda_looking_on
from quantkit.model.backends.arena import Buffer, Slot, Within
from quantkit.model.backends.cuda_joins import AttentionTo
from quantkit.model.backends.cuda_lowering import FEW_ROWS, CUDALowering, GemmEntry, KernelEntry, Rows
from quantkit.model.backends.cuda_parts import MulMatHeadsInto
from quantkit.model.backends.lowering import expert_bytes_of, row_bytes_of
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
from quantkit.types import BY_NAME, TensorType

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


def _gate(b: CUDALowering, activation: Activation, out: Value, gate: Buffer, gate_width: int, up: Slot) -> KernelEntry:
    width = out.width
    return b.emit(
        lambda rows: glu.glu(activation, width, rows),
        out,
        out=b.buffer(out),
        gate=gate,
        up=up,
        width=width,
        gate_width=gate_width,
        **glu.limits(activation),
    )


def _glu(b: CUDALowering, op: Glu) -> None:
    if op.up is None:
        _gate(b, op.activation, op.out, b.buffer(op.gate), op.out.width, 0)
    else:
        entry = _gate(b, op.activation, op.out, b.buffer(op.gate), op.gate.width, b.buffer(op.up))
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


# ---------------------------------------------------------------- matrices


@dataclass(frozen=True)
class _Product:
    """out = scale * (weight x) + bias"""

    out: Value
    weight: Matrix
    bias: Matrix | None
    scale: Matrix | None

    def type_name(self) -> str:
        return self.weight.tensor.type.name

    def slots(self, b: CUDALowering) -> dict[str, Slot]:
        return {
            "w": b.weight(self.weight),
            "n_out": self.weight.n_out,
            "out": b.buffer(self.out),
            "bias": b.vector(self.bias),
            "scale": b.vector(self.scale),
        }


def _multiply(b: CUDALowering, x: Value, products: Sequence[_Product]) -> None:
    """Multiply weights whose types go together: in one launch, if rows are few."""
    together, card, n_in = len(products) > 1, b.device.capability, products[0].weight.n_in
    activations, stride = b.activations(x, products[0].weight)
    common: dict[str, Slot] = {"x": activations, "x_stride": stride, "n_in": n_in}
    each, weights = [product.slots(b) for product in products], tuple(product.weight for product in products)
    types = [weight.tensor.type for weight in weights]
    if together:
        n_outs = [weight.n_out for weight in weights]

        def several(rows: int) -> Shape | None:
            return mat_vec_several.mul_mats(types, n_in, n_outs, rows) if rows <= FEW_ROWS else None

        slots = {**common, **mat_vec_several.slots(each), "n_first": types.count(types[0])}
        slots |= {"row_bytes": row_bytes_of(weights[0]), "other_row_bytes": row_bytes_of(weights[-1])}
        b.emit(several, x, **slots).weights = weights
    for product, t, slots in zip(products, types, each, strict=True):
        cublas = b.backend.cublas and t.name != "F32"  # those are strict

        def choose(
            rows: int, t: TensorType = t, n_out: int = product.weight.n_out, cublas: bool = cublas
        ) -> Shape | None:
            if rows > FEW_ROWS:
                if cublas:
                    return None
                return mat_mat.mul_mat(t, n_in, n_out, rows, card)
            return None if together else mat_vec.mul_mat(t, n_in, n_out, rows)

        slots |= {"row_bytes": row_bytes_of(product.weight), "out_stride": 4 * product.out.width, **common}
        b.emit(choose, x, **slots).weights = (product.weight,)
        if cublas:
            _by_cublas(b, x, product)


def _by_cublas(b: CUDALowering, x: Value, product: _Product) -> None:
    """Round x, and unpack the weight, to bf16; multiply; scale and bias by themselves."""
    weight, out = product.weight, b.buffer(product.out)
    t, n_in, n_out = weight.tensor.type, weight.n_in, weight.n_out
    to: dict[str, Slot] = {"out_stride": 2 * n_in, "n": n_in, "to": dequantize.OUTPUTS.index("bf16")}
    rounded = Buffer(f"{x.name} (bf16)", 2 * b.limits.n_ubatch * x.per * n_in)
    unpacked = Buffer(f"{weight} (bf16)", 2 * n_out * n_in)

    def many(shape: Callable[[int], Shape], **slots: Slot) -> None:
        b.emit(lambda rows: shape(rows) if rows > FEW_ROWS else None, x, **slots)

    floats = BY_NAME["F32"]
    many(lambda rows: dequantize.dequantize(floats, n_in, rows), w=b.buffer(x), row_bytes=4 * n_in, out=rounded, **to)
    unpacking: dict[str, Slot] = {"w": b.weight(weight), "row_bytes": row_bytes_of(weight), "rows": n_out, **to}
    many(lambda rows: dequantize.dequantize(t, n_in, n_out), out=unpacked, **unpacking)
    slots: dict[str, Slot] = {"x": rounded, "w": unpacked, "out": out}
    b.entries.append(GemmEntry(b.op, slots=slots, outputs=x.outputs, per=x.per, n_out=n_out, n_in=n_in))
    then: dict[str, Slot] = {"x": out, "out": out, "width": n_out}
    if product.scale is not None:
        many(lambda rows: elementwise.multiply_by(n_out, rows), vector=b.vector(product.scale), n=1, **then)
    if product.bias is not None:
        many(lambda rows: elementwise.plus_vector(n_out, rows), vector=b.vector(product.bias), n=n_out, **then)


def _mul_mat(b: CUDALowering, op: MulMat) -> None:
    _multiply(b, op.x, [_Product(op.out, op.weight, op.bias, op.scale)])


def _mul_mats(b: CUDALowering, op: MulMats) -> None:
    """Of a family as many go together as a launch takes, and of no more than two types."""
    groups: dict[str, list[_Product]] = {}
    for product in sorted(map(_Product, op.outs, op.weights, op.biases, op.scales), key=_Product.type_name):
        group = groups.setdefault(mat_vec_several.family(product.weight.tensor.type), [])
        types = {other.type_name() for other in (*group, product)}
        if len(group) == mat_vec_several.MAX_MATRICES or len(types) > 2:
            _multiply(b, op.x, group)
            group.clear()
        group.append(product)
    for group in groups.values():
        _multiply(b, op.x, group)


def _up_gate(b: CUDALowering, op: UpGate) -> None:
    if b.backend.cublas:  # its products end in memory: three steps
        up, gate = (Value(f"{op.out.name} {part}", op.up.n_out, op.x.per, op.x.outputs) for part in ("up", "gate"))
        _multiply(b, op.x, [_Product(up, op.up, op.up_bias, op.up_scale)])
        _multiply(b, op.x, [_Product(gate, op.gate, op.gate_bias, op.gate_scale)])
        _gate(b, op.activation, op.out, b.buffer(gate), gate.width, b.buffer(up))
        return
    activations, stride = b.activations(op.x, op.up)
    t, n_in, n_out, activation = op.up.tensor.type, op.up.n_in, op.up.n_out, op.activation
    weights = b.weight(op.up), b.weight(op.gate)

    def choose(rows: int) -> Shape:
        if rows <= FEW_ROWS:
            return mat_vec.up_gate(t, activation, n_in, n_out, rows)
        return mat_mat.up_gate(t, activation, n_in, n_out, rows, b.device.capability)

    entry = b.emit(
        choose,
        op.x,
        x=activations,
        x_stride=stride,
        up=weights[0],
        gate=weights[1],
        row_bytes=row_bytes_of(op.up),
        n_in=n_in,
        n_out=n_out,
        out=b.buffer(op.out),
        out_stride=4 * op.out.width,
        up_bias=b.vector(op.up_bias),
        gate_bias=b.vector(op.gate_bias),
        up_scale=b.vector(op.up_scale),
        gate_scale=b.vector(op.gate_scale),
        **glu.limits(activation),
    )
    entry.weights = (op.up, op.gate)


def _mul_mat_heads(b: CUDALowering, op: MulMatHeads) -> None:
    """What a head gives lies beside the next one's, unless told otherwise."""
    start, step = (op.start, op.step) if isinstance(op, MulMatHeadsInto) else (0, op.weight.n_out)
    weight, heads = op.weight, op.x.width // op.weight.n_in
    t, n_in, n_out = weight.tensor.type, weight.n_in, weight.n_out
    activations, stride = b.activations(op.x, weight)

    def choose(rows: int) -> Shape:
        if rows <= FEW_ROWS:
            return mat_vec.mul_mat_heads(t, n_in, n_out, rows, heads)
        return mat_mat.mul_mat_heads(t, n_in, n_out, rows, heads, b.device.capability)

    entry = b.emit(
        choose,
        op.x,
        x=activations,
        x_stride=stride * heads,
        x_head_bytes=stride,
        w=b.weight(weight),
        row_bytes=row_bytes_of(weight),
        head_bytes=expert_bytes_of(weight),
        heads=heads,
        n_in=n_in,
        n_out=n_out,
        out=Within(b.buffer(op.out), 4 * start),
        out_stride=4 * op.out.width,
        out_head_bytes=4 * step,
    )
    entry.weights = (weight,)


# ---------------------------------------------------------------- experts


def _by_expert(b: CUDALowering, out: Value, x: Value, ids: Value, weight: Matrix) -> dict[str, Slot]:
    """Return the slots that both kinds of products by expert have."""
    activations, stride = b.activations(x, weight)
    return {
        "out": b.buffer(out),
        "x": activations,
        "x_stride": stride,
        "x_per": ids.width if x.per == 1 else 1,
        "ids": b.buffer(ids),
        "plan": b.plan(ids, weight.n_matrices),
        "n_expert": weight.n_matrices,
        "n_used": ids.width,
        "row_bytes": row_bytes_of(weight),
        "n_in": weight.n_in,
        "n_out": weight.n_out,
    }


def _mul_mat_id(b: CUDALowering, op: MulMatId) -> None:
    w, slots = b.weight(op.weight, op.ids), _by_expert(b, op.out, op.x, op.ids, op.weight)
    t, n_in, n_out, n_expert, n_used = (
        op.weight.tensor.type,
        op.weight.n_in,
        op.weight.n_out,
        op.weight.n_matrices,
        op.ids.width,
    )

    def choose(rows: int) -> Shape:
        if rows <= FEW_ROWS:
            return mat_vec.mul_mat_id(t, n_in, n_out, rows, n_used)
        return mat_mat.mul_mat_id(t, n_in, n_out, rows, n_used, n_expert, b.device.capability)

    entry = b.emit(
        choose,
        op.ids,
        w=w,
        expert_bytes=expert_bytes_of(op.weight),
        bias=b.vector(op.bias),
        bias_stride=4 * n_out,
        scale=b.vector(op.scale),
        **slots,
    )
    entry.weights = (op.weight,)


def _up_gate_id(b: CUDALowering, op: UpGateId) -> None:
    up, gate = b.weight(op.up, op.ids), b.weight(op.gate, op.ids)
    slots = _by_expert(b, op.out, op.x, op.ids, op.up)
    t, n_in, n_out, n_expert, n_used = op.up.tensor.type, op.up.n_in, op.up.n_out, op.up.n_matrices, op.ids.width
    activation = op.activation

    def choose(rows: int) -> Shape:
        if rows <= FEW_ROWS:
            return mat_vec.up_gate_id(t, activation, n_in, n_out, rows, n_used)
        return mat_mat.up_gate_id(t, activation, n_in, n_out, rows, n_used, n_expert, b.device.capability)

    entry = b.emit(
        choose,
        op.ids,
        up=up,
        gate=gate,
        up_expert_bytes=expert_bytes_of(op.up),
        gate_expert_bytes=expert_bytes_of(op.gate),
        up_bias=b.vector(op.up_bias),
        gate_bias=b.vector(op.gate_bias),
        up_bias_stride=4 * op.up.n_out,
        gate_bias_stride=4 * op.gate.n_out,
        up_scale=b.vector(op.up_scale),
        gate_scale=b.vector(op.gate_scale),
        **slots,
        **glu.limits(activation),
    )
    entry.weights = (op.up, op.gate)


def _route(b: CUDALowering, op: Route) -> None:
    routing = op.routing
    b.emit(
        lambda rows: route.route(routing, rows),
        op.logits,
        ids=b.buffer(op.ids),
        weights=b.buffer(op.weights),
        logits=b.buffer(op.logits),
        bias=b.vector(op.bias),
        **route.route_block(routing),
    )


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
    b.emit(
        lambda rows: None if joined(way(rows // rows_of_token)) else activations.quantize(form, q_width, rows),
        op.out,
        op.out.per * rows_of_token,
        x=b.buffer(op.out),
        x_stride=4 * q_width,
        n=q_width,
        out=made,
    )


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
    MulMat: _mul_mat,
    MulMats: _mul_mats,
    UpGate: _up_gate,
    MulMatHeads: _mul_mat_heads,
    MulMatHeadsInto: _mul_mat_heads,
    MulMatId: _mul_mat_id,
    UpGateId: _up_gate_id,
    Route: _route,
    Repeat: _repeat,
    Combine: _combine,
    RopeTable: _rope_table,
    Rope: _rope,
    CacheWrite: _cache_write,
    Attention: _attention,
    AttentionTo: _attention_to,
    Convolve: _convolve,
    DeltaNet: _delta_net,
    **cuda_joined.LOWER,
    **cuda_looking_on.LOWER,
}


def lower(b: CUDALowering, op: Op) -> None:
    """Append the launches of an operation; TypeNotSupported if this backend has none for it."""
    if type(op) not in LOWER:
        raise TypeNotSupported(f"the cuda backend has no {type(op).__name__}")
    b.op = op
    LOWER[type(op)](b, op)
