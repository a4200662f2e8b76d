"""``quantkit recipe``: lint, show, convert, diff."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import (
    DiffError,
    GPULayers,
    GroupedCommand,
    WholeNames,
    claim,
    echo_notes,
    option,
    project_name,
    project_names,
    setting,
)
from quantkit.cli._paths import IMATRIX_FILE, MODEL_FILE, Place
from quantkit.cli._table import fold, format_list, table
from quantkit.errors import QuantkitError, RecipeError
from quantkit.formats.outputs import atomic_write
from quantkit.names import printable, shorten
from quantkit.recipes import (
    DIALECTS,
    RecipeDiff,
    RecipeSummary,
    Sum,
    convert_recipe,
    diff_recipe,
    lint_recipe,
    show_recipe,
)
from quantkit.types import TensorType, type_by_name
from quantkit.units import format_count, format_size

_RECIPE = "Recipe"
_DEVICES = "Devices"
_OUT = "Output"
_FILE = Place(exists=True, dir_okay=False)
_NAME = 48

_from = option(
    "--from",
    "dialect",
    group=_RECIPE,
    type=project_names(DIALECTS),
    help="Dialect of the recipe.  [default: detected]",
)
_model = option(
    "-m", "--model", group=_RECIPE, type=MODEL_FILE, help="Model to apply the recipe to; only the header is read."
)
_type = setting(
    "--type",
    "title",
    group=_RECIPE,
    metavar="TYPE",
    default="COPY",
    help="TYPE of quantkit quantize, for tensors that no rule matches.",
)
_json = json_option()


class RecipeGroup(WholeNames, click.Group):
    """A group to whose options -xyz is always one name."""


@click.group("recipe", cls=RecipeGroup)
def command() -> None:
    """Check, show, convert and compare recipes: rules that give tensors their types.

    Reads quantkit's own recipes (lines `regex = type`), files of llama.cpp's
    --tensor-type-file, rules of ik_llama.cpp's --custom-q (also in a shell script's
    custom="..") and recipes of Thireus' GGUF-Tool-Suite. The first rule that
    matches decides.

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
@option(
    "--for", "runtime", group=_RECIPE, type=project_names(("mainline", "ik")), help="Runtime that must load the output."
)
@_type
@option(
    "--imatrix", group=_RECIPE, type=IMATRIX_FILE, help="Importance matrix; without one, types that need it are errors."
)
@_json
def lint_command(
    recipe: Path,
    model: Path | None,
    dialect: str | None,
    runtime: str | None,
    title: str,
    imatrix: Path | None,
    json_to: JsonOutput,
) -> None:
    """Check a recipe alone, and with -m against a model.

    Exit code 1 if there is an error; warnings alone give 0.
    """
    findings = lint_recipe(
        recipe, model=model, dialect=dialect, runtime=runtime, title=title, imatrix=imatrix is not None
    )
    errors = sum(f.severity == "error" for f in findings)
    rows = [{"code": f.code, "severity": f.severity, "message": f.message} for f in findings]
    lines = [fold(f"{f.severity}: {f.code}: {printable(f.message)}", 2) for f in findings]
    lines.append(f"{errors} errors, {len(findings) - errors} warnings" if findings else "nothing found")
    json_to.print(lambda: "\n".join(lines), lambda: {"recipe": str(recipe), "errors": errors, "findings": rows})
    sys.exit(1 if errors else 0)


