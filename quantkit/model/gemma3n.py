"""Layers of Gemma 3n: several residual streams (AltUp), a low-rank path parallel to attention (LAuReL), sparse gates,
and per-layer inputs, as in Gemma 4.

    streams     a layer has n rows a token, side by side in one value. It predicts all of them by a token-dependent
                mixture, computes with the first alone, and corrects the others by the result.
    first, last the other streams start as projections of the embeddings, scaled to their length, and are projected back
                at the end; the output is the mean of all.
    LAuReL      attention's input is also multiplied by two low-rank matrices, and both results are added.
    gates       in the first layers, only the excess over mean + DEVIATIONS * standard deviation of the row passes.

As llama.cpp does, the constants here override the metadata. Source: llama.cpp b11434
src/models/gemma3n.cpp, models.h.
"""

from __future__ import annotations

import math

from quantkit.errors import FormatError
from quantkit.model.builder import Builder
from quantkit.model.gemma4 import gate_layer_input, gemma4
from quantkit.model.ops import Activation, Exceed, Glu, Join, Mix, MulMatHeads, Softcap, ToLength, Value

#: The number of layers with sparse gates, and their threshold in standard deviations (95 % of a normal distribution).
N_SPARSE, DEVIATIONS = 10, 1.6448533535003662


def init_streams(b: Builder, x: Value) -> Value:
    """Return the initial streams, side by side, for the embeddings x; FormatError without layer inputs."""
    if not b.layer_inputs:
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch}.embedding_length_per_layer_input must be positive", "QK-E123"
        )
    return _join(b, x, _project(b, x, _repeat(b, x, _n_streams(b) - 1), "altup_proj"), "embeddings")


def merge_streams(b: Builder, x: Value) -> Value:
    """Return the mean of the streams after the last layer."""
    first = _first(b, x, "altup_first")
    projections = _project(b, first, _other_streams(b, x), "altup_unembd_proj")
    total = first
    for i in range(_n_streams(b) - 1):
        total = b.sum(total, b.take(projections, f"altup_{i + 1}", first.width, i * first.width), f"altup_sum_{i + 1}")
    return b.scale(total, 1.0 / _n_streams(b))


def add_altup_layer(b: Builder, x: Value) -> Value:
    """Add the operations of the current layer and return all streams."""
    predicted = _predict(b, x)
    active = _first(b, predicted, "active")
    normed = b.norm(active, "attn_norm")
    laurel = b.sum(_laurel(b, normed), normed, "laurel")
    attended = gemma4(b, normed)
    if b.layer == b.h.n_layer - 1:
        attended, active, laurel, predicted = (b.select_outputs(v) for v in (attended, active, laurel, predicted))
    middle = b.sum(b.norm(attended, "post_attention_norm"), active, "attended_active")
    middle = b.scale(b.sum(middle, laurel, "attn_residual"), 1.0 / math.sqrt(2.0))
    ffn_out = b.norm(_feed_forward(b, b.norm(middle, "ffn_norm")), "post_ffw_norm")
    corrected = _correct(b, predicted, active, b.sum(ffn_out, middle, "stream_out"))
    return _with_layer_input(b, corrected)


# ---------------------------------------------------------------- a layer


def _laurel(b: Builder, x: Value) -> Value:
    return b.norm(b.mul_mat(b.mul_mat(x, "laurel_l"), "laurel_r"), "laurel_post_norm")


def _feed_forward(b: Builder, x: Value) -> Value:
    gate, up = (b.mul_mat(x, name, scale=False, bias=False) for name in ("ffn_gate", "ffn_up"))
    if b.layer < N_SPARSE:
        sparse = b.value("ffn_gate_sparse", gate.width, gate)
        b.add(Exceed(out=sparse, x=gate, factor=DEVIATIONS))
        gate = sparse
    hidden = b.value("ffn_hidden", up.width, up)
    b.add(Glu(out=hidden, gate=gate, up=up, activation=Activation(b.arch.activation)))
    return b.mul_mat(hidden, "ffn_down", scale=False, bias=False)


def _with_layer_input(b: Builder, x: Value) -> Value:
    """Add the gated layer input to all streams but the first."""
    first = _first(b, x, "corrected_first")
    layer_input = gate_layer_input(b, b.times(first, "altup_correct_scale.weight", "corrected_scaled"))
    return _join(
        b,
        first,
        b.sum(_other_streams(b, x), _repeat(b, layer_input, _n_streams(b) - 1), "layer_out_others"),
        "layer_out",
    )


def _weights(b: Builder, x: Value, name: str, out: str) -> Value:
    """Return the token-dependent weights of a mixture of streams, computed from x, a row of the active stream."""
    normed = b.scale(b.norm(x, "altup_router_norm", out=f"{out}_normed"), 1.0 / b.h.n_embd)
    logits = b.mul_mat(normed, "altup_router", out=f"{out}_logits")
    modalities = b.value(f"{out}_modalities", logits.width, logits)
    b.add(Softcap(out=modalities, x=logits, cap=1.0))
    return b.mul_mat(modalities, name, out=f"{out}_weights")


def _predict(b: Builder, x: Value) -> Value:
    weights = _weights(b, _first(b, x, "last_first"), "altup_predict_coef", "predict")
    out = b.value("predicted", x.width, x)
    b.add(Mix(out=out, x=x, weights=weights, base=x, n=_n_streams(b)))
    return out


def _correct(b: Builder, predicted: Value, active: Value, computed: Value) -> Value:
    """Return the streams plus (1 + weight) * (computed - active)."""
    new = b.sum(computed, b.scale(active, -1.0), "innovation")
    weights = _weights(b, computed, "altup_correct_coef", "correct")
    out = b.value("corrected", predicted.width, predicted)
    b.add(Mix(out=out, x=new, weights=weights, base=predicted, n=1, offset=1.0))
    return out


# ---------------------------------------------------------------- streams


def _n_streams(b: Builder) -> int:
    """Return the number of streams; FormatError without altup_proj."""
    projection = b.source.tensors.get("altup_proj.weight")
    if projection is None or len(projection.shape) != 3:
        raise FormatError(f"{b.source.paths[0]}: {b.h.arch} needs altup_proj.weight with three dimensions", "QK-E105")
    return projection.shape[2] + 1


def _first(b: Builder, x: Value, name: str) -> Value:
    return b.take(x, name, b.h.n_embd, 0)


def _other_streams(b: Builder, x: Value) -> Value:
    return b.take(x, "altup_others", x.width - b.h.n_embd, b.h.n_embd)


def _join(b: Builder, first: Value, other_streams: Value, name: str) -> Value:
    out = b.value(name, first.width + other_streams.width, first)
    b.add(Join(out=out, a=first, b=other_streams, period_a=first.width, period_b=other_streams.width))
    return out


def _repeat(b: Builder, x: Value, n: int) -> Value:
    """Return n copies of x side by side."""
    copies = x
    for i in range(n - 1):
        copies = _join(b, copies, x, f"{x.name.split('.')[-1]}_{i + 2}_times")
    return copies


def _project(b: Builder, like: Value, x: Value, name: str) -> Value:
    """Return each group of columns of x, multiplied by its own matrix and scaled to the length of ``like``."""
    weight = b.global_matrix(f"{name}.weight")
    projected = b.value(name, x.width, x)
    b.add(MulMatHeads(out=projected, x=x, weight=weight))
    out = b.value(f"{name}_like", x.width, x)
    b.add(ToLength(out=out, x=projected, like=like, group=like.width))
    return out
