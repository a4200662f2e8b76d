"""``quantkit stitch``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quantkit.cli._copy_run import copy_options, run_copy_plan
from quantkit.cli._options import SHARD_SIZE, GroupedCommand, option
from quantkit.cli._pairs import Pair
from quantkit.cli._paths import MODEL
from quantkit.formats.remote import located


@click.command("stitch", cls=GroupedCommand)
@click.argument("base", metavar="BASE.gguf", type=MODEL)
@click.argument("output", metavar="OUT.gguf", type=MODEL)
@option(
    "--take",
    group="Files",
    multiple=True,
    required=True,
    type=Pair("REGEX=FILE", last=True),
    metavar="REGEX=FILE",
    help="Take matching tensors from another GGUF file, or from the shards of a map (tensors.iq4_k.map) of "
    "GGUF-Tool-Suite. Repeatable; the first match counts.",
)
@option("--split-max-size", group="Files", type=SHARD_SIZE, metavar="SIZE", help="Maximum size of a shard (48G).")
@copy_options()
def command(
    base: Path,
    output: Path,
    take: Sequence[tuple[str, str]],
    split_max_size: int | None,
    spool: Path | None,
    **run: Any,
) -> None:
    """Write one model with tensors of several files, byte for byte.

    All files are quants of the same model: BASE has the metadata, the order and all
    tensors that are not taken from another file.

    \b
    quantkit stitch model-IQ4_XS.gguf out.gguf --take 'attn_v=model-Q8_0.gguf'
    quantkit stitch model-Q4_K_M.gguf out.gguf --take ffn_down=tensors.iq4_k.map
    """
    from quantkit.stitch import plan_stitch

    plan = plan_stitch(base, located(output, spool), dict(take), split_max_size=split_max_size)
    run_copy_plan(plan, delete_source=False, **run)
