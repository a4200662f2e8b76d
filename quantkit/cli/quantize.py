"""``quantkit quantize``."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from quantkit.cli.options import SIZE, GroupedCommand, echo_notes, option
from quantkit.cli.summary import DryRunReport, RunReport
from quantkit.errors import QuantkitError, TypeNotSupported
from quantkit.helpers import available_cpus, format_size
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.work import least_ram

_WHAT, _TYPES, _IMATRIX, _META, _RUN, _OUT = (
    "What is quantized",
    "Which type a tensor gets (first match of: own option, rule, class, preset)",
    "Importance matrix",
    "Metadata and shards",
    "The run",
    "Output",
)
#: More layers than any model has, so that a slip of the finger does not become a list of billions.
_MAX_LAYERS = 1 << 16
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _class_options(function: Any) -> Any:
    """Declare --attn-*-type and --ffn-*-type."""
    for part in ("ffn-down", "ffn-up", "ffn-gate", "attn-output", "attn-qkv", "attn-v", "attn-k", "attn-q"):
        help_text = f"Type of all {part.replace('-', '_')} tensors{', experts too' if part[0] == 'f' else ''}."
        function = option(f"--{part}-type", group=_TYPES, metavar="TYPE", help=help_text)(function)
    return function


class _Command(GroupedCommand):
    """A negative THREADS means all CPUs, as in llama-quantize; click would take it for an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if len(args) > 1 and re.fullmatch(r"-\d+", args[-1]) and not args[-2].startswith("-"):
            args = [*args[:-1], "0"]
        return super().parse_args(ctx, args)


@click.command("quantize", cls=_Command, context_settings={"ignore_unknown_options": False})
@click.argument("arguments", nargs=-1, metavar="IN.gguf [OUT.gguf] TYPE [THREADS]", required=True)
@option("--allow-requantize", group=_WHAT, is_flag=True, help="Let tensors that are quantized already change type.")
@option("--leave-output-tensor", group=_WHAT, is_flag=True, help="Leave output.weight as it is.")
@option(
    "--pure", group=_WHAT, is_flag=True, help="No mixture: the base type everywhere; rules and options still count."
)
@option(
    "--merge-up-gate",
    group=_WHAT,
    is_flag=True,
    help="Merge up and gate experts on the way, without a file between; see `quantkit merge-up-gate`.",
)
@option(
    "--split-up-gate",
    group=_WHAT,
    is_flag=True,
    help="Take merged up and gate experts apart on the way; see `quantkit split-up-gate`.",
)
@option("--prune-layers", group=_WHAT, metavar="L,L,..", help="Drop these layers and renumber the rest.")
@option("--output-tensor-type", group=_TYPES, metavar="TYPE", help="Type of output.weight.")
@option("--token-embedding-type", group=_TYPES, metavar="TYPE", help="Type of the token embeddings.")
@option("--ffn-gate-inp-type", group=_TYPES, metavar="TYPE", help="Type of the MoE router, otherwise left alone.")
@option("-r", "--recipe", group=_TYPES, type=_FILE, multiple=True, help="Rules `regex = type`, one a line, # comments.")
@option("--tensor-type", group=_TYPES, multiple=True, metavar="RE=TYPE", help="One rule; may be repeated.")
@option("--tensor-type-file", group=_TYPES, type=_FILE, multiple=True, help="Rules RE=TYPE, as llama-quantize reads.")
@option("--custom-q", group=_TYPES, multiple=True, metavar="RE=TYPE,..", help="Rules in ik_llama.cpp's form.")
@_class_options
@option(
    "--fallback",
    group=_TYPES,
    default="next",
    show_default=True,
    metavar="error|next|TYPE",
    help="For rows that do not divide into blocks: stop, take llama.cpp's next type, or this one.",
)
@option("--imatrix", group=_IMATRIX, type=_FILE, help="Importance matrix, GGUF or .dat.")
@option(
    "--include-weights", group=_IMATRIX, multiple=True, metavar="TEXT", help="Use only entries with TEXT in the name."
)
@option(
    "--exclude-weights", group=_IMATRIX, multiple=True, metavar="TEXT", help="Do not use entries with TEXT in the name."
)
@option("--ignore-imatrix-rules", group=_IMATRIX, is_flag=True, help="Let low-bit types go without importance.")
@option("--hide-imatrix", group=_IMATRIX, is_flag=True, help="Do not name the importance matrix in the metadata.")
@option(
    "--override-kv",
    group=_META,
    multiple=True,
    metavar="KEY=T:V",
    help="Set a key; T: int, float, bool, str, u8 .. f64.",
)
@option("--keep-split", group=_META, is_flag=True, help="One output shard per input shard.")
@option("--split-max-size", group=_META, type=SIZE, help="Begin a new shard beyond this size (48G).")
@option("--no-provenance", group=_META, is_flag=True, help="No quantkit.quantize.* keys: llama-quantize's very file.")
@option("-j", "--threads", group=_RUN, type=click.IntRange(0), help="Worker threads; 0 or nothing: all CPUs.")
@option(
    "--max-ram", group=_RUN, type=SIZE, default="512MiB", show_default=True, help="Memory for all buffers together."
)
@option(
    "--max-buffer-size",
    group=_RUN,
    type=click.IntRange(1),
    metavar="MIB",
    help="--max-ram in MiB, as llama-quantize spells it.",
)
@option("--resume", group=_RUN, is_flag=True, help="Go on with an interrupted run.")
@option("--overwrite", group=_RUN, is_flag=True, help="Replace an existing output.")
@option("--measure-error", group=_RUN, is_flag=True, help="Decode again and report the error of every tensor class.")
@option("--dry-run", group=_OUT, is_flag=True, help="Print the plan, every type with its reason, and stop.")
@option("--json", "as_json", group=_OUT, is_flag=True, help="Print the summary as JSON.")
def command(
    arguments: tuple[str, ...],
    threads: int | None,
    max_ram: int,
    max_buffer_size: int | None,
    resume: bool,
    overwrite: bool,
    measure_error: bool,
    dry_run: bool,
    as_json: bool,
    prune_layers: str | None,
    **given: Any,
) -> None:
    """Quantize a GGUF model.

    TYPE is a preset (Q4_K_M, IQ4_XS, ...), its number, a tensor type, or COPY. Without OUT.gguf the output is
    ggml-model-TYPE.gguf beside the input. IN may be any shard of a split model. The bytes are those of
    llama-quantize b11434, whatever the number of threads.

    Rules that name ffn_gate_exps and ffn_up_exps and give both one type hold for merged experts, ffn_gate_up_exps,
    too, where llama-quantize passes them over; a note says when. A rule for ffn_gate_up_exps comes before them.
    """
    from quantkit.quantize import QuantizeOptions, plan_quantize, run_quantize

    source, output, type_name, positional = _positionals(arguments)
    if max_buffer_size and click.get_current_context().get_parameter_source("max_ram") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--max-buffer-size is --max-ram in MiB: give one of them")
    if threads and positional and threads != positional:
        raise click.UsageError(f"THREADS is {positional} and --threads {threads}: give one of them")
    names = {f.name for f in fields(QuantizeOptions)}
    options = QuantizeOptions(
        prune_layers=_layers(prune_layers), **{name: value for name, value in given.items() if name in names}
    )
    plan = plan_quantize(source, output, type_name, options)
    echo_notes(plan.notes)
    if dry_run:
        report = DryRunReport(plan)
        click.echo(json.dumps(report.as_dict(), indent=2) if as_json else report.text())
        return
    if max_buffer_size is not None:
        max_ram = _buffer_ram(plan, threads or positional, max_buffer_size)
    run = RunReport(plan, quiet=as_json)
    try:
        with run:
            result = run_quantize(
                plan,
                threads=threads or positional,
                max_ram=max_ram,
                resume=resume,
                overwrite=overwrite,
                measure_error=measure_error,
                observer=run,
            )
    except KeyboardInterrupt:
        click.echo(f"\ninterrupted; go on with the same command and --resume ({plan.shards[0].path}.part)", err=True)
        sys.exit(130)
    except OSError as e:
        raise QuantkitError(
            f"{e.filename or plan.shards[0].path}: {e.strerror or e}; what is done is kept, go on with --resume"
        ) from e
    click.echo(json.dumps(run.as_dict(result), indent=2) if as_json else run.text(result))


