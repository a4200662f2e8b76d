"""Open a model: a single file, or all shards of a split model as one."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.files import check_unchanged
from quantkit.formats.gguf.byte_order import check_swap, swap, unit_bytes
from quantkit.formats.gguf.fields import Field, ValueType
from quantkit.formats.gguf.reader import Shard, TensorInfo, map_file, read_shard
from quantkit.formats.gguf.rules import PADDING_KEY, short
from quantkit.formats.ranges import U8, both_ends, read_range
from quantkit.formats.remote import URL, locate

#: Shard mappings kept open at once; each holds a file descriptor, and there may be thousands of shards.
_OPEN_MAPS = 64
#: Bytes hashed at each end of every tensor for the fingerprint of a model.
_SAMPLE = 4096


class GGUFFile:
    """An open model: metadata, tensors and their bytes, over all shards. Created by ``open_gguf``.

    Attributes:
        paths: all shards in order; one path for a file that is not split.
        version: 2 or 3, of the first shard.
        alignment: the first shard's.
        fields: the first shard's metadata in file order, split.* included.
        room: bytes that the first shard's header has for edits.
        tensors: by name, in the order of shards and, within one, of their infos.
        big_endian: whether any shard is; its numbers are reversed while being read.

    Closing is safe while views and fields are alive: each keeps its mapping.
    """

    def __init__(self, shards: Sequence[Shard], header_only: bool) -> None:
        self.paths: tuple[Path, ...] = tuple(s.path for s in shards)
        self.version: int = shards[0].version
        self.alignment: int = shards[0].alignment
        fields = shards[0].fields
        self.fields: dict[str, Field] = {key: field for key, field in fields.items() if key != PADDING_KEY}
        self.room: int = len(fields[PADDING_KEY].raw) - 8 if PADDING_KEY in fields else 0
        self.tensors: dict[str, TensorInfo] = {t.name: t for s in shards for t in s.tensors}
        self._swapped: tuple[bool, ...] = tuple(s.big_endian for s in shards)
        self.big_endian: bool = any(self._swapped)
        self._header_only = header_only
        self._grows = False
        self._closed = False
        self._maps: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the header with absolute paths; the receiving process maps the files again."""
        return {**self.__dict__, "paths": tuple(path.absolute() for path in self.paths), "_maps": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _maps=OrderedDict(), _lock=threading.Lock())

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key, or ``default`` if there is none."""
        field = self.fields.get(key)
        return default if field is None else field.value

    def data(self, tensor: TensorInfo | str) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes: a read-only 1-D uint8 view of the mapped file, of a big-endian one a copy.

        Safe to call from threads.

        Raises:
            KeyError: no tensor of this name.
            FormatError: the file was opened ``header_only``, or has changed since.
            TypeNotSupported: a big-endian file, and a type without such a form.
            ValueError: the file is closed.
        """
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        if self._header_only:
            raise FormatError(
                f"{self.paths[info.shard]}: opened for its header only, so its tensor data cannot be read", "QK-E103"
            )
        if not info.nbytes:
            return np.empty(0, np.uint8)
        view = self._view(info.shard)
        if not self._grows:
            check_unchanged(self.paths[info.shard : info.shard + 1])
        if info.offset + info.nbytes > len(view):
            raise FormatError(
                f"{self.paths[info.shard]}: the file has shrunk to {len(view)} bytes; {info.name} is missing", "QK-E109"
            )
        stored = np.frombuffer(view, np.uint8, info.nbytes, info.offset)
        return self._little_endian(info, stored.copy()) if self._swapped[info.shard] else stored

    def _little_endian(self, info: TensorInfo, data: U8) -> U8:
        """Return the bytes of whole blocks of a big-endian shard with their numbers reversed, read-only."""
        check_swap(info.type, f"{self.paths[info.shard]}: tensor {short(info.name)}")
        swap(data, info.type)
        data.flags.writeable = False
        return data

    def check(self) -> None:
        """Raise FormatError if a file has changed since it was opened: memory maps would show the new bytes."""
        if not self._grows:
            check_unchanged(self.paths)

    def expect_writes(self) -> None:
        """Accept changes of the files: this process writes them."""
        self._grows = True

    def forget(self, tensor: TensorInfo | str) -> None:
        """Release a tensor's pages from this process's memory; views stay valid and read the file again.

        Mapped pages count as resident once touched: call this after each tensor when streaming through a model.
        """
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        with self._lock:
            view = self._maps.get(info.shard)
        if view is None or not info.nbytes or not hasattr(mmap, "MADV_DONTNEED"):
            return
        mapping: mmap.mmap = view.obj  # type: ignore[assignment]
        start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, start, info.offset + info.nbytes - start)

    @property
    def inputs(self) -> tuple[Path, ...]:
        """The shards: see ``pipeline.source``."""
        return tuple(self.paths)

    def read(self, tensor: TensorInfo, out: U8, offset: int, readahead: int = 0) -> None:
        """Fill ``out`` from byte ``offset`` of a tensor on, with pread; ask the kernel for ``readahead`` more bytes.

        Also works when closed. Raises FormatError when the file ends before, OSError when it cannot be read.
        """
        begin = tensor.offset
        within = (begin, begin + tensor.nbytes)
        if not self._swapped[tensor.shard]:
            read_range(self.paths[tensor.shard], out, begin + offset, readahead, within)
            return
        unit = unit_bytes(tensor.type)
        first = offset // unit * unit
        blocks = np.empty(-(-(offset + out.size - first) // unit) * unit, np.uint8)
        read_range(self.paths[tensor.shard], blocks, begin + first, readahead, within)
        out[...] = self._little_endian(tensor, blocks)[offset - first :][: out.size]

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        """Return the file and the offset of a tensor's bytes, None if they are big-endian there."""
        return None if self._swapped[tensor.shard] else (self.paths[tensor.shard], tensor.offset)

    def stored_tensor(self, tensor: TensorInfo) -> TensorInfo:
        """Return the tensor unchanged."""
        return tensor

    def where(self, tensor: TensorInfo) -> str:
        """Return the file of a tensor, for messages."""
        return str(self.paths[tensor.shard])

    def fingerprint(self) -> str:
        """Return a SHA-256 that identifies the model, over all headers and both ends of every tensor.

        Hashing all of a 500 GB model would take longer than quantizing it; the first and last 4 KiB of every tensor are
        enough to distinguish trained models. For objects of a store, their entity tags are used instead.
        """
        digest = hashlib.sha256()
        for field in self.fields.values():
            digest.update(field.encode())
        for tensor in self.tensors.values():
            digest.update(f"{tensor.name} {tensor.shape} {tensor.type.id} {tensor.nbytes}".encode())
            for ends in both_ends(self.paths[tensor.shard], [(tensor.offset, tensor.nbytes)], _SAMPLE):
                digest.update(ends)
        return digest.hexdigest()

    def _view(self, shard: int) -> memoryview:
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.paths[shard]} is closed")
            if shard not in self._maps:
                self._maps[shard] = map_file(self.paths[shard])
                if len(self._maps) > _OPEN_MAPS:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(shard)
            return self._maps[shard]

    def close(self) -> None:
        """Close the files; existing views stay valid."""
        with self._lock:
            self._closed = True
            self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str], *, header_only: bool = False) -> GGUFFile:
    """Open a GGUF file, or, given any shard of a split one, the whole model.

    Args:
        path: the file; shards are searched beside it under the names of ``split_path``.
        header_only: accept files whose tensor data is missing or truncated; ``data`` then raises.

    Raises:
        FormatError: a file is damaged; the message names file and byte.
    """
    return GGUFFile(open_shards(path, header_only=header_only), header_only)