@command.command("show", cls=GroupedCommand, short_help="Show the types and sizes a recipe gives.")
@click.argument("recipe", metavar="RECIPE|GGUF", type=_FILE)
@_model
@_from
@_type
@option("--imatrix", group=_RECIPE, type=IMATRIX_FILE, help="Importance matrix, for the exact size of the output.")
@option(
    "-ngl",
    "--gpu-layers",
    group=_DEVICES,
    type=GPULayers(),
    metavar="N|all",
    help="Offload the last N layers to GPUs, or all.",
)
@option(
    "-ot",
    "--override-tensor",
    "overrides",
    group=_DEVICES,
    multiple=True,
    metavar="RE=DEVICE",
    help="Place matching tensors on a device; repeatable.",
)
@option("--cpu-moe", group=_DEVICES, is_flag=True, help="Keep all experts on the CPU.")
@option(
    "--n-cpu-moe",
    group=_DEVICES,
    type=click.IntRange(0),
    default=0,
    help="Keep the experts of the first N layers on the CPU.",
)
@setting(
    "--gpus",
    group=_DEVICES,
    type=click.IntRange(1, 64),
    default=1,
    help="Number of GPUs, which share the offloaded layers evenly.",
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
    json_to: JsonOutput,
) -> None:
    """Show the types and sizes that a recipe gives a model, or those of a GGUF file.

    Sizes by device are those of weights, without caches and buffers. "per token"
    counts the bytes read to generate a token: the experts in use, and one row of
    the embeddings.
    """
    contents = show_recipe(
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
    json_to.print(lambda: _contents_text(contents, layers=layers), lambda: _contents_dict(contents))
    if not json_to.only:
        echo_notes(contents.notes)


def _contents_text(contents: RecipeSummary, *, layers: bool) -> str:
    parts = [_sums("class", contents.by_class, contents.total)]
    parts += [_sums("layer", contents.by_layer, contents.total)] if layers else []
    parts += [_sums("type", contents.by_type, None), _sums("device", contents.by_device, None)]
    about = "" if contents.contents.exact else ", approximate: the exact size needs --imatrix"
    lines = [f"file: {contents.contents.file_bytes} bytes ({format_size(contents.contents.file_bytes)}){about}"]
    lines += [f"{format_count(contents.total.values)} weights, {contents.total.bpw:.3f} bits per weight"]
    lines += [f"{format_size(contents.total.token_bytes)} read per token"]
    if contents.unnamed:
        first = ", ".join(map(printable, contents.unnamed[:3]))
        omitted = f" and {len(contents.unnamed) - 3} more" if len(contents.unnamed) > 3 else ""
        lines += [f"no rule matches {first}{omitted}: they get the type of --type"]
    lines += [f"{runtime.name}: {runtime}" for runtime in contents.runtimes]
    return "\n\n".join([*parts, "\n".join(fold(line, 2) for line in lines)])


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


def _contents_dict(contents: RecipeSummary) -> dict[str, Any]:
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
        "file_bytes": contents.contents.file_bytes,
        "exact": contents.contents.exact,
        "total": rows([contents.total])[0],
        "classes": rows(contents.by_class),
        "layers": rows(contents.by_layer),
        "types": rows(contents.by_type),
        "devices": rows(contents.by_device),
        "unnamed": list(contents.unnamed),
        "runtimes": {r.name: r.as_dict() for r in contents.runtimes},
        "notes": list(contents.notes),
        "tensors": [
            {"name": t.name, "shape": list(t.shape), "type": t.type.name, "bytes": t.nbytes, "reason": t.reason}
            for t in contents.contents.tensors
        ],
    }


@command.command(
    "convert", cls=GroupedCommand, short_help="Convert between dialects; extract the recipe of a GGUF file."
)
@click.argument("source", metavar="IN", type=_FILE)
@click.argument("output", metavar="OUT", type=Place(dir_okay=False, allow_dash=True))
@setting("--to", group=_RECIPE, type=project_names(DIALECTS), default="quantkit", help="Dialect of OUT.")
@_from
@_model
@option(
    "--replace",
    group=_RECIPE,
    multiple=True,
    metavar="TYPE=TYPE",
    help="Replace a type that the other dialect lacks; repeatable.",
)
@option("--overwrite", group=_OUT, is_flag=True, help="Replace an existing output.")
@_json
def convert_command(
    source: Path,
    output: Path,
    to: str,
    dialect: str | None,
    model: Path | None,
    replace: tuple[str, ...],
    overwrite: bool,
    json_to: JsonOutput,
) -> None:
    """Convert a recipe to another dialect, or extract the recipe of a GGUF file.

    OUT may be - for stdout. With -m, the type of every tensor is verified to be the
    same in both dialects; exact names replace rules that the other dialect cannot
    express. Exit code 1 if rules had to be omitted because the other dialect lacks
    their types or regular expressions.
    """
    to_stdout = str(output) == "-"
    if not to_stdout:
        output = claim(output, source, model, overwrite=overwrite)
    result = convert_recipe(source, to, dialect=dialect, model=model, replace=dict(map(_replacement, replace)))
    if json_to.only:
        json_to.print(str, lambda: asdict(result))
    elif to_stdout:
        click.echo(result.text, nl=False)
    json_to.write(lambda: asdict(result))
    if not to_stdout:
        with atomic_write(output) as part:
            part.write_text(result.text, encoding="utf-8")
    echo_notes(result.notes)
    proof = f", the same types for {result.proved_tensors} tensors" if result.proved_tensors is not None else ""
    left = f"; {len(result.omitted)} left out" if result.omitted else ""
    click.echo(
        f"{project_name(result.source)} to {project_name(result.dialect)}: {result.rules} rules{proof}{left}", err=True
    )
    if to == "ik" and not to_stdout:
        click.echo(f"--custom-q \"$(grep -v '^#' {printable(output)} | paste -sd,)\"", err=True)
    sys.exit(1 if result.omitted else 0)


