"""Fusion of the products of a shared expert with those of the routed experts: up and gate, then down."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quantkit.kernels.cuda.matmul.mat_vec_same_input import family
from quantkit.kernels.formats import activation_format
from quantkit.model.backends.cuda.fuse.def_use import DefUse, replace_ops
from quantkit.model.check import CHECK
from quantkit.model.fusion import Decisions
from quantkit.model.ops import Matrix, MulMat, MulMatId, Op, UpGate, UpGateId, Value


class SharedExpert(Op):
    """A product by expert and that of a shared expert: one launch for a token."""

    WRITES = ("outs",)

    outs: tuple[Value, ...]
    ins: tuple[Value, ...]
    by_expert: UpGateId | MulMatId
    dense: UpGate | MulMat


@CHECK.register(SharedExpert)
def _check(op: SharedExpert, experts: dict[Value, int]) -> None:
    for part in (op.by_expert, op.dense):
        CHECK[type(part)](part, experts)


def fuse_shared_experts(ops: Sequence[Op], leaves: Collection[Value], decisions: Decisions) -> list[Op]:
    """Return operations with products of shared experts fused with those by expert."""
    def_use = DefUse(ops, leaves)
    new: dict[int, Op] = {}
    removed: set[int] = set()

    def one_launch(i: int, dense_index: int, reason: str) -> bool:
        if decisions.decide("shared_expert", ops[i].layer, reason):
            new[i] = _shared_expert(ops[i], ops[dense_index])
            removed.update((i, dense_index))
        return not reason

    for i, op in enumerate(ops):
        dense_at = _find_dense(def_use, i) if isinstance(op, UpGateId) else None
        if dense_at is None or not one_launch(i, dense_at, _obstacle(op, ops[dense_at])):
            continue
        down, dense_down = (def_use.sole_reader(ops[k].outputs()[0]) for k in (i, dense_at))
        if down is not None and dense_down is not None:
            one_launch(down, dense_down, _obstacle(ops[down], ops[dense_down]))
    return replace_ops(ops, new, removed)


def _find_dense(def_use: DefUse, i: int) -> int | None:
    """Return the first dense up and gate of the same layer whose input is defined before operation i."""
    for index in range(i, len(def_use.ops)):
        op = def_use.ops[index]
        if op.layer > def_use.ops[i].layer:
            return None
        if isinstance(op, UpGate) and def_use.defined_at.get(op.x, -1) < i:
            return index
    return None


def _obstacle(op: Op, dense: Op) -> str:
    """Return the reason why no kernel computes both; empty if one does."""
    if isinstance(op, UpGateId) and isinstance(dense, UpGate):
        if op.activation != dense.activation or op.up.n_in != dense.up.n_in:
            return "another activation, or another size of input"
        return _difference(op.ids, dense.out, op.up, dense.up)
    if isinstance(op, MulMatId) and isinstance(dense, MulMat):
        return _difference(op.ids, dense.out, op.weight, dense.weight)
    return "their results are read by other operations"


def _difference(ids: Value, out: Value, weight: Matrix, dense: Matrix) -> str:
    types = weight.tensor.type, dense.tensor.type
    if (ids.per, ids.outputs) != (out.per, out.outputs):
        return "they have other rows"
    compatible = len({activation_format(t) for t in types}) == len({family(t) for t in types}) == 1
    return "" if compatible else f"no kernel multiplies by {types[0].name} and {types[1].name}"


def _shared_expert(op: Op, dense: Op) -> SharedExpert:
    assert isinstance(op, UpGateId | MulMatId)
    assert isinstance(dense, UpGate | MulMat)
    ins = dict.fromkeys((*op.inputs(), *dense.inputs()))
    return SharedExpert(layer=op.layer, outs=(op.out, dense.out), ins=tuple(ins), by_expert=op, dense=dense)
