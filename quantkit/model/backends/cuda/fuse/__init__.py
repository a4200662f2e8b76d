"""Fusion of operations into launches of the cuda backend, by definitions and uses of values.

A launch costs about as much as reading 10 MB of weights, and a layer has two dozen operations:

    MulMats        products of one input; MulMatsRoute: with the choice of experts by a router (same_input.py)
    PerHead        work on single columns or heads: rotary positions, norms of heads, activations, gates, keys
                   and values into the cache (per_head.py)
    RowEpilogue    work on whole rows: experts summed, norm, sums, norm, and the format of the next weights
                   (row_epilogue.py)
    SharedExpert   products of a token's experts and of a shared one (shared_expert.py)
    ...WithFormat  results in the activation format of the next weights (formats.py)

A value that leaves the program, is observed or has a second reader is written as before.
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
    """Return operations that compute the same values, and the decisions.

    leaves: values that leave the program, in addition to those without readers. kv_type: of the caches. cublas disables
    fusion, because fused operations only write the activation formats of quantkit's products.
    """
    used = {value for op in ops for value in op.inputs()}
    leaves = {*leaves, *(value for op in ops for value in op.outputs() if value not in used)}
    decisions = Decisions()
    fused = fuse_routes(fuse_same_input(ops, fusion, decisions), decisions)
    fused = fuse_row_epilogues(fuse_per_head(fused, leaves, kv_type, decisions), leaves, decisions)
    fused = fuse_shared_experts(fuse_formats(fused, leaves, decisions), leaves, decisions)
    if fusion.launches and not cublas:
        return fused, decisions
    reason = CUBLAS if cublas else SWITCHED_OFF
    return list(ops), [replace(d, fused=False, reason=reason) if d.fused else d for d in decisions]
