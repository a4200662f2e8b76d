"""``quantkit types``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quantkit.catalog import TypeRow, types
from quantkit.catalog import presets as all_presets
from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import GroupedCommand, claim, option, project_names
from quantkit.cli._paths import Place, preset_use
from quantkit.cli._plot import Points, Scatter, check_plot, draw
from quantkit.cli._table import table
from quantkit.formats.outputs import atomic_write
from quantkit.kernels.interleave import base_of
from quantkit.pipeline.presets import PRESET_ALIASES, Preset
from quantkit.pipeline.quality import QUALITY
from quantkit.types import TensorType

FILE = Place()
_SCOPE, _OUT = "Selection", "Output"

_TYPES_LEGEND = """\
bpw       bits per weight without row headers
block     weights per block, and its bytes
header    bytes at the start of each row
rows      number of rows that are interleaved
runtimes  mainline is llama.cpp, ik is ik_llama.cpp
error     of the weights, weighted by importance, in percent, on a fixed sample:
          the error with an importance matrix; lower is better
          (interleaved types: by ik_llama.cpp's search, as they are encoded)
speed     of encoding: fast, medium (below 200 Mweights/s per core), slow
          (below 20)
imatrix   what the encoder does with an importance matrix
refused   llama-quantize programs that refuse the type without one (so does
          quantkit, except with --ignore-imatrix-rules)
codec     what this version of quantkit does: "full" encodes and decodes

Terminals with fewer than 120 columns show fewer of them; --json has all."""

_PRESETS_LEGEND = """\
number  general.file_type; TYPE may be this number, too
use     "mixture": type rules of llama.cpp, or of ik_llama.cpp for its presets
        (for all with --rules ik); "-": no encoder in this version
TYPE may also be any weight type that `quantkit types` lists, unmixed."""


@click.command("types", cls=GroupedCommand)
@option("--presets", group=_SCOPE, is_flag=True, help="Also list presets.")
@option(
    "--tree",
    "--runtime",
    "tree",
    group=_SCOPE,
    type=project_names(("mainline", "ik")),
    help="List only types that this runtime loads.",
)
@option("--plot", group=_OUT, type=FILE, metavar="FILE", help="Plot error against bits per weight: .svg, .png, .pdf.")
@option("--overwrite", group=_OUT, is_flag=True, help="Replace an existing plot.")
@json_option("the tables")
def command(presets: bool, tree: str | None, plot: Path | None, overwrite: bool, json_to: JsonOutput) -> None:
    """List the tensor types of llama.cpp and ik_llama.cpp, with --presets also their presets."""
    catalog, selected = types(tree), all_presets(tree)
    if plot is not None:
        kind, plot = check_plot(plot), claim(plot, overwrite=overwrite)
        with atomic_write(plot) as part:
            part.write_bytes(draw(_figure([row.type for row in catalog]), kind))
    result: dict[str, Any] = {"types": [row.as_dict() for row in catalog]}
    if presets:
        result |= {"presets": [_preset_dict(p) for p in selected], "aliases": PRESET_ALIASES}
    tables = [_type_table(catalog), *([_preset_table(selected)] if presets else [])]
    json_to.print(lambda: "\n\n".join(tables), lambda: result)


def _type_table(catalog: Sequence[TypeRow]) -> str:
    header = ["id", "name", "bpw", "block", "bytes", "header", "rows", "family", "runtimes"]
    header += ["error", "speed", "imatrix", "refused", "codec"]
    rows = [
        (
            t.id,
            t.name,
            f"{t.bpw:g}",
            t.block,
            t.block_bytes,
            t.row_header or "",
            t.interleave if t.interleave > 1 else "",
            t.family,
            t.trees,
            "" if row.error is None else f"{row.error:.3g}",
            row.speed or "",
            t.imatrix,
            t.needs_imatrix,
            _codec(row),
        )
        for row in catalog
        for t in [row.type]
    ]
    text = table(header, rows, left=(1, 7, 8, 10, 11, 12, 13), droppable=(5, 6, 12, 4, 3))
    return f"{text}\n\n{len(rows)} types.\n{_TYPES_LEGEND}"


def _codec(row: TypeRow) -> str:
    if row.encoder:
        return "full"
    return "decode" if row.decoder else "-"


def _preset_table(presets: Sequence[Preset]) -> str:
    header = ["number", "name", "base type", "runtimes", "use", "description"]
    rows = [(p.ftype, p.name, p.base or "", p.trees, preset_use(p) or "-", p.description) for p in presets]
    aliases = ", ".join(f"{alias} is {name}" for alias, name in PRESET_ALIASES.items())
    return (
        f"{table(header, rows, left=(1, 2, 3, 4, 5))}\n\n"
        f"{len(presets)} presets; as in llama-quantize {aliases}.\n{_PRESETS_LEGEND}"
    )


#: Kinds of points by the runtimes that have a type.
_RUNTIMES = (
    ("llama.cpp and ik_llama.cpp", "both"),
    ("llama.cpp only", "mainline"),
    ("ik_llama.cpp only", "ik"),
    ("neither", "none"),
)


def _figure(types: list[TensorType]) -> Scatter:
    """Return error against bits per weight, by runtime, with a line through the types that no smaller one beats."""
    by_point: dict[tuple[float, float], list[TensorType]] = {}
    for t in types:
        if t.name in QUALITY and t.is_quantized and not _is_at_its_base(t):
            by_point.setdefault((bits_with_header(t), QUALITY[t.name].error), []).append(t)
    best, least = [], math.inf
    for b, error in sorted(by_point):
        if error < least:
            best.append((b, error))
            least = error
    kinds = [Points("best error at each size", [b for b, _ in best], [e for _, e in best], is_line=True)]
    for name, trees in _RUNTIMES:
        points = [(b, e, ", ".join(map(str, group))) for (b, e), group in by_point.items() if group[0].trees == trees]
        if points:
            x, y, labels = zip(*points, strict=True)
            kinds.append(Points(name, x, y, labels))
    y_label = "relative error of the weights, weighted by importance (%)"
    note = "lower left is better"
    bits = "bits per weight (interleaved types coincide with their base types unless shown)"
    return Scatter("Error of tensor types on a fixed sample, by size", bits, y_label, kinds, note)


def _is_at_its_base(t: TensorType) -> bool:
    """Return whether an interleaved type has the size of its base type, and its error within 2 %."""
    base = base_of(t)
    if base is t or base.name not in QUALITY or bits_with_header(base) != bits_with_header(t):
        return False
    return abs(QUALITY[t.name].error / QUALITY[base.name].error - 1) < 0.02


def bits_with_header(t: TensorType) -> float:
    """Return bits per weight of rows of 2048 values, with the row header."""
    return 8 * t.row_bytes(2048) / 2048


def _preset_dict(p: Preset) -> dict[str, Any]:
    return {
        "number": p.ftype,
        "name": p.name,
        "base": p.base.name if p.base else None,
        "trees": p.trees,
        "use": preset_use(p),
        "description": p.description,
    }
