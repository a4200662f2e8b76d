"""safetensors: the header of a file, and the files of a checkpoint with their index.

::

    u64 length of the header   JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__"
    tensor data; offsets count from here

Every header is validated: lengths against the file, bytes against shape and dtype, no overlapping tensors, and against
``model.safetensors.index.json`` every tensor in the file named by the index, none missing and none extra. Any violation
is a FormatError with file and tensor.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError, os_error_code
from quantkit.formats.files import hold, open_input
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_whole
from quantkit.formats.remote import URL
from quantkit.formats.remote.reader import Prefix

#: Bits of an element, by the names of safetensors 0.8.
DTYPES = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "C64": 64,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
#: Maximum length of a header in the safetensors library, and of an index here.
MAX_HEADER, MAX_INDEX = 100_000_000, 1 << 26
_MAX_DIMS, _MAX_DIM = 16, 1 << 48
#: The name of one file of several, and the maximum number of files.
_SHARD, _MAX_SHARDS = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors"), 10000
#: Headers that are requested in parallel.
_MAX_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file. ``shape`` is outermost first, ``offset`` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """Pickle the absolute path, because another process may have another working directory."""
        return StoredTensor, (self.name, self.dtype, self.shape, self.path.absolute(), self.offset, self.nbytes)

    @property
    def n_values(self) -> int:
        return math.prod(self.shape)


def _missing_shards(files: Iterable[Path]) -> list[str]:
    """Return the missing shards that the names of others imply: NAME-00002-of-00002.safetensors."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for path in files:
        if match := _SHARD.fullmatch(path.name):
            numbers.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    return [
        f"{stem}-{number:05}-of-{count:05}.safetensors"
        for (stem, count), present in sorted(numbers.items())
        for number in range(1, min(count, _MAX_SHARDS) + 1)
        if number not in present
    ]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, sorted by name. Raises FormatError for any invalid header.

    Their path is a held file: see ``files``.
    """
    try:
        path = hold(path)
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror or e}", os_error_code(e)) from None
    size, header = _header(path)
    begin = 8 + len(header)
    entries = _json(path, header, "the header")
    entries.pop("__metadata__", None)
    tensors = [_tensor(path, name, entry, begin, size) for name, entry in sorted(entries.items())]
    for a, b in pairwise(sorted(tensors, key=lambda t: (t.offset, t.nbytes))):
        if a.offset + a.nbytes > b.offset and b.nbytes:
            raise FormatError(f"{path}: tensors {short(a.name)} and {short(b.name)} overlap", "QK-E110")
    return {t.name: t for t in tensors}


def _header(path: Path) -> tuple[int, bytes]:
    """Return the size of a file and the bytes of its header."""
    try:
        if isinstance(path, URL):
            beginning = Prefix(path)
            size, head = beginning.size, beginning.read_to(8)
            n = _header_bytes(path, size, head[:8])
            return size, beginning.read_to(8 + n)[8 : 8 + n]
        with open_input(path) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(f"{path}: not a regular file", "QK-E120")
            size = status.st_size
            n = _header_bytes(path, size, os.pread(fd, 8, 0))
            header = os.pread(fd, n, 8)
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror or e}", os_error_code(e)) from None
    if len(header) < n:
        raise FormatError(f"{path}: ends within its header", "QK-E103")
    return size, header


def _header_bytes(path: Path, size: int, head: bytes) -> int:
    """Return the length of a header from the first 8 bytes of its file."""
    if head.startswith(b"version "):
        raise FormatError(f"{path}: a Git LFS pointer: fetch the file itself (git lfs pull)", "QK-E101")
    n = int.from_bytes(head, "little")
    if len(head) < 8 or n > size - 8:
        raise FormatError(f"{path}: a header of {n} bytes, but the file has {size} (truncated?)", "QK-E103")
    if n > MAX_HEADER:
        raise FormatError(f"{path}: a header of {n} bytes; at most {MAX_HEADER} are supported", "QK-E110")
    return n


def _json(path: Path, data: bytes, kind: str) -> dict[str, Any]:
    """Return a JSON object; duplicate keys are refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            names = [name for name, _ in pairs]
            duplicate = next(name for name in names if names.count(name) > 1)
            raise FormatError(f"{path}: {short(duplicate)} occurs twice in {kind}", "QK-E110")
        return entries

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{path}: {kind} is not JSON: {e}", "QK-E111") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: {kind} is not a JSON object", "QK-E111")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(path: Path, name: str, entry: object, begin: int, size: int) -> StoredTensor:
    where = f"{path}: tensor {short(name)}"
    if not isinstance(entry, dict):
        raise FormatError(f"{where}: its entry is {short(entry)}", "QK-E110")
    dtype = entry.get("dtype")
    shape = entry.get("shape")
    offsets = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{where} has the unknown dtype {short(dtype)}", "QK-E110")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(_is_count(n) and n <= _MAX_DIM for n in shape):
        raise FormatError(f"{where} has the shape {short(shape)}", "QK-E110")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise FormatError(f"{where} has the offsets {short(offsets)}", "QK-E110")
    first, last = offsets
    bits = math.prod(shape) * DTYPES[dtype]
    if last < first or 8 * (last - first) != bits:
        need = bits / 8
        raise FormatError(
            f"{where}: {dtype} {short(shape)} needs {need:.15g} bytes, but its offsets span {last - first}", "QK-E110"
        )
    if begin + last > size:
        raise FormatError(f"{where} needs bytes up to {begin + last}, but the file has {size} (truncated?)", "QK-E103")
    return StoredTensor(name, dtype, tuple(shape), path, begin + first, last - first)