def open_shards(path: str | os.PathLike[str], *, header_only: bool) -> list[Shard]:
    """Return the headers of all shards of a model; arguments and errors as for ``open_gguf``."""
    location = locate(path)
    shard = read_shard(location, 0, header_only)
    count = _split_int(shard, "split.count", 0)
    if count <= 1:
        return [shard]
    no = _split_int(shard, "split.no")
    paths = _shard_paths(location, no, count)
    shards = [read_shard(paths[0], 0, header_only)]
    shards += [_without_map(read_shard(p, i, header_only)) for i, p in enumerate(paths) if i]
    _check_shards(shards, count)
    return shards


def open_first_shard(path: str | os.PathLike[str]) -> tuple[GGUFFile, int]:
    """Open a model like ``open_gguf``, given any shard; if others than the first do not lie beside it, the first alone.

    Returns the file and the number of missing shards.
    """
    location = locate(path)
    split = parse_split_path(location)
    if split is None or isinstance(location, URL):
        return open_gguf(path), 0
    prefix, _, count = split
    first = split_path(prefix, 0, count)
    missing = sum(not split_path(prefix, i, count).exists() for i in range(1, count))
    if not missing or not first.exists():
        return open_gguf(path), 0
    shard = read_shard(first, 0, header_only=False)
    if (_split_int(shard, "split.no", 0), _split_int(shard, "split.count", 1)) != (0, count):
        return open_gguf(path), 0
    return GGUFFile([shard], header_only=False), missing


