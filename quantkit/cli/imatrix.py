"""``quantkit imatrix``: the group, ``merge`` and ``convert``; collecting, ``show`` and ``diff`` are in other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import GroupedCommand, NoEffect, echo_notes, on_command_line, option, options
from quantkit.cli._paths import IMATRIX, MODEL
from quantkit.cli.imatrix_collect import collect, collect_options
from quantkit.cli.imatrix_diff import diff
from quantkit.cli.imatrix_show import show
from quantkit.imatrix import ImatrixFile, convert_imatrix, merge_imatrix
from quantkit.names import printable
from quantkit.options.imatrix import FILLS, FORMATS, NAMES
from quantkit.units import format_count, format_size

_FILES, _OUT = "Files", "Output"


class ImatrixGroup(GroupedCommand, click.Group):
    """A group whose help lists its own options by heading, then its commands."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, "diff" if cmd_name == "compare" else cmd_name)


@click.group("imatrix", cls=ImatrixGroup, invoke_without_command=True)
@collect_options
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """Collect, show, compare, merge and convert importance matrices.

    Without a command, runs texts through a model and sums the squared inputs of
    every matrix, with the options of llama-imatrix. Fusion is always off; entries
    without data are listed.

    Reads the files of llama.cpp (GGUF and .dat) and ik_llama.cpp (.dat), and writes
    both formats.

    \b
    quantkit imatrix -m model-bf16.gguf -f calibration.txt -o imatrix.gguf
    quantkit imatrix -m model-bf16.gguf --chat chats.jsonl -f code.txt -c 2048
    quantkit imatrix -m model.gguf -f text.txt --layer-similarity
    quantkit imatrix show -m model-bf16.gguf imatrix.gguf
    quantkit imatrix diff old.gguf new.gguf --fail-above 0.01
    quantkit imatrix merge code.gguf chat.gguf -o both.gguf
    quantkit imatrix convert imatrix.gguf imatrix.dat
    """
    if ctx.invoked_subcommand is None:
        if not any(map(on_command_line, values)):
            click.echo(ctx.get_help())
            ctx.exit(0)
        collect(ctx, values)
        return
    if named_options := [p for p in command.params if p.name in values and on_command_line(p.name)]:
        raise click.UsageError(
            f"{NoEffect.from_context(ctx).name(named_options[0])} is an option of quantkit imatrix without a "
            f"subcommand; options of {ctx.invoked_subcommand} follow its name"
        )


#: The options of the commands that write an importance matrix.
shared_options = options(
    option(
        "--to",
        "--output-format",
        "kind",
        group=_OUT,
        type=click.Choice(FORMATS),
        help="Output format.  [default: dat if OUT ends in .dat, else gguf]",
    ),
    option("-m", "--model", group=_FILES, type=MODEL, help="Model, for the number of experts in a .dat."),
    option(
        "--chunk-size",
        group=_FILES,
        type=click.IntRange(1),
        help="Tokens per call of a .dat.  [default: that of a GGUF input, or 512]",
    ),
    option("--names", group=_OUT, type=click.Choice(NAMES), help="Names of up and gate experts.  [default: unchanged]"),
    option(
        "--fill",
        group=_OUT,
        type=click.Choice(FILLS),
        help="Values for experts without tokens, recorded in the file; merging removes them, and so does none.",
    ),
    option("--overwrite", group=_OUT, is_flag=True, help="Replace an existing output."),
    json_option("a record of the file"),
)


@command.command("merge", cls=GroupedCommand, short_help="Merge files as if one run had seen all texts.")
@click.argument("inputs", metavar="IN...", nargs=-1, required=True, type=IMATRIX)
@option("-o", "--output", group=_OUT, required=True, type=IMATRIX, help="Importance matrix to write.")
@shared_options
def merge_command(
    inputs: tuple[Path, ...], output: Path, model: Path | None, json_to: JsonOutput, **options: Any
) -> None:
    """Merge importance matrices of one model as if one run had seen all texts.

    Sums and token counts are added expert by expert, so every token has the same
    weight. Formats may be mixed. A .dat has no token counts: each of its calls
    counts as --chunk-size tokens.

    \b
    quantkit imatrix merge code.gguf chat.gguf wiki.dat -o all.gguf
    quantkit imatrix merge part-*.gguf -o all.dat
    """
    _report(merge_imatrix(inputs, output, model=model, format=options.pop("kind"), **options), json_to)


@command.command("convert", cls=GroupedCommand, short_help="Convert between GGUF and .dat; rename or fill experts.")
@click.argument("source", metavar="IN", type=IMATRIX)
@click.argument("output", metavar="OUT", type=IMATRIX)
@shared_options
def convert_command(source: Path, output: Path, model: Path | None, json_to: JsonOutput, **options: Any) -> None:
    """Convert an importance matrix between GGUF and .dat; rename or fill experts.

    Notes list what the other format cannot store. A .dat has no counts per expert:
    all experts get the same count, those without tokens none.

    \b
    quantkit imatrix convert imatrix.gguf imatrix.dat
    quantkit imatrix convert -m model-bf16.gguf imatrix.dat imatrix.gguf
    quantkit imatrix convert --names separate --fill mean in.gguf out.gguf
    """
    _report(convert_imatrix(source, output, model=model, format=options.pop("kind"), **options), json_to)


def _report(file: ImatrixFile, json_to: JsonOutput) -> None:
    """Print the notes on a file that was written, and a summary."""
    echo_notes(file.notes)
    assert file.path is not None
    result = file.imatrix
    tokens = result.chunk_count * result.chunk_size
    content = f"{len(result.entries)} entries, {result.chunk_count} chunks"
    about = f" of {result.chunk_size} tokens ({format_count(tokens)})" if tokens and file.format == "gguf" else ""
    line = f"{printable(str(file.path))}: {content}{about}, {format_size(file.path.stat().st_size)}"
    json_to.print(lambda: line, file.as_dict)


command.add_command(show)
command.add_command(diff)
