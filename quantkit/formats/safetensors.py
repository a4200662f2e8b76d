"""safetensors: the header of a file, and the files of a checkpoint with their index.

::

    u64 length of the header   JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__"
    tensor data; offsets count from here

Nothing in a header is believed: lengths against the file, bytes against shape and dtype, no two tensors in the same
bytes, and against ``model.safetensors.index.json`` every tensor in the file that the index names, none missing and
none more. Any violation is one FormatError with file and tensor.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.remote import URL
from quantkit.formats.remote.reader import Growing

#: Bits of an element, by the names of safetensors 0.8.
DTYPES = {
    **{"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16},
    **{"I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64},
    **{"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
#: The longest header that the safetensors library reads, and the longest index that is read here.
MAX_HEADER, MAX_INDEX = 100_000_000, 1 << 30
_MAX_DIMS, _MAX_DIM = 16, 1 << 48
#: Headers that are asked for at the same time.
_TOGETHER = 16


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
        """Pickle the whole path: another process has a directory of its own."""
        return StoredTensor, (self.name, self.dtype, self.shape, self.path.absolute(), self.offset, self.nbytes)

    @property
    def n_values(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, sorted by name. Raises FormatError for anything that is not as it must be."""
    size, header = _header(path)
    begin = 8 + len(header)
    entries = _json(path, header, "the header")
    entries.pop("__metadata__", None)
    tensors = [_tensor(path, name, entry, begin, size) for name, entry in sorted(entries.items())]
    for a, b in pairwise(sorted(tensors, key=lambda t: (t.offset, t.nbytes))):
        if a.offset + a.nbytes > b.offset and b.nbytes:
            raise FormatError(f"{path}: tensors {short(a.name)} and {short(b.name)} lie in the same bytes")
    return {t.name: t for t in tensors}


def _header(path: Path) -> tuple[int, bytes]:
    """Return the size of a file and the bytes of its header."""
    try:
        if isinstance(path, URL):
            beginning = Growing(path)
            size, head = beginning.size, beginning.upto(8)
            n = _header_bytes(path, size, head[:8])
            return size, beginning.upto(8 + n)[8 : 8 + n]
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise FormatError(f"{path}: not a regular file")
            size = found.st_size
            n = _header_bytes(path, size, file.read(8))
            header = file.read(n)
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror or e}") from None
    if len(header) < n:
        raise FormatError(f"{path}: ends within its header")
    return size, header


def _header_bytes(path: Path, size: int, head: bytes) -> int:
    """Return how long a header is, by the first 8 bytes of its file."""
    if head.startswith(b"version "):
        raise FormatError(f"{path}: a Git LFS pointer: fetch the file itself (git lfs pull)")
    n = int.from_bytes(head, "little")
    if len(head) < 8 or n > size - 8:
        raise FormatError(f"{path}: a header of {n} bytes, but the file has {size} (truncated?)")
    if n > MAX_HEADER:
        raise FormatError(f"{path}: a header of {n} bytes; at most {MAX_HEADER} are read")
    return n


