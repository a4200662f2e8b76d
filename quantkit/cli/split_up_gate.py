"""``quantkit split-up-gate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli._options import GroupedCommand
from quantkit.cli._up_gate import run_merge_plan, shared_options
from quantkit.formats.remote import locate


@click.command("split-up-gate", cls=GroupedCommand)
@shared_options
def command(
    source: Path, output: Path, keep_split: bool, split_max_size: int | None, spool: Path | None, **run: Any
) -> None:
    """Split ffn_gate_up_exps into ffn_gate_exps and ffn_up_exps.

    Undoes `quantkit merge-up-gate` exactly: bytes, order of tensors, shards and
    metadata. It also splits files that other programs merged.

    \b
    quantkit split-up-gate merged.gguf model.gguf
    """
    from quantkit.merge import plan_split_up_gate, split_imatrix_entries

    output = locate(output, spool)
    plan = plan_split_up_gate(source, output, keep_split=keep_split, split_max_size=split_max_size)
    run_merge_plan(plan, split_imatrix_entries, **run)
