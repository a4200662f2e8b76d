"""``quantkit recipe``: lint, show, convert, diff."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quantkit.cli.complete import IMATRIX_FILE, MODEL_FILE
from quantkit.cli.options import (
    DiffTrouble,
    GPULayers,
    GroupedCommand,
    WholeNames,
    claim,
    echo_notes,
    option,
    setting,
    to_json,
)
from quantkit.cli.table import folded, listed, table
from quantkit.errors import QuantkitError, RecipeError
from quantkit.formats.outputs import written
from quantkit.names import printable, shorten
from quantkit.recipes import DIALECTS, RecipeDiff, Shown, Sum, convert, diff, lint, show
from quantkit.types import TensorType, type_by_name
from quantkit.units import format_count, format_size

_WHAT, _WHERE, _OUT = "The recipe", "Devices", "Output"
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NAME = 48

_from = option(
    "--from",
    "dialect",
    group=_WHAT,
    type=click.Choice(DIALECTS),
    help="The recipe's dialect; by default the one that it looks like.",
)
_model = option("-m", "--model", group=_WHAT, type=MODEL_FILE, help="The model it is for; only headers are read.")
_type = setting(
    "--type", "title", group=_WHAT, metavar="TYPE", default="COPY", help="TYPE of quantize, where no rule matches."
)
_json = option("--json", "as_json", group=_OUT, is_flag=True, help="Print everything as JSON.")


class RecipeGroup(WholeNames, click.Group):
    """A group to whose options -xyz is always one name."""


@click.group("recipe", cls=RecipeGroup)
def command() -> None:
    """Recipes, rules that give tensors their types: check, show, convert and compare them.

    Reads quantkit's own (regex = type lines), llama.cpp's --tensor-type-file, rules of ik_llama.cpp's --custom-q (also
    in a shell script's custom="...") and those of Thireus' GGUF-Tool-Suite. The first rule that matches decides.

    \b
    quantkit recipe lint my.recipe -m model-bf16.gguf
    quantkit recipe show my.recipe -m model-bf16.gguf -ngl all -ot exps=CPU
    quantkit recipe convert my.recipe custom-q.txt --to ik -m model-bf16.gguf
    quantkit recipe convert theirs.gguf theirs.recipe
    quantkit recipe diff my.recipe theirs.gguf
    """


@command.command("lint", cls=GroupedCommand, short_help="Find rules without effect, missing types, loose regexes.")
@click.argument("recipe", metavar="RECIPE", type=_FILE)
@_model
@_from
@option("--for", "runtime", group=_WHAT, type=click.Choice(["mainline", "ik"]), help="The runtime that must load it.")
@_type
@option("--imatrix", group=_WHAT, type=IMATRIX_FILE, help="There is one: types that need it are no finding.")
@_json
def lint_command(
    recipe: Path,
    model: Path | None,
    dialect: str | None,
    runtime: str | None,
    title: str,
    imatrix: Path | None,
    as_json: bool,
) -> None:
    """Check a recipe: for itself, and with -m for a model.

    Exit code 1 if there is an error; warnings alone give 0.
    """
    found = lint(recipe, model=model, dialect=dialect, runtime=runtime, title=title, imatrix=imatrix is not None)
    errors = sum(f.severity == "error" for f in found)
    if as_json:
        rows = [{"code": f.code, "severity": f.severity, "message": f.message} for f in found]
        click.echo(to_json({"recipe": str(recipe), "errors": errors, "findings": rows}))
    else:
        for f in found:
            click.echo(folded(f"{f.severity}: {f.code}: {printable(f.message)}", 2))
        click.echo(f"{errors} errors, {len(found) - errors} warnings" if found else "nothing found")
    sys.exit(1 if errors else 0)


@command.command("show", cls=GroupedCommand, short_help="Show the types and sizes a recipe gives.")
@click.argument("recipe", metavar="RECIPE|GGUF", type=_FILE)
@_model
@_from
@_type
@option("--imatrix", group=_WHAT, type=IMATRIX_FILE, help="For the exact size of a file that needs one.")
@option("-ngl", "--gpu-layers", group=_WHERE, type=GPULayers(), metavar="N|all", help="Layers on the GPUs.")
@option(
    "-ot", "--override-tensor", "overrides", group=_WHERE, multiple=True, metavar="RE=DEVICE", help="As for llama.cpp."
)
@option("--cpu-moe", group=_WHERE, is_flag=True, help="All experts on the CPU.")
@option(
    "--n-cpu-moe", group=_WHERE, type=click.IntRange(0), default=0, help="The experts of the first N layers on the CPU."
)
@setting(
    "--gpus", group=_WHERE, type=click.IntRange(1, 64), default=1, help="GPUs that share the layers of -ngl evenly."
)
@option("--layers", group=_OUT, is_flag=True, help="Also list sizes by layer.")
@_json
def show_command(
    recipe: Path,
    model: Path | None,
    dialect: str | None,
    title: str,
    imatrix: Path | None,
    gpu_layers: int | None,
    overrides: tuple[str, ...],
    cpu_moe: bool,
    n_cpu_moe: int,
    gpus: int,
    layers: bool,
    as_json: bool,
) -> None:
    """Show what a recipe gives on a model, or what a GGUF file has: types and sizes by class, layer and device.

    Sizes by device are of weights: caches and buffers come on top. "per token" is what generating one reads: of experts
    those it uses, of the embeddings one row.
    """
    found = show(
        recipe,
        model=model,
        title=title,
        dialect=dialect,
        imatrix=imatrix,
        gpu_layers=gpu_layers or 0,
        devices=tuple(f"CUDA{i}" for i in range(gpus)),
        overrides=overrides,
        cpu_moe=cpu_moe,
        n_cpu_moe=n_cpu_moe,
    )
    click.echo(to_json(_shown_dict(found)) if as_json else _shown(found, layers=layers))
    if not as_json:
        echo_notes(found.notes)


def _shown(found: Shown, *, layers: bool) -> str:
    parts = [_sums("class", found.by_class, found.total)]
    parts += [_sums("layer", found.by_layer, found.total)] if layers else []
    parts += [_sums("type", found.by_type, None), _sums("device", found.by_device, None)]
    about = "" if found.contents.exact else ", about: without --imatrix the header is not known to the byte"
    lines = [f"file: {found.contents.file_bytes} bytes ({format_size(found.contents.file_bytes)}){about}"]
    lines += [f"{format_count(found.total.values)} weights, {found.total.bpw:.3f} bits per weight"]
    lines += [f"{format_size(found.total.token_bytes)} read per token"]
    if found.unnamed:
        first = ", ".join(map(printable, found.unnamed[:3]))
        more = f" and {len(found.unnamed) - 3} more" if len(found.unnamed) > 3 else ""
        lines += [f"no rule names {first}{more}: they get what --type says"]
    lines += [f"{runtime.name}: {runtime}" for runtime in found.runtimes]
    return "\n\n".join([*parts, "\n".join(folded(line, 2) for line in lines)])


def _sums(kind: str, sums: Sequence[Sum], total: Sum | None) -> str:
    rows = [
        (
            shorten(printable(s.name), _NAME),
            "" if kind == "type" else shorten(", ".join(s.types), 20),
            s.tensors,
            format_size(s.nbytes),
            f"{s.bpw:.3f}",
            format_size(s.token_bytes),
        )
        for s in (*sums, *([total] if total and len(sums) > 1 else []))
    ]
    return table([kind, "types", "tensors", "size", "bpw", "per token"], rows, left=2)


def _shown_dict(found: Shown) -> dict[str, Any]:
    def rows(sums: Sequence[Sum]) -> list[dict[str, Any]]:
        return [
            {
                "name": s.name,
                "types": list(s.types),
                "tensors": s.tensors,
                "weights": s.values,
                "bytes": s.nbytes,
                "bits_per_weight": s.bpw,
                "bytes_per_token": s.token_bytes,
            }
            for s in sums
        ]

    return {
        "file_bytes": found.contents.file_bytes,
        "exact": found.contents.exact,
        "total": rows([found.total])[0],
        "classes": rows(found.by_class),
        "layers": rows(found.by_layer),
        "types": rows(found.by_type),
        "devices": rows(found.by_device),
        "unnamed": list(found.unnamed),
        "runtimes": {r.name: r.as_dict() for r in found.runtimes},
        "notes": list(found.notes),
        "tensors": [
            {"name": t.name, "shape": list(t.shape), "type": t.type.name, "bytes": t.nbytes, "reason": t.reason}
            for t in found.contents.tensors
        ],
    }


@command.command(
    "convert", cls=GroupedCommand, short_help="Convert between dialects; extract the recipe of a GGUF file."
)
@click.argument("source", metavar="IN", type=_FILE)
@click.argument("output", metavar="OUT", type=click.Path(dir_okay=False, path_type=Path, allow_dash=True))
@setting("--to", group=_WHAT, type=click.Choice(DIALECTS), default="ours", help="The dialect of OUT.")
@_from
@_model
@option("--replace", group=_WHAT, multiple=True, metavar="TYPE=TYPE", help="A type for one that the other tree lacks.")
@option("--overwrite", group=_OUT, is_flag=True, help="Replace an existing output.")
def convert_command(
    source: Path,
    output: Path,
    to: str,
    dialect: str | None,
    model: Path | None,
    replace: tuple[str, ...],
    overwrite: bool,
) -> None:
    """Convert a recipe to another dialect, or write the recipe of an existing GGUF file. OUT may be - for stdout.

    With -m every tensor's type is proved to be the same, as each program finds it; where rules cannot say it, exact
    names do. Exit code 1 if rules had to be left out: the other dialect lacks their types or regexes.
    """
    to_stdout = str(output) == "-"
    if not to_stdout:
        output = claim(output, source, model, overwrite=overwrite)
    made = convert(source, to, dialect=dialect, model=model, replace=dict(map(_replacement, replace)))
    if to_stdout:
        click.echo(made.text, nl=False)
    else:
        with written(output) as part:
            part.write_text(made.text)
    echo_notes(made.notes)
    proof = f", the same types for {made.proved} tensors" if made.proved is not None else ""
    left = f"; {len(made.left_out)} left out" if made.left_out else ""
    click.echo(f"{made.source} to {made.dialect}: {made.rules} rules{proof}{left}", err=True)
    if to == "ik" and not to_stdout:
        click.echo(f"--custom-q \"$(grep -v '^#' {printable(output)} | paste -sd,)\"", err=True)
    sys.exit(1 if made.left_out else 0)


def _replacement(text: str) -> tuple[TensorType, TensorType]:
    old, equals, new = text.partition("=")
    if not equals:
        raise RecipeError(f"--replace {text}: write OLD=NEW, as IQ4_KS=IQ4_XS")
    return type_by_name(old), type_by_name(new)


@command.command("diff", cls=GroupedCommand, short_help="Compare two recipes, or recipes and GGUF files.")
@click.argument("a", metavar="A", type=_FILE)
@click.argument("b", metavar="B", type=_FILE)
@_model
@_type
@option("--per-tensor", group=_OUT, is_flag=True, help="List every tensor that differs.")
@_json
def diff_command(a: Path, b: Path, model: Path | None, title: str, per_tensor: bool, as_json: bool) -> None:
    """Compare what two recipes give a model's tensors, or what GGUF files have; without any model, rule by rule.

    Exit code as with diff: 0 nothing differs, 1 something does, 2 wrong usage or a file that cannot be read.
    """
    try:
        found = diff(a, b, model=model, title=title)
    except QuantkitError as e:
        raise DiffTrouble(e.message) from e
    click.echo(to_json(_diff_dict(found)) if as_json else _differences(found, full=per_tensor))
    sys.exit(0 if found.identical else 1)


def _differences(found: RecipeDiff, *, full: bool) -> str:
    if not found.by_model:
        lines = [f"{found.same} rules are in both{', in another order' if found.moved else ''}"]
        for side, only in (("A", found.only_a), ("B", found.only_b)):
            lines += [f"only in {side}: {len(only)}", *listed(map(printable, only), 2, full=full)] if only else []
        return "\n".join(lines)
    parts = []
    if found.changes:
        groups: dict[tuple[str, str, str], list[int]] = {}
        for c in found.changes:
            sums = groups.setdefault((c.group, c.a or "none", c.b or "none"), [0, 0, 0])
            for i, n in enumerate((1, c.a_bytes, c.b_bytes)):
                sums[i] += n
        rows = [
            (shorten(printable(name), _NAME), f"{x} -> {y}", n, format_size(p), format_size(q), format_size(q - p))
            for (name, x, y), (n, p, q) in groups.items()
        ]
        parts.append(table(["class", "types", "tensors", "size A", "size B", "B - A"], rows, left=2))
        if full:
            parts.append("\n".join(f"{printable(c.name)}: {c.a or 'none'} -> {c.b or 'none'}" for c in found.changes))
    sizes = f"{format_size(found.a_bytes)} -> {format_size(found.b_bytes)}"
    parts.append(f"{found.same} tensors have the same type, {len(found.changes)} differ; {sizes}")
    return "\n\n".join(parts)


def _diff_dict(found: RecipeDiff) -> dict[str, Any]:
    return {
        "identical": found.identical,
        "same": found.same,
        "a_bytes": found.a_bytes,
        "b_bytes": found.b_bytes,
        "only_in_a": list(found.only_a),
        "only_in_b": list(found.only_b),
        "other_order": found.moved,
        "tensors": [
            {"name": c.name, "a": c.a or None, "b": c.b or None, "a_bytes": c.a_bytes, "b_bytes": c.b_bytes}
            for c in found.changes
        ],
    }
