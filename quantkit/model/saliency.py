"""Graphs that sum what each expert adds to the residual: its saliency in REAP (arXiv 2510.13999).

The saliency of an expert is the mean, over the tokens routed to it, of its gate value times the L2 norm of its output.
The graph sums the columns of gate * y * y / |y|, whose total over all columns is gate * |y|, by SumColumns: exactly,
on every backend, independent of the order of chunks. Operations are only added, so the logits remain the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quantkit.model import ops
from quantkit.model.ops import Activation, Graph, Op, Value

#: Prefix of accumulators of saliency.
SALIENCY = "saliency: "
#: Added to a sum of squares, so that the norm of a row of zeros is 0.
_EPS = 1e-30


def observe_saliency(graph: Graph) -> Graph:
    """Return the graph with the sums of every layer's routed experts, labelled by the name of their down projection.

    Of experts whose input is weighted (Llama 4), the output already includes the gate. Experts that share their routing
    with others (Grove MoE's chunk experts) are not observed.
    """
    producers = {value: op for op in graph.ops for value in op.outputs()}
    result: list[Op] = []
    for op in graph.ops:
        result.append(op)
        down = producers.get(op.x) if isinstance(op, ops.Combine) else None
        if isinstance(op, ops.Combine) and isinstance(down, ops.MulMatId) and "_exps." in down.weight.tensor.name:
            result += _sums(down, op.weights)
    return replace(graph, ops=tuple(result))


def _sums(down: ops.MulMatId, gates: Value | None) -> Iterator[Op]:
    y, layer, name = down.out, down.layer, down.weight.tensor.name
    n = down.weight.n_matrices
    if gates is not None:
        one, gate = (Value(f"{layer}.saliency_{part}", 1, 1, y.outputs) for part in ("one", "gate"))
        gate = replace(gate, per=down.ids.width)
        zero, first = (replace(one, name=f"{one.name}_{part}") for part in ("zero", "first"))
        yield ops.Take(layer=layer, out=first, x=gates, start=0, period=gates.width)
        yield ops.Scale(layer=layer, out=zero, x=first, factor=0.0)
        yield ops.Shift(layer=layer, out=one, x=zero, offset=1.0)
        yield ops.Repeat(layer=layer, out=gate, x=one, weights=gates)
        gated = replace(y, name=f"{layer}.saliency_gated")
        yield ops.Glu(layer=layer, out=gated, gate=gate, up=y, activation=Activation("linear"))
        y = gated
    unit, product = (replace(y, name=f"{layer}.saliency_{part}") for part in ("unit", "product"))
    yield ops.Norm(layer=layer, out=unit, x=y, weight=None, eps=_EPS, kind="l2", group=y.width)
    yield ops.Glu(layer=layer, out=product, gate=unit, up=y, activation=Activation("linear"))
    yield ops.SumColumns(layer=layer, x=product, label=SALIENCY + name, names=(name,), ids=down.ids, n_mat=n)
