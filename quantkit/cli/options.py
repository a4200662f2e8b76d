"""Parameter types, grouped help and values as text, which several commands share."""

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

from quantkit.cli.table import folded
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
            found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            found = -1.0
        if not 0 <= found <= 1:
            self.fail(f"{text!r} is not a share; write 5% or 0.05", param, ctx)
        return found


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


class Chunks(_Int):
    """A number of chunks; -1 becomes None, all."""

    name = "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            found = int(value)
        except ValueError:
            found = 0
        if found == 0 or found < -1:
            self.fail("give a number above 0, or -1 for all", param, ctx)
        return found if found > 0 else None


CHUNKS = Chunks()


class GroupedOption(click.Option):
    """An option that --help lists under its group's heading."""

    def __init__(self, *args: Any, group: str = "Options", values: str | None = None, **kwargs: Any) -> None:
        self.group = group
        #: The value may be omitted; a regular expression then tells values from what follows.
        self.may_be_bare, self.values = kwargs.get("is_flag") is False, values
        super().__init__(*args, **kwargs)
        if self.metavar is None and isinstance(self.type, (click.IntRange, click.types.IntParamType)):
            self.metavar = "N"


class WholeNames(click.Command):
    """A command to which -xyz is always one name; click reads an unknown one as -x -y -z, or -x with value yz."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = {
            n: o for o in self.get_params(ctx) if isinstance(o, click.Option) for n in (*o.opts, *o.secondary_opts)
        }
        args = _with_bare_values(args, named)
        left = args[::-1]
        while left and left[-1] != "--":
            arg = left.pop()
            found = named.get(arg)
            if found is None and not arg.startswith("-") and not ctx.allow_interspersed_args:
                break  # a command of this group, and its arguments
            if found is not None and not found.is_flag and not getattr(found, "may_be_bare", False):
                del left[len(left) - found.nargs :]
            elif found is None and _is_unknown(arg, named):
                raise click.NoSuchOption(arg, possibilities=get_close_matches(arg, named), ctx=ctx)
        return super().parse_args(ctx, args)


def _with_bare_values(args: list[str], named: Mapping[str, click.Option]) -> list[str]:
    """Return arguments where an option that may be bare, and is, has the value that this stands for."""
    end = args.index("--") if "--" in args else len(args)
    made = list(args)
    for i, arg in enumerate(args[:end]):
        found = named.get(arg)
        values = getattr(found, "values", None)
        if found is not None and values and (i + 1 == end or not re.fullmatch(values, args[i + 1])):
            made[i] = f"{arg}={found.flag_value}"
    return made


def _is_unknown(arg: str, named: Mapping[str, click.Option]) -> bool:
    """Tell whether ``arg`` is like -xyz, but neither an option, with =VALUE or not, nor one with a number, as -j4."""
    if len(arg) < 3 or arg[0] != "-" or arg[1] == "-" or arg.partition("=")[0] in named:
        return False
    first = named.get(arg[:2])
    return first is None or first.is_flag or not arg[2].isdecimal()


class GroupedCommand(WholeNames):
    """A command whose help lists options by group in the order of declaration, and last those that change nothing."""

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
            with formatter.section("Taken as llama.cpp and ik_llama.cpp spell them, with no effect here"):
                formatter.write_text(", ".join(without_effect))


class DiffTrouble(click.ClickException):
    """An error of a command that compares; its exit code, like diff's, tells it from a difference."""

    exit_code = 2


def option(*names: str, group: str, **kwargs: Any) -> Callable[[F], F]:
    """Declare a grouped option."""
    return click.option(*names, cls=GroupedOption, group=group, **kwargs)


def setting(*names: str, group: str, **kwargs: Any) -> Callable[[F], F]:
    """Declare a grouped option whose help shows its default."""
    return option(*names, group=group, show_default=True, **kwargs)


def options(*declared: Callable[[F], F]) -> Callable[[F], F]:
    """Return one decorator that declares several options; --help lists them in this order."""

    def declare(function: F) -> F:
        for each in reversed(declared):
            function = each(function)
        return function

    return declare


#: -j, for commands that work tensor by tensor.
threads_option = option(
    *("-j", "-t", "--threads"),
    group="The run",
    type=click.IntRange(0),
    help="Worker threads; by default, and with 0, all CPUs.",
)


#: Names the cache of encoded tensors where --cache does not.
CACHE_VARIABLE = "QUANTKIT_TENSOR_CACHE"

cache_option = option(
    "--cache",
    group="The run",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=CACHE_VARIABLE,
    help="Keep encoded tensors in this folder, and take from it what was encoded before.",
)
cache_size_option = option(
    "--cache-size", group="The run", type=SIZE, help="With --cache: the most it may take from now on (50G)."
)


def cached(cache: Path | None, cache_size: int | None) -> RunOptions:
    """Return what --cache and --cache-size say of a run."""
    if cache is None:
        if cache_size is not None:
            raise click.UsageError("--cache-size is the size of a --cache, but none was given")
        return {}
    return {"cache": cache, "cache_size": cache_size}


#: --ray, with an address or without.
ray_option = option(
    "--ray",
    group="The run",
    is_flag=False,
    flag_value="auto",
    values=r"auto|local|ray://.*|\S+:\d+",
    metavar="[ADDRESS]",
    help="Work on all nodes of a Ray cluster: HOST:PORT, or bare, the one this machine is in.",
)


def start_nodes(ray: str | None, threads: int | None, backend: str = "cpu") -> None:
    """Let the nodes of --ray start what encodes, while this process plans what they will do."""
    if ray is not None:
        from quantkit.pipeline.ahead import start_workers

        start_workers(ray, threads, cards=backend != "cpu")


#: --spool, for commands that write through a plan.
spool_option = option(
    "--spool",
    group="The run",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where an output that is a URL grows until it is uploaded.  [default: in the cache]",
)

#: What commands share that make one output from a plan.
plan_options = options(
    threads_option,
    ray_option,
    setting("--max-ram", group="The run", type=SIZE, default="512MiB", help="Memory for all buffers."),
    option("--resume", group="The run", is_flag=True, help="Continue an interrupted run."),
    option("--overwrite", group="The run", is_flag=True, help="Replace an existing output."),
    option("--dry-run", group="Output", is_flag=True, help="Only print the plan."),
    option("--json", "as_json", group="Output", is_flag=True, help="Print the summary as JSON."),
)


def on_command_line(name: str) -> bool:
    """Tell whether the command line, not a default, gives the current command's parameter ``name``."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def claim(path: Path, *inputs: Path | None, overwrite: bool) -> Path:
    """Return where an output that is none of the ``inputs`` is to be ``written``; it is held until the command ends."""
    from quantkit.formats.outputs import Output, check_apart

    check_apart([path], inputs)
    return click.get_current_context().with_resource(Output(path, overwrite=overwrite)).path


def echo_notes(notes: Iterable[str]) -> None:
    """Print notes on stderr, folded to the terminal; warnings already say that they are."""
    for note in notes:
        click.echo(folded(f"{'' if note.startswith('warning: ') else 'note: '}{printable(note)}", 2), err=True)


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
