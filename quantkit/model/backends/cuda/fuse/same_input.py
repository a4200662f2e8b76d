"""Fuses products of one input, and the choice of experts with the product that makes the router's logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from quantkit.kernels.cuda.matmul.mat_vec_same_input import MAX_MATRICES, family
from quantkit.model.backends.cuda.fuse.def_use import DefUse, extended, replaced
from quantkit.model.check import CHECK
from quantkit.model.fusion import SWITCHED_OFF, Decisions, Fusion, together
from quantkit.model.ops import MulMat, MulMats, Op, Route, Value

#: Experts at most that a router's product chooses from: shared memory is the product's, too.
MAX_ROUTED = 1024


class MulMatsRoute(MulMats):
    """Products one of which is a router's, and its choice: route's ids and weights."""

    WRITES = ("outs", "chosen")

    chosen: tuple[Value, ...]
    route: Route


@CHECK.of(MulMatsRoute)
def _check(op: MulMatsRoute, experts: dict[Value, int]) -> None:
    CHECK[MulMats](op, experts)
    CHECK[Route](op.route, experts)


def fuse_same_input(ops: Sequence[Op], fusion: Fusion, decisions: Decisions) -> list[Op]:
    """Bring products of one input, of types that go together, to where the first of them is."""
    groups: dict[Value, dict[str, list[int]]] = {}
    for i, op in enumerate(ops):
        if isinstance(op, MulMat):
            groups.setdefault(op.x, {}).setdefault(family(op.weight.tensor.type), []).append(i)
    new, gone = dict[int, Op](), set[int]()
    for families in groups.values():
        for group in families.values():
            for first in range(0, len(group), MAX_MATRICES):
                some = group[first : first + MAX_MATRICES]
                members = [cast(MulMat, ops[i]) for i in some]
                if _are_fused(members, families, fusion, decisions):
                    new[some[0]] = together(members)
                    gone |= set(some)
    return replaced(ops, new, gone)


def _are_fused(members: Sequence[MulMat], families: Collection[str], fusion: Fusion, decisions: Decisions) -> bool:
    if len(members) == len(families) == 1:
        return False  # alone
    reason = "" if fusion.qkv else SWITCHED_OFF
    if not reason and len(members) == 1:
        reason = f"no kernel multiplies by {members[0].weight.tensor.type.name} and the other types"
    return decisions.decide("qkv", members[0].layer, reason)


def fuse_routes(ops: Sequence[Op], decisions: Decisions) -> list[Op]:
    """Let the product that makes a router's logits choose the experts, too."""
    def_use, new, gone = DefUse(ops, ()), dict[int, Op](), set[int]()
    for i, op in enumerate(ops):
        if not isinstance(op, Route):
            continue
        product, reason = def_use.definition(op.logits), ""
        if not isinstance(product, MulMat | MulMats):
            reason = "no product makes the router's logits"
        elif def_use.made_at[op.logits] in new:
            reason = "the router's product chooses among other experts already"
        elif op.chosen is not None:
            reason = "the experts are chosen elsewhere"
        elif op.logits.width > MAX_ROUTED:
            reason = f"{op.logits.width} experts, more than {MAX_ROUTED}"
        if decisions.decide("route", op.layer, reason):
            products = together([product]) if isinstance(product, MulMat) else cast(MulMats, product)
            chosen = {"chosen": (op.ids, op.weights), "route": op, "layer": op.layer}
            new[def_use.made_at[op.logits]] = extended(products, MulMatsRoute, **chosen)
            gone |= {i}
    return replaced(ops, new, gone)
