"""``quantkit prune-experts``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli._copy_run import copy_options, run_copy_plan
from quantkit.cli._options import SHARD_SIZE, GroupedCommand, option
from quantkit.cli._paths import IMATRIX, MODEL, FileOf
from quantkit.formats.remote import locate


@click.command("prune-experts", cls=GroupedCommand)
@click.argument("source", metavar="IN.gguf", type=MODEL)
@click.argument("output", metavar="OUT.gguf", type=MODEL)
@option("--keep", group="Selection", metavar="N|SHARE", help="Experts of each layer that stay: 96, or 75%.")
@option(
    "--by",
    "criterion",
    group="Selection",
    type=click.Choice(("reap", "frequency", "list")),
    help="Score of an expert: REAP's saliency, its number of tokens, or a list.  [default: list with --experts, else "
    "reap]",
)
@option("--imatrix", group="Selection", type=IMATRIX, help="Importance matrix of `quantkit imatrix --saliency`.")
@option(
    "--experts",
    group="Selection",
    type=FileOf(".json", ".gguf"),
    metavar="FILE",
    help="List of experts: JSON of an earlier --json, or a pruned file.",
)
@option("--keep-split", group="Files", is_flag=True, help="Write one output shard per input shard.")
@option("--split-max-size", group="Files", type=SHARD_SIZE, help="Maximum size of a shard (48G).")
@copy_options()
def command(
    source: Path,
    output: Path,
    keep: str | None,
    criterion: Any,
    imatrix: Path | None,
    experts: Path | None,
    keep_split: bool,
    split_max_size: int | None,
    spool: Path | None,
    **run: Any,
) -> None:
    """Write a MoE model with fewer experts.

    Every layer keeps the same number, of the largest score; groups of experts keep
    equal numbers. Bytes are copied, so quantized files remain what they were;
    router, biases and keys follow. An importance matrix or a covariance file of the
    model follows with the list of the pruned model.

    \b
    quantkit imatrix --saliency -m m.gguf -f text.txt -o imatrix.gguf
    quantkit prune-experts m.gguf out.gguf --keep 75% --imatrix imatrix.gguf
    quantkit prune-experts imatrix.gguf out-imatrix.gguf --experts out.gguf
    """
    from quantkit.prune import plan_prune_experts

    prune = plan_prune_experts(
        source,
        locate(output, spool),
        keep,
        criterion=criterion,
        imatrix=imatrix,
        experts=experts,
        keep_split=keep_split,
        split_max_size=split_max_size,
    )
    size = len(next(iter(prune.experts.values())))
    lines = [f"{len(prune.experts)} layers: {size} of {prune.n_expert} experts, by {prune.criterion}"]
    for layer, _, removed, share in prune.as_table().rows:
        score = "" if share is None else f"  ({share:.1%} of the score)"
        lines.append(f"  {layer}: without {removed}{score}")
    run_copy_plan(prune.plan, summary=lines, record=prune.as_dict(), **run)
