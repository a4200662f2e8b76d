"""Parameter types, grouped options and output helpers shared by several commands."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from quantkit.cli._extras import Further, check_command
from quantkit.cli._help import HelpContext
from quantkit.cli._paths import Place
from quantkit.cli._table import fold
from quantkit.errors import QuantkitError
from quantkit.extras import Extra
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


class Sizes(_Ints):
    """Sizes with commas between them: 24G,64G."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(parse_size(part) for part in str(value).split(","))
        except ValueError as e:
            self.fail(str(e), param, ctx)


SIZES = Sizes()


class Tokens(_Int):
    """A number of tokens, also as 32k: 32 times 1024."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).lower()
        number = text.removesuffix("k")
        if not number.isdecimal():
            self.fail(f"{value!r} is not a number of tokens; write 32768 or 32k", param, ctx)
        return int(number) * (1024 if text.endswith("k") else 1)


TOKENS = Tokens()

#: The smallest shard size that is accepted without a unit.
_MIN_BARE = 100_000


class ShardSize(Size):
    """The maximum size of a shard; a small number without a unit is refused: 48 stands for 48G."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, str) and value.strip().isdecimal() and int(value) < _MIN_BARE:
            self.fail(f"{value} bytes: is {value}G (gigabytes) or {value}M (megabytes) meant?", param, ctx)
        return super().convert(value, param, ctx)


SHARD_SIZE = ShardSize()


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


class Names(click.Choice):  # type: ignore[type-arg, unused-ignore]  # generic since click 8.2
    """One of some names, which may have other spellings; the value is the name inside quantkit."""

    def __init__(self, names: Mapping[str, str], spellings: Mapping[str, str]) -> None:
        super().__init__(list(names), case_sensitive=False)
        self.values = {**names, **{spelling: names[name] for spelling, name in spellings.items() if name in names}}
        self.values |= {value: value for value in names.values()}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        inner = self.values.get(str(value).lower())
        return super().convert(value, param, ctx) if inner is None else inner


#: Other spellings of llama.cpp and ik_llama.cpp on the command line, where help shows ``llama.cpp`` and ``ik``.
SPELLINGS = {
    **dict.fromkeys(("mainline", "llama", "llama-cpp"), "llama.cpp"),
    **dict.fromkeys(("ik_llama.cpp", "ik_llama", "ik-llama.cpp", "ik-llama"), "ik"),
    "ours": "quantkit",
}


def project_name(value: str) -> str:
    """Return the name on the command line of a project, or a dialect, by its name inside quantkit."""
    return {"mainline": "llama.cpp", "ik_llama.cpp": "ik", "ours": "quantkit"}.get(value, value)


def project_names(values: Iterable[str]) -> Names:
    """Return the type of an option whose value is a project, or a dialect, by its name inside quantkit."""
    return Names({project_name(value): value for value in values}, SPELLINGS)


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
        #: The value may be omitted; a regular expression then distinguishes values from other arguments.
        self.may_be_bare, self.values = kwargs.get("is_flag") is False, values
        super().__init__(*args, **kwargs)
        if self.metavar is None and isinstance(self.type, click.types.IntParamType):
            self.metavar = "N"
        elif self.metavar is None and isinstance(self.type, click.types.FloatParamType):
            self.metavar = "X"

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return the text after the help, without the range of values: the error for other values states it."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class WholeNames(click.Command):
    """A command for which -xyz is one name; click reads an unknown one as -x -y -z, or -x with value yz."""

    context_class = HelpContext

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Return both names: click keeps the option of the first context, which may have only --help."""
        return ["-h", "--help"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known_options = {
            n: o for o in self.get_params(ctx) if isinstance(o, click.Option) for n in (*o.opts, *o.secondary_opts)
        }
        args = _fill_optional_values(args, known_options)
        remaining = args[::-1]
        while remaining and remaining[-1] != "--":
            arg = remaining.pop()
            match = known_options.get(arg.partition("=")[0])
            if match is None and not arg.startswith("-") and not ctx.allow_interspersed_args:
                break  # the command and its arguments
            if match is not None:
                NoEffect.from_context(ctx).typed[match] = arg.partition("=")[0]
                if "=" not in arg and not match.is_flag and not getattr(match, "may_be_bare", False):
                    del remaining[len(remaining) - match.nargs :]
            elif _is_unknown(arg, known_options):
                raise _no_such_option(ctx, arg, known_options)
        return super().parse_args(ctx, args)


class NoEffect:
    """Names of options as they are typed on a command line, and why some of them have no effect."""

    def __init__(self) -> None:
        self.typed: dict[click.Parameter, str] = {}
        self.reasons: dict[str, list[str]] = {}

    @classmethod
    def from_context(cls, ctx: click.Context) -> NoEffect:
        """Return that of a command line."""
        return cast(NoEffect, ctx.meta.setdefault(f"{__name__}.{ctx.command_path}", cls()))

    def name(self, option: click.Parameter) -> str:
        """Return an option's name as it is typed."""
        return self.typed.get(option, option.opts[0])

    def add(self, option: click.Parameter, reason: str) -> None:
        """Add an option without effect."""
        self.reasons.setdefault(reason, []).append(self.name(option))

    def note(self) -> list[str]:
        """Return one note on all of them, if there are any."""
        if not self.reasons:
            return []
        parts = [
            f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect: {reason}"
            for reason, names in self.reasons.items()
        ]
        return ["; ".join(parts)]