def _replacement(text: str) -> tuple[TensorType, TensorType]:
    old, equals, new = text.partition("=")
    if not equals:
        raise RecipeError(f"--replace {text}: write OLD=NEW, as IQ4_KS=IQ4_XS", "QK-E204")
    return type_by_name(old), type_by_name(new)


@command.command("diff", cls=GroupedCommand, short_help="Compare two recipes, or recipes and GGUF files.")
@click.argument("a", metavar="A", type=_FILE)
@click.argument("b", metavar="B", type=_FILE)
@_model
@_type
@option("--per-tensor", group=_OUT, is_flag=True, help="List every tensor that differs.")
@_json
def diff_command(a: Path, b: Path, model: Path | None, title: str, per_tensor: bool, json_to: JsonOutput) -> None:
    """Compare the types that two recipes or GGUF files give; without -m, the rules.

    Exit code as with diff: 0 nothing differs, 1 something does, 2 wrong usage or an
    unreadable file.
    """
    try:
        result = diff_recipe(a, b, model=model, title=title)
    except QuantkitError as e:
        raise DiffError(e) from e
    json_to.print(lambda: _differences(result, full=per_tensor), lambda: _diff_dict(result))
    sys.exit(0 if result.identical else 1)


def _differences(result: RecipeDiff, *, full: bool) -> str:
    if not result.by_model:
        lines = [f"{result.n_same} rules are in both{', in another order' if result.reordered else ''}"]
        for side, only in (("A", result.only_a), ("B", result.only_b)):
            lines += [f"only in {side}: {len(only)}", *format_list(map(printable, only), 2, full=full)] if only else []
        return "\n".join(lines)
    parts = []
    if result.changes:
        groups: dict[tuple[str, str, str], list[int]] = {}
        for c in result.changes:
            sums = groups.setdefault((c.group, c.a or "none", c.b or "none"), [0, 0, 0])
            for i, n in enumerate((1, c.a_bytes, c.b_bytes)):
                sums[i] += n
        rows = [
            (shorten(printable(name), _NAME), f"{x} -> {y}", n, format_size(p), format_size(q), format_size(q - p))
            for (name, x, y), (n, p, q) in groups.items()
        ]
        parts.append(table(["class", "types", "tensors", "size A", "size B", "B - A"], rows, left=2))
        if full:
            parts.append("\n".join(f"{printable(c.name)}: {c.a or 'none'} -> {c.b or 'none'}" for c in result.changes))
    sizes = f"{format_size(result.a_bytes)} -> {format_size(result.b_bytes)}"
    parts.append(f"{result.n_same} tensors have the same type, {len(result.changes)} differ; {sizes}")
    return "\n\n".join(parts)


def _diff_dict(result: RecipeDiff) -> dict[str, Any]:
    return {
        "identical": result.identical,
        "same": result.n_same,
        "a_bytes": result.a_bytes,
        "b_bytes": result.b_bytes,
        "only_in_a": list(result.only_a),
        "only_in_b": list(result.only_b),
        "other_order": result.reordered,
        "tensors": [
            {"name": c.name, "a": c.a or None, "b": c.b or None, "a_bytes": c.a_bytes, "b_bytes": c.b_bytes}
            for c in result.changes
        ],
    }