def layout_safetensors(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[int], int]:
    """Lay out a file of tensors, each a name, a dtype and a shape, outermost first.

    Data is in order of width, then of name, as the safetensors library has it, without gaps.

    Returns:
        the beginning of the file, the offset of each tensor from there on as given, and the bytes of the file.
    """
    order = sorted(range(len(tensors)), key=lambda i: (-DTYPES[tensors[i][1]], tensors[i][0]))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, position = [0] * len(tensors), 0
    for i in order:
        name, dtype, shape = tensors[i]
        nbytes = math.prod(shape) * DTYPES[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        offsets[i], position = position, position + nbytes
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    begin = len(header) + 8
    return len(header).to_bytes(8, "little") + header, [begin + offset for offset in offsets], begin + position


def read_checkpoint(
    folder: Path, prefix: str = "model", *, allow_incomplete: bool = False
) -> list[dict[str, StoredTensor]]:
    """Return the tensors of each file of a checkpoint, in the order convert_hf_to_gguf.py (b11434) reads them.

    The files are those of PREFIX.safetensors.index.json, or else all named PREFIX*.safetensors, by name; of these some
    may be missing if ``allow_incomplete``. Raises FormatError if a file is missing, or index and files disagree.
    """
    index = folder / f"{prefix}.safetensors.index.json"
    if not _is_present(index):
        paths = _files(folder, prefix)
        if (missing_shards := _missing_shards(paths)) and not allow_incomplete:
            message = _missing(missing_shards, len(missing_shards) + len(paths))
            raise FormatError(
                f"{folder}: {message}: download them, or use --allow-incomplete to convert the rest", "QK-E104"
            )
        files = _read_headers(paths)
        _check_once(files)
        return files
    weight_map = _json(index, read_whole(index, MAX_INDEX), "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index}: has no weight_map", "QK-E110")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_name(file):
            raise FormatError(
                f"{index}: tensor {short(name)} is in {short(file)}, which is not in the folder of the index", "QK-E110"
            )
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and (not allow_incomplete or missing == names):
        first = next(name for name, file in weight_map.items() if file == missing[0])
        raise FormatError(f"{index}: {_missing(missing, len(names))} (tensor {short(first)}): download them", "QK-E104")
    weight_map = {name: file for name, file in weight_map.items() if file not in missing}
    files = _read_headers([folder / name for name in names if name not in missing])
    _check_once(files)
    locations = {name: t.path.name for tensors in files for name, t in tensors.items()}
    for name, file in weight_map.items():
        if name not in locations:
            raise FormatError(
                f"{folder / file}: tensor {short(name)} is missing, although {index.name} lists it", "QK-E105"
            )
        if locations[name] != file:
            raise FormatError(
                f"{folder / locations[name]}: has tensor {short(name)}, but {index.name} lists it in {file}", "QK-E104"
            )
    for name, file in locations.items():
        if name not in weight_map:
            raise FormatError(f"{folder / file}: tensor {short(name)} is not in {index.name}", "QK-E107")
    return files


def _missing(names: Sequence[str], count: int) -> str:
    """Return which of ``count`` files are missing, the first three by name."""
    return f"{len(names)} of {count} files are missing: {', '.join(names[:3])}{', ..' if len(names) > 3 else ''}"


def _is_present(path: Path) -> bool:
    """Return whether a name exists, dangling links included, so that reading one is an error."""
    try:
        return path.exists() or path.is_symlink()
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror or e}", os_error_code(e)) from None


def _read_headers(paths: Sequence[Path]) -> list[dict[str, StoredTensor]]:
    """Return the tensors of each file; requests to a store run in parallel to hide latency."""
    if not any(isinstance(path, URL) for path in paths):
        return [read_header(path) for path in paths]
    with ThreadPoolExecutor(_MAX_REQUESTS) as pool:
        return list(pool.map(read_header, paths))


def _is_name(file: str) -> bool:
    """Return whether a text can be the name of a file in a directory."""
    try:
        return 0 < len(os.fsencode(file)) < 256 and file not in (".", "..") and not {"/", "\0"} & set(file)
    except UnicodeEncodeError:
        return False


def _files(folder: Path, prefix: str) -> list[Path]:
    try:
        if isinstance(folder, URL):
            # In a store that cannot list files, only the usual name is tried.
            file_names = [f"{prefix}.safetensors"] if folder.listing is None else list(folder.listing)
        else:
            file_names = os.listdir(folder)
    except OSError as e:
        raise FormatError(f"{folder}: cannot be read: {e.strerror or e}", os_error_code(e)) from None
    names = sorted(n for n in file_names if n.startswith(prefix) and n.endswith(".safetensors"))
    if not names:
        foreign = ", ".join(sorted(n for n in file_names if n.endswith((".bin", ".pth", ".pt", ".gguf")))[:3])
        raise FormatError(
            f"{folder}: no {prefix}*.safetensors"
            + (f", only {foreign}: convert them to safetensors first" if foreign else ""),
            "QK-E101",
        )
    return [folder / name for name in names]


def _check_once(files: Sequence[dict[str, StoredTensor]]) -> None:
    """Refuse a tensor that two files contain."""
    paths: dict[str, Path] = {}
    for tensors in files:
        for name, tensor in tensors.items():
            if name in paths:
                raise FormatError(f"{tensor.path}: tensor {short(name)} is also in {paths[name].name}", "QK-E107")
            paths[name] = tensor.path
