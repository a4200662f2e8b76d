"""Traces the columns of a value back through operations that move columns, or compute each column or head from itself
alone, to values that other operations make.

A ColumnChain says where some columns begin, which steps they take and where they end; per_head.cu carries it out.
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

#: Operations that a trace goes through.
PER_COLUMN = (Activate, Glu, Join, MultiplyBy, Norm, Repeat, Rope, ScaleByPosition, Take)

#: The order of a chain's steps.
_PLUS, _ACTIVATION, _TIMES, _BEFORE, _ROPE, _AFTER, _POSITION, _GATE, _END = range(9)


@dataclass(frozen=True)
class Columns:
    """Some columns of a value, in an order: the c-th is at start + c // each * step + c % each."""

    start: int
    width: int
    each: int
    step: int

    @staticmethod
    def run(start: int, width: int) -> Columns:
        """Return columns side by side."""
        return Columns(start, width, width, 0)

    @property
    def end(self) -> int:
        """The column after the last one in memory."""
        return self.start + (self.width // self.each - 1) * self.step + self.each

    @property
    def together(self) -> bool:
        """Whether they are side by side."""
        return self.each == self.width

    def of_groups(self, size: int) -> bool:
        """Tell whether they are whole groups of ``size`` columns."""
        return not self.start % size and not self.each % size and (self.together or not self.step % size)

    def within_groups(self, size: int) -> bool:
        """Tell whether every stretch lies within a group, each at the same place."""
        return self.start % size + self.each <= size and (self.together or not self.step % size)

    def moved(self, start: int, step: int) -> Columns:
        """Return the same stretches at other places."""
        return Columns(start, self.width, self.each, step)


@dataclass(frozen=True)
class ColumnChain:
    """Columns ``columns`` of x, their steps (per_head.cu has all, in order), and ``to``: their places in the result."""

    x: Value
    columns: Columns
    to: Columns
    by: Value | None = None
    plus: Matrix | None = None
    activation: Activation | None = None
    times: Matrix | None = None
    norm: Norm | None = None
    when: int = per_head.NEVER
    rope: Rope | None = None
    head: int = 1
    rope_start: int = 0
    by_position: ScaleByPosition | None = None
    gate: Value | None = None
    gate_columns: Columns = Columns(0, 1, 1, 0)
    gating: Activation | None = None
    #: The first of the steps that it has.
    first: int = _END
    #: The operations it replaces.
    of: tuple[Op, ...] = ()

    @property
    def unit(self) -> int:
        """The columns that belong together: pieces are multiples."""
        return lcm(1 if self.norm is None else self.norm.group, 1 if self.rope is None else self.head)

    def inputs(self) -> tuple[Value, ...]:
        """Return the values it reads."""
        table = None if self.rope is None else self.rope.table
        return tuple(value for value in (self.x, self.by, self.gate, table) if value is not None)


def trace_columns(def_use: DefUse, value: Value) -> list[ColumnChain]:
    """Return chains that together make a value."""
    whole = Columns.run(0, value.width)
    return _followed(def_use, ColumnChain(value, whole, whole))


def _followed(def_use: DefUse, chain: ColumnChain) -> list[ColumnChain]:
    while True:
        op = def_use.definition(chain.x)
        if isinstance(op, Join):
            split = _join(op, chain)
            return [chain] if split is None else [found for half in split for found in _followed(def_use, half)]
        if isinstance(op, Repeat):  # its input has other rows: a chain begins there
            return [replace(chain, x=op.x, by=op.weights, of=(*chain.of, op))]
        step = None if op is None else _STEPS.get(type(op))
        # Rows of another kind end a trace.
        if op is None or step is None or any(_rows(v) != _rows(chain.x) for v in op.inputs()):
            return [chain]
        further = step(def_use, op, chain)
        if further is None:
            return [chain]
        chain = replace(further, of=(*chain.of, op))


def _rows(value: Value) -> tuple[int, bool]:
    return value.per, value.outputs


# ---------------------------------------------------------------- columns that move


def _take(def_use: DefUse, op: Take, chain: ColumnChain) -> ColumnChain | None:
    columns = _taken(op, chain.columns)
    return None if columns is None else replace(chain, x=op.x, columns=columns)


def _taken(op: Take, of: Columns) -> Columns | None:
    """Return the columns of x that columns of op's result are."""
    each = op.out.width // (op.x.width // op.period)
    start = op.start + of.start // each * op.period + of.start % each
    if op.x.width == op.period:
        return of.moved(start, of.step)
    if of.within_groups(each):
        return of.moved(start, of.step // each * op.period)
    return Columns(start, of.width, each, op.period) if of.together and of.of_groups(each) else None


def _join(op: Join, chain: ColumnChain) -> list[ColumnChain] | None:
    """Return the chain, or two of them, that columns of a and b are."""
    of, period = chain.columns, op.period_a + op.period_b
    sides = ((op.a, 0, op.period_a), (op.b, op.period_a, op.period_b))
    if of.within_groups(period):
        for x, first, each in sides:
            groups, start = x.width // each, of.start % period - first
            if start >= 0 and start + of.each <= each:
                repeats = groups < op.out.width // period
                if repeats and (groups > 1 or not of.together):
                    return None
                start += 0 if repeats else of.start // period * each
                return [replace(chain, x=x, columns=of.moved(start, of.step // period * each), of=(*chain.of, op))]
    if not (of.together and of.of_groups(period) and chain.to.together and chain.first == _END):
        return None
    count, found = of.width // period, list[ColumnChain]()
    for x, first, each in sides:
        groups, width = x.width // each, count * each
        if groups == 1 < count:
            columns = Columns(0, width, each, 0)
        elif groups == op.out.width // period:
            columns = Columns.run(of.start // period * each, width)
        else:
            return None
        start = chain.to.start + first
        to = Columns(start, width, each, period) if count > 1 else Columns.run(start, width)
        found.append(replace(chain, x=x, columns=columns, to=to, of=(*chain.of, op)))
    return found


# ---------------------------------------------------------------- steps


def _is_whole(of: Columns, value: Value) -> bool:
    return of.together and of.start == 0 and of.width == value.width


def _length(matrix: Matrix) -> int:
    return prod(matrix.tensor.shape)


def _multiply_by(def_use: DefUse, op: MultiplyBy, chain: ColumnChain) -> ColumnChain | None:
    step = _PLUS if op.add else _TIMES
    if chain.first <= step or op.each > 1 or not _is_whole(chain.columns, op.out):
        return None
    further = replace(chain, x=op.x, first=step)
    return replace(further, plus=op.vector) if op.add else replace(further, times=op.vector)


def _activate(def_use: DefUse, op: Activate, chain: ColumnChain) -> ColumnChain | None:
    if chain.first <= _ACTIVATION or not _is_plain(op.activation):
        return None
    return replace(chain, x=op.x, first=_ACTIVATION, activation=op.activation)


def _is_plain(activation: Activation) -> bool:
    limits = activation.gate_limit, activation.act_limit, activation.up_limit
    return activation.kind != "swiglu_oai" and not any(limits)


def _norm(def_use: DefUse, op: Norm, chain: ColumnChain) -> ColumnChain | None:
    step = _AFTER if chain.first > _AFTER else _BEFORE
    if chain.norm is not None or chain.first <= step or op.group > per_head.MAX_OF_BLOCK:
        return None
    long = any(_length(m) > op.group for m in (op.weight, op.bias) if m is not None)
    if not chain.columns.of_groups(op.group) or (long and not _is_whole(chain.columns, op.out)):
        return None
    when = per_head.AFTER if step == _AFTER else per_head.BEFORE
    return replace(chain, x=op.x, first=step, norm=op, when=when)


def _rope(def_use: DefUse, op: Rope, chain: ColumnChain) -> ColumnChain | None:
    """Columns that do not rotate pass."""
    of, n_rot = chain.columns, op.config.n_rot
    if of.of_groups(op.head):
        head, start = op.head, op.start
    elif of.within_groups(op.head):
        first = of.start % op.head
        if first + of.each <= op.start or first >= op.start + n_rot:
            return replace(chain, x=op.x)
        head, start = of.each, op.start - first
    else:
        return None
    if start < 0 or start + n_rot > head or chain.rope is not None or chain.first <= _ROPE or op.x.per > 1:
        return None
    return replace(chain, x=op.x, first=_ROPE, rope=op, head=head, rope_start=start)


def _scale_by_position(def_use: DefUse, op: ScaleByPosition, chain: ColumnChain) -> ColumnChain | None:
    if chain.first <= _POSITION or op.x.per > 1 or op.x.outputs:
        return None
    return replace(chain, x=op.x, first=_POSITION, by_position=op)


def _glu(def_use: DefUse, op: Glu, chain: ColumnChain) -> ColumnChain | None:
    if chain.first <= _GATE or not _is_plain(op.activation):
        return None
    gate, columns, x, of = op.gate, chain.columns, op.up or op.gate, chain.columns
    if op.up is None:  # side by side in one row
        of = of.moved(of.start + op.out.width, of.step)
    elif gate.width != op.up.width:
        return None
    while isinstance(take := def_use.definition(gate), Take) and _rows(take.x) == _rows(gate):
        further = _taken(take, columns)
        if further is None:
            break
        gate, columns, chain = take.x, further, replace(chain, of=(*chain.of, take))
    return replace(chain, x=x, columns=of, first=_GATE, gate=gate, gate_columns=columns, gating=op.activation)


_STEPS: Mapping[type[Op], Callable[[DefUse, Any, ColumnChain], ColumnChain | None]] = {
    Activate: _activate,
    Glu: _glu,
    MultiplyBy: _multiply_by,
    Norm: _norm,
    Rope: _rope,
    ScaleByPosition: _scale_by_position,
    Take: _take,
}
