"""Where the columns of a value come from: followed back through operations that only move columns, or look at each
column or head by itself, to values that others make.

Part says of some columns where they begin, what happens to them on their way, and where they end; parts.cu does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

from quantkit.kernels.cuda import parts
from quantkit.kernels.parameters import Activation
from quantkit.model.backends.cuda_uses import Uses
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

#: What a trace goes through.
PIECEWISE = (Activate, Glu, Join, MultiplyBy, Norm, Repeat, Rope, ScaleByPosition, Take)

#: The order in which a part takes its steps.
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
    def together(self) -> bool:
        """Whether they are side by side."""
        return self.each == self.width

    def of_groups(self, size: int) -> bool:
        """Tell whether they are whole groups of so many columns."""
        return not self.start % size and not self.each % size and (self.together or not self.step % size)

    def within_groups(self, size: int) -> bool:
        """Tell whether every stretch lies within a group, each at the same place."""
        return self.start % size + self.each <= size and (self.together or not self.step % size)

    def moved(self, start: int, step: int) -> Columns:
        """Return the same stretches at other places."""
        return Columns(start, self.width, self.each, step)


@dataclass(frozen=True)
class Part:
    """Columns ``columns`` of x, what happens to them (parts.cu has the steps and their order), and ``to`` where."""

    x: Value
    columns: Columns
    to: Columns
    by: Value | None = None
    plus: Matrix | None = None
    activation: Activation | None = None
    times: Matrix | None = None
    norm: Norm | None = None
    when: int = parts.NEVER
    rope: Rope | None = None
    head: int = 1
    rope_start: int = 0
    by_position: ScaleByPosition | None = None
    gate: Value | None = None
    gate_columns: Columns = Columns(0, 1, 1, 0)
    gating: Activation | None = None
    #: The first of the steps that it has.
    first: int = _END
    #: The operations that it stands for.
    of: tuple[Op, ...] = ()

    @property
    def unit(self) -> int:
        """As many columns, or a multiple, belong together."""
        return lcm(1 if self.norm is None else self.norm.group, 1 if self.rope is None else self.head)

    def inputs(self) -> tuple[Value, ...]:
        """Return the values it reads."""
        table = None if self.rope is None else self.rope.table
        return tuple(value for value in (self.x, self.by, self.gate, table) if value is not None)


def trace(uses: Uses, value: Value) -> list[Part]:
    """Return parts that together are a value."""
    whole = Columns.run(0, value.width)
    return _followed(uses, Part(value, whole, whole))


def _followed(uses: Uses, part: Part) -> list[Part]:
    while True:
        op = uses.maker(part.x)
        if isinstance(op, Join):
            split = _join(op, part)
            return [part] if split is None else [found for half in split for found in _followed(uses, half)]
        if isinstance(op, Repeat):  # its input has other rows: a part begins there
            return [replace(part, x=op.x, by=op.weights, of=(*part.of, op))]
        step = None if op is None else _STEPS.get(type(op))
        # Rows of another kind are not followed.
        if op is None or step is None or any(_rows(v) != _rows(part.x) for v in op.inputs()):
            return [part]
        further = step(uses, op, part)
        if further is None:
            return [part]
        part = replace(further, of=(*part.of, op))


def _rows(value: Value) -> tuple[int, bool]:
    return value.per, value.outputs


# ---------------------------------------------------------------- columns that move


def _take(uses: Uses, op: Take, part: Part) -> Part | None:
    columns = _taken(op, part.columns)
    return None if columns is None else replace(part, x=op.x, columns=columns)


def _taken(op: Take, of: Columns) -> Columns | None:
    """Return where columns of what was taken are in what they were taken from."""
    each = op.out.width // (op.x.width // op.period)
    start = op.start + of.start // each * op.period + of.start % each
    if op.x.width == op.period:
        return of.moved(start, of.step)
    if of.within_groups(each):
        return of.moved(start, of.step // each * op.period)
    return Columns(start, of.width, each, op.period) if of.together and of.of_groups(each) else None


def _join(op: Join, part: Part) -> list[Part] | None:
    """Return the part, or two of them, that columns of a and b are."""
    of, period = part.columns, op.period_a + op.period_b
    sides = ((op.a, 0, op.period_a), (op.b, op.period_a, op.period_b))
    if of.within_groups(period):
        for x, first, each in sides:
            groups, start = x.width // each, of.start % period - first
            if start >= 0 and start + of.each <= each:
                repeats = groups < op.out.width // period
                if repeats and (groups > 1 or not of.together):
                    return None
                start += 0 if repeats else of.start // period * each
                return [replace(part, x=x, columns=of.moved(start, of.step // period * each), of=(*part.of, op))]
    if not (of.together and of.of_groups(period) and part.to.together and part.first == _END):
        return None
    count, found = of.width // period, list[Part]()
    for x, first, each in sides:
        groups, width = x.width // each, count * each
        if groups == 1 < count:
            columns = Columns(0, width, each, 0)
        elif groups == op.out.width // period:
            columns = Columns.run(of.start // period * each, width)
        else:
            return None
        start = part.to.start + first
        to = Columns(start, width, each, period) if count > 1 else Columns.run(start, width)
        found.append(replace(part, x=x, columns=columns, to=to, of=(*part.of, op)))
    return found


# ---------------------------------------------------------------- steps


def _is_whole(of: Columns, value: Value) -> bool:
    return of.together and of.start == 0 and of.width == value.width


def _length(matrix: Matrix) -> int:
    return prod(matrix.tensor.shape)


def _multiply_by(uses: Uses, op: MultiplyBy, part: Part) -> Part | None:
    step = _PLUS if op.add else _TIMES
    if part.first <= step or not _is_whole(part.columns, op.out):
        return None
    further = replace(part, x=op.x, first=step)
    return replace(further, plus=op.vector) if op.add else replace(further, times=op.vector)


def _activate(uses: Uses, op: Activate, part: Part) -> Part | None:
    if part.first <= _ACTIVATION or not _is_plain(op.activation):
        return None
    return replace(part, x=op.x, first=_ACTIVATION, activation=op.activation)


def _is_plain(activation: Activation) -> bool:
    limits = activation.gate_limit, activation.act_limit, activation.up_limit
    return activation.kind != "swiglu_oai" and not any(limits)


def _norm(uses: Uses, op: Norm, part: Part) -> Part | None:
    step = _AFTER if part.first > _AFTER else _BEFORE
    if part.norm is not None or part.first <= step or op.group > parts.MAX_OF_BLOCK:
        return None
    long = any(_length(m) > op.group for m in (op.weight, op.bias) if m is not None)
    if not part.columns.of_groups(op.group) or (long and not _is_whole(part.columns, op.out)):
        return None
    when = parts.AFTER if step == _AFTER else parts.BEFORE
    return replace(part, x=op.x, first=step, norm=op, when=when)


def _rope(uses: Uses, op: Rope, part: Part) -> Part | None:
    """Columns that do not turn go past it."""
    of, n_rot = part.columns, op.config.n_rot
    if of.of_groups(op.head):
        head, start = op.head, op.start
    elif of.within_groups(op.head):
        first = of.start % op.head
        if first + of.each <= op.start or first >= op.start + n_rot:
            return replace(part, x=op.x)
        head, start = of.each, op.start - first
    else:
        return None
    if start < 0 or start + n_rot > head or part.rope is not None or part.first <= _ROPE or op.x.per > 1:
        return None
    return replace(part, x=op.x, first=_ROPE, rope=op, head=head, rope_start=start)


def _scale_by_position(uses: Uses, op: ScaleByPosition, part: Part) -> Part | None:
    if part.first <= _POSITION or op.x.per > 1 or op.x.outputs:
        return None
    return replace(part, x=op.x, first=_POSITION, by_position=op)


def _glu(uses: Uses, op: Glu, part: Part) -> Part | None:
    if part.first <= _GATE or not _is_plain(op.activation):
        return None
    gate, columns, x, of = op.gate, part.columns, op.up or op.gate, part.columns
    if op.up is None:  # side by side in one row
        of = of.moved(of.start + op.out.width, of.step)
    elif gate.width != op.up.width:
        return None
    while isinstance(take := uses.maker(gate), Take) and _rows(take.x) == _rows(gate):
        further = _taken(take, columns)
        if further is None:
            break
        gate, columns, part = take.x, further, replace(part, of=(*part.of, take))
    return replace(part, x=x, columns=of, first=_GATE, gate=gate, gate_columns=columns, gating=op.activation)


_STEPS: Mapping[type[Op], Callable[[Uses, Any, Part], Part | None]] = {
    Activate: _activate,
    Glu: _glu,
    MultiplyBy: _multiply_by,
    Norm: _norm,
    Rope: _rope,
    ScaleByPosition: _scale_by_position,
    Take: _take,
}
