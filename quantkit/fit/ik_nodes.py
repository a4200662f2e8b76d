"""Nodes of ik_llama.cpp's graph that differ from llama.cpp's: fused norms and experts, masks, inputs.

From src/llama-build-context.cpp and src/graphs, with its defaults: flash attention, -mla 3, fused experts and sums. Its
graph has up and gate as one operation, which ``fuse`` makes of the engine's two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from quantkit.fit.allocator import Tensor
from quantkit.fit.nodes import F16, F32, I32, Nodes, norm_input
from quantkit.formats.gguf import TensorInfo
from quantkit.model import ops
from quantkit.model.fusion import Fusion
from quantkit.model.ops import Cache, Graph, Op, OpTable
from quantkit.types import BY_NAME
from quantkit.units import round_up

#: What ik_llama.cpp fuses; q, k and v remain three products.
FUSION = Fusion(qkv=False, launches=False)
#: Rows of a mask are a multiple of this (GGML_KQ_MASK_PAD).
MASK_PAD = 16

#: Tokens of a batch from which on latent keys are expanded to those of all heads.
EXPANDED_BATCH = 128
#: Architectures that add a layer's input to routed experts before shared ones (llm_build_std_moe_ffn).
RESIDUAL_FIRST = frozenset({"ernie4_5-moe", "glm4moe", "hunyuan-moe", "mimo2", "qwen35moe", "qwen3next", "step35"})

EMIT_IK = OpTable("fit for ik_llama.cpp")


class IkNodes(Nodes):
    """Nodes of a part of ik_llama.cpp's graph."""

    table = EMIT_IK

    @cached_property
    def expands_latent(self) -> bool:
        """Whether keys and values are computed from latent rows for the whole context (-mla 3, large batches)."""
        return self.batch.flash_attn and self.batch.n_tokens >= EXPANDED_BATCH

    def mask(self, cache: Cache) -> Tensor:
        """Return the mask of a cache: one for full attention, one for windows."""
        key = self.masks[cache]
        if key not in self.mask_inputs:
            item = F16 if self.batch.flash_attn else F32
            self.mask_inputs[key] = self.input(item * key.n_kv * round_up(self.batch.n_tokens, MASK_PAD))
        return self.mask_inputs[key]


@EMIT_IK.register(ops.Embed, ops.Lookup)
def _embed(nodes: Nodes, op: ops.Embed | ops.Lookup) -> None:
    if isinstance(op, ops.Embed) and not op.by_position and not nodes.nodes:
        nodes.out(op.out, nodes.input(I32 * nodes.batch.n_tokens))
    else:
        nodes.out(op.out)


@EMIT_IK.register(ops.Norm)
def _norm(nodes: Nodes, op: ops.Norm) -> None:
    x, shape = norm_input(nodes, op)
    # A fused norm does not work in place.
    fused = op.kind == "rms" and op.weight is not None
    y = nodes.node(nodes.nbytes(op.out), x, shape=shape, in_place=op.kind == "rms" and not fused)
    for vector in (None if fused else op.weight, op.bias):
        y = y if vector is None else nodes.like(y)
    nodes.tensors[op.out] = y


@EMIT_IK.register(ops.UpGate)
def _up_gate(nodes: Nodes, op: ops.UpGate) -> None:
    """Add one node for quantized matrices of one type, otherwise up, gate and their product."""
    up, gate = op.up.tensor.type, op.gate.tensor.type
    x = nodes.tensor(op.x)
    plain = op.up_bias is op.gate_bias is op.up_scale is op.gate_scale is None
    if up is gate and up.block > 1 and plain:
        nodes.out(op.out, x)
    else:
        parts = [nodes.node(nodes.nbytes(op.out), x) for _ in range(2)]
        nodes.out(op.out, *parts)


@EMIT_IK.register(ops.Softcap)
def _softcap(nodes: Nodes, op: ops.Softcap) -> None:
    nodes.out(op.out, nodes.tensor(op.x))


@EMIT_IK.register(ops.Combine)
def _combine(nodes: Nodes, op: ops.Combine) -> None:
    """Add the sum of experts, which multiplies by the weights."""
    nodes.out(op.out, *nodes.sources(op))


@EMIT_IK.register(ops.CacheWrite)
def _cache_write(nodes: IkNodes, op: ops.CacheWrite) -> None:
    for value in (op.k, op.v):
        if value is not None:
            nodes.node(0, nodes.tensor(value))


