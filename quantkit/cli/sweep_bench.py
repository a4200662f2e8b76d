"""``quantkit sweep-bench``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from quantkit.bench import Setting, SweepRow, sweep_bench
from quantkit.cli.evaluation import FILE, KV_TYPES, MODEL
from quantkit.cli.options import GroupedCommand, option
from quantkit.model.placement import Placement, parse_rules

_SWEEP, _RUN, _OUT = "The sweep", "How the model runs", "Output"


@click.command("sweep-bench", cls=GroupedCommand)
@option("-m", "--model", group=MODEL, type=FILE, required=True, help="The GGUF file; any shard of a split one.")
@option(
    "-c", "--ctx-size", "n_ctx", group=_SWEEP, type=click.IntRange(2), default=2048, show_default=True, help="Tokens."
)
@option("-ub", "--ubatch-size", group=_SWEEP, type=click.IntRange(1), default=512, show_default=True, help="The step.")
@option("-n", "--n-gen", group=_SWEEP, type=click.IntRange(0), help="Single tokens at each step; a quarter of it.")
@option(
    "-nrep", "repetitions", group=_SWEEP, type=click.IntRange(1), default=1, help="Repeat the first step; the median."
)
@option("-t", "--threads", group=_RUN, type=click.IntRange(0), default=0, help="Threads; 0 or nothing: all CPUs.")
@option("-ctk", "--kv-type", group=_RUN, type=click.Choice(KV_TYPES), default="f16", show_default=True, help="Caches.")
@option("-no-fug", "--no-fused-up-gate", group=_RUN, is_flag=True, help="Do not fuse up+gate of dense layers.")
@option("-no-fmoe", "--no-fused-moe", group=_RUN, is_flag=True, help="Do not fuse up+gate of experts.")
@option("-muge", "--merge-up-gate-experts", group=_RUN, is_flag=True, help="Merge up and gate experts while loading.")
@option("-ngl", "gpu_layers", group=_RUN, type=int, default=0, show_default=True, help="Layers on an accelerator.")
@option("-ot", "rules", group=_RUN, multiple=True, metavar="RE=DEVICE", help="Place matching tensors on a device.")
@option(
    "--output-format", group=_OUT, type=click.Choice(["md", "jsonl"]), default="md", show_default=True, help="Format."
)
def command(
    model: Path,
    n_ctx: int,
    ubatch_size: int,
    n_gen: int | None,
    repetitions: int,
    threads: int,
    kv_type: str,
    no_fused_up_gate: bool,
    no_fused_moe: bool,
    merge_up_gate_experts: bool,
    gpu_layers: int,
    rules: tuple[str, ...],
    output_format: str,
) -> None:
    """Fill a context step by step and measure a batch and single tokens at each, as ik_llama.cpp's llama-sweep-bench.

    \b
    quantkit sweep-bench -m model.gguf -c 8192
    quantkit sweep-bench -m moe.gguf -c 4096 -ub 1024 -no-fmoe --output-format jsonl
    """
    setting = Setting(
        n_batch=ubatch_size,
        n_ubatch=ubatch_size,
        kv_type=kv_type,
        threads=threads,
        fused_up_gate=not no_fused_up_gate,
        fused_moe=not no_fused_moe,
        merge_up_gate=merge_up_gate_experts,
        placement=Placement(gpu_layers, parse_rules(rules)),
    )
    rows = sweep_bench(model, n_ctx, setting, n_gen=n_gen, repetitions=repetitions)
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
