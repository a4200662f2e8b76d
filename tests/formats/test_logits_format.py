"""Files of base logits: llama.cpp's and quantkit's, byte for byte, round trips, and damaged files."""

from __future__ import annotations

import contextlib
import math
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

from quantkit.errors import FormatError, ResourceError
from quantkit.formats.logits import (
    Chunks,
    CompactLogits,
    CompactRows,
    CompactWriter,
    LlamaLogits,
    LlamaWriter,
    encode_rows,
    join_rows,
    open_logits,
)
from quantkit.formats.logits import compact as compact_format

F32 = npt.NDArray[np.float32]
f32 = np.float32
N_CTX, N_CHUNKS = 8, 3
ROWS = 3


def chunks(n_vocab: int, n_chunks: int = N_CHUNKS) -> Chunks:
    tokens = np.random.default_rng(0).integers(0, n_vocab, (n_chunks, N_CTX), dtype=np.int32)
    return Chunks(n_vocab, tokens)


def awkward_logits(n_vocab: int) -> F32:
    """Return rows that reach every branch of the encoder."""
    rng = np.random.default_rng(n_vocab)
    x = rng.standard_normal((9, n_vocab)).astype(f32)
    x[1] *= 10  # clipped at 16 and 24
    x[2] = 1.25  # scale 0
    x[3] *= f32(1e-30)
    x[4, 0] = -np.inf
    x[5] = np.round(x[5] * 4)  # ties
    x[6, 0] = 500
    x[7] = -x[7] * 20 - 3000
    x[8] *= 1e4
    return x


def log_sum_exp(x: F32) -> npt.NDArray[np.float64]:
    return np.log(np.exp(x - x.max(axis=1, keepdims=True)).sum(axis=1, dtype=np.float64))


