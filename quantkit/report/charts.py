"""Charts of a page, as Vega-Lite specifications.

Colours are variables of the style sheet, which SVG resolves: a change of theme, and printing, need no new drawing. Heat
maps have the fixed colours of Viridis, whose lightness the colour-blind can distinguish, and white or black text by
contrast.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.evaluate import Estimate
from quantkit.pipeline.presets import PRESETS
from quantkit.report.data import File, GroupCost, Matrix, Report
from quantkit.types import TYPES, type_by_name
from quantkit.units import size_unit

Json = dict[str, Any]

#: Number of the colour variables of the style sheet, one per file.
SERIES = 8
DASHES = ((1, 0), (6, 3), (2, 2))
#: Viridis from dark to light, sRGB.
_VIRIDIS = (
    (68, 1, 84),
    (72, 40, 120),
    (62, 73, 137),
    (49, 104, 142),
    (38, 130, 142),
    (31, 158, 137),
    (53, 183, 121),
    (110, 206, 88),
    (181, 222, 43),
    (253, 231, 37),
)
_TYPE = re.compile(
    rf"(?:{'|'.join(sorted({t.name for t in TYPES} | {p.name for p in PRESETS}, reverse=True))})(?![A-Za-z0-9])", re.I
)
#: Value of "layer" for tensors outside of layers.
NO_LAYER = "none"
_AXIS = {
    "labelColor": "var(--ink)",
    "titleColor": "var(--ink)",
    "tickColor": "var(--line)",
    "domainColor": "var(--line)",
}
_CONFIG: Json = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **_AXIS,
        "gridColor": "var(--line)",
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    "legend": {"labelColor": "var(--ink)", "titleColor": "var(--ink)", "titleFontWeight": "normal"},
}


@dataclass(frozen=True)
class Chart:
    """A chart. ``name``: its id; ``labels``: its points have labels, placed apart; ``by_file``: shows one file."""

    name: str
    spec: Json
    labels: bool = False
    by_file: bool = False


def series_of(i: int) -> tuple[str, Sequence[int]]:
    """Return the colour and the dashes of file ``i``."""
    return f"var(--series-{i % SERIES + 1})", DASHES[i // SERIES % len(DASHES)]


def short_names(files: Sequence[File]) -> list[str]:
    """Return the names of files without ".gguf" and their common first words."""
    names = [f.name.removesuffix(".gguf") for f in files]
    if len(names) < 2:
        return [files[0].preset or names[0]] if files else []
    common = os.path.commonprefix(names)
    start = max((i for i in range(len(common) + 1) if all(_begins_word(name, i) for name in names)), default=0)
    labels = [name[start:] for name in names]
    return [label if len(label) <= 32 else f"{label[:15]}…{label[-16:]}" for label in labels]


def _begins_word(name: str, position: int) -> bool:
    """Return whether a word starts at a position of a name, outside of names of types or presets, and numbers."""
    before, tail = name[position - 1 : position], name[position:]
    if before == "_":
        return _TYPE.match(tail) is not None
    number = before == "." and name[position - 2 : position - 1].isdigit() and tail[:1].isdigit()
    return bool(tail) and before in ("", "-", " ", ".") and not number


def charts(report: Report) -> list[Chart]:
    """Return the charts for which there are numbers."""
    results: list[Chart | None] = [
        _divergence(report),
        _perplexity(report),
        _tokens(report),
        _types(report),
        _errors(report),
        _costs(report),
        _coverage(report),
        *_speeds(report),
    ]
    return [chart for chart in results if chart is not None]


def _spec(description: str, height: int, **properties: Any) -> Json:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "description": description,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": _CONFIG,
        **properties,
    }


# ---------------------------------------------------------------- size against quality


def _scatter(
    name: str, description: str, title: str, unit: str, rows: list[Json], y: Json, extra_layers: list[Json]
) -> Chart:
    biggest, least = max(r["size"] for r in rows), min(r["size"] for r in rows)
    pad = 0.12 * (biggest - least) or 0.1 * biggest
    x: Json = {
        "field": "size",
        "type": "quantitative",
        "title": f"size of the file, {unit}",
        "scale": {"domain": [max(0, least - pad), biggest + 1.5 * pad], "nice": False, "zero": False},
        "axis": {"grid": False, "tickCount": 6},
    }
    tip = [
        {"field": "name", "title": "file"},
        {"field": "size", "title": unit, "format": ".4~g"},
        {"field": "shown", "title": title},
    ]
    bar = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    layers: list[Json] = [
        *extra_layers,
        {
            "name": "bars",
            "mark": {"type": "rule", "color": "var(--accent)", "strokeWidth": 2, "clip": True},
            "encoding": bar,
        },
        {
            "name": "points",
            "mark": {"type": "point", "filled": True, "size": 70, "color": "var(--accent)", "opacity": 1},
            "encoding": {"x": x, "y": y, "tooltip": tip},
        },
        {
            "name": "names",
            "mark": {"type": "text", "fontSize": 11, "color": "var(--ink)", "align": "left", "dx": 7, "dy": -7},
            "encoding": {"x": x, "y": y, "text": {"field": "label"}},
        },
    ]
    return Chart(name, _spec(description, 340, data={"values": rows}, layer=layers), labels=True)


def _divergence(report: Report) -> Chart | None:
    unit, factor = size_unit(max(f.nbytes for f in report.files))
    rows: list[Json] = []
    for label, f in zip(short_names(report.files), report.files, strict=True):
        if f.quality is None or f.quality.kld is None or not f.quality.kld.value > 0:
            continue
        value = f.quality.kld.value
        low, high = f.quality.kld.interval()
        row = {
            "name": f.name,
            "label": label,
            "size": f.nbytes / factor,
            "kld": value,
            "shown": _format_estimate(f.quality.kld),
        }
        rows.append({**row, "low": max(low, value / 20), "high": high})
    if not rows:
        return None
    domain = [min(r["low"] for r in rows) / 1.5, max(r["high"] for r in rows) * 1.3]
    title = "mean KL divergence from the base, nats per token"
    y: Json = {"field": "kld", "type": "quantitative", "title": title, "scale": {"type": "log", "domain": domain}}
    y["axis"] = {"format": "~g", "values": _ticks(*domain)}
    return _scatter("chart-divergence", f"Size of each file against its {title}", title, unit, rows, y, [])


def _format_estimate(e: Estimate) -> str:
    return f"{e.value:.4g} ± {e.error:.2g} (one standard error)"


def _ticks(low: float, high: float) -> list[float]:
    """Return the ticks of a logarithmic scale: 1 of each decade; 1, 2 and 5 for up to three decades."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    return [step * 10.0**power for power in range(first, last + 1) for step in steps]


