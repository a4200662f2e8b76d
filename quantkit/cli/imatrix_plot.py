"""The picture of an importance matrix: what comes in, how it changes from layer to layer, which experts see it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quantkit.cli.plot import Figure, Line, LinePanel, MapPanel
from quantkit.formats.imatrix import Imatrix
from quantkit.helpers import printable, tensor_class
from quantkit.imatrix import Coverage, Statistics, TensorCoverage, TensorStatistics
from quantkit.imatrix.rows import DOWN
from quantkit.pipeline.facts import layer_of


def figure_of(imatrix: Imatrix, covered: Coverage, found: Statistics) -> Figure:
    """Return the panels that the file has data for."""
    panels: list[LinePanel | MapPanel] = [
        LinePanel("Mean square of the input, E[x²]", _lines(found, "mean_square"), log=True),
    ]
    similar = _lines(found, "cossim")
    if similar:
        panels.append(LinePanel("Cosine similarity of the input with that of the layer before", similar))
    experts = _experts(covered.tensors)
    if experts is not None:
        panels.append(experts)
    return Figure(f"Importance matrix {printable(imatrix.path.name)}", "layer", panels)


def _lines(found: Statistics, what: str) -> list[Line]:
    """Return a line per class; classes that see the same input (q, k, v) share one."""
    classes: dict[str, dict[int, float]] = {}
    for t in found.tensors:
        if t.layer is not None:
            classes.setdefault(tensor_class(t.name), {})[t.layer] = _figure(t, what)
    same: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name, points in sorted(classes.items()):
        # As strings of few digits: rounding must not tell inputs apart that are one.
        key = tuple((layer, float(f"{value:.5g}")) for layer, value in sorted(points.items()) if value == value)
        if key:
            same.setdefault(key, []).append(name)
    return [Line(", ".join(names), [x for x, _ in points], [y for _, y in points]) for points, names in same.items()]


def _figure(t: TensorStatistics, what: str) -> float:
    return t.sum_sq / t.elements if what == "mean_square" else t.cossim


def _experts(tensors: Iterable[TensorCoverage]) -> MapPanel | None:
    """Return the share of tokens of every expert of every layer, 1 being even; one weight stands for its layer."""
    chosen: dict[int, TensorCoverage] = {}
    for t in tensors:
        if t.experts and t.counts.size > 1 and not t.estimated and (layer_of(t.name) not in chosen or DOWN in t.name):
            chosen[layer_of(t.name)] = t
    if not chosen:
        return None
    layers = sorted(chosen)
    shares = np.full((max(t.counts.size for t in chosen.values()), len(layers)), np.nan)
    for column, layer in enumerate(layers):
        counts = chosen[layer].counts.astype(np.float64)
        shares[: counts.size, column] = counts / counts.mean() if counts.any() else counts
    return MapPanel("Tokens of each expert", "tokens, 1 = even share", layers, shares)
