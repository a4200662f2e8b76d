"""Encoders of the trellis types: their own search, whose error is held against that of ik_llama.cpp's golden bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from type_params import SEARCHED

from conftest import DATA
from edge_rows import NO_WEIGHTS, encode
from quantkit.kernels import dequantize, quantize
from quantkit.kernels.cpu.core.jit import helper, kernel, specialize
from quantkit.kernels.cpu.core.simd import i32x16, load, splat, store
from quantkit.kernels.cpu.encode import trellis
from quantkit.kernels.cpu.encode import trellis_search as search
from quantkit.kernels.cpu.encode.batch import address
from quantkit.kernels.cpu.encode.trellis_codebook import codebook
from quantkit.kernels.cpu.encode.trellis_lists import LEVELS, RANGE_OF
from quantkit.kernels.grids import trellis_levels
from quantkit.types import BY_NAME, TensorType

f32 = np.float32


def weights_of(x: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """Return the weights of ik_llama.cpp's search, float64 [rows, n]."""
    values = x.astype(np.float64).reshape(len(x), -1, 8, 32)
    square = (values**2).sum((2, 3), keepdims=True)
    if importance.size:
        weights = importance.astype(np.float64).reshape(1, -1, 8, 32) * np.sqrt(square / 128 + values**2)
        sums = (values**2).sum(-1), (weights**2).sum(-1), (weights * abs(values)).sum(-1)
        weights[np.any(np.array(sums) < 1e-14, axis=0)] = 1e-4
    else:
        weights = square / 512 + values**2
    return np.where(square < 256e-14, 1e-4, weights).reshape(x.shape)


def errors(t: TensorType, x: np.ndarray, importance: np.ndarray, data: np.ndarray) -> np.ndarray:
    y = dequantize(data, t, x.shape[1]).astype(np.float64)
    squares: np.ndarray = (weights_of(x, importance) * (x - y) ** 2).sum(-1)
    return squares


#: Our error over ik_llama.cpp's, at most: of all rows of a kind, and of any row.
TOTAL, ROW = 1.0, 1.02
#: Random rows: kinds of values; length and number of rows.
KINDS, SIZES = ("gauss", "laplace", "t3", "outliers"), {256: 24, 1024: 8, 4096: 2}


def random_rows(kind: str, n: int) -> np.ndarray:
    """Return the rows whose errors, as ik_llama.cpp encodes them, are in tests/data/trellis-errors.npz."""
    rng, rows = np.random.default_rng([n, *kind.encode()]), SIZES[n]
    rows_by_kind = {
        "gauss": lambda: rng.standard_normal((rows, n)),
        "laplace": lambda: rng.laplace(size=(rows, n)),
        "t3": lambda: rng.standard_t(3, (rows, n)),
        "outliers": lambda: rng.standard_normal((rows, n)) * np.where(rng.random((rows, n)) < 0.01, 8, 1),
    }[kind]()
    return (0.02 * rows_by_kind).astype(f32)


def random_importance(n: int) -> np.ndarray:
    return np.exp(np.random.default_rng(n).standard_normal(n)).astype(f32)


