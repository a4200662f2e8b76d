"""Tensors that lie on the grid of a type: ``--keep-grid`` gives them that type, and keeps their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quantkit.kernels.interleave import base_of
from quantkit.pipeline.choose import Choice, Request
from quantkit.pipeline.grid import Grid, find_grid, grid_types, has_grid, sample, share_on_grid
from quantkit.pipeline.plan import OutputTensor
from quantkit.pipeline.recipe import abbreviate
from quantkit.pipeline.source import Source
from quantkit.types import TensorType

#: Steps of ``choose`` whose types a grid may replace.
_REPLACED = frozenset({"preset", "rule", "class", "option"})


@dataclass
class GridChoices:
    """The types of tensors on grids, the names of those whose blocks are searched, and notes."""

    choices: list[Choice] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def choose_grids(
    source: Source,
    request: Request,
    tensors: Sequence[OutputTensor],
    choices: Sequence[Choice],
    *,
    only_whole: bool = False,
) -> GridChoices:
    """Give every tensor that lies on the grid of a type no larger than its own that type.

    A sample of its rows decides; the run counts the weights that are exact. only_whole: only tensors whose
    whole sample lies on a grid keep it, as with error feedback, which has no error to compensate in these.
    """
    result = GridChoices()
    smaller, larger = dict[tuple[str, str], list[str]](), dict[str, list[str]]()
    # blocks off the grid are encoded, too, for which some types need an importance matrix
    types = [t for t in grid_types("ik" if request.ik else "mainline") if t.imatrix != "required"]
    for tensor, choice in zip(tensors, choices, strict=True):
        grid = _grid_of(source, tensor, choice, types)
        if grid is None or (only_whole and grid.share < 1):
            result.choices.append(choice)
        elif grid.type.bpw > choice.type.bpw:
            larger.setdefault(grid.type.name, []).append(tensor.name)
            result.choices.append(choice)
        else:
            result.names.add(tensor.name)
            if grid.type is not choice.type:
                smaller.setdefault((choice.type.name, grid.type.name), []).append(tensor.name)
            result.choices.append(_with_grid(choice, grid))
    result.notes = _notes(result.names, smaller, larger)
    return result


def _grid_of(source: Source, tensor: OutputTensor, choice: Choice, types: Sequence[TensorType]) -> Grid | None:
    """Return the grid of a tensor that is encoded: the smallest type that holds all of it, or its own type if that
    holds a part; a larger type than its own only if that holds all of it.
    """
    target = choice.type
    is_encoded = not choice.copied and not choice.repacked and target.is_quantized
    if not is_encoded or choice.step not in _REPLACED or base_of(target) is not target:
        return None
    parts = [(part.source.type, sample(source, part.source)) for part in tensor.parts]

    def share(t: TensorType) -> float:
        return min(share_on_grid(t, source_type, rows) for source_type, rows in parts)

    for t in sorted(types, key=lambda t: (t.bpw, t is not target)):
        if tensor.shape[0] % t.block == 0 and (t.bpw <= target.bpw) and share(t) == 1:
            return Grid(t, 1.0)
    if has_grid(target) and (partial := find_grid([target], *parts[0])) is not None:
        return Grid(target, share(target)) if share(target) else partial
    return next((Grid(t, 1.0) for t in types if t.bpw > target.bpw and share(t) == 1), None)


def _with_grid(choice: Choice, grid: Grid) -> Choice:
    if grid.type is choice.type:
        part = "" if grid.share == 1 else f", {100 * grid.share:.0f} % of the sample"
        return replace(choice, reason=choice.reason.adjust(f"on its grid{part}: blocks are kept"))
    text = f"on the grid of {grid.type}, which holds it exactly in fewer bits than {choice.type}"
    if grid.type.bpw == choice.type.bpw:
        text = f"on the grid of {grid.type}, which holds it exactly, unlike {choice.type}"
    return replace(choice, type=grid.type, reason=choice.reason.adjust(text), fallback_from=None)


def with_grids(tensors: Sequence[OutputTensor], names: set[str]) -> list[OutputTensor]:
    """Return the tensors, of which those with these names keep blocks that lie on the grid of their type."""
    return [replace(tensor, keeps_grid=tensor.name in names) for tensor in tensors]


def _notes(names: set[str], smaller: dict[tuple[str, str], list[str]], larger: dict[str, list[str]]) -> list[str]:
    notes = [
        f"--keep-grid: {abbreviate(tensors)}: {type_name} holds the weights exactly, instead of {larger_type}"
        for (larger_type, type_name), tensors in smaller.items()
    ]
    notes += [
        f"--keep-grid: {abbreviate(tensors)}: the weights lie on {type_name}'s grid, but fewer bits are asked for, so "
        "they are rounded"
        for type_name, tensors in larger.items()
    ]
    if not names and not larger:
        notes.append("--keep-grid has no effect: no tensor lies on the grid of its type or of a smaller one")
    return notes
