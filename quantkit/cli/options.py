"""What several commands share: parameter types, grouped help, plain tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from quantkit.helpers import parse_size, printable

F = TypeVar("F", bound=Callable[..., Any])


if TYPE_CHECKING:
    _ParamType = click.ParamType[int]
else:  # click before 8.5 has it plain
    _ParamType = click.ParamType


class Size(_ParamType):
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
