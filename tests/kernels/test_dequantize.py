"""Decoders: bit for bit PyPI gguf's, llama.cpp's and quantkit's reference, for every type and any memory layout."""

from __future__ import annotations

import ctypes
import json
import mmap
import subprocess
import sys

import gguf
import numba
import numpy as np
import pytest
from blocks import random_rows, row_scales
from numba.core import types as numba_types
from refusals import refuses
from type_params import DECODABLE

from quantkit.errors import TypeNotSupported
from quantkit.kernels.cpu.core import jit
from quantkit.kernels.cpu.core.simd import f32x16, i8x64, store
from quantkit.kernels.cpu.unpack import unpacker
from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows, rows_decoder
from quantkit.kernels.formats import BLOCK_TYPES, format_of, has_decoder
from quantkit.kernels.reference import decode_rows as reference
from quantkit.types import BY_NAME, ROWS, TYPES

SMALL = [t for t in DECODABLE if t.block < 256]

by_name = pytest.mark.parametrize("t", DECODABLE, ids=str)


def decode(t, data):
    """Decode rows of bytes; what is not written stays NaN."""
    n = (data.shape[1] - t.row_header) // t.block_bytes * t.block
    out = np.full((len(data), n), np.nan, np.float32)
    dequantize_rows(t, data, out)
    return out


def assert_same_bits(actual, expected):
    """Compare bits, so that 0.0 and -0.0 differ."""
    np.testing.assert_array_equal(actual.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32), strict=True)


def by_gguf(t, data):
    """Return PyPI gguf's decoded values, or None if this version cannot decode the type."""
    try:
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(t.id))
    except (NotImplementedError, ValueError):
        return None


# ---------------------------------------------------------------- values


def test_all_types_of_llama_cpp_are_decoded():
    mainline = {t.name for t in TYPES if t.is_in("mainline") and t.family not in ("activation", "integer")} - {"F64"}
    assert {t.name for t in DECODABLE if t.is_in("mainline")} == mainline


def test_pypi_gguf_decodes_all_but_two_of_them():
    cannot = {t.name for t in DECODABLE if t.is_in("mainline") and by_gguf(t, random_rows(t, 1, t.block)) is None}
    assert cannot <= {"Q1_0", "Q2_0"}


@pytest.mark.parametrize("t", [t for t in BLOCK_TYPES if t.trees != "none"], ids=str)
def test_golden_bytes(t, golden):
    keys = [key for key in (t.name, f"{t.name}+imatrix") if key in golden]
    assert keys
    for key in keys:
        actual = decode(t, golden[key])
        assert_same_bits(actual, reference(t, golden[key]))
        peer = by_gguf(t, golden[key])
        if peer is not None:
            assert_same_bits(actual, peer)


@by_name
def test_random_blocks(t):
    data = random_rows(t, 21, 1024)
    actual = decode(t, data)
    assert not np.isnan(actual).any()
    assert_same_bits(actual, reference(t, data))
    peer = by_gguf(t, data)
    if peer is not None:
        assert_same_bits(actual, peer)


