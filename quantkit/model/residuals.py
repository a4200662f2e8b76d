"""Residual attention (Kimi K3): a layer reads a mixture of what the layers before it have added up.

Every ``attn_res.block_size`` layers the sum so far becomes a checkpoint, and a new sum begins with what attention adds.
Before attention, before the feed-forward layer and at the end the checkpoints x_i and the sum are mixed, with weights
for each token:

    softmax over i of (score . rms_norm(x_i)),   score being attn_res_score, ffn_res_score or output_res_score

The mixture is made one by one: with m of those up to i, and l the logarithm of the sum of their exponentials,
p = sigmoid(s - l) of the next one, m += p (x - m), l += softplus(s - l). Source: llama.cpp b11434
src/models/kimi-k3.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

from quantkit.model.builder import Builder
from quantkit.model.ops import Activate, Activation, Glu, Value


def add_layer_of_mixtures(
    b: Builder, x: Value, attention: Callable[[Builder, Value], Value], feed_forward: Callable[[Builder, Value], Value]
) -> Value:
    """Add the operations of the current layer; x: the sum so far, and what is returned."""
    size = b.h.int("attn_res.block_size", 0)
    attended = attention(b, b.norm(mixture(b, x, "attn_res_score"), "attn_norm"))
    if size > 0 and b.layer % size == 0:
        b.checkpoints.append(x)
        x = attended
    else:
        x = b.sum(x, attended, "attn_residual")
    return b.sum(feed_forward(b, b.norm(mixture(b, x, "ffn_res_score"), "ffn_norm")), x, "layer_out")


def mixture(b: Builder, x: Value, score: str) -> Value:
    """Return the mixture of the checkpoints and x; x alone while there are none."""
    if not b.checkpoints:
        b.maybe(f"{score}.weight")  # the first layer has one, too
        return x
    mixed, log_sum = b.checkpoints[0], _score(b, b.checkpoints[0], score)
    for i, more in enumerate([*b.checkpoints[1:], x]):
        difference = _minus(b, _score(b, more, score), log_sum, f"{score}_{i}_difference")
        part = b.value(f"{score}_{i}_part", x.width, x)
        gap = _minus(b, more, mixed, f"{score}_{i}_gap")
        b.add(Glu(out=part, gate=difference, up=gap, activation=Activation("sigmoid")))
        mixed = b.sum(mixed, part, f"{score}_{i}_mixed")
        grown = b.value(f"{score}_{i}_grown", 1, x)
        b.add(Activate(out=grown, x=difference, activation=Activation("softplus")))
        log_sum = b.sum(log_sum, grown, f"{score}_{i}_sum")
    return mixed


def _score(b: Builder, x: Value, name: str) -> Value:
    return b.mul_mat(b.plain_norm(x, x.width), name, scale=False, bias=False)


def _minus(b: Builder, x: Value, y: Value, name: str) -> Value:
    return b.sum(x, b.scaled(y, -1.0), name)
