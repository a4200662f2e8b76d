"""The measured cost of re-quantization: quantized tensors lose accuracy a second time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.errors import QuantkitError
from quantkit.kernels import dequantize, quantize
from quantkit.kernels.formats import encoder_for, has_decoder, has_encoder
from quantkit.kernels.interleave import repacks
from quantkit.pipeline.plan import OutputTensor
from quantkit.pipeline.quality import QUALITY, weighted_error
from quantkit.pipeline.row_slices import RowSlice
from quantkit.pipeline.source import Source
from quantkit.types import TensorType

#: Tensors of each pair of types that are measured, and rows of each, a multiple of all interleaves.
_TENSORS, _ROWS = 3, 64


class _Sums(NamedTuple):
    """Importance-weighted sums over a sample: squared errors, and squares."""

    error: float
    square: float


def requantize_notes(source: Source, tensors: Sequence[OutputTensor]) -> list[str]:
    """Return a note for each pair of types that tensors are re-quantized from and to: the error it adds, and has."""
    pairs: dict[tuple[TensorType, TensorType], list[tuple[RowSlice, str]]] = {}
    for tensor in tensors:
        for part in tensor.parts:
            if _is_requantized(part.source.type, tensor.type):
                pairs.setdefault((part.source.type, tensor.type), []).append((part, tensor.encoder))
    return [_note(source, *types, parts) for types, parts in pairs.items()]


def _is_requantized(source: TensorType, t: TensorType) -> bool:
    lossy = source.is_quantized and t is not source and t.name not in ("F32", "F16", "BF16") and not repacks(source, t)
    return lossy and has_decoder(source) and has_encoder(t)


def _note(file: Source, source: TensorType, t: TensorType, parts: Sequence[tuple[RowSlice, str]]) -> str:
    step = max(1, (len(parts) - 1) // (_TENSORS - 1))
    sums = [s for part, encoder in parts[::step][:_TENSORS] for s in _measure(file, part, t, encoder)]
    error, square = sum(s.error for s in sums), sum(s.square for s in sums)
    error_text = f"an error of {100 * np.sqrt(error / square):.3g} % (measured)" if square else "an error"
    tensors = "1 tensor" if len(parts) == 1 else f"{len(parts)} tensors"
    note = f"re-quantizing {tensors} from {source} to {t} adds {error_text} to what {source} has lost before"
    source_quality, typical = QUALITY.get(source.name), _typical(t, parts[0][1])
    if source_quality and typical:
        note += f", typically {source_quality.error:.3g} %; {t} of the original weights loses {typical:.3g} %"
    return note


def _typical(t: TensorType, search: str) -> float | None:
    """Return the error of a type on the sample of ``quality.py`` with a search, in percent."""
    if search and search != encoder_for(t):
        return weighted_error(t, search)
    return QUALITY[t.name].error if t.name in QUALITY else None


def _measure(file: Source, part: RowSlice, t: TensorType, encoder: str) -> Iterator[_Sums]:
    """Yield the sums over rows in the middle of a tensor; nothing if they cannot be encoded, which the run reports."""
    n, matrix = part.values, part.matrices // 2
    rows = min(_ROWS, part.source_rows)
    first = (part.source_rows - rows) // 2 // 16 * 16
    data = np.empty((rows, part.source.type.row_bytes(n)), np.uint8)
    offset = (matrix * part.source_rows + first) * data.shape[1]
    weights = None if part.importance is None else part.importance.weights
    importance = None if weights is None else weights[min(matrix, len(weights) - 1)]
    try:
        file.read(part.source, data.reshape(-1), offset)
        x = dequantize(data, part.source.type, n)
        y = dequantize(quantize(x, t, importance, encoder or None), t, n)
    except QuantkitError:
        return
    w = np.ones(n) if importance is None else importance.astype(np.float64)
    yield _Sums(*(_weighted(w, v) for v in (y.astype(np.float64) - x, x)))


def _weighted(w: npt.NDArray[np.float64], v: npt.NDArray[Any]) -> float:
    return float((w * v.astype(np.float64) ** 2).sum())
