"""Write the tables of docs/benchmarks/*.md from the records in docs/benchmarks/data/*.json.

    scripts/make_benchmark_pages.py                     write them
    scripts/make_benchmark_pages.py --check             exit with 1 if a page is not up to date
    scripts/make_benchmark_pages.py --figures README.md    print the ratios of a text that no record has

The text of the pages is written by hand, without figures. A marker names the record of the table below it:

    <!-- record NAME --> ... <!-- end -->       the tables, with machine, date, commit and command
    <!-- record NAME? --> ... <!-- end -->      the same; without the record, a sentence that says so
    <!-- record NAME NAME --> ... <!-- end -->  one table of the rows of several records
    <!-- summary --> ... <!-- end -->           the main results (SUMMARY)

A benchmark writes its record with --json docs/benchmarks/data/NAME.json (benchmarks/results.py).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from results import UNKNOWN, Record, Table, read_record  # noqa: E402

PAGES = ROOT / "docs/benchmarks"
DATA = PAGES / "data"
_MARKER = re.compile(r"(<!-- (record [^>]+?|summary) -->\n).*?(<!-- end -->)", re.S)
#: A ratio in a text: 9.0x, 10.4 times.
_RATIO = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?:x\b|x(?= )| times\b)")

K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
I_QUANTS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
IK_TYPES = re.compile(r"IQ\d_(K|KS|KSS|KL)")
INTERLEAVED = re.compile(r"\w+_R(4|8|16)")

Records = Mapping[str, Record]


# ---------------------------------------------------------------- figures of a table


def number(text: str) -> float:
    """Return the number at the start of a cell. Raises ValueError."""
    match = re.match(r"[-+−]?\d+(?:\.\d+)?", text.replace(",", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a number")
    return float(match[0].replace("−", "-"))


def cell(table: Table, row: str, column: str) -> float:
    """Return the number in the column of the row whose first cell is ``row``. Raises KeyError."""
    return dict(zip(table.column(table.columns[0]), map(number, table.column(column)), strict=True))[row]


def extremes(values: Sequence[tuple[str, float]], digits: int = 1, unit: str = "x") -> str:
    """Return the smallest and the largest of named values: 8.7x (IQ3_S) to 16x (IQ1_S)."""
    if not values:
        raise ValueError("no row has such a value")
    (least_name, least), (most_name, most) = min(values, key=_value), max(values, key=_value)
    return f"{_short(least, digits)}{unit} ({least_name}) to {_short(most, digits)}{unit} ({most_name})"


def _value(pair: tuple[str, float]) -> float:
    return pair[1]


def _short(value: float, digits: int) -> str:
    return f"{value:.0f}" if value >= 20 and digits < 2 else f"{value:.{digits}f}"


def ratios(table: Table, columns: Sequence[str], is_row: Callable[[str], object]) -> list[tuple[str, float]]:
    """Return the smallest ratio of these columns, that to the fastest peer, for each selected row."""
    values = []
    for i, name in enumerate(table.column("type")):
        cells = [table.column(column)[i] for column in columns]
        numbers = [number(text) for text in cells if text not in ("", "-")]
        if is_row(name) and numbers:
            values.append((name, min(numbers)))
    return values


def ratios_after(table: Table, pattern: str) -> list[tuple[str, float]]:
    """Return the names of rows with their ratios: the column after the first whose name matches."""
    i = next(i for i, name in enumerate(table.columns) if re.fullmatch(pattern, name)) + 1
    return [(row[0], number(row[i])) for row in table.rows if row[i] not in ("", "-")]


# ---------------------------------------------------------------- the summary


@dataclass(frozen=True)
class Result:
    """A main result: its name, page and record, and a function that extracts its text from the record's table."""

    name: str
    page: str
    record: str
    text: Callable[[Table], str]
    target: str = ""


def _times(table: Table, peers: Sequence[str], program: str) -> float:
    """Return the total time of the peers relative to that of a program."""
    return sum(cell(table, peer, "wall time") for peer in peers) / cell(table, program, "wall time")


def _engine(test: str, peer: str) -> Callable[[Table], str]:
    def text(table: Table) -> str:
        column = table.column(f"/ {peer}")
        values = [
            (row[0].removeprefix("MoE "), number(ratio))
            for row, ratio in zip(table.rows, column, strict=True)
            if row[1].startswith(test) and ratio not in ("", "-")
        ]
        return f"{extremes(values, 2)} {peer}"

    return text


