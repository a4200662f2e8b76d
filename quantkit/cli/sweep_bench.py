"""``quantkit sweep-bench``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from quantkit.bench import Setting, Sweep, SweepProgress, SweepRow, cpu_name, sweep_bench
from quantkit.cli._evaluation import OUT, model_option, placement_from, run_options
from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import GroupedCommand, option, setting
from quantkit.cli._progress import Bar
from quantkit.cpus import available_cpus
from quantkit.names import printable

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
@json_option()
def command(
    model: Path,
    n_ctx: int,
    n_gen: int | None,
    repetitions: int,
    output_format: str,
    json_to: JsonOutput,
    **run: Any,
) -> None:
    """Measure speed as the context fills, as llama-sweep-bench does.

    Each step processes a batch of -ub tokens, generates single tokens, and advances
    the context by -ub.

    \b
    quantkit sweep-bench -m model.gguf -c 8192
    quantkit sweep-bench -m moe.gguf -ub 1024 -no-fmoe --output-format jsonl
    """
    values = {f.name: run[f.name] for f in fields(Setting) if f.name in run} | {"threads": run["threads"] or 0}
    settings = Setting(**values, merge_up_gate=run["merge_up_gate_experts"], placement=placement_from(run))
    lines = _md if output_format == "md" else _jsonl
    with closing(Bar(quiet=json_to.only, unit="step", desc="load")) as bar:

        def show(now: SweepProgress) -> None:
            for note in now.notes:
                bar.print(f"note: {printable(note)}", err=True)
            bar.update(now.current, now.total, now.text)
            if now.row is not None and not json_to.only:
                for line in lines(now.row):
                    bar.print(line)

        sweep = sweep_bench(model, n_ctx, settings, n_gen=n_gen, repetitions=repetitions, progress=show)
    if json_to.only:
        json_to.print(str, lambda: _as_dict(sweep, settings, n_ctx))
    else:
        json_to.write(lambda: _as_dict(sweep, settings, n_ctx))


def _as_dict(sweep: Sweep, settings: Setting, n_ctx: int) -> dict[str, Any]:
    return {
        "model": sweep.model,
        "cpu_info": cpu_name(),
        "n_ctx": n_ctx,
        "n_batch": settings.n_batch,
        "n_ubatch": settings.n_ubatch,
        "kv_type": settings.kv_type,
        "threads": settings.threads or available_cpus(),
        "notes": list(sweep.notes),
        "rows": [row.row() for row in sweep],
    }


def _md(row: SweepRow) -> Iterator[str]:
    if row.n_kv == 0:
        yield "|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |"
        yield "|-------|--------|--------|----------|----------|----------|----------|"
    yield (
        f"|{row.pp:6} | {row.tg:6} | {row.n_kv:6} | {row.t_pp:8.3f} | {row.speed_pp:8.2f} | {row.t_tg:8.3f} | "
        f"{row.speed_tg:8.2f} |"
    )


def _jsonl(row: SweepRow) -> Iterator[str]:
    yield json.dumps(row.row())
