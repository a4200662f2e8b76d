"""Joins what is done to whole rows between two products into one launch: stage.cu."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

from quantkit.kernels.cuda import stage
from quantkit.model.backends.cuda_uses import Uses, replaced
from quantkit.model.ops import Activation, Add, Combine, Glu, Norm, Op, Scale, SelectOutputs, Value


@dataclass(frozen=True, eq=False, kw_only=True)
class Stage(Op):
    """t = post of x (or of the sum of a token's experts); y = plus_too + by * (plus + t); z = norm of y.

    gate: plus times its sigmoid, one value a row. selected: of the rows of x, plus and plus_too those that are outputs.
    post and norm are operations whose values are these. What is read as float32 is in ``plain``; the last value (z, or
    y without a norm) is also made in the format that the products reading it take.
    """

    WRITES = ("y", "z")

    x: Value
    weights: Value | None = None
    n_used: int = 0
    post: Norm | None = None
    plus: Value | None = None
    by: float = 1.0
    plus_too: Value | None = None
    gate: Value | None = None
    selected: bool = False
    norm: Norm | None = None
    y: Value | None = None
    z: Value | None = None
    plain: frozenset[Value] = frozenset()
    format: str = ""

    @property
    def last(self) -> Value:
        """What the stage ends with."""
        return cast(Value, self.z or self.y)


def with_stages(ops: Sequence[Op], leaves: Collection[Value]) -> list[Op]:
    """Return operations that give the same values, in fewer launches."""
    uses, new, gone = Uses(ops, leaves), dict[int, Op](), set[int]()
    for i in range(len(ops)):
        if i not in gone:
            found = _stage(uses, i, gone)
            if found is not None:
                anchor, made, of = found
                for further in (_gated, _selected):
                    made, more = further(uses, made)
                    of |= more
                new[anchor] = made
                gone |= of
    return replaced(ops, new, gone)


def _gated(uses: Uses, op: Stage) -> tuple[Stage, set[int]]:
    """Return a stage that does what makes ``plus`` and nobody else reads: a shared expert's gate."""
    glu = None if op.plus is None or uses.only_reader(op.plus) is None else uses.maker(op.plus)
    if not isinstance(glu, Glu) or glu.up is None or glu.gate.width != 1 or glu.activation != Activation("sigmoid"):
        return op, set()
    return replace(op, plus=glu.up, gate=glu.gate), {uses.made[glu.out]}


def _selected(uses: Uses, op: Stage) -> tuple[Stage, set[int]]:
    """Return a stage that takes the rows of outputs from those of tokens by itself."""
    wanted = [value for value in (op.x, op.plus, op.plus_too) if value is not None]
    of = {maker.out: maker.x for value in wanted if isinstance(maker := uses.maker(value), SelectOutputs)}
    alone = all(value in of and uses.only_reader(value) is not None for value in wanted)
    if op.n_used or op.gate is not None or not alone or len(of) < len(wanted):
        return op, set()
    plus, plus_too = (None if value is None else of[value] for value in (op.plus, op.plus_too))
    made = replace(op, selected=True, x=of[op.x], plus=plus, plus_too=plus_too)
    return made, {uses.made[value] for value in wanted}


def _of_rows(op: Op | None) -> bool:
    """Tell whether an operation normalizes whole rows."""
    return isinstance(op, Norm) and op.group == op.x.width


class _Chain:
    """Operations one after the other, each the only reader of what the one before made."""

    def __init__(self, uses: Uses, first: int, gone: Collection[int]) -> None:
        self._uses, self._gone, self.of = uses, gone, list[int]()
        self._at: int | None = first

    @property
    def op(self) -> Op | None:
        """The next one."""
        return None if self._at is None else self._uses.ops[self._at]

    def follower(self) -> Op | None:
        """Return the one after the next."""
        assert self.op is not None
        at = self._uses.only_reader(self.op.outputs()[0])
        return None if at is None or at in self._gone else self._uses.ops[at]

    def take(self) -> None:
        assert self.op is not None
        assert self._at is not None
        self.of.append(self._at)
        follower = self._uses.only_reader(self.op.outputs()[0])
        self._at = None if follower in self._gone else follower


def _stage(uses: Uses, i: int, gone: Collection[int]) -> tuple[int, Stage, set[int]] | None:
    """Return the stage that begins with operation i: where it is to stand, itself, what it stands for."""
    first = uses.ops[i]
    if not isinstance(first, Combine | Norm | Add | Scale) or first.out.width > stage.MAX_WIDTH:
        return None
    chain = _Chain(uses, i, gone)
    x = first.b if isinstance(first, Add) else first.x
    weights, n_used, by = None, 0, 1.0
    post: Norm | None = None
    plus: Value | None = None
    plus_too: Value | None = None
    t = x
    if isinstance(op := chain.op, Combine):
        weights, n_used, t = op.weights, op.x.per // op.out.per, op.out
        chain.take()
    if isinstance(op := chain.op, Norm) and _of_rows(op) and isinstance(chain.follower(), Add | Scale):
        post, t = op, op.out
        chain.take()
    if isinstance(op := chain.op, Add) and isinstance(chain.follower(), Add | Scale):
        plus, t = op.b if op.a is t and op.b is not t else op.a, op.out
        chain.take()
    if isinstance(op := chain.op, Scale):
        by, t = op.factor, op.out
        chain.take()
    if isinstance(op := chain.op, Add):
        plus_too, t = op.b if op.a is t and op.b is not t else op.a, op.out
        chain.take()
    of, anchor = set(chain.of), chain.of[-1] if chain.of else i
    norm_at = (
        i if not of else next((at for at in uses.read.get(t, []) if at not in gone and _of_rows(uses.ops[at])), None)
    )
    norm = None if norm_at is None else cast(Norm, uses.ops[norm_at])
    if norm is not None and not _of_rows(norm):
        return None
    y, z = t if of else None, None if norm is None else norm.out
    last = cast(Value, z or y)
    form, alone = _format(uses, last)
    if norm is None and len(of) < 2 and not form:
        return None
    readers = uses.read.get(t, [])
    plain = set() if alone else {last}
    if y is not None and norm is not None and (y in uses.leaves or any(at != norm_at for at in readers)):
        plain.add(y)
    made = Stage(
        layer=uses.ops[anchor].layer,
        x=x,
        weights=weights,
        n_used=n_used,
        post=post,
        plus=plus,
        by=by,
        plus_too=plus_too,
        norm=norm,
        y=y,
        z=z,
        plain=frozenset(plain),
        format=form,
    )
    return anchor, made, of | ({norm_at} if norm_at is not None else set())


def _format(uses: Uses, value: Value) -> tuple[str, bool]:
    """Return the format that products take rows of a value in ("": none), and whether nobody reads the value itself."""
    form, width, alone = uses.format(value)
    return (form, alone) if width == value.width else ("", False)
