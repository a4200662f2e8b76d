"""The forward pass of any model: its tensors and its architecture's row become a list of operations.

``build_graph`` walks the layers. A layer's tensors determine its biases, norms and experts, the row of arch.py
everything else. The blocks of a layer are in attention.py, mla.py, deepseek4.py, delta_net.py, gemma4.py,
hyper_connections.py, kimi.py, lightning.py, mamba.py, short_convolution.py and feed_forward.py, whole layers of another
structure in encoder.py, gemma3n.py, residual_attention.py and rwkv.py; ATTENTION lists the attention blocks. This
module does not depend on backends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from quantkit.formats.gguf import GGUFFile
from quantkit.kernels.formats import has_decoder
from quantkit.model import gemma3n, hyper_connections
from quantkit.model.arch import arch_by_name
from quantkit.model.attention import gqa, gqa_or_one
from quantkit.model.builder import Builder, format_names, kind_of
from quantkit.model.check import check_graph
from quantkit.model.deepseek4 import compressed_attention
from quantkit.model.delta_net import delta_net_hybrid
from quantkit.model.encoder import add_residual_norm_layer, check_encoder, head_graph, pooling_of
from quantkit.model.feed_forward import arctic_feed_forward, feed_forward
from quantkit.model.gemma4 import add_layer_input, gemma4, gemma4_feed_forward, layer_inputs
from quantkit.model.hparams import HParams
from quantkit.model.kimi import kimi_linear
from quantkit.model.lightning import lightning_hybrid
from quantkit.model.mamba import mamba, mamba2, mamba2_hybrid, mamba2_parallel, mamba_hybrid, nemotron_h, plamo2
from quantkit.model.mla import gqa_fixed_rope, mla, mla_gated, mla_plain
from quantkit.model.ops import Embed, Graph, MultiplyBy, Norm, Softcap, Value
from quantkit.model.residual_attention import add_residual_attention_layer, mix_block_sums
from quantkit.model.rwkv import add_rwkv_layer, time_mix_6, time_mix_7
from quantkit.model.short_convolution import short_convolution_hybrid

#: Attention blocks by their name in arch.py.
ATTENTION: Mapping[str, Callable[[Builder, Value], Value]] = {
    "gqa": gqa,
    "gqa_or_one": gqa_or_one,
    "gqa_fixed_rope": gqa_fixed_rope,
    "mla": mla,
    "mla_plain": mla_plain,
    "mla_gated": mla_gated,
    "compressed_attention": compressed_attention,
    "delta_net_hybrid": delta_net_hybrid,
    "mamba": mamba,
    "mamba_hybrid": mamba_hybrid,
    "mamba2": mamba2,
    "mamba2_hybrid": mamba2_hybrid,
    "mamba2_parallel": mamba2_parallel,
    "nemotron_h": nemotron_h,
    "plamo2": plamo2,
    "short_convolution_hybrid": short_convolution_hybrid,
    "kimi_linear": kimi_linear,
    "lightning_hybrid": lightning_hybrid,
    "gemma4": gemma4,
    "time_mix_6": time_mix_6,
    "time_mix_7": time_mix_7,
}


def build_graph(source: GGUFFile, n_ctx: int = 0) -> Graph:
    """Return the forward pass of a model: to logits, or of an encoder to rows that are pooled.

    Args:
        source: the opened model; its tensors' data are not read.
        n_ctx: the longest sequence, on which the rope factors of some models depend; 0: the context of training.

    Raises:
        TypeNotSupported: the architecture, or a part of this model, is not supported.
        FormatError: a required tensor or key is missing.
    """
    b = Builder(source, n_ctx)
    if b.arch.encoder:
        return _embedding_graph(b, "")
    with b.require_all_tensors():
        logits = _logits(b, _add_layers(b))
    graph = Graph(tuple(b.ops), logits, tuple(b.caches), tuple(b.states))
    check_graph(graph, has_decoder)
    return graph


def build_embeddings(source: GGUFFile, n_ctx: int = 0, *, pooling: str = "") -> Graph:
    """Return the forward pass of any model to the rows that its embeddings are pooled from, without logits.

    Args:
        source: as of ``build_graph``, whose errors it raises.
        n_ctx: the same.
        pooling: one of encoder.POOLINGS; empty: that of the metadata, or the mean.
    """
    return _embedding_graph(Builder(source, n_ctx), pooling)


def _embedding_graph(b: Builder, pooling: str) -> Graph:
    check_encoder(b)
    kind = pooling_of(b, pooling)
    with b.require_all_tensors():
        rows = _add_layers(b)
        head = head_graph(b, rows.width, kind)
        b.ignore("output.weight", "output.bias", "output.scale")
    graph = Graph(tuple(b.ops), rows, tuple(b.caches), tuple(b.states), pooling=kind, head=head)
    check_graph(graph, has_decoder)
    if head is not None:
        check_graph(head, has_decoder)
    return graph


def _add_layers(b: Builder) -> Value:
    """Add the operations of all layers and return their output, normalized."""
    b.embeddings = x = _embeddings(b)
    b.layer_inputs = layer_inputs(b, x)
    if b.arch.altup:
        x = gemma3n.init_streams(b, x)
    elif b.arch.hyper_connections:
        x = hyper_connections.init_streams(b, x)
    for layer in range(b.h.n_layer):
        b.layer = layer
        x = _loop_norm(b, gemma3n.add_altup_layer(b, x) if b.arch.altup else add_layer(b, x))
    b.layer = b.h.n_layer
    if b.arch.residual_attention:
        x = b.select_outputs(mix_block_sums(b, x, "output_res_score"))
    if b.arch.altup:
        x = gemma3n.merge_streams(b, x)
    elif b.arch.hyper_connections:
        x = hyper_connections.merge_streams(b, x)
    x = x if x.outputs else b.select_outputs(x)
    return x if b.arch.residual_norms else b.norm(x, b.arch.output_norm)


def unused_notes(source: GGUFFile) -> list[str]:
    """Return a note on tensors in the file that neither the engine nor llama.cpp uses."""
    arch = arch_by_name(HParams(source).arch)
    ignored = set() if arch.encoder else arch.ignored
    names = [name for name in source.tensors if kind_of(name) in ignored and not name.endswith("scale")]
    notes = [f"not used, as in llama.cpp: {format_names(names)}"] if names else []
    prefix = arch.decoder_prefix
    decoder = [name for name in source.tensors if prefix and name.startswith(prefix)]
    return [*notes, "the decoder is not run: the output is the encoder's"] if decoder else notes


# ---------------------------------------------------------------- beginning and end


def _embeddings(b: Builder) -> Value:
    """Return the input of the first layer: embeddings of tokens, the first type of token, and positions, normalized."""
    weighted = b.has("token_embd_norm.weight") and b.arch.output_norm != "token_embd_norm"
    has_types, has_positions = b.has("token_types.weight"), b.has("position_embd.weight")
    has_positions = has_positions or b.arch.position_embeddings
    is_last = not (weighted or b.arch.embed_norm or has_types or has_positions)
    x = b.value("embeddings" if is_last else "token_embeddings", b.h.n_embd)
    b.add(Embed(out=x, weight=b.matrix("token_embd.weight"), scale=_embed_scale(b)))
    if has_types:
        typed = b.value("typed_embeddings", x.width)
        first = b.matrix("token_types.weight", (0, 1))
        b.add(MultiplyBy(out=typed, x=x, vector=first, kind="plus"))
        x = typed
    if has_positions:
        positions = b.value("position_embeddings", b.h.n_embd)
        b.add(Embed(out=positions, weight=b.matrix("position_embd.weight"), by_position=True))
        x = b.sum(x, positions, "embedding_sum" if weighted else "embeddings")
    if weighted:
        return b.norm(x, "token_embd_norm", out="embeddings")
    return b.plain_norm(x, x.width, out="embeddings") if b.arch.embed_norm else x


def _embed_scale(b: Builder) -> float:
    if b.arch.embed_sqrt:
        return math.sqrt(b.h.n_embd)
    fixed = b.arch.fixed_scales.embed if b.arch.fixed_scales else 0.0
    return (b.h.float("embedding_scale", fixed) if "embedding" in b.arch.scales else fixed) or 1.0


def _logits(b: Builder, x: Value) -> Value:
    """Add the output matrix, and the scale and cap of its logits."""
    logits = b.mul_mat(x, "output" if b.has("output.weight") else "token_embd", out="logits", base_name="output")
    fixed = b.arch.fixed_scales.logits or b.arch.fixed_scales.width / b.h.n_embd if b.arch.fixed_scales else 0.0
    scale = b.h.float("logit_scale", fixed) if b.arch.logit_scale else fixed
    if scale:
        logits = b.scale(logits, 1.0 / scale if b.arch.logit_scale == "divide" else scale)
    cap = 0.0
    if b.arch.final_softcap is not None:
        cap = b.arch.final_softcap if b.arch.altup else b.h.float("final_logit_softcapping", b.arch.final_softcap)
    if not cap:
        return logits
    capped = Value("logits_capped", logits.width, 1, logits.outputs)
    b.add(Softcap(out=capped, x=logits, cap=cap))
    return capped


# ---------------------------------------------------------------- a layer


def add_layer(b: Builder, x: Value) -> Value:
    """Add the operations of the current layer and return its output."""
    if b.arch.hyper_connections:
        return _hyper_connection_layer(b, x)
    if b.arch.residual_attention:
        return add_residual_attention_layer(b, x, ATTENTION[b.arch.attention], feed_forward)
    if b.arch.channel_mix:
        return add_rwkv_layer(b, x)
    if b.arch.single_block:
        return _single_block(b, x)
    if b.arch.residual_norms:
        return add_residual_norm_layer(b, x, ATTENTION[b.arch.attention], feed_forward)
    if b.arch.optional_attention and not (b.has("attn_norm.weight") and b.has("ffn_norm.weight")):
        return _layer_without_attention(b, x)
    return _transformer_layer(b, x)


class _Norms(NamedTuple):
    """The norms of a layer: whether they come first, names of those that follow, and whether ffn_norm is applied."""

    first: bool
    after_attention: str
    after_ffn: tuple[str, ...]
    own_ffn_norm: bool


def _norms(b: Builder) -> _Norms:
    swin = b.arch.swin_key and b.h.flag("swin_norm")
    first = not swin and not b.arch.norms_after
    after_attention, *after_ffn = ("attn_norm", "ffn_norm") if swin else b.arch.post_norms
    own_ffn_norm = first and (not b.arch.parallel or b.has("ffn_norm.weight"))
    return _Norms(first, after_attention, tuple(after_ffn), own_ffn_norm)


def _transformer_layer(b: Builder, x: Value) -> Value:
    """Add attention and a feed-forward layer, sequential or parallel."""
    norms = _norms(b)
    parallel = _is_parallel(b, norms.own_ffn_norm)
    shared = parallel and not norms.own_ffn_norm  # attention and feed-forward layer have the same input
    router = b.mul_mat(x, "ffn_gate_inp") if b.arch.moe.router_on_input and b.has("ffn_gate_inp.weight") else None
    first_norm = norms.first and not (b.arch.encoder and b.layer == 0 and not b.has_norm("attn_norm"))
    normed = b.norm(x, "attn_norm") if first_norm else x
    own_input = b.norm(x, "attn_norm_2") if b.has("attn_norm_2.weight") and not b.arch.normed_residual else normed
    attn_out = ATTENTION[b.arch.attention](b, own_input)
    if b.layer == b.h.n_layer - 1:
        attn_out, x = b.select_outputs(attn_out), b.select_outputs(x)
        normed = b.select_outputs(normed) if shared or b.arch.normed_residual else normed
        router = None if router is None else b.select_outputs(router)
    if b.arch.ffn_norm != norms.after_attention:
        attn_out = _post_norm(b, attn_out, norms.after_attention)
    attn_out = b.scale(attn_out, _residual_scale(b))
    if parallel:
        ffn_out = feed_forward(b, normed if shared else b.norm(x, "ffn_norm"))
        return b.sum(b.sum(ffn_out, x, "ffn_residual"), attn_out, "layer_out")
    if b.arch.normed_residual:
        return _normed_residual_layer(b, attn_out, normed)
    return _feed_forward_part(b, x, attn_out, router, norms)


def _feed_forward_part(b: Builder, x: Value, attn_out: Value, router: Value | None, norms: _Norms) -> Value:
    """Add the part of a layer after attention; x: the layer's input, router: logits that are computed from it."""
    attn_residual = b.sum(attn_out, x, "attn_residual")
    ffn_in = b.norm(attn_residual, b.arch.ffn_norm) if norms.own_ffn_norm else attn_residual
    if b.has("pre_ffw_norm_2.weight"):
        ffn_out = gemma4_feed_forward(b, attn_residual, ffn_in)
    elif b.has("ffn_norm_exps.weight"):
        ffn_out = arctic_feed_forward(b, ffn_in, b.norm(x, "ffn_norm_exps"))
    else:
        ffn_out = feed_forward(b, ffn_in, router)
    name = next((name for name in norms.after_ffn if b.has_norm(name)), None)
    ffn_out = ffn_out if name is None else _post_norm(b, ffn_out, name)
    return _layer_out(b, b.scale(ffn_out, _residual_scale(b)), attn_residual)