def _perplexity(report: Report) -> Chart | None:
    unit, factor = size_unit(max(f.nbytes for f in report.files))
    rows: list[Json] = []
    for label, f in zip(short_names(report.files), report.files, strict=True):
        if f.quality is None:
            continue
        q = f.quality
        estimate = q.ppl if q.ppl_ratio is None else Estimate(100 * (q.ppl_ratio.value - 1), 100 * q.ppl_ratio.error)
        if abs(estimate.value) > 1e6:
            continue
        low, high = estimate.interval()
        row = {
            "name": f.name,
            "label": label,
            "size": f.nbytes / factor,
            "y": estimate.value,
            "shown": _format_estimate(estimate),
        }
        rows.append({**row, "low": low, "high": high})
    if not rows:
        return None
    has_base = any(f.quality is not None and f.quality.ppl_ratio is not None for f in report.files)
    title = "rise of perplexity over the base, %" if has_base else "perplexity"
    y: Json = {"field": "y", "type": "quantitative", "title": title, "scale": {"zero": has_base}}
    zero = {"mark": {"type": "rule", "color": "var(--ink)", "strokeDash": [4, 3]}, "encoding": {"y": {"datum": 0}}}
    extra_layers = [zero] if has_base else []
    return _scatter("chart-perplexity", f"Size of each file against its {title}", title, unit, rows, y, extra_layers)


