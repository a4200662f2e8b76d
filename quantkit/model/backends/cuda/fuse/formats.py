"""Fusion of activation formats with the operations that compute the values: attention, up and gate, heads."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quantkit.kernels.cuda.matmul.activations import OF_ROWS
from quantkit.model.backends.cuda.fuse.def_use import DefUse, extend_op, replace_ops
from quantkit.model.check import CHECK
from quantkit.model.fusion import Decisions
from quantkit.model.ops import Attention, MulMatHeads, Op, UpGate, UpGateId, Value


class AttentionWithFormat(Attention):
    """Attention that also writes its result in an activation format, in rows of q_width."""

    format: str
    q_width: int


class UpGateWithFormat(UpGate):
    """A variant that also writes its result in an activation format."""

    format: str


class UpGateIdWithFormat(UpGateId):
    """A variant that also writes its result in an activation format."""

    format: str


class MulMatHeadsWithFormat(MulMatHeads):
    """A variant that also writes its result in an activation format."""

    format: str


_WITH_FORMAT: dict[type[Op], type[Op]] = {
    Attention: AttentionWithFormat,
    UpGate: UpGateWithFormat,
    UpGateId: UpGateIdWithFormat,
    MulMatHeads: MulMatHeadsWithFormat,
}
CHECK |= {subclass: CHECK[kind] for kind, subclass in _WITH_FORMAT.items()}


def fuse_formats(ops: Sequence[Op], leaves: Collection[Value], decisions: Decisions) -> list[Op]:
    """Return operations that also write the activation format of the products that read them."""
    def_use, new = DefUse(ops, leaves), dict[int, Op]()
    for i, op in enumerate(ops):
        kind = _WITH_FORMAT.get(type(op))
        if kind is None:
            continue
        form, q_width, _ = def_use.format(op.outputs()[0])
        width = op.outputs()[0].width
        extra = {"q_width": q_width} if kind is AttentionWithFormat else {}
        reason = "" if extra or q_width == width else f"products read {q_width} of its {width} columns"
        if form in OF_ROWS:
            reason = f"{form} has scales of whole rows"
        if form and decisions.decide("format", op.layer, reason):
            new[i] = extend_op(op, kind, format=form, **extra)
    return replace_ops(ops, new, ())
