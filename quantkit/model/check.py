"""Every shape of a graph is checked before anything runs: kernels work on addresses and trust what they are told.

A model whose tensors do not fit together, by accident or on purpose, is a FormatError that names the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from quantkit.errors import FormatError, TypeNotSupported
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
    Graph,
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
from quantkit.types import TensorType

#: Types of weights that nothing multiplies with: integers and activation formats have no meaning here.
_FLOATS = ("F32", "F16", "BF16")


def check_graph(graph: Graph, multiplies: Callable[[TensorType], bool]) -> None:
    """Raise FormatError if shapes do not fit together, TypeNotSupported for a weight of a type without products."""
    experts: dict[Value, int] = {}
    for op in graph.ops:
        if isinstance(op, Route):
            experts[op.ids] = op.routing.n_expert
        for matrix in op.matrices():
            t = matrix.tensor.type
            if t.name not in _FLOATS and not multiplies(t):
                raise TypeNotSupported(
                    f"{matrix.tensor.name} is {t.name}, for which there is no unpacker in this version; "
                    "`quantkit types` shows which exist"
                )
        CHECK.get(type(op), _nothing)(op, experts)


def _fit(right: bool, op: Op, matrix: Matrix | None, what: str) -> None:
    if right:
        return
    if matrix is not None:
        raise FormatError(f"{matrix.tensor.name}: shape {list(matrix.tensor.shape)}, {what}")
    outs = ", ".join(str(v) for v in op.outputs())
    raise FormatError(f"the shapes of this model do not fit together: {type(op).__name__} to {outs}: {what}")


def _count(matrix: Matrix) -> int:
    return math.prod(matrix.tensor.shape)


def _vector(op: Op, matrix: Matrix | None, n: int, what: str) -> None:
    if matrix is not None:
        _fit(_count(matrix) == n, op, matrix, f"where {what} takes {n} values")


def _product(op: Op, w: Matrix, x: Value, out: Value, bias: Matrix | None, scale: Matrix | None) -> None:
    _fit(w.n_matrices == 1 and len(w.tensor.shape) <= 2, op, w, "where one matrix is needed")
    _fit(w.n_in == x.width and w.n_out == out.width, op, w, f"where {x.width} values become {out.width}")
    _vector(op, bias, out.width, "a bias")
    _vector(op, scale, 1, "a scale")


def _by_expert(
    op: Op, w: Matrix, x: Value, out: Value, n_expert: int, bias: Matrix | None, scale: Matrix | None
) -> None:
    _fit(w.n_matrices == n_expert, op, w, f"where the router chooses among {n_expert} experts")
    _fit(w.n_in == x.width and w.n_out == out.width, op, w, f"where {x.width} values become {out.width}")
    last = w.first_row + w.n_out
    _fit(last <= (w.tensor.shape[1] if len(w.tensor.shape) > 1 else 1), op, w, f"where row {last} is needed")
    if bias is not None:
        first, end = bias.columns or (0, bias.tensor.shape[0])
        right = end - first == out.width and end <= bias.tensor.shape[0]
        _fit(right and _count(bias) == bias.tensor.shape[0] * n_expert, op, bias, f"where {n_expert} biases are needed")
    _vector(op, scale, n_expert, "scales of experts")


# ---------------------------------------------------------------- one for every operation


def _nothing(op: Any, experts: dict[Value, int]) -> None:
    """Nothing to check."""


def _same(op: Any, experts: dict[Value, int]) -> None:
    _fit(op.x.width == op.out.width, op, None, f"{op.x.width} columns become {op.out.width}")


def _embed(op: Embed, experts: dict[Value, int]) -> None:
    right = op.weight.n_in == op.out.width and len(op.weight.tensor.shape) == 2
    _fit(right, op, op.weight, f"where rows of {op.out.width} are needed")


def _add(op: Add, experts: dict[Value, int]) -> None:
    _fit(op.a.width == op.b.width == op.out.width, op, None, f"{op.a.width} and {op.b.width} columns are added")


def _multiply_by(op: MultiplyBy, experts: dict[Value, int]) -> None:
    n = _count(op.vector)
    _fit(n > 0 and op.x.width % n == 0, op, op.vector, f"which does not divide {op.x.width} columns")


def _norm(op: Norm, experts: dict[Value, int]) -> None:
    _same(op, experts)
    _fit(op.group > 0 and op.x.width % op.group == 0, op, op.weight, f"groups of {op.group} of {op.x.width} columns")
    for vector in (op.weight, op.bias):
        if vector is not None:
            n = _count(vector)
            _fit(n > 0 and op.x.width % n == 0 and n % op.group == 0, op, vector, f"for {op.x.width} columns")


def _glu(op: Glu, experts: dict[Value, int]) -> None:
    if op.up is None:
        _fit(op.gate.width == 2 * op.out.width, op, None, f"{op.gate.width} columns are no gate and up")
    else:
        right = op.up.width == op.out.width and op.gate.width > 0 and op.up.width % op.gate.width == 0
        _fit(right, op, None, f"a gate of {op.gate.width} columns for {op.up.width}")


def _take(op: Take, experts: dict[Value, int]) -> None:
    right = op.period > 0 and op.x.width % op.period == 0 and op.out.width * op.period % op.x.width == 0
    _fit(right, op, None, f"{op.out.width} of {op.x.width} columns, in periods of {op.period}")
    width = op.out.width * op.period // op.x.width
    _fit(op.start >= 0 and op.start + width <= op.period, op, None, f"columns {op.start} to {op.start + width}")


def _join(op: Join, experts: dict[Value, int]) -> None:
    right = op.a.width % op.period_a == 0 and op.b.width % op.period_b == 0
    _fit(right, op, None, "periods do not divide")
    n, m = op.a.width // op.period_a, op.b.width // op.period_b
    right = m > 0 and n % m == 0 and op.out.width == n * (op.period_a + op.period_b)
    _fit(right, op, None, f"{op.a.width} and {op.b.width} columns become {op.out.width}")


def _mul_mat(op: MulMat, experts: dict[Value, int]) -> None:
    _product(op, op.weight, op.x, op.out, op.bias, op.scale)


def _mul_mats(op: MulMats, experts: dict[Value, int]) -> None:
    for out, w, bias, scale in zip(op.outs, op.weights, op.biases, op.scales, strict=True):
        _product(op, w, op.x, out, bias, scale)


def _mul_mat_heads(op: MulMatHeads, experts: dict[Value, int]) -> None:
    w = op.weight
    right = op.x.width == w.n_matrices * w.n_in and op.out.width == w.n_matrices * w.n_out
    _fit(right, op, w, f"where {op.x.width} values become {op.out.width}, by head")


def _up_gate(op: UpGate, experts: dict[Value, int]) -> None:
    _product(op, op.up, op.x, op.out, op.up_bias, op.up_scale)
    _product(op, op.gate, op.x, op.out, op.gate_bias, op.gate_scale)


def _up_gate_id(op: UpGateId, experts: dict[Value, int]) -> None:
    n = experts.get(op.ids, op.up.n_matrices)
    _by_expert(op, op.up, op.x, op.out, n, op.up_bias, op.up_scale)
    _by_expert(op, op.gate, op.x, op.out, n, op.gate_bias, op.gate_scale)


def _mul_mat_id(op: MulMatId, experts: dict[Value, int]) -> None:
    _by_expert(op, op.weight, op.x, op.out, experts.get(op.ids, op.weight.n_matrices), op.bias, op.scale)


def _route(op: Route, experts: dict[Value, int]) -> None:
    r = op.routing
    _fit(op.logits.width == r.n_expert, op, None, f"a router of {op.logits.width} outputs for {r.n_expert} experts")
    _fit(0 < r.n_used <= r.n_expert, op, None, f"{r.n_used} of {r.n_expert} experts are used")
    right = r.n_group >= 1 and r.n_expert % r.n_group == 0 and 1 <= r.n_group_used <= r.n_group
    _fit(right, op, None, f"{r.n_group_used} of {r.n_group} groups of {r.n_expert} experts")
    enough = r.n_expert // r.n_group * r.n_group_used >= r.n_used
    _fit(enough, op, None, "the groups used have too few experts")
    _vector(op, op.bias, r.n_expert, "a bias of the choice")


def _combine(op: Combine, experts: dict[Value, int]) -> None:
    _same(op, experts)
    if op.weights is not None:
        _fit(op.weights.width == op.x.per, op, None, f"{op.weights.width} weights for {op.x.per} experts")


def _rope_table(op: RopeTable, experts: dict[Value, int]) -> None:
    n = op.config.n_rot
    _fit(n > 0 and n % 2 == 0 and op.out.width == n, op, None, f"{n} columns rotate")
    if op.factors is not None:
        _fit(_count(op.factors) >= n // 2, op, op.factors, f"where {n // 2} divisors are needed")


def _rope(op: Rope, experts: dict[Value, int]) -> None:
    _same(op, experts)
    right = op.head > 0 and op.x.width % op.head == 0 and op.start + op.config.n_rot <= op.head
    _fit(right and op.start >= 0, op, None, f"{op.config.n_rot} columns of heads of {op.head} rotate")


def _cache_write(op: CacheWrite, experts: dict[Value, int]) -> None:
    v = 0 if op.v is None else op.v.width
    _fit((op.k.width, v) == (op.cache.k_width, op.cache.v_width), op, None, "keys and values do not fit their cache")


def _attention(op: Attention, experts: dict[Value, int]) -> None:
    c = op.cache
    heads = op.n_head_kv > 0 and op.n_head % op.n_head_kv == 0
    _fit(heads, op, None, f"{op.n_head} heads share {op.n_head_kv} of keys")
    right = op.q.width == op.n_head * op.head_k and op.out.width == op.n_head * op.head_v
    _fit(right, op, None, f"{op.q.width} columns of queries for {op.n_head} heads of {op.head_k}")
    values = c.v_width == op.n_head_kv * op.head_v if c.v_width else op.n_head_kv == 1 and op.head_v <= op.head_k
    right = c.k_width == op.n_head_kv * op.head_k and values
    _fit(right, op, None, f"keys of {c.k_width} and values of {c.v_width} columns for {op.n_head_kv} heads")
    _vector(op, op.sinks, op.n_head, "sinks")


def _convolve(op: Convolve, experts: dict[Value, int]) -> None:
    taps = op.weight.n_in
    _fit(_count(op.weight) == taps * op.x.width, op, op.weight, f"where {op.x.width} columns are convolved")
    _fit(1 < taps <= 16 and op.state.width == (taps - 1) * op.x.width, op, op.weight, f"with {taps} taps, not 2 to 16")
    _same(op, experts)


def _delta_net(op: DeltaNet, experts: dict[Value, int]) -> None:
    heads = op.n_k_head > 0 and op.n_v_head > 0 and op.n_v_head % op.n_k_head == 0
    _fit(heads, op, None, f"{op.n_v_head} heads of values for {op.n_k_head} of keys")
    right = op.q.width == op.k.width and op.q.width % op.n_k_head == 0 and op.v.width % op.n_v_head == 0
    right = right and op.g.width == op.beta.width == op.n_v_head and op.out.width == op.v.width
    _fit(right, op, None, f"keys of {op.k.width} and values of {op.v.width} columns")
    size = op.n_v_head * (op.k.width // op.n_k_head) * (op.v.width // op.n_v_head)
    _fit(op.state.width == size, op, None, f"a state of {op.state.width} for {size}")


CHECK: dict[type[Op], Callable[[Any, dict[Value, int]], None]] = {
    Embed: _embed,
    SelectOutputs: _same,
    Add: _add,
    Scale: _same,
    ScaleByPosition: _same,
    MultiplyBy: _multiply_by,
    Softcap: _same,
    Clamp: _same,
    Norm: _norm,
    Glu: _glu,
    Activate: _same,
    Take: _take,
    Join: _join,
    MulMat: _mul_mat,
    MulMats: _mul_mats,
    MulMatHeads: _mul_mat_heads,
    UpGate: _up_gate,
    Route: _route,
    MulMatId: _mul_mat_id,
    UpGateId: _up_gate_id,
    Repeat: _same,
    Combine: _combine,
    RopeTable: _rope_table,
    Rope: _rope,
    CacheWrite: _cache_write,
    Attention: _attention,
    Convolve: _convolve,
    DeltaNet: _delta_net,
}