def encoded_by_the_letter(x: F32, log_total: np.float32, clip: float) -> bytes:
    """One row, one number at a time, in float32, after llama.cpp's log_softmax."""
    top, bottom = f32(max(x)), f32(min(x))
    bottom = max(bottom, f32(top - f32(clip)))
    scale = f32(f32(top - bottom) / f32(65535))
    codes = [0] * (2 * ((len(x) + 1) // 2))
    if scale:
        inverse = f32(f32(1) / scale)
        for i, value in enumerate(x):
            if value > bottom:
                # nearest_int: float32's own rounding, by adding 1.5 * 2^23.
                magic = f32(f32(inverse * f32(value - bottom)) + f32(12582912))
                codes[i] = (int(magic.view(np.int32)) & 0x007FFFFF) - 0x00400000
    return struct.pack(f"<ff{len(codes)}H", scale, f32(f32(bottom - top) - log_total), *codes)


@pytest.mark.parametrize("clip", [16, 24])
@pytest.mark.parametrize("n_vocab", [1, 2, 37, 300])
def test_rows_are_encoded_like_llama_cpps(n_vocab: int, clip: float) -> None:
    x = awkward_logits(n_vocab)
    if n_vocab == 1:
        x = x[[0, 1, 2, 3, 6]]  # -Inf alone is no row
    log_total = log_sum_exp(x).astype(f32)
    expected = [encoded_by_the_letter(row, lse, clip) for row, lse in zip(x, log_total, strict=True)]
    assert [row.tobytes() for row in encode_rows(x, log_total, clip)] == expected


def write_llama(path: Path, text: Chunks, seed: int = 1, clip: float = 16) -> F32:
    """Write a file, rows in an awkward order, and return the logits [chunk, row, n_vocab]."""
    x = np.random.default_rng(seed).standard_normal((text.n_chunks, text.rows, text.n_vocab)).astype(f32) * 4
    writer = LlamaWriter(path, text, clip)
    for chunk in reversed(range(text.n_chunks)):
        for first, last in ((1, text.rows), (0, 1)):
            writer.write(chunk, first, x[chunk, first:last], log_sum_exp(x[chunk, first:last]))
    return x


@pytest.mark.parametrize("n_vocab", [12, 13])
def test_the_bytes_of_a_llama_cpp_file(tmp_path: Path, n_vocab: int) -> None:
    text, path = chunks(n_vocab), tmp_path / "base"
    x = write_llama(path, text)
    expected = struct.pack("<8siii", b"_logits_", N_CTX, n_vocab, N_CHUNKS) + text.tokens.tobytes()
    for row in x.reshape(-1, n_vocab):
        expected += encoded_by_the_letter(row, f32(log_sum_exp(row[None])[0]), 16)
    assert path.read_bytes() == expected
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def test_a_llama_cpp_file_is_read_by_rows(tmp_path: Path) -> None:
    text, path = chunks(31), tmp_path / "base"
    x = write_llama(path, text, clip=24)
    file = open_logits(path)
    assert isinstance(file, LlamaLogits)
    assert (file.n_whole, file.chunks.n_ctx, file.chunks.n_vocab, file.chunks.rows) == (N_CHUNKS, N_CTX, 31, ROWS)
    assert np.array_equal(file.chunks.tokens, text.tokens)
    for chunk in range(N_CHUNKS):
        rows = file.rows(chunk, 1, 3)
        log_p = x[chunk, 1:3] - x[chunk, 1:3].max(1, keepdims=True) - log_sum_exp(x[chunk, 1:3])[:, None]
        # Half a step of 24 / 65535 at most.
        assert np.abs(rows.log_probs() - log_p).max() < 0.5 * rows.scale.max() + 1e-5


def test_reencoding_a_file_is_the_identity(tmp_path: Path) -> None:
    write_llama(tmp_path / "base", chunks(200))
    file = open_logits(tmp_path / "base")
    assert isinstance(file, LlamaLogits)
    rows = file.rows(1, 0, ROWS)
    log_p = rows.log_probs()
    rerun = encode_rows(log_p, log_sum_exp(log_p).astype(f32))
    difference = rerun[:, 4:204].astype(int) - rows.codes.astype(int)
    assert np.abs(difference).max() <= 1


def llama_bytes(tmp_path: Path) -> bytes:
    write_llama(tmp_path / "good", chunks(13))
    return (tmp_path / "good").read_bytes()


def patched(raw: bytes, offset: int, form: str, *values: float) -> bytes:
    new = struct.pack(form, *values)
    return raw[:offset] + new + raw[offset + len(new) :]


START = 20 + 4 * N_CTX * N_CHUNKS


@pytest.mark.parametrize(
    ("damage", "refusal"),
    [
        (lambda raw: b"", "QK-E100"),
        (lambda raw: raw[:8], "QK-E103 8"),
        (lambda raw: b"_Logits_" + raw[8:], "QK-E100"),
        (lambda raw: patched(raw, 8, "<i", -1), "QK-E100 n_ctx -1"),
        (lambda raw: patched(raw, 8, "<i", 2), "QK-E100 n_ctx 2"),
        (lambda raw: patched(raw, 8, "<i", 2**31 - 1), "QK-E103 440"),
        (lambda raw: patched(raw, 12, "<i", 0), "QK-E100 n_vocab 0"),
        (lambda raw: patched(raw, 12, "<i", 2**31 - 1), "QK-E103 440"),
        (lambda raw: patched(raw, 12, "<i", 11), "QK-E100 440"),
        (lambda raw: patched(raw, 16, "<i", 0), "QK-E100 n_chunk 0"),
        (lambda raw: patched(raw, 16, "<i", 2**31 - 1), "QK-E103 440"),
        (lambda raw: patched(raw, 20 + 4 * 5, "<i", 13), "QK-E100 5 40 13"),
        (lambda raw: patched(raw, 20, "<i", -1), "QK-E100 0 20 -1"),
        (lambda raw: raw + b"\0", "QK-E100 440"),
        (lambda raw: raw[: START + 10], "QK-E103 440"),
    ],
)
def test_damaged_llama_cpp_files_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes], refusal: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(damage(llama_bytes(tmp_path)))
    with refuses(FormatError, refusal):
        open_logits(path)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0])
def test_invalid_scales_are_refused_with_their_position(tmp_path: Path, scale: float) -> None:
    path = tmp_path / "bad"
    row_bytes = 2 * (14 + 4)
    offset = START + (ROWS + 2) * row_bytes
    path.write_bytes(patched(llama_bytes(tmp_path), offset, "<f", scale))
    file = open_logits(path)
    file.rows(0, 0, ROWS)
    with refuses(FormatError, "QK-E100 1 6", offset):
        file.rows(1, 1, ROWS)


