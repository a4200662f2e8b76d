"""The order in which llama.cpp and ik_llama.cpp compute the operations of a graph."""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.model import ops
from quantkit.model.ops import Cache, Graph, Op, Value

#: Operations between the product and the attention that reads it.
ELEMENTWISE = (ops.Norm, ops.Rope, ops.Scale, ops.ScaleByPosition, ops.Clamp, ops.MultiplyBy, ops.Take, ops.MulMatHeads)


#: Operations at which a graph is expanded, besides attention and experts.
EXPANDED = (ops.Convolve, ops.DeltaNet, ops.SsmScan, ops.ColumnScan, ops.Wkv)


def _adds_experts(op: Op, makers: Mapping[Value, Op]) -> bool:
    return isinstance(op, ops.Add) and isinstance(makers.get(op.a), ops.Combine)


def in_ggml_order(graph: Graph, runtime: str = "llama.cpp") -> list[Op]:
    """Return the operations in the order in which ggml computes them.

    A graph is expanded at some operations, in their order: what they read comes directly before them, by argument.
    Of attention, llama.cpp expands q, v, k and both writes to the cache first, ik_llama.cpp the products of q, k and v,
    then q, k and v; of experts, their weights.
    """
    makers = {value: op for op in graph.ops for value in op.outputs()}
    order: dict[Op, None] = {}

    def expand(op: Op | None) -> None:
        pending = [op] if op is not None and op not in order else []
        while pending:
            op = pending[-1]
            readied = next((m for v in op.inputs() if (m := makers.get(v)) is not None and m not in order), None)
            if readied is not None:
                pending.append(readied)
                continue
            order[pending.pop()] = None

    def product(value: Value | None) -> Op | None:
        """Return the product that an element-wise chain begins with."""
        op = None if value is None else makers.get(value)
        while isinstance(op, ELEMENTWISE):
            op = makers.get(op.x)
        return op

    def expand_latent(op: ops.Attention, cache_writes: list[ops.CacheWrite]) -> None:
        """Expand the first products of queries and of latent rows, then what is rotated."""
        joins = [
            join
            for value in (op.q, *(write.k for write in cache_writes))
            if isinstance(join := makers[value], ops.Join)
        ]
        below = [product(join.a) for join in joins]
        x = getattr(below[-1], "x", None)
        for first in below:
            while isinstance(first, ops.MulMat) and first.x is not x and product(first.x) is not None:
                first = product(first.x)
            expand(first)
        for join in joins:
            expand(makers.get(join.b))

    writes: dict[Cache, list[Op]] = {}
    for op in graph.ops:  # embeddings are computed first, also those that later layers read (gemma3n)
        scaled = isinstance(op, ops.Scale) and op.layer < 0 and isinstance(makers.get(op.x), ops.Embed)
        if isinstance(op, ops.Embed) or scaled:
            expand(op)
    for op in graph.ops:
        if isinstance(op, ops.CacheWrite | ops.BlockWrite):
            writes.setdefault(op.cache, []).append(op)
        elif isinstance(op, ops.Attention) and runtime == "ik":
            cache_writes = [write for write in writes.pop(op.cache, ()) if isinstance(write, ops.CacheWrite)]
            values = [op.q, *(value for write in cache_writes for value in (write.k, write.v))]
            if not op.cache.v_width:
                expand_latent(op, cache_writes)
                values = values[1:]
            for value in values:
                expand(product(value))
            for value in values:
                expand(None if value is None else makers.get(value))
            for cache_write in cache_writes:
                expand(cache_write)
            expand(op)
        elif isinstance(op, ops.Attention):
            expand(makers.get(op.q))
            for write in writes.pop(op.cache, ()):
                if op.mask == "whole" and isinstance(write, ops.CacheWrite):  # without a cache, k comes before v
                    expand(makers.get(write.k))
                v = write.v if isinstance(write, ops.CacheWrite) else None
                expand(None if v is None else makers.get(v))
                expand(write)
            expand(op)
        elif isinstance(op, ops.Combine):
            expand(None if op.weights is None else makers.get(op.weights))
            expand(op)
        elif isinstance(op, EXPANDED) or runtime == "ik" and _adds_experts(op, makers):
            expand(op)
    # Operations after the last attention are expanded from the logits.
    for value in (graph.logits, *graph.leaves):
        expand(makers.get(value))
    for op in graph.ops:
        expand(op)
    return list(order)
