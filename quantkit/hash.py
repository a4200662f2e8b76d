"""Digests of models: of each tensor, of all data, of the metadata, of files: ``quantkit hash``.

Digests of data and metadata do not depend on the order of tensors or keys, nor on shards and padding: a model has the
same ones split and joined.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quantkit.arguments import checked
from quantkit.cpus import available_cpus
from quantkit.errors import FormatError, RecipeError, ResourceError
from quantkit.extras import HASHES, missing_packages
from quantkit.formats.files import check_unchanged
from quantkit.formats.gguf import SPLIT_KEYS, GGUFFile, TensorInfo, open_gguf
from quantkit.formats.gguf.rules import n_dims
from quantkit.formats.outputs import Output, atomic_write, check_apart, read_text, resolve_links
from quantkit.formats.ranges import read_range
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.progress import ByteCounter, ProgressCallback

ALGORITHMS = ("sha256", "xxh3")
#: Bytes that are read at once.
_CHUNK = 4 << 20
#: A line of sha256sum: digest, then a space and the mode, then the name.
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


class Digest(Protocol):
    """A digest of hashlib or xxhash."""

    def update(self, data: Any, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes."""


@dataclass(frozen=True)
class ModelHash(HtmlTable):
    """Digests of a model, as hexadecimal text.

    Attributes:
        algorithm: sha256 or xxh3 (XXH3 of 128 bits).
        tensors: of each tensor's bytes, in the order of the file.
        data: of the names, types, shapes and digests of all tensors.
        metadata: of all keys and values but split.*.
        model: of both.
    """

    paths: tuple[Path, ...]
    algorithm: str
    tensors: Mapping[str, str]
    data: str
    metadata: str
    model: str

    def as_table(self) -> Table:
        """Return the digests of the whole and of each tensor."""
        rows = [("model", self.model), ("data", self.data), ("metadata", self.metadata)]
        return table_of("of, digest", [*rows, *self.tensors.items()], f"{self.paths[0]}: {self.algorithm}")


@checked
def hash(  # noqa: A001 - the word of the command line
    source: str | Path,
    *,
    algorithm: str = "sha256",
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> ModelHash:
    """Return the digests of a model.

    Args:
        source: a GGUF file, or any shard of a split one.
        algorithm: sha256, or xxh3, which is several times faster and no protection against intent.
        threads: None for all available CPUs.
        progress: called with the bytes read.

    Raises:
        FormatError: a damaged file, or one that changes meanwhile. ResourceError: xxhash is not installed.
    """
    create = _digest(algorithm)
    with open_gguf(source) as model:
        tensors = list(model.tensors.values())
        steps = ByteCounter(progress, sum(tensor.nbytes for tensor in tensors))

        def digest_of(i: int) -> str:
            tensor = tensors[i]
            return _tensor_digest(create(), model, tensor, steps.add)

        with ThreadPoolExecutor(threads or available_cpus()) as pool:
            largest_first = sorted(range(len(tensors)), key=lambda i: -tensors[i].nbytes)
            digests = dict(zip(largest_first, pool.map(digest_of, largest_first), strict=True))
        check_unchanged(model.paths)
        lines = sorted(
            f"{t.name}\t{t.type.name}\t{[*t.shape, 1][: n_dims(t.shape)]}\t{digests[i]}\n"
            for i, t in enumerate(tensors)
        )
        data = _bytes_digest(create(), [line.encode("utf-8", "surrogateescape") for line in lines])
        metadata = _bytes_digest(create(), _keys(model))
        digest = _bytes_digest(create(), [f"{data}\n{metadata}\n".encode()])
        by_name = {tensor.name: digests[i] for i, tensor in enumerate(tensors)}
        return ModelHash(tuple(map(Path, model.paths)), algorithm, by_name, data, metadata, digest)


@checked
def write_sums(
    sources: Sequence[str | Path],
    output: str | Path,
    *,
    overwrite: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, str]:
    """Write the SHA-256 of files as sha256sum does, and return them by name.

    Args:
        sources: files; of a shard, all shards count. They lie beside ``output`` or below its folder.
        output: the file, SHA256SUMS by custom.
        overwrite: replace an existing output.
        threads, progress: as for ``hash``.

    Raises:
        FormatError: a file cannot be read. RecipeError: a file lies elsewhere. ResourceError: the output exists.
    """
    target = resolve_links(output)
    paths = list(dict.fromkeys(path for source in sources for path in _files_of(Path(source))))
    check_apart([target], paths)
    names = [_name_beside(path, target) for path in paths]
    with Output(target, overwrite=overwrite):
        digests = file_digests(paths, threads, progress)
        with atomic_write(target) as part:
            lines = [f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True)]
            part.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
    return dict(zip(names, digests, strict=True))


