"""``quantkit search``."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import click

from quantkit.cli.complete import IMATRIX_FILE, MODEL_FILE, types
from quantkit.cli.evaluation import json_option, report
from quantkit.cli.options import (
    CACHE_VARIABLE,
    SIZE,
    GroupedCommand,
    claim,
    echo_notes,
    option,
    setting,
)
from quantkit.cli.plot import Points, Scatter, check_plot, draw
from quantkit.cli.table import table
from quantkit.errors import ResourceError
from quantkit.formats.outputs import check_apart, read_whole, written
from quantkit.names import printable
from quantkit.recipes.dialects import text_of
from quantkit.search import Allocation, Check, Front, SearchOptions, SearchResult, search, search_front
from quantkit.search.find import known_of, model_of, with_imatrix
from quantkit.search.options import RUNTIMES
from quantkit.search.restrict import named_type
from quantkit.sensitivity.file import Sensitivity
from quantkit.units import format_seconds, format_size

_WHAT, _TARGET, _LIMITS, _CHECK, _FRONT, _OUT = (
    "What is quantized",
    "The target (one of them)",
    "Constraints",
    "Measuring the best",
    "The front",
    "Output",
)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW = click.Path(dir_okay=False, path_type=Path)
_POSITIVE = click.FloatRange(0, min_open=True)
_RE: dict[str, Any] = {"group": _LIMITS, "multiple": True, "shell_complete": types}


def _listed(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (value or "").split(",") if part.strip())


@click.command("search", cls=GroupedCommand)
@option("-s", "--sensitivity", group=_WHAT, type=_FILE, required=True, help="What `quantkit sensitivity` measured.")
@option(
    "-m",
    "--model",
    group=_WHAT,
    type=MODEL_FILE,
    help="The model, of which the header is read.  [default: that which was measured]",
)
@option(
    "--imatrix",
    group=_WHAT,
    type=IMATRIX_FILE,
    help="The importance matrix that the file will be made with.  [default: that which was measured with]",
)
@option(
    "--feedback",
    group=_WHAT,
    type=_FILE,
    metavar="COV.gguf",
    help="It will be made with --feedback: costs that were measured so count.",
)
@option("--merge-up-gate", group=_WHAT, is_flag=True, help="It will be made with --merge-up-gate.")
@option("--allow-requantize", group=_WHAT, is_flag=True, help="Take tensors that are quantized already.")
@option("--target-size", group=_TARGET, type=SIZE, help="The most bytes of the whole file: 12.3G, 11.5GiB.")
@option("--target-bpw", group=_TARGET, type=_POSITIVE, help="The most bits per weight of the tensors.")
@option("--target-kld", group=_TARGET, type=_POSITIVE, help="The most predicted divergence, in the fewest bytes.")
@option(
    "--types",
    group=_LIMITS,
    callback=_listed,
    metavar="TYPE,TYPE,..",
    shell_complete=types,
    help="What tensors may become.  [default: all that was measured]",
)
@option(
    "--runtime",
    group=_LIMITS,
    type=click.Choice(RUNTIMES, case_sensitive=False),
    help="Only types that llama.cpp, ik_llama.cpp, or both load.",
)
@option(
    "--allow",
    **_RE,
    metavar="RE=TYPE,..",
    help="The types of tensors whose names match; the first that matches counts.",
)
@option("--at-least", **_RE, metavar="RE=TYPE", help="No fewer bits per weight than those of TYPE.")
@option("--at-most", **_RE, metavar="RE=TYPE", help="No more bits per weight than those of TYPE.")
@option(
    "--same",
    group=_LIMITS,
    multiple=True,
    metavar="A,B",
    help="One type within a layer for classes or parts of their names: up,gate; q,k,v.",
)
@option(
    "--max-read", group=_LIMITS, type=SIZE, help="The most bytes of weights that a token reads; of experts those used."
)
@option(
    "--min-speed",
    group=_LIMITS,
    type=_POSITIVE,
    metavar="T/S",
    help="Tokens per second that reading weights must allow here.",
)
@option(
    "--speeds",
    group=_LIMITS,
    type=_FILE,
    metavar="FILE",
    help="For --min-speed: GB/s by type, as JSON.  [default: measured]",
)
@option("--proxy", group=_LIMITS, metavar="NAME", help="What stands for a divergence if none was measured.")
@option(
    "--check",
    group=_CHECK,
    type=click.IntRange(1),
    metavar="N",
    help="Quantize the N best, measure them, and take the best.",
)
@option("--base", group=_CHECK, type=_FILE, help="For --check: logits of the model, by perplexity --save-all-logits.")
@option(
    "--chunks",
    group=_CHECK,
    type=click.IntRange(1),
    metavar="N",
    help="For --check: only the first N chunks of the base.",
)
@option(
    "--cache",
    group=_CHECK,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    envvar=CACHE_VARIABLE,
    help="For --check: a cache of encoded tensors.",
)
@option(
    "--front",
    "front_to",
    group=_FRONT,
    type=_NEW,
    metavar="FILE",
    help="Write the best of every size, and the presets: .csv or .json.",
)
@setting("--points", group=_FRONT, type=click.IntRange(2), default=48, help="Sizes of the front.")
@option("--plot", group=_FRONT, type=_NEW, metavar="FILE", help="Draw the front: .svg, .png or .pdf.")
@option("-o", "--output", group=_OUT, type=_NEW, help="The recipe, for `quantkit quantize -r`.  [default: printed]")
@setting("--time-limit", group=_OUT, type=_POSITIVE, default=60.0, metavar="SECONDS", help="For each allocation.")
@setting(
    "--gap",
    group=_OUT,
    type=click.FloatRange(0),
    default=0.0,
    help="Share of divergence above the optimum at which to stop.",
)
@option("-t", "--threads", group=_OUT, type=click.IntRange(0), help="Threads; by default, and with 0, all CPUs.")
@json_option
def command(
    sensitivity: Path,
    model: Path | None,
    check: int | None,
    base: Path | None,
    chunks: int | None,
    cache: Path | None,
    front_to: Path | None,
    points: int,
    plot: Path | None,
    output: Path | None,
    speeds: Path | None,
    threads: int | None,
    json_to: str | None,
    overwrite: bool,
    **given: Any,
) -> None:
    """Find the types that lose least at a size: which bits go where, from measured sensitivities.

    Every group of tensors gets a type, so that the divergence predicted from those that were measured is least: what
    routers flip adds up as squares, the rest as it is. Integer programs find it. The size is that of the whole file,
    never more than the target. The recipe gives exactly it.

    \b
    quantkit sensitivity -m model-bf16.gguf -f text.txt --imatrix im.gguf -o S.json
    quantkit search -s S.json --target-size 12.3G --imatrix im.gguf -o model.recipe
    quantkit quantize model-bf16.gguf out.gguf Q4_K -r model.recipe --imatrix im.gguf
    quantkit search -s S.json --imatrix im.gguf --front front.csv --plot front.svg
    """
    named = {f.name for f in fields(SearchOptions)}
    targets = [name for name in ("target_size", "target_bpw", "target_kld") if given[name] is not None]
    _check_usage(targets, check, base, output, front_to, plot)
    known = known_of(sensitivity)
    source = model_of(known, model)
    kind = None if plot is None else check_plot(plot)
    inputs = [sensitivity, source, base, speeds, given["imatrix"], given["feedback"]]
    json_file = None if json_to in (None, "-") else Path(str(json_to))
    outputs = [output, front_to, plot, json_file]
    check_apart(outputs, inputs)
    output, front_to, plot, json_file = (p and claim(p, *inputs, overwrite=overwrite) for p in outputs)
    say = _say(quiet=json_to == "-")
    if given["min_speed"] is not None:
        given["speeds"] = _speeds(speeds, known, given["types"], threads, say)
    asked = SearchOptions(**{name: value for name, value in given.items() if name in named})
    options = with_imatrix(asked, known, sensitivity, source)
    result: dict[str, Any] = {}
    text: list[str] = []
    if targets:
        how = None
        if check is not None and base is not None:
            folder = None if output is None else output.parent
            how = Check(check, base, chunks=chunks, threads=threads or None, cache=cache, folder=folder)
        found = search(known, source, options, check=how, progress=say)
        echo_notes(found.notes)
        recipe = _recipe(found, sensitivity, source)
        _write(output, recipe)
        result |= _as_dict(found, output)
        text.append(
            _text(found, recipe) if output is None else f"{_text(found)}\n{_command(found.best, source, output)}"
        )
    if front_to is not None or plot is not None:
        swept = search_front(known, source, options, points=points, progress=say)
        echo_notes(swept.notes)
        rows = _rows(swept)
        if front_to is not None:
            _write(front_to, _front_text(front_to, rows))
        if plot is not None and kind is not None:
            with written(plot) as part:
                part.write_bytes(draw(_scatter(swept, source), kind))
        result["front"] = rows
        text.append(_front_summary(swept))
    report(json_to, json_file, "\n\n".join(text), result)


def _check_usage(
    targets: list[str], check: int | None, base: Path | None, output: Path | None, front: Path | None, plot: Path | None
) -> None:
    if len(targets) > 1 or (not targets and front is None and plot is None):
        raise click.UsageError("give one of --target-size, --target-bpw and --target-kld, or --front FILE")
    if not targets and (output is not None or check is not None):
        raise click.UsageError("--output and --check are about one allocation: give its target")
    if (check is None) != (base is None):
        raise click.UsageError("--check measures against --base: give both")
    if front is not None and front.suffix.lower() not in (".csv", ".json"):
        raise click.UsageError(f"--front {front}: the name must end in .csv or .json")


def _say(*, quiet: bool) -> Callable[[str], None]:
    """Return what prints progress, on stderr if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        return lambda line: None
    return lambda line: click.echo(printable(line), err=True)


