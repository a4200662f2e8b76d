"""Stitched models: tensors of several files, byte for byte, and shards of maps with their digests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from refusals import refuses

from quantkit.cli import cli
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError
from quantkit.formats.gguf import open_gguf
from quantkit.quantize import quantize
from quantkit.split import split
from quantkit.stitch import stitch


@pytest.fixture(scope="module")
def quants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    source, folder = Path(__file__).parents[1] / "data" / "tiny-moe-bf16.gguf", tmp_path_factory.mktemp("quants")
    files = {name: folder / f"{name}.gguf" for name in ("Q4_0", "Q8_0")}
    for name, path in files.items():
        quantize(source, path, name)
    return files


def tensors_of(path: Path) -> dict[str, tuple[str, bytes]]:
    with open_gguf(path) as file:
        return {t.name: (t.type.name, file.data(t).tobytes()) for t in file.tensors.values()}


def write_map(folder: Path, source: Path) -> Path:
    """Split a file into a shard per tensor, and write the map of GGUF-Tool-Suite."""
    split(source, folder / "m.gguf", max_tensors=1, no_tensor_first_split=True)
    lines = []
    with open_gguf(folder / "m-00001-of-00052.gguf") as file:
        for t in file.tensors.values():
            path = file.paths[t.shard]
            digest, shape = hashlib.sha256(path.read_bytes()).hexdigest(), tuple(t.shape)
            dtype, n = t.type.name.lower(), t.nbytes
            lines.append(f"{path.name}:{digest}:{t.name}:shape={shape}:dtype={dtype}:elements=0:bytes={n}\n")
    (path := folder / "tensors.q8_0.map").write_text("".join(lines))
    return path


def test_tensors_are_those_of_their_files(quants: dict[str, Path], tmp_path: Path) -> None:
    base, q8 = (tensors_of(quants[name]) for name in ("Q4_0", "Q8_0"))
    stitch(quants["Q4_0"], tmp_path / "s.gguf", {r"blk\.0\.attn_k\.weight": quants["Q4_0"], "attn": quants["Q8_0"]})
    expected = {n: q8[n] if "attn" in n and n != "blk.0.attn_k.weight" else t for n, t in base.items()}
    assert tensors_of(tmp_path / "s.gguf") == expected
    assert list(tensors_of(tmp_path / "s.gguf")) == list(base)
    with open_gguf(tmp_path / "s.gguf") as file, open_gguf(quants["Q8_0"]) as source:
        assert file.get("quantkit.stitch.rules") == [r"blk\.0\.attn_k\.weight=Q4_0.gguf", "attn=Q8_0.gguf"]
        assert file.get("quantkit.stitch.1.quantize.recipe") == source.get("quantkit.quantize.recipe")


def test_the_shards_of_a_map_are_checked(quants: dict[str, Path], tmp_path: Path) -> None:
    path = write_map(tmp_path, quants["Q8_0"])
    stitch(quants["Q4_0"], tmp_path / "s.gguf", {"ffn_down": path})
    base, q8 = (tensors_of(quants[name]) for name in ("Q4_0", "Q8_0"))
    assert tensors_of(tmp_path / "s.gguf") == {n: q8[n] if "ffn_down" in n else t for n, t in base.items()}
    shard = next(line.split(":")[0] for line in path.read_text().splitlines() if "blk.2.ffn_down" in line)
    content = bytearray((tmp_path / shard).read_bytes())
    content[-1] ^= 1
    (tmp_path / shard).write_bytes(content)
    with refuses(FormatError, "QK-E100", shard):
        stitch(quants["Q4_0"], tmp_path / "t.gguf", {"ffn_down": path})
    stitch(quants["Q4_0"], tmp_path / "t.gguf", {"ffn_up": path})


def test_refusals(quants: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "bad.map").write_text("x\n")
    (tmp_path / "empty.map").write_text("")
    imatrix = Path(__file__).parents[1] / "data" / "tiny-moe-imatrix.gguf"
    cases: list[tuple[dict[str, str | Path], type[QuantkitError], str]] = [
        ({}, RecipeError, "QK-E214"),
        ({"nope": quants["Q8_0"]}, RecipeError, "QK-E206 nope"),
        ({"attn": imatrix}, RecipeError, "QK-E206 attn"),
        ({"(": quants["Q8_0"]}, RecipeError, "QK-E205"),
        ({"attn": tmp_path / "bad.map"}, FormatError, "QK-E111 1"),
        ({"attn": tmp_path / "empty.map"}, FormatError, "QK-E111"),
        ({"attn": tmp_path / "nope.gguf"}, FormatError, "QK-E401 nope.gguf"),
    ]
    for take, kind, refusal in cases:
        with refuses(kind, refusal):
            stitch(quants["Q4_0"], tmp_path / "s.gguf", take)
    with refuses(ResourceError, "QK-E403"):
        stitch(quants["Q4_0"], quants["Q8_0"], {"attn": quants["Q8_0"]}, overwrite=True)
    assert not (tmp_path / "s.gguf").exists()


def test_the_command(quants: dict[str, Path], tmp_path: Path) -> None:
    arguments = ["stitch", str(quants["Q4_0"]), str(tmp_path / "s.gguf"), "--take", f"attn_(k|v)={quants['Q8_0']}"]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["written"] is True
    assert tensors_of(tmp_path / "s.gguf")["blk.1.attn_v.weight"][0] == "Q8_0"
