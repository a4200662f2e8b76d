"""``quantkit quantize``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._compat_options import QUANTIZE_REFUSED, IgnoredOption, refuse_options
from quantkit.cli._declared_options import NO_FILE, declared_options
from quantkit.cli._feedback_report import check_feedback_plot, write_feedback_plot
from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import (
    SIZE,
    F,
    GroupedCommand,
    cache_arguments,
    cache_option,
    cache_size_option,
    echo_notes,
    on_command_line,
    option,
    options,
    ray_option,
    setting,
    spool_option,
    start_nodes,
    threads_option,
)
from quantkit.cli._paths import Place, complete_targets
from quantkit.cpus import available_cpus
from quantkit.errors import TypeNotSupported
from quantkit.options.quantize import IMATRIX, INPUT, METADATA, TYPES, QuantizeOptions, parse_layers
from quantkit.pipeline.reference_types import LIKE
from quantkit.units import format_size

if TYPE_CHECKING:
    from quantkit.pipeline.plan import Plan
    from quantkit.pipeline.run import RunOptions

_RUN, _OUT = "Run", "Output"


class Devices(click.ParamType[tuple[int, ...]]):
    """Numbers of GPUs."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        numbers = [item.strip().upper().removeprefix("CUDA") for item in value.split(",")]
        if not all(item.isdecimal() for item in numbers):
            self.fail(f"{value!r}: give GPUs, such as 0,1", param, ctx)
        return tuple(dict.fromkeys(map(int, numbers)))


def gpu_arguments(values: dict[str, Any], ray: str | None) -> RunOptions:
    """Remove --backend and its options from ``values``, and return them as run options."""
    backend, gpu_only = (
        values.pop("backend").lower(),
        {name: values.pop(name) for name in ("devices", "max_vram", "verify")},
    )
    if backend == "cpu" and any(gpu_only.values()):
        names = ", ".join(f"--{name.replace('_', '-')}" for name, value in gpu_only.items() if value)
        raise click.UsageError(f"{names}: needs --backend cuda or auto")
    if ray is not None and (gpu_only["devices"] or gpu_only["verify"]):
        raise click.UsageError("--devices and --verify apply to the GPUs of this machine: omit them with --ray")
    return {
        "backend": backend,
        "devices": gpu_only["devices"] or (),
        "max_vram": gpu_only["max_vram"],
        "verify": gpu_only["verify"] or 0,
    }


def print_dry_run(plans: Sequence[Plan], run_options: RunOptions, *, json_to: JsonOutput) -> None:
    """Print the plans of a run, which GPUs it would use on this machine, and whether they would be refused.

    As JSON the mmproj file of a model is in the record of its text model.
    """
    from quantkit.cli._run_report import DryRunReport
    from quantkit.pipeline.gpu.choice import gpus_for
    from quantkit.pipeline.run import forecast_cache, refusal

    reports = []
    for plan in plans:
        if run_options["backend"] != "cpu" and run_options["ray"] is None:
            echo_notes([gpus_for(plan, run_options["backend"], run_options["devices"])[1]])
        refused = refusal(plan, resume=run_options["resume"], overwrite=run_options["overwrite"])
        forecast = forecast_cache(plan, run_options.get("cache"), measure=run_options["measure_error"])
        reports.append(DryRunReport(plan, refused, forecast))
    json_to.print(
        lambda: "\n\n".join(report.text() for report in reports),
        lambda: _join_records([report.as_dict() for report in reports]),
    )


def _join_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of a file; that of the second, an mmproj file, is in the first."""
    return records[0] if len(records) == 1 else {**records[0], "mmproj": records[1]}


class QuantizeCommand(GroupedCommand):
    """Takes a negative THREADS for all CPUs, as llama-quantize does; click would read it as an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if len(args) > 1 and re.fullmatch(r"-\d+", args[-1]) and not args[-2].startswith("-"):
            args = [*args[:-1], "0"]
        return super().parse_args(ctx, args)


