"""Element by element, columns that move, embeddings: against numpy, for odd widths and any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from blocks import random_rows
from op_runner import run_operation
from type_params import DECODABLE, DECODED_ALIKE

from quantkit.errors import TypeNotSupported
from quantkit.kernels import dequantize
from quantkit.kernels.cpu.core.tape import N_OUTPUTS, N_TOKENS
from quantkit.kernels.cpu.layer import elementwise
from quantkit.kernels.cpu.layer.elementwise import embed, embed_scratch_bytes
from quantkit.types import TYPES

f32 = np.float32
threads = pytest.mark.parametrize("threads", [1, 2, 3])
#: rows, width: a vector, less than one, partial ones, and more than one thread's worth.
SHAPES = [(1, 16), (3, 5), (7, 33), (1, 10007), (64, 257)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def values(*shape, seed=1):
    return np.random.default_rng(seed).normal(0, 2, shape).astype(f32)


@threads
@shapes
def test_add(shape, threads):
    a, b = values(*shape), values(*shape, seed=2)
    for slots in ({"a": a}, {"a": "out", "start_with": a}):  # also in place
        out = run_operation(
            elementwise.add, shape, threads=threads, b=b, width=shape[1], rows_of=N_TOKENS, per=1, **slots
        )
        np.testing.assert_array_equal(out, a + b)


@threads
@shapes
@pytest.mark.parametrize(
    ("name", "settings", "want"),
    [
        ("scale", 0.37, lambda x: x * f32(0.37)),
        ("shift", 0.37, lambda x: x + f32(0.37)),
        ("clamp", 1.5, lambda x: np.clip(x, f32(-1.5), f32(1.5))),
        ("softcap", 3.0, lambda x: 3 * np.tanh(x.astype(np.float64) / 3)),
    ],
)
def test_maps(name, settings, want, shape, threads):
    x = values(*shape)
    operation = getattr(elementwise, name)
    for slots in ({"x": x}, {"x": "out", "start_with": x}):
        out = run_operation(
            operation, shape, threads=threads, width=shape[1], rows_of=N_TOKENS, per=1, by=settings, **slots
        )
        np.testing.assert_allclose(out, want(x), rtol=3e-7 if name == "softcap" else 0)


@threads
@shapes
def test_softplus(shape, threads):
    x = values(*shape) * 10
    out = run_operation(
        elementwise.softplus, shape, threads=threads, x=x, width=shape[1], rows_of=N_TOKENS, per=1, by=0
    )
    np.testing.assert_allclose(out, np.logaddexp(0, x.astype(np.float64)), rtol=1e-6, atol=1e-12)


@threads
@shapes
@pytest.mark.parametrize("eps", [-1e-6, -0.5])
def test_xielu(shape, threads, eps):
    x = values(*shape)
    x.flat[0] = -1e-4  # where e^x - 1 - x cancels
    constants = {"alpha_n": 0.75, "alpha_p": 1.25, "beta": 0.5, "eps": eps}
    out = run_operation(
        elementwise.xielu, shape, threads=threads, x=x, width=shape[1], rows_of=N_TOKENS, per=1, **constants
    )
    z = x.astype(np.float64)
    want = np.where(z > 0, 1.25 * z * z, 0.75 * (np.expm1(np.minimum(z, f32(eps))) - z)) + 0.5 * z
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=3e-7)


@threads
def test_output_rows_and_expert_rows(threads):
    x = values(9 * 4, 50)
    batch = {"tokens": np.zeros(30), "outputs": np.arange(9) * 3}
    out = run_operation(
        elementwise.scale, x.shape, threads=threads, batch=batch, x=x, width=50, rows_of=N_OUTPUTS, per=4, by=2.0
    )
    np.testing.assert_array_equal(out, 2 * x)


@threads
@pytest.mark.parametrize("outputs", [False, True])
def test_scale_by_position(outputs, threads):
    positions, picks = np.arange(40) * 777, np.arange(5, 25)
    rows = picks if outputs else np.arange(40)
    x = values(len(rows), 300)
    out = run_operation(
        elementwise.scale_by_position,
        x.shape,
        threads=threads,
        batch={"tokens": np.zeros(40), "positions": positions, "outputs": picks},
        x=x,
        width=300,
        rows_of=int(outputs),
        per=1,
        floor_scale=8192.0,
        alpha=0.1,
        offset=1.0,
    )
    factor = np.log(np.floor((positions[rows] + 1) / 8192) + 1) * 0.1 + 1
    assert len(set(factor)) > 2
    np.testing.assert_allclose(out, x * factor[:, None].astype(f32), rtol=2e-7)


@threads
@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize(("name", "combine"), [("multiply_by", np.multiply), ("plus_vector", np.add)])
@shapes
def test_vectors_along_rows(name, combine, repeat, shape, threads):
    x, vector = values(shape[0], shape[1] * repeat), values(shape[1], seed=3)
    out = run_operation(
        getattr(elementwise, name),
        x.shape,
        threads=threads,
        x=x,
        vector=vector,
        n=len(vector),
        width=x.shape[1],
        rows_of=N_TOKENS,
        per=1,
    )
    np.testing.assert_array_equal(out, combine(x, np.tile(vector, repeat)))


@threads
@pytest.mark.parametrize(("groups", "period", "start", "n"), [(1, 40, 8, 32), (4, 24, 0, 16), (50, 200, 72, 128)])
def test_take(groups, period, start, n, threads):
    x = values(6, groups * period)
    out = run_operation(
        elementwise.take,
        (6, groups * n),
        threads=threads,
        x=x,
        width=groups * n,
        x_width=groups * period,
        start=start,
        period=period,
        rows_of=N_TOKENS,
        per=1,
    )
    np.testing.assert_array_equal(out, x.reshape(6, groups, period)[:, :, start : start + n].reshape(6, -1))


@threads
@pytest.mark.parametrize(
    ("a_groups", "b_groups", "period_a", "period_b"), [(1, 1, 5, 3), (16, 1, 48, 24), (4, 2, 7, 9)]
)
def test_join(a_groups, b_groups, period_a, period_b, threads):
    a, b = values(11, a_groups * period_a), values(11, b_groups * period_b, seed=2)
    out = run_operation(
        elementwise.join,
        (11, a_groups * (period_a + period_b)),
        threads=threads,
        a=a,
        b=b,
        a_width=a.shape[1],
        b_width=b.shape[1],
        period_a=period_a,
        period_b=period_b,
        rows_of=N_TOKENS,
        per=1,
    )
    tiled = np.tile(b.reshape(11, b_groups, period_b), (1, a_groups // b_groups, 1))
    want = np.concatenate([a.reshape(11, a_groups, period_a), tiled], -1).reshape(11, -1)
    np.testing.assert_array_equal(out, want)


@threads
def test_select_outputs(threads):
    x, indices = values(100, 300), np.array([99, 3, 4, 50] * 10)
    out = run_operation(
        elementwise.select_outputs,
        (40, 300),
        threads=threads,
        batch={"tokens": np.zeros(100), "outputs": indices},
        x=x,
        width=300,
    )
    np.testing.assert_array_equal(out, x[indices])


@pytest.mark.parametrize("t", DECODED_ALIKE, ids=str)
def test_embeddings_of_every_family(t):
    width, n_vocab = (512 if t.block == 256 else 384 if t.block > 64 else 320), 20
    weight = random_rows(t, n_vocab, width)
    tokens = np.array([0, 19, 7, 7, *range(20)] * 2)
    rows = dequantize(weight, t, width)
    for threads, scale, rows_by in ((1, 1.0, "token"), (3, 0.5, "token"), (2, 1.0, "position")):
        bytes_each = embed_scratch_bytes(t, width)
        out = run_operation(
            embed(t),
            (len(tokens), width),
            threads=threads,
            batch={"tokens": tokens[::-1].copy(), "positions": tokens[::-1].copy(), f"{rows_by}s": tokens},
            weight=weight,
            rows_by=elementwise.ROWS_BY[rows_by],
            row_bytes=weight.shape[1],
            width=width,
            scale=scale,
            scratch=np.zeros(max(1, threads * bytes_each), np.uint8),
            scratch_bytes=bytes_each,
        )
        np.testing.assert_array_equal(out, rows[tokens] * f32(scale))


def test_types_without_a_decoder_have_no_embeddings():
    missing = [t for t in TYPES if t not in DECODABLE]
    assert missing
    with pytest.raises(TypeNotSupported):
        embed(missing[0])
