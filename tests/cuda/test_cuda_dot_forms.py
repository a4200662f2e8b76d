"""The forms in which few rows are multiplied: equal to numpy, every type, for few columns and for several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from blocks import row_scales
from cuda_products import by_words
from device_memory import Memory
from matmul_cases import decode, draw_weights

from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.formats import activation_format, format_of
from quantkit.types import BY_NAME

ALL = str(Path(__file__).parents[1] / "kernels/dot_forms_all.cu")
#: As in dot_forms_all.cu; Q5_0 for all types without a form of their own.
NAMES = ["Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]
NAMES += ["TQ1_0", "TQ2_0", "Q2_0", "Q1_0", "Q5_0", "IQ1_S_ROW", "IQ1_M_ROW"]
NAMES += ["IQ4_K", "IQ5_K", "IQ6_K", "IQ4_KS", "IQ5_KS", "IQ4_KSS", "IQ2_KL", "IQ2_K", "IQ3_K", "IQ2_KS", "IQ3_KS"]
NAMES += ["IQ1_KT", "IQ2_KT", "IQ4_KT", "IQ1_BN", "IQ3_KT", "IQ2_BN"]


@pytest.mark.parametrize("several", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_form_is_exact(memory: Memory, name: str, several: int) -> None:
    t, rng, n = BY_NAME[name], np.random.default_rng(5), 512
    extremes = np.resize(np.array([-128, 127, 127], np.int8), n)
    for seed, x in enumerate((rng.integers(-128, 128, n).astype(np.int8), extremes)):
        w = draw_weights(t, (n,), np.random.default_rng(seed))
        want = (decode(w, t).reshape(-1) / row_scales(t, w[None])[0, 0] * x).reshape(2, 256).sum(1)
        w = w[t.row_header :]
        if activation_format(t) == "q8_k64":
            x = by_words(x[None])[0]
        for shift in range(0, 16, format_of(t).align):
            out = memory.allocate((32,))
            slots = {"w": memory.put(w), "levels": memory.put(x), "out": out, "bytes": w.size, "shift": shift}
            kernel = Kernel(ALL, "dot_forms_all")
            memory.run(Shape(kernel, (1, 1, 1)), **slots, type=NAMES.index(name), several=several)
            shares = memory.get(out, (32,))
            shares = shares[~np.isnan(shares)].astype(np.float64)
            actual = shares.reshape(2, -1).sum(1)
            np.testing.assert_allclose(actual, want, rtol=0, atol=2e-7 * np.abs(shares).sum())
