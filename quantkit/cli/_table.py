"""Plain-text tables and lists that fit the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from textwrap import wrap

from quantkit.names import printable

#: Maximum number of lines of an abridged list.
_LINES = 12
#: Minimum width of text columns, and the one used if the table still does not fit.
_FOLD, _NARROW = 20, 8


def columns() -> int | None:
    """Return COLUMNS, or the width of the terminal; None for pipes and files, where lines are not folded."""
    if os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


def fold(line: str, indent: int) -> str:
    """Return a line folded to the terminal, continued behind ``indent`` spaces."""
    max_width = columns()
    if max_width is None or len(line) <= max_width:
        return line
    return "\n".join(wrap(line, max_width, subsequent_indent=" " * indent, break_on_hyphens=False))


def format_list(lines: Iterable[str], indent: int, *, full: bool) -> list[str]:
    """Return the lines of a list, escaped, indented and folded; only the first dozen unless ``full``."""
    lines = list(map(printable, lines))
    n_omitted = len(lines) - _LINES + 1
    if not full and n_omitted > 1:
        lines[_LINES - 1 :] = [f"and {n_omitted} more (--per-tensor lists all)"]
    return [fold(" " * indent + line, indent + 2) for line in lines]


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    left: int | Collection[int] = 1,
    droppable: Collection[int] = (),
) -> str:
    """Return a table. ``left`` columns (a number of them, or indices) are text: aligned left, and they may fold.

    Control characters in cells are escaped: names come from files.
    Empty columns are left out. A table too wide for the terminal folds headings and text; if that is not enough it
    drops ``spare`` columns, and at last splits into parts, one below the other.
    """
    cells = [[printable(c) for c in row] for row in (header, *rows)]
    texts = range(left) if isinstance(left, int) else left
    visible = [i for i in range(len(header)) if not i or not rows or any(row[i] not in ("", "-") for row in cells[1:])]
    grid = _Grid(cells, texts, visible)
    return "\n\n".join("\n".join(grid.lines(part)) for part in grid.parts(droppable))


def _wrap(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else wrap(cell, width, break_on_hyphens=False)


class _Grid:
    """The cells of a table, and the widths of its columns: largest, least, and without the heading."""

    def __init__(self, cells: Sequence[Sequence[str]], texts: Collection[int], visible: Sequence[int]) -> None:
        self.cells = cells
        self.texts = texts
        self.visible = visible
        self.width_limit = columns() or sys.maxsize
        self.body = [max((len(row[i]) for row in cells[1:]), default=0) for i in range(len(cells[0]))]
        self.most = [max(len(name), body) for name, body in zip(cells[0], self.body, strict=True)]
        # The columns that identify a row: all up to the first run of text.
        begin = next((n for n, i in enumerate(visible) if i in texts), 0)
        end = next((n for n, i in enumerate(visible) if n > begin and i not in texts), len(visible))
        self.keys = visible[:end]
        self.least = [self._least(i) for i in range(len(cells[0]))]

    def _least(self, i: int) -> int:
        word = max(map(len, self.cells[0][i].split()), default=0)
        if i not in self.texts:
            return max(word, self.body[i])
        return max(word, min(self.body[i], self.width_limit * 3 // 5 if i in self.keys[:2] else _FOLD))

    def _fits(self, part: Sequence[int], widths: Sequence[int]) -> bool:
        return sum(widths[i] for i in part) + 2 * (len(part) - 1) <= self.width_limit

    def parts(self, droppable: Collection[int]) -> Iterator[list[int]]:
        """Yield the columns of each part; one part if they fit."""
        visible = list(self.visible)
        for i in droppable:
            if i in visible and not self._fits(visible, self.least):
                visible.remove(i)
        part = keys = [i for i in self.keys if i in visible]
        for i in visible[len(keys) :]:
            if part != keys and not self._fits([*part, i], self.least):
                yield part
                part = keys
            part = [*part, i]
        yield part

    def lines(self, part: Sequence[int]) -> Iterator[str]:
        """Yield the lines of a part, headings first."""
        widths = self._widths(part)
        for n, row in enumerate(self.cells):
            cell_lines = [_wrap(row[i], widths[i]) for i in part]
            for line in zip_longest(*cell_lines, fillvalue=""):
                aligned = (f"{c:{'<' if i in self.texts else '>'}{widths[i]}}" for i, c in zip(part, line, strict=True))
                yield "  ".join(aligned).rstrip()
            if n == 0:
                yield "  ".join("-" * widths[i] for i in part)

    def _widths(self, part: Sequence[int]) -> list[int]:
        """Return widths that fit: headings shrink first, then the widest text."""
        widths = [min(width, self.width_limit) for width in self.most]
        while not self._fits(part, widths):
            shrinkable = [i for i in part if widths[i] > self.least[i]]
            if not (shrinkable := shrinkable or [i for i in part if i in self.texts and widths[i] > _NARROW]):
                break
            widths[max(shrinkable, key=lambda i: (widths[i] > self.body[i], widths[i]))] -= 1
        return widths