def _layer_without_attention(b: Builder, x: Value) -> Value:
    """Add a feed-forward layer without attention; if that is missing too, return x unchanged (Deci)."""
    x = b.select_outputs(x) if b.layer == b.h.n_layer - 1 else x
    return b.sum(x, feed_forward(b, b.norm(x, "ffn_norm")), "layer_out") if b.has("ffn_norm.weight") else x


def _normed_residual_layer(b: Builder, attn_out: Value, normed: Value) -> Value:
    """Add the end of a layer whose residuals are ``residual_scale`` times the output of its norms (MiniMax Text 01)."""
    factor = b.h.float("residual_scale")
    ffn_in = b.norm(b.sum(attn_out, b.scale(normed, factor), "attn_residual"), "ffn_norm")
    return b.sum(feed_forward(b, ffn_in), b.scale(ffn_in, factor), "layer_out")


def _single_block(b: Builder, x: Value) -> Value:
    """Add a layer of one block (Mamba; Nemotron H, whose feed-forward layers are separate layers)."""
    block_out = ATTENTION[b.arch.attention](b, b.norm(x, "attn_norm"))
    if b.layer == b.h.n_layer - 1:
        block_out, x = b.select_outputs(block_out), b.select_outputs(x)
    return b.sum(x, block_out, "layer_out")


