"""A chart of a page: a Vega-Lite specification, and the texts around it.

Colours are variables of the style sheet, which SVG resolves: a change of theme, and printing, need no new drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_CONFIG: Json = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--ink)",
        "titleColor": "var(--ink)",
        "tickColor": "var(--line)",
        "domainColor": "var(--line)",
        "gridColor": "var(--line)",
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    "legend": {"labelColor": "var(--ink)", "titleColor": "var(--ink)", "titleFontWeight": "normal"},
}


@dataclass(frozen=True)
class Scale:
    """The colour scale below a map: colours at equal distances, and the values at equal distances under them."""

    colours: Sequence[str]
    ticks: Sequence[str]


@dataclass(frozen=True)
class Chart:
    """A chart. ``name``: its id.

    Attributes:
        labels: its points have labels, which the page places apart.
        cells: of a map of one file, the data of each file; the page draws the chosen ones.
        scale: of its colours.
        min_width: in pixels; a narrower page scrolls the chart sideways.
        has_gaps: some cells are not measured.
    """

    name: str
    spec: Json
    labels: bool = False
    cells: Sequence[Sequence[Json]] = ()
    scale: Scale | None = None
    min_width: int = 0
    has_gaps: bool = False


def chart_spec(description: str, height: int, **properties: Any) -> Json:
    """Return a specification as wide as its place on the page."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "description": description,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": _CONFIG,
        **properties,
    }
