"""Short sequences need no selection: where an indexer would select every key, latent attention runs without it."""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.ops import (
    Attention,
    BlockWrite,
    CacheWrite,
    Graph,
    LightningIndexer,
    Op,
    State,
    Value,
    WindowAndBlocks,
)


def without_selection(graph: Graph, n_ctx: int) -> Graph:
    """Return the graph for sequences of up to ``n_ctx`` tokens, without indexers that would select all keys of these.

    What only they read is left out, too; what is observed stays. Lists of cells have no more room than they need. The
    same graph if nothing changes.
    """
    whole = {op.out for op in graph.ops if isinstance(op, LightningIndexer) and op.out.width >= _keys(op, n_ctx)}
    listed = {op.out: _shorter(op, whole, n_ctx) for op in graph.ops if isinstance(op, WindowAndBlocks)}
    if not whole and all(old.width == new.out.width for old, new in listed.items()):
        return graph
    kept = [_kept(op, whole, listed) for op in graph.ops if whole.isdisjoint(op.outputs())]
    caches = {op.cache for op in kept if isinstance(op, Attention | LightningIndexer)}
    needed, found = {graph.logits}, list[Op]()
    for op in reversed(kept):
        if isinstance(op, BlockWrite | CacheWrite):
            wanted = op.cache in caches
        else:
            wanted = not op.outputs() or not needed.isdisjoint(op.outputs())
        if wanted:
            found.append(op)
            needed.update(op.inputs())
    states = {part for op in found for part in vars(op).values() if isinstance(part, State)}
    return replace(
        graph,
        ops=tuple(reversed(found)),
        caches=tuple(c for c in graph.caches if c in caches),
        states=tuple(s for s in graph.states if s in states),
    )


def _keys(op: LightningIndexer, n_ctx: int) -> int:
    """Return how many keys there can be to choose from."""
    return op.cache.blocks(n_ctx) if op.cache.ratio else n_ctx


def _shorter(op: WindowAndBlocks, whole: set[Value], n_ctx: int) -> WindowAndBlocks:
    blocks = None if op.blocks in whole else op.blocks
    room = op.out.width - op.window if blocks is not None else op.cache.blocks(n_ctx)
    return replace(op, out=replace(op.out, width=op.window + room), blocks=blocks)


def _kept(op: Op, whole: set[Value], listed: dict[Value, WindowAndBlocks]) -> Op:
    if isinstance(op, WindowAndBlocks):
        return listed[op.out]
    if not isinstance(op, Attention) or op.selected is None:
        return op
    if op.selected in whole:
        return replace(op, selected=None)
    return replace(op, selected=listed[op.selected].out) if op.selected in listed else op
