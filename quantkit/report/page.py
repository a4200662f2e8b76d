"""The page: HTML with style, numbers and Vega-Lite in one file, which makes no network request."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.names import printable
from quantkit.report.charts import charts, series_of, short_names, type_colours
from quantkit.report.conclusion import conclusion, perplexity_warning
from quantkit.report.data import Report
from quantkit.report.tables import (
    costs_table,
    coverage_table,
    files_table,
    matrices_tables,
    speeds_table,
    support_table,
    tokens_table,
)
from quantkit.units import PLUS_MINUS, format_count, size_unit

_FOLDER = Path(__file__).parent
#: Globals that page.js takes from the bundle.
_SNIPPET = "window.vegaLite = vegaLite; window.vega = vega; window.vegaEmbed = vegaEmbed;"


@cache
def _library() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script."""
    import vl_convert

    return str(vl_convert.javascript_bundle(_SNIPPET)).replace("</script", "<\\/script").replace("<!--", "<\\!--")


def page_text(report: Report) -> str:
    """Return the page."""
    import jinja2

    scripts = [_library(), (_FOLDER / "page.js").read_text(encoding="utf-8")]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    chart_list = charts(report)
    specs = {chart.name: {"spec": chart.spec, "labels": chart.labels, "byFile": chart.by_file} for chart in chart_list}
    template = environment.get_template("page.html")
    return str(
        template.render(
            report=report,
            policy=_policy(scripts),
            style=mark_safe((_FOLDER / "page.css").read_text(encoding="utf-8")),
            scripts=[mark_safe(script) for script in scripts],
            data=mark_safe(script_json(_printable_values(specs))),
            charts={chart.name for chart in chart_list},
            heights={chart.name: chart.spec["height"] for chart in chart_list},
            **_template_values(report),
        )
    )


def _printable_values(value: Any) -> Any:
    """Return specifications with printable texts: Vega's parser takes some characters for ends of lines."""
    if isinstance(value, dict):
        return {key: _printable_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable_values(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def mark_safe(text: str) -> Any:
    """Return text that the template does not escape: our own, or made safe."""
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
    series = [(label, *series_of(i)) for i, label in enumerate(labels)]
    return {
        "labels": labels,
        "series": [s for s, f in zip(series, report.files, strict=True) if f.quality and f.quality.quantiles],
        "types": type_colours(report),
        "lead": _summarize(report),
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
        "weighted": any(m.weighted for f in report.files for m in f.matrices),
        "machines": sorted({s.machine for f in report.files for s in f.speeds}),
    }


def _summarize(report: Report) -> str:
    """Return the summary at the top of the page."""
    least, most = min(f.nbytes for f in report.files), max(f.nbytes for f in report.files)
    unit, factor = size_unit(most)
    n = len(report.files)
    files = (
        f"{n} files of {least / factor:.3g} to {most / factor:.3g} {unit}"
        if n > 1
        else f"One file of {most / factor:.3g} {unit}"
    )
    return " ".join([f"{files}.", *conclusion(report.files)])


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
    return facts
