"""The measured cost of re-quantization: quantized tensors lose accuracy a second time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.errors import QuantkitError
from quantkit.kernels import dequantize, quantize
from quantkit.pipeline.encoding import Action, RowEncoding
from quantkit.pipeline.quality import QUALITY, weighted_error
from quantkit.pipeline.row_slices import PlannedPart, PlannedTensor
from quantkit.pipeline.source import Source
from quantkit.types import TensorType

#: Number of tensors measured per pair of types, and of rows per tensor, a multiple of all interleaves.
_TENSORS, _ROWS = 3, 64


class _Sums(NamedTuple):
    """Importance-weighted sums over a sample: squared errors, and squares."""

    error: float
    square: float


def requantize_notes(source: Source, tensors: Sequence[PlannedTensor]) -> list[str]:
    """Return a note for each pair of source and target types of requantized tensors: added and existing error."""
    pairs: dict[tuple[TensorType, TensorType], list[PlannedPart]] = {}
    for part in (part for tensor in tensors for part in tensor.parts):
        if _is_requantized(part.encoding):
            pairs.setdefault((part.encoding.source, part.encoding.target), []).append(part)
    return [_note(source, *types, parts) for types, parts in pairs.items()]


def _is_requantized(encoding: RowEncoding) -> bool:
    source, target = encoding.source, encoding.target
    is_encoded = encoding.action is Action.ENCODE and source is not target and not encoding.missing
    is_lossy = source.is_quantized and target.name not in ("F32", "F16", "BF16")
    return is_encoded and is_lossy and not encoding.has_tensor_scale


def _note(file: Source, source: TensorType, t: TensorType, parts: Sequence[PlannedPart]) -> str:
    step = max(1, (len(parts) - 1) // (_TENSORS - 1))
    sums = [s for part in parts[::step][:_TENSORS] for s in _measure(file, part)]
    error, square = sum(s.error for s in sums), sum(s.square for s in sums)
    error_text = f"an error of {100 * np.sqrt(error / square):.3g} % (measured)" if square else "an error"
    tensors = "1 tensor" if len(parts) == 1 else f"{len(parts)} tensors"
    note = f"re-quantizing {tensors} from {source} to {t} adds {error_text} to the loss of {source}"
    source_quality, typical = QUALITY.get(source.name), _typical(parts[0].encoding)
    if source_quality and typical:
        note += f", typically {source_quality.error:.3g} %; {t} of the original weights loses {typical:.3g} %"
    return note


def _typical(encoding: RowEncoding) -> float | None:
    """Return the error of an encoder's type on the sample of ``quality.py``, in percent."""
    t = encoding.target
    if encoding.is_unusual:
        return weighted_error(t, encoding.encoder)
    return QUALITY[t.name].error if t.name in QUALITY else None


def _measure(file: Source, part: PlannedPart) -> Iterator[_Sums]:
    """Yield the sums over rows in the middle of a tensor; nothing if they cannot be encoded, which the run reports."""
    n, t = part.values, part.encoding.target
    matrix = part.matrices // 2
    rows = min(_ROWS, part.source_rows)
    first = (part.source_rows - rows) // 2 // 16 * 16
    data = np.empty((rows, part.source.type.row_bytes(n)), np.uint8)
    offset = (matrix * part.source_rows + first) * data.shape[1]
    weights = None if part.importance is None else part.importance.weights
    importance = None if weights is None else weights[min(matrix, len(weights) - 1)]
    try:
        file.read(part.source, data.reshape(-1), offset)
        x = dequantize(data, part.source.type, n)
        y = dequantize(quantize(x, t, importance, part.encoding.encoder), t, n)
    except QuantkitError:
        return
    w = np.ones(n) if importance is None else importance.astype(np.float64)
    yield _Sums(*(_weighted_square(w, v) for v in (y.astype(np.float64) - x, x)))


def _weighted_square(w: npt.NDArray[np.float64], v: npt.NDArray[Any]) -> float:
    return float((w * v.astype(np.float64) ** 2).sum())
