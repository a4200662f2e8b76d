"""The error of decoded values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.core.jit import kernel
from quantkit.kernels.cpu.core.simd import convert, f32x8, f64x8, hsum, load, splat


@kernel
def error_sums(
    x: npt.NDArray[np.float32], y: npt.NDArray[np.float32], weights: npt.NDArray[np.float32]
) -> tuple[float, float, float, float]:
    """Return the f64 sums of x^2, (x-y)^2, w x^2 and w (x-y)^2 over rows.

    ``x`` and ``y`` are float32 [rows, n], C-contiguous; ``weights`` float32 [n], or empty for weights of 1. The order
    of summation is fixed (eight lanes along a row), so the result depends only on the values.
    """
    zero = splat(f64x8, 0.0)
    square = 0.0
    error = 0.0
    w_square = 0.0
    w_error = 0.0
    n = x.shape[1]
    vector_end = n // 8 * 8
    for row in range(x.shape[0]):
        a = zero
        b = zero
        c = zero
        d = zero
        offset = row * n * 4
        for i in range(0, vector_end, 8):
            v = convert(f64x8, load(f32x8, x, offset + 4 * i))
            e = v - convert(f64x8, load(f32x8, y, offset + 4 * i))
            a += v * v
            b += e * e
            if weights.size:
                w = convert(f64x8, load(f32x8, weights, 4 * i))
                c += w * (v * v)
                d += w * (e * e)
        square += hsum(a)
        error += hsum(b)
        w_square += hsum(c)
        w_error += hsum(d)
        for i in range(vector_end, n):
            s, t = np.float64(x[row, i]), np.float64(x[row, i]) - np.float64(y[row, i])
            square += s * s
            error += t * t
            if weights.size:
                w_square += np.float64(weights[i]) * (s * s)
                w_error += np.float64(weights[i]) * (t * t)
    if weights.size == 0:
        return square, error, square, error
    return square, error, w_square, w_error
