"""``quantkit stitch``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quantkit.cli._copy_run import copy_options, run_copy_plan
from quantkit.cli._options import SHARD_SIZE, GroupedCommand, option
from quantkit.cli._pairs import Pair
from quantkit.cli._paths import MODEL, FileOf, Place
from quantkit.formats.remote import locate

_PART = FileOf(".gguf", ".map")


@click.command("stitch", cls=GroupedCommand)
@click.argument("base", metavar="BASE.gguf", type=_PART)
@click.argument("files", metavar="[FILE.gguf]...", type=_PART, nargs=-1)
@click.argument("output", metavar="OUT.gguf", type=MODEL)
@option(
    "-r",
    "--recipe",
    group="Files",
    type=Place(),
    metavar="FILE",
    help="Take each tensor from the first file that has it in the type of its rule. Tensors without a rule are BASE's.",
)
@option(
    "--take",
    group="Files",
    multiple=True,
    type=Pair("REGEX=FILE", last=True),
    metavar="REGEX=FILE",
    help="Take matching tensors from another file. Repeatable; the first match counts, and comes before --recipe.",
)
@option("--split-max-size", group="Files", type=SHARD_SIZE, metavar="SIZE", help="Maximum size of a shard (48G).")
@copy_options()
def command(
    base: Path,
    files: tuple[Path, ...],
    output: Path,
    recipe: Path | None,
    take: Sequence[tuple[str, str]],
    split_max_size: int | None,
    spool: Path | None,
    **run: Any,
) -> None:
    """Write one model with tensors of several files, byte for byte.

    All files are quants of the same model: BASE has the metadata and the order. A
    file can also be a map of Thireus' GGUF-Tool-Suite (tensors.iq4_k.map); those of
    its shards that are taken lie beside it, and their SHA-256 is checked.

    \b
    quantkit stitch model-IQ4_XS.gguf out.gguf --take 'attn_v=model-Q8_0.gguf'
    quantkit stitch m-Q8_0.gguf m-IQ4_XS.gguf m-Q3_K.gguf out.gguf -r my.recipe
    quantkit stitch tensors.bf16.map tensors.iq3_k.map out.gguf -r theirs.recipe
    """
    from quantkit.stitch import plan_stitch

    out = locate(output, spool)
    plan = plan_stitch(base, out, dict(take), recipe=recipe, files=files, split_max_size=split_max_size)
    run_copy_plan(plan, delete_source=False, **run)
