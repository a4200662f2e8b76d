"""Splitting and joining: the bytes of llama-gguf-split, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from quantkit.cli import cli
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError
from quantkit.formats.gguf import Field, open_gguf, write_gguf
from quantkit.pipeline import shard_join
from quantkit.split import join, plan_split, split
from quantkit.types import BY_NAME

FORMS: list[tuple[dict[str, Any], list[str]]] = [
    ({"max_size": "6M"}, ["--split-max-size", "6M"]),
    ({"max_tensors": 20}, ["--split-max-tensors", "20"]),
    ({"max_size": "3M", "no_tensor_first_split": True}, ["--split-max-size", "3M", "--no-tensor-first-split"]),
]


@pytest.mark.peer
@pytest.mark.parametrize(("options", "arguments"), FORMS, ids=["size", "tensors", "metadata-first"])
def test_the_bytes_are_those_of_llama_gguf_split(
    llama_bin: Path, tiny_moe: Path, tmp_path: Path, options: dict[str, Any], arguments: list[str]
) -> None:
    reference, output = tmp_path / "reference", tmp_path / "output"
    reference.mkdir()
    output.mkdir()
    program = str(llama_bin / "llama-gguf-split")
    subprocess.run([program, "--split", *arguments, tiny_moe, reference / "m"], check=True, capture_output=True)
    split(tiny_moe, output / "m.gguf", **options)
    files = sorted(reference.iterdir())
    assert [path.name for path in sorted(output.iterdir())] == [path.name for path in files]
    assert len(files) > 2
    assert [(output / path.name).read_bytes() for path in files] == [path.read_bytes() for path in files]
    subprocess.run([program, "--merge", files[0], reference / "j.gguf"], check=True, capture_output=True)
    join(output / files[1].name, output / "j.gguf")
    assert (output / "j.gguf").read_bytes() == (reference / "j.gguf").read_bytes()


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=9), st.integers(1, 9), st.booleans())
def test_shards_join_to_the_same_tensors(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], n: int, by_tensors: bool
) -> None:
    folder = tmp_path_factory.mktemp("split")
    tensors = [
        (f"t{i}", (8, r), BY_NAME["F32"], bytes((i + j) % 64 for j in range(32 * r))) for i, r in enumerate(rows)
    ]
    write_gguf(folder / "m.gguf", [Field.of("general.architecture", "x")], tensors)
    limit: dict[str, Any] = {"max_tensors": n} if by_tensors else {"max_size": 160 * n}
    if len(rows) <= n if by_tensors else sum(rows) <= 5 * n:
        with refuses(RecipeError, "QK-E214"):
            plan_split(folder / "m.gguf", **limit)
        return
    shards = [shard.path for shard in plan_split(folder / "m.gguf", **limit).shards]
    split(folder / "m.gguf", delete_source=True, **limit)
    assert sorted(folder.iterdir()) == shards
    for path in shards:
        sizes = [32 * rows[int(name[1:])] for name in _names(path)]
        assert len(sizes) <= n if by_tensors else len(sizes) == 1 or sum(sizes) <= 160 * n
    join(shards[-1], delete_source=True)
    assert [path.name for path in folder.iterdir()] == ["m.gguf"]
    with open_gguf(folder / "m.gguf") as file:
        assert [(name, file.data(name).tobytes()) for name in file.tensors] == [(t[0], t[3]) for t in tensors]


def _names(path: Path) -> list[str]:
    with open_gguf(path) as file:
        return [t.name for t in file.tensors.values() if file.paths[t.shard].name == path.name]


def test_refusals(tiny_moe: Path, tmp_path: Path) -> None:
    with refuses(ResourceError, "QK-E120"):
        split(tiny_moe, tmp_path, max_size="6M")
    cases: list[tuple[dict[str, Any], type[QuantkitError], str]] = [
        ({}, RecipeError, "QK-E201"),
        ({"max_size": "1G", "max_tensors": 3}, RecipeError, "QK-E201"),
        ({"max_tensors": 0}, RecipeError, "QK-E203 0"),
        ({"max_size": "1G"}, RecipeError, "QK-E214"),
    ]
    for options, kind, refusal in cases:
        with refuses(kind, refusal):
            split(tiny_moe, tmp_path / "m.gguf", **options)
    with refuses(RecipeError, "QK-E214", str(tiny_moe)):
        join(tiny_moe, tmp_path / "j.gguf")
    split(tiny_moe, tmp_path / "m.gguf", max_size="6M")
    shards = sorted(tmp_path.iterdir())
    with refuses(ResourceError, "QK-E402"):
        split(tiny_moe, tmp_path / "m.gguf", max_size="6M")
    with refuses(ResourceError, "QK-E403"):
        join(shards[0], shards[1])
    shards[2].rename(tmp_path / "x")
    with refuses(FormatError, "QK-E104", shards[2].name):
        join(shards[0], tmp_path / "j.gguf")
    assert not (tmp_path / "j.gguf").exists()


def test_the_commands(tiny_moe: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> dict[str, Any]:
        result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
        assert result.exit_code == 0, result.output
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    dry_run = run("split", tiny_moe, tmp_path / "m.gguf", "--split-max-size", "6M", "--dry-run")
    assert not list(tmp_path.iterdir())
    result = run("split", tiny_moe, tmp_path / "m.gguf", "--max-size", "6M")
    assert result["files"] == dry_run["files"]
    assert (dry_run["written"], result["written"]) == (False, True)
    assert {file["path"]: file["bytes"] for file in result["files"]} == {
        str(path): path.stat().st_size for path in tmp_path.iterdir()
    }
    after = run("join", result["files"][0]["path"], "--delete-source")
    assert after["deleted"] == [file["path"] for file in result["files"]]
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_an_interrupted_join_that_deletes(tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on only if asked, takes no other shards, and needs the space of one shard."""
    result = split(tiny_moe, tmp_path / "m.gguf", max_size="5M")
    assert result.resumed == 0
    first, last = tmp_path / "m-00001-of-00004.gguf", tmp_path / "m-00004-of-00004.gguf"
    content, output = last.read_bytes(), tmp_path / "m.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(shard_join, "crc32_range", lambda path, *_: 0 if path != last else hash(path.name + str(_)))
        with refuses(FormatError, "QK-E100 m-00004-of-00004.gguf"):
            join(first, delete_source=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {last.name, "m.gguf.join", "m.gguf.joining"}
    for options in ({}, {"delete_source": True}, {"overwrite": True, "delete_source": True}):
        with refuses(ResourceError, "QK-E408 m.gguf"):
            join(last, **options)
    last.write_bytes(content[:-1] + b"\1")
    with refuses(FormatError, "QK-E109 m-00004-of-00004.gguf"):
        join(first, delete_source=True, resume=True)
    stamp = json.loads((tmp_path / "m.gguf.join").read_text())["shards"][3]["mtime_ns"]
    last.write_bytes(content)
    os.utime(last, ns=(stamp, stamp))
    answer = CliRunner().invoke(cli, ["join", str(first), "--delete-source", "--resume", "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["resumed"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    with open_gguf(output) as file, open_gguf(tiny_moe) as expected:
        assert all(file.data(name).tobytes() == expected.data(name).tobytes() for name in expected.tensors)
