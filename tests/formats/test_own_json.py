"""Files of JSON that we write: whatever was damaged in them, reading them is one error that names the file."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from refusals import refuses

from quantkit.cook.state import State, StepRecord
from quantkit.errors import FormatError
from quantkit.evaluate import Estimate
from quantkit.pipeline.content import FileRecord
from quantkit.report.data import File, Matrix, ModelSummary, Quality, Report, Support, read_data
from quantkit.search.speeds import read_speeds
from quantkit.sensitivity.file import Cost, Group, Sensitivity, read_sensitivity
from quantkit.types import type_by_name


def a_report() -> str:
    quality = Quality("k", 10, 512, 1, Estimate(2.0, 0.1), kld=Estimate(0.1, 0.01))
    matrix = Matrix("blk.0.attn_q.weight", "attn_q", 0, "Q4_K", 256, 144, 0.1)
    file = File(
        *("m.gguf", "f", 1, 200, 144, 256, "Q4_K_M", (("Q4_K", 1, 144),), (matrix,)),
        *((Support("llama.cpp", True, "loads"),), (("a", "b"),), "quantkit quantize"),
        quality=quality,
    )
    return Report("t", "2026", "1", ModelSummary("m", "llama", 256, None, (), ()), (file,)).to_json()


def a_sensitivity() -> str:
    group = Group("blk.0.attn_q", "attn_q", 0, {"blk.0.attn_q.weight": (256, 256)})
    cost = Cost("blk.0.attn_q", type_by_name("Q4_K"), 0.1, 0.01, 0.0, 0.01, {"layer_error": 0.2}, flips=0.5)
    return Sensitivity({"name": "m"}, {"tokens": 10}, {"n_ctx": 512}, (group,), (cost,)).to_json()


def a_state(folder: Path) -> str:
    state = State(folder)
    state.steps["convert"] = StepRecord({"a": "b"}, {"m.gguf": FileRecord([[1, 2, 3, "tag"]], "d")}, 1.5, {"n": 3})
    state.save()
    return state.path.read_text()


READERS: dict[str, tuple[Callable[[Path], str], Callable[[Path], object]]] = {
    "report": (lambda _: a_report(), read_data),
    "sensitivity": (lambda _: a_sensitivity(), read_sensitivity),
    "speeds": (lambda _: '{"Q4_K": 18.5}', read_speeds),
    "cook.json": (a_state, lambda path: State(path.parent)),
}


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value within a value of JSON."""
    yield place
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*place, key))


def damaged(text: str) -> Iterator[bytes]:
    value = json.loads(text)
    for place in list(places(value))[1:]:
        for wrong in (None, True, "x", [], {}, [[[]]], -1, 10**400, float("nan"), float("inf"), "\ud800"):
            changed = copy.deepcopy(value)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = wrong
            yield json.dumps(changed).encode()


@pytest.mark.parametrize("kind", READERS)
def test_a_value_of_wrong_kind_is_refused(tmp_path: Path, kind: str) -> None:
    make, read = READERS[kind]
    text, path = make(tmp_path), tmp_path / "cook.json"
    path.write_text(text)
    read(path)
    refused = 0
    for data in damaged(text):
        path.write_bytes(data)
        message = ""
        try:
            read(path)
        except FormatError as e:
            message = e.message
        assert not message or message.startswith(f"{path}: ")
        assert len(message) < 600
        refused += bool(message)
    assert refused >= 5


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b"NaN",
        b"1" + b"0" * 5000,
        b"GGUF" + b"\xff" * 10**6,
        b"null",
        b"[]",
        b'"x"',
        b"",
        b"{}",
    ],
    ids=["nested", "NaN", "number", "bytes", "null", "list", "text", "empty", "object"],
)
def test_a_file_of_wrong_kind_is_refused(tmp_path: Path, kind: str, data: bytes) -> None:
    path = tmp_path / "cook.json"
    path.write_bytes(data)
    if (kind, data) == ("speeds", b"{}"):
        return  # a table without a type
    with pytest.raises(FormatError) as e:
        READERS[kind][1](path)
    assert e.value.message.startswith(f"{path}: ")
    assert len(e.value.message) < 600


@pytest.mark.parametrize("kind", READERS)
def test_a_missing_or_unreadable_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "cook.json"
    os.mkfifo(path)
    with refuses(FormatError, "QK-E120 cook.json"):
        READERS[kind][1](path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with refuses(FormatError, "QK-E120 cook.json"):
        READERS[kind][1](path)
    path.unlink()
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with refuses(FormatError, "QK-E120 cook.json"):
        READERS[kind][1](path)
