"""``quantkit sensitivity``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from quantkit.cli.evaluation import KV_NAMES, KV_TYPES, OUT, RUN, TEXT, TEXT_FILE, model_option, one_kv_type
from quantkit.cli.options import (
    CHUNKS,
    SIZE,
    GroupedCommand,
    cache_option,
    cache_size_option,
    cached,
    echo_notes,
    option,
    setting,
    threads_option,
)
from quantkit.cli.table import table
from quantkit.names import printable
from quantkit.sensitivity import Cost, Sensitivity, SensitivityOptions, SensitivityProgress, sensitivity
from quantkit.sensitivity.encode import GROUPS
from quantkit.sensitivity.experts import line_of
from quantkit.sensitivity.measure import FEW, FULL_RUNS, TYPES
from quantkit.units import format_seconds, format_size

_MEASURED = "What is measured"
#: Groups that are listed.
_LISTED = 12


@click.command("sensitivity", cls=GroupedCommand)
@model_option
@option(
    "-f",
    "--file",
    "files",
    group=TEXT,
    type=TEXT_FILE,
    required=True,
    multiple=True,
    help="A held-out text, - for stdin; repeatable. Not the one the importance matrix is of.",
)
@setting("-c", "--ctx-size", "n_ctx", group=TEXT, type=click.IntRange(4), default=512, help="Tokens per chunk.")
@option("--chunks", group=TEXT, type=CHUNKS, default=-1, help="Only the first N chunks; -1, the default, for all.")
@option("--types", group=_MEASURED, metavar="TYPES", help=f"Types, divided by commas. Default: {','.join(TYPES)}.")
@setting(
    "--groups",
    group=_MEASURED,
    type=click.Choice(GROUPS),
    default=GROUPS[0],
    help="What is quantized together: the tensors of a class in a layer, those of a class in all layers, or each by "
    "itself. All experts of a tensor have one type.",
)
@option(
    "--imatrix",
    group=_MEASURED,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Importance matrix, as for quantize; some types need one.",
)
@option(
    "--feedback",
    group=_MEASURED,
    metavar="COV",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Covariances: also measure types encoded with error feedback.",
)
@option(
    "--full-runs",
    group=_MEASURED,
    type=click.IntRange(-1),
    metavar="N",
    help="Types of each group that run to the end of the model, -1 for all; the others only to the end of their layer: "
    f"what they cost follows from the error there. Default: all of up to {FEW} types, {FULL_RUNS} of more.",
)
@option("--proxies-only", group=_MEASURED, is_flag=True, help="Measure one type of each group, guess the others.")
@option(
    "--together/--no-together",
    group=_MEASURED,
    default=True,
    help="Also measure all groups in each type at once, so that search knows how costs combine.",
)
@option("--allow-requantize", group=_MEASURED, is_flag=True, help="Take tensors that are quantized already.")
@setting("-b", "--batch-size", "n_batch", group=RUN, type=click.IntRange(1), default=4096, help="Tokens at once.")
@threads_option
@setting(
    *KV_NAMES,
    group=RUN,
    multiple=True,
    type=click.Choice(KV_TYPES, case_sensitive=False),
    default=["f16"],
    callback=one_kv_type,
    help="Type of both K and V cache.",
)
@option("--max-ram", group=RUN, type=SIZE, metavar="SIZE", help="Memory for weights; the rest is streamed.")
@cache_option
@cache_size_option
@option("--resume", group=RUN, is_flag=True, help="Go on with an interrupted run.")
@option(
    "-o",
    "--output",
    group=OUT,
    metavar="S.json",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write, for `quantkit search`.",
)
@option("--overwrite", group=OUT, is_flag=True, help="Replace an existing output, or drop an interrupted run.")
def command(
    model: Path,
    files: tuple[Path, ...],
    types: str | None,
    output: Path,
    cache: Path | None,
    cache_size: int | None,
    threads: int | None,
    **given: Any,
) -> None:
    """Measure what quantizing each group of tensors alone costs, in each of some types.

    A cost is the KL divergence from the model itself, and the change of ln(perplexity), on a held-out text: what
    `quantkit quantize` of that group alone and `quantkit kld` give, in a fraction of the time, for only the layers
    behind a change run again. Of more than a few types, most only run to the end of the layer, and what they cost is
    guessed from the error there (--full-runs). `quantkit search` finds the types that lose least at a size.

    \b
    quantkit sensitivity -m model-bf16.gguf -f heldout.txt --imatrix imatrix.gguf -o S.json
    quantkit sensitivity -m model-bf16.gguf -f heldout.txt --types Q3_K,Q4_K,Q6_K --chunks 16 -o S.json
    quantkit sensitivity -m model-bf16.gguf -f heldout.txt --imatrix imatrix.gguf --full-runs -1 -o S.json
    quantkit sensitivity -m model-bf16.gguf -f heldout.txt --types Q4_K,Q8_0 --proxies-only -o S.json
    """
    names = () if types is None else tuple(name.strip() for name in types.split(",") if name.strip())
    cached(cache, cache_size)  # refuses a size without a cache
    options = SensitivityOptions(types=names, threads=threads or None, cache=cache, cache_size=cache_size, **given)
    with closing(_Bar()) as bar:
        found = sensitivity(model, output, files, options=options, progress=bar.update)
    echo_notes(found.settings["notes"])
    click.echo("\n".join(_lines(found, output)))


class _Bar:
    """A bar with what is done and the time left, if stderr is a terminal."""

    def __init__(self) -> None:
        shown = sys.stderr.isatty()
        layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        self._bar: tqdm[Any] | None = (
            tqdm(desc="plan", leave=False, dynamic_ncols=True, smoothing=0.05, bar_format=layout) if shown else None
        )

    def update(self, now: SensitivityProgress) -> None:
        """Show how far a run is."""
        if self._bar is not None:
            self._bar.total = now.total
            if now.text:
                self._bar.set_description_str(printable(now.text), refresh=False)
            self._bar.update(now.done - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()


def _lines(found: Sensitivity, output: Path) -> Iterator[str]:
    """Yield what a run found: the costliest groups, how well proxies predict, where it is."""
    plain = [c for c in found.costs if c.kld is not None and not c.feedback]
    counts = Counter(c.type for c in plain)
    most = sorted((t for t, n in counts.items() if n == max(counts.values())), key=lambda t: t.bpw)
    common = next((t for t in most if t.bpw > 4), most[-1] if most else None)
    shown = [c for c in plain if found.settings["proxies_only"] or c.type is common]
    sizes = {g.name: sum(_values(shape) for shape in g.tensors.values()) for g in found.groups}
    shown.sort(key=lambda c: -_per_bit(c, sizes))
    rows = [
        (
            printable(c.group),
            str(c.type),
            format_size(int(sizes[c.group] * c.type.bpw / 8)),
            f"{c.kld:.6f}",
            f"{c.kld_error:.6f}",
            f"{c.ln_ppl:+.6f}",
            f"{1e9 * _per_bit(c, sizes):.3g}",
        )
        for c in shown[:_LISTED]
    ]
    if rows:
        header = ("group", "type", "size", "KLD", "+/-", "ln PPL", "KLD/Gbit")
        yield table(header, rows, left=2, spare=(4, 2))
        if len(shown) > _LISTED:
            yield f"and {len(shown) - _LISTED} more groups, which cost less per bit"
    for name, value in found.settings["rank_correlation"].items():
        yield f"{name} ranks costs with a correlation of {value:.3f} (Spearman)"
    if line := line_of(found.settings.get("experts", {})):
        yield line
    pairs = sum(c.kld is not None for c in found.costs)
    of = f"{pairs} of {len(found.costs)} pairs" if pairs < len(found.costs) else f"{pairs} pairs"
    yield f"{of} of {len(found.groups)} groups measured, {format_seconds(found.settings['seconds'])}"
    yield f"wrote {printable(output)}; next: quantkit search -s {printable(output)}"


def _values(shape: tuple[int, ...]) -> int:
    n = 1
    for each in shape:
        n *= each
    return n


def _per_bit(cost: Cost, sizes: dict[str, int]) -> float:
    return (cost.kld or 0.0) / (sizes[cost.group] * cost.type.bpw)
