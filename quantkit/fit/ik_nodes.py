"""Nodes of ik_llama.cpp's graph that differ from llama.cpp's: fused norms and experts, masks, inputs.

From src/llama-build-context.cpp and src/graphs, with its defaults (-fa on, -fmoe, -mmad on, -mla 3). Its graph has up and
gate as one operation, which ``fusion`` makes of the engine's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from quantkit.fit.allocator import Tensor
from quantkit.fit.nodes import F16, F32, I32, Nodes
from quantkit.model import ops
from quantkit.model.fusion import Fusion
from quantkit.model.ops import Cache, Graph, Op, OpTable
from quantkit.units import round_up

#: What ik_llama.cpp fuses; q, k and v remain three products.
FUSION = Fusion(qkv=False, launches=False)
#: Rows of a mask are a multiple of this (GGML_KQ_MASK_PAD).
MASK_PAD = 16

#: Architectures that add a layer's input to routed experts before shared ones (llm_build_std_moe_ffn).
RESIDUAL_FIRST = frozenset({"ernie4_5-moe", "glm4moe", "hunyuan-moe", "mimo2", "qwen35moe", "qwen3next", "step35"})

EMIT_IK = OpTable("fit for ik_llama.cpp")


class IkNodes(Nodes):
    """Nodes of a part of ik_llama.cpp's graph."""

    table = EMIT_IK

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
        n = nodes.batch.n_tokens
        ids = nodes.input(I32 * n)
        nodes.input(I32 * n * nodes.batch.n_positions)
        nodes.input(I32 * nodes.batch.n_outputs)
        nodes.out(op.out, ids)
    else:
        nodes.out(op.out)


@EMIT_IK.register(ops.Norm)
def _norm(nodes: Nodes, op: ops.Norm) -> None:
    shape: tuple[int, ...] = nodes.shape(op.out)
    if op.group and op.group != op.out.width:
        shape = (op.group, op.out.width // op.group, shape[1])
    x = nodes.reshaped(nodes.tensor(op.x), shape)
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


@EMIT_IK.register(ops.Attention)
def _attention(nodes: Nodes, op: ops.Attention) -> None:
    q, mask = nodes.tensor(op.q), nodes.mask(op.cache)
    nbytes, shape = nodes.nbytes(op.out), nodes.shape(op.out)
    if nodes.batch.flash_attn:
        nodes.tensors[op.out] = nodes.node(nbytes, q, mask, shape=shape)
        return
    scores = nodes.node(F32 * nodes.masks[op.cache].n_kv * nodes.rows(op.q) * op.n_head, q)
    scores = nodes.node(scores.nbytes, scores, mask) if op.softcap else nodes.like(scores, mask)
    heads = nodes.node(nbytes, scores)
    nodes.tensors[op.out] = nodes.node(nbytes, heads, shape=shape)


def residual_first(graph: Graph) -> Graph:
    """Return the graph with a layer's input added to the routed experts, then the shared ones."""
    makers = {value: op for op in graph.ops for value in op.outputs()}
    readers = Counter(value for op in graph.ops for value in op.inputs())
    replaced: dict[Op, Op] = {}
    for op in graph.ops:
        if not isinstance(op, ops.Add) or not isinstance(joined := makers.get(op.a), ops.Add) or readers[op.a] > 1:
            continue
        routed, shared = makers.get(joined.a), joined.b
        if isinstance(routed, ops.Combine):
            replaced[joined] = ops.Add(out=joined.out, a=joined.a, b=op.b, layer=joined.layer)
            replaced[op] = ops.Add(out=op.out, a=joined.out, b=shared, layer=op.layer)
    return replace(graph, ops=tuple(replaced.get(op, op) for op in graph.ops))
