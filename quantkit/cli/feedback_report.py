"""What error feedback did, as a table of 80 columns and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from quantkit.cli.plot import Figure, Line, LinePanel, check_plot, draw
from quantkit.cli.table import folded, table
from quantkit.errors import QuantkitError, RecipeError
from quantkit.pipeline.feedback import ENOUGH
from quantkit.pipeline.feedback_report import FedMatrix, FedTensor, FeedbackReport


def feedback_lines(report: FeedbackReport | None) -> list[str]:
    """Return a table of classes, and what fell back; nothing without feedback."""
    if report is None or not report.tensors:
        return []
    header = ["class", "type", "matrices", "tokens least", "median", "most", "better %", "loss", "by layer"]
    rows = [_row(tensors) for tensors in _classes(report)]
    matrices = [m for t in report.tensors for m in t.matrices]
    none = sum(m.damping is None for m in matrices)
    kept = sum(m.rows - m.better for m in matrices if m.damping is not None)
    lines = [
        table(header, rows, left=(0, 1)),
        "better: rows, loss: sums in the metric of the covariance, of the reference's; by layer: least and most",
        f"{kept} of {sum(m.rows for m in matrices if m.damping is not None)} rows keep the reference's bytes: "
        "feedback made none better",
    ]
    if none:
        lines.append(f"{none} of {len(matrices)} matrices without feedback: fewer tokens than columns")
    if any(t.alike for t in report.tensors):
        lines.append("embeddings: all columns count alike, for want of a covariance; a row is what a block holds")
    if any(t.refit for t in report.tensors):
        lines.append("F32: weights of norms, refit; loss: squares of what is wrong with what they give")
    if report.without:
        count = f"{len(report.without)} tensor{'s' if len(report.without) > 1 else ''}"
        lines.append(f"{count} without feedback: {', '.join(dict.fromkeys(why for *_, why in report.without))}")
    return ["", *(line if "\n" in line else folded(line, 2) for line in lines)]


def _classes(report: FeedbackReport) -> list[list[FedTensor]]:
    found: dict[tuple[str, str], list[FedTensor]] = {}
    for tensor in report.tensors:
        found.setdefault((tensor.kind, tensor.type), []).append(tensor)
    return list(found.values())


def _row(tensors: Sequence[FedTensor]) -> list[object]:
    matrices = [m for t in tensors for m in t.matrices]
    counts = [m.tokens for m in matrices] if not tensors[0].alike else []
    tokens = [_short(f(counts)) for f in (min, statistics.median_low, max)] if counts else [""] * 3
    ratios = [r for t in tensors if (r := _ratio([t])) is not None]
    total, span = _ratio(tensors), f"{min(ratios):.2f}-{max(ratios):.2f}" if len(ratios) > 1 else ""
    return [tensors[0].kind, tensors[0].type, len(matrices), *tokens, _better(matrices), _times(total), span]


def _better(matrices: Sequence[FedMatrix]) -> str:
    rows = sum(m.rows for m in matrices if m.damping is not None)
    return f"{100 * sum(m.better for m in matrices) / rows:.1f}" if rows else "none"


def _ratio(tensors: Sequence[FedTensor]) -> float | None:
    before = sum(t.before for t in tensors)
    return sum(t.after for t in tensors) / before if before > 0 else None


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def _short(n: int) -> str:
    """Return a number of tokens in at most five characters."""
    for unit, size in ((" M", 10**6), (" K", 10**3)):
        if n >= 10 * size:
            return f"{n // size}{unit}"
    return str(n)


# ---------------------------------------------------------------- the plot


def check_feedback_plot(path: Path | None, feedback: object) -> None:
    """Raise, before the run, what would keep the plot from being drawn."""
    if path is not None:
        check_plot(path)
        if not feedback:
            raise RecipeError("--plot draws what --feedback or --calibrate did: give one of them, too")


def write_feedback_plot(report: FeedbackReport | None, name: str, path: Path) -> None:
    """Draw losses by class and layer, and tokens by expert."""
    if report is None:
        return
    data = draw(feedback_figure(report, name), check_plot(path))
    try:
        path.write_bytes(data)
    except OSError as e:
        raise QuantkitError(f"{path}: {e.strerror or e}; the model is complete, only its plot is not") from e


def feedback_figure(report: FeedbackReport, name: str) -> Figure:
    """Return the panels for which there are data."""
    outside = [f"{t.kind} {_ratio([t]):.2f}" for t in report.tensors if t.layer < 0 and _ratio([t]) is not None]
    title = "Loss with feedback, of the reference's" + (f" ({', '.join(outside)})" if outside else "")
    tokens = f"Tokens for each column (fewer than {ENOUGH}: few; fewer than 1: no feedback)"
    return Figure(
        f"Error feedback in {name}",
        [
            LinePanel(title, "ratio", _lines(report, relative=True)),
            LinePanel("Loss with feedback, by row", "loss / row", _lines(report, relative=False), log=True),
            LinePanel(tokens, "tokens / column", _token_lines(report), log=True),
        ],
    )


def _lines(report: FeedbackReport, *, relative: bool) -> list[Line]:
    """Return a line per class over the layers."""
    points: dict[str, dict[int, float]] = {}
    for t in report.tensors:
        rows = sum(m.rows for m in t.matrices if m.damping is not None)
        value = _ratio([t]) if relative else t.after / rows if rows else None
        if t.layer >= 0 and value is not None and (relative or not t.refit):
            points.setdefault(t.kind, {})[t.layer] = value
    return [Line(kind, sorted(at), [at[layer] for layer in sorted(at)]) for kind, at in sorted(points.items())]


def _token_lines(report: FeedbackReport) -> list[Line]:
    """Return the tokens of matrices that all see, and the least, the median and the most of experts."""
    alone: dict[int, float] = {}
    experts: dict[int, list[float]] = {}
    for t in report.tensors:
        if t.layer >= 0 and not t.refit:
            found = [m.tokens / m.columns for m in t.matrices]
            if len(found) > 1:
                experts[t.layer] = found
            elif t.layer not in alone or found[0] < alone[t.layer]:
                alone[t.layer] = found[0]
    of: dict[str, Callable[[list[float]], float]] = {"most": max, "median": statistics.median, "least": min}
    lines = [Line("all tokens", sorted(alone), [alone[layer] for layer in sorted(alone)])] if alone else []
    for what, function in of.items() if experts else ():
        layers = sorted(experts)
        lines.append(Line(f"experts: {what}", layers, [function(experts[layer]) for layer in layers]))
    return lines
