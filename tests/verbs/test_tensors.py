"""``open_gguf``: values by name and shape, equal to PyPI gguf's reader; rows of them without the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from refusals import refuses

import quantkit
from quantkit.errors import FormatError, ResourceError, TypeNotSupported
from quantkit.kernels import dequantize, quantize
from quantkit.types import BY_NAME

EXPERTS, ROWS, N = 3, 8, 256


def write(path: Path, name: str, data: np.ndarray, shape: tuple[int, ...] = (N, ROWS, EXPERTS)) -> Path:
    fields = [quantkit.Field.of("general.architecture", "llama")]
    quantkit.write_gguf(path, fields, [("w", shape, name, data)])
    return path


def sample(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def test_values_equal_another_readers(tiny_moe: Path) -> None:
    tensors = {t.name: t for t in gguf.GGUFReader(tiny_moe).tensors}
    with quantkit.open_gguf(tiny_moe) as file:
        assert file.tensors.keys() == tensors.keys()
        for name, t in tensors.items():
            values = file.values(name)
            expected = gguf.quants.dequantize(t.data, t.tensor_type)
            assert values.dtype == np.float32
            assert values.shape == tuple(int(n) for n in reversed(t.shape))
            assert np.array_equal(values, expected.reshape(values.shape))


@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0", "Q4_K", "Q4_K_R4"])
@pytest.mark.parametrize(
    "rows",
    [..., 1, slice(1, 2), (2, slice(1, 7, 2)), (slice(None), 3), [2, 0], (slice(0, 0),), -1],
    ids=str,
)
def test_rows_select_values(tmp_path: Path, name: str, rows: Any) -> None:
    x = sample(EXPERTS, ROWS, N)
    t = BY_NAME[name]
    data = x if name == "F32" else x.astype(np.float16) if name == "F16" else quantize(x, t)
    values_of_all = dequantize(data.reshape(EXPERTS * ROWS, -1).view(np.uint8), t).reshape(x.shape)
    with quantkit.open_gguf(write(tmp_path / "m.gguf", name, data)) as file:
        assert np.array_equal(file.values("w"), values_of_all)
        values = file.values("w", rows)
        assert values.shape == values_of_all[rows].shape
        assert np.array_equal(values, values_of_all[rows])


def test_a_tensor_with_one_scale(tmp_path: Path) -> None:
    """I2_S: levels 0, 1, 2 are -1, 0, 1, times the scale behind the last row."""
    levels = np.random.default_rng(2).integers(0, 3, (4, 128)).astype(np.uint8)
    quarters = levels.reshape(4, 4, 32)
    rows = quarters[:, 0] << 6 | quarters[:, 1] << 4 | quarters[:, 2] << 2 | quarters[:, 3]
    tail = np.zeros(32, np.uint8)
    tail[:4] = np.array([0.5], "<f4").view(np.uint8)
    path = write(tmp_path / "m.gguf", "I2_S", np.concatenate([rows.reshape(-1), tail]), (128, 4))
    with quantkit.open_gguf(path) as file:
        assert np.array_equal(file.values("w"), 0.5 * (levels.astype(np.float32) - 1))
        assert np.array_equal(file.values("w", 2), 0.5 * (levels[2].astype(np.float32) - 1))


def test_shapes_without_rows(tmp_path: Path) -> None:
    vector = np.arange(4, dtype=np.float32)
    with quantkit.open_gguf(write(tmp_path / "v.gguf", "F32", vector, (4,))) as file:
        assert np.array_equal(file.values("w"), vector)
    with quantkit.open_gguf(write(tmp_path / "s.gguf", "F32", vector[2:3], ())) as file:
        assert file.tensors["w"].shape == (1,)  # as ggml writes a scalar
        assert file.values("w") == [2]
    with quantkit.open_gguf(write(tmp_path / "e.gguf", "F32", vector[:0], (4, 0))) as file:
        assert file.values("w").shape == (0, 4)


def test_refusals(tmp_path: Path) -> None:
    with quantkit.open_gguf(write(tmp_path / "i.gguf", "I32", np.zeros(4, np.int32), (4,))) as file:
        with refuses(TypeNotSupported, "QK-E302", "I32"):
            file.values("w")
        with refuses(FormatError, "QK-E206", "blk.0"):
            file.values("blk.0")
    with quantkit.open_gguf(write(tmp_path / "f.gguf", "F32", sample(2, 4), (4, 2)), header_only=True) as header:
        pytest.raises(FormatError, header.values, "w")
    with quantkit.open_gguf(tmp_path / "f.gguf") as file, pytest.raises(IndexError):
        file.values("w", 2)


def test_a_type_name_is_accepted_for_writing(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", "Q8_0", quantize(sample(ROWS, N), "Q8_0"), (N, ROWS))
    with quantkit.open_gguf(tmp_path / "a.gguf") as file:
        assert file.tensors["w"].type is BY_NAME["Q8_0"]
    with refuses(TypeNotSupported, "QK-E301", "Q9"):
        write(tmp_path / "b.gguf", "Q9", sample(1, N), (N,))


def test_an_open_file_is_not_truncated(tmp_path: Path) -> None:
    """A tensor of a file may be written into the same file, which is replaced once the new one is complete."""
    x = sample(EXPERTS, ROWS, N)
    path = write(tmp_path / "m.gguf", "F32", x)
    with refuses(ResourceError, "QK-E402 m.gguf"):
        write(path, "F32", x)
    with quantkit.open_gguf(path) as file:
        data = file.data(file.tensors["w"])
        quantkit.write_gguf(path, file.fields.values(), [("v", (N, ROWS, EXPERTS), "F32", data)], overwrite=True)
        assert np.array_equal(file.values("w"), x)
    with quantkit.open_gguf(path) as file:
        assert np.array_equal(file.values("v"), x)
    with refuses(FormatError, "QK-E106"):
        quantkit.write_gguf(path, [], [("v", (N, 1), "F32", b"")], overwrite=True)
    with quantkit.open_gguf(path) as file:
        assert list(file.tensors) == ["v"]
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
