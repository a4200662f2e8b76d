"""The kernels of a plan, each called once on a row of zeros: so they are loaded or compiled before the work begins."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from quantkit.kernels.first_run import Job
from quantkit.pipeline.work import PlannedTensor
from quantkit.types import TensorType


def kernel_calls(tensors: Iterable[PlannedTensor], measure: bool) -> list[Job]:
    """Return calls of all kernels that encoding ``tensors`` will run; ``measure``: and measuring the error."""
    tensors = list(tensors)
    changed = [(part, t) for t in tensors for part in t.parts if part.source.type is not t.type]
    sources, targets = dict.fromkeys(p.source.type for p, _ in changed), dict.fromkeys(t.type for _, t in changed)
    encoders = dict.fromkeys((t.type, t.encoder, bool(t.encoder) and p.found is not None) for p, t in changed)
    written = dict.fromkeys(t.type for t in tensors if t.type.scales)
    return [
        *(partial(_encode, *which) for which in encoders),
        *(partial(_decode, t) for t in (sources | targets if measure else sources) if t.name != "F32"),
        *(partial(_validate, t) for t in written),
        *([_first_nonfinite] if changed else []),
        *([_measure] if changed and measure else []),
    ]


def _values(t: TensorType) -> int:
    return max(t.block, 256)


def _encode(t: TensorType, whose: str, weighted: bool) -> None:
    """Encode with type ``t``'s encoder, or ``whose``; some of ik_llama.cpp's have a kernel of their own for weights."""
    from quantkit.kernels.cpu.encode import encoder

    n = _values(t)
    weights, out = np.ones(n if weighted else 0, np.float32), np.zeros((1, t.row_bytes(n)), np.uint8)
    encoder(t, whose or "mainline")(np.zeros((1, n), np.float32), weights, out, 0, 1)


def _decode(t: TensorType) -> None:
    from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows

    n = _values(t)
    dequantize_rows(t, np.zeros((1, t.row_bytes(n)), np.uint8), np.zeros((1, n), np.float32))


def _validate(t: TensorType) -> None:
    from quantkit.kernels.cpu.encode.check import validate_rows

    validate_rows(t, np.zeros((1, t.row_bytes(_values(t))), np.uint8))


def _first_nonfinite() -> None:
    from quantkit.kernels.cpu.encode.check import first_nonfinite_row

    first_nonfinite_row(np.zeros((1, 256), np.float32), 0, 1)


def _measure() -> None:
    from quantkit.kernels.cpu.encode.error import error_sums

    x = np.zeros((1, 256), np.float32)
    error_sums(x, x, np.zeros(0, np.float32))
