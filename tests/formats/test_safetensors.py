"""safetensors: what is read, and that no header is believed."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from refusals import refuses
from tiny_checkpoints import write_checkpoint, write_raw, write_safetensors

from quantkit.errors import FormatError
from quantkit.formats.safetensors import read_checkpoint, read_header


def test_tensors_are_sorted_by_name(tmp_path: Path) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {"b": np.zeros((2, 3), np.float32), "a": np.ones(4, np.uint16)}
    tensors = read_header(write_safetensors(tmp_path / "x.safetensors", arrays, order=False))
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in tensors.values()] == [
        ("a", "BF16", (4,), 8),
        ("b", "F32", (2, 3), 24),
    ]
    data = (tmp_path / "x.safetensors").read_bytes()
    assert data[tensors["a"].offset :][:8] == arrays["a"].tobytes()


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "refusal"),
    [
        ({"x": entry(dtype="F31")}, "QK-E110 x"),
        ({"x": entry(dtype=["F32"])}, "QK-E110 x"),
        ({"x": entry(shape=[-1])}, "QK-E110 x"),
        ({"x": entry(shape=[True])}, "QK-E110 x"),
        ({"x": entry(shape=2)}, "QK-E110 x"),
        ({"x": entry(shape=[1 << 62, 1 << 62])}, "QK-E110 x"),
        ({"x": entry(shape=[3])}, "QK-E110 12"),
        ({"x": entry(offsets=[0, 12])}, "QK-E110 8"),
        ({"x": entry(offsets=[8, 0])}, "QK-E110 -8"),
        ({"x": entry(offsets=[-8, 0])}, "QK-E110 x"),
        ({"x": entry(offsets=[0])}, "QK-E110 x"),
        ({"x": entry(offsets=[1 << 60, (1 << 60) + 8])}, "QK-E103 x"),
        ({"x": entry(offsets=[16, 24])}, "QK-E103 x"),
        ({"x": entry(), "y": entry(offsets=[4, 12])}, "QK-E110 x y"),
        ({"x": 7}, "QK-E110 x 7"),
        ([], "QK-E111 JSON"),
        ("{", "QK-E111 JSON"),
        ("[" * 100000, "QK-E111 JSON"),
        ('{"x": {}, "x": {}}', "QK-E110 x"),
        (b"\xff\xfe", "QK-E111 JSON"),
    ],
)
def test_contradictory_headers_are_refused(tmp_path: Path, header: Any, refusal: str) -> None:
    text = header if isinstance(header, bytes) else header if isinstance(header, str) else json.dumps(header)
    path = write_raw(tmp_path / "x.safetensors", text if isinstance(text, bytes) else text.encode(), bytes(16))
    with refuses(FormatError, refusal, "x.safetensors"):
        read_header(path)


@pytest.mark.parametrize("data", [b"", b"1234567", struct.pack("<Q", 1 << 63), struct.pack("<Q", 9) + b"{}"])
def test_wrong_lengths_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with refuses(FormatError, "QK-E103 x.safetensors"):
        read_header(path)


def test_any_changed_header_is_read_or_refused(tmp_path: Path) -> None:
    """Bytes changed at random: a FormatError or tensors within the file, nothing else."""
    original = write_safetensors(
        tmp_path / "a", {f"t{i}": np.zeros((2, i), np.float32) for i in range(1, 6)}
    ).read_bytes()
    rng, path = random.Random(1), tmp_path / "x.safetensors"
    for _ in range(2000):
        data = bytearray(original)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randint(0, len(data))] if rng.random() < 0.2 else data)
        try:
            tensors = read_header(path)
        except FormatError:
            continue
        assert all(0 <= t.offset <= t.offset + t.nbytes <= path.stat().st_size for t in tensors.values())


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=3)
    assert len(read_checkpoint(folder)) == 3
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    first = next(iter(good["weight_map"]))

    def refused(weight_map: Any, refusal: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with refuses(FormatError, refusal):
            read_checkpoint(folder)

    refused({k: v for k, v in good["weight_map"].items() if k != first}, "QK-E107 model.safetensors.index.json")
    refused(good["weight_map"] | {"more": "model-00001-of-00003.safetensors"}, "QK-E105 more")
    refused(good["weight_map"] | {first: "model-00003-of-00003.safetensors"}, "QK-E104 model-00003")
    refused(good["weight_map"] | {first: "model-00009.safetensors"}, "QK-E104 model-00009")
    refused(
        good["weight_map"] | {first: "../m/model-00001-of-00003.safetensors"},
        "QK-E110 model.embed_tokens.weight model-00001-of-00003.safetensors",
    )
    refused({}, "QK-E110 weight_map")
    refused([], "QK-E110 weight_map")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        write_safetensors(tmp_path / name, {"x": np.zeros(2, np.float32)})
    with refuses(FormatError, "QK-E107 x model-1.safetensors"):
        read_checkpoint(tmp_path)


def test_an_index_without_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with refuses(FormatError, "QK-E101 pytorch_model.bin"):
        read_checkpoint(tmp_path)
