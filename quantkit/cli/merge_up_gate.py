"""``quantkit merge-up-gate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli.complete import types
from quantkit.cli.merging import carry_out, shared_options
from quantkit.cli.options import GroupedCommand, cache_option, cache_size_option, cached, option
from quantkit.formats.remote import located


@click.command("merge-up-gate", cls=GroupedCommand)
@shared_options
@option(
    "--reencode",
    group="Files",
    metavar="TYPE",
    shell_complete=types,
    help="Re-encode halves of different types to TYPE.",
)
@cache_option
@cache_size_option
def command(
    source: Path,
    output: Path,
    reencode: str | None,
    keep_split: bool,
    split_max_size: int | None,
    cache: Path | None,
    cache_size: int | None,
    spool: Path | None,
    **run: Any,
) -> None:
    """Merge ffn_gate_exps and ffn_up_exps into ffn_gate_up_exps.

    Bytes are copied, not re-encoded (except with --reencode): for each expert the gate rows, then the up rows; the same
    for biases. Layers that cannot be merged are left alone and listed. `quantkit split-up-gate` undoes it exactly.
    """
    from quantkit.merge import merge_imatrix, plan_merge_up_gate

    kept = cached(cache, cache_size)
    output = located(output, spool)
    plan = plan_merge_up_gate(source, output, reencode=reencode, keep_split=keep_split, split_max_size=split_max_size)
    carry_out(plan, merge_imatrix, **run, **kept)
