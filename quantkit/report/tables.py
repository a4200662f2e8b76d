"""The tables of a page: every number a chart shows, for those who do not see it, or want it exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quantkit.evaluate import Estimate
from quantkit.report.charts import OUTSIDE, WIDE, costs_of, short_names, size_unit
from quantkit.report.data import File, GroupCost, Report


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the number it is sorted by, None if it is sorted by text."""

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


def number(value: float | None, form: str = ".4g") -> Cell:
    """Return a cell of a number, empty for None."""
    return Cell("", -1e308) if value is None else Cell(format(value, form), value)


def _pair(e: Estimate | None, factor: float = 1.0, form: str = "") -> Cell:
    """Return a cell of an estimate with half the width of its 95 % interval, as exact as two digits of that."""
    if e is None:
        return Cell("", -1e308)
    value, wide = factor * e.value, factor * WIDE * e.error
    if form or not wide:
        return Cell(f"{value:{form or '.4g'}} ± {wide:.2g}", value)
    decimals = max(0, 1 - math.floor(math.log10(wide)))
    return Cell(f"{value:.{decimals}f} ± {wide:.{decimals}f}", value)


def files_table(report: Report) -> Table:
    """Return the table of all files, which begins the page."""
    unit, factor = size_unit(report.files)
    columns = [Column("file", False), Column(unit), Column("bits per weight")]
    qualities = [f.quality for f in report.files if f.quality is not None]
    against = any(q.kld is not None for q in qualities)
    if against:
        columns += [Column("KL divergence, nats"), Column("perplexity rise, %"), Column("same top token, %")]
    if qualities:
        columns.append(Column("perplexity"))
    tests = list(dict.fromkeys(s.test for f in report.files for s in f.speeds))
    columns += [Column(f"{test}, tokens/s") for test in tests]
    rows = []
    for f in report.files:
        row = [
            Cell(f.name),
            number(f.nbytes / factor, ".3f" if f.nbytes < 100 * factor else ".1f"),
            number(f.bpw, ".2f"),
        ]
        q = f.quality
        if against:
            rise = None if q is None or q.ppl_ratio is None else Estimate(q.ppl_ratio.value - 1, q.ppl_ratio.error)
            row += [_pair(None if q is None else q.kld), _pair(rise, 100)]
            row.append(_pair(None if q is None else q.same_top, 100))
        if qualities:
            row.append(_pair(None if q is None else q.ppl, form=".4g"))
        row += [_speed(f, test) for test in tests]
        rows.append(tuple(row))
    return Table("table-files", "All files", tuple(columns), tuple(rows))


def _speed(f: File, test: str) -> Cell:
    """Return a cell of a speed and its standard deviation."""
    found = next((s.rate for s in f.speeds if s.test == test), None)
    return number(None) if found is None else Cell(f"{found.value:,.0f} ± {found.error:,.0f}", found.value)


def tokens_table(report: Report) -> Table:
    """Return the divergences that shares of the tokens exceed."""
    labels = short_names(report.files)
    known = {label: dict(f.quality.quantiles) for label, f in zip(labels, report.files, strict=True) if f.quality}
    shares = sorted({share for found in known.values() for share in found}, reverse=True)
    columns = (Column("share of the tokens"), *(Column(label) for label in known))
    rows = (
        (Cell(f"{100 * share:g} %", share), *(number(found.get(share), ".3g") for found in known.values()))
        for share in shares
    )
    caption = "Divergence, in nats, that each share of the tokens exceeds"
    return Table("table-tokens", caption, columns, tuple(rows))


