"""Importance matrices: mean squared activations of each input column of each weight.

For a weight W this is the sum of x^2 per input column x over all calibration tokens; a tensor of experts has one
row per expert, each with its own token count. There are two formats, and one function reads both.

GGUF (llama.cpp), all F32, n_mat = number of counts (1 for dense weights, also 3-D MLA ones; n_expert for experts)::

    general.type = "imatrix", imatrix.datasets [str], imatrix.chunk_count u32, imatrix.chunk_size u32
    W.in_sum2 [nval / n_mat, n_mat]   raw sums of x^2            W.counts [1, n_mat]   tokens seen
    W.in_sum  [nval / n_mat, n_mat]   raw sums of x, optional    W.stats  [12]         statistics, ignored here
    W.saliency [n_mat]                quantkit's own, of down projections of experts: see ``ImatrixEntry``

.dat (older; the only format that ik_llama.cpp reads), int32 and float32, little endian::

    n_entries, then per entry: name_len, name, ncall, nval, float[nval]     value = sum / count * ncall
    last_chunk, dataset_len, dataset                                        optional trailer

An encoder gets sums / counts in float32, each operation rounded once: the bytes of a quantized file depend on it.
An expert without tokens gets ones. llama.cpp and ik_llama.cpp divide a .dat the same way.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, os_error_code
from quantkit.formats.files import hold
from quantkit.formats.gguf import Field, GGUFFile, TensorInfo, ValueType, open_gguf, write_gguf
from quantkit.formats.outputs import atomic_write
from quantkit.formats.remote import locate
from quantkit.mapping import map_descriptor
from quantkit.types import BY_NAME, TensorType

F32Array = npt.NDArray[np.float32]
Format = Literal["gguf", "dat"]

#: Assumed chunk size of a .dat, which does not record it: llama-imatrix's default context.
DEFAULT_CHUNK_SIZE = 512

#: ggml stores a tensor name in 64 bytes, the last one zero.
MAX_GGUF_NAME = 63

#: Smallest entry of a .dat: name_len, one byte of name, ncall, nval, one float.
_MIN_DAT_ENTRY = 17


def format_of(path: Path) -> Format:
    """Return the format for a file name: .dat, or else GGUF."""
    return "dat" if path.suffix.lower() == ".dat" else "gguf"


@dataclass(eq=False)
class ImatrixEntry:
    """The data of one weight, in the units of its file.

    Of a GGUF: ``sums`` [n_mat, n] raw sums of x^2, ``counts`` [n_mat] tokens. Of a .dat, which does not say where
    experts begin: ``sums`` [1, nval] means times ncall, ``counts`` [1] ncall. ``in_sum`` [n_mat, n] raw sums of x.
    """

    sums: F32Array
    counts: npt.NDArray[np.int64]
    in_sum: F32Array | None = None
    #: llama.cpp's statistics of the entry, copied unchanged; remove them when the sums change.
    stats: F32Array | None = None
    #: Of down projections of experts, [n_mat]: sums over tokens of the gate times the norm of the expert's output.
    saliency: F32Array | None = None


@dataclass(eq=False)
class Imatrix:
    """An importance matrix: entries by name, and the datasets and chunks of its calibration."""

    path: Path
    entries: dict[str, ImatrixEntry]
    datasets: list[str] = field(default_factory=list)
    chunk_count: int = 0
    #: Tokens per chunk; 0 for a .dat, which does not record it.
    chunk_size: int = 0
    format: Format = "gguf"
    n_layer_nextn: int = 0
    stats_schema: list[str] = field(default_factory=list)
    #: quantkit's own keys ("quantkit."): fill policy, calibration text. A .dat cannot store them.
    extra: dict[str, Field] = field(default_factory=dict)

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the file's bytes, hex."""
        with _open_file(self.path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def values(self, name: str) -> F32Array:
        """Return the importance that an encoder uses, of entry ``name``: a new float32 array, flat [nval].

        The arithmetic is that of llama.cpp b11434 tools/quantize/quantize.cpp load_imatrix (for a .dat also
        ik_llama.cpp's): one float32 division by the count as float32; ones where a GGUF has no tokens; a .dat with
        ncall 0 unchanged.
        """
        entry = self.entries[name]
        counts = entry.counts.astype(np.float32)[:, None]
        divisor = np.where(counts > 0, counts, np.float32(1))
        values = np.divide(entry.sums, divisor, dtype=np.float32)
        if self.format == "gguf":
            values[entry.counts == 0] = 1
        return values.reshape(-1)


# --- reading ---


def read_imatrix(path: str | os.PathLike[str], *, check: bool = True) -> Imatrix:
    """Read the importance matrix ``path``, GGUF or .dat, detected by the first four bytes.

    Sums are read-only views of the mapped file. Raises FormatError for everything that llama.cpp's loader rejects, and
    for what it does not check: truncated or trailing data, negative or non-finite counts, contradicting shapes,
    duplicate entries, sums of squares that are negative or not finite. ``check`` False takes any sums: for commands
    that show them, and for quantize, which can exclude entries and checks the rest (pipeline.importance).
    """
    path = locate(path)
    if path.exists() and not path.is_file():
        raise FormatError(f"{path}: the importance matrix must be a regular file", "QK-E120")
    with suppress(OSError):  # opening it reports the reason
        path = hold(path)
    with _open_file(path) as file:
        imatrix = _read_dat(path, file) if file.read(4) != b"GGUF" else _read_gguf(path)
    if check:
        for name, entry in imatrix.entries.items():
            check_squares(imatrix.path, name, entry.sums)
            if entry.in_sum is not None:
                _check_values(
                    imatrix.path, name, entry.in_sum, np.isfinite(entry.in_sum), "finite (sums of activations)"
                )
    return imatrix


def check_squares(path: Path, name: str, values: F32Array) -> None:
    """Raise FormatError for values of entry ``name`` that are NaN, infinite or negative."""
    _check_values(path, name, values, (values >= 0) & (values < np.inf), "a sum of squares")


def _check_values(path: Path, name: str, values: F32Array, good: npt.NDArray[np.bool_], requirement: str) -> None:
    if good.all():
        return
    bad = np.flatnonzero(~good)
    raise FormatError(
        f"{path}: entry {name!r}: value {bad[0]} of {values.size} is {values.flat[bad[0]]}, not {requirement} "
        f"({bad.size} such"
        f" values); calibrate again, or quantize without the entry: --exclude-weights {name}",
        "QK-E118",
    )


@contextmanager
def _open_file(path: Path) -> Iterator[Any]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise FormatError(
            f"{path}: the importance matrix cannot be opened: {error.strerror}", os_error_code(error)
        ) from error
    with file:
        yield file


class _Cursor:
    """Reads a .dat front to back; errors name byte and entry."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.offset = 0
        self.where = "the header"

    def fail(self, problem: str, offset: int | None = None) -> FormatError:
        offset = self.offset if offset is None else offset
        return FormatError(
            f"{self.path}: not a valid .dat importance matrix: {self.where}, byte {offset}: {problem}", "QK-E118"
        )

    def skip(self, n: int, item: str) -> int:
        """Skip ``n`` bytes and return their offset."""
        left = len(self.data) - self.offset
        if n > left:
            raise self.fail(f"{item} needs {n} bytes, but the file has {left} left")
        self.offset += n
        return self.offset - n

    def count(self, item: str, lowest: int = 0) -> int:
        """Read an int32 that must be at least ``lowest``."""
        start = self.skip(4, item)
        value: int = struct.unpack_from("<i", self.data, start)[0]
        if value < lowest:
            raise self.fail(f"{item} is {value}; it must be at least {lowest}", start)
        return value

    def text(self, n: int, item: str) -> bytes:
        """Read ``n`` bytes of text, truncated at the first NUL byte as in llama.cpp and ik_llama.cpp."""
        start = self.skip(n, item)
        return bytes(self.data[start : start + n]).split(b"\0", 1)[0]


def _read_dat(path: Path, file: Any) -> Imatrix:
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise FormatError(f"{path}: the importance matrix is empty", "QK-E118")
    cursor = _Cursor(path, map_descriptor(file.fileno(), size))
    n_entries = cursor.count("the number of entries", 1)
    if n_entries * _MIN_DAT_ENTRY > size - 4:
        raise cursor.fail(
            f"{n_entries} entries do not fit in a file of {size} bytes; it is probably neither GGUF nor .dat", 0
        )
    entries: dict[str, ImatrixEntry] = {}
    for i in range(n_entries):
        start = cursor.offset
        name, entry = _read_dat_entry(cursor, i)
        if name in entries:
            raise cursor.fail("the name occurs twice", start)
        entries[name] = entry
    datasets, chunk_count = _read_dat_trailer(cursor)
    return Imatrix(path, entries, datasets, chunk_count, 0, "dat")


def _read_dat_entry(cursor: _Cursor, i: int) -> tuple[str, ImatrixEntry]:
    cursor.where = f"entry {i + 1}"
    length = cursor.count("the length of its name", 1)
    name_start = cursor.offset
    try:
        name = cursor.text(length, "its name").decode()
    except UnicodeDecodeError as error:
        raise cursor.fail(f"its name is not UTF-8 ({error.reason})", name_start + error.start) from None
    if not name:
        raise cursor.fail("its name is empty", name_start)
    cursor.where = f"entry {i + 1} ({name!r})"
    ncall = cursor.count("ncall")
    nval = cursor.count("the number of values", 1)
    start = cursor.skip(4 * nval, f"its data ({nval} values)")
    sums = np.frombuffer(cursor.data, "<f4", nval, start).reshape(1, nval)
    return name, ImatrixEntry(sums, np.array([ncall], np.int64))


def _read_dat_trailer(cursor: _Cursor) -> tuple[list[str], int]:
    cursor.where = "the trailer"
    if cursor.offset == len(cursor.data):
        return [], 0
    chunk_count = cursor.count("the number of chunks")
    length = cursor.count("the length of the dataset's name")
    dataset = cursor.text(length, "the dataset's name").decode(errors="surrogateescape")
    if cursor.offset != len(cursor.data):
        raise cursor.fail(f"{len(cursor.data) - cursor.offset} bytes follow the end")
    return ([dataset] if dataset else []), chunk_count


def _read_gguf(path: Path) -> Imatrix:
    file = open_gguf(path)
    path = file.paths[0]
    imatrix = Imatrix(
        path,
        {},
        _strings(file, path, "imatrix.datasets", required=True),
        _uint32(file, path, "imatrix.chunk_count", required=True),
        _uint32(file, path, "imatrix.chunk_size", required=True),
        "gguf",
        _uint32(file, path, "imatrix.n_layer_nextn"),
        _strings(file, path, "imatrix.stats_schema"),
        {key: field for key, field in file.fields.items() if key.startswith("quantkit.")},
    )
    parts: dict[str, dict[str, TensorInfo]] = {}
    for tensor in file.tensors.values():
        name, _, kind = tensor.name.rpartition(".")
        if kind in ("in_sum2", "counts", "in_sum", "stats", "saliency"):
            parts.setdefault(name, {})[kind] = tensor
    for name in sorted(parts):
        # Statistics alone contain no importance; llama.cpp writes them for weights without activations.
        if parts[name].keys() != {"stats"}:
            imatrix.entries[name] = _gguf_entry(file, path, name, parts[name])
    if not imatrix.entries:
        raise FormatError(f"{path}: the importance matrix has no entries (no tensor *.in_sum2)", "QK-E118")
    return imatrix


def _find_field(file: GGUFFile, path: Path, key: str, *, required: bool) -> Field | None:
    field: Field | None = file.fields.get(key)
    if field is None and required:
        kind = file.get("general.type", "model")
        hint = "" if kind == "imatrix" else f" (general.type is {kind!r}: is it a model?)"
        raise FormatError(f"{path}: not an importance matrix: the key {key} is missing{hint}", "QK-E118")
    return field


def _strings(file: GGUFFile, path: Path, key: str, *, required: bool = False) -> list[str]:
    field = _find_field(file, path, key, required=required)
    if field is None:
        return []
    if field.type != ValueType.ARRAY or field.item_type != ValueType.STRING:
        raise FormatError(f"{path}: the key {key} must be an array of strings", "QK-E118")
    return list(field.value)


def _uint32(file: GGUFFile, path: Path, key: str, *, required: bool = False) -> int:
    field = _find_field(file, path, key, required=required)
    if field is None:
        return 0
    if field.type != ValueType.UINT32:
        raise FormatError(f"{path}: the key {key} must be a uint32, but is {field.type.name.lower()}", "QK-E118")
    return int(field.value)


def _gguf_entry(file: GGUFFile, path: Path, name: str, parts: dict[str, TensorInfo]) -> ImatrixEntry:
    def fail(problem: str, tensor: TensorInfo) -> FormatError:
        return FormatError(
            f"{path}: entry {name!r}, tensor {tensor.name!r} at byte {tensor.offset}: {problem}", "QK-E118"
        )

    anchor = next(iter(parts.values()))
    if not name:
        raise fail("the name of the entry is empty", anchor)
    for kind in ("in_sum2", "counts"):
        if kind not in parts:
            raise fail(f"its companion {name}.{kind} is missing", anchor)
    for tensor in parts.values():
        if tensor.type.name != "F32":
            raise fail(f"must be F32, but is {tensor.type}", tensor)
    flat = {kind: np.asarray(file.data(tensor)).view("<f4") for kind, tensor in parts.items()}
    counts = _gguf_counts(flat["counts"], lambda problem: fail(problem, parts["counts"]))
    nval, n_mat = flat["in_sum2"].size, counts.size
    rows = nval // max(1, parts["in_sum2"].shape[0])
    if nval == 0 or nval % n_mat or rows not in (1, n_mat) and n_mat != 1:
        shape = list(parts["in_sum2"].shape)
        raise fail(f"shape {shape} does not match the {n_mat} counts of {name}.counts", parts["in_sum2"])
    if "in_sum" in flat and flat["in_sum"].size != nval:
        raise fail(f"has {flat['in_sum'].size} values, but {name}.in_sum2 has {nval}", parts["in_sum"])
    saliency = flat.get("saliency")
    if saliency is not None and not (saliency.size == n_mat and ((saliency >= 0) & (saliency < np.inf)).all()):
        raise fail(f"must hold {n_mat} sums of norms", parts["saliency"])
    in_sum = flat["in_sum"].reshape(n_mat, -1) if "in_sum" in flat else None
    return ImatrixEntry(flat["in_sum2"].reshape(n_mat, -1), counts, in_sum, flat.get("stats"), saliency)


def _gguf_counts(raw: F32Array, fail: Callable[[str], FormatError]) -> npt.NDArray[np.int64]:
    """Round counts half away from zero, as llama.cpp's lround does."""
    if raw.size == 0:
        raise fail("counts are missing")
    bad = np.flatnonzero(~((raw >= 0) & (raw < 2.0**53)))
    if bad.size:
        raise fail(f"count {bad[0]} is {raw[bad[0]]}, not a number of tokens")
    return np.floor(raw.astype(np.float64) + 0.5).astype(np.int64)


# --- writing ---


def write_imatrix(
    path: str | os.PathLike[str],
    imatrix: Imatrix,
    format: Format = "gguf",  # noqa: A002
    *,
    chunk_size: int | None = None,
) -> None:
    """Write ``imatrix`` to ``path`` as llama-imatrix b11434 would: names sorted; the file is written completely or not
    at all.

    ``format`` "gguf" keeps counts per expert; "dat" stores sum / count * ncall, ncall = ceil(max(counts) / chunk_size),
    ones for experts without tokens, and omits weights without tokens. ``chunk_size`` (tokens) is only used between the
    formats: a .dat does not record it (default 512, llama-imatrix's); being a power of two it changes no value. Raises
    FormatError for names or counts the format cannot hold.
    """
    path = locate(path)
    if format not in ("gguf", "dat"):
        raise ValueError(f"format must be 'gguf' or 'dat', not {format!r}")
    if not imatrix.entries:
        raise FormatError(f"{path}: llama.cpp rejects an importance matrix without entries", "QK-E118")
    size = chunk_size or imatrix.chunk_size or DEFAULT_CHUNK_SIZE
    for name, entry in imatrix.entries.items():
        _check_shapes(name, entry)
    with atomic_write(path) as part:
        if format == "gguf":
            write_gguf(part, _gguf_fields(imatrix, size), _gguf_tensors(path, imatrix, size))
        else:
            _write_dat(part, path, imatrix, size)


def _check_shapes(name: str, entry: ImatrixEntry) -> None:
    """Raise ValueError for an entry that no reader can produce."""
    if entry.sums.dtype != np.float32 or entry.sums.ndim != 2 or entry.sums.size == 0:
        raise ValueError(f"{name}: sums must be float32 [n_mat, n], not {entry.sums.dtype} {list(entry.sums.shape)}")
    if entry.counts.shape != entry.sums.shape[:1] or (entry.counts < 0).any():
        raise ValueError(f"{name}: counts must be [{entry.sums.shape[0]}] and not negative")
    if entry.in_sum is not None and entry.in_sum.shape != entry.sums.shape:
        raise ValueError(f"{name}: in_sum must have the shape of sums, {list(entry.sums.shape)}")
    if entry.saliency is not None and entry.saliency.shape != entry.counts.shape:
        raise ValueError(f"{name}: saliency must have the shape of counts, {list(entry.counts.shape)}")


def _gguf_fields(imatrix: Imatrix, chunk_size: int) -> Iterator[Field]:
    yield Field.of("general.type", "imatrix")
    # Never empty: llama-quantize requires the key, and GGUF writers tend to drop empty arrays.
    datasets = imatrix.datasets or ["unknown"]
    yield Field.of("imatrix.datasets", datasets, ValueType.ARRAY, ValueType.STRING)
    size = chunk_size if imatrix.format == "dat" else imatrix.chunk_size
    yield Field.of("imatrix.chunk_count", imatrix.chunk_count, ValueType.UINT32)
    yield Field.of("imatrix.chunk_size", size, ValueType.UINT32)
    if imatrix.n_layer_nextn:
        yield Field.of("imatrix.n_layer_nextn", imatrix.n_layer_nextn, ValueType.UINT32)
    if imatrix.stats_schema:
        yield Field.of("imatrix.stats_schema", imatrix.stats_schema, ValueType.ARRAY, ValueType.STRING)
    yield from imatrix.extra.values()


def _gguf_tensors(
    path: Path, imatrix: Imatrix, chunk_size: int
) -> Iterator[tuple[str, tuple[int, ...], TensorType, bytes]]:
    for name in sorted(imatrix.entries):
        entry = (
            _as_gguf(path, name, imatrix.entries[name], chunk_size)
            if imatrix.format == "dat"
            else imatrix.entries[name]
        )
        n_mat, n = entry.sums.shape
        parts: list[tuple[str, tuple[int, ...], npt.NDArray[Any]]] = [
            ("in_sum2", (n, n_mat), entry.sums),
            ("counts", (1, n_mat), entry.counts),
        ]
        if entry.in_sum is not None:
            parts.append(("in_sum", (n, n_mat), entry.in_sum))
        if entry.stats is not None:
            parts.append(("stats", (entry.stats.size,), entry.stats))
        if entry.saliency is not None:
            parts.append(("saliency", (n_mat,), entry.saliency))
        for kind, shape, array in parts:
            if len(f"{name}.{kind}".encode()) > MAX_GGUF_NAME:
                max_name = MAX_GGUF_NAME - len(f".{kind}")
                raise FormatError(
                    f"{path}: entry {name!r}: ggml limits tensor names to {MAX_GGUF_NAME} bytes, which leaves "
                    f"{max_name} before .{kind}; write a .dat instead",
                    "QK-E305",
                )
            # ggml drops trailing dimensions of 1.
            dims = shape[:1] if shape[-1] == 1 else shape
            yield f"{name}.{kind}", dims, BY_NAME["F32"], array.astype("<f4").tobytes()


def _as_gguf(path: Path, name: str, entry: ImatrixEntry, chunk_size: int) -> ImatrixEntry:
    """Convert means times calls to raw sums and tokens; ncall 0 counts as one call."""
    with np.errstate(over="ignore"):
        sums = entry.sums * np.float32(chunk_size)
    if np.isfinite(entry.sums).all() and not np.isfinite(sums).all():
        raise FormatError(
            f"{path}: entry {name!r}: sums times chunk_size {chunk_size} exceed float32; choose a smaller one",
            "QK-E305",
        )
    return ImatrixEntry(sums, np.maximum(entry.counts, 1) * chunk_size)


def _write_dat(temporary: Path, path: Path, imatrix: Imatrix, chunk_size: int) -> None:
    names = [name for name in sorted(imatrix.entries) if imatrix.format == "dat" or imatrix.entries[name].counts.any()]
    if not names:
        raise FormatError(f"{path}: no entry has tokens, which a .dat cannot store", "QK-E305")
    with temporary.open("wb") as file:
        file.write(struct.pack("<i", len(names)))
        for name in names:
            entry = imatrix.entries[name]
            ncall, values = (
                _as_dat(entry, chunk_size) if imatrix.format == "gguf" else (int(entry.counts[0]), entry.sums)
            )
            if max(ncall, values.size) >= 2**31:
                raise FormatError(
                    f"{path}: entry {name!r}: {ncall} calls or {values.size} values exceed the .dat's int32", "QK-E305"
                )
            raw = name.encode()
            file.write(struct.pack("<i", len(raw)) + raw + struct.pack("<ii", ncall, values.size))
            file.write(values.astype("<f4").tobytes())
        dataset = imatrix.datasets[-1].encode(errors="surrogateescape") if imatrix.datasets else b""
        file.write(struct.pack("<ii", imatrix.chunk_count, len(dataset)) + dataset)


def _as_dat(entry: ImatrixEntry, chunk_size: int) -> tuple[int, F32Array]:
    """Return ncall and mean times ncall, rounded as llama.cpp b11434 save_imatrix_legacy rounds."""
    ncall = -(-int(entry.counts.max()) // chunk_size)
    counts = entry.counts.astype(np.float32)[:, None]
    empty = counts == 0
    one = np.float32(1)
    means = np.divide(np.where(empty, one, entry.sums), np.where(empty, one, counts), dtype=np.float32)
    return ncall, np.multiply(means, np.float32(ncall), dtype=np.float32)
