"""The layers of Qwen3-Next and Qwen3.5: gated delta nets, and among them attention with a gate.

A delta net remembers a sequence in one matrix S [head_k, head_v] a head and in the last rows before a short
convolution, so that its memory does not grow. For every token:

    q, k, v = silu(convolution along the sequence of the projection qkv);  q and k to the length 1
    g = -exp(A_log) softplus(a + dt)   (``ssm_a`` holds -exp(A_log))       beta = sigmoid(b)
    S = exp(g) S;  S += k (beta (v - S^T k))^T;  out = rms_norm(S^T q / sqrt(head_k)) * silu(z)

A layer that attends takes q and a gate of the same shape from one matrix, head by head side by side; the sigmoid of
the gate multiplies attention's result. Sources: llama.cpp b11434 src/models/qwen3next.cpp, qwen35moe.cpp, qwen35.cpp.
"""

from __future__ import annotations

import math

from quantkit.errors import FormatError
from quantkit.model.attention import attend, keep, qkv, rope_config
from quantkit.model.builder import Builder
from quantkit.model.ops import DeltaNet, Join, MultiplyBy, Value
from quantkit.model.recurrent import activated, check_width, convolved, gated, new_state


def delta_nets(b: Builder, x: Value) -> Value:
    """Add a delta net or gated attention, whichever the current layer is."""
    return delta_net(b, x) if is_recurrent(b) else gated_attention(b, x)


def gated_attention(b: Builder, x: Value) -> Value:
    """Attention with grouped queries, normalized q and k, and a gate on its result."""
    n_head = b.h.layer_int("attention.head_count", b.layer)
    n_kv, head = b.h.layer_int("attention.head_count_kv", b.layer, n_head), b.h.head_k
    if b.h.head_v != head:
        raise FormatError(f"{b.source.paths[0]}: keys have {head} columns, values {b.h.head_v}; here they are equal")
    both, k, v = qkv(b, x, 2 * n_head * head, n_kv * head, n_kv * head)
    q = b.norm(b.take(both, "attn_q_alone", n_head * head, 0, 2 * head), "attn_q_norm", group=head)
    gate = b.take(both, "attn_gate", n_head * head, head, 2 * head)
    k = b.norm(k, "attn_k_norm", group=head)
    config = rope_config(b, head)
    q, k = b.rope(q, config, head), b.rope(k, config, head)
    attended = attend(b, q, keep(b, k, v), n_head, n_kv, head, head, 1.0 / math.sqrt(head))
    return b.mul_mat(gated(b, attended, gate, "sigmoid"), "attn_output", bias=b.arch.output_bias)


def is_recurrent(b: Builder, every: int = 4) -> bool:
    """Tell whether the current layer is a delta net: by a list in the metadata, or all but every n-th.

    A prediction layer attends.
    """
    if b.layer >= b.h.n_layer:
        return False
    if b.h.get("attention.recurrent_layers", None) is not None:
        return b.h.layer_int("attention.recurrent_layers", b.layer) != 0
    interval = b.h.int("full_attention_interval", every)
    if interval < 1:
        raise FormatError(f"{b.source.paths[0]}: {b.h.arch}.full_attention_interval is {interval}; it must be positive")
    return (b.layer + 1) % interval != 0


def delta_net(b: Builder, x: Value) -> Value:
    """A gated delta net: projections, convolution, the recurrence, a gated norm, and the output matrix.

    Raises FormatError if the metadata or shapes do not fit together.
    """
    n_k, n_v, head = b.h.int("ssm.group_count"), b.h.int("ssm.time_step_rank"), b.h.int("ssm.state_size")
    if n_k < 1 or n_v % n_k or b.h.int("ssm.inner_size") != n_v * head:
        raise FormatError(
            f"{b.source.paths[0]}: {n_k} key heads, {n_v} value heads of {head} columns, and ssm.inner_size "
            f"{b.h.int('ssm.inner_size')} do not fit together"
        )
    mixed, z = _projections(b, x, n_k, n_v, head)
    beta, g = _rates(b, x, n_k, n_v)
    q, k, v = _convolved(b, mixed, n_k * head, n_v * head)
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
    out = gated(b, b.norm(out, "ssm_norm", group=head), z, "silu")
    return b.mul_mat(out, "ssm_out", scale="ssm" in b.arch.tensor_scales)


def _projections(b: Builder, x: Value, n_k: int, n_v: int, head: int) -> tuple[Value, Value]:
    """Return q, k, v side by side, and z; of ``ssm_in`` (old files) every key head has its own q, k, v, z."""
    if b.has("attn_qkv.weight"):
        b.maybe("ssm_in.weight")  # llama.cpp reads it and uses the others
        scale = "ssm" in b.arch.tensor_scales
        mixed, z = b.mul_mat(x, "attn_qkv", scale=scale), b.mul_mat(x, "attn_gate", scale=scale)
    else:
        both, width = b.mul_mat(x, "ssm_in", scale=False), n_v * head // n_k
        check_width(b, both, 2 * n_k * head + 2 * n_v * head)
        period = 2 * head + 2 * width
        q = b.take(both, "q_flat", n_k * head, 0, period)
        k = b.take(both, "k_flat", n_k * head, head, period)
        v = b.take(both, "v_flat", n_v * head, 2 * head, period)
        z = b.take(both, "z", n_v * head, 2 * head + width, period)
        mixed = _beside(b, "qkv_flat", _beside(b, "qk_flat", q, k), v)
    check_width(b, mixed, 2 * n_k * head + n_v * head)
    check_width(b, z, n_v * head)
    return mixed, z


def _rates(b: Builder, x: Value, n_k: int, n_v: int) -> tuple[Value, Value]:
    """Return beta, how much of a value is learned, and g, the logarithm of what is kept, of every value head."""
    if b.arch.tiled_heads:
        beta = b.mul_mat(x, "ssm_beta", scale="ssm" in b.arch.tensor_scales)
        alpha = b.mul_mat(x, "ssm_alpha", scale="ssm" in b.arch.tensor_scales)
    else:
        both, group = b.mul_mat(x, "ssm_ba", scale=False), n_v // n_k
        check_width(b, both, 2 * n_v)
        beta = b.take(both, "ssm_beta", n_v, 0, 2 * group)
        alpha = b.take(both, "ssm_alpha", n_v, group, 2 * group)
    check_width(b, beta, n_v)
    check_width(b, alpha, n_v)
    shifted, g = b.value("alpha_shifted", n_v, x), b.value("decay", n_v, x)
    b.add(MultiplyBy(out=shifted, x=alpha, vector=b.matrix("ssm_dt.bias"), add=True))
    b.add(MultiplyBy(out=g, x=activated(b, shifted, "softplus"), vector=b.matrix("ssm_a")))
    return activated(b, beta, "sigmoid"), g


def _convolved(b: Builder, mixed: Value, k_width: int, v_width: int) -> tuple[Value, Value, Value]:
    out = convolved(b, mixed)
    q, k = b.take(out, "q_convolved", k_width, 0), b.take(out, "k_convolved", k_width, k_width)
    return q, k, b.take(out, "v_convolved", v_width, 2 * k_width)


def _beside(b: Builder, name: str, first: Value, second: Value) -> Value:
    y = b.value(name, first.width + second.width, first)
    b.add(Join(out=y, a=first, b=second, period_a=first.width, period_b=second.width))
    return y
