"""Rows whose values lie on a type's lattice, encoded exactly: ``keep_exact_blocks``.

An encoder's own bytes stay where they are exact already, and where no exact ones are found.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.encode.exactness import SAME_SIGNS, exactness, mark_ambiguous_signs
from quantkit.kernels.cpu.encode.lattice_blocks import find_scales, find_scales_and_minimums
from quantkit.kernels.cpu.encode.lattice_groups import pack_groups
from quantkit.kernels.cpu.encode.lattice_pack import pack_blocks, write_better
from quantkit.kernels.cpu.encode.lattice_super import find_super_scales, find_super_scales_and_minimums
from quantkit.kernels.lattices import PRECISIONS, Lattice, lattice_of
from quantkit.types import TensorType

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Exactness(NamedTuple):
    """The number of values that are exact, and that of the exact blocks whose bytes their numbers do not determine."""

    values: int
    ambiguous_blocks: int


class _Blocks:
    """Which blocks are on the lattice, and the integers of these, one after another."""

    def __init__(self, lattice: Lattice, count: int) -> None:
        block, span = lattice.type.block, lattice.span
        self.q = np.empty(count * block, np.uint8)
        self.s, self.m = (np.zeros(count * block // span, np.uint8) for _ in range(2))
        self.d, self.dmin = np.zeros(count), np.zeros(count)
        self.on_grid = np.zeros(count, np.bool_)


def _find(lattice: Lattice, x: F32, indices: Ints, precisions: Ints) -> _Blocks:
    """Search the integers of some blocks of x, float32 [n]; of a type with a grid, without regard to its points."""
    if lattice.unit != 1:
        x = x * np.float32(lattice.unit)
    a, b, block = lattice, _Blocks(lattice, len(indices)), lattice.type.block
    if not a.has_minimum and not a.scales.size:
        find_scales(
            x, indices, block, a.span, precisions, a.tries, a.follows_sign, a.level_codes, a.even, a.factors, b.q, b.s,
            b.d, b.on_grid,
        )  # fmt: skip
    elif not a.scales.size:
        find_scales_and_minimums(x, indices, block, precisions, a.top, b.q, b.d, b.dmin, b.on_grid)
    elif not a.has_minimum:
        find_super_scales(
            x, indices, block, a.span, precisions, a.tries, a.level_codes, a.even, a.scales, a.scale_codes, b.q, b.s,
            b.d, b.on_grid,
        )  # fmt: skip
    else:
        find_super_scales_and_minimums(
            x, indices, block, a.span, precisions, a.top, a.scales, a.scale_codes, a.max_m, b.q, b.s, b.m, b.d, b.dmin,
            b.on_grid,
        )  # fmt: skip
    return b


def blocks_on_lattice(t: TensorType, source: TensorType, x: F32) -> Flags:
    """Return which blocks of x, float32 [rows, n], values of type ``source``, a block of type ``t`` holds exactly."""
    lattice, count = lattice_of(t), x.size // t.block
    if lattice is None:
        return np.zeros(count, np.bool_)
    integers = _find(lattice, x.reshape(-1), np.arange(count), np.array(PRECISIONS[source.name]))
    result = integers.on_grid
    if lattice.grid is not None:
        result[np.flatnonzero(result)] = _pack(lattice, integers, int(np.count_nonzero(result)))[1]
    return result


def keep_exact_blocks(t: TensorType, source: TensorType, x: F32, out: U8) -> Exactness:
    """Replace an encoder's blocks by exact ones where there are any; return what is exact then.

    Args:
        t: the type of ``out``.
        source: the type of the values of x: BF16, F16 or F32. An F32 block of numbers of F16 or BF16 counts as such.
        x: float32 [rows, n], contiguous.
        out: the encoder's bytes of x, uint8 [rows, row bytes].
    """
    precisions, lattice = np.array(PRECISIONS[source.name]), lattice_of(t)
    values, blocks = x.reshape(-1), out.reshape(-1, t.block_bytes)
    exact = exactness(t, precisions, values, np.arange(len(blocks)), blocks)
    if lattice is None:
        return Exactness(int(np.count_nonzero(exact)) * t.block, 0)
    indices = np.flatnonzero(exact < SAME_SIGNS)
    if indices.size:
        _replace(lattice, precisions, values, indices, exact, blocks)
    return Exactness(int(np.count_nonzero(exact)) * t.block, _ambiguous_blocks(lattice, values, exact))


def _ambiguous_blocks(lattice: Lattice, x: F32, exact: U8) -> int:
    if not lattice.loses_sign:
        return 0
    ambiguous = np.empty(len(exact), np.bool_)
    mark_ambiguous_signs(x, lattice.type.block, lattice.span, ambiguous)
    return int(np.count_nonzero(ambiguous & (exact > 0)))


def _replace(lattice: Lattice, precisions: Ints, x: F32, indices: Ints, exact: U8, blocks: U8) -> None:
    """Search some blocks, and write those that are more exact than before, with their exactness."""
    t, integers = lattice.type, _find(lattice, x, indices, precisions)
    indices = indices[integers.on_grid]
    data, exists = _pack(lattice, integers, len(indices))
    if not exists.all():
        indices, data = indices[exists], data[exists]
    if not indices.size:
        return
    after = exactness(t, precisions, x, indices, data)
    write_better(x, indices, data, after, exact, blocks)


def _pack(lattice: Lattice, integers: _Blocks, count: int) -> tuple[U8, Flags]:
    """Return the first blocks of a search, uint8 [count, block bytes], and which of them the type has."""
    t, a = lattice.type, integers
    if lattice.grid is not None:
        return pack_groups(lattice, a.q[: count * t.block], a.s[: count * t.block // lattice.span], a.d[:count])
    data = np.empty((count, t.block_bytes), np.uint8)
    if count:
        pack_blocks(
            count, t.block, t.block // lattice.span, a.q, a.s, a.m, a.d, a.dmin, lattice.runs, lattice.ends,
            data.reshape(-1),
        )  # fmt: skip
    return data, np.ones(count, np.bool_)
