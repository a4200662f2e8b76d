"""A type's integers on a device: where their bits lie, as fields.cuh and rows.cu read it."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cuda.core.device import Device
from quantkit.kernels.cuda.core.lookups import upload_once
from quantkit.kernels.cuda.feedback.sweeps import codebook
from quantkit.kernels.levels import Bits, Levels, float_bits, levels_of
from quantkit.types import TensorType

Ints = npt.NDArray[np.int32]
#: What a bit is of (fields.cuh).
_LEVEL, _FACTOR, _MINIMUM, _SHIFT, _D, _DMIN = range(1, 7)


class Tables(NamedTuple):
    """Arrays or, on a device, their addresses; an empty array, or 0, where a type has none.

    Fields are int32 [fields, bits]; factor_indices: of the factor of each s in ``factors``, ascending; sources, codes:
    as write_args of rows.cu says. codebook: of its levels (sweeps.cuh); empty where levels come from a grid.
    """

    factor_fields: Any
    minimum_fields: Any
    shift_fields: Any
    d_field: Any
    dmin_field: Any
    factor_indices: Any
    factors: Any
    sources: Any
    level_codes: Any
    factor_codes: Any
    codebook: Any
    level_fields: Any


def _field(kind: str) -> Ints:
    return float_bits(kind).ravel().astype(np.int32) if kind else np.zeros(0, np.int32)


def _enter(sources: npt.NDArray[np.uint32], kind: int, fields: Bits | None) -> None:
    """Record the item and bit of each field bit."""
    if fields is None:
        return
    items, bits = np.indices(fields.shape)
    sources[fields] = kind << 24 | items << 8 | bits


def _sources(layout: Levels) -> npt.NDArray[np.uint32]:
    """Return the field of each bit of a row's header, then of a block's."""
    header, block = (np.zeros(8 * size, np.uint32) for size in (layout.type.row_header, layout.type.block_bytes))
    for kind, fields in (
        (_LEVEL, layout.levels),
        (_FACTOR, layout.scale),
        (_MINIMUM, layout.minimum),
        (_SHIFT, layout.shift),
    ):
        _enter(block, kind, fields)
    for kind, where in ((_D, layout.d), (_DMIN, layout.dmin)):
        if where:
            _enter(header if where.startswith("row:") else block, kind, float_bits(where))
    return np.concatenate([header, block])


def _flat(fields: Bits | None) -> Ints:
    return np.zeros(0, np.int32) if fields is None else fields.astype(np.int32).ravel()


@cache
def tables(t: TensorType) -> Tables:
    """Return the arrays of a type."""
    layout = levels_of(t)
    factors = np.zeros(0, np.float32)
    factor_indices = np.zeros(0, np.int64)
    codes = np.zeros(0, np.int64)
    if layout.factors is not None:
        factors, codes, factor_indices = np.unique(layout.factors, return_index=True, return_inverse=True)
    level_codes, levels = np.zeros(0, np.int32), np.zeros(0, np.float32)
    if layout.grid is None:
        distinct, first = np.unique(layout.codebook, return_index=True)  # whole numbers, -128 to 127
        level_codes, levels = np.zeros(256, np.int32), codebook(layout.codebook)
        level_codes[distinct.astype(np.int8).view(np.uint8)] = first
    return Tables(
        _flat(layout.scale), _flat(layout.minimum), _flat(layout.shift), _field(layout.d), _field(layout.dmin),
        factor_indices.astype(np.int32), factors.astype(np.float32), _sources(layout).view(np.int32), level_codes,
        codes.astype(np.int32), levels, _flat(layout.levels),
    )  # fmt: skip


def tables_on(device: Device, t: TensorType) -> Tables:
    """Return the addresses of a type's tables on a device, where they stay."""
    return Tables(*upload_once(device, tables, t))
