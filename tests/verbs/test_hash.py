"""Digests: equal however a model is packed, different for any change; lists of sha256sum."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from refusals import refuses

from quantkit.cli import cli
from quantkit.edit import EditOptions, edit
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError
from quantkit.formats.gguf import open_gguf, write_gguf
from quantkit.hash import ALGORITHMS, check_sums, hash, write_sums  # noqa: A004
from quantkit.split import split


@pytest.fixture
def shards(tiny_moe: Path, tmp_path: Path) -> list[Path]:
    split(tiny_moe, tmp_path / "m.gguf", max_size="6M")
    return sorted(tmp_path.iterdir())


def test_digests_are_of_the_bytes(tiny_moe: Path) -> None:
    result = hash(tiny_moe)
    with open_gguf(tiny_moe) as file:
        assert result.tensors == {name: hashlib.sha256(file.data(name)).hexdigest() for name in file.tensors}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_packing_does_not_matter(tiny_moe: Path, shards: list[Path], tmp_path: Path, algorithm: str) -> None:
    with open_gguf(tiny_moe) as file:
        tensors = [(t.name, t.shape, t.type, file.data(t)) for t in file.tensors.values()]
        write_gguf(tmp_path / "reversed.gguf", [*file.fields.values()][::-1], tensors[::-1])
    expected = hash(tiny_moe, algorithm=algorithm)
    for path in (shards[1], tmp_path / "reversed.gguf"):
        result = hash(path, algorithm=algorithm, threads=1)
        assert (result.data, result.metadata, result.model) == (expected.data, expected.metadata, expected.model)
        assert result.tensors == expected.tensors


def test_any_change_shows(tiny_moe: Path, tmp_path: Path) -> None:
    before = hash(tiny_moe)
    edit(tiny_moe, tmp_path / "e.gguf", EditOptions(name="Tiny"), reserve=100)
    after = hash(tmp_path / "e.gguf")
    assert after.data == before.data
    assert len({after.metadata, before.metadata}) == len({after.model, before.model}) == 2
    content = bytearray(tiny_moe.read_bytes())
    content[-1] ^= 1
    (tmp_path / "b.gguf").write_bytes(content)
    copy = hash(tmp_path / "b.gguf")
    assert copy.metadata == before.metadata
    assert len({copy.data, before.data}) == len({copy.model, before.model}) == 2


def test_lists_are_those_of_sha256sum(shards: list[Path], tmp_path: Path) -> None:
    sums = tmp_path / "SHA256SUMS"
    write_sums([shards[2]], sums)
    assert sums.read_text() == "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in shards)
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "-c", "--strict", sums.name], cwd=tmp_path, check=True, capture_output=True)
    assert all(check.is_equal for check in check_sums(sums))
    shards[1].write_bytes(shards[1].read_bytes() + b"x")
    assert [check.is_equal for check in check_sums(sums)] == [True, False, *[True] * (len(shards) - 2)]
    assert [check.path for check in check_sums(sums, [shards[0]])] == shards
    result = CliRunner().invoke(cli, ["hash", "--check", str(sums), "--json"])
    assert result.exit_code == 1
    assert [file["equal"] for file in json.loads(result.stdout)["files"]].count(False) == 1


def test_refusals(shards: list[Path], tiny_moe: Path, tmp_path: Path) -> None:
    sums = tmp_path / "SHA256SUMS"
    write_sums([shards[0]], sums)
    with refuses(ResourceError, "QK-E402", str(sums)):
        write_sums([shards[0]], sums)
    with refuses(ResourceError, "QK-E403"):
        write_sums([shards[0]], shards[0], overwrite=True)
    with refuses(RecipeError, "QK-E203", str(tiny_moe)):
        write_sums([tiny_moe], sums, overwrite=True)
    with refuses(FormatError, "QK-E206", str(tiny_moe)):
        check_sums(sums, [tiny_moe])
    with refuses(RecipeError, "QK-E203 md5 sha256"):
        hash(tiny_moe, algorithm="md5")
    cases: list[tuple[str, type[QuantkitError], str]] = [
        ("", FormatError, "QK-E111"),
        ("xyz\n", FormatError, "QK-E111 1"),
        (f"{'0' * 64}  nope.gguf\n", ResourceError, "QK-E401 nope.gguf"),
    ]
    for text, kind, refusal in cases:
        (tmp_path / "bad").write_text(text)
        with refuses(kind, refusal):
            check_sums(tmp_path / "bad")
