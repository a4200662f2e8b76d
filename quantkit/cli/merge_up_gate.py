"""``quantkit merge-up-gate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli._options import GroupedCommand, cache_arguments, cache_option, cache_size_option, option
from quantkit.cli._paths import complete_types
from quantkit.cli._up_gate import run_merge_plan, shared_options
from quantkit.formats.remote import locate


@click.command("merge-up-gate", cls=GroupedCommand)
@shared_options
@option(
    "--reencode",
    group="Files",
    metavar="TYPE",
    shell_complete=complete_types,
    help="Encode up and gate of different types again, as TYPE.",
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

    Bytes are copied, not encoded again (except with --reencode): for each expert
    the gate rows, then the up rows, and the same for biases. Layers that cannot be
    merged are left unchanged and listed. `quantkit split-up-gate` undoes it
    exactly.

    \b
    quantkit merge-up-gate model.gguf merged.gguf
    """
    from quantkit.merge import merge_imatrix_entries, plan_merge_up_gate

    cache_run = cache_arguments(cache, cache_size)
    output = locate(output, spool)
    plan = plan_merge_up_gate(source, output, reencode=reencode, keep_split=keep_split, split_max_size=split_max_size)
    run_merge_plan(plan, merge_imatrix_entries, **run, **cache_run)