def _speeds(
    path: Path | None, known: Sensitivity, names: tuple[str, ...], threads: int | None, say: Callable[[str], None]
) -> Mapping[str, float]:
    from quantkit.search.speeds import measure_speeds, read_speeds  # kernels are slow to import

    if path is not None:
        return read_speeds(path)
    every = dict.fromkeys([*(cost.type for cost in known.costs), *(named_type(name, "--types") for name in names)])
    return measure_speeds(every, threads=threads, progress=say)


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        with written(path) as part:
            part.write_text(text)


# --- the recipe ---


def _recipe(found: SearchResult, sensitivity: Path, source: Path) -> str:
    """Return the recipe with how it was made, and how to make the file."""
    best = found.best
    lines = [
        f"quantkit search: {best.nbytes} bytes ({format_size(best.nbytes)}), {best.bpw:.4f} bits per weight",
        f"predicted divergence: {best.kld:.5g} nats per token{_shortfall(best)}",
    ]
    if best.check is not None:
        mean = best.check.sums.kld.mean
        lines.append(f"measured divergence: {mean.value:.5g} ± {mean.error:.2g} on {best.check.sums.n} tokens")
    lines += [
        f"read for a token: {format_size(best.part.read)}",
        f"sensitivities: {sensitivity.name}, sha256 {sha256(read_whole(sensitivity)).hexdigest()}",
        f"searched by: quantkit {shlex.join(sys.argv[1:])}",
        f"make the file: {_command(best, source, 'RECIPE')}",
    ]
    return text_of([(rule.pattern, rule.type) for rule in best.rules], [*map(printable, lines)], "ours")


