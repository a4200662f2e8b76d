"""``quantkit types``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from quantkit.cli.options import GroupedCommand, claim, option
from quantkit.cli.plot import Points, Scatter, check_plot, draw
from quantkit.cli.table import table
from quantkit.formats.outputs import written
from quantkit.kernels.formats import has_decoder, has_encoder
from quantkit.kernels.interleave import base_of
from quantkit.kernels.tensor_scale import decoded_as
from quantkit.pipeline.presets import PRESET_ALIASES, PRESETS, Preset
from quantkit.pipeline.quality import QUALITY
from quantkit.types import TYPES, TensorType

FILE = click.Path(path_type=Path)
_WHAT, _OUT = "What to list", "Output"

_TYPES_LEGEND = """\
bpw       bits per weight without row headers
block     weights per block, and its bytes
header    bytes at the head of each row
weave     rows interleaved with each other
runtimes  mainline is llama.cpp, ik is ik_llama.cpp
error     of the weights, weighted by importance, in percent, on a fixed sample:
          what encoding with an importance matrix costs; less is better
          (interleaved types: by ik_llama.cpp's search, as they are encoded)
speed     of encoding: fast, medium (below 200 Mweights/s of a core), slow
          (below 20)
imatrix   what the encoder does with an importance matrix
refused   whose llama-quantize refuses the type without one (so does quantkit,
          except with --ignore-imatrix-rules)
codec     what this version of quantkit does: "full" encodes and decodes

Below 120 columns some are omitted; --json has everything."""

_PRESETS_LEGEND = """\
number  general.file_type; TYPE may be this number, too
use     "mixture": llama.cpp's mixing rules, or ik_llama.cpp's for its presets
        (for all with --rules ik); "-": no encoder in this version
TYPE may also be any weight type that `quantkit types` lists, without a mixture."""


@click.command("types", cls=GroupedCommand)
@option("--presets", group=_WHAT, is_flag=True, help="Also list the presets that TYPE may name.")
@option("--tree", group=_WHAT, type=click.Choice(["mainline", "ik"]), help="Only what this tree supports.")
@option("--plot", group=_OUT, type=FILE, metavar="FILE", help="Draw error against bits per weight: .svg, .png, .pdf.")
@option("--overwrite", group=_OUT, is_flag=True, help="Replace the plot if it exists.")
@option("--json", "as_json", group=_OUT, is_flag=True, help="Print the tables as JSON.")
def command(presets: bool, tree: str | None, plot: Path | None, overwrite: bool, as_json: bool) -> None:
    """List the tensor types of llama.cpp and ik_llama.cpp, with --presets also their presets."""
    types = [t for t in TYPES if tree in (None, t.trees) or t.trees == "both"]
    chosen = [p for p in PRESETS if tree in (None, p.trees) or p.trees == "both"]
    if plot is not None:
        kind, plot = check_plot(plot), claim(plot, overwrite=overwrite)
        with written(plot) as part:
            part.write_bytes(draw(_figure(types), kind))
    if as_json:
        result: dict[str, Any] = {"types": [_type_dict(t) for t in types]}
        if presets:
            result |= {"presets": [_preset_dict(p) for p in chosen], "aliases": PRESET_ALIASES}
        click.echo(json.dumps(result, indent=2))
        return
    click.echo(_type_table(types))
    if presets:
        click.echo("\n" + _preset_table(chosen))


def use_of(preset: Preset) -> str | None:
    """Return how `quantkit quantize` treats the preset: as a mixture or a copy, or not at all (None)."""
    if preset.base is None:
        return "copy"
    return "mixture" if has_encoder(preset.base) else None


def _type_table(types: list[TensorType]) -> str:
    header = ["id", "name", "bpw", "block", "bytes", "header", "weave", "family", "runtimes"]
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
            f"{found.error:.3g}" if (found := QUALITY.get(t.name)) else "",
            found.speed if found else "",
            t.imatrix,
            t.needs_imatrix,
            "full" if has_encoder(t) else "decode" if has_decoder(decoded_as(t)) else "-",
        )
        for t in types
    ]
    text = table(header, rows, left=(1, 7, 8, 10, 11, 12, 13), spare=(5, 6, 12, 4, 3))
    return f"{text}\n\n{len(types)} types.\n{_TYPES_LEGEND}"


def _preset_table(presets: list[Preset]) -> str:
    header = ["number", "name", "base type", "runtimes", "use", "description"]
    rows = [(p.ftype, p.name, p.base or "", p.trees, use_of(p) or "-", p.description) for p in presets]
    aliases = ", ".join(f"{alias} is {name}" for alias, name in PRESET_ALIASES.items())
    return (
        f"{table(header, rows, left=(1, 2, 3, 4, 5))}\n\n"
        f"{len(presets)} presets; as in llama-quantize {aliases}.\n{_PRESETS_LEGEND}"
    )


def _type_dict(t: TensorType) -> dict[str, Any]:
    found = QUALITY.get(t.name)
    return {
        **asdict(t),
        "bits_per_weight": t.bpw,
        "weighted_error": found.error if found else None,
        "encoding": found.speed if found else None,
        "encoder": has_encoder(t),
        "decoder": has_decoder(decoded_as(t)),
    }


def _figure(types: list[TensorType]) -> Scatter:
    """Return error against bits per weight, by tree, and the types that no smaller one betters."""
    at: dict[tuple[float, float], list[TensorType]] = {}
    for t in types:
        if t.name in QUALITY and t.is_quantized and not _is_at_its_base(t):
            at.setdefault((bits_with_header(t), QUALITY[t.name].error), []).append(t)
    best, least = [], math.inf
    for b, error in sorted(at):
        if error < least:
            best.append((b, error))
            least = error
    kinds = [Points("no smaller type is better", [b for b, _ in best], [e for _, e in best], joined=True)]
    for name, trees in (("both trees", "both"), ("llama.cpp", "mainline"), ("ik_llama.cpp", "ik")):
        some = [(b, e, ", ".join(map(str, group))) for (b, e), group in at.items() if group[0].trees == trees]
        if some:
            x, y, labels = zip(*some, strict=True)
            kinds.append(Points(name, x, y, labels))
    what = "error of the weights, weighted by importance, %"
    note = "the further down and left, the better"
    bits = "bits per weight (interleaved types that are not shown lie where those of single rows do)"
    return Scatter("Size and error of tensor types, on a fixed sample", bits, what, kinds, note)


def _is_at_its_base(t: TensorType) -> bool:
    """Whether an interleaved type is as large as that of single rows, and its error the same but for 2 %."""
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
        "use": use_of(p),
        "description": p.description,
    }
