"""Edits of metadata: in place with a journal, or written again; what is refused; the bytes of gguf-new-metadata."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from kills import copy_blocks
from refusals import check_refused, refuses

from checkpoints import write_checkpoint
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert
from quantkit.edit import EditOptions, EditPlan, Method, ValueText, edit, plan_edit, run_edit
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError
from quantkit.formats import clone
from quantkit.formats.gguf import Field, ValueType, header_journal, layout_gguf, open_gguf
from quantkit.formats.gguf.header_journal import journal_path, replace_header
from quantkit.formats.locks import drop_lock, take_lock
from quantkit.hash import hash  # noqa: A004
from quantkit.quantize import QuantizeOptions, quantize
from quantkit.split import split
from quantkit.types import BY_NAME

JINJA = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


@pytest.fixture
def model(tiny_moe: Path, tmp_path: Path) -> Path:
    """A file with room for edits."""
    path = tmp_path / "m.gguf"
    edit(tiny_moe, path, reserve=4096)
    return path


@pytest.fixture(autouse=True)
def no_clones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without clones, wherever the tests run."""

    def refuse(source: int, target: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no clones")

    monkeypatch.setattr(clone, "share_blocks", refuse)


def tensors_of(path: Path) -> dict[str, bytes]:
    with open_gguf(path) as file:
        return {name: file.data(name).tobytes() for name in file.tensors}


def values_of(path: Path) -> dict[str, object]:
    with open_gguf(path) as file:
        return {key: field.value for key, field in file.fields.items()}


def write_small(folder: Path) -> Path:
    """Write a file with three tensors, whose infos have trailing dimensions of 1."""
    tensors = [(f"t{i}", (32, i + 1, 1), BY_NAME["F32"]) for i in range(3)]
    layout = layout_gguf([Field.of("general.architecture", "x")], tensors, all_dims=True)
    data = bytearray(layout.header) + bytes(i % 251 for i in range(layout.nbytes - len(layout.header)))
    (path := folder / "s.gguf").write_bytes(data)
    return path


def change(text: str) -> EditOptions:
    return EditOptions(set={"general.name": text})


# ---------------------------------------------------------------- in place, and written again


def test_an_edit_that_fits_changes_only_the_header(model: Path, tiny_moe: Path, tmp_path: Path) -> None:
    (template := tmp_path / "t.jinja").write_text(JINJA)
    before, size = model.stat().st_ino, model.stat().st_size
    plan = edit(model, options=EditOptions(name="Tiny", license="mit", chat_template={"": template}))
    assert plan.method is Method.IN_PLACE
    assert (model.stat().st_ino, model.stat().st_size) == (before, size)
    assert tensors_of(model) == tensors_of(tiny_moe)
    values = values_of(tiny_moe)
    assert values_of(model) == values | {
        "general.name": "Tiny",
        "general.license": "mit",
        "tokenizer.chat_template": JINJA,
    }
    assert not journal_path(model).exists()
    inverse = EditOptions(name="tiny-moe", remove=("general.license", "tokenizer.chat_template"))
    assert edit(model, options=inverse).method is Method.IN_PLACE
    assert values_of(model) == values


def test_a_file_without_room_is_written_again_with_some(tiny_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_moe.read_bytes())
    path.chmod(0o640)
    plan = edit(path, options=change("x" * 100))
    assert plan.method is Method.REWRITE
    assert path.stat().st_size == plan.nbytes
    assert path.stat().st_mode & 0o777 == 0o640
    assert (len(plan.header) - len(plan.present)) % 4096 == 0
    assert tensors_of(path) == tensors_of(tiny_moe)
    assert edit(path, options=change("y" * 5000)).method is Method.IN_PLACE
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_file_that_is_written_again_has_room_for_atomic_edits(tiny_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_moe.read_bytes())
    assert edit(path, options=change("x" * 100)).method is Method.REWRITE
    for key, text in (("general.name", "y" * 20000), ("user.new", "z"), ("general.name", "")):
        plan = edit(path, options=EditOptions(set={key: text}))
        assert (plan.method, plan.is_atomic) == (Method.IN_PLACE, True)
        assert values_of(path)[key] == text
        assert path.read_bytes()[: len(plan.header)] == plan.header
    assert tensors_of(path) == tensors_of(tiny_moe)


def test_an_edit_within_a_page_needs_no_room(tiny_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_moe.read_bytes())
    plan = edit(path, options=EditOptions(special_token={"eos": 5}))
    assert (plan.method, plan.is_atomic, len(plan.writes)) == (Method.IN_PLACE, True, 1)
    assert len(plan.writes[0].data) <= 4
    assert values_of(path)["tokenizer.ggml.eos_token_id"] == 5


def test_a_file_of_metadata_is_written_again(tiny_moe: Path, tmp_path: Path) -> None:
    """Its bytes are no more than those of a journal, and a rename is atomic."""
    split(tiny_moe, tmp_path / "s.gguf", max_size="6M", no_tensor_first_split=True)
    first = min(tmp_path.iterdir())
    edit(first, reserve=4096)
    nbytes = first.stat().st_size
    plan = edit(first, options=change("x" * 1000))
    assert (plan.method, plan.is_atomic, first.stat().st_size) == (Method.REWRITE, True, nbytes)
    assert values_of(first)["general.name"] == "x" * 1000


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 300)), max_size=6), st.booleans())
def test_any_edit_leaves_the_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int]],
    has_room: bool,
) -> None:
    path = write_small(tmp_path_factory.mktemp("edit"))
    if has_room:
        edit(path, reserve=200)
    expected, tensors = values_of(path), tensors_of(path)
    for key, n in steps:
        name = f"user.{key}"
        options = EditOptions(set={name: "x" * n}) if n % 3 else EditOptions(remove=(name,) if name in expected else ())
        size, method = path.stat().st_size, edit(path, options=options).method
        assert method is not Method.IN_PLACE or path.stat().st_size == size
        expected = {k: v for k, v in expected.items() if k != name} | ({name: "x" * n} if n % 3 else {})
        assert values_of(path) == expected
    assert tensors_of(path) == tensors


