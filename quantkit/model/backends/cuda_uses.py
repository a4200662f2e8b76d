"""Who makes and who reads which value: what joining operations (cuda_joins.py) needs to know."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from quantkit.kernels.activation_formats import activation_format
from quantkit.model.ops import Matrix, MulMat, MulMatHeads, MulMatId, MulMats, Op, UpGate, UpGateId, Value


class Uses:
    """Who makes and who reads each value: numbers of operations."""

    def __init__(self, ops: Sequence[Op], leaves: Collection[Value]) -> None:
        self.ops, self.leaves = ops, leaves
        self.inputs, self.outputs = [op.inputs() for op in ops], [op.outputs() for op in ops]
        self.made = {value: i for i, outputs in enumerate(self.outputs) for value in outputs}
        self.read: dict[Value, list[int]] = {}
        for i, inputs in enumerate(self.inputs):
            for value in inputs:
                self.read.setdefault(value, []).append(i)

    def only_reader(self, value: Value) -> int | None:
        """Return who alone reads a value, once."""
        readers = self.read.get(value, [])
        return readers[0] if len(readers) == 1 and value not in self.leaves else None

    def maker(self, value: Value) -> Op | None:
        """Return what makes a value; None: it comes from outside."""
        return self.ops[self.made[value]] if value in self.made else None

    def format(self, value: Value) -> tuple[str, int, bool]:
        """Return the format that products take a value in ("": none), the columns of its rows in it, and whether
        nobody reads the value itself."""
        wanted, others = list[tuple[str, int]](), value in self.leaves
        for at in self.read.get(value, []):
            weights = weights_of(self.ops[at], value)
            wanted += [(activation_format(w.tensor.type), w.n_in) for w in weights]
            others |= not weights
        made = [form for form in dict.fromkeys(wanted) if form[0] != "f32" and value.width % form[1] == 0]
        if not made:
            return "", value.width, False
        return *made[0], not others and set(wanted) == {made[0]}


def weights_of(op: Op, x: Value) -> tuple[Matrix, ...]:
    """Return the weights that an operation multiplies x by, and does nothing else with it."""
    if isinstance(op, MulMats):
        return op.weights
    if isinstance(op, MulMat | MulMatHeads | MulMatId) and op.x is x:
        return (op.weight,)
    if isinstance(op, UpGate | UpGateId) and op.x is x:
        return (op.up,)
    return ()


def replaced(ops: Sequence[Op], new: dict[int, Op], gone: Iterable[int]) -> list[Op]:
    """Return the operations without some, and with others at some places."""
    left_out = set(gone)
    return [new.get(i, op) for i, op in enumerate(ops) if i in new or i not in left_out]
