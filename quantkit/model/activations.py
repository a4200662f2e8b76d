"""Graphs of activations: the residual stream after layers, and covariances of the inputs of weights.

``Model.hidden`` and ``Model.covariances`` run them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.errors import RecipeError
from quantkit.model.observers import CovarianceRequest, Input, covariances, every_token, inputs
from quantkit.model.ops import Graph, Value
from quantkit.model.stages import split_stages


class InputCovariance(NamedTuple):
    """Sums over tokens of x x^T, x being the input of a weight.

    ``sums``: float64 [matrices, n, n], a matrix per expert or head, else one. ``counts``: int64 [matrices], the tokens
    of each.
    """

    sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """The mean of x x^T, float64 [matrices, n, n]; zeros without tokens."""
        mean: npt.NDArray[np.float64] = self.sums / np.maximum(self.counts, 1)[:, None, None]
        return mean


def residual_stream(graph: Graph, layers: Sequence[int] | None) -> tuple[Graph, list[Value]]:
    """Return the part of a graph up to the last of ``layers``, and the values that leave these, as leaves.

    layers: None for all. Raises RecipeError for a layer that the graph does not have.
    """
    graph = every_token(graph)
    outs = {op.layer: v for op in graph.ops for v in op.outputs() if v.name.endswith(".layer_out")}
    selection = sorted(outs) if layers is None else list(layers)
    if missing := [layer for layer in selection if layer not in outs]:
        raise RecipeError(f"no layer {missing[0]}: the model has layers 0 to {max(outs)}", "QK-E203")
    values = [outs[layer] for layer in selection]
    end = 1 + max((i for i, op in enumerate(graph.ops) if not set(values).isdisjoint(op.outputs())), default=-1)
    return split_stages(graph, [end], [values])[0].graph, values


@dataclass(frozen=True)
class CovarianceGraph:
    """A graph that sums covariances: the label of each requested weight's accumulator."""

    graph: Graph
    labels: dict[str, str]


def covariance_graph(graph: Graph, names: Collection[str] | None) -> CovarianceGraph:
    """Return a graph that sums the covariances of the inputs of weights.

    names: of tensors; None for all but the output matrix. Raises RecipeError for a tensor that multiplies nothing.
    """
    observed = inputs(every_token(graph), process_output=names is not None)
    by_weight = {name: item for item in observed for name in item.names}
    selection = list(by_weight if names is None else names)
    if missing := [name for name in selection if name not in by_weight]:
        raise RecipeError(f"{missing[0]} is not a weight that multiplies an input in this model", "QK-E206")
    requests = _requests(by_weight[name] for name in selection)
    result = covariances(graph, requests.values(), process_output=names is not None, weighted=False)
    return CovarianceGraph(result, {name: f"{by_weight[name].names[0]} 0" for name in selection})


def _requests(items: Iterable[Input]) -> dict[str, CovarianceRequest]:
    """Return a request for each distinct input."""
    return {item.names[0]: CovarianceRequest(item.names[0], (0, item.n_mat)) for item in items}
