"""Activations on the device are those of the CPU: the same integers, scales and sums, to the bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from cpu_products import Rows
from cuda_products import by_words
from device_memory import Memory
from matmul_cases import awkward_rows

from quantkit.kernels.cpu.matmul.activations import IN_ORDER, SCALES, SUMS
from quantkit.kernels.cuda.matmul import activations
from quantkit.kernels.formats import activation_format
from quantkit.types import BY_NAME

#: A type that wants activations in each format.
OF_FORMAT = {
    **{"q8_0": "Q4_0", "q8_1": "Q4_1", "q8_2": "Q6_0", "q8_k": "Q4_K", "q8_kv": "Q8_KV", "q8_k64": "IQ2_BN"},
    **{"f16": "F16", "bf16": "BF16"},
}
ROWS = 11


def expected(kind: str, x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return the rows the device should make, from those of the CPU: bytes [rows, row_bytes]."""
    with np.errstate(all="ignore"):
        rows = Rows(BY_NAME[OF_FORMAT[kind]], x)
    assert rows.kind == kind
    if not kind.startswith("q8"):
        return rows.bytes.reshape(len(x), -1)
    d, sums = rows.part(SCALES, 16, np.float32), rows.part(SUMS, 16, np.float32)
    if kind not in ("q8_1", "q8_k"):
        sums = np.zeros_like(sums)
    np.testing.assert_array_equal(d[:, ::2], d[:, 1::2])
    levels, d = rows.part(0, 256, np.uint8), d[:, ::2]
    if kind == "q8_k64":  # the CPU has the four scales once in 256 values, each for 64
        levels = by_words(rows.part(IN_ORDER, 256, np.uint8))
        d = np.tile(d[:, :8:2], d.shape[1] // 4)
    parts = (levels, d, sums)
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8) for p in parts], axis=1)


@pytest.mark.parametrize("kind", activations.KINDS)
@pytest.mark.parametrize(("n", "gap", "lead"), [(512, 0, 0), (256, 3, 0), (1376, 4, 1), (80, 0, 0), (33, 1, 2)])
def test_rows_equal_the_cpus(memory: Memory, kind: str, n: int, gap: int, lead: int) -> None:
    """Rows ``gap`` values apart, the first one ``lead`` values after an aligned address; nothing after the last."""
    x = awkward_rows(n)
    row_bytes = activations.row_bytes(kind, n)
    spread = np.full(lead + ROWS * (n + gap), np.nan, np.float32)
    spread[lead:].reshape(ROWS, n + gap)[:, :n] = x
    out = memory.allocate((ROWS + 1, row_bytes), np.uint8)
    slots = {"rows": ROWS, "x": memory.put(spread) + 4 * lead, "x_stride": 4 * (n + gap), "n": n, "out": out}
    memory.run(activations.quantize(kind, n, ROWS), **slots)
    actual = memory.get(out, (ROWS + 1, row_bytes), np.uint8)
    np.testing.assert_array_equal(actual[:ROWS], expected(kind, x))
    assert (actual[ROWS] == 255).all()


def test_every_format_is_supported() -> None:
    kinds = {activation_format(BY_NAME[name]) for name in ("F32", "Q8_0", "Q5_1", "IQ2_S", *OF_FORMAT.values())}
    assert kinds == {"f32", *activations.KINDS}
    with pytest.raises(ValueError, match="not f32"):
        activations.quantize("f32", 32, 1)
