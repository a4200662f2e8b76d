"""GELU as transformers computes it, for the reference backend: ggml's is that of the tanh, rounded to f16."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from quantkit.model.ops import Activation


def exact_gelu(x: Any, a: Activation) -> Any:
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))


def exact_tanh_gelu(x: Any, a: Activation) -> Any:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
