"""``quantkit convert``."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from quantkit.cli.feedback_report import check_feedback_plot
from quantkit.cli.ignored import Ignored
from quantkit.cli.options import cached, echo_notes, on_command_line, option, options, start_nodes
from quantkit.cli.panics import panics_hidden
from quantkit.cli.quantize import (
    QuantizeCommand,
    cards_given,
    dry_run_shown,
    is_count,
    is_type,
    parsed_layers,
    quantize_options,
    run_shown,
)
from quantkit.cli.refused import refused_options
from quantkit.cli.table import table
from quantkit.pipeline.like import LIKE

if TYPE_CHECKING:
    from quantkit.pipeline.run import RunOptions

_SOURCE = "The checkpoint"
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
#: Options of quantize that are about GGUF files, which alone can be run.
_NOT_HERE = {"keep_split", "repack", "unrepack", "repack_pattern", "max_buffer_size", "partial_requant"}
_NOT_HERE |= {"calibrate", "calibrate_ctx", "calibrate_chunks", "balance", "refit_norms"}


def _list_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print what is converted, and end."""
    from quantkit.convert import architectures

    if value:
        click.echo(table(["class of transformers", "architecture"], list(architectures().items()), left=2))
        ctx.exit()


#: Options of convert_hf_to_gguf.py that change nothing.
_IGNORED = (
    ("--use-temp-file", "tensors are written where they belong as soon as they are made; --max-ram bounds the memory"),
    ("--no-lazy", "nothing is held back until the end"),
    ("--verbose", "--dry-run shows every tensor, --json as data"),
)

_convert_options = options(
    option(
        "--outtype",
        group=_SOURCE,
        type=click.Choice(("f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0", "auto"), case_sensitive=False),
        default="auto",
        help="Without TYPE: type of the matrices; auto: the one they are stored in.  [default: auto]",
    ),
    option(
        "--intermediate",
        group=_SOURCE,
        type=click.Choice(("auto", "bf16", "f16", "f32", "none"), case_sensitive=False),
        default="auto",
        help="With TYPE: what values are rounded to before, as between the two programs; none: not at all.",
    ),
    option(
        "--lossless",
        group=_SOURCE,
        is_flag=True,
        help="Keep weights that are quantized already as they are: int4 as Q4_0, int8 as Q8_0, where no value changes.",
    ),
    option(
        "--merge-lora",
        group=_SOURCE,
        multiple=True,
        metavar="ADAPTER[:SCALE]",
        shell_complete=lambda ctx, param, incomplete: [CompletionItem(incomplete, type="dir")],
        help="Merge a LoRA adapter of PEFT, a directory, into the weights; several in their order.",
    ),
    option("--pre", group=_SOURCE, metavar="NAME", help="Name of the pre-tokenizer, where it is not recognized."),
    option("--model-name", group=_SOURCE, metavar="NAME", help="Name of the model (general.name)."),
    option("--metadata", group=_SOURCE, type=_FILE, help="JSON file of keys that override what is found."),
    option(
        "--no-nextn",
        "--no-mtp",
        "no_nextn",
        group=_SOURCE,
        is_flag=True,
        help="Without the layers that predict more tokens (NextN, MTP).",
    ),
    option("--mtp", group=_SOURCE, is_flag=True, help="Only those layers, as a model that drafts."),
    option("--fuse-gate-up-exps", group=_SOURCE, is_flag=True, help="Gate and up experts of a layer as one tensor."),
    option("--fuse-qkv", group=_SOURCE, is_flag=True, help="Queries, keys and values of a layer as one tensor."),
    option("--fp8-as-q8", group=_SOURCE, is_flag=True, help="Without TYPE: weights stored as float8 become Q8_0."),
    option("--vocab-only", group=_SOURCE, is_flag=True, help="Without TYPE: metadata and vocabulary alone."),
    option("--split-max-tensors", group=_SOURCE, type=click.IntRange(0), default=0, help="Most tensors in a shard."),
    option("--no-tensor-first-split", group=_SOURCE, is_flag=True, help="Begin with a shard of metadata alone."),
    option(
        "--list",
        "--print-supported-models",
        group=_SOURCE,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list_all,
        help="List the architectures that are converted.",
    ),
    option("--outfile", group=_SOURCE, metavar="FILE", help="The same as OUT.gguf."),
    *(click.option(name, cls=Ignored, is_flag=True, note=note) for name, note in _IGNORED),
    refused_options,
)


