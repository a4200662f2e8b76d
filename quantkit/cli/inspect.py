"""``quantkit inspect``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import click

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import GroupedCommand, json_value, one_line, option, setting
from quantkit.cli._paths import MODEL
from quantkit.cli._table import fold, table
from quantkit.formats.gguf import Field
from quantkit.inspect import Fact, Group, Inspection, first_items, inspect
from quantkit.names import printable, shorten
from quantkit.pipeline.exactness import exact_weights
from quantkit.units import format_count, format_shape, format_size

_SCOPE, _OUT = "Selection", "Output"
#: With --metadata short: characters shown of a string, items of an array.
_WIDTH, _ITEMS = 72, 8
#: The widest name in a table.
_NAME = 64


@click.command("inspect", cls=GroupedCommand)
@click.argument("path", metavar="FILE", type=MODEL)
@setting(
    "--metadata",
    group=_SCOPE,
    type=click.Choice(["short", "full", "none"]),
    default="short",
    help="Show metadata with long values shortened, in full, or not at all.",
)
@option("--tensors", group=_SCOPE, metavar="REGEX", help="Only tensors whose names match REGEX, also in totals.")
@option("--no-tensors", group=_SCOPE, is_flag=True, help="Omit the list of tensors.")
@option("--header-only", group=_SCOPE, is_flag=True, help="Accept a file whose tensor data is missing or truncated.")
@json_option()
def command(
    path: Path, metadata: str, tensors: str | None, no_tensors: bool, header_only: bool, json_to: JsonOutput
) -> None:
    """Show the contents of a GGUF file: a model or an importance matrix.

    FILE may be any shard of a split model. Offsets are from the start of the
    tensor's shard. Bits per weight include row headers.

    \b
    quantkit inspect model.gguf
    quantkit inspect model.gguf --tensors attn_k --metadata none
    """
    result = inspect(path, tensors=tensors, header_only=header_only)
    json_to.print(
        lambda: _text(result, metadata, no_tensors=no_tensors), lambda: _as_dict(result, metadata, no_tensors)
    )


def _text(result: Inspection, metadata: str, *, no_tensors: bool) -> str:
    parts = [_summary(result)]
    if metadata != "none":
        parts.append(_metadata_table(result.fields, full=metadata == "full"))
    if not no_tensors:
        parts.append(_tensor_table(result))
    parts += [_group_table("type", result.by_type, result.total), _group_table("class", result.by_class, result.total)]
    return "\n\n".join(parts)


def _summary(inspection: Inspection) -> str:
    lines = list(_lines(inspection))
    width = max(len(label) for label, _ in lines)
    return "\n".join(fold(f"{label:<{width}}  {text}", width + 2) for label, text in lines)


def _lines(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Yield the summary as labels and texts."""
    yield "file", printable(str(inspection.path))
    size = f"{format_size(inspection.file_bytes)} ({inspection.file_bytes} bytes)"
    shards = f", {len(inspection.shards)} shards" if len(inspection.shards) > 1 else ""
    order = "big-endian, " if inspection.big_endian else ""
    yield "size", f"{size}{shards}; GGUF version {inspection.version}, {order}alignment {inspection.alignment}"
    if len(inspection.shards) > 1:
        for i, shard in enumerate(inspection.shards, 1):
            content = f"{shard.tensors} tensors, {format_size(shard.nbytes)}"
            yield f"  shard {i}", f"{printable(shard.path.name)}: {content}"
    if inspection.kind:
        yield "kind", _short(inspection.kind)
    if inspection.architecture:
        yield "architecture", _short(inspection.architecture)
    if inspection.name:
        yield "name", _short(inspection.name)
    if inspection.grid:
        yield "grid", inspection.grid
    if inspection.file_type is not None:
        yield "file type", f"{inspection.file_type} ({inspection.file_type_name})"
    for fact in inspection.facts:
        # Converters write 0 for parts that a model lacks.
        if fact.counts or fact.value != 0:
            yield fact.label, _fact(fact)
    if inspection.merged_layers:
        separate = f", separate in {inspection.unmerged_layers}" if inspection.unmerged_layers else ""
        yield "up and gate experts", f"merged in {inspection.merged_layers} layers{separate}"
    total = inspection.total
    selection = "" if total.tensors == inspection.n_tensors else f" of {inspection.n_tensors}"
    active = "" if inspection.active_values is None else f"; {format_count(inspection.active_values)} active per token"
    content = "weights" if inspection.architecture else "values"
    yield content, f"{format_count(total.values)} in {total.tensors}{selection} tensors{active}"
    yield "tensor data", f"{format_size(total.nbytes)}, {total.bpw:.3f} bits per weight"
    if exact := exact_weights(dict(inspection.provenance)):
        on_grid = [t for t in inspection.tensors if t.name in exact]
        share = f"{sum(exact[t.name] for t in on_grid)} of {sum(prod(t.shape) for t in on_grid)}"
        yield "exact weights", f"{share} in {len(on_grid)} tensors that keep their grid"
    for runtime in inspection.runtimes if inspection.architecture else ():
        yield f"in {runtime.name}", str(runtime)
    for key, value in inspection.provenance:
        yield key, _short(one_line(value))


