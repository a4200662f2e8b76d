"""``quantkit imatrix -m MODEL -f TEXT``: collect an importance matrix."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.arguments import declarations
from quantkit.cli._declared_options import declared_options
from quantkit.cli._evaluation import evaluation_options, hub_model, hub_options, ids_file, run_options
from quantkit.cli._json import BESIDE_ARGUMENTS, JsonOutput, json_option
from quantkit.cli._options import (
    SHARE,
    claim,
    echo_notes,
    on_command_line,
    option,
    options,
    ray_option,
    setting,
)
from quantkit.cli._paths import IMATRIX_LOCAL, MODEL_FILE, TEXT_FILE, Place
from quantkit.cli._plot import Figure, Line, LinePanel, check_plot, draw
from quantkit.cli._progress import Bar
from quantkit.cli._table import table
from quantkit.cli.imatrix_show import coverage_table, findings, show
from quantkit.evaluate import Estimate
from quantkit.formats.imatrix import format_of, read_imatrix, write_imatrix
from quantkit.formats.outputs import atomic_write, check_apart
from quantkit.formats.remote import locate
from quantkit.formats.tokenizer import read_token_ids
from quantkit.imatrix import (
    ImatrixFile,
    ImatrixResult,
    Similarity,
    Watcher,
    apply_fill,
    imatrix,
    merge,
    with_names,
)
from quantkit.imatrix.coverage import HARDLY
from quantkit.imatrix.show import experts_of
from quantkit.imatrix.snapshot import snapshot_path
from quantkit.kernels.first_run import working_seconds
from quantkit.names import printable
from quantkit.options.imatrix import FURTHER, OUTPUT, TEXT, ImatrixOptions
from quantkit.process import interruptible
from quantkit.units import format_seconds, format_size

if TYPE_CHECKING:
    from quantkit.evaluate.passes import EvaluationOptions
    from quantkit.imatrix.covariance import CovarianceFile, Weighting

_MODEL = "Model"
_FILE: dict[str, Any] = {"group": FURTHER, "type": Place(), "metavar": "FILE"}

FUSION_OFF = (
    "fusion is off (up and gate of dense layers, shared experts and experts; q, k and v): fused operations would hide"
    " the inputs of some weights"
)

#: Switches of fusion, by the end of their parameter names.
_FUSIONS = {"up_gate": "-fug", "moe": "-fmoe", "qkv": "-fqkv", "launches": "-flaunch"}

#: The options of a collection.
collect_options = options(
    option("-m", "--model", group=_MODEL, type=MODEL_FILE, help="GGUF file; any shard of a split model."),
    hub_options,
    option(
        "-f", "--file", "files", group=TEXT, type=TEXT_FILE, multiple=True, help="Text file; - for stdin. Repeatable."
    ),
    option(
        "--chat",
        group=TEXT,
        type=TEXT_FILE,
        multiple=True,
        metavar="JSONL",
        help="Conversations, rendered with the model's chat template.",
    ),
    option("-p", "--prompt", group=TEXT, metavar="TEXT", help="Text."),
    option("--tokens", group=TEXT, metavar="IDS", help="Token ids, such as 1,2,3, or @FILE of raw int32."),
    *declared_options(ImatrixOptions, (TEXT,)),
    option(
        "-o",
        "--output",
        "--output-file",
        group=OUTPUT,
        type=IMATRIX_LOCAL,
        help="Output file.  [default: imatrix.gguf]",
    ),
    option(
        "--in-file",
        "in_files",
        group=OUTPUT,
        multiple=True,
        metavar="FILE",
        help="Existing importance matrices to merge into the result: A,B or repeated.",
    ),
    *declared_options(ImatrixOptions, (OUTPUT, FURTHER)),
    option(
        "--require-coverage",
        group=OUTPUT,
        type=SHARE,
        metavar="SHARE",
        help="Exit with code 3 below this coverage (99%).",
    ),
    option("--show-statistics", group=OUTPUT, is_flag=True, help="Show the --in-file, as `imatrix show` does."),
    option(
        "-md",
        "--model-draft",
        "draft",
        group=FURTHER,
        type=MODEL_FILE,
        help="Model file with only the MTP layer.",
    ),
    option("--plot", **_FILE, help="Plot the layer similarity: .svg, .png or .pdf."),
    option(
        "--covariance",
        **_FILE,
        help="Also write covariances of activations, for error feedback, in as many passes as --max-ram requires.",
    ),
    setting(
        "--covariance-of",
        "weighting",
        group=FURTHER,
        type=click.Choice(["tokens", "router", "both"]),
        default="both",
        help="Weights of an expert's tokens: equal, squared router weights, or both.",
    ),
    json_option("a record of the result", values=BESIDE_ARGUMENTS),
    run_options,
    ray_option,
)


# ---------------------------------------------------------------- the run


def collect(ctx: click.Context, values: Mapping[str, Any]) -> None:
    """Collect, merge or show, as the options request."""
    values = {**values, "model": hub_model(values["model"], values["hf_repo"], values["hf_file"])}
    in_files = [locate(name) for names in values["in_files"] for name in names.split(",") if name]
    if values["show_statistics"]:
        _show(ctx, in_files, values["json_to"])
        return
    has_text = any(values[name] for name in ("files", "chat", "prompt", "tokens"))
    output = values["output"]
    if output is None and not values["layer_similarity"]:
        output = Path("imatrix.gguf")
    if in_files and not has_text:
        _merge_only(output or Path("imatrix.gguf"), in_files, values)
        return
    if values["model"] is None or not has_text:
        raise click.UsageError("give a model (-m) and a text (-f, -p, --chat or --tokens), or a command such as show")
    if ignored := [
        option for name, option in _FUSIONS.items() if values[f"fused_{name}"] and on_command_line(f"fused_{name}")
    ]:
        echo_notes([f"{', '.join(ignored)}: ignored, because imatrix fuses nothing"])
    if values["plot"] is not None:
        if not values["layer_similarity"]:
            raise click.UsageError(
                "--plot shows the similarity of layers: add --layer-similarity, or use imatrix show --plot"
            )
        check_plot(values["plot"])
    _check_apart(output, in_files, values)
    try:
        with interruptible():
            _collect(output, in_files, values)
    except KeyboardInterrupt:
        states = [snapshot_path(path) for path in (output, values["covariance"]) if path is not None]
        if not any(state.exists() for state in states):
            raise
        click.echo("\ninterrupted; continue with the same command and --resume", err=True)
        sys.exit(130)


def _collect(output: Path | None, in_files: Sequence[Path], values: Mapping[str, Any]) -> None:
    run = evaluation_options(values)
    if output is not None:
        run["fusion"] = run["fusion"].for_observers()
    tokens = None if values["tokens"] is None else read_token_ids(values["tokens"])
    texts: dict[str, Any] = {"chat": values["chat"], "prompt": values["prompt"], "tokens": tokens}
    options = _options(values)
    if values["covariance"] is not None:
        _check_covariance(values, options)
    picture = None if values["plot"] is None else claim(values["plot"], overwrite=values["overwrite"])
    json_to: JsonOutput = values["json_to"]
    report = _Report(values["ppl"], None if output is None else FUSION_OFF, quiet=json_to.only)
    result = imatrix(
        values["model"],
        values["files"],
        output,
        **texts,
        in_files=in_files,
        draft=values["draft"],
        options=options,
        watcher=report,
        **run,
    )
    report.finish(result.notes)
    if picture is not None and result.similarity:
        with atomic_write(picture) as part:
            part.write_bytes(draw(_figure(values["model"], result.similarity), check_plot(values["plot"])))
    if not json_to.only:
        click.echo("\n".join(_lines(result, values)))
    record = result.as_dict()
    if values["covariance"] is not None:
        record["covariance"] = _covariance(
            values, options, texts, run, None if result.was_complete else tuple(result.dropped)
        )
    if json_to.only:
        json_to.print(str, lambda: record)
    json_to.write(lambda: record)
    if result.coverage is not None and values["require_coverage"] is not None:
        result.coverage.check(values["require_coverage"])


def _check_apart(output: Path | None, in_files: Sequence[Path], values: Mapping[str, Any]) -> None:
    """Refuse outputs that are inputs or each other, before anything is read."""
    recorded = [path for path in (output, values["covariance"]) if path is not None]
    outputs = [*recorded, *map(snapshot_path, recorded), values["plot"]]
    texts = [*values["files"], *values["chat"], ids_file(values["tokens"])]
    check_apart(outputs, [values["model"], values["draft"], *texts, *in_files])


def _check_covariance(values: Mapping[str, Any], options: ImatrixOptions) -> None:
    """Check memory and disk before the importance matrix is computed, which takes hours."""
    from quantkit.imatrix.covariance import check_covariance

    check_covariance(values["model"], values["covariance"], options, values["weighting"], values["max_ram"])


def _options(values: Mapping[str, Any]) -> ImatrixOptions:
    return ImatrixOptions(n_batch=values["n_batch"], **{name: values[name] for name in declarations(ImatrixOptions)})


class _Report(Watcher):
    """Prints llama-imatrix's output: seconds per pass, perplexity after every chunk."""

    def __init__(self, ppl: bool, first_line: str | None, *, quiet: bool) -> None:
        self.first_line = first_line
        self.quiet = quiet
        self.ppl = ppl
        self.first = 0
        self.n_seq = 1
        self.began = working_seconds()
        self.timed = False
        self.open_line, self.notes = False, 0
        self.bar: Bar | None = None

    def on_start(self, first: int, n_chunks: int, n_seq: int, notes: Sequence[str]) -> None:
        if self.first_line is not None and not self.quiet:
            click.echo(self.first_line, err=True)
        self.print_notes(notes)
        resumed = f", resumed after {first}" if first else ""
        if not self.quiet:
            click.echo(f"{n_chunks} chunks{resumed}, {n_seq} at a time", err=True)
        self.first = first
        self.n_seq = n_seq
        self.began = working_seconds()

    def on_chunk(self, chunk: int, n_chunks: int, ppl: Estimate | None) -> None:
        if self.quiet:
            return
        if not self.timed:
            self.timed = True
            seconds = working_seconds() - self.began
            left = seconds * math.ceil((n_chunks - self.first) / self.n_seq)
            click.echo(f"{seconds:.2f} seconds per pass, {format_seconds(left)} in all", err=True)
        if not self.ppl:
            self.bar = self.bar or Bar(lines=True, unit="chunk")
            self.bar.update(chunk, n_chunks, f"chunk {chunk} of {n_chunks}")
        if self.ppl and ppl is not None:
            click.echo(f"[{chunk}]{ppl.value:.4f},", nl=False)
            sys.stdout.flush()
            self.open_line = True

    def on_drop(self, chunk: int, reason: str, back_to: int) -> None:
        self.end_line()
        click.echo(
            f"chunk {chunk + 1} is skipped: {printable(reason)} is NaN or infinite; continuing after chunk {back_to}",
            err=True,
        )

    def print_notes(self, notes: Sequence[str]) -> None:
        """Print the notes that have not been printed yet."""
        echo_notes(notes[self.notes :])
        self.notes = len(notes)

    def finish(self, notes: Sequence[str]) -> None:
        """End the progress and print the notes that remain."""
        self.end_line()
        self.print_notes(notes)

    def end_line(self) -> None:
        """End the line of running values, or the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if self.open_line:
            click.echo()
            self.open_line = False


def _lines(result: ImatrixResult, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a result."""
    if result.was_complete:
        message = f"nothing to resume after {result.n_chunks} chunks"
        after = message if values["covariance"] is None else "continuing with the covariances"
        yield f"{printable(result.path)} is complete; {after}"
        return
    if result.ppl is not None:
        yield f"Final estimate: PPL = {result.ppl.value:.4f} +/- {result.ppl.error:.5f}"
    if result.similarity:
        yield "\nSimilarity of input and output, least changed first\n" + _similarity_table(result)
    if result.coverage is not None:
        yield "\nBy class\n" + coverage_table("class", result.coverage.by_class())
        yield "\nBy layer\n" + coverage_table("layer", result.coverage.by_layer())
        for paragraph in findings(result.coverage):
            yield f"\n{paragraph}"
        n_hardly = sum(t.hardly for t in result.coverage.tensors if t.experts)
        if n_hardly:
            yield f"\nexperts with fewer than {HARDLY} tokens: {n_hardly}"
    if result.imatrix is not None and result.path is not None:
        dropped = f", {len(result.dropped)} skipped" if result.dropped else ""
        content = f"{len(result.imatrix.entries)} entries, {result.imatrix.chunk_count} chunks{dropped}"
        size = format_size(result.path.stat().st_size)
        yield f"\n{printable(str(result.path))}: {content}, {size}, {format_seconds(result.seconds)}"
        if result.all_experts is not None:
            yield f"{printable(str(result.all_experts))}: every token through every expert"


