"""``quantkit sensitivity``."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.activations import MEANINGS
from quantkit.cli._declared_options import declared_options
from quantkit.cli._evaluation import OUT, kv_options, kv_type_from, model_option
from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import (
    GroupedCommand,
    cache_arguments,
    cache_option,
    cache_size_option,
    echo_notes,
    option,
    options,
    threads_option,
)
from quantkit.cli._paths import TEXT_FILE, Place
from quantkit.cli._progress import Bar
from quantkit.cli._table import table
from quantkit.names import printable
from quantkit.options.sensitivity import MEASUREMENT, RUN, TEXT
from quantkit.sensitivity import Cost, Sensitivity, SensitivityOptions, sensitivity
from quantkit.sensitivity.experts import experts_summary
from quantkit.units import format_seconds, format_size

#: Most groups that are listed.
_MAX_ROWS = 12


_declared = options(*declared_options(SensitivityOptions, (TEXT, MEASUREMENT, RUN)))


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
    help="Held-out text, not that of the importance matrix; - for stdin. Repeatable.",
)
@_declared
@threads_option
@kv_options
@cache_option
@cache_size_option
@option("--resume", group=RUN, is_flag=True, help="Continue an interrupted run.")
@option(
    "-o",
    "--output",
    group=OUT,
    metavar="S.json",
    required=True,
    type=Place(dir_okay=False),
    help="Output file, for quantkit search.",
)
@option("--overwrite", group=OUT, is_flag=True, help="Replace an existing output; discard an interrupted run.")
@json_option("the sensitivities")
def command(
    model: Path,
    files: tuple[Path, ...],
    output: Path,
    cache: Path | None,
    cache_size: int | None,
    threads: int | None,
    json_to: JsonOutput,
    **values: Any,
) -> None:
    """Measure the divergence that quantizing each group of tensors alone causes.

    A sensitivity is the KL divergence from the base, and the change of
    ln(perplexity), on a held-out text: what `quantkit quantize` of that group alone
    and `quantkit kld` give, but faster, because only the layers after a change are
    recomputed. With more than a few types, most are run only to the end of the
    layer, and their divergence is predicted from the error there (--full-runs).
    `quantkit search` finds the best types for a size from these figures.

    \b
    quantkit sensitivity -m model.gguf -f heldout.txt --imatrix im.gguf -o S.json
    quantkit sensitivity -m model.gguf -f heldout.txt --types Q3_K,Q4_K -o S.json
    quantkit sensitivity -m model.gguf -f heldout.txt --proxies-only -o S.json
    """
    cache_arguments(cache, cache_size)  # refuses a size without a cache
    values["kv_type"] = kv_type_from(values)
    requested = SensitivityOptions(threads=threads or None, cache=cache, cache_size=cache_size, **values)
    layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with closing(Bar(quiet=json_to.only, desc="plan", bar_format=layout)) as bar:
        result = sensitivity(model, output, files, options=requested, progress=lambda now: bar.update(*now))
    echo_notes(result.settings["notes"])
    json_to.print(lambda: "\n".join(_lines(result, output)), lambda: json.loads(result.to_json()))


def _lines(result: Sensitivity, output: Path) -> Iterator[str]:
    """Yield the costliest groups, rank correlations of proxies, and the output."""
    plain = [c for c in result.costs if c.kld is not None and not c.feedback]
    counts = Counter(c.type for c in plain)
    most = sorted((t for t, n in counts.items() if n == max(counts.values())), key=lambda t: t.bpw)
    common = next((t for t in most if t.bpw > 4), most[-1] if most else None)
    rows_shown = [c for c in plain if result.settings["proxies_only"] or c.type is common]
    sizes = {g.name: sum(_values(shape) for shape in g.tensors.values()) for g in result.groups}
    rows_shown.sort(key=lambda c: -_per_bit(c, sizes))
    costliest = rows_shown[:_MAX_ROWS]
    decimals = _decimals([1e9 * _per_bit(c, sizes) for c in costliest])
    rows = [
        (
            printable(c.group),
            str(c.type),
            format_size(int(sizes[c.group] * c.type.bpw / 8)),
            f"{c.kld:.6f}",
            f"{c.kld_error:.6f}",
            f"{c.ln_ppl:+.6f}",
            f"{1e9 * _per_bit(c, sizes):.{decimals}f}",
        )
        for c in costliest
    ]
    if rows:
        header = ("group", "type", "size", "KLD", "+/-", "ln PPL", "KLD/Gbit")
        yield table(header, rows, left=2, droppable=(4, 2))
        if len(rows_shown) > _MAX_ROWS:
            yield f"and {len(rows_shown) - _MAX_ROWS} more groups, which cost less per bit"
    for name, value in result.settings["rank_correlation"].items():
        yield f"{name} ranks costs with a correlation of {value:.3f} (Spearman)"
    if line := experts_summary(result.settings.get("experts", {})):
        yield line
    pairs = sum(c.kld is not None for c in result.costs)
    measured_pairs = f"{pairs} of {len(result.costs)} pairs" if pairs < len(result.costs) else f"{pairs} pairs"
    yield f"{measured_pairs} of {len(result.groups)} groups measured, {format_seconds(result.settings['seconds'])}"
    yield MEANINGS[result.settings["activations"]]
    yield f"wrote {printable(output)}; next: quantkit search -s {printable(output)}"


def _decimals(values: Sequence[float]) -> int:
    """Return the decimals for a column: three digits for the largest value, all rows alike."""
    largest = max(values, default=0.0)
    return max(0, 2 - math.floor(math.log10(largest))) if largest > 0 else 0


def _values(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _per_bit(cost: Cost, sizes: dict[str, int]) -> float:
    return (cost.kld or 0.0) / (sizes[cost.group] * cost.type.bpw)
