"""Sites where activation equalization can move factors from columns of matrices to the producer of their input.

The producer is a norm's weight, if its output is multiplied by matrices only, or an up projection, whose rows are the
columns of the input of the down projection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from quantkit.model import ops
from quantkit.model.ops import Graph, Matrix, Op, Value

_Product = ops.MulMat | ops.MulMatId


@dataclass(frozen=True, eq=False)
class ScaleSite:
    """The tensor ``producer``, a norm's weight or an up projection, computes x, which only ``consumers`` multiply.

    ids: the experts of x, if every one of the n_mat experts has its own factors.
    """

    producer: str
    x: Value
    consumers: tuple[str, ...]
    ids: Value | None = None
    n_mat: int = 1


def find_scale_sites(graph: Graph, tensors: Collection[str]) -> list[ScaleSite]:
    """Return all sites of an unfused graph, in order.

    tensors: all names of the file. Layers with tensors that the graph does not read are skipped, because another form
    of the model may multiply the same input by them; so is the output's norm if there are prediction layers.
    """
    readers: dict[Value, list[Op]] = {}
    uses = Counter[str]()
    for op in graph.ops:
        for value in set(op.inputs()):
            readers.setdefault(value, []).append(op)
        uses.update({m.tensor.name for m in op.matrices()})
    unread = {_part(name) for name in tensors if name not in uses}
    makers = {value: op for op in graph.ops for value in op.outputs()}
    sites = []
    for op in graph.ops:
        producer = _find_producer(op, makers, readers)
        if producer is None:
            continue
        x = next(iter(op.outputs()))
        products = _products(x, readers) or []
        read = Counter(p.weight.tensor.name for p in products)
        name = producer.tensor.name
        exclusive = uses[name] == 1 and all(uses[name] == count for name, count in read.items())
        if read and exclusive and unread.isdisjoint(_part(name) for name in (name, *read)):
            first = products[0]
            by_expert = isinstance(op, ops.Glu) and isinstance(first, ops.MulMatId)
            ids = first.ids if by_expert and isinstance(first, ops.MulMatId) else None
            sites.append(ScaleSite(name, x, tuple(read), ids, producer.n_matrices if by_expert else 1))
    return sites


def _find_producer(op: Op, makers: dict[Value, Op], readers: dict[Value, list[Op]]) -> Matrix | None:
    """Return the weight that scales each column of an operation's output, or None."""
    if isinstance(op, ops.Norm):
        n = op.out.width
        is_full = op.weight is not None and op.group == n and op.weight.tensor.shape == (n,)
        return op.weight if is_full and op.bias is None and op.out.per == 1 else None
    if not isinstance(op, ops.Glu) or op.up is None or op.activation.kind == "swiglu_oai" or op.activation.up_limit:
        return None
    up = makers.get(op.up)
    if not isinstance(up, _Product) or up.bias is not None or up.weight.rows is not None or len(readers[op.up]) > 1:
        return None
    return up.weight if up.weight.n_out == op.out.width else None


def _part(name: str) -> str:
    """Return the layer of a tensor; "" for tensors of no layer, and of prediction layers."""
    if not name.startswith("blk.") or ".nextn." in name:
        return "rope" if name.startswith("rope_") else ""
    return name.split(".")[1]


def _products(value: Value, readers: dict[Value, list[Op]]) -> list[_Product] | None:
    """Return the products of a value, or None if it has other readers."""
    products: list[_Product] = []
    for op in readers.get(value, ()):
        if isinstance(op, ops.SelectOutputs):
            selected = _products(op.out, readers)
            if selected is None:
                return None
            products += selected
        elif isinstance(op, _Product) and op.x is value:
            products.append(op)
        else:
            return None
    return products
