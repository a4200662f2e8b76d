"""Encoders: float32 rows in, a type's bytes out, identical to the reference's.

Every encoder is ``encode_<type>(x, weights, out, row0, row1)``: ``x`` float32 [rows, n], ``weights`` float32 [n] or
empty, ``out`` uint8 [rows, row_bytes]. It lives in the file of its family.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from quantkit.errors import TypeNotSupported
from quantkit.types import TensorType

#: The file that holds the encoder of each type there is one for.
FAMILY_FILES: dict[str, str] = {
    "F32": "floats",
    "F16": "floats",
    "BF16": "floats",
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
    "IQ4_NL": "i_quants",
    "IQ4_XS": "i_quants",
    "TQ1_0": "ternary",
    "TQ2_0": "ternary",
    "Q2_0": "ternary",
    "Q1_0": "binary",
    "MXFP4": "fp4",
    "NVFP4": "fp4",
}

Encoder = Callable[[Any, Any, Any, int, int], None]


def has_encoder(t: TensorType) -> bool:
    """Tell whether rows can be encoded as type ``t``."""
    return t.name in FAMILY_FILES


def encoder(t: TensorType) -> Encoder:
    """Return the encoder of type ``t``; raise TypeNotSupported if there is none."""
    if t.name not in FAMILY_FILES:
        raise TypeNotSupported(f"there is no encoder for {t.name} in this version; `quantkit types` shows which exist")
    module = importlib.import_module(f"{__name__}.{FAMILY_FILES[t.name]}")
    return getattr(module, f"encode_{t.name.lower()}")  # type: ignore[no-any-return]
