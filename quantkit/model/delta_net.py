"""Layers of Qwen3-Next and Qwen3.5: gated delta nets, in some layers gated attention.

The state of a delta net is one matrix S [head_k, head_v] per head and the last input rows of a short convolution; it
does not grow. For every token:

    q, k, v = silu(convolution along the sequence of the projection qkv);  q and k to the length 1
    g = -exp(A_log) softplus(a + dt)   (``ssm_a`` holds -exp(A_log))       beta = sigmoid(b)
    S = exp(g) S;  S += k (beta (v - S^T k))^T;  out = rms_norm(S^T q / sqrt(head_k)) * silu(z)

Attention layers project q and a gate of the same shape by one matrix, head by head; out = attention * sigmoid(gate).
Sources: llama.cpp b11434 src/models/qwen3next.cpp, qwen35moe.cpp, qwen35.cpp.
"""

from __future__ import annotations

import math

from quantkit.errors import FormatError
from quantkit.model.attention import HeadShape, attend, cache_kv, qkv, rope_config
from quantkit.model.builder import Builder
from quantkit.model.ops import DeltaNet, Join, MultiplyBy, Value
from quantkit.model.recurrent import activate, apply_gate, check_width, convolve_silu, new_state


def delta_net_hybrid(b: Builder, x: Value) -> Value:
    """Add a delta net or gated attention, depending on the current layer."""
    return delta_net(b, x) if is_recurrent(b) else gated_attention(b, x)


def gated_attention(b: Builder, x: Value) -> Value:
    """Add grouped-query attention with normalized q and k and a gate on its result."""
    n_head = b.h.layer_int("attention.head_count", b.layer)
    n_kv, head = b.h.layer_int("attention.head_count_kv", b.layer, n_head), b.h.head_k
    if b.h.head_v != head:
        raise FormatError(
            f"{b.source.paths[0]}: keys have {head} columns, but values {b.h.head_v}; both must be equal", "QK-E123"
        )
    q_gate, k, v = qkv(b, x, 2 * n_head * head, n_kv * head, n_kv * head)
    q = b.norm(b.take(q_gate, "attn_q_alone", n_head * head, 0, 2 * head), "attn_q_norm", group=head)
    gate = b.take(q_gate, "attn_gate", n_head * head, head, 2 * head)
    k = b.norm(k, "attn_k_norm", group=head)
    config = rope_config(b, head)
    q, k = b.rope(q, config, head), b.rope(k, config, head)
    attended = attend(b, q, cache_kv(b, k, v), HeadShape(n_head, n_kv, head, head), 1.0 / math.sqrt(head))
    return b.mul_mat(apply_gate(b, attended, gate, "sigmoid"), "attn_output", bias=False)


def is_recurrent(b: Builder, default_interval: int = 4) -> bool:
    """Return whether the current layer is recurrent: by a list in the metadata, or all but every n-th.

    A prediction layer has attention.
    """
    if b.layer >= b.h.n_layer:
        return False
    if b.h.get("attention.recurrent_layers", None) is not None:
        return b.h.layer_int("attention.recurrent_layers", b.layer) != 0
    interval = b.h.int("full_attention_interval", default_interval)
    if interval < 1:
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch}.full_attention_interval is {interval}; it must be positive", "QK-E123"
        )
    return (b.layer + 1) % interval != 0


