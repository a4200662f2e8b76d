"""``quantkit search``."""

from __future__ import annotations

import csv
import io
import itertools
import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import click

from quantkit.activations import ACTIVATIONS, MEANINGS
from quantkit.cli._declared_options import declared_options
from quantkit.cli._devices import device_dicts, device_table
from quantkit.cli._evaluation import json_option, report
from quantkit.cli._options import (
    CACHE_VARIABLE,
    GroupedCommand,
    claim,
    echo_notes,
    option,
    options,
    setting,
    threads_option,
)
from quantkit.cli._paths import MODEL_FILE, Place
from quantkit.cli._plot import Points, Scatter, check_plot, draw
from quantkit.cli._progress import Bar
from quantkit.cli._table import table
from quantkit.errors import ResourceError
from quantkit.extras import SEARCH
from quantkit.formats.outputs import atomic_write, check_apart, read_whole
from quantkit.formats.remote import locate
from quantkit.names import printable
from quantkit.options.search import DEVICES, LIMITS, MODEL, SOLVER, TARGET
from quantkit.progress import Progress, ProgressCallback
from quantkit.recipes.dialects import text_of
from quantkit.search import Allocation, Check, DeviceFit, Front, SearchOptions, SearchResult, search, search_front
from quantkit.search.find import load_measurements, model_path, with_imatrix
from quantkit.search.restrict import option_type
from quantkit.sensitivity.file import Sensitivity
from quantkit.units import PLUS_MINUS, format_seconds, format_size, size_unit

_CHECK = "Verification"
_FRONT = "Pareto front"
_OUT = "Output"
_FILE = Place(exists=True, dir_okay=False)
_NEW = Place(dir_okay=False)


_search_options = options(
    option("-s", "--sensitivity", group=MODEL, type=_FILE, required=True, help="Output of quantkit sensitivity."),
    option(
        "-m",
        "--model",
        group=MODEL,
        type=MODEL_FILE,
        help="Model; only the header is read.  [default: that of -s]",
    ),
    *declared_options(SearchOptions, (MODEL, TARGET, LIMITS, SOLVER)),
    option(
        "--speeds",
        group=LIMITS,
        type=_FILE,
        metavar="FILE",
        help="GB/s by type, as JSON, for --min-speed and --fit.  [default: measured]",
    ),
    option(
        "--check",
        group=_CHECK,
        type=click.IntRange(1),
        metavar="N",
        help="Quantize and measure the N best allocations, and choose the best.",
    ),
    option("--base", group=_CHECK, type=_FILE, help="Base logits for --check, of perplexity --save-all-logits."),
    option(
        "--chunks",
        group=_CHECK,
        type=click.IntRange(1),
        metavar="N",
        help="Number of chunks for --check.  [default: all]",
    ),
    option(
        "--activations",
        group=_CHECK,
        type=click.Choice(ACTIVATIONS),
        help="Those of --check: exact or runtime.  [default: as of -s]",
    ),
    option(
        "--cache",
        group=_CHECK,
        type=Place(file_okay=False),
        metavar="DIR",
        envvar=CACHE_VARIABLE,
        help="Cache of encoded tensors for --check.",
    ),
    option(
        "--front",
        "front_to",
        group=_FRONT,
        type=_NEW,
        metavar="FILE",
        help="Write the best allocation for each size, and the presets: .csv or .json.",
    ),
    setting("--points", group=_FRONT, type=click.IntRange(2), default=48, help="Number of sizes in the front."),
    option("--plot", group=_FRONT, type=_NEW, metavar="FILE", help="Plot the front: .svg, .png or .pdf."),
    *declared_options(SearchOptions, (DEVICES,)),
    option(
        "-o",
        "--output",
        group=_OUT,
        type=_NEW,
        help="Output recipe, for quantkit quantize -r.  [default: stdout]",
    ),
    threads_option,
    json_option,
)


