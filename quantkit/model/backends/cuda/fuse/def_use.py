"""Where values are defined and used: what the fusion passes decide by."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from quantkit.kernels.formats import activation_format
from quantkit.model.ops import Matrix, MulMat, MulMatHeads, MulMatId, MulMats, Op, UpGate, UpGateId, Value

Kind = TypeVar("Kind", bound=Op)


class DefUse:
    """Which operation defines each value, and which use it, by their numbers."""

    def __init__(self, ops: Sequence[Op], leaves: Collection[Value]) -> None:
        self.ops, self.leaves = ops, leaves
        self.inputs, self.outputs = [op.inputs() for op in ops], [op.outputs() for op in ops]
        self.made_at = {value: i for i, outputs in enumerate(self.outputs) for value in outputs}
        self.readers: dict[Value, list[int]] = {}
        for i, inputs in enumerate(self.inputs):
            for value in inputs:
                self.readers.setdefault(value, []).append(i)

    def sole_reader(self, value: Value) -> int | None:
        """Return the only operation that reads a value, if it reads it once."""
        found = self.readers.get(value, [])
        return found[0] if len(found) == 1 and value not in self.leaves else None

    def definition(self, value: Value) -> Op | None:
        """Return the operation that makes a value; None: it comes from outside."""
        return self.ops[self.made_at[value]] if value in self.made_at else None

    def format(self, value: Value) -> tuple[str, int, bool]:
        """Return the format that products take a value in ("": none), the columns of its rows in it, and whether
        nothing reads the value itself."""
        wanted, others = list[tuple[str, int]](), value in self.leaves
        for at in self.readers.get(value, []):
            weights = weights_of(self.ops[at], value)
            wanted += [(activation_format(w.tensor.type), w.n_in) for w in weights]
            others |= not weights
        made = [form for form in dict.fromkeys(wanted) if form[0] != "f32" and value.width % form[1] == 0]
        if not made:
            return "", value.width, False
        return *made[0], not others and set(wanted) == {made[0]}


def weights_of(op: Op, x: Value) -> tuple[Matrix, ...]:
    """Return the weights an operation multiplies x by, if it does nothing else with x."""
    if isinstance(op, MulMats):
        return op.weights
    if isinstance(op, MulMat | MulMatHeads | MulMatId) and op.x is x:
        return (op.weight,)
    if isinstance(op, UpGate | UpGateId) and op.x is x:
        return (op.up,)
    return ()


def extended(op: Op, kind: type[Kind], **more: Any) -> Kind:
    """Return an operation as one of a subclass of its class, with more (or other) fields."""
    return kind(**{**{f.name: getattr(op, f.name) for f in fields(op)}, **more})


def replaced(ops: Sequence[Op], new: dict[int, Op], gone: Iterable[int]) -> list[Op]:
    """Return the operations without some, and with others at some places."""
    left_out = set(gone)
    return [new.get(i, op) for i, op in enumerate(ops) if i in new or i not in left_out]
