"""``quantkit convert``."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from quantkit.cli.options import echo_notes, on_command_line, option, options
from quantkit.cli.quantize import QuantizeCommand, is_count, is_type, parsed_layers, quantize_options
from quantkit.cli.summary import DryRunReport, RunReport
from quantkit.cli.table import table
from quantkit.pipeline.run import refusal

_SOURCE = "The checkpoint"
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
#: Options of quantize that are about GGUF files.
_NOT_HERE = {"keep_split", "repack", "unrepack", "repack_pattern", "max_buffer_size", "partial_requant"}


def _list_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print what is converted, and end."""
    from quantkit.convert import architectures

    if value:
        click.echo(table(["class of transformers", "architecture"], list(architectures().items()), left=2))
        ctx.exit()


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
    option("--no-nextn", group=_SOURCE, is_flag=True, help="Leave out layers that predict further tokens (MTP)."),
    option("--fuse-gate-up-exps", group=_SOURCE, is_flag=True, help="Make gate and up of experts one tensor."),
    option("--fp8-as-q8", group=_SOURCE, is_flag=True, help="Without TYPE: matrices stored as float8 become Q8_0."),
    option("--fuse-qkv", group=_SOURCE, is_flag=True, help="Make queries, keys and values one tensor."),
    option("--pre", group=_SOURCE, metavar="NAME", help="Name of the pre-tokenizer, where it is not recognized."),
    option("--model-name", group=_SOURCE, metavar="NAME", help="Name of the model (general.name)."),
    option("--metadata", group=_SOURCE, type=_FILE, help="JSON file of keys that override what is found."),
    option("--split-max-tensors", group=_SOURCE, type=click.IntRange(0), default=0, help="Most tensors in a shard."),
    option("--no-tensor-first-split", group=_SOURCE, is_flag=True, help="Begin with a shard of metadata alone."),
    option(
        "--list",
        group=_SOURCE,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list_all,
        help="List the architectures that are converted.",
    ),
)


@click.command("convert", cls=QuantizeCommand)
@click.argument("arguments", nargs=-1, metavar="DIR [OUT.gguf] [TYPE [THREADS]]", required=True)
@_convert_options
@quantize_options(without=_NOT_HERE)
def command(
    arguments: tuple[str, ...],
    threads: int | None,
    max_ram: int,
    resume: bool,
    overwrite: bool,
    measure_error: bool,
    dry_run: bool,
    as_json: bool,
    prune_layers: str | None,
    split_max_size: int | None,
    **given: Any,
) -> None:
    """Convert a checkpoint of Hugging Face to GGUF; with TYPE, quantize it in the same pass.

    DIR holds config.json, model*.safetensors and the files of the tokenizer. Without OUT.gguf the output lies in DIR,
    under the name that llama.cpp's convert_hf_to_gguf.py gives it; in OUT {ftype} stands for the type.

    The bytes are those of convert_hf_to_gguf.py b11434 (with transformers 4.57.6) and, with TYPE, of llama-quantize on
    what it writes: no file in between, no torch, and memory for a few rows only. Options of `quantkit quantize` need
    TYPE. --intermediate none rounds once, from the values of the checkpoint: more exact where those are not of one
    16-bit type (float8, F32).
    """
    from quantkit.convert import ConvertOptions, plan_convert
    from quantkit.quantize import QuantizeOptions, run_quantize

    folder, output, type_name, positional = _positionals(arguments)
    if threads and positional and threads != positional:
        raise click.UsageError(f"THREADS is {positional} and --threads {threads}: give one of them")
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
    plan = plan_convert(folder, output, type_name, convert, quantize)
    echo_notes(plan.notes)
    if dry_run:
        report = DryRunReport(plan, refusal(plan, resume=resume, overwrite=overwrite))
        click.echo(json.dumps(report.as_dict(), indent=2) if as_json else report.text())
        return
    run = RunReport(plan, quiet=as_json)
    with run.shown("what is done is kept, continue with --resume"):
        result = run_quantize(
            plan,
            threads=threads or positional,
            max_ram=max_ram,
            resume=resume,
            overwrite=overwrite,
            measure_error=measure_error,
            observer=run,
        )
    click.echo(json.dumps(run.as_dict(result), indent=2) if as_json else run.text(result))


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
