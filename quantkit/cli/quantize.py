"""``quantkit quantize``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.complete import IMATRIX_FILE, targets, types
from quantkit.cli.feedback_report import check_feedback_plot, write_feedback_plot
from quantkit.cli.ignored import Ignored
from quantkit.cli.options import (
    SIZE,
    F,
    GroupedCommand,
    cache_option,
    cache_size_option,
    cached,
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
from quantkit.cpus import available_cpus
from quantkit.errors import TypeNotSupported
from quantkit.kernels.formats import ENCODERS
from quantkit.pipeline.like import LIKE
from quantkit.pipeline.presets import RULES
from quantkit.units import format_size

if TYPE_CHECKING:
    from quantkit.pipeline.plan import Plan
    from quantkit.pipeline.run import RunOptions

_WHAT, _TYPES, _IMATRIX, _META, _RUN, _OUT = (
    "What to quantize",
    "Types (the first that applies: own option, rule, class option, preset)",
    "Importance matrix",
    "Metadata and shards",
    "The run",
    "Output",
)
#: More layers than any model has; a typing error must not become a list of billions.
_MAX_LAYERS = 1 << 16
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
#: What --feedback without a file is.
_NO_FILE = Path()


class _Covariances(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value, param, ctx) if value else _NO_FILE


class Devices(click.ParamType[tuple[int, ...]]):
    """Numbers of cards."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        numbers = [each.strip().upper().removeprefix("CUDA") for each in value.split(",")]
        if not all(each.isdecimal() for each in numbers):
            self.fail(f"{value!r} is no list of cards such as 0,1", param, ctx)
        return tuple(dict.fromkeys(map(int, numbers)))


def cards_given(given: dict[str, Any], ray: str | None) -> RunOptions:
    """Take --backend and what belongs to it out of the options ``given``."""
    backend, rest = given.pop("backend").lower(), {name: given.pop(name) for name in ("devices", "max_vram", "verify")}
    if backend == "cpu" and any(rest.values()):
        names = ", ".join(f"--{name.replace('_', '-')}" for name, value in rest.items() if value)
        raise click.UsageError(f"{names}: of cards; give --backend cuda, or auto")
    if ray is not None and (rest["devices"] or rest["verify"]):
        raise click.UsageError("--devices and --verify are for the cards of this machine: leave them away with --ray")
    return {
        "backend": backend,
        "devices": rest["devices"] or (),
        "max_vram": rest["max_vram"],
        "verify": rest["verify"] or 0,
    }


def dry_run_shown(plan: Plan, how: RunOptions, *, as_json: bool) -> None:
    """Print what a run would do, and whether it would be refused; which cards would do what, but for those of nodes."""
    from quantkit.cli.summary import DryRunReport
    from quantkit.pipeline.cards.choice import cards_for
    from quantkit.pipeline.run import foreseen, refusal

    if how["backend"] != "cpu" and how["ray"] is None:
        echo_notes([cards_for(plan, how["backend"], how["devices"])[1]])
    refused = refusal(plan, resume=how["resume"], overwrite=how["overwrite"])
    report = DryRunReport(plan, refused, foreseen(plan, how.get("cache"), measure=how["measure_error"]))
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else report.text())


_A_TYPE: dict[str, Any] = {"group": _TYPES, "metavar": "TYPE", "shell_complete": types}


#: --attn-*-type and --ffn-*-type.
_class_options = options(
    *(
        option(
            f"--{part}-type",
            **_A_TYPE,
            help=f"Type of all {part.replace('-', '_')} tensors{', experts included' if part[0] == 'f' else ''}.",
        )
        for part in ("attn-q", "attn-k", "attn-v", "attn-qkv", "attn-output", "ffn-gate", "ffn-up", "ffn-down")
    )
)


