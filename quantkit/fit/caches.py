"""The memory of a context, layer by layer: keys and values, states of recurrent layers, indexers.

Sizes are those that llama.cpp b11434 allocates (src/llama-kv-cache*.cpp, llama-memory-*.cpp), byte for byte. Widths and
kinds come from the engine's graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from quantkit.model import ops
from quantkit.model.hparams import HParams
from quantkit.model.ops import Cache, Graph
from quantkit.types import TensorType
from quantkit.units import round_up

#: llama.cpp rounds up contexts, and the cells of windows and of blocks, to this many.
PAD = 256
_F32 = 4


@dataclass(frozen=True)
class Context:
    """The settings of a context that decide its memory."""

    n_ctx: int
    k_type: TensorType
    v_type: TensorType
    n_parallel: int = 1
    kv_unified: bool = False
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attn: bool = True
    #: ``llama.cpp`` or ``ik``.
    runtime: str = "llama.cpp"
    #: Only one row of logits for each sequence, as in llama-server.
    server: bool = False

    @property
    def windows(self) -> bool:
        """Whether windows have caches of their own size; otherwise all caches are as long as the context."""
        return self.runtime == "llama.cpp"

    @property
    def cells(self) -> int:
        """Positions of a sequence, or of all if they share the cache."""
        n = round_up(self.n_ctx, PAD)
        return n if self.kv_unified else round_up(n // self.n_parallel, PAD)

    @property
    def n_stream(self) -> int:
        return 1 if self.kv_unified else self.n_parallel

    @property
    def n_tokens(self) -> int:
        """Tokens of the largest batch."""
        return min(round_up(self.n_ctx, PAD), self.n_batch, self.n_ubatch)

    @property
    def n_outputs(self) -> int:
        """Rows of logits of the largest batch."""
        return min(self.n_tokens, self.n_parallel if self.server and self.runtime == "llama.cpp" else self.n_batch)

    def with_length(self, n_ctx: int) -> Context:
        return replace(self, n_ctx=n_ctx)


@dataclass(frozen=True)
class LayerMemory:
    """KV cache or recurrent state of a layer, in bytes."""

    layer: int
    #: ``full``, ``window``, ``latent``, ``indexer``, ``blocks`` or ``state``.
    kind: str
    #: Positions, or blocks, of all sequences together; 0 for states.
    cells: int
    k_bytes: int = 0
    v_bytes: int = 0
    state_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.k_bytes + self.v_bytes + self.state_bytes


@dataclass(frozen=True)
class CacheShapes:
    """The caches of a graph: layer, window and whether values are stored, by cache."""

    graph: Graph
    arch: str
    #: Values of a context without flash attention are padded to the widest layer, also in layers without attention.
    n_layer: int
    #: Further caches of indexers, which the engine does not compute: layer, width of keys, width of values.
    indexers: tuple[tuple[int, int, int], ...] = ()
    layers: Mapping[Cache, int] = field(default_factory=dict)
    windows: Mapping[Cache, int] = field(default_factory=dict)
    layer_of_state: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def has_cache(self) -> bool:
        """Whether llama.cpp keeps a context; diffusion models attend to the batch alone."""
        return not any(isinstance(op, ops.Attention) and op.mask == "whole" for op in self.graph.ops)

    @property
    def widest_v(self) -> int:
        return max((cache.v_width for cache in self.graph.caches), default=0)

    def is_windowed(self, cache: Cache, context: Context) -> bool:
        return bool(self.windows.get(cache)) and context.windows

    def cells(self, cache: Cache, context: Context) -> int:
        """Return the cells of a sequence's part of a cache; of one with blocks, those of positions."""
        if not self.is_windowed(cache, context):
            return context.cells
        shared = context.n_parallel if context.kv_unified and not cache.ratio else 1
        return round_up(min(context.cells, self.windows[cache] * shared + context.n_ubatch), PAD)


