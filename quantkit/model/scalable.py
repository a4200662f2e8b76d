"""Where factors can go from the columns of matrices to what makes their inputs, so that nothing else changes.

A norm's weight can take them, as what it gives is multiplied by matrices only. So can the rows of a matrix of up
projections: each row is a column of what down projections multiply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from quantkit.model import ops
from quantkit.model.ops import Graph, Matrix, Op, Value

_Product = ops.MulMat | ops.MulMatId


@dataclass(frozen=True, eq=False)
class Scalable:
    """``takes``, a norm's weight or a matrix of up projections, makes x, which ``gives`` multiply, and nothing else.

    ids: of the experts, if there is one matrix for each, whose columns have factors of their own.
    """

    takes: str
    x: Value
    gives: tuple[str, ...]
    ids: Value | None = None
    n_mat: int = 1


def scalable(graph: Graph, tensors: Collection[str]) -> list[Scalable]:
    """Return all such places of a graph without fusions, in order.

    tensors: all of the file's names. Where a layer has some that the graph does not read, another form of the model
    may read them, and multiply the same: such layers are left alone, and the output's norm where layers predict more
    tokens.
    """
    readers: dict[Value, list[Op]] = {}
    uses = Counter[str]()
    for op in graph.ops:
        for value in set(op.inputs()):
            readers.setdefault(value, []).append(op)
        uses.update({m.tensor.name for m in op.matrices()})
    unread = {_part(name) for name in tensors if name not in uses}
    makers = {value: op for op in graph.ops for value in op.outputs()}
    found = []
    for op in graph.ops:
        takes = _taker(op, makers, readers)
        if takes is None:
            continue
        x = next(iter(op.outputs()))
        products = _products(x, readers) or []
        read = Counter(p.weight.tensor.name for p in products)
        own = takes.tensor.name
        alone = uses[own] == 1 and all(uses[name] == count for name, count in read.items())
        if read and alone and unread.isdisjoint(_part(name) for name in (own, *read)):
            first = products[0]
            by_expert = isinstance(op, ops.Glu) and isinstance(first, ops.MulMatId)
            ids = first.ids if by_expert and isinstance(first, ops.MulMatId) else None
            found.append(Scalable(own, x, tuple(read), ids, takes.n_matrices if by_expert else 1))
    return found


def _taker(op: Op, makers: dict[Value, Op], readers: dict[Value, list[Op]]) -> Matrix | None:
    """Return what makes the columns of an operation's result, by a factor for each; None if there is no such thing."""
    if isinstance(op, ops.Norm):
        n = op.out.width
        whole = op.weight is not None and op.group == n and op.weight.tensor.shape == (n,)
        return op.weight if whole and op.bias is None and op.out.per == 1 else None
    if not isinstance(op, ops.Glu) or op.up is None or op.activation.kind == "swiglu_oai" or op.activation.up_limit:
        return None
    up = makers.get(op.up)
    if not isinstance(up, _Product) or up.bias is not None or up.weight.rows is not None or len(readers[op.up]) > 1:
        return None
    return up.weight if up.weight.n_out == op.out.width else None


def _part(name: str) -> str:
    """Return the layer of a tensor, or "" for those of none, and of layers that predict more tokens."""
    if not name.startswith("blk.") or ".nextn." in name:
        return "rope" if name.startswith("rope_") else ""
    return name.split(".")[1]


def _products(value: Value, readers: dict[Value, list[Op]]) -> list[_Product] | None:
    """Return what multiplies a value, or None if anything else reads it."""
    found: list[_Product] = []
    for op in readers.get(value, ()):
        if isinstance(op, ops.SelectOutputs):
            chosen = _products(op.out, readers)
            if chosen is None:
                return None
            found += chosen
        elif isinstance(op, _Product) and op.x is value:
            found.append(op)
        else:
            return None
    return found