class QuantizeCommand(GroupedCommand):
    """Takes a negative THREADS for all CPUs, as llama-quantize does; click would read it as an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if len(args) > 1 and re.fullmatch(r"-\d+", args[-1]) and not args[-2].startswith("-"):
            args = [*args[:-1], "0"]
        return super().parse_args(ctx, args)


#: Every option of `quantize`, by name: `convert` has most of them, too.
_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "allow_requantize": option(
        "--allow-requantize", group=_WHAT, is_flag=True, help="Re-quantize tensors that are already quantized."
    ),
    "leave_output_tensor": option(
        "--leave-output-tensor", group=_WHAT, is_flag=True, help="Keep output.weight as it is."
    ),
    "pure": option(
        "--pure", group=_WHAT, is_flag=True, help="No mixture, only the base type; rules and type options still apply."
    ),
    "rules": option(
        "--rules",
        group=_TYPES,
        type=click.Choice(RULES, case_sensitive=False),
        help="Whose mixtures, fallbacks and order of the file: llama.cpp's or ik_llama.cpp's.  [default: that of TYPE]",
    ),
    "merge_up_gate": option(
        "--merge-up-gate", group=_WHAT, is_flag=True, help="Merge up and gate experts, as `quantkit merge-up-gate`."
    ),
    "split_up_gate": option(
        "--split-up-gate", group=_WHAT, is_flag=True, help="Split merged experts, as `quantkit split-up-gate`."
    ),
    "repack": option(
        "--repack", group=_WHAT, is_flag=True, help="Interleave rows (Q4_K to Q4_K_R4); no value changes."
    ),
    "unrepack": option(
        "--unrepack", group=_WHAT, is_flag=True, help="Take interleaved rows apart (Q4_K_R4 to Q4_K): the way back."
    ),
    "repack_pattern": option(
        "--repack-pattern",
        group=_WHAT,
        multiple=True,
        metavar="RE,RE,..",
        help="Repack only tensors whose names match.",
    ),
    "prune_layers": option(
        "--prune-layers", group=_WHAT, metavar="L,L,..", help="Drop these layers (3,7-9) and renumber the rest."
    ),
    "output_tensor_type": option("--output-tensor-type", **_A_TYPE, help="Type of output.weight."),
    "token_embedding_type": option("--token-embedding-type", **_A_TYPE, help="Type of the token embeddings."),
    "per_layer_token_embedding_type": option(
        "--per-layer-token-embedding-type", **_A_TYPE, help="Type of the embeddings per layer (Gemma 3n and 4)."
    ),
    "extra_output_tensor": option(
        "--extra-output-tensor", **_A_TYPE, help="Add a second output of this type, with which ik_llama.cpp drafts."
    ),
    "ffn_gate_inp_type": option(
        "--ffn-gate-inp-type", **_A_TYPE, help="Type of the MoE router, otherwise kept as it is."
    ),
    "like": option(
        "--like",
        group=_TYPES,
        type=_FILE,
        metavar="FILE",
        help="Instead of TYPE: every tensor gets the type that it has in this quantized GGUF file.",
    ),
    "recipe": option(
        "-r", "--recipe", group=_TYPES, type=_FILE, multiple=True, help="File of rules `regex = type`, one per line."
    ),
    "tensor_type": option(
        "--tensor-type", multiple=True, **{**_A_TYPE, "metavar": "RE=TYPE"}, help="One rule; repeatable."
    ),
    "tensor_type_file": option(
        "--tensor-type-file",
        group=_TYPES,
        type=_FILE,
        multiple=True,
        help="File of RE=TYPE words, as in llama-quantize.",
    ),
    "custom_q": option(
        "--custom-q", multiple=True, **{**_A_TYPE, "metavar": "RE=TYPE,.."}, help="Rules as ik_llama.cpp takes them."
    ),
    "class types": _class_options,
    "fallback": setting(
        "--fallback",
        group=_TYPES,
        shell_complete=types,
        default="next",
        metavar="error|next|TYPE",
        help="For rows that do not divide into blocks: fail, take llama.cpp's next type, or TYPE.",
    ),
    "encoder": option(
        "--encoder",
        group=_TYPES,
        type=click.Choice(ENCODERS, case_sensitive=False),
        help="Whose search encodes types that llama.cpp and ik_llama.cpp both have; "
        "default: mainline, ik if interleaved.",
    ),
    "symmetric_q40": option(
        "--symmetric-q40", group=_TYPES, is_flag=True, help="Q4_0 in levels -7 .. 7; the importance matrix is ignored."
    ),
    "slow_iq2ks": click.option(
        "--slow-iq2ks", cls=Ignored, is_flag=True, note="IQ2_KS always has the bytes of that search"
    ),
    "imatrix": option("--imatrix", group=_IMATRIX, type=IMATRIX_FILE, help="Importance matrix, GGUF or .dat."),
    "include_weights": option(
        "--include-weights",
        group=_IMATRIX,
        multiple=True,
        metavar="TEXT",
        help="Use only entries with TEXT in the name.",
    ),
    "exclude_weights": option(
        "--exclude-weights", group=_IMATRIX, multiple=True, metavar="TEXT", help="Ignore entries with TEXT in the name."
    ),
    "ignore_imatrix_rules": option(
        "--ignore-imatrix-rules", group=_IMATRIX, is_flag=True, help="Allow low-bit types without importance."
    ),
    "hide_imatrix": option(
        "--hide-imatrix", group=_IMATRIX, is_flag=True, help="Keep the importance matrix's name out of the metadata."
    ),
    "feedback": option(
        "--feedback",
        group=_IMATRIX,
        type=_Covariances(exists=True, dir_okay=False, path_type=Path),
        is_flag=False,
        flag_value="",
        metavar="COV.gguf",
        help="Feed rounding errors forward, by covariances of `imatrix --covariance`, or as --calibrate says.",
    ),
    "calibrate": option(
        "--calibrate",
        group=_IMATRIX,
        type=_FILE,
        multiple=True,
        metavar="TEXT|CHATS.jsonl",
        help="Feedback layer by layer, on what the layers before make of a text, or of conversations; repeatable.",
    ),
    "calibrate_ctx": setting(
        "--calibrate-ctx", group=_IMATRIX, type=click.IntRange(4), default=512, help="Tokens of a chunk of that text."
    ),
    "calibrate_chunks": option(
        "--calibrate-chunks", group=_IMATRIX, type=click.IntRange(1), metavar="N", help="Use only N chunks of it."
    ),
    "balance": option(
        "--balance/--no-balance",
        group=_IMATRIX,
        default=True,
        help="With --calibrate, first let norms and up projections take factors over from the weights behind them, so "
        "that columns of inputs are of more alike size (the default). The model stays the same.",
    ),
    "refit_norms": option(
        "--refit-norms",
        group=_IMATRIX,
        is_flag=True,
        help="With --calibrate, also refit the weights of norms that no matrix follows (of queries and keys, or behind "
        "attention and feed-forward parts) to what they take of the quantized model. Gains little.",
    ),
    "override_kv": option(
        "--override-kv",
        group=_META,
        multiple=True,
        metavar="KEY=T:V",
        help="Set a key; T: int, float, bool, str, u8 .. f64.",
    ),
    "keep_split": option("--keep-split", group=_META, is_flag=True, help="One output shard per input shard."),
    "split_max_size": option(
        "--split-max-size", group=_META, type=SIZE, help="Start a new shard beyond this size (48G)."
    ),
    "no_provenance": option(
        "--no-provenance",
        group=_META,
        is_flag=True,
        help="Write no quantkit.quantize.* keys: llama-quantize's exact file.",
    ),
    "threads": threads_option,
    "ray": ray_option,
    "backend": setting(
        "--backend",
        group=_RUN,
        type=click.Choice(["cpu", "cuda", "auto"], case_sensitive=False),
        default="cpu",
        help="Where to encode, with the same bytes: cuda and auto use all cards for types they encode, also with "
        "--feedback and --calibrate; with --ray each node its own, and cuda leaves out nodes without.",
    ),
    "devices": option(
        "--devices", group=_RUN, type=Devices(), metavar="N,N,..", help="Only these cards (0,1), as CUDA counts them."
    ),
    "max_vram": option("--max-vram", group=_RUN, type=SIZE, help="Memory to take of each card."),
    "verify": option(
        "--verify",
        group=_RUN,
        type=click.IntRange(1),
        metavar="N",
        help="Encode N random pieces of what cards encode on the CPU, too, and compare.",
    ),
    "max_ram": setting("--max-ram", group=_RUN, type=SIZE, default="512MiB", help="Memory for all buffers."),
    "spool": spool_option,
    "max_buffer_size": option(
        "--max-buffer-size",
        group=_RUN,
        type=click.IntRange(1),
        metavar="MIB",
        help="--max-ram in MiB, as llama-quantize.",
    ),
    "partial_requant": option(
        "--partial-requant", group=_RUN, is_flag=True, help="Keep files of the output that are there; make the others."
    ),
    "cache": cache_option,
    "cache_size": cache_size_option,
    "resume": option("--resume", group=_RUN, is_flag=True, help="Continue an interrupted run."),
    "overwrite": option("--overwrite", group=_RUN, is_flag=True, help="Replace an existing output."),
    "measure_error": option(
        "--measure-error", group=_RUN, is_flag=True, help="Decode the result and report the error by tensor class."
    ),
    "plot": option(
        "--plot",
        group=_OUT,
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Draw what feedback did, by class and layer: .svg, .png or .pdf.",
    ),
    "dry_run": option("--dry-run", group=_OUT, is_flag=True, help="Only print the plan: every type with its reason."),
    "json": option("--json", "as_json", group=_OUT, is_flag=True, help="Print the summary as JSON."),
}


def quantize_options(without: Collection[str] = ()) -> Callable[[F], F]:
    """Declare the options of `quantize`, but not those ``without``."""
    return options(*(declare for name, declare in _OPTIONS.items() if name not in without))


@click.command("quantize", cls=QuantizeCommand, context_settings={"ignore_unknown_options": False})
@click.argument(
    "arguments", nargs=-1, metavar="IN.gguf [OUT.gguf] TYPE [THREADS]", required=True, shell_complete=targets
)
@quantize_options()
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
    as_json: bool,
    prune_layers: str | None,
    cache: Path | None,
    cache_size: int | None,
    **given: Any,
) -> None:
    """Quantize a GGUF model.

    IN, OUT and the importance matrix may be URLs (s3://bucket/model.gguf; hf:// and https:// are only read).

    TYPE is a preset (Q4_K_M, IQ4_KS, ...), its number, a tensor type, or COPY. Without OUT.gguf the output is
    ggml-model-TYPE.gguf next to the input. IN may be any shard of a split model. The bytes are those of
    llama-quantize b11434, whatever the number of threads.

    Presets that llama.cpp has follow its rules; --rules ik makes them follow those of ik_llama.cpp, as its own presets
    always do; the order in the file is then ik's, too. Rules, options and --pure work the same with both.

    Rules that give ffn_gate_exps and ffn_up_exps the same type also apply to merged experts (ffn_gate_up_exps), which
    llama-quantize would skip; a note says so. A rule for ffn_gate_up_exps takes precedence.

    --repack gives tensors the interleaved type of their own (Q4_K: Q4_K_R4), as in ik_llama.cpp; --unrepack is the
    exact way back. Neither needs TYPE. Embeddings stay, and rows that do not make whole groups. Exceptions: Q8_K_R8
    and Q8_K_R16 become Q8_0, IQ1_S_R4 becomes IQ1_S, all with the same values, but there is no way back; Q4_0_4X4,
    Q4_0_4X8 and Q4_0_8X8 become Q4_0, which --repack makes Q4_0_R8; IQ1_M_R4 stays, as no other type has its
    values, and so does F16: BF16_R16, which ik may make of it, would lose bits. (In ik, BF16_R16 runs on CPUs with
    AVX512-BF16 only.) I2_S, of Microsoft's BitNet, becomes IQ2_BN by --unrepack, with the same values.

    --like FILE takes the types and the file type of an existing file, whoever made it, tensor by tensor: to make it
    again with --feedback, or from another checkpoint. Options and rules for types still come first. Experts may be
    merged in one and apart in the other.

    Quantized to an interleaved type, tensors get ik_llama.cpp's bytes; --encoder mainline gives those of llama.cpp's
    encoder, interleaved.
    """
    instead = "REPACK" if given["repack"] else "UNREPACK" if given["unrepack"] else LIKE if given["like"] else None
    source, output, type_name, positional = _positionals(_with_a_type(arguments, instead) if instead else arguments)
    if partial_requant and overwrite:
        raise click.UsageError("--partial-requant keeps what is there, --overwrite replaces it: give one of them")
    if max_buffer_size and on_command_line("max_ram"):
        raise click.UsageError("--max-buffer-size is --max-ram in MiB: give one of them")
    if threads and positional and threads != positional:
        raise click.UsageError(f"THREADS is {positional} and --threads {threads}: give one of them")
    if given["feedback"] == _NO_FILE:
        given["feedback"] = None
        if not given["calibrate"]:
            raise click.UsageError("--feedback needs a file of covariances, or --calibrate with a text")
    check_feedback_plot(plot, given["feedback"] or given["calibrate"])
    kept, cards = cached(cache, cache_size), cards_given(given, ray)
    if not dry_run:
        start_nodes(ray, threads or positional, cards["backend"])  # before the imports, which take their time, too
    from quantkit.cli.summary import DryRunReport
    from quantkit.formats.remote import located
    from quantkit.pipeline.plan import without_existing
    from quantkit.quantize import QuantizeOptions, plan_quantize

    names = {f.name for f in fields(QuantizeOptions)}
    options = QuantizeOptions(
        prune_layers=parsed_layers(prune_layers), **{name: value for name, value in given.items() if name in names}
    )
    plan = plan_quantize(located(source, spool), output and located(output, spool), type_name, options)
    echo_notes(plan.notes)
    if partial_requant:
        there, plan = len(plan.shards), without_existing(plan)
        echo_notes([f"--partial-requant: {there - len(plan.shards)} of {there} files of the output are there already"])
        if not plan.shards:
            click.echo(json.dumps(DryRunReport(plan).as_dict(), indent=2) if as_json else "nothing to do")
            return
    run: RunOptions = {"threads": threads or positional, "resume": resume, "overwrite": overwrite, "ray": ray}
    how: RunOptions = {**run, **kept, **cards, "measure_error": measure_error}
    if dry_run:
        dry_run_shown(plan, how, as_json=as_json)
        return
    if max_buffer_size is not None:
        max_ram = _buffer_ram(plan, threads or positional, max_buffer_size)
    run_shown(plan, max_ram, how, as_json=as_json, plot=plot)


def run_shown(plan: Plan, max_ram: int, how: RunOptions, *, as_json: bool, plot: Path | None = None) -> None:
    """Carry out a plan with progress, print how it went, and ``plot`` what feedback did."""
    from quantkit.cli.summary import RunReport
    from quantkit.pipeline.feedback_report import feedback_report
    from quantkit.quantize import run_quantize

    run = RunReport(plan, quiet=as_json)
    with run.shown("what is done is kept, continue with --resume"):
        given: RunOptions = {**how, "observer": run}
        result = run_quantize(plan, max_ram=max_ram, **given)
    echo_notes(result.run.cache.notes if result.run.cache is not None else ())
    click.echo(json.dumps(run.as_dict(result), indent=2) if as_json else run.text(result))
    if plot is not None:
        write_feedback_plot(feedback_report(plan, result.run.losses), plan.shards[0].path.name, plot)


def _buffer_ram(plan: Plan, threads: int | None, mib: int) -> int:
    """Return --max-ram for --max-buffer-size, which llama-quantize exceeds if it must: for a row per thread."""
    from quantkit.pipeline.jobs import least_ram

    n = threads or available_cpus()
    least = least_ram(list(plan.tensors), n)
    if mib << 20 < least:
        click.echo(f"note: --max-buffer-size {mib}: {n} threads need at least {format_size(least)}", err=True)
    return max(mib << 20, least)


def _positionals(arguments: tuple[str, ...]) -> tuple[str, str | None, str, int | None]:
    """Return IN, OUT or None, TYPE and THREADS; what parses as a type is TYPE, as in llama-quantize."""
    if len(arguments) < 2 or len(arguments) > 4:
        raise click.UsageError("expected IN.gguf [OUT.gguf] TYPE [THREADS]")
    source, rest = arguments[0], list(arguments[1:])
    output = None
    if not is_type(rest[0]) or (len(rest) > 1 and is_type(rest[1]) and not is_count(rest[1])):
        output = rest.pop(0)
    if not rest:
        # The one argument besides IN was meant as TYPE, so the error is about it as a type.
        rest, output = [output or ""], None
    type_name, rest = rest[0], rest[1:]
    if len(rest) > 1:
        raise click.UsageError(f"unexpected argument {rest[1]!r}: expected IN.gguf [OUT.gguf] TYPE [THREADS]")
    if rest and not is_count(rest[0]):
        read = f"IN {source}, OUT {output}, TYPE {type_name}" if output else f"IN {source}, TYPE {type_name}"
        raise click.UsageError(f"THREADS must be a number, not {rest[0]!r}, where {read} stand before it")
    return source, output, type_name, int(rest[0]) if rest and int(rest[0]) > 0 else None


def _with_a_type(arguments: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return arguments with a TYPE, which --repack and --unrepack need only as a ``name``, and --like not at all."""
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


def parsed_layers(text: str | None) -> tuple[int, ...]:
    """Return the layers of --prune-layers: numbers and ranges such as 20-27, separated by commas."""
    layers: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if not part.strip():
            continue
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise click.BadParameter(f"{part!r} is neither a layer number nor a range", param_hint="--prune-layers")
        begin, end = int(first), int(last or first)
        if not begin <= end < _MAX_LAYERS:
            raise click.BadParameter(f"{part!r} is not a range of layers", param_hint="--prune-layers")
        layers.update(range(begin, end + 1))
    return tuple(sorted(layers))