@pytest.mark.parametrize("t", SMALL, ids=str)
def test_rows_that_end_within_256_values(t):
    for blocks in sorted({1, 2, 3, 256 // t.block - 1, 256 // t.block + 1, 512 // t.block + 3}):
        data = random_rows(t, 3, blocks * t.block, seed=blocks)
        out = np.full((3, blocks * t.block + 16), np.nan, np.float32)
        dequantize_rows(t, data, out[:, :-16])
        assert_same_bits(out[:, :-16].copy(), reference(t, data))
        assert np.isnan(out[:, -16:]).all()


def ggml_decode(lib, t, data):
    special = {"Q1_0": "dequantize_row_q1_0", "F16": "ggml_fp16_to_fp32_row", "BF16": "ggml_bf16_to_fp32_row"}
    function = getattr(lib, special.get(t.name, f"dequantize_row_{t.ggml_name}"))
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    out = np.empty((len(data), data.shape[1] // t.block_bytes * t.block), np.float32)
    function(data.ctypes.data, out.ctypes.data, out.size)
    return out


@pytest.mark.peer
@pytest.mark.parametrize("t", [t for t in DECODABLE if t.name != "F32" and t.is_in("mainline")], ids=str)
def test_equal_to_llama_cpp(t, llama_bin, golden):
    lib = ctypes.CDLL(str(llama_bin / "libggml-base.so"))
    samples = [golden[k] for k in (t.name, f"{t.name}+imatrix") if k in golden]
    samples += [random_rows(t, 64, 1024, seed=seed) for seed in (1, 2)]
    for data in samples:
        assert_same_bits(decode(t, data), ggml_decode(lib, t, data))


#: Types with separate signs, that ik_llama.cpp applies to values: a level 0 may become -0 there.
MINUS_ZEROS = ("IQ3_KT",)


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@pytest.mark.peer
@pytest.mark.parametrize("t", [t for t in DECODABLE if t.trees == "ik" and t not in ROWS], ids=str)
def test_equal_to_ik_llama_cpp(t, ik_bin, golden):
    lib = ctypes.CDLL(str(ik_bin.parent / "lib/libggml.so"))
    lib.ggml_init.argtypes, lib.ggml_init.restype = [InitParams], ctypes.c_void_p
    assert lib.ggml_init(InitParams(1 << 20, None, False))  # makes the table that halves are widened by
    golden_rows = [golden[key] for key in (t.name, f"{t.name}+imatrix") if key in golden]
    for row in np.concatenate([*golden_rows, random_rows(t, 64, 1024)]):
        # A row by itself: the library counts blocks, and knows nothing of the next header.
        actual = decode(t, row[None])
        if t.name in ("IQ1_BN", "IQ2_BN"):  # its decoders take blocks and leave the scale to the caller
            expected = row_scales(t, row[None]) * ggml_decode(lib, t, np.ascontiguousarray(row[None, t.row_header :]))
            assert_same_bits(actual, expected)
        elif t.name == "IQ6_K":
            assert_like_iq6_k(row, actual, ggml_decode(lib, t, row[None]))
        elif t.name in MINUS_ZEROS:
            assert_same_bits(actual + np.float32(0), ggml_decode(lib, t, row[None]) + np.float32(0))
        else:
            assert_same_bits(actual, ggml_decode(lib, t, row[None]))


def assert_like_iq6_k(row, actual, expected):
    """ik's products, and its CUDA decoder, read a table; dequantize_row_iq6_k the polynomial that was rounded to it."""
    blocks = row.reshape(-1, BY_NAME["IQ6_K"].block_bytes)
    d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    scales = (d * np.ascontiguousarray(blocks[:, 4:20]).view(np.int8)).reshape(-1, 1)
    difference = np.abs(actual.reshape(-1, 16) - expected.reshape(-1, 16))
    assert (difference <= 0.5 * np.abs(scales)).all()


# ---------------------------------------------------------------- memory


@by_name
def test_unaligned_readonly_and_strided_rows_use_one_compiled_version(t, tmp_path):
    rows, row_bytes = 5, t.row_bytes(512)
    data = random_rows(t, rows, 512)
    path = tmp_path / "rows"
    path.write_bytes(b"\0" * 3 + b"".join(row.tobytes() + b"\xff" * 5 for row in data))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)[3:].reshape(rows, row_bytes + 5)[:, :row_bytes]
        assert not view.flags.writeable
        actual = decode(t, view)
        del view
    assert_same_bits(actual, decode(t, data))
    assert_same_bits(actual, reference(t, data))
    if t.name != "F32":
        assert len(rows_decoder(t).signatures) == 1


# Every type's bytes lie right before a page that may not be read; the kernels must come from the cache.
GUARDED = """
import ctypes, json, mmap, sys
import numpy as np
from quantkit.kernels.cpu.core import jit
from quantkit.kernels.cpu.unpack import dequantize as module
from quantkit.types import BY_NAME
if sys.argv[1] != str(jit.kernel_folder()):
    sys.exit(77)
page = mmap.PAGESIZE
area = mmap.mmap(-1, 2 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, 0) == 0
stats = {}
for name in sys.argv[2:]:
    t = BY_NAME[name]
    for n in {t.block, 256, 256 + t.block} if t.block > 1 else {1, 15, 17, 256}:
        data = np.frombuffer(area, np.uint8)[page - t.row_bytes(n) : page].reshape(1, -1)
        module.dequantize_rows(t, data, np.zeros((1, n), np.float32))
    if name != "F32":
        made = module.rows_decoder(t)
        stats[name] = [sum(made.stats.cache_hits.values()), sum(made.stats.cache_misses.values())]
print(json.dumps(stats))
"""


def test_decoding_stays_in_bounds_and_uses_the_kernel_cache():
    for t in DECODABLE:
        decode(t, random_rows(t, 1, 256))
    names = [t.name for t in DECODABLE]
    command = [sys.executable, "-c", GUARDED, str(jit.kernel_folder()), *names]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode == 77:
        pytest.skip("kernel sources were edited while the tests ran: another cache")
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == {name: [1, 0] for name in names if name != "F32"}


# ---------------------------------------------------------------- the contract of unpackers


def unpack(unpack_units, data):
    """Return int8 levels [256], scales [16] and mins [16] (zeros where the type has none) of a unit at byte 3."""
    unpack, has_mins = unpack_units.function, unpack_units.format.mins

    @numba.njit
    def run(address, out):
        l0, l1, l2, l3, scales, mins = unpack(address, 3)
        store(out, 0, l0)
        store(out, 64, l1)
        store(out, 128, l2)
        store(out, 192, l3)
        store(out, 256, scales)
        if has_mins:
            store(out, 320, mins)

    shifted = np.concatenate([np.zeros(3, np.uint8), data])
    out = np.zeros(384, np.uint8)
    run(shifted.ctypes.data, out)
    kinds = unpack.nopython_signatures[0].return_type.types
    assert kinds == (i8x64,) * 4 + (f32x16, f32x16 if has_mins else numba_types.none)
    return out[:256].view(np.int8), out[256:320].view(np.float32), out[320:].view(np.float32)


def contract(t):
    """Return the layout shared by types of a family, whose unpackers return levels and scales alike."""
    record = format_of(t)
    return t.family, t.block, t.row_header > 0, record.span, record.mins, record.signed


CONTRACTS = {contract(t): t for t in BLOCK_TYPES}


@pytest.mark.parametrize("t", CONTRACTS.values(), ids=str)
def test_levels_and_scales_in_registers_decode_to_values(t):
    unpack_units, record = unpacker(t), format_of(t)
    assert record.unit_bytes * t.block == 256 * t.block_bytes
    data = random_rows(t, 1, 256, seed=5)
    levels, scales, mins = unpack(unpack_units, data[0, t.row_header :])
    assert record.span == 16 or np.array_equal(scales[::2], scales[1::2])
    assert record.signed or levels.min() >= 0
    values = (row_scales(t, data) * scales[:, None]) * levels.reshape(16, 16).astype(np.float32)
    if record.mins:
        values = values - mins[:, None]
    assert_same_bits(values.reshape(1, 256), reference(t, data))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["I32", "F64", "Q8_1"])
def test_types_without_a_decoder_are_refused_by_name(name):
    assert not has_decoder(BY_NAME[name])
    with refuses(TypeNotSupported, "QK-E302", name):
        dequantize_rows(BY_NAME[name], np.zeros((1, 256), np.uint8), np.zeros((1, 256), np.float32))


def test_rows_of_partial_blocks_are_refused():
    with refuses(TypeNotSupported, "QK-E303 Q4_K 256"):
        dequantize_rows(BY_NAME["Q4_K"], np.zeros((1, 144), np.uint8), np.zeros((1, 128), np.float32))


@pytest.mark.parametrize(
    ("data", "out"),
    [
        (np.zeros((1, 18), np.uint8), np.zeros((1, 64), np.float32)),
        (np.zeros((2, 36), np.uint8), np.zeros((1, 64), np.float32)),
        (np.zeros((1, 36), np.int8), np.zeros((1, 64), np.float32)),
        (np.zeros((1, 36), np.uint8), np.zeros((1, 64), np.float64)),
        (np.zeros((1, 72), np.uint8)[:, ::2], np.zeros((1, 64), np.float32)),
        (np.zeros((1, 36), np.uint8), np.zeros((1, 128), np.float32)[:, ::2]),
    ],
)
def test_arrays_of_wrong_size_are_refused(data, out):
    with pytest.raises(ValueError, match="Q4_0"):
        dequantize_rows(BY_NAME["Q4_0"], data, out)


def test_an_empty_input_decodes_to_an_empty_array():
    dequantize_rows(BY_NAME["Q4_0"], np.zeros((0, 36), np.uint8), np.zeros((0, 64), np.float32))
