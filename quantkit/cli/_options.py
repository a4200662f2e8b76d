"""Parameter types, grouped options and output helpers shared by several commands."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from quantkit.cli._paths import Place
from quantkit.cli._table import fold
from quantkit.errors import QuantkitError
from quantkit.names import printable
from quantkit.units import parse_size

F = TypeVar("F", bound=Callable[..., Any])


if TYPE_CHECKING:
    from quantkit.pipeline.run import RunOptions

    _Int = click.ParamType[int]
    _Float = click.ParamType[float]
    _Ints = click.ParamType[tuple[int, ...]]
else:  # before click 8.5 it is not generic
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
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            self.fail(f"{text!r} is not a share; write 5% or 0.05", param, ctx)
        return share


SHARE = Share()


class GPULayers(_Int):
    """A number of layers, or ``all``, as llama.cpp takes them."""

    name = "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from quantkit.model.placement import ALL_LAYERS

        return ALL_LAYERS if value == "all" else click.IntRange(0).convert(value, param, ctx)


class Numbers(_Ints):
    """Numbers as llama-bench takes them: ``512``, ``128,512``, ``1-4``, ``64-512*2``."""

    name = "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(n for part in str(value).split(",") for n in _range(part))
        except ValueError:
            self.fail(f"{value!r}: write 512, or 128,512, or 64-512*2, or 64-512+64", param, ctx)


def _range(text: str) -> list[int]:
    first, dash, tail = text.partition("-")
    if not dash:
        return [int(text)]
    for sign in "*+":
        last, operator, step = tail.partition(sign)
        if operator:
            break
    n = int(first)
    end = int(last)
    increment = int(step or 1)
    if increment < 1 or (sign == "*" and step and (increment < 2 or n < 1)):
        raise ValueError(text)
    numbers = []
    while n <= end:
        numbers.append(n)
        n = n * increment if step and sign == "*" else n + increment
    return numbers


NUMBERS = Numbers()


class Chunks(_Int):
    """A number of chunks; -1 becomes None, all."""

    name = "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            count = int(value)
        except ValueError:
            count = 0
        if count == 0 or count < -1:
            self.fail("give a number above 0, or -1 for all", param, ctx)
        return count if count > 0 else None


CHUNKS = Chunks()


class GroupedOption(click.Option):
    """An option that --help lists under its group's heading."""

    def __init__(self, *args: Any, group: str = "Options", values: str | None = None, **kwargs: Any) -> None:
        self.group = group
        #: The value may be omitted; a regular expression then tells values from other arguments.
        self.may_be_bare, self.values = kwargs.get("is_flag") is False, values
        super().__init__(*args, **kwargs)
        if self.metavar is None and isinstance(self.type, (click.IntRange, click.types.IntParamType)):
            self.metavar = "N"


class WholeNames(click.Command):
    """A command for which -xyz is one name; click reads an unknown one as -x -y -z, or -x with value yz."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known_options = {
            n: o for o in self.get_params(ctx) if isinstance(o, click.Option) for n in (*o.opts, *o.secondary_opts)
        }
        args = _fill_optional_values(args, known_options)
        remaining = args[::-1]
        while remaining and remaining[-1] != "--":
            arg = remaining.pop()
            match = known_options.get(arg)
            if match is None and not arg.startswith("-") and not ctx.allow_interspersed_args:
                break  # a command of this group, and its arguments
            if match is not None and not match.is_flag and not getattr(match, "may_be_bare", False):
                del remaining[len(remaining) - match.nargs :]
            elif match is None and _is_unknown(arg, known_options):
                raise click.NoSuchOption(arg, possibilities=get_close_matches(arg, known_options), ctx=ctx)
        return super().parse_args(ctx, args)


def _fill_optional_values(args: list[str], known_options: Mapping[str, click.Option]) -> list[str]:
    """Return the arguments, with the default value after options whose optional value is missing."""
    end = args.index("--") if "--" in args else len(args)
    result = list(args)
    for i, arg in enumerate(args[:end]):
        match = known_options.get(arg)
        values = getattr(match, "values", None)
        if match is not None and values and (i + 1 == end or not re.fullmatch(values, args[i + 1])):
            result[i] = f"{arg}={match.flag_value}"
    return result


def _is_unknown(arg: str, known_options: Mapping[str, click.Option]) -> bool:
    """Return whether ``arg`` is like -xyz, but neither an option, with =VALUE or not, nor one like -j4."""
    if len(arg) < 3 or arg[0] != "-" or arg[1] == "-" or arg.partition("=")[0] in known_options:
        return False
    first = known_options.get(arg[:2])
    return first is None or first.is_flag or not arg[2].isdecimal()


class GroupedCommand(WholeNames):
    """A command whose help lists options by group, in order of declaration, and ignored ones last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(param, "group", "Other"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=34)
        if without_effect := [o.opts[0] for o in self.get_params(ctx) if hasattr(o, "note")]:
            with formatter.section("Accepted for compatibility with llama.cpp and ik_llama.cpp, without effect"):
                formatter.write_text(", ".join(without_effect))


