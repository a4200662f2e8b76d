"""Digests of everything that determines the bytes of encoded rows; equal digests mean equal bytes.

The key of an entry is the digest of its encoding (types, encoder and its code, shape, importance) and that of its
source rows. Source rows are digested while being read; known digests are looked up by *identity*, without reading.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

from quantkit.formats.cache_entry import Pieces
from quantkit.formats.files import stamp_of
from quantkit.formats.remote import URL
from quantkit.kernels.formats import FORMATS
from quantkit.kernels.interleave import base_of
from quantkit.kernels.tensor_scale import decoded_as
from quantkit.pipeline.row_slices import PlannedPart
from quantkit.pipeline.source import Source
from quantkit.types import TensorType

_PACKAGE = Path(__file__).parent.parent.parent
_IMPORT = re.compile(r"^\s*(?:from\s+(quantkit[\w.]*)\s+import\s+(\([^)]*\)|[^\n]*)|import\s+(quantkit[\w.]*))", re.M)


def is_cached(part: PlannedPart) -> bool:
    """Return whether the cache may hold a part's rows."""
    if part.inputs is not None and part.inputs.digest() is None:  # its inputs are known only during the run
        return False
    return part.encoding.is_cached


def pieces_of(part: PlannedPart) -> Pieces:
    """Return the layout of a part's encoded rows in an entry."""
    encoding = part.encoding
    return Pieces(part.matrices, part.rows, encoding.target.row_bytes(part.values), encoding.piece)


def importance_digest(part: PlannedPart) -> str | None:
    """Return the digest of the importance a part is encoded with, or None without."""
    weights = None if part.importance is None else part.importance.weights
    return None if weights is None else hashlib.sha256(weights.tobytes()).hexdigest()


def encoding_digest(part: PlannedPart, importance: str | None) -> str:
    """Return the digest of everything that determines encoded rows except the source rows."""
    pieces, encoding = pieces_of(part), part.encoding
    settings = {
        "from": encoding.source.name,
        "to": encoding.target.name,
        "encoder": encoding.encoder,
        "code": encoder_digest(encoding.source, encoding.target, part.inputs is not None),
        "values": part.values,
        "shape": [pieces.matrices, pieces.rows, pieces.row_bytes, pieces.piece],
        "importance": importance if encoding.is_weighted else None,
        "feedback": None if part.inputs is None else part.inputs.digest(),
    }
    if encoding.keeps_grid:
        settings["grid"] = True
    if encoding.custom is not None:
        settings["custom"] = f"{encoding.custom}"
    return _digest(settings)


@cache
def encoder_digest(source: TensorType, target: TensorType, feedback: bool = False) -> str:
    """Return a digest of the code that decodes rows of ``source`` and encodes them as ``target``, and of its compiler.

    ``feedback``: with error feedback.

    That is all the modules of kernels that the families' code reaches, also to measure the error, and the tables.
    """
    have, want = (FORMATS.get(base_of(t).name) for t in (decoded_as(source), target))
    roots = ["cpu.encode", "cpu.encode.interleaved", "cpu.encode.check", "cpu.unpack.dequantize", "tensor_scale"]
    roots += [f"cpu.unpack.{fmt.family}" for fmt in (have, want) if fmt is not None]
    roots += [f"cpu.encode.{want.family}"] if want is not None else []
    roots += ["cpu.feedback.rounding"] * feedback + ["cpu.encode.lattice_rows"]
    paths = {_PACKAGE / f"pipeline/{name}.py" for name in ("encoding", "jobs", "scaled_source", "worker")}
    paths |= set((_PACKAGE / "kernels").glob("*.npz"))
    paths |= {path for root in roots for path in _imported_modules(f"quantkit.kernels.{root}")}
    return _digest([version("numba"), version("llvmlite"), *_files_digests(paths)])


def _imported_modules(root: str) -> set[Path]:
    """Return the files of kernels and types that a module imports, directly or not, at its head or anywhere in it."""
    pending, modules = [root], dict[str, Path]()
    while pending:
        name = pending.pop()
        path = None if name in modules else _path_of(_PACKAGE.parent, name)
        if path is not None:
            modules[name] = path
            pending += _imports(path)
    return set(modules.values())


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Return the kernel modules that a file may import, by name."""

    def names() -> Iterator[str]:
        for package, members, plain in _IMPORT.findall(path.read_text(encoding="utf-8")):
            yield package or plain
            yield from (f"{package}.{name}" for name in re.findall(r"\w+", members))

    return tuple(name for name in names() if name.startswith("quantkit.kernels.") or name == "quantkit.types")


@cache
def _path_of(folder: Path, module: str) -> Path | None:
    base = folder.joinpath(*module.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


@cache
def package_digest() -> str:
    """Return a digest of all of quantkit's code, which determines the rows of tensors computed while reading."""
    return _digest([version("numpy"), *_files_digests(set(_PACKAGE.rglob("*.py")))])


def _files_digests(paths: set[Path]) -> list[tuple[str, str]]:
    return [(path.relative_to(_PACKAGE).as_posix(), _file_digest(path)) for path in sorted(paths)]


@cache
def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def identity(source: Source, fingerprint: str, part: PlannedPart) -> str | None:
    """Return a digest that identifies the source rows of a part without reading them; None if impossible.

    Files are identified by inode, size and times of change, not by path; objects in stores by their tag.
    ``fingerprint`` is the source's.
    """
    place = source.place(part.source)
    files = [place[0]] if place is not None else list(source.inputs)
    try:
        stamps = [_identity_of(path) for path in files]
    except OSError:  # not on this machine
        return None
    if None in stamps:
        return None
    facts = {
        "source": fingerprint,
        "files": stamps,
        "made": None if place is not None else package_digest(),
        "tensor": [part.source.name, part.source.type.name, part.source.nbytes, None if place is None else place[1]],
        "rows": [part.values, part.matrices, part.rows, part.source_rows, part.source_row, part.encoding.piece],
    }
    return _digest(facts)


def _identity_of(path: Path) -> list[int | str] | None:
    """Return the stamp of one version of a file; None for an object in a store without a version."""
    if isinstance(path, URL):
        # A tag may be just a date, so the address is also used, without the signature if it is signed.
        return [str(path), *stamp_of(path)] if path.facts.tag else None
    return stamp_of(path)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
