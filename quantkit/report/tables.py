"""Tables of a page: all numbers of its charts, for readers who cannot see these, or need exact values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quantkit.evaluate import Estimate
from quantkit.report.charts import short_names
from quantkit.report.data import Base, File, GroupCost, Matrix, Report, TaskScore
from quantkit.report.heat_maps import GUESS, GUESS_NOTE, NO_LAYER, costs_of
from quantkit.units import size_unit


@dataclass(frozen=True)
class Cell:
    """Text of a cell, and the number it is sorted by; None: sorted by text."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Column:
    """A heading; numbers are aligned to the right."""

    label: str
    number: bool = True


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its heading."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def number_cell(value: float | None, form: str = ".4g") -> Cell:
    """Return a cell of a number, empty for None."""
    return Cell("", -1e308) if value is None else Cell(format(value, form), value)


def _estimate_cell(e: Estimate | None, factor: float = 1.0) -> Cell:
    """Return a cell of an estimate, with two digits of its standard error."""
    if e is None:
        return Cell("", -1e308)
    value, error = factor * e.value, factor * e.error
    if not error:
        return Cell(f"{value:.4g} ± 0", value)
    return Cell(Estimate(value, error).text(max(0, 1 - math.floor(math.log10(error)))), value)


def files_table(report: Report) -> Table:
    """Return the table of all files."""
    unit, factor = size_unit(max(f.nbytes for f in report.files))
    columns = [Column("file", False), Column(unit), Column("bits per weight")]
    qualities = [f.quality for f in report.files if f.quality is not None]
    has_base = any(q.kld is not None for q in qualities)
    if has_base:
        columns += [Column("KL divergence, nats"), Column("perplexity rise, %"), Column("same top token, %")]
    if qualities:
        columns.append(Column("perplexity"))
    score_labels = list(dict.fromkeys(score_label(s) for f in report.files for s in f.scores))
    columns += [Column(f"{label}, %") for label in score_labels]
    tests = list(dict.fromkeys(s.test for f in report.files for s in f.speeds))
    columns += [Column(f"{test}, tokens/s") for test in tests]
    rows = []
    for f in report.files:
        row = [
            Cell(f.name),
            number_cell(f.nbytes / factor, ".3f" if f.nbytes < 100 * factor else ".1f"),
            number_cell(f.bpw, ".2f"),
        ]
        q = f.quality
        if has_base:
            rise = None if q is None or q.ppl_ratio is None else Estimate(q.ppl_ratio.value - 1, q.ppl_ratio.error)
            row += [_estimate_cell(None if q is None else q.kld), _estimate_cell(rise, 100)]
            row.append(_estimate_cell(None if q is None else q.same_top, 100))
        if qualities:
            row.append(_estimate_cell(None if q is None else q.ppl))
        accuracies = {score_label(s): 100 * s.accuracy.value for s in f.scores}
        row += [number_cell(accuracies.get(label), ".1f") for label in score_labels]
        row += [_speed_cell(f, test) for test in tests]
        rows.append(tuple(row))
    return Table("table-files", "All files", tuple(columns), tuple(rows))


def score_label(score: TaskScore) -> str:
    """Return the name of a score: that of its tasks, and the metric if these have two."""
    return f"{score.tasks} {score.metric}" if score.kind == "requests" else score.tasks


def scores_table(report: Report) -> Table:
    """Return the table of accuracies of base and files, with differences from the base; shares in percent."""
    models: list[Base | File] = [*([report.base] if report.base is not None else []), *report.files]
    labels = ["accuracy, %", "95 % interval", "flips", "difference, %", "95 % interval", "p", "tasks needed"]
    columns = (Column("tasks", False), Column("file", False), *map(Column, labels))
    rows = [(Cell(score_label(s)), Cell(model.name), *_score_cells(s)) for model in models for s in model.scores]
    order = list(dict.fromkeys(row[0].text for row in rows))
    rows.sort(key=lambda row: order.index(row[0].text))
    return Table("table-scores", "Accuracy on tasks", columns, tuple(rows))


