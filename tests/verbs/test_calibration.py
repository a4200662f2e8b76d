"""Calibration text: inputs, removed duplicates, the held-out part, and recognition of a text later."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import check_refused, refuses

from quantkit.calibration import Corpus, Sketch, calibration, merge_sketches, overlap, sketch, sketch_file, sketch_of
from quantkit.calibration.documents import read_inputs, record_text
from quantkit.calibration.heldout import HeldOut, find_held_out, held_out_warning, merge_held_out, read_held_out
from quantkit.calibration.overlap import MAX_HASHES, SCALE, WORDS, shingles
from quantkit.calibration.passages import Deduplicator, passage_hash, split_passages
from quantkit.cli import cli
from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.formats.gguf import Field
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, read_imatrix, write_imatrix


def prose(seed: int, words: int) -> str:
    """Return paragraphs of made-up words; no two seeds share a shingle."""
    rng = random.Random(seed)
    vocabulary = [f"w{seed}x{i}" for i in range(400)]
    paragraphs = [" ".join(rng.choices(vocabulary, k=60)) + "." for _ in range(words // 60)]
    return "\n\n".join(paragraphs) + "\n"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(prose(i, 1800))
    return folder


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["calibration", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def passages(corpus: Corpus) -> tuple[set[str], set[str]]:
    return set(corpus.calibration.passages), set(corpus.evaluation.passages)


# --- the corpus ---


def test_the_held_out_part_shares_no_text(texts: Path) -> None:
    corpus = calibration([texts], size=60_000, heldout=0.1)
    assert 0.9 * 54_000 < corpus.calibration.nbytes <= 54_000
    assert 0.5 * 6_000 < corpus.evaluation.nbytes <= 6_000
    calibration_part, held_out = passages(corpus)
    assert not calibration_part & held_out
    assert overlap(corpus.evaluation.text, corpus.calibration.text).share == 0
    assert not set(shingles(corpus.evaluation.text).tolist()) & set(shingles(corpus.calibration.text).tolist())
    source = "".join(path.read_text() for path in sorted(texts.iterdir()))
    assert all(passage in source for passage in calibration_part | held_out)
    assert corpus.notes == ()


def test_bytes_do_not_depend_on_names_and_order(texts: Path, tmp_path: Path) -> None:
    first = calibration([texts], size=50_000, seed=7)
    rerun = calibration([texts], size=50_000, seed=7)
    folder = tmp_path / "other"
    folder.mkdir()
    for i, path in enumerate(sorted(texts.iterdir(), reverse=True)):
        (folder / f"name{i}.md").write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    renamed = calibration(sorted(folder.iterdir(), reverse=True), size=50_000, seed=7)
    assert first.calibration.text == rerun.calibration.text == renamed.calibration.text
    assert first.evaluation.text == rerun.evaluation.text == renamed.evaluation.text
    assert first.manifest() == rerun.manifest()
    reseeded = calibration([texts], size=50_000, seed=8)
    assert reseeded.calibration.text != first.calibration.text
    assert reseeded.evaluation.text != first.evaluation.text


def test_pinned_bytes(tmp_path: Path) -> None:
    """A seed always gives these bytes: importance matrices name texts by their hashes."""
    words = [f"w{i * i % 1009}" for i in range(12_000)]
    text = "\n\n".join(" ".join(words[i : i + 60]) for i in range(0, len(words), 60))
    (tmp_path / "a.txt").write_text(text)
    corpus = calibration([tmp_path / "a.txt"], size=20_000, heldout=0.1, passage=500, seed=3)
    assert corpus.calibration.sha256[:16] == "8e27718c3810f49f"
    assert corpus.evaluation.sha256[:16] == "a7b116931b223549"


def test_less_text_than_requested(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(prose(1, 6000))
    corpus = calibration([tmp_path / "a.txt"], size=10**6, heldout=0.1)
    total = (tmp_path / "a.txt").stat().st_size
    assert corpus.calibration.nbytes + corpus.evaluation.nbytes > 0.98 * total
    assert 0.05 * total < corpus.evaluation.nbytes <= 0.1 * total
    assert corpus.notes[0].startswith("less text than --size")
    (tmp_path / "b.txt").write_text(prose(2, 120))
    with refuses(FormatError, "QK-E214 heldout size"):
        calibration([tmp_path / "b.txt"])
    assert not calibration([tmp_path / "a.txt"], heldout=0.0).evaluation.passages


def test_repetitions_are_dropped(tmp_path: Path) -> None:
    pieces = prose(1, 3000).split("\n\n")
    variants = [piece.replace("w1x1 ", "w1x2 ", 1).upper() for piece in pieces]
    (tmp_path / "a.txt").write_text("\n\n".join(pieces))
    (tmp_path / "b.txt").write_text("\n\n".join(pieces).replace(" ", "  "))
    (tmp_path / "c.txt").write_text("\n\n".join(variants))
    one = calibration([tmp_path / "a.txt"], passage=600, heldout=0)
    all_three = calibration([tmp_path / f"{name}.txt" for name in "abc"], passage=600, heldout=0)
    hashes = {passage_hash(p) for p in one.calibration.passages}
    assert len(all_three.calibration.passages) <= 1.2 * len(hashes)
    assert all_three.dedup.exact_dropped + all_three.dedup.near_dropped > 1.7 * len(hashes)
    assert all_three.dedup.exact_dropped > 0
    assert all_three.dedup.near_dropped > 0


def test_copies_of_the_held_out_part_are_not_calibrated_on(texts: Path, tmp_path: Path) -> None:
    first = calibration([texts], size=60_000, heldout=0.1)
    quotes = [f"{prose(100 + i, 120)}{p[:200]}" for i, p in enumerate(first.evaluation.passages)]
    (texts / "quotes.jsonl").write_text("".join(json.dumps({"text": q}) + "\n" for q in quotes))
    rerun = calibration([texts], size=60_000, heldout=0.1)
    assert overlap(rerun.evaluation.text, rerun.calibration.text).warning is None
    calibration_part, held_out = passages(rerun)
    shared = set(shingles("\n".join(held_out)).tolist())
    for passage in calibration_part:
        hashes = shingles(passage).tolist()
        assert len(shared.intersection(hashes)) <= 0.1 * len(hashes)


def test_common_boilerplate_is_no_leak(texts: Path) -> None:
    license_text = " ".join(f"license{i}" for i in range(60))
    for path in sorted(texts.iterdir()):
        path.write_text(f"{license_text}\n\n{path.read_text()}")
    corpus = calibration([texts], size=120_000, heldout=0.1)
    assert corpus.calibration.nbytes > 0.8 * 108_000
    held_out = set(shingles(corpus.evaluation.text).tolist())
    assert len(held_out & set(shingles(corpus.calibration.text).tolist())) <= 0.005 * len(held_out)
    assert overlap(corpus.evaluation.text, corpus.calibration.text).warning is None


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab \n\té語𝄞"), max_size=400), st.integers(4, 64))
def test_cutting_loses_only_whitespace(text: str, size: int) -> None:
    pieces = list(split_passages(text, size))
    assert "".join("".join(piece.split()) for piece in pieces) == "".join(text.split())
    assert all(0 < len(piece.encode()) <= size for piece in pieces)
    assert all(piece == piece.strip("\n").rstrip() for piece in pieces)


def test_passages_end_at_paragraphs() -> None:
    text = "one two\nthree\n\nfour five six\nseven\n\neight"
    assert list(split_passages(text, 24)) == ["one two\nthree", "four five six\nseven", "eight"]
    assert list(split_passages("    indented\n    code\n", 100)) == ["    indented\n    code"]


def test_overlap_with_known_texts() -> None:
    deduplicator = Deduplicator()
    text = prose(1, 60)
    assert deduplicator.take(text, held_out=True)
    assert not deduplicator.take(text)
    assert not deduplicator.take(text.upper().replace(" ", "\n"))
    assert deduplicator.exact_dropped == 2
    assert not deduplicator.take(f"{prose(2, 60)} {' '.join(text.split()[:30])}")
    assert deduplicator.leak_dropped == 1
    assert deduplicator.take(prose(2, 60))
    assert not deduplicator.take(prose(2, 60) + " more")
    assert deduplicator.near_dropped == 1
    assert deduplicator.take("...")  # no words at all: only its own repetition is known
    assert not deduplicator.take("...")


# --- documents ---


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}, "hi\n\nho"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]}, "a"),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}, "hi\n\nho"),
        ({"text": "plain", "content": "other"}, "plain"),
        ({"content": "other"}, "other"),
        ({"instruction": "do", "input": "", "output": "done"}, "do\n\ndone"),
        ({"prompt": "p", "completion": "c"}, "p\n\nc"),
        ("a string", "a string"),
        ({"messages": []}, None),
        ({"text": " "}, None),
        ({"messages": [{"role": "user", "content": None}, 7]}, None),
        ({"id": 1}, None),
        (3, None),
    ],
)
def test_records(record: object, text: str | None) -> None:
    assert record_text(record) == text


def test_folders_and_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "a.py").write_bytes(b"\xef\xbb\xbfprint(1)\r\n")
    (tmp_path / "sub" / "b.md").write_text("# b")
    (tmp_path / "sub" / "c.bin").write_bytes(b"a\0b")
    (tmp_path / "sub" / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "zero.txt").write_bytes(b"text" * 300 + b"\0.")
    texts = read_inputs([tmp_path])
    assert [(f.path.name, f.documents) for f in texts.files] == [
        ("a.py", ["print(1)\n"]), ("empty.txt", []), ("b.md", ["# b"]), ("zero.txt", ["text" * 300 + "."]),
    ]  # fmt: skip
    assert (texts.not_text, texts.left_out) == (2, 0)
    subset = read_inputs([tmp_path], include=["*.md", "*.rst"])
    assert ([f.path.name for f in subset.files], subset.left_out) == (["b.md"], 5)


def test_unusable_inputs(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": \n')
    (tmp_path / "b.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "c.jsonl").write_text('{"text": "one two three"}\n{"id": 1}\n{"text": "\\ud800"}\n')
    with refuses(FormatError, "QK-E121 latin.txt UTF-8 3"):
        read_inputs([tmp_path / "latin.txt"])
    with refuses(FormatError, "QK-E111 a.jsonl 3 JSON"):
        read_inputs([tmp_path / "a.jsonl"])
    with refuses(FormatError, "QK-E121 b.jsonl"):
        read_inputs([tmp_path / "b.jsonl"])
    with refuses(FormatError, "QK-E401"):
        read_inputs([tmp_path / "none"])
    corpus = calibration([tmp_path / "c.jsonl"], heldout=0.0)
    assert "c.jsonl: skipped 1 records without text, first line 2" in corpus.notes[0]
    assert "?" in corpus.calibration.text
    (tmp_path / "folder").mkdir()
    with refuses(FormatError, "QK-E121"):
        calibration([tmp_path / "folder"])


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"heldout": 0.6}, "QK-E203 0 50 60"),
        ({"passage": 10}, "QK-E203 64"),
        ({"size": 1000}, "QK-E203 1000 2000"),
    ],
)
def test_invalid_options_are_refused(texts: Path, options: dict[str, float], refusal: str) -> None:
    with refuses(RecipeError, refusal):
        calibration([texts], **options)  # type: ignore[arg-type]


# --- recognizing a text ---


def test_shingles() -> None:
    words = [f"w{i}" for i in range(20)]
    hashes = shingles(" ".join(words))
    assert hashes.size == 20 - WORDS + 1
    assert np.array_equal(shingles("W0,  w1.\nw2; w3 w4 w5 w6 w7"), hashes[:1])
    assert np.array_equal(shingles(" ".join(words[5:])), hashes[5:])
    assert len(set(hashes.tolist())) == hashes.size
    assert shingles("... !").size == 0
    assert shingles("two words").size == 1
    assert shingles("今天天气很好我们去公园").size == 11 - WORDS + 1


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_overlap_estimates_the_share(share: float) -> None:
    evaluation = prose(1, 30_000).split("\n\n")
    n = int(share * len(evaluation))
    unrelated = prose(2, 30_000)
    actual = overlap("\n\n".join(evaluation), "\n\n".join([*evaluation[:n], unrelated]))
    assert actual.share == pytest.approx(share, abs=0.05)
    assert actual.sampled > 1000
    assert not actual.same_text
    assert (actual.warning is None) == (share == 0)
    if share == 0.25:
        assert "of this text was used for calibration" in (actual.warning or "")


def test_short_equal_texts_are_recognized() -> None:
    assert overlap("three short words", "three short words").warning is not None
    assert overlap("three short words", "others").warning is None


def test_sketches_are_thinned_and_still_compare() -> None:
    rng = np.random.default_rng(1)
    hashes = np.unique(rng.integers(0, 2**64 // SCALE, 3 * MAX_HASHES, np.uint64))
    large = merge_sketches([Sketch(SCALE, hashes, ("a",))])
    assert large.hashes.size <= MAX_HASHES
    assert large.scale == 4 * SCALE
    assert overlap(Sketch(SCALE, hashes, ("b",)), large).share == 1
    assert overlap(large, [Sketch(SCALE, hashes[::2], ("b",)), Sketch(SCALE, hashes[1::2], ("c",))]).share == 1


def imatrix_with(extra: dict[str, Field]) -> Imatrix:
    entry = ImatrixEntry(np.ones((1, 4), np.float32), np.ones(1, np.int64))
    return Imatrix(Path("x"), {"blk.0.attn_q.weight": entry}, ["t"], 1, 512, extra=extra)


def test_an_imatrix_keeps_the_sketch(tmp_path: Path, texts: Path) -> None:
    corpus = calibration([texts], tmp_path / "out", size=60_000)
    sketch = sketch_file(tmp_path / "out" / "calibration.txt")
    write_imatrix(tmp_path / "x.gguf", imatrix_with(sketch.fields()))
    actual = sketch_of(read_imatrix(tmp_path / "x.gguf"))
    assert actual is not None
    assert (actual.scale, actual.sha256) == (SCALE, (corpus.calibration.sha256,))
    assert np.array_equal(actual.hashes, sketch.hashes)
    assert overlap(corpus.calibration.text, actual).same_text
    assert overlap(corpus.evaluation.text, actual).warning is None
    assert overlap("\n\n".join(corpus.calibration.passages[:9]), actual).share == 1
    assert sketch_of(imatrix_with({})) is None


@pytest.mark.parametrize("key", ["scale", "shingles", "sha256"])
def test_an_invalid_sketch_is_refused(key: str) -> None:
    fields = sketch(prose(1, 300)).fields()
    fields[f"quantkit.calibration.{key}"] = Field.of(f"quantkit.calibration.{key}", -1)
    with refuses(FormatError, "QK-E118"):
        sketch_of(imatrix_with(fields))


# --- what was held out ---


def test_a_text_records_its_held_out_part(tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "out"
    corpus = calibration([texts], out, size=60_000, heldout=0.2)
    held_out_parts = {
        name: find_held_out(out / name, (out / name).read_bytes()) for name in ("calibration.txt", "evaluation.txt")
    }
    for held_out in held_out_parts.values():
        assert held_out is not None
        assert held_out.files == (str(out / "evaluation.txt"),)
        assert held_out.sketch.sha256 == (corpus.evaluation.sha256,)
        assert np.array_equal(held_out.sketch.hashes, sketch(corpus.evaluation.text).hashes)
    assert find_held_out(out / "calibration.txt", b"another text") is None
    assert find_held_out(texts / "00.txt", (texts / "00.txt").read_bytes()) is None
    raw = (out / "calibration.txt").read_bytes()
    (out / "evaluation.txt").write_text("changed")  # its hash is known all the same
    missing = find_held_out(out / "calibration.txt", raw)
    assert missing is not None
    assert (missing.sketch.sha256, missing.sketch.hashes.size) == ((corpus.evaluation.sha256,), 0)
    for text in ("{", "[]", json.dumps({"made_by": "others"}), json.dumps({"made_by": "quantkit calibration"})):
        (out / "manifest.json").write_text(text)
        assert find_held_out(out / "calibration.txt", raw) is None


def test_no_held_out_part_gives_no_warning(tmp_path: Path, texts: Path) -> None:
    calibration([texts], tmp_path / "out", size=60_000, heldout=0)
    path = tmp_path / "out" / "calibration.txt"
    assert find_held_out(path, path.read_bytes()) is None


def test_the_held_out_part_is_kept_in_metadata() -> None:
    one, two = (HeldOut((name,), sketch(prose(seed, 3000))) for name, seed in (("a", 1), ("b", 2)))
    both = merge_held_out([one, two, one])
    assert both is not None
    actual = read_held_out(Path("x"), both.fields())
    assert actual is not None
    assert actual.files == ("a", "b")
    assert actual.sketch.sha256 == both.sketch.sha256
    used = held_out_warning(Path("x"), {**both.fields(), **two.sketch.fields()})
    assert used is not None
    assert used.startswith("warning: x was computed on b, which is held out for evaluation")
    assert held_out_warning(Path("x"), {**both.fields(), **sketch(prose(3, 3000)).fields()}) is None
    for fields in (
        Field.of("quantkit.calibration.heldout.files", 1),
        one.fields()["quantkit.calibration.heldout.files"],
    ):
        with refuses(FormatError, "QK-E118 heldout.*"):
            read_held_out(Path("x"), both.fields() | {"quantkit.calibration.heldout.files": fields})


# --- files and the command ---


def test_files_and_manifest(tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "out"
    output = run("-o", out, "--size", "50k", "--heldout", "10%", "--seed", 5, texts).output
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["seed"], manifest["size"], manifest["heldout"], manifest["passage"]) == (5, 50_000, 0.1, 2000)
    for part in ("calibration", "evaluation"):
        raw = (out / f"{part}.txt").read_bytes()
        record = manifest[part]
        assert record["sha256"] == hashlib.sha256(raw).hexdigest()
        assert record["bytes"] == len(raw)
        assert len(record["passages"]) == len(set(record["passages"])) > 0
        assert record["sha256"][:16] in output
    assert not set(manifest["calibration"]["passages"]) & set(manifest["evaluation"]["passages"])
    assert [i["documents"] for i in manifest["inputs"]] == [1] * 12
    assert "read: 12 files, 12 documents" in output
    check_refused(run("-o", out, texts, code=1).output, "QK-E402 --overwrite")
    run("-o", out, "--overwrite", texts)
    assert json.loads((out / "manifest.json").read_text())["seed"] == 0


def test_json_and_errors(tmp_path: Path, texts: Path) -> None:
    printed = run("-o", tmp_path / "out", "--json", "--include", "0*.txt", texts).output
    manifest = json.loads(printed[printed.index("{") :])
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert len(manifest["inputs"]) == 10
    assert "is not a share; write 5% or 0.05" in run("-o", tmp_path / "o", "--heldout", "x", texts, code=2).output
    assert "Missing argument" in run("-o", tmp_path / "o", code=2).output
    assert "quantkit perplexity" in run("--help").output
    with refuses(QuantkitError, "QK-E402 manifest.json --overwrite"):
        calibration([texts], tmp_path / "out")