def _trellis(table: Table) -> str:
    """Return the extremes of ratios without and with importance, on rows of 4096 values."""
    pairs = zip(table.column("type"), table.column("4096"), strict=True)
    return f"{extremes([(name, number(text)) for name, texts in pairs for text in texts.split(', ')])} ik_llama.cpp"


def _largest_difference(table: Table) -> str:
    worst = max(abs(number(text)) for text in table.column("difference"))
    return f"within {worst:.2f} % of llama.cpp"


def _verdicts(table: Table) -> str:
    texts = []
    for runtime, *counts in table.rows:
        n_whole, whole_agree, n_damaged, damaged_agree = map(int, counts[:4])
        texts.append(f"{runtime}: {whole_agree + damaged_agree:,} of {n_whole + n_damaged:,} files")
    return "; ".join(texts)


def _kills(table: Table) -> str:
    trials, identical = (sum(map(int, table.column(name))) for name in ("trials", "identical results"))
    return f"{identical} of {trials} killed and resumed runs have identical results"


SUMMARY = (
    Result(
        "Quantize a file to Q4_K_M, same bytes",
        "quantize",
        "quantize-file",
        lambda t: f"{_times(t, ['llama-quantize'], 'quantkit'):.1f}x llama-quantize",
        "5x",
    ),
    Result(
        "The same with an importance matrix",
        "quantize",
        "quantize-file-imatrix",
        lambda t: f"{_times(t, ['llama-quantize'], 'quantkit'):.1f}x llama-quantize",
        "5x",
    ),
    Result(
        "Checkpoint to Q4_K_M, same bytes",
        "convert",
        "convert",
        lambda t: (
            f"{_times(t, t.column('program')[1:3], t.column('program')[0]):.1f}x"
            " convert_hf_to_gguf.py and llama-quantize"
        ),
    ),
    Result(
        "Encoders of K-quants and IQ4",
        "encoders",
        "encoders",
        lambda t: f"{extremes(ratios(t, ['/ ggml'], K_QUANTS.__contains__))} ggml",
        "8x",
    ),
    Result(
        "Encoders of i-quants",
        "encoders",
        "encoders",
        lambda t: f"{extremes(ratios(t, ['/ ggml', '/ libgguf', '/ ik'], I_QUANTS.__contains__))} the fastest peer",
        "2x",
    ),
    Result(
        "Encoders of ik_llama.cpp's types",
        "encoders",
        "encoders",
        lambda t: f"{extremes(ratios(t, ['/ ik'], IK_TYPES.fullmatch))} ik_llama.cpp",
        "8x",
    ),
    Result(
        "Encoders of trellis types, rows of 4096",
        "encoders",
        "trellis-widths",
        _trellis,
        "10x",
    ),
    Result(
        "Encoders of interleaved types",
        "encoders",
        "encoders",
        lambda t: f"{extremes(ratios(t, ['/ ik'], INTERLEAVED.fullmatch))} ik_llama.cpp",
    ),
    Result("Decoders", "encoders", "decoders", lambda t: f"{extremes(ratios(t, ['/ ggml'], lambda name: True))} ggml"),
    Result(
        "Time to merge experts, same file",
        "quantize",
        "merge",
        lambda t: f"{cell(t, 'merge-up-gate', '/ cp'):.2f}x cp",
        "1.15x",
    ),
    Result(
        "Memory of `quantize`",
        "quantize",
        "memory",
        lambda t: (
            f"at most {max(map(number, t.column('peak RSS'))):.0f} MiB, `--max-ram` up to {t.column('--max-ram')[-1]}"
        ),
    ),
    Result("Prompt, mixture of experts", "engine", "engine", _engine("pp", "llama.cpp"), "1x"),
    Result("Prompt, mixture of experts", "engine", "engine", _engine("pp", "ik_llama.cpp"), "1x"),
    Result("Generation, mixture of experts", "engine", "engine", _engine("tg", "llama.cpp"), "1x"),
    Result("Generation, mixture of experts", "engine", "engine", _engine("tg", "ik_llama.cpp"), "1x"),
    Result("Perplexity of the engine, same files", "fidelity", "perplexity", _largest_difference, "0.1 %"),
    Result("Verdict: does a runtime load this file?", "fidelity", "verdicts", _verdicts, "all"),
    Result(
        "Divergence with `--calibrate`, relative to an importance matrix alone",
        "error-feedback",
        "feedback",
        lambda t: extremes(ratios_after(t, "`--calibrate`"), 3, ""),
    ),
    Result(
        "Divergence of searched recipes, relative to the preset of that size",
        "search",
        "search",
        lambda t: extremes(ratios_after(t, r"searched(, [\w.]+)?"), 3, ""),
        "0.85",
    ),
    Result(
        "The same with `--calibrate`",
        "search",
        "search",
        lambda t: extremes(ratios_after(t, r".*calibrat\w+.*"), 3, ""),
        "0.5",
    ),
    Result("`quantize`, killed at random moments", "robustness", "kills-quantize", _kills, "all"),
    Result("`cook`, killed at random moments", "robustness", "kills-cook", _kills, "all"),
)