def _similarity_table(result: ImatrixResult) -> str:
    rows = [
        (s.layer, f"{s.block:.5f}", f"{s.attention:.5f}", f"{s.feed_forward:.5f}")
        for s in sorted(result.similarity, key=lambda s: -s.block)
    ]
    return table(["layer", "whole", "attention", "feed-forward"], rows, left=())


def _figure(model: Path, similarity: Sequence[Similarity]) -> Figure:
    layers = [s.layer for s in similarity]
    lines = [
        Line(name, layers, [getattr(s, field) for s in similarity])
        for name, field in (("layer", "block"), ("attention", "attention"), ("feed-forward", "feed_forward"))
    ]
    panel = LinePanel("Similarity of a block's input and output", "cosine", lines)
    return Figure(f"Layers of {model.name}", [panel])


# ---------------------------------------------------------------- other actions


def _show(ctx: click.Context, in_files: Sequence[Path], json_to: JsonOutput) -> None:
    if not in_files:
        raise click.UsageError("--show-statistics needs an --in-file")
    ctx.invoke(show, path=in_files[0], per_tensor=True, json_to=json_to)


def _merge_only(output: Path, in_files: Sequence[Path], values: Mapping[str, Any]) -> None:
    """Merge files as llama-imatrix does when there is no text."""
    output = claim(output, *in_files, values["model"], overwrite=values["overwrite"])
    matrices = [read_imatrix(path) for path in in_files]
    experts = experts_of(values["model"], {n for i in matrices for n in i.entries})
    # Without -c, the chunk size of the files applies.
    merged = merge(matrices, chunk_size=values["n_ctx"] if on_command_line("n_ctx") else None, experts=experts)
    echo_notes(merged.notes)
    matrix = merged.imatrix if values["names"] is None else with_names(merged.imatrix, values["names"])
    matrix = matrix if values["fill"] is None else apply_fill(matrix, values["fill"])
    write_imatrix(output, matrix, values["output_format"] or format_of(output))
    values["json_to"].print(
        lambda: f"{printable(str(output))}: {len(matrix.entries)} entries of {len(matrices)} files; no text was given",
        ImatrixFile(matrix, values["output_format"] or format_of(output), output, tuple(merged.notes)).as_dict,
    )