#: The options of a run, by name; `convert` has most of them, too.
_RUN_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "slow_iq2ks": click.option("--slow-iq2ks", cls=IgnoredOption, is_flag=True, note="IQ2_KS always uses its encoder"),
    "threads": threads_option,
    "ray": ray_option,
    "backend": setting(
        "--backend",
        group=_RUN,
        type=click.Choice(["cpu", "cuda", "auto"], case_sensitive=False),
        default="cpu",
        help="Device that encodes; the output is identical. cuda and auto use all GPUs, also of the nodes of --ray.",
    ),
    "devices": option(
        "--devices",
        group=_RUN,
        type=Devices(),
        metavar="N,N,..",
        help="Use only these GPUs (0,1), as CUDA counts them.",
    ),
    "max_vram": option("--max-vram", group=_RUN, type=SIZE, help="Maximum memory per GPU."),
    "verify": option(
        "--verify",
        group=_RUN,
        type=click.IntRange(1),
        metavar="N",
        help="Encode N random parts on the CPU as well, and compare.",
    ),
    "max_ram": setting("--max-ram", group=_RUN, type=SIZE, default="512MiB", help="Memory for buffers."),
    "spool": spool_option,
    "max_buffer_size": option(
        "--max-buffer-size",
        group=_RUN,
        type=click.IntRange(1),
        metavar="MIB",
        help="Same as --max-ram, in MiB.",
    ),
    "partial_requant": option(
        "--partial-requant", group=_RUN, is_flag=True, help="Write only missing shards of the output."
    ),
    "cache": cache_option,
    "cache_size": cache_size_option,
    "resume": option(
        "--resume", group=_RUN, is_flag=True, help="Continue an interrupted run; do nothing after a complete one."
    ),
    "overwrite": option("--overwrite", group=_RUN, is_flag=True, help="Replace an existing output."),
    "measure_error": option(
        "--measure-error", group=_RUN, is_flag=True, help="Report the error of the output by tensor class."
    ),
    "plot": option(
        "--plot",
        group=_OUT,
        type=Place(dir_okay=False),
        metavar="FILE",
        help="Plot the effect of error feedback by class and layer: .svg, .png or .pdf.",
    ),
    "dry_run": option("--dry-run", group=_OUT, is_flag=True, help="Print the types and their reasons; write nothing."),
    "json": json_option(),
}


def quantize_options(without: Collection[str] = ()) -> Callable[[F], F]:
    """Declare the options of `quantize`, but not those ``without``."""
    declared = declared_options(QuantizeOptions, (INPUT, TYPES, IMATRIX, METADATA), without)
    return options(*declared, *(declare for name, declare in _RUN_OPTIONS.items() if name not in without))


#: Options that --help shows.
COMMON = (
    *("imatrix", "tensor_type", "recipe", "output_tensor_type", "token_embedding_type", "allow_requantize"),
    *("split_max_size", "threads", "resume", "overwrite", "dry_run"),
)


