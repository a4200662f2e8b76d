"""The engine's operations as nodes of llama.cpp's graph, of which only the sizes matter.

One entry per operation: the tensors that llama.cpp b11434 (src/llama-graph.cpp, src/models) allocates for it, which of
them take over the block of an input, and which are views. Operations without an entry make a new tensor for each
output. allocator.py then computes the buffer, as ggml does for the largest batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from quantkit.fit.allocator import Tensor
from quantkit.model import ops
from quantkit.model.ops import Cache, Op, OpTable, Value
from quantkit.types import BY_NAME, TensorType
from quantkit.units import round_up

F32 = I32 = 4
F16 = 2
I64 = 8


@dataclass(frozen=True)
class Mask:
    """Attention to one kind of cache: cells of a sequence, and sequences with cells of their own."""

    n_kv: int
    n_stream: int = 1
    #: ``full``, ``window`` or ``indexer``: caches of different kinds have masks of their own.
    kind: str = "full"


@dataclass(frozen=True)
class BlockIndexer:
    """An indexer that selects blocks of keys for each group of heads (MiniMax M3), in layers from ``first`` on.

    Scores are by position, not by cell; at the start llama.cpp reserves those of 256 positions.
    """

    first: int
    n_head: int
    width: int
    block: int
    top_k: int

    @property
    def n_positions(self) -> int:
        return round_up(256, self.block)


@dataclass(frozen=True)
class Batch:
    """The largest batch: ``n_tokens`` tokens of ``n_seqs`` sequences, ``n_outputs`` of which have logits."""

    n_tokens: int
    n_outputs: int
    n_seqs: int
    flash_attn: bool
    #: Widths of Hadamard rotations of quantized keys and values; 0: none.
    k_rotation: int = 0
    v_rotation: int = 0
    #: Whether a batch may mix tokens and vectors, which has inputs of its own.
    mixed: bool = True
    #: Positions per token: 4 with sections of rope.
    n_positions: int = 1
    #: Widths of the vectors that may take the place of embeddings, in embeddings: one more for each layer of a deep
    #: stack, whose part is added to the output of the layer (qwen3vl).
    n_vectors: int = 1
    #: There is no cache: tokens attend to those of the batch.
    no_cache: bool = False
    block_indexer: BlockIndexer | None = None
    #: The type of the cache's keys.
    k_type: TensorType = BY_NAME["F16"]


class Nodes:
    """Nodes of a part of the graph: ``ops`` on one device."""

    #: Functions of another runtime, by operation, which replace those of ``EMIT``.
    table: ClassVar[OpTable] = OpTable("fit")

    def __init__(
        self,
        batch: Batch,
        masks: Mapping[Cache, Mask],
        widest_v: int,
        rotated: Collection[Value] = (),
        split: Collection[Value] = (),
        stacked: Collection[Op] = (),
        makers: Mapping[Value, Op] | None = None,
    ) -> None:
        self.batch = batch
        #: The operation that computes a value.
        self.makers = makers or {}
        self.masks = masks
        self.widest_v = widest_v
        #: Values that are multiplied by a Hadamard matrix.
        self.rotated = rotated
        #: Values of which columns are read, not whole rows.
        self.split = split
        #: The last operations of the layers of a deep stack, and the embeddings with all its parts.
        self.stacked = stacked
        self.deep_stack: Tensor | None = None
        #: Values that are stored layer by layer.
        self.by_layer: set[Value] = set()
        #: Ropes of the last columns of these, which are rotated when they are read.
        self.unrotated: dict[Value, ops.Rope] = {}
        self.inputs: list[Tensor] = []
        self.nodes: list[Tensor] = []
        self.tensors: dict[Value, Tensor] = {}
        self.mask_inputs: dict[Mask, Tensor] = {}
        #: Rows of the cache to which keys and values of this batch are written.
        self.slots: dict[Mask, tuple[Tensor, ...]] = {}
        #: Keys and values of this batch, where there is no cache.
        self.keys: dict[Cache, list[Tensor]] = {}
        #: Inputs of the indexer of blocks, and the mask as f32, which all its layers share.
        self.block_inputs: tuple[Tensor, ...] = ()
        self.float_mask: Tensor | None = None

    # ------------------------------------------------ tensors

    def input(self, nbytes: int) -> Tensor:
        """Return an input, which is filled before the graph runs."""
        tensor = Tensor(nbytes)
        self.inputs.append(tensor)
        return tensor

    def node(self, nbytes: int, *sources: Tensor | None, shape: tuple[int, ...] = (), in_place: bool = False) -> Tensor:
        """Append a node; in place, if nothing else reads one of its sources with the same shape."""
        tensor = Tensor(nbytes, shape or (nbytes,), tuple(s for s in sources if s is not None), in_place=in_place)
        self.nodes.append(tensor)
        return tensor

    def view(self, x: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
        """Append a view of a tensor."""
        tensor = Tensor(0, shape, (x,), view_of=x.view_of or x)
        self.nodes.append(tensor)
        return tensor

    def overwrite(self, x: Tensor, *sources: Tensor) -> Tensor:
        """Append a node that writes into x."""
        tensor = Tensor(0, x.shape, (x, *sources), view_of=x.view_of or x)
        self.nodes.append(tensor)
        return tensor

    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return x, or a view of it in another shape."""
        return x if x.shape == shape else self.view(x, shape)

    def like(self, x: Tensor, *sources: Tensor | None, nbytes: int = 0) -> Tensor:
        """Append a node of x's shape that may take over its block."""
        return self.node(nbytes or self.bytes_of(x), x, *sources, shape=x.shape, in_place=True)

    def bytes_of(self, x: Tensor) -> int:
        return F32 * math.prod(x.shape) if len(x.shape) > 1 else x.nbytes

    # ------------------------------------------------ values

    def rows(self, value: Value) -> int:
        """Return the rows of a value in the largest batch."""
        return (self.batch.n_outputs if value.outputs else self.batch.n_tokens) * value.per

    def shape(self, value: Value) -> tuple[int, int]:
        return value.width, self.rows(value)

    def nbytes(self, value: Value) -> int:
        """Return the bytes of a value, f32 or i32."""
        return F32 * value.width * self.rows(value)

    def tensor(self, value: Value) -> Tensor:
        """Return the tensor of a value; one of another device is an input."""
        tensor = self.tensors.get(value)
        if tensor is None:
            tensor = self.tensors[value] = Tensor(self.nbytes(value), self.shape(value))
            self.inputs.append(tensor)
        return tensor

    def sources(self, op: Op) -> list[Tensor]:
        """Return the tensors that an operation reads; angles are no tensors in ggml."""
        return [self.tensor(value) for value in op.inputs() if value in self.tensors or not _is_angle(value)]

    def out(self, value: Value, *sources: Tensor | None, in_place: bool = False) -> Tensor:
        """Append the node of a value."""
        shape = self.shape(value)
        if in_place:
            sources = tuple(
                s and (s if math.prod(s.shape) != math.prod(shape) else self.reshape(s, shape)) for s in sources
            )
        tensor = self.node(self.nbytes(value), *sources, shape=shape, in_place=in_place)
        self.tensors[value] = tensor
        return tensor

    @cached_property
    def positions(self) -> Tensor:
        """The input with the positions of the tokens."""
        return self.input(I32 * self.batch.n_tokens * self.batch.n_positions)

    @cached_property
    def output_rows(self) -> Tensor:
        """The input with the rows whose logits are requested."""
        return self.input(I32 * self.batch.n_outputs)

    # ------------------------------------------------ attention

    def mask(self, cache: Cache) -> Tensor:
        """Return the mask of a cache; caches of the same size and kind share it."""
        key, n = self.masks[cache], self.batch.n_tokens
        if key not in self.mask_inputs:
            item = F16 if self.batch.flash_attn or key.kind == "indexer" else F32
            if self.batch.no_cache:
                self.mask_inputs[key] = self.input(item * n * n)
                return self.mask_inputs[key]
            for width in (self.batch.k_rotation, self.batch.v_rotation):
                if width:
                    self.input(F32 * width * width)
            v_slots = n if self.batch.flash_attn or not cache.v_width else n * self.widest_v
            self.slots[key] = (self.input(I64 * n), self.input(I64 * v_slots))
            self.mask_inputs[key] = self.input(item * key.n_kv * (n // key.n_stream) * key.n_stream)
        return self.mask_inputs[key]


def _is_angle(value: Value) -> bool:
    return value.name.startswith("angles")


#: A function for each operation that is more than a new tensor for each output.
EMIT = OpTable("fit")


def emit(nodes: Nodes, ops_of_device: Iterable[Op], copies: Sequence[Tensor] = ()) -> None:
    """Append the nodes of these operations; ``copies`` of weights, from memory to the device, live until the last."""
    nodes.nodes += copies
    for op in ops_of_device:
        if (emit_op := nodes.table.get(type(op)) or EMIT.get(type(op))) is not None:
            emit_op(nodes, op)
        else:
            sources = nodes.sources(op)
            for value in op.outputs():
                nodes.out(value, *sources)
        if op in nodes.stacked:
            _add_stack(nodes, op)
        for value in op.outputs():
            if value in nodes.rotated:
                nodes.out(value, nodes.tensor(value))
    if copies:
        nodes.node(0, *copies)


def _add_stack(nodes: Nodes, op: Op) -> None:
    """Add a layer's part of the deep stack to its output."""
    (out,) = op.outputs()
    if nodes.deep_stack is None:
        nodes.deep_stack = nodes.input(F32 * out.width * nodes.batch.n_vectors * nodes.batch.n_tokens)
    nodes.out(out, nodes.tensor(out), nodes.view(nodes.deep_stack), in_place=True)


def _embedding_inputs(nodes: Nodes, out: Value) -> None:
    """Add the inputs of every graph: token ids, and vectors in their place."""
    n, width = nodes.batch.n_tokens, F32 * out.width * nodes.batch.n_vectors
    ids = nodes.input(I32 * n)
    nodes.input(width * n)
    if nodes.batch.mixed:
        mixed_ids, slots, vectors = nodes.input(I32 * n), nodes.input(I64 * n), nodes.input(width * n)
    nodes.out(out, ids)
    if nodes.batch.n_vectors > 1:
        padded = nodes.node(width * n, nodes.tensor(out))
        nodes.deep_stack = padded
        nodes.tensors[out] = nodes.view(padded, nodes.shape(out))
    if nodes.batch.mixed:
        rows = nodes.node(F32 * out.width * n, mixed_ids)
        rows = rows if nodes.batch.n_vectors == 1 else nodes.node(width * n, rows)
        copy = nodes.node(width * n, vectors)
        # set_rows writes into the copy, which nothing reads in this branch and which is therefore never freed.
        nodes.nodes.append(Tensor(0, (), (rows, slots, copy), view_of=copy))


# ---------------------------------------------------------------- element by element


@EMIT.register(ops.RopeTable)
def _rope_table(nodes: Nodes, op: ops.RopeTable) -> None:
    """Add nothing: ggml computes angles within rope."""


@EMIT.register(ops.Embed, ops.Lookup)
def _embed(nodes: Nodes, op: ops.Embed | ops.Lookup) -> None:
    if isinstance(op, ops.Lookup) or op.by_position:
        nodes.out(op.out)
    elif nodes.nodes:  # embeddings of layers, which are scaled after a reshape
        rows = nodes.node(nodes.nbytes(op.out))
        nodes.out(op.out, nodes.view(rows))
    else:
        _embedding_inputs(nodes, op.out)


@EMIT.register(ops.SelectOutputs)
def _select(nodes: Nodes, op: ops.SelectOutputs) -> None:
    nodes.out(op.out, nodes.tensor(op.x), nodes.output_rows)


@EMIT.register(ops.Add)
def _add(nodes: Nodes, op: ops.Add) -> None:
    nodes.out(op.out, nodes.tensor(op.a), nodes.tensor(op.b), in_place=True)


@EMIT.register(
    ops.Scale, ops.Shift, ops.ScaleByPosition, ops.MultiplyBy, ops.Softcap, ops.Clamp, ops.Xielu, ops.Activate
)
def _in_place(nodes: Nodes, op: ops.Map) -> None:
    nodes.out(op.out, nodes.tensor(op.x), in_place=True)


def norm_input(nodes: Nodes, op: ops.Norm) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input of a norm, or a view of it by groups, and its shape."""
    shape: tuple[int, ...] = nodes.shape(op.out)
    if op.group and op.group != op.out.width:
        shape = (op.group, op.out.width // op.group, shape[1])
    return nodes.reshape(nodes.tensor(op.x), shape), shape


@EMIT.register(ops.Norm)
def _norm(nodes: Nodes, op: ops.Norm) -> None:
    x, shape = norm_input(nodes, op)
    y = nodes.node(nodes.nbytes(op.out), x, shape=shape, in_place=op.kind == "rms")
    for vector in (op.weight, op.bias):
        y = y if vector is None else nodes.like(y)
    nodes.tensors[op.out] = y


@EMIT.register(ops.Rope)
def _rope(nodes: Nodes, op: ops.Rope) -> None:
    x = nodes.tensor(op.x)
    if not op.start:
        x = nodes.reshape(x, (op.head, op.x.width // op.head, nodes.rows(op.x)))
        nodes.tensors[op.out] = nodes.node(nodes.nbytes(op.out), x, nodes.positions, shape=x.shape, in_place=True)
        return
    if op.out in nodes.split:
        # Latent attention multiplies the first columns, and joins the product with the rotated ones.
        nodes.tensors[op.out] = x
        nodes.unrotated[op.out] = op
        return
    # Rope of the last columns: their view is rotated and joined with the others.
    n_rot, n_rows = op.config.n_rot, nodes.rows(op.x) * (op.x.width // op.head)
    part = nodes.view(x, (n_rot, n_rows))
    rotated = nodes.node(F32 * n_rot * n_rows, part, nodes.positions)
    plain = nodes.view(x, (op.head - n_rot, n_rows))
    nodes.out(op.out, plain, rotated)


@EMIT.register(ops.Take)
def _take(nodes: Nodes, op: ops.Take) -> None:
    x = nodes.tensor(op.x)
    maker = nodes.makers.get(op.x)
    if isinstance(maker, ops.Scale) and maker.layer < 0 and op.x not in nodes.by_layer:
        # Inputs of all layers are copied, layer by layer (gemma3n, gemma4).
        x = nodes.tensors[op.x] = nodes.node(nodes.nbytes(op.x), x, shape=x.shape)
        nodes.by_layer.add(op.x)
    rope = nodes.unrotated.get(op.x)
    if rope is not None and op.start % op.period == rope.start:
        nodes.out(op.out, nodes.view(x), nodes.positions)
        return
    nodes.tensors[op.out] = nodes.view(x, nodes.shape(op.out))


@EMIT.register(ops.Mix)
def _mix(nodes: Nodes, op: ops.Mix) -> None:
    """Add a mixture of streams: a product with the streams as columns, or copies of one row times weights (gemma3n)."""
    x, weights, nbytes, shape = nodes.tensor(op.x), nodes.tensor(op.weights), nodes.nbytes(op.out), nodes.shape(op.out)
    if op.n > 1 and op.base is not op.x:  # hyper-connections
        nodes.out(op.out, *nodes.sources(op))
        return
    if op.n > 1:
        product = nodes.node(nbytes, nodes.node(nodes.nbytes(op.x), x), weights)
        mixture = nodes.node(nbytes, product, shape=shape)
    else:
        mixture = nodes.like(nodes.node(nbytes, x, shape=shape), weights)
    nodes.out(op.out, mixture, nodes.tensor(op.base), in_place=True)


# ---------------------------------------------------------------- experts


@EMIT.register(ops.Route)
def _route(nodes: Nodes, op: ops.Route) -> None:
    logits = nodes.tensor(op.logits)
    probs = nodes.like(logits)
    scores = probs if op.bias is None else nodes.like(probs)
    if op.selected is None:
        order = nodes.node(I32 * op.logits.width * nodes.batch.n_tokens, scores)
        nodes.tensors[op.ids] = nodes.view(order, nodes.shape(op.ids))
    else:
        nodes.tensors[op.ids] = nodes.tensor(op.selected)
    weights = nodes.out(op.weights, probs, nodes.tensors[op.ids])
    if op.routing.norm:
        total = nodes.node(F32 * nodes.batch.n_tokens, weights)
        nodes.tensors[op.weights] = nodes.like(weights, total)


@EMIT.register(ops.Combine)
def _combine(nodes: Nodes, op: ops.Combine) -> None:
    x = nodes.tensor(op.x)
    if op.weights is not None:
        x = nodes.like(x, nodes.tensor(op.weights))
    nodes.out(op.out, x)


@EMIT.register(ops.Repeat)
def _repeat(nodes: Nodes, op: ops.Repeat) -> None:
    copies = nodes.node(nodes.nbytes(op.out), nodes.tensor(op.x), shape=nodes.shape(op.out))
    nodes.out(op.out, copies, nodes.tensor(op.weights), in_place=True)


# ---------------------------------------------------------------- attention


@EMIT.register(ops.CacheWrite)
def _cache_write(nodes: Nodes, op: ops.CacheWrite) -> None:
    if not nodes.batch.no_cache:
        nodes.mask(op.cache)
    k, v = nodes.tensor(op.k), None if op.v is None else nodes.tensor(op.v)
    if nodes.batch.no_cache:
        # Flash attention reads keys and values as f16.
        nodes.keys[op.cache] = [
            nodes.node(x.nbytes // 2, x) if nodes.batch.flash_attn else x for x in (k, v) if x is not None
        ]
        return
    k_slots, v_slots = nodes.slots[nodes.masks[op.cache]]
    nodes.node(0, k, k_slots)
    if v is not None:
        nodes.node(0, v, v_slots)


@EMIT.register(ops.Attention)
def _attention(nodes: Nodes, op: ops.Attention) -> None:
    mask = nodes.mask(op.cache)
    q = nodes.tensor(op.q)
    if op.selected is not None:
        mask = _selected_mask(nodes, op.selected, mask)
    indexer = nodes.batch.block_indexer
    if nodes.batch.flash_attn and indexer is not None and op.layer >= indexer.first:
        y = _block_attention(nodes, op, indexer, q, mask)
    elif nodes.batch.flash_attn:
        y = nodes.node(nodes.nbytes(op.out), q, mask, *nodes.keys.get(op.cache, ()), shape=nodes.shape(op.out))
    else:
        y = _plain_attention(nodes, op, q, mask)
    if nodes.batch.v_rotation and op.cache.v_width:
        y = nodes.node(nodes.nbytes(op.out), y, shape=nodes.shape(op.out))
    nodes.tensors[op.out] = y


def _selected_mask(nodes: Nodes, selected: Value, mask: Tensor) -> Tensor:
    """Add the mask of the selected keys: -inf, zeros in their places, plus the causal mask."""
    mask_copy = nodes.node(mask.nbytes, mask)
    zeros = nodes.node(nodes.nbytes(selected))
    unmasked = nodes.overwrite(mask_copy, zeros, nodes.tensor(selected))
    return nodes.node(mask.nbytes, unmasked, mask)


@EMIT.register(ops.LightningIndexer)
def _indexer(nodes: Nodes, op: ops.LightningIndexer) -> None:
    n_kv = nodes.masks[op.cache].n_kv
    q = nodes.node(nodes.nbytes(op.q), nodes.tensor(op.q))
    scores = nodes.node(F32 * n_kv * nodes.batch.n_tokens, q, nodes.tensor(op.weights), nodes.mask(op.cache))
    top = nodes.node(nodes.nbytes(op.out), scores)
    nodes.out(op.out, top)


def _block_attention(nodes: Nodes, op: ops.Attention, indexer: BlockIndexer, q: Tensor, mask: Tensor) -> Tensor:
    """Add attention to the keys of selected blocks: a mask of all cells for each group of heads (minimax-m3.cpp)."""
    cells, n_tokens = nodes.masks[op.cache], nodes.batch.n_tokens
    n, n_head, n_positions = n_tokens // cells.n_stream, indexer.n_head, indexer.n_positions
    n_blocks = n_positions // indexer.block
    top_k = min(indexer.top_k, n_blocks)
    if not nodes.block_inputs:
        sizes = (F32 * n_blocks * n_tokens, F32 * n_positions * n_tokens, I32 * n_positions * cells.n_stream)
        nodes.block_inputs = tuple(map(nodes.input, (*sizes, I32 * cells.n_kv * cells.n_stream, I64 * n_tokens)))
    bias, visible, slots, blocks, rows = nodes.block_inputs
    key = nodes.node(F32 * indexer.width * n_tokens)
    nodes.node(0, key, rows)
    queries = nodes.node(F32 * indexer.width * n_head * n_tokens)
    parts = []
    for _ in range(cells.n_stream):
        keys = nodes.node(F32 * indexer.width * n_positions, slots)
        scores = nodes.node(F32 * n_positions * n_head * n, keys, queries)
        best = nodes.node(F32 * n_blocks * n_head * n, nodes.overwrite(scores, visible))
        selected = nodes.node(I32 * top_k * n_head * n, nodes.like(best, bias))
        zeros = nodes.node(F32 * top_k * n_head * n, selected)
        masked = nodes.node(F16 * n_blocks * n, nodes.node(F32 * n_blocks * n, bias))
        masked = nodes.node(F16 * n_blocks * n_head * n, masked)
        by_head = nodes.node(masked.nbytes, nodes.overwrite(masked, nodes.like(zeros), selected))
        by_block = nodes.node(masked.nbytes, by_head)
        by_cell = nodes.node(F32 * n * n_head * cells.n_kv, by_block, blocks)
        by_cell = nodes.node(by_cell.nbytes, by_cell)
        if nodes.float_mask is None:
            nodes.float_mask = nodes.node(F32 * cells.n_kv * n_tokens, mask)
        full = nodes.node(by_cell.nbytes // 2, nodes.overwrite(by_cell, nodes.float_mask))
        heads = nodes.node(nodes.nbytes(op.out) // cells.n_stream, q, full)
        parts.append(nodes.node(heads.nbytes, heads))
    y = parts[0]
    for part in parts[1:]:
        y = nodes.node(y.nbytes + part.nbytes, y, part)
    return nodes.reshape(y, nodes.shape(op.out))


def _plain_attention(nodes: Nodes, op: ops.Attention, q: Tensor, mask: Tensor) -> Tensor:
    """Add attention without flash attention: the scores of all heads are in memory at once."""
    n_kv = nodes.masks[op.cache].n_kv
    keys = nodes.keys.get(op.cache, [])
    scores = nodes.node(F32 * n_kv * nodes.rows(op.q) * op.n_head, q, *keys[:1])
    scores = nodes.like(scores, mask)
    values = None
    if nodes.batch.no_cache:
        values = nodes.node(F32 * op.cache.v_width * nodes.batch.n_tokens, *keys[1:])
    elif not op.cache.v_width:
        values = nodes.node(F16 * op.head_v * n_kv * nodes.masks[op.cache].n_stream)
    heads = nodes.node(nodes.nbytes(op.out), values, scores)
    return nodes.node(nodes.nbytes(op.out), heads, shape=nodes.shape(op.out))


# ---------------------------------------------------------------- recurrent layers


@EMIT.register(ops.Convolve)
def _convolve(nodes: Nodes, op: ops.Convolve) -> None:
    taps, n_seqs = op.weight.n_in, nodes.batch.n_seqs
    state = nodes.node(F32 * (taps - 1) * op.x.width * n_seqs)
    rows = nodes.batch.n_tokens + (taps - 1) * n_seqs
    rows_in = nodes.node(F32 * rows * op.x.width, state, nodes.tensor(op.x))
    nodes.node(0, nodes.view(rows_in))
    nodes.out(op.out, rows_in)


@EMIT.register(ops.DeltaNet)
def _delta_net(nodes: Nodes, op: ops.DeltaNet) -> None:
    state = nodes.node(F32 * op.state.width * nodes.batch.n_seqs)
    sources = [nodes.tensor(value) for value in (op.q, op.k, op.v, op.g, op.beta)]
    _with_state(nodes, op.out, op.state.width, *sources, state)


@EMIT.register(ops.SsmScan, ops.ColumnScan)
def _scan(nodes: Nodes, op: ops.SsmScan | ops.ColumnScan) -> None:
    values = (op.x, op.dt, op.b, op.c)
    x = nodes.tensor(op.x)
    y = _with_state(nodes, op.out, op.state.width, *(nodes.tensor(v) for v in values if v is not None))
    if op.d is not None:
        skip = nodes.node(nodes.nbytes(op.out), x, shape=nodes.shape(op.out))
        y = nodes.like(skip, y)
    if op.z is not None:
        gate = nodes.node(nodes.nbytes(op.out), nodes.tensor(op.z))
        y = nodes.node(nodes.nbytes(op.out), gate, y, shape=nodes.shape(op.out))
    nodes.tensors[op.out] = y


@EMIT.register(ops.Wkv)
def _wkv(nodes: Nodes, op: ops.Wkv) -> None:
    state = nodes.node(F32 * op.state.width * nodes.batch.n_seqs)
    _with_state(nodes, op.out, op.state.width, *nodes.sources(op), state)


def _with_state(nodes: Nodes, out: Value, state_width: int, *sources: Tensor) -> Tensor:
    """Add a node whose result is followed by the new states, which are copied to the cache."""
    result = nodes.node(nodes.nbytes(out) + F32 * state_width * nodes.batch.n_seqs, *sources)
    nodes.node(0, nodes.view(result))
    nodes.tensors[out] = nodes.view(result, nodes.shape(out))
    return nodes.tensors[out]
