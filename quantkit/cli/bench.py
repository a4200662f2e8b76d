"""``quantkit bench``."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from quantkit.bench import Result, Setting, Test, bench, combinations
from quantkit.cli.evaluation import FILE, KV_TYPES, MODEL, placement_given, placement_options
from quantkit.cli.options import NUMBERS, GroupedCommand, option
from quantkit.helpers import format_count, format_size

_TESTS, _SETTINGS, _OUT = "Tests", "How the model runs (several values: all combinations)", "Output"
FORMATS = ("md", "csv", "json", "jsonl")


def flags(*names: str, help: str, default: str) -> Any:  # noqa: A002
    """Declare a switch that takes 0, 1 or 0,1."""
    return option(*names, group=_SETTINGS, type=NUMBERS, default=default, show_default=True, metavar="0,1", help=help)


@click.command("bench", cls=GroupedCommand)
@option(
    "-m", "--model", "models", group=MODEL, type=FILE, required=True, multiple=True, help="A GGUF file; repeatable."
)
@option("-p", "--n-prompt", group=_TESTS, type=NUMBERS, default="512", show_default=True, help="Prompts of n tokens.")
@option("-n", "--n-gen", group=_TESTS, type=NUMBERS, default="128", show_default=True, help="n tokens one by one.")
@option("-pg", "both", group=_TESTS, multiple=True, metavar="PP,TG", help="A prompt, then tokens one by one.")
@option("-d", "--n-depth", group=_TESTS, type=NUMBERS, default="0", show_default=True, help="After n tokens.")
@option("-r", "--repetitions", group=_TESTS, type=click.IntRange(1), default=5, show_default=True, help="Of each test.")
@option("--no-warmup", group=_TESTS, is_flag=True, help="Count the first run, too.")
@option("-t", "--threads", group=_SETTINGS, type=NUMBERS, default="0", help="Threads; 0, the default: all CPUs.")
@option(
    "-b", "--batch-size", group=_SETTINGS, type=NUMBERS, default="2048", show_default=True, help="Tokens of a pass."
)
@option("-ub", "--ubatch-size", group=_SETTINGS, type=NUMBERS, default="512", show_default=True, help="At once in it.")
@option("-ctk", "--kv-type", group=_SETTINGS, default="f16", show_default=True, help=f"Caches: {', '.join(KV_TYPES)}.")
@flags("-fug", "--fused-up-gate", default="1", help="Fused up+gate of dense layers and shared experts.")
@flags("-fmoe", "--fused-moe", default="1", help="Fused up+gate of experts.")
@flags("-fqkv", "--fused-qkv", default="1", help="q, k and v in one pass.")
@flags("-muge", "--merge-up-gate-experts", default="0", help="Merge up and gate experts while loading.")
@placement_options
@option(
    "-o", "--output", "form", group=_OUT, type=click.Choice(FORMATS), default="md", show_default=True, help="Format."
)
@option("--progress", group=_OUT, is_flag=True, help="Say on stderr what runs.")
def command(
    models: Sequence[Path],
    n_prompt: Sequence[int],
    n_gen: Sequence[int],
    both: Sequence[str],
    n_depth: Sequence[int],
    repetitions: int,
    no_warmup: bool,
    threads: Sequence[int],
    batch_size: Sequence[int],
    ubatch_size: Sequence[int],
    kv_type: str,
    fused_up_gate: Sequence[int],
    fused_moe: Sequence[int],
    fused_qkv: Sequence[int],
    merge_up_gate_experts: Sequence[int],
    form: str,
    progress: bool,
    **run: Any,
) -> None:
    """Measure how fast a model runs, as llama-bench does.

    ppN is a prompt of N tokens, tgN are N tokens one by one. GB/s are the weights and caches that generating reads,
    `of read` is that as a share of what the device can read (a card: copy), `of peak` the multiplications as a share of
    its arithmetic peak (a CPU's 8-bit integers, a card's bf16 GEMM).

    \b
    quantkit bench -m model.gguf
    quantkit bench -m model.gguf -p 512,2048 -n 64 -d 0,4096 -o json
    quantkit bench -m moe.gguf -fmoe 0,1 -muge 0,1
    """
    tests = _tests(n_prompt, n_gen, both, n_depth)
    settings = combinations(
        n_batch=batch_size,
        n_ubatch=ubatch_size,
        kv_type=_kv_types(kv_type),
        threads=threads,
        fused_up_gate=[bool(x) for x in fused_up_gate],
        fused_moe=[bool(x) for x in fused_moe],
        fused_qkv=[bool(x) for x in fused_qkv],
        merge_up_gate=[bool(x) for x in merge_up_gate_experts],
        placement=[placement_given(run)],
        max_vram=[run["max_vram"]],
        cublas=[run["cublas"]],
    )

    def say(line: str) -> None:
        if progress or line.startswith("note: "):
            click.echo(line, err=True)

    results = (
        result
        for model in models
        for result in bench(model, tests, settings, repetitions=repetitions, warmup=not no_warmup, progress=say)
    )
    PRINT[form](results)


def _kv_types(text: str) -> list[str]:
    found = [t.strip().lower() for t in text.split(",")]
    for t in found:
        if t not in KV_TYPES:
            raise click.BadParameter(f"{t!r} is none of {', '.join(KV_TYPES)}", param_hint="-ctk")
    return found


def _tests(n_prompt: Sequence[int], n_gen: Sequence[int], both: Sequence[str], depths: Sequence[int]) -> list[Test]:
    pairs = [(n, 0) for n in n_prompt if n] + [(0, n) for n in n_gen if n]
    for text in both:
        try:
            p, g = (int(n) for n in text.split(","))
        except ValueError:
            raise click.BadParameter(f"{text!r}: write PP,TG such as 512,128", param_hint="-pg") from None
        pairs.append((p, g))
    if any(p < 0 or g < 0 for p, g in pairs) or any(d < 0 for d in depths):
        raise click.BadParameter("tokens are counted from 0", param_hint="-p, -n, -pg, -d")
    return [Test(p, g, d) for d in depths for p, g in pairs]


# ---------------------------------------------------------------- formats

#: Columns that stand in the table if the command line sets their option: header, option, value.
_OPTIONAL: tuple[tuple[str, str, Callable[[Setting], object]], ...] = (
    ("n_batch", "batch_size", lambda s: s.n_batch),
    ("n_ubatch", "ubatch_size", lambda s: s.n_ubatch),
    ("kv", "kv_type", lambda s: s.kv_type),
    ("fug", "fused_up_gate", lambda s: int(s.fused_up_gate)),
    ("fmoe", "fused_moe", lambda s: int(s.fused_moe)),
    ("fqkv", "fused_qkv", lambda s: int(s.fused_qkv)),
    ("muge", "merge_up_gate_experts", lambda s: int(s.merge_up_gate)),
)


def _print_md(results: Iterable[Result]) -> None:
    """Print a table row by row, as results come: whoever waits sees something."""
    columns = [column for column in _OPTIONAL if _given(column[1])]
    names = ["model", "size", "params", "backend", "threads", *(name for name, _, _ in columns), "test", "t/s"]
    names += ["GB/s", "of read", "of peak"]
    machine = None
    for r in results:
        if machine is None:
            click.echo("| " + " | ".join(names) + " |")
            click.echo("| " + " | ".join("---" if i < 4 else "---:" for i in range(len(names))) + " |")
        machine = r.machine
        cells = [
            r.model,
            format_size(r.model_size),
            format_count(r.model_n_params),
            machine.backends,
            str(machine.threads),
            *(str(value(r.setting)) for _, _, value in columns),
            str(r.test),
            f"{r.avg_ts:.2f} ± {r.stddev_ts:.2f}",
            f"{r.gb_s:.1f}" if r.gb_s else "",
            f"{r.bandwidth_share:.0%}" if r.gb_s and machine.read_gb_s else "",
            f"{r.peak_share:.0%}" if machine.peak_gops else "",
        ]
        click.echo("| " + " | ".join(cells) + " |")
    if machine is not None and machine.peak:
        of = f"with {machine.threads} threads" if machine.backends == "CPU" else f"of {machine.backends}"
        click.echo(
            f"\nthis machine, measured: {machine.read_gb_s:.1f} GB/s read, {machine.peak_gops:.0f} GOPS of "
            f"{machine.peak} {of}"
        )


def _given(name: str) -> bool:
    """Tell whether the command line set this option."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def _print_csv(results: Iterable[Result]) -> None:
    first = True
    for r in results:
        row = r.row()
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, row.keys(), lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
        if first:
            writer.writeheader()
        writer.writerow(row)
        sys.stdout.write(buffer.getvalue())
        sys.stdout.flush()
        first = False


def _with_samples(r: Result) -> dict[str, Any]:
    return {**r.row(), "samples_ns": list(r.samples_ns), "samples_ts": list(r.samples_ts)}


def _print_json(results: Iterable[Result]) -> None:
    click.echo(json.dumps([_with_samples(r) for r in results], indent=2))


def _print_jsonl(results: Iterable[Result]) -> None:
    for r in results:
        click.echo(json.dumps(_with_samples(r)))


PRINT = {"md": _print_md, "csv": _print_csv, "json": _print_json, "jsonl": _print_jsonl}
