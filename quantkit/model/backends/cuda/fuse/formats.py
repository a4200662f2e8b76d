"""Fuses the format of the next weights with what makes the values: attention, products of up and gate, heads."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quantkit.kernels.cuda.matmul.activations import OF_ROWS
from quantkit.model.backends.cuda.fuse.def_use import DefUse, extended, replaced
from quantkit.model.check import CHECK
from quantkit.model.fusion import Decisions
from quantkit.model.ops import Attention, MulMatHeads, Op, UpGate, UpGateId, Value


class AttentionTo(Attention):
    """Attention that also writes its result in a format of activations, rows of q_width."""

    format: str
    q_width: int


class UpGateTo(UpGate):
    """One that also writes its result in a format."""

    format: str


class UpGateIdTo(UpGateId):
    """One that also writes its result in a format."""

    format: str


class MulMatHeadsTo(MulMatHeads):
    """One that also writes its result in a format."""

    format: str


_TO: dict[type[Op], type[Op]] = {
    Attention: AttentionTo,
    UpGate: UpGateTo,
    UpGateId: UpGateIdTo,
    MulMatHeads: MulMatHeadsTo,
}
CHECK |= {to: CHECK[kind] for kind, to in _TO.items()}


def fuse_formats(ops: Sequence[Op], leaves: Collection[Value], decisions: Decisions) -> list[Op]:
    """Let operations make the format of the products after them."""
    def_use, new = DefUse(ops, leaves), dict[int, Op]()
    for i, op in enumerate(ops):
        kind = _TO.get(type(op))
        if kind is None:
            continue
        form, q_width, _ = def_use.format(op.outputs()[0])
        width = op.outputs()[0].width
        more = {"q_width": q_width} if kind is AttentionTo else {}
        reason = "" if more or q_width == width else f"products take {q_width} of its {width} columns"
        if form in OF_ROWS:
            reason = f"{form} has scales of whole rows"
        if form and decisions.decide("format", op.layer, reason):
            new[i] = extended(op, kind, format=form, **more)
    return replaced(ops, new, ())