def delta_net(b: Builder, x: Value) -> Value:
    """Add a gated delta net: projections, convolution, the recurrence, a gated norm, and the output matrix.

    Raises FormatError if the metadata or shapes are inconsistent.
    """
    n_k = b.h.int("ssm.group_count")
    n_v = b.h.int("ssm.time_step_rank")
    head = b.h.int("ssm.state_size")
    if n_k < 1 or n_v % n_k or b.h.int("ssm.inner_size") != n_v * head:
        raise FormatError(
            f"{b.source.paths[0]}: {n_k} key heads, {n_v} value heads of {head} columns, and ssm.inner_size "
            f"{b.h.int('ssm.inner_size')} are inconsistent",
            "QK-E123",
        )
    mixed, z = _projections(b, x, n_k, n_v, head)
    beta, g = _rates(b, x, n_k, n_v)
    q, k, v = _convolve_qkv(b, mixed, n_k * head, n_v * head)
    q, k = b.plain_norm(q, head, kind="l2"), b.plain_norm(k, head, kind="l2")
    out = b.value("delta_net", n_v * head, x)
    b.add(
        DeltaNet(
            out=out,
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            state=new_state(b, "delta", n_v * head * head),
            n_k_head=n_k,
            n_v_head=n_v,
            scale=1.0 / math.sqrt(head),
            tiled=b.arch.tiled_heads,
        )
    )
    out = apply_gate(b, b.norm(out, "ssm_norm", group=head), z, "silu")
    return b.mul_mat(out, "ssm_out", scale="ssm" in b.arch.tensor_scales)


def _projections(b: Builder, x: Value, n_k: int, n_v: int, head: int) -> tuple[Value, Value]:
    """Return q, k, v side by side, and z; ``ssm_in`` (old files) has q, k, v, z of each key head side by side."""
    if b.has("attn_qkv.weight"):
        b.ignore("ssm_in.weight")
        scale = "ssm" in b.arch.tensor_scales
        mixed, z = b.mul_mat(x, "attn_qkv", scale=scale), b.mul_mat(x, "attn_gate", scale=scale)
    else:
        qkvz, width = b.mul_mat(x, "ssm_in", scale=False), n_v * head // n_k
        check_width(b, qkvz, 2 * n_k * head + 2 * n_v * head)
        period = 2 * head + 2 * width
        q = b.take(qkvz, "q_flat", n_k * head, 0, period)
        k = b.take(qkvz, "k_flat", n_k * head, head, period)
        v = b.take(qkvz, "v_flat", n_v * head, 2 * head, period)
        z = b.take(qkvz, "z", n_v * head, 2 * head + width, period)
        mixed = _concat(b, "qkv_flat", _concat(b, "qk_flat", q, k), v)
    check_width(b, mixed, 2 * n_k * head + n_v * head)
    check_width(b, z, n_v * head)
    return mixed, z


def _rates(b: Builder, x: Value, n_k: int, n_v: int) -> tuple[Value, Value]:
    """Return beta (the write strength) and g (the logarithm of the decay) of every value head."""
    if b.arch.tiled_heads:
        beta = b.mul_mat(x, "ssm_beta", scale="ssm" in b.arch.tensor_scales)
        alpha = b.mul_mat(x, "ssm_alpha", scale="ssm" in b.arch.tensor_scales)
    else:
        beta_alpha, group = b.mul_mat(x, "ssm_ba", scale=False), n_v // n_k
        check_width(b, beta_alpha, 2 * n_v)
        beta = b.take(beta_alpha, "ssm_beta", n_v, 0, 2 * group)
        alpha = b.take(beta_alpha, "ssm_alpha", n_v, group, 2 * group)
    check_width(b, beta, n_v)
    check_width(b, alpha, n_v)
    shifted, g = b.value("alpha_shifted", n_v, x), b.value("decay", n_v, x)
    b.add(MultiplyBy(out=shifted, x=alpha, vector=b.matrix("ssm_dt.bias"), kind="plus"))
    b.add(MultiplyBy(out=g, x=activate(b, shifted, "softplus"), vector=b.matrix("ssm_a")))
    return activate(b, beta, "sigmoid"), g


def _convolve_qkv(b: Builder, mixed: Value, k_width: int, v_width: int) -> tuple[Value, Value, Value]:
    out = convolve_silu(b, mixed)
    q, k = b.take(out, "q_convolved", k_width, 0), b.take(out, "k_convolved", k_width, k_width)
    return q, k, b.take(out, "v_convolved", v_width, 2 * k_width)


def _concat(b: Builder, name: str, first: Value, second: Value) -> Value:
    y = b.value(name, first.width + second.width, first)
    b.add(Join(out=y, a=first, b=second, period_a=first.width, period_b=second.width))
    return y
