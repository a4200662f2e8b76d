"""Blocks on the grid of a type are encoded exactly, and no other block changes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grids import F32, as_stored, gaussian, qat_weights
from quantkit.kernels import dequantize, quantize
from quantkit.kernels.cpu.encode.lattice_rows import blocks_on_lattice, keep_exact_blocks
from quantkit.kernels.lattices import PRECISIONS, lattice_of
from quantkit.kernels.levels import Integers, read_integers
from quantkit.types import BY_NAME, TYPES, TensorType

N = 512
SEARCHED = [t for t in TYPES if lattice_of(t) is not None]
#: The share of blocks of BF16 that are exact at least: with a minimum, a few have no second pair of scales in reach.
LEAST = {"Q4_1": 0.99, "Q5_1": 0.99, "IQ2_XXS": 0.96, "IQ2_S": 0.96}


def keep(t: TensorType, source: str, x: F32) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the bytes without and with the option, and the number of exact values."""
    plain = quantize(x, t, np.ones(x.shape[1], np.float32) if t.imatrix == "required" else None)
    result = plain.copy()
    return plain, result, keep_exact_blocks(t, BY_NAME[source], x, result).values


def exact_values(t: TensorType, source: str, x: F32, rows: np.ndarray) -> np.ndarray:
    """Return which values decode to the source's number, by block: bool [blocks]."""
    equal = as_stored(dequantize(rows, t, x.shape[1]), source) == x
    return equal.reshape(-1, t.block).all(axis=1)


@cache
def bytes_of(name: str, weighted: bool) -> np.ndarray:
    t = BY_NAME[name]
    return quantize(gaussian(16, N), t, np.ones(N, np.float32) if weighted or t.imatrix == "required" else None)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("source", PRECISIONS)
@pytest.mark.parametrize("t", SEARCHED, ids=str)
def test_decoded_values_are_on_the_grid(t: TensorType, source: str, weighted: bool) -> None:
    """Decoded blocks of a type lie on its grid, in every float type that stores them."""
    x = as_stored(dequantize(bytes_of(t.name, weighted), t, N), source)
    plain, result, exact = keep(t, source, x)
    least = LEAST.get(t.name, 1) if source == "BF16" else 1
    assert exact >= least * x.size
    assert exact_values(t, source, x, result).sum() * t.block == exact
    assert exact >= exact_values(t, source, x, plain).sum() * t.block