#: The similarity from which a name is suggested, compared without dashes.
_SIMILARITY = 0.8
#: Destructive options, which are never suggested.
_DESTRUCTIVE = frozenset({"--overwrite", "--delete-splits"})


def _no_such_option(ctx: click.Context, name: str, known_options: Mapping[str, click.Option]) -> click.NoSuchOption:
    """Return the error of an unknown option: near spellings, or the commands that have it."""
    close = near_names(
        name.partition("=")[0], [n for n, o in known_options.items() if not o.hidden and n not in _DESTRUCTIVE]
    )
    message = None
    if not close and (commands := _commands_with(ctx, name)):
        message = f"No such option {name!r}: it is an option of {' and '.join(f'quantkit {c}' for c in commands)}."
    return click.NoSuchOption(name, message=message, possibilities=close, ctx=ctx)


def near_names(name: str, names: Iterable[str]) -> list[str]:
    """Return names that ``name`` is probably a misspelling of."""
    by_word = {n.strip("-"): n for n in names}
    return [by_word[word] for word in get_close_matches(name.strip("-"), by_word, cutoff=_SIMILARITY)]


def _commands_with(ctx: click.Context, name: str) -> list[str]:
    """Return up to three commands with an option of this name, long enough to mean the same everywhere."""
    root = ctx.find_root()
    if len(name) < 5 or name in _DESTRUCTIVE or not isinstance(root.command, click.Group):
        return []
    commands = ((n, root.command.get_command(root, n)) for n in root.command.list_commands(root))
    return [
        n
        for n, command in commands
        if command is not None
        and any(name in (*p.opts, *p.secondary_opts) and not getattr(p, "hidden", False) for p in command.params)
    ][:3]


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
    """Return whether ``arg`` is like -xyz or --xyz, but no option like -j4."""
    if len(arg) < 3 or arg[0] != "-":
        return False
    if arg[1] == "-":
        return True
    first = known_options.get(arg[:2])
    return first is None or first.is_flag or not arg[2].isdecimal()


#: The order of headings in every help; a heading may end in parentheses.
HEADINGS = (
    *(
        "Model",
        "Checkpoint",
        "Vision and audio encoders",
        "Adapter",
        "Files",
        "Recipe",
        "Input",
        "Text",
        "Base logits",
        "Base logits for quantkit kld",
    ),
    *("Tensor types", "Importance matrix and error feedback", "Metadata and shards", "Measurements", "Measurement"),
    *("Comparison", "Selection", "Tests", "Model settings", "Sweep", "Target", "Constraints", "Solver", "Verification"),
    *("Pareto front", "Further recordings", "Content", "Devices", "Options", "Run", "Output", "Other"),
)


def _rank(heading: str) -> int:
    return HEADINGS.index(heading.partition(" (")[0])


