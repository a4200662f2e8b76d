"""Slots of operations that are the same on every device: kernels of an operation have the same argument names."""

from __future__ import annotations

import numpy as np

from quantkit.kernels.rope_constants import rope_constants, rope_scalars
from quantkit.model import ops
from quantkit.model.backends.arena import Slot
from quantkit.model.backends.lowering import Lowering, expert_bytes_of, row_bytes_of
from quantkit.model.check import table_of
from quantkit.model.ops import Matrix, Op, Value

Slots = dict[str, Slot]


#: Numbers of elementwise operations: slot -> field of the operation.
NUMBERS: dict[type[Op], dict[str, str]] = {
    ops.Scale: {"by": "factor"},
    ops.Shift: {"by": "offset"},
    ops.Softcap: {"by": "cap"},
    ops.Clamp: {"by": "limit"},
    ops.Exceed: {"factor": "factor"},
    ops.ScaleByPosition: {name: name for name in ("floor_scale", "alpha", "offset")},
    ops.Xielu: {name: name for name in ("alpha_n", "alpha_p", "beta", "eps")},
}


def numbers(op: Op) -> Slots:
    """Return the slots of an elementwise operation's numbers."""
    return {slot: float(getattr(op, field)) for slot, field in NUMBERS[type(op)].items()}


def buffers(b: Lowering, op: Op, *names: str) -> Slots:
    """Return the buffers of an operation's fields, by their names; 0 for None."""
    values = {name: getattr(op, name) for name in names}
    return {name: 0 if value is None else b.buffer(value) for name, value in values.items()}


def take(b: Lowering, op: ops.Take) -> Slots:
    """Return the slots of ``take``."""
    sizes: Slots = {"width": op.out.width, "x_width": op.x.width, "start": op.start, "period": op.period}
    return buffers(b, op, "out", "x") | sizes


def join(b: Lowering, op: ops.Join) -> Slots:
    """Return the slots of ``join``."""
    sizes: Slots = {"a_width": op.a.width, "b_width": op.b.width, "period_a": op.period_a, "period_b": op.period_b}
    return buffers(b, op, "out", "a", "b") | sizes


