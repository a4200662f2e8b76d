"""The pipeline from a file to the encoders of a GPU; test_gpus.py tests whole runs."""

from __future__ import annotations

import numpy as np
import pytest
from device_memory import Memory

from quantkit.kernels.cuda.encode.pipeline import RowConversion, SlotMemory, largest, memory_for, not_finite
from quantkit.types import BY_NAME


@pytest.mark.parametrize("n", [3, 1024, 2050])
def test_nonfinite_values_are_detected(memory: Memory, n: int) -> None:
    """Wherever they are; the largest and the smallest are finite."""
    good = np.resize(np.array([0, -0.0, 1e-45, -3.4028235e38, 3.4028235e38], np.float32), n)
    flag = memory.put(np.zeros(1, np.int32))
    memory.run(not_finite(n), x=memory.put(good), flag=flag, n=n)
    assert memory.get(flag, (1,), np.int32)[0] == 0
    for index, bad in ((0, np.nan), (n - 1, np.inf), (n // 2, -np.inf)):
        x = good.copy()
        x[index] = bad
        flag = memory.put(np.zeros(1, np.int32))
        memory.run(not_finite(n), x=memory.put(x), flag=flag, n=n)
        assert memory.get(flag, (1,), np.int32)[0] == 1


def test_slot_memory_fits_the_largest_form() -> None:
    bf16, f32, q4 = (BY_NAME[name] for name in ("BF16", "F32", "Q4_0"))
    forms = [RowConversion(bf16, q4, 512), RowConversion(f32, q4, 256)]
    assert memory_for(forms[0], 10) == SlotMemory(10 * 1024, 4 * 512 * 10, 5120, 256, 256 + 10 * 288 + 16 * 10)
    assert memory_for(forms[1], 10).values == 0, "nothing is to be decoded"
    assert largest(forms, lambda form: 5120 // form.n) == memory_for(forms[0], 10) | memory_for(forms[1], 20)
