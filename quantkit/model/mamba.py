"""Layers of Mamba and Mamba 2 (selective state spaces), and hybrids with attention: in other layers (Granite 4, Jamba,
Nemotron H) or in parallel in every layer (Falcon H1).

A layer keeps a state S and the last rows before a short convolution. In Mamba 2 that is a matrix [d_state, head] a
head. For every token:

    z, x b c, dt = parts of ssm_in x;  x, b, c = parts of silu(convolution along the sequence of x b c)
    dt = softplus(dt + ssm_dt);  S = exp(ssm_a dt) S;  S += b (dt x)^T;  y = S^T c + ssm_d x
    out = ssm_out rms_norm(y * silu(z))                (``ssm_a`` holds -exp(A_log))

Heads of a group share b and c, and the norm is per group; Falcon H1 may lack it. In Mamba every column is a head with
its own decay for every row of S, the steps are projected from a short row, and the output is not normalized:

    x, z = parts of ssm_in x;  x = silu(convolution of x);  dt, b, c = parts of ssm_x x   (normalized in Jamba, Falcon)
    dt = softplus(ssm_dt dt + bias);  S = exp(ssm_a dt) S;  S += b dt x;  y = S^T c + ssm_d x
    out = ssm_out(y * silu(z))

Sources: llama.cpp b11434 src/models/mamba-base.cpp, granite-hybrid.cpp, mamba.cpp, jamba.cpp, falcon-h1.cpp,
nemotron-h.cpp, plamo2.cpp.
"""

from __future__ import annotations

from quantkit.errors import FormatError
from quantkit.model.attention import gqa, n_head_kv
from quantkit.model.builder import Builder
from quantkit.model.feed_forward import feed_forward
from quantkit.model.ops import ColumnScan, SsmScan, Value
from quantkit.model.recurrent import check_width, convolve_silu, new_state


def mamba2_hybrid(b: Builder, x: Value) -> Value:
    """Add a Mamba 2 layer if the metadata gives no key heads, attention if it does."""
    return mamba2(b, x) if b.h.layer_int("attention.head_count_kv", b.layer, 1) == 0 else gqa(b, x)


def mamba_hybrid(b: Builder, x: Value) -> Value:
    """Add a Mamba layer if the metadata gives no key heads, attention if it does."""
    return mamba(b, x) if n_head_kv(b) == 0 else gqa(b, x)


def mamba2_parallel(b: Builder, x: Value) -> Value:
    """Add attention and Mamba 2 in parallel on the same input (Falcon H1)."""
    return b.sum(gqa(b, x), mamba2(b, x), "attended_and_scanned")


def nemotron_h(b: Builder, x: Value) -> Value:
    """Add the layer's block: feed-forward if the metadata gives its width, else Mamba 2 or attention."""
    return feed_forward(b, x) if b.h.layer_int("feed_forward_length", b.layer, 0) else mamba2_hybrid(b, x)