def test_a_truncated_file_has_its_complete_chunks(tmp_path: Path) -> None:
    raw = llama_bytes(tmp_path)
    (tmp_path / "cut").write_bytes(raw[:-1])
    assert open_logits(tmp_path / "cut").n_whole == N_CHUNKS - 1


def test_a_file_larger_than_the_disk_is_not_started(tmp_path: Path) -> None:
    text = Chunks(2**30, np.zeros((1 << 20, 16), np.int32))
    with refuses(ResourceError, "QK-E406 --chunks --logits-format"):
        LlamaWriter(tmp_path / "base", text)
    assert not list(tmp_path.iterdir())


# --- ours ---


@st.composite
def compact_rows(draw: st.DrawFn, n_vocab: int = 50, rows: int = ROWS) -> CompactRows:
    ids = [sorted(draw(st.sets(st.integers(0, n_vocab - 1), min_size=1, max_size=20))) for _ in range(rows)]
    floats = st.floats(-30, 0, width=32)
    n = sum(map(len, ids))
    return CompactRows(
        np.array(draw(st.lists(st.floats(-100, 100, width=32), min_size=rows, max_size=rows)), f32),
        np.array(draw(st.lists(st.floats(0, 1, width=32), min_size=rows, max_size=rows)), f32),
        np.array(draw(st.lists(floats, min_size=rows, max_size=rows)), f32),
        np.cumsum([0, *map(len, ids)]),
        np.concatenate([np.array(i, np.int64) for i in ids]),
        np.array(draw(st.lists(floats, min_size=n, max_size=n)), f32),
    )


def is_same(a: CompactRows, b: CompactRows) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@given(compact_rows())
def test_compact_rows_round_trip(rows: CompactRows) -> None:
    raw = compact_format.pack_rows(rows)
    assert is_same(compact_format.unpack_rows(raw, ROWS, 50, 20, "here"), rows)
    assert is_same(join_rows([rows.slice(0, 1), rows.slice(1, ROWS)]), rows)


def random_rows(seed: int, n_vocab: int = 50, rows: int = ROWS) -> CompactRows:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 20, rows)
    ids = [np.sort(rng.choice(n_vocab, n, replace=False)) for n in counts]
    values = [rng.random(n).astype(f32) for n in (rows, rows, rows, counts.sum())]
    starts = np.concatenate([[0], np.cumsum(counts)])
    return CompactRows(values[0], values[1], -values[2], starts, np.concatenate(ids), -values[3])


def write_compact(path: Path, n_chunks: int = N_CHUNKS, codec: str = "zlib") -> list[CompactRows]:
    rows = [random_rows(i) for i in range(n_chunks)]
    with CompactWriter(path, chunks(50), top_k=20, codec=codec, model="bf16.gguf", fingerprint="ab" * 32) as writer:
        for r in rows:
            writer.write(r)
    return rows


@pytest.mark.parametrize("codec", ["zlib", "zstd"])
def test_a_compact_file_is_read_in_any_order(tmp_path: Path, codec: str) -> None:
    if codec == "zstd":
        pytest.importorskip("zstandard")
    rows = write_compact(tmp_path / "base", codec=codec)
    file = open_logits(tmp_path / "base")
    assert isinstance(file, CompactLogits)
    assert (file.model, file.fingerprint, file.top_k, file.codec) == ("bf16.gguf", "ab" * 32, 20, codec)
    assert np.array_equal(file.chunks.tokens, chunks(50).tokens)
    for chunk in (2, 0, 1, 1):
        assert is_same(file.chunk(chunk), rows[chunk])
        assert is_same(file.rows(chunk, 1, 3), rows[chunk].slice(1, 3))


