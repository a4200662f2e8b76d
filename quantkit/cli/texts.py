"""``quantkit texts``."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import GroupedCommand, option
from quantkit.cli._paths import Place
from quantkit.cli._table import table
from quantkit.names import printable
from quantkit.texts import LICENSE, TextSet, texts

_OUT = "Output"


@click.command("texts", cls=GroupedCommand)
@option(
    "-o",
    "--output",
    group=_OUT,
    metavar="DIR",
    type=Place(file_okay=False),
    help="Write the texts to this directory, which is created.",
)
@option("--overwrite", group=_OUT, is_flag=True, help="Replace existing files.")
@json_option("the list")
def command(output: Path | None, overwrite: bool, json_to: JsonOutput) -> None:
    """List texts to measure models on, in six categories, and write them to a directory.

    For perplexity and kld, which show a row for each. They are no calibration
    texts: a model that was calibrated on them looks too good on them, and a warning
    says so. In the public domain (CC0 1.0); made for quantkit.

    \b
    quantkit texts -o texts
    quantkit kld --base-model model-BF16.gguf model-Q4_K_M.gguf -f texts
    quantkit perplexity -m model-Q4_K_M.gguf -f texts/code.txt
    """
    result = texts(output, overwrite=overwrite)
    json_to.print(lambda: _text(result), result.as_dict)


def _text(result: TextSet) -> str:
    rows = [(t.name, t.nbytes, t.sha256[:16], t.content) for t in result.texts]
    lines = [table(["text", "bytes", "SHA-256", "content"], rows, left=(0, 2, 3)), ""]
    if result.folder is None:
        lines.append(f"{LICENSE}; quantkit texts -o DIR writes them")
    else:
        lines.append(f"wrote {len(result.texts)} texts to {printable(str(result.folder))}, {LICENSE}")
    return "\n".join(lines)
