"""A GGUF file whose tensors have other names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sparse_gguf import write_hollow

from quantkit.formats.gguf import open_gguf


def rename_tensors(path: Path, out: Path, rename: Callable[[str], str]) -> Path:
    """Write a file with the bytes of another's tensors under the names that ``rename`` returns."""
    data, stored = {}, path.read_bytes()
    with open_gguf(path) as file:
        infos = [(rename(x.name), x.shape, x.type) for x in file.tensors.values()]
        for x in file.tensors.values():
            data[rename(x.name)] = stored[x.offset : x.offset + x.nbytes]
        return write_hollow(out, file.fields.values(), infos, data)
