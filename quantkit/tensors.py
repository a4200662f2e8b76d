"""GGUF files for programs: ``open_gguf`` reads tensors as values, ``write_gguf`` writes a file from memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.arguments import checked
from quantkit.errors import FormatError
from quantkit.formats import gguf
from quantkit.formats.gguf import Field, TensorInfo
from quantkit.formats.outputs import Output, atomic_write
from quantkit.kernels.tensor_scale import TAIL, decoded_as, with_row_scales
from quantkit.types import TensorType, type_by_name

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class GGUFFile(gguf.GGUFFile):
    """An open model, of one file or all shards of a split one: metadata, tensors, their bytes and their values."""

    def values(self, name: str, rows: Any = ...) -> F32:
        """Return the values of a tensor, decoded: float32 in numpy's shape, the reverse of ggml's ``ne``.

        A matrix is [rows, columns], merged experts are [experts, rows, columns]; blocks are parts of a row.

        Args:
            name: a tensor's name.
            rows: an index of numpy into all axes but the last; only these rows are read and decoded, so that
                ``values(name, rows)`` is ``values(name)[rows]`` without the memory of the whole: ``slice(0, 64)``,
                ``7`` (an expert), ``(7, slice(0, 64))`` (some rows of an expert), ``[3, 5, 8]``.

        Returns:
            A new array, bit for bit what ggml's dequantize_row functions give.

        Raises:
            FormatError: no tensor of this name, or the file was opened for its header only.
            TypeNotSupported: a type without a decoder, as that of integers.
            IndexError: rows that the tensor does not have.
        """
        info = self._info(name)
        shape = info.shape[::-1] or (1,)
        numbers = np.arange(math.prod(shape[:-1]), dtype=np.int64).reshape(shape[:-1])[rows]
        values = self._decode(info, np.asarray(numbers).reshape(-1), shape[-1])
        return values.reshape(*np.shape(numbers), shape[-1])

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise FormatError(f"{self.paths[0]}: has no tensor {name!r}", "QK-E206")
        return self.tensors[name]

    def _decode(self, info: TensorInfo, numbers: I64, n: int) -> F32:
        """Return rows by their numbers, float32 [rows, n]; of interleaved ones whole groups are decoded."""
        from quantkit.kernels import dequantize

        if not n or not numbers.size:
            return np.zeros((numbers.size, n), np.float32)
        t, data = decoded_as(info.type), self.data(info)
        size = t.interleave
        groups, places = np.unique(numbers // size, return_inverse=True)
        tail = b"" if t is info.type else data[-TAIL:].tobytes()
        blocks = data[: data.size - len(tail)].reshape(math.prod(info.shape[1:]), -1)
        selected_blocks = blocks[(groups[:, None] * size + np.arange(size)).reshape(-1)]
        if tail:
            selected_blocks = with_row_scales(selected_blocks, float(np.frombuffer(tail, "<f4", 1)[0]))
        values: F32 = dequantize(selected_blocks, t, n)[places.reshape(-1) * size + numbers % size]
        return values


@checked
def open_gguf(path: str | Path, *, header_only: bool = False) -> GGUFFile:
    """Open a GGUF file, or, given any shard of a split one, the whole model.

    Args:
        path: the file; shards are looked for beside it.
        header_only: accept files whose tensor data is missing or cut off; ``data`` and ``values`` then raise.

    Returns:
        The open file, a context manager. ``fields`` and ``get(key)`` are its metadata, ``tensors`` its tensor infos by
        name, ``data(name)`` a tensor's bytes, ``values(name)`` its values.

    Raises FormatError: the file is damaged; the message names file and byte.
    """
    return GGUFFile(gguf.open_shards(path, header_only=header_only), header_only)


@checked
def write_gguf(
    path: str | os.PathLike[str],
    fields: Iterable[Field],
    tensors: Iterable[tuple[str, tuple[int, ...], TensorType | str, Any]],
    *,
    version: int = 3,
    overwrite: bool = False,
) -> None:
    """Write a whole GGUF file from memory; it appears under its name once it is complete.

    Args:
        path: the file to write.
        fields: the metadata, each of ``Field.of(key, value, ValueType.STRING)`` or of an open file's ``fields``.
        tensors: name, shape in ggml's order (``ne``, innermost first: numpy's reversed), type or its name, and data:
            bytes or a contiguous array of them.
        version: 2 or 3.
        overwrite: replace a file that exists; one that is open keeps its content.

    Raises:
        FormatError: names or shapes that no file may have, or the size of the data is not that of the tensor.
        TypeNotSupported: an unknown type, or one that cannot hold a tensor of this shape.
        ResourceError: the file exists, is being written by another run, or cannot be written.
    """
    with Output(os.fspath(path), overwrite=overwrite) as output, atomic_write(output.path) as part:
        entries = (
            (name, shape, type_by_name(kind) if isinstance(kind, str) else kind, data)
            for name, shape, kind, data in tensors
        )
        gguf.write_gguf(part, fields, entries, version=version)
