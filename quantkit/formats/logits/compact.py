"""quantkit's base logits: the most probable tokens of every position, and the mass of all others.

Little endian::

    "qklogits"  u32 version = 1  u16 codec (0 zlib, 1 zstd)  u16 activations (0 runtime, 1 exact)
    i32 n_ctx  i32 n_vocab  i32 n_chunks  u32 top_k
    u8 sha256[32] of the tokens   u8 model[32], a fingerprint   u32 length, the model's name in UTF-8
    i32 tokens[n_chunks * n_ctx]
    n_chunks frames, in order:  "CHNK"  u32 chunk  u32 crc32 of the payload  u32 raw bytes  u64 payload bytes  payload

A payload, unpacked, has one array after the other, each as four planes of bytes (all first bytes, all second ...),
which compress better. R positions (rows), N tokens kept in all of them::

    f32 log_sum_exp[R]   log(sum(exp(logits))): logit = log p + log_sum_exp
    f32 residual[R]      the mass of the tokens that are not stored
    f32 next[R]          log p of the next token of the text, stored or not
    u32 counts[R]        tokens kept: the top_k most probable, or fewer if little mass is left
    u32 ids[N]           ascending within a row, each the difference to the one before (the first: to 0)
    f32 log_p[N]         their log-probabilities

The error. Let S be the kept tokens, r the residual, s the mass the compared model gives to the others, a the
smallest kept p and b the smallest q of the compared model. Then

    least = sum over S of p log(p / q)  +  r log(r / s)   <=   KLD   <=   least + r log(a / b) - r log(r / s) = most

The left holds because merging outcomes cannot raise a divergence (log-sum inequality), the right because no omitted
token is more probable than a, or less probable than b in the other model. The left lacks exactly r times the divergence
among the omitted tokens. Quantization affects the logits of all improbable tokens similarly, so E, the divergence among
the kept tokens with p < a e^2, serves as its estimate::

    value = min(least + r E, most)                      |value - KLD| <= max(value - least, most - value) + 1e-6

The 1e-6 covers float32. The bound is the worst case, in which all omitted mass falls on the model's least probable
tokens; the estimate is far closer (a test holds it to 1 % of the divergence on a real model).
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.activations import ACTIVATIONS, RUNTIME
from quantkit.errors import FormatError, ResourceError, os_error_code
from quantkit.formats.logits.chunks import Chunks, check_header, read_tokens
from quantkit.formats.ranges import read_range
from quantkit.formats.remote import locate
from quantkit.names import printable

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

#: Name -> number in the header.
CODECS = {"zlib": 0, "zstd": 1}
VERSION = 1
#: Longest name of a model; longer names are truncated.
MAX_NAME = 1024

_HEADER = struct.Struct("<8sIHHiiiI32s32sI")
_FRAME = struct.Struct("<4sIIIQ")
_ROW_BYTES, _TOKEN_BYTES = 16, 8
#: Mantissas do not compress: higher levels take twice as long for 3 % less.
_LEVEL = {"zlib": 1, "zstd": 3}


class CompactRows(NamedTuple):
    """Consecutive rows: per row the first three (f32 [rows]); row i keeps tokens ``starts[i]`` to ``starts[i + 1]``.

    ``ids`` int64 [n], ascending within a row, ``log_probs`` f32 [n], ``starts`` int64 [rows + 1].
    """

    log_sum_exp: F32
    residual: F32
    next: F32
    starts: I64
    ids: I64
    log_probs: F32

    def slice(self, first: int, last: int) -> CompactRows:
        """Return rows ``first`` to ``last`` (exclusive)."""
        a, b = self.starts[first], self.starts[last]
        starts = self.starts[first : last + 1] - a
        per_row = (self.log_sum_exp[first:last], self.residual[first:last], self.next[first:last])
        return CompactRows(*per_row, starts, self.ids[a:b], self.log_probs[a:b])


def join_rows(parts: list[CompactRows]) -> CompactRows:
    """Return the rows of all parts as one."""
    offsets = np.cumsum([0, *(p.ids.size for p in parts)])
    starts = [p.starts[:-1] + offset for p, offset in zip(parts, offsets, strict=False)]
    log_sum_exp, residual, following, ids, log_probs = (np.concatenate([p[i] for p in parts]) for i in (0, 1, 2, 4, 5))
    return CompactRows(log_sum_exp, residual, following, np.concatenate([*starts, offsets[-1:]]), ids, log_probs)


def _planes(array: npt.NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1, 4).T.tobytes()


def _from_planes(raw: bytes, offset: int, n: int, dtype: str) -> npt.NDArray[Any]:
    planes = np.frombuffer(raw, np.uint8, 4 * n, offset).reshape(4, n)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(n)


def pack_rows(rows: CompactRows) -> bytes:
    """Return a payload before compression."""
    counts = np.diff(rows.starts)
    deltas = np.diff(rows.ids, prepend=0)
    deltas[rows.starts[1:-1]] = rows.ids[rows.starts[1:-1]]
    arrays = [a.astype("<f4") for a in (rows.log_sum_exp, rows.residual, rows.next)]
    arrays += [counts.astype("<u4"), deltas.astype("<u4"), rows.log_probs.astype("<f4")]
    return b"".join(map(_planes, arrays))


def unpack_rows(raw: bytes, n_rows: int, n_vocab: int, top_k: int, where: str) -> CompactRows:
    """Return the rows of a payload. Raises FormatError, beginning with ``where``, if it is invalid."""
    if len(raw) < _ROW_BYTES * n_rows:
        raise FormatError(f"{where}: {len(raw)} bytes cannot hold {n_rows} positions", "QK-E122")
    log_sum_exp, residual, following = (_from_planes(raw, 4 * n_rows * i, n_rows, "<f4") for i in range(3))
    counts = _from_planes(raw, 12 * n_rows, n_rows, "<u4").astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    n = int(starts[-1])
    if counts.min() < 1 or counts.max() > min(top_k, n_vocab) or len(raw) != _ROW_BYTES * n_rows + _TOKEN_BYTES * n:
        raise FormatError(
            f"{where}: has {counts.min()} to {counts.max()} tokens per position in {len(raw)} bytes", "QK-E122"
        )
    deltas = _from_planes(raw, 16 * n_rows, n, "<u4").astype(np.int64)
    log_probs = _from_planes(raw, 16 * n_rows + 4 * n, n, "<f4")
    sums = np.cumsum(deltas)
    ids = sums - np.repeat(sums[starts[:-1]] - deltas[starts[:-1]], counts)
    repeated = deltas == 0
    repeated[starts[:-1]] = False
    if ids.max() >= n_vocab or repeated.any():
        raise FormatError(f"{where}: token ids must be ascending and less than {n_vocab}", "QK-E122")
    # NaN fails every comparison.
    sane = (log_probs <= 0).all() and np.isfinite(log_probs).all() and (following <= 0).all()
    if not (sane and np.isfinite(log_sum_exp).all() and ((residual >= 0) & (residual <= 1)).all()):
        raise FormatError(f"{where}: it contains values that are not log-probabilities", "QK-E122")
    return CompactRows(log_sum_exp, residual, following, starts, ids, log_probs)


# --- compression ---


def _zstd() -> tuple[Callable[[bytes, int], bytes], Callable[[bytes, int], bytes]]:
    """Return compress(data, level) and decompress(data, expected size) of whichever zstd is installed."""
    with suppress(ImportError):
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # Python 3.14

        return zstd.compress, lambda data, size: zstd.ZstdDecompressor().decompress(data, size + 1)
    try:
        import zstandard  # type: ignore[import-not-found,unused-ignore]
    except ImportError as e:
        raise ResourceError(
            "base logits with zstd need Python 3.14 or the package zstandard: pip install zstandard; or write them with"
            " --codec zlib",
            "QK-E410",
        ) from e

    def unpack(data: bytes, size: int) -> bytes:
        # A frame's claimed size decides the allocation, so it is checked first.
        content_size = zstandard.get_frame_parameters(data).content_size
        if content_size != size:
            raise ValueError(f"the frame claims {content_size} bytes")
        return bytes(zstandard.ZstdDecompressor().decompress(data, max_output_size=size))

    return zstandard.compress, unpack


def compress(data: bytes, codec: str) -> bytes:
    """Return ``data`` compressed. Raises ResourceError if zstd is requested and missing."""
    return zlib.compress(data, _LEVEL["zlib"]) if codec == "zlib" else _zstd()[0](data, _LEVEL["zstd"])


def decompress(data: bytes, size: int, codec: str, where: str) -> bytes:
    """Return exactly ``size`` decompressed bytes. Raises FormatError, beginning with ``where``, if ``data`` has other
    content."""
    unpack = _zstd()[1] if codec == "zstd" else lambda data, size: zlib.decompressobj().decompress(data, size + 1)
    try:
        raw = unpack(data, size)
    except Exception as e:  # each library has its own errors
        raise FormatError(f"{where}: {codec} cannot decompress it: {e}", "QK-E122") from None
    if len(raw) != size:
        raise FormatError(f"{where}: it does not decompress to {size} bytes", "QK-E122")
    return raw


# --- reading ---


class CompactLogits:
    """A file of quantkit's base logits, open for reading by chunk: frames are found when it is opened."""

    magic = b"qklogits"
    kind = "quantkit"

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            n_ctx, n_vocab, n_chunks = self._read_header(file.read(_HEADER.size), size)
            name = file.read(self._name_bytes)
            raw = file.read(4 * n_ctx * n_chunks)
            self.model = printable(name.decode(errors="replace"))
            self.chunks = read_tokens(path, raw, n_ctx, n_vocab, _HEADER.size + len(name))
            if self.chunks.sha256() != self._sha256:
                raise FormatError(
                    f"{path}: the tokens do not match the SHA-256 in the header: the file is damaged", "QK-E122"
                )
            self._frames = self._find_frames(file, size)
        self._last_chunk: tuple[int, CompactRows] | None = None
        self._lock = threading.Lock()

    def _read_header(self, raw: bytes, size: int) -> tuple[int, int, int]:
        path = self.path
        if len(raw) < _HEADER.size:
            raise FormatError(
                f"{path}: ends after {size} bytes, within the header of base logits: truncated", "QK-E103"
            )
        _, version, codec, activations, *sizes, self._sha256, model, name_bytes = _HEADER.unpack(raw)
        n_ctx, n_vocab, n_chunks, top_k = sizes
        if version != VERSION:
            raise FormatError(
                f"{path}: base logits of version {version}; this version of quantkit reads version {VERSION}"
            )
        is_valid = codec in CODECS.values() and activations < len(ACTIVATIONS)
        if not is_valid or not top_k or name_bytes > MAX_NAME:
            raise FormatError(
                f"{path}: header: codec {codec}, activations {activations}, top_k {top_k}, name of {name_bytes} bytes: "
                "damaged",
                "QK-E122",
            )
        check_header(path, n_ctx, n_vocab, n_chunks)
        need = _HEADER.size + name_bytes + 4 * n_ctx * n_chunks + _FRAME.size
        if size < need:
            raise FormatError(f"{path}: {size} bytes, but its text and first frame need {need}: truncated", "QK-E103")
        self.codec = next(name for name, number in CODECS.items() if number == codec)
        self.activations = ACTIVATIONS[activations]
        self.top_k = int(top_k)
        self.fingerprint = model.hex()
        self._name_bytes = int(name_bytes)
        return n_ctx, n_vocab, n_chunks

    def _find_frames(self, file: BinaryIO, size: int) -> list[tuple[int, int, int, int]]:
        """Return (offset, payload bytes, raw bytes, crc) of every whole frame."""
        chunks, offset = self.chunks, file.tell()
        frames: list[tuple[int, int, int, int]] = []
        max_raw_bytes = chunks.rows * (_ROW_BYTES + _TOKEN_BYTES * min(self.top_k, chunks.n_vocab))
        while offset + _FRAME.size <= size and len(frames) < chunks.n_chunks:
            file.seek(offset)
            mark, number, crc, raw_bytes, nbytes = _FRAME.unpack(file.read(_FRAME.size))
            if mark != b"CHNK" or number != len(frames) or raw_bytes > max_raw_bytes:
                raise FormatError(
                    f"{self.path}: the frame of chunk {len(frames)} is not at byte {offset}: damaged", "QK-E122"
                )
            offset += _FRAME.size
            if offset + nbytes > size:
                break
            frames.append((offset, nbytes, raw_bytes, crc))
            offset += nbytes
        if not frames:
            raise FormatError(f"{self.path}: ends within its first chunk: truncated, write it again", "QK-E103")
        if len(frames) == chunks.n_chunks and offset != size:
            raise FormatError(
                f"{self.path}: {size - offset} bytes after the last chunk, byte {offset}: damaged", "QK-E122"
            )
        return frames

    @property
    def n_whole(self) -> int:
        """Complete chunks in the file: all, unless it is truncated."""
        return len(self._frames)

    @property
    def description(self) -> str:
        frames = sum(nbytes for _, nbytes, _, _ in self._frames)
        bytes_per_row = frames / max(1, self.n_whole * self.chunks.rows)
        size = f"{bytes_per_row:.0f} bytes per position"
        return f"quantkit's base logits of {self.model}, top {self.top_k}, {size}, {self.codec}"

    def chunk(self, index: int) -> CompactRows:
        """Return the checked rows of a chunk; the last chunk is cached. Safe to call from any thread."""
        with self._lock:
            if self._last_chunk is None or self._last_chunk[0] != index:
                self._last_chunk = (index, self._read(index))
            return self._last_chunk[1]

    def _read(self, index: int) -> CompactRows:
        offset, nbytes, raw_bytes, crc = self._frames[index]
        where = f"{self.path}: chunk {index}, byte {offset}"
        payload = np.empty(nbytes, np.uint8)
        try:
            read_range(self.path, payload, offset)
        except OSError as e:
            raise ResourceError(f"{where}: cannot be read: {e.strerror or e}", os_error_code(e)) from e
        if zlib.crc32(payload.data) != crc:
            raise FormatError(f"{where}: wrong checksum: the file is damaged", "QK-E122")
        raw = decompress(payload.tobytes(), raw_bytes, self.codec, where)
        return unpack_rows(raw, self.chunks.rows, self.chunks.n_vocab, self.top_k, where)

    def rows(self, chunk: int, first: int, last: int) -> CompactRows:
        """Return rows ``first`` to ``last`` (exclusive) of a chunk."""
        return self.chunk(chunk).slice(first, last)


