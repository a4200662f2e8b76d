"""What only Gemma 4 has: heads of two sizes, layers without keys and values of their own, inputs of every layer beside
its own, and experts beside a dense feed-forward layer.

    attention       values are normalized, too, without weights; without attn_v they are the keys before their norm and
                    rope. Heads of windowed layers are narrower (``key_length_swa``), and those layers alone rotate
                    without rope factors. The products are not scaled.
    shared caches   the last ``shared_kv_layers`` layers attend to what the last layer of their kind, windowed or not,
                    that is none of them has cached.
    layer inputs    a second table of embeddings has a short row for every layer and token; a projection of the
                    embeddings is added. At the end of a layer gelu(inp_gate x) * this row, through proj and a norm, is
                    added to x.
    experts         router, experts and the dense layer have norms of their own and read the same residual.

Source: llama.cpp b11434 src/models/gemma4.cpp and llama-model.cpp (which layers share).
"""

from __future__ import annotations

import math

from quantkit.errors import FormatError
from quantkit.model.attention import (
    attend,
    head_norm,
    is_windowed,
    keep,
    n_head_kv,
    qkv,
    rope_config,
    rope_factors,
)
from quantkit.model.builder import Builder
from quantkit.model.feed_forward import dense, experts
from quantkit.model.ops import Activation, Cache, Embed, Glu, Value


def gemma4(b: Builder, x: Value) -> Value:
    """Attention to keys and values of the layer, or to those that an earlier one keeps.

    Raises FormatError if the metadata or shapes do not fit together.
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
        cache = keep(b, k, b.plain_norm(v, head))
    attended = attend(b, q, cache, n_head, n_kv, head, head, 1.0)
    return b.mul_mat(attended, "attn_output", bias=False)


def _shared_cache(b: Builder, windowed: bool) -> Cache | None:
    """Return the cache that the current layer reads and does not write; None: it has its own."""
    n_own = b.arch.own_caches or b.h.n_layer - b.h.int("attention.shared_kv_layers", 0)
    if b.layer < n_own:
        return None
    source = n_own - (2 if windowed else 1)
    if source < 0 or is_windowed(b, source) != windowed:
        raise FormatError(
            f"{b.source.paths[0]}: layers from {n_own} on share caches ({b.h.arch}.attention.shared_kv_layers): the "
            "two before them must be one with a window, then one without"
        )
    return next(cache for cache in b.caches if cache.name == f"cache_{source}")


def _projections(b: Builder, x: Value, q_width: int, kv_width: int, *, alone: bool) -> tuple[Value, Value, Value]:
    """Return q, k and v; alone: q is all that is used (k and v are q, too)."""
    if b.has("attn_qkv.weight"):
        return qkv(b, x, q_width, kv_width, kv_width)
    q = b.mul_mat(x, "attn_q")
    if alone:
        for name in ("attn_k", "attn_v", "attn_k_norm"):
            b.maybe(f"{name}.weight")  # llama.cpp reads them, and does not use them
        return q, q, q
    k = b.mul_mat(x, "attn_k")
    return q, k, b.mul_mat(x, "attn_v") if b.has("attn_v.weight") else k


# ---------------------------------------------------------------- inputs of layers


def layer_inputs(b: Builder, x: Value) -> list[Value]:
    """Return what every layer is given beside its input, for x, the embeddings; nothing if the model has none.

    Raises FormatError if shapes do not fit together.
    """
    width, n_layer = b.h.int("embedding_length_per_layer_input", 0), b.h.n_layer
    if width <= 0:
        return []
    table, tokens = b.matrix("per_layer_token_embd.weight"), b.matrix("token_embd.weight")
    if (table.n_in, table.n_out) != (width * n_layer, tokens.n_out):
        raise FormatError(
            f"{b.source.paths[0]}: {table.tensor.name} has {table.n_out} rows of {table.n_in} values, by the metadata "
            f"{tokens.n_out} of {width} for each of {n_layer} layers"
        )
    embedded = b.value("layer_embeddings", table.n_in)
    b.add(Embed(out=embedded, weight=table, scale=math.sqrt(width)))
    projected = b.mul_mat(x, "per_layer_model_proj", scale=False, bias=False)
    normed = b.norm(b.scaled(projected, 1.0 / math.sqrt(b.h.n_embd)), "per_layer_proj_norm", group=width)
    both = b.scaled(b.sum(normed, embedded, "layer_embeddings_projected"), 1.0 / math.sqrt(2.0))
    # All at once: a layer on another device is sent its own part alone, and does not wait for it.
    return [b.take(both, f"layer_input_{layer}", width, layer * width) for layer in range(n_layer)]


def with_layer_input(b: Builder, x: Value, out: str) -> Value:
    """Add to x what it makes of the layer's second input."""
    return b.sum(x, made_of_layer_input(b, x), out)


def made_of_layer_input(b: Builder, x: Value) -> Value:
    """Return what x makes of the layer's second input."""
    gate, given = b.mul_mat(x, "inp_gate", scale=False, bias=False), b.per_layer[b.layer]
    given = b.selected(given) if gate.outputs else given
    hidden = b.value("layer_input_gated", gate.width, x)
    b.add(Glu(out=hidden, gate=gate, up=given, activation=Activation(b.arch.activation)))
    return b.norm(b.mul_mat(hidden, "proj", scale=False, bias=False), "post_norm")


# ---------------------------------------------------------------- experts


def beside_experts(b: Builder, x: Value, normed: Value) -> Value:
    """Return the sum of a dense feed-forward layer, which reads ``normed``, and of experts with norms of their own.

    The router reads x normalized without weights, over sqrt(n_embd), times ``ffn_gate_inp.scale``.
    """
    fed = b.norm(dense(b, normed, "ffn_gate", "ffn_up", "ffn_down", "ffn"), "post_ffw_norm_1")
    routed = b.times(
        b.scaled(b.plain_norm(x, x.width), 1.0 / math.sqrt(b.h.n_embd)), "ffn_gate_inp.scale", "router_input"
    )
    logits = b.mul_mat(routed, "ffn_gate_inp", scale=False)
    chosen = b.norm(experts(b, b.norm(x, "pre_ffw_norm_2"), logits), "post_ffw_norm_2")
    return b.sum(fed, chosen, "ffn_sum")
