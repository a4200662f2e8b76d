"""The order in which llama.cpp and ik_llama.cpp compute the operations of a graph."""

from __future__ import annotations

from quantkit.model import ops
from quantkit.model.ops import Cache, Graph, Op, Value


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
        while isinstance(op, ops.Norm | ops.Rope | ops.Scale | ops.ScaleByPosition | ops.Clamp | ops.MultiplyBy):
            op = makers.get(op.x)
        return op

    writes: dict[Cache, list[Op]] = {}
    for op in graph.ops:  # embeddings are computed first, also those that later layers read (gemma3n)
        if isinstance(op, ops.Embed) or isinstance(op, ops.Scale) and isinstance(makers.get(op.x), ops.Embed):
            expand(op)
    for op in graph.ops:
        if isinstance(op, ops.CacheWrite | ops.BlockWrite):
            writes.setdefault(op.cache, []).append(op)
        elif isinstance(op, ops.Attention) and runtime == "ik":
            written = [write for write in writes.pop(op.cache, ()) if isinstance(write, ops.CacheWrite)]
            values = [op.q, *(value for write in written for value in (write.k, write.v))]
            for value in values:
                expand(product(value))
            for value in values:
                expand(None if value is None else makers.get(value))
            for write in written:
                expand(write)
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
        elif runtime == "ik" and isinstance(op, ops.Add) and isinstance(makers.get(op.a), ops.Combine):
            expand(op)
        elif isinstance(op, ops.Convolve | ops.DeltaNet | ops.SsmScan | ops.ColumnScan | ops.Wkv):
            expand(op)
    for op in graph.ops:
        expand(op)
    return list(order)
