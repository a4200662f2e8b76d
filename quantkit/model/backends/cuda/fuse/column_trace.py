"""Tracing of a value's columns back through operations that move columns or work on single columns or heads.

A ColumnChain has the source of some columns, their steps and their destination; per_head.cu runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

from quantkit.kernels.cuda.layer import per_head
from quantkit.kernels.parameters import Activation
from quantkit.model.backends.cuda.fuse.def_use import DefUse
from quantkit.model.ops import (
    Activate,
    Glu,
    Join,
    Matrix,
    MultiplyBy,
    Norm,
    Op,
    Repeat,
    Rope,
    ScaleByPosition,
    Take,
    Value,
)

#: Operations that a trace follows.
PER_COLUMN = (Activate, Glu, Join, MultiplyBy, Norm, Repeat, Rope, ScaleByPosition, Take)

#: The order of a chain's steps.
_BIAS, _ACTIVATION, _SCALE, _NORM_BEFORE, _ROPE, _NORM_AFTER, _POSITION, _GATE, _END = range(9)


@dataclass(frozen=True)
class Columns:
    """Some columns of a value, in order: column c is at start + c // chunk * stride + c % chunk."""

    start: int
    width: int
    chunk: int
    stride: int

    @staticmethod
    def contiguous(start: int, width: int) -> Columns:
        """Return adjacent columns."""
        return Columns(start, width, width, 0)

    @property
    def end(self) -> int:
        """The column after the last one in memory."""
        return self.start + (self.width // self.chunk - 1) * self.stride + self.chunk

    @property
    def is_contiguous(self) -> bool:
        """Whether they are adjacent."""
        return self.chunk == self.width

    def covers_groups(self, size: int) -> bool:
        """Return whether they are whole groups of ``size`` columns."""
        return not self.start % size and not self.chunk % size and (self.is_contiguous or not self.stride % size)

    def within_groups(self, size: int) -> bool:
        """Return whether every chunk is within a group, at the same offset."""
        return self.start % size + self.chunk <= size and (self.is_contiguous or not self.stride % size)

    def relocate(self, start: int, stride: int) -> Columns:
        """Return the same chunks at another start and stride."""
        return Columns(start, self.width, self.chunk, stride)


@dataclass(frozen=True)
class ColumnChain:
    """Columns of x, their steps (in the order of per_head.cu), and out_columns, their destination in the result."""

    x: Value
    columns: Columns
    out_columns: Columns
    row_weights: Value | None = None
    bias: Matrix | None = None
    activation: Activation | None = None
    scale: Matrix | None = None
    norm: Norm | None = None
    norm_step: int = per_head.NO_NORM
    rope: Rope | None = None
    head: int = 1
    rope_start: int = 0
    by_position: ScaleByPosition | None = None
    gate: Value | None = None
    gate_columns: Columns = Columns(0, 1, 1, 0)
    gating: Activation | None = None
    #: The first step in use.
    first_step: int = _END
    #: The replaced operations.
    ops: tuple[Op, ...] = ()

    @property
    def unit(self) -> int:
        """The columns of a unit: pieces are multiples of it."""
        return lcm(1 if self.norm is None else self.norm.group, 1 if self.rope is None else self.head)

    def inputs(self) -> tuple[Value, ...]:
        """Return the values that it reads."""
        table = None if self.rope is None else self.rope.table
        return tuple(value for value in (self.x, self.row_weights, self.gate, table) if value is not None)


def trace_columns(def_use: DefUse, value: Value) -> list[ColumnChain]:
    """Return the chains that together compute a value."""
    all_columns = Columns.contiguous(0, value.width)
    return _follow(def_use, ColumnChain(value, all_columns, all_columns))


def _follow(def_use: DefUse, chain: ColumnChain) -> list[ColumnChain]:
    while True:
        op = def_use.definition(chain.x)
        if isinstance(op, Join):
            split = _join(op, chain)
            return [chain] if split is None else [traced for half in split for traced in _follow(def_use, half)]
        if isinstance(op, Repeat):  # its input has other rows, so a chain starts here
            return [replace(chain, x=op.x, row_weights=op.weights, ops=(*chain.ops, op))]
        step = None if op is None else _STEPS.get(type(op))
        # Rows of another kind end a trace.
        if op is None or step is None or any(_rows(v) != _rows(chain.x) for v in op.inputs()):
            return [chain]
        further = step(def_use, op, chain)
        if further is None:
            return [chain]
        chain = replace(further, ops=(*chain.ops, op))


def _rows(value: Value) -> tuple[int, bool]:
    return value.per, value.outputs


# ---------------------------------------------------------------- columns that move


def _take(def_use: DefUse, op: Take, chain: ColumnChain) -> ColumnChain | None:
    columns = _take_columns(op, chain.columns)
    return None if columns is None else replace(chain, x=op.x, columns=columns)


def _take_columns(op: Take, columns: Columns) -> Columns | None:
    """Return the columns of x that become ``columns`` of the result; None if they are not strided."""
    chunk = op.out.width // (op.x.width // op.period)
    start = op.start + columns.start // chunk * op.period + columns.start % chunk
    if op.x.width == op.period:
        return columns.relocate(start, columns.stride)
    if columns.within_groups(chunk):
        return columns.relocate(start, columns.stride // chunk * op.period)
    if columns.is_contiguous and columns.covers_groups(chunk):
        return Columns(start, columns.width, chunk, op.period)
    return None


def _join(op: Join, chain: ColumnChain) -> list[ColumnChain] | None:
    """Return the chain through a Join, or two chains; None if their columns are not strided."""
    columns, period = chain.columns, op.period_a + op.period_b
    sides = ((op.a, 0, op.period_a), (op.b, op.period_a, op.period_b))
    if columns.within_groups(period):
        for x, first, part_period in sides:
            groups, start = x.width // part_period, columns.start % period - first
            if start >= 0 and start + columns.chunk <= part_period:
                repeats = groups < op.out.width // period
                if repeats and (groups > 1 or not columns.is_contiguous):
                    return None
                start += 0 if repeats else columns.start // period * part_period
                return [
                    replace(
                        chain,
                        x=x,
                        columns=columns.relocate(start, columns.stride // period * part_period),
                        ops=(*chain.ops, op),
                    )
                ]
    if not (
        columns.is_contiguous
        and columns.covers_groups(period)
        and chain.out_columns.is_contiguous
        and chain.first_step == _END
    ):
        return None
    count, chains = columns.width // period, list[ColumnChain]()
    for x, first, part_period in sides:
        groups, width = x.width // part_period, count * part_period
        if groups == 1 < count:
            part_columns = Columns(0, width, part_period, 0)
        elif groups == op.out.width // period:
            part_columns = Columns.contiguous(columns.start // period * part_period, width)
        else:
            return None
        start = chain.out_columns.start + first
        out_columns = Columns(start, width, part_period, period) if count > 1 else Columns.contiguous(start, width)
        chains.append(replace(chain, x=x, columns=part_columns, out_columns=out_columns, ops=(*chain.ops, op)))
    return chains


# ---------------------------------------------------------------- steps


def _is_whole(columns: Columns, value: Value) -> bool:
    return columns.is_contiguous and columns.start == 0 and columns.width == value.width


def _length(matrix: Matrix) -> int:
    return prod(matrix.tensor.shape)


def _multiply_by(def_use: DefUse, op: MultiplyBy, chain: ColumnChain) -> ColumnChain | None:
    step = _BIAS if op.kind == "plus" else _SCALE
    if chain.first_step <= step or op.repeat > 1 or op.kind == "over" or not _is_whole(chain.columns, op.out):
        return None
    further = replace(chain, x=op.x, first_step=step)
    return replace(further, bias=op.vector) if op.kind == "plus" else replace(further, scale=op.vector)


def _activate(def_use: DefUse, op: Activate, chain: ColumnChain) -> ColumnChain | None:
    if chain.first_step <= _ACTIVATION or not _is_plain(op.activation):
        return None
    return replace(chain, x=op.x, first_step=_ACTIVATION, activation=op.activation)


def _is_plain(activation: Activation) -> bool:
    limits = activation.gate_limit, activation.act_limit, activation.up_limit
    return activation.kind != "swiglu_oai" and not any(limits)


def _norm(def_use: DefUse, op: Norm, chain: ColumnChain) -> ColumnChain | None:
    step = _NORM_AFTER if chain.first_step > _NORM_AFTER else _NORM_BEFORE
    if chain.norm is not None or chain.first_step <= step or op.group > per_head.MAX_OF_BLOCK:
        return None
    long = any(_length(m) > op.group for m in (op.weight, op.bias) if m is not None)
    if not chain.columns.covers_groups(op.group) or (long and not _is_whole(chain.columns, op.out)):
        return None
    norm_step = per_head.AFTER if step == _NORM_AFTER else per_head.BEFORE
    return replace(chain, x=op.x, first_step=step, norm=op, norm_step=norm_step)


def _rope(def_use: DefUse, op: Rope, chain: ColumnChain) -> ColumnChain | None:
    """Return the chain through a Rope, without a step if its columns do not rotate."""
    columns, n_rot = chain.columns, op.config.n_rot
    if columns.covers_groups(op.head):
        head, start = op.head, op.start
    elif columns.within_groups(op.head):
        first = columns.start % op.head
        if first + columns.chunk <= op.start or first >= op.start + n_rot:
            return replace(chain, x=op.x)
        head, start = columns.chunk, op.start - first
    else:
        return None
    if start < 0 or start + n_rot > head or chain.rope is not None or chain.first_step <= _ROPE or op.x.per > 1:
        return None
    return replace(chain, x=op.x, first_step=_ROPE, rope=op, head=head, rope_start=start)


def _scale_by_position(def_use: DefUse, op: ScaleByPosition, chain: ColumnChain) -> ColumnChain | None:
    if chain.first_step <= _POSITION or op.x.per > 1 or op.x.outputs:
        return None
    return replace(chain, x=op.x, first_step=_POSITION, by_position=op)


def _glu(def_use: DefUse, op: Glu, chain: ColumnChain) -> ColumnChain | None:
    if chain.first_step <= _GATE or not _is_plain(op.activation):
        return None
    gate = op.gate
    gate_columns = chain.columns
    x = op.up or op.gate
    up_columns = chain.columns
    if op.up is None:  # side by side in one row
        up_columns = up_columns.relocate(up_columns.start + op.out.width, up_columns.stride)
    elif gate.width != op.up.width:
        return None
    while isinstance(take := def_use.definition(gate), Take) and _rows(take.x) == _rows(gate):
        further = _take_columns(take, gate_columns)
        if further is None:
            break
        gate = take.x
        gate_columns = further
        chain = replace(chain, ops=(*chain.ops, take))
    return replace(
        chain, x=x, columns=up_columns, first_step=_GATE, gate=gate, gate_columns=gate_columns, gating=op.activation
    )


_STEPS: Mapping[type[Op], Callable[[DefUse, Any, ColumnChain], ColumnChain | None]] = {
    Activate: _activate,
    Glu: _glu,
    MultiplyBy: _multiply_by,
    Norm: _norm,
    Rope: _rope,
    ScaleByPosition: _scale_by_position,
    Take: _take,
}
