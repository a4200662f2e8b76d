"""Uploads to a stand-in of the Hub on the loopback: layout, what is sent, checks before and after, secrets."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from refusals import check_refused, refuses

from model_hub import TOKEN, ModelHub, model_hub
from quantkit.cli import cli
from quantkit.edit import EditOptions, edit
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError
from quantkit.formats.gguf import open_gguf
from quantkit.formats.outputs import Output
from quantkit.split import split
from quantkit.upload import MAX_FILE, State, plan_upload, run_upload, upload

NAME = "me/Tiny-GGUF"
# huggingface_hub's own, of its library for HTTP.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    from huggingface_hub import constants

    with model_hub(tmp_path / "hub") as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A single file, a split model, a card and a text."""
    folder, tiny_moe = tmp_path_factory.mktemp("files"), data / "tiny-moe-bf16.gguf"
    shutil.copy(tiny_moe, folder / "tiny-Q8_0.gguf")
    split(tiny_moe, folder / "tiny-BF16.gguf", max_size="7M")
    (folder / "card.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    (folder / "SHA256SUMS").write_text("text\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path, original: Path) -> Path:
    """A copy of these files."""
    return Path(shutil.copytree(original, tmp_path / "files"))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(cli, ["upload", *map(str, arguments)])


def test_the_layout_and_the_bytes(hub: ModelHub, folder: Path) -> None:
    files = [folder / "tiny-Q8_0.gguf", folder / "tiny-BF16-00002-of-00003.gguf", folder / "SHA256SUMS"]
    result = upload(NAME, files, card=folder / "card.md")
    shards = [f"tiny-BF16-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    expected = {"tiny-Q8_0.gguf": "tiny-Q8_0.gguf", "SHA256SUMS": "SHA256SUMS", "README.md": "card.md"}
    expected |= {f"tiny-BF16/{name}": name for name in shards}
    branch = hub.repository(NAME)
    present = {str(path.relative_to(branch)): path for path in branch.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in present.items()} == {
        name: (folder / local).read_bytes() for name, local in expected.items()
    }
    assert {file.name: file.sha256 for file in result.files} == {
        name: sha256(folder / local) for name, local in expected.items()
    }
    assert result.commit is not None
    assert [sorted(names) for names in hub.commits] == [sorted(expected)]
    assert not list(folder.glob("*.lock"))


def test_present_bytes_are_not_sent_again(hub: ModelHub, folder: Path) -> None:
    first, shard = folder / "tiny-Q8_0.gguf", folder / "tiny-BF16-00001-of-00003.gguf"
    upload(NAME, [first], card=folder / "card.md")
    result = upload(NAME, [first, shard], card=folder / "card.md")
    states = {file.name: file.state for file in result.files}
    assert [name for name, state in states.items() if state is State.PRESENT] == ["tiny-Q8_0.gguf", "README.md"]
    assert len(hub.puts) == len(set(hub.puts)) == 4
    assert upload(NAME, [first, shard]).commit is None
    assert len(hub.commits) == 2


def test_another_file_is_replaced_only_if_asked(hub: ModelHub, folder: Path) -> None:
    file, card = folder / "tiny-Q8_0.gguf", folder / "card.md"
    upload(NAME, [file], card=card)
    card.write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    with refuses(ResourceError, "QK-E402 README.md"):
        upload(NAME, [file], card=card)
    assert len(hub.commits) == 1
    upload(NAME, [file], card=card, overwrite=True)
    assert hub.commits[1] == ["README.md"]
    assert (hub.repository(NAME) / "README.md").read_bytes() == card.read_bytes()


def test_a_killed_upload_goes_on(hub: ModelHub, folder: Path) -> None:
    command = [sys.executable, "-m", "quantkit", "upload", NAME, str(folder / "tiny-BF16-00001-of-00003.gguf")]
    puts = list[str]()

    def kill(method: str, path: str) -> int | None:
        if method == "PUT":
            puts.append(path)
            if len(puts) == 2:
                os.kill(process.pid, signal.SIGKILL)
                return 500
        return None

    hub.fault = kill
    process = subprocess.Popen(command, env=hub.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert process.wait() == -signal.SIGKILL
    assert (len(hub.puts), hub.commits) == (1, [])
    assert not list(hub.repository(NAME).iterdir())  # no half of a model
    hub.fault = lambda method, path: None
    result = upload(NAME, [folder / "tiny-BF16-00001-of-00003.gguf"])
    assert sorted(hub.puts) == sorted(str(file.sha256) for file in result.files)
    assert len(hub.commits) == 1


def test_damage_on_the_way_is_found(hub: ModelHub, folder: Path) -> None:
    hub.damage = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    with refuses(FormatError, "QK-E100 tiny-Q8_0.gguf"):
        upload(NAME, [folder / "tiny-Q8_0.gguf"])


def test_no_secret_is_shown(hub: ModelHub, folder: Path) -> None:
    upload(NAME, [folder / "SHA256SUMS"])
    hub.fault = lambda method, path: 403 if "preupload" in path else None
    result = run(NAME, folder / "tiny-Q8_0.gguf")
    assert result.exit_code == 1
    check_refused(result.output, "QK-E412 403", "storage quota exceeded")
    assert TOKEN not in result.output
    assert "sig=1" not in result.output


def test_without_a_token(hub: ModelHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "wrong0" * 6)
    with refuses(ResourceError, "QK-E412 401 HF_TOKEN") as raised:
        upload(NAME, [folder / "tiny-Q8_0.gguf"])
    assert "wrong0" not in raised.value.message
    assert hub.puts == []


def test_a_dry_run_sends_nothing(hub: ModelHub, folder: Path) -> None:
    result = run(NAME, folder / "tiny-Q8_0.gguf", "--private", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert (answer["exists"], answer["private"], answer["written"], answer["commit"]) == (False, True, False, None)
    assert [(f["name"], f["state"]) for f in answer["files"]] == [("tiny-Q8_0.gguf", "new")]
    assert {method for method, _ in hub.requests} == {"GET"}
    result = run(NAME, folder / "tiny-Q8_0.gguf", "--private")
    assert result.exit_code == 0, result.output
    with refuses(RecipeError, "QK-E201"):  # a repository that is public already
        hub.repository(NAME).parent.joinpath("private.json").write_text("false")
        plan_upload(NAME, [folder / "tiny-Q8_0.gguf"], private=True)


def test_a_branch_and_a_folder(hub: ModelHub, folder: Path) -> None:
    upload(NAME, [folder / "SHA256SUMS"])
    upload(NAME, [folder / "tiny-BF16-00001-of-00003.gguf"], folder="BF16/1", revision="next")
    assert len(list((hub.repository(NAME, "next") / "BF16/1").iterdir())) == 3
    assert [path.name for path in hub.repository(NAME).iterdir()] == ["SHA256SUMS"]
    upload(NAME, [folder / "tiny-BF16-00001-of-00003.gguf"], folder=".", revision="next")
    assert len(list(hub.repository(NAME, "next").glob("*.gguf"))) == 3
    assert len(hub.puts) == 3


def test_only_complete_files_are_sent(hub: ModelHub, folder: Path, tmp_path: Path) -> None:
    (folder / "tiny-BF16-00002-of-00003.gguf").rename(tmp_path / "away.gguf")
    with refuses(FormatError, "QK-E104 tiny-BF16-00002-of-00003.gguf"):
        upload(NAME, [folder / "tiny-BF16-00001-of-00003.gguf"])
    with refuses(FormatError, "QK-E104 tiny-BF16-00002-of-00003.gguf"):
        upload(NAME, [folder / "tiny-BF16-00003-of-00003.gguf"])
    short = folder / "short.gguf"
    short.write_bytes((folder / "tiny-Q8_0.gguf").read_bytes()[:-1])
    with refuses(FormatError, "QK-E103 short.gguf"):
        upload(NAME, [short])
    shutil.copy(folder / "tiny-Q8_0.gguf", folder / "x.gguf.part")
    with refuses(ResourceError, "QK-E408 x.gguf.part"):
        upload(NAME, [folder / "x.gguf.part"])
    (folder / "tiny-Q8_0.gguf.journal").touch()
    with refuses(ResourceError, "QK-E408"):
        upload(NAME, [folder / "tiny-Q8_0.gguf"])
    (folder / "tiny-Q8_0.gguf.journal").unlink()
    with Output(folder / "tiny-Q8_0.gguf", overwrite=True), refuses(ResourceError, "QK-E404 tiny-Q8_0.gguf"):
        upload(NAME, [folder / "tiny-Q8_0.gguf"])
    large = folder / "large.bin"
    large.touch()
    os.truncate(large, MAX_FILE + 1)
    with refuses(ResourceError, "QK-E120 large.bin"):
        upload(NAME, [large])
    plan = plan_upload(NAME, [folder / "tiny-Q8_0.gguf"])
    with open(folder / "tiny-Q8_0.gguf", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    with refuses(FormatError, "QK-E109 tiny-Q8_0.gguf"):
        run_upload(plan)
    assert hub.puts == []


@pytest.mark.parametrize("parent", ["tiny-BF16", "", "BF16"])
def test_the_first_shard_alone_is_edited_and_sent(hub: ModelHub, folder: Path, tmp_path: Path, parent: str) -> None:
    """The commands that the refusal of a URL names, from a repository of each layout."""
    upload(NAME, [folder / "tiny-BF16-00001-of-00003.gguf"], folder=parent or ".")
    before = {p.name: p.read_bytes() for p in (hub.repository(NAME) / parent).iterdir()}
    url = f"hf://{NAME}/{parent}/tiny-BF16-00002-of-00003.gguf".replace("//tiny", "/tiny")
    message = CliRunner().invoke(cli, ["edit", url, "--name", "x"]).output
    text = " ".join(message.split()).partition(": ")[2].partition("files: ")[2].partition(";")[0]
    commands = [shlex.split(command) for command in text.split(" && ")]
    assert [command[:2] for command in commands] == [["hf", "download"], ["quantkit", "edit"], ["quantkit", "upload"]]
    (local := tmp_path / "here").mkdir()
    environment = {**hub.environment, "PYTHONPATH": str(Path(__file__).parents[2])}
    program = [str(Path(sys.executable).parent / "hf"), *commands[0][1:]]
    subprocess.run(program, cwd=local, env=environment, check=True, capture_output=True, timeout=120)
    shard = local / commands[1][2]
    plan = edit(shard, options=EditOptions(name="Corrected"))
    assert (plan.missing, plan.outputs, len(plan.notes)) == (2, (shard,), 1)
    hub.puts.clear()
    assert CliRunner().invoke(cli, ["upload", NAME, str(shard), "--folder", parent or "."]).exit_code == 1
    # Without --folder, the place is where the other shards are.
    result = CliRunner().invoke(cli, ["upload", NAME, str(shard), "--overwrite"])
    assert result.exit_code == 0, result.output
    assert hub.puts == [sha256(shard)]
    after = {p.name: p.read_bytes() for p in (hub.repository(NAME) / parent).iterdir()}
    assert after == before | {shard.name: shard.read_bytes()}
    with open_gguf(hub.repository(NAME) / parent / shard.name) as model:
        assert (model.get("general.name"), len(model.tensors)) == ("Corrected", 51)


def test_the_card_is_checked_first(hub: ModelHub, folder: Path) -> None:
    card = folder / "card.md"
    for text, code in (("license: none-such", "QK-E111 license"), ("license: [", "QK-E111"), ("\udcff", "QK-E121")):
        card.write_bytes(f"---\n{text}\n---\n".encode("utf-8", "surrogateescape"))
        with refuses(FormatError, code):
            upload(NAME, [folder / "tiny-Q8_0.gguf"], card=card)
    assert hub.puts == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"repository": "Tiny"}, "QK-E203"),
        ({"files": []}, "QK-E214"),
        ({"folder": "../x"}, "QK-E203"),
        ({"files": ["none.gguf"]}, "QK-E101|QK-E401|QK-E405"),
        ({"files": ["."]}, "QK-E120"),
        ({"files": ["a/SHA256SUMS", "b/SHA256SUMS"]}, "QK-E403"),
    ],
)
def test_refused_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
        Path(name, "SHA256SUMS").write_text(name)
    with refuses(QuantkitError, code):
        upload(**{"repository": NAME, "files": ["a/SHA256SUMS"], **arguments})