@click.command("search", cls=GroupedCommand, extras=(SEARCH,))
@_search_options
def command(
    sensitivity: Path,
    model: Path | None,
    check: int | None,
    base: Path | None,
    chunks: int | None,
    activations: str | None,
    cache: Path | None,
    front_to: Path | None,
    points: int,
    plot: Path | None,
    output: Path | None,
    speeds: Path | None,
    threads: int | None,
    json_to: str | None,
    overwrite: bool,
    **values: Any,
) -> None:
    """Find the types with the least divergence at a size.

    Chooses a type for every group of tensors so that the predicted divergence is
    least. Costs of changed routing are combined quadratically, all others linearly;
    an integer program finds the best allocation. The size is that of the whole
    file; the recipe yields exactly this size, never above the target.

    With --fit the weights fit GPUs and host memory beside caches and compute
    buffers, in the layout that it prints as options of llama.cpp. --aim quality
    finds the least divergence, speed the most predicted tokens per second within
    --max-kld, balance the least sum of both losses, each as a share of the
    difference between these two.

    \b
    quantkit sensitivity -m model.gguf -f text.txt --imatrix im.gguf -o S.json
    quantkit search -s S.json --target-size 12.3G --imatrix im.gguf -o my.recipe
    quantkit quantize model.gguf out.gguf Q4_K -r my.recipe --imatrix im.gguf
    quantkit search -s S.json --imatrix im.gguf --front front.csv --plot front.svg
    quantkit search -s S.json --imatrix im.gguf --fit 24G,64G -c 32k -o my.recipe
    """
    targets = [name for name in ("target_size", "target_bpw", "target_kld", "fit") if values[name] not in (None, ())]
    _check_usage(targets, check, base, output, front_to, plot)
    kind = None if plot is None else check_plot(plot)
    sensitivities = load_measurements(sensitivity)
    source = model_path(sensitivities, model)
    inputs = [sensitivity, source, base, speeds, values["imatrix"], values["feedback"]]
    json_file = None if json_to in (None, "-") else locate(str(json_to))
    outputs = [output, front_to, plot, json_file]
    check_apart(outputs, inputs)
    output, front_to, plot, json_file = (p and claim(p, *inputs, overwrite=overwrite) for p in outputs)
    quiet = json_to == "-"
    if values["min_speed"] is not None or _needs_host_speeds(speeds, **values):
        values["speeds"] = _speeds(speeds, sensitivities, values["types"], threads, quiet=quiet)
    requested = with_imatrix(SearchOptions(**values), sensitivities, sensitivity, source)
    result: dict[str, Any] = {}
    text: list[str] = []
    if targets:
        verification = None
        if check is not None and base is not None:
            folder = None if output is None else output.parent
            verification = Check(
                check,
                base,
                chunks=chunks,
                threads=threads or None,
                cache=cache,
                folder=folder,
                activations=activations,
            )
        with closing(Bar(quiet=quiet, unit="step")) as bar:
            outcome = search(sensitivities, source, requested, check=verification, progress=_show(bar))
        echo_notes(outcome.notes)
        recipe = _recipe(outcome, sensitivity, source)
        _write(output, recipe)
        result |= _as_dict(outcome, output)
        text.append(
            _text(outcome, recipe) if output is None else f"{_text(outcome)}\n{_command(outcome.best, source, output)}"
        )
    if front_to is not None or plot is not None:
        with closing(Bar(quiet=quiet, unit="size", desc="solve")) as bar:
            front_result = search_front(
                sensitivities, source, requested, points=points, progress=lambda now: bar.update(*now)
            )
        echo_notes(front_result.notes)
        rows = _rows(front_result)
        if front_to is not None:
            _write(front_to, _front_text(front_to, rows))
        if plot is not None and kind is not None:
            with atomic_write(plot) as part:
                part.write_bytes(draw(_scatter(front_result, source), kind))
        result["front"] = rows
        text.append(_front_summary(front_result))
    report(json_to, json_file, "\n\n".join(text), result)


def _check_usage(
    targets: list[str], check: int | None, base: Path | None, output: Path | None, front: Path | None, plot: Path | None
) -> None:
    if len(targets) > 1 or (not targets and front is None and plot is None):
        raise click.UsageError("give one of --target-size, --target-bpw, --target-kld and --fit, or --front FILE")
    if not targets and (output is not None or check is not None):
        raise click.UsageError("--output and --check apply to one allocation: give its target")
    if (check is None) != (base is None):
        raise click.UsageError("--check needs --base")
    if front is not None and front.suffix.lower() not in (".csv", ".json"):
        raise click.UsageError(f"--front {front}: the name must end in .csv or .json")


def _show(bar: Bar) -> ProgressCallback:
    """Return a function that shows the progress, and prints what is measured on a line of its own on a terminal."""

    def show(now: Progress) -> None:
        if now.current > 1 and sys.stderr.isatty():
            bar.print(printable(now.text), err=True)
        bar.update(now.current, now.total, "" if now.current > 1 else now.text)

    return show


