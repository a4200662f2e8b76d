"""A type's integers on a device: where their bits lie, as fields.cuh and rows.cu read it."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cuda.core.device import Device
from quantkit.kernels.cuda.core.lookups import put_once
from quantkit.kernels.cuda.feedback.sweeps import book_of
from quantkit.kernels.levels import Bits, Levels, float_bits, levels_of
from quantkit.types import TensorType

Ints = npt.NDArray[np.int32]
#: What a bit is of (fields.cuh).
_LEVEL, _FACTOR, _MINIMUM, _SHIFT, _D, _DMIN = range(1, 7)


class Tables(NamedTuple):
    """Arrays or, on a device, their addresses; an empty array, or 0, for what a type has not.

    Fields are int32 [fields, bits]; places: of the factor of each s in ``factors``, ascending; sources, codes: as
    write_args of rows.cu says. book: of its levels (sweeps.cuh); empty where levels come from a grid.
    """

    factor_fields: Any
    minimum_fields: Any
    shift_fields: Any
    d_field: Any
    dmin_field: Any
    places: Any
    factors: Any
    sources: Any
    level_codes: Any
    factor_codes: Any
    book: Any
    level_fields: Any


def _field(kind: str) -> Ints:
    return float_bits(kind).ravel().astype(np.int32) if kind else np.zeros(0, np.int32)


def _enter(sources: npt.NDArray[np.uint32], kind: int, fields: Bits | None) -> None:
    """Note of which item, and which of its bits, the bits of fields are."""
    if fields is None:
        return
    items, bits = np.indices(fields.shape)
    sources[fields] = kind << 24 | items << 8 | bits


def _sources(of: Levels) -> npt.NDArray[np.uint32]:
    """Return what each bit of a row's header, then of a block's, is of."""
    header, block = (np.zeros(8 * size, np.uint32) for size in (of.type.row_header, of.type.block_bytes))
    for kind, fields in ((_LEVEL, of.levels), (_FACTOR, of.scale), (_MINIMUM, of.minimum), (_SHIFT, of.shift)):
        _enter(block, kind, fields)
    for kind, where in ((_D, of.d), (_DMIN, of.dmin)):
        if where:
            _enter(header if where.startswith("row:") else block, kind, float_bits(where))
    return np.concatenate([header, block])


def _flat(fields: Bits | None) -> Ints:
    return np.zeros(0, np.int32) if fields is None else fields.astype(np.int32).ravel()


@cache
def tables(t: TensorType) -> Tables:
    """Return the arrays of a type."""
    of = levels_of(t)
    factors, places, codes = np.zeros(0, np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64)
    if of.factors is not None:
        factors, codes, places = np.unique(of.factors, return_index=True, return_inverse=True)
    level_codes, book = np.zeros(0, np.int32), np.zeros(0, np.float32)
    if of.grid is None:
        known, first = np.unique(of.codebook, return_index=True)  # whole numbers, -128 to 127
        level_codes, book = np.zeros(256, np.int32), book_of(of.codebook)
        level_codes[known.astype(np.int8).view(np.uint8)] = first
    return Tables(
        _flat(of.scale), _flat(of.minimum), _flat(of.shift), _field(of.d), _field(of.dmin), places.astype(np.int32),
        factors.astype(np.float32), _sources(of).view(np.int32), level_codes, codes.astype(np.int32), book,
        _flat(of.levels),
    )  # fmt: skip


def tables_on(device: Device, t: TensorType) -> Tables:
    """Return the addresses of a type's tables on a device, where they stay."""
    return Tables(*put_once(device, tables, t))
