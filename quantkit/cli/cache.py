"""``quantkit cache``: the group, ``show``, ``prune`` and ``verify``."""

from __future__ import annotations

import re
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import CACHE_VARIABLE, SIZE, GroupedCommand, WholeNames, option, threads_option
from quantkit.cli._paths import Place
from quantkit.cli._progress import Bar
from quantkit.cli._table import table
from quantkit.names import printable
from quantkit.units import format_seconds, format_size

if TYPE_CHECKING:
    from quantkit.cache import CacheReport

_REMOVAL, _OUT = "Selection", "Output"
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "": 86400, "w": 7 * 86400}


class Age(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since click 8.5
    """A time span in seconds: 30d, 12h."""

    name = "age"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = _AGE.fullmatch(str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is not a time span; write 30d, 12h or 90m", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


class CacheGroup(WholeNames, click.Group):
    """A group to whose options -xyz is always one name."""


@click.group("cache", cls=CacheGroup)
def command() -> None:
    """Show, prune and verify a cache of encoded tensors: the directory of --cache.

    quantize, convert and merge-up-gate store every tensor they encode there, and
    reuse it when the same code encodes the same rows again with the same type,
    encoder, importance and shape.

    DIR may be omitted if QUANTKIT_TENSOR_CACHE is set.

    \b
    quantkit quantize --cache ~/tensors model-bf16.gguf first.gguf Q4_K_M
    quantkit quantize --cache ~/tensors model-bf16.gguf second.gguf Q4_K_S
    quantkit cache show ~/tensors
    """


folder_argument = click.argument(
    "folder", metavar="DIR", type=Place(exists=True, file_okay=False), envvar=CACHE_VARIABLE
)
_json = json_option()


@command.command("show", cls=GroupedCommand, short_help="Show contents and hits of a cache.")
@folder_argument
@_json
def show(folder: Path, json_to: JsonOutput) -> None:
    """Show the contents of a cache by model and type, and how much runs reused."""
    from quantkit.cache import show_cache

    contents = show_cache(folder)
    json_to.print(lambda: _contents_text(contents), contents.as_dict)


def _contents_text(contents: CacheReport) -> str:
    rows = [(printable(g.model), printable(g.type), g.entries, format_size(g.nbytes)) for g in contents.groups]
    lines = [table(["model", "type", "tensors", "size"], rows, left=2), ""] if rows else []
    share = f" ({100 * contents.nbytes / contents.limit:.0f} %)" if contents.limit else ""
    lines.append(f"{contents.entries} tensors, {format_size(contents.nbytes)} of {format_size(contents.limit)}{share}")
    if contents.oldest is not None and contents.newest is not None:
        ages = [format_seconds(max(0.0, time.time() - last_use)) for last_use in (contents.oldest, contents.newest)]
        lines.append(f"least recently used: {ages[0]} ago; most recently: {ages[1]} ago")
    if contents.runs:
        reused = f"{contents.hits} of {contents.tensors} tensors ({contents.hits / max(1, contents.tensors):.0%})"
        lines.append(f"{contents.runs} runs took {reused} from it, {format_size(contents.hit_bytes)}")
    if contents.unfinished:
        lines.append(f"unfinished, of running or killed commands: {format_size(contents.unfinished)}")
    if contents.unreadable:
        lines.append(f"{contents.unreadable} entries cannot be read: run `quantkit cache verify` for the reasons")
    return "\n".join(lines)


@command.command("prune", cls=GroupedCommand, short_help="Remove tensors from a cache.")
@folder_argument
@option("--to", group=_REMOVAL, type=SIZE, help="Remove the least recently used tensors down to this size (10G).")
@option("--older-than", group=_REMOVAL, type=Age(), help="Remove tensors not used for this long (30d, 12h).")
@_json
def prune(folder: Path, to: int | None, older_than: float | None, json_to: JsonOutput) -> None:
    """Remove tensors from a cache: by default those beyond its size limit.

    The least recently used go first. Files that killed runs left more than a day
    ago are removed, too. Concurrent runs are not disturbed: they encode missing
    tensors again.
    """
    from quantkit.cache import prune_cache

    result = prune_cache(folder, to=to, older_than=older_than)
    json_to.print(
        lambda: (
            f"removed {result.removed} tensors, {format_size(result.removed_bytes)}, "
            f"and {result.unfinished} unfinished ones; "
            f"{result.entries} tensors, {format_size(result.nbytes)}, are left"
        ),
        lambda: asdict(result),
    )


@command.command("verify", cls=GroupedCommand, short_help="Check all tensors of a cache and remove damaged ones.")
@folder_argument
@threads_option
@_json
@click.pass_context
def verify(ctx: click.Context, folder: Path, threads: int | None, json_to: JsonOutput) -> None:
    """Check all tensors of a cache and remove damaged ones.

    Exit code 1 if there are any. Runs never use a damaged tensor: they check what
    they read, and encode it again.
    """
    from quantkit.cache import verify_cache

    with closing(Bar(quiet=json_to.only, unit="iB", unit_scale=True, unit_divisor=1024)) as bar:
        result = verify_cache(
            folder, threads=threads, progress=lambda now: bar.update(now.current, now.total, "verify")
        )
    for path, damage in () if json_to.only else result.damaged:
        click.echo(f"{printable(path)}: {damage}", err=True)
    unremoved = f", {result.n_not_removable} of which cannot be removed" if result.n_not_removable else ""
    json_to.print(
        lambda: (
            f"{result.entries} tensors, {format_size(result.nbytes)}: {len(result.damaged)} damaged ones{unremoved}"
        ),
        result.as_dict,
    )
    ctx.exit(1 if result.damaged else 0)