@click.command("quantize", cls=QuantizeCommand, common=COMMON)
@click.argument(
    "arguments", nargs=-1, metavar="IN.gguf [OUT.gguf] TYPE [THREADS]", required=True, shell_complete=complete_targets
)
@quantize_options()
@refuse_options(QUANTIZE_REFUSED)
def command(
    arguments: tuple[str, ...],
    threads: int | None,
    ray: str | None,
    max_ram: int,
    spool: Path | None,
    max_buffer_size: int | None,
    partial_requant: bool,
    resume: bool,
    overwrite: bool,
    measure_error: bool,
    plot: Path | None,
    dry_run: bool,
    json_to: JsonOutput,
    prune_layers: str | None,
    cache: Path | None,
    cache_size: int | None,
    **values: Any,
) -> None:
    """Quantize a GGUF model: the bytes of llama-quantize, several times faster.

    TYPE is a preset (Q4_K_M, IQ4_KS, ..), a tensor type, or COPY; `quantkit types
    --presets` lists them. Without OUT.gguf the output is ggml-model-TYPE.gguf.

    \b
    quantkit quantize --imatrix imatrix.gguf model-bf16.gguf out.gguf Q4_K_M
    quantkit quantize --split-max-size 48G model.gguf shards.gguf COPY
    \f
    Without OUT.gguf the output is next to the input. IN may be any shard of a split
    model. IN, OUT and the importance matrix may be URLs (s3://bucket/model.gguf;
    hf:// and https:// are read-only). The bytes are those of llama-quantize b11434, for any
    number of threads.

    Presets of llama.cpp follow its type rules; --rules ik applies those of
    ik_llama.cpp, and its tensor order. Presets of ik_llama.cpp always follow its
    rules. Recipes, options and --pure work the same with both.

    A rule that gives ffn_gate_exps and ffn_up_exps the same type also applies to
    merged experts (ffn_gate_up_exps), which llama-quantize skips (with a note). A
    rule for ffn_gate_up_exps takes precedence.

    --repack interleaves tensors (Q4_K becomes Q4_K_R4), as in ik_llama.cpp;
    --unrepack is the exact inverse. Neither needs TYPE. Embeddings are left
    unchanged, and so are tensors whose number of rows is not a multiple of the
    group. Exceptions: Q8_K_R8 and Q8_K_R16 become Q8_0 and IQ1_S_R4 becomes IQ1_S,
    with the same values but no way back; Q4_0_4X4, Q4_0_4X8 and Q4_0_8X8 become
    Q4_0, which --repack turns into Q4_0_R8. IQ1_M_R4 and F16 are left unchanged: no
    other type has the values of the former, and BF16_R16 would lose bits of the
    latter. --unrepack turns I2_S, of Microsoft's BitNet, into IQ2_BN with the same
    values.

    --like FILE copies the tensor types and the file type of an existing file, to
    produce it again with --feedback, or from another checkpoint. Options and rules
    for types take precedence. Experts may be merged in one file and separate in
    the other.

    Interleaved target types get ik_llama.cpp's bytes; --encoder llama.cpp gives
    those of llama.cpp's encoder, interleaved.
    """
    default_type = next(
        (name for key, name in (("repack", "REPACK"), ("unrepack", "UNREPACK"), ("like", LIKE)) if values[key]), None
    )
    source, output, type_name, positional = _positionals(
        _add_type(arguments, default_type) if default_type else arguments
    )
    if partial_requant and overwrite:
        raise click.UsageError("--partial-requant keeps existing shards, --overwrite replaces them: give one of them")
    if max_buffer_size and on_command_line("max_ram"):
        raise click.UsageError("--max-buffer-size is --max-ram in MiB: give one of them")
    if threads and positional and threads != positional:
        raise click.UsageError(f"THREADS is {positional} and --threads {threads}: give one of them")
    if values["feedback"] == NO_FILE:
        values["feedback"] = None
        if not values["calibrate"]:
            raise click.UsageError("--feedback needs a file of covariances, or --calibrate with a text")
    check_feedback_plot(plot, values["feedback"] or values["calibrate"])
    cache_run, gpu_run = cache_arguments(cache, cache_size), gpu_arguments(values, ray)
    if not dry_run:
        start_nodes(ray, threads or positional, gpu_run["backend"])  # before the imports, which are slow
    from quantkit.cli._run_report import DryRunReport
    from quantkit.formats.remote import locate
    from quantkit.pipeline.plan import without_existing
    from quantkit.quantize import plan_quantize

    names = {f.name for f in fields(QuantizeOptions)}
    options = QuantizeOptions(
        prune_layers=parse_prune_layers(prune_layers),
        **{name: value for name, value in values.items() if name in names},
    )
    plan = plan_quantize(locate(source, spool), output and locate(output, spool), type_name, options)
    echo_notes(plan.notes)
    if partial_requant:
        n_files, plan = len(plan.shards), without_existing(plan)
        echo_notes([f"--partial-requant: {n_files - len(plan.shards)} of {n_files} files of the output already exist"])
        if not plan.shards:
            json_to.print(lambda: "nothing to do", DryRunReport(plan).as_dict)
            return
    run: RunOptions = {"threads": threads or positional, "resume": resume, "overwrite": overwrite, "ray": ray}
    run_options: RunOptions = {**run, **cache_run, **gpu_run, "measure_error": measure_error}
    if dry_run:
        print_dry_run([plan], run_options, json_to=json_to)
        return
    if max_buffer_size is not None:
        max_ram = _buffer_ram(plan, threads or positional, max_buffer_size)
    run_plans([plan], max_ram, run_options, json_to=json_to, plot=plot)