def test_only_the_first_shard_changes(tiny_moe: Path, tmp_path: Path) -> None:
    quantize(tiny_moe, tmp_path / "m.gguf", "COPY", QuantizeOptions(split_max_size=6 << 20))
    shards = sorted(tmp_path.iterdir())
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards[1:]}
    plan = edit(shards[1], options=change("Tiny"))
    assert plan.outputs == (shards[0],)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards[1:]} == before
    assert values_of(shards[2])["general.name"] == "Tiny"
    copies = edit(shards[0], tmp_path / "c.gguf", change("Copy")).outputs
    assert [path.name for path in copies] == [path.name.replace("m-", "c-") for path in shards]
    assert [path.read_bytes() for path in copies[1:]] == [path.read_bytes() for path in shards[1:]]


def test_the_first_shard_alone(tiny_moe: Path, tmp_path: Path) -> None:
    """Where the others are missing, its header changes, and checks see its tensors only."""
    quantize(tiny_moe, tmp_path / "m.gguf", "COPY", QuantizeOptions(split_max_size=6 << 20))
    first, *later = sorted(tmp_path.iterdir())
    (folder := tmp_path / "away").mkdir()
    moved = [path.rename(folder / path.name) for path in later]
    result = CliRunner().invoke(cli, ["edit", str(first), "--name", "Tiny", "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["files"], record["missing_shards"], len(record["notes"])) == ([str(first)], len(later), 1)
    for change_of, code in (({"qwen3moe.block_count": 7}, "QK-E305"), ({"qwen3moe.embedding_length": 512}, "QK-E305")):
        with refuses(RecipeError, code):
            edit(first, options=EditOptions(set=change_of))
    copy = edit(first, tmp_path / "c.gguf", change("Copy")).outputs
    assert [path.name for path in copy] == [first.name.replace("m-", "c-")]
    shutil.copy(moved[-1], tmp_path)
    assert plan_edit(tmp_path / moved[-1].name, options=change("Third")).outputs == (first,)
    with refuses(FormatError, "QK-E104", first.name):
        edit(moved[-1], options=change("x"))
    shutil.copy(first, folder)
    assert values_of(moved[-1])["general.name"] == "Tiny"
    assert tensors_of(moved[-1]) == tensors_of(tiny_moe)


# ---------------------------------------------------------------- in a clone


@pytest.fixture
def clones(no_clones: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system with clones."""
    monkeypatch.setattr(clone, "share_blocks", copy_blocks)


def test_an_edit_in_a_clone_replaces_the_file(model: Path, clones: None) -> None:
    model.chmod(0o640)
    os.setxattr(model, "user.origin", b"here")
    before = model.stat()
    expected = bytearray(model.read_bytes())
    plan = plan_edit(model, options=change("Tiny"))
    expected[: len(plan.header)] = plan.header
    with open(model, "rb") as reader:
        run_edit(plan)
        assert reader.read(len(plan.present)) == plan.present
    after = model.stat()
    assert plan.method is Method.CLONE
    assert plan.nbytes == len(plan.header)
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino
    assert os.getxattr(model, "user.origin") == b"here"
    assert model.read_bytes() == expected
    assert [path.name for path in model.parent.iterdir()] == [model.name]


def test_a_link_leads_to_the_file_that_is_edited_in_a_clone(model: Path, tmp_path: Path, clones: None) -> None:
    (folder := tmp_path / "links").mkdir()
    (link := folder / "l.gguf").symlink_to(model)
    assert edit(link, options=change("Tiny")).method is Method.CLONE
    assert link.is_symlink()
    assert values_of(model)["general.name"] == "Tiny"


@pytest.mark.parametrize("call", ["fchown", "fchmod", "open"])
def test_a_clone_that_would_differ_is_not_made(
    model: Path, clones: None, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Where this user may not give a file the same owner, or may not write beside it, the edit is in place."""
    original = getattr(os, call)

    def refuse(path: object, *arguments: int) -> object:
        if call == "open" and arguments[0] & os.O_TMPFILE != os.O_TMPFILE:
            return original(path, *arguments)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, call, refuse)
    assert plan_edit(model, options=change("Tiny")).method is Method.IN_PLACE


def test_a_dry_run_leaves_nothing_and_says_how(model: Path, clones: None) -> None:
    content = model.read_bytes()
    code, text = run(model, "--name", "Tiny", "--dry-run", "--json")
    assert (code, json.loads(text)["method"]) == (0, "clone")
    assert [(path.name, path.read_bytes()) for path in model.parent.iterdir()] == [(model.name, content)]


# ---------------------------------------------------------------- crashes and other processes


def killed_while(function: Callable[[], object]) -> None:
    """Run a function in a process that kills itself."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def plan_to_kill(path: Path) -> EditPlan:
    """Return an edit whose room is too small for a copy of the keys."""
    plan = plan_edit(path, options=change("Killed"))
    assert (plan.method, plan.is_atomic, len(plan.writes)) == (Method.IN_PLACE, False, 3)
    return plan


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("n", [0, 1, 40, 5000, None])
def test_a_header_written_in_part_is_put_back(
    model: Path, monkeypatch: pytest.MonkeyPatch, number: int, n: int | None
) -> None:
    content = model.read_bytes()
    plan = plan_to_kill(model)
    write, count = header_journal.write_range, itertools.count()

    def write_part(path: Path, data: object, offset: int) -> None:
        is_last = next(count) == number
        write(path, data[:n] if is_last else data, offset)  # type: ignore[index, arg-type]
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(header_journal, "write_range", write_part)
    killed_while(lambda: replace_header(model, plan.present, plan.writes))
    monkeypatch.undo()
    assert journal_path(model).exists()
    assert values_of(model)["general.name"] == "tiny-moe"
    assert model.read_bytes() == content
    assert not journal_path(model).exists()


def test_a_file_without_its_journal_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_to_kill(model)
    model.write_bytes(plan.writes[0].data + model.read_bytes()[4:])
    with refuses(FormatError, "QK-E101", journal_path(Path("FILE")).name):
        open_gguf(model)


@pytest.mark.parametrize("n", [0, 4, 100])
def test_a_journal_written_in_part_is_removed(model: Path, n: int) -> None:
    content = model.read_bytes()
    plan = plan_to_kill(model)
    replace_header(model, plan.present, plan.writes)
    model.write_bytes(content)
    journal_path(model).write_bytes(b"QKHEADER"[:n] if n < 8 else b"QKHEADER" + bytes(n))
    assert values_of(model)["general.name"] == "tiny-moe"
    assert not journal_path(model).exists()


def test_a_write_that_fails_puts_the_header_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = model.read_bytes()
    write, calls = header_journal.write_range, []

    def fail_once(path: Path, data: object, offset: int) -> None:
        calls.append(path)
        write(path, data[:100] if len(calls) == 2 else data, offset)  # type: ignore[index]
        if len(calls) == 2:
            raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(header_journal, "write_range", fail_once)
    with refuses(ResourceError, "QK-E405", str(model)):
        edit(model, options=change("Tiny"))
    assert model.read_bytes() == content
    assert [p.name for p in model.parent.iterdir()] == [model.name]


def test_a_journal_of_another_file_restores_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_to_kill(model)
    monkeypatch.setattr(header_journal, "_remove", lambda journal: None)
    replace_header(model, plan.present, plan.writes)
    monkeypatch.undo()
    replacement = bytearray(model.read_bytes())
    replacement[30] ^= 255
    model.write_bytes(replacement)
    with refuses(FormatError, "QK-E409", journal_path(model).name):
        open_gguf(model)
    assert model.read_bytes() == replacement
    journal_path(model).unlink()


def test_readers_wait_for_a_writer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_journal, "PATIENCE", 0.1)
    lock_path = model.with_name(model.name + ".lock")
    lock = take_lock(lock_path)
    journal_path(model).write_bytes(b"QKHEADER")
    with refuses(ResourceError, "QK-E404", str(model)):
        open_gguf(model)
    assert journal_path(model).exists()
    drop_lock(lock_path, lock)
    assert values_of(model)["general.name"] == "tiny-moe"


def test_two_writers_are_refused(model: Path) -> None:
    lock_path = model.with_name(model.name + ".lock")
    lock = take_lock(lock_path)
    with refuses(ResourceError, "QK-E404", str(model)):
        edit(model, options=change("Tiny"))
    drop_lock(lock_path, lock)


def test_a_link_into_the_cache_of_the_hub_is_not_edited(model: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    blob = model.rename(tmp_path / "blobs" / "abcd")
    (link := tmp_path / "linked.gguf").symlink_to(blob)
    with refuses(ResourceError, "QK-E403", str(link)):
        edit(link, options=change("Tiny"))
    edit(link, tmp_path / "o.gguf", change("Tiny"))
    os.link(blob, tmp_path / "hard.gguf")
    with refuses(ResourceError, "QK-E403"):
        edit(tmp_path / "hard.gguf", options=change("Tiny"))


# ---------------------------------------------------------------- values

ARRAYS = {"general.tags": ["a", "b"], "user.i": [1, 2], "user.f": [1.5], "user.b": [True]}


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("general.name=str:@@x", "STRING", "@x"),
        ("general.name=a:b", "STRING", "a:b"),
        ("user.i8=i8:-3", "INT8", -3),
        ("user.u64=u64:0x10", "UINT64", 16),
        ("user.int=int:-5", "INT32", -5),
        ("qwen3moe.expert_used_count=int:1", "UINT32", 1),
        ("qwen3moe.expert_used_count=1", "UINT32", 1),
        ("qwen3moe.rope.freq_base=5000", "FLOAT32", 5000.0),
        ("user.d=f64:2", "FLOAT64", 2.0),
        ("tokenizer.ggml.add_bos_token=TRUE", "BOOL", True),
        ('user.s=["a","b"]', "ARRAY of 2 STRING", ["a", "b"]),
        ("user.a=u8:[1,2]", "ARRAY of 2 UINT8", [1, 2]),
        ("user.a=f32:[1,2.5]", "ARRAY of 2 FLOAT32", [1.0, 2.5]),
        ("user.a=[true]", "ARRAY of 1 BOOL", [True]),
        ("user.a=str:[1]", "STRING", "[1]"),
    ],
)
def test_values_have_their_types(model: Path, text: str, kind: str, value: object) -> None:
    key, _, typed = text.partition("=")
    edit(model, options=EditOptions(set={key: ValueText(typed)}))
    with open_gguf(model) as file:
        assert (file.fields[key].describe(), file.get(key)) == (kind, value)


def test_python_values_and_renames(model: Path) -> None:
    options = EditOptions(
        rename={"general.name": "general.basename"},
        set={**ARRAYS, "user.field": Field.of("other", 3, ValueType.UINT8), "qwen3moe.expert_used_count": 1},
    )
    keys = list(values_of(model))
    edit(model, options=options)
    with open_gguf(model) as file:
        assert {key: file.get(key) for key in ARRAYS} == ARRAYS
        assert file.fields["user.field"].type is ValueType.UINT8
        assert file.fields["qwen3moe.expert_used_count"].type is ValueType.UINT32
        assert list(file.fields)[: len(keys)] == [k.replace("general.name", "general.basename") for k in keys]


def test_templates_and_tokens(model: Path, tmp_path: Path) -> None:
    (config := tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": n, "template": f"{n} {JINJA}"} for n in ("default", "tool_use")]})
    )
    (rag := tmp_path / "rag.jinja").write_text(JINJA)
    edit(model, options=EditOptions(chat_template={"": config, "rag": rag}, special_token={"eot": "!", "pad": 5}))
    values = values_of(model)
    assert values["tokenizer.chat_template"] == f"default {JINJA}"
    assert values["tokenizer.chat_template.tool_use"] == f"tool_use {JINJA}"
    assert values["tokenizer.chat_template.rag"] == JINJA
    assert values["tokenizer.chat_templates"] == ["rag", "tool_use"]
    assert (values["tokenizer.ggml.eot_token_id"], values["tokenizer.ggml.padding_token_id"]) == (1, 5)


def test_provenance_is_dropped(tiny_moe: Path, tmp_path: Path) -> None:
    quantize(tiny_moe, tmp_path / "q.gguf", "Q8_0")
    assert any(key.startswith("quantkit.") for key in values_of(tmp_path / "q.gguf"))
    edit(tmp_path / "q.gguf", options=EditOptions(drop_provenance=True))
    assert not any(key.startswith("quantkit.") for key in values_of(tmp_path / "q.gguf"))


# ---------------------------------------------------------------- refusals

LOOP = "{% for i in range(99999999) %}{% for j in range(99999999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("options", "kind", "refusal"),
    [
        (EditOptions(set={"qwen3moe.block_count": 5}), RecipeError, "QK-E305 blk.4.attn_norm.weight"),
        (EditOptions(remove=("qwen3moe.block_count",)), RecipeError, "QK-E305 qwen3moe.block_count"),
        (EditOptions(pre="nope"), RecipeError, "QK-E305 nope"),
        (EditOptions(set={"general.architecture": "nope"}), RecipeError, "QK-E305 nope"),
        (EditOptions(set={"general.name": 3}), RecipeError, "QK-E123 general.name UINT32 STRING"),
        (EditOptions(set={"qwen3moe.block_count": ValueText("i32:4")}), RecipeError, "QK-E123 INT32 UINT32"),
        (EditOptions(set={"split.count": 3}), RecipeError, "QK-E201 split.count"),
        (EditOptions(set={"general.alignment": 64}), RecipeError, "QK-E201 general.alignment"),
        (EditOptions(remove=("nope*",)), RecipeError, "QK-E206 nope*"),
        (EditOptions(rename={"nope": "x"}), RecipeError, "QK-E206 nope"),
        (EditOptions(rename={"general.name": "tokenizer.ggml.pre"}), RecipeError, "QK-E201 tokenizer.ggml.pre"),
        (EditOptions(set={"user.x": ValueText("3")}), RecipeError, "QK-E203 user.x"),
        (EditOptions(set={"user.x": ValueText("u8:300")}), RecipeError, "QK-E203 user.x UINT8"),
        (EditOptions(set={"user.x": ValueText("[1,")}), RecipeError, "QK-E203 user.x"),
        (EditOptions(set={"user.x": []}), RecipeError, "QK-E203 user.x"),
        (EditOptions(set={"user.x": ValueText("[[1]]")}), RecipeError, "QK-E203 user.x"),
        (EditOptions(set={"tokenizer.ggml.merges": ValueText("x")}), RecipeError, "QK-E203 tokenizer.ggml.merges"),
        (EditOptions(set={"general.name": ValueText("@/nope")}), RecipeError, "QK-E401 /nope"),
        (EditOptions(special_token={"eos": "no such token"}), RecipeError, "QK-E206 eos"),
        (EditOptions(special_token={"eos": 4096}), RecipeError, "QK-E203 4096 4095"),
        (EditOptions(special_token={"nope": 1}), RecipeError, "QK-E203 nope eos"),
        (EditOptions(chat_template={"": Path("/nope")}), FormatError, "QK-E401 /nope"),
    ],
)
def test_refusals_change_nothing(model: Path, options: EditOptions, kind: type[QuantkitError], refusal: str) -> None:
    content = model.read_bytes()
    with refuses(kind, refusal):
        edit(model, options=options)
    assert model.read_bytes() == content
    assert [p.name for p in model.parent.iterdir()] == [model.name]


@pytest.mark.parametrize(
    "text", ["{% for m in %}", "{{ raise_exception('no') }}", LOOP], ids=["syntax", "raise", "loop"]
)
def test_a_chat_template_that_fails_is_refused(model: Path, text: str, tmp_path: Path) -> None:
    (path := tmp_path / "t.jinja").write_text(text)
    options = EditOptions(chat_template={"": path})
    with refuses(FormatError, "QK-E116", str(model)):
        edit(model, options=options)
    edit(model, options=options, force=True)
    assert values_of(model)["tokenizer.chat_template"] == text


@pytest.mark.parametrize("share", [None, copy_blocks])
@pytest.mark.parametrize("reserve", [None, 1 << 16])
def test_a_file_that_changes_after_the_plan_keeps_the_change(
    model: Path, monkeypatch: pytest.MonkeyPatch, reserve: int | None, share: Callable[[int, int], None] | None
) -> None:
    """In place, in a clone, and where the file would be written again; also if another file has its name now."""
    if share is not None:
        monkeypatch.setattr(clone, "share_blocks", share)
    plan = plan_edit(model, None, EditOptions(name="first"), reserve=reserve)
    edit(model, None, EditOptions(name="second"))
    with refuses(FormatError, "QK-E109"):
        run_edit(plan)
    with open_gguf(model) as file:
        assert file.get("general.name") == "second"


def test_a_copy_replaces_nothing(model: Path, tmp_path: Path) -> None:
    with refuses(ResourceError, "QK-E403", str(model)):
        edit(model, model, change("x"))
    (tmp_path / "o.gguf").write_bytes(b"x")
    with refuses(ResourceError, "QK-E402"):
        edit(model, tmp_path / "o.gguf", change("x"))
    edit(model, tmp_path / "o.gguf", change("x"), overwrite=True)
    assert values_of(tmp_path / "o.gguf")["general.name"] == "x"


# ---------------------------------------------------------------- the command, and gguf-py


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["edit", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command(model: Path, tmp_path: Path) -> None:
    content = model.read_bytes()
    code, text = run(model, "--name", "Tiny", "--set", 'general.tags=["moe"]', "--dry-run")
    assert code == 0
    assert 'general.name: "tiny-moe" -> "Tiny"' in text
    assert model.read_bytes() == content
    code, text = run(model, "--special-token", "eos=!", "--remove", "tokenizer.ggml.add_bos_token", "--json")
    result = json.loads(text)
    assert (code, result["method"], result["written"]) == (0, "in_place", True)
    assert {c["key"]: (c["before"] or {}).get("value") for c in result["changes"]} == {
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert run(model, "--set", "general.name")[0] == 2
    assert run(model)[0] == 0


def test_the_bytes_are_those_of_gguf_new_metadata(tiny_moe: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf.scripts.gguf_new_metadata")
    import subprocess

    (template := tmp_path / "t.jinja").write_text(JINJA)
    output, reference = tmp_path / "output.gguf", tmp_path / "reference.gguf"
    arguments = ["--general-name", "Tiny", "--chat-template", JINJA, "--special-token", "eos", "!"]
    arguments += ["--remove-metadata", "tokenizer.ggml.add_bos_token", "--force", str(tiny_moe), str(reference)]
    subprocess.run(
        [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", *arguments], check=True, capture_output=True
    )
    options = EditOptions(
        name="Tiny", chat_template={"": template}, special_token={"eos": "!"}, remove=("tokenizer.ggml.add_bos_token",)
    )
    edit(tiny_moe, output, options)
    assert output.read_bytes() == reference.read_bytes()


def test_room_of_quantize_and_convert(tiny_moe: Path, tmp_path: Path) -> None:
    """--reserve: a long template fits in place, and all else is as without it; of a split model in the first shard."""
    quantize(tiny_moe, tmp_path / "plain.gguf", "Q8_0", QuantizeOptions(no_provenance=True))
    output = tmp_path / "q.gguf"
    result = CliRunner().invoke(
        cli, ["quantize", "--no-provenance", "--reserve", "64KiB", str(tiny_moe), str(output), "Q8_0"]
    )
    assert result.exit_code == 0, result.output
    with open_gguf(output) as file, open_gguf(tmp_path / "plain.gguf") as plain:
        assert (64 << 10) - 64 <= file.room <= 64 << 10
        assert plain.room == 0
        assert file.fields == plain.fields
    assert hash(output).model == hash(tmp_path / "plain.gguf").model
    data = output.read_bytes()
    plan = edit(output, None, EditOptions(name="x" * 60000))
    assert plan.method is Method.IN_PLACE
    assert output.stat().st_size == len(data)
    quantize(tiny_moe, tmp_path / "s.gguf", "COPY", QuantizeOptions(split_max_size="7M", reserve=4096))
    with open_gguf(tmp_path / "s-00001-of-00003.gguf") as file:
        assert file.room
    folder = write_checkpoint("afmoe", tmp_path)
    options = ConvertOptions(pre="llama3", reserve="64KiB")
    for type_name in (None, "Q8_0"):
        convert(folder, tmp_path / f"c-{type_name}.gguf", type_name, options)
        with open_gguf(tmp_path / f"c-{type_name}.gguf") as file:
            assert file.room > 65000
    with refuses(RecipeError, "QK-E203 64"):
        quantize(tiny_moe, tmp_path / "n.gguf", "Q8_0", QuantizeOptions(reserve="65MiB"))


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("hf://org/name/a/m.gguf", "quantkit upload org/name a/m.gguf --folder a --overwrite"),
        ("s3://bucket/m.gguf", "aws s3 cp m.gguf s3://bucket/m.gguf"),
        ("https://host/m.gguf", "https://host/m.gguf"),
    ],
)
def test_a_url_is_refused_with_what_to_type(url: str, command: str) -> None:
    result = CliRunner().invoke(cli, ["edit", url, "--name", "Tiny"])
    assert result.exit_code == 1
    check_refused(result.output, "QK-E412", command)
