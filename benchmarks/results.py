"""Records of benchmarks: the output of a run, with machine, date, commit and command, as JSON (``--json FILE``).

    options = parse_options(parser)     in place of parser.parse_args(): adds --json
    record_output(main)                 in place of main(): writes what it prints to the file of --json, at its end
    print_table(columns, rows)          prints the rows as they are measured

Tables are read from the Markdown that a benchmark prints, so that the record cannot differ from it. The pages in
docs/benchmarks show the records in docs/benchmarks/data (scripts/make_benchmark_pages.py): a rerun with --json replaces
them.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from processes import machine

ROOT = Path(__file__).resolve().parents[1]
UNKNOWN = "unknown"
#: Columns of the table of killed and resumed runs.
KILLS = ("run", "trials", "kills", "identical results", "tensors reused, %")


@dataclass(frozen=True)
class Table:
    """A table of texts, as printed."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def column(self, name: str) -> list[str]:
        """Return the cells of a column. Raises KeyError."""
        if name not in self.columns:
            raise KeyError(f"{name!r} is not one of the columns {self.columns}")
        i = self.columns.index(name)
        return [row[i] for row in self.rows]

    def markdown(self) -> str:
        """Return the table as Markdown; columns of numbers are aligned to the right."""
        marks = ["---:" if _is_of_numbers(self.column(name)) else "---" for name in self.columns]
        lines = [self.columns, marks, *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _is_of_numbers(texts: Iterable[str]) -> bool:
    values = [text for text in texts if text not in ("", "-")]
    return bool(values) and all(re.match(r"[-+−±≈<~]?\d(?!\d{3}-)", text) for text in values)  # and not dates


@dataclass(frozen=True)
class Record:
    """The result of one run. ``commit``: that of the source, with "+" if files were changed; "unknown" without git."""

    command: str
    machine: str
    date: str
    commit: str
    tables: tuple[Table, ...]
    lines: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the record as JSON, one row per line."""
        data = asdict(self)
        tables = data.pop("tables")
        lines = data.pop("lines")
        parts = [f" {json.dumps(key)}: {_dump(value)}" for key, value in data.items()]
        parts.append(f' "tables": [{", ".join(map(_table_json, tables))}]')
        parts += [f' "lines": {_rows_json(lines)}'] if lines else []
        return "{\n" + ",\n".join(parts) + "\n}\n"


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _table_json(table: dict[str, Sequence[object]]) -> str:
    return f'{{\n  "columns": {_dump(table["columns"])},\n  "rows": {_rows_json(table["rows"])}\n }}'


def _rows_json(rows: Iterable[object]) -> str:
    return "[\n" + ",\n".join(f"   {_dump(row)}" for row in rows) + "\n  ]"


def read_record(path: Path) -> Record:
    """Return the record in a file. Raises ValueError with its name."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        tables = [Table(tuple(t["columns"]), tuple(map(tuple, t["rows"]))) for t in data.pop("tables")]
        lines = tuple(data.pop("lines", ()))
        record = Record(**data, tables=tuple(tables), lines=lines)
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{path}: no record of a benchmark: {e}") from e
    for table in record.tables:
        if any(len(row) != len(table.columns) for row in table.rows):
            raise ValueError(f"{path}: a row does not have the columns {table.columns}")
    return record


def tables_of(text: str) -> tuple[list[Table], list[str]]:
    """Return the Markdown tables of a text, and its other lines."""
    tables: list[Table] = []
    text_lines: list[str] = []
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        columns = _cells(lines[i])
        if columns and i + 1 < len(lines) and re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", lines[i + 1].strip()):
            i += 2
            rows = []
            while i < len(lines) and (cells := _cells(lines[i])):
                rows.append(tuple(cells))
                i += 1
            tables.append(Table(tuple(columns), tuple(rows)))
        else:
            text_lines += [lines[i]] if lines[i].strip() else []
            i += 1
    return tables, text_lines


def _cells(line: str) -> list[str]:
    """Return the cells of a row of a Markdown table; empty for another line."""
    line = line.strip()
    if not (line.startswith("|") and line.endswith("|") and len(line) > 1):
        return []
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])]


def parse_options(parser: ArgumentParser) -> Namespace:
    """Return the parsed arguments, with --json."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the output as a record")
    return parser.parse_args()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """Print a table in Markdown, each row as soon as ``rows`` has it; return the rows."""
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    printed = []
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
        printed.append(row)
    return printed


def record_output(main: Callable[[], object]) -> None:
    """Run a benchmark and, if it succeeds, write the record of its output to the file of --json."""
    path = _json_path(sys.argv[1:])
    if path is None:
        main()
        return
    copy = _Copy(sys.stdout)
    sys.stdout = copy
    end: SystemExit | None = None
    try:
        main()
    except SystemExit as e:
        end = e
    finally:
        sys.stdout = copy.stream
    if end is None or end.code in (None, 0):
        path.write_text(record_of(copy.text.getvalue()).to_json(), encoding="utf-8")
    if end is not None:
        raise end


def kills_table(run: str, trials: int, kills: int, identical: int, reused: float | None) -> str:
    """Return the table of killed and resumed runs; ``reused``: share of the tensors that a resume found complete."""
    share = "" if reused is None else f"{100 * reused:.0f}"
    return Table(KILLS, ((run, *map(str, (trials, kills, identical)), share),)).markdown()


def _json_path(arguments: Sequence[str]) -> Path | None:
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", type=Path)
    path: Path | None = parser.parse_known_args(list(arguments))[0].json
    return path


def record_of(text: str) -> Record:
    """Return the record of a text that this program printed."""
    tables, lines = tables_of(text)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return Record(command_line(sys.argv), machine(), date, commit(), tuple(tables), tuple(lines))


def command_line(argv: Sequence[str]) -> str:
    """Return the command without --json, and without the folders of files outside this checkout."""
    words = [_without_folder(word) for word in argv]
    if "--json" in words:
        i = words.index("--json")
        del words[i : i + 2]
    return shlex.join(word for word in words if not word.startswith("--json="))


def _without_folder(word: str) -> str:
    path = Path(word)
    if path.is_absolute() or word.startswith((".", "~")):
        path = path.expanduser().resolve()
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return word


def commit() -> str:
    """Return the commit of this checkout."""
    try:
        head = _git("rev-parse", "--short=9", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class _Copy(io.TextIOBase):
    """A stream that also stores a copy of its text."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.text = stream, io.StringIO()

    def write(self, text: str) -> int:
        """Write a text."""
        self.text.write(text)
        return self.stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()