def assert_no_larger(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.sum() <= TOTAL * expected.sum(), actual.sum() / expected.sum()
    assert (actual <= ROW * expected + 1e-30).all(), (actual / expected).max()


GOLDEN_KEYS = [f"{t.name}{suffix}" for t in SEARCHED for suffix in ("", "+imatrix")]
GOLDEN_KEYS.remove("IQ1_KT")


@pytest.mark.parametrize("key", GOLDEN_KEYS)
def test_the_error_of_golden_rows_is_no_larger_than_the_references(golden: dict[str, np.ndarray], key: str) -> None:
    t, importance = BY_NAME[key.partition("+")[0]], golden["imatrix"] if "+" in key else NO_WEIGHTS
    expected = errors(t, golden["x"], importance, golden[key])
    assert_no_larger(errors(t, golden["x"], importance, encode(t, golden["x"], importance)), expected)


@pytest.fixture(scope="module")
def reference_errors() -> dict[str, np.ndarray]:
    return dict(np.load(DATA / "trellis-errors.npz"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", ["", "+imatrix"])
@pytest.mark.parametrize("t", SEARCHED, ids=str)
def test_the_error_of_random_rows_is_no_larger_than_the_references(
    t: TensorType, suffix: str, kind: str, reference_errors: dict[str, np.ndarray]
) -> None:
    for n in SIZES:
        x, importance = random_rows(kind, n), random_importance(n) if suffix else NO_WEIGHTS
        expected = reference_errors[f"{t.name}{suffix} {kind} {n}"]
        assert_no_larger(errors(t, x, importance, encode(t, x, importance)), expected)


def spread_rows() -> tuple[np.ndarray, np.ndarray]:
    """Return long rows and importances that differ as much as those of real models."""
    rng = np.random.default_rng(15)
    return (0.02 * rng.standard_normal((6, 4096))).astype(f32), np.exp(1.5 * rng.standard_normal(4096)).astype(f32)


@pytest.mark.parametrize("t", SEARCHED, ids=str)
def test_unequal_weights_are_searched_more_deeply(t: TensorType, reference_errors: dict[str, np.ndarray]) -> None:
    """Errors are compared with those of ik_llama.cpp's wheel, which is built with FMA; IQ3_KT's may be 1 % larger."""
    x, importance = spread_rows()
    most = 1.01 if t.name == "IQ3_KT" else TOTAL
    assert errors(t, x, importance, encode(t, x, importance)).sum() <= most * reference_errors[f"{t.name} spread"].sum()


@pytest.mark.parametrize("t", SEARCHED, ids=str)
def test_the_error_scales_with_the_row(t: TensorType) -> None:
    """A power of two changes nothing but the row's scale: from small to near the largest float."""
    x = np.random.default_rng(0).standard_normal((2, 256)).astype(f32)
    expected = encode(t, x, NO_WEIGHTS)
    for power in (-10, 40, 100, 120):
        scaled = encode(t, np.ldexp(x, power), NO_WEIGHTS)
        assert np.array_equal(scaled[:, 4:], expected[:, 4:])
        assert np.array_equal(scaled[:, :4].copy().view(f32), np.ldexp(expected[:, :4].copy().view(f32), power))


@pytest.mark.parametrize("t", SEARCHED, ids=str)
def test_tiny_rows_become_zeros(t: TensorType) -> None:
    x = np.zeros((4, 512), f32)
    x[1], x[2, 7], x[3, ::2] = 1e-17, 1e-42, -1e-30
    for importance in (NO_WEIGHTS, np.ones(512, f32)):
        assert not dequantize(quantize(x, t, importance if importance.size else None), t, 512).any()


@pytest.mark.parametrize("t", SEARCHED, ids=str)
def test_importances_may_be_zero_or_of_any_size(t: TensorType) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 512)).astype(f32)
    energy = (x**2).sum()
    for importance in (np.zeros(512), np.full(512, 1e-30), 10.0 ** rng.uniform(-30, 30, 512), np.eye(1, 512)[0]):
        y = dequantize(quantize(x, t, importance.astype(f32)), t, 512)
        assert np.isfinite(y).all()
        assert ((x - y) ** 2).sum() < 20 * energy


def test_lines_listed_for_a_query_contain_its_nearest_points() -> None:
    """Of 12 and 32 lines, of normal values of the codebook's own spread, weighted as values are."""
    book, rng = codebook(32768, 4, False, 2), np.random.default_rng(5)
    lines = book.points.view(np.int16).reshape(2, 2048, 2, 16, 2).swapaxes(2, 3).reshape(2, 2048, 16, 4).astype(f32)
    y = (37 * rng.standard_normal((300, 4))).clip(-140, 140).astype(f32)
    weights = (37**2 / 2 + y * y) * rng.uniform(0.5, 1.5, y.shape).astype(f32)
    side, ranges = 2 * LEVELS, np.array(RANGE_OF)[np.minimum(abs(y) // 8, 15).astype(int)]
    buckets = np.where(y < 0, LEVELS - 1 - ranges, LEVELS + ranges) @ side ** np.arange(3, -1, -1)
    hits = np.zeros((2, 33))
    for side_index in range(2):
        for query, weight, bucket in zip(y, weights, buckets, strict=True):
            errors_of_lines = ((lines[side_index] - query) ** 2 @ weight).min(1)
            listed_lines = book.lists.reshape(2, side**4, -1)[side_index, bucket].astype(int) - 2048 * side_index
            assert len(set(listed_lines)) == 32
            hits[side_index] += [errors_of_lines.min(), *np.minimum.accumulate(errors_of_lines[listed_lines])]
    assert (hits[:, 12] < 1.02 * hits[:, 0]).all()
    assert (hits[:, 32] < 1.005 * hits[:, 0]).all()


@pytest.mark.parametrize(
    ("count", "size", "magnitudes", "books"),
    [(8192, 8, False, 1), (65536, 8, False, 1), (65536, 8, True, 1), (32768, 4, False, 2)],
)
def test_a_codebook_has_every_point_once(count: int, size: int, magnitudes: bool, books: int) -> None:
    book = codebook(count, size, magnitudes, books)
    levels = trellis_levels(0, books * count, size)
    levels, bias = (abs(levels), 0) if magnitudes else (levels, 126 if size == 8 else 0)
    kind = np.uint8 if size == 8 else np.int16
    lines = book.points.view(kind).reshape(books * count // 16, -1, 16, size // 2)[:, :2].swapaxes(1, 2)
    assert np.array_equal(np.sort(book.indices.reshape(books, -1), axis=1), np.tile(np.arange(count), (books, 1)))
    positions = book.indices + np.repeat(np.arange(books) * count, count)
    assert np.array_equal(lines.reshape(-1, size).astype(int) - bias, levels[positions])


#: Bindings: a scan, two ways.
pruned: Any = None
plain: Any = None


@helper
def rank_every_line(steps: Any, lines: Any, first: int, energy: float, least: float, s: int, n_near: int) -> None:
    """Rank as trellis_search.rank_all does, all points."""
    for i in range(0, 64 * len(steps.ends) - 64, 64):
        store(s, search.BEST + i, splat(i32x16, search.MOST))
    for number in range(first, first + steps.lines):
        search.rank_line(steps, lines[0], number, energy, f32(search.KNOWN_ERROR) / least, s)
    for i in range(0, 64 * len(steps.ends) - 64, 64):
        best = load(i32x16, s, search.BEST + i) & np.int32((1 << search.NUMBER) - 1)
        store(s, search.BEST + i, (best << 4) | search.lanes16())


def scan_groups(x, w, book, inverse, error, points, extents, survivors, scratch):  # type: ignore[no-untyped-def]
    """Scan for each group, pruned into kept[0] and plainly into kept[1]."""
    lines = address(points), 0, 0, 0, address(extents)
    for i in range(len(x)):
        x_address, weights, width = address(x) + 4 * x.shape[1] * i, address(w) + 4 * x.shape[1] * i, survivors.shape[3]
        for half in range(2):
            s, survivors_address = (
                (address(scratch) + 63) // 64 * 64,
                address(survivors) + 4 * 3 * width * (len(x) * half + i),
            )
            sign = f32(-1) if inverse[i] < 0 else f32(1)
            query = search.Query(book[i], sign, inverse[i], x_address, weights)
            if half == 0:
                search.scan(pruned, query, error[i], lines, s, survivors_address, width)
            else:
                search.scan(plain, query, error[i], lines, s, survivors_address, width)


def hostile_groups(rng: np.random.Generator, size: int, magnitudes: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return values about as large as levels, and weights: normal, sparse, of one huge value, of any size, none."""
    x = 37 * rng.standard_normal((1200, size))
    x[200:400] *= rng.random((200, size)) < 0.3
    x[np.arange(400, 600), rng.integers(size, size=200)] = rng.choice([-100, 100], 200)
    x[600:700] = rng.choice([-40, 40], (100, size))
    w = 37**2 / 2 + x * x
    w[700:1000] = 10.0 ** rng.uniform(-30, 30, (300, size))
    w[1000:1100] *= rng.random((100, size)) < 0.4
    w[1100:1150, -1] *= -0.3
    w[1150:1170] *= rng.random((20, 1)) * 1e-38
    return abs(x) if magnitudes else x, w


@pytest.mark.parametrize(
    ("name", "count", "size", "magnitudes", "books", "ranges"),
    [("iq1_kt", 8192, 8, False, 1, 3), ("iq2_kt", 65536, 8, False, 1, 3)]
    + [("iq3_kt", 65536, 8, True, 1, 4), ("iq4_kt", 32768, 4, False, 2, 4)],
)
def test_a_scan_that_skips_points_finds_the_same(
    name: str, count: int, size: int, magnitudes: bool, books: int, ranges: int
) -> None:
    """As one that ranks all, for all scales, and whatever the error known: far too small, too large, none."""
    form = trellis.point_format(size, 0 if magnitudes or size == 4 else 126)
    scan = trellis.scan_steps(count, form, ranges)
    both = specialize(scan_groups, name, kernel, pruned=scan, plain=replace(scan, rank_all=rank_every_line))

    rng, tree = np.random.default_rng(size), codebook(count, size, magnitudes, books)
    values, weights = hostile_groups(rng, size, magnitudes)
    x, w, width = values.astype(f32), weights.astype(f32), search.SURVIVORS * (ranges + 1)
    inverse = rng.choice([-1.0, 1.0] if not magnitudes else [1.0], len(x)).astype(f32)
    error = ((w * x * x).sum(1) * 10.0 ** rng.uniform(-4, 0, len(x))).astype(f32)
    error[::50], error[1::50], error[2::50] = 0, error[1::50] * f32(1e-9), f32(np.inf)
    survivors, scratch = np.zeros((2, len(x), 3, width), f32), np.zeros(search.SCRATCH // 4 + 32, f32)
    survivors.view(np.int32)[:, :, 2] = rng.integers(books * count, size=(len(x), width))
    both(x, w, rng.integers(books, size=len(x)), inverse, error, tree.points, tree.extents, survivors, scratch)
    lists = survivors.view(np.int32)[..., : search.SURVIVORS * ranges]
    assert np.array_equal(lists[0], lists[1])
    assert len(np.unique(lists[0, :, 2])) > 1000