@EMIT_IK.register(ops.Attention)
def _attention(nodes: IkNodes, op: ops.Attention) -> None:
    q, mask = nodes.tensor(op.q), nodes.mask(op.cache)
    nbytes, shape = nodes.nbytes(op.out), nodes.shape(op.out)
    if nodes.batch.flash_attn:
        if op.cache.v_width or not nodes.expands_latent:
            nodes.tensors[op.out] = nodes.node(nbytes, q, mask, shape=shape)
        return  # _heads adds what latent rows are expanded to
    n_kv = nodes.masks[op.cache].n_kv
    values = None if op.cache.v_width else nodes.node(nodes.batch.k_type.row_bytes(op.head_v) * n_kv)
    scores = nodes.node(F32 * n_kv * nodes.rows(op.q) * op.n_head, q)
    scores = nodes.node(scores.nbytes, scores, mask) if op.softcap else nodes.like(scores, mask)
    heads = nodes.node(nbytes, values, scores)
    nodes.tensors[op.out] = nodes.node(nbytes, heads, shape=shape)


# ---------------------------------------------------------------- latent keys


@EMIT_IK.register(ops.MulMatHeads)
def _heads(nodes: IkNodes, op: ops.MulMatHeads) -> None:
    """Add a product of each head; where latent rows are expanded, attention is added with that of the values."""
    attention = nodes.makers.get(op.x)
    if not nodes.expands_latent:
        nodes.out(op.out, nodes.node(nodes.nbytes(op.out), nodes.tensor(op.x)))
    elif isinstance(attention, ops.Attention):
        _expanded_attention(nodes, attention, op)
    else:
        nodes.tensors[op.out] = nodes.tensor(op.x)


@EMIT_IK.register(ops.Join)
def _join(nodes: IkNodes, op: ops.Join) -> None:
    product = nodes.makers.get(op.a)
    part = product.x if nodes.expands_latent and isinstance(product, ops.MulMatHeads) else op.a
    nbytes = nodes.nbytes(part) + nodes.nbytes(op.b)
    nodes.tensors[op.out] = nodes.node(nbytes, *nodes.sources(op))


def _expanded_attention(nodes: IkNodes, op: ops.Attention, values: ops.MulMatHeads) -> None:
    """Add attention to keys and values of all heads, which a product computes from all latent rows."""
    join = nodes.makers[op.q]
    assert isinstance(join, ops.Join)
    product = nodes.makers[join.a]
    assert isinstance(product, ops.MulMatHeads)
    rows = nodes.masks[op.cache].n_kv * op.n_head
    plain, rotated, width = (n // op.n_head for n in (product.x.width, join.b.width, values.out.width))
    row_bytes = nodes.batch.k_type.row_bytes
    both = nodes.node(F32 * (plain + width) * rows)
    k_plain = nodes.node(row_bytes(plain) * rows, nodes.view(both))
    v = nodes.node(row_bytes(width) * rows, nodes.view(both))
    k_rotated = nodes.node(row_bytes(rotated) * rows)
    k = nodes.node(k_rotated.nbytes + k_plain.nbytes, k_rotated, k_plain)
    nodes.out(values.out, nodes.tensor(op.q), k, v, nodes.mask(op.cache))


def expanded_tensors(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Return name and bytes of the products that ik_llama.cpp makes of k_b and v_b (llm_prepare_mla), of type Q8_0."""
    products: dict[str, int] = {}
    for name, k_b in tensors.items():
        layer = name.removesuffix(".attn_k_b.weight")
        v_b, product = tensors.get(f"{layer}.attn_v_b.weight"), f"{layer}.attn_kv_b.weight"
        if layer != name and v_b is not None and product not in tensors:
            heads = (*k_b.shape, 1)[2]
            products[product] = BY_NAME["Q8_0"].row_bytes(k_b.shape[1]) * heads * (k_b.shape[0] + v_b.shape[1])
    return products


def residual_first(graph: Graph) -> Graph:
    """Return the graph with a layer's input added to the routed experts, then the shared ones."""
    makers = {value: op for op in graph.ops for value in op.outputs()}
    readers = Counter(value for op in graph.ops for value in op.inputs())
    replaced: dict[Op, Op] = {}
    for op in graph.ops:
        if not isinstance(op, ops.Add) or not isinstance(expert_sum := makers.get(op.a), ops.Add) or readers[op.a] > 1:
            continue
        routed, shared = makers.get(expert_sum.a), expert_sum.b
        if isinstance(routed, ops.Combine):
            replaced[expert_sum] = ops.Add(out=expert_sum.out, a=expert_sum.a, b=op.b, layer=expert_sum.layer)
            replaced[op] = ops.Add(out=op.out, a=expert_sum.out, b=shared, layer=op.layer)
    return replace(graph, ops=tuple(replaced.get(op, op) for op in graph.ops))
