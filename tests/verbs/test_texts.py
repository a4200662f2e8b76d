"""The texts for measurement: their bytes, what they are good for, and that they are no calibration texts."""

from __future__ import annotations

import hashlib
import json
from importlib import import_module
from itertools import combinations
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from refusals import check_refused, refuses

from quantkit.calibration import calibration, overlap
from quantkit.calibration.overlap import shingles
from quantkit.chat import conversations
from quantkit.cli import cli
from quantkit.errors import FormatError, ResourceError
from quantkit.evaluate.texts import Texts, read_texts
from quantkit.imatrix import imatrix
from quantkit.model.engine import load
from quantkit.options.imatrix import ImatrixOptions
from quantkit.texts import TEXTS, texts

MODULE = import_module("quantkit.texts")  # the attribute of the package is the verb
FOLDER = Path(str(MODULE.__file__)).parent
CHAT = "chat.jsonl"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def test_the_files_are_those_recorded() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".txt", ".jsonl")} == {t.name for t in TEXTS}
    for text in TEXTS:
        raw = (FOLDER / text.name).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (text.nbytes, text.sha256)
        assert text.read() == raw
        assert raw.decode().endswith("\n")
    assert "CC0-1.0" in (FOLDER / "LICENSE").read_text()


def test_no_passage_occurs_twice() -> None:
    """Neither in two categories nor in one; nor in the texts of the tests."""
    contents = {text.name: text.read() for text in TEXTS}
    for a, b in combinations(contents.values(), 2):
        assert overlap(a, b).warning is None
        assert len(set(shingles(a.decode()).tolist()) & set(shingles(b.decode()).tolist())) <= 4
    for raw in contents.values():
        hashes = shingles(raw.decode())
        assert len(set(hashes.tolist())) > 0.9 * len(hashes)


@pytest.mark.parametrize("vocabulary", ["smollm2", "gemma3"])
def test_each_text_has_ten_chunks(vocabulary: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Conversations are whole, and as many; a model without a chat template gets none."""
    texts(tmp_path / "set")
    notes: list[str] = []
    with load(request.getfixturevalue(vocabulary)) as model:
        has_template = "tokenizer.chat_template" in model.source.fields
        if has_template:
            pytest.importorskip("jinja2")
        parts = read_texts(Texts(files=(tmp_path / "set",)), model, 512, None, notes, all_positions=False)
    names = sorted(text.name for text in TEXTS if text.name != CHAT)
    assert [Path(part.name).name for part in parts] == [*names, *([CHAT] if has_template else [])]
    assert all(len(part.windows) >= 10 for part in parts)
    assert has_template == (vocabulary == "smollm2")
    assert [str(tmp_path / "set" / CHAT) in note for note in notes] == ([] if has_template else [True])
    if has_template:
        chat = parts[-1]
        assert len(chat.windows) == len(list(conversations(FOLDER / CHAT)))
        assert sum(window.rows for window in chat.windows) > 0.5 * len(chat.tokens)


def test_the_command_lists_and_writes_them(tmp_path: Path) -> None:
    listing = run("texts")
    assert listing.exit_code == 0, listing.output
    assert all(text.name in listing.stdout and text.sha256[:16] in listing.stdout for text in TEXTS)
    out = tmp_path / "a" / "b"
    result = json.loads(run("texts", "-o", out, "--json").stdout)
    assert (result["folder"], result["license"]) == (str(out), "CC0-1.0")
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()} == {
        text["name"]: text["sha256"] for text in result["texts"]
    }
    (out / "code.txt").write_text("mine")
    check_refused(run("texts", "-o", out).output, f"QK-E402 {out / 'prose.txt'} --overwrite")
    assert (out / "code.txt").read_text() == "mine"
    assert run("texts", "-o", out, "--overwrite").exit_code == 0
    assert (out / "code.txt").read_bytes() == (FOLDER / "code.txt").read_bytes()


def test_what_cannot_be_read_or_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with refuses(ResourceError, f"QK-E405 {tmp_path / 'file'}"):
        texts(tmp_path / "file")
    monkeypatch.setattr(MODULE, "_FOLDER", tmp_path)
    (tmp_path / "prose.txt").write_text("Another text.\n")
    with refuses(FormatError, f"QK-E100 {tmp_path / 'prose.txt'}"):
        texts(tmp_path / "out")
    (tmp_path / "prose.txt").unlink()
    with refuses(FormatError, f"QK-E401 {tmp_path / 'prose.txt'}"):
        texts(tmp_path / "out")
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix == ".txt"]


def test_calibrating_on_them_gives_a_warning(tiny_moe: Path, tmp_path: Path, data: Path) -> None:
    texts(tmp_path / "set")
    prose, code = tmp_path / "set" / "prose.txt", tmp_path / "set" / "code.txt"
    options = ImatrixOptions(n_ctx=64, chunks=2, ppl=False)
    overlap = imatrix(tiny_moe, [prose, data / "tiny-moe-calibration.txt"], tmp_path / "i.gguf", options=options)
    assert [note for note in overlap.notes if note.startswith("warning: ") and str(prose) in note]
    disjoint = imatrix(tiny_moe, [data / "tiny-moe-calibration.txt"], tmp_path / "j.gguf", options=options)
    assert not [note for note in disjoint.notes if "held out" in note]
    corpus = calibration([prose, code, data / "tiny-moe-calibration.txt"], size=100_000)
    assert [str(prose) in note and str(code) in note for note in corpus.notes if note.startswith("warning: ")] == [True]


def test_calibrating_on_the_conversations_gives_a_warning(smollm2: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    texts(tmp_path / "set")
    chat = tmp_path / "set" / CHAT
    options = ImatrixOptions(n_ctx=8, chunks=1, ppl=False)
    overlap = imatrix(smollm2, [], tmp_path / "i.gguf", chat=[chat], options=options)
    assert [note for note in overlap.notes if note.startswith("warning: ") and str(chat) in note]
