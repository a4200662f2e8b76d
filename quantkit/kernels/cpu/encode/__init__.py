"""Encoders: float32 rows to a type's bytes, identical to the reference's.

Every encoder is ``encode_<type>(x, weights, out, row0, row1)``: ``x`` float32 [rows, n], ``weights`` float32 [n] or
empty, ``out`` uint8 [rows, row_bytes], in the file of its family (kernels/formats.py). Where ik_llama.cpp has its own
search for a common type, its encoder is ``encode_<type>_ik``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quantkit.kernels.formats import cpu_function, encoder_for
from quantkit.kernels.interleave import is_interleaved
from quantkit.types import TensorType

Encoder = Callable[[Any, Any, Any, int, int], None]


def encoder(t: TensorType, variant: str | None = None) -> Encoder:
    """Return the encoder of type ``t``; of an interleaved type for whole groups of rows.

    variant: "mainline" or "ik", if there are two; default: that of the type's project. Raises TypeNotSupported if there
    is none.
    """
    search = encoder_for(t, variant)
    if is_interleaved(t):
        from quantkit.kernels.cpu.encode.interleaved import interleaved_encoder

        return interleaved_encoder(t, search)
    return cpu_function("encode", t, search)
