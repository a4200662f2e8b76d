"""Fuses operations into the launches of the cuda backend, by who defines and who uses each value.

A launch costs about as much as reading 10 MB of weights, and a layer has two dozen operations:

    MulMats        products of one input; MulMatsRoute: with the choice of experts by a router (same_input.py)
    PerHead        work on each column or head by itself: rotary positions, norms of heads, activations, gates, keys
                   and values into the cache (per_head.py)
    RowEpilogue    work on whole rows: experts summed, norm, sums, norm, and the format of the next weights
                   (row_epilogue.py)
    SharedExpert   products of a token's experts and of a shared one (shared_expert.py)
    ...To          results in the format of the next weights (formats.py)

A value that leaves the program, that an observer sees or that a second operation uses is written as before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from quantkit.model.backends.cuda.fuse.formats import fuse_formats
from quantkit.model.backends.cuda.fuse.per_head import fuse_per_head
from quantkit.model.backends.cuda.fuse.row_epilogue import fuse_row_epilogues
from quantkit.model.backends.cuda.fuse.same_input import fuse_routes, fuse_same_input
from quantkit.model.backends.cuda.fuse.shared_expert import fuse_shared_experts
from quantkit.model.fusion import CUBLAS, SWITCHED_OFF, Decision, Decisions, Fusion
from quantkit.model.ops import Op, Value


def fuse(
    ops: Sequence[Op], leaves: Collection[Value], fusion: Fusion, kv_type: str, *, cublas: bool = False
) -> tuple[list[Op], list[Decision]]:
    """Return operations that give the same values, and what was decided.

    leaves: values that leave the program, besides those that nothing in it reads. kv_type: of the caches. With cublas
    nothing is fused: fused operations write the activation formats of our products only.
    """
    used = {value for op in ops for value in op.inputs()}
    leaves = {*leaves, *(value for op in ops for value in op.outputs() if value not in used)}
    decisions = Decisions()
    fused = fuse_routes(fuse_same_input(ops, fusion, decisions), decisions)
    fused = fuse_row_epilogues(fuse_per_head(fused, leaves, kv_type, decisions), leaves, decisions)
    fused = fuse_shared_experts(fuse_formats(fused, leaves, decisions), leaves, decisions)
    reason = CUBLAS if cublas else "" if fusion.launches else SWITCHED_OFF
    if not reason:
        return fused, decisions
    return list(ops), [replace(d, fused=False, reason=reason) if d.fused else d for d in decisions]
