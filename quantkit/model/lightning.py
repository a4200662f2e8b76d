"""Layers of MiniMax Text 01 and M1: lightning attention, in some layers softmax attention.

The state of lightning attention is one matrix S [head, head] per head, with a constant decay for each head and layer.
For every token, q, k, v of all heads being parts of silu(attn_qkv x):

    S = exp(-slope) S + k v^T;  out = attn_output(sigmoid(attn_gate x) * rms_norm(S^T q))

Source: llama.cpp b11434 src/models/minimax-01.cpp.
"""

from __future__ import annotations

import math

import numpy as np

from quantkit.model.attention import gqa
from quantkit.model.builder import Builder
from quantkit.model.delta_net import is_recurrent
from quantkit.model.ops import SsmScan, Value
from quantkit.model.recurrent import activate, apply_gate, check_width, new_state


def lightning_hybrid(b: Builder, x: Value) -> Value:
    """Add lightning attention, or softmax attention in every eighth layer or as set in the metadata.

    Raises FormatError if the metadata or shapes are inconsistent.
    """
    if not is_recurrent(b, 8):
        return gqa(b, x)
    n, head = b.h.layer_int("attention.head_count", b.layer), b.h.head_k
    qkv = b.mul_mat(x, "attn_qkv", scale=False, bias=False)
    check_width(b, qkv, 3 * n * head)
    qkv = activate(b, qkv, "silu")
    q, k, v = (b.take(qkv, name, n * head, i * head, 3 * head) for i, name in enumerate("qkv"))
    out = b.value("lightning", n * head, x)
    state = new_state(b, "lightning", n * head * head)
    b.add(SsmScan(out=out, x=v, b=k, c=q, a=_decays(b, n), state=state, n_head=n, n_group=n))
    gate = b.mul_mat(x, "attn_gate", scale=False, bias=False)
    check_width(b, gate, n * head)
    return b.mul_mat(apply_gate(b, b.norm(out, "attn_norm_2"), gate, "sigmoid"), "attn_output", scale=False, bias=False)


def _decays(b: Builder, n: int) -> tuple[float, ...]:
    """Return the logarithm of each head's decay: ALiBi's slopes, scaled down from layer to layer."""
    start = np.float32(2.0 ** -(2.0 ** -(math.log2(n) - 3)))
    scale = np.float32(1.0 - b.layer / max(b.h.n_layer - 1, 1) + 1e-5)
    return tuple(float(-start * start ** np.float32(h) * scale) for h in range(n))