def _shortfall(best: Allocation) -> str:
    return f" (the time was up: {best.gap:.3g} above the bound)" if best.gap else ""


def _command(best: Allocation, source: Path, recipe: str | Path) -> str:
    """Return the command that makes exactly the file whose size is promised."""
    o = best.options
    words = ["quantkit", "quantize", str(source), "OUT.gguf", best.type_name, "-r", str(recipe)]
    words += ["--rules", o.rules] if o.rules else []
    words += ["--imatrix", str(o.imatrix)] if o.imatrix else []
    words += ["--feedback", str(o.feedback)] if o.feedback else []
    words += ["--merge-up-gate"] if o.merge_up_gate else []
    return shlex.join([*words, "--allow-requantize"] if o.allow_requantize else words)


# --- what is printed ---


def _text(found: SearchResult, recipe: str = "") -> str:
    best = found.best
    lines = [
        f"{best.nbytes} bytes ({format_size(best.nbytes)}), {best.bpw:.4f} bits per weight, "
        f"{format_size(best.part.read)} read for a token",
        f"predicted divergence {best.kld:.5g} nats per token, {len(best.rules)} rules, "
        f"found in {format_seconds(found.seconds)}",
    ]
    if len(found.allocations) > 1 or best.check is not None:
        rows = [_checked(each) for each in found.allocations]
        lines += ["", table(["bytes", "predicted", "measured"], rows, left=0)]
    counts = Counter(t.name for t in best.types.values())
    lines += ["", "groups: " + ", ".join(f"{n} {name}" for name, n in counts.most_common())]
    return "\n".join([*lines, *(["", recipe.rstrip("\n")] if recipe else [])])


