"""``quantkit convert``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._compat_options import IgnoredOption
from quantkit.cli._declared_options import declared_options
from quantkit.cli._feedback_report import check_feedback_plot
from quantkit.cli._json import JsonOutput
from quantkit.cli._mmproj import MmprojArguments, check_plans_apart, mmproj_options
from quantkit.cli._options import cache_arguments, echo_notes, on_command_line, option, options, start_nodes
from quantkit.cli._table import table
from quantkit.cli.quantize import (
    QuantizeCommand,
    gpu_arguments,
    is_count,
    is_type,
    parse_prune_layers,
    print_dry_run,
    quantize_options,
    run_plans,
)
from quantkit.extras import Extra
from quantkit.options.convert import CHECKPOINT, ConvertOptions
from quantkit.options.quantize import QuantizeOptions
from quantkit.pipeline.reference_types import LIKE

if TYPE_CHECKING:
    from quantkit.pipeline.plan import Plan
    from quantkit.pipeline.run import RunOptions

#: Options of quantize that need a GGUF file as input.
_EXCLUDED_OPTIONS = {"keep_split", "repack", "unrepack", "repack_pattern", "max_buffer_size", "partial_requant"}
_EXCLUDED_OPTIONS |= {"calibrate", "calibrate_ctx", "calibrate_chunks", "balance", "merge_lora", "bigendian", "reserve"}


def _list_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print the supported classes and exit."""
    from quantkit.convert import architectures, encoder_classes

    if value:
        text, encoders = architectures(), encoder_classes()
        names = sorted({*text, *encoders})
        rows = [(name, text.get(name, ""), ", ".join(encoders.get(name, ()))) for name in names]
        click.echo(table(["class of transformers", "architecture", "projectors of its mmproj"], rows, left=3))
        ctx.exit()


#: Options of convert_hf_to_gguf.py without effect.
_IGNORED = (
    ("--use-temp-file", "tensors are written to their final place at once; --max-ram limits memory"),
    ("--no-lazy", "tensors are never held back until the end"),
    ("--verbose", "--dry-run shows every tensor, --json as data"),
)

_convert_options = options(
    *declared_options(ConvertOptions, (CHECKPOINT,)),
    option(
        "--list",
        "--print-supported-models",
        group=CHECKPOINT,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list_all,
        help="List supported model classes.",
    ),
    option("--remote", group=CHECKPOINT, is_flag=True, help="Read DIR from the Hugging Face Hub: same as hf://DIR."),
    option("--outfile", group=CHECKPOINT, metavar="FILE", help="Same as OUT.gguf."),
    *(click.option(name, cls=IgnoredOption, is_flag=True, note=note) for name, note in _IGNORED),
    mmproj_options,
)


#: Options that --help shows.
_COMMON = (
    *("outtype", "pre", "model_name", "no_nextn", "merge_lora", "imatrix", "tensor_type", "recipe", "split_max_size"),
    *("mmproj", "threads", "resume", "overwrite", "dry_run"),
)


def _checkpoint_extras(values: Mapping[str, Any]) -> tuple[Extra, ...]:
    """Return the extras that reading the checkpoint needs."""
    from quantkit.checkpoint.requirements import checkpoint_extras

    return checkpoint_extras(Path(_positionals(values["arguments"])[0]), has_pre=values["pre"] is not None)


