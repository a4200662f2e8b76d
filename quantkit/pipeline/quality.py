"""Error and speed of each type, measured on a fixed sample: the figures of ``quantkit types``.

``scripts/measure_types.py`` writes the table; tests/kernels/test_quality.py measures the errors again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.types import TensorType

F32 = npt.NDArray[np.float32]


class Quality(NamedTuple):
    """``error``: relative RMS error of the sample, weighted by importance, in percent; ``speed``: of encoding it."""

    error: float
    speed: str


#: Names of speeds, and their minimum Mweights/s on one core (AVX-512).
SPEEDS = {"fast": 200, "medium": 20, "slow": 0}

# fmt: off
QUALITY: dict[str, Quality] = {
    "F32": Quality(0, "fast"),
    "F16": Quality(0.02076, "fast"),
    "Q4_0": Quality(11.26, "fast"),
    "Q4_1": Quality(8.256, "medium"),
    "Q5_0": Quality(5.661, "fast"),
    "Q5_1": Quality(4.014, "medium"),
    "Q8_0": Quality(0.7658, "fast"),
    "Q2_K": Quality(28.38, "medium"),
    "Q3_K": Quality(17.63, "fast"),
    "Q4_K": Quality(8.452, "medium"),
    "Q5_K": Quality(4.36, "medium"),
    "Q6_K": Quality(2.231, "fast"),
    "IQ2_XXS": Quality(36.32, "medium"),
    "IQ2_XS": Quality(31.44, "medium"),
    "IQ3_XXS": Quality(18.27, "slow"),
    "IQ1_S": Quality(52.14, "medium"),
    "IQ4_NL": Quality(9.022, "fast"),
    "IQ3_S": Quality(15.14, "medium"),
    "IQ2_S": Quality(28.75, "medium"),
    "IQ4_XS": Quality(9.138, "fast"),
    "IQ1_M": Quality(44.53, "medium"),
    "BF16": Quality(0.1646, "fast"),
    "Q4_0_4X4": Quality(12.17, "fast"),
    "Q4_0_4X8": Quality(12.17, "fast"),
    "Q4_0_8X8": Quality(12.17, "fast"),
    "TQ1_0": Quality(87.15, "fast"),
    "TQ2_0": Quality(87.15, "fast"),
    "MXFP4": Quality(13.2, "fast"),
    "NVFP4": Quality(9.95, "fast"),
    "Q1_0": Quality(69.66, "fast"),
    "Q2_0": Quality(77.08, "fast"),
    "Q6_0": Quality(2.773, "fast"),
    "IQ1_BN": Quality(95.12, "fast"),
    "IQ2_BN": Quality(95.12, "fast"),
    "IQ2_K": Quality(30.27, "medium"),
    "IQ3_K": Quality(14.1, "medium"),
    "IQ4_K": Quality(6.788, "medium"),
    "IQ5_K": Quality(3.581, "medium"),
    "IQ6_K": Quality(1.601, "medium"),
    "IQ4_KS": Quality(8.47, "medium"),
    "IQ2_KS": Quality(35.4, "slow"),
    "IQ4_KSS": Quality(10.06, "medium"),
    "Q8_KV": Quality(1.808, "fast"),
    "IQ5_KS": Quality(4.253, "medium"),
    "IQ2_KT": Quality(27.08, "slow"),
    "IQ3_KT": Quality(14.7, "slow"),
    "IQ4_KT": Quality(7.953, "slow"),
    "IQ3_KS": Quality(17.56, "medium"),
    "IQ2_KL": Quality(23.48, "medium"),
    "IQ1_KT": Quality(35.65, "slow"),
    "Q4_0_R8": Quality(11.23, "fast"),
    "Q5_0_R4": Quality(5.618, "fast"),
    "Q8_0_R8": Quality(0.7658, "fast"),
    "Q2_K_R4": Quality(28.47, "medium"),
    "Q3_K_R4": Quality(17.56, "fast"),
    "Q4_K_R4": Quality(8.432, "medium"),
    "Q5_K_R4": Quality(4.359, "medium"),
    "Q6_K_R4": Quality(2.172, "fast"),
    "IQ2_XXS_R4": Quality(36.32, "medium"),
    "IQ2_XS_R4": Quality(30.3, "medium"),
    "IQ3_XXS_R4": Quality(18.27, "slow"),
    "IQ1_S_R4": Quality(51.77, "medium"),
    "IQ4_NL_R4": Quality(8.908, "fast"),
    "IQ3_S_R4": Quality(15.14, "medium"),
    "IQ2_S_R4": Quality(28.75, "medium"),
    "IQ4_XS_R8": Quality(9.027, "fast"),
    "IQ1_M_R4": Quality(42.91, "medium"),
    "BF16_R16": Quality(0.3317, "fast"),
    "Q6_0_R4": Quality(2.773, "fast"),
    "IQ2_BN_R4": Quality(95.12, "fast"),
    "IQ2_K_R4": Quality(30.27, "medium"),
    "IQ3_K_R4": Quality(14.1, "medium"),
    "IQ4_K_R4": Quality(6.788, "medium"),
    "IQ5_K_R4": Quality(3.581, "medium"),
    "IQ4_KS_R4": Quality(8.47, "medium"),
    "IQ5_KS_R4": Quality(4.253, "medium"),
    "MXFP4_R8": Quality(13.2, "fast"),
    "Q8_K_R16": Quality(1.226, "fast"),
    "Q8_KV_R8": Quality(1.808, "fast"),
    "Q8_K_R8": Quality(1.226, "fast"),
}
# fmt: on


def sample() -> tuple[F32, F32]:
    """Return rows of weights, float32 [64, 2048], and the importance of their columns, float32 [2048].

    Weights are Student-t with 6 degrees of freedom times a lognormal scale per row and per column, like matrices of
    language models; importances are lognormal, larger where columns are smaller.
    """
    rng = np.random.default_rng(20260815)
    rows, columns = np.exp(0.3 * rng.standard_normal((64, 1))), np.exp(0.3 * rng.standard_normal(2048))
    heavy = np.sqrt(6 / (rng.standard_normal((6, 64, 2048)) ** 2).sum(0))
    x = 0.02 * rng.standard_normal((64, 2048)) * heavy * rows * columns
    importance = np.exp(rng.standard_normal(2048)) / columns
    return x.astype(np.float32), importance.astype(np.float32)


def weighted_error(t: TensorType, encoder: str | None = None) -> float:
    """Return the relative RMS error of encoding the sample as type ``t``, weighted by importance, in percent.

    encoder: as in ``kernels.quantize``.
    """
    from quantkit.kernels import dequantize, quantize

    x, importance = sample()
    error = (dequantize(quantize(x, t, importance, encoder), t, x.shape[1]) - x).astype(np.float64)
    return 100 * float(np.sqrt((importance * error**2).sum() / (importance * x.astype(np.float64) ** 2).sum()))