def _tokens(report: Report) -> Chart | None:
    rows: list[Json] = []
    for i, (label, f) in enumerate(zip(short_names(report.files), report.files, strict=True)):
        for share, value in f.quality.quantiles if f.quality is not None else ():
            if value > 0:
                rows.append({"label": label, "order": i, "share": share, "kld": value})
    if not rows:
        return None
    colours, dashes = zip(*(series_of(i) for i in range(len(report.files))), strict=True)
    order = list(range(len(report.files)))
    ticks = [0.9, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001]
    x: Json = {
        "field": "share",
        "type": "quantitative",
        "title": "share of the tokens that diverge by more",
        "scale": {"type": "log", "reverse": True, "nice": False},
        "axis": {"values": ticks, "format": "~%", "grid": False, "labelOverlap": True},
    }
    y: Json = {"field": "kld", "type": "quantitative", "title": "KL divergence, nats", "scale": {"type": "log"}}
    y["axis"] = {"format": "~g", "tickCount": 6}
    encoding = {
        "x": x,
        "y": y,
        "color": {"field": "order", "type": "nominal", "scale": {"domain": order, "range": colours}, "legend": None},
        "strokeDash": {
            "field": "order",
            "type": "nominal",
            "scale": {"domain": order, "range": dashes},
            "legend": None,
        },
        "tooltip": [
            {"field": "label", "title": "file"},
            {"field": "share", "title": "share", "format": "~%"},
            {"field": "kld", "title": "more than", "format": ".3g"},
        ],
    }
    y["axis"] = {"format": "~g", "values": _ticks(min(r["kld"] for r in rows), max(r["kld"] for r in rows))}
    mark = {"type": "line", "strokeWidth": 2, "point": {"filled": True, "size": 26}}
    description = "For each file, the divergence that a share of the tokens exceeds"
    spec = _spec(description, 340, data={"values": rows}, mark=mark, encoding=encoding)
    return Chart("chart-tokens", spec)


# ---------------------------------------------------------------- maps of classes and layers


def ramp_colour(fraction: float) -> str:
    """Return the colour of Viridis at ``fraction`` of its length, as #rrggbb."""
    position = min(max(fraction, 0.0), 1.0) * (len(_VIRIDIS) - 1)
    i = min(int(position), len(_VIRIDIS) - 2)
    mixed = (round(a + (position - i) * (b - a)) for a, b in zip(_VIRIDIS[i], _VIRIDIS[i + 1], strict=True))
    return "#" + "".join(f"{c:02x}" for c in mixed)


