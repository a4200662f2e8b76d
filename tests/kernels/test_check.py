"""Rows with NaN or Inf and blocks with impossible scales are found, and no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

from edge_rows import ggml
from quantkit.errors import FormatError
from quantkit.kernels.cpu.encode.check import MASKS, first_nonfinite_row, validate_rows
from quantkit.types import BY_NAME, TYPES, TensorType

MAINLINE = [t for t in TYPES if t.is_in("mainline") and t.family != "activation"]
CHECKED = [(t, field) for t in TYPES for field in t.fields if MASKS[field[1]] is not None]


@pytest.mark.parametrize("n", [1, 15, 16, 63, 64, 65, 100, 256])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_first_nonfinite_row(n: int, bad: float) -> None:
    largest = np.finfo(np.float32).max
    x = np.full((9, n), largest, np.float32)
    x[::2] = -largest
    assert first_nonfinite_row(x, 0, 9) == -1
    for column in {0, n // 2, n - 1}:
        y = x.copy()
        y[3, column] = y[6, n - 1 - column] = bad
        assert first_nonfinite_row(y, 0, 9) == 3
        assert first_nonfinite_row(y, 4, 9) == 6
        assert first_nonfinite_row(y, 0, 3) == -1
        assert first_nonfinite_row(y, 7, 9) == -1


def field_at(t: TensorType, data: np.ndarray, row: int, block: int, field: tuple[bool, str, int]) -> np.ndarray:
    """Return a view of one field of one block, or of the row."""
    of_row, kind, offset = field
    start = offset if of_row else t.row_header + block * t.block_bytes + offset
    width = MASKS[kind].itemsize
    return data[row, start : start + width].view(MASKS[kind].dtype)


@pytest.mark.parametrize(("t", "field"), CHECKED, ids=lambda v: getattr(v, "name", v))
def test_every_checked_field_is_detected(t: TensorType, field: tuple[bool, str, int]) -> None:
    mask = MASKS[field[1]]
    blocks = 300 if t.block == 1 else 5
    for block in (0, blocks // 2, blocks - 1):
        data = np.zeros((4, t.row_bytes(blocks * t.block)), np.uint8)
        offset = field_at(t, data, 2, block, field)
        offset[:] = mask
        assert validate_rows(t, data) == 2
        offset[:] = ~mask
        assert validate_rows(t, data) == -1
        offset[:] = mask & (mask - mask.dtype.type(1))  # all bits of the mask but one
        assert validate_rows(t, data) == -1


def test_all_bytes_255_are_detected_in_every_type_with_scales() -> None:
    for t in MAINLINE:
        data = np.full((2, t.row_bytes(2 * t.block)), 0xFF, np.uint8)
        assert validate_rows(t, data) == (0 if t.scales and t.name != "NVFP4" else -1), t.name


def test_readonly_and_unaligned_rows_are_checked() -> None:
    t = BY_NAME["F32"]
    raw = np.zeros(1 + 3 * 400, np.uint8)
    raw[1 + 2 * 400 + 396 :] = np.frombuffer(np.float32(np.inf).tobytes(), np.uint8)
    data = raw[1:].reshape(3, 400)
    data.flags.writeable = False
    assert validate_rows(t, data) == 2


@pytest.mark.parametrize("data", [np.zeros((2, 17), np.uint8), np.zeros(18, np.uint8), np.zeros((2, 18), np.int8)])
def test_rows_of_wrong_shape_are_refused(data: np.ndarray) -> None:
    with refuses(FormatError, "QK-E210 Q4_0 uint8", "[rows, 0 + k * 18 bytes]"):
        validate_rows(BY_NAME["Q4_0"], data)


def test_an_empty_input_is_valid() -> None:
    assert validate_rows(BY_NAME["Q4_0"], np.zeros((0, 18), np.uint8)) == -1


@pytest.mark.peer
@pytest.mark.parametrize("t", MAINLINE, ids=str)
def test_random_bytes_are_validated_like_ggml(llama_bin: Path, t: TensorType) -> None:
    """One row at a time: random scales are impossible now and then, in every field and every block."""
    rng = np.random.default_rng(t.id)
    data = rng.integers(0, 256, (400, t.row_bytes(3 * t.block)), np.uint8)
    if t.name == "F64":  # ggml narrows to f32 first and so refuses 1e39 too; we refuse NaN and Inf
        data = rng.choice([0.0, -1e38, 1e-300, np.nan, np.inf], (400, 3), p=[0.3, 0.3, 0.3, 0.05, 0.05]).view(np.uint8)
    valid = [
        ggml(llama_bin).ggml_validate_row_data(t.id, row.ctypes.data, row.size) for row in np.ascontiguousarray(data)
    ]
    assert [validate_rows(t, data[i : i + 1]) < 0 for i in range(400)] == valid
    assert validate_rows(t, data) == (valid.index(False) if False in valid else -1)
    if t.scales and t.name not in ("NVFP4", "F32"):
        assert False in valid
