"""Models that are adapters are merged into their base to the bytes of convert_hf_to_gguf.py, which downloads it."""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from refusals import check_refused, refuses

import checkpoints
from gguf_digests import differences, digests
from libllama import Libllama
from quantkit.checkpoint.adapter_model import named_base
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert, plan_convert
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import open_gguf
from quantkit.formats.remote import URL

pytestmark = pytest.mark.usefixtures("services_in_process")

EXPECTED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/adapter-sha256.json").read_text())
OUTTYPES = ("f32", "f16", "bf16", "q8_0", "auto")
BASE = "mm-qwen3.5"


@dataclass(frozen=True)
class Folders:
    """The checkpoints of a base and of its adapters."""

    path: Path

    @property
    def base(self) -> Path:
        return self.path / BASE

    def options(self, **changes: Any) -> ConvertOptions:
        pre = checkpoints.describe(BASE).vocab["pre"]
        return ConvertOptions(**{"base": self.base, "pre": pre, "allow_other_ids": True} | changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    path = tmp_path_factory.mktemp("adapters")
    for name in (BASE, *EXPECTED):
        checkpoints.write_checkpoint(name, path)
    return Folders(path)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_bytes_are_the_references(name: str, folders: Folders, tmp_path: Path) -> None:
    row, wrong = EXPECTED[name], {}
    assert checkpoints.digest(folders.path / name) == row["checkpoint"]
    for outtype in OUTTYPES:
        options = folders.options(outtype=outtype)
        (path,) = convert(folders.path / name, tmp_path, None, options, overwrite=True).paths
        with open_gguf(path) as file:
            difference = differences(row[outtype], digests(path), list(file.tensors))
        if difference or path.name != row[outtype]["file"]:
            wrong[outtype] = difference or path.name
    assert wrong == {}


def test_the_bytes_differ_from_the_bases(folders: Folders, tmp_path: Path) -> None:
    """The adapter is merged, also in the pass that quantizes."""
    options = folders.options()
    base = convert(folders.base, tmp_path / "base.gguf", "Q8_0", folders.options(base=None, no_nextn=True)).paths[0]
    path = convert(folders.path / "nimble", tmp_path / "o.gguf", "Q8_0", options).paths[0]
    with open_gguf(path) as file, open_gguf(base) as plain:
        changed = {name for name in file.tensors if (file.data(name) != plain.data(name)).any()}
    assert changed == {
        *(f"blk.{i}.ffn_{part}.weight" for i in (0, 1) for part in ("up", "down")),
        "blk.0.attn_qkv.weight",
        "blk.1.attn_q.weight",
    }


@pytest.mark.peer
@pytest.mark.parametrize("name", EXPECTED)
def test_llama_cpp_loads_it(name: str, folders: Folders, tmp_path: Path, llama_bin: Path) -> None:
    (path,) = convert(folders.path / name, tmp_path / "o.gguf", None, folders.options()).paths
    loading = Libllama(llama_bin).load(path)
    assert (loading.loads, loading.runs) == (True, True), loading.complaint


def test_the_base_that_an_adapter_names(folders: Folders, tmp_path: Path) -> None:
    """A repository, at a revision of either file; a directory; else an error names the option."""
    bases = {name: named_base(folders.path / name) for name in EXPECTED}
    assert bases == {
        "lev": URL("hf://quantkit/mm-qwen3.5"),
        "kev": URL("hf://quantkit/mm-qwen3.5@0123abcd"),
        "nimble": URL("hf://quantkit/mm-qwen3.5@main"),
    }
    copy = shutil.copytree(folders.path / "lev", tmp_path / "lev")
    path = copy / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"base_model_name_or_path": str(folders.base)}))
    assert plan_convert(copy, tmp_path / "o.gguf", None, folders.options(base=None)).tensors
    for values in (
        {"base_model_name_or_path": "../../secret"},
        {"base_model_name_or_path": "s3://bucket/model"},
        {"base_model_name_or_path": "org/name", "revision": "../other"},
        {"base_model_name_or_path": None},
    ):
        path.write_text(json.dumps(config | values))
        with refuses(RecipeError, "QK-E216 --base"):
            plan_convert(copy, tmp_path / "o.gguf", None, folders.options(base=None))
    path.write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path)}))  # not a checkpoint
    with refuses(RecipeError, f"QK-E216 --base {tmp_path}"):
        plan_convert(copy, tmp_path / "o.gguf", None, folders.options(base=None))


def test_other_bases_are_refused(folders: Folders, tmp_path: Path) -> None:
    def run(*arguments: object) -> Result:
        return CliRunner().invoke(cli, ["convert", *map(str, arguments)])

    out = tmp_path / "o.gguf"
    check_refused(run(folders.base, out, "--base", folders.base).output, "QK-E216 --base")
    check_refused(run(folders.path / "kev", out, "--base", tmp_path).output, "QK-E101")
    check_refused(run(folders.path / "kev", out, "--base", folders.base, "--mmproj-only").output, "QK-E304 KevModel")
    wide = checkpoints.write_checkpoint("qwen3.5", tmp_path)
    check_refused(run(folders.path / "nimble", out, "--base", wide).output, "QK-E117")
    assert not out.exists()


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (b"head_dim", b"head_dom", "QK-E110"),
        (b"q.bias", b"z.bias", "QK-E110"),
        (b"G\x3f", b"N\x4e", "QK-E110"),
        (b"head_dimK\x20", b"head_dimK\x21", "QK-E106"),
    ],
)
def test_a_damaged_head_is_refused(old: bytes, new: bytes, code: str, folders: Folders, tmp_path: Path) -> None:
    copy = shutil.copytree(folders.path / "kev", tmp_path / "kev")
    with zipfile.ZipFile(copy / "head.pt") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    pickle = entries["head/data.pkl"]
    assert old in pickle
    with zipfile.ZipFile(copy / "head.pt", "w") as archive:
        for name, data in (entries | {"head/data.pkl": pickle.replace(old, new)}).items():
            archive.writestr(name, data)
    with refuses(FormatError, f"{code} head.pt"):
        plan_convert(copy, tmp_path / "o.gguf", None, folders.options())
