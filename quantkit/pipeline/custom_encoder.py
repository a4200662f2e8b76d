"""Encoders from Python: ``QuantizeOptions.encoders``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.types import TensorType, type_by_name

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

#: Called with rows, float32 [rows, n], and their importance, float32 [n] or None; returns the rows' bytes: uint8
#: [rows, row_bytes], or as many bytes. Called by several threads, with some rows of a tensor at a time.
RowEncoder = Callable[[F32, F32 | None], Any]


@dataclass(frozen=True, slots=True)
class CustomEncoder:
    """A user's encoder of a type."""

    type: TensorType
    function: RowEncoder

    @property
    def key(self) -> str:
        """The text that changes whenever the function's bytes may: its attribute ``cache_key``; "" without."""
        return str(getattr(self.function, "cache_key", ""))

    def __str__(self) -> str:
        """Return the name for provenance: module and function, and the key."""
        kind = self.function if hasattr(self.function, "__qualname__") else type(self.function)
        name = f"{kind.__module__}.{kind.__qualname__}"
        return f"{name} ({self.key})" if self.key else name

    def encode(self, rows: F32, weights: F32, out: U8, tensor: str) -> None:
        """Fill ``out`` with the encoded rows; ``weights``: empty without importance.

        Raises QuantkitError for a function that fails, FormatError for another size of its result.
        """
        try:
            result = self.function(rows, weights if weights.size else None)
        except QuantkitError:
            raise
        except Exception as e:
            raise QuantkitError(
                f"tensor {tensor}: the encoder of {self.type}, {self}, failed: {type(e).__name__}: {e}", "QK-E400"
            ) from e
        out[...] = self._check(result, out.shape, tensor)

    def _check(self, result: Any, shape: tuple[int, ...], tensor: str) -> U8:
        is_buffer = isinstance(result, bytes | bytearray | memoryview)
        data = np.frombuffer(result, np.uint8) if is_buffer else np.asarray(result)
        if data.dtype != np.uint8 or data.size != shape[0] * shape[1] or (data.ndim > 1 and data.shape != shape):
            raise FormatError(
                f"tensor {tensor}: the encoder of {self.type}, {self}, returned {data.dtype} {list(data.shape)}; "
                f"expected for {shape[0]} rows: uint8 {list(shape)}",
                "QK-E210",
            )
        return data.reshape(shape)


def custom_encoders(functions: Mapping[str, RowEncoder] | None) -> dict[str, CustomEncoder]:
    """Return the encoders by the names of their types. Raises TypeNotSupported, or RecipeError for values that are not
    functions.

    A type of whole tensors without blocks (F16, BF16) may have one, too.
    """
    encoders = {}
    for name, function in (functions or {}).items():
        t = type_by_name(str(name))
        if not callable(function):
            raise RecipeError(f"encoders: the encoder of {t} is {function!r}, not a function", "QK-E210")
        encoders[t.name] = CustomEncoder(t, function)
    return encoders