def _covariance(
    values: Mapping[str, Any],
    options: ImatrixOptions,
    texts: Mapping[str, Any],
    run: EvaluationOptions,
    without: tuple[int, ...] | None,
) -> dict[str, Any]:
    """Record covariances, report on them, and return the record for JSON."""
    from quantkit.imatrix.covariance import CovarianceProgress, covariance

    weighting: Weighting = values["weighting"]
    if values["nextn"] or values["draft"] is not None:
        echo_notes(["--covariance does not include the prediction layer"])
    quiet = values["json_to"].only
    with closing(Bar(quiet=quiet, unit="chunk", desc="covariance")) as bar:

        def progress(now: CovarianceProgress) -> None:
            bar.update(now.chunk, now.n_chunks, f"covariance, pass {now.number} of {now.n_passes}")
            if now.chunk == now.n_chunks and not quiet:
                bar.print(f"covariance: pass {now.number} of {now.n_passes}, {now.inputs}")

        result = covariance(
            values["model"],
            values["files"],
            values["covariance"],
            **texts,
            options=options,
            weighting=weighting,
            progress=progress,
            without=without,
            **run,
        )
    echo_notes(result.notes)
    if not quiet:
        click.echo(_covariance_line(result))
    return {
        "file": str(result.path),
        "bytes": result.path.stat().st_size,
        "n_inputs": result.n_inputs,
        "n_passes": result.n_passes,
        "n_chunks": result.n_chunks,
        "was_complete": result.n_passes == 0,
        "notes": list(result.notes),
    }


def _covariance_line(result: CovarianceFile) -> str:
    if result.n_passes == 0:
        return f"{printable(result.path)} is complete; nothing to resume"
    passes = f"{result.n_passes} pass{'' if result.n_passes == 1 else 'es'}"
    return (
        f"{printable(str(result.path))}: {result.n_inputs} covariances, {passes},"
        f" {format_size(result.path.stat().st_size)}"
    )
