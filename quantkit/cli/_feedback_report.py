"""The effect of error feedback, as a table of 80 columns and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from quantkit.cli._plot import Figure, Line, LinePanel, check_plot, draw
from quantkit.cli._table import fold, table
from quantkit.errors import QuantkitError, RecipeError, os_error_code
from quantkit.pipeline.feedback import TOKENS_PER_COLUMN
from quantkit.pipeline.feedback_report import FeedbackReport, MatrixReport, TensorReport


def feedback_lines(report: FeedbackReport | None) -> list[str]:
    """Return a table by class, and notes on tensors without feedback; nothing without feedback."""
    if report is None or not report.tensors:
        return []
    header = ["class", "type", "matrices", "tokens least", "median", "most", "better %", "loss", "by layer"]
    rows = [_row(tensors) for tensors in _classes(report)]
    matrices = [m for t in report.tensors for m in t.matrices]
    none = sum(m.damping is None for m in matrices)
    n_unchanged = sum(m.rows - m.better for m in matrices if m.damping is not None)
    lines = [
        table(header, rows, left=(0, 1)),
        "better: share of rows improved; loss: weighted error relative to the reference encoder's; by layer: "
        "minimum and maximum",
        f"{n_unchanged} of {sum(m.rows for m in matrices if m.damping is not None)} rows keep the reference's "
        f"bytes: feedback does not improve them",
    ]
    if none:
        lines.append(f"{none} of {len(matrices)} matrices without feedback: fewer tokens than columns")
    if any(t.uniform for t in report.tensors):
        lines.append("embeddings: all columns are weighted equally, because there is no covariance; a row is one block")
    if report.without:
        count = f"{len(report.without)} tensor{'s' if len(report.without) > 1 else ''}"
        lines.append(f"{count} without feedback: {', '.join(dict.fromkeys(reason for *_, reason in report.without))}")
    return ["", *(line if "\n" in line else fold(line, 2) for line in lines)]


def _classes(report: FeedbackReport) -> list[list[TensorReport]]:
    groups: dict[tuple[str, str], list[TensorReport]] = {}
    for tensor in report.tensors:
        groups.setdefault((tensor.kind, tensor.type), []).append(tensor)
    return list(groups.values())


def _row(tensors: Sequence[TensorReport]) -> list[object]:
    matrices = [m for t in tensors for m in t.matrices]
    counts = [m.tokens for m in matrices] if not tensors[0].uniform else []
    tokens = [_short(f(counts)) for f in (min, statistics.median_low, max)] if counts else [""] * 3
    ratios = [r for t in tensors if (r := _ratio([t])) is not None]
    total, span = _ratio(tensors), f"{min(ratios):.2f}-{max(ratios):.2f}" if len(ratios) > 1 else ""
    return [tensors[0].kind, tensors[0].type, len(matrices), *tokens, _better(matrices), _times(total), span]


def _better(matrices: Sequence[MatrixReport]) -> str:
    rows = sum(m.rows for m in matrices if m.damping is not None)
    return f"{100 * sum(m.better for m in matrices) / rows:.1f}" if rows else "none"


def _ratio(tensors: Sequence[TensorReport]) -> float | None:
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
    """Check, before the run, that the plot can be drawn."""
    if path is not None:
        check_plot(path)
        if not feedback:
            raise RecipeError(
                "--plot shows the effect of error feedback: also give --feedback or --calibrate", "QK-E202"
            )


def write_feedback_plot(report: FeedbackReport | None, name: str, path: Path) -> None:
    """Draw losses by class and layer, and tokens by expert."""
    if report is None:
        return
    data = draw(feedback_figure(report, name), check_plot(path))
    try:
        path.write_bytes(data)
    except OSError as e:
        raise QuantkitError(
            f"{path}: {e.strerror or e}; the model is complete, but its plot was not written", os_error_code(e)
        ) from e


def feedback_figure(report: FeedbackReport, name: str) -> Figure:
    """Return the plot, without panels that lack data."""
    other_tensors = [f"{t.kind} {_ratio([t]):.2f}" for t in report.tensors if t.layer < 0 and _ratio([t]) is not None]
    title = "Loss relative to the encoder without feedback (lower is better)"
    if other_tensors:
        title += f"\nOutside of layers: {', '.join(other_tensors)}"
    tokens = f"Calibration tokens per column (below {TOKENS_PER_COLUMN}: few; below 1: no feedback)"
    return Figure(
        f"Error feedback in {name}",
        [
            LinePanel(title, "ratio", _lines(report, relative=True), reference=(1.0, "1: no gain")),
            LinePanel("Loss with feedback, per row", "loss / row", _lines(report, relative=False), log=True),
            LinePanel(tokens, "tokens / column", _token_lines(report), log=True),
        ],
    )


def _lines(report: FeedbackReport, *, relative: bool) -> list[Line]:
    """Return a line per class over the layers."""
    points: dict[str, dict[int, float]] = {}
    for t in report.tensors:
        rows = sum(m.rows for m in t.matrices if m.damping is not None)
        value = t.after / rows if rows else None
        if relative:
            value = _ratio([t])
        if t.layer >= 0 and value is not None:
            points.setdefault(t.kind, {})[t.layer] = value
    return [
        Line(kind, sorted(ratios), [ratios[layer] for layer in sorted(ratios)])
        for kind, ratios in sorted(points.items())
    ]


def _token_lines(report: FeedbackReport) -> list[Line]:
    """Return the tokens of matrices that all tokens pass, and least, median and most of experts."""
    dense: dict[int, float] = {}
    experts: dict[int, list[float]] = {}
    for t in report.tensors:
        if t.layer >= 0:
            ratios = [m.tokens / m.columns for m in t.matrices]
            if len(ratios) > 1:
                experts[t.layer] = ratios
            elif t.layer not in dense or ratios[0] < dense[t.layer]:
                dense[t.layer] = ratios[0]
    statistic_functions: dict[str, Callable[[list[float]], float]] = {
        "most": max,
        "median": statistics.median,
        "least": min,
    }
    lines = [Line("all tokens", sorted(dense), [dense[layer] for layer in sorted(dense)])] if dense else []
    for label, function in statistic_functions.items() if experts else ():
        layers = sorted(experts)
        lines.append(Line(f"experts: {label}", layers, [function(experts[layer]) for layer in layers]))
    return lines