def _checked(each: Allocation) -> tuple[str, str, str]:
    mean = None if each.check is None else each.check.sums.kld.mean
    return str(each.nbytes), f"{each.kld:.5f}", "-" if mean is None else f"{mean.value:.5f} ± {mean.error:.5f}"


def _as_dict(found: SearchResult, output: Path | None) -> dict[str, Any]:
    return {
        "recipe": None if output is None else str(output),
        "seconds": found.seconds,
        "notes": list(found.notes),
        "allocations": [_allocation(each) for each in found.allocations],
    }


def _allocation(each: Allocation) -> dict[str, Any]:
    return {
        "bytes": each.nbytes,
        "bpw": each.bpw,
        "read_bytes": each.part.read,
        "predicted_kld": each.kld,
        "gap": each.gap,
        "measured_kld": None if each.check is None else each.check.sums.kld.mean.as_dict(),
        "type": each.type_name,
        "rules": [f"{rule.pattern} = {rule.type}" for rule in each.rules],
        "types": {group: t.name for group, t in each.types.items()},
    }


# --- the front ---


_COLUMNS = ("kind", "name", "bytes", "bpw", "predicted_kld", "read_bytes")


def _rows(swept: Front) -> list[dict[str, Any]]:
    """Return the points of a front, then the presets."""
    found = [("search", a.type_name, a.nbytes, a.bpw, a.kld, a.part.read) for a in swept.allocations]
    found += [("preset", p.name, p.nbytes, p.bpw, p.kld, p.read) for p in swept.presets]
    return [dict(zip(_COLUMNS, row, strict=True)) for row in found]


def _front_text(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix.lower() == ".json":
        return json.dumps(rows, indent=1) + "\n"
    file = io.StringIO()
    writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _front_summary(swept: Front) -> str:
    first, last = swept.allocations[0], swept.allocations[-1]
    head = (
        f"front: {len(swept.allocations)} allocations, {format_size(first.nbytes)} to {format_size(last.nbytes)}, "
        f"predicted divergence {first.kld:.4g} to {last.kld:.4g}, found in {format_seconds(swept.seconds)}"
    )
    rows = []
    for p in swept.presets:
        best = min((a.kld for a in swept.allocations if a.nbytes <= p.nbytes), default=None)
        rows.append((p.name, p.nbytes, f"{p.kld:.5f}", "-" if best is None else f"{best:.5f}"))
    return head + ("\n\n" + table(["preset", "bytes", "predicted", "searched"], rows) if rows else "")


def _scatter(swept: Front, source: Path) -> Scatter:
    largest = max(a.nbytes for a in swept.allocations)
    unit, name = next((1 << s, n) for s, n in ((30, "GiB"), (20, "MiB"), (0, "bytes")) if largest >= 1 << s)
    searched = [a for a in swept.allocations if a.kld > 0]
    if not searched:
        raise ResourceError("there is nothing to draw: every allocation is predicted to lose nothing")
    kinds = [Points("searched", [a.nbytes / unit for a in searched], [a.kld for a in searched], joined=True)]
    if presets := [p for p in swept.presets if p.kld > 0]:
        x, y, names = [p.nbytes / unit for p in presets], [p.kld for p in presets], [p.name for p in presets]
        kinds.append(Points("llama-quantize's presets", x, y, names))
    return Scatter(f"{source.name}: size and divergence", f"size ({name})", "predicted KL divergence (nats)", kinds)
