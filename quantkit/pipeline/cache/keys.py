"""What decides the bytes of encoded rows, as digests; equal digests mean equal bytes.

An entry is found by how it was encoded (types, encoder and its code, shape, importance) and by what (the rows that its
jobs read). A source's rows are digested while they are read; their *identity*, which tells them from others without
reading them, is by what digests are remembered.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

from quantkit.formats.cache_entry import Pieces
from quantkit.formats.remote import URL
from quantkit.kernels.formats import FORMATS, encoder_for
from quantkit.kernels.interleave import base_of, repacks
from quantkit.kernels.tensor_scale import decoded_as
from quantkit.pipeline.jobs import piece_rows
from quantkit.pipeline.planned import PlannedTensor, RowSlice
from quantkit.pipeline.source import Source
from quantkit.types import TensorType

_PACKAGE = Path(__file__).parent.parent.parent
_IMPORT = re.compile(r"^\s*(?:from\s+(quantkit[\w.]*)\s+import\s+(\([^)]*\)|[^\n]*)|import\s+(quantkit[\w.]*))", re.M)


def is_encoded(part: RowSlice, target: TensorType) -> bool:
    """Tell whether a part is kept: its rows are neither copied, nor repacked, nor merely rounded."""
    source = part.source.type
    if part.inputs is not None and part.inputs.digest() is None:  # what decides its rows is found out in the run
        return False
    return source is not target and target.block > 1 and not repacks(source, target)


def pieces_of(part: RowSlice, target: TensorType) -> Pieces:
    """Return how the encoded rows of a part lie in an entry."""
    return Pieces(part.matrices, part.rows, target.row_bytes(part.values), piece_rows(part, target))


def importance_digest(part: RowSlice) -> str | None:
    """Return the digest of the importance a part is encoded with, or None without."""
    weights = None if part.found is None else part.found.weights
    return None if weights is None else hashlib.sha256(weights.tobytes()).hexdigest()


def how_digest(part: RowSlice, tensor: PlannedTensor, importance: str | None) -> str:
    """Return the digest of everything that decides encoded rows, but those they are made of."""
    pieces = pieces_of(part, tensor.type)
    whose = encoder_for(tensor.type, tensor.encoder or None)
    how = {
        "from": part.source.type.name,
        "to": tensor.type.name,
        "encoder": whose,
        "code": encoder_digest(part.source.type, tensor.type, part.inputs is not None),
        "values": part.values,
        "shape": [pieces.matrices, pieces.rows, pieces.row_bytes, pieces.piece],
        "importance": None if tensor.type.imatrix == "ignored" else importance,
        "feedback": None if part.inputs is None else part.inputs.digest(),
    }
    return _digest(how)


@cache
def encoder_digest(source: TensorType, target: TensorType, fed: bool = False) -> str:
    """Return a digest of the code that decodes rows of ``source`` and encodes them as ``target``, and of its compiler.

    ``fed``: with feedback.

    That is all the modules of kernels that the families' code reaches, also to measure the error, and the tables.
    """
    have, want = (FORMATS.get(base_of(t).name) for t in (decoded_as(source), target))
    roots = ["cpu.encode", "cpu.encode.interleaved", "cpu.encode.error", "cpu.unpack.dequantize", "tensor_scale"]
    roots += [f"cpu.unpack.{each.family}" for each in (have, want) if each is not None]
    roots += [f"cpu.encode.{want.family}"] if want is not None else []
    roots += ["cpu.feedback.rounding"] * fed
    paths = {_PACKAGE / "pipeline/jobs.py", _PACKAGE / "pipeline/work.py", *(_PACKAGE / "kernels").glob("*.npz")}
    paths |= {path for root in roots for path in _reached(f"quantkit.kernels.{root}")}
    return _digest([version("numba"), version("llvmlite"), *_files_digests(paths)])


def _reached(root: str) -> set[Path]:
    """Return the files of kernels, and of types, that a module imports, or those do, at its head or anywhere in it."""
    left, found = [root], dict[str, Path]()
    while left:
        name = left.pop()
        path = None if name in found else _path_of(_PACKAGE.parent, name)
        if path is not None:
            found[name] = path
            left += _imports(path)
    return set(found.values())


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Return the names that may be modules of kernels among what a file imports."""

    def names() -> Iterator[str]:
        for package, listed, plain in _IMPORT.findall(path.read_text(encoding="utf-8")):
            yield package or plain
            yield from (f"{package}.{name}" for name in re.findall(r"\w+", listed))

    return tuple(name for name in names() if name.startswith("quantkit.kernels.") or name == "quantkit.types")


@cache
def _path_of(folder: Path, module: str) -> Path | None:
    base = folder.joinpath(*module.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


@cache
def package_digest() -> str:
    """Return a digest of all of quantkit's code: it decides the rows of tensors that are made while they are read."""
    return _digest([version("numpy"), *_files_digests(set(_PACKAGE.rglob("*.py")))])


def _files_digests(paths: set[Path]) -> list[tuple[str, str]]:
    return [(path.relative_to(_PACKAGE).as_posix(), _file_digest(path)) for path in sorted(paths)]


@cache
def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def identity(source: Source, fingerprint: str, part: RowSlice, target: TensorType) -> str | None:
    """Return what tells the rows of a part from any others, without reading them; None if nothing can.

    Paths do not count, but files do: by inode, size and time of change; objects in stores by what pins them.
    ``fingerprint`` is the source's.
    """
    place = source.place(part.source)
    files = [place[0]] if place is not None else list(source.inputs)
    try:
        found = [_identity_of(path) for path in files]
    except OSError:  # not on this machine
        return None
    if None in found:
        return None
    what = {
        "source": fingerprint,
        "files": found,
        "made": None if place is not None else package_digest(),
        "tensor": [part.source.name, part.source.type.name, part.source.nbytes, None if place is None else place[1]],
        "rows": [part.values, part.matrices, part.rows, part.source_rows, part.source_row, piece_rows(part, target)],
    }
    return _digest(what)


def _identity_of(path: Path) -> tuple[object, ...] | None:
    """Return what tells a file from others, and from what it was before; None of an object that nothing pins."""
    if isinstance(path, URL):
        # A tag may be no more than a date, so here the address counts, too; that of a signed one without its signature.
        return (str(path), path.facts.size, path.facts.tag) if path.facts.tag else None
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