def _is_parallel(b: Builder, own_ffn_norm: bool) -> bool:
    if b.arch.parallel_key:
        return bool(b.h.get("use_parallel_residual"))
    return b.arch.parallel and not own_ffn_norm


def _loop_norm(b: Builder, x: Value) -> Value:
    """Return the input of the next layer, normalized before each repetition of the layers (Nanbeige)."""
    ends = (b.layer + 1) % b.h.n_stored == 0 and b.layer + 1 < b.h.n_layer
    if not ends or b.h.flag("skip_loop_final_norm"):
        return x
    y = b.value("loop_out", x.width, x)
    b.add(Norm(out=y, x=x, weight=b.global_matrix("output_norm.weight"), eps=b.h.eps, kind=b.arch.norm, group=x.width))
    return y


def _hyper_connection_layer(b: Builder, streams: Value) -> Value:
    x, weights = hyper_connections.gather(b, streams, "attn")
    attn_out = ATTENTION[b.arch.attention](b, b.norm(x, "attn_norm"))
    if b.layer == b.h.n_layer - 1:
        attn_out, streams = b.select_outputs(attn_out), b.select_outputs(streams)
        weights = tuple(b.select_outputs(weight) for weight in weights)
    streams = hyper_connections.scatter(b, attn_out, streams, weights, "attn_residual")
    x, weights = hyper_connections.gather(b, streams, "ffn")
    return hyper_connections.scatter(b, feed_forward(b, b.norm(x, "ffn_norm")), streams, weights, "layer_out")