# --- writing ---


class CompactWriter:
    """Writes quantkit's base logits to ``path``; chunks must come in order. A context manager."""

    def __init__(
        self,
        path: str | Path,
        chunks: Chunks,
        *,
        top_k: int = 1024,
        codec: str = "zlib",
        model: str = "",
        fingerprint: str = "00" * 32,
        activations: str = RUNTIME,
    ) -> None:
        compress(b"", codec)  # a missing zstd is an error before any work
        self.path = locate(path)
        self.chunks = chunks
        self.top_k = top_k
        self.codec = codec
        name = model.encode(errors="replace")[:MAX_NAME]
        kinds = (VERSION, CODECS[codec], ACTIVATIONS.index(activations))
        numbers = (*kinds, chunks.n_ctx, chunks.n_vocab, chunks.n_chunks, top_k)
        header = _HEADER.pack(CompactLogits.magic, *numbers, chunks.sha256(), bytes.fromhex(fingerprint), len(name))
        self._file = self.path.open("wb")
        self._file.write(header + name + chunks.tokens.astype("<i4").tobytes())
        self._next = 0

    def write(self, rows: CompactRows) -> None:
        """Write the rows of the next chunk."""
        raw = pack_rows(rows)
        payload = compress(raw, self.codec)
        self._file.write(_FRAME.pack(b"CHNK", self._next, zlib.crc32(payload), len(raw), len(payload)) + payload)
        self._next += 1

    def __enter__(self) -> CompactWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
