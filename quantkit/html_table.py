"""Results as tables: ``as_table`` for programs, HTML for notebooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

#: Maximum number of rows in a notebook.
MAX_ROWS = 100


class Table(NamedTuple):
    """Headings, rows of plain values (numbers, texts, None), and a caption.

    ``pandas.DataFrame(table.rows, columns=table.header)`` makes a frame of it.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    caption: str = ""

    def to_html(self) -> str:
        """Return the table as HTML, of ``MAX_ROWS`` rows at most; a last line counts the others."""
        head = "".join(f"<th>{escape(heading)}</th>" for heading in self.header)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in self.rows[:MAX_ROWS])
        if (omitted := len(self.rows) - MAX_ROWS) > 0:
            body += f'<tr><td colspan="{len(self.header)}">{omitted:,} more rows: as_table() returns all</td></tr>'
        caption = f"<caption>{escape(self.caption)}</caption>" if self.caption else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def to_text(self) -> str:
        """Return the table as text, of ``MAX_ROWS`` rows at most."""
        rows = [self.header, *(tuple(map(_text, row)) for row in self.rows[:MAX_ROWS])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{cell:{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
        omitted = len(self.rows) - MAX_ROWS
        return "\n".join(
            [*([self.caption] * bool(self.caption)), *lines, *([f"{omitted:,} more rows"] * (omitted > 0))]
        )


class HtmlTable(ABC):
    """A result that a notebook shows as a table."""

    __slots__ = ()

    @abstractmethod
    def as_table(self) -> Table:
        """Return the result as a table."""

    def _repr_html_(self) -> str:
        return self.as_table().to_html()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return both forms; without it a notebook would also save the text of the dataclass, often megabytes."""
        table = self.as_table()
        return {"text/plain": table.to_text(), "text/html": table.to_html()}


def table_of(header: str, rows: Iterable[tuple[Any, ...]], caption: str = "") -> Table:
    """Return a table whose headings are separated by commas."""
    return Table(tuple(name.strip() for name in header.split(",")), tuple(rows), caption)


def _cell(value: Any) -> str:
    side = "right" if _is_number(value) else "left"
    return f'<td style="text-align: {side}">{escape(_text(value))}</td>'


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if _is_number(value):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return "" if value is None else value.name if isinstance(value, Path) else str(value)
