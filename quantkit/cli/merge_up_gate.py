"""``quantkit merge-up-gate``."""

from __future__ import annotations

from typing import Any

import click

from quantkit.cli.merging import carry_out, shared_options
from quantkit.cli.options import GroupedCommand, option


@click.command("merge-up-gate", cls=GroupedCommand)
@shared_options
@option("--reencode", group="Files", metavar="TYPE", help="Give both halves this type where their types differ.")
def command(
    source: str, output: str, reencode: str | None, keep_split: bool, split_max_size: int | None, **run: Any
) -> None:
    """Merge ffn_gate_exps and ffn_up_exps into ffn_gate_up_exps.

    Bytes are copied, never re-encoded (but see --reencode): per expert the gate rows, then the up rows, biases the
    same. Layers that cannot be merged are left alone and named. `quantkit split-up-gate` undoes it exactly.
    """
    from quantkit.merge import merge_imatrix, plan_merge_up_gate

    plan = plan_merge_up_gate(source, output, reencode=reencode, keep_split=keep_split, split_max_size=split_max_size)
    carry_out(plan, merge_imatrix, **run)
