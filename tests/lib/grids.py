"""Weights on the grids of QAT checkpoints, and rounding to the types of sources."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def as_stored(x: F32, type_name: str) -> F32:
    """Return values rounded to BF16 or F16, or F32 as they are."""
    if type_name == "F16":
        return x.astype(np.float16).astype(np.float32)
    if type_name == "F32":
        return x
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded: F32 = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return rounded


def gaussian(rows: int, n: int, seed: int = 1, std: float = 0.03) -> F32:
    """Return Gaussian weights, float32 [rows, n]."""
    return (np.random.default_rng(seed).standard_normal((rows, n)) * std).astype(np.float32)


def qat_weights(rows: int, n: int, divisor: float, group: int, type_name: str, seed: int = 1) -> F32:
    """Return weights as 4-bit QAT leaves them: s * q in groups of one s, float32 [rows, n].

    divisor: s is the largest magnitude divided by it, rounded to the type, and q is -7 to 7; -8: s is the value of
    largest magnitude divided by it, and q is -8 to 7.
    """
    x = gaussian(rows, n, seed).reshape(-1, group)
    if divisor > 0:
        s = as_stored(np.abs(x).max(axis=1, keepdims=True) / np.float32(divisor), type_name)
        q = np.rint(x / s).clip(-7, 7)
    else:
        extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
        s = as_stored(extreme / np.float32(divisor), type_name)
        q = np.rint(x / s).clip(-8, 7)
    return as_stored((s * q).astype(np.float32).reshape(rows, n), type_name)
