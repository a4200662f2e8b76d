"""Layers of Kimi Linear, Kimi K3 and Ling 3: delta attention, in some layers latent attention.

Delta attention has the state of a gated delta net (delta_net.py), one matrix S [head, head] per head, but every row of
S has its own decay, and q, k and v have separate convolutions. For every token:

    q, k, v = silu(convolution along the sequence of attn_q x, attn_k x, attn_v x);  q and k to the length 1
    g = -exp(A_log) softplus(f_b f_a x + dt)   (``ssm_a`` holds -exp(A_log))       beta = sigmoid(ssm_beta x)
    S = exp(g) S;  S += k (beta (v - S^T k))^T;  out = rms_norm(S^T q / sqrt(head)) * sigmoid(g_b g_a x)

K3 and Ling 3 compute the gate by one matrix and bound the decays: g = bound * sigmoid(exp(A_log) (f_b f_a x + dt)),
without f_b in Ling, whose ``ssm_a`` holds exp(A_log). K3 also has residual attention (residual_attention.py). Sources:
llama.cpp b11434 src/models/kimi-linear.cpp, kimi-k3.cpp, bailingmoe3.cpp.
"""

from __future__ import annotations

import math

from quantkit.errors import FormatError
from quantkit.model.attention import n_head_kv, qkv
from quantkit.model.builder import Builder
from quantkit.model.mla import mla_without_yarn
from quantkit.model.ops import DeltaNet, MultiplyBy, Value
from quantkit.model.recurrent import activate, apply_gate, check_width, convolve_silu, new_state


def kimi_linear(b: Builder, x: Value) -> Value:
    """Add delta attention if the metadata gives no key heads, latent attention if it does."""
    return delta_attention(b, x) if n_head_kv(b) == 0 else mla_without_yarn(b, x)


def delta_attention(b: Builder, x: Value) -> Value:
    """Add Kimi's delta attention: projections, convolutions, the recurrence, a gated norm, and the output matrix.

    Raises FormatError if the metadata or shapes are inconsistent.
    """
    n, head = b.h.n_head, b.h.int("kda.head_dim")
    if min(n, head) < 1:
        raise FormatError(f"{b.source.paths[0]}: {n} heads of {head} columns ({b.h.arch}.kda.head_dim)", "QK-E123")
    width = n * head
    projected = qkv(b, x, width, width, width)
    for part in projected:
        check_width(b, part, width)
    q, k, v = (convolve_silu(b, part, f"ssm_conv1d_{name}") for name, part in zip("qkv", projected, strict=True))
    q, k = b.plain_norm(q, head, kind="l2"), b.plain_norm(k, head, kind="l2")
    beta = activate(b, _mul_mat(b, x, "ssm_beta"), "sigmoid")
    out = b.value("delta_net", width, x)
    b.add(
        DeltaNet(
            out=out,
            q=q,
            k=k,
            v=v,
            g=_decays(b, x, head),
            beta=beta,
            state=new_state(b, "delta", width * head),
            n_k_head=n,
            n_v_head=n,
            scale=1.0 / math.sqrt(head),
        )
    )
    gate = _mul_mat(b, x, "ssm_g") if b.has("ssm_g.weight") else _low_rank(b, x, "ssm_g")
    check_width(b, gate, width)
    out = apply_gate(b, b.norm(out, "ssm_norm", group=head), gate, "sigmoid")
    return b.mul_mat(out, "attn_output", scale=False, bias=False)


def _decays(b: Builder, x: Value, head: int) -> Value:
    """Return g, the logarithm of the decay of every row of S."""
    raw = _low_rank(b, x, "ssm_f")
    check_width(b, raw, b.h.n_head * head)
    shifted = b.value("decay_shifted", raw.width, x)
    b.add(MultiplyBy(out=shifted, x=raw, vector=b.matrix("ssm_dt.bias"), kind="plus"))
    bound = b.h.float("kda.gate_lower_bound", -math.inf) if b.arch.bounded_decay else -math.inf
    if bound == -math.inf:
        return _scale_heads(b, activate(b, shifted, "softplus"), head, "decay")
    raw = b.scale(_scale_heads(b, shifted, head, "decay_raw"), float(b.arch.bounded_decay))
    return b.scale(activate(b, raw, "sigmoid"), bound)


def _scale_heads(b: Builder, x: Value, head: int, name: str) -> Value:
    """Multiply every head's columns by its value of ``ssm_a``."""
    y = b.value(name, x.width, x)
    b.add(MultiplyBy(out=y, x=x, vector=b.matrix("ssm_a"), repeat=head))
    return y


def _low_rank(b: Builder, x: Value, name: str) -> Value:
    """Multiply by ``name_a``, and by ``name_b`` if the file has it."""
    first = _mul_mat(b, x, f"{name}_a")
    return _mul_mat(b, first, f"{name}_b") if b.has(f"{name}_b.weight") else first


def _mul_mat(b: Builder, x: Value, name: str) -> Value:
    return b.mul_mat(x, name, scale=False, bias=False)