def _needs_host_speeds(
    path: Path | None, *, fit: tuple[int, ...], aim: str, bandwidth: tuple[int, ...], **_: Any
) -> bool:
    """Return whether --fit uses the speeds of types: the bandwidths of all GPUs are given, but not that of the host."""
    has_use = path is not None or aim != "quality" or bool(bandwidth)
    return bool(fit) and has_use and len(bandwidth) == len(fit) - 1


def _speeds(
    path: Path | None,
    sensitivities: Sensitivity,
    names: tuple[str, ...],
    threads: int | None,
    *,
    quiet: bool,
) -> Mapping[str, float]:
    from quantkit.search.speeds import measure_speeds, read_speeds  # kernels are slow to import

    if path is not None:
        return read_speeds(path)
    types_used = dict.fromkeys(
        [*(cost.type for cost in sensitivities.costs), *(option_type(name, "--types") for name in names)]
    )
    with closing(Bar(quiet=quiet, unit="type", desc="speeds")) as bar:
        counter = itertools.count(1)
        return measure_speeds(
            types_used, threads=threads, progress=lambda line: bar.update(next(counter), len(types_used), line)
        )


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        with atomic_write(path) as part:
            part.write_text(text, encoding="utf-8")


# --- the recipe ---


def _recipe(outcome: SearchResult, sensitivity: Path, source: Path) -> str:
    """Return the recipe, with comments on its origin and the command that uses it."""
    best = outcome.best
    lines = [
        f"quantkit search: {best.nbytes} bytes ({format_size(best.nbytes)}), {best.bpw:.4f} bits per weight",
        f"predicted divergence: {best.kld:.5g} nats per token{_shortfall(best)}",
    ]
    if best.check is not None:
        mean = best.check.sums.kld.mean
        lines.append(f"measured divergence: {mean.value:.5g} ± {mean.error:.2g} on {best.check.sums.n} tokens")
        lines.append(MEANINGS[best.check.activations])
        lines.append(PLUS_MINUS)
    lines += [
        f"read per token: {format_size(best.footprint.read)}",
        *_fit_lines(best),
        f"sensitivities: {sensitivity.name}, sha256 {sha256(read_whole(sensitivity)).hexdigest()}",
        f"searched by: quantkit {shlex.join(sys.argv[1:])}",
        f"make the file: {_command(best, source, 'RECIPE')}",
    ]
    return text_of([(rule.pattern, rule.type) for rule in best.rules], [*map(printable, lines)], "ours")


def _fit_lines(best: Allocation) -> list[str]:
    """Return comments on the memory and the speed of an allocation of --fit, and the command of llama.cpp."""
    if best.fit is None:
        return []
    fit = best.fit
    sizes = ", ".join(f"{d.name} {format_size(d.nbytes)} of {format_size(d.limit or 0)}" for d in fit.devices)
    speed = [f"predicted tokens per second: {fit.tokens_per_second:.1f}"] if fit.tokens_per_second else []
    return [f"fits with a context of {fit.ctx}: {sizes}", *speed, f"run the file: {fit.command}"]


def _shortfall(best: Allocation) -> str:
    return f" (time limit reached: {best.gap:.3g} above the bound)" if best.gap else ""


def _command(best: Allocation, source: Path, recipe: str | Path) -> str:
    """Return the command that produces exactly the file of the predicted size."""
    o = best.options
    words = ["quantkit", "quantize", str(source), "OUT.gguf", best.type_name, "-r", str(recipe)]
    words += ["--rules", o.rules] if o.rules else []
    words += ["--imatrix", str(o.imatrix)] if o.imatrix else []
    words += ["--feedback", str(o.feedback)] if o.feedback else []
    words += ["--merge-up-gate"] if o.merge_up_gate else []
    return shlex.join([*words, "--allow-requantize"] if o.allow_requantize else words)


# --- output ---


def _text(outcome: SearchResult, recipe: str = "") -> str:
    best = outcome.best
    lines = [
        f"{best.nbytes} bytes ({format_size(best.nbytes)}), {best.bpw:.4f} bits per weight, "
        f"{format_size(best.footprint.read)} read per token",
        f"predicted divergence {best.kld:.5g} nats per token, {len(best.rules)} rules, "
        f"found in {format_seconds(outcome.seconds)}",
    ]
    if len(outcome.allocations) > 1 or best.check is not None:
        rows = [_allocation_row(allocation) for allocation in outcome.allocations]
        lines += ["", table(["bytes", "predicted", "measured"], rows, left=0)]
        lines += [PLUS_MINUS] if any(allocation.check is not None for allocation in outcome.allocations) else []
    if best.fit is not None:
        speed = best.fit.tokens_per_second
        lines += [f"predicted speed {speed:.1f} tokens per second"] if speed else []
        lines += ["", device_table(best.fit.devices), "", best.fit.command]
    counts = Counter(t.name for t in best.types.values())
    lines += ["", "groups: " + ", ".join(f"{n} {name}" for name, n in counts.most_common())]
    return "\n".join([*lines, *(["", recipe.rstrip("\n")] if recipe else [])])


