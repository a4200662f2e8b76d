"""Short sequences need no selection: where an indexer would select every key, latent attention runs without it."""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.ops import Attention, CacheWrite, Graph, LightningIndexer, Op


def without_selection(graph: Graph, n_ctx: int) -> Graph:
    """Return the graph for sequences of up to ``n_ctx`` tokens, without indexers that would select all keys of these.

    What only they read is left out, too; what is observed stays. The same graph if nothing is left out.
    """
    whole = {op.out for op in graph.ops if isinstance(op, LightningIndexer) and op.out.width >= n_ctx}
    if not whole:
        return graph
    kept = [
        replace(op, selected=None) if isinstance(op, Attention) and op.selected in whole else op
        for op in graph.ops
        if whole.isdisjoint(op.outputs())
    ]
    caches = {op.cache for op in kept if isinstance(op, Attention | LightningIndexer)}
    needed, listed = {graph.logits}, list[Op]()
    for op in reversed(kept):
        if isinstance(op, CacheWrite):
            wanted = op.cache in caches
        else:
            wanted = not op.outputs() or not needed.isdisjoint(op.outputs())
        if wanted:
            listed.append(op)
            needed.update(op.inputs())
    return replace(graph, ops=tuple(reversed(listed)), caches=tuple(c for c in graph.caches if c in caches))