class GroupedCommand(WholeNames):
    """A command whose help lists options by group, in the order of ``HEADINGS``.

    ``common`` names the parameters that --help shows; without them it shows all. --help-all also lists the options
    that are accepted without effect. ``extras`` are those that the command always needs, ``further_extras`` those that
    it needs besides if any package is missing; None for ``extras``: the verb checks all.
    """

    def __init__(
        self,
        *args: Any,
        common: Iterable[str] = (),
        extras: Sequence[Extra] | None = (),
        further_extras: Further | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.common, self.extras, self.further_extras = tuple(common), extras, further_extras
        names = {n for p in self.params if not is_compatible_only(p) for n in (*p.opts, *p.secondary_opts)}
        self.params = [p for p in self.params if _claim_names(p, names)]
        for param in list(self.params):
            if (prepare := getattr(param, "prepare", None)) is not None:
                prepare(self.params)
        self.params.append(_help_all())

    def invoke(self, ctx: click.Context) -> Any:
        echo_notes(NoEffect.from_context(ctx).note())
        if self.extras is not None:
            check_command(self.extras, self.params, ctx.params, self.further_extras)
        for value in ctx.params.values():
            if (hold := getattr(value, "hold_file", None)) is not None:
                hold(ctx)
        return super().invoke(ctx)

    def _in_order(self, ctx: click.Context, *, shows_all: bool) -> list[click.Parameter]:
        """Return the parameters as declared, or those that --help shows in the order of ``common``."""
        params = self.get_params(ctx)
        return params if shows_all else sorted(params, key=lambda p: (*self.common, p.name).index(p.name))

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the docstring; --help ends at its form feed, --help-all goes on."""
        text = inspect.cleandoc(self.help or "")
        visible = text.replace("\f", "\n\n") if ctx.meta.get(_HELP_ALL, False) else text.partition("\f")[0]
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(visible)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shows_all = not self.common or ctx.meta.get(_HELP_ALL, False)
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self._in_order(ctx, shows_all=shows_all):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None and (shows_all or param.name in (*self.common, "help", "help_all")):
                groups.setdefault(getattr(param, "group", "Other") if shows_all else "Options", []).append(record)
        for heading in sorted(groups, key=_rank):
            with formatter.section(heading):
                formatter.write_dl(groups[heading], col_max=34)
        names = [p.opts[0] for p in self.get_params(ctx) if hasattr(p, "note")]
        if names and ctx.meta.get(_HELP_ALL, False):
            with formatter.section("Accepted for compatibility with llama.cpp and ik_llama.cpp, without effect"):
                formatter.write_text(", ".join(names))


_HELP_ALL = f"{__name__}.help_all"


def _help_all() -> click.Option:
    """Return the option --help-all."""

    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[_HELP_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return GroupedOption(
        ["--help-all"],
        group="Other",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show all options and details.",
    )


def _claim_names(param: click.Parameter, names: set[str]) -> bool:
    """Remove names of a compatibility option that other options have; return whether any name is left."""
    if not is_compatible_only(param):
        return True
    param.opts = [n for n in param.opts if n not in names]
    return bool(param.opts)


def is_compatible_only(param: click.Parameter) -> bool:
    """Return whether an option is only accepted, or refused, for command lines of other programs."""
    return hasattr(param, "note") or hasattr(param, "reason")


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


#: -j, -t or --threads of all commands.
threads_option = option(
    "-j", "-t", "--threads", group="Run", type=click.IntRange(0), help="Threads; 0 (default): all CPUs."
)


#: The default of --cache.
CACHE_VARIABLE = "QUANTKIT_TENSOR_CACHE"

cache_option = option(
    "--cache",
    group="Run",
    metavar="DIR",
    type=Place(file_okay=False),
    envvar=CACHE_VARIABLE,
    help="Store encoded tensors in DIR and reuse them.",
)
cache_size_option = option("--cache-size", group="Run", type=SIZE, help="Maximum size of the cache (50G).")


def cache_arguments(cache: Path | None, cache_size: int | None) -> RunOptions:
    """Return the run options of --cache and --cache-size."""
    if cache is None:
        if cache_size is not None:
            raise click.UsageError("--cache-size needs --cache")
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
    help="Run on all nodes of a Ray cluster: HOST:PORT, or without ADDRESS the one that this machine belongs to.",
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
    help="Directory for the local copy of an output that is a URL.  [default: ~/.cache/quantkit/spool]",
)

#: Options of commands that write one output from a plan.
plan_options = options(
    threads_option,
    ray_option,
    setting("--max-ram", group="Run", type=SIZE, default="512MiB", help="Memory for buffers."),
    option("--resume", group="Run", is_flag=True, help="Continue an interrupted run; do nothing after a complete one."),
    option("--overwrite", group="Run", is_flag=True, help="Replace an existing output."),
    option("--dry-run", group="Output", is_flag=True, help="Print the plan; write nothing."),
)


def on_command_line(name: str) -> bool:
    """Return whether the command line, not a default, sets the current command's parameter ``name``."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def claim(path: Path, *inputs: Path | None, overwrite: bool) -> Path:
    """Return the path of an output, which must not be one of the ``inputs``; it is held until the command ends."""
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
