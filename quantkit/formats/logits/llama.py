"""llama.cpp's base logits, as llama-perplexity --save-all-logits writes and --kl-divergence reads them.

Little endian, from llama.cpp b11434 tools/perplexity/perplexity.cpp (ik_llama.cpp's differs only in the clip)::

    "_logits_"  i32 n_ctx  i32 n_vocab  i32 n_chunk
    i32 tokens[n_chunk * n_ctx]
    n_chunk * (n_ctx - 1 - n_ctx / 2) rows:
        f32 scale  f32 min_log_prob  u16 codes[n_vocab], and one more if n_vocab is odd

    log p = scale * code + min_log_prob         scale = (max - min) / 65535,  min = max(lowest logit, max - clip)

A file with exact activations (quantkit/activations.py) ends with "_exact__", which llama-perplexity does not read;
every other one has those of a runtime.

The clip is 16 in llama.cpp and 24 in ik_llama.cpp: everything less probable than e^-clip times the top token becomes
code 0. A file does not record its clip, and readers do not need it.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.activations import EXACT, RUNTIME
from quantkit.errors import FormatError, ResourceError, os_error_code
from quantkit.formats.logits.chunks import Chunks, check_header, read_tokens, scored_rows
from quantkit.formats.ranges import read_range, write_open, write_range
from quantkit.formats.remote import locate
from quantkit.units import format_size

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U16 = npt.NDArray[np.uint16]

#: Each runtime's clip, in nats below the most probable token.
CLIPS = {"llama.cpp": 16, "ik_llama.cpp": 24}

#: The end of a file with exact activations.
EXACT_MARK = b"_exact__"

_HEADER = struct.Struct("<8siii")


def row_codes(n_vocab: int) -> int:
    """Return the number of uint16 values of a row: four for scale and minimum, and codes in pairs."""
    return 2 * ((n_vocab + 1) // 2) + 4


class LlamaRows(NamedTuple):
    """Consecutive rows of a file: ``scale`` and ``minimum`` f32 [rows], ``codes`` uint16 [rows, n_vocab]."""

    scale: F32
    minimum: F32
    codes: U16

    def log_probs(self, out: F32 | None = None) -> F32:
        """Return the log-probabilities, f32 [rows, n_vocab], in ``out`` if given, rounded where llama.cpp rounds."""
        x = np.empty(self.codes.shape, np.float32) if out is None else out
        np.copyto(x, self.codes)
        x *= self.scale[:, None]
        x += self.minimum[:, None]
        return x


def encode_rows(logits: F32, log_sum_exp: F32, clip: float = 16, scratch: F32 | None = None) -> U16:
    """Return rows of a file, uint16 [rows, row_codes(n_vocab)], for finite-topped logits f32 [rows, n_vocab].

    ``log_sum_exp`` f32 [rows] is log(sum(exp(logits - max))), without the maximum. ``scratch``, of the shape of
    ``logits``, is overwritten. After llama.cpp b11434 perplexity.cpp log_softmax with a log_prob pointer.
    """
    rows, n_vocab = logits.shape
    top, bottom = logits.max(axis=1), logits.min(axis=1)
    bottom = np.maximum(bottom, top - np.float32(clip))
    scale = (top - bottom) / np.float32(65535)
    out = np.zeros((rows, row_codes(n_vocab)), np.uint16)
    header = out[:, :4].view(np.float32)
    header[:, 0] = scale
    header[:, 1] = bottom - top - log_sum_exp
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    # Clipping first has no effect: everything at or below the bottom gets code 0.
    x = np.maximum(logits, bottom[:, None], out=scratch)
    x -= bottom[:, None]
    x *= inverse[:, None]
    np.rint(x, out=x)
    np.copyto(out[:, 4 : 4 + n_vocab], x, casting="unsafe")
    return out


class LlamaLogits:
    """A file of llama.cpp's base logits, open for reading by rows.

    ``chunks`` has the tokens of all chunks; the file has logits for the first ``n_whole``, which is all unless the
    writer was killed.
    """

    magic = b"_logits_"
    kind = "llama.cpp"

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            raw = file.read(_HEADER.size)
            if len(raw) < _HEADER.size:
                raise FormatError(
                    f"{path}: ends after {size} bytes, within the header of base logits: truncated", "QK-E103"
                )
            _, n_ctx, n_vocab, n_chunks = _HEADER.unpack(raw)
            check_header(path, n_ctx, n_vocab, n_chunks)
            self._row_bytes = 2 * row_codes(n_vocab)
            self._start = _HEADER.size + 4 * n_ctx * n_chunks
            chunk_bytes = scored_rows(n_ctx) * self._row_bytes
            self.activations = RUNTIME
            complete_bytes = self._start + n_chunks * chunk_bytes
            if size == complete_bytes + len(EXACT_MARK):
                file.seek(complete_bytes)
                if file.read() == EXACT_MARK:
                    self.activations, size = EXACT, complete_bytes
                file.seek(_HEADER.size)
            self._check_size(size, n_chunks, chunk_bytes)
            self.n_whole = min(n_chunks, (size - self._start) // chunk_bytes)
            self.chunks = read_tokens(path, file.read(4 * n_ctx * n_chunks), n_ctx, n_vocab, _HEADER.size)

    def _check_size(self, size: int, n_chunks: int, chunk_bytes: int) -> None:
        complete_bytes = self._start + n_chunks * chunk_bytes
        if size > complete_bytes:
            raise FormatError(
                f"{self.path}: {size} bytes, but its header describes {complete_bytes}: not base logits, or damaged"
            )
        if size < self._start + chunk_bytes:
            raise FormatError(
                f"{self.path}: {size} bytes, but its header describes {complete_bytes}, {self._start + chunk_bytes} "
                "up to the end of its first chunk: truncated, write it again",
                "QK-E103",
            )

    @property
    def description(self) -> str:
        return f"llama.cpp's base logits, {16 * self.chunks.n_vocab // 8} bytes per position"

    def rows(self, chunk: int, first: int, last: int) -> LlamaRows:
        """Read rows ``first`` to ``last`` (exclusive) of a chunk. Raises FormatError for invalid scales."""
        n = last - first
        raw = np.empty(n * self._row_bytes, np.uint8)
        offset = self._start + (chunk * self.chunks.rows + first) * self._row_bytes
        try:
            read_range(self.path, raw, offset)
        except OSError as e:
            raise ResourceError(
                f"{self.path}: cannot be read at byte {offset}: {e.strerror or e}", os_error_code(e)
            ) from e
        codes = raw.view("<u2").reshape(n, -1)
        header = codes[:, :4].copy().view("<f4")
        bad = np.flatnonzero(~np.isfinite(header).all(axis=1) | (header[:, 0] < 0))
        if bad.size:
            row = first + int(bad[0])
            scale, minimum = (float(v) for v in header[bad[0]])
            raise FormatError(
                f"{self.path}: chunk {chunk}, position {self.chunks.first + row}, byte "
                f"{offset + int(bad[0]) * self._row_bytes}: scale {scale} and minimum {minimum} are not "
                "log-probabilities"
            )
        return LlamaRows(header[:, 0], header[:, 1], codes[:, 4 : 4 + self.chunks.n_vocab])


class LlamaWriter:
    """Writes llama.cpp's base logits to ``path``; rows may come in any order, from any thread."""

    def __init__(self, path: str | Path, chunks: Chunks, clip: float = 16, activations: str = RUNTIME) -> None:
        if clip not in CLIPS.values():
            raise ValueError(f"clip {clip}: choose one of {sorted(CLIPS.values())}")
        self.path = locate(path)
        self.chunks = chunks
        self.clip = clip
        self._mark = EXACT_MARK if activations == EXACT else b""
        self._row_bytes = 2 * row_codes(chunks.n_vocab)
        self.header = _HEADER.pack(LlamaLogits.magic, chunks.n_ctx, chunks.n_vocab, chunks.n_chunks)
        self.header += chunks.tokens.astype("<i4").tobytes()
        self.nbytes = len(self.header) + chunks.n_chunks * chunks.rows * self._row_bytes
        self._begin()

    def _begin(self) -> None:
        """Write the header. Raises ResourceError, OSError."""
        free = shutil.disk_usage(self.path.parent).free if self.path.parent.is_dir() else self.nbytes
        if free < self.nbytes:
            raise ResourceError(
                f"{self.path.parent}: needs {format_size(self.nbytes)}, but only {format_size(free)} are free; use "
                "fewer --chunks, or --logits-format compact",
                "QK-E406",
            )
        self.path.write_bytes(self.header)

    def write(self, chunk: int, first: int, logits: F32, log_sum_exp: F64, scratch: F32 | None = None) -> None:
        """Encode and write rows from ``first`` on; the arguments are those of ``encode_rows``."""
        rows = encode_rows(logits, log_sum_exp.astype(np.float32), self.clip, scratch)
        offset = len(self.header) + (chunk * self.chunks.rows + first) * self._row_bytes
        self._write_at(rows.reshape(-1).view(np.uint8), offset)

    def finish(self) -> None:
        """Record the activations, after all rows."""
        if self._mark:
            self._write_at(np.frombuffer(self._mark, np.uint8), self.nbytes)

    def _write_at(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        write_range(self.path, data, offset)


class LlamaSharer(LlamaWriter):
    """Writes rows to a file that another process, perhaps on another machine, has created.

    The file stays open, so that late writes never reach a file that replaced it. Raises FormatError if it is another
    file.
    """

    def _begin(self) -> None:
        with self.path.open("rb") as file:
            if file.read(len(self.header)) != self.header:
                raise FormatError(
                    f"{self.path} is not the file of this run: its chunks differ, or are missing", "QK-E409"
                )
            self._fd = os.open(self.path, os.O_WRONLY)

    def _write_at(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        write_open(self._fd, self.path, data, offset)

    def sync(self) -> None:
        """Flush written data to the disk, where other machines see it. Raises OSError."""
        os.fdatasync(self._fd)
