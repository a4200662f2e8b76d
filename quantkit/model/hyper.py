"""Hyper-connections: several streams of rows run beside the layers, which read a mixture of them (HY V4, DeepSeek 4).

A token has n streams of n_embd columns, side by side in one row; each begins as its embedding. Before attention, and
again before the feed-forward layer, with c = fn (the row, normalized as a whole):

    input    sum over streams i of (sigmoid(scale[0] c[i] + base[i]) + eps) * stream i
    stream i += (magnitude * sigmoid(scale[1] c[n + i] + base[n + i]) + eps) * what the layer gives

In DeepSeek 4 each is also made of all streams before, by a matrix of the token's whose rows and columns add up to 1
(Sinkhorn's iteration, ops.StreamWeights), and the magnitude is 2, without eps:

    stream j  = sum over streams i of across[j, i] * stream i + 2 sigmoid(scale[1] c[n + j] + base[n + j]) * ...

After the last layer they are mixed as an input is. Sources: llama.cpp b11434 src/models/hy-v4.cpp, deepseek4.cpp.
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


def spread(b: Builder, x: Value) -> Value:
    """Return the streams of an embedding: x, as often as there are."""
    streams = x
    for n in range(2, _streams(b) + 1):
        longer = b.value(f"streams_{n}", n * x.width, x)
        b.add(Join(out=longer, a=streams, b=x, period_a=streams.width, period_b=x.width))
        streams = longer
    return streams


def gather(b: Builder, streams: Value, of: str) -> tuple[Value, tuple[Value, ...]]:
    """Return the input of a layer's part, ``attn`` or ``ffn``, and what its result counts in each stream.

    With that, if streams are mixed, how much of each is in each.
    """
    n = _streams(b)
    normed = b.plain_norm(streams, streams.width)
    if b.arch.hyper == "mixed":
        return _gather_mixed(b, streams, normed, f"hc_{of}")
    before = _shifted(b, _coefficients(b, normed, f"hc_{of}", (0, n), 0))
    after = _coefficients(b, normed, f"hc_{of}", (n, 2 * n), 1)
    after = _shifted(b, b.scaled(after, b.h.float("hyper_connection.magnitude")))
    return _mixed(b, streams, before, f"hc_{of}_input"), (after,)


def _gather_mixed(b: Builder, streams: Value, normed: Value, name: str) -> tuple[Value, tuple[Value, ...]]:
    n = _streams(b)
    if n != 4:
        raise TypeNotSupported(
            f"{b.source.paths[0]}: {b.h.arch}.hyper_connection.count is {n}; 4 streams are what can be mixed here, and "
            "in llama.cpp"
        )
    scale, base = b.matrix(f"{name}_scale.weight"), b.matrix(f"{name}_base.weight")
    x = b.mul_mat(normed, f"{name}_fn", scale=False, bias=False)
    before, after = (b.value(f"{name}_{part}", n, streams) for part in ("before", "after"))
    across = b.value(f"{name}_across", n * n, streams)
    eps, rounds = b.h.float("hyper_connection.epsilon"), b.h.int("hyper_connection.sinkhorn_iterations")
    b.add(
        StreamWeights(
            before=before, after=after, across=across, x=x, scale=scale, base=base, eps=eps, rounds=max(1, rounds)
        )
    )
    return _mixed(b, streams, before, f"{name}_input"), (after, across)


def scatter(b: Builder, x: Value, streams: Value, counts: tuple[Value, ...], name: str) -> Value:
    """Return the streams, mixed if they are, with x, times its count in each, added; counts: what ``gather`` gave."""
    each = b.value(f"{name}_each", streams.width, x)
    b.add(Repeat(out=each, x=x, weights=counts[0]))
    if len(counts) == 1:
        return b.sum(streams, each, name)
    y = b.value(name, streams.width, x)
    b.add(Mix(out=y, x=streams, weights=counts[1], base=each, n=_streams(b)))
    return y


def head(b: Builder, streams: Value) -> Value:
    """Return the mixture of the streams that the logits are made of."""
    normed = b.plain_norm(streams, streams.width)
    counts = _shifted(b, _coefficients(b, normed, "output_hc", (0, _streams(b)), 0))
    return _mixed(b, streams, counts, "hc_output")


def _streams(b: Builder) -> int:
    n = b.h.int("hyper_connection.count")
    if n < 1:
        raise FormatError(f"{b.source.paths[0]}: {b.h.arch}.hyper_connection.count is {n}; it must be positive")
    return n


def _coefficients(b: Builder, normed: Value, name: str, rows: tuple[int, int], at: int) -> Value:
    """Return the sigmoid of some rows of fn, scaled by the ``at``-th scale, with their part of base."""
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
            scale=Matrix(scale, columns=(at, at + 1)),
        )
    )
    y = b.value(f"{name}_{start}_sigmoid", product.width, normed)
    b.add(Activate(out=y, x=product, activation=Activation("sigmoid")))
    return y


def _shifted(b: Builder, x: Value) -> Value:
    y = b.value(f"{x.name.split('.')[-1]}_shifted", x.width, x)
    b.add(Shift(out=y, x=x, by=b.h.float("hyper_connection.epsilon")))
    return y


def _mixed(b: Builder, streams: Value, counts: Value, name: str) -> Value:
    y = b.value(name, b.h.n_embd, streams)
    b.add(Combine(out=y, x=streams, weights=counts))
    return y