@dataclass(frozen=True, slots=True)
class Check:
    """The check of a file: its digest, and that of the list."""

    path: Path
    expected: str
    digest: str

    @property
    def is_equal(self) -> bool:
        """Whether the file is the one of the list."""
        return self.digest == self.expected


@checked
def check_sums(
    sums: str | Path,
    sources: Sequence[str | Path] = (),
    *,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> tuple[Check, ...]:
    """Compare files with the list that sha256sum or ``write_sums`` wrote.

    Args:
        sums: the list; names are relative to its folder.
        sources: the only files to check; of a shard, all shards count.
        threads, progress: as for ``hash``.

    Raises:
        FormatError: the list is damaged, a file is missing or is not in the list.
    """
    digests_by_path = read_sums(Path(sums))
    paths = [path for source in sources for path in _files_of(Path(source))] or list(digests_by_path)
    expected = {path.absolute(): digest for path, digest in digests_by_path.items()}
    for path in paths:
        if path.absolute() not in expected:
            raise FormatError(f"{sums}: has no digest of {path}", "QK-E206")
    digests = file_digests(paths, threads, progress)
    return tuple(Check(path, expected[path.absolute()], digest) for path, digest in zip(paths, digests, strict=True))


def read_sums(path: Path) -> dict[Path, str]:
    """Return the digests of a list of sha256sum by file. Raises FormatError."""
    digests: dict[Path, str] = {}
    text = read_text(path).decode("utf-8", "surrogateescape")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise FormatError(f"{path}: line {number} is not a SHA-256 and a name", "QK-E111")
        digests[path.parent / match[2]] = match[1]
    if not digests:
        raise FormatError(f"{path}: contains no digest", "QK-E111")
    return digests


def _digest(algorithm: str) -> Callable[[], Digest]:
    if algorithm not in ALGORITHMS:
        raise RecipeError(f"algorithm {algorithm}: choose one of {', '.join(ALGORITHMS)}", "QK-E203")
    if algorithm == "sha256":
        return hashlib.sha256
    if HASHES.missing():
        raise missing_packages(HASHES)
    import xxhash

    create: Callable[[], Digest] = xxhash.xxh3_128
    return create


def _tensor_digest(digest: Digest, model: GGUFFile, tensor: TensorInfo, count: Callable[[int], None]) -> str:
    """Return the digest of a tensor's little-endian bytes."""
    buffer = np.empty(min(_CHUNK, tensor.nbytes), np.uint8)
    for position in range(0, tensor.nbytes, _CHUNK):
        n = min(_CHUNK, tensor.nbytes - position)
        model.read(tensor, buffer[:n], position)
        digest.update(buffer[:n].data)
        count(n)
    return digest.hexdigest()


def _range_digest(digest: Digest, path: Path, offset: int, nbytes: int, count: Callable[[int], None]) -> str:
    buffer = np.empty(min(_CHUNK, nbytes), np.uint8)
    for position in range(0, nbytes, _CHUNK):
        n = min(_CHUNK, nbytes - position)
        read_range(path, buffer[:n], offset + position, within=(offset, offset + nbytes))
        digest.update(buffer[:n].data)
        count(n)
    return digest.hexdigest()


def _bytes_digest(digest: Digest, parts: Iterable[bytes]) -> str:
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _keys(model: GGUFFile) -> Iterator[bytes]:
    for key in sorted(model.fields.keys() - set(SPLIT_KEYS)):
        yield model.fields[key].encode()


def _files_of(path: Path) -> list[Path]:
    """Return a file, or all shards of the model that it belongs to."""
    if path.suffix != ".gguf":
        return [path]
    with open_gguf(path, header_only=True) as model:
        return [Path(p) for p in model.paths]


def _name_beside(path: Path, target: Path) -> str:
    try:
        name = str(path.absolute().relative_to(target.absolute().parent))
    except ValueError:
        raise RecipeError(f"{path}: does not lie below the folder of {target}", "QK-E203") from None
    if "\n" in name:
        raise RecipeError(f"{path!r}: a name with a line break has no place in {target.name}", "QK-E203")
    return name


def file_digests(
    paths: Sequence[Path], threads: int | None = None, progress: ProgressCallback | None = None
) -> list[str]:
    """Return the SHA-256 of files, several at a time. Raises ResourceError."""
    try:
        sizes = [path.stat().st_size for path in paths]
        steps = ByteCounter(progress, sum(sizes))
        with ThreadPoolExecutor(threads or available_cpus()) as pool:
            jobs = [
                pool.submit(_range_digest, hashlib.sha256(), path, 0, n, steps.add)
                for path, n in zip(paths, sizes, strict=True)
            ]
            return [job.result() for job in jobs]
    except OSError as e:
        raise ResourceError(f"{e.filename}: cannot be read: {e.strerror or e}", "QK-E401") from None
