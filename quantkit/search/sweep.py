"""``search_front``: the least divergence at many sizes, and llama-quantize's presets for comparison."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.arguments import checked
from quantkit.errors import RecipeError, TypeNotSupported
from quantkit.formats.gguf import open_model
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.options.search import SearchOptions
from quantkit.pipeline.facts import half_names
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.presets import PRESETS, Preset
from quantkit.progress import Progress, ProgressCallback
from quantkit.search.allocation import Allocation
from quantkit.search.find import load_measurements, model_path, sensitivity_files, with_imatrix
from quantkit.search.finder import Finder
from quantkit.search.space import Space
from quantkit.sensitivity.file import Sensitivity
from quantkit.types import TensorType


@dataclass(frozen=True)
class PresetPoint:
    """A preset: ``nbytes`` of its file, ``read`` bytes per token, predicted ``kld`` in nats per token."""

    name: str
    nbytes: int
    bpw: float
    read: int
    kld: float


@dataclass(frozen=True)
class Front(HtmlTable):
    """Allocations from the smallest to the one of least divergence, each the best of its size, and presets."""

    allocations: tuple[Allocation, ...]
    presets: tuple[PresetPoint, ...]
    space: Space
    seconds: float
    notes: tuple[str, ...]

    def as_table(self) -> Table:
        """Return allocations and presets by size; divergences in nats per token."""
        rows = [("search", a.nbytes, a.bpw, a.kld) for a in self.allocations]
        rows += [(p.name, p.nbytes, p.bpw, p.kld) for p in self.presets]
        return table_of("of, bytes, bpw, predicted divergence", sorted(rows, key=lambda row: row[1]))


@checked
def search_front(
    sensitivity: Sensitivity | str | Path,
    source: str | Path | None = None,
    options: SearchOptions | None = None,
    *,
    points: int = 48,
    progress: ProgressCallback | None = None,
) -> Front:
    """Return the best allocations of many sizes, evenly spaced in their logarithm, and the presets of the runtime.

    Args:
        sensitivity: the result of ``sensitivity``, or its file.
        source: the model, of which only the header is read; default: the measured model.
        options: constraints; a target is ignored.
        points: number of sizes to solve for, in addition to those of the presets. Equal allocations count once.
        progress: called for each size.

    Raises as ``search``, and RecipeError for fewer than 2 points.
    """
    start = time.monotonic()
    if points < 2:
        raise RecipeError(f"--points {points}: must be at least 2", "QK-E203")
    measurements = load_measurements(sensitivity)
    with open_model(path := model_path(measurements, source)) as model:
        space = Space(
            measurements,
            model,
            with_imatrix(options or SearchOptions(), measurements, *sensitivity_files(sensitivity), path),
        )
        finder = Finder(space)
        presets, notes = _presets(space)
        allocations = list(_sweep(finder, points, [p.nbytes for p in presets], progress or (lambda now: None)))
    return Front(tuple(allocations), tuple(presets), space, time.monotonic() - start, (*space.notes, *notes))


def _sweep(finder: Finder, points: int, extra_sizes: Sequence[int], progress: ProgressCallback) -> Iterator[Allocation]:
    """Yield the allocations of a front, smallest first, each better than those before it, also for ``extra_sizes``."""
    first, last = finder.smallest(), finder.least_kld()
    sizes = {int(size) for size in np.geomspace(first.nbytes, max(first.nbytes, last.nbytes), points)}
    sizes = {size for size in sizes.union(extra_sizes) if first.nbytes < size < last.nbytes}
    before = math.inf
    for number, size in enumerate([first.nbytes, *sorted(sizes), last.nbytes], 1):
        allocation: Allocation | None
        if number == 1:
            allocation = first
        elif number == len(sizes) + 2:
            allocation = last
        else:
            allocation = finder.best_for_size(size)
        if allocation is not None and allocation.kld < before:
            line = f"{allocation.nbytes} bytes, predicted divergence {allocation.kld:.5g}"
            progress(Progress(number, len(sizes) + 2, line))
            yield allocation
            before = allocation.kld


# --- presets ---


def _presets(space: Space) -> tuple[list[PresetPoint], list[str]]:
    """Return the presets all of whose types were measured, largest first, and a note about the others."""
    points, omitted = [], []
    for preset in PRESETS:
        if not _is_plotted(preset, space.tree):
            continue
        try:
            plan = space.plan(preset.name, ())
        except (RecipeError, TypeNotSupported):  # needs an importance matrix, or has no encoder
            omitted.append(preset.name)
            continue
        kld = predict_plan(space, plan)
        if kld is None:
            omitted.append(preset.name)
            continue
        read = sum(space.footprint(t).read for t in plan.tensors)
        points.append(PresetPoint(preset.name, plan.nbytes, plan.bpw, read, kld))
    notes = [f"omitted presets, because types were not measured or need an importance matrix: {', '.join(omitted)}"]
    return sorted(points, key=lambda p: -p.nbytes), notes if omitted else []


def _is_plotted(preset: Preset, tree: str) -> bool:
    """Return whether a preset quantizes, for the runtime, to types for this purpose."""
    base = preset.base
    if base is None or not base.is_quantized or base.interleave > 1 or preset.trees not in (tree, "both"):
        return False
    return "BN" not in preset.name and not preset.name.startswith("TQ")


def predict_plan(space: Space, plan: Plan) -> float | None:
    """Return the predicted divergence of a plan, in nats per token; None if a type in it is unknown."""
    types = {name: t.type for t in plan.tensors for name in (t.name, *(half_names(t.name) or ()))}
    parts: list[tuple[float, float]] = []
    for group in space.groups:
        prediction = _predict_group(space, group.name, {n: types[n] for n in group.tensors if n in types})
        if prediction is None:
            return None
        parts.append(prediction)
    return space.combined_kld(parts)


def _predict_group(space: Space, name: str, types: dict[str, TensorType]) -> tuple[float, float] | None:
    """Return divergence and flips of a group; several types are weighted by their numbers of values."""
    total = weighted = flips = 0.0
    for tensor, t in types.items():
        source = space.source.tensors[tensor]
        values = math.prod(source.shape)
        kld = 0.0 if source.type is t else space.predictor.extrapolated_kld(name, t)
        if kld is None:
            return None
        total, weighted = total + values, weighted + values * kld
        flips += values * kld * space.predictor.flips(name, t)
    return (weighted / total, flips / total) if total else (0.0, 0.0)
