"""Heat maps of tensor classes by layer: types, errors, divergences, tokens of the importance matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from quantkit.report.chart import Chart, Json, Scale, chart_spec
from quantkit.report.colours import SUFFICIENCY, VIRIDIS, Rgb, ramp_colour, text_colour
from quantkit.report.data import File, GroupCost, Matrix, Report, TensorCoverage
from quantkit.types import type_by_name

#: Value of "layer" for tensors outside of layers.
NO_LAYER = "none"
NOT_MEASURED = "not measured"
#: Marks an estimate: before its value, or alone in a cell that is too narrow for the value.
GUESS = "≈"
GUESS_NOTE = f"{GUESS}: estimated from the error at the end of the layer"
#: Width in pixels of the names of classes, and of the narrowest cell with a readable key; print has narrower ones.
_NAMES, _CELL = 126, 10
#: Width of the narrowest cell with a key, and distance of two numbers of layers, in pixels.
_KEY, _NUMBER = 7, 26
_TIP: list[Json] = [{"field": "name", "title": "tensor"}, {"field": "type", "title": "type"}]


# ---------------------------------------------------------------- types


def type_colours(report: Report) -> dict[str, str]:
    """Return a colour for each type of matrices, by bits per weight: lighter is more."""
    names = sorted({m.type for f in report.files for m in f.matrices}, key=lambda n: (_bits(n), n))
    return {name: ramp_colour((i + 0.5) / len(names)) for i, name in enumerate(names)}


def type_keys(names: Iterable[str]) -> dict[str, str]:
    """Return a character for each type, all different: its bits where they are free, else a letter of its name.

    Cells of deep models have no space for more.
    """
    keys: dict[str, str] = {}
    spare = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    for name in names:
        bits = [c for c in name if c.isdigit()][:1]
        letters = [c for c in reversed(name) if c.isalpha()]
        keys[name] = next((c for c in (*bits, *letters, *spare) if c not in keys.values()), "?")
    return keys


def _bits(name: str) -> float:
    t = type_by_name(name)
    return 8 * t.block_bytes / t.block


def types_map(report: Report) -> Chart | None:
    """Return the map of the types of each class in each layer."""
    colours = type_colours(report)
    keys = type_keys(colours)
    files: list[list[Json]] = []
    for f in report.files:
        files.append([])
        for m in _largest_matrices(f):
            colour = colours[m.type]
            fields = {"colour": colour, "ink": text_colour(colour), "text": m.type, "key": keys[m.type]}
            files[-1].append({**_cell(m), **fields})
    description = "The type of each class of tensors in each layer of the chosen file"
    kinds = order_kinds(m for f in report.files for m in f.matrices)
    return _map_of_files("chart-types", description, files, kinds, _TIP)


# ---------------------------------------------------------------- values


@dataclass(frozen=True)
class _Ramp:
    """A colour map, linear on the scale of ``to_scale``; ``from_scale`` is its inverse.

    ``domain``: ends of that scale; None: those of the values.
    """

    to_scale: Callable[[float], float]
    from_scale: Callable[[float], float]
    text: Callable[[float], str]
    colours: Sequence[Rgb] = VIRIDIS
    domain: tuple[float, float] | None = None


def errors_map(report: Report) -> Chart | None:
    """Return the map of the relative errors of each class in each layer, in percent."""
    files: list[list[Json]] = [
        [_cell(m) | {"value": None if m.error is None else 100 * m.error} for m in _largest_matrices(f)]
        for f in report.files
    ]
    scale = _colour_values(files, _Ramp(lambda v: v, lambda v: v, lambda v: f"{v:.2g}" if v < 10 else f"{v:.0f}"))
    tip = [*_TIP, {"field": "value", "title": "error, %", "format": ".3~g"}]
    description = "The relative error of each class of tensors in each layer of the chosen file"
    kinds = order_kinds(m for f in report.files for m in f.matrices)
    return None if scale is None else _map_of_files("chart-errors", description, files, kinds, tip, scale)


def costs_of(report: Report, f: File) -> dict[str, GroupCost]:
    """Return the known costs of groups in the types that a file has for them, by group."""
    if report.sensitivity is None:
        return {}
    types = {m.name: m.type for m in f.matrices}
    return {c.group: c for c in report.sensitivity.costs if c.tensors and {types.get(n) for n in c.tensors} == {c.type}}


def costs_map(report: Report) -> Chart | None:
    """Return the map of the divergence that each group alone causes in its type, in thousandths of a nat."""
    if report.sensitivity is None:
        return None
    groups = {c.group: c for c in report.sensitivity.costs}
    in_groups = {name for group in groups.values() for name in group.tensors}
    files: list[list[Json]] = []
    for f in report.files:
        costs = costs_of(report, f)
        files.append([_cost_cell(group, costs.get(name), f) for name, group in groups.items()])
        files[-1] += [_cell(m) | {"value": None} for m in _largest_matrices(f) if m.name not in in_groups]
    values = [cell["value"] for cells in files for cell in cells if cell["value"] is not None]
    floor = max(values, default=1.0) / 1000
    scale = _colour_values(files, _Ramp(lambda v: math.log(max(v, floor) or 1e-300), math.exp, lambda v: f"{v:.2g}"))
    tip = [*_TIP, {"field": "value", "title": "divergence, thousandths of a nat", "format": ".3~g"}]
    description = "The divergence that each group of tensors alone causes in its type in the chosen file"
    order = order_kinds(m for f in report.files for m in f.matrices)
    all_cells = sorted((cell for cells in files for cell in cells), key=lambda cell: cell["layer"] == NO_LAYER)
    kinds = dict.fromkeys(cell["kind"] for cell in all_cells)
    if kinds.keys() <= set(order):
        kinds = dict.fromkeys(kind for kind in order if kind in kinds)
    if scale is not None and any(value < floor for value in values):
        scale = replace(scale, ticks=(f"≤ {scale.ticks[0]}", *scale.ticks[1:]))
    return None if scale is None else _map_of_files("chart-costs", description, files, list(kinds), tip, scale)


def _cost_cell(group: GroupCost, cost: GroupCost | None, f: File) -> Json:
    types = dict.fromkeys(m.type for m in f.matrices if m.name in group.tensors)
    cell: Json = {"kind": group.kind, "layer": _layer(group.layer), "name": group.group, "type": ", ".join(types)}
    if cost is None:
        return cell | {"value": None}
    return cell | {"value": 1000 * cost.kld, "is_guess": cost.error is None}


def coverage_map(report: Report) -> Chart | None:
    """Return the map of the tokens behind the least used expert of each tensor.

    The middle of the scale is the number that suffices, so that plenty never looks like a gap.
    """
    if report.imatrix is None:
        return None
    cells: list[Json] = [
        {"kind": t.kind, "layer": _layer(t.layer), "name": t.name, "value": _tokens(t)} for t in report.imatrix.tensors
    ]
    sufficient = max(1, report.imatrix.hardly)
    ramp = _Ramp(
        lambda v: math.log(max(v, 1e-9) / sufficient),
        lambda v: sufficient * math.exp(v),
        lambda v: f"{v:.0f}" if v < 1e4 else f"{v / 1e3:.0f}k",
        SUFFICIENCY,
        (-math.log(100), math.log(100)),
    )
    scale = _colour_values([cells], ramp)
    tip = [{"field": "name", "title": "tensor"}, {"field": "value", "title": "fewest tokens", "format": ","}]
    description = "The fewest tokens of any expert of a tensor in calibration, by class and layer"
    kinds = list(dict.fromkeys(c["kind"] for c in cells))
    if scale is None:
        return None
    first, *between, last = scale.ticks
    scale = replace(scale, ticks=(f"≤ {first}", *between, f"≥ {last}"))
    spec = _spec(description, cells, kinds, _layers([cells]), tip, _longest([cells]))
    spec["data"] = {"values": _with_notes(cells, kinds, _layers([cells]))}
    return Chart("chart-coverage", spec, scale=scale, min_width=_min_width([cells]), has_gaps=_has_gaps([cells]))


def _tokens(t: TensorCoverage) -> float | None:
    """Return the tokens of the least used expert, 0 without an entry; None if the file does not count them."""
    if t.tokens_min is None:
        return None if t.present else 0.0
    return float(t.tokens_min)


def _colour_values(files: Sequence[Sequence[Json]], ramp: _Ramp) -> Scale | None:
    """Set colours and texts of cells, on one scale for all files, and return the scale; None without a value."""
    values = [ramp.to_scale(c["value"]) for cells in files for c in cells if c["value"] is not None]
    if not values:
        return None
    low, high = ramp.domain or (min(values), max(values))
    for cell in (c for cells in files for c in cells):
        if cell["value"] is None:
            cell |= {"colour": "var(--gap)", "ink": "var(--soft)", "text": "–", "key": "–"}
            continue
        fraction = (ramp.to_scale(cell["value"]) - low) / (high - low) if high > low else 0.5
        colour = ramp_colour(fraction, ramp.colours)
        mark = GUESS if cell.get("is_guess") else ""
        text = f"{mark}{ramp.text(cell['value'])}"
        cell |= {"colour": colour, "ink": text_colour(colour), "text": text, "key": mark}
    steps = [i / 4 for i in range(5)] if high > low else [0.5]
    ticks = tuple(ramp.text(ramp.from_scale(low + step * (high - low))) for step in steps)
    return Scale([ramp_colour(i / 12, ramp.colours) for i in range(13)] if high > low else [ramp_colour(0.5)], ticks)


# ---------------------------------------------------------------- cells and their specification


def _layer(layer: int | None) -> str:
    return NO_LAYER if layer is None else str(layer)


def _cell(m: Matrix) -> Json:
    return {"kind": m.kind, "layer": _layer(m.layer), "name": m.name, "type": m.type}


def _largest_matrices(f: File) -> Iterable[Matrix]:
    """Return the largest matrix of each class and layer."""
    largest: dict[tuple[str, int | None], Matrix] = {}
    for m in f.matrices:
        current = largest.get((m.kind, m.layer))
        if current is None or current.values < m.values:
            largest[m.kind, m.layer] = m
    return largest.values()


def order_kinds(matrices: Iterable[Matrix]) -> list[str]:
    """Return tensor classes in the order of their first tensors, those outside of layers last."""
    layer_kinds, other_kinds = dict[str, None](), dict[str, None]()
    for m in matrices:
        (other_kinds if m.layer is None else layer_kinds)[m.kind] = None
    return [*layer_kinds, *(kind for kind in other_kinds if kind not in layer_kinds)]


def _layers(files: Sequence[Sequence[Json]]) -> list[str]:
    layers = {cell["layer"] for cells in files for cell in cells}
    return sorted(layers, key=lambda n: (n == NO_LAYER, int(n) if n.isdecimal() else 0))


def _longest(files: Sequence[Sequence[Json]]) -> int:
    return max((len(cell["text"]) for cells in files for cell in cells), default=1)


def _min_width(files: Sequence[Sequence[Json]]) -> int:
    return _NAMES + _CELL * len(_layers(files))


def _has_gaps(files: Sequence[Sequence[Json]]) -> bool:
    return any(cell.get("value", 0) is None for cells in files for cell in cells)


def _with_notes(cells: Sequence[Json], kinds: Sequence[str], layers: Sequence[str]) -> list[Json]:
    """Return cells with a note on each row that is not measured at all, or that the file lacks."""
    rows: dict[str, list[Json]] = {kind: [] for kind in kinds}
    for cell in cells:
        rows[cell["kind"]].append(cell)
    notes = []
    for kind, row in rows.items():
        if all(cell.get("value", 0) is None for cell in row):
            for cell in row:
                cell |= {"text": "", "key": ""}
            text = NOT_MEASURED if row else "not in this file"
            notes.append({"kind": kind, "layer": layers[0], "note": text})
    return [*cells, *notes]


def _map_of_files(
    name: str,
    description: str,
    files: Sequence[Sequence[Json]],
    kinds: Sequence[str],
    tip: list[Json],
    scale: Scale | None = None,
) -> Chart | None:
    """Return a map that shows one file at a time; None if there are no cells."""
    layers = _layers(files)
    if not layers:
        return None
    spec = _spec(description, (), kinds, layers, tip, _longest(files))
    cells = [_with_notes(cells, kinds, layers) for cells in files]
    return Chart(name, spec, cells=cells, scale=scale, min_width=_min_width(files), has_gaps=_has_gaps(files))


def _number(layers: Sequence[str]) -> str:
    """Return Vega's expression of the labels of an axis: every 1st, 2nd, 5th .. layer, and always "none"."""
    n = len(layers)
    index, least = f"round(datum.index * {n - 1})", f"{_NUMBER * n} / width"
    step = "".join(f"{least} <= {step} ? {step} : " for step in (1, 2, 5, 10)) + "20"
    condition = f"{index} % ({step}) === 0"
    if layers[-1] == NO_LAYER:
        condition += f" && ({n - 1} - {index}) * width / {n} > {_NUMBER + 6}"
    return f"datum.label === '{NO_LAYER}' || {condition} ? datum.label : ''"


