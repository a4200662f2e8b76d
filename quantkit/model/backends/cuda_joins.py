"""Neighbours that the cuda backend carries out in one launch: operations of its own, found by who reads which value.

A launch costs about as much as reading 10 MB of weights, and a layer has two dozen operations:

    MulMats  products of one x; MulMatsRoute: and what a router's choose
    Parts    what is done to each column or head by itself: rotary positions, norms of heads, activations, gates, keys
             and values into the cache (cuda_parts.py)
    Stage    what is done to whole rows: experts summed, norm, sums, norm, and the format of the next weights
             (cuda_stages.py)
    Beside   products of a token's experts and of a shared one (cuda_formats.py)

Attention and products that are made for other products leave their results in the format of the next weights.

Nothing that somebody else reads is left out: a value that leaves the program, that an observer sees or that a second
operation takes is written as before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

from quantkit.kernels.cuda.mat_vec_several import MAX_MATRICES, family
from quantkit.model.backends.cuda_formats import with_beside, with_formats
from quantkit.model.backends.cuda_parts import with_parts
from quantkit.model.backends.cuda_stages import with_stages
from quantkit.model.backends.cuda_uses import Uses, replaced
from quantkit.model.ops import MulMat, MulMats, Op, Route, Value

#: Experts at most that a router's product chooses from: shared memory is the product's, too.
MAX_ROUTED = 1024


@dataclass(frozen=True, eq=False, kw_only=True)
class MulMatsRoute(MulMats):
    """Products one of which is a router's, and its choice: route's ids and weights."""

    WRITES = ("outs", "chosen")

    chosen: tuple[Value, ...]
    route: Route


def join(ops: Sequence[Op], leaves: Collection[Value], kv_type: str) -> list[Op]:
    """Return operations that give the same values; ``leaves`` are those that leave the program."""
    joined = with_stages(with_parts(_with_routes(_with_products(ops)), leaves, kv_type), leaves)
    return with_beside(with_formats(joined, leaves), leaves)


def _with_products(ops: Sequence[Op]) -> list[Op]:
    """Bring products of one x with weights of types that go together to where the first of them is."""
    groups: dict[tuple[Value, str], list[int]] = {}
    for i, op in enumerate(ops):
        if isinstance(op, MulMat):
            groups.setdefault((op.x, family(op.weight.tensor.type)), []).append(i)
    new, gone = dict[int, Op](), set[int]()
    for group in groups.values():
        for first in range(0, len(group), MAX_MATRICES):
            some = group[first : first + MAX_MATRICES]
            if len(some) > 1:
                members = [cast(MulMat, ops[i]) for i in some]
                new[some[0]] = MulMats(layer=members[0].layer, x=members[0].x, **_columns(members))
                gone |= set(some)
    return replaced(ops, new, gone)


def _columns(members: Sequence[MulMat]) -> dict[str, tuple[Any, ...]]:
    of = {"outs": "out", "weights": "weight", "biases": "bias", "scales": "scale"}
    return {several: tuple(getattr(op, one) for op in members) for several, one in of.items()}


def _with_routes(ops: Sequence[Op]) -> list[Op]:
    """Let the product with a router choose the experts, too."""
    uses, new, gone = Uses(ops, ()), dict[int, Op](), set[int]()
    for i, op in enumerate(ops):
        if not isinstance(op, Route) or op.logits.width > MAX_ROUTED:
            continue
        at = uses.made.get(op.logits, -1)
        product = ops[at]
        if at < 0 or at in new or not isinstance(product, MulMat | MulMats):
            continue
        given = _columns([product]) if isinstance(product, MulMat) else {f: getattr(product, f) for f in _columns([])}
        chosen = op.ids, op.weights
        new[at] = MulMatsRoute(layer=op.layer, x=product.x, chosen=chosen, route=op, **given)
        gone |= {i}
    return replaced(ops, new, gone)
