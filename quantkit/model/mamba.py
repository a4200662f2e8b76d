"""The layers of hybrids with Mamba 2 (Granite 4): selective state spaces, and among them plain attention.

A layer of Mamba remembers a sequence in one matrix S [d_state, head] a head and in the last rows before a short
convolution. For every token:

    z, x b c, dt = parts of ssm_in x;  x, b, c = parts of silu(convolution along the sequence of x b c)
    dt = softplus(dt + ssm_dt);  S = exp(ssm_a dt) S;  S += b (dt x)^T;  y = S^T c + ssm_d x
    out = ssm_out rms_norm(y * silu(z))                (``ssm_a`` holds -exp(A_log))

Heads share b and c by groups, which the norm goes by, too. Sources: llama.cpp b11434 src/models/granite-hybrid.cpp,
mamba-base.cpp (build_mamba2_layer).
"""

from __future__ import annotations

from quantkit.errors import FormatError
from quantkit.model.attention import gqa
from quantkit.model.builder import Builder
from quantkit.model.ops import SsmScan, Value
from quantkit.model.recurrent import check_width, convolved, new_state


def mamba2_hybrid(b: Builder, x: Value) -> Value:
    """Add a layer of Mamba 2 where the metadata give no heads of keys, attention where they do."""
    return mamba2(b, x) if b.h.layer_int("attention.head_count_kv", b.layer, 1) == 0 else gqa(b, x)


def mamba2(b: Builder, x: Value) -> Value:
    """A layer of Mamba 2: the projection, convolution, the scan, a gated norm, and the output matrix.

    Raises FormatError if the metadata or shapes do not fit together.
    """
    n_head, n_group = b.h.int("ssm.time_step_rank"), b.h.int("ssm.group_count")
    width, d_state = b.h.int("ssm.inner_size"), b.h.int("ssm.state_size")
    if min(n_head, n_group, width, d_state) < 1 or width % n_head or n_head % n_group:
        raise FormatError(
            f"{b.source.paths[0]}: {n_head} heads in {n_group} groups, a state of {d_state}, and ssm.inner_size "
            f"{width} do not fit together"
        )
    shared = n_group * d_state
    both, mixed_width = b.mul_mat(x, "ssm_in"), width + 2 * shared
    check_width(b, both, width + mixed_width + n_head)
    mixed = convolved(b, b.take(both, "xbc", mixed_width, width), bias=True)
    out = b.value("ssm_scan", width, x)
    b.add(
        SsmScan(
            out=out,
            x=b.take(mixed, "x_convolved", width, 0),
            z=b.take(both, "z", width, 0),
            dt=b.take(both, "dt", n_head, width + mixed_width),
            b=b.take(mixed, "b_convolved", shared, width),
            c=b.take(mixed, "c_convolved", shared, width + shared),
            dt_bias=b.matrix("ssm_dt.bias"),
            a=b.matrix("ssm_a"),
            d=b.matrix("ssm_d"),
            state=new_state(b, "ssm", width * d_state),
            n_head=n_head,
            n_group=n_group,
        )
    )
    return b.mul_mat(b.norm(out, "ssm_norm", group=width // n_group), "ssm_out")
