"""What only Gemma 3n has: several residual streams (AltUp), a second way around attention of low rank (LAuReL), sparse
gates, and inputs of every layer beside its own, as Gemma 4 has them.

    streams     a layer gets n rows a token, side by side in one value. It predicts all of them from a mixture by
                weights of the token, computes with the first alone, and corrects the others by what came out.
    first, last the other streams begin as projections of the embeddings with the length of these, and end so, too; the
                output is the mean of all.
    LAuReL      what attention reads goes through two narrow matrices as well, and both are added.
    gates       of the first layers only what exceeds the row's mean by some deviations passes.

Where the metadata say otherwise than the constants here, llama.cpp ignores them. Source: llama.cpp b11434
src/models/gemma3n.cpp, models.h.
"""

from __future__ import annotations

import math

from quantkit.errors import FormatError
from quantkit.model.builder import Builder
from quantkit.model.gemma4 import gemma4, made_of_layer_input
from quantkit.model.ops import Activation, Exceed, Glu, Join, Mix, MulMatHeads, Softcap, ToLength, Value

#: Layers with sparse gates, and how many deviations above the mean they begin (95 % of a normal distribution).
N_SPARSE, DEVIATIONS = 10, 1.6448533535003662


def streams(b: Builder, x: Value) -> Value:
    """Return the streams of the first layer, side by side, for x, the embeddings; FormatError without layer inputs."""
    if not b.per_layer:
        raise FormatError(f"{b.source.paths[0]}: {b.h.arch}.embedding_length_per_layer_input must be above 0")
    return _join(b, x, _projected(b, x, _repeated(b, x, _n(b) - 1), "altup_proj"), "embeddings")


def merged(b: Builder, x: Value) -> Value:
    """Return the mean of the streams after the last layer."""
    first = _first(b, x, "altup_first")
    rest = _projected(b, first, _others(b, x), "altup_unembd_proj")
    total = first
    for i in range(_n(b) - 1):
        total = b.sum(total, b.take(rest, f"altup_{i + 1}", first.width, i * first.width), f"altup_sum_{i + 1}")
    return b.scaled(total, 1.0 / _n(b))


def add_altup_layer(b: Builder, x: Value) -> Value:
    """Add the operations of the current layer, for all streams, and return them."""
    predicted = _predicted(b, x)
    active = _first(b, predicted, "active")
    normed = b.norm(active, "attn_norm")
    around = b.sum(_laurel(b, normed), normed, "laurel")
    attended = gemma4(b, normed)
    if b.layer == b.h.n_layer - 1:
        attended, active, around, predicted = (b.selected(v) for v in (attended, active, around, predicted))
    middle = b.sum(b.norm(attended, "post_attention_norm"), active, "attended_active")
    middle = b.scaled(b.sum(middle, around, "attn_residual"), 1.0 / math.sqrt(2.0))
    fed = b.norm(_feed_forward(b, b.norm(middle, "ffn_norm")), "post_ffw_norm")
    corrected = _corrected(b, predicted, active, b.sum(fed, middle, "stream_out"))
    return _with_layer_input(b, corrected)


# ---------------------------------------------------------------- a layer


def _laurel(b: Builder, x: Value) -> Value:
    return b.norm(b.mul_mat(b.mul_mat(x, "laurel_l"), "laurel_r"), "laurel_post_norm")


def _feed_forward(b: Builder, x: Value) -> Value:
    gate, up = b.mul_mat(x, "ffn_gate"), b.mul_mat(x, "ffn_up")
    if b.layer < N_SPARSE:
        few = b.value("ffn_gate_sparse", gate.width, gate)
        b.add(Exceed(out=few, x=gate, factor=DEVIATIONS))
        gate = few
    hidden = b.value("ffn_hidden", up.width, up)
    b.add(Glu(out=hidden, gate=gate, up=up, activation=Activation(b.arch.activation)))
    return b.mul_mat(hidden, "ffn_down")


def _with_layer_input(b: Builder, x: Value) -> Value:
    """Add to all streams but the first what that one makes of the layer's second input."""
    first = _first(b, x, "corrected_first")
    made = made_of_layer_input(b, b.times(first, "altup_correct_scale.weight", "corrected_scaled"))
    return _join(b, first, b.sum(_others(b, x), _repeated(b, made, _n(b) - 1), "layer_out_others"), "layer_out")


def _weights(b: Builder, x: Value, name: str, out: str) -> Value:
    """Return the weights of a mixture of streams that a row of the active one asks for."""
    normed = b.scaled(b.norm(x, "altup_router_norm", out=f"{out}_normed"), 1.0 / b.h.n_embd)
    logits = b.mul_mat(normed, "altup_router", out=f"{out}_logits")
    modalities = b.value(f"{out}_modalities", logits.width, logits)
    b.add(Softcap(out=modalities, x=logits, cap=1.0))
    return b.mul_mat(modalities, name, out=f"{out}_weights")


def _predicted(b: Builder, x: Value) -> Value:
    weights = _weights(b, _first(b, x, "last_first"), "altup_predict_coef", "predict")
    out = b.value("predicted", x.width, x)
    b.add(Mix(out=out, x=x, weights=weights, base=x, n=_n(b)))
    return out


def _corrected(b: Builder, predicted: Value, active: Value, made: Value) -> Value:
    """Return the streams with their shares of what is new: 1 + weight times the difference of made and active."""
    new = b.sum(made, b.scaled(active, -1.0), "innovation")
    weights = _weights(b, made, "altup_correct_coef", "correct")
    out = b.value("corrected", predicted.width, predicted)
    b.add(Mix(out=out, x=new, weights=weights, base=predicted, n=1, offset=1.0))
    return out


# ---------------------------------------------------------------- streams


def _n(b: Builder) -> int:
    """Return the number of streams; FormatError if it is none."""
    found = b.source.tensors.get("altup_proj.weight")
    if found is None or len(found.shape) != 3:
        raise FormatError(f"{b.source.paths[0]}: {b.h.arch} needs altup_proj.weight, of three dimensions")
    return found.shape[2] + 1


def _first(b: Builder, x: Value, name: str) -> Value:
    return b.take(x, name, b.h.n_embd, 0)


def _others(b: Builder, x: Value) -> Value:
    return b.take(x, "altup_others", x.width - b.h.n_embd, b.h.n_embd)


def _join(b: Builder, first: Value, others: Value, name: str) -> Value:
    out = b.value(name, first.width + others.width, first)
    b.add(Join(out=out, a=first, b=others, period_a=first.width, period_b=others.width))
    return out


def _repeated(b: Builder, x: Value, n: int) -> Value:
    """Return n copies of x side by side."""
    copies = x
    for i in range(n - 1):
        copies = _join(b, copies, x, f"{x.name.split('.')[-1]}_{i + 2}_times")
    return copies


def _projected(b: Builder, like: Value, x: Value, name: str) -> Value:
    """Return every group of columns of x through a matrix of its own, with the length of like."""
    weight = b.outside(f"{name}.weight")
    projected = b.value(name, x.width, x)
    b.add(MulMatHeads(out=projected, x=x, weight=weight))
    out = b.value(f"{name}_like", x.width, x)
    b.add(ToLength(out=out, x=projected, like=like, group=like.width))
    return out
