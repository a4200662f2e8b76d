"""``quantkit report``."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from quantkit.cli._evaluation import TEXT_FILE, load_options, run_options
from quantkit.cli._options import CHUNKS, GroupedCommand, option, setting
from quantkit.cli._paths import IMATRIX_LOCAL, MODEL_FILE, Place
from quantkit.names import printable
from quantkit.report import ReportOptions, report

_MEASURE = "Measurements"
_CONTENT = "Content"
_OUT = "Output"
_FILE = Place(dir_okay=False)
_EXISTING = Place(exists=True, dir_okay=False)


@click.command("report", cls=GroupedCommand)
@click.argument("out", metavar="OUT.html", type=_FILE)
@click.argument("files", metavar="[FILE.gguf]...", type=MODEL_FILE, nargs=-1)
@option("--base", group=_MEASURE, type=MODEL_FILE, help="Unquantized model (BF16), to measure divergence and errors.")
@option(
    "-f", "--file", "text", group=_MEASURE, type=TEXT_FILE, help="Held-out text; without --base, for perplexity only."
)
@option("--logits", group=_MEASURE, type=_FILE, metavar="FILE", help="Base logits; computed and written if missing.")
@setting("-c", "--ctx-size", "n_ctx", group=_MEASURE, type=click.IntRange(4), default=512, help="Tokens per chunk.")
@option("--chunks", group=_MEASURE, type=CHUNKS, default=-1, help="Number of chunks; -1 (default): all.")
@option("--no-errors", group=_MEASURE, is_flag=True, help="Skip comparing every matrix with the base's.")
@option(
    "--bench", group=_MEASURE, is_flag=True, help="Time a prompt of 512 tokens and 64 generated ones, three times each."
)
@option("--imatrix", group=_CONTENT, type=IMATRIX_LOCAL, help="Show its coverage, and weight errors by it.")
@option(
    "--sensitivity", group=_CONTENT, type=_EXISTING, metavar="S.json", help="Show the cost of each group in its type."
)
@option("--title", group=_CONTENT, metavar="TEXT", help="Title.  [default: the model's name]")
@option("--card", group=_OUT, type=_FILE, metavar="README.md", help="Also write a model card in Markdown.")
@option("--data", group=_OUT, type=_FILE, metavar="FILE", help="File for the numbers.  [default: OUT.json]")
@option("--overwrite", group=_OUT, is_flag=True, help="Replace an existing page and card.")
@run_options
def command(
    out: Path,
    files: tuple[Path, ...],
    base: Path | None,
    text: Path | None,
    logits: Path | None,
    n_ctx: int,
    chunks: int | None,
    no_errors: bool,
    bench: bool,
    imatrix: Path | None,
    sensitivity: Path | None,
    title: str | None,
    card: Path | None,
    data: Path | None,
    overwrite: bool,
    **run: Any,
) -> None:
    """Write an HTML report on quantized files of one model: one file that needs no network.

    It shows size against divergence and perplexity, divergence of the worst tokens, types and errors by class and
    layer, provenance, and the runtimes that load the files. All numbers are stored beside it, in OUT.json: existing
    ones are not measured again, so a killed run continues, and without files the page is built from them alone.

    \b
    quantkit report report.html model-*.gguf --base model-BF16.gguf -f held-out.txt
    quantkit report report.html model-*.gguf --card README.md --bench
    quantkit report again.html --data report.json
    """
    options = ReportOptions(
        base=base,
        text=text,
        logits=logits,
        n_ctx=n_ctx,
        chunks=chunks,
        n_batch=run["n_batch"],
        imatrix=imatrix,
        sensitivity=sensitivity,
        errors=not no_errors,
        bench=(512, 64, 3) if bench else (),
        title=title or "",
        load=load_options(run) if files else {},
    )
    with closing(_Bar()) as bar:
        result = report(files, out, card=card, data=data, options=options, overwrite=overwrite, progress=bar.update)
    for file in result.files:
        for note in file.notes:
            click.echo(f"warning: {file.name}: {note}", err=True)
    for path in (out, card):
        if path is not None:
            click.echo(f"wrote {printable(path)}")


class _Bar:
    """A bar for each step, if stderr is a terminal; else a line."""

    def __init__(self) -> None:
        self.bar: tqdm[Any] | None = None
        self.step = ""

    def update(self, step: str, n_done: int, total: int) -> None:
        """Show that ``done`` of ``todo`` parts of a step are done."""
        if step != self.step:
            self.close()
            self.step = step
            if sys.stderr.isatty():
                self.bar = tqdm(total=total or None, desc=step, leave=False, dynamic_ncols=True)
            else:
                click.echo(step, err=True)
        if self.bar is not None:
            self.bar.total = total or None
            self.bar.update(n_done - self.bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()
        self.bar = None
