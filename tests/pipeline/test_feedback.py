"""Error feedback: types as integers, sweeps against plain numpy, and what a file made with it keeps to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from edge_rows import encode
from quantkit.kernels import levels, reference
from quantkit.kernels.cpu.encode import encoder
from quantkit.kernels.cpu.feedback import factor, rounding, sweeps
from quantkit.kernels.cpu.feedback.groups import GroupTile
from quantkit.kernels.cpu.feedback.metric import metric as metric_of
from quantkit.kernels.cpu.feedback.tiles import ROWS, pack_columns
from quantkit.types import BY_NAME, TensorType

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
DESCRIBED = [layout.type for layout in levels.all_levels().values()]
GROUPED = [layout.type for layout in levels.all_levels().values() if layout.grid is not None]
N = 512


def random_values(seed: int, rows: int, n: int = N) -> F32:
    return (np.random.default_rng(seed).standard_normal((rows, n)) / n**0.5).astype(np.float32)


def covariance(seed: int, n: int = N) -> F64:
    """Return one whose spectrum falls, as those of models do, with columns of very different variance."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2 * n, n)) * np.exp(-np.arange(n) / n * 5)
    x = x @ np.linalg.qr(rng.standard_normal((n, n)))[0] * np.exp(0.7 * rng.standard_normal(n))
    return x.T @ x  # type: ignore[no-any-return]


@pytest.mark.parametrize("t", DESCRIBED, ids=str)
def test_integers_equal_decoded_values(t: TensorType) -> None:
    """Golden rows of the encoder; what is read and written again has the same bytes, over any bytes."""
    rows = encode(t, random_values(1, 9), np.zeros(0, np.float32))
    integers = levels.read_integers(t, rows)
    assert np.allclose(levels.decode(t, integers), reference.decode_rows(t, rows), rtol=3e-7, atol=1e-9)
    data = encode(t, random_values(2, 9), np.zeros(0, np.float32))
    levels.write_integers(t, integers, data)
    assert (data == rows).all()


