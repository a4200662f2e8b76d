"""Cost of a token: bytes read and multiply-adds, counted over a graph's operations."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.model.kv_types import STORED, stored_type
from quantkit.model.ops import Attention, Embed, Graph, LightningIndexer, Lookup, MulMatId, Op, UpGateId


@dataclass(frozen=True)
class Cost:
    """Cost of one token: bytes of weights and caches read, of states read and written, multiply-adds with weights."""

    weight_bytes: float
    cache_bytes: float
    mul_adds: float
    state_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.cache_bytes + self.state_bytes


def token_cost(graph: Graph, kv_type: str = "f16", depth: int = 0) -> Cost:
    """Return the cost of generating one token at position ``depth``; only the selected experts count."""
    weights = cache = mul_adds = 0.0
    for op in graph.ops:
        for matrix in op.matrices():
            used, rows = _n_used(op), 1 if isinstance(op, Embed | Lookup) else matrix.n_out
            part = used * matrix.tensor.type.row_bytes(matrix.n_in) * rows
            if len(matrix.tensor.shape) > 1 and not isinstance(op, Embed | Lookup):
                mul_adds += used * matrix.n_in * rows
            weights += part
        if isinstance(op, Attention):
            n_keys = min(depth, op.window) if op.window else depth
            if op.selected is not None:
                ratio = op.cache.ratio
                n_keys += min(depth // ratio, op.selected.width - op.window) if ratio else 0
                n_keys = min(n_keys, op.selected.width)
            cache += n_keys * (op.cache.k_width + op.cache.v_width) * STORED[stored_type(kv_type)]
        scored = depth // (op.cache.ratio or 1) if isinstance(op, LightningIndexer) else 0
        if isinstance(op, LightningIndexer) and scored > op.out.width:
            cache += scored * op.cache.k_width * STORED[stored_type(kv_type)]
    return Cost(weights, cache, mul_adds, sum(2.0 * 4 * state.width for state in graph.states))


def _n_used(op: Op) -> int:
    """Return the number of an operation's matrices that a token uses: of experts, the selected ones."""
    if isinstance(op, MulMatId | UpGateId):
        return op.out.per
    matrices = [m for m in op.matrices() if len(m.tensor.shape) > 2]
    return matrices[0].n_matrices if matrices else 1