def texts_table(report: Report) -> Table:
    """Return the table of divergences by text, a row per text and file; probabilities in percent."""
    labels = ["tokens", "KL divergence, nats", "perplexity rise, %", "same top token, %"]
    columns = (Column("text", False), Column("file", False), *map(Column, labels))
    names = list(dict.fromkeys(q.text for f in report.files for q in f.by_text))
    rows = [
        (
            Cell(q.text),
            Cell(f.name),
            number_cell(q.n_scored, ","),
            _estimate_cell(q.kld),
            _estimate_cell(Estimate(q.ppl_ratio.value - 1, q.ppl_ratio.error), 100),
            _estimate_cell(q.same_top, 100),
        )
        for name in names
        for f in report.files
        for q in f.by_text
        if q.text == name
    ]
    return Table("table-texts", "Divergence by text", columns, tuple(rows))


def _score_cells(score: TaskScore) -> tuple[Cell, ...]:
    """Return the cells of an accuracy, and of its difference, which are empty for the base."""
    accuracy, pair = score.accuracy, score.difference
    cells = (number_cell(100 * accuracy.value, ".2f"), _interval_cell(accuracy.interval()))
    if pair is None:
        return (*cells, *(number_cell(None) for _ in range(5)))
    return (
        *cells,
        number_cell(pair.flips, ",.0f"),
        number_cell(100 * pair.difference, "+.2f"),
        _interval_cell(pair.interval(), "+"),
        number_cell(pair.p_value, ".3f"),
        number_cell(pair.tasks_needed, ",.0f"),
    )


def _interval_cell(interval: tuple[float, float], sign: str = "") -> Cell:
    low, high = (100 * x for x in interval)
    return Cell(f"{low:{sign}.1f} to {high:{sign}.1f}", low)


def mmproj_table(report: Report) -> Table:
    """Return the table of the files of encoders."""
    unit, factor = size_unit(max((f.nbytes for f in report.mmproj), default=1))
    labels = list(dict.fromkeys(label for f in report.mmproj for label, _ in f.facts))
    columns = (Column("file", False), Column(unit), Column("types", False), *(Column(label, False) for label in labels))
    rows = (
        (
            Cell(f.name),
            number_cell(f.nbytes / factor, ".3f" if f.nbytes < 100 * factor else ".1f"),
            Cell(", ".join(name for name, _, _ in f.by_type)),
            *(Cell(dict(f.facts).get(label, "")) for label in labels),
        )
        for f in report.mmproj
    )
    return Table("table-mmproj", "Vision and audio encoders", columns, tuple(rows))


def _speed_cell(f: File, test: str) -> Cell:
    """Return a cell of a speed; ``speeds_table`` has its standard deviation."""
    return number_cell(next((s.rate.value for s in f.speeds if s.test == test), None), ",.0f")


def tokens_table(report: Report) -> Table:
    """Return the table of divergences that shares of the tokens exceed."""
    labels = short_names(report.files)
    quantiles = {label: dict(f.quality.quantiles) for label, f in zip(labels, report.files, strict=True) if f.quality}
    shares = sorted({share for values in quantiles.values() for share in values}, reverse=True)
    columns = (Column("share of the tokens"), *(Column(label) for label in quantiles))
    rows = (
        (Cell(f"{100 * share:g} %", share), *(number_cell(values.get(share), ".3g") for values in quantiles.values()))
        for share in shares
    )
    caption = "Divergence, in nats, that each share of the tokens exceeds"
    return Table("table-tokens", caption, columns, tuple(rows))