def mamba2(b: Builder, x: Value) -> Value:
    """Add a layer of Mamba 2: the projection, convolution, the scan, a gated norm, and the output matrix.

    Raises FormatError if the metadata or shapes are inconsistent.
    """
    n_head, n_group = b.h.int("ssm.time_step_rank"), b.h.int("ssm.group_count")
    width, d_state = b.h.int("ssm.inner_size"), b.h.int("ssm.state_size")
    if min(n_head, n_group, width, d_state) < 1 or width % n_head or n_head % n_group:
        raise FormatError(
            f"{b.source.paths[0]}: {n_head} heads in {n_group} groups, a state of {d_state}, and ssm.inner_size "
            f"{width} are inconsistent",
            "QK-E123",
        )
    shared = n_group * d_state
    zxbcdt, mixed_width = b.mul_mat(x, "ssm_in"), width + 2 * shared
    check_width(b, zxbcdt, width + mixed_width + n_head)
    mixed = convolve_silu(b, b.take(zxbcdt, "xbc", mixed_width, width), bias=True)
    out = b.value("ssm_scan", width, x)
    b.add(
        SsmScan(
            out=out,
            x=b.take(mixed, "x_convolved", width, 0),
            z=b.take(zxbcdt, "z", width, 0),
            dt=b.take(zxbcdt, "dt", n_head, width + mixed_width),
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
    if b.has("ssm_norm.weight") or not b.arch.scan_norm_optional:
        out = b.norm(out, "ssm_norm", group=width // n_group)
    return b.mul_mat(out, "ssm_out")


def mamba(b: Builder, x: Value) -> Value:
    """Add a layer of Mamba: the projection, convolution, steps, the scan, and the output matrix.

    Raises FormatError if the metadata or shapes are inconsistent.
    """
    width = b.h.int("ssm.inner_size")
    d_state = b.h.int("ssm.state_size")
    rank = b.h.int("ssm.time_step_rank")
    if min(width, d_state, rank) < 1:
        raise FormatError(
            f"{b.source.paths[0]}: ssm.inner_size {width}, a state of {d_state} and ssm.time_step_rank {rank}: all "
            "must be positive",
            "QK-E123",
        )
    xz = b.mul_mat(x, "ssm_in")
    check_width(b, xz, 2 * width)
    mixed = convolve_silu(b, b.take(xz, "x", width, 0), bias=True)
    parts = b.mul_mat(mixed, "ssm_x", scale=False, bias=False)
    check_width(b, parts, rank + 2 * d_state)
    starts = (("dt", rank, 0), ("b", d_state, rank), ("c", d_state, rank + d_state))
    dt_row, b_row, c_row = (
        _maybe_norm(b, b.take(parts, f"ssm_{name}_row", n, start), name) for name, n, start in starts
    )
    out = b.value("ssm_scan", width, x)
    b.add(
        ColumnScan(
            out=out,
            x=mixed,
            z=b.take(xz, "z", width, width),
            dt=b.mul_mat(dt_row, "ssm_dt", scale=False),
            b=b_row,
            c=c_row,
            a=b.matrix("ssm_a"),
            d=b.matrix("ssm_d"),
            state=new_state(b, "ssm", width * d_state),
        )
    )
    return b.mul_mat(out, "ssm_out")


def plamo2(b: Builder, x: Value) -> Value:
    """Add a layer of PLaMo 2's Mamba if the metadata gives no key heads, attention if it does.

    Steps are per head, as in Mamba 2, but are projected, with b and c, from a short row, as in Mamba:

        z, x = halves of every head's part of ssm_in x;  x = silu(convolution of x)
        b, c, dt = parts of ssm_x x, normalized;  dt = ssm_dt dt;  y = the scan;  out = ssm_out y

    Raises FormatError if the metadata or shapes are inconsistent.
    """
    if n_head_kv(b):
        return gqa(b, x)
    n_head = b.h.int("ssm.time_step_rank")
    width = b.h.int("ssm.inner_size")
    d_state = b.h.int("ssm.state_size")
    if min(n_head, width, d_state) < 1 or width % n_head:
        raise FormatError(
            f"{b.source.paths[0]}: {n_head} heads, a state of {d_state}, and ssm.inner_size {width} are inconsistent",
            "QK-E123",
        )
    zx, head = b.mul_mat(x, "ssm_in"), width // n_head
    check_width(b, zx, 2 * width)
    mixed = convolve_silu(b, b.take(zx, "x", width, head, 2 * head))
    parts = b.mul_mat(mixed, "ssm_x", scale=False, bias=False)
    rank = parts.width - 2 * d_state
    check_width(b, parts, max(rank, 1) + 2 * d_state)
    starts = (("b", d_state, 0), ("c", d_state, d_state), ("dt", rank, 2 * d_state))
    b_row, c_row, dt_row = (
        b.norm(b.take(parts, f"ssm_{name}_row", n, start), f"ssm_{name}_norm") for name, n, start in starts
    )
    out = b.value("ssm_scan", width, x)
    b.add(
        SsmScan(
            out=out,
            x=mixed,
            z=b.take(zx, "z", width, 0, 2 * head),
            dt=b.mul_mat(dt_row, "ssm_dt", scale=False, bias=False),
            b=b_row,
            c=c_row,
            dt_bias=b.matrix("ssm_dt.bias"),
            a=b.matrix("ssm_a"),
            d=b.matrix("ssm_d"),
            state=new_state(b, "ssm", width * d_state),
            n_head=n_head,
            n_group=1,
        )
    )
    return b.mul_mat(out, "ssm_out")


def _maybe_norm(b: Builder, x: Value, name: str) -> Value:
    """Normalize a part if all parts have norms; without weights if ``ssm.dt_b_c_rms`` is set (Falcon Mamba)."""
    if all(b.has(f"ssm_{part}_norm.weight") for part in ("dt", "b", "c")):
        return b.norm(x, f"ssm_{name}_norm")
    return b.plain_norm(x, x.width) if b.h.flag("ssm.dt_b_c_rms") else x
