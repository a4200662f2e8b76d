"""Activation functions and gated linear units in numpy, gelu with the roundings of ggml's table."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.layer.glu import FUNCTIONS
from quantkit.model.ops import Activation

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
KINDS = [
    *(Activation(kind) for kind in FUNCTIONS),
    Activation("silu", act_limit=2.0, up_limit=1.5),
    Activation("silu", gate_limit=1.0, up_limit=1.5),
    Activation("swiglu_oai", alpha=1.5, gate_limit=7.0, up_limit=7.0),
]


def half(x: F64) -> F64:
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(np.float16).astype(np.float64)


def gelu(x: F64) -> F64:
    h = half(x).astype(np.float32)  # the table of ggml is made in f32: 1 + tanh cancels for negative x
    u = np.float32(np.sqrt(2 / np.pi)) * h * (1 + np.float32(0.044715) * h * h)
    with np.errstate(invalid="ignore"):
        y = half(np.float32(0.5) * h * (1 + np.tanh(u.astype(np.float64)).astype(np.float32)))
    return np.where(x <= -10, 0, np.where(x >= 10, x, y))


def gelu_quick(x: F64) -> F64:
    return half(half(x) / (1 + np.exp(-1.702 * half(x))))


ACTIVATIONS = {
    "silu": lambda x, _: x / (1 + np.exp(-x)),
    "gelu": lambda x, _: gelu(x),
    "gelu_erf": lambda x, _: 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))),
    "gelu_quick": lambda x, _: gelu_quick(x),
    "relu": lambda x, _: np.maximum(x, 0),
    "relu_sqr": lambda x, _: np.maximum(x, 0) ** 2,
    "sigmoid": lambda x, _: 1 / (1 + np.exp(-x)),
    "swiglu_oai": lambda x, alpha: x / (1 + np.exp(-alpha * x)),
    "linear": lambda x, _: x,
    "softplus": lambda x, _: np.logaddexp(0, x),
}


def activated(a: Activation, x: F32) -> F64:
    y = np.minimum(x.astype(np.float64), a.gate_limit or np.inf)
    with np.errstate(over="ignore"):
        return np.minimum(ACTIVATIONS[a.kind](y, a.alpha), a.act_limit or np.inf)


def gated(a: Activation, gate: F32, up: F32) -> F64:
    u = up.astype(np.float64)
    u = np.clip(u, -a.up_limit, a.up_limit) if a.up_limit else u
    return activated(a, gate) * (u + (a.kind == "swiglu_oai"))


def close(a: Activation, actual: F32, want: F64, tolerance: float = 1e-7) -> None:
    """Compare results; tolerance: for the cancellation of 1 + tanh."""
    if a.kind in ("gelu", "gelu_quick"):
        # A result between two f16 values may round either way, but rarely.
        wrong = np.abs(actual - want) > 1e-6 * np.abs(want) + tolerance
        assert wrong.mean() < 1e-2
        np.testing.assert_allclose(actual, want, rtol=1.2e-3, atol=max(1e-6, 3 * tolerance))
    else:
        np.testing.assert_allclose(actual, want, rtol=2e-6, atol=5e-6 if a.kind in ("gelu_erf", "softplus") else 1e-6)
