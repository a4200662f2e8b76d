"""Charts of a page: size against quality, divergences of tokens, speeds; ``heat_maps`` has the others."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence

from quantkit.evaluate import Estimate
from quantkit.pipeline.presets import PRESETS
from quantkit.report.chart import Chart, Json, chart_spec
from quantkit.report.data import File, Report
from quantkit.report.heat_maps import costs_map, coverage_map, errors_map, types_map
from quantkit.types import TYPES
from quantkit.units import size_unit

#: Number of the colour variables of the style sheet, one per file.
SERIES = 8
DASHES = ((1, 0), (6, 3), (2, 2))
_TYPE = re.compile(
    rf"(?:{'|'.join(sorted({t.name for t in TYPES} | {p.name for p in PRESETS}, reverse=True))})(?![A-Za-z0-9])", re.I
)
#: Up to this number of files, their lines are in one chart, and their names fit beside the points in half a page.
FEW_LINES, FEW_POINTS = 4, 8


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
        *_tokens(report),
        types_map(report),
        errors_map(report),
        costs_map(report),
        coverage_map(report),
        *_speeds(report),
    ]
    return [chart for chart in results if chart is not None]


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
    height = 340 if len(rows) <= FEW_POINTS else 480
    return Chart(name, chart_spec(description, height, data={"values": rows}, layer=layers), labels=True)


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
    zero = {
        "name": "zero",
        "mark": {"type": "rule", "color": "var(--ink)", "strokeDash": [4, 3]},
        "encoding": {"y": {"datum": 0}},
    }
    extra_layers = [zero] if has_base else []
    return _scatter("chart-perplexity", f"Size of each file against its {title}", title, unit, rows, y, extra_layers)


def _tokens(report: Report) -> list[Chart]:
    """Return one chart of the lines of a few files, else a small one for each file."""
    labels = short_names(report.files)
    lines = [_token_line(i, labels[i], f) for i, f in enumerate(report.files)]
    rows = [row for line in lines for row in line]
    if not rows:
        return []
    if len(report.files) <= FEW_LINES:
        return [Chart("chart-tokens", _tokens_of_all(rows, len(report.files)))]
    return [Chart(tokens_name(i), _tokens_of_one(line, rows)) for i, line in enumerate(lines) if line]


def tokens_name(i: int) -> str:
    """Return the name of the small chart of file ``i``."""
    return f"chart-tokens-{i + 1}"


def _token_line(i: int, label: str, f: File) -> list[Json]:
    quantiles = f.quality.quantiles if f.quality is not None else ()
    return [{"label": label, "order": i, "share": share, "kld": kld} for share, kld in quantiles if kld > 0]


_TOKENS_TIP = [
    {"field": "label", "title": "file"},
    {"field": "share", "title": "share", "format": "~%"},
    {"field": "kld", "title": "more than", "format": ".3g"},
]


def _token_axes(rows: Iterable[Json]) -> tuple[Json, Json]:
    """Return the axes of shares and of divergences, the same for all charts of these rows."""
    shares, values = zip(*((row["share"], row["kld"]) for row in rows), strict=True)
    x: Json = {
        "field": "share",
        "type": "quantitative",
        "title": "share of the tokens that diverge by more",
        "scale": {"type": "log", "reverse": True, "nice": False, "domain": [min(shares), max(shares)]},
    }
    y: Json = {"field": "kld", "type": "quantitative", "title": "KL divergence, nats"}
    y["scale"] = {"type": "log", "nice": False, "domain": [min(values) / 1.3, max(values) * 1.3]}
    return x, y


def _tokens_of_all(rows: Sequence[Json], n_files: int) -> Json:
    x, y = _token_axes(rows)
    ticks = [0.9, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001]
    x["axis"] = {"values": ticks, "format": "~%", "grid": False, "labelOverlap": True}
    y["axis"] = {"format": "~g", "values": _ticks(*y["scale"]["domain"])}
    order = list(range(n_files))
    colours, dashes = zip(*map(series_of, order), strict=True)
    by_file: Json = {"field": "order", "type": "nominal", "legend": None}
    encoding = {
        "x": x,
        "y": y,
        "color": {**by_file, "scale": {"domain": order, "range": colours}},
        "strokeDash": {**by_file, "scale": {"domain": order, "range": dashes}},
        "tooltip": _TOKENS_TIP,
    }
    mark = {"type": "line", "strokeWidth": 2, "point": {"filled": True, "size": 26}}
    description = "For each file, the divergence that a share of the tokens exceeds"
    return chart_spec(description, 340, data={"values": rows}, mark=mark, encoding=encoding)


def _tokens_of_one(line: Sequence[Json], rows: Sequence[Json]) -> Json:
    """Return the chart of one file, before the range of all files."""
    x, y = _token_axes(rows)
    x |= {"title": None, "axis": {"values": [0.5, 0.1, 0.01, 0.001], "format": "~%", "grid": False}}
    decades = [tick for tick in _ticks(*y["scale"]["domain"]) if f"{tick:e}".startswith("1.0")]
    y |= {"title": None, "axis": {"format": "~g", "values": decades}}
    by_share: dict[float, list[float]] = {}
    for row in rows:
        by_share.setdefault(row["share"], []).append(row["kld"])
    spread = [{"share": share, "low": min(v), "high": max(v)} for share, v in by_share.items()]
    layers = [
        {
            "data": {"values": spread},
            "mark": {"type": "area", "color": "var(--line)", "opacity": 0.6},
            "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}},
        },
        {
            "data": {"values": line},
            "mark": {"type": "line", "color": "var(--accent)", "strokeWidth": 2, "point": {"filled": True, "size": 18}},
            "encoding": {"x": x, "y": y, "tooltip": _TOKENS_TIP},
        },
    ]
    return chart_spec(
        "The divergence that a share of the tokens exceeds, with those of all files in the background",
        120,
        layer=layers,
    )


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
    return Chart(name, chart_spec(f"Speed of each file: {test}", 28 * len(rows), data={"values": rows}, layer=layers))
