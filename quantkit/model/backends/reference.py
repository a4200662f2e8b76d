"""The backend ``reference``: every operation in numpy, the specification of the others.

Weights are decoded to float32 and activations are never quantized, so the other backends are compared with it on float
weights; on quantized weights it isolates their error. Sources of the definitions: llama.cpp b11434 ggml-cpu/ops.cpp and
llama-graph.cpp; no code is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quantkit.formats.gguf import GGUFFile
from quantkit.kernels import dequantize
from quantkit.kernels.formats import format_of
from quantkit.kernels.interleave import base_of
from quantkit.model import ops
from quantkit.model.backends import Limits, Observer
from quantkit.model.backends.accumulators import (
    Accumulator,
    NotFinite,
    covariance,
    new_accumulator,
    not_finite,
    similarity,
    sum_columns,
)
from quantkit.model.backends.distance_bias import alibi_slope, bias_table, has_table
from quantkit.model.batch import Batch, Floats, Ints
from quantkit.model.check import table_of
from quantkit.model.ops import Activation, Cache, Matrix, Op, OpTable, RopeConfig, State, Value

RUN = OpTable("the reference backend")

f32 = np.float32


class Reference:
    """The backend ``reference``."""

    name = "reference"

    def __init__(self, source: GGUFFile, observer: Observer | None = None) -> None:
        self.source, self.observer = source, observer
        self._weights: dict[Matrix, Floats] = {}

    def compile(self, ops: Sequence[Op], limits: Limits, leaves: Sequence[Value] = ()) -> ReferenceProgram:
        """Return a program of these operations; its caches are always float32."""
        return ReferenceProgram(self, ops, limits.n_ctx, limits.n_seq)

    def close(self) -> None:
        """Forget the decoded weights."""
        self._weights.clear()

    def weight(self, matrix: Matrix) -> Floats:
        """Return a weight decoded: [n_matrices,] [n_out,] n_in."""
        if matrix not in self._weights:
            t = matrix.tensor
            data = self.source.data(t).reshape(-1, t.type.row_bytes(t.shape[0]))
            values = dequantize(data, t.type, t.shape[0]).reshape(t.shape[::-1])
            if matrix.rows is not None:
                values = values[..., slice(*matrix.rows), :]
            if matrix.columns is not None:
                values = values[..., slice(*matrix.columns)]
            self._weights[matrix] = values
        return self._weights[matrix]


class ReferenceProgram:
    """Operations, their values, caches and states."""

    def __init__(self, backend: Reference, sequence: Sequence[Op], n_ctx: int, n_seq: int) -> None:
        self.backend = backend
        self.ops = sequence
        self.n_ctx = n_ctx
        self.n_seq = n_seq
        self.values: dict[Value, Any] = {}
        self.caches: dict[Cache, tuple[Floats, Floats]] = {}
        self.states: dict[tuple[State, int], Floats] = {}
        self.accumulators: dict[str, Accumulator] = {}
        self.not_finite: list[NotFinite] = []
        for op in sequence:
            if isinstance(op, ops.SumColumns | ops.Covariance | ops.Similarity) and op.label not in self.accumulators:
                self.accumulators[op.label] = new_accumulator(op)

    def run(self, batch: Batch) -> None:
        """Run all operations for a batch; afterwards ``read`` returns the values."""
        self.batch = batch
        for op in self.ops:
            RUN[type(op)](self, op)

    def read(self, value: Value) -> Any:
        """Return a value of the last run."""
        return self.values[value]

    def write(self, value: Value, array: Any) -> None:
        """Set a value that another backend computed."""
        self.values[value] = array

    def clear(self, sequence: int | None = None) -> None:
        """Reset a sequence, or all of them."""
        for key in [k for k in self.states if sequence is None or k[1] == sequence]:
            del self.states[key]

    def weight(self, matrix: Matrix | None) -> Any:
        return None if matrix is None else self.backend.weight(matrix)

    def factors(self, matrix: Matrix) -> Any:
        """Return a weight as products multiply it (``Format.row_scale_gain``)."""
        gain = format_of(base_of(matrix.tensor.type)).row_scale_gain
        return self.weight(matrix) if gain == 1 else self.weight(matrix) * f32(gain)

    def cache(self, cache: Cache) -> tuple[Floats, Floats]:
        if cache not in self.caches:
            cells = cache.cells(self.n_seq, self.n_ctx)
            self.caches[cache] = (np.zeros((cells, cache.k_width), f32), np.zeros((cells, cache.v_width), f32))
        return self.caches[cache]

    def state(self, state: State, sequence: int, position: int) -> Floats:
        if position == 0 or (state, sequence) not in self.states:
            self.states[state, sequence] = np.zeros(state.width, f32)
        return self.states[state, sequence]

    def report(self, label: str, row: int) -> None:
        self.not_finite.append(not_finite(label, self.batch, row))

    def cells(self) -> Any:
        return self.batch.sequences.astype(np.int64) * self.n_ctx + self.batch.positions


# ---------------------------------------------------------------- element by element


@RUN.register(ops.Embed)
def _embed(p: ReferenceProgram, op: ops.Embed) -> None:
    rows = p.weight(op.weight)[p.batch.positions if op.by_position else p.batch.tokens]
    p.values[op.out] = rows * f32(op.scale) if op.scale != 1 else rows


@RUN.register(ops.Lookup)
def _lookup(p: ReferenceProgram, op: ops.Lookup) -> None:
    p.values[op.out] = table_of(p.backend.source, op)[p.batch.tokens]


@RUN.register(ops.SelectOutputs)
def _select_outputs(p: ReferenceProgram, op: ops.SelectOutputs) -> None:
    x = p.values[op.x]
    p.values[op.out] = x.reshape(len(p.batch.tokens), -1)[p.batch.outputs].reshape(-1, op.out.width)


@RUN.register(ops.Add)
def _add(p: ReferenceProgram, op: ops.Add) -> None:
    p.values[op.out] = p.values[op.a] + p.values[op.b]


@RUN.register(ops.Scale)
def _scale(p: ReferenceProgram, op: ops.Scale) -> None:
    p.values[op.out] = p.values[op.x] * f32(op.factor)


@RUN.register(ops.Shift)
def _shift(p: ReferenceProgram, op: ops.Shift) -> None:
    p.values[op.out] = p.values[op.x] + f32(op.offset)


@RUN.register(ops.ScaleByPosition)
def _scale_by_position(p: ReferenceProgram, op: ops.ScaleByPosition) -> None:
    steps = np.floor((p.batch.positions.astype(f32) + f32(op.offset)) / f32(op.floor_scale))
    p.values[op.out] = p.values[op.x] * (np.log(steps + f32(1)) * f32(op.alpha) + f32(1))[:, None]


@RUN.register(ops.MultiplyBy)
def _multiply_by(p: ReferenceProgram, op: ops.MultiplyBy) -> None:
    x, vector = p.values[op.x], p.weight(op.vector).reshape(-1)
    vector = np.repeat(vector, op.repeat)
    vector = np.tile(vector, x.shape[1] // len(vector))
    combine = {"times": np.multiply, "plus": np.add, "over": np.divide}[op.kind]
    p.values[op.out] = combine(x, vector)


@RUN.register(ops.Softcap)
def _softcap(p: ReferenceProgram, op: ops.Softcap) -> None:
    p.values[op.out] = f32(op.cap) * np.tanh(p.values[op.x] / f32(op.cap))


@RUN.register(ops.Clamp)
def _clamp(p: ReferenceProgram, op: ops.Clamp) -> None:
    p.values[op.out] = np.clip(p.values[op.x], f32(-op.limit), f32(op.limit))


@RUN.register(ops.Norm)
def _norm(p: ReferenceProgram, op: ops.Norm) -> None:
    x = p.values[op.x]
    g = x.reshape(len(x), x.shape[1] // op.group, op.group)
    if op.kind == "layer":
        g = g - g.mean(-1, keepdims=True, dtype=np.float64).astype(f32)
    square = np.square(g, dtype=np.float64)
    if op.kind == "l2":
        factor = 1 / np.sqrt(square.sum(-1, keepdims=True) + op.eps)
    else:
        factor = 1 / np.sqrt(square.mean(-1, keepdims=True) + op.eps)
    y = (g * factor.astype(f32)).reshape(x.shape)
    for part, combine in ((op.weight, np.multiply), (op.bias, np.add)):
        if part is not None:
            vector = p.weight(part).reshape(-1)
            y = combine(y, np.tile(vector, x.shape[1] // len(vector)))
    p.values[op.out] = y


def activate(a: Activation, x: Floats) -> Floats:
    """Return activation(x), without the clamp of up."""
    if a.gate_limit:
        x = np.minimum(x, f32(a.gate_limit))
    y: Floats = np.asarray(_ACTIVATIONS[a.kind](x, a), f32)
    return np.minimum(y, f32(a.act_limit)) if a.act_limit else y


def _sigmoid(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        y: Floats = f32(1) / (f32(1) + np.exp(-x))
    return y


def _erf(x: Floats) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _through_half(f: Callable[[Any], Any], x: Floats) -> Floats:
    """Return f(x) as ggml does for gelu, by a table over float16; outside of +-10 it is x or 0."""
    half = f(x.astype(np.float16).astype(f32)).astype(np.float16).astype(f32)
    return np.where(x <= -10, f32(0), np.where(x >= 10, x, half))


def _gelu(x: Floats, a: Activation) -> Floats:
    c = f32(0.79788456080286535587989211986876)
    return _through_half(lambda h: f32(0.5) * h * (1 + np.tanh(c * h * (1 + f32(0.044715) * h * h))), x)


def _gelu_quick(x: Floats, a: Activation) -> Floats:
    half = x.astype(np.float16).astype(f32)
    return (half * _sigmoid(f32(1.702) * half)).astype(np.float16).astype(f32)


_ACTIVATIONS: Mapping[str, Callable[[Floats, Activation], Any]] = {
    "silu": lambda x, a: x * _sigmoid(x),
    "gelu": _gelu,
    "gelu_erf": lambda x, a: 0.5 * x * (1 + _erf(x * f32(0.70710678118654752440))),
    "gelu_quick": _gelu_quick,
    "relu": lambda x, a: np.maximum(x, f32(0)),
    "relu_sqr": lambda x, a: np.square(np.maximum(x, f32(0))),
    "sigmoid": lambda x, a: _sigmoid(x),
    "linear": lambda x, a: x,
    "softplus": lambda x, a: np.where(x > 20, x, np.log(f32(1) + np.exp(np.minimum(x, f32(20))))),
    "swiglu_oai": lambda x, a: x * _sigmoid(f32(a.alpha) * x),
}


def gate(a: Activation, g: Floats, up: Floats) -> Floats:
    """Return activation(g) * up with all clamps."""
    if a.up_limit:
        up = np.clip(up, f32(-a.up_limit), f32(a.up_limit))
    if a.kind == "swiglu_oai":
        up = up + f32(1)
    y = activate(a, g)
    return np.repeat(y, up.shape[1] // y.shape[1], axis=1) * up


@RUN.register(ops.Xielu)
def _xielu(p: ReferenceProgram, op: ops.Xielu) -> None:
    x = p.values[op.x]
    below = (np.expm1(np.minimum(x, f32(op.eps))) - x) * f32(op.alpha_n)
    p.values[op.out] = np.where(x > 0, f32(op.alpha_p) * x * x, below) + f32(op.beta) * x


@RUN.register(ops.Exceed)
def _exceed(p: ReferenceProgram, op: ops.Exceed) -> None:
    x = p.values[op.x]
    mean = x.mean(-1, keepdims=True, dtype=np.float64).astype(f32)
    square = np.square(x - mean).sum(-1, keepdims=True, dtype=np.float64)
    deviation = np.sqrt((square / (x.shape[1] - 1)).astype(f32))
    p.values[op.out] = np.maximum(x - (mean + f32(op.factor) * deviation), f32(0))


@RUN.register(ops.ToLength)
def _to_length(p: ReferenceProgram, op: ops.ToLength) -> None:
    x, like = p.values[op.x], p.values[op.like]
    groups = x.reshape(len(x), -1, op.group)
    p.values[op.out] = (groups * _length(like)[:, None] / _length(groups)).reshape(x.shape)


def _length(x: Floats) -> Floats:
    length: Floats = np.sqrt(np.square(x).sum(-1, keepdims=True, dtype=np.float64).astype(f32))
    return length


@RUN.register(ops.Mix)
def _mix(p: ReferenceProgram, op: ops.Mix) -> None:
    x = p.values[op.x]
    weights = p.values[op.weights] + f32(op.offset)
    base = p.values[op.base]
    mixed = np.matmul(weights.reshape(len(x), -1, op.n), x.reshape(len(x), op.n, -1))
    p.values[op.out] = base + mixed.reshape(base.shape)


@RUN.register(ops.StreamWeights)
def _stream_weights(p: ReferenceProgram, op: ops.StreamWeights) -> None:
    scale = p.weight(op.scale).reshape(-1)
    base = p.weight(op.base).reshape(-1)
    eps = f32(op.eps)
    x = p.values[op.x] * np.repeat(scale, (4, 4, 16)) + base
    c = _softmax(x[:, 8:].reshape(-1, 4, 4)) + eps
    c = c / (c.sum(1, keepdims=True) + eps)
    for _ in range(op.rounds - 1):
        c = c / (c.sum(2, keepdims=True) + eps)
        c = c / (c.sum(1, keepdims=True) + eps)
    p.values[op.before], p.values[op.after] = _sigmoid(x[:, :4]) + eps, _sigmoid(x[:, 4:8]) * f32(2)
    p.values[op.mixing] = c.swapaxes(1, 2).reshape(-1, 16)


@RUN.register(ops.Lerp)
def _lerp(p: ReferenceProgram, op: ops.Lerp) -> None:
    x, target = p.values[op.x], p.values[op.target]
    factor = f32(0) if op.vector is None else p.weight(op.vector).reshape(-1)
    if op.weights is not None:
        factor = p.values[op.weights] + factor
    n = op.out.width // x.shape[1]
    p.values[op.out] = np.tile(x, n) + np.tile(target - x, n) * factor


@RUN.register(ops.Bonus)
def _bonus(p: ReferenceProgram, op: ops.Bonus) -> None:
    x, r, k, v = (p.values[value] for value in (op.x, op.r, op.k, op.v))
    product = (k * r * p.weight(op.vector).reshape(-1)).reshape(len(x), -1, op.head)
    factor = product.sum(-1, keepdims=True, dtype=np.float64).astype(f32)
    p.values[op.out] = x + (v.reshape(product.shape) * factor).reshape(x.shape)


@RUN.register(ops.Glu)
def _glu(p: ReferenceProgram, op: ops.Glu) -> None:
    g = p.values[op.gate]
    if op.up is None:
        half = g.shape[1] // 2
        p.values[op.out] = gate(op.activation, g[:, :half], g[:, half:])
    else:
        p.values[op.out] = gate(op.activation, g, p.values[op.up])


@RUN.register(ops.Activate)
def _activate(p: ReferenceProgram, op: ops.Activate) -> None:
    p.values[op.out] = activate(op.activation, p.values[op.x])


@RUN.register(ops.Take)
def _take(p: ReferenceProgram, op: ops.Take) -> None:
    x = p.values[op.x]
    width = op.out.width * op.period // x.shape[1]
    p.values[op.out] = x.reshape(len(x), -1, op.period)[:, :, op.start : op.start + width].reshape(len(x), -1)


@RUN.register(ops.Join)
def _join(p: ReferenceProgram, op: ops.Join) -> None:
    a, b = p.values[op.a], p.values[op.b]
    a, b = a.reshape(len(a), -1, op.period_a), b.reshape(len(b), -1, op.period_b)
    b = np.tile(b, (1, a.shape[1] // b.shape[1], 1))
    p.values[op.out] = np.concatenate([a, b], -1).reshape(len(a), -1)


# ---------------------------------------------------------------- matrices


def _product(p: ReferenceProgram, x: Floats, weight: Matrix, bias: Matrix | None, scale: Matrix | None) -> Floats:
    y: Floats = x @ p.factors(weight).reshape(-1, x.shape[1]).T
    if scale is not None:
        y = y * p.weight(scale).reshape(-1)
    if bias is not None:
        y = y + p.weight(bias).reshape(-1)
    return y


@RUN.register(ops.MulMat)
def _mul_mat(p: ReferenceProgram, op: ops.MulMat) -> None:
    p.values[op.out] = _product(p, p.values[op.x], op.weight, op.bias, op.scale)


@RUN.register(ops.MulMats)
def _mul_mats(p: ReferenceProgram, op: ops.MulMats) -> None:
    for out, weight, bias, scale in zip(op.outs, op.weights, op.biases, op.scales, strict=True):
        p.values[out] = _product(p, p.values[op.x], weight, bias, scale)


@RUN.register(ops.MulMatHeads)
def _mul_mat_heads(p: ReferenceProgram, op: ops.MulMatHeads) -> None:
    x = p.values[op.x]
    w = p.factors(op.weight).reshape(-1, op.weight.n_out, op.weight.n_in)
    heads = x.reshape(len(x), len(w), op.weight.n_in)
    p.values[op.out] = np.einsum("thi,hoi->tho", heads, w).reshape(len(x), -1)


@RUN.register(ops.UpGate)
def _up_gate(p: ReferenceProgram, op: ops.UpGate) -> None:
    x = p.values[op.x]
    g, up = _product(p, x, op.gate, op.gate_bias, op.gate_scale), _product(p, x, op.up, op.up_bias, op.up_scale)
    p.values[op.out] = gate(op.activation, g, up)


# ---------------------------------------------------------------- experts


def _softmax(x: Floats) -> Floats:
    y = np.exp(x - x.max(-1, keepdims=True))
    total: Floats = y / y.sum(-1, keepdims=True)
    return total


def top_ids(scores: Floats, n: int) -> Ints:
    """Return the columns of the n largest values of every row, descending; equal values in order."""
    ids: Ints = np.argsort(-scores, axis=-1, kind="stable")[..., :n].astype(np.int32)
    return ids


_PROBABILITIES: Mapping[str, Callable[[Floats], Floats]] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "softmax_weight": lambda x: x,
    "sqrt_softplus": lambda x: np.sqrt(activate(Activation("softplus"), x)),
}


@RUN.register(ops.Route)
def _route(p: ReferenceProgram, op: ops.Route) -> None:
    r, logits = op.routing, p.values[op.logits]
    probs = _PROBABILITIES[r.gating](logits)
    choice = probs if op.bias is None else probs + p.weight(op.bias).reshape(-1)
    if r.n_group > 1:
        groups = choice.reshape(len(choice), r.n_group, -1)
        best = -np.sort(-groups, axis=-1)[:, :, :2].sum(-1)
        is_used = np.zeros(best.shape, bool)
        np.put_along_axis(is_used, top_ids(best, r.n_group_used), True, axis=1)
        choice = np.where(is_used[:, :, None], groups, f32(-np.inf)).reshape(choice.shape)
    ids = p.values[op.selected] if op.selected is not None else top_ids(choice, r.n_used) // np.int32(r.share)
    weights = np.take_along_axis(probs, ids, axis=1)
    if r.gating == "softmax_weight":
        weights = _softmax(weights)
    if r.norm:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), f32(r.sum_floor))
    if r.scale not in (0, 1):
        weights = weights * f32(r.scale)
    p.values[op.ids], p.values[op.weights] = ids, weights


def _expert_product(
    p: ReferenceProgram, x: Floats, ids: Ints, w: Matrix, bias: Matrix | None, scale: Matrix | None
) -> Floats:
    experts, flat = p.factors(w), ids.reshape(-1)
    rows = np.arange(len(flat)) if len(x) == len(flat) else np.arange(len(flat)) // ids.shape[1]
    out = np.empty((len(flat), experts.shape[1]), f32)
    for e in np.unique(flat):
        pairs = np.flatnonzero(flat == e)
        y = x[rows[pairs]] @ experts[e].T
        if scale is not None:
            y = y * p.weight(scale).reshape(-1)[e]
        if bias is not None:
            y = y + p.weight(bias)[e]
        out[pairs] = y
    return out


@RUN.register(ops.MulMatId)
def _mul_mat_id(p: ReferenceProgram, op: ops.MulMatId) -> None:
    p.values[op.out] = _expert_product(p, p.values[op.x], p.values[op.ids], op.weight, op.bias, op.scale)


@RUN.register(ops.UpGateId)
def _up_gate_id(p: ReferenceProgram, op: ops.UpGateId) -> None:
    x, ids = p.values[op.x], p.values[op.ids]
    g = _expert_product(p, x, ids, op.gate, op.gate_bias, op.gate_scale)
    p.values[op.out] = gate(op.activation, g, _expert_product(p, x, ids, op.up, op.up_bias, op.up_scale))


@RUN.register(ops.Repeat)
def _repeat(p: ReferenceProgram, op: ops.Repeat) -> None:
    x, weights = p.values[op.x], p.values[op.weights]
    p.values[op.out] = (x[:, None, :] * weights[:, :, None]).reshape(-1, op.out.width)


@RUN.register(ops.Combine)
def _combine(p: ReferenceProgram, op: ops.Combine) -> None:
    n = op.x.per * op.x.width // op.out.width
    x = p.values[op.x].reshape(-1, n, op.out.width)
    if op.weights is not None:
        x = x * p.values[op.weights][:, :, None]
    out = x[:, 0].copy()
    for j in range(1, n):
        out += x[:, j]
    p.values[op.out] = out


# ---------------------------------------------------------------- attention


def rope_angles(config: RopeConfig, positions: Ints, factors: Floats | None) -> tuple[Floats, Floats]:
    """Return cos and sin [n, n_rot / 2] of every pair, attn_factor (mscale) included."""
    c, pairs = config, config.n_rot // 2
    step = f32(c.freq_base) ** f32(-2.0 / c.n_rot)
    # A running product starting with the position, as in ggml: its rounding errors are part of the model.
    factor = np.broadcast_to(np.full(pairs - 1, step), (len(positions), pairs - 1))
    theta = np.cumprod(np.concatenate([positions.astype(f32)[:, None], factor], 1), axis=1, dtype=f32)
    if c.sections:
        theta = theta * _section_mask(c, pairs)
    if factors is not None:
        theta = theta / factors[:pairs]
    mscale = np.full(pairs, f32(c.attn_factor))
    scaled = f32(c.freq_scale) * theta
    if c.ext_factor:
        low, high = _yarn_range(c)
        ramp = f32(1) - np.clip((np.arange(pairs, dtype=f32) - low) / max(0.001, high - low), 0, 1).astype(f32)
        mix = ramp * f32(c.ext_factor)
        scaled = scaled * (1 - mix) + theta * mix
        mscale = mscale * f32(1 + 0.1 * math.log(1 / c.freq_scale))
    return np.cos(scaled) * mscale, np.sin(scaled) * mscale


def _section_mask(c: RopeConfig, pairs: int) -> Floats:
    """Return 0 for pairs of M-RoPE that use the fourth position, which is 0 in texts, else 1."""
    total = sum(c.sections)
    sector = np.arange(pairs) % total
    if c.interleaved:
        part = sector % 3
        uses = np.choose(part, [sector < 3 * c.sections[0], sector < 3 * c.sections[1], sector < 3 * c.sections[2]])
    else:
        uses = sector < sum(c.sections[:3])
    return np.where(uses, f32(1), f32(0)).astype(f32)


def _yarn_range(c: RopeConfig) -> tuple[float, float]:
    def pair_index(beta: float) -> float:
        return c.n_rot * math.log(c.n_ctx_orig / (beta * 2 * math.pi)) / (2 * math.log(c.freq_base))

    return max(0.0, math.floor(pair_index(c.beta_fast))), min(c.n_rot - 1.0, math.ceil(pair_index(c.beta_slow)))


@RUN.register(ops.RopeTable)
def _rope_table(p: ReferenceProgram, op: ops.RopeTable) -> None:
    factors = None if op.factors is None else p.weight(op.factors).reshape(-1)
    cos, sin = rope_angles(op.config, p.batch.positions // op.step * op.step, factors)
    sin = -sin if op.inverse else sin
    p.values[op.out] = np.stack([cos, sin], -1).reshape(len(cos), -1)


@RUN.register(ops.Rope)
def _rope(p: ReferenceProgram, op: ops.Rope) -> None:
    x = p.values[op.x]
    y = x.reshape(len(x), -1, op.head).copy()
    table = p.values[op.table].reshape(len(x), 1, -1, 2)
    cos = table[..., 0]
    sin = table[..., 1]
    n = op.config.n_rot
    turned = y[:, :, op.start : op.start + n]
    neox = op.config.kind == "neox"
    first, second = (slice(0, n // 2), slice(n // 2, n)) if neox else (slice(0, n, 2), slice(1, n, 2))
    a, b = turned[:, :, first].copy(), turned[:, :, second].copy()
    turned[:, :, first], turned[:, :, second] = a * cos - b * sin, a * sin + b * cos
    p.values[op.out] = y.reshape(x.shape)


@RUN.register(ops.CacheWrite)
def _cache_write(p: ReferenceProgram, op: ops.CacheWrite) -> None:
    k, v = p.cache(op.cache)
    k[p.cells()] = p.values[op.k]
    if op.v is not None:
        v[p.cells()] = p.values[op.v]


def complete_blocks(p: ReferenceProgram, ratio: int) -> Any:
    """Return the number of blocks that are complete at each token."""
    return (p.batch.positions.astype(np.int64) + 1) // ratio


@RUN.register(ops.BlockWrite)
def _block_write(p: ReferenceProgram, op: ops.BlockWrite) -> None:
    cache, ratio = op.cache, op.cache.ratio
    first = cache.first_block(p.n_seq, p.n_ctx) + p.batch.sequences.astype(np.int64) * cache.blocks(p.n_ctx)
    ends = (p.batch.positions + 1) % ratio == 0
    p.cache(cache)[0][(first + p.batch.positions // ratio)[ends]] = p.values[op.k][ends]


@RUN.register(ops.WindowAndBlocks)
def _window_and_blocks(p: ReferenceProgram, op: ops.WindowAndBlocks) -> None:
    first, n_blocks = op.cache.first_block(p.n_seq, p.n_ctx), op.cache.blocks(p.n_ctx)
    out = np.full((len(p.batch.tokens), op.out.width), -1, np.int32)
    ends = complete_blocks(p, op.cache.ratio)
    for t, (sequence, position) in enumerate(zip(p.batch.sequences, p.batch.positions, strict=True)):
        window_cells = np.arange(max(0, int(position) + 1 - op.window), int(position) + 1)
        blocks = np.arange(ends[t]) if op.blocks is None else p.values[op.blocks][t]
        block_cells = first + int(sequence) * (n_blocks - p.n_ctx) + blocks[blocks >= 0]
        out[t, : len(window_cells) + len(block_cells)] = np.concatenate([window_cells, block_cells])
    p.values[op.out] = out


@RUN.register(ops.LightningIndexer)
def _lightning_indexer(p: ReferenceProgram, op: ops.LightningIndexer) -> None:
    keys, _ = p.cache(op.cache)
    q = p.values[op.q].reshape(-1, op.n_head, op.head)
    weights = p.values[op.weights] * f32(op.scale)
    out = np.full((len(q), op.out.width), -1, np.int32)
    ends, n_rows = complete_blocks(p, op.cache.ratio or 1), op.cache.blocks(p.n_ctx) if op.cache.ratio else p.n_ctx
    for t, sequence in enumerate(p.batch.sequences):
        n, cell = int(ends[t]), int(sequence) * n_rows
        scores = np.fmax(q[t] @ keys[cell : cell + n].T, f32(0)).T @ weights[t]
        selected = np.arange(n) if n <= op.out.width else np.sort(top_ids(scores, op.out.width))
        out[t, : len(selected)] = selected
    p.values[op.out] = out


@RUN.register(ops.Attention)
def _attention(p: ReferenceProgram, op: ops.Attention) -> None:
    keys, values = p.cache(op.cache)
    if not op.cache.v_width:
        values = keys[:, : op.head_v]
    q = p.values[op.q].reshape(-1, op.n_head, op.head_k)
    out = np.empty((len(q), op.n_head, op.head_v), f32)
    sinks = None if op.sinks is None else p.weight(op.sinks).reshape(-1)
    group = op.n_head // op.n_head_kv
    buckets = None if op.buckets is None else p.weight(op.buckets)
    table = bias_table(op, p.n_ctx, buckets) if has_table(op) else None
    for t, (sequence, position) in enumerate(zip(p.batch.sequences, p.batch.positions, strict=True)):
        first = _first_position(op, int(position))
        center = int(position)
        if op.mask in ("whole", "symmetric"):
            position = p.batch.positions[p.batch.sequences == sequence].max()
        if op.mask == "symmetric":
            position = min(position, center + op.window // 2)
        cells: Any = slice(sequence * p.n_ctx + first, sequence * p.n_ctx + position + 1)
        if op.selected is not None:
            selected = p.values[op.selected][t]
            cells = sequence * p.n_ctx + selected[selected >= 0]
        k = keys[cells].reshape(-1, op.n_head_kv, op.head_k)
        v = values[cells].reshape(-1, op.n_head_kv, op.head_v)
        for h in range(op.n_head):
            s = k[:, h // group] @ q[t, h] * f32(op.scale)
            if op.softcap:
                s = f32(op.softcap) * np.tanh(s / f32(op.softcap))
            if table is not None:
                s = s + table[h, p.n_ctx - 1 + first - center : p.n_ctx + position - center]
            elif op.alibi:
                before = np.arange(first, position + 1, dtype=f32) - f32(position)
                s = s + alibi_slope(op.alibi, op.n_head, h) * before
            top = s.max() if sinks is None else max(s.max(), sinks[h])
            e = np.exp(s - top)
            total = e.sum() + (0 if sinks is None else np.exp(sinks[h] - top))
            out[t, h] = (e / total) @ v[:, h // group]
    p.values[op.out] = out.reshape(len(q), -1)


def _first_position(op: ops.Attention, position: int) -> int:
    if op.mask == "sliding":
        return max(0, position - op.window + 1)
    if op.mask == "chunked":
        return position // op.window * op.window
    if op.mask == "symmetric":
        return max(0, position - op.window // 2)
    return 0


# ---------------------------------------------------------------- recurrent layers


@RUN.register(ops.Convolve)
def _convolve(p: ReferenceProgram, op: ops.Convolve) -> None:
    x, n = p.values[op.x], op.weight.n_in
    w = p.weight(op.weight).reshape(-1, n)
    out = np.empty_like(x)
    for sequence in np.unique(p.batch.sequences):
        rows = np.flatnonzero(p.batch.sequences == sequence)
        state = p.state(op.state, int(sequence), int(p.batch.positions[rows[0]])).reshape(n - 1, -1)
        line = np.concatenate([state, x[rows]])
        out[rows] = sum(line[i : i + len(rows)] * w[:, i] for i in range(n))
        state[...] = line[len(rows) :]
    p.values[op.out] = out if op.bias is None else out + p.weight(op.bias).reshape(-1)


@RUN.register(ops.Compress)
def _compress(p: ReferenceProgram, op: ops.Compress) -> None:
    kv = p.values[op.kv]
    score = p.values[op.score]
    ape = p.weight(op.ape).reshape(op.ratio, -1)
    out, width = np.zeros((len(kv), op.out.width), f32), op.out.width
    for t, (sequence, position) in enumerate(zip(p.batch.sequences, p.batch.positions, strict=True)):
        i = int(position) % op.ratio
        # [halves, and the block before's first; largest, sum, values; width]
        state = p.state(op.state, int(sequence), int(position)).reshape(-1, 3, width)
        s, v = ((score[t] + ape[i]).reshape(-1, width)[::-1], kv[t].reshape(-1, width)[::-1])
        for half, (s_half, v_half) in enumerate(zip(s, v, strict=True)):
            new = np.stack([s_half, np.ones(width, f32), v_half])
            state[half] = new if i == 0 else _merge_parts(state[half], new)
        if i == op.ratio - 1:
            total = _merge_parts(state[2], state[0]) if op.overlap and position >= op.ratio else state[0]
            out[t] = total[2] / total[1]
            if op.overlap:
                state[2] = state[1]
    p.values[op.out] = out


def _merge_parts(a: Floats, b: Floats) -> Floats:
    """Return largest score, sum of weights and sum of values of the union of two parts."""
    largest = np.maximum(a[0], b[0])
    by_a, by_b = np.exp(a[0] - largest), np.exp(b[0] - largest)
    return np.stack([largest, a[1] * by_a + b[1] * by_b, a[2] * by_a + b[2] * by_b])


@RUN.register(ops.DeltaNet)
def _delta_net(p: ReferenceProgram, op: ops.DeltaNet) -> None:
    n = len(p.batch.tokens)
    q, k = (p.values[x].reshape(n, op.n_k_head, -1) for x in (op.q, op.k))
    v = p.values[op.v].reshape(n, op.n_v_head, -1)
    heads = np.arange(op.n_v_head)
    key = heads % op.n_k_head if op.tiled else heads // (op.n_v_head // op.n_k_head)
    decay, beta = np.exp(p.values[op.g]), p.values[op.beta]
    out = np.empty_like(v)
    for t, (sequence, position) in enumerate(zip(p.batch.sequences, p.batch.positions, strict=True)):
        s = p.state(op.state, int(sequence), int(position)).reshape(op.n_v_head, k.shape[2], v.shape[2])
        s *= decay[t].reshape(op.n_v_head, -1, 1)
        kt, qt = k[t, key], q[t, key] * f32(op.scale)
        delta = (v[t] - np.einsum("hkv,hk->hv", s, kt)) * beta[t][:, None]
        s += kt[:, :, None] * delta[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", s, qt)
    p.values[op.out] = out.reshape(n, -1)


@RUN.register(ops.SsmScan)
def _ssm_scan(p: ReferenceProgram, op: ops.SsmScan) -> None:
    n, d_state = len(p.batch.tokens), op.b.width // op.n_group
    a = np.array(op.a, f32) if isinstance(op.a, tuple) else p.weight(op.a).reshape(-1)
    x = p.values[op.x].reshape(n, op.n_head, -1)
    groups = np.arange(op.n_head) // (op.n_head // op.n_group)
    b, c = (p.values[v].reshape(n, op.n_group, d_state)[:, groups] for v in (op.b, op.c))
    dt = np.ones((n, op.n_head), f32)
    if op.dt is not None:
        dt = activate(Activation("softplus"), p.values[op.dt] + p.weight(op.dt_bias).reshape(-1))
    decay, out = np.exp(dt * a), np.empty_like(x)
    for t, (sequence, position) in enumerate(zip(p.batch.sequences, p.batch.positions, strict=True)):
        s = p.state(op.state, int(sequence), int(position)).reshape(op.n_head, d_state, -1)
        s *= decay[t][:, None, None]
        s += b[t][:, :, None] * (x[t] * dt[t][:, None])[:, None, :]
        out[t] = np.einsum("hsv,hs->hv", s, c[t])
    if op.d is not None:
        out += x * p.weight(op.d).reshape(-1, 1)
    flat = out.reshape(n, -1)
    p.values[op.out] = flat if op.z is None else gate(Activation("silu"), p.values[op.z], flat)


@RUN.register(ops.ColumnScan)
def _column_scan(p: ReferenceProgram, op: ops.ColumnScan) -> None:
    a, d = p.weight(op.a).T, p.weight(op.d).reshape(-1)
    x, b, c = (p.values[v] for v in (op.x, op.b, op.c))
    dt, out = activate(Activation("softplus"), p.values[op.dt]), np.empty_like(x)
    for t, (sequence, position) in enumerate(zip(p.batch.sequences, p.batch.positions, strict=True)):
        s = p.state(op.state, int(sequence), int(position)).reshape(a.shape)
        s *= np.exp(a * dt[t])
        s += b[t][:, None] * (x[t] * dt[t])
        out[t] = c[t] @ s + x[t] * d
    p.values[op.out] = gate(Activation("silu"), p.values[op.z], out)


@RUN.register(ops.Previous)
def _previous(p: ReferenceProgram, op: ops.Previous) -> None:
    x, out = p.values[op.x], np.empty_like(p.values[op.x])
    for t, (sequence, position) in enumerate(zip(p.batch.sequences, p.batch.positions, strict=True)):
        state = p.state(op.state, int(sequence), int(position))
        out[t], state[...] = state.copy(), x[t]
    p.values[op.out] = out


@RUN.register(ops.Wkv)
def _wkv(p: ReferenceProgram, op: ops.Wkv) -> None:
    n, n_head = len(p.batch.tokens), op.n_head
    r, g, k, v = (p.values[x].reshape(n, -1, op.r.width // n_head) for x in (op.r, op.g, op.k, op.v))
    k, v = (np.repeat(x, n_head // x.shape[1], axis=1) for x in (k, v))
    r, w = r * f32(op.scale), np.exp(f32(-op.bound) * _sigmoid(g)) if op.bound else np.exp(-np.exp(g))
    k, out = k - k * w if op.complement else k, np.empty_like(v)
    removed, rate = (None if x is None else p.values[x].reshape(r.shape) for x in (op.removed, op.rate))
    for t, (sequence, position) in enumerate(zip(p.batch.sequences, p.batch.positions, strict=True)):
        s = p.state(op.state, int(sequence), int(position)).reshape(n_head, r.shape[2], r.shape[2])
        before = s.copy()
        s *= w[t][:, :, None]
        s += k[t][:, :, None] * v[t][:, None, :]
        if removed is not None and rate is not None:
            removed_values = np.einsum("hkv,hk->hv", before, removed[t])
            s -= (removed[t] * rate[t])[:, :, None] * removed_values[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", before if op.earlier else s, r[t])
    p.values[op.out] = out.reshape(n, -1)


@RUN.register(ops.Observe)
def _observe(p: ReferenceProgram, op: ops.Observe) -> None:
    if p.backend.observer is not None:
        p.backend.observer(op.label, p.values[op.x], None if op.ids is None else p.values[op.ids])


@RUN.register(ops.SumColumns)
def _sum_columns(p: ReferenceProgram, op: ops.SumColumns) -> None:
    sum_columns(op, p.accumulators[op.label], p.values[op.x], None if op.ids is None else p.values[op.ids], p.report)


@RUN.register(ops.Covariance)
def _covariance(p: ReferenceProgram, op: ops.Covariance) -> None:
    ids, weights = (None if value is None else p.values[value] for value in (op.ids, op.weights))
    covariance(op, p.accumulators[op.label], p.values[op.x], ids, weights, p.report)


@RUN.register(ops.Similarity)
def _similarity(p: ReferenceProgram, op: ops.Similarity) -> None:
    similarity(op, p.accumulators[op.label], p.values[op.a], p.values[op.b], p.report)


@RUN.register(ops.CountUp)
def _count_up(p: ReferenceProgram, op: ops.CountUp) -> None:
    row = np.arange(op.first, op.first + op.out.width, dtype=np.int32)
    p.values[op.out] = np.tile(row, (p.batch.rows(op.out.outputs), 1))