def _json(path: Path, data: bytes, what: str) -> dict[str, Any]:
    """Return a JSON object whose keys are all different."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise FormatError(f"{path}: {short(twice)} appears twice in {what}")
        return found

    try:
        found = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{path}: {what} is not JSON: {e}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{path}: {what} is no JSON object")
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(path: Path, name: str, entry: object, begin: int, size: int) -> StoredTensor:
    where = f"{path}: tensor {short(name)}"
    if not isinstance(entry, dict):
        raise FormatError(f"{where}: its entry is {short(entry)}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{where} has the dtype {short(dtype)}, which is none")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(_is_count(n) and n <= _MAX_DIM for n in shape):
        raise FormatError(f"{where} has the shape {short(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise FormatError(f"{where} has the offsets {short(offsets)}")
    first, last = offsets
    bits = math.prod(shape) * DTYPES[dtype]
    if last < first or 8 * (last - first) != bits:
        need = bits / 8
        raise FormatError(f"{where}: {dtype} {short(shape)} takes {need:.15g} bytes, its offsets hold {last - first}")
    if begin + last > size:
        raise FormatError(f"{where} needs bytes up to {begin + last}, but the file has {size} (truncated?)")
    return StoredTensor(name, dtype, tuple(shape), path, begin + first, last - first)


def layout_safetensors(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[int], int]:
    """Lay out a file of tensors, each a name, a dtype and a shape, outermost first.

    Data is in order of width, then of name, as the safetensors library has it, without gaps.

    Returns:
        the beginning of the file, the offset of each tensor from there on as given, and the bytes of the file.
    """
    order = sorted(range(len(tensors)), key=lambda i: (-DTYPES[tensors[i][1]], tensors[i][0]))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, at = [0] * len(tensors), 0
    for i in order:
        name, dtype, shape = tensors[i]
        nbytes = math.prod(shape) * DTYPES[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        offsets[i], at = at, at + nbytes
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    begin = len(header) + 8
    return len(header).to_bytes(8, "little") + header, [begin + offset for offset in offsets], begin + at


def read_checkpoint(folder: Path, prefix: str = "model") -> list[dict[str, StoredTensor]]:
    """Return the tensors of each file of a checkpoint, in the order convert_hf_to_gguf.py (b11434) reads them.

    The files are those of PREFIX.safetensors.index.json, or else all named PREFIX*.safetensors, by name. Raises
    FormatError if a file is missing, or index and files disagree.
    """
    index = folder / f"{prefix}.safetensors.index.json"
    if not _is_there(index):
        files = _read_headers(_files(folder, prefix))
        _check_once(files)
        return files
    try:
        if index.stat().st_size > MAX_INDEX:
            raise FormatError(f"{index}: more than {MAX_INDEX} bytes")
        data = index.read_bytes()
    except OSError as e:
        raise FormatError(f"{index}: cannot be read: {e.strerror or e}") from None
    weight_map = _json(index, data, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index}: it has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_name(file):
            raise FormatError(f"{index}: tensor {short(name)} is in {short(file)}, which is no file beside the index")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        first = next(name for name, file in weight_map.items() if file == missing[0])
        raise FormatError(
            f"{index}: {len(missing)} of {len(names)} files are missing: {', '.join(missing[:3])}"
            f"{', ..' if len(missing) > 3 else ''} (tensor {short(first)}): download them"
        )
    files = _read_headers([folder / name for name in names])
    _check_once(files)
    found = {name: t.path.name for tensors in files for name, t in tensors.items()}
    for name, file in weight_map.items():
        if name not in found:
            raise FormatError(f"{folder / file}: tensor {short(name)} is missing, which {index.name} has there")
        if found[name] != file:
            raise FormatError(f"{folder / found[name]}: tensor {short(name)} is here; {index.name} has it in {file}")
    for name, file in found.items():
        if name not in weight_map:
            raise FormatError(f"{folder / file}: tensor {short(name)} is not in {index.name}")
    return files


def _is_there(path: Path) -> bool:
    """Tell whether there is anything of a name: a link that leads nowhere is an error, and not nothing."""
    try:
        return path.exists() or path.is_symlink()
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror or e}") from None


def _read_headers(paths: Sequence[Path]) -> list[dict[str, StoredTensor]]:
    """Return the tensors of each file; those of a store are asked for together, for each answer takes its time."""
    if not any(isinstance(path, URL) for path in paths):
        return [read_header(path) for path in paths]
    with ThreadPoolExecutor(_TOGETHER) as pool:
        return list(pool.map(read_header, paths))


def _is_name(file: str) -> bool:
    """Tell whether a text may be the name of a file in a directory."""
    try:
        return 0 < len(os.fsencode(file)) < 256 and file not in (".", "..") and not {"/", "\0"} & set(file)
    except UnicodeEncodeError:
        return False


def _files(folder: Path, prefix: str) -> list[Path]:
    try:
        if isinstance(folder, URL):
            # A store that cannot list has the usual name, if any.
            listed = [f"{prefix}.safetensors"] if folder.listing is None else list(folder.listing)
        else:
            listed = os.listdir(folder)
    except OSError as e:
        raise FormatError(f"{folder}: cannot be read: {e.strerror or e}") from None
    names = sorted(n for n in listed if n.startswith(prefix) and n.endswith(".safetensors"))
    if not names:
        other = ", ".join(sorted(n for n in listed if n.endswith((".bin", ".pth", ".pt", ".gguf")))[:3])
        raise FormatError(
            f"{folder}: there are no {prefix}*.safetensors"
            + (f", only {other}: convert them to safetensors first" if other else "")
        )
    return [folder / name for name in names]


def _check_once(files: Sequence[dict[str, StoredTensor]]) -> None:
    """Refuse a tensor that two files have: which one is meant?"""
    seen: dict[str, Path] = {}
    for tensors in files:
        for name, tensor in tensors.items():
            if name in seen:
                raise FormatError(f"{tensor.path}: tensor {short(name)} is also in {seen[name].name}")
            seen[name] = tensor.path
