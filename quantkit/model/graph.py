"""One forward pass, written once: a model's tensors and its architecture's row become a list of operations.

``build_graph`` walks the layers; a layer asks its tensors for what there is (biases, norms, experts, a shared expert)
and the row of arch.py for what tensors cannot say. The blocks of a layer lie in attention.py, mla.py, compressed.py,
delta_net.py, gemma4.py, hyper.py, kimi.py, lightning.py, mamba.py, short_convolution.py and feed_forward.py, layers
that are other altogether in gemma3n.py, residuals.py and rwkv.py; attention blocks are entered in ATTENTION. No backend
is known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from quantkit.formats.gguf import GGUFFile
from quantkit.kernels.formats import has_decoder
from quantkit.model import hyper
from quantkit.model.attention import gqa, gqa_or_one
from quantkit.model.builder import Builder
from quantkit.model.check import check_graph
from quantkit.model.compressed import compressed
from quantkit.model.delta_net import delta_nets
from quantkit.model.feed_forward import dense_and_experts, feed_forward
from quantkit.model.gemma3n import add_altup_layer, merged, streams
from quantkit.model.gemma4 import beside_experts, gemma4, layer_inputs, with_layer_input
from quantkit.model.kimi import kimi_linear
from quantkit.model.lightning import lightning
from quantkit.model.mamba import mamba, mamba2, mamba2_beside, mamba2_hybrid, mamba_hybrid, nemotron_h, plamo2
from quantkit.model.mla import mla, mla_gated, mla_plain, unscaled
from quantkit.model.ops import Embed, Graph, Norm, Softcap, Value
from quantkit.model.residuals import add_layer_of_mixtures, mixture
from quantkit.model.rwkv import add_layer_of_mixing, time_mix_6, time_mix_7
from quantkit.model.short_convolution import short_convolutions

#: The blocks an attention layer can be.
ATTENTION: Mapping[str, Callable[[Builder, Value], Value]] = {
    "gqa": gqa,
    "gqa_or_one": gqa_or_one,
    "unscaled": unscaled,
    "mla": mla,
    "mla_plain": mla_plain,
    "mla_gated": mla_gated,
    "compressed": compressed,
    "delta_nets": delta_nets,
    "mamba": mamba,
    "mamba_hybrid": mamba_hybrid,
    "mamba2": mamba2,
    "mamba2_hybrid": mamba2_hybrid,
    "mamba2_beside": mamba2_beside,
    "nemotron_h": nemotron_h,
    "plamo2": plamo2,
    "short_convolutions": short_convolutions,
    "kimi_linear": kimi_linear,
    "lightning": lightning,
    "gemma4": gemma4,
    "time_mix_6": time_mix_6,
    "time_mix_7": time_mix_7,
}


def build_graph(source: GGUFFile, n_ctx: int = 0) -> Graph:
    """Return the forward pass of a model.

    Args:
        source: the opened model; its tensors' data are not read.
        n_ctx: tokens a sequence can have; some models choose their rope factors by it (0: those of training).

    Raises:
        TypeNotSupported: the architecture, or a part of this model, is not known here.
        FormatError: a tensor or key that the model needs is missing.
    """
    b = Builder(source, n_ctx)
    b.embedded = x = _embeddings(b)
    b.per_layer = layer_inputs(b, x)
    x = streams(b, x) if b.arch.altup else x
    x = hyper.spread(b, x) if b.arch.hyper else x
    for layer in range(b.h.n_layer):
        b.layer = layer
        x = _between_loops(b, add_altup_layer(b, x) if b.arch.altup else add_layer(b, x))
    b.layer = b.h.n_layer
    if b.arch.mixtures:
        x = b.selected(mixture(b, x, "output_res_score"))
    x = merged(b, x) if b.arch.altup else hyper.head(b, x) if b.arch.hyper else x
    x = b.norm(x, b.arch.output_norm)
    logits = b.mul_mat(x, "output" if b.has("output.weight") else "token_embd", out="logits", of="output")
    logits = _logits(b, logits)
    b.check_all_used()
    graph = Graph(tuple(b.ops), logits, tuple(b.caches), tuple(b.states))
    check_graph(graph, has_decoder)
    return graph


# ---------------------------------------------------------------- beginning and end


def _embeddings(b: Builder) -> Value:
    """Return the input of the first layer."""
    weighted = b.has("token_embd_norm.weight") and b.arch.output_norm != "token_embd_norm"
    normed = weighted or b.arch.embed_norm
    positioned = b.arch.position_embeddings or b.has("position_embd.weight")
    x = b.value("token_embeddings" if positioned or normed else "embeddings", b.h.n_embd)
    b.add(Embed(out=x, weight=b.matrix("token_embd.weight"), scale=_embed_scale(b)))
    if weighted:
        return b.norm(x, "token_embd_norm", out="embeddings")
    if b.arch.embed_norm:
        return b.plain_norm(x, x.width, out="embeddings")
    if not positioned:
        return x
    positions = b.value("position_embeddings", b.h.n_embd)
    b.add(Embed(out=positions, weight=b.matrix("position_embd.weight"), by_position=True))
    return b.sum(x, positions, "embeddings")


def _embed_scale(b: Builder) -> float:
    if b.arch.embed_sqrt:
        return math.sqrt(b.h.n_embd)
    fixed = b.arch.fixed_scales.embed if b.arch.fixed_scales else 0.0
    return (b.h.float("embedding_scale", fixed) if b.arch.scales else fixed) or 1.0


def _logits(b: Builder, logits: Value) -> Value:
    fixed = b.arch.fixed_scales.logits or b.arch.fixed_scales.width / b.h.n_embd if b.arch.fixed_scales else 0.0
    scale = b.h.float("logit_scale", fixed) if b.arch.logit_scale else fixed
    if scale:
        logits = b.scaled(logits, 1.0 / scale if b.arch.logit_scale == "divide" else scale)
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
    if b.arch.hyper:
        return _add_layer_of_streams(b, x)
    if b.arch.mixtures:
        return add_layer_of_mixtures(b, x, ATTENTION[b.arch.attention], feed_forward)
    if b.arch.mixes_channels:
        return add_layer_of_mixing(b, x)
    if b.arch.single_block:
        return _single_block(b, x)
    if b.arch.uneven and not (b.has("attn_norm.weight") and b.has("ffn_norm.weight")):
        return _layer_without_attention(b, x)
    swin = b.arch.swin_key and b.h.flag("swin_norm")
    after_attention, *after_ffn = ("attn_norm", "ffn_norm") if swin else b.arch.post_norms
    own_ffn_norm = not swin and (b.has_norm(b.arch.ffn_norm) or b.arch.plain_norms)
    parallel = _is_parallel(b, own_ffn_norm)
    shared = parallel and not own_ffn_norm  # the same input for both
    router = b.mul_mat(x, "ffn_gate_inp") if b.arch.moe.on_input and b.has("ffn_gate_inp.weight") else None
    normed = b.norm(x, "attn_norm") if not swin and (b.has("attn_norm.weight") or b.arch.plain_norms) else x
    own_input = b.norm(x, "attn_norm_2") if b.has("attn_norm_2.weight") and not b.arch.residual_of_norms else normed
    attended = ATTENTION[b.arch.attention](b, own_input)
    if b.layer == b.h.n_layer - 1:
        attended, x = b.selected(attended), b.selected(x)
        normed = b.selected(normed) if shared or b.arch.residual_of_norms else normed
        router = None if router is None else b.selected(router)
    if b.arch.ffn_norm != after_attention:
        attended = _post_norm(b, attended, after_attention)
    attended = b.scaled(attended, _residual_scale(b))
    if parallel:
        fed = feed_forward(b, normed if shared else b.norm(x, "ffn_norm"))
        return b.sum(b.sum(fed, x, "ffn_residual"), attended, "layer_out")
    if b.arch.residual_of_norms:
        return _layer_of_norms(b, attended, normed)
    middle = b.sum(attended, x, "attn_residual")
    ready = b.norm(middle, b.arch.ffn_norm) if own_ffn_norm else middle
    if b.has("pre_ffw_norm_2.weight"):
        fed = beside_experts(b, middle, ready)
    elif b.has("ffn_norm_exps.weight"):
        fed = dense_and_experts(b, ready, b.norm(x, "ffn_norm_exps"))
    else:
        fed = feed_forward(b, ready, router)
    for name in after_ffn:
        fed = _post_norm(b, fed, name)
    return _layer_out(b, b.scaled(fed, _residual_scale(b)), middle)


def _layer_without_attention(b: Builder, x: Value) -> Value:
    """Add a feed-forward layer alone, or nothing: a layer without one is left out whole, as in llama.cpp (Deci)."""
    x = b.selected(x) if b.layer == b.h.n_layer - 1 else x
    return b.sum(x, feed_forward(b, b.norm(x, "ffn_norm")), "layer_out") if b.has("ffn_norm.weight") else x


def _layer_of_norms(b: Builder, attended: Value, normed: Value) -> Value:
    """Add the rest of a layer whose residuals are what its norms give, times a factor (MiniMax Text 01)."""
    factor = b.h.float("residual_scale")
    ready = b.norm(b.sum(attended, b.scaled(normed, factor), "attn_residual"), "ffn_norm")
    return b.sum(feed_forward(b, ready), b.scaled(ready, factor), "layer_out")


def _single_block(b: Builder, x: Value) -> Value:
    """Add a layer without a feed-forward layer of its own: Mamba, and Nemotron H, where one is a layer."""
    done = ATTENTION[b.arch.attention](b, b.norm(x, "attn_norm"))
    if b.layer == b.h.n_layer - 1:
        done, x = b.selected(done), b.selected(x)
    return b.sum(x, done, "layer_out")


def _is_parallel(b: Builder, own_ffn_norm: bool) -> bool:
    if b.arch.parallel_key:
        return bool(b.h.get("use_parallel_residual"))
    return b.arch.parallel and not own_ffn_norm


def _between_loops(b: Builder, x: Value) -> Value:
    """Return the input of the next layer: normed where the model goes through its layers once more."""
    ends = (b.layer + 1) % b.h.n_stored == 0 and b.layer + 1 < b.h.n_layer
    if not ends or b.h.flag("skip_loop_final_norm"):
        return x
    y = b.value("loop_out", x.width, x)
    b.add(Norm(out=y, x=x, weight=b.outside("output_norm.weight"), eps=b.h.eps, kind=b.arch.norm, group=x.width))
    return y


def _add_layer_of_streams(b: Builder, streams: Value) -> Value:
    x, counts = hyper.gather(b, streams, "attn")
    attended = ATTENTION[b.arch.attention](b, b.norm(x, "attn_norm"))
    if b.layer == b.h.n_layer - 1:
        attended, streams = b.selected(attended), b.selected(streams)
        counts = tuple(b.selected(each) for each in counts)
    streams = hyper.scatter(b, attended, streams, counts, "attn_residual")
    x, counts = hyper.gather(b, streams, "ffn")
    return hyper.scatter(b, feed_forward(b, b.norm(x, "ffn_norm")), streams, counts, "layer_out")


def _layer_out(b: Builder, fed: Value, middle: Value) -> Value:
    """Return the sum, with what follows in Gemma 4: the layer's second input, a factor; in Talkie the model's input."""
    if b.arch.embed_skip and b.embedded is not None:
        skipped = b.selected(b.embedded) if fed.outputs else b.embedded
        skipped = b.times(skipped, "layer_output_scale.weight", "embed_skip")
        return b.sum(b.sum(fed, middle, "ffn_out"), skipped, "layer_out")
    scaled = b.has("layer_output_scale.weight")
    name = "layer_out_unscaled" if scaled else "layer_out"
    out = b.sum(fed, middle, "ffn_out" if b.per_layer else name)
    if b.per_layer:
        out = with_layer_input(b, out, name)
    return b.times(out, "layer_output_scale.weight", "layer_out") if scaled else out


def _post_norm(b: Builder, x: Value, name: str) -> Value:
    return b.norm(x, name, eps=b.arch.post_norm_eps or None) if b.has_norm(name) else x


def _residual_scale(b: Builder) -> float:
    fixed = b.arch.fixed_scales.depth / math.sqrt(b.h.n_layer) if b.arch.fixed_scales else 0.0
    return (b.h.float("residual_scale", fixed) if b.arch.scales else fixed) or 1.0
