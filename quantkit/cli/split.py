"""``quantkit split``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli._copy_run import copy_options, run_copy_plan
from quantkit.cli._options import SHARD_SIZE, GroupedCommand, option
from quantkit.cli._paths import MODEL
from quantkit.formats.remote import locate


@click.command("split", cls=GroupedCommand)
@click.argument("source", metavar="IN.gguf", type=MODEL)
@click.argument("output", metavar="[OUT.gguf]", type=MODEL, required=False)
@option(
    "--max-size",
    "--split-max-size",
    group="Files",
    type=SHARD_SIZE,
    metavar="SIZE",
    help="Maximum size (48G).",
)
@option(
    "--max-tensors",
    "--split-max-tensors",
    group="Files",
    type=click.IntRange(1),
    help="Maximum number of tensors in a shard, instead.",
)
@option("--no-tensor-first-split", group="Files", is_flag=True, help="Write a first shard of metadata alone.")
@copy_options(delete="Delete the input when all shards are on the disk.")
def command(
    source: Path,
    output: Path | None,
    max_size: int | None,
    max_tensors: int | None,
    no_tensor_first_split: bool,
    spool: Path | None,
    **run: Any,
) -> None:
    """Split a GGUF file into shards.

    Writes OUT-00001-of-00003.gguf and so on, with the bytes of llama-gguf-split;
    OUT is by default the name of the input. Runtimes load the first shard.
    `quantkit join` undoes it.

    \b
    quantkit split model.gguf --max-size 48G
    quantkit split model.gguf parts/model.gguf --max-size 48G --delete-source
    """
    from quantkit.split import plan_split

    plan = plan_split(
        source,
        None if output is None else locate(output, spool),
        max_size=max_size,
        max_tensors=max_tensors,
        no_tensor_first_split=no_tensor_first_split,
    )
    run_copy_plan(plan, **run)
