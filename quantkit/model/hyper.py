"""Hyper-connections: several streams of rows run beside the layers, which read a mixture of them (HY V4).

A token has n streams of n_embd columns, side by side in one row; each begins as its embedding. Before attention, and
again before the feed-forward layer, with c = fn (the row, normalized as a whole):

    input    sum over streams i of (sigmoid(scale[0] c[i] + base[i]) + eps) * stream i
    stream i += (magnitude * sigmoid(scale[1] c[n + i] + base[n + i]) + eps) * what the layer gives

After the last layer they are mixed as an input is. Independent streams, in the terms of the models that also mix them
with each other (DeepSeek 4). Source: llama.cpp b11434 src/models/hy-v4.cpp.
"""

from __future__ import annotations

from quantkit.errors import FormatError
from quantkit.model.builder import Builder
from quantkit.model.ops import Activate, Activation, Combine, Join, Matrix, MulMat, Repeat, Shift, Value


def spread(b: Builder, x: Value) -> Value:
    """Return the streams of an embedding: x, as often as there are."""
    streams = x
    for n in range(2, _streams(b) + 1):
        longer = b.value(f"streams_{n}", n * x.width, x)
        b.add(Join(out=longer, a=streams, b=x, period_a=streams.width, period_b=x.width))
        streams = longer
    return streams


def gather(b: Builder, streams: Value, of: str) -> tuple[Value, Value]:
    """Return the input of a layer's part, ``attn`` or ``ffn``, and what its result counts in each stream."""
    n = _streams(b)
    normed = b.plain_norm(streams, streams.width)
    before = _shifted(b, _coefficients(b, normed, f"hc_{of}", (0, n), 0))
    after = _coefficients(b, normed, f"hc_{of}", (n, 2 * n), 1)
    after = _shifted(b, b.scaled(after, b.h.float("hyper_connection.magnitude")))
    return _mixed(b, streams, before, f"hc_{of}_input"), after


def scatter(b: Builder, x: Value, streams: Value, counts: Value, name: str) -> Value:
    """Return the streams with x, times its count in each, added."""
    each = b.value(f"{name}_each", streams.width, x)
    b.add(Repeat(out=each, x=x, weights=counts))
    return b.sum(streams, each, name)


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
