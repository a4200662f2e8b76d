"""``quantkit imatrix -m MODEL -f TEXT``: collect an importance matrix."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.complete import IMATRIX_HERE, MODEL_FILE
from quantkit.cli.evaluation import TEXT_FILE, Bar, ids_file, run_options, run_options_of
from quantkit.cli.imatrix_show import coverage_table, experts_of, findings, show
from quantkit.cli.options import CHUNKS, SHARE, claim, echo_notes, on_command_line, option, options, ray_option, setting
from quantkit.cli.plot import Figure, Line, LinePanel, check_plot, draw
from quantkit.cli.table import table
from quantkit.evaluate import Estimate
from quantkit.formats.imatrix import format_of, read_imatrix, write_imatrix
from quantkit.formats.outputs import check_apart, written
from quantkit.formats.tokenizer import read_token_ids
from quantkit.imatrix import (
    FILLS,
    Collected,
    ImatrixOptions,
    Similarity,
    Watcher,
    apply_fill,
    imatrix,
    merge,
    with_names,
)
from quantkit.imatrix.checkpoint import state_of
from quantkit.imatrix.coverage import HARDLY
from quantkit.kernels.first_run import working_seconds
from quantkit.names import printable
from quantkit.units import format_seconds, format_size

if TYPE_CHECKING:
    from quantkit.evaluate.passes import EvaluationOptions
    from quantkit.imatrix.covariance import Weighting

_WHAT, _TEXT, _OUT, _MORE = "The model and the text", "How to use the text", "Output", "What else to record"
_FILE: dict[str, Any] = {"group": _MORE, "type": click.Path(path_type=Path), "metavar": "FILE"}
_CHUNKS: dict[str, Any] = {"group": _OUT, "type": click.IntRange(0)}
#: The formats of an importance matrix, and what up and gate experts may be called in it.
KINDS, NAMES = click.Choice(["gguf", "dat"]), click.Choice(["merged", "separate", "both"])

FUSION_OFF = (
    "fusion is off (up and gate of dense layers, shared experts and experts; q, k and v): fused operations would hide"
    " the inputs of some weights"
)

#: The options of a collection.
collect_options = options(
    option("-m", "--model", group=_WHAT, type=MODEL_FILE, help="The GGUF file; any shard of a split one."),
    option(
        "-f", "--file", "files", group=_WHAT, type=TEXT_FILE, multiple=True, help="A text, - for stdin; repeatable."
    ),
    option(
        "--chat",
        group=_WHAT,
        type=TEXT_FILE,
        multiple=True,
        metavar="JSONL",
        help="Conversations, rendered by the model's chat template.",
    ),
    option("-p", "--prompt", group=_WHAT, metavar="TEXT", help="The text itself."),
    option("--tokens", group=_WHAT, metavar="IDS", help="Token ids: 1,2,3, or @FILE.i32, raw int32."),
    setting("-c", "--ctx-size", "n_ctx", group=_TEXT, type=click.IntRange(4), default=512, help="Tokens per chunk."),
    option("--chunks", group=_TEXT, type=CHUNKS, default=-1, help="Use only N chunks; -1, the default, for all."),
    setting("--chunk", "--from-chunk", group=_TEXT, type=click.IntRange(0), default=0, help="Skip the first N chunks."),
    option("--parse-special", group=_TEXT, is_flag=True, help="Parse special tokens in texts, such as <|im_end|>."),
    option("--ppl/--no-ppl", group=_TEXT, default=True, help="Also compute the perplexity (the default)."),
    option("-o", "--output", "--output-file", group=_OUT, type=IMATRIX_HERE, help="The file to write [imatrix.gguf]."),
    option("--output-format", group=_OUT, type=KINDS, help="By default from the name of OUT."),
    option("--in-file", "in_files", group=_OUT, multiple=True, metavar="FILE", help="Add to these; a,b or repeated."),
    setting(
        "-ofreq", "--output-frequency", **_CHUNKS, default=10, help="Write OUT every N chunks; 0: only at the end."
    ),
    setting("--save-frequency", **_CHUNKS, default=0, help="Keep a copy, OUT.at_N, every N chunks."),
    option("--resume", group=_OUT, is_flag=True, help="Continue an interrupted run."),
    option("--overwrite", group=_OUT, is_flag=True, help="Replace an existing output."),
    option(
        "--names",
        group=_OUT,
        type=NAMES,
        help="Names for up and gate experts; by default both for merged experts, else as they are.",
    ),
    option("--fill", group=_OUT, type=click.Choice(FILLS), help="Values for experts without tokens, marked as such."),
    option("--require-coverage", group=_OUT, type=SHARE, metavar="SHARE", help="Exit with 3 below this coverage."),
    option("--show-statistics", group=_OUT, is_flag=True, help="Only show an --in-file, as imatrix show."),
    option("--process-output", group=_MORE, is_flag=True, help="Also record the output matrix."),
    option("--nextn", group=_MORE, is_flag=True, help="Also record the prediction layer (NextN, MTP)."),
    option(
        "-md",
        "--model-draft",
        "draft",
        group=_MORE,
        type=MODEL_FILE,
        help="The prediction layer, from a file of its own.",
    ),
    option("--all-experts", group=_MORE, is_flag=True, help="Also OUT.all-experts: every token through every expert."),
    option(
        "-lsim",
        "--layer-similarity",
        group=_MORE,
        is_flag=True,
        help="Cosine similarity of each layer's input and output; without -o nothing else.",
    ),
    option("--plot", **_FILE, help="Plot the similarity: .svg, .png or .pdf."),
    option("--covariance", **_FILE, help="Covariance of every weight's inputs, in passes that fit --max-ram."),
    setting(
        "--covariance-of",
        "weighting",
        group=_MORE,
        type=click.Choice(["tokens", "router", "both"]),
        default="both",
        help="For experts: weigh tokens equally, by squared router weight, or both.",
    ),
    run_options,
    ray_option,
)


# ---------------------------------------------------------------- the run


def collect(ctx: click.Context, given: Mapping[str, Any]) -> None:
    """Do what the options say."""
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
        raise click.UsageError("give a model (-m) and a text (-f, -p, --chat or --tokens), or a command such as show")
    if any(
        given[name] and on_command_line(name) for name in ("fused_up_gate", "fused_moe", "fused_qkv", "fused_launches")
    ):
        raise click.UsageError(f"{FUSION_OFF}; omit -fug and -fmoe")
    if given["plot"] is not None:
        if not given["layer_similarity"]:
            raise click.UsageError(
                "--plot draws the similarity of layers: add --layer-similarity, or use imatrix show --plot"
            )
        check_plot(given["plot"])
    _check_apart(output, in_files, given)
    try:
        _collect(output, in_files, given)
    except KeyboardInterrupt:
        states = [state_of(path) for path in (output, given["covariance"]) if path is not None]
        if not any(state.exists() for state in states):
            raise
        click.echo("\ninterrupted; continue with the same command and --resume", err=True)
        sys.exit(130)


def _collect(output: Path | None, in_files: Sequence[Path], given: Mapping[str, Any]) -> None:
    run = run_options_of(given)
    if output is not None:
        run["fusion"] = run["fusion"].observed()
    tokens = None if given["tokens"] is None else read_token_ids(given["tokens"])
    texts: dict[str, Any] = {"chat": given["chat"], "prompt": given["prompt"], "tokens": tokens}
    options = _options(given)
    if given["covariance"] is not None:
        _check_covariance(given, options)
    picture = None if given["plot"] is None else claim(given["plot"], overwrite=given["overwrite"])
    report = _Report(given["ppl"], None if output is None else FUSION_OFF)
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
    if found.finished:
        nothing = f"nothing to resume after {found.n_chunks} chunks"
        after = nothing if given["covariance"] is None else "continuing with the covariances"
        click.echo(f"{printable(found.path)} is complete; {after}")
    else:
        _print(found, given, report, picture)
    if given["covariance"] is not None:
        _covariance(given, options, texts, run, None if found.finished else tuple(found.dropped))
    if found.coverage is not None and given["require_coverage"] is not None:
        found.coverage.check(given["require_coverage"])


def _check_apart(output: Path | None, in_files: Sequence[Path], given: Mapping[str, Any]) -> None:
    """Refuse outputs that are inputs or each other, before anything is read."""
    recorded = [path for path in (output, given["covariance"]) if path is not None]
    outputs = [*recorded, *map(state_of, recorded), given["plot"]]
    texts = [*given["files"], *given["chat"], ids_file(given["tokens"])]
    check_apart(outputs, [given["model"], given["draft"], *texts, *in_files])


def _check_covariance(given: Mapping[str, Any], options: ImatrixOptions) -> None:
    """Refuse what cannot be recorded, before the hours that the importance matrix takes."""
    from quantkit.imatrix.covariance import check_covariance

    check_covariance(given["model"], given["covariance"], options, given["weighting"], given["max_ram"])


def _options(given: Mapping[str, Any]) -> ImatrixOptions:
    same = (
        "n_ctx n_batch output_format output_frequency save_frequency process_output nextn parse_special ppl all_experts"
        " layer_similarity chunks names fill resume overwrite"
    )
    return ImatrixOptions(**{name: given[name] for name in same.split()}, from_chunk=given["chunk"])


class _Report(Watcher):
    """Prints what llama-imatrix prints: seconds per pass, perplexity after every chunk."""

    def __init__(self, ppl: bool, first_line: str | None) -> None:
        self.first_line = first_line
        self.ppl, self.first, self.n_seq, self.began, self.timed = ppl, 0, 1, working_seconds(), False
        self.open_line, self.notes = False, 0

    def started(self, first: int, n_chunks: int, n_seq: int, notes: Sequence[str]) -> None:
        if self.first_line is not None:
            click.echo(self.first_line, err=True)
        self.tell(notes)
        resumed = f", resumed after {first}" if first else ""
        click.echo(f"{n_chunks} chunks{resumed}, {n_seq} at a time", err=True)
        self.first, self.n_seq, self.began = first, n_seq, working_seconds()

    def chunk(self, chunk: int, n_chunks: int, ppl: Estimate | None) -> None:
        if not self.timed:
            self.timed = True
            seconds = working_seconds() - self.began
            left = seconds * math.ceil((n_chunks - self.first) / self.n_seq)
            click.echo(f"{seconds:.2f} seconds per pass, {format_seconds(left)} in all", err=True)
        if self.ppl and ppl is not None:
            click.echo(f"[{chunk}]{ppl.value:.4f},", nl=False)
            sys.stdout.flush()
            self.open_line = True

    def dropped(self, chunk: int, why: str, back_to: int) -> None:
        self.end_line()
        click.echo(
            f"chunk {chunk + 1} is skipped: {printable(why)} is NaN or infinite; continuing after chunk {back_to}",
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


def _print(found: Collected, given: Mapping[str, Any], report: _Report, picture: Path | None) -> None:
    report.end_line()
    report.tell(found.notes)
    if found.ppl is not None:
        click.echo(f"Final estimate: PPL = {found.ppl.value:.4f} +/- {found.ppl.error:.5f}")
    if found.similarity:
        click.echo("\nSimilarity of input and output, least changed first\n" + _similarity_table(found))
        if picture is not None:
            with written(picture) as part:
                part.write_bytes(draw(_figure(given["model"], found.similarity), check_plot(given["plot"])))
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
    layers = [s.layer for s in found]
    lines = [
        Line(name, layers, [getattr(s, what) for s in found])
        for name, what in (("layer", "whole"), ("attention", "attention"), ("feed-forward", "feed_forward"))
    ]
    panel = LinePanel("Similarity of what enters a block to what leaves it", "cosine", lines)
    return Figure(f"Layers of {model.name}", [panel])


# ---------------------------------------------------------------- other things to do


def _show(ctx: click.Context, in_files: Sequence[Path]) -> None:
    if not in_files:
        raise click.UsageError("--show-statistics needs an --in-file")
    ctx.invoke(show, path=in_files[0], per_tensor=True)


def _merge_only(output: Path, in_files: Sequence[Path], given: Mapping[str, Any]) -> None:
    """Merge files as llama-imatrix does when there is no text."""
    output = claim(output, *in_files, given["model"], overwrite=given["overwrite"])
    found = [read_imatrix(path) for path in in_files]
    experts = experts_of(given["model"], {n for i in found for n in i.entries})
    # Without -c, the files' own chunk size counts.
    made = merge(found, chunk_size=given["n_ctx"] if on_command_line("n_ctx") else None, experts=experts)
    echo_notes(made.notes)
    joined = made.imatrix if given["names"] is None else with_names(made.imatrix, given["names"])
    joined = joined if given["fill"] is None else apply_fill(joined, given["fill"])
    write_imatrix(output, joined, given["output_format"] or format_of(output))
    click.echo(f"{printable(str(output))}: {len(joined.entries)} entries of {len(found)} files; no text was given")


def _covariance(
    given: Mapping[str, Any],
    options: ImatrixOptions,
    texts: Mapping[str, Any],
    run: EvaluationOptions,
    without: tuple[int, ...] | None,
) -> None:
    from quantkit.imatrix.covariance import CovarianceProgress, covariance

    weighting: Weighting = given["weighting"]
    if given["nextn"] or given["draft"] is not None:
        echo_notes(["--covariance does not include the prediction layer"])
    with closing(Bar()) as bar:

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
    echo_notes(made.notes)
    if made.n_passes == 0:
        click.echo(f"{printable(made.path)} is complete; nothing to resume")
        return
    passes = f"{made.n_passes} pass{'' if made.n_passes == 1 else 'es'}"
    size = format_size(made.path.stat().st_size)
    click.echo(f"{printable(str(made.path))}: {made.n_inputs} covariances, {passes}, {size}")