def _fact(fact: Fact) -> str:
    if not fact.counts:
        return _short(one_line(fact.value))
    if all(n == 1 for _, n in fact.counts):
        return _short(", ".join(one_line(v) for v, _ in fact.counts))
    return _short(", ".join(f"{one_line(v)} (x {n})" for v, n in fact.counts))


def _short(text: str) -> str:
    return shorten(printable(text[: 2 * _WIDTH]), _WIDTH)


def _metadata_table(fields: Sequence[Field], *, full: bool) -> str:
    rows = [(shorten(printable(f.key), _NAME), _type(f), _field_text(f, full=full)) for f in fields]
    return table(["key", "type", "value"], rows, left=3)


def _type(item: Field) -> str:
    return item.type.name if item.item_type is None else f"{item.item_type.name}[{item.count}]"


def _field_text(item: Field, *, full: bool) -> str:
    if item.item_type is None:
        return one_line(item.value) if full else _short(one_line(item.value))
    items = item.value if full else first_items(item, _ITEMS)
    text = ", ".join(json.dumps(v) if isinstance(v, str) and "," in v else one_line(v) for v in items)
    if full or (item.count <= _ITEMS and len(text) <= _WIDTH):
        return text
    return shorten(text + ", …" if len(text) <= _WIDTH - 3 else text, _WIDTH)


def _tensor_table(inspection: Inspection) -> str:
    several = len(inspection.shards) > 1
    rows = [
        (
            shorten(printable(t.name), _NAME),
            format_shape(t.shape),
            t.type,
            format_size(t.nbytes),
            t.offset,
            t.shard + 1 if several else "",
        )
        for t in inspection.tensors
    ]
    return table(["tensor", "shape", "type", "size", "offset", "shard"], rows, left=(0, 2))


def _group_table(kind: str, groups: Sequence[Group], total: Group) -> str:
    rows = [(g, shorten(printable(g.name), _NAME)) for g in groups]
    if len(groups) > 1:
        rows.append((total, "total"))
    return table(
        [kind, "types", "tensors", "weights", "size", "bits per weight"],
        [
            (
                name,
                "" if kind == "type" else shorten(", ".join(g.types), 40),
                g.tensors,
                format_count(g.values),
                format_size(g.nbytes),
                f"{g.bpw:.3f}",
            )
            for g, name in rows
        ],
        left=2,
    )


def _as_dict(inspection: Inspection, metadata: str, no_tensors: bool) -> dict[str, Any]:
    """Return everything, for programs."""
    result: dict[str, Any] = {
        "path": str(inspection.path),
        "shards": [{"path": str(s.path), "bytes": s.nbytes, "tensors": s.tensors} for s in inspection.shards],
        "version": inspection.version,
        "alignment": inspection.alignment,
        "big_endian": inspection.big_endian,
        "kind": inspection.kind or None,
        "architecture": inspection.architecture or None,
        "name": inspection.name or None,
        "file_type": inspection.file_type,
        "file_type_name": inspection.file_type_name or None,
        "facts": {f.key: json_value(f.counts or f.value) for f in inspection.facts},
        "merged_layers": inspection.merged_layers,
        "unmerged_layers": inspection.unmerged_layers,
        "model_tensors": inspection.n_tensors,
        "active_weights": inspection.active_values,
        "total": _group_dict(inspection.total),
        "types": [_group_dict(g) for g in inspection.by_type],
        "classes": [_group_dict(g) for g in inspection.by_class],
        "grid": inspection.grid or None,
        "runtimes": {r.name: r.as_dict() for r in inspection.runtimes},
        "provenance": {key: json_value(value) for key, value in inspection.provenance},
    }
    if metadata != "none":
        result["metadata"] = [_field_dict(f, full=metadata == "full") for f in inspection.fields]
    if not no_tensors:
        result["tensors"] = [
            {
                "name": t.name,
                "shape": list(t.shape),
                "type": t.type.name,
                "bytes": t.nbytes,
                "offset": t.offset,
                "shard": t.shard,
            }
            for t in inspection.tensors
        ]
    return result


def _group_dict(g: Group) -> dict[str, Any]:
    return {
        "name": g.name,
        "types": list(g.types),
        "tensors": g.tensors,
        "weights": g.values,
        "bytes": g.nbytes,
        "bits_per_weight": g.bpw,
    }


def _field_dict(item: Field, *, full: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"key": item.key, "type": item.type.name}
    if item.item_type is not None:
        entry |= {"item_type": item.item_type.name, "count": item.count}
    is_shortened = item.item_type is not None and item.count > _ITEMS and not full
    return {
        **entry,
        "value": json_value(first_items(item, _ITEMS) if is_shortened else item.value),
        "cut": is_shortened,
    }
