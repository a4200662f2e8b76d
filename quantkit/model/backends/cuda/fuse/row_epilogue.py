"""Fuses the work on whole rows between two products into one launch: row_epilogue.cu."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import cast

from quantkit.kernels.cuda.layer import row_epilogue
from quantkit.model.backends.cuda.fuse.def_use import DefUse, replaced
from quantkit.model.check import CHECK, fit
from quantkit.model.fusion import Decisions
from quantkit.model.ops import Activation, Add, Combine, Glu, Norm, Op, Scale, SelectOutputs, Value


class RowEpilogue(Op):
    """t = post of x (or of the sum of a token's experts); y = plus_too + by * (plus + t); z = norm of y.

    gate: plus times its sigmoid, one value a row. selected: of the rows of x, plus and plus_too those that are outputs.
    post and norm are operations whose values are these. Values read as float32 are in ``plain``; the last value (z, or
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
        """Its last value."""
        return cast(Value, self.z or self.y)


@CHECK.of(RowEpilogue)
def _check(op: RowEpilogue, experts: dict[Value, int]) -> None:
    rows = {v.width for v in (op.plus, op.plus_too, op.y, op.z) if v is not None}
    fit(rows == {op.last.width}, op, None, f"rows of {sorted(rows)} columns")
    read, taken = op.x.width * op.x.per, op.last.width * op.last.per * (op.n_used or 1)
    fit(read == taken, op, None, f"{read} columns of a token, of which {taken} are read")
    fit(op.last.width <= row_epilogue.MAX_WIDTH, op, None, f"{op.last.width} columns, more than a block holds")
    fit(op.gate is None or op.gate.width == 1, op, None, "a gate of more than one column")
    for norm in (op.post, op.norm):
        if norm is not None:
            CHECK[Norm](norm, experts)


def fuse_row_epilogues(ops: Sequence[Op], leaves: Collection[Value], decisions: Decisions) -> list[Op]:
    """Return operations that give the same values, in fewer launches."""
    def_use, new, gone = DefUse(ops, leaves), dict[int, Op](), set[int]()
    for i in range(len(ops)):
        found = None if i in gone else _row_epilogue(def_use, i, gone)
        if found is None:
            continue
        anchor, made, of = found
        width, most = made.last.width, row_epilogue.MAX_WIDTH
        if decisions.decide("row_epilogue", made.layer, f"{width} columns, more than {most}" if width > most else ""):
            for further in (_gated, _selected):
                made, more = further(def_use, made)
                of |= more
            new[anchor] = made
            gone |= of
    return replaced(ops, new, gone)


def _gated(def_use: DefUse, op: RowEpilogue) -> tuple[RowEpilogue, set[int]]:
    """Return an epilogue that includes the gate of ``plus`` if nothing else reads it: a shared expert's."""
    glu = None if op.plus is None or def_use.sole_reader(op.plus) is None else def_use.definition(op.plus)
    if not isinstance(glu, Glu) or glu.up is None or glu.gate.width != 1 or glu.activation != Activation("sigmoid"):
        return op, set()
    return replace(op, plus=glu.up, gate=glu.gate), {def_use.made_at[glu.out]}


def _selected(def_use: DefUse, op: RowEpilogue) -> tuple[RowEpilogue, set[int]]:
    """Return an epilogue that takes the rows of outputs from those of tokens by itself."""
    wanted = [value for value in (op.x, op.plus, op.plus_too) if value is not None]
    of = {maker.out: maker.x for value in wanted if isinstance(maker := def_use.definition(value), SelectOutputs)}
    alone = all(value in of and def_use.sole_reader(value) is not None for value in wanted)
    if op.n_used or op.gate is not None or not alone or len(of) < len(wanted):
        return op, set()
    plus, plus_too = (None if value is None else of[value] for value in (op.plus, op.plus_too))
    made = replace(op, selected=True, x=of[op.x], plus=plus, plus_too=plus_too)
    return made, {def_use.made_at[value] for value in wanted}


def _of_rows(op: Op | None) -> bool:
    """Tell whether an operation normalizes whole rows."""
    return isinstance(op, Norm) and op.group == op.x.width


class _Run:
    """Operations one after another, each the only reader of the one before."""

    def __init__(self, def_use: DefUse, first: int, gone: Collection[int]) -> None:
        self._def_use, self._gone, self.of = def_use, gone, list[int]()
        self._at: int | None = first

    @property
    def op(self) -> Op | None:
        """The next one."""
        return None if self._at is None else self._def_use.ops[self._at]

    def follower(self) -> Op | None:
        """Return the one after the next."""
        assert self.op is not None
        at = self._def_use.sole_reader(self.op.outputs()[0])
        return None if at is None or at in self._gone else self._def_use.ops[at]

    def take(self) -> None:
        assert self.op is not None
        assert self._at is not None
        self.of.append(self._at)
        follower = self._def_use.sole_reader(self.op.outputs()[0])
        self._at = None if follower in self._gone else follower


def _row_epilogue(def_use: DefUse, i: int, gone: Collection[int]) -> tuple[int, RowEpilogue, set[int]] | None:
    """Return the epilogue that begins with operation i: its place, itself, and the operations it replaces."""
    first = def_use.ops[i]
    if not isinstance(first, Combine | Norm | Add | Scale):
        return None
    run = _Run(def_use, i, gone)
    x = first.b if isinstance(first, Add) else first.x
    weights, n_used, by = None, 0, 1.0
    post: Norm | None = None
    plus: Value | None = None
    plus_too: Value | None = None
    t = x
    if isinstance(op := run.op, Combine):
        weights, n_used, t = op.weights, op.x.per * op.x.width // (op.out.per * op.out.width), op.out
        run.take()
    if isinstance(op := run.op, Norm) and _of_rows(op) and isinstance(run.follower(), Add | Scale):
        post, t = op, op.out
        run.take()
    if isinstance(op := run.op, Add) and isinstance(run.follower(), Add | Scale):
        plus, t = op.b if op.a is t and op.b is not t else op.a, op.out
        run.take()
    if isinstance(op := run.op, Scale):
        by, t = op.factor, op.out
        run.take()
    if isinstance(op := run.op, Add):
        plus_too, t = op.b if op.a is t and op.b is not t else op.a, op.out
        run.take()
    of, anchor = set(run.of), run.of[-1] if run.of else i
    norm_at = (
        i
        if not of
        else next((at for at in def_use.readers.get(t, []) if at not in gone and _of_rows(def_use.ops[at])), None)
    )
    norm = None if norm_at is None else cast(Norm, def_use.ops[norm_at])
    if norm is not None and not _of_rows(norm):
        return None
    y, z = t if of else None, None if norm is None else norm.out
    last = cast(Value, z or y)
    form, alone = _format(def_use, last)
    if norm is None and len(of) < 2 and not form:
        return None
    readers = def_use.readers.get(t, [])
    plain = set() if alone else {last}
    if y is not None and norm is not None and (y in def_use.leaves or any(at != norm_at for at in readers)):
        plain.add(y)
    made = RowEpilogue(
        layer=def_use.ops[anchor].layer,
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


def _format(def_use: DefUse, value: Value) -> tuple[str, bool]:
    """Return the format in which products take rows of a value ("": none), and whether nothing else reads it."""
    form, width, alone = def_use.format(value)
    return (form, alone) if width == value.width else ("", False)
