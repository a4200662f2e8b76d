"""``quantkit bench``."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.bench import SWITCHES, BenchProgress, Machine, Result, Setting, Test, bench, combinations
from quantkit.cli._compat_options import ignored_options
from quantkit.cli._evaluation import MODEL, hub_model, hub_options, placement_from, placement_options
from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import NUMBERS, GroupedCommand, on_command_line, option, setting
from quantkit.cli._paths import MODEL_FILE
from quantkit.cli._progress import Bar
from quantkit.cli._table import columns
from quantkit.model.kv_types import KV_TYPES, join_kv_types
from quantkit.names import printable, shorten
from quantkit.units import format_count, format_size

_TESTS = "Tests"
_SETTINGS = "Model settings (with several values, as 0,1, every combination runs)"
_OUT = "Output"
FORMATS = ("md", "csv", "json", "jsonl")


def switch(*names: str, help: str, default: str) -> Any:  # noqa: A002
    """Declare a switch whose value is 0, 1 or 0,1."""
    return setting(*names, group=_SETTINGS, type=NUMBERS, default=default, metavar="0,1", help=help)


@click.command("bench", cls=GroupedCommand)
@option(
    "-m",
    "--model",
    "models",
    group=MODEL,
    type=MODEL_FILE,
    multiple=True,
    help="Model file; repeatable.",
)
@hub_options
@setting("-p", "--n-prompt", group=_TESTS, type=NUMBERS, default="512", help="Length of the prompt in tokens.")
@setting("-n", "--n-gen", group=_TESTS, type=NUMBERS, default="128", help="Number of tokens to generate.")
@option(
    "-pg", "both", group=_TESTS, multiple=True, metavar="PP,TG", help="Process a prompt of PP tokens, then generate TG."
)
@setting("-d", "--n-depth", group=_TESTS, type=NUMBERS, default="0", help="Tokens in the context before each test.")
@setting("-r", "--repetitions", group=_TESTS, type=click.IntRange(1), default=5, help="Repetitions of each test.")
@option("--no-warmup", group=_TESTS, is_flag=True, help="Skip the warm-up run.")
@option("-j", "-t", "--threads", group=_SETTINGS, type=NUMBERS, default="0", help="Threads; 0 (default): all CPUs.")
@setting("-b", "--batch-size", group=_SETTINGS, type=NUMBERS, default="2048", help="Logical batch size.")
@setting("-ub", "--ubatch-size", group=_SETTINGS, type=NUMBERS, default="512", help="Physical batch size.")
@setting(
    "--kv-type", group=_SETTINGS, metavar="TYPE", default="f16", help=f"Type of both caches: {', '.join(KV_TYPES)}."
)
@option("-ctk", "--cache-type-k", "k_type", group=_SETTINGS, metavar="TYPE", help="Type of the K cache.")
@option("-ctv", "--cache-type-v", "v_type", group=_SETTINGS, metavar="TYPE", help="Type of the V cache.")
@switch("-fug", "--fused-up-gate", default="1", help="Fuse up and gate of dense layers and shared experts.")
@switch("-fmoe", "--fused-moe", default="1", help="Fuse up and gate of experts.")
@switch("-fqkv", "--fused-qkv", default="1", help="Fuse q, k and v.")
@switch("-flaunch", "--fused-launches", default="1", help="On GPUs, fuse neighbouring operations into one launch.")
@switch("-muge", "--merge-up-gate-experts", default="0", help="Merge up and gate experts while loading.")
@switch("-mmp", "--mmap", default="1", help="1: memory-map weights; 0: copy them to memory.")
@placement_options
@ignored_options
@setting("-o", "--output", "form", group=_OUT, type=click.Choice(FORMATS), default="md", help="Output format.")
@option("--progress", group=_OUT, is_flag=True, help="Report each step on stderr.")
@json_option("the results, as -o json does,")
def command(
    models: Sequence[Path],
    hf_repo: str | None,
    hf_file: str | None,
    repetitions: int,
    no_warmup: bool,
    form: str,
    progress: bool,
    json_to: JsonOutput,
    **run: Any,
) -> None:
    """Measure prompt processing and generation speed, as llama-bench does.

    ppN processes a prompt of N tokens, tgN generates N tokens. GB/s counts the
    weights and caches that generation reads; `read` is its share of the measured
    bandwidth (on a GPU: of a copy), `peak` the share of the measured arithmetic
    peak (8-bit integers on a CPU, a bf16 GEMM on a GPU).

    \b
    quantkit bench -m model.gguf
    quantkit bench -m model.gguf -p 512,2048 -n 64 -d 0,4096 --json speed.json
    quantkit bench -m moe.gguf -fmoe 0,1 -muge 0,1
    """
    if (download := hub_model(None, hf_repo, hf_file)) is not None:
        models = [*models, download]
    if not models:
        raise click.UsageError("Missing option '-m' / '--model'.")
    tests = _tests(run["n_prompt"], run["n_gen"], run["both"], run["n_depth"])
    run["merge_up_gate"] = run.pop("merge_up_gate_experts")
    settings = combinations(
        n_batch=run["batch_size"],
        n_ubatch=run["ubatch_size"],
        kv_type=_kv_types(run),
        threads=run["threads"],
        **{name: [bool(x) for x in run[name]] for name in SWITCHES},
        placement=[placement_from(run)],
        max_vram=[run["max_vram"]],
        cublas=[run["cublas"]],
    )

    results: list[Result] = []
    printer = _Json() if json_to.only else _PRINTERS[form]()
    with closing(Bar(quiet=progress or json_to.only, unit="run", desc="load")) as bar:

        def show(now: BenchProgress) -> None:
            for note in now.notes:
                bar.print(f"note: {printable(note)}", err=True)
            if now.text and progress and now.result is None:
                click.echo(now.text, err=True)
            bar.update(now.current, now.total, now.text)
            if now.result is not None:
                results.append(now.result)
                for line in printer.lines(now.result):
                    bar.print(line)

        for model in models:
            bench(model, tests, settings, repetitions=repetitions, warmup=not no_warmup, progress=show)
    for line in printer.end():
        click.echo(line)
    json_to.write(lambda: [_with_samples(r) for r in results])


def _kv_types(run: Mapping[str, Any]) -> list[str]:
    """Return the types of caches: those of --kv-type, or all combinations of -ctk and -ctv."""
    if run["k_type"] is None and run["v_type"] is None:
        return _types(run["kv_type"], "--kv-type")
    ks = _types(run["k_type"] or run["kv_type"], "-ctk")
    vs = _types(run["v_type"] or run["kv_type"], "-ctv")
    return [join_kv_types(k, v) for k in ks for v in vs]


def _types(text: str, name: str) -> list[str]:
    types = [t.strip().lower() for t in text.split(",")]
    for t in types:
        if t not in KV_TYPES:
            raise click.BadParameter(f"{t!r} is not one of {', '.join(KV_TYPES)}", param_hint=name)
    return types


def _tests(n_prompt: Sequence[int], n_gen: Sequence[int], both: Sequence[str], depths: Sequence[int]) -> list[Test]:
    pairs = [(n, 0) for n in n_prompt if n] + [(0, n) for n in n_gen if n]
    for text in both:
        try:
            p, g = (int(n) for n in text.split(","))
        except ValueError:
            raise click.BadParameter(f"{text!r}: write PP,TG such as 512,128", param_hint="-pg") from None
        pairs.append((p, g))
    if any(p < 0 or g < 0 for p, g in pairs) or any(d < 0 for d in depths):
        raise click.BadParameter("give 0 or more tokens", param_hint="-p, -n, -pg, -d")
    return [Test(p, g, d) for d in depths for p, g in pairs]


# ---------------------------------------------------------------- formats

#: Columns of a terminal for the whole table, and a model's longest name in a narrower one.
_WIDE, _NAME = 110, 20

#: Columns that the table has if the command line sets their option: header, option, value.
_OPTIONAL: tuple[tuple[str, str, Callable[[Setting], object]], ...] = (
    ("n_batch", "batch_size", lambda s: s.n_batch),
    ("n_ubatch", "ubatch_size", lambda s: s.n_ubatch),
    ("kv", "kv_type", lambda s: s.kv_type),
    ("fug", "fused_up_gate", lambda s: int(s.fused_up_gate)),
    ("fmoe", "fused_moe", lambda s: int(s.fused_moe)),
    ("fqkv", "fused_qkv", lambda s: int(s.fused_qkv)),
    ("flaunch", "fused_launches", lambda s: int(s.fused_launches)),
    ("muge", "merge_up_gate_experts", lambda s: int(s.merge_up_gate)),
    ("mmap", "mmap", lambda s: int(s.mmap)),
)


class _Printer:
    """Prints nothing; the base of the formats."""

    def lines(self, result: Result) -> Iterator[str]:
        """Yield the lines of a result, printed as it comes."""
        return iter(())

    def end(self) -> Iterator[str]:
        """Yield the lines after the last result."""
        return iter(())


class _Markdown(_Printer):
    """A table; a narrow terminal gets shorter names, no size and no params."""

    def __init__(self) -> None:
        self.is_narrow = (columns() or _WIDE) < _WIDE
        self.optional = [column for column in _OPTIONAL if on_command_line(column[1])]
        self.machine: Machine | None = None

    def lines(self, result: Result) -> Iterator[str]:
        if self.machine is None:
            names = ["model", "size", "params", "backend", "threads", *(name for name, _, _ in self.optional)]
            names += ["test", "t/s", "GB/s", "read", "peak"]
            yield self._row(names)
            yield self._row(["---" if i < 4 else "---:" for i in range(len(names))])
        self.machine = machine = result.machine
        yield self._row(
            [
                printable(result.model),
                format_size(result.model_size),
                format_count(result.model_n_params),
                machine.backends,
                str(machine.threads),
                *(str(value(result.setting)) for _, _, value in self.optional),
                str(result.test),
                f"{result.avg_ts:.2f} ± {result.stddev_ts:.2f}",
                f"{result.gb_s:.1f}" if result.gb_s else "",
                f"{result.bandwidth_share:.0%}" if result.gb_s and machine.read_gb_s else "",
                f"{result.peak_share:.0%}" if machine.peak_gops else "",
            ]
        )

    def end(self) -> Iterator[str]:
        machine = self.machine
        if machine is not None and machine.peak:
            basis = f"with {machine.threads} threads" if machine.backends == "CPU" else f"of {machine.backends}"
            yield ""
            yield (
                f"measured here: {machine.read_gb_s:.1f} GB/s read, "
                f"{machine.peak_gops:.0f} GOPS of {machine.peak} {basis}"
            )

    def _row(self, cells: Sequence[str]) -> str:
        return f"| {' | '.join([shorten(cells[0], _NAME), *cells[3:]] if self.is_narrow else cells)} |"


class _Csv(_Printer):
    """CSV, texts in quotes."""

    def __init__(self) -> None:
        self.has_header = False

    def lines(self, result: Result) -> Iterator[str]:
        row = {name: printable(value) if isinstance(value, str) else value for name, value in result.row().items()}
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, row.keys(), lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
        if not self.has_header:
            writer.writeheader()
        writer.writerow(row)
        self.has_header = True
        yield buffer.getvalue().removesuffix("\n")


class _Json(_Printer):
    """One JSON list of all results."""

    def __init__(self) -> None:
        self.results: list[Result] = []

    def lines(self, result: Result) -> Iterator[str]:
        self.results.append(result)
        return iter(())

    def end(self) -> Iterator[str]:
        yield _json(self.results)


class _JsonLines(_Printer):
    """A JSON object per line."""

    def lines(self, result: Result) -> Iterator[str]:
        yield json.dumps(_with_samples(result))


def _with_samples(r: Result) -> dict[str, Any]:
    return {**r.row(), "samples_ns": list(r.samples_ns), "samples_ts": list(r.samples_ts)}


def _json(results: Sequence[Result]) -> str:
    return json.dumps([_with_samples(r) for r in results], indent=2)


_PRINTERS: dict[str, Callable[[], _Printer]] = {"md": _Markdown, "csv": _Csv, "json": _Json, "jsonl": _JsonLines}
