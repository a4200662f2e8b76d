"""Definitions and uses of values, for the fusion passes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from quantkit.kernels.formats import activation_format
from quantkit.model.ops import Matrix, MulMat, MulMatHeads, MulMatId, MulMats, Op, UpGate, UpGateId, Value

Kind = TypeVar("Kind", bound=Op)


class DefUse:
    """The operation that defines each value, and those that read it, by their indices."""

    def __init__(self, ops: Sequence[Op], leaves: Collection[Value]) -> None:
        self.ops, self.leaves = ops, leaves
        self.inputs, self.outputs = [op.inputs() for op in ops], [op.outputs() for op in ops]
        self.defined_at = {value: i for i, outputs in enumerate(self.outputs) for value in outputs}
        self.readers: dict[Value, list[int]] = {}
        for i, inputs in enumerate(self.inputs):
            for value in inputs:
                self.readers.setdefault(value, []).append(i)

    def sole_reader(self, value: Value) -> int | None:
        """Return the only reader of a value, if it reads it once and the value does not leave."""
        readers = self.readers.get(value, [])
        return readers[0] if len(readers) == 1 and value not in self.leaves else None

    def definition(self, value: Value) -> Op | None:
        """Return the operation that defines a value; None if it enters the program."""
        return self.ops[self.defined_at[value]] if value in self.defined_at else None

    def format(self, value: Value) -> tuple[str, int, bool]:
        """Return the activation format in which products read a value ("": none), its columns, and whether all do."""
        forms, read_plain = list[tuple[str, int]](), value in self.leaves
        for reader in self.readers.get(value, []):
            weights = weights_of(self.ops[reader], value)
            forms += [(activation_format(w.tensor.type), w.n_in) for w in weights]
            read_plain |= not weights
        candidates = [form for form in dict.fromkeys(forms) if form[0] != "f32" and value.width % form[1] == 0]
        if not candidates:
            return "", value.width, False
        return *candidates[0], not read_plain and set(forms) == {candidates[0]}


def weights_of(op: Op, x: Value) -> tuple[Matrix, ...]:
    """Return the weights that an operation multiplies x by, if it has no other use of x."""
    if isinstance(op, MulMats):
        return op.weights
    if isinstance(op, MulMat | MulMatHeads | MulMatId) and op.x is x:
        return (op.weight,)
    if isinstance(op, UpGate | UpGateId) and op.x is x:
        return (op.up,)
    return ()


def extend_op(op: Op, kind: type[Kind], **values: Any) -> Kind:
    """Return an operation as an instance of a subclass of its class, with additional or changed fields."""
    return kind(**{**{f.name: getattr(op, f.name) for f in fields(op)}, **values})


def replace_ops(ops: Sequence[Op], new: dict[int, Op], removed: Iterable[int]) -> list[Op]:
    """Return the operations with ``new`` at some indices and without ``removed``."""
    left_out = set(removed)
    return [new.get(i, op) for i, op in enumerate(ops) if i in new or i not in left_out]
