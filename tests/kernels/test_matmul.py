"""Matrix products against numpy, from the same quantized activations: every type, few and many rows, awkward shapes.

Weights end where a page that nobody may read begins, so a kernel that reads past a row's end does not go unnoticed.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from cpu_products import TEAMS, Rows, aligned
from matmul_cases import awkward_rows, decode, draw_weights, products

from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.layer.glu import limits
from quantkit.kernels.cpu.matmul.activations import SCALES, SUMS, TOTALS
from quantkit.kernels.cpu.matmul.matmul import (
    cached_rows,
    mul_mat,
    products_of,
    scratch_bytes,
    up_gate,
    up_gate_scratch_bytes,
)
from quantkit.kernels.cpu.matmul.products import BLOCK
from quantkit.kernels.formats import FORMATS
from quantkit.model.ops import Activation
from quantkit.types import BY_NAME

TYPES = list(FORMATS)
MOST = 2 * BLOCK + 3


def before_a_forbidden_page(data):
    """Return a copy of the bytes that ends at the end of the readable memory."""
    pages = -(-data.size // mmap.PAGESIZE) + 1
    space = mmap.mmap(-1, pages * mmap.PAGESIZE)
    array = np.frombuffer(space, np.uint8)
    end = (pages - 1) * mmap.PAGESIZE
    array[end - data.size : end] = data.reshape(-1)
    libc = ctypes.CDLL(None, use_errno=True)
    last = ctypes.c_void_p(address_of(array) + end)
    assert libc.mprotect(last, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return array[end - data.size : end].reshape(data.shape)


def weights(t, n_out, n_in, seed=0):
    """Return rows of a type as bytes: random levels under scales of about one."""
    return before_a_forbidden_page(draw_weights(t, (n_out, n_in), np.random.default_rng(seed), scale=(0.25, 1)))


def expected(t, data, rows):
    """Return (products, sums of magnitudes) in float64."""
    values, excess = rows.values()
    return products(data, t, values, excess), np.abs(values) @ np.abs(decode(data, t).T)


def multiply(t, data, n_out, rows, threads=1, bias=None, scale=None, pad=3, at_once=BLOCK):
    """Return mul_mat's result; the output's rows are ``pad`` values longer than the result, and stay as they were."""
    team, (count, n_in) = TEAMS[threads], rows.x.shape
    batch = Batch(team, MOST)
    batch.set(np.zeros(count, np.int32))
    out = np.full((count, n_out + pad), -7, np.float32)
    scratch_size = -(-scratch_bytes(t, n_in) // 64) * 64
    scratch = aligned(threads * scratch_size)
    block = mul_mat.block(
        batch=batch.address, x=address_of(rows.bytes), x_stride=rows.stride, w=address_of(data),
        row_bytes=data.strides[0], products=products_of(t), n_in=n_in, n_out=n_out, out=address_of(out),
        out_stride=out.strides[0], rows_of=0, per=1, bias=0 if bias is None else address_of(bias),
        scale=0 if scale is None else address_of(scale), scratch=address_of(scratch), scratch_bytes=scratch_size,
        at_once=at_once,
    )  # fmt: skip
    Tape(team, batch, [(mul_mat, block)]).run()
    assert (out[:, n_out:] == -7).all()
    return out[:, :n_out]


def shapes(t):
    """(n_out, n_in): whole panels and parts of one, whole units and rows that end within one."""
    tails = {1: [(5, 1), (37, 77), (33, 300)], 256: []}.get(t.block, [(37, t.block), (33, 512 + t.block)])
    return [(32, 256), (1, 512), (70, 768), *tails]


@pytest.mark.parametrize("name", TYPES)
def test_products(name):
    t, rng = BY_NAME[name], np.random.default_rng(1)
    for n_out, n_in in shapes(t):
        all_forms = (n_out, n_in) == shapes(t)[-1]
        data = weights(t, n_out, n_in)
        x = (rng.standard_normal((64, n_in)) * np.exp(rng.standard_normal(n_in))).astype(np.float32)
        want, magnitudes = expected(t, data, Rows(t, x))
        for count in (1, 2, 3, 4, 5, 7, 8, 13, 33, 61, 64) if all_forms else (1, 3, 5, 61):
            out = multiply(t, data, n_out, Rows(t, x[:count]))
            worst = np.max(np.abs(out - want[:count]) / magnitudes[:count])
            assert worst < 5e-7, f"{n_out} x {n_in}, {count} rows: {worst}"


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "F16"])
@pytest.mark.parametrize("count", [2, 40])
def test_every_thread_count_gives_the_same_bits(name, count):
    t = BY_NAME[name]
    data = weights(t, 101, 512)
    x = np.random.default_rng(2).standard_normal((count, 512)).astype(np.float32)
    one = multiply(t, data, 101, Rows(t, x))
    for threads in (2, 3):
        rows = Rows(t, x, threads)
        assert np.array_equal(rows.bytes, Rows(t, x).bytes)
        assert np.array_equal(multiply(t, data, 101, rows, threads), one)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "F16"])
def test_cache_state_does_not_change_bits(name):
    """Panels are unpacked again for the next rows: two blocks and three rows, in one, two and three parts."""
    t = BY_NAME[name]
    data, rows = weights(t, 70, 512), Rows(t, np.random.default_rng(7).standard_normal((MOST, 512)).astype(np.float32))
    batched = multiply(t, data, 70, rows, at_once=3 * BLOCK)
    for at_once in (BLOCK, 2 * BLOCK):
        assert np.array_equal(multiply(t, data, 70, rows, threads=2, at_once=at_once), batched)


def test_rows_in_the_cache(monkeypatch):
    """Whole blocks, at least one, as long as the cache holds half of it."""
    monkeypatch.setattr("quantkit.kernels.cpu.matmul.matmul.l2_bytes", lambda: BLOCK << 12)
    assert [cached_rows(n) // BLOCK for n in (1 << 10, 1 << 12, 1 << 13)] == [4, 1, 1]
    assert cached_rows((1 << 13) + 1) > 1 << 30


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "IQ4_XS", "Q8_0", "Q5_1"])
def test_a_product_hardly_depends_on_its_batch(name):
    """One row alone, four at a time, and in a tile: only the order of additions in f32 differs."""
    t = BY_NAME[name]
    data = weights(t, 64, 2048)
    x = np.random.default_rng(3).standard_normal((64, 2048)).astype(np.float32)
    full = multiply(t, data, 64, Rows(t, x))
    for count in (1, 4):
        partial = multiply(t, data, 64, Rows(t, x[:count]))
        assert np.mean((partial - full[:count]) ** 2) < 1e-12 * np.mean(full**2)


@pytest.mark.parametrize("count", [1, 9])
def test_scale_and_bias(count):
    t, rng = BY_NAME["Q4_K"], np.random.default_rng(4)
    data = weights(t, 45, 256)
    bias, scale = rng.standard_normal(45).astype(np.float32) * 100, np.array([2.5], np.float32)
    rows = Rows(t, rng.standard_normal((count, 256)).astype(np.float32))
    out, (want, magnitudes) = multiply(t, data, 45, rows, bias=bias, scale=scale), expected(t, data, rows)
    assert np.all(np.abs(out - (2.5 * want + bias)) < 1e-6 * (2.5 * magnitudes + np.abs(bias)))


def test_heads_of_a_larger_value():
    """Heads: x and out begin within a row, and rows lie further apart than they are long."""
    t, rng = BY_NAME["Q8_0"], np.random.default_rng(5)
    x = rng.standard_normal((20, 64)).astype(np.float32)
    rows = Rows(t, x)
    data = weights(t, 32, 64)
    every_other = Rows(t, x[::2].copy())
    every_other.bytes, every_other.stride = rows.bytes, 2 * rows.stride
    assert np.array_equal(multiply(t, data, 32, every_other), multiply(t, data, 32, rows)[::2])


@pytest.mark.parametrize("kind", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("count", [1, 11, 64])
@pytest.mark.parametrize(("up_name", "gate_name"), [("Q4_K", "Q4_K"), ("Q4_K", "Q8_0")])
def test_up_gate(kind, count, up_name, gate_name):
    """Fused, and the two products by themselves: the same numbers under the activation."""
    up_type, gate_type, rng = BY_NAME[up_name], BY_NAME[gate_name], np.random.default_rng(6)
    a = Activation(kind, gate_limit=40.0, up_limit=30.0)
    n_out, n_in, threads = 71, 512, 2
    x = rng.standard_normal((count, n_in)).astype(np.float32)
    slots, plain = {}, {}
    scale = np.array([0.02], np.float32)
    keep = []
    for side, t in (("up", up_type), ("gate", gate_type)):
        data = weights(t, n_out, n_in, seed=len(side))
        rows, bias = Rows(t, x), rng.standard_normal(n_out).astype(np.float32)
        plain[side] = multiply(t, data, n_out, rows, bias=bias, scale=scale).astype(np.float64)
        slots |= {
            side: address_of(data), f"{side}_row_bytes": data.strides[0], f"{side}_products": products_of(t),
            f"{side}_x": address_of(rows.bytes), f"{side}_x_stride": rows.stride, f"{side}_bias": address_of(bias),
            f"{side}_scale": address_of(scale),
        }  # fmt: skip
        keep.append((data, rows, bias))
    team, out = TEAMS[threads], np.zeros((count, n_out), np.float32)
    batch = Batch(team, MOST)
    batch.set(np.zeros(count, np.int32))
    scratch_size = up_gate_scratch_bytes(up_type, gate_type, n_in)
    scratch = aligned(threads * scratch_size)
    op = up_gate(a)
    block = op.block(
        batch=batch.address, **slots, n_in=n_in, n_out=n_out, out=address_of(out), out_stride=out.strides[0],
        rows_of=0, per=1, scratch=address_of(scratch), scratch_bytes=scratch_size, at_once=BLOCK, **limits(a),
    )  # fmt: skip
    Tape(team, batch, [(op, block)]).run()
    g, u = np.minimum(plain["gate"], 40), np.clip(plain["up"], -30, 30)
    alpha, offset = (1.702, 1) if kind == "swiglu_oai" else (1, 0)
    with np.errstate(over="ignore"):  # e^-x is infinite where the activation is 0
        gated = g / (1 + np.exp(-alpha * g)) * (u + offset)
    assert np.allclose(out, gated, rtol=2e-5, atol=1e-5)


# ---------------------------------------------------------------- the peer


@pytest.mark.peer
@pytest.mark.parametrize(("kind", "name", "size", "field"), [
    ("q8_0", "quantize_row_q8_0", 34, 2), ("q8_1", "quantize_row_q8_1", 36, 4), ("q8_k", "quantize_row_q8_K", 292, 4),
])  # fmt: skip
@pytest.mark.parametrize("n", [256, 2048, 352])
def test_quantized_activations_equal_ggmls(kind, name, size, field, n, llama_bin):
    block = 256 if kind == "q8_k" else 32
    n = n // block * block
    library = ctypes.CDLL(str(llama_bin / "libggml-cpu.so"))
    t = BY_NAME[{"q8_0": "Q8_0", "q8_1": "Q4_1", "q8_k": "Q4_K"}[kind]]
    # Levels of denormals whose scale is 0 do not matter; sums under an infinite one are no numbers.
    x = awkward_rows(n) if kind == "q8_k" else np.delete(awkward_rows(n), [3, 8], 0)
    rows = Rows(t, x)
    actual, scales = rows.part(0, 256, np.int8), rows.part(SCALES, 16, np.float32)
    for i, row in enumerate(x):
        expected = np.zeros((n // block, size), np.uint8)
        getattr(library, name)(
            ctypes.c_void_p(address_of(row)), ctypes.c_void_p(address_of(expected)), ctypes.c_int64(n)
        )
        levels = expected[:, field : field + block].view(np.int8).reshape(-1)
        assert np.array_equal(actual[i, :n], levels)
        assert not actual[i, n:].any()
        d = expected[:, :2].copy().view("<f2") if block == 32 else expected[:, :4].copy().view("<f4")
        d = np.repeat(d.reshape(-1).astype(np.float32), block // 16)
        assert np.array_equal(scales[i, : n // 16], d)
        totals = levels.reshape(-1, 16).sum(1, dtype=np.int64)
        if kind == "q8_1":
            s = expected[:, 2:4].copy().view("<f2").reshape(-1).astype(np.float32)
            assert np.array_equal(rows.part(SUMS, 16, np.float32)[i, : n // 16 : 2], s)
        else:
            assert np.array_equal(rows.part(SUMS, 16, np.float32)[i, : n // 16], d * totals.astype(np.float32))
        assert np.array_equal(rows.part(TOTALS, 16, np.int16)[i, : n // 16], totals)
