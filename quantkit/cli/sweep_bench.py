"""``quantkit sweep-bench``."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from quantkit.bench import Setting, SweepRow, sweep_bench
from quantkit.cli._evaluation import OUT, model_option, placement_from, run_options
from quantkit.cli._options import GroupedCommand, option, setting

_SWEEP = "Sweep"


@click.command("sweep-bench", cls=GroupedCommand)
@model_option
@setting("-c", "--ctx-size", "n_ctx", group=_SWEEP, type=click.IntRange(2), default=2048, help="Context size to reach.")
@option(
    "-n",
    "--n-gen",
    group=_SWEEP,
    type=click.IntRange(0),
    help="Tokens to generate per step.  [default: a quarter of -ub]",
)
@option(
    "-nrep",
    "repetitions",
    group=_SWEEP,
    type=click.IntRange(1),
    default=1,
    help="Repeat the first step N times and report the median.",
)
@run_options
@setting("--output-format", group=OUT, type=click.Choice(["md", "jsonl"]), default="md", help="Output format.")
def command(model: Path, n_ctx: int, n_gen: int | None, repetitions: int, output_format: str, **run: Any) -> None:
    """Measure speed as the context fills, as llama-sweep-bench does.

    Each step processes a batch of -ub tokens, generates single tokens, and advances
    the context by -ub.

    \b
    quantkit sweep-bench -m model.gguf -c 8192
    quantkit sweep-bench -m moe.gguf -ub 1024 -no-fmoe --output-format jsonl
    """
    values = {f.name: run[f.name] for f in fields(Setting) if f.name in run} | {"threads": run["threads"] or 0}
    settings = Setting(**values, merge_up_gate=run["merge_up_gate_experts"], placement=placement_from(run))
    rows = sweep_bench(model, n_ctx, settings, n_gen=n_gen, repetitions=repetitions)
    show = _md if output_format == "md" else _jsonl
    for i, row in enumerate(rows):
        show(row, i == 0)


def _md(row: SweepRow, first: bool) -> None:
    if first:
        click.echo("|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |")
        click.echo("|-------|--------|--------|----------|----------|----------|----------|")
    click.echo(
        f"|{row.pp:6} | {row.tg:6} | {row.n_kv:6} | {row.t_pp:8.3f} | {row.speed_pp:8.2f} | {row.t_tg:8.3f} | "
        f"{row.speed_tg:8.2f} |"
    )


def _jsonl(row: SweepRow, first: bool) -> None:
    click.echo(json.dumps(row.row()))