def open_model(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a model like ``open_gguf``; also raises FormatError for a file without tensors."""
    file = open_gguf(path)
    if not file.tensors:
        raise FormatError(
            f"{file.paths[0]}: has no tensors, so this is not a model: convert or download it again", "QK-E105"
        )
    return file


def _without_map(shard: Shard) -> Shard:
    """Copy only the split keys of a later shard, so that thousands of shards do not each keep a mapping."""
    fields = {key: replace(f, raw=bytes(f.raw)) for key, f in shard.fields.items() if key.startswith("split.")}
    return replace(shard, fields=fields)


def _split_int(shard: Shard, key: str, default: int | None = None) -> int:
    field = shard.fields.get(key)
    if field is None and default is not None:
        return default
    if field is None:
        raise FormatError(f"{shard.path}: a shard without the key {key}", "QK-E104")
    if not isinstance(field.value, int) or isinstance(field.value, bool) or not 0 <= field.value < 1 << 31:
        raise FormatError(f"{shard.path}: {key} is {short(field.value)} ({field.describe()}), not a count", "QK-E123")
    return field.value


def _shard_paths(location: Path, no: int, count: int) -> list[Path]:
    """Return the paths of all shards of the one at ``location``; each must exist."""
    split = parse_split_path(location)
    if split is None or split[1:] != (no, count):
        expected = split_path("PREFIX", no, count).name
        raise FormatError(f"{location}: this is shard {no + 1} of {count} and must be named {expected}", "QK-E104")
    paths = [location if i == no else location.with_name(split_path(split[0], i, count).name) for i in range(count)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        suffix = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise FormatError(
            f"{location}: {len(missing)} of {count} shards are missing: {', '.join(missing[:3])}{suffix}",
            "QK-E104",
        )
    return paths


def _check_shards(shards: Sequence[Shard], count: int) -> None:
    """Refuse shards that contradict each other."""
    owner: dict[str, Path] = {}
    for i, shard in enumerate(shards):
        no, its_count = _split_int(shard, "split.no"), _split_int(shard, "split.count", count)
        if (no, its_count) != (i, count):
            raise FormatError(
                f"{shard.path}: shard {no + 1} of {its_count} by its metadata, but shard {i + 1} of {count} "
                f"by its name",
                "QK-E104",
            )
        for tensor in shard.tensors:
            owner_path = owner.setdefault(tensor.name, shard.path)
            if owner_path is not shard.path:
                raise FormatError(f"{shard.path}: tensor {short(tensor.name)} is also in {owner_path.name}", "QK-E107")
    for shard in shards:
        total = _split_int(shard, "split.tensors.count", len(owner))
        if total != len(owner):
            raise FormatError(
                f"{shard.path}: split.tensors.count is {total}, but the shards contain {len(owner)}", "QK-E104"
            )


def split_path(prefix: str | os.PathLike[str], no: int, count: int) -> Path:
    """Return the path of shard ``no`` (from 0) of ``count``, as llama.cpp's llama_split_path names it."""
    return locate(f"{os.fspath(prefix)}-{no + 1:05d}-of-{count:05d}.gguf")


def parse_split_path(path: str | os.PathLike[str]) -> tuple[str, int, int] | None:
    """Return prefix, number (from 0) and count of a shard's path, None for another path."""
    match = re.fullmatch(r"(.+)-(\d{5,10})-of-(\d{5,10})\.gguf", os.fspath(path), re.DOTALL)
    return (match[1], int(match[2]) - 1, int(match[3])) if match else None


#: The keys of shards.
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


def split_fields(no: int, count: int, n_tensors: int) -> list[Field]:
    """Return the three keys of shard ``no`` (from 0), typed and ordered as llama-quantize --keep-split does."""
    return [
        Field.of("split.no", no, ValueType.UINT16),
        Field.of("split.count", count, ValueType.UINT16),
        Field.of("split.tensors.count", n_tensors, ValueType.INT32),
    ]
