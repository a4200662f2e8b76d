"""Rows whose values lie on a type's lattice, encoded exactly: ``keep_exact_blocks``.

An encoder's own bytes stay where they are exact already, and where no exact ones are found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.encode.lattice import (
    HALF_SUBNORMAL,
    LEAST_NORMAL,
    are_representable,
    half_unit,
    pack_field,
)
from quantkit.kernels.cpu.encode.lattice_blocks import find_scales, find_scales_and_minimums
from quantkit.kernels.cpu.encode.lattice_super import find_super_scales, find_super_scales_and_minimums
from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows
from quantkit.kernels.lattices import PRECISIONS, Lattice, lattice_of
from quantkit.types import TensorType

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


#: How exact a block is: also in the signs of its zeros, which are those of scales.
EXACT, SAME_SIGNS = 1, 2


@inline
def _is_near(x: Any, y: Any, bits: Any) -> Any:
    """Return whether a float rounds to a number with so many bits; both as int32."""
    if bits == 24 or (x ^ y) < 0:
        return False
    magnitude = x & np.int32(0x7FFFFFFF)
    return abs(x - y) <= half_unit(magnitude, bits)


@kernel
def _mark_exact(x: Any, y: Any, block: int, precisions: Any, exact: Any) -> None:
    """Store how exact blocks of y are, rounded to the source's type, or to a narrower one that holds all values."""
    x_bits, y_bits = x.view(np.int32), y.view(np.int32)
    for b in range(exact.size):
        exact[b] = 0
        for p in range(precisions.size):
            if p > 0 and not are_representable(x, b * block, block, precisions[p]):
                break
            result = SAME_SIGNS
            for i in range(b * block, (b + 1) * block):
                if x_bits[i] == y_bits[i]:
                    continue
                if x[i] == y[i]:
                    result = min(result, EXACT)
                elif precisions[p] == 11 and abs(x[i]) < LEAST_NORMAL:
                    result = result if abs(x[i] - y[i]) <= HALF_SUBNORMAL else 0
                elif not _is_near(x_bits[i], y_bits[i], precisions[p]):
                    result = 0
                if result == 0:
                    break
            if result:
                exact[b] = result
                break


@kernel
def _pack(flags: Any, block: int, subs: int, q: Any, s: Any, m: Any, d: Any, dmin: Any, runs: Any, fields: Any,
          counts: Any, out: Any) -> None:  # fmt: skip
    """Write the fields of the flagged blocks into out, uint8 [blocks, block bytes]; d and dmin: uint16, bits of f16.

    counts: numbers of fields of q, s, m, d and dmin.
    """
    for b in range(flags.size):
        if not flags[b]:
            continue
        out[b, :] = 0
        field = 0
        row = out[b]
        for i in range(counts[0]):
            pack_field(row, 0, field, np.int64(q[b * block + i]), runs, fields)
            field += 1
        for i in range(counts[1]):
            pack_field(row, 0, field, np.int64(s[b * subs + i]), runs, fields)
            field += 1
        for i in range(counts[2]):
            pack_field(row, 0, field, np.int64(m[b * subs + i]), runs, fields)
            field += 1
        if counts[3]:
            pack_field(row, 0, field, np.int64(d[b]), runs, fields)
            field += 1
        if counts[4]:
            pack_field(row, 0, field, np.int64(dmin[b]), runs, fields)
            field += 1


class _Blocks:
    """Integers of blocks, and which of them are on the lattice."""

    def __init__(self, lattice: Lattice, values: int) -> None:
        block, span = lattice.type.block, lattice.span
        self.q = np.zeros(values, np.uint8)
        self.s, self.m = np.zeros(values // span, np.uint8), np.zeros(values // span, np.uint8)
        self.d, self.dmin = np.zeros(values // block), np.zeros(values // block)
        self.on_grid = np.zeros(values // block, np.bool_)


def _find(lattice: Lattice, x: F32, precisions: npt.NDArray[np.int64]) -> _Blocks:
    """Search the integers of all blocks of x, float32 [n]."""
    a, b, block = lattice, _Blocks(lattice, x.size), lattice.type.block
    if not a.has_minimum and not a.scales.size:
        find_scales(
            x, block, a.span, precisions, a.tries, a.follows_sign, a.level_codes, a.factors, b.q, b.s, b.d, b.on_grid
        )
    elif not a.scales.size:
        find_scales_and_minimums(x, block, precisions, a.top, b.q, b.d, b.dmin, b.on_grid)
    elif not a.has_minimum:
        find_super_scales(
            x, block, a.span, precisions, a.tries, a.level_codes, a.scales, a.scale_codes, b.q, b.s, b.d, b.on_grid
        )
    else:
        find_super_scales_and_minimums(
            x, block, a.span, precisions, a.top, a.scales, a.scale_codes, a.max_m, b.q, b.s, b.m, b.d, b.dmin, b.on_grid
        )  # fmt: skip
    return b


def blocks_on_lattice(t: TensorType, source: TensorType, x: F32) -> Flags:
    """Return which blocks of x, float32 [rows, n], values of type ``source``, a block of type ``t`` holds exactly."""
    lattice = lattice_of(t)
    if lattice is None:
        return np.zeros(x.size // t.block, np.bool_)
    return _find(lattice, x.reshape(-1), np.array(PRECISIONS[source.name])).on_grid


def keep_exact_blocks(t: TensorType, source: TensorType, x: F32, out: U8) -> int:
    """Replace an encoder's blocks by exact ones where there are any; return the number of values that are exact then.

    Args:
        t: the type of ``out``.
        source: the type of the values of x: BF16, F16 or F32. An F32 block of numbers of F16 or BF16 counts as such.
        x: float32 [rows, n], contiguous.
        out: the encoder's bytes of x, uint8 [rows, row bytes].
    """
    precisions = np.array(PRECISIONS[source.name])
    exact = exactness(t, precisions, x, out)
    lattice = lattice_of(t)
    if lattice is not None and not (exact == SAME_SIGNS).all():
        blocks = _find(lattice, x.reshape(-1), precisions)
        flags = blocks.on_grid & (exact < SAME_SIGNS) & x.reshape(-1, t.block).any(axis=1)
        if flags.any():
            exact = _replace(lattice, blocks, flags, exact, precisions, x, out)
    return int(np.count_nonzero(exact)) * t.block


def _replace(lattice: Lattice, blocks: _Blocks, flags: Flags, exact: U8, precisions: Ints, x: F32, out: U8) -> U8:
    """Write the flagged blocks where they are more exact; return how exact all are then."""
    t, before, data = lattice.type, out.copy(), out.reshape(-1, lattice.type.block_bytes)
    d, dmin = (floats.astype(np.float16).view(np.uint16) for floats in (blocks.d, blocks.dmin))
    _pack(
        flags, t.block, t.block // lattice.span, blocks.q, blocks.s, blocks.m, d, dmin, lattice.runs, lattice.fields,
        lattice.counts, data,
    )  # fmt: skip
    after = exactness(t, precisions, x, out)
    worse = flags & (after <= exact)
    data[worse] = before.reshape(-1, t.block_bytes)[worse]
    return np.maximum(exact, after)


def exactness(t: TensorType, precisions: Ints, x: F32, rows: U8) -> U8:
    """Return the exactness with which each block of rows decodes to the values of x: 0, EXACT or SAME_SIGNS."""
    y = np.empty_like(x)
    dequantize_rows(t, rows, y)
    exact = np.empty(x.size // t.block, np.uint8)
    _mark_exact(x.reshape(-1), y.reshape(-1), t.block, precisions, exact)
    return exact