def _buffer_ram(plan: Plan, threads: int | None, mib: int) -> int:
    """Return --max-ram for --max-buffer-size, which to llama-quantize is a wish: the least is a row per thread."""
    n = threads or available_cpus()
    least = least_ram(list(plan.tensors), n)
    if mib << 20 < least:
        click.echo(f"note: --max-buffer-size {mib}: {n} threads take {format_size(least)} at least", err=True)
    return max(mib << 20, least)


def _positionals(arguments: tuple[str, ...]) -> tuple[str, str | None, str, int | None]:
    """Return IN, OUT or None, TYPE and THREADS, told apart as llama-quantize does: by what parses as a type."""
    if len(arguments) < 2 or len(arguments) > 4:
        raise click.UsageError("expected IN.gguf [OUT.gguf] TYPE [THREADS]")
    source, rest = arguments[0], list(arguments[1:])
    output = None
    if not _is_type(rest[0]) or (len(rest) > 1 and _is_type(rest[1]) and not _is_count(rest[1])):
        output = rest.pop(0)
    if not rest:
        # One argument beside IN: it was meant as TYPE, so say what is wrong with it as a type.
        rest, output = [output or ""], None
    type_name, rest = rest[0], rest[1:]
    if len(rest) > 1:
        raise click.UsageError(f"unexpected argument {rest[1]!r}: expected IN.gguf [OUT.gguf] TYPE [THREADS]")
    if rest and not _is_count(rest[0]):
        raise click.UsageError(f"THREADS must be a number, not {rest[0]!r}")
    return source, output, type_name, int(rest[0]) if rest and int(rest[0]) > 0 else None


def _is_count(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _is_type(text: str) -> bool:
    from quantkit.pipeline.presets import preset_by_name

    try:
        preset_by_name(text)
    except TypeNotSupported:
        return False
    return True


def _layers(text: str | None) -> tuple[int, ...]:
    """Return the layers of --prune-layers: numbers, and ranges such as 20-27, separated by commas."""
    layers: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if not part.strip():
            continue
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise click.BadParameter(f"{part!r} is no layer number and no range", param_hint="--prune-layers")
        begin, end = int(first), int(last or first)
        if not begin <= end < _MAX_LAYERS:
            raise click.BadParameter(f"{part!r} is no range of layers", param_hint="--prune-layers")
        layers.update(range(begin, end + 1))
    return tuple(sorted(layers))
