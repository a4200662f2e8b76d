"""Files of torch.save are read without running anything in them; damaged and hostile ones are one error each."""

from __future__ import annotations

import io
import json
import pickle
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

from quantkit.errors import FormatError
from quantkit.formats.safetensors import StoredTensor
from quantkit.formats.torch_file import read_torch_file

FILES = Path(__file__).parents[1] / "data" / "torch"
VALUES: dict[str, Any] = json.loads((FILES / "values.json").read_text())
#: Saved by torch, with tensors that are no run of values, or with an object of a class.
REFUSED = {"strided": "QK-E110 [2]", "transposed": "QK-E110 [1", "module": "QK-E110 torch.nn.modules.linear.Linear"}
SCRATCH = tempfile.TemporaryDirectory()
_DTYPES = {"F32": "<f4", "F16": "<f2", "I64": "<i8"}


def plain(value: Any) -> Any:
    """Return the object of a file in the form of values.json."""
    if isinstance(value, StoredTensor):
        data = value.path.read_bytes()[value.offset : value.offset + value.nbytes]
        if value.dtype == "BF16":
            numbers = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        else:
            numbers = np.frombuffer(data, _DTYPES[value.dtype])
        name = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}[value.dtype]
        return {"dtype": f"torch.{name}", "shape": list(value.shape), "values": numbers.tolist()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", sorted(VALUES.keys() - REFUSED.keys()))
def test_the_values_are_those_of_torch(name: str) -> None:
    assert plain(read_torch_file(FILES / f"{name}.pt")) == VALUES[name]


@pytest.mark.parametrize("name", [*REFUSED, "legacy"])
def test_other_objects_are_refused(name: str) -> None:
    with refuses(FormatError, REFUSED.get(name, "QK-E110"), FILES / f"{name}.pt"):
        read_torch_file(FILES / f"{name}.pt")


def entries_of(name: str) -> dict[str, bytes]:
    with zipfile.ZipFile(FILES / f"{name}.pt") as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def write(path: Path, entries: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


class Runs:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_code_is_named_and_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for protocol, function in ((2, "builtins.open|io.open"), (0, ""), (4, "")):
        entries = entries_of("mask-f32") | {
            "mask-f32/data.pkl": pickle.dumps({"a": Runs(open, str(trace), "w")}, protocol)
        }
        with pytest.raises(FormatError) as raised:
            read_torch_file(write(tmp_path / "x.pt", entries))
        assert raised.value.code == "QK-E110"
        assert not function or any(name in raised.value.message for name in function.split("|"))
    assert not trace.exists()


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"byteorder": b"big"}, "big"),
        ({"data/0": b"\0" * 44}, "44"),
        ({"data/0": None}, "data/0"),
        ({"data.pkl": None}, "data.pkl"),
        ({"data.pkl": b""}, ""),
        ({"data.pkl": b"\x80\x02."}, ""),
        ({"data.pkl": b"\x80\x03}."}, "3"),
        ({"data.pkl": b"\x80\x02}K\x01K\x02K\x03u."}, ""),
        ({"data.pkl": b"\x80\x02h\x05."}, ""),
        ({"data.pkl": b"\x80\x02" + b"(" * 9 + b"Q."}, ""),
        ({"data.pkl": b"\x80\x02" + b"N" * (1 << 20) + b"."}, "1048576"),
    ],
)
def test_damaged_entries_are_refused(change: dict[str, bytes | None], values: str, tmp_path: Path) -> None:
    entries: dict[str, bytes | None] = {**entries_of("mask-f32"), **{f"mask-f32/{k}": v for k, v in change.items()}}
    path = write(tmp_path / "x.pt", {name: data for name, data in entries.items() if data is not None})
    with refuses(FormatError, f"QK-E110 {values}"):
        read_torch_file(path)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    """Of a bomb of zeros nothing is decompressed."""
    entries = entries_of("mask-f32") | {"mask-f32/data/0": bytes(1 << 26)}
    with refuses(FormatError, "QK-E110 compressed"):
        read_torch_file(write(tmp_path / "x.pt", entries, zipfile.ZIP_DEFLATED))


def test_shapes_beyond_the_storage_are_refused(tmp_path: Path) -> None:
    entries = entries_of("mask-f32")
    data = entries["mask-f32/data.pkl"]
    assert data.count(b"K\x0c\x85") == 1, "the shape (12,)"
    entries["mask-f32/data.pkl"] = data.replace(b"K\x0c\x85", b"K\x0d\x85")
    with refuses(FormatError, "QK-E110 13 12"):
        read_torch_file(write(tmp_path / "x.pt", entries))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with refuses(FormatError, "QK-E401"):
        read_torch_file(tmp_path / "none.pt")


MASK = (FILES / "mask-f32.pt").read_bytes()


@given(st.data())
def test_changed_bytes_never_escape(data: st.DataObject) -> None:
    """A file with changed bytes, or cut, is read or an error of quantkit, and its tensors lie within it."""
    changed = bytearray(MASK[: data.draw(st.integers(0, len(MASK)) | st.just(len(MASK)))])
    for place in data.draw(st.lists(st.integers(0, max(0, len(changed) - 1)), max_size=4)) if changed else ():
        changed[place] = data.draw(st.integers(0, 255))
    check(bytes(changed))


@given(st.lists(st.sampled_from([*b"\x80\x02}](NKMJ\x8aGXcqrhjt\x85\x86\x87QRsuae.)\x88\x89\x01\0"]), max_size=40))
def test_any_pickle_is_read_or_refused(codes: list[int]) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + bytes(codes) + b".")
        archive.writestr("x/data/0", bytes(16))
    check(out.getvalue())


def check(content: bytes) -> None:
    path = Path(SCRATCH.name) / "x.pt"
    path.write_bytes(content)
    try:
        saved = read_torch_file(path)
    except FormatError:
        return
    tensors = [t for t in (saved.values() if isinstance(saved, dict) else [saved]) if isinstance(t, StoredTensor)]
    assert all(0 <= t.offset <= t.offset + t.nbytes <= len(content) for t in tensors)