@click.command("convert", cls=QuantizeCommand)
@click.argument("arguments", nargs=-1, metavar="DIR [OUT.gguf] [TYPE [THREADS]]", required=True)
@_convert_options
@quantize_options(without=_NOT_HERE)
def command(
    arguments: tuple[str, ...],
    threads: int | None,
    ray: str | None,
    max_ram: int,
    spool: Path | None,
    resume: bool,
    overwrite: bool,
    measure_error: bool,
    plot: Path | None,
    dry_run: bool,
    as_json: bool,
    prune_layers: str | None,
    split_max_size: int | None,
    cache: Path | None,
    cache_size: int | None,
    outfile: str | None,
    **given: Any,
) -> None:
    """Convert a checkpoint of Hugging Face to GGUF; with TYPE, quantize it in the same pass.

    DIR holds config.json, model*.safetensors and the files of the tokenizer. Without OUT.gguf the output lies in DIR,
    under the name that llama.cpp's convert_hf_to_gguf.py gives it; in OUT {ftype} stands for the type. Both may be URLs
    (hf://org/model, s3://bucket/model).

    The bytes are those of convert_hf_to_gguf.py b11434 (with transformers 4.57.6) and, with TYPE, of llama-quantize on
    what it writes: no file in between, no torch, and memory for a few rows only. Options of `quantkit quantize` need
    TYPE. --intermediate none rounds once, from the values of the checkpoint: more exact where those are not of one
    16-bit type (float8, F32).
    """
    folder, output, type_name, positional = _positionals(arguments)
    if given["like"] is not None:
        type_name = type_name or LIKE
    if outfile is not None and output is not None:
        raise click.UsageError(f"the output is {output} and --outfile {outfile}: give one of them")
    output = output if outfile is None else outfile
    if threads and positional and threads != positional:
        raise click.UsageError(f"THREADS is {positional} and --threads {threads}: give one of them")
    check_feedback_plot(plot, given["feedback"])
    kept, cards = cached(cache, cache_size), cards_given(given, ray)
    if not dry_run:
        start_nodes(ray, threads or positional, cards["backend"])  # before the imports, which take their time, too
    from quantkit.convert import ConvertOptions, plan_convert
    from quantkit.formats.remote import located
    from quantkit.quantize import QuantizeOptions

    names, own = ({f.name for f in fields(of)} for of in (QuantizeOptions, ConvertOptions))
    quantize = QuantizeOptions(
        prune_layers=parsed_layers(prune_layers),
        split_max_size=split_max_size if type_name else None,
        **{name: value for name, value in given.items() if name in names and (type_name or on_command_line(name))},
    )
    convert = ConvertOptions(
        split_max_size=None if type_name else split_max_size,
        **{name: value for name, value in given.items() if name in own},
    )
    with panics_hidden():  # the tokenizer is read then
        plan = plan_convert(located(folder, spool), output and located(output, spool), type_name, convert, quantize)
    echo_notes(plan.notes)
    run: RunOptions = {"threads": threads or positional, "resume": resume, "overwrite": overwrite, "ray": ray}
    how: RunOptions = {**run, **kept, **cards, "measure_error": measure_error}
    if dry_run:
        dry_run_shown(plan, how, as_json=as_json)
        return
    run_shown(plan, max_ram, how, as_json=as_json, plot=plot)


def _positionals(arguments: tuple[str, ...]) -> tuple[str, str | None, str | None, int | None]:
    """Return DIR, OUT or None, TYPE or None, THREADS or None; what parses as a type is TYPE."""
    folder, rest = arguments[0], list(arguments[1:])
    output = type_name = threads = None
    if rest and (not is_type(rest[0]) or (len(rest) > 1 and is_type(rest[1]) and not is_count(rest[1]))):
        output = rest.pop(0)
    if rest:
        type_name = rest.pop(0)
        if not is_type(type_name):
            raise click.UsageError(f"{type_name!r} is no TYPE: `quantkit types` lists presets and types")
    if rest:
        if not is_count(rest[0]) or len(rest) > 1:
            raise click.UsageError(f"unexpected argument {rest[-1]!r}: expected DIR [OUT.gguf] [TYPE [THREADS]]")
        threads = int(rest[0]) if int(rest[0]) > 0 else None
    return folder, output, type_name, threads