class UserError(click.ClickException):
    """An error of the library for click: one line that ends with its code, and its exit code."""

    def __init__(self, error: QuantkitError) -> None:
        super().__init__(f"{printable(error.message)} [{error.code}]")
        self.exit_code = error.exit_code  # type: ignore[misc]


class DiffError(UserError):
    """An error of a command that compares: exit code 2, as diff's, since 1 means a difference."""

    def __init__(self, error: QuantkitError) -> None:
        super().__init__(error)
        self.exit_code = 2  # type: ignore[misc]


def option(*names: str, group: str, **kwargs: Any) -> Callable[[F], F]:
    """Declare a grouped option."""
    return click.option(*names, cls=GroupedOption, group=group, **kwargs)


def setting(*names: str, group: str, **kwargs: Any) -> Callable[[F], F]:
    """Declare a grouped option whose help shows its default."""
    return option(*names, group=group, show_default=True, **kwargs)


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Return one decorator that declares several options; --help lists them in this order."""

    def declare(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return declare


#: -j, for commands that work tensor by tensor.
threads_option = option(
    "-j",
    "-t",
    "--threads",
    group="Run",
    type=click.IntRange(0),
    help="Worker threads; 0 or by default, all CPUs.",
)


#: The default of --cache.
CACHE_VARIABLE = "QUANTKIT_TENSOR_CACHE"

cache_option = option(
    "--cache",
    group="Run",
    metavar="DIR",
    type=Place(file_okay=False),
    envvar=CACHE_VARIABLE,
    help="Cache encoded tensors in this directory, and reuse them.",
)
cache_size_option = option("--cache-size", group="Run", type=SIZE, help="Size limit of the cache (50G).")


def cache_arguments(cache: Path | None, cache_size: int | None) -> RunOptions:
    """Return the run options of --cache and --cache-size."""
    if cache is None:
        if cache_size is not None:
            raise click.UsageError("--cache-size is the size of a --cache, but none was given")
        return {}
    return {"cache": cache, "cache_size": cache_size}


#: --ray, with an address or without.
ray_option = option(
    "--ray",
    group="Run",
    is_flag=False,
    flag_value="auto",
    values=r"auto|local|ray://.*|\S+:\d+",
    metavar="[ADDRESS]",
    help="Run on all nodes of a Ray cluster: HOST:PORT; without a value, the one this machine is in.",
)


def start_nodes(ray: str | None, threads: int | None, backend: str = "cpu") -> None:
    """Start worker processes on the nodes of --ray while this process plans."""
    if ray is not None:
        from quantkit.cluster import prestart_workers

        prestart_workers(ray, threads, gpus=backend != "cpu")


#: --spool, for commands that write through a plan.
spool_option = option(
    "--spool",
    group="Run",
    type=Place(file_okay=False),
    metavar="DIR",
    help="Directory for the local copy of an output that is a URL.  [default: in the cache]",
)

#: Options of commands that write one output from a plan.
plan_options = options(
    threads_option,
    ray_option,
    setting("--max-ram", group="Run", type=SIZE, default="512MiB", help="Memory for buffers."),
    option("--resume", group="Run", is_flag=True, help="Continue an interrupted run."),
    option("--overwrite", group="Run", is_flag=True, help="Replace an existing output."),
    option("--dry-run", group="Output", is_flag=True, help="Print the plan only."),
    option("--json", "as_json", group="Output", is_flag=True, help="Print the summary as JSON."),
)


def on_command_line(name: str) -> bool:
    """Return whether the command line, not a default, sets the current command's parameter ``name``."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def claim(path: Path, *inputs: Path | None, overwrite: bool) -> Path:
    """Return the path of an output that is none of the ``inputs``; it is held until the command ends."""
    from quantkit.formats.outputs import Output, check_apart

    check_apart([path], inputs)
    return click.get_current_context().with_resource(Output(path, overwrite=overwrite)).path


def echo_notes(notes: Iterable[str]) -> None:
    """Print notes on stderr, folded to the terminal; warnings have their own prefix."""
    for note in notes:
        click.echo(fold(f"{'' if note.startswith('warning: ') else 'note: '}{printable(note)}", 2), err=True)


def json_value(value: Any) -> Any:
    """Return ``value`` for JSON, which has no NaN or infinity: they become the strings "nan" and "inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [json_value(v) for v in value]
    return value


def to_json(value: Any) -> str:
    """Return a result as --json prints it. ValueError for NaN and infinity."""
    return json.dumps(value, indent=2, allow_nan=False)


def one_line(value: Any) -> str:
    """Return a metadata value on one line of printable characters, strings as they are."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(one_line, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.7g}" if isinstance(value, float) else printable(str(value))
