"""Residual attention (Kimi K3): layers read a weighted mixture of earlier residual sums.

Every ``attn_res.block_size`` layers the residual sum is stored as a block sum, and a new sum starts with the output of
attention. Before attention, before the feed-forward layer and at the end, the block sums x_i and the current sum are
mixed, with weights for each token:

    softmax over i of (score . rms_norm(x_i)),   score being attn_res_score, ffn_res_score or output_res_score

The mixture is computed one by one: m is the mixture up to i, l the log-sum-exp of its scores; for the next x with score
s, p = sigmoid(s - l), m += p (x - m), l += softplus(s - l). Source: llama.cpp b11434
src/models/kimi-k3.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

from quantkit.model.builder import Builder
from quantkit.model.ops import Activate, Activation, Glu, Value


def add_residual_attention_layer(
    b: Builder, x: Value, attention: Callable[[Builder, Value], Value], feed_forward: Callable[[Builder, Value], Value]
) -> Value:
    """Add the operations of the current layer; x and the result are the current residual sum."""
    size = b.h.int("attn_res.block_size", 0)
    attended = attention(b, b.norm(mix_block_sums(b, x, "attn_res_score"), "attn_norm"))
    if size > 0 and b.layer % size == 0:
        b.block_sums.append(x)
        x = attended
    else:
        x = b.sum(x, attended, "attn_residual")
    return b.sum(feed_forward(b, b.norm(mix_block_sums(b, x, "ffn_res_score"), "ffn_norm")), x, "layer_out")


def mix_block_sums(b: Builder, x: Value, score: str) -> Value:
    """Return the mixture of the block sums and x; x itself before the first block sum."""
    if not b.block_sums:
        b.ignore(f"{score}.weight")  # present in the first layer, too
        return x
    mixed, log_sum = b.block_sums[0], _score(b, b.block_sums[0], score)
    for i, block_sum in enumerate([*b.block_sums[1:], x]):
        difference = _subtract(b, _score(b, block_sum, score), log_sum, f"{score}_{i}_difference")
        part = b.value(f"{score}_{i}_part", x.width, x)
        gap = _subtract(b, block_sum, mixed, f"{score}_{i}_gap")
        b.add(Glu(out=part, gate=difference, up=gap, activation=Activation("sigmoid")))
        mixed = b.sum(mixed, part, f"{score}_{i}_mixed")
        increment = b.value(f"{score}_{i}_grown", 1, x)
        b.add(Activate(out=increment, x=difference, activation=Activation("softplus")))
        log_sum = b.sum(log_sum, increment, f"{score}_{i}_sum")
    return mixed


def _score(b: Builder, x: Value, name: str) -> Value:
    return b.mul_mat(b.plain_norm(x, x.width), name, scale=False, bias=False)


def _subtract(b: Builder, x: Value, y: Value, name: str) -> Value:
    return b.sum(x, b.scale(y, -1.0), name)
