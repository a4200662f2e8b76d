"""Values that conversion computes as torch 2.13 does on x86: CRC-32 of what torch returned."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from quantkit.checkpoint.expressions import Array
from quantkit.checkpoint.models.nemotron_vl import Resized
from quantkit.checkpoint.torch_math import inverse_softplus, softplus


def test_softplus_is_that_of_torch() -> None:
    """exp, log1p and their composition in float64 differ from it in 497 of these values."""
    values = softplus(np.linspace(-30, 25, 4096, dtype=np.float32))
    assert zlib.crc32(values.tobytes()) == 0x35419994


def test_softplus_of_extreme_values() -> None:
    x = np.array([-np.inf, -1e30, 0, 20.5, 3e38, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(softplus(x), np.array([0, 0, np.log(2), 20.5, 3e38, np.inf, np.nan], np.float32))


def test_the_inverse_of_softplus() -> None:
    """Every BF16 value comes back whose neighbours have another softplus; others have the same softplus."""
    x = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    x = x[np.isfinite(x) & (x > -80)]
    inverse = inverse_softplus(softplus(x))
    exact = (np.abs(x) > 1e-3) & (np.abs(x) < 1e30) | (x == 0)
    np.testing.assert_array_equal(inverse[exact], x[exact])
    np.testing.assert_allclose(softplus(inverse), softplus(x), rtol=3e-7)
    uneven = np.array([0.1, -3.3, 7.7], np.float32)
    np.testing.assert_allclose(inverse_softplus(softplus(uneven)), uneven, rtol=1e-6)


@pytest.mark.parametrize(("side", "crc"), [(1, 0x453B1E1A), (4, 0xE5765C2F), (5, 0x7E291F6C), (16, 0x8E084AD2)])
def test_resized_positions_are_those_of_torch(side: int, crc: int) -> None:
    """interpolate(mode="bilinear", align_corners=True) of a channels-last grid of 8 x 8 positions."""
    grid = (np.arange(64 * 16, dtype=np.int64) * 40503 % 65536 / 65536).astype(np.float32).reshape(1, 64, 16)
    resized = Resized(Array(grid), side)
    out = np.empty(side**2 * 16 * 4, np.uint8)
    middle = out.size // 2
    resized.read(0, out[:middle])
    resized.read(middle // 4, out[middle:])
    assert (resized.shape, zlib.crc32(out.tobytes())) == ((1, side**2, 16), crc)
