"""The layers of MiniMax Text 01 and M1: lightning attention, and among them plain attention.

Lightning attention remembers a sequence in one matrix S [head, head] a head, which decays by a constant of the head and
of the layer. For every token, all heads' q, k, v being parts of silu(attn_qkv x):

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
from quantkit.model.recurrent import activated, check_width, gated, new_state


def lightning(b: Builder, x: Value) -> Value:
    """Add lightning attention, or plain attention where it is every eighth layer or the metadata say so.

    Raises FormatError if the metadata or shapes do not fit together.
    """
    if not is_recurrent(b, 8):
        return gqa(b, x)
    n, head = b.h.layer_int("attention.head_count", b.layer), b.h.head_k
    both = b.mul_mat(x, "attn_qkv", bias=False)
    check_width(b, both, 3 * n * head)
    both = activated(b, both, "silu")
    q, k, v = (b.take(both, name, n * head, i * head, 3 * head) for i, name in enumerate("qkv"))
    out = b.value("lightning", n * head, x)
    state = new_state(b, "lightning", n * head * head)
    b.add(SsmScan(out=out, x=v, b=k, c=q, a=_decays(b, n), state=state, n_head=n, n_group=n))
    gate = b.mul_mat(x, "attn_gate", bias=False)
    check_width(b, gate, n * head)
    return b.mul_mat(gated(b, b.norm(out, "attn_norm_2"), gate, "sigmoid"), "attn_output", bias=False)


def _decays(b: Builder, n: int) -> tuple[float, ...]:
    """Return the logarithm of what each head keeps: slopes as those of ALiBi, smaller from layer to layer."""
    start = np.float32(2.0 ** -(2.0 ** -(math.log2(n) - 3)))
    scale = np.float32(1.0 - b.layer / max(b.h.n_layer - 1, 1) + 1e-5)
    return tuple(float(-start * start ** np.float32(h) * scale) for h in range(n))
