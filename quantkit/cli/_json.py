"""``--json [FILE]`` of all commands: JSON in FILE beside the text; without a value, or with -, JSON alone on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from quantkit.cli._options import GroupedOption, claim
from quantkit.formats.outputs import atomic_write, check_apart
from quantkit.formats.remote import locate

#: Values of --json: in commands with arguments and in groups, which must not be taken as its value, and elsewhere.
BESIDE_ARGUMENTS, _ANY = r"-|[^-].*\.jsonl?", r"-|[^-].*"
_OVERWRITE = f"{__name__}.overwrite"


class JsonOutput:
    """Where a command writes its result as JSON."""

    def __init__(self, place: str | None) -> None:
        #: Whether stdout gets JSON, and nothing else.
        self.only = place == "-"
        self.path: Path | None = None if place in (None, "-") else locate(str(place))

    def hold_file(self, ctx: click.Context) -> None:
        """Hold the file until the command ends. Raises ResourceError if it exists, or is another of the command's."""
        if self.path is not None:
            check_apart([self.path], _places(ctx.params.values()))
            self.path = claim(self.path, overwrite=bool(ctx.params.get("overwrite") or ctx.meta.get(_OVERWRITE)))

    def print(self, text: Callable[[], str], result: Callable[[], Any]) -> None:
        """Print the text, or the result as JSON; write the result to the file."""
        click.echo(_to_text(result()) if self.only else text())
        self.write(result)

    def write(self, result: Callable[[], Any]) -> None:
        """Write the result to the file, if there is one."""
        if self.path is not None:
            with atomic_write(self.path) as part:
                part.write_text(_to_text(result()) + "\n", encoding="utf-8")


def _to_text(result: Any) -> str:
    return json.dumps(result, indent=2, allow_nan=False)


def _places(values: Iterable[Any]) -> Iterator[Path]:
    """Yield the paths among a command's parameters."""
    for value in values:
        if isinstance(value, Path):
            yield value
        elif isinstance(value, str):
            yield locate(value)
        elif isinstance(value, tuple):
            yield from _places(value)


class JsonOption(GroupedOption):
    """``--json``; the command can declare further parameters."""

    def prepare(self, params: list[click.Parameter]) -> None:
        """Adapt to the command's parameters: with arguments, a value ends in .json; a file needs an --overwrite."""
        if any(isinstance(p, click.Argument) for p in params):
            self.values = BESIDE_ARGUMENTS
        if not any(p.name == "overwrite" for p in params):
            params.append(_overwrite_option())


def _overwrite_option() -> click.Option:
    def note(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        ctx.meta[_OVERWRITE] = value

    return GroupedOption(
        ["--overwrite"],
        group="Output",
        is_flag=True,
        expose_value=False,
        callback=note,
        help="Replace an existing file of --json.",
    )


def json_option(
    content: str = "the result", *, name: str = "json_to", raw: bool = False, values: str = _ANY
) -> Callable[[Any], Any]:
    """Declare --json; the parameter is a JsonOutput, or the text of the value if ``raw``."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        return value if raw else JsonOutput(value)

    return click.option(
        "--json",
        name,
        cls=JsonOption,
        group="Output",
        is_flag=False,
        flag_value="-",
        values=values,
        metavar="[FILE]",
        callback=convert,
        help=f"Write {content} as JSON to FILE (.json); without FILE, print only that.",
    )
