"""``quantkit join``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli._copy_run import copy_options, run_copy_plan
from quantkit.cli._options import GroupedCommand
from quantkit.cli._paths import MODEL
from quantkit.formats.remote import locate
from quantkit.units import format_seconds


@click.command("join", cls=GroupedCommand)
@click.argument("source", metavar="IN-00001-of-N.gguf", type=MODEL)
@click.argument("output", metavar="[OUT.gguf]", type=MODEL, required=False)
@copy_options(delete="Delete each shard as soon as it is in the output.")
def command(source: Path, output: Path | None, spool: Path | None, **run: Any) -> None:
    """Join the shards of a model into one file.

    IN is any of the shards; the others lie beside it. The bytes are those of
    llama-gguf-split --merge. OUT is by default the name without the number.

    --delete-source deletes each shard as soon as its bytes are in the output, so
    the space of one shard is enough. After a kill, --delete-source --resume goes on.

    \b
    quantkit join model-00001-of-00003.gguf
    quantkit join model-00001-of-00003.gguf model.gguf --delete-source
    """
    from quantkit.split import plan_join, resume_join

    target = None if output is None else locate(output, spool)
    if run["delete_source"] and run["resume"] and not run["dry_run"]:
        result = resume_join(source, target, resume=True, overwrite=run["overwrite"])
        if result is not None:
            text = f"continued after {result.resumed} shards: {format_seconds(result.seconds)}"
            run["json_to"].print(
                lambda: text, lambda: {"command": "join", "resumed": result.resumed, "seconds": result.seconds}
            )
            return
    run_copy_plan(plan_join(source, target), **run)
