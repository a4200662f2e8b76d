"""``quantkit report``."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from quantkit.cli.complete import IMATRIX_HERE, MODEL_FILE
from quantkit.cli.evaluation import TEXT_FILE, load_options, run_options
from quantkit.cli.options import CHUNKS, GroupedCommand, option, setting
from quantkit.names import printable
from quantkit.report import ReportOptions, report

_ON, _MORE, _OUT = "What is measured", "What else is shown", "Output"
_FILE = click.Path(dir_okay=False, path_type=Path)
_HERE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("report", cls=GroupedCommand)
@click.argument("out", metavar="OUT.html", type=_FILE)
@click.argument("files", metavar="[FILE.gguf]...", type=MODEL_FILE, nargs=-1)
@option("--base", group=_ON, type=MODEL_FILE, help="The unquantized model (BF16): divergence and errors are from it.")
@option("-f", "--file", "text", group=_ON, type=TEXT_FILE, help="Held-out text; without --base, perplexity alone.")
@option("--logits", group=_ON, type=_FILE, metavar="FILE", help="Base logits: used, or kept here if not there yet.")
@setting("-c", "--ctx-size", "n_ctx", group=_ON, type=click.IntRange(4), default=512, help="Tokens of a chunk.")
@option("--chunks", group=_ON, type=CHUNKS, default=-1, help="Only the first N chunks; -1, the default, for all.")
@option("--no-errors", group=_ON, is_flag=True, help="Do not compare every matrix with the base's.")
@option("--bench", group=_ON, is_flag=True, help="Time a prompt of 512 tokens and 64 generated ones, three times each.")
@option("--imatrix", group=_MORE, type=IMATRIX_HERE, help="Its coverage; errors are weighted by it.")
@option("--sensitivity", group=_MORE, type=_HERE, metavar="S.json", help="What each group costs in the type it has.")
@option("--title", group=_MORE, metavar="TEXT", help="The heading.  [default: the model's name]")
@option("--card", group=_OUT, type=_FILE, metavar="README.md", help="Also write a model card for hubs, Markdown.")
@option("--data", group=_OUT, type=_FILE, metavar="FILE", help="Where the numbers are kept.  [default: OUT.json]")
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
    """Write a page about quantized files of one model, to look at and to show: one file that needs no network.

    Size against divergence and perplexity, divergence of the worst tokens, types and errors by class and layer, where
    the files come from, and what loads them. All numbers are kept beside it, in OUT.json: what stands there is not
    measured again, so a killed run goes on, and without files the page is made from them alone.

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
        made = report(files, out, card=card, data=data, options=options, overwrite=overwrite, progress=bar.update)
    for file in made.files:
        for note in file.notes:
            click.echo(f"warning: {file.name}: {note}", err=True)
    for path in (out, card):
        if path is not None:
            click.echo(f"wrote {printable(path)}")


class _Bar:
    """A bar for each step, if stderr is a terminal; else a line."""

    def __init__(self) -> None:
        self.bar: tqdm[Any] | None = None
        self.what = ""

    def update(self, what: str, done: int, todo: int) -> None:
        """Show that ``done`` of ``todo`` parts of a step are done."""
        if what != self.what:
            self.close()
            self.what = what
            if sys.stderr.isatty():
                self.bar = tqdm(total=todo or None, desc=what, leave=False, dynamic_ncols=True)
            else:
                click.echo(what, err=True)
        if self.bar is not None:
            self.bar.total = todo or None
            self.bar.update(done - self.bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()
        self.bar = None
