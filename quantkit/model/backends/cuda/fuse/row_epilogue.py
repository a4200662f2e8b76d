"""Fusion of the row operations between two products into one launch: row_epilogue.cu."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, cast

from quantkit.kernels.cuda.layer import row_epilogue
from quantkit.model.backends.cuda.fuse.def_use import DefUse, replace_ops
from quantkit.model.check import CHECK, fit
from quantkit.model.fusion import Decisions
from quantkit.model.ops import Activation, Add, Combine, Glu, Norm, Op, Scale, SelectOutputs, Value


class RowEpilogue(Op):
    """t = post_norm(x), or of the sum of a token's experts; sum = residual + scale * (addend + t); normed = norm(sum).

    gate: the addend is multiplied by its sigmoid, one value a row. selected: only rows of outputs of x, addend and
    residual are read. Values read as float32 are in ``plain``; the last value (normed, or the sum without a norm) is
    also written in the activation format of the products that read it.
    """

    WRITES = ("sum_value", "normed_value")

    x: Value
    weights: Value | None = None
    n_used: int = 0
    post_norm: Norm | None = None
    addend: Value | None = None
    scale: float = 1.0
    residual: Value | None = None
    gate: Value | None = None
    selected: bool = False
    norm: Norm | None = None
    sum_value: Value | None = None
    normed_value: Value | None = None
    plain: frozenset[Value] = frozenset()
    format: str = ""

    @property
    def last(self) -> Value:
        """The last value."""
        return cast(Value, self.normed_value or self.sum_value)


@CHECK.register(RowEpilogue)
def _check(op: RowEpilogue, experts: dict[Value, int]) -> None:
    rows = {v.width for v in (op.addend, op.residual, op.sum_value, op.normed_value) if v is not None}
    fit(rows == {op.last.width}, op, None, f"rows of {sorted(rows)} columns")
    read, expected = op.x.width * op.x.per, op.last.width * op.last.per * (op.n_used or 1)
    fit(read == expected, op, None, f"{read} columns of a token, of which {expected} are read")
    fit(op.last.width <= row_epilogue.MAX_WIDTH, op, None, f"{op.last.width} columns, more than fit into a block")
    fit(op.gate is None or op.gate.width == 1, op, None, "a gate of more than one column")
    for norm in (op.post_norm, op.norm):
        if norm is not None:
            CHECK[Norm](norm, experts)


def fuse_row_epilogues(ops: Sequence[Op], leaves: Collection[Value], decisions: Decisions) -> list[Op]:
    """Return operations that compute the same values in fewer launches."""
    def_use = DefUse(ops, leaves)
    new: dict[int, Op] = {}
    removed: set[int] = set()
    for i in range(len(ops)):
        match = None if i in removed else _row_epilogue(def_use, i, removed)
        if match is None:
            continue
        anchor, epilogue, indices = match
        width, most = epilogue.last.width, row_epilogue.MAX_WIDTH
        reason = f"{width} columns, more than {most}" if width > most else ""
        if decisions.decide("row_epilogue", epilogue.layer, reason):
            for absorb in (_absorb_gate, _absorb_selection):
                epilogue, extra = absorb(def_use, epilogue)
                indices |= extra
            new[anchor] = epilogue
            removed |= indices
    return replace_ops(ops, new, removed)


def _absorb_gate(def_use: DefUse, op: RowEpilogue) -> tuple[RowEpilogue, set[int]]:
    """Return an epilogue that includes the gate of the addend (a shared expert's), if nothing else reads it."""
    glu = None if op.addend is None or def_use.sole_reader(op.addend) is None else def_use.definition(op.addend)
    if not isinstance(glu, Glu) or glu.up is None or glu.gate.width != 1 or glu.activation != Activation("sigmoid"):
        return op, set()
    return replace(op, addend=glu.up, gate=glu.gate), {def_use.defined_at[glu.out]}


def _absorb_selection(def_use: DefUse, op: RowEpilogue) -> tuple[RowEpilogue, set[int]]:
    """Return an epilogue that includes SelectOutputs of its inputs."""
    values = [value for value in (op.x, op.addend, op.residual) if value is not None]
    sources = {maker.out: maker.x for value in values if isinstance(maker := def_use.definition(value), SelectOutputs)}
    alone = all(value in sources and def_use.sole_reader(value) is not None for value in values)
    if op.n_used or op.gate is not None or not alone or len(sources) < len(values):
        return op, set()
    addend, residual = (None if value is None else sources[value] for value in (op.addend, op.residual))
    result = replace(op, selected=True, x=sources[op.x], addend=addend, residual=residual)
    return result, {def_use.defined_at[value] for value in values}


def _normalizes_rows(op: Op | None) -> bool:
    """Return whether an operation normalizes whole rows."""
    return isinstance(op, Norm) and op.group == op.x.width


class _OpRun:
    """A chain of operations, each the only reader of the one before; ``value``: the result of those passed."""

    def __init__(self, def_use: DefUse, first: int, removed: Collection[int], value: Value) -> None:
        self._def_use = def_use
        self._removed = removed
        self._index: int | None = first
        self.indices: list[int] = []
        self.value = value

    @property
    def op(self) -> Op | None:
        """The next operation."""
        return None if self._index is None else self._def_use.ops[self._index]

    def follower(self) -> Op | None:
        """Return the operation after the next."""
        assert self.op is not None
        index = self._def_use.sole_reader(self.op.outputs()[0])
        return None if index is None or index in self._removed else self._def_use.ops[index]

    def advance(self) -> None:
        """Pass the next operation."""
        assert self.op is not None
        assert self._index is not None
        self.indices.append(self._index)
        self.value = self.op.outputs()[0]
        follower = self._def_use.sole_reader(self.value)
        self._index = None if follower in self._removed else follower

    def addend(self, op: Add) -> Value:
        """Return the value that ``op`` adds to the current one."""
        return op.b if op.a is self.value and op.b is not self.value else op.a

    def match_sum(self) -> dict[str, Any]:
        """Pass the sum of experts, post_norm, addend, scale and residual that follow; return their fields."""
        fields: dict[str, Any] = {}
        if isinstance(op := self.op, Combine):
            n_used = op.x.per * op.x.width // (op.out.per * op.out.width)
            fields |= {"weights": op.weights, "n_used": n_used}
            self.advance()
        if isinstance(op := self.op, Norm) and _normalizes_rows(op) and isinstance(self.follower(), Add | Scale):
            fields["post_norm"] = op
            self.advance()
        if isinstance(op := self.op, Add) and isinstance(self.follower(), Add | Scale):
            fields["addend"] = self.addend(op)
            self.advance()
        if isinstance(op := self.op, Scale):
            fields["scale"] = op.factor
            self.advance()
        if isinstance(op := self.op, Add):
            fields["residual"] = self.addend(op)
            self.advance()
        return fields


def _row_epilogue(def_use: DefUse, i: int, removed: Collection[int]) -> tuple[int, RowEpilogue, set[int]] | None:
    """Return the epilogue that starts with operation i: its index, itself, and the indices it replaces."""
    first = def_use.ops[i]
    if not isinstance(first, Combine | Norm | Add | Scale):
        return None
    x = first.b if isinstance(first, Add) else first.x
    run = _OpRun(def_use, i, removed, x)
    fields = run.match_sum()
    norm_at: int | None = i
    if run.indices:
        readers = (k for k in def_use.readers.get(run.value, []) if k not in removed)
        norm_at = next((k for k in readers if _normalizes_rows(def_use.ops[k])), None)
    elif not _normalizes_rows(first):
        return None
    norm = None if norm_at is None else cast(Norm, def_use.ops[norm_at])
    sum_value = run.value if run.indices else None
    last = run.value if norm is None else norm.out
    form, alone = _format(def_use, last)
    if norm is None and len(run.indices) < 2 and not form:
        return None
    plain = set() if alone else {last}
    if sum_value is not None and norm_at is not None:
        other_readers = set(def_use.readers.get(sum_value, [])) - {norm_at}
        plain |= {sum_value} if other_readers or sum_value in def_use.leaves else set()
    anchor = run.indices[-1] if run.indices else i
    epilogue = RowEpilogue(
        layer=def_use.ops[anchor].layer,
        x=x,
        norm=norm,
        sum_value=sum_value,
        normed_value=None if norm is None else norm.out,
        plain=frozenset(plain),
        format=form,
        **fields,
    )
    return anchor, epilogue, {*run.indices, *(() if norm_at is None else (norm_at,))}


def _format(def_use: DefUse, value: Value) -> tuple[str, bool]:
    """Return the activation format in which products read rows of a value ("": none), and whether all do."""
    form, width, alone = def_use.format(value)
    return (form, alone) if width == value.width else ("", False)