def summary(records: Records) -> str:
    """Return the table of the main results, and the list of their runs."""
    runs = list(dict.fromkeys(result.record for result in SUMMARY))
    rows = []
    for result in SUMMARY:
        record = records[result.record]
        name = f"[{result.name}]({result.page}.md)"
        run = str(runs.index(result.record) + 1)
        rows.append((name, result.text(record.tables[0]), result.target, record.date, run))
    table = Table(("result", "figure", "target", "date", "run"), tuple(rows))
    return f"{table.markdown()}\n\nRuns:\n\n{_runs([records[name] for name in runs])}"


def _runs(records: Sequence[Record]) -> str:
    """Return a numbered list of the origins of records."""
    return "\n".join(f"{i}. {origin(record)}" for i, record in enumerate(records, 1))


def origin(record: Record) -> str:
    """Return command, machine, date and commit of a record."""
    command = "" if record.command == UNKNOWN else f"`{record.command}`; "
    return f"{command}{record.machine}; {record.date}; commit {record.commit}"


# ---------------------------------------------------------------- the pages


def read_records() -> dict[str, Record]:
    """Return all records by their names."""
    return {path.stem: read_record(path) for path in sorted(DATA.glob("*.json"))}


def page_text(text: str, records: Records) -> str:
    """Return a page with the tables of records between its markers. Raises KeyError for an unknown record."""

    def block(match: re.Match[str]) -> str:
        kind, *names = match[2].split()
        return f"{match[1]}\n{summary(records) if kind == 'summary' else body(names)}\n\n{match[3]}"

    def body(names: Sequence[str]) -> str:
        if names[0].endswith("?") and names[0][:-1] not in records:
            return "No run is recorded yet."
        members = [records[name.removesuffix("?")] for name in names]
        if len(members) == 1:
            return record_text(members[0])
        return f"{rows_of(members).markdown()}\n\nRuns:\n\n{_runs(members)}"

    return _MARKER.sub(block, text)


def record_text(record: Record) -> str:
    """Return a record's origin, its lines and its tables."""
    lines = ["\n".join(["```text", *record.lines, "```"])] if record.lines else []
    return "\n\n".join([f"*{origin(record)}.*", *lines, *(table.markdown() for table in record.tables)])


def rows_of(records: Sequence[Record]) -> Table:
    """Return the rows of several records, each with the number of its run. Raises ValueError if columns differ."""
    (columns,) = {record.tables[0].columns for record in records}
    runs = enumerate(records, 1)
    return Table((*columns, "run"), tuple((*row, str(i)) for i, record in runs for row in record.tables[0].rows))


def records_of(text: str) -> set[str]:
    """Return the names of the records that a page shows."""
    markers = (match[2] for match in _MARKER.finditer(text) if match[2] != "summary")
    return {name.removesuffix("?") for marker in markers for name in marker.split()[1:]}


def unknown_ratios(text: str, records: Records) -> list[str]:
    """Return the ratios of a text ("9.0x", "10 times") that are in no cell of a record and not in the summary."""
    cells: Iterable[str] = (c for r in records.values() for t in r.tables for row in t.rows for c in row)
    sources = " ".join([*cells, summary(records)])
    numbers = set(re.findall(r"\d+(?:\.\d+)?", sources))
    return [match[0] for match in _RATIO.finditer(text) if match[1] not in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a page is not up to date")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="print the ratios of a text that no record has")
    options = parser.parse_args()
    records = read_records()
    if options.figures is not None:
        unknown = unknown_ratios(options.figures.read_text(encoding="utf-8"), records)
        sys.exit("\n".join([f"{options.figures}: in no record:", *unknown]) if unknown else 0)
    stale = []
    for page in sorted(PAGES.glob("*.md")):
        old = page.read_text(encoding="utf-8")
        text = page_text(old, records)
        if text != old and options.check:
            stale.append(page.name)
        elif text != old:
            page.write_text(text, encoding="utf-8")
    if stale:
        sys.exit(f"not up to date: {', '.join(stale)}: run scripts/make_benchmark_pages.py")


if __name__ == "__main__":
    main()