def run_plans(
    plans: Sequence[Plan], max_ram: int, run_options: RunOptions, *, json_to: JsonOutput, plot: Path | None = None
) -> None:
    """Run plans with progress, print the summaries, and ``plot`` the effect of error feedback in the first."""
    from quantkit.cli._run_report import RunReport
    from quantkit.pipeline.feedback_report import feedback_report
    from quantkit.pipeline.run import check_targets
    from quantkit.quantize import run_quantize

    for plan in plans[1:]:
        check_targets(plan, resume=run_options["resume"], overwrite=run_options["overwrite"])
    texts, records = [], []
    for plan in plans:
        run = RunReport(plan, quiet=json_to.only)
        with run.show_progress("the completed part is kept; continue with --resume"):
            observed: RunOptions = {**run_options, "observer": run}
            result = run_quantize(plan, max_ram=max_ram, **observed)
        echo_notes(result.run.cache.notes if result.run.cache is not None else ())
        texts.append(run.text(result))
        records.append(run.as_dict(result))
        if plot is not None and plan is plans[0]:
            write_feedback_plot(feedback_report(plan, result.run.losses), plan.shards[0].path.name, plot)
    json_to.print(lambda: "\n\n".join(texts), lambda: _join_records(records))


def _buffer_ram(plan: Plan, threads: int | None, mib: int) -> int:
    """Return --max-ram for --max-buffer-size, which llama-quantize exceeds if it must: for a row per thread."""
    from quantkit.pipeline.jobs import least_ram

    n = threads or available_cpus()
    least = least_ram(list(plan.tensors), n)
    if mib << 20 < least:
        click.echo(f"note: --max-buffer-size {mib}: {n} threads need at least {format_size(least)}", err=True)
    return max(mib << 20, least)


def _positionals(arguments: tuple[str, ...]) -> tuple[str, str | None, str, int | None]:
    """Return IN, OUT or None, TYPE and THREADS; an argument that parses as a type is TYPE, as in llama-quantize."""
    if len(arguments) < 2 or len(arguments) > 4:
        raise click.UsageError("expected IN.gguf [OUT.gguf] TYPE [THREADS]")
    source, remainder = arguments[0], list(arguments[1:])
    output = None
    if not is_type(remainder[0]) or (len(remainder) > 1 and is_type(remainder[1]) and not is_count(remainder[1])):
        output = remainder.pop(0)
    if not remainder and output is not None and output.lower().endswith(".gguf"):
        raise click.UsageError(f"{output} is not a type: expected IN.gguf [OUT.gguf] TYPE [THREADS]")
    if not remainder:
        # The only argument besides IN is probably TYPE, so the error treats it as a type.
        remainder, output = [output or ""], None
    type_name, remainder = remainder[0], remainder[1:]
    if len(remainder) > 1:
        raise click.UsageError(f"unexpected argument {remainder[1]!r}: expected IN.gguf [OUT.gguf] TYPE [THREADS]")
    if remainder and not is_count(remainder[0]):
        read = f"IN {source}, OUT {output}, TYPE {type_name}" if output else f"IN {source}, TYPE {type_name}"
        raise click.UsageError(f"THREADS must be a number, not {remainder[0]!r}; the arguments before it are {read}")
    return source, output, type_name, int(remainder[0]) if remainder and int(remainder[0]) > 0 else None


def _add_type(arguments: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the arguments with ``name`` as TYPE if it is omitted, as with --repack, --unrepack and --like."""
    if len(arguments) == 1 or (len(arguments) == 2 and not is_type(arguments[1])):
        return (*arguments, name)
    return arguments


def is_count(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def is_type(text: str) -> bool:
    from quantkit.pipeline.presets import preset_by_name

    if text in ("REPACK", "UNREPACK", LIKE):
        return True
    try:
        preset_by_name(text)
    except TypeNotSupported:
        return False
    return True


def parse_prune_layers(text: str | None) -> tuple[int, ...]:
    """Return the layers of --prune-layers."""
    try:
        return parse_layers(text or "")
    except ValueError as e:
        raise click.BadParameter(str(e), param_hint="--prune-layers") from None
