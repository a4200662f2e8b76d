"""Graphs for short sequences: where an indexer would select every key, latent attention runs without it."""

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
    """Return the graph for sequences of up to ``n_ctx`` tokens, without indexers that would select all keys.

    Operations that only these read are also removed, unless observed. Lists of cells shrink to their largest length. If
    nothing changes, the result is ``graph`` itself.
    """
    full = {op.out for op in graph.ops if isinstance(op, LightningIndexer) and op.out.width >= _n_keys(op, n_ctx)}
    windows = {op.out: _shorten(op, full, n_ctx) for op in graph.ops if isinstance(op, WindowAndBlocks)}
    if not full and all(old.width == new.out.width for old, new in windows.items()):
        return graph
    candidates = [_with_selection(op, full, windows) for op in graph.ops if full.isdisjoint(op.outputs())]
    caches = {op.cache for op in candidates if isinstance(op, Attention | LightningIndexer)}
    live_values, live_ops = {graph.logits}, list[Op]()
    for op in reversed(candidates):
        if isinstance(op, BlockWrite | CacheWrite):
            is_live = op.cache in caches
        else:
            is_live = not op.outputs() or not live_values.isdisjoint(op.outputs())
        if is_live:
            live_ops.append(op)
            live_values.update(op.inputs())
    states = {part for op in live_ops for part in vars(op).values() if isinstance(part, State)}
    return replace(
        graph,
        ops=tuple(reversed(live_ops)),
        caches=tuple(c for c in graph.caches if c in caches),
        states=tuple(s for s in graph.states if s in states),
    )


def _n_keys(op: LightningIndexer, n_ctx: int) -> int:
    """Return the largest number of keys to select from."""
    return op.cache.blocks(n_ctx) if op.cache.ratio else n_ctx


def _shorten(op: WindowAndBlocks, full: set[Value], n_ctx: int) -> WindowAndBlocks:
    blocks = None if op.blocks in full else op.blocks
    n_cells = op.out.width - op.window if blocks is not None else op.cache.blocks(n_ctx)
    return replace(op, out=replace(op.out, width=op.window + n_cells), blocks=blocks)


def _with_selection(op: Op, full: set[Value], windows: dict[Value, WindowAndBlocks]) -> Op:
    if isinstance(op, WindowAndBlocks):
        return windows[op.out]
    if not isinstance(op, Attention) or op.selected is None:
        return op
    if op.selected in full:
        return replace(op, selected=None)
    return replace(op, selected=windows[op.selected].out) if op.selected in windows else op