def cache_shapes(graph: Graph, h: HParams) -> CacheShapes:
    """Return the layer and the window of each cache of a graph."""
    layers: dict[Cache, int] = {}
    windows: dict[Cache, int] = {}
    states: dict[str, int] = {}
    for op in graph.ops:
        cache = getattr(op, "cache", None)
        if cache is not None:
            layers.setdefault(cache, op.layer)
        if isinstance(op, ops.Attention) and op.window:
            windows.setdefault(op.cache, op.window)
        state = getattr(op, "state", None)
        if state is not None:
            states.setdefault(state.name, op.layer)
    # The engine attends to all keys, which MiniMax M3's indexer selects blocks of.
    first = h.int("leading_dense_block_count", 0) if h.arch == "minimax-m3" else h.n_layer
    width = h.int("attention.indexer.key_length", 0)
    indexers = tuple((layer, width, h.head_v) for layer in range(first, h.n_layer))
    return CacheShapes(graph, h.arch, h.n_layer, indexers, layers, windows, states)


def layer_memory(shapes: CacheShapes, context: Context) -> list[LayerMemory]:
    """Return the memory of each layer and kind."""
    if not shapes.has_cache:
        return []
    return [*_caches(shapes, context), *_states(shapes, context)]


def _caches(shapes: CacheShapes, context: Context) -> Iterator[LayerMemory]:
    padded = not context.flash_attn and context.runtime == "llama.cpp" and shapes.widest_v
    layers_without = set(range(shapes.n_layer)) if shapes.arch == "deci" and padded else set()
    # DeepSeek 4 keeps sequences apart even in a unified cache.
    streams = context.n_parallel if shapes.arch == "deepseek4" else context.n_stream
    for cache in shapes.graph.caches:
        layer = shapes.layers.get(cache, 0)
        layers_without.discard(layer)
        if cache.ratio:
            yield from _block_memory(cache, layer, shapes, context)
            if not cache.positions:
                continue
        cells = shapes.cells(cache, context) * streams
        v_width = shapes.widest_v if padded and cache.v_width else cache.v_width
        yield LayerMemory(
            layer,
            _kind(cache, shapes, context),
            cells,
            context.k_type.row_bytes(cache.k_width) * cells,
            context.v_type.row_bytes(v_width) * cells if v_width else 0,
        )
    for layer, k_width, v_width in shapes.indexers:
        cells = context.cells * streams
        k_bytes, v_bytes = context.k_type.row_bytes(k_width), context.v_type.row_bytes(v_width)
        yield LayerMemory(layer, "indexer", cells, k_bytes * cells, v_bytes * cells)
    for layer in sorted(layers_without):
        cells = context.cells * streams
        yield LayerMemory(layer, "padding", cells, 0, context.v_type.row_bytes(shapes.widest_v) * cells)


def _kind(cache: Cache, shapes: CacheShapes, context: Context) -> str:
    if cache.name.endswith("_indexer"):
        return "indexer"
    if shapes.is_windowed(cache, context):
        return "window"
    return "full" if cache.v_width else "latent"


def _block_memory(cache: Cache, layer: int, shapes: CacheShapes, context: Context) -> Iterator[LayerMemory]:
    """Yield the rows of blocks of a cache, and the state of the compressor that makes them (DeepSeek 4)."""
    cells = round_up(max(1, -(-context.cells // cache.ratio)), PAD) * context.n_parallel
    kind = "blocks" if cache.positions else "indexer"
    yield LayerMemory(layer, kind, cells, context.k_type.row_bytes(cache.k_width) * cells)
    # Blocks that overlap keep two halves of twice as many rows.
    halves = 2 if cache.ratio == 4 else 1
    state = 2 * _F32 * (halves * cache.k_width) * (halves * cache.ratio) * context.n_parallel
    yield LayerMemory(layer, "state", 0, state_bytes=state)


def _states(shapes: CacheShapes, context: Context) -> Iterator[LayerMemory]:
    if shapes.arch == "deepseek4":
        return
    for state in shapes.graph.states:
        layer = shapes.layer_of_state.get(state.name, 0)
        yield LayerMemory(layer, "state", 0, state_bytes=_F32 * state.width * context.n_parallel)
