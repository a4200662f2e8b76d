"""Hyper-connections: layers read a mixture of several residual streams (HY V4, DeepSeek 4).

A token has n streams of n_embd columns, side by side in one row; each begins as its embedding. Before attention, and
again before the feed-forward layer, with c = fn (the row, normalized as a whole):

    input    sum over streams i of (sigmoid(scale[0] c[i] + base[i]) + eps) * stream i
    stream i += (magnitude * sigmoid(scale[1] c[n + i] + base[n + i]) + eps) * output of the layer

In DeepSeek 4 every stream is also a mixture of all streams, by a doubly stochastic matrix of the token (Sinkhorn's
iteration, ops.StreamWeights), and the magnitude is 2, without eps:

    stream j  = sum over streams i of mixing[j, i] * stream i + 2 sigmoid(scale[1] c[n + j] + base[n + j]) * ...

After the last layer they are mixed as for an input. Sources: llama.cpp b11434 src/models/hy-v4.cpp, deepseek4.cpp.
"""

from __future__ import annotations

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.model.builder import Builder
from quantkit.model.ops import (
    Activate,
    Activation,
    Combine,
    Join,
    Matrix,
    Mix,
    MulMat,
    Repeat,
    Shift,
    StreamWeights,
    Value,
)


def init_streams(b: Builder, x: Value) -> Value:
    """Return the initial streams: n copies of x side by side."""
    streams = x
    for n in range(2, _n_streams(b) + 1):
        longer = b.value(f"streams_{n}", n * x.width, x)
        b.add(Join(out=longer, a=streams, b=x, period_a=streams.width, period_b=x.width))
        streams = longer
    return streams


def gather(b: Builder, streams: Value, part: str) -> tuple[Value, tuple[Value, ...]]:
    """Return the input of a layer's part (``attn`` or ``ffn``), and the weights of its output in each stream.

    If streams are mixed, the mixing matrix follows the weights.
    """
    n = _n_streams(b)
    normed = b.plain_norm(streams, streams.width)
    if b.arch.hyper_connections == "mixed":
        return _gather_mixed(b, streams, normed, f"hc_{part}")
    input_weights = _add_epsilon(b, _coefficients(b, normed, f"hc_{part}", (0, n), 0))
    output_weights = _coefficients(b, normed, f"hc_{part}", (n, 2 * n), 1)
    output_weights = _add_epsilon(b, b.scale(output_weights, b.h.float("hyper_connection.magnitude")))
    return _mix_streams(b, streams, input_weights, f"hc_{part}_input"), (output_weights,)


def _gather_mixed(b: Builder, streams: Value, normed: Value, name: str) -> tuple[Value, tuple[Value, ...]]:
    n = _n_streams(b)
    if n != 4:
        raise TypeNotSupported(
            f"{b.source.paths[0]}: {b.h.arch}.hyper_connection.count is {n}; 4 streams are supported, as in llama.cpp",
            "QK-E306",
        )
    scale, base = b.matrix(f"{name}_scale.weight"), b.matrix(f"{name}_base.weight")
    x = b.mul_mat(normed, f"{name}_fn", scale=False, bias=False)
    before, after = (b.value(f"{name}_{part}", n, streams) for part in ("before", "after"))
    mixing = b.value(f"{name}_across", n * n, streams)
    eps, rounds = b.h.float("hyper_connection.epsilon"), b.h.int("hyper_connection.sinkhorn_iterations")
    b.add(
        StreamWeights(
            before=before, after=after, mixing=mixing, x=x, scale=scale, base=base, eps=eps, rounds=max(1, rounds)
        )
    )
    return _mix_streams(b, streams, before, f"{name}_input"), (after, mixing)


def scatter(b: Builder, x: Value, streams: Value, weights: tuple[Value, ...], name: str) -> Value:
    """Return the streams, mixed if a mixing matrix is given, plus weighted x; counts: as ``gather`` returns them."""
    contribution = b.value(f"{name}_each", streams.width, x)
    b.add(Repeat(out=contribution, x=x, weights=weights[0]))
    if len(weights) == 1:
        return b.sum(streams, contribution, name)
    y = b.value(name, streams.width, x)
    b.add(Mix(out=y, x=streams, weights=weights[1], base=contribution, n=_n_streams(b)))
    return y


def merge_streams(b: Builder, streams: Value) -> Value:
    """Return the mixture of the streams that the logits are computed from."""
    normed = b.plain_norm(streams, streams.width)
    weights = _add_epsilon(b, _coefficients(b, normed, "output_hc", (0, _n_streams(b)), 0))
    return _mix_streams(b, streams, weights, "hc_output")


def _n_streams(b: Builder) -> int:
    n = b.h.int("hyper_connection.count")
    if n < 1:
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch}.hyper_connection.count is {n}; it must be positive", "QK-E123"
        )
    return n


def _coefficients(b: Builder, normed: Value, name: str, rows: tuple[int, int], scale_index: int) -> Value:
    """Return sigmoid(scale[scale_index] * (rows of fn) x + rows of base)."""
    start, end = rows
    product = b.value(f"{name}_{start}", end - start, normed)
    weight = b.matrix(f"{name}_fn.weight")
    scale, base = b.matrix(f"{name}_scale.weight").tensor, b.matrix(f"{name}_base.weight").tensor
    b.add(
        MulMat(
            out=product,
            x=normed,
            weight=Matrix(weight.tensor, rows),
            bias=Matrix(base, columns=rows),
            scale=Matrix(scale, columns=(scale_index, scale_index + 1)),
        )
    )
    y = b.value(f"{name}_{start}_sigmoid", product.width, normed)
    b.add(Activate(out=y, x=product, activation=Activation("sigmoid")))
    return y


def _add_epsilon(b: Builder, x: Value) -> Value:
    y = b.value(f"{x.name.split('.')[-1]}_shifted", x.width, x)
    b.add(Shift(out=y, x=x, offset=b.h.float("hyper_connection.epsilon")))
    return y


def _mix_streams(b: Builder, streams: Value, weights: Value, name: str) -> Value:
    y = b.value(name, b.h.n_embd, streams)
    b.add(Combine(out=y, x=streams, weights=weights))
    return y
