"""Weights that lie on the grid of a type: found in a sample of a tensor's rows, before its type is set.

QAT checkpoints, dequantized files and casts from 4 or 8 bits hold numbers that a type of GGUF has exactly, or to half a
unit of BF16 or F16. ``kernels/lattices.py`` describes these grids, ``kernels/cpu/encode/lattice_rows.py`` encodes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.gguf import TensorInfo
from quantkit.formats.gguf.rules import n_dims
from quantkit.formats.remote import URL
from quantkit.kernels.lattices import PRECISIONS, lattice_of
from quantkit.pipeline.facts import ROUTER, unquantized_reason
from quantkit.pipeline.source import Source
from quantkit.types import BY_NAME, TYPES, TensorType

F32 = npt.NDArray[np.float32]

#: What to do with weights that lie on a grid.
KEEP_GRID = "quantize --keep-grid loses nothing of them"
#: Rows of a tensor that are read, and values of them that are examined.
_ROWS, _VALUES = 16, 1 << 15
#: The least share of blocks on a grid for which a tensor is searched as a whole: others are there by chance.
LEAST_SHARE = 1 / 16
#: Bits of a weight above which a grid gains nothing over 16 bits.
_MOST_BITS = 9
#: Distinct magnitudes of 32 weights up to which a tensor is examined at all, on average.
_MOST_MAGNITUDES = 28.5
#: A type without a search of its own -> the one with the same values.
_SAME_VALUES = {"TQ1_0": "TQ2_0"}


@dataclass(frozen=True, slots=True)
class Grid:
    """A type on whose grid weights lie, and the share of them that does, 0 to 1."""

    type: TensorType
    share: float


def has_grid(t: TensorType) -> bool:
    """Return whether blocks of a type can be searched for in a source."""
    return lattice_of(_plain_type(t)) is not None


def _plain_type(t: TensorType) -> TensorType:
    return BY_NAME[_SAME_VALUES.get(t.name, t.name)]


@cache
def grid_types(tree: str) -> tuple[TensorType, ...]:
    """Return the types with a grid that a project's files may have, "mainline" or "ik", the smallest first."""
    types = (t for t in TYPES if t.trees in ("both", tree) and t.is_quantized and has_grid(t))
    return tuple(sorted((t for t in types if t.bpw < _MOST_BITS), key=lambda t: t.bpw))


def sample(source: Source, tensor: TensorInfo) -> F32:
    """Return rows of a tensor of BF16, F16 or F32 from all of its parts, float32 [rows, n]; no rows of another type.

    Raises FormatError or OSError if they cannot be read.
    """
    from quantkit.kernels import dequantize

    n, t = tensor.shape[0] if tensor.shape else 1, tensor.type
    rows = prod(tensor.shape[1:])
    if t.name not in PRECISIONS or not n or not rows:
        return np.zeros((0, max(1, n)), np.float32)
    count = max(1, min(_ROWS, rows, _VALUES // n))
    data = np.empty((count, t.row_bytes(n)), np.uint8)
    for i in range(count):
        source.read(tensor, data[i], (i * rows // count) * data.shape[1])
    return dequantize(data, t, n)


def share_on_grid(t: TensorType, source: TensorType, rows: F32) -> float:
    """Return the share of blocks with any weights, of rows of the type ``source``, that type ``t`` holds exactly."""
    from quantkit.kernels.cpu.encode.lattice_rows import blocks_on_lattice

    if not len(rows) or rows.shape[1] % t.block or not np.isfinite(rows).all():
        return 0.0
    has_weights = rows.reshape(-1, t.block).any(axis=1)
    on_grid = blocks_on_lattice(_plain_type(t), source, rows)
    return float((on_grid & has_weights).sum() / max(1, has_weights.sum()))


def find_grid(types: Iterable[TensorType], source: TensorType, rows: F32) -> Grid | None:
    """Return the first type that holds all the rows exactly; otherwise the one that holds most, if it holds enough."""
    best: Grid | None = None
    for t in types:
        share = share_on_grid(t, source, rows)
        if share >= LEAST_SHARE and (best is None or share > best.share):
            best = Grid(t, share)
        if share == 1:
            break
    return best


def _has_few_magnitudes(rows: F32) -> bool:
    """Return whether blocks have as few distinct magnitudes as on a grid of up to 8 bits: cheap, and rarely wrong.

    Of 32 Gaussian weights in BF16 29.5 are distinct on average, of those on Q8_0's grid 27.4.
    """
    if not len(rows) or rows.shape[1] % 32:
        return False
    magnitudes = np.sort(np.abs(rows.reshape(-1, 32)), axis=1)
    return float((np.diff(magnitudes, axis=1) != 0).sum(axis=1).mean()) + 1 <= _MOST_MAGNITUDES


def grids_of(source: Source, tensors: Iterable[TensorInfo], tree: str = "mainline") -> list[tuple[Grid | None, int]]:
    """Return the grid of each tensor that has weights in BF16, F16 or F32, in a sample, and the number of its weights.

    Raises FormatError or OSError if they cannot be read.
    """
    types, result = grid_types(tree), list[tuple[Grid | None, int]]()
    for tensor in tensors:
        rows = sample(source, tensor)
        if len(rows):
            grid = find_grid(types, tensor.type, rows) if _has_few_magnitudes(rows) else None
            result.append((grid, prod(tensor.shape)))
    return result


def matrices_of(source: Source) -> list[TensorInfo]:
    """Return the matrices of a model that quantize may encode."""
    arch = source.get("general.architecture", "")
    return [
        t
        for t in source.tensors.values()
        if n_dims(t.shape) > 1 and ROUTER not in t.name and unquantized_reason(t.name, arch, ik=False) is None
    ]


def grid_note(source: Source, tensors: Sequence[TensorInfo], remedy: str = "", tree: str = "mainline") -> str:
    """Return the sentence on the grids that tensors of a source on this machine lie on; "" if hardly any do.

    Unreadable data is left to the command that needs it.
    """
    if any(isinstance(path, URL) for path in source.paths):
        return ""
    try:
        return grid_line(grids_of(source, tensors, tree), remedy)
    except (FormatError, OSError):
        return ""


def grid_line(weights: Sequence[tuple[Grid | None, int]], remedy: str) -> str:
    """Return the sentence on weights that lie on grids, "" if hardly any do.

    weights: the grid of each tensor that can be quantized, and the number of its weights. remedy: what to do, or "".
    """
    total = sum(n for _, n in weights)
    by_type: dict[str, float] = {}
    for grid, n in weights:
        if grid is not None:
            by_type[grid.type.name] = by_type.get(grid.type.name, 0) + grid.share * n
    shares = {name: n / total for name, n in sorted(by_type.items(), key=lambda item: -item[1]) if n >= total / 100}
    if not shares:
        return ""
    parts = [f"{100 * share:.3g} % of the weights lie on {name}'s grid" for name, share in shares.items()]
    return f"{', '.join(parts)}: {remedy}" if remedy else ", ".join(parts)
