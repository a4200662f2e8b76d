"""``quantkit join``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli._copy_run import copy_options, run_copy_plan
from quantkit.cli._options import GroupedCommand
from quantkit.cli._paths import MODEL
from quantkit.formats.remote import located


@click.command("join", cls=GroupedCommand)
@click.argument("source", metavar="IN-00001-of-N.gguf", type=MODEL)
@click.argument("output", metavar="[OUT.gguf]", type=MODEL, required=False)
@copy_options()
def command(source: Path, output: Path | None, spool: Path | None, **run: Any) -> None:
    """Join the shards of a model into one file.

    IN is any of the shards; the others lie beside it. The bytes are those of
    llama-gguf-split --merge. OUT is by default the name without the number.

    \b
    quantkit join model-00001-of-00003.gguf
    quantkit join model-00001-of-00003.gguf model.gguf --delete-source
    """
    from quantkit.split import plan_join

    run_copy_plan(plan_join(source, None if output is None else located(output, spool)), **run)