def _spec(
    description: str, cells: Sequence[Json], kinds: Sequence[str], layers: Sequence[str], tip: list[Json], longest: int
) -> Json:
    """Return the specification of a map. All its cells have texts, where the longest fits; else all have keys."""
    n = len(layers)
    x: Json = {"field": "layer", "type": "ordinal", "title": "layer", "sort": layers, "scale": {"domain": layers}}
    x["axis"] = {"labelAngle": 0, "labelOverlap": False, "ticks": False, "domain": False, "labelExpr": _number(layers)}
    y: Json = {"field": "kind", "type": "nominal", "title": None, "sort": kinds, "scale": {"domain": kinds}}
    y["axis"] = {"ticks": False, "domain": False, "labelLimit": _NAMES - 8}
    text = f"width / {n} > {6.4 * longest} ? datum.text : width / {n} > {_KEY} ? datum.key : ''"
    gap = f"width / {n} > 14 ? 1 : 0.3"  # in narrow cells, wide gaps would hide the cell
    position: Json = {"x": x, "y": y}
    style: Json = {"type": "text", "tooltip": None, "aria": False}
    layer = [
        {
            "name": "cells",
            "transform": [{"filter": "!datum.note"}],
            "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": {"expr": gap}},
            "encoding": {**position, "color": {"field": "colour", "type": "nominal", "scale": None}, "tooltip": tip},
        },
        {
            "name": "texts",
            "transform": [{"filter": "!datum.note"}],
            "mark": {**style, "fontSize": 10, "text": {"expr": text}},
            "encoding": {**position, "color": {"field": "ink", "type": "nominal", "scale": None}},
        },
        {
            "name": "notes",
            "transform": [{"filter": "!!datum.note"}],
            "mark": {**style, "fontSize": 11, "fontStyle": "italic", "align": "left", "dx": 4, "color": "var(--soft)"},
            "encoding": {**position, "x": {**x, "bandPosition": 0}, "text": {"field": "note"}},
        },
    ]
    return chart_spec(description, 24 * len(kinds), data={"values": cells}, layer=layer)
