"""``quantkit imatrix``: the group, ``merge`` and ``convert``.

Collecting (no command), ``show`` and ``diff`` have files of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from quantkit.cli.imatrix_collect import collect, collect_options
from quantkit.cli.imatrix_diff import diff
from quantkit.cli.imatrix_show import show
from quantkit.cli.options import GroupedCommand, echo_notes, option
from quantkit.errors import QuantkitError
from quantkit.formats.gguf import open_gguf
from quantkit.formats.imatrix import Format, Imatrix, read_imatrix, write_imatrix
from quantkit.helpers import format_count, format_size, printable
from quantkit.imatrix import FILLS, apply_fill, convert, expert_counts, filled_experts, merge, with_names, without_fill

_FILES, _OUT = "Files", "Output"
FILE = click.Path(path_type=Path)


class ImatrixGroup(click.Group):
    """A group whose help lists its own options by heading, then its commands."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        GroupedCommand.format_options(self, ctx, formatter)  # type: ignore[arg-type]
        self.format_commands(ctx, formatter)


@click.group("imatrix", cls=ImatrixGroup, invoke_without_command=True)
@collect_options
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Importance matrices: collect them; read, compare, merge and convert them.

    Without a command, texts go through a model and what comes into every weight is added up, as llama-imatrix does,
    with its options. Fused operations are off by themselves, and what an importance matrix lacks is always shown.

    Files of llama.cpp (GGUF and .dat) and ik_llama.cpp (.dat) are read, both formats are written, and both trees'
    llama-quantize take what is written.

    \b
    quantkit imatrix -m model-bf16.gguf -f calibration.txt -o imatrix.gguf
    quantkit imatrix -m model-bf16.gguf --chat chats.jsonl -f code.txt -c 2048 --process-output
    quantkit imatrix -m model-Q8_0.gguf -f text.txt --layer-similarity --plot layers.svg
    quantkit imatrix show -m model-bf16.gguf imatrix.gguf
    quantkit imatrix diff old.gguf new.gguf --fail-above 0.01
    quantkit imatrix merge code.gguf chat.gguf -o both.gguf
    quantkit imatrix convert imatrix.gguf imatrix.dat
    """
    if ctx.invoked_subcommand is None:
        if not any(ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in given):
            click.echo(ctx.get_help())
            ctx.exit(0)
        collect(ctx, given)
        return
    said = [name for name in given if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if said:
        raise click.UsageError(
            f"--{said[0].replace('_', '-')} belongs to a collection, not to {ctx.invoked_subcommand}: options of a"
            " command stand behind it"
        )


def shared_options(function: Any) -> Any:
    """Declare what every command has that writes an importance matrix."""
    for decorate in reversed(
        (
            option(
                "--to",
                "--output-format",
                "kind",
                group=_OUT,
                type=click.Choice(["gguf", "dat"]),
                help="The format; without: by the name, .dat or else GGUF.",
            ),
            option("-m", "--model", group=_FILES, type=FILE, help="The model: tells a .dat's numbers of experts."),
            option(
                "--chunk-size",
                group=_FILES,
                type=click.IntRange(1),
                metavar="N",
                help="Tokens of one call of a .dat, which does not say; without: that of a GGUF given too, or 512.",
            ),
            option(
                "--names",
                group=_OUT,
                type=click.Choice(["merged", "separate", "both"]),
                help="Names of up and gate experts; without: as they are.",
            ),
            option(
                "--fill",
                group=_OUT,
                type=click.Choice(FILLS),
                help="What experts without tokens get; recorded in the file, and taken back by whatever merges it."
                " none: no fill, an earlier one is taken back.",
            ),
            option("--overwrite", group=_OUT, is_flag=True, help="Replace an existing output."),
        )
    ):
        function = decorate(function)
    return function


@command.command("merge", cls=GroupedCommand, short_help="Merge several into what one run over all texts gives.")
@click.argument("inputs", metavar="IN...", nargs=-1, required=True, type=FILE)
@option("-o", "--output", group=_OUT, required=True, type=FILE, help="The importance matrix to write.")
@shared_options
def merge_command(inputs: tuple[Path, ...], output: Path, model: Path | None, **options: Any) -> None:
    """Merge importance matrices of one model into what one run over all their texts gives.

    Sums and token counts add up, expert by expert, so that every token weighs the same. Formats may be mixed; a .dat
    has no token counts, and weighs --chunk-size tokens a call.

    \b
    quantkit imatrix merge code.gguf chat.gguf wiki.dat -o all.gguf
    quantkit imatrix merge part-*.gguf -o all.dat
    """
    _check_output(output, options["overwrite"])
    imatrices = [read_imatrix(path) for path in inputs]
    experts = experts_of_model(model, {name for i in imatrices for name in i.entries})
    made = merge(imatrices, chunk_size=options["chunk_size"], experts=experts)
    _finish(output, made.imatrix, made.notes, experts, options)


@command.command("convert", cls=GroupedCommand, short_help="Convert GGUF to .dat and back; names, fill.")
@click.argument("source", metavar="IN", type=FILE)
@click.argument("output", metavar="OUT", type=FILE)
@shared_options
def convert_command(source: Path, output: Path, model: Path | None, **options: Any) -> None:
    """Convert an importance matrix: GGUF to .dat and back, names of experts, a fill for experts without tokens.

    What the other format cannot keep is said. A .dat keeps no counts: of it every expert gets the same, those without
    tokens none.

    \b
    quantkit imatrix convert imatrix.gguf imatrix.dat
    quantkit imatrix convert -m model-bf16.gguf imatrix.dat imatrix.gguf
    quantkit imatrix convert --names separate --fill mean merged.gguf separate.gguf
    """
    _check_output(output, options["overwrite"])
    imatrix = read_imatrix(source)
    _finish(output, imatrix, (), experts_of_model(model, imatrix.entries), options)


def experts_of_model(model: Path | None, entries: Iterable[str]) -> dict[str, int]:
    """Return the numbers of experts that a model's file tells."""
    if model is None:
        return {}
    with open_gguf(model) as file:
        return expert_counts(entries, file.tensors.values())


