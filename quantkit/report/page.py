"""The page: HTML with style, numbers and Vega-Lite in one file, which makes no network request."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.activations import MEANINGS
from quantkit.names import printable
from quantkit.report.card import run_command
from quantkit.report.chart import Chart
from quantkit.report.charts import FEW_LINES, FEW_POINTS, charts, series_of, short_names, tokens_name
from quantkit.report.colours import text_colour
from quantkit.report.conclusion import SCORE_EXPLANATION, closest_file, larger_but_worse, perplexity_warning
from quantkit.report.data import Report
from quantkit.report.heat_maps import GUESS_NOTE, NOT_MEASURED, costs_of, type_colours, type_keys
from quantkit.report.tables import (
    costs_table,
    coverage_table,
    files_table,
    matrices_tables,
    mmproj_table,
    scores_table,
    speeds_table,
    support_table,
    texts_table,
    tokens_table,
)
from quantkit.units import PLUS_MINUS, format_count, size_unit

_FOLDER = Path(__file__).parent
#: Globals of the bundle that page.js uses.
_SNIPPET = "window.vegaLite = vegaLite; window.vega = vega; window.vegaEmbed = vegaEmbed;"


@cache
def _library() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script."""
    import vl_convert

    return str(vl_convert.javascript_bundle(_SNIPPET)).replace("</script", "<\\/script").replace("<!--", "<\\!--")


def page_text(report: Report) -> str:
    """Return the page, with files by size."""
    import jinja2

    report = report.by_size()

    scripts = [_library(), (_FOLDER / "page.js").read_text(encoding="utf-8")]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["name_parts"] = _name_parts
    chart_list = charts(report)
    template = environment.get_template("page.html")
    return str(
        template.render(
            report=report,
            policy=_policy(scripts),
            style=mark_safe((_FOLDER / "page.css").read_text(encoding="utf-8")),
            scripts=[mark_safe(script) for script in scripts],
            data=mark_safe(script_json(_printable_values({chart.name: _chart_data(chart) for chart in chart_list}))),
            file_names=mark_safe(script_json([printable(f.name) for f in report.files])),
            charts={chart.name: chart for chart in chart_list},
            **_template_values(report),
        )
    )


def _name_parts(name: str) -> list[str]:
    """Return a file's name in parts between which a line may break."""
    return re.findall(r"[^-_.]*[-_.]?", name)[:-1]


def _chart_data(chart: Chart) -> dict[str, Any]:
    """Return the fields of a chart that page.js reads."""
    return {"spec": chart.spec, "labels": chart.labels, "cells": chart.cells}


def _printable_values(value: Any) -> Any:
    """Return specifications with printable texts: Vega's parser takes some characters for ends of lines."""
    if isinstance(value, dict):
        return {key: _printable_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable_values(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def mark_safe(text: str) -> Any:
    """Return text that the template does not escape: from this package, or already escaped."""
    from markupsafe import Markup

    return Markup(text)  # noqa: S704 - never from a file


def script_json(value: Any) -> str:
    """Return JSON that ends neither its script element nor a line of it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _policy(scripts: list[str]) -> str:
    """Return a Content Security Policy: no requests, and only these scripts."""
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )


def _template_values(report: Report) -> dict[str, Any]:
    labels = short_names(report.files)
    qualities = [f.quality for f in report.files if f.quality is not None]
    has_line = [f.quality is not None and bool(f.quality.quantiles) for f in report.files]
    is_few = len(labels) <= FEW_LINES
    colours = type_colours(report)
    closest, larger_files = closest_file(report.files), larger_but_worse(report.files)
    return {
        "labels": labels,
        "has_tokens": any(has_line),
        "series": [(labels[i], *series_of(i)) for i, has in enumerate(has_line) if has] if is_few else [],
        "small_charts": [] if is_few else [(labels[i], tokens_name(i)) for i, has in enumerate(has_line) if has],
        "has_many": len(labels) > FEW_POINTS,
        "types": [(name, colour, text_colour(colour), type_keys(colours)[name]) for name, colour in colours.items()],
        "not_measured": NOT_MEASURED,
        "guess_note": GUESS_NOTE,
        "has_guesses": any(c.error is None for f in report.files for c in costs_of(report, f).values()),
        "lead": " ".join([_summarize(report), *closest]),
        "larger_files": larger_files,
        "facts": _facts(report),
        "quality": qualities[0] if qualities else None,
        "bound": max((q.bound for q in qualities), default=0.0),
        "plus_minus": PLUS_MINUS,
        "perplexity_warning": perplexity_warning(report.files),
        "files_table": files_table(report),
        "tokens_table": tokens_table(report),
        "matrices_tables": matrices_tables(report),
        "costs_table": costs_table(report),
        "coverage_table": coverage_table(report),
        "speeds_table": speeds_table(report),
        "support_table": support_table(report),
        "scores_table": scores_table(report),
        "texts_table": texts_table(report),
        "score_explanation": SCORE_EXPLANATION,
        "mmproj_table": mmproj_table(report),
        "mmproj_command": run_command(report),
        "weighted": any(m.weighted for f in report.files for m in f.matrices),
        "machines": sorted({s.machine for f in report.files for s in f.speeds}),
    }


def _summarize(report: Report) -> str:
    """Return the sentence on number and size of the files."""
    least, most = min(f.nbytes for f in report.files), max(f.nbytes for f in report.files)
    unit, factor = size_unit(most)
    n = len(report.files)
    if n == 1:
        return f"One file of {most / factor:.3g} {unit}."
    return f"{n} files of {least / factor:.3g} to {most / factor:.3g} {unit}."


def _facts(report: Report) -> list[tuple[str, str]]:
    """Return the facts of the model, of the base and of the text."""
    model = report.model
    weights = format_count(model.values) + (f", {format_count(model.active)} active per token" if model.active else "")
    facts = [("architecture", model.architecture), ("weights", weights)]
    facts += [(k, v) for k, v in model.facts if k in ("layers", "experts", "experts used", "context length")]
    if report.base is not None:
        facts.append(("base", f"{report.base.name} ({', '.join(report.base.types)})"))
    qualities = [f.quality for f in report.files if f.quality is not None]
    if report.text is not None and qualities:
        facts.append(("measured on", f"{report.text.name}, {qualities[0].n_scored:,} tokens scored"))
    facts += [("activations", MEANINGS[mode]) for mode in dict.fromkeys(q.activations for q in qualities)]
    return facts
