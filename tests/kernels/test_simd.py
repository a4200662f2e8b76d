"""Every op of simd.py against numpy. cpu_name_worker.py calls some of this file for AVX2 and SSE2."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit

from quantkit.kernels.cpu.core import simd
from quantkit.kernels.cpu.core.simd import any_lane, cast, convert, extract, load, mask_bits, select, splat, store

VECTORS = {name: v for name, v in vars(simd).items() if isinstance(v, simd.VecType) and not name.startswith("mask")}
WIDE = ["u8x64", "i8x64", "u16x32", "i16x32", "u32x16", "i32x16", "f32x16", "i64x8", "f64x8"]


def dtype_of(vt: simd.VecType) -> np.dtype:
    return np.dtype(str(vt.elem))


def sample(vt: simd.VecType, seed: int) -> np.ndarray:
    """Return random lanes for a vector type, small numbers, so that sums and products do not overflow i32."""
    rng, dtype = np.random.default_rng(seed), dtype_of(vt)
    if vt.is_float:
        return rng.standard_normal(vt.lanes).astype(dtype)
    return rng.integers(1 if dtype.kind == "u" else -100, 100, vt.lanes).astype(dtype)


def apply(op: Callable[..., Any], vt: simd.VecType, result: np.dtype, lanes: int, *arrays: np.ndarray) -> np.ndarray:
    """Return op(*vectors) as an array of ``lanes`` numbers."""
    out = np.zeros(lanes, result)
    if len(arrays) == 1:

        @njit(error_model="numpy")
        def run(a, out):  # type: ignore[no-untyped-def]
            store(out, 0, op(load(vt, a, 0)))

    elif len(arrays) == 2:

        @njit(error_model="numpy")
        def run(a, b, out):  # type: ignore[no-untyped-def]
            store(out, 0, op(load(vt, a, 0), load(vt, b, 0)))

    else:

        @njit(error_model="numpy")
        def run(a, b, c, out):  # type: ignore[no-untyped-def]
            store(out, 0, op(load(vt, a, 0), load(vt, b, 0), load(vt, c, 0)))

    run(*arrays, out)
    return out


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("name", sorted(VECTORS))
def test_load_and_store_at_any_alignment(name: str) -> None:
    vt = VECTORS[name]

    @njit
    def copy(source, offset, target, target_offset):  # type: ignore[no-untyped-def]
        store(target, target_offset, load(vt, source, offset))

    nbytes = sample(vt, 0).nbytes
    source = np.random.default_rng(1).integers(0, 256, nbytes + 9, np.uint8)
    for offset, target_offset in ((0, 0), (1, 3), (9, 5)):
        target = np.zeros(nbytes + 9, np.uint8)
        copy(source, offset, target, target_offset)
        want = np.zeros_like(target)
        want[target_offset : target_offset + nbytes] = source[offset : offset + nbytes]
        assert same_bits(target, want)
    target = np.zeros(nbytes + 9, np.uint8)
    copy(source.ctypes.data, 9, target.ctypes.data, 5)  # raw addresses
    assert same_bits(target, want)


def test_scalars_at_odd_bytes() -> None:
    kinds = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64)

    @njit
    def move(kind, source, offset, target, target_offset):  # type: ignore[no-untyped-def]
        value = simd.load(kind, source, offset)
        simd.store(target, target_offset, value)
        return value

    source = np.random.default_rng(2).integers(1, 120, 32, np.uint8)
    for kind in kinds:
        width = np.dtype(kind).itemsize
        target = np.zeros(32, np.uint8)
        value = move(kind, source, 3, target, 7)
        assert value == np.frombuffer(source[3 : 3 + width].tobytes(), kind)[0]
        assert target[7 : 7 + width].tobytes() == source[3 : 3 + width].tobytes()
        assert not target[:7].any()
        assert not target[7 + width :].any()


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_load_line(kind: type) -> None:
    @njit
    def find(source, offset, value):  # type: ignore[no-untyped-def]
        return mask_bits(simd.load_line(kind, source, offset) == value)

    source = np.arange(80, dtype=np.uint8)
    lanes = np.frombuffer(source[5:69].tobytes(), kind)
    for lane, value in enumerate(lanes):
        assert find(source, 5, value) == 1 << lane


def test_prefetch_beyond_the_end_is_harmless() -> None:
    @njit
    def run(a):  # type: ignore[no-untyped-def]
        simd.prefetch(a, 0)
        simd.prefetch(a, 1 << 40)
        return 7

    assert run(np.zeros(4, np.float32)) == 7


# ---------------------------------------------------------------- half floats

HALVES = np.arange(1 << 16, dtype=np.uint16)


def f32_around_halves() -> np.ndarray:
    """Return f32 around every half float and every middle of two, up to infinity, both signs, no NaN."""
    values = HALVES[np.isfinite(HALVES.view(np.float16))].view(np.float16).astype(np.float32).view(np.uint32)
    centers = np.concatenate([values, values + np.uint32(0x1000), values & np.uint32(0x80000000)])
    x = np.concatenate([centers - np.uint32(1), centers, centers + np.uint32(1)]).view(np.float32)
    return np.resize(x[~np.isnan(x)], len(x) // 16 * 16)


@pytest.mark.parametrize("name", ["f32x16", "f32x8", "f32x4"])
def test_half_floats_in_vectors(name: str) -> None:
    vt = VECTORS[name]
    lanes = vt.lanes

    @njit
    def both(halves, wide, x, narrowed):  # type: ignore[no-untyped-def]
        for i in range(0, halves.size, lanes):
            store(wide, 4 * i, simd.load_f16(vt, halves, 2 * i))
        for i in range(0, x.size, lanes):
            simd.store_f16(narrowed, 2 * i, load(vt, x, 4 * i))

    x = f32_around_halves()
    wide, narrowed = np.zeros(1 << 16, np.float32), np.zeros(x.size, np.uint16)
    both(HALVES, wide, x, narrowed)
    with np.errstate(over="ignore"):
        assert same_bits(narrowed, x.astype(np.float16).view(np.uint16))
    want, nan = HALVES.view(np.float16).astype(np.float32), np.isnan(HALVES.view(np.float16))
    assert same_bits(wide[~nan], want[~nan])
    assert np.isnan(wide[nan]).all()


def test_half_float_scalars() -> None:
    @njit
    def narrow(x, out):  # type: ignore[no-untyped-def]
        for i in range(x.size):
            out[i] = simd.f32_to_f16(x[i])

    @njit
    def widen(bits, out):  # type: ignore[no-untyped-def]
        for i in range(bits.size):
            out[i] = simd.f16_to_f32(bits[i])

    x = f32_around_halves()
    bits = np.zeros(x.size, np.uint16)
    narrow(x, bits)
    with np.errstate(over="ignore"):
        assert same_bits(bits, x.astype(np.float16).view(np.uint16))
    finite = HALVES[~np.isnan(HALVES.view(np.float16))]
    out = np.zeros(finite.size, np.float32)
    widen(finite, out)
    assert same_bits(out, finite.view(np.float16).astype(np.float32))


# ---------------------------------------------------------------- making and converting

CONVERSIONS = [
    ("u8x16", "i32x16"),
    ("i8x16", "i32x16"),
    ("u16x16", "u32x16"),
    ("i16x16", "i32x16"),
    ("i32x16", "u8x16"),
    ("i32x16", "i8x16"),
    ("i32x16", "i16x16"),
    ("i32x16", "f32x16"),
    ("u8x16", "f32x16"),
    ("i8x16", "f32x16"),
    ("f32x16", "i32x16"),
    ("f32x8", "f64x8"),
    ("f64x8", "f32x8"),
    ("u32x8", "u64x8"),
]


@pytest.mark.parametrize(("source", "target"), CONVERSIONS)
def test_convert(source: str, target: str) -> None:
    a, b = VECTORS[source], VECTORS[target]

    @njit
    def op(v):  # type: ignore[no-untyped-def]
        return convert(b, v)

    x = sample(a, 3) * dtype_of(a).type(2.5 if a.is_float else 1)
    if not a.is_float:
        info = np.iinfo(dtype_of(a))
        x[:2] = info.min, info.max
    assert same_bits(apply(op, a, dtype_of(b), b.lanes, x), x.astype(dtype_of(b)))


def test_convert_masks_and_reinterpret() -> None:
    f32x16, i32x16, u8x64 = simd.f32x16, simd.i32x16, simd.u8x64

    @njit
    def op(a, mask, sign, octets, seven):  # type: ignore[no-untyped-def]
        v = load(f32x16, a, 0)
        store(mask, 0, convert(i32x16, v > np.float32(0)))
        store(sign, 0, cast(i32x16, v) >> 31)
        store(octets, 0, cast(u8x64, v))
        store(seven, 0, splat(f32x16, 7))

    x = sample(f32x16, 4)
    mask, sign, octets = np.zeros(16, np.int32), np.zeros(16, np.int32), np.zeros(64, np.uint8)
    seven = np.zeros(16, np.float32)
    op(x, mask, sign, octets, seven)
    assert mask.tolist() == (x > 0).astype(int).tolist()
    assert sign.tolist() == (-(x < 0).astype(int)).tolist()
    assert octets.tobytes() == x.tobytes()
    assert (seven == 7).all()


_constant = simd.make_constant(simd.i32x16, list(range(5, 21)), "test_constant")
_reverse = simd.make_shuffle(list(range(15, -1, -1)), "test_reverse")
_narrow = simd.make_shuffle([3, 3, 0, 15], "test_narrow")
_zip = simd.make_shuffle2([lane // 2 + 16 * (lane % 2) for lane in range(16)], "test_zip")


def test_constants_and_shuffles() -> None:
    vt = simd.i32x16

    @njit
    def op(a, b, out, short_out):  # type: ignore[no-untyped-def]
        v, w = load(vt, a, 0), load(vt, b, 0)
        store(out, 0, _constant())
        store(out, 64, _reverse(v))
        store(out, 128, _zip(v, w))
        store(short_out, 0, _narrow(v))
        return extract(v, 6)

    a, b = np.arange(16, dtype=np.int32), np.arange(100, 116, dtype=np.int32)
    out, short_out = np.zeros((3, 16), np.int32), np.zeros(4, np.int32)
    assert op(a, b, out, short_out) == 6
    assert out[0].tolist() == list(range(5, 21))
    assert out[1].tolist() == a[::-1].tolist()
    assert out[2].tolist() == np.stack([a[:8], b[:8]], 1).ravel().tolist()
    assert short_out.tolist() == [3, 3, 0, 15]


# ---------------------------------------------------------------- operators


@pytest.mark.parametrize("name", WIDE)
def test_arithmetic(name: str) -> None:
    vt = VECTORS[name]
    dtype, size = dtype_of(vt), vt.lanes
    is_float = vt.is_float

    @njit(error_model="numpy")
    def op(a, b, out):  # type: ignore[no-untyped-def]
        v, w = load(vt, a, 0), load(vt, b, 0)
        store(out, 0, v + w)
        store(out, 64, v - w)
        store(out, 128, v * w)
        store(out, 192, -v)
        store(out, 256, v + 3)
        store(out, 320, 3 - v)
        if is_float:
            store(out, 384, v / w)

    a, b = sample(vt, 5), sample(vt, 6)
    out = np.zeros((7, size), dtype)
    op(a, b, out)
    three = dtype.type(3)
    with np.errstate(over="ignore"):
        want = [a + b, a - b, a * b, np.negative(a), a + three, three - a]
    for actual, expected in zip(out, want, strict=False):
        assert same_bits(actual, expected)
    if vt.is_float:
        assert same_bits(out[6], a / b)


def test_augmented_assignment() -> None:
    vt = simd.i32x16

    @njit
    def op(v):  # type: ignore[no-untyped-def]
        v += v
        v *= 3
        v -= 5
        v <<= 2
        v |= 1
        v &= 0xFFFF
        v ^= 7
        v >>= 1
        return v

    a = np.arange(16, dtype=np.int32)
    assert same_bits(apply(op, vt, a.dtype, 16, a), (((((a + a) * 3 - 5) << 2 | 1) & 0xFFFF) ^ 7) >> 1)


@pytest.mark.parametrize("name", [name for name in WIDE if name[0] != "f"])
def test_bits_and_shifts(name: str) -> None:
    vt = VECTORS[name]

    @njit
    def op(a, b, out):  # type: ignore[no-untyped-def]
        v, w = load(vt, a, 0), load(vt, b, 0)
        store(out, 0, v & w)
        store(out, 64, v | w)
        store(out, 128, v ^ w)
        store(out, 192, ~v)
        store(out, 256, v << 3)
        store(out, 320, v >> 3)

    a, b = sample(vt, 7), sample(vt, 8)
    a[:2] = np.iinfo(a.dtype).min, np.iinfo(a.dtype).max  # arithmetic or logical shift?
    out = np.zeros((6, vt.lanes), a.dtype)
    op(a, b, out)
    for actual, expected in zip(out, [a & b, a | b, a ^ b, ~a, a << 3, a >> 3], strict=True):
        assert same_bits(actual, expected)


@pytest.mark.parametrize("name", ["f32x16", "i32x16", "u8x64", "i8x64", "u16x32"])
def test_comparisons(name: str) -> None:
    vt = VECTORS[name]

    @njit
    def op(a, b):  # type: ignore[no-untyped-def]
        v, w = load(vt, a, 0), load(vt, b, 0)
        return (
            (mask_bits(v < w), mask_bits(v > w), mask_bits(v <= w)),
            (mask_bits(v >= w), mask_bits(v == w), mask_bits(v != w)),
        )

    a, b = sample(vt, 9), sample(vt, 10)
    b[1], b[2] = a[1], 0
    if vt.is_float:
        a[3] = a[4] = b[4] = b[5] = np.nan
    else:
        a[3], b[4] = np.iinfo(a.dtype).max, np.iinfo(a.dtype).min
    ops = (operator.lt, operator.gt, operator.le, operator.ge, operator.eq, operator.ne)
    first, second = op(a, b)
    for actual, compare in zip(first + second, ops, strict=True):
        assert actual == sum(1 << lane for lane in range(vt.lanes) if compare(a[lane], b[lane])), compare


def test_select_and_masks() -> None:
    vt = simd.f32x16

    @njit
    def op(a, b, out):  # type: ignore[no-untyped-def]
        v, w = load(vt, a, 0), load(vt, b, 0)
        less = v < w
        store(out, 0, select(less, v, w))
        store(out, 64, select(less, v, 9))
        store(out, 128, select(less, 9, w))
        store(out, 192, select(less & (v > np.float32(0)), v, w))
        return any_lane(less), any_lane(v < np.float32(-1e30)), mask_bits(~less)

    a, b = sample(vt, 11), sample(vt, 12)
    out = np.zeros((4, 16), np.float32)
    assert op(a, b, out) == (True, False, sum(1 << i for i in range(16) if not a[i] < b[i]))
    nine = np.float32(9)
    less = a < b
    want = [np.where(m, x, y) for m, x, y in ((less, a, b), (less, a, nine), (less, nine, b), (less & (a > 0), a, b))]
    assert same_bits(out, np.array(want))


def test_trailing_zeros() -> None:
    op = njit(lambda bits: simd.trailing_zeros(bits))
    assert [op(np.uint64(bits)) for bits in (1, 0b101000, 1 << 63, 0)] == [0, 3, 63, 64]


# ---------------------------------------------------------------- math


def test_roots_and_magnitudes() -> None:
    x = np.abs(sample(simd.f32x16, 13))
    x[:3] = 0, 2.0**-149, np.inf
    assert same_bits(apply(simd.vsqrt, simd.f32x16, np.dtype(np.float32), 16, x), np.sqrt(x))
    y = sample(simd.f32x16, 14)
    y[:3] = -0.0, -np.inf, -(2.0**-149)
    assert same_bits(apply(simd.vabs, simd.f32x16, np.dtype(np.float32), 16, y), np.abs(y))


def test_vmax_and_vmin_are_cs_macros() -> None:
    nan = np.float32(np.nan)
    a = np.array([1, 2, nan, 1, nan, -0.0, 0.0, np.inf] * 2, np.float32)
    b = np.array([2, 1, 1, nan, nan, 0.0, -0.0, 1] * 2, np.float32)
    for op, compare in ((simd.vmax, operator.gt), (simd.vmin, operator.lt)):
        actual = apply(op, simd.f32x16, np.dtype(np.float32), 16, a, b)
        assert same_bits(actual, np.where(compare(a, b), a, b))
    for name in ("i32x16", "u8x64", "i8x64"):
        vt = VECTORS[name]
        a, b = sample(vt, 18), sample(vt, 19)
        a[0], b[0] = np.iinfo(a.dtype).max, np.iinfo(a.dtype).min
        assert same_bits(apply(simd.vmax, vt, a.dtype, vt.lanes, a, b), np.maximum(a, b))
        assert same_bits(apply(simd.vmin, vt, a.dtype, vt.lanes, a, b), np.minimum(a, b))


def tree_sum(x: np.ndarray) -> Any:
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


@pytest.mark.parametrize("name", ["f32x16", "f64x8", "i32x16", "u8x64", "i16x32"])
def test_reductions(name: str) -> None:
    vt = VECTORS[name]

    @njit
    def op(a):  # type: ignore[no-untyped-def]
        v = load(vt, a, 0)
        return simd.hsum(v), simd.hmax(v), simd.hmin(v)

    for seed in range(20, 25):
        a = sample(vt, seed)
        a[seed % vt.lanes] = 120
        total, largest, smallest = op(a)
        assert a.dtype.type(total % 256 if name == "u8x64" else total) == tree_sum(a)
        assert largest == a.max() == 120
        assert smallest == a.min()


def nearest_int_of_c(x: np.ndarray) -> np.ndarray:
    """Return ggml's nearest_int: the low bits of x + 1.5 * 2^23."""
    with np.errstate(invalid="ignore"):
        bits = (x + np.float32(12582912)).view(np.int32)
    return (bits & 0x7FFFFF) - 0x400000


