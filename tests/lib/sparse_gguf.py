"""GGUF files whose large tensors are holes: zeros without time to write or disk space, for tests of headers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.formats.gguf import Field, Layout, layout_gguf
from quantkit.types import TensorType

Info = tuple[str, tuple[int, ...], TensorType]


def write_hollow(path: Path, fields: Iterable[Field], infos: Sequence[Info], data: Mapping[str, Any]) -> Path:
    """Write a file with these tensors; those in ``data`` have their bytes, all others are zeros."""
    layout = layout_gguf(fields, infos)
    write_layout(path, layout)
    with path.open("r+b") as file:
        for (name, _, _), offset in zip(infos, layout.offsets, strict=True):
            if name in data:
                file.seek(offset)
                file.write(data[name])
    return path


def write_layout(path: Path, layout: Layout) -> Path:
    """Write a file of this layout, all tensors zeros."""
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.nbytes)
    return path