def _allocation_row(allocation: Allocation) -> tuple[str, str, str]:
    mean = None if allocation.check is None else allocation.check.sums.kld.mean
    return str(allocation.nbytes), f"{allocation.kld:.5f}", "-" if mean is None else mean.text(5)


def _as_dict(outcome: SearchResult, output: Path | None) -> dict[str, Any]:
    return {
        "recipe": None if output is None else str(output),
        "seconds": outcome.seconds,
        "notes": list(outcome.notes),
        "allocations": [_allocation_dict(allocation) for allocation in outcome.allocations],
    }


def _allocation_dict(allocation: Allocation) -> dict[str, Any]:
    return {
        "bytes": allocation.nbytes,
        "bpw": allocation.bpw,
        "read_bytes": allocation.footprint.read,
        "predicted_kld": allocation.kld,
        "gap": allocation.gap,
        "activations": None if allocation.check is None else allocation.check.activations,
        "measured_kld": None if allocation.check is None else allocation.check.sums.kld.mean.as_dict(),
        "type": allocation.type_name,
        "rules": [f"{rule.pattern} = {rule.type}" for rule in allocation.rules],
        "types": {group: t.name for group, t in allocation.types.items()},
        **({} if allocation.fit is None else {"fit": _fit_dict(allocation.fit)}),
    }


def _fit_dict(fit: DeviceFit) -> dict[str, Any]:
    return {
        "ctx": fit.ctx,
        "gpu_layers": fit.gpu_layers,
        "cpu_moe": fit.cpu_moe,
        "tensor_split": list(fit.tensor_split),
        "devices": device_dicts(fit.devices),
        "command": fit.command,
        "predicted_tokens_per_second": fit.tokens_per_second,
    }


# --- the front ---


_COLUMNS = ("kind", "name", "bytes", "bpw", "predicted_kld", "read_bytes")


def _rows(front: Front) -> list[dict[str, Any]]:
    """Return the points of a front, then the presets."""
    rows = [("search", a.type_name, a.nbytes, a.bpw, a.kld, a.footprint.read) for a in front.allocations]
    rows += [("preset", p.name, p.nbytes, p.bpw, p.kld, p.read) for p in front.presets]
    return [dict(zip(_COLUMNS, row, strict=True)) for row in rows]


def _front_text(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix.lower() == ".json":
        return json.dumps(rows, indent=1) + "\n"
    file = io.StringIO()
    writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _front_summary(front: Front) -> str:
    first, last = front.allocations[0], front.allocations[-1]
    head = (
        f"front: {len(front.allocations)} allocations, {format_size(first.nbytes)} to {format_size(last.nbytes)}, "
        f"predicted divergence {first.kld:.4g} to {last.kld:.4g}, found in {format_seconds(front.seconds)}"
    )
    rows = []
    for p in front.presets:
        best = min((a.kld for a in front.allocations if a.nbytes <= p.nbytes), default=None)
        rows.append((p.name, p.nbytes, f"{p.kld:.5f}", "-" if best is None else f"{best:.5f}"))
    return head + ("\n\n" + table(["preset", "bytes", "predicted", "searched"], rows) if rows else "")


def _scatter(front: Front, source: Path) -> Scatter:
    largest = max(a.nbytes for a in front.allocations)
    name, unit = size_unit(largest)
    drawn_allocations = [a for a in front.allocations if a.kld > 0]
    if not drawn_allocations:
        raise ResourceError("nothing to plot: every allocation has a predicted divergence of 0", "QK-E214")
    x, y = [a.nbytes / unit for a in drawn_allocations], [a.kld for a in drawn_allocations]
    kinds = [Points("best recipe of each size (quantkit search)", x, y, is_line=True, is_subject=True)]
    if presets := [p for p in front.presets if p.kld > 0]:
        x = [p.nbytes / unit for p in presets]
        y = [p.kld for p in presets]
        names = [p.name for p in presets]
        kinds.append(Points("presets", x, y, names))
    title = f"{source.name}: predicted divergence by file size"
    note = "" if len(kinds) > 1 else "no preset has only types that were measured"
    return Scatter(title, f"file size ({name})", "predicted KL divergence from the base (nats)", kinds, note)