def matrices_tables(report: Report) -> list[Table]:
    """Return the tables of types of all matrices in each file, of exact weights and of errors where they are known."""
    labels = short_names(report.files)
    files = [{m.name: m for m in f.matrices} for f in report.files]
    names = list(dict.fromkeys(name for matrices in files for name in matrices))
    columns = (Column("tensor", False), Column("weights"), *(Column(label, False) for label in labels))
    rows, exact, errors = [], [], []
    for name in names:
        first = next(matrices[name] for matrices in files if name in matrices)
        head = (Cell(name), Cell(f"{first.values:,}", first.values))
        rows.append((*head, *(Cell(matrices[name].type if name in matrices else "") for matrices in files)))
        shares = [_exact_share(matrices.get(name)) for matrices in files]
        exact.append((*head, *(number_cell(share, ".6g") for share in shares)))
        cells = [matrices[name].error if name in matrices else None for matrices in files]
        errors.append((*head, *(number_cell(None if e is None else 100 * e, ".3g") for e in cells)))
    tables = [Table("table-types", "Type of every matrix", columns, tuple(rows))]
    columns = (*columns[:2], *(Column(label) for label in labels))
    if any(m.exact is not None for f in report.files for m in f.matrices):
        tables.append(Table("table-exact", "Exact weights of every matrix on a grid, %", columns, tuple(exact)))
    if any(m.error is not None for f in report.files for m in f.matrices):
        tables.append(Table("table-errors", "Relative error of every matrix, %", columns, tuple(errors)))
    return tables


def _exact_share(matrix: Matrix | None) -> float | None:
    """Return the percentage of a matrix's weights that are exact; None if none are counted."""
    return None if matrix is None or matrix.exact is None else 100 * matrix.exact / max(1, matrix.values)


def costs_table(report: Report) -> Table:
    """Return the table of the divergence of each group in each file."""
    labels = short_names(report.files)
    columns = (Column("group", False), Column("layer"), *(Column(label) for label in labels))
    costs = [costs_of(report, f) for f in report.files]
    groups = {c.group: c.layer for c in report.sensitivity.costs} if report.sensitivity is not None else {}
    rows = ((Cell(g), _layer_cell(layer), *(_cost_cell(f.get(g)) for f in costs)) for g, layer in groups.items())
    caption = "Divergence that each group of tensors causes alone, in its type, in thousandths of a nat"
    if any(cost.error is None for file in costs for cost in file.values()):
        caption += f"; {GUESS_NOTE}"
    return Table("table-costs", caption, columns, tuple(rows))


def _cost_cell(cost: GroupCost | None) -> Cell:
    if cost is None:
        return number_cell(None)
    cell = number_cell(1000 * cost.kld, ".3g")
    return cell if cost.error is not None else replace(cell, text=f"{GUESS} {cell.text}")


def _layer_cell(layer: int | None) -> Cell:
    return Cell(NO_LAYER, 1e9) if layer is None else Cell(str(layer), layer)


def coverage_table(report: Report) -> Table:
    """Return the table of the coverage of each matrix by the importance matrix."""
    columns = ["tensor", "layer", "experts", "experts without tokens", "least tokens", "median tokens"]
    rows = []
    for t in report.imatrix.tensors if report.imatrix is not None else ():
        counts = (number_cell(t.tokens_min, ",.0f"), number_cell(t.tokens_median, ",.0f"))
        if not t.present:
            counts = (Cell("no entry", -1), Cell("no entry", -1))
        rows.append(
            (Cell(t.name), _layer_cell(t.layer), Cell(str(t.experts), t.experts), Cell(str(t.never), t.never), *counts)
        )
    count_columns = (Column(label) for label in columns[1:])
    return Table(
        "table-coverage",
        "Tokens behind the importance of every matrix",
        (Column("tensor", False), *count_columns),
        tuple(rows),
    )


def speeds_table(report: Report) -> Table:
    """Return the table of speeds of all files."""
    columns = (Column("file", False), Column("test", False), Column("tokens per second"), Column("standard deviation"))
    rows = (
        (Cell(f.name), Cell(s.test), number_cell(s.rate.value), number_cell(s.rate.error, ".2g"))
        for f in report.files
        for s in f.speeds
    )
    return Table("table-speed", "Speed of every file", columns, tuple(rows))


def support_table(report: Report) -> Table:
    """Return the table of runtimes and the files they load."""
    names = list(dict.fromkeys(s.runtime for f in report.files for s in f.support))
    columns: Sequence[Column] = [Column("file", False), *(Column(name, False) for name in names)]
    rows: Iterable[tuple[Cell, ...]] = (
        (Cell(f.name), *(Cell(next((s.text for s in f.support if s.runtime == n), "")) for n in names))
        for f in report.files
    )
    return Table("table-support", "What loads each file", tuple(columns), tuple(rows))
