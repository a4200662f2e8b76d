"""Blocks of Gemma 4: heads of two sizes, shared KV caches, per-layer inputs, and experts parallel to a dense layer.

    attention       values are normalized, too, without weights; without attn_v they are the keys before their norm and
                    rope. Heads of windowed layers are narrower (``key_length_swa``), and those layers alone rotate
                    without rope factors. The products are not scaled.
    shared caches   the last ``shared_kv_layers`` layers read the cache of the last layer before them of their kind,
                    windowed or not.
    layer inputs    a second embedding table has a short row for every layer and token, to which a projection of the
                    embeddings is added. A layer ends with x += norm(proj(gelu(inp_gate x) * row)).
    experts         router, experts and the dense layer read the same residual, each through its own norm.

Source: llama.cpp b11434 src/models/gemma4.cpp and llama-model.cpp (which layers share).
"""

from __future__ import annotations

import math

from quantkit.errors import FormatError
from quantkit.model.attention import (
    HeadShape,
    attend,
    cache_kv,
    head_norm,
    is_windowed,
    n_head_kv,
    qkv,
    rope_config,
    rope_factors,
)
from quantkit.model.builder import Builder
from quantkit.model.feed_forward import dense, experts
from quantkit.model.ops import Activation, Cache, Embed, Glu, Value

#: Columns of a layer input in Gemma 3n; its metadata is ignored.
_WIDTH = 256


def gemma4(b: Builder, x: Value) -> Value:
    """Add attention over the layer's own cache, or over that of an earlier layer.

    Raises FormatError if the metadata or shapes are inconsistent.
    """
    windowed = is_windowed(b)
    n_head, n_kv = b.h.layer_int("attention.head_count", b.layer), n_head_kv(b)
    head = b.h.int("attention.key_length_swa", b.h.head_k) if windowed else b.h.head_k
    config, factors = rope_config(b, head), None if windowed else rope_factors(b)
    shared = _shared_cache(b, windowed)
    q, k, v = _projections(b, x, n_head * head, n_kv * head, alone=shared is not None)
    q = b.rope(head_norm(b, q, "attn_q_norm", head), config, head, factors=factors)
    cache = shared
    if cache is None:
        k = b.rope(head_norm(b, k, "attn_k_norm", head), config, head, factors=factors)
        cache = cache_kv(b, k, b.plain_norm(v, head))
    attended = attend(b, q, cache, HeadShape(n_head, n_kv, head, head), 1.0)
    return b.mul_mat(attended, "attn_output", bias=False)


def _shared_cache(b: Builder, windowed: bool) -> Cache | None:
    """Return the earlier layer's cache that the current layer shares; None: it has its own."""
    n_own = b.arch.n_own_caches or b.h.n_layer - b.h.int("attention.shared_kv_layers", 0)
    if b.layer < n_own:
        return None
    source = n_own - (2 if windowed else 1)
    if source < 0 or is_windowed(b, source) != windowed:
        raise FormatError(
            f"{b.source.paths[0]}: layers from {n_own} on share caches ({b.h.arch}.attention.shared_kv_layers): the "
            "two layers before them must be one with a window, then one without",
            "QK-E123",
        )
    return next(cache for cache in b.caches if cache.name == f"cache_{source}")


def _projections(b: Builder, x: Value, q_width: int, kv_width: int, *, alone: bool) -> tuple[Value, Value, Value]:
    """Return q, k and v; alone: only q is needed and returned for all three."""
    if b.has("attn_qkv.weight"):
        return qkv(b, x, q_width, kv_width, kv_width)
    if alone:
        q = b.mul_mat(x, "attn_q", scale=not b.arch.altup, bias=False)
        b.ignore("attn_q.bias", "attn_k.weight", "attn_k.bias", "attn_v.weight", "attn_v.bias", "attn_k_norm.weight")
        return q, q, q
    q, k = b.mul_mat(x, "attn_q"), b.mul_mat(x, "attn_k")
    return q, k, b.mul_mat(x, "attn_v") if b.has("attn_v.weight") else k


# ---------------------------------------------------------------- inputs of layers


def layer_inputs(b: Builder, x: Value) -> list[Value]:
    """Return the second input of every layer, for the embeddings x; empty if the model has none.

    Raises FormatError if shapes are inconsistent.
    """
    width, n_layer = b.h.int("embedding_length_per_layer_input", _WIDTH if b.arch.altup else 0), b.h.n_layer
    if width <= 0:
        return []
    table, tokens = b.matrix("per_layer_token_embd.weight"), b.matrix("token_embd.weight")
    if (table.n_in, table.n_out) != (width * n_layer, tokens.n_out):
        raise FormatError(
            f"{b.source.paths[0]}: {table.tensor.name} has {table.n_out} rows of {table.n_in} values, but by the "
            f"metadata {tokens.n_out} of {width} for each of {n_layer} layers",
            "QK-E106",
        )
    embedded = b.value("layer_embeddings", table.n_in)
    b.add(Embed(out=embedded, weight=table, scale=math.sqrt(width)))
    projected = b.mul_mat(x, "per_layer_model_proj", scale=False, bias=False)
    normed = b.norm(b.scale(projected, 1.0 / math.sqrt(b.h.n_embd)), "per_layer_proj_norm", group=width)
    inputs = b.scale(b.sum(normed, embedded, "layer_embeddings_projected"), 1.0 / math.sqrt(2.0))
    # All layers at once, so that a layer on another device gets only its own part, in advance.
    return [b.take(inputs, f"layer_input_{layer}", width, layer * width) for layer in range(n_layer)]


def add_layer_input(b: Builder, x: Value, out: str) -> Value:
    """Return x plus the gated layer input."""
    return b.sum(x, gate_layer_input(b, x), out)


def gate_layer_input(b: Builder, x: Value) -> Value:
    """Return norm(proj(activation(inp_gate x) * layer input))."""
    gate, layer_input = b.mul_mat(x, "inp_gate", scale=False, bias=False), b.layer_inputs[b.layer]
    layer_input = b.select_outputs(layer_input) if gate.outputs else layer_input
    hidden = b.value("layer_input_gated", gate.width, x)
    b.add(Glu(out=hidden, gate=gate, up=layer_input, activation=Activation(b.arch.activation)))
    return b.norm(b.mul_mat(hidden, "proj", scale=False, bias=False), "post_norm")


# ---------------------------------------------------------------- experts


def gemma4_feed_forward(b: Builder, x: Value, normed: Value) -> Value:
    """Return the sum of a dense layer, which reads ``normed``, and of experts, which have their own norms.

    The router reads x normalized without weights, over sqrt(n_embd), times ``ffn_gate_inp.scale``.
    """
    dense_out = b.norm(dense(b, normed, "ffn_gate", "ffn_up", "ffn_down", "ffn"), "post_ffw_norm_1")
    routed = b.times(
        b.scale(b.plain_norm(x, x.width), 1.0 / math.sqrt(b.h.n_embd)), "ffn_gate_inp.scale", "router_input"
    )
    logits = b.mul_mat(routed, "ffn_gate_inp", scale=False)
    experts_out = b.norm(experts(b, b.norm(x, "pre_ffw_norm_2"), logits), "post_ffw_norm_2")
    return b.sum(dense_out, experts_out, "ffn_sum")