def matrices_tables(report: Report) -> list[Table]:
    """Return the types of all matrices in each file, and their errors if they were measured."""
    labels = short_names(report.files)
    by_name = [{m.name: m for m in f.matrices} for f in report.files]
    names = list(dict.fromkeys(name for found in by_name for name in found))
    columns = (Column("tensor", False), Column("weights"), *(Column(label, False) for label in labels))
    rows, errors = [], []
    for name in names:
        first = next(found[name] for found in by_name if name in found)
        head = (Cell(name), Cell(f"{first.values:,}", first.values))
        rows.append((*head, *(Cell(found[name].type if name in found else "") for found in by_name)))
        cells = [found[name].error if name in found else None for found in by_name]
        errors.append((*head, *(number(None if e is None else 100 * e, ".3g") for e in cells)))
    made = [Table("table-types", "Type of every matrix", columns, tuple(rows))]
    if any(m.error is not None for f in report.files for m in f.matrices):
        columns = (*columns[:2], *(Column(label) for label in labels))
        made.append(Table("table-errors", "Relative error of every matrix, %", columns, tuple(errors)))
    return made


def classes_table(f: File, name: str) -> Table:
    """Return how many tensors and bytes of a file each type has."""
    columns = (Column("type", False), Column("tensors"), Column("bytes"), Column("share of the file, %"))
    total = sum(nbytes for _, _, nbytes in f.by_type)
    rows = (
        (Cell(t), Cell(f"{n:,}", n), Cell(f"{nbytes:,}", nbytes), number(100 * nbytes / max(1, total), ".1f"))
        for t, n, nbytes in f.by_type
    )
    return Table(name, f"Types in {f.name}", columns, tuple(rows))


def costs_table(report: Report) -> Table:
    """Return what each group of tensors costs in each file."""
    labels = short_names(report.files)
    columns = (Column("group", False), Column("layer"), *(Column(label) for label in labels))
    found = [costs_of(report, f) for f in report.files]
    groups = {c.group: c.layer for c in report.sensitivity.costs} if report.sensitivity is not None else {}
    rows = ((Cell(g), _layer(layer), *(_cost(f.get(g)) for f in found)) for g, layer in groups.items())
    caption = "Divergence that each group alone causes in the type it has, in thousandths of a nat"
    if any(each.error is None for f in found for each in f.values()):
        caption += "; ≈: guessed from the error where its layer ends"
    return Table("table-costs", caption, columns, tuple(rows))


def _cost(cost: GroupCost | None) -> Cell:
    if cost is None:
        return number(None)
    shown = number(1000 * cost.kld, ".3g")
    return shown if cost.error is not None else replace(shown, text=f"≈ {shown.text}")


def _layer(layer: int | None) -> Cell:
    return Cell(OUTSIDE, 1e9) if layer is None else Cell(str(layer), layer)


def coverage_table(report: Report) -> Table:
    """Return what the importance matrix has for each matrix of the model."""
    columns = ["tensor", "layer", "experts", "experts without tokens", "least tokens", "median tokens"]
    rows = []
    for t in report.imatrix.tensors if report.imatrix is not None else ():
        counts = (number(t.tokens_min, ",.0f"), number(t.tokens_median, ",.0f"))
        if not t.present:
            counts = (Cell("no entry", -1), Cell("no entry", -1))
        rows.append(
            (Cell(t.name), _layer(t.layer), Cell(str(t.experts), t.experts), Cell(str(t.never), t.never), *counts)
        )
    made = (Column(label) for label in columns[1:])
    return Table(
        "table-coverage", "Tokens behind the importance of every matrix", (Column("tensor", False), *made), tuple(rows)
    )


def speeds_table(report: Report) -> Table:
    """Return the speeds of all files."""
    columns = (Column("file", False), Column("test", False), Column("tokens per second"), Column("standard deviation"))
    rows = (
        (Cell(f.name), Cell(s.test), number(s.rate.value), number(s.rate.error, ".2g"))
        for f in report.files
        for s in f.speeds
    )
    return Table("table-speed", "Speed of every file", columns, tuple(rows))


def support_table(report: Report) -> Table:
    """Return which runtimes load which file."""
    names = list(dict.fromkeys(s.runtime for f in report.files for s in f.support))
    columns: Sequence[Column] = [Column("file", False), *(Column(name, False) for name in names)]
    rows: Iterable[tuple[Cell, ...]] = (
        (Cell(f.name), *(Cell(next((s.text for s in f.support if s.runtime == n), "")) for n in names))
        for f in report.files
    )
    return Table("table-support", "What loads each file", tuple(columns), tuple(rows))
