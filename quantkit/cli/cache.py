"""``quantkit cache``: the group, ``show``, ``prune`` and ``verify``."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path

import click

from quantkit.cli.options import CACHE_VARIABLE, SIZE, GroupedCommand, WholeNames, option, threads_option, to_json
from quantkit.cli.table import table
from quantkit.names import printable
from quantkit.units import format_seconds, format_size

_WHAT, _OUT = "What to remove", "Output"
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "": 86400, "w": 7 * 86400}


class Age(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since click 8.5
    """A time span in seconds: 30d, 12h."""

    name = "age"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = _AGE.fullmatch(str(value).strip().lower())
        if found is None:
            self.fail(f"{value!r} is not a time span; write 30d, 12h or 90m", param, ctx)
        return float(found[1]) * _SECONDS[found[2]]


class CacheGroup(WholeNames, click.Group):
    """A group that takes no option apart."""


@click.group("cache", cls=CacheGroup)
def command() -> None:
    """Look after a cache of encoded tensors: the folder of --cache.

    quantize, convert and merge-up-gate put every tensor they encode there, and take it from there when the same rows
    are to be encoded in the same way again: with the same type, encoder, importance and shape, by the same code.

    DIR may be left away where QUANTKIT_TENSOR_CACHE names it.

    \b
    quantkit quantize --cache ~/tensors --cache-size 50G model-bf16.gguf first.gguf Q4_K_M
    quantkit quantize --cache ~/tensors --attn-v-type q8_0 model-bf16.gguf second.gguf Q4_K_M
    quantkit cache show ~/tensors
    """


folder_argument = click.argument(
    "folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path), envvar=CACHE_VARIABLE
)
_json = option("--json", "as_json", group=_OUT, is_flag=True, help="Print the result as JSON.")


@command.command("show", cls=GroupedCommand, short_help="Show what is in a cache, and what it was good for.")
@folder_argument
@_json
def show(folder: Path, as_json: bool) -> None:
    """Show what is in a cache, by model and type, and what runs took from it."""
    from quantkit.cache import show_cache

    found = show_cache(folder)
    if as_json:
        click.echo(to_json(asdict(found) | {"folder": str(found.folder)}))
        return
    rows = [(printable(g.model), printable(g.type), g.entries, format_size(g.nbytes)) for g in found.groups]
    lines = [table(["model", "type", "tensors", "size"], rows, left=2), ""] if rows else []
    share = f" ({100 * found.nbytes / found.limit:.0f} %)" if found.limit else ""
    lines.append(f"{found.entries} tensors, {format_size(found.nbytes)} of {format_size(found.limit)}{share}")
    if found.oldest is not None and found.newest is not None:
        ages = [format_seconds(max(0.0, time.time() - at)) for at in (found.oldest, found.newest)]
        lines.append(f"least recently used: {ages[0]} ago; most recently: {ages[1]} ago")
    if found.runs:
        of = f"{found.taken} of {found.tensors} tensors ({found.taken / max(1, found.tensors):.0%})"
        lines.append(f"{found.runs} runs took {of} from it, {format_size(found.taken_bytes)}")
    if found.unfinished:
        lines.append(f"unfinished, of runs that write or were killed: {format_size(found.unfinished)}")
    if found.unreadable:
        lines.append(f"{found.unreadable} entries cannot be read: `quantkit cache verify` says why")
    click.echo("\n".join(lines))


@command.command("prune", cls=GroupedCommand, short_help="Make a cache smaller.")
@folder_argument
@option("--to", group=_WHAT, type=SIZE, help="The least recently used tensors, until this size is left (10G).")
@option("--older-than", group=_WHAT, type=Age(), help="Tensors that nobody has used for so long (30d, 12h).")
@_json
def prune(folder: Path, to: int | None, older_than: float | None, as_json: bool) -> None:
    """Remove tensors from a cache: by default those beyond its size limit, least recently used first.

    Also removes what killed runs left behind a day ago or earlier. Runs that use the cache meanwhile are not disturbed:
    they encode what they no longer find.
    """
    from quantkit.cache import prune_cache

    done = prune_cache(folder, to=to, older_than=older_than)
    if as_json:
        click.echo(to_json(asdict(done)))
        return
    click.echo(
        f"removed {done.removed} tensors, {format_size(done.removed_bytes)}, and {done.unfinished} unfinished ones; "
        f"{done.entries} tensors, {format_size(done.nbytes)}, are left"
    )


@command.command("verify", cls=GroupedCommand, short_help="Read all of a cache, and remove what is damaged.")
@folder_argument
@threads_option
@_json
@click.pass_context
def verify(ctx: click.Context, folder: Path, threads: int | None, as_json: bool) -> None:
    """Read all tensors of a cache, and remove those that are damaged; exits with 1 if there were any.

    No run takes a damaged tensor: it checks what it reads, and encodes again.
    """
    from quantkit.cache import verify_cache

    done = verify_cache(folder, threads=threads)
    if as_json:
        click.echo(to_json(asdict(done)))
    else:
        for path, why in done.damaged:
            click.echo(f"{printable(path)}: {why}", err=True)
        could = f", {done.kept} of which cannot be removed" if done.kept else ""
        click.echo(f"{done.entries} tensors, {format_size(done.nbytes)}: {len(done.damaged)} damaged ones{could}")
    ctx.exit(1 if done.damaged else 0)
