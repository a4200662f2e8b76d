"""What several commands share: parameter types, grouped help, plain tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from quantkit.helpers import parse_size, printable

F = TypeVar("F", bound=Callable[..., Any])


if TYPE_CHECKING:
    _Int = click.ParamType[int]
    _Float = click.ParamType[float]
    _Ints = click.ParamType[tuple[int, ...]]
else:  # click before 8.5 has it plain
    _Int = _Float = _Ints = click.ParamType


class Size(_Int):
    """A number of bytes: 48G, 512MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as e:
            self.fail(str(e), param, ctx)


SIZE = Size()


class Share(_Float):
    """A number from 0 to 1, or a percentage."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            found = -1.0
        if not 0 <= found <= 1:
            self.fail(f"{text!r} is not a share; write 5% or 0.05", param, ctx)
        return found


SHARE = Share()


class Numbers(_Ints):
    """Numbers: ``512``, ``128,512``, ``1-4``, ``64-512*2``, as llama-bench takes them."""

    name = "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(n for part in str(value).split(",") for n in _range(part))
        except ValueError:
            self.fail(f"{value!r}: write 512, or 128,512, or 64-512*2, or 64-512+64", param, ctx)


def _range(text: str) -> list[int]:
    first, dash, rest = text.partition("-")
    if not dash:
        return [int(text)]
    for sign in "*+":
        last, found, step = rest.partition(sign)
        if found:
            break
    n, end, by = int(first), int(last), int(step or 1)
    if by < 1 or (sign == "*" and step and (by < 2 or n < 1)):
        raise ValueError(text)
    numbers = []
    while n <= end:
        numbers.append(n)
        n = n * by if step and sign == "*" else n + by
    return numbers


NUMBERS = Numbers()


class GroupedOption(click.Option):
    """An option that is listed in --help under a heading of its group."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        self.group = group
        super().__init__(*args, **kwargs)


class GroupedCommand(click.Command):
    """A command whose help lists options by group, in the order they were declared."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(param, "group", "Other"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=34)


def option(*names: str, group: str, **kwargs: Any) -> Callable[[F], F]:
    """Declare a grouped option."""
    return click.option(*names, cls=GroupedOption, group=group, **kwargs)


def echo_notes(notes: Iterable[str]) -> None:
    """Print notes on stderr, a line each; those that are warnings say so themselves."""
    for note in notes:
        click.echo(f"{'' if note.startswith('warning: ') else 'note: '}{printable(note)}", err=True)


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, left: int | Collection[int] = 1) -> str:
    """Return a plain-text table; ``left`` columns, the first so many or these, are aligned left, the others right."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    columns = range(left) if isinstance(left, int) else left
    lines = [
        "  ".join(c.ljust(w) if i in columns else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(line.rstrip() for line in lines)


def json_value(value: Any) -> Any:
    """Return ``value`` as JSON can hold it: NaN and infinities, which it cannot, become the strings "nan", "inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [json_value(v) for v in value]
    return value


def one_line(value: Any) -> str:
    """Return a metadata value on one line of printable characters, strings as they are."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(one_line, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.7g}" if isinstance(value, float) else printable(str(value))