def text_colour(colour: str) -> str:
    """Return white or black, the one of higher contrast on a colour (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#ffffff"


def type_colours(report: Report) -> dict[str, str]:
    """Return a colour for each type of matrices, by bits per weight: lighter is more."""
    names = sorted({m.type for f in report.files for m in f.matrices}, key=lambda n: (_bits(n), n))
    return {name: ramp_colour((i + 0.5) / len(names)) for i, name in enumerate(names)}


def _bits(name: str) -> float:
    t = type_by_name(name)
    return 8 * t.block_bytes / t.block


def order_kinds(matrices: Iterable[Matrix]) -> list[str]:
    """Return tensor classes in the order of their first tensors, those outside of layers last."""
    layer_kinds, other_kinds = dict[str, None](), dict[str, None]()
    for m in matrices:
        (other_kinds if m.layer is None else layer_kinds)[m.kind] = None
    return [*layer_kinds, *(kind for kind in other_kinds if kind not in layer_kinds)]


def _heat_map(
    name: str, description: str, cells: list[Json], kinds: list[str], tip: list[Json], *, color: Json, by_file: bool
) -> Chart | None:
    if not cells:
        return None
    layers = sorted({c["layer"] for c in cells}, key=lambda n: (n == NO_LAYER, int(n) if n.isdecimal() else 0))
    x: Json = {"field": "layer", "type": "ordinal", "title": "layer", "sort": layers, "scale": {"domain": layers}}
    x["axis"] = {"labelAngle": 0, "labelOverlap": True, "ticks": False, "domain": False}
    y: Json = {"field": "kind", "type": "nominal", "title": None, "sort": kinds, "scale": {"domain": kinds}}
    y["axis"] = {"ticks": False, "domain": False, "labelLimit": 118}
    text_opacity = f"width / {len(layers)} > 8 * length(datum.text) ? 1 : 0"
    gap = f"width / {len(layers)} > 6 ? 1 : 0"  # in narrow cells, gaps would hide the cell
    position: Json = {"x": x, "y": y}
    layer = [
        {
            "name": "cells",
            "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": {"expr": gap}},
            "encoding": {**position, "color": color, "tooltip": tip},
        },
        {
            "mark": {"type": "text", "fontSize": 10, "opacity": {"expr": text_opacity}, "tooltip": None, "aria": False},
            "encoding": {**position, "text": {"field": "text"}, "color": {"field": "ink", "scale": None}},
        },
    ]
    properties: Json = {"data": {"values": cells}, "layer": layer}
    if by_file:
        properties["params"] = [{"name": "file", "value": 0}]
        properties["transform"] = [{"filter": "datum.file === file"}]
    return Chart(name, _spec(description, 24 * len(kinds), **properties), by_file=by_file)


def _largest_matrices(f: File) -> Iterable[Matrix]:
    """Return the largest matrix of each class and layer."""
    largest: dict[tuple[str, int | None], Matrix] = {}
    for m in f.matrices:
        current = largest.get((m.kind, m.layer))
        if current is None or current.values < m.values:
            largest[m.kind, m.layer] = m
    return largest.values()


def _cell(m: Matrix, file: int) -> Json:
    layer = NO_LAYER if m.layer is None else str(m.layer)
    return {"file": file, "kind": m.kind, "layer": layer, "name": m.name, "type": m.type}


_TIP: list[Json] = [{"field": "name", "title": "tensor"}, {"field": "type", "title": "type"}]


def _types(report: Report) -> Chart | None:
    colours = type_colours(report)
    cells: list[Json] = []
    for i, f in enumerate(report.files):
        for m in _largest_matrices(f):
            colour_fields = {"colour": colours[m.type], "ink": text_colour(colours[m.type])}
            cells.append({**_cell(m, i), "text": m.type, **colour_fields})
    description = "The type of each class of tensors in each layer of the chosen file"
    colour = {"field": "colour", "type": "nominal", "scale": None}
    kinds = order_kinds(m for f in report.files for m in f.matrices)
    return _heat_map("chart-types", description, cells, kinds, _TIP, color=colour, by_file=True)


def _colour_cells(cells: list[Json], value: Callable[[float], float], text: Callable[[float], str]) -> None:
    """Set the colours and texts of cells, on one scale for all."""
    values = [value(c["value"]) for c in cells]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    for cell, scaled in zip(cells, values, strict=True):
        colour = ramp_colour((scaled - low) / (high - low) if high > low else 0.0)
        cell |= {"colour": colour, "ink": text_colour(colour), "text": text(cell["value"])}


def _errors(report: Report) -> Chart | None:
    cells: list[Json] = [
        {**_cell(m, i), "value": 100 * m.error}
        for i, f in enumerate(report.files)
        for m in _largest_matrices(f)
        if m.error is not None
    ]
    _colour_cells(cells, lambda v: v, lambda v: f"{v:.2g}" if v < 10 else f"{v:.0f}")
    tip = [*_TIP, {"field": "value", "title": "error, %", "format": ".3~g"}]
    description = "The relative error of each class of tensors in each layer of the chosen file"
    kinds = order_kinds(m for f in report.files for m in f.matrices)
    colour = {"field": "colour", "type": "nominal", "scale": None}
    return _heat_map("chart-errors", description, cells, kinds, tip, color=colour, by_file=True)


def costs_of(report: Report, f: File) -> dict[str, GroupCost]:
    """Return the known costs of groups in the types that a file has for them, by group."""
    if report.sensitivity is None:
        return {}
    types = {m.name: m.type for m in f.matrices}
    return {c.group: c for c in report.sensitivity.costs if c.tensors and {types.get(n) for n in c.tensors} == {c.type}}


def _costs(report: Report) -> Chart | None:
    if report.sensitivity is None:
        return None
    cells: list[Json] = []
    for i, f in enumerate(report.files):
        for name, cost in costs_of(report, f).items():
            layer = NO_LAYER if cost.layer is None else str(cost.layer)
            cell: Json = {"file": i, "kind": cost.kind, "layer": layer, "name": name, "type": cost.type}
            cells.append({**cell, "value": cost.kld})
    floor = max((c["value"] for c in cells), default=1.0) / 1000
    _colour_cells(cells, lambda v: math.log(max(v, floor) or 1e-300), lambda v: f"{1000 * v:.2g}")
    for cell in cells:
        cell["value"] *= 1000
    tip = [*_TIP, {"field": "value", "title": "divergence, thousandths of a nat", "format": ".3~g"}]
    description = "The divergence that each group of tensors alone causes in its type in the chosen file"
    kinds = list(dict.fromkeys(c["kind"] for c in sorted(cells, key=lambda c: c["layer"] == NO_LAYER)))
    colour = {"field": "colour", "type": "nominal", "scale": None}
    return _heat_map("chart-costs", description, cells, kinds, tip, color=colour, by_file=True)


def _coverage(report: Report) -> Chart | None:
    if report.imatrix is None:
        return None
    cells: list[Json] = []
    for t in report.imatrix.tensors:
        if t.tokens_min is None and t.present:
            continue
        layer = NO_LAYER if t.layer is None else str(t.layer)
        cells.append({"kind": t.kind, "layer": layer, "name": t.name, "value": float(t.tokens_min or 0)})
    _colour_cells(cells, lambda v: math.log1p(v), lambda v: f"{v:.3g}" if v < 1e4 else f"{v / 1e3:.0f}k")
    tip = [{"field": "name", "title": "tensor"}, {"field": "value", "title": "least tokens", "format": ","}]
    description = "The least tokens that any expert of a tensor saw in calibration, by class and layer"
    kinds = list(dict.fromkeys(c["kind"] for c in cells))
    colour = {"field": "colour", "type": "nominal", "scale": None}
    return _heat_map("chart-coverage", description, cells, kinds, tip, color=colour, by_file=False)


# ---------------------------------------------------------------- speed


def _speeds(report: Report) -> list[Chart]:
    tests = list(dict.fromkeys(s.test for f in report.files for s in f.speeds))
    return [_speed(report, test, f"chart-speed-{i + 1}") for i, test in enumerate(tests)]


def _speed(report: Report, test: str, name: str) -> Chart:
    labels = short_names(report.files)
    rows: list[Json] = []
    for label, f in zip(labels, report.files, strict=True):
        for s in f.speeds:
            if s.test == test:
                low, high = s.rate.value - s.rate.error, s.rate.value + s.rate.error
                text = f"{s.rate.value:,.0f}" if s.rate.value >= 100 else f"{s.rate.value:.3g}"
                rows.append({"label": label, "value": s.rate.value, "low": low, "high": high, "text": text})
    y: Json = {
        "field": "label",
        "type": "nominal",
        "title": None,
        "sort": labels,
        "axis": {"ticks": False, "domain": False},
    }
    x: Json = {"field": "value", "type": "quantitative", "title": f"{test}, tokens per second"}
    x["axis"] = {"grid": False, "tickCount": 5}
    layers = [
        {"mark": {"type": "bar", "color": "var(--bar)", "height": 16}, "encoding": {"x": x, "y": y}},
        {
            "mark": {"type": "rule", "color": "var(--ink)"},
            "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}, "y": y},
        },
        {
            "mark": {"type": "text", "align": "left", "dx": 4, "color": "var(--ink)", "fontSize": 11},
            "encoding": {
                "x": {"datum": 0, "type": "quantitative"},
                "y": y,
                "text": {"field": "text"},
            },
        },
    ]
    return Chart(name, _spec(f"Speed of each file: {test}", 28 * len(rows), data={"values": rows}, layer=layers))