def _layer_out(b: Builder, ffn_out: Value, attn_residual: Value) -> Value:
    """Return the residual sum; Gemma 4 adds the layer's second input and scales, Talkie adds the model's input."""
    if b.arch.embed_skip and b.embeddings is not None:
        skip = b.select_outputs(b.embeddings) if ffn_out.outputs else b.embeddings
        skip = b.times(skip, "layer_output_scale.weight", "embed_skip")
        return b.sum(b.sum(ffn_out, attn_residual, "ffn_out"), skip, "layer_out")
    scaled = b.has("layer_output_scale.weight")
    name = "layer_out_unscaled" if scaled else "layer_out"
    out = b.sum(ffn_out, attn_residual, "ffn_out" if b.layer_inputs else name)
    if b.layer_inputs:
        out = add_layer_input(b, out, name)
    return b.times(out, "layer_output_scale.weight", "layer_out") if scaled else out


def _post_norm(b: Builder, x: Value, name: str) -> Value:
    return b.norm(x, name, eps=b.arch.post_norm_eps or None) if b.has_norm(name) else x


def _residual_scale(b: Builder) -> float:
    fixed = b.arch.fixed_scales.depth / math.sqrt(b.h.n_layer) if b.arch.fixed_scales else 0.0
    return (b.h.float("residual_scale", fixed) if "residual" in b.arch.scales else fixed) or 1.0