@click.command("convert", cls=QuantizeCommand, common=_COMMON, further_extras=_checkpoint_extras)
@click.argument("arguments", nargs=-1, metavar="DIR [OUT.gguf] [TYPE [THREADS]]", required=True)
@_convert_options
@quantize_options(without=_EXCLUDED_OPTIONS)
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
    json_to: JsonOutput,
    prune_layers: str | None,
    split_max_size: int | None,
    cache: Path | None,
    cache_size: int | None,
    outfile: str | None,
    remote: bool,
    mmproj: str | None,
    mmproj_only: bool,
    mmproj_type: str | None,
    **values: Any,
) -> None:
    """Convert a Hugging Face checkpoint to GGUF; with TYPE, quantize it, too.

    DIR holds config.json, model*.safetensors and the tokenizer's files; it may be a
    URL, such as hf://org/model. Without OUT.gguf the output is written to DIR.

    \b
    quantkit convert Qwen3-30B-A3B/ model-bf16.gguf
    quantkit convert Qwen3-30B-A3B/ model.gguf Q4_K_M --imatrix imatrix.gguf
    quantkit convert Qwen3-VL-8B/ model.gguf Q4_K_M --mmproj
    \f
    Without OUT.gguf the name is that of convert_hf_to_gguf.py; {ftype} in OUT stands
    for the type. DIR and OUT may be URLs (hf://org/model, s3://bucket/model).

    The bytes are those of convert_hf_to_gguf.py b11434 (with transformers 4.57.6)
    and, with TYPE, of llama-quantize on its output: without an intermediate file or
    torch, and with memory for a few rows only. Only ssm_a of Mamba differs: torch's
    exponential, which depends on its CPU, is off by the last bit in 1 % of values.

    --mmproj writes the mmproj file of a model with vision or audio encoders, with the
    bytes of convert_hf_to_gguf.py --mmproj, as mmproj-NAME-F16.gguf beside OUT.

    Options of `quantkit quantize` need TYPE. --intermediate none rounds once, from
    the checkpoint's values: more exact where these are not of one 16-bit type
    (float8, F32).
    """
    folder, output, type_name, positional = _positionals(arguments)
    folder = f"hf://{folder}" if remote and not folder.startswith("hf://") else folder
    if values["like"] is not None:
        type_name = type_name or LIKE
    if outfile is not None and output is not None:
        raise click.UsageError(f"the output is {output} and --outfile {outfile}: give one of them")
    encoders = MmprojArguments.parse(mmproj, mmproj_only, mmproj_type, (output, type_name))
    output = output if outfile is None else outfile
    if threads and positional and threads != positional:
        raise click.UsageError(f"THREADS is {positional} and --threads {threads}: give one of them")
    check_feedback_plot(plot, values["feedback"])
    cache_run, gpu_run = cache_arguments(cache, cache_size), gpu_arguments(values, ray)
    if not dry_run:
        start_nodes(ray, threads or positional, gpu_run["backend"])  # before the imports, which are slow
    from quantkit.convert import ENCODERS_NOTE, plan_convert
    from quantkit.formats.remote import locate

    names, convert_names = (
        {f.name for f in fields(options_class)} for options_class in (QuantizeOptions, ConvertOptions)
    )
    quantize = QuantizeOptions(
        prune_layers=parse_prune_layers(prune_layers),
        split_max_size=split_max_size if type_name else None,
        **{n: value for n, value in values.items() if n in names - convert_names and (type_name or on_command_line(n))},
    )
    convert = ConvertOptions(
        split_max_size=None if type_name else split_max_size,
        **{name: value for name, value in values.items() if name in convert_names},
    )
    source, target = locate(folder, spool), None if output is None else locate(output, spool)
    plans: list[Plan] = []
    if encoders is None or not encoders.only:
        plans.append(plan_convert(source, target, type_name, convert, quantize))
    if encoders is not None:
        plans.append(encoders.plan(source, target, type_name, convert, values))
        check_plans_apart(plans)
    for plan in plans:
        echo_notes([note for note in plan.notes if encoders is None or note != ENCODERS_NOTE])
    run: RunOptions = {"threads": threads or positional, "resume": resume, "overwrite": overwrite, "ray": ray}
    run_options: RunOptions = {**run, **cache_run, **gpu_run, "measure_error": measure_error}
    if dry_run:
        print_dry_run(plans, run_options, json_to=json_to)
        return
    run_plans(plans, max_ram, run_options, json_to=json_to, plot=plot)


def _positionals(arguments: tuple[str, ...]) -> tuple[str, str | None, str | None, int | None]:
    """Return DIR, OUT or None, TYPE or None, THREADS or None; an argument that parses as a type is TYPE."""
    folder, remainder = arguments[0], list(arguments[1:])
    output = type_name = threads = None
    if remainder and (
        not is_type(remainder[0]) or (len(remainder) > 1 and is_type(remainder[1]) and not is_count(remainder[1]))
    ):
        output = remainder.pop(0)
    if remainder:
        type_name = remainder.pop(0)
        if not is_type(type_name):
            raise click.UsageError(f"{type_name!r} is not a TYPE: `quantkit types` lists presets and types")
    if remainder:
        if not is_count(remainder[0]) or len(remainder) > 1:
            raise click.UsageError(f"unexpected argument {remainder[-1]!r}: expected DIR [OUT.gguf] [TYPE [THREADS]]")
        threads = int(remainder[0]) if int(remainder[0]) > 0 else None
    return folder, output, type_name, threads