def test_rounding() -> None:
    f32x16 = simd.f32x16

    @njit
    def op(a, to_int, even, to_away, scalar):  # type: ignore[no-untyped-def]
        for i in range(0, a.size, 16):
            v = load(f32x16, a, 4 * i)
            store(to_int, 4 * i, simd.nearest_int(v))
            store(even, 4 * i, simd.round_even(v))
            store(to_away, 4 * i, simd.round_away(v))
        for i in range(a.size):
            scalar[i] = simd.nearest_int(a[i])

    halves = (np.arange(-640, 640) / 2).astype(np.float32)
    big = np.float32(2) ** np.arange(0, 22, dtype=np.float32)
    x = np.concatenate([halves, big, -big, big + np.float32(0.5), np.float32(0.5) - big])
    x = np.concatenate([np.nextafter(x, -np.inf), x, np.nextafter(x, np.inf)]).astype(np.float32)
    x = np.resize(x, x.size // 16 * 16)
    to_int, to_away, scalar = (np.zeros(x.size, np.int32) for _ in range(3))
    even = np.zeros(x.size, np.float32)
    op(x, to_int, even, to_away, scalar)
    assert np.array_equal(to_int, np.rint(x))
    assert np.array_equal(even, np.rint(x))
    assert same_bits(scalar, to_int)
    assert np.array_equal(to_away, np.trunc(x.astype(np.float64) + np.copysign(0.5, x)))


def test_nearest_int_wraps_around_like_ggmls() -> None:
    x = np.array([4194303, 4194305, -4194305, 1e7, -1e7, 1e20, -1e20, np.inf, -np.inf, np.nan] * 8, np.float32)[:16]
    assert same_bits(apply(simd.nearest_int, simd.f32x16, np.dtype(np.int32), 16, x), nearest_int_of_c(x))


# ---------------------------------------------------------------- lookups and transposition


@pytest.mark.parametrize("lanes", [16, 32, 64])
@pytest.mark.parametrize("kind", ["u8", "i8"])
def test_lookup16(lanes: int, kind: str) -> None:
    table_type, index_type = VECTORS[f"{kind}x16"], VECTORS[f"u8x{lanes}"]

    @njit
    def op(table, index, out):  # type: ignore[no-untyped-def]
        store(out, 0, simd.lookup16(load(table_type, table, 0), load(index_type, index, 0)))

    rng = np.random.default_rng(21)
    table = rng.integers(0, 256, 16, np.uint8).view(dtype_of(table_type))
    index, out = rng.integers(0, 16, lanes, np.uint8), np.zeros(lanes, table.dtype)
    op(table, index, out)
    assert same_bits(out, table[index])


@pytest.mark.parametrize("size", [32, 64])
def test_lookup64(size: int) -> None:
    table_type, index_type = VECTORS[f"i8x{size}"], VECTORS["u8x64"]

    @njit
    def op(table, index, out):  # type: ignore[no-untyped-def]
        store(out, 0, simd.lookup64(load(table_type, table, 0), load(index_type, index, 0)))

    rng = np.random.default_rng(21)
    table = rng.integers(-128, 128, size, np.int8)
    index, out = rng.permutation(64).astype(np.uint8) % np.uint8(size), np.zeros(64, np.int8)
    op(table, index, out)
    assert same_bits(out, table[index])


def test_popcount() -> None:
    @njit
    def op(values, out):  # type: ignore[no-untyped-def]
        store(out, 0, simd.popcount(load(simd.u8x64, values, 0)))

    values, out = np.arange(3, 256, 4, np.uint8), np.zeros(64, np.uint8)
    op(values, out)
    assert out.tolist() == [int(x).bit_count() for x in values]


@pytest.mark.parametrize("name", ["f32x16", "i32x16"])
def test_lookups_of_32_bits(name: str) -> None:
    vt, i32x16 = VECTORS[name], simd.i32x16

    @njit
    def op(table, index, out):  # type: ignore[no-untyped-def]
        low, high = load(vt, table, 0), load(vt, table, 64)
        store(out, 0, simd.lookup16_f32(low, load(i32x16, index, 0) & 15))
        store(out, 64, simd.lookup32_f32(low, high, load(i32x16, index, 0)))

    table = np.random.default_rng(22).integers(-99, 99, 32).astype(dtype_of(vt))
    for seed in range(3):
        index, out = np.random.default_rng(seed).integers(0, 32, 16, np.int32), np.zeros((2, 16), table.dtype)
        op(table, index, out)
        assert same_bits(out[0], table[index % 16])
        assert same_bits(out[1], table[index])


@pytest.mark.parametrize("n", [16, 32, 64, 128])
def test_tables_of_constants(n: int) -> None:
    """Indices count modulo the table; integers of 8 bits, of either sign, are exact."""
    values = np.random.default_rng(n).integers(-255, 256, n)
    look_up = simd.make_table(values.tolist(), f"test_table_{n}")

    @njit
    def op(index, out):  # type: ignore[no-untyped-def]
        store(out, 0, look_up(load(simd.i32x16, index, 0)))

    for first in range(-2 * n, 2 * n, 16):
        index, out = np.arange(first, first + 16, dtype=np.int32), np.zeros(16, np.float32)
        op(index, out)
        assert same_bits(out, values[index % n].astype(np.float32))


def test_transpositions() -> None:
    @njit
    def op(a, adjacent, distant):  # type: ignore[no-untyped-def]
        simd.transpose16(a, 4, 80, adjacent, 64)
        simd.transpose16_apart(a, 4, 80, distant, 0, 128)

    a = np.random.default_rng(23).standard_normal((16, 20)).astype(np.float32)
    adjacent, distant = np.zeros((17, 16), np.float32), np.zeros((16, 32), np.float32)
    op(a, adjacent, distant)
    assert same_bits(adjacent[1:], np.ascontiguousarray(a[:, 1:17].T))
    assert not adjacent[0].any()
    assert same_bits(np.ascontiguousarray(distant[:, :16]), np.ascontiguousarray(a[:, 1:17].T))
    assert not distant[:, 16:].any()


def test_row_extremes() -> None:
    @njit
    def op(a, out):  # type: ignore[no-untyped-def]
        low, high = simd.row_extremes(a, 8, 160)
        store(out, 0, low)
        store(out, 64, high)

    a = np.random.default_rng(24).standard_normal((16, 40)).astype(np.float32)
    out = np.zeros((2, 16), np.float32)
    op(a, out)
    assert same_bits(out, np.array([a[:, 2:34].min(1), a[:, 2:34].max(1)]))


# ---------------------------------------------------------------- products, for mat-mul


@pytest.mark.parametrize("first", ["u8x64", "i8x64"])
def test_dot4_is_exact(first: str) -> None:
    """As far as its contract goes: u8 without bound where the CPU has the instruction, up to 127 elsewhere."""
    vt = VECTORS[first]
    signed = first == "i8x64"

    @njit
    def op(acc, x, y, out):  # type: ignore[no-untyped-def]
        store(out, 0, simd.dot4(load(simd.i32x16, acc, 0), load(vt, x, 0), load(simd.i8x64, y, 0)))

    rng = np.random.default_rng(31)
    low, high = (-128, 128) if signed else (0, 256 if simd.HAS_DOT4 else 128)
    for _ in range(20):
        x = rng.integers(low, high, 64).astype(dtype_of(vt))
        x[:4] = low if signed else high - 1
        y = rng.integers(-127, 128, 64).astype(np.int8)
        y[:4] = -127
        acc, out = rng.integers(-(10**6), 10**6, 16).astype(np.int32), np.zeros(16, np.int32)
        op(acc, x, y, out)
        products = (x.astype(np.int64) * y.astype(np.int64)).reshape(16, 4).sum(1)
        assert np.array_equal(out, acc + products)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_dot2_is_exact(lanes: int) -> None:
    acc_type, vt = simd.VecType(simd.i32x16.elem, lanes), simd.VecType(simd.i16x32.elem, 2 * lanes)

    @njit
    def op(acc, x, y, out):  # type: ignore[no-untyped-def]
        store(out, 0, simd.dot2(load(acc_type, acc, 0), load(vt, x, 0), load(vt, y, 0)))

    rng = np.random.default_rng(32)
    x, y = (rng.integers(-20000, 20000, 2 * lanes).astype(np.int16) for _ in range(2))
    acc, out = rng.integers(-1000, 1000, lanes).astype(np.int32), np.zeros(lanes, np.int32)
    op(acc, x, y, out)
    assert np.array_equal(out, acc + (x.astype(np.int64) * y).reshape(lanes, 2).sum(1))


def test_maddubs_adds_neighbours() -> None:
    @njit
    def op(x, y, out):  # type: ignore[no-untyped-def]
        store(out, 0, simd.maddubs(load(simd.u8x64, x, 0), load(simd.i8x64, y, 0)))

    rng = np.random.default_rng(33)
    x, y = rng.integers(0, 64, 64).astype(np.uint8), rng.integers(-128, 128, 64).astype(np.int8)
    out = np.zeros(32, np.int16)
    op(x, y, out)
    assert np.array_equal(out, (x.astype(np.int64) * y).reshape(32, 2).sum(1))


def test_muladd_takes_vectors_and_scalars() -> None:
    @njit
    def op(a, b, c, out):  # type: ignore[no-untyped-def]
        x, y, z = load(simd.f32x16, a, 0), load(simd.f32x16, b, 0), load(simd.f32x16, c, 0)
        store(out, 0, simd.muladd(x, y, z))
        store(out, 64, simd.muladd(x, b[0], z))
        store(out, 128, simd.muladd(x, b[1], c[2]))

    a, b, c = (np.random.default_rng(34 + i).standard_normal(16).astype(np.float32) for i in range(3))
    out = np.zeros((3, 16), np.float32)
    op(a, b, c, out)
    exact = np.array([a * b.astype(np.float64) + c, a * np.float64(b[0]) + c, a * np.float64(b[1]) + np.float64(c[2])])
    assert np.allclose(out, exact, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["u8x64", "i16x16", "f32x16", "i32x8"])
def test_opaque_is_the_identity(name: str) -> None:
    vt = VECTORS[name]
    if vt.lanes * dtype_of(vt).itemsize == 64 and "avx512f" not in simd.FEATURES:
        vt = simd.VecType(vt.elem, vt.lanes // 2)
    a = sample(vt, 35)
    assert same_bits(apply(simd.opaque, vt, dtype_of(vt), vt.lanes, a), a)


def test_prefetching_does_not_fault() -> None:
    @njit
    def op(a, out):  # type: ignore[no-untyped-def]
        simd.prefetch(a, 1 << 40)
        simd.prefetch_l2(a, 1 << 40)
        store(out, 0, load(simd.f32x16, a, 0))

    a, out = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
    op(a, out)
    assert same_bits(a, out)


def test_stack_bytes_are_aligned_and_private() -> None:
    @njit
    def inner(value):  # type: ignore[no-untyped-def]
        space = simd.stack_bytes(256)
        for i in range(4):
            store(space, 64 * i, splat(simd.f32x16, value))
        return space % 64, load(simd.f32x16, space, 192)

    @njit
    def op(out):  # type: ignore[no-untyped-def]
        space = simd.stack_bytes(64)
        store(space, 0, splat(simd.f32x16, np.float32(1)))
        remainder, v = inner(np.float32(2))
        store(out, 0, load(simd.f32x16, space, 0) + v)
        return remainder, space % 64

    out = np.zeros(16, np.float32)
    assert op(out) == (0, 0)
    assert (out == 3).all()


def test_every_op_is_tested() -> None:
    """A new op of simd.py must be named here or in a test above."""
    source = Path(__file__).read_text()
    ops = [name for name, v in vars(simd).items() if type(v).__name__ == "_Intrinsic" and not name.startswith("_")]
    assert len(ops) > 20
    assert [name for name in ops if name not in source] == []