def mix(b: Lowering, op: ops.Mix) -> Slots:
    """Return the slots of ``mix``."""
    sizes: Slots = {"width": op.out.width, "group": op.x.width // op.n, "n": op.n, "offset": op.offset}
    return buffers(b, op, "out", "x", "weights", "base") | sizes


def lerp(b: Lowering, op: ops.Lerp) -> Slots:
    """Return the slots of ``lerp``."""
    return buffers(b, op, "out", "x", "weights") | {
        "to": b.buffer(op.target),
        "by": b.vector(op.vector),
        "width": op.out.width,
        "n": op.x.width,
    }


def bonus(b: Lowering, op: ops.Bonus) -> Slots:
    """Return the slots of ``bonus``."""
    return buffers(b, op, "out", "x", "r", "k", "v") | {
        "vector": b.vector(op.vector),
        "width": op.x.width,
        "head": op.head,
    }


def rope_table(b: Lowering, op: ops.RopeTable) -> Slots:
    """Return the slots of ``rope_table``."""
    constants = rope_constants(op.config, None if op.factors is None else b.vector_values(op.factors))
    parameters: Slots = {"pairs": op.config.n_rot // 2, "constants": b.array(constants), **rope_scalars(op.config)}
    parameters |= {"each": op.step, "back": int(op.inverse)}
    return buffers(b, op, "out") | parameters


def stream_weights(b: Lowering, op: ops.StreamWeights) -> Slots:
    """Return the slots of ``stream_weights``."""
    parameters: Slots = {"scale": b.vector(op.scale), "base": b.vector(op.base), "rounds": op.rounds, "eps": op.eps}
    return buffers(b, op, "before", "after", "x") | {"across": b.buffer(op.mixing)} | parameters


def lookup(b: Lowering, op: ops.Lookup) -> Slots:
    """Return the slots of ``lookup``; FormatError for a table with values out of range."""
    b.limit_ids(op)
    return buffers(b, op, "out") | {"table": b.array(table_of(b.source, op)), "width": op.out.width}


def block_write(b: Lowering, op: ops.BlockWrite) -> Slots:
    """Return the slots of ``block_write``, except for the cache."""
    return buffers(b, op, "k") | {"k_width": op.k.width, **block_slots(b, op.cache)}


def window_and_blocks(b: Lowering, op: ops.WindowAndBlocks) -> Slots:
    """Return the slots of ``window_and_blocks``."""
    sizes: Slots = {"n_out": op.out.width, "window": op.window, **block_slots(b, op.cache)}
    return buffers(b, op, "out", "blocks") | sizes


def block_slots(b: Lowering, cache: ops.Cache) -> Slots:
    """Return the positions of a block, and the cell of the first block."""
    return {"ratio": cache.ratio, "first": cache.first_block(b.limits.n_seq, b.limits.n_ctx)}


def compress(b: Lowering, op: ops.Compress) -> Slots:
    """Return the slots of ``compress``."""
    parameters: Slots = {"ape": b.vector(op.ape), "state": b.state(op.state), "width": op.out.width, "ratio": op.ratio}
    return buffers(b, op, "out", "kv", "score") | parameters | {"overlap": int(op.overlap)}


def convolve(b: Lowering, op: ops.Convolve) -> Slots:
    """Return the slots of ``convolve``."""
    parameters: Slots = {"weight": b.vector(op.weight), "bias": b.vector(op.bias), "state": b.state(op.state)}
    return buffers(b, op, "x", "out") | parameters | {"taps": op.weight.n_in, "width": op.x.width}


def delta_net(b: Lowering, op: ops.DeltaNet) -> Slots:
    """Return the slots of ``delta_net``."""
    heads: Slots = {"n_k_head": op.n_k_head, "n_v_head": op.n_v_head, "scale": op.scale, "tiled": int(op.tiled)}
    heads |= {"head_k": op.k.width // op.n_k_head, "head_v": op.v.width // op.n_v_head, "state": b.state(op.state)}
    return buffers(b, op, "q", "k", "v", "g", "beta", "out") | heads


def ssm_scan(b: Lowering, op: ops.SsmScan) -> Slots:
    """Return the slots of ``ssm_scan``."""
    rates = b.array(np.array(op.a, np.float32)) if isinstance(op.a, tuple) else b.vector(op.a)
    vectors: Slots = {"dt_bias": b.vector(op.dt_bias), "a": rates, "d": b.vector(op.d)}
    heads: Slots = {"n_head": op.n_head, "n_group": op.n_group, "state": b.state(op.state)}
    heads |= {"head": op.x.width // op.n_head, "d_state": op.b.width // op.n_group}
    return buffers(b, op, "x", "z", "dt", "b", "c", "out") | vectors | heads


def column_scan(b: Lowering, op: ops.ColumnScan) -> Slots:
    """Return the slots of ``column_scan``; its rates are transposed to rows of the state."""
    rates = b.vector_values(op.a).reshape(op.x.width, op.b.width).T
    vectors: Slots = {"a": b.array(np.ascontiguousarray(rates)), "d": b.vector(op.d), "state": b.state(op.state)}
    return buffers(b, op, "x", "z", "dt", "b", "c", "out") | vectors | {"width": op.x.width, "d_state": op.b.width}


def previous(b: Lowering, op: ops.Previous) -> Slots:
    """Return the slots of ``convolve`` for rows of previous tokens: two taps, the later 0."""
    width = op.x.width
    taps = b.once(("previous", width), lambda: b.array(np.tile(np.array([1, 0], np.float32), width)))
    convolution: Slots = {"weight": taps, "bias": 0, "taps": 2, "width": width, "state": b.state(op.state)}
    return buffers(b, op, "x", "out") | convolution


def wkv(b: Lowering, op: ops.Wkv) -> Slots:
    """Return the slots of ``wkv``."""
    head = op.r.width // op.n_head
    heads: Slots = {"n_head": op.n_head, "n_kv_head": op.k.width // head, "head": head, "state": b.state(op.state)}
    flags: Slots = {"earlier": int(op.earlier), "complement": int(op.complement), "scale": op.scale, "bound": op.bound}
    return buffers(b, op, "r", "g", "k", "v", "removed", "rate", "out") | heads | flags


def vector_slots(b: Lowering, op: ops.MultiplyBy) -> Slots:
    """Return the vector, or its inverse if it divides, and its length."""
    vector = b.vector_values(op.vector)
    if op.kind == "over":
        with np.errstate(divide="ignore"):
            vector = np.reciprocal(vector)
    vector = vector if op.repeat == 1 else np.repeat(vector, op.repeat)
    return {"vector": b.array(vector), "n": len(vector)}


# ---------------------------------------------------------------- experts


def route(b: Lowering, op: ops.Route) -> Slots:
    """Return the slots of ``route``, except for ``chosen``."""
    return buffers(b, op, "ids", "weights", "logits") | {"bias": b.vector(op.bias), **op.routing.slots()}


def given_ids(b: Lowering, op: ops.Route) -> Slots:
    """Return the slot of given ids; 0 if the router chooses."""
    return {"chosen": 0 if op.selected is None else b.buffer(op.selected)}


def expert_slots(b: Lowering, out: Value, x: Value, ids: Value, weight: Matrix) -> Slots:
    """Return the slots of every product by expert."""
    activations, stride = b.activations(x, weight)
    return {
        "out": b.buffer(out),
        "x": activations,
        "x_stride": stride,
        "x_per": ids.width if x.per == 1 else 1,
        "plan": b.plan(ids, weight.n_matrices),
        "n_expert": weight.n_matrices,
        "n_used": ids.width,
        "row_bytes": row_bytes_of(weight),
        "n_in": weight.n_in,
        "n_out": weight.n_out,
    }


def expert_vector_slots(
    b: Lowering, weight: Matrix, bias: Matrix | None, scale: Matrix | None, prefix: str = ""
) -> Slots:
    """Return the slots of a weight's bytes per expert, bias and scale, with ``prefix`` before their names."""
    slots: Slots = {"expert_bytes": expert_bytes_of(weight), "bias": b.vector(bias), "bias_stride": 4 * weight.n_out}
    return {f"{prefix}{name}": slot for name, slot in {**slots, "scale": b.vector(scale)}.items()}