def test_files_record_exact_activations(tmp_path: Path) -> None:
    """Without a record they are the runtime's; the mark of a llama.cpp file is no part of its rows."""
    text = chunks(12)
    writer = LlamaWriter(tmp_path / "llama", text, activations="exact")
    for chunk in range(text.n_chunks):
        writer.write(chunk, 0, np.zeros((ROWS, 12), f32), np.full(ROWS, np.log(12)))
    writer.finish()
    with CompactWriter(tmp_path / "compact", chunks(50), top_k=20, activations="exact") as compact:
        for i in range(N_CHUNKS):
            compact.write(random_rows(i))
    files = [open_logits(tmp_path / name) for name in ("llama", "compact")]
    assert [(file.activations, file.n_whole) for file in files] == [("exact", N_CHUNKS)] * 2
    write_llama(tmp_path / "plain", text)
    write_compact(tmp_path / "plain-compact")
    assert [open_logits(tmp_path / f"plain{end}").activations for end in ("", "-compact")] == ["runtime"] * 2
    data = (tmp_path / "plain").read_bytes()
    (tmp_path / "plain").write_bytes(data + b"_exact_?")
    with refuses(FormatError, "QK-E100|QK-E122"):
        open_logits(tmp_path / "plain")


def test_without_zstd_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    monkeypatch.setitem(__import__("sys").modules, "compression", None)
    with refuses(ResourceError, "QK-E410 --codec"):
        CompactWriter(tmp_path / "base", chunks(50), codec="zstd")
    assert not list(tmp_path.iterdir())


def compact_bytes(tmp_path: Path) -> bytes:
    write_compact(tmp_path / "good")
    return (tmp_path / "good").read_bytes()


HEADER = 8 + 4 * 6 + 64 + 4
FRAMES = HEADER + len("bf16.gguf") + 4 * N_CTX * N_CHUNKS


def reframed(raw: bytes, payload: bytes, size: int) -> bytes:
    """Replace the first frame, checksum and all."""
    _, _, _, _, nbytes = struct.unpack_from("<4sIIIQ", raw, FRAMES)
    frame = struct.pack("<4sIIIQ", b"CHNK", 0, zlib.crc32(payload), size, len(payload)) + payload
    return raw[:FRAMES] + frame + raw[FRAMES + 24 + nbytes :]


@pytest.mark.parametrize(
    ("damage", "refusal"),
    [
        (lambda raw: raw[:60], "QK-E103 60"),
        (lambda raw: patched(raw, 8, "<I", 2), "QK-E100 2"),
        (lambda raw: patched(raw, 12, "<I", 7), "QK-E122 7"),
        (lambda raw: patched(raw, 16, "<i", 2**31 - 1), "QK-E103 907"),
        (lambda raw: patched(raw, 24, "<i", 2**31 - 1), "QK-E103 907"),
        (lambda raw: patched(raw, 24, "<i", -3), "QK-E100 n_chunk -3"),
        (lambda raw: patched(raw, 28, "<I", 0), "QK-E122 top_k 0"),
        (lambda raw: patched(raw, HEADER - 4, "<I", 2**32 - 1), "QK-E122 4294967295"),
        (lambda raw: patched(raw, 32, "<B", raw[32] ^ 1), "QK-E122 SHA-256"),
        (
            lambda raw: patched(raw, FRAMES - 4, "<i", 1 ^ struct.unpack_from("<i", raw, FRAMES - 4)[0]),
            "QK-E122 SHA-256",
        ),
        (lambda raw: patched(raw, FRAMES, "<4s", b"CHUN"), "QK-E122 205 0"),
        (lambda raw: patched(raw, FRAMES + 4, "<I", 1), "QK-E122 0"),
        (lambda raw: patched(raw, FRAMES + 12, "<I", 2**32 - 1), "QK-E122 205 0"),
        (lambda raw: patched(raw, FRAMES + 16, "<Q", 2**64 - 1), "QK-E103"),
        (lambda raw: raw + b"more", "QK-E122 4"),
        (lambda raw: raw[: FRAMES + 30], "QK-E103"),
    ],
)
def test_damaged_compact_files_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes], refusal: str) -> None:
    (tmp_path / "bad").write_bytes(damage(compact_bytes(tmp_path)))
    with refuses(FormatError, refusal):
        open_logits(tmp_path / "bad")


def repacked(**changes: object) -> tuple[bytes, int]:
    raw = compact_format.pack_rows(random_rows(0)._replace(**changes))
    return zlib.compress(raw), len(raw)


