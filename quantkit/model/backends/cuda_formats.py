"""Joins what makes the format of the next weights to what makes the values: attention, products of up and gate, heads.

Experts and the dense matrices beside them, a shared expert's, are joined here, too: their up and gate, then their down.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

from quantkit.kernels.activation_formats import activation_format
from quantkit.kernels.cuda.mat_vec_several import family
from quantkit.model.backends.cuda_parts import MulMatHeadsInto
from quantkit.model.backends.cuda_uses import Uses, replaced
from quantkit.model.ops import Attention, Matrix, MulMat, MulMatHeads, MulMatId, Op, UpGate, UpGateId, Value


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionTo(Attention):
    """Attention whose result is also made in a format that products take, rows of q_width."""

    format: str
    q_width: int


@dataclass(frozen=True, eq=False, kw_only=True)
class UpGateTo(UpGate):
    """One whose result is also made in a format."""

    format: str


@dataclass(frozen=True, eq=False, kw_only=True)
class UpGateIdTo(UpGateId):
    """One whose result is also made in a format."""

    format: str


@dataclass(frozen=True, eq=False, kw_only=True)
class MulMatHeadsTo(MulMatHeads):
    """One whose result is also made in a format."""

    format: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Beside(Op):
    """Products by expert, and dense ones beside them: of a token in one launch."""

    WRITES = ("outs",)

    outs: tuple[Value, ...]
    ins: tuple[Value, ...]
    by_expert: UpGateId | MulMatId
    dense: UpGate | MulMat


def with_formats(ops: Sequence[Op], leaves: Collection[Value]) -> list[Op]:
    """Let operations make the format of the products after them."""
    uses, new = Uses(ops, leaves), dict[int, Op]()
    for i, op in enumerate(ops):
        given = {f.name: getattr(op, f.name) for f in fields(op)}
        if isinstance(op, Attention | UpGate | UpGateId | MulMatHeads) and not isinstance(op, MulMatHeadsInto):
            form, q_width, _ = uses.format(op.out)
            if not form:
                continue
            if isinstance(op, Attention):
                new[i] = AttentionTo(**given, format=form, q_width=q_width)
            elif q_width == op.out.width:
                to = UpGateTo if isinstance(op, UpGate) else UpGateIdTo if isinstance(op, UpGateId) else MulMatHeadsTo
                new[i] = to(**given, format=form)
    return replaced(ops, new, ())


# ---------------------------------------------------------------- experts and what is beside them


def with_beside(ops: Sequence[Op], leaves: Collection[Value]) -> list[Op]:
    """Bring the products of a shared expert to those of the experts."""
    uses, new, gone = Uses(ops, leaves), dict[int, Op](), set[int]()
    for i, op in enumerate(ops):
        at = _shared(uses, i) if isinstance(op, UpGateId) else None
        if at is None:
            continue
        new[i] = _beside(op, ops[at])
        gone |= {i, at}
        down, dense_down = (uses.only_reader(ops[k].outputs()[0]) for k in (i, at))
        if down is not None and dense_down is not None and _go_together(ops[down], ops[dense_down]):
            new[down] = _beside(ops[down], ops[dense_down])
            gone |= {down, dense_down}
    return replaced(ops, new, gone)


def _shared(uses: Uses, i: int) -> int | None:
    """Return the first dense up and gate of the same layer and token whose input is there when experts' are wanted."""
    for at in range(i, len(uses.ops)):
        op = uses.ops[at]
        if op.layer > uses.ops[i].layer:
            return None
        if isinstance(op, UpGate) and uses.made.get(op.x, -1) < i:
            return at if _go_together(uses.ops[i], op) else None
    return None


def _go_together(op: Op, dense: Op) -> bool:
    """Tell whether a kernel can do both: of one family of types, and doing the same with the products."""
    if isinstance(op, UpGateId) and isinstance(dense, UpGate):
        same = op.activation == dense.activation and op.up.n_in == dense.up.n_in
        return same and _alike(op.ids, dense.out, op.up, dense.up)
    if isinstance(op, MulMatId) and isinstance(dense, MulMat):
        return _alike(op.ids, dense.out, op.weight, dense.weight)
    return False


def _alike(ids: Value, out: Value, weight: Matrix, dense: Matrix) -> bool:
    types = weight.tensor.type, dense.tensor.type
    formats = {activation_format(t) for t in types}
    rows = (ids.per, ids.outputs) == (out.per, out.outputs)
    return rows and len(formats) == 1 and family(types[0]) == family(types[1])


def _beside(op: Op, dense: Op) -> Beside:
    assert isinstance(op, UpGateId | MulMatId)
    assert isinstance(dense, UpGate | MulMat)
    ins = dict.fromkeys((*op.inputs(), *dense.inputs()))
    return Beside(layer=op.layer, outs=(op.out, dense.out), ins=tuple(ins), by_expert=op, dense=dense)