#: Where bytes of an imatrix or the plain encoder come back for certain, apart from ties of sign.
IDENTICAL = (
    *("Q4_1", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS", "Q2_K", "Q4_K", "Q5_K", "MXFP4", "NVFP4", "TQ2_0", "Q1_0"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("source", ["F32", "F16"])
@pytest.mark.parametrize("name", IDENTICAL)
def test_requantized_blocks_are_the_old_ones(name: str, source: str, weighted: bool) -> None:
    t, before = BY_NAME[name], bytes_of(name, weighted)
    result = keep(t, source, as_stored(dequantize(before, t, N), source))[1]
    assert result.tobytes() == before.tobytes()


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q3_K", "Q6_K"])
def test_other_blocks_differ_in_the_sign_of_scale_and_levels_alone(name: str) -> None:
    """Where two values of opposite signs are the largest, numbers do not say which made the scale."""
    t, before = BY_NAME[name], bytes_of(name, True)
    result = keep(t, "F16", as_stored(dequantize(before, t, N), "F16"))[1]
    assert (dequantize(result, t, N) == dequantize(before, t, N)).all()
    old, new = (_scales(read_integers(t, rows)) for rows in (before, result))
    assert (np.abs(old) == np.abs(new)).all()
    assert (old != new).mean() < 0.1


def _scales(i: Integers) -> np.ndarray:
    """Return the scales of sub-blocks, except for a constant factor, of types with signed scales."""
    assert i.d is not None
    if i.s is None:
        return i.d
    s = i.s.view(np.int8).astype(np.float32) if i.s.max() > 63 else i.s.astype(np.float32) - 32
    return np.repeat(i.d, s.shape[1] // i.d.shape[1], axis=1) * s


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("source", ["BF16", "F16"])
@pytest.mark.parametrize("divisor", [7, 7.5, 8, -8])
def test_qat_weights_are_exact_as_q4_0(divisor: float, source: str, group: int) -> None:
    x = qat_weights(16, N, divisor, group, source)
    plain, result, exact = keep(BY_NAME["Q4_0"], source, x)
    assert exact == x.size
    assert exact_values(BY_NAME["Q4_0"], source, x, result).all()
    if divisor > 0:
        assert exact_values(BY_NAME["Q4_0"], source, x, plain).mean() < 0.9


@pytest.mark.parametrize("group", [32, 128])
def test_bf16_weights_in_wider_floats_are_exact(group: int) -> None:
    """A BF16 checkpoint that was converted to F16 or F32 still has scales and products rounded to BF16."""
    x = qat_weights(16, N, 7, group, "BF16")
    for source in ("F16", "F32"):
        assert keep(BY_NAME["Q4_0"], source, x)[2] == x.size


@pytest.mark.parametrize("source", PRECISIONS)
@pytest.mark.parametrize("t", SEARCHED, ids=str)
def test_weights_off_the_grid_have_the_encoders_bytes(t: TensorType, source: str) -> None:
    x = as_stored(gaussian(8, N, seed=5), source)
    plain, result, exact = keep(t, source, x)
    on_grid = exact_values(t, source, x, result)
    assert exact == on_grid.sum() * t.block
    equal = (plain.reshape(-1, t.block_bytes) == result.reshape(-1, t.block_bytes)).all(axis=1)
    assert (equal | on_grid).all()
    assert on_grid.mean() < 0.05 or t.name == "Q8_0"


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["Q4_0", "Q4_1", "Q8_0", "Q3_K", "Q4_K", "Q6_K", "MXFP4"]),
    source=st.sampled_from(sorted(PRECISIONS)),
    seed=st.integers(0, 2**32 - 1),
    spoiled=st.lists(st.integers(0, N - 1), max_size=3),
    exponent=st.integers(-12, 4),
)
def test_each_block_is_exact_or_the_encoders(
    name: str, source: str, seed: int, spoiled: list[int], exponent: int
) -> None:
    """Some values of a row on the grid are spoiled: only their blocks change, to the encoder's bytes."""
    t = BY_NAME[name]
    x = dequantize(quantize(gaussian(1, N, seed, std=2.0**exponent), t), t, N)
    x[0, spoiled] *= np.float32(1.09)
    x = as_stored(x, source)
    plain, result, exact = keep(t, source, x)
    on_grid = exact_values(t, source, x, result)
    equal = (plain.reshape(-1, t.block_bytes) == result.reshape(-1, t.block_bytes)).all(axis=1)
    assert (equal | on_grid).all()
    assert exact == on_grid.sum() * t.block


def test_zeros_and_constants_are_exact() -> None:
    x = np.zeros((2, N), np.float32)
    x[1] = np.float32(0.25)
    for t in SEARCHED:
        plain, result, _ = keep(t, "BF16", x)
        assert result[0].tobytes() == plain[0].tobytes()
        better = exact_values(t, "BF16", x, result) >= exact_values(t, "BF16", x, plain)
        assert better.all()


def test_ternary_weights_are_found() -> None:
    x = (np.random.default_rng(3).integers(-1, 2, (4, N)) * np.float32(0.013)).astype(np.float32)
    x = as_stored(x, "BF16")
    for name in ("TQ2_0", "Q2_0", "Q4_0", "Q8_0"):
        assert blocks_on_lattice(BY_NAME[name], BY_NAME["BF16"], x).all()
    assert not blocks_on_lattice(BY_NAME["Q1_0"], BY_NAME["BF16"], x).any()


@pytest.mark.parametrize("t", SEARCHED, ids=str)
def test_the_fields_of_a_block_have_all_of_its_bits_once(t: TensorType) -> None:
    lattice = lattice_of.__wrapped__(t)
    bits = [
        8 * (byte + k) + shift + i
        for _, byte, shift, _, count, fields in lattice.runs.tolist()
        for k in range(fields)
        for i in range(count)
    ]
    assert sorted(bits) == list(range(8 * t.block_bytes))
    assert lattice.ends[-1] == len(lattice.runs)
