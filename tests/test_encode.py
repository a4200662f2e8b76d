"""Every encoder, one way for all types: ggml's bytes for awkward rows and weights, whatever the batches and the rows.

Golden bytes, which need no peer, are in test_kernels.py; what is special to a type is in test_encode_corners.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from encoded import ENCODERS, GGMLS, UNWEIGHTED

from awkward import IMPORTANCE, NO_WEIGHTS, assert_same_bytes, awkward_imatrix, awkward_rows, encode, ggml_encode
from quantkit.kernels.cpu.encode import encoder
from quantkit.kernels.formats import FORMATS
from quantkit.types import TensorType

#: Types whose blocks are coded one by one, whatever the rest of the row.
BY_BLOCK = [(t, by) for t, by in ENCODERS if t.is_quantized and not t.row_header]
#: Those that weigh by the mean square of a whole row.
BY_ROW = "legacy"


def weights_for(t: TensorType, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return no weights, if the type can do without, and the given ones, even if it ignores them."""
    return ((NO_WEIGHTS,) if t in UNWEIGHTED else ()) + ((weights,) if t.is_quantized else ())


def within_reach(t: TensorType, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return x, clipped for types with a grid: ggml aborts where no neighbour of a point has a finite distance."""
    if not FORMATS[t.name].grid:
        return x
    limit = np.cbrt(1e36 / max(float(weights.max(initial=1)), 1.0))
    clipped: np.ndarray = np.clip(x, -limit, limit).astype(np.float32)
    return clipped


def assert_ggmls(llama_bin: Path, t: TensorType, x: np.ndarray, weights: np.ndarray = NO_WEIGHTS) -> None:
    assert_same_bytes(encode(t, x, weights), ggml_encode(llama_bin, t, x, weights), t)


@pytest.mark.peer
@pytest.mark.parametrize("t", GGMLS, ids=str)
@pytest.mark.parametrize("blocks", [1, 3, 17])
def test_awkward_rows_equal_ggml(llama_bin: Path, t: TensorType, blocks: int) -> None:
    """Rows of 1, 3 and 17 blocks: 16 lanes cross from row to row, and some stay empty at the end."""
    n = blocks * t.block if t.is_quantized else 11 * blocks
    for seed, huge in enumerate((1e30, 1e12, 1e20, 1e37, 1.1e38)):  # up to ranges that overflow f32
        for weights in weights_for(t, awkward_imatrix(n, seed)):
            assert_ggmls(llama_bin, t, within_reach(t, awkward_rows(n, seed, huge), weights), weights)


@pytest.mark.peer
@pytest.mark.parametrize("t", [t for t in GGMLS if t.imatrix != "ignored"], ids=str)
def test_any_importance_equals_ggml(llama_bin: Path, t: TensorType) -> None:
    for seed, (kind, make) in enumerate(IMPORTANCE.items()):
        for n in (256, 1280):
            weights = make(np.random.default_rng(seed), n).astype(np.float32)
            x = within_reach(t, awkward_rows(n, seed), weights)
            ours, theirs = encode(t, x, weights), ggml_encode(llama_bin, t, x, weights)
            assert np.array_equal(ours, theirs), f"{t.name}, importance: {kind}, rows of {n}"


@pytest.mark.peer
@pytest.mark.parametrize("t", GGMLS, ids=str)
def test_many_random_blocks_equal_ggml(llama_bin: Path, t: TensorType) -> None:
    rng = np.random.default_rng(11)
    x = (rng.standard_t(3, (129, 1024)) * np.exp(rng.standard_normal((129, 1)))).astype(np.float32)
    for weights in weights_for(t, rng.chisquare(2, 1024).astype(np.float32)):
        assert_ggmls(llama_bin, t, x, weights)


@pytest.mark.parametrize(("t", "by"), ENCODERS, ids=str)
@pytest.mark.parametrize("blocks", [3, 40])
def test_every_row_range_gives_the_same_bytes(t: TensorType, by: str, blocks: int) -> None:
    """Importance begins anew with each row, wherever in a batch that is; other rows stay as they were."""
    n = blocks * t.block if t.is_quantized else 12 * blocks + 1
    x = np.tile(awkward_rows(n, 5, 1e3), (2, 1))[:41]
    for w in weights_for(t, awkward_imatrix(n, 5)):
        whole = encode(t, x, w, by)
        for row0, row1 in ((0, 1), (3, 20), (7, 40), (40, 41), (5, 5)):
            out = np.full_like(whole, 0x5A)
            encoder(t, by)(x, w, out, row0, row1)
            assert_same_bytes(out[row0:row1], whole[row0:row1], t)
            assert (out[:row0] == 0x5A).all()
            assert (out[row1:] == 0x5A).all()


@pytest.mark.parametrize(("t", "by"), BY_BLOCK, ids=str)
def test_golden_blocks_do_not_depend_on_their_batch(t: TensorType, by: str) -> None:
    """A row of 43 blocks, as full batches and a part of one, and block by block."""
    rng, n = np.random.default_rng(0), t.block
    x = (rng.standard_normal(43 * n) * np.exp(rng.standard_normal(43 * n) / 2)).astype(np.float32)[None]
    x[0, 5 * n : 6 * n] = 0
    drawn = NO_WEIGHTS if t.family == BY_ROW else np.exp(rng.standard_normal(43 * n)).astype(np.float32)
    for weights in weights_for(t, drawn):
        whole = encode(t, x, weights, by).reshape(43, -1)
        for b in range(43):
            part = slice(b * n, b * n + n)
            assert_same_bytes(encode(t, x[:, part], weights[part], by), whole[b : b + 1], t)
