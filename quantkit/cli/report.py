"""``quantkit report``."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.arguments import declarations
from quantkit.cli._declared_options import declared_options
from quantkit.cli._evaluation import load_options, run_options
from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import GroupedCommand, option, options
from quantkit.cli._paths import MODEL_FILE, Place
from quantkit.cli._progress import Bar
from quantkit.extras import REPORT
from quantkit.names import printable
from quantkit.progress import Progress
from quantkit.report import ReportOptions, report
from quantkit.report.measure import CONTENT, MEASUREMENTS

_OUT = "Output"
_FILE = Place(dir_okay=False)


@click.command("report", cls=GroupedCommand, extras=(REPORT,))
@click.argument("out", metavar="OUT.html", type=_FILE)
@click.argument("files", metavar="[FILE.gguf]...", type=MODEL_FILE, nargs=-1)
@options(*declared_options(ReportOptions, (MEASUREMENTS, CONTENT)))
@option(
    "--bench",
    group=MEASUREMENTS,
    is_flag=True,
    help="Time a prompt of 512 tokens and 64 generated ones, three times each.",
)
@option("--card", group=_OUT, type=_FILE, metavar="README.md", help="Also write a model card in Markdown.")
@option("--data", group=_OUT, type=_FILE, metavar="FILE", help="File for the numbers.  [default: OUT.json]")
@option("--overwrite", group=_OUT, is_flag=True, help="Replace an existing page and card.")
@json_option("the numbers")
@run_options
def command(
    out: Path,
    files: tuple[Path, ...],
    bench: bool,
    card: Path | None,
    data: Path | None,
    overwrite: bool,
    json_to: JsonOutput,
    **values: Any,
) -> None:
    """Write an HTML report on quantized files of one model.

    The report is one file that needs no network. It shows size against divergence
    and perplexity, the divergence of the worst tokens, types and errors by class
    and layer, provenance, and the runtimes that load the files. All numbers are
    stored beside it, in OUT.json: numbers in it are not measured again, so
    a killed run continues, and without files the page is built from them alone.

    \b
    quantkit report report.html model-*.gguf --base model-BF16.gguf -f text.txt
    quantkit report report.html model-*.gguf --card README.md --bench
    quantkit report again.html --data report.json
    """
    settings = ReportOptions(
        **{name: values.pop(name) for name in declarations(ReportOptions)},
        bench=(512, 64, 3) if bench else (),
        n_batch=values["n_batch"],
        load=load_options(values) if files else {},
    )
    with closing(_Bar(quiet=json_to.only)) as bar:
        result = report(files, out, card=card, data=data, options=settings, overwrite=overwrite, progress=bar.update)
    for file in result.files:
        for note in file.notes:
            click.echo(f"warning: {file.name}: {note}", err=True)
    json_to.print(
        lambda: "\n".join(f"wrote {printable(path)}" for path in (out, card) if path is not None),
        lambda: json.loads(result.to_json()),
    )


class _Bar:
    """A bar for each step, if stderr is a terminal; else a line, and lines from time to time on a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.bar: Bar | None = None
        self.step = ""

    def update(self, now: Progress) -> None:
        """Show the parts of a step that are done."""
        if now.text != self.step:
            self.close()
            self.step = now.text
            self.bar = Bar(quiet=self.quiet, lines=True)
        if self.bar is not None:
            self.bar.update(*now)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()
        self.bar = None
