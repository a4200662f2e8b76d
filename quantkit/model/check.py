"""Shape checks of graphs and of fused operations: kernels work on addresses and do not check their arguments.

A model with inconsistent tensors, damaged or hostile, raises a FormatError that names the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import GGUFFile
from quantkit.kernels.parameters import MAX_DECAYS
from quantkit.model import ops
from quantkit.model.batch import Ints
from quantkit.model.ops import Graph, Lookup, Matrix, Op, OpTable, Value
from quantkit.types import TensorType

#: The shape check of every operation; one without a check does not run.
CHECK = OpTable("check.py")


def check_graph(graph: Graph, multiplies: Callable[[TensorType], bool]) -> None:
    """Raise FormatError if shapes are inconsistent, TypeNotSupported for a weight of a type without products."""
    for op in graph.ops:
        for matrix in op.matrices():
            t = matrix.tensor.type
            if not multiplies(t) and not isinstance(op, ops.Lookup):
                raise TypeNotSupported(
                    f"{matrix.tensor.name} is {t.name}, for which this version has no unpacker; see `quantkit types`",
                    "QK-E302",
                )
    check_ops(graph.ops)


def check_ops(operations: Iterable[Op]) -> None:
    """Raise FormatError if shapes of operations are inconsistent, TypeNotSupported for a kind without a check."""
    experts: dict[Value, int] = {}
    for op in operations:
        CHECK[type(op)](op, experts)


def fit(right: bool, op: Op, matrix: Matrix | None, problem: str) -> None:
    """Raise FormatError unless ``valid``; matrix: the weight to name."""
    if right:
        return
    if matrix is not None:
        raise FormatError(f"{matrix.tensor.name}: shape {list(matrix.tensor.shape)}, {problem}", "QK-E106")
    outs = ", ".join(str(v) for v in op.outputs())
    raise FormatError(f"the shapes of this model are inconsistent: {type(op).__name__} to {outs}: {problem}", "QK-E106")


def _count(matrix: Matrix) -> int:
    columns = matrix.columns or (0, matrix.tensor.shape[0])
    rows = matrix.n_out * math.prod(matrix.tensor.shape[2:])
    return (columns[1] - columns[0]) * rows


def _vector(op: Op, matrix: Matrix | None, n: int, purpose: str) -> None:
    if matrix is not None:
        in_range = matrix.columns is None or matrix.columns[1] <= matrix.tensor.shape[0]
        fit(in_range and _count(matrix) == n, op, matrix, f"where {purpose} needs {n} values")


def _product(op: Op, w: Matrix, x: Value, out: Value, bias: Matrix | None, scale: Matrix | None) -> None:
    fit(w.n_matrices == 1 and len(w.tensor.shape) <= 2, op, w, "where one matrix is needed")
    fit(w.n_in == x.width and w.n_out == out.width, op, w, f"where {x.width} values become {out.width}")
    _vector(op, bias, out.width, "a bias")
    _vector(op, scale, 1, "a scale")


def _by_expert(
    op: Op, w: Matrix, x: Value, out: Value, n_expert: int, bias: Matrix | None, scale: Matrix | None
) -> None:
    fit(w.n_matrices == n_expert, op, w, f"where the router selects among {n_expert} experts")
    fit(w.n_in == x.width and w.n_out == out.width, op, w, f"where {x.width} values become {out.width}")
    last = w.first_row + w.n_out
    fit(last <= (w.tensor.shape[1] if len(w.tensor.shape) > 1 else 1), op, w, f"where row {last} is needed")
    if bias is not None:
        first, end = bias.columns or (0, bias.tensor.shape[0])
        right = end - first == out.width and end <= bias.tensor.shape[0]
        fit(right and _count(bias) == out.width * n_expert, op, bias, f"where {n_expert} biases are needed")
    _vector(op, scale, n_expert, "scales of experts")


# ---------------------------------------------------------------- one for every operation


@CHECK.register(ops.Activate, ops.Clamp, ops.Scale, ops.ScaleByPosition)
@CHECK.register(ops.SelectOutputs, ops.Shift, ops.Softcap, ops.Xielu)
def _same_width(op: Any, experts: dict[Value, int]) -> None:
    fit(op.x.width == op.out.width, op, None, f"{op.x.width} columns become {op.out.width}")


@CHECK.register(ops.Embed)
def _embed(op: ops.Embed, experts: dict[Value, int]) -> None:
    right = op.weight.n_in == op.out.width and len(op.weight.tensor.shape) == 2
    fit(right, op, op.weight, f"where rows of {op.out.width} are needed")


@CHECK.register(ops.Lookup)
def _lookup(op: ops.Lookup, experts: dict[Value, int]) -> None:
    right = op.weight.tensor.type.name == "I32" and len(op.weight.tensor.shape) == 2 and op.weight.n_in == op.out.width
    fit(right and op.out.integer, op, op.weight, f"where rows of {op.out.width} integers are needed")


@CHECK.register(ops.Add)
def _add(op: ops.Add, experts: dict[Value, int]) -> None:
    fit(op.a.width == op.b.width == op.out.width, op, None, f"{op.a.width} and {op.b.width} columns are added")


@CHECK.register(ops.MultiplyBy)
def _multiply_by(op: ops.MultiplyBy, experts: dict[Value, int]) -> None:
    n = _count(op.vector) * op.repeat
    fit(n > 0 and op.x.width % n == 0, op, op.vector, f"which is not a divisor of {op.x.width} columns")


@CHECK.register(ops.Norm)
def _norm(op: ops.Norm, experts: dict[Value, int]) -> None:
    _same_width(op, experts)
    fit(op.group > 0 and op.x.width % op.group == 0, op, op.weight, f"groups of {op.group} of {op.x.width} columns")
    for vector in (op.weight, op.bias):
        if vector is not None:
            n = _count(vector)
            fit(n > 0 and op.x.width % n == 0 and n % op.group == 0, op, vector, f"for {op.x.width} columns")


@CHECK.register(ops.Exceed)
def _exceed(op: ops.Exceed, experts: dict[Value, int]) -> None:
    _same_width(op, experts)
    fit(op.x.width > 1 and op.x.per == 1, op, None, f"the deviation of {op.x.width} columns")


@CHECK.register(ops.ToLength)
def _to_length(op: ops.ToLength, experts: dict[Value, int]) -> None:
    _same_width(op, experts)
    right = op.group > 0 and op.x.width % op.group == 0 and op.like.width == op.group and op.x.per == 1
    fit(right, op, None, f"groups of {op.group} of {op.x.width} columns, as long as {op.like.width}")


@CHECK.register(ops.Mix)
def _mix(op: ops.Mix, experts: dict[Value, int]) -> None:
    right = op.n > 0 and op.x.width % op.n == 0 and op.weights.width % op.n == 0 and op.x.per == 1
    fit(right, op, None, f"{op.weights.width} weights for {op.n} groups of {op.x.width} columns")
    width = op.weights.width // op.n * (op.x.width // op.n)
    fit(op.out.width == op.base.width == width, op, None, f"{op.base.width} columns become {op.out.width}, not {width}")


@CHECK.register(ops.StreamWeights)
def _stream_weights(op: ops.StreamWeights, experts: dict[Value, int]) -> None:
    right = op.x.width == 24 and op.before.width == op.after.width == 4 and op.mixing.width == 16
    fit(right and op.rounds >= 1, op, None, f"{op.x.width} columns for {op.before.width} streams, not 24 for 4")
    _vector(op, op.scale, 3, "scales")
    _vector(op, op.base, op.x.width, "a bias")


@CHECK.register(ops.Lerp)
def _lerp(op: ops.Lerp, experts: dict[Value, int]) -> None:
    right = op.x.width > 0 and op.target.width == op.x.width and op.out.width % op.x.width == 0
    right = right and (op.weights is None or op.weights.width == op.out.width)
    fit(right, op, None, f"{op.target.width} columns between {op.x.width} become {op.out.width}")
    _vector(op, op.vector, op.out.width, "a mixture")


@CHECK.register(ops.Bonus)
def _bonus(op: ops.Bonus, experts: dict[Value, int]) -> None:
    widths = {v.width for v in (op.x, op.r, op.k, op.v, op.out)}
    right = widths == {op.x.width} and op.head > 0 and op.x.width % op.head == 0
    fit(right, op, None, f"heads of {op.head} columns, of {sorted(widths)}")
    _vector(op, op.vector, op.x.width, "a bonus")


@CHECK.register(ops.Glu)
def _glu(op: ops.Glu, experts: dict[Value, int]) -> None:
    if op.up is None:
        fit(op.gate.width == 2 * op.out.width, op, None, f"{op.gate.width} columns are not gate and up")
    else:
        right = op.up.width == op.out.width and op.gate.width > 0 and op.up.width % op.gate.width == 0
        fit(right, op, None, f"a gate of {op.gate.width} columns for {op.up.width}")


@CHECK.register(ops.Take)
def _take(op: ops.Take, experts: dict[Value, int]) -> None:
    right = op.period > 0 and op.x.width % op.period == 0 and op.out.width * op.period % op.x.width == 0
    fit(right, op, None, f"{op.out.width} of {op.x.width} columns, in periods of {op.period}")
    width = op.out.width * op.period // op.x.width
    fit(op.start >= 0 and op.start + width <= op.period, op, None, f"columns {op.start} to {op.start + width}")


@CHECK.register(ops.Join)
def _join(op: ops.Join, experts: dict[Value, int]) -> None:
    right = op.a.width % op.period_a == 0 and op.b.width % op.period_b == 0
    fit(right, op, None, "not a multiple of the period")
    n, m = op.a.width // op.period_a, op.b.width // op.period_b
    right = m > 0 and n % m == 0 and op.out.width == n * (op.period_a + op.period_b)
    fit(right, op, None, f"{op.a.width} and {op.b.width} columns become {op.out.width}")


@CHECK.register(ops.MulMat)
def _mul_mat(op: ops.MulMat, experts: dict[Value, int]) -> None:
    _product(op, op.weight, op.x, op.out, op.bias, op.scale)


@CHECK.register(ops.MulMats)
def _mul_mats(op: ops.MulMats, experts: dict[Value, int]) -> None:
    for out, w, bias, scale in zip(op.outs, op.weights, op.biases, op.scales, strict=True):
        _product(op, w, op.x, out, bias, scale)


@CHECK.register(ops.MulMatHeads)
def _mul_mat_heads(op: ops.MulMatHeads, experts: dict[Value, int]) -> None:
    w = op.weight
    right = op.x.width == w.n_matrices * w.n_in and op.out.width == w.n_matrices * w.n_out
    fit(right, op, w, f"where {op.x.width} values become {op.out.width}, by head")


@CHECK.register(ops.UpGate)
def _up_gate(op: ops.UpGate, experts: dict[Value, int]) -> None:
    _product(op, op.up, op.x, op.out, op.up_bias, op.up_scale)
    _product(op, op.gate, op.x, op.out, op.gate_bias, op.gate_scale)


@CHECK.register(ops.UpGateId)
def _up_gate_id(op: ops.UpGateId, experts: dict[Value, int]) -> None:
    n = experts.get(op.ids, op.up.n_matrices)
    _by_expert(op, op.up, op.x, op.out, n, op.up_bias, op.up_scale)
    _by_expert(op, op.gate, op.x, op.out, n, op.gate_bias, op.gate_scale)


@CHECK.register(ops.MulMatId)
def _mul_mat_id(op: ops.MulMatId, experts: dict[Value, int]) -> None:
    _by_expert(op, op.weight, op.x, op.out, experts.get(op.ids, op.weight.n_matrices), op.bias, op.scale)


@CHECK.register(ops.Route)
def _route(op: ops.Route, experts: dict[Value, int]) -> None:
    r = op.routing
    experts[op.ids] = r.n_expert // r.share
    fit(r.share >= 1 and r.n_expert % r.share == 0, op, None, f"{r.share} of {r.n_expert} experts share one")
    fit(op.logits.width == r.n_expert, op, None, f"a router of {op.logits.width} outputs for {r.n_expert} experts")
    fit(0 < r.n_used <= r.n_expert, op, None, f"{r.n_used} of {r.n_expert} experts are used")
    right = r.n_group >= 1 and r.n_expert % r.n_group == 0 and 1 <= r.n_group_used <= r.n_group
    fit(right, op, None, f"{r.n_group_used} of {r.n_group} groups of {r.n_expert} experts")
    sufficient = r.n_expert // r.n_group * r.n_group_used >= r.n_used
    fit(sufficient, op, None, "the selected groups have too few experts")
    right = op.selected is None or (
        op.selected.integer and op.selected.width == r.n_used == op.ids.width and r.share == 1
    )
    fit(right, op, None, f"{op.selected} are selected, not {r.n_used}")
    _vector(op, op.bias, r.n_expert, "a selection bias")


@CHECK.register(ops.Combine)
def _combine(op: ops.Combine, experts: dict[Value, int]) -> None:
    _rows_side_by_side(op, op.x, op.out, op.weights)


@CHECK.register(ops.Repeat)
def _repeat(op: ops.Repeat, experts: dict[Value, int]) -> None:
    _rows_side_by_side(op, op.out, op.x, op.weights)


def _rows_side_by_side(op: Op, multiple: Value, single: Value, weights: Value | None) -> None:
    n = multiple.width * multiple.per // single.width
    fit(n * single.width == multiple.width * multiple.per, op, None, f"{multiple} and {single}")
    fit(weights is None or weights.width == n, op, None, f"{weights} for {n} rows")


@CHECK.register(ops.RopeTable)
def _rope_table(op: ops.RopeTable, experts: dict[Value, int]) -> None:
    n = op.config.n_rot
    fit(n > 0 and n % 2 == 0 and op.out.width == n and op.step >= 1, op, None, f"{n} columns rotate")
    if op.factors is not None:
        fit(_count(op.factors) >= n // 2, op, op.factors, f"where {n // 2} divisors are needed")


@CHECK.register(ops.Rope)
def _rope(op: ops.Rope, experts: dict[Value, int]) -> None:
    _same_width(op, experts)
    right = op.head > 0 and op.x.width % op.head == 0 and op.start + op.config.n_rot <= op.head
    fit(right and op.start >= 0, op, None, f"{op.config.n_rot} columns of heads of {op.head} rotate")


@CHECK.register(ops.CacheWrite)
def _cache_write(op: ops.CacheWrite, experts: dict[Value, int]) -> None:
    v = 0 if op.v is None else op.v.width
    fit((op.k.width, v) == (op.cache.k_width, op.cache.v_width), op, None, "keys and values do not fit their cache")


@CHECK.register(ops.BlockWrite)
def _block_write(op: ops.BlockWrite, experts: dict[Value, int]) -> None:
    fit(op.k.width == op.cache.k_width and op.cache.ratio > 0, op, None, "keys do not fit their cache")


@CHECK.register(ops.WindowAndBlocks)
def _window_and_blocks(op: ops.WindowAndBlocks, experts: dict[Value, int]) -> None:
    right = op.out.integer and 0 < op.window <= op.out.width and op.cache.ratio > 0 and op.cache.positions
    fit(right, op, None, f"{op.out.width} cells with a window of {op.window}")
    n = 0 if op.blocks is None else op.blocks.width
    right = op.blocks is None or (op.blocks.integer and op.out.width - op.window == n)
    fit(right, op, None, f"{n} blocks, but space for {op.out.width - op.window}")


@CHECK.register(ops.Attention)
def _attention(op: ops.Attention, experts: dict[Value, int]) -> None:
    c = op.cache
    heads = op.n_head_kv > 0 and op.n_head % op.n_head_kv == 0
    fit(heads, op, None, f"{op.n_head} heads share {op.n_head_kv} of keys")
    right = op.q.width == op.n_head * op.head_k and op.out.width == op.n_head * op.head_v
    fit(right, op, None, f"{op.q.width} columns of queries for {op.n_head} heads of {op.head_k}")
    values = c.v_width == op.n_head_kv * op.head_v if c.v_width else op.n_head_kv == 1 and op.head_v <= op.head_k
    right = c.k_width == op.n_head_kv * op.head_k and values
    fit(right, op, None, f"keys of {c.k_width} and values of {c.v_width} columns for {op.n_head_kv} heads")
    _vector(op, op.sinks, op.n_head, "sinks")
    fit(op.mask != "symmetric" or not op.alibi, op, None, "no bias by distance within a symmetric window")
    if op.buckets is not None:
        n = op.buckets.n_out
        right = op.buckets.n_in == op.n_head and op.buckets.n_matrices == 1 and n >= 4 and n % 4 == 0
        fit(right and op.mask == "whole", op, op.buckets, f"where buckets of {op.n_head} heads are needed")
    if op.selected is not None:
        right = op.selected.integer and op.selected.width > 0 and op.selected.outputs == op.out.outputs
        fit(right, op, None, f"{op.selected.width} positions are selected")
        fit(not c.v_width and op.mask == "causal" and not op.alibi, op, None, "only latent rows are selected")
        right = not c.ratio or 0 < op.window <= op.selected.width
        fit(right, op, None, f"{op.selected.width} cells with a window of {op.window}")


@CHECK.register(ops.LightningIndexer)
def _lightning_indexer(op: ops.LightningIndexer, experts: dict[Value, int]) -> None:
    right = op.n_head > 0 and op.head > 0 and op.q.width == op.n_head * op.head and op.weights.width == op.n_head
    fit(right, op, None, f"{op.q.width} columns of queries and {op.weights.width} weights for {op.n_head} heads")
    fit((op.cache.k_width, op.cache.v_width) == (op.head, 0), op, None, f"keys of {op.cache.k_width} columns")
    fit(op.out.integer and op.out.width > 0, op, None, f"{op.out.width} positions are selected")


@CHECK.register(ops.Convolve)
def _convolve(op: ops.Convolve, experts: dict[Value, int]) -> None:
    taps = op.weight.n_in
    fit(_count(op.weight) == taps * op.x.width, op, op.weight, f"where {op.x.width} columns are convolved")
    fit(1 < taps <= 16 and op.state.width == (taps - 1) * op.x.width, op, op.weight, f"with {taps} taps, not 2 to 16")
    _vector(op, op.bias, op.x.width, "a bias")
    _same_width(op, experts)


@CHECK.register(ops.Compress)
def _compress(op: ops.Compress, experts: dict[Value, int]) -> None:
    halves = 2 if op.overlap else 1
    right = op.kv.width == op.score.width == halves * op.out.width and op.ratio > 0
    fit(right, op, None, f"{op.kv.width} and {op.score.width} columns become {op.out.width}")
    right = op.ape.n_in == op.kv.width and _count(op.ape) == op.kv.width * op.ratio
    fit(right, op, op.ape, f"where {op.ratio} rows of {op.kv.width} are needed")
    size = (9 if op.overlap else 3) * op.out.width
    fit(op.state.width == size, op, None, f"a state of {op.state.width} for {size}")


@CHECK.register(ops.DeltaNet)
def _delta_net(op: ops.DeltaNet, experts: dict[Value, int]) -> None:
    heads = op.n_k_head > 0 and op.n_v_head > 0 and op.n_v_head % op.n_k_head == 0
    fit(heads, op, None, f"{op.n_v_head} heads of values for {op.n_k_head} of keys")
    right = op.q.width == op.k.width and op.q.width % op.n_k_head == 0 and op.v.width % op.n_v_head == 0
    right = right and op.beta.width == op.n_v_head and op.out.width == op.v.width
    right = right and op.g.width in (op.n_v_head, op.n_v_head * (op.k.width // op.n_k_head))
    fit(right, op, None, f"keys of {op.k.width} and values of {op.v.width} columns")
    in_limit = not op.by_row or op.g.width <= op.n_v_head * MAX_DECAYS
    fit(in_limit, op, None, f"more than {MAX_DECAYS} rows of a state have their own decay")
    size = op.n_v_head * (op.k.width // op.n_k_head) * (op.v.width // op.n_v_head)
    fit(op.state.width == size, op, None, f"a state of {op.state.width} for {size}")


@CHECK.register(ops.SsmScan)
def _ssm_scan(op: ops.SsmScan, experts: dict[Value, int]) -> None:
    heads = op.n_head > 0 and op.n_group > 0 and op.n_head % op.n_group == 0
    fit(heads, op, None, f"{op.n_head} heads in {op.n_group} groups")
    right = op.x.width == op.out.width and op.x.width % op.n_head == 0
    right = right and (op.z is None or op.z.width == op.x.width) and (op.dt is None or op.dt.width == op.n_head)
    right = right and op.b.width == op.c.width and op.b.width % op.n_group == 0
    right = right and (op.dt is None) == (op.dt_bias is None)
    steps = 0 if op.dt is None else op.dt.width
    fit(right, op, None, f"{op.n_head} heads of {op.x.width} columns, {steps} steps and {op.b.width} inputs")
    size = op.x.width * (op.b.width // op.n_group)
    fit(op.state.width == size, op, None, f"a state of {op.state.width} for {size}")
    if isinstance(op.a, tuple):
        fit(len(op.a) == op.n_head, op, None, f"{len(op.a)} decays for {op.n_head} heads")
    for vector in (op.dt_bias, None if isinstance(op.a, tuple) else op.a, op.d):
        _vector(op, vector, op.n_head, "a scan")


@CHECK.register(ops.ColumnScan)
def _column_scan(op: ops.ColumnScan, experts: dict[Value, int]) -> None:
    width, d_state = op.x.width, op.b.width
    right = width == op.z.width == op.dt.width == op.out.width and d_state == op.c.width > 0
    fit(right, op, None, f"{width} columns, {op.dt.width} steps and {d_state} inputs")
    fit(op.a.n_in == d_state and _count(op.a) == d_state * width, op, op.a, f"where {d_state} rows decay")
    _vector(op, op.d, width, "a scan")
    fit(op.state.width == d_state * width, op, None, f"a state of {op.state.width} for {d_state * width}")


@CHECK.register(ops.Previous)
def _previous(op: ops.Previous, experts: dict[Value, int]) -> None:
    _same_width(op, experts)
    fit(op.state.width == op.x.width, op, None, f"a state of {op.state.width} for {op.x.width}")


@CHECK.register(ops.Wkv)
def _wkv(op: ops.Wkv, experts: dict[Value, int]) -> None:
    width, n_head = op.r.width, op.n_head
    fit(n_head > 0 and width % n_head == 0, op, None, f"{n_head} heads of {width} columns")
    head = width // n_head
    full = [v for v in (op.g, op.out, op.removed, op.rate) if v is not None]
    right = all(v.width == width for v in full) and (op.removed is None) == (op.rate is None)
    right = right and op.k.width == op.v.width > 0 and width % op.k.width == 0 and op.k.width % head == 0
    fit(right, op, None, f"{op.g.width} decays, {op.k.width} columns of keys and {op.v.width} of values for {width}")
    fit(head <= MAX_DECAYS, op, None, f"more than {MAX_DECAYS} rows of a state have their own decay")
    fit(op.state.width == width * head, op, None, f"a state of {op.state.width} for {width * head}")


# ---------------------------------------------------------------- observers


def _rows_of_experts(op: Op, x: Value, ids: Value | None) -> None:
    right = ids is None or x.per in (1, ids.width)
    fit(right, op, None, f"{x.per} rows per token for {0 if ids is None else ids.width} experts")


@CHECK.register(ops.Observe)
def _observe(op: ops.Observe, experts: dict[Value, int]) -> None:
    _rows_of_experts(op, op.x, op.ids)


@CHECK.register(ops.SumColumns)
def _sum_columns(op: ops.SumColumns, experts: dict[Value, int]) -> None:
    _rows_of_experts(op, op.x, op.ids)
    fit(op.n_mat == (1 if op.ids is None else experts.get(op.ids, op.n_mat)), op, None, f"sums of {op.n_mat} matrices")


@CHECK.register(ops.Covariance)
def _covariance(op: ops.Covariance, experts: dict[Value, int]) -> None:
    _rows_of_experts(op, op.x, op.ids)
    first, end = op.experts
    fit(op.heads > 0 and op.x.width % op.heads == 0, op, None, f"{op.x.width} columns of {op.heads} heads")
    fit(0 <= first < end, op, None, f"experts {first} to {end}")


@CHECK.register(ops.Similarity)
def _similarity(op: ops.Similarity, experts: dict[Value, int]) -> None:
    fit(op.a.width == op.b.width, op, None, f"{op.a.width} and {op.b.width} columns are compared")


@CHECK.register(ops.CountUp)
def _count_up(op: ops.CountUp, experts: dict[Value, int]) -> None:
    fit(op.out.integer and op.first >= 0, op, None, f"experts from {op.first} on")


# ---------------------------------------------------------------- contents


def table_of(source: GGUFFile, op: Lookup) -> Ints:
    """Return the table of an operation, int32 [n_vocab, width].

    Raises FormatError unless its numbers run from 0 to n - 1.
    """
    tensor = op.weight.tensor
    table = source.data(tensor).view("<i4").reshape(-1, op.weight.n_in)
    if table.size and not (table.min() >= 0 and table.max() < op.n):
        raise FormatError(f"{tensor.name}: values are {table.min()} to {table.max()}, not 0 to {op.n - 1}")
    return table
