"""Unpackers: what 256 stored values are, as int8 levels and f32 scales, in registers.

An unpacker is ``unpack_<type>(data, offset) -> (l0, l1, l2, l3, scales, mins)``, inlined into the skeleton that calls
it. ``data`` is an address (or an array), ``offset`` the byte where a *unit* of 256 values begins: one super-block, or
8, 4 or 2 small blocks in a row. It reads these bytes and no others. l0 ... l3 are i8x64: the levels of values 0..63,
64..127, 128..191, 192..255; scales and mins are f32x16, one lane per 16 values::

    value = scale * level           when mins is None (the type has none)
    value = scale * level - min     otherwise

with exactly the reference's roundings (llama.cpp b11434 ggml-quants.c dequantize_row_*, strict f32).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantkit.errors import TypeNotSupported
from quantkit.types import TensorType

#: Values that an unpacker unpacks at once.
UNIT = 256

#: The file that holds the unpacker of each type there is one for.
FAMILY_FILES: dict[str, str] = {
    "Q4_0": "legacy",
    "Q4_1": "legacy",
    "Q5_0": "legacy",
    "Q5_1": "legacy",
    "Q8_0": "legacy",
    "Q2_K": "k_quants",
    "Q3_K": "k_quants",
    "Q4_K": "k_quants",
    "Q5_K": "k_quants",
    "Q6_K": "k_quants",
    "IQ1_S": "i_quants",
    "IQ1_M": "i_quants",
    "IQ2_XXS": "i_quants",
    "IQ2_XS": "i_quants",
    "IQ2_S": "i_quants",
    "IQ3_XXS": "i_quants",
    "IQ3_S": "i_quants",
    "IQ4_NL": "i_quants",
    "IQ4_XS": "i_quants",
    "TQ1_0": "ternary",
    "TQ2_0": "ternary",
    "Q2_0": "ternary",
    "Q1_0": "binary",
    "MXFP4": "fp4",
    "NVFP4": "fp4",
}

#: Types whose unpacker returns mins; for the others it returns None in their place.
WITH_MINS = frozenset({"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"})

#: Types whose levels are never negative (0..127): mat-muls need no offset for them.
NON_NEGATIVE = WITH_MINS

#: Types with a scale (and minimum) of its own per 16 values; the lanes of others come in equal pairs.
SCALE_PER_16 = frozenset({"Q2_K", "Q3_K", "Q6_K", "IQ2_XS", "IQ2_S", "IQ1_M", "NVFP4"})


@dataclass(frozen=True, slots=True)
class Unpacker:
    """The unpacker of one type: its inlined function, the bytes of 256 values, and what mat-muls may rely on."""

    type: TensorType
    function: Callable[..., Any]
    unit_bytes: int
    has_mins: bool
    non_negative: bool
    #: Values that share a scale: 16 or 32.
    span: int


def has_unpacker(t: TensorType) -> bool:
    """Tell whether type ``t`` has an unpacker; F32, F16 and BF16 need none."""
    return t.name in FAMILY_FILES


def unpacker(t: TensorType) -> Unpacker:
    """Return the unpacker of type ``t``; raise TypeNotSupported if there is none."""
    if t.name not in FAMILY_FILES:
        raise TypeNotSupported(f"there is no unpacker for {t.name} in this version; `quantkit types` shows which exist")
    module = importlib.import_module(f"{__name__}.{FAMILY_FILES[t.name]}")
    function = getattr(module, f"unpack_{t.name.lower()}")
    span = 16 if t.name in SCALE_PER_16 else 32
    return Unpacker(t, function, t.row_bytes(UNIT), t.name in WITH_MINS, t.name in NON_NEGATIVE, span)