def _check_output(output: Path, overwrite: bool) -> None:
    if output.exists() and not overwrite:
        raise QuantkitError(f"{output} exists; give another name, or --overwrite to replace it")


def _finish(
    output: Path, imatrix: Imatrix, notes: Iterable[str], experts: Mapping[str, int], options: Mapping[str, Any]
) -> None:
    """Rename, fill, convert, write; say what was done."""
    kind: Format = options["kind"] or ("dat" if output.suffix.lower() == ".dat" else "gguf")
    said = list(notes)
    size = options["chunk_size"]
    if options["fill"] is not None and imatrix.format == "dat":
        made = convert(imatrix, "gguf", chunk_size=size, experts=experts)
        imatrix, said = made.imatrix, [*said, *made.notes]
    if options["names"] is not None:
        imatrix = with_names(imatrix, options["names"])
    if options["fill"] is not None:
        imatrix = apply_fill(imatrix, options["fill"])
        said += _fill_notes(imatrix)
    made = convert(imatrix, kind, chunk_size=size, experts=experts)
    write_imatrix(output, made.imatrix, kind, chunk_size=size)
    echo_notes(dict.fromkeys((*said, *made.notes)))
    written = made.imatrix
    tokens = written.chunk_count * written.chunk_size
    what = f"{len(written.entries)} entries, {written.chunk_count} chunks"
    about = f" of {written.chunk_size} tokens ({format_count(tokens)})" if tokens and kind == "gguf" else ""
    click.echo(f"{printable(str(output))}: {what}{about}, {format_size(output.stat().st_size)}")


def _fill_notes(imatrix: Imatrix) -> list[str]:
    filled = filled_experts(imatrix)
    left = [n for n, e in without_fill(imatrix).entries.items() if not e.counts.any() and n not in filled]
    notes = [f"{sum(map(len, filled.values()))} experts without tokens filled in {len(filled)} entries"]
    if left:
        notes.append(f"nothing to fill from, no expert has tokens: {', '.join(left)}")
    return notes


command.add_command(show)
command.add_command(diff)
