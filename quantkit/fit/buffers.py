"""Compute buffers: the memory of the largest batch on each device, by a replay of ggml's allocator.

The graph is the engine's, and so an estimate: exact for most architectures, and within the bounds of docs/how-to/fit.md
for others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from quantkit.fit.allocator import Tensor, buffer_size
from quantkit.fit.caches import CacheShapes, Context
from quantkit.fit.nodes import Batch, BlockIndexer, Mask, Nodes, emit, in_ggml_order
from quantkit.model import ops
from quantkit.model.hparams import HParams
from quantkit.model.ops import Graph, Op, Value
from quantkit.types import TensorType

#: Architectures whose batches cannot mix tokens and vectors.
_UNMIXED = frozenset({"cogvlm", "deepseek4"})
_SECTIONS = frozenset({"qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "paddleocr", "glm4", "glm4moe"})
#: Architectures that llama.cpp runs without flash attention.
WITHOUT_FLASH_ATTENTION = frozenset({"grok"})
#: Input copies of a scheduler that overlaps several GPUs (GGML_SCHED_MAX_COPIES).
COPIES = 4


@dataclass(frozen=True)
class Schedule:
    """The operations of a graph in ggml's order, computed once for a model."""

    graph: Graph
    order: tuple[Op, ...]


def schedule(graph: Graph) -> Schedule:
    """Return the graph's operations in ggml's order."""
    return Schedule(graph, tuple(in_ggml_order(graph)))


def compute_bytes(
    plan: Schedule,
    shapes: CacheShapes,
    h: HParams,
    context: Context,
    device_of: Callable[[Op], int] | None = None,
    host_weights: Mapping[str, int] | None = None,
    *,
    pipeline: bool = False,
) -> dict[int, int]:
    """Return the bytes of each device's compute buffer.

    device_of: the device of an operation, 0 being the CPU; by default all are there. host_weights: bytes of tensors in
    memory whose operations are computed on a GPU, which therefore copies them. pipeline: batches overlap on several
    GPUs.
    """
    batch = _batch(shapes, h, context)
    masks = {cache: _mask(shapes, context, cache) for cache in plan.graph.caches}
    rotated = set(_rotate(plan.graph, batch))
    split = {op.x for op in plan.graph.ops if isinstance(op, ops.Take)}
    last = {op.layer: op for op in plan.order if 0 <= op.layer < batch.n_vectors - 1}
    stacked = set(last.values())
    parts: dict[int, list[Op]] = {}
    for op in plan.order:
        parts.setdefault(device_of(op) if device_of else 0, []).append(op)
    sizes = {}
    for device, part in parts.items():
        nodes = Nodes(batch, masks, shapes.widest_v, rotated, split, stacked)
        if not device and device_of:
            for cache in masks:
                nodes.mask(cache)  # inputs are filled in memory, then copied to GPUs
        for op in part:
            names = dict.fromkeys(matrix.tensor.name for matrix in op.matrices()) if device and host_weights else ()
            copies = [Tensor(host_weights[name]) for name in names if name in host_weights] if host_weights else []
            emit(nodes, [op], copies)
        if plan.graph.logits in nodes.tensors:
            nodes.tensors[plan.graph.logits].is_output = True
        size = buffer_size(nodes.inputs, nodes.nodes)
        if pipeline and device:
            size += (COPIES - 1) * sum(tensor.nbytes for tensor in nodes.inputs)
        sizes[device] = size
    return sizes


def _batch(shapes: CacheShapes, h: HParams, context: Context) -> Batch:
    graph = shapes.graph
    heads = {(op.head_k, op.head_v) for op in graph.ops if isinstance(op, ops.Attention)}
    is_plain = not shapes.has_cache or any(not cache.v_width for cache in graph.caches)
    return Batch(
        n_tokens=context.n_tokens,
        n_outputs=context.n_outputs,
        n_seqs=context.n_parallel,
        flash_attn=context.flash_attn and h.arch not in WITHOUT_FLASH_ATTENTION,
        # Latent keys are not rotated (llm_graph_input_attn_k), nor are those without a cache.
        k_rotation=0 if is_plain else _k_rotation({k for k, _ in heads}, context.k_type),
        v_rotation=0 if is_plain else _v_rotation({v for _, v in heads}, context.v_type),
        mixed=h.arch not in _UNMIXED,
        n_positions=4 if h.arch in _SECTIONS else 1,
        n_vectors=1 + h.int("n_deepstack_layers", 0),
        no_cache=not shapes.has_cache,
        block_indexer=_block_indexer(h, context),
    )


def _block_indexer(h: HParams, context: Context) -> BlockIndexer | None:
    """Return the indexer of blocks of MiniMax M3, which needs a cache of its own for each sequence."""
    if h.arch != "minimax-m3" or (context.n_parallel > 1 and context.kv_unified):
        return None
    names = ("head_count", "key_length", "block_size", "top_k")
    return BlockIndexer(h.int("leading_dense_block_count", 0), *(h.int(f"attention.indexer.{name}") for name in names))


def _rotate(graph: Graph, batch: Batch) -> Iterator[Value]:
    """Yield queries, keys and values that are rotated before they are quantized."""
    for op in graph.ops:
        if isinstance(op, ops.Attention) and batch.k_rotation:
            yield op.q
        elif isinstance(op, ops.CacheWrite):
            if batch.k_rotation:
                yield op.k
            if batch.v_rotation and op.v is not None:
                yield op.v


def _mask(shapes: CacheShapes, context: Context, cache: ops.Cache) -> Mask:
    cells = shapes.cells(cache, context)
    if cache.ratio:
        blocks = -(-context.cells // cache.ratio)
        cells = blocks if not cache.positions else cells + blocks
    if not shapes.has_cache:
        cells = context.n_tokens
    kind = "indexer" if cache.name.endswith("_indexer") else "window" if shapes.windows.get(cache) else "full"
    return Mask(cells, context.n_stream, kind)


def _k_rotation(heads: Collection[int], kv_type: TensorType) -> int:
    """Return the width of the Hadamard matrix by which quantized keys are rotated; 0: they are not."""
    if len(heads) != 1 or not _is_quantized(kv_type):
        return 0
    (head,) = heads
    width = 64
    while head % (2 * width) == 0:
        width *= 2
    return width if head % 64 == 0 else 0


def _v_rotation(heads: Collection[int], kv_type: TensorType) -> int:
    return 64 if len(heads) == 1 and _is_quantized(kv_type) and next(iter(heads)) % 64 == 0 else 0


def _is_quantized(kv_type: TensorType) -> bool:
    return kv_type.block > 1
