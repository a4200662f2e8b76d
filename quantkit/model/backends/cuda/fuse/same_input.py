"""Fusion of products of one input, and of routing with the product that computes the router's logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from quantkit.kernels.cuda.matmul.mat_vec_same_input import MAX_MATRICES, family
from quantkit.model.backends.cuda.fuse.def_use import DefUse, extend_op, replace_ops
from quantkit.model.check import CHECK
from quantkit.model.fusion import SWITCHED_OFF, Decisions, Fusion, merge_products
from quantkit.model.ops import MulMat, MulMats, Op, Route, Value

#: The largest number of experts of a fused router, which shares the product's shared memory.
MAX_ROUTED = 1024


class MulMatsRoute(MulMats):
    """Products, one of which is a router's, and its routing; route_outs: ids and weights."""

    WRITES = ("outs", "route_outs")

    route_outs: tuple[Value, ...]
    route: Route


@CHECK.register(MulMatsRoute)
def _check(op: MulMatsRoute, experts: dict[Value, int]) -> None:
    CHECK[MulMats](op, experts)
    CHECK[Route](op.route, experts)


def fuse_same_input(ops: Sequence[Op], fusion: Fusion, decisions: Decisions) -> list[Op]:
    """Return operations with products of one input and of compatible types fused at the first of them."""
    groups: dict[Value, dict[str, list[int]]] = {}
    for i, op in enumerate(ops):
        if isinstance(op, MulMat):
            groups.setdefault(op.x, {}).setdefault(family(op.weight.tensor.type), []).append(i)
    new, removed = dict[int, Op](), set[int]()
    for families in groups.values():
        for group in families.values():
            for first in range(0, len(group), MAX_MATRICES):
                indices = group[first : first + MAX_MATRICES]
                members = [cast(MulMat, ops[i]) for i in indices]
                if _are_fused(members, families, fusion, decisions):
                    new[indices[0]] = merge_products(members)
                    removed |= set(indices)
    return replace_ops(ops, new, removed)


def _are_fused(members: Sequence[MulMat], families: Collection[str], fusion: Fusion, decisions: Decisions) -> bool:
    if len(members) == len(families) == 1:
        return False  # alone
    reason = "" if fusion.qkv else SWITCHED_OFF
    if not reason and len(members) == 1:
        reason = f"no kernel multiplies by {members[0].weight.tensor.type.name} and the other types"
    return decisions.decide("qkv", members[0].layer, reason)


def fuse_routes(ops: Sequence[Op], decisions: Decisions) -> list[Op]:
    """Return operations with routing fused into the product that computes the logits."""
    def_use = DefUse(ops, ())
    new: dict[int, Op] = {}
    removed: set[int] = set()
    for i, op in enumerate(ops):
        if not isinstance(op, Route):
            continue
        product, reason = def_use.definition(op.logits), ""
        if not isinstance(product, MulMat | MulMats):
            reason = "no product computes the router's logits"
        elif def_use.defined_at[op.logits] in new:
            reason = "the router's product already selects among other experts"
        elif op.selected is not None:
            reason = "the experts are selected elsewhere"
        elif op.logits.width > MAX_ROUTED:
            reason = f"{op.logits.width} experts, more than {MAX_ROUTED}"
        if decisions.decide("route", op.layer, reason):
            products = merge_products([product]) if isinstance(product, MulMat) else cast(MulMats, product)
            route_fields = {"route_outs": (op.ids, op.weights), "route": op, "layer": op.layer}
            new[def_use.defined_at[op.logits]] = extend_op(products, MulMatsRoute, **route_fields)
            removed |= {i}
    return replace_ops(ops, new, removed)
