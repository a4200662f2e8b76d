"""The plot of an importance matrix: inputs of weights by layer, their similarity, tokens of experts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quantkit.cli._plot import Figure, Line, LinePanel, MapPanel
from quantkit.formats.imatrix import Imatrix
from quantkit.imatrix import Coverage, Statistics, TensorCoverage, TensorStatistics
from quantkit.imatrix.rows import DOWN
from quantkit.names import tensor_class
from quantkit.pipeline.facts import layer_of


def figure_of(imatrix: Imatrix, covered: Coverage, figures: Statistics) -> Figure:
    """Return the panels for which the file has data."""
    panels: list[LinePanel | MapPanel] = [
        LinePanel("Mean square of the input", "E[x²]", _lines(figures, "mean_square"), log=True)
    ]
    similar = _lines(figures, "cossim")
    if similar:
        panels.append(LinePanel("Similarity of the input to that of the previous layer", "cosine", similar))
    experts = _experts(covered.tensors)
    if experts is not None:
        panels.append(experts)
    return Figure(f"Importance matrix {imatrix.path.name}", panels)


def _lines(figures: Statistics, field: str) -> list[Line]:
    """Return a line per class; classes that see the same input (q, k, v) share one."""
    classes: dict[str, dict[int, float]] = {}
    for t in figures.tensors:
        if t.layer is not None:
            classes.setdefault(tensor_class(t.name), {})[t.layer] = _figure(t, field)
    groups: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name, points in sorted(classes.items()):
        # Few digits, so that rounding does not separate equal inputs.
        key = tuple((layer, float(f"{value:.5g}")) for layer, value in sorted(points.items()) if value == value)
        if key:
            groups.setdefault(key, []).append(name)
    return [Line(", ".join(names), [x for x, _ in points], [y for _, y in points]) for points, names in groups.items()]


def _figure(t: TensorStatistics, field: str) -> float:
    return t.sum_sq / t.elements if field == "mean_square" else t.cossim


def _experts(tensors: Iterable[TensorCoverage]) -> MapPanel | None:
    """Return each expert's share of tokens in every layer, 1 being even; one weight stands for its layer."""
    by_layer: dict[int, TensorCoverage] = {}
    for t in tensors:
        if t.experts and t.counts.size > 1 and not t.estimated and (layer_of(t.name) not in by_layer or DOWN in t.name):
            by_layer[layer_of(t.name)] = t
    if not by_layer:
        return None
    first = min(by_layer)
    shares = np.full((max(t.counts.size for t in by_layer.values()), max(by_layer) - first + 1), np.nan)
    for layer, t in by_layer.items():
        counts = t.counts.astype(np.float64)
        shares[: counts.size, layer - first] = counts / counts.mean() if counts.any() else counts
    return MapPanel("Tokens of each expert", "expert", "tokens / even share", first, shares)