GOOD = random_rows(0)


@pytest.mark.parametrize(
    ("payload", "size", "refusal"),
    [
        (b"no zlib", 100, "QK-E122 0 229"),
        (zlib.compress(bytes(10**7)), 100, "QK-E122 100"),
        (zlib.compress(bytes(50)), 100, "QK-E122 100"),
        (zlib.compress(bytes(8)), 8, "QK-E122 3"),
        (zlib.compress(bytes(48)), 48, "QK-E122 0"),
        (zlib.compress(b"\xff" * 60), 60, "QK-E122 60"),
        (*repacked(ids=GOOD.ids + 40), "QK-E122 50"),
        (*repacked(ids=np.zeros_like(GOOD.ids)), "QK-E122 50"),
        (*repacked(log_probs=GOOD.log_probs * np.float32(np.nan)), "QK-E122 0 229"),
        (*repacked(log_probs=-GOOD.log_probs), "QK-E122 0 229"),
        (*repacked(residual=GOOD.residual + 1), "QK-E122 0 229"),
        (*repacked(log_sum_exp=GOOD.log_sum_exp * np.float32(np.inf)), "QK-E122 0 229"),
        (*repacked(next=-GOOD.next + np.float32(0.1)), "QK-E122 0 229"),
    ],
)
def test_hostile_chunks_are_refused(tmp_path: Path, payload: bytes, size: int, refusal: str) -> None:
    (tmp_path / "bad").write_bytes(reframed(compact_bytes(tmp_path), payload, size))
    file = open_logits(tmp_path / "bad")
    assert isinstance(file, CompactLogits)
    with refuses(FormatError, refusal):
        file.chunk(0)
    file.chunk(1)


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(reframed(compact_bytes(tmp_path), zlib.compress(bytes(10**8)), 100))
    file = open_logits(tmp_path / "bad")
    tracemalloc.start()
    with refuses(FormatError, "QK-E122 100"):
        file.rows(0, 0, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


def test_a_zstd_frame_larger_than_declared_is_refused(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    write_compact(tmp_path / "good", codec="zstd")
    raw = (tmp_path / "good").read_bytes()
    for bomb in (zstandard.compress(bytes(10**8)), b"none"):
        (tmp_path / "bad").write_bytes(reframed(raw, bomb, 100))
        file = open_logits(tmp_path / "bad")
        with refuses(FormatError, "QK-E122 0 229"):
            file.rows(0, 0, 1)


def test_a_wrong_checksum_is_refused_with_its_position(tmp_path: Path) -> None:
    raw = compact_bytes(tmp_path)
    (tmp_path / "bad").write_bytes(patched(raw, FRAMES + 30, "<B", raw[FRAMES + 30] ^ 4))
    file = open_logits(tmp_path / "bad")
    with refuses(FormatError, "QK-E122 0", FRAMES + 24):
        file.rows(0, 0, 1)


@pytest.mark.parametrize("write", [write_compact, lambda path: write_llama(path, chunks(50))])
def test_any_damaged_byte_is_an_error_or_decodes(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path / "good")
    raw = (tmp_path / "good").read_bytes()
    rng = np.random.default_rng(3)
    for offset in range(0, len(raw), 3):
        bad = bytearray(raw)
        bad[offset] ^= 1 << rng.integers(8)
        (tmp_path / "bad").write_bytes(bad)
        # What is raised but FormatError fails the test.
        with contextlib.suppress(FormatError):
            file = open_logits(tmp_path / "bad")
            for chunk in range(file.n_whole):
                file.rows(chunk, 0, file.chunks.rows)


def test_a_truncated_compact_file_has_its_complete_chunks(tmp_path: Path) -> None:
    raw = compact_bytes(tmp_path)
    (tmp_path / "cut").write_bytes(raw[:-1])
    assert open_logits(tmp_path / "cut").n_whole == N_CHUNKS - 1


def test_a_missing_file_has_no_traceback(tmp_path: Path) -> None:
    with refuses(FormatError, "QK-E401 --save-all-logits"):
        open_logits(tmp_path / "missing")
    with refuses(FormatError, "QK-E401 --save-all-logits"):
        open_logits(tmp_path)
