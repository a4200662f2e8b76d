"""``quantkit imatrix -m MODEL -f TEXT``: collect an importance matrix."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from quantkit.cli.evaluation import Bar, load_options, run_options
from quantkit.cli.imatrix_show import coverage_table, findings, show
from quantkit.cli.options import SHARE, echo_notes, option, table
from quantkit.cli.plot import Figure, Line, LinePanel, check_plot, save_plot
from quantkit.errors import QuantkitError
from quantkit.evaluate import Estimate
from quantkit.formats.gguf import open_gguf
from quantkit.formats.imatrix import Format, read_imatrix, write_imatrix
from quantkit.formats.tokenizer import read_token_ids
from quantkit.helpers import format_seconds, format_size, printable
from quantkit.imatrix import (
    FILLS,
    Collected,
    Coverage,
    ImatrixOptions,
    Similarity,
    Watcher,
    apply_fill,
    coverage,
    expert_counts,
    imatrix,
    merge,
    with_names,
)
from quantkit.imatrix.checkpoint import state_of
from quantkit.imatrix.coverage import HARDLY

if TYPE_CHECKING:
    from quantkit.evaluate.passes import LoadOptions
    from quantkit.imatrix.covariance import Weighting

F = TypeVar("F", bound=Callable[..., Any])

_WHAT, _TEXT, _OUT, _MORE = "The model and the text", "How the text is used", "Output", "What else is recorded"
_FILE = click.Path(path_type=Path)
_TEXT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

FUSION_OFF = (
    "fusion is off (up+gate of dense layers, shared experts and experts, merged or not; q/k/v): a fused operation would"
    " not show what every weight multiplies"
)


def collect_options(function: F) -> F:
    """Declare the options of a collection."""
    declared = (*_texts(), *_chunking(), *_outputs(), *_more())
    function = run_options(function)
    for each in reversed(declared):
        function = each(function)
    return function


def _texts() -> tuple[Callable[[F], F], ...]:
    return (
        option("-m", "--model", group=_WHAT, type=_TEXT_FILE, help="The GGUF file; any shard of a split one."),
        option("-f", "--file", "files", group=_WHAT, type=_TEXT_FILE, multiple=True, help="A text; several are used."),
        option(
            "--chat",
            group=_WHAT,
            type=_TEXT_FILE,
            multiple=True,
            metavar="JSONL",
            help="Conversations, put through the model's chat template.",
        ),
        option("-p", "--prompt", group=_WHAT, metavar="TEXT", help="A text itself."),
        option("--tokens", group=_WHAT, metavar="IDS", help="Token ids: 1,2,3, or @FILE.i32, raw int32."),
    )


def _chunking() -> tuple[Callable[[F], F], ...]:
    number: dict[str, Any] = {"group": _TEXT, "show_default": True}
    return (
        option("-c", "--ctx-size", "n_ctx", **number, type=click.IntRange(4), default=512, help="Tokens of a chunk."),
        option("--chunks", group=_TEXT, type=int, default=-1, help="Only so many chunks; -1, the default: all."),
        option("--chunk", "--from-chunk", **number, type=click.IntRange(0), default=0, help="Leave out so many first."),
        option("--parse-special", group=_TEXT, is_flag=True, help="Texts name special tokens, such as <|im_end|>."),
        option("--ppl/--no-ppl", group=_TEXT, default=True, help="Compute the perplexity on the side, or not."),
    )


def _outputs() -> tuple[Callable[[F], F], ...]:
    count: dict[str, Any] = {"group": _OUT, "type": click.IntRange(0), "metavar": "N", "show_default": True}
    formats = click.Choice(["gguf", "dat"])
    return (
        option("-o", "--output", "--output-file", group=_OUT, type=_FILE, help="The file to write [imatrix.gguf]."),
        option("--output-format", "output_format", group=_OUT, type=formats, help="Without: by the name."),
        option(
            "--in-file", "in_files", group=_OUT, multiple=True, metavar="FILE", help="Add to these; a,b or repeated."
        ),
        option(
            "-ofreq",
            "--output-frequency",
            **count,
            default=10,
            help="Write OUT and a state every N chunks; 0: at the end.",
        ),
        option("--save-frequency", **count, default=0, help="Keep a copy, OUT.at_N, every N chunks."),
        option("--resume", group=_OUT, is_flag=True, help="Go on where an interrupted run stopped."),
        option("--overwrite", group=_OUT, is_flag=True, help="Replace an existing output."),
        option(
            "--names",
            group=_OUT,
            type=click.Choice(["merged", "separate", "both"]),
            help="Names of up and gate experts; without: both for merged ones, else as they are.",
        ),
        option(
            "--fill", group=_OUT, type=click.Choice(FILLS), help="What experts without tokens get; recorded in OUT."
        ),
        option("--require-coverage", group=_OUT, type=SHARE, metavar="SHARE", help="Exit code 3 below this."),
        option("--show-statistics", group=_OUT, is_flag=True, help="Only show an --in-file; as imatrix show."),
    )


def _more() -> tuple[Callable[[F], F], ...]:
    return (
        option("--process-output", group=_MORE, is_flag=True, help="The output matrix, too."),
        option("--nextn", group=_MORE, is_flag=True, help="The prediction layer (NextN, MTP), too."),
        option(
            "-md",
            "--model-draft",
            "draft",
            group=_MORE,
            type=_TEXT_FILE,
            metavar="FILE",
            help="The prediction layer, of a file of its own.",
        ),
        option(
            "--all-experts", group=_MORE, is_flag=True, help="Also OUT.all-experts: every token through every expert."
        ),
        option(
            "-lsim",
            "--layer-similarity",
            "layer_similarity",
            group=_MORE,
            is_flag=True,
            help="Cosine of what goes in and out of every layer; without -o nothing else.",
        ),
        option("--plot", group=_MORE, type=_FILE, metavar="FILE", help="Draw the similarity, as .svg or .png."),
        option(
            "--covariance",
            group=_MORE,
            type=_FILE,
            metavar="FILE",
            help="Also the covariance of every weight's input, in passes that fit --max-ram.",
        ),
        option(
            "--covariance-of",
            "weighting",
            group=_MORE,
            type=click.Choice(["tokens", "router", "both"]),
            default="both",
            show_default=True,
            help="Experts: tokens count once, by router weight squared, or both.",
        ),
        # ik_llama.cpp's; its -no-fug and -no-fmoe are taken and change nothing.
        option("-fug", "--fused-up-gate", "asked_up_gate", group=_MORE, is_flag=True, hidden=True),
        option("-fmoe", "--fused-moe", "asked_moe", group=_MORE, is_flag=True, hidden=True),
    )


# ---------------------------------------------------------------- the run


def collect(ctx: click.Context, given: Mapping[str, Any]) -> None:
    """Carry out what the options say."""
    in_files = [Path(name) for names in given["in_files"] for name in names.split(",") if name]
    if given["show_statistics"]:
        _show(ctx, in_files)
        return
    has_text = any(given[name] for name in ("files", "chat", "prompt", "tokens"))
    output = given["output"]
    if output is None and not given["layer_similarity"]:
        output = Path("imatrix.gguf")
    if in_files and not has_text:
        _merge_only(output or Path("imatrix.gguf"), in_files, given)
        return
    if given["model"] is None or not has_text:
        raise click.UsageError("give a model (-m) and a text (-f, -p, --chat or --tokens); or a command, such as show")
    if given["asked_up_gate"] or given["asked_moe"]:
        raise click.UsageError(f"{FUSION_OFF}; leave -fug and -fmoe away")
    if given["plot"] is not None:
        if not given["layer_similarity"]:
            raise click.UsageError(
                "--plot draws the similarity of layers: give --layer-similarity, or imatrix show --plot"
            )
        check_plot(given["plot"])
    try:
        _collect(output, in_files, given)
    except KeyboardInterrupt:
        states = [state_of(path) for path in (output, given["covariance"]) if path is not None]
        if not any(state.exists() for state in states):
            raise
        click.echo("\ninterrupted; go on with the same command and --resume", err=True)
        sys.exit(130)


def _collect(output: Path | None, in_files: Sequence[Path], given: Mapping[str, Any]) -> None:
    run = load_options(given)
    if output is not None:
        run["fusion"] = None
        click.echo(FUSION_OFF, err=True)
    tokens = None if given["tokens"] is None else read_token_ids(given["tokens"])
    texts: dict[str, Any] = {"chat": given["chat"], "prompt": given["prompt"], "tokens": tokens}
    options = _options(given)
    if given["covariance"] is not None:
        _check_covariance(given, options, output)
    covered: Coverage | None
    without: tuple[int, ...] | None
    if output is not None and _is_complete(output, given):
        click.echo(f"{printable(str(output))} is complete; the covariances go on", err=True)
        covered, without = _coverage_of(output, given), None
    else:
        report = _Report(given["ppl"])
        found = imatrix(
            given["model"],
            given["files"],
            output,
            **texts,
            in_files=in_files,
            draft=given["draft"],
            options=options,
            watcher=report,
            **run,
        )
        _print(found, given, report)
        covered, without = found.coverage, tuple(found.dropped)
    if given["covariance"] is not None:
        _covariance(given, options, texts, run, without)
    if covered is not None and given["require_coverage"] is not None:
        covered.check(given["require_coverage"])


def _check_covariance(given: Mapping[str, Any], options: ImatrixOptions, output: Path | None) -> None:
    """Refuse, before the hours that the importance matrix takes, what cannot be recorded."""
    from quantkit.imatrix.covariance import check_covariance

    if output is not None and output.resolve() == given["covariance"].resolve():
        raise click.UsageError(f"-o and --covariance both name {output}")
    check_covariance(given["model"], given["covariance"], options, given["weighting"], given["max_ram"])


def _is_complete(output: Path, given: Mapping[str, Any]) -> bool:
    """Tell whether an interrupted run had come to the covariances."""
    if given["covariance"] is None or not given["resume"] or given["overwrite"]:
        return False
    return output.exists() and not state_of(output).exists() and state_of(given["covariance"]).exists()


def _coverage_of(output: Path, given: Mapping[str, Any]) -> Coverage:
    with open_gguf(given["model"]) as file:
        arch = str(file.get("general.architecture", ""))
        tensors = file.tensors.values()
        return coverage(read_imatrix(output), tensors, arch=arch, process_output=given["process_output"])


def _options(given: Mapping[str, Any]) -> ImatrixOptions:
    if given["chunks"] == 0 or given["chunks"] < -1:
        raise click.BadParameter("a number above 0, or -1 for all", param_hint="--chunks")
    same = (
        "n_ctx n_batch output_format output_frequency save_frequency process_output nextn parse_special ppl all_experts"
        " layer_similarity names fill resume overwrite"
    )
    chunks = given["chunks"] if given["chunks"] > 0 else None
    return ImatrixOptions(**{name: given[name] for name in same.split()}, chunks=chunks, from_chunk=given["chunk"])


class _Report(Watcher):
    """Prints what llama-imatrix prints: seconds of a pass, the perplexity after every chunk."""

    def __init__(self, ppl: bool) -> None:
        self.ppl, self.first, self.n_seq, self.began, self.timed = ppl, 0, 1, time.perf_counter(), False
        self.open_line, self.notes = False, 0

    def started(self, first: int, n_chunks: int, n_seq: int, notes: Sequence[str]) -> None:
        self.tell(notes)
        resumed = f", resumed after {first}" if first else ""
        click.echo(f"{n_chunks} chunks{resumed}, {n_seq} at a time", err=True)
        self.first, self.n_seq, self.began = first, n_seq, time.perf_counter()

    def chunk(self, chunk: int, n_chunks: int, ppl: Estimate | None) -> None:
        if not self.timed:
            self.timed = True
            seconds = time.perf_counter() - self.began
            left = seconds * math.ceil((n_chunks - self.first) / self.n_seq)
            click.echo(f"{seconds:.2f} seconds per pass, in all {format_seconds(left)}", err=True)
        if self.ppl and ppl is not None:
            click.echo(f"[{chunk}]{ppl.value:.4f},", nl=False)
            sys.stdout.flush()
            self.open_line = True

    def dropped(self, chunk: int, why: str, back_to: int) -> None:
        self.end_line()
        click.echo(
            f"chunk {chunk + 1} is left out: {printable(why)} is NaN or infinite; going on after chunk {back_to}",
            err=True,
        )

    def tell(self, notes: Sequence[str]) -> None:
        """Print the notes that have not been printed yet."""
        echo_notes(notes[self.notes :])
        self.notes = len(notes)

    def end_line(self) -> None:
        """End the line of running values."""
        if self.open_line:
            click.echo()
            self.open_line = False


def _print(found: Collected, given: Mapping[str, Any], report: _Report) -> None:
    report.end_line()
    report.tell(found.notes)
    if found.ppl is not None:
        click.echo(f"Final estimate: PPL = {found.ppl.value:.4f} +/- {found.ppl.error:.5f}")
    if found.similarity:
        click.echo("\nSimilarity of what goes in and comes out, least changed first\n" + _similarity_table(found))
        if given["plot"] is not None:
            save_plot(given["plot"], _figure(given["model"], found.similarity))
    if found.coverage is not None:
        click.echo("\nBy class\n" + coverage_table("class", found.coverage.by_class()))
        click.echo("\nBy layer\n" + coverage_table("layer", found.coverage.by_layer()))
        for paragraph in findings(found.coverage):
            click.echo(f"\n{paragraph}")
        few = sum(t.hardly for t in found.coverage.tensors if t.experts)
        if few:
            click.echo(f"\nexperts with fewer than {HARDLY} tokens: {few}")
    if found.imatrix is not None and found.path is not None:
        dropped = f", {len(found.dropped)} left out" if found.dropped else ""
        what = f"{len(found.imatrix.entries)} entries, {found.imatrix.chunk_count} chunks{dropped}"
        size = format_size(found.path.stat().st_size)
        click.echo(f"\n{printable(str(found.path))}: {what}, {size}, {format_seconds(found.seconds)}")
        if found.all_experts is not None:
            click.echo(f"{printable(str(found.all_experts))}: every token through every expert")


def _similarity_table(found: Collected) -> str:
    rows = [
        (s.layer, f"{s.whole:.5f}", f"{s.attention:.5f}", f"{s.feed_forward:.5f}")
        for s in sorted(found.similarity, key=lambda s: -s.whole)
    ]
    return table(["layer", "whole", "attention", "feed-forward"], rows, left=())


def _figure(model: Path, found: Sequence[Similarity]) -> Figure:
    layers = [float(s.layer) for s in found]
    lines = [
        Line(name, layers, [getattr(s, what) for s in found])
        for name, what in (("layer", "whole"), ("attention", "attention"), ("feed-forward", "feed_forward"))
    ]
    panel = LinePanel("Cosine similarity of what goes in and comes out", lines)
    return Figure(f"Layers of {printable(model.name)}", "layer", [panel])


# ---------------------------------------------------------------- other things to do


def _show(ctx: click.Context, in_files: Sequence[Path]) -> None:
    if not in_files:
        raise click.UsageError("--show-statistics shows an --in-file; none was given")
    ctx.invoke(show, path=in_files[0], per_tensor=True)


def _merge_only(output: Path, in_files: Sequence[Path], given: Mapping[str, Any]) -> None:
    """Merge files as llama-imatrix does when there is no text."""
    if output.exists() and not given["overwrite"]:
        raise QuantkitError(f"{output} exists; give another name, or --overwrite to replace it")
    found = [read_imatrix(path) for path in in_files]
    experts: dict[str, int] = {}
    if given["model"] is not None:
        with open_gguf(given["model"]) as file:
            experts = expert_counts({n for i in found for n in i.entries}, file.tensors.values())
    # Without -c the files say how long their chunks are.
    said = click.get_current_context().get_parameter_source("n_ctx") is ParameterSource.COMMANDLINE
    made = merge(found, chunk_size=given["n_ctx"] if said else None, experts=experts)
    echo_notes(made.notes)
    joined = made.imatrix if given["names"] is None else with_names(made.imatrix, given["names"])
    joined = joined if given["fill"] is None else apply_fill(joined, given["fill"])
    kind: Format = given["output_format"] or ("dat" if output.suffix.lower() == ".dat" else "gguf")
    write_imatrix(output, joined, kind)
    click.echo(f"{printable(str(output))}: {len(joined.entries)} entries of {len(found)} files; no text was given")


def _covariance(
    given: Mapping[str, Any],
    options: ImatrixOptions,
    texts: Mapping[str, Any],
    run: LoadOptions,
    without: tuple[int, ...] | None,
) -> None:
    from quantkit.imatrix.covariance import CovarianceProgress, covariance

    weighting: Weighting = given["weighting"]
    if given["nextn"] or given["draft"] is not None:
        echo_notes(["--covariance: what the prediction layer multiplies is not in it"])
    with Bar() as bar:

        def progress(now: CovarianceProgress) -> None:
            bar.update(now.chunk, now.n_chunks, f"covariance, pass {now.number} of {now.n_passes}")
            if now.chunk == now.n_chunks:
                bar.print(f"covariance: pass {now.number} of {now.n_passes}, {now.what}")

        made = covariance(
            given["model"],
            given["files"],
            given["covariance"],
            **texts,
            options=options,
            weighting=weighting,
            progress=progress,
            without=without,
            **run,
        )
    passes = f"{made.n_passes} pass{'' if made.n_passes == 1 else 'es'}"
    size = format_size(made.path.stat().st_size)
    click.echo(f"{printable(str(made.path))}: {made.n_inputs} covariances, {passes}, {size}")
