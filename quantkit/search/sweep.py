"""The least divergence at every size, and where llama-quantize's presets lie: ``search_front``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.errors import RecipeError, TypeNotSupported
from quantkit.formats.gguf import open_model
from quantkit.pipeline.facts import half_names
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.presets import PRESETS, Preset
from quantkit.search.allocation import Allocation
from quantkit.search.find import Finder, files_of, known_of, model_of, with_imatrix
from quantkit.search.options import SearchOptions
from quantkit.search.space import Space
from quantkit.sensitivity.file import Sensitivity
from quantkit.types import TensorType


@dataclass(frozen=True)
class PresetPoint:
    """A preset: bytes of its file and what its types are predicted to do."""

    name: str
    nbytes: int
    bpw: float
    read: int
    kld: float


@dataclass(frozen=True)
class Front:
    """Allocations from the smallest to the one of least divergence, each the best of its size; presets beside them."""

    allocations: tuple[Allocation, ...]
    presets: tuple[PresetPoint, ...]
    space: Space
    seconds: float
    notes: tuple[str, ...]


def search_front(
    sensitivity: Sensitivity | str | Path,
    source: str | Path | None = None,
    options: SearchOptions | None = None,
    *,
    points: int = 48,
    progress: Callable[[str], None] = lambda line: None,
) -> Front:
    """Return the best allocations of many sizes, even in their logarithm, and the presets of the runtime.

    Args:
        sensitivity: what ``sensitivity`` measured, or its file.
        source: the model, of which only the header is read; by default that which was measured.
        options: constraints; a target does not count.
        points: sizes to solve for, beside those of the presets. Equal allocations are one.
        progress: told of each step.
    """
    began = time.monotonic()
    if points < 2:
        raise RecipeError(f"--points {points}: a front has two ends")
    known = known_of(sensitivity)
    with open_model(path := model_of(known, source)) as opened:
        space = Space(known, opened, with_imatrix(options or SearchOptions(), known, *files_of(sensitivity), path))
        finder = Finder(space)
        presets, notes = _presets(space)
        found = list(_sweep(finder, points, [p.nbytes for p in presets], progress))
    return Front(tuple(found), tuple(presets), space, time.monotonic() - began, (*space.notes, *notes))


def _sweep(finder: Finder, points: int, more: Sequence[int], progress: Callable[[str], None]) -> Iterator[Allocation]:
    """Yield the allocations of a front, smallest first, each better than those before it; also of ``more`` sizes."""
    first, last = finder.smallest(), finder.least_kld()
    sizes = {int(size) for size in np.geomspace(first.nbytes, max(first.nbytes, last.nbytes), points)}
    sizes = {size for size in sizes.union(more) if first.nbytes < size < last.nbytes}
    before = math.inf
    for no, size in enumerate([first.nbytes, *sorted(sizes), last.nbytes], 1):
        found = first if no == 1 else last if no == len(sizes) + 2 else finder.of_size(size)
        if found is not None and found.kld < before:
            progress(f"{no} of {len(sizes) + 2}: {found.nbytes} bytes, predicted divergence {found.kld:.5g}")
            yield found
            before = found.kld


# --- presets ---


def _presets(space: Space) -> tuple[list[PresetPoint], list[str]]:
    """Return the presets of which every type was measured, largest first, and a note about those left out."""
    found, left = [], []
    for preset in PRESETS:
        if not _is_shown(preset, space.tree):
            continue
        try:
            plan = space.plan(preset.name, ())
        except (RecipeError, TypeNotSupported):  # without importance, or without an encoder
            left.append(preset.name)
            continue
        kld = predicted(space, plan)
        if kld is None:
            left.append(preset.name)
            continue
        read = sum(space.part(t).read for t in plan.tensors)
        found.append(PresetPoint(preset.name, plan.nbytes, plan.bpw, read, kld))
    notes = [f"presets with types that were not measured, or without their importance: {', '.join(left)}"]
    return sorted(found, key=lambda p: -p.nbytes), notes if left else []


def _is_shown(preset: Preset, tree: str) -> bool:
    """Tell whether a preset is one of few bits, with a mixture, that the runtime has."""
    base = preset.base
    if base is None or not base.is_quantized or base.interleave > 1 or preset.trees not in (tree, "both"):
        return False
    return "BN" not in preset.name and not preset.name.startswith("TQ")


def predicted(space: Space, plan: Plan) -> float | None:
    """Return the predicted divergence of any plan; None if nothing is known of a type in it."""
    types = {name: t.type for t in plan.tensors for name in (t.name, *(half_names(t.name) or ()))}
    parts: list[tuple[float, float]] = []
    for group in space.groups:
        found = _of_group(space, group.name, {n: types[n] for n in group.tensors if n in types})
        if found is None:
            return None
        parts.append(found)
    return space.together(parts)


def _of_group(space: Space, name: str, types: dict[str, TensorType]) -> tuple[float, float] | None:
    """Return what a group comes to, and what flips make of it, its types weighted by values where it has several."""
    total = weighted = flips = 0.0
    for tensor, t in types.items():
        source = space.source.tensors[tensor]
        values = math.prod(source.shape)
        kld = 0.0 if source.type is t else space.predictor.filled(name, t)
        if kld is None:
            return None
        total, weighted = total + values, weighted + values * kld
        flips += values * kld * space.predictor.flips(name, t)
    return (weighted / total, flips / total) if total else (0.0, 0.0)