@pytest.mark.parametrize("t", DESCRIBED, ids=str)
def test_every_field_is_described(t: TensorType) -> None:
    """No bit of a block belongs to two fields, and those that belong to none are not decoded."""
    layout = levels.levels_of(t)
    fields = [f.ravel() for f in (layout.levels, layout.scale, layout.minimum, layout.shift) if f is not None]
    fields += [
        levels.float_bits(kind).ravel() for kind in (layout.d, layout.dmin) if kind and not kind.startswith("row:")
    ]
    used = np.concatenate(fields)
    assert len(np.unique(used)) == len(used)
    free = np.setdiff1d(np.arange(8 * t.block_bytes), used)
    rows = encode(t, random_values(3, 1, max(N, t.block)), np.zeros(0, np.float32))
    blocks = rows[:, t.row_header :].reshape(-1, t.block_bytes)
    flipped = blocks.copy()
    for bit in free:
        flipped[:, bit // 8] ^= 1 << bit % 8
    copy = rows.copy()
    copy[:, t.row_header :] = flipped.reshape(1, -1)
    assert (reference.decode_rows(t, copy) == reference.decode_rows(t, rows)).all()


def _nearest(book: F32, y: F64) -> F64:
    return book[np.abs(y[..., None] - book).argmin(-1)]


def test_feedback_and_descent_follow_their_definitions() -> None:
    """Column after column in numpy; then the descent never raises the loss, and keeps the gradient."""
    n, book = 96, np.array([-127, -104, -83, -40, 1, 20, 69, 113], np.float32)
    rng = np.random.default_rng(0)
    h = covariance(4, n) / 100
    x = rng.standard_normal((n, ROWS)).astype(np.float32)
    sub = (np.arange(n) // 32).astype(np.int32)
    scale = (0.02 + 0.01 * rng.random((3, ROWS))).astype(np.float32)
    scale[1, 3], scale[2, 5] = 0, -scale[2, 5]
    low = rng.standard_normal((3, ROWS)).astype(np.float32) / 4
    inverse = np.where(scale == 0, 0, 1 / np.where(scale == 0, 1, scale)).astype(np.float32)
    upper = np.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
    u = upper / np.diagonal(upper)
    levels, v, g, e, c = (np.zeros((n, ROWS), np.float32) for _ in range(5))
    scaling = sweeps.Scaling(sub, scale, low, inverse, sweeps.codebook(book))
    sweeps.error_feedback(np.arange(n, dtype=np.int32), x, pack_columns(u), scaling, levels, v, e, c)
    expected, error = np.zeros((n, ROWS)), np.zeros((n, ROWS))
    for k in range(n):
        target = x[k] + u[:k, k] @ error[:k]
        expected[k] = scale[sub[k]] * _nearest(book, (target + low[sub[k]]) * inverse[sub[k]]) - low[sub[k]]
        error[k] = x[k] - expected[k]
    assert (np.abs(v - expected) < 1e-5).mean() > 0.99  # a tie may fall the other way, and all behind it
    assert np.allclose(e, x - v)
    assert np.allclose(c, u.T @ e, atol=1e-5)
    pivots = (np.diagonal(upper) ** 2).astype(np.float32)
    assert np.allclose(sweeps.weighted_squares(c, pivots), ((x - v) * (h @ (x - v))).sum(0), rtol=1e-4)

    def loss() -> F64:
        return ((x - v) * (h @ (x - v).astype(np.float64))).sum(0)  # type: ignore[no-any-return]

    packed_h, diagonal = pack_columns(h), (1 / np.diagonal(h)).astype(np.float32)
    sweeps.gradient(x, v, packed_h, g, e)
    for _ in range(3):
        before = loss()
        sweeps.descend(packed_h, diagonal, scaling, levels, v, g, c)
        assert (loss() <= before * (1 + 1e-5)).all()
        assert np.allclose(g, h @ (x - v), atol=1e-4 * np.abs(h).max())
        assert np.allclose(v, scale[sub] * levels - low[sub], atol=1e-6)
        assert np.isin(levels, book).all()


@pytest.mark.parametrize("t", GROUPED, ids=str)
def test_groups_choose_among_all_points(t: TensorType) -> None:
    """Where groups do not depend on each other, the losses left are near those of the best of many, or all, points."""
    layout, n = levels.levels_of(t), 256
    grid, grouping = layout.grid, layout.grouping
    assert grid is not None
    assert grouping is not None
    columns = grouping.order(n).reshape(-1, grouping.size)
    full, h, x = covariance(6, n), np.zeros((n, n)), random_values(10, ROWS, n)
    for group in columns:
        h[np.ix_(group, group)] = full[np.ix_(group, group)]
    rows = encode(t, x, np.zeros(0, np.float32))
    tile = GroupTile(layout, x, rows, rows, metric_of(h, 0.01, grouping=grouping))
    tile._error_feedback()
    bits = layout.levels.shape[1]
    codes = np.random.default_rng(0).integers(1 << bits, size=1 << 16) if bits > 16 else np.arange(1 << bits)
    scale, low = levels.scales_and_minimums(t, tile.integers)
    low = np.zeros_like(scale) if low is None else low
    left, least = [], []
    for row in range(len(x)):
        group, shift = columns[row % len(columns)], tile.integers.shift
        sub = group[0] // layout.span
        book = None if grid.codebooks == 1 or shift is None else np.full(len(codes), shift[row, sub])
        points = np.concatenate([scale[row, sub] * grid.levels(codes.astype(np.uint32), book) - low[row, sub],
                                 tile.v[group, row][None]])  # fmt: skip
        error = x[row, group] - points.astype(np.float64)
        losses = ((error @ h[np.ix_(group, group)]) * error).sum(1)
        left.append(losses[-1])
        least.append(losses.min())
    # Points of a trellis lie anywhere, so that a tree of them is a poor guide: it costs up to a third.
    assert sum(left) < (1.4 if t.name.endswith("_KT") else 1.15) * sum(least)
    assert (levels.levels_of(t).levels_of(tile.codebook_tree.q_of(tile.codes.transpose(2, 0, 1)), tile.integers.shift)
            == tile.levels.T).all()  # fmt: skip
    after_feeding = tile.codes.copy()
    tile._descend(1)
    assert (after_feeding == tile.codes).mean() > 0.8  # nothing else has changed


@pytest.mark.parametrize("n", [16, 64, 80, 336])
def test_the_factor_does_not_depend_on_threads(n: int) -> None:
    h = covariance(n, n)
    r = np.triu(factor.cholesky(h.copy()))
    assert np.allclose(r.T @ r, h, atol=1e-12 * np.abs(h).max())
    for threads in (2, 3, 7):
        assert (np.triu(factor.cholesky(h.copy(), threads)) == r).all()
    with pytest.raises(np.linalg.LinAlgError, match="not positive definite"):
        factor.cholesky(h - 1e-3 * np.abs(h).max() * np.eye(n))


def _awkward_covariances() -> dict[str, F64]:
    rng = np.random.default_rng(11)
    tokens = rng.standard_normal((40, N))
    repeated = np.outer(np.ones(4 * N), rng.standard_normal(N)) + 1e-3 * rng.standard_normal((4 * N, N))
    spread = rng.standard_normal((4 * N, N)) * np.exp(3 * rng.standard_normal(N))
    spread[:, 7] *= 1e4
    spread[:, 300:310] = 0
    return {
        "few tokens": tokens.T @ tokens,
        "columns alike": repeated.T @ repeated,
        "massive and dead columns": spread.T @ spread,
    }


@pytest.mark.parametrize("name", ["Q4_K", "Q2_K", "IQ4_XS", "Q4_1", "MXFP4"])
@pytest.mark.parametrize("type_name", ["few tokens", "columns alike", "massive and dead columns"])
def test_awkward_covariances(type_name: str, name: str) -> None:
    """Losses stay finite and are those of the bytes; what is kept is better."""
    t, h, x = BY_NAME[name], _awkward_covariances()[type_name], random_values(12, 20)
    weights = np.diagonal(h).astype(np.float32) + np.float32(1e-6)
    plain = encode(t, x, weights)
    options = rounding.Rounding(rounds=2, sweeps=2)
    result = rounding.round_rows(t, x, lambda _, out: np.copyto(out, plain), metric_of(h, 0.01), options)
    damped = h + 0.01 * np.diagonal(h).mean() * np.eye(N)
    error = x - reference.decode_rows(t, result.rows).astype(np.float64)
    after = ((error @ damped) * error).sum(1)
    assert np.allclose(result.after, after, rtol=1e-3)
    assert (result.after <= result.before).all()
    assert result.after.sum() < result.before.sum()


@pytest.mark.parametrize("t", DESCRIBED, ids=str)
def test_rows_are_never_worse_than_the_references(t: TensorType) -> None:
    """By the loss of the very bytes, computed apart, and whatever rows come together; most rows are better."""
    h, x = covariance(7), random_values(8, 40)
    x[3], x[5, :256] = 0, 0
    weights = np.diagonal(h).astype(np.float32)
    metric = metric_of(h, 0.01, grouping=levels.levels_of(t).grouping)

    def reference_bytes(rows: F32, out: npt.NDArray[np.uint8]) -> None:
        encoder(t)(rows, weights, out, 0, len(rows))

    result = rounding.round_rows(t, x, reference_bytes, metric, rounding.Rounding())
    plain = encode(t, x, weights)
    damped = h + 0.01 * np.diagonal(h).mean() * np.eye(N)

    def loss(rows: npt.NDArray[np.uint8]) -> F64:
        error = x - reference.decode_rows(t, rows).astype(np.float64)
        return ((error @ damped) * error).sum(1)  # type: ignore[no-any-return]

    before, after = loss(plain), loss(result.rows)
    unchanged = (result.rows == plain).all(1)
    assert (after[~unchanged] < before[~unchanged]).all()
    assert np.allclose(result.before, before, rtol=1e-3, atol=1e-9)
    assert np.allclose(result.after, after, rtol=1e-3, atol=1e-9)
    assert after.sum() < 0.8 * before.sum()
    for rows in (slice(0, 7), slice(7, 40), slice(33, 34)):
        part = rounding.round_rows(t, x[rows], reference_bytes, metric, rounding.Rounding())
        assert (part.rows == result.rows[rows]).all()
    target = x + random_values(9, 40) / 4  # scales, and shifts of levels, are those of its bytes
    moved = rounding.round_rows(t, x, reference_bytes, metric, rounding.Rounding(), target)
    error = target - reference.decode_rows(t, moved.rows).astype(np.float64)
    assert np.allclose(moved.after, ((error @ damped) * error).sum(1), rtol=1e-3, atol=1e-9)
