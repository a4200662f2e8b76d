"""Norms on the device against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from device_memory import Memory
from layer_cases import normed

from quantkit.kernels.cuda.layer import norms_rope


@pytest.mark.parametrize("kind", norms_rope.NORM_KINDS)
@pytest.mark.parametrize(("rows", "width", "group", "n_weight"), [(3, 192, 192, 192), (5, 96, 32, 32), (1, 48, 8, 16)])
def test_norms_agree_with_numpy(memory: Memory, kind: str, rows: int, width: int, group: int, n_weight: int) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((rows, width)).astype(np.float32) + 0.5
    weight, bias = rng.standard_normal((2, n_weight)).astype(np.float32)
    out = memory.allocate(x.shape)
    groups = rows * width // group
    for w, b in ((weight, bias), (weight, None), (None, None)):
        memory.run(
            norms_rope.norm(kind, groups),
            x=memory.put(x),
            out=out,
            weight=0 if w is None else memory.put(w),
            bias=0 if b is None else memory.put(b),
            groups=groups,
            group=group,
            per_row=width // group,
            n_weight=n_weight,
            eps=1e-5,
        )
        want = normed(x, kind, group, w, b)
        np.testing.assert_allclose(memory.get(out, x.shape), want, rtol=2e-6, atol=2e-6)
