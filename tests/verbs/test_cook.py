"""quantkit cook: what can be asked for, which steps stand, and that a killed cook goes on to the same bytes."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import write_checkpoint
from quantkit.cli import cli
from quantkit.cook import Config, config_from, cook, parse_target, plan_cook, read_config, starter, target_steps
from quantkit.cook import config as config_module
from quantkit.cook.engine import Decision, Facts, NullObserver, Step, StepProgress, decide, run_steps
from quantkit.cook.state import STATE, State, StepRecord
from quantkit.cook.tables import keys_of
from quantkit.cook.texts import split_text
from quantkit.errors import QualityGate, QuantkitError, RecipeError, ResourceError
from quantkit.evaluate import kld
from quantkit.imatrix import ImatrixOptions, imatrix
from quantkit.pipeline import content as content_module
from quantkit.quantize import QuantizeOptions, quantize
from quantkit.report import read_data
from quantkit.units import PLUS_MINUS

DATA = Path(__file__).parents[1] / "data"
MODEL = DATA / "tiny-moe-bf16.gguf"


# ---------------------------------------------------------------- what can be asked for


@pytest.mark.parametrize(
    ("text", "goal", "part"),
    [
        ("q4_k_m", None, "Q4_K_M"),
        ("12.3G", ("size", 12.3e9), "12.3G"),
        ("512 MiB", ("size", 512 << 20), "512MiB"),
        ("4.2bpw", ("bpw", 4.2), "4.2bpw"),
        ("kld=.01", ("kld", 0.01), "kld.01"),
        ("kld<=1e-2+feedback", ("kld", 0.01), "kld<1e-2-feedback"),
        ("IQ2_M+feedback", None, "IQ2_M-feedback"),
        ("Q2_K+calibrate", None, "Q2_K-calibrate"),
    ],
)
def test_targets(text: str, goal: tuple[str, float] | None, part: str) -> None:
    found = parse_target(text)
    assert (found.goal is None) == (goal is None)
    if found.goal is not None and goal is not None:
        assert (found.goal.kind, found.goal.value) == pytest.approx(goal)
    assert found.file_suffix == part
    assert (found.feedback, found.calibrate) == ("+feedback" in text, "+calibrate" in text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Q4_KM", "did you mean Q4_K_M?"),
        ("12", "12G or 12bpw"),
        ("0G", "that small"),
        ("99bpw", "to 32 bits"),
        ("Q4_K_M+feedbak", "did you mean feedback?"),
        ("Q4_K_M+feedback+calibrate", "one of"),
        ("COPY", "quantizes nothing"),
        ("", "there is no preset"),
    ],
)
def test_targets_that_are_none(text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        parse_target(text)


@given(st.text(max_size=20) | st.from_regex(r"\A(kld=?|)[\d.e+-]*(bpw|[KMGT]i?B?|)(\+\w+)*\Z"))
@settings(max_examples=100, deadline=None)
def test_no_target_breaks_the_parser(text: str) -> None:
    try:
        found = parse_target(text)
    except RecipeError:
        return
    assert (found.preset is None) != (found.goal is None)
    assert "/" not in found.file_suffix


def configured(**top: Any) -> Config:
    return config_from({"model": "m.gguf", "targets": "Q4_K_M", **top}, "cook.toml", Path("folder"))


def test_defaults_and_paths() -> None:
    made = configured(calibration={"text": ["a.txt", "/b"]}, imatrix={"chunks": "all"}, check={"chunks": 7})
    assert made.model == Path("folder/m.gguf")
    assert (made.output, made.work) == (Path("folder/m-cooked"), Path("folder/m-cooked/work"))
    assert made.calibration.text == (Path("folder/a.txt"), Path("/b"))
    assert (made.imatrix.chunks, made.check.chunks, made.name) == (None, 7, "m")
    assert configured(model="Qwen3-30B-bf16-00001-of-00002.gguf").name == "Qwen3-30B"


@pytest.mark.parametrize(
    ("top", "said"),
    [
        ({"taragets": "Q4_K_M"}, "taragets: there is no such key; did you mean targets?"),
        ({"chunks": 3}, "it is a key of [imatrix] and [check] and [sensitivity]"),
        ({"imatrx": {}}, "did you mean [imatrix]?"),
        ({"imatrix": {"chunk": 3}}, "[imatrix] chunk: there is no such key; did you mean chunks?"),
        ({"imatrix": {"chunks": 0}}, "[imatrix] chunks: 0: write a number above 0"),
        ({"imatrix": {"chunks": True}}, "[imatrix] chunks: True"),
        ({"imatrix": 3}, "[imatrix] imatrix: must be a table"),
        ({"calibration": {"heldout": "60%"}}, "[calibration] heldout: '60%'"),
        ({"targets": []}, "nothing to cook"),
        ({"targets": ["Q4_K_M", "q4_k_m"]}, "Q4_K_M occurs twice"),
        ({"targets": ["Q4_K"] * 2 + ["x"]}, "there is no preset"),
        ({"target": {"target": "Q8_0"}}, "write [[target]]"),
        ({"target": [{"name": "x"}]}, "[[target]] target: must be given"),
        ({"target": [{"target": "Q8_0", "name": "../x"}]}, "no slash"),
        ({"target": [{"target": "3bpw", "recipe": "x"}]}, "the types that are searched for"),
        ({"model": "hf://org/model"}, "a file of this machine"),
        ({"runtime": "ollama"}, "'llama.cpp' or 'ik_llama.cpp'"),
        ({"name": "a\nb"}, "one line"),
    ],
)
def test_what_is_wrong_is_named(top: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)) as e:
        configured(**top)
    assert e.value.message.startswith("cook.toml: ")


TABLES = {name: list(keys_of(table)) for name, table in config_module.TABLES.items()}
TABLES["target"] = [*config_module.TARGET_KEYS, *keys_of(QuantizeOptions)]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(["1M", "5%"])
VALUES = st.recursive(SCALARS, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each))


@given(st.sampled_from(sorted(TABLES)).flatmap(lambda t: st.tuples(st.just(t), st.sampled_from(TABLES[t]))), VALUES)
@settings(max_examples=100, deadline=None)
def test_hostile_values(at: tuple[str, str], value: Any) -> None:
    table, name = at
    inner = {name: value}
    try:
        made = configured(**{table: [{"target": "Q8_0", **inner}] if table == "target" else inner})
    except RecipeError as e:
        said = e.message
    else:
        assert all(made.options(each) is not None for each in made.targets)
        said = "cook.toml: "
    assert said.startswith("cook.toml: ")
    assert said.isprintable()


@given(st.binary(max_size=40) | st.text(max_size=60).map(str.encode))
@settings(max_examples=10, deadline=None)
def test_hostile_files(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile.toml"
    path.write_bytes(text)
    with pytest.raises(QuantkitError):  # the model and the targets are missing at least
        read_config(path)


def test_the_starter_has_every_key_and_its_default(tmp_path: Path) -> None:
    """As it is, it is valid; with every key uncommented, too, and that changes nothing but what are examples."""
    text, notes = starter(MODEL, tmp_path)
    assert not notes
    assert "qwen3moe, 4 layers, 8 experts" in text
    plain = config_from(tomllib.loads(text), "cook.toml", tmp_path)
    assert len(plain.targets) == 3
    every = re.sub(r"(?m)^# ((\w+ = \S|\[\[).*)", r"\1", text)
    keys = tomllib.loads(every)
    for table, table_type in config_module.TABLES.items():
        assert keys_of(table_type).keys() == keys[table].keys()
    assert keys_of(config_module.TopSettings).keys() == keys.keys() - config_module.TABLES.keys() - {"target"}
    made = config_from(keys, "cook.toml", tmp_path)
    assert (made.name, made.output, made.work) == (plain.name, plain.output, plain.work)
    for table in ("check", "sensitivity", "report", "runtime", "merge_up_gate", "threads"):
        default, shown = getattr(plain, table), getattr(made, table)
        for example in ("types", "ctx"):
            shown = replace(shown, **{example: getattr(default, example)}) if hasattr(shown, example) else shown
        assert shown == default, table


def test_texts_are_divided_at_blank_lines() -> None:
    text = b"\n\n".join(b"passage %d of some length" % i for i in range(20))
    first, second = split_text(text, 0.4)
    assert first + second == text
    assert first.endswith(b"\n\n")
    assert 0.2 < len(first) / len(text) <= 0.4
    for odd in (b"", b"x", "é".encode() * 50, b"word " * 50):
        assert b"".join(split_text(odd, 0.4)) == odd
        for part in split_text(odd, 0.4):
            part.decode()


def test_conversations_alone_are_all_that_an_imatrix_reads(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"messages": []}\n')
    off = {"run": False}
    keys = {"targets": "Q8_0", "calibration": {"chat": [str(chat)]}, "check": off, "report": off}
    planned = plan_cook(config_from({"model": str(MODEL), **keys}, "cook.toml", tmp_path))
    (step,) = [step for step in planned.steps if step.name == "imatrix"]
    assert set(step.inputs.values()) == {MODEL, chat}


# ---------------------------------------------------------------- which steps stand


class Line:
    """A line of steps a -> b -> c over files, which write what they read, and an option."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.options, self.ran = folder, {"a": 1, "b": 1, "c": 1}, list[str]()
        self.fails: Callable[[str, str], None] = lambda name, when: None
        (folder / "in").write_text("in")

    def steps(self) -> list[Step]:
        return [self.step("a", "in"), self.step("b", "a"), self.step("c", "b")]

    def step(self, name: str, of: str) -> Step:
        out = self.folder / name

        def run(tell: StepProgress) -> Facts:
            self.ran.append(name)
            self.fails(name, "begun")
            (self.folder / f"{name}.part").write_text(
                (self.folder / of).read_text() + f" {name}{self.options[name] % 10}"
            )
            self.fails(name, "written")
            (self.folder / f"{name}.part").replace(out)
            self.fails(name, "renamed")
            return {}

        inputs = {of: self.folder / of}
        return Step(name, name, inputs, {"option": self.options[name]}, (out,), run, is_complete=lambda: True)

    def cook(self) -> list[str]:
        self.ran.clear()
        run_steps(self.steps(), State(self.folder), NullObserver())
        return list(self.ran)

    def standing(self) -> list[str]:
        return [d.step.name for d in decide(self.steps(), State(self.folder)) if d.up_to_date]


def test_only_what_depends_on_a_change_runs_again(tmp_path: Path) -> None:
    line = Line(tmp_path)
    assert line.cook() == ["a", "b", "c"]
    assert line.cook() == []
    assert line.standing() == ["a", "b", "c"]
    line.options["b"] = 2
    assert line.standing() == ["a"]
    assert line.cook() == ["b", "c"]
    line.options["b"] = 12  # the same bytes as before: c stands
    assert line.cook() == ["b"]
    (tmp_path / "c").unlink()
    assert line.cook() == ["c"]
    os.utime(tmp_path / "a", (1, 1))  # copied, say: the content counts
    assert line.cook() == []
    (tmp_path / "in").write_text("in2")
    assert line.cook() == ["a", "b", "c"]
    assert (tmp_path / "c").read_text() == "in2 a1 b2 c1"
    status = (tmp_path / "in").stat()
    (tmp_path / "in").write_text("in3")  # of the same length, and the time put back
    os.utime(tmp_path / "in", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert line.cook() == ["a", "b", "c"]
    (tmp_path / "other").write_text("in4")
    os.utime(tmp_path / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
    (tmp_path / "other").replace(tmp_path / "in")
    assert line.standing() == []


@pytest.mark.parametrize("place", ["file", "shard", "folder"])
def test_content_is_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Not only the ends of tensors; of a model in shards, of all of them; of a folder, of its files."""
    monkeypatch.setattr(content_module, "_PIECE", 1 << 12)
    paths = {"file": ["m.gguf"], "shard": [f"m-{no:05}-of-00003.gguf" for no in (1, 2, 3)], "folder": ["a/b", "a/c"]}
    files = [tmp_path / name for name in paths[place]]
    files[0].parent.mkdir(exist_ok=True)
    for file in files:
        file.write_bytes(bytes(10_000))
    named = tmp_path / "a" if place == "folder" else files[0]
    digests = {State(tmp_path).digest(named)}
    for at in (0, 4095, 5000, 9999):
        with files[-1].open("r+b") as raw:
            raw.seek(at)
            raw.write(b"x")
        digests.add(State(tmp_path).digest(named))
    assert len(digests) == 5
    for file in files:
        shutil.copy(file, tmp_path / "copy")
        (tmp_path / "copy").replace(file)
    assert State(tmp_path).digest(named) in digests


def test_a_plan_reads_no_file_that_no_step_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run of a model of some hundred gigabytes takes no minutes; what a step knows is told by its content."""
    (file := tmp_path / "m.gguf").write_bytes(bytes(100))
    state = State(tmp_path)
    state.record([file])
    state.save()
    file.write_bytes(bytes(101))
    assert State(tmp_path, planning=True).digest(file) == State(tmp_path).digest(file)
    (other := tmp_path / "n.gguf").write_bytes(bytes(100))
    monkeypatch.setattr(content_module, "content_digest", None)  # nothing may call it
    assert State(tmp_path, planning=True).digest(other)


def test_why_a_step_runs(tmp_path: Path) -> None:
    line = Line(tmp_path)
    state = State(tmp_path)
    assert [d.reason for d in decide(line.steps(), state)] == ["not done yet", "after a", "after b"]
    line.cook()
    line.options["a"] = 2
    assert [d.reason for d in decide(line.steps(), State(tmp_path))] == ["changed: option", "after a", "after b"]
    line.options["a"] = 1
    (tmp_path / "c").unlink()
    assert [d.reason for d in decide(line.steps(), State(tmp_path))] == ["up to date", "up to date", "c is gone"]


class Killed(BaseException):
    """What kill -9 is to a test."""


@pytest.mark.parametrize("when", ["begun", "written", "renamed"])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_kill_at_any_point(tmp_path: Path, name: str, when: str) -> None:
    """In a first run, and in one that replaces what an earlier one made: never is an old file taken for a new one."""
    for value in (1, 2):
        line = Line(tmp_path)
        line.options = dict.fromkeys("abc", value)

        def fail(at: str, moment: str) -> None:
            if (at, moment) == (name, when):
                raise Killed

        line.fails = fail
        with pytest.raises(Killed):
            line.cook()
        line.fails = lambda name, when: None
        again = line.cook()
        after = ["a", "b", "c"][["a", "b", "c"].index(name) :]
        assert again == (after[1:] if when == "renamed" else after)
        assert (tmp_path / "c").read_text() == f"in a{value} b{value} c{value}"


def test_files_of_others_are_never_replaced(tmp_path: Path) -> None:
    line = Line(tmp_path)
    (tmp_path / "b").write_text("mine")
    with pytest.raises(ResourceError, match="quantkit cook did not make it"):
        line.cook()
    assert (tmp_path / "b").read_text() == "mine"
    (tmp_path / "b").unlink()
    assert line.cook() == ["b", "c"]
    (tmp_path / "b").write_text("changed by hand")
    assert line.standing() == ["a"]
    with pytest.raises(ResourceError, match="changed since"):
        line.cook()
    assert (tmp_path / "b").read_text() == "changed by hand"


def test_a_broken_state_is_an_error(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"kind": "quantkit.cook", "version": 1}', '{"kind": "quantkit.cook", "version": 2}'):
        (tmp_path / STATE).write_text(text)
        with pytest.raises(QuantkitError, match="not a state of quantkit cook"):
            State(tmp_path)


# ---------------------------------------------------------------- real cooks


SMALL: dict[str, dict[str, Any]] = {
    "imatrix": {"ctx": 64, "chunks": 2},
    "check": {"ctx": 64, "chunks": 2},
    "sensitivity": {"ctx": 64, "chunks": 1, "types": ["Q3_K", "Q6_K"]},
    "report": {"run": False},
}


def small(targets: Any = ("Q4_K_M", "IQ4_XS"), **tables: Any) -> Config:
    """Return the settings of a cook of seconds, of the small MoE into the current folder, whose name is in no file."""
    calibration = {"text": str(DATA / "tiny-moe-calibration.txt"), "evaluation": str(DATA / "tiny-moe-evaluation.txt")}
    merged = {**SMALL, "calibration": calibration}
    for name, value in tables.items():
        merged[name] = {**merged[name], **value} if isinstance(value, dict) and name in merged else value
    top = {"model": str(MODEL), "targets": list(targets), "name": "moe", "output": "out", "threads": 1}
    return config_from({**top, **merged}, "cook.toml", Path())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in a folder of one's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(folder: Path) -> dict[str, bytes]:
    """Return the files of a cook that others may have, and what decided them."""
    work = folder / "out/work"
    files = [
        *(folder / "out").glob("*.gguf"),
        *work.glob("imatrix.gguf"),
        *work.glob("checks/*"),
        *work.glob("texts/*"),
    ]
    return {str(path.relative_to(folder)): _timeless(path) for path in files}


def _timeless(path: Path) -> bytes:
    raw = path.read_bytes()
    return re.sub(rb'"(seconds|model|base)": .*', b"", raw) if path.suffix == ".json" else raw


@pytest.fixture(scope="module")
def cooked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished cook, which no test changes."""
    folder = tmp_path_factory.mktemp("cooked")
    with chdir(folder):
        result = cook(small())
    assert [dish.path.name for dish in result.targets] == ["moe-Q4_K_M.gguf", "moe-IQ4_XS.gguf"]
    assert all(dish.kld is not None and 0 < dish.kld < 1 for dish in result.targets)
    assert len(result.executed) == 7
    assert not list(folder.rglob("*.lock"))
    return folder


def test_the_files_are_those_of_the_commands(cooked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cooked)
    work = Path("out/work")
    by_hand = tmp_path / "imatrix.gguf"
    options = ImatrixOptions(n_ctx=64, chunks=2)
    imatrix(MODEL, [DATA / "tiny-moe-calibration.txt"], by_hand, options=options, threads=1)
    assert by_hand.read_bytes() == (work / "imatrix.gguf").read_bytes()
    for preset in ("Q4_K_M", "IQ4_XS"):
        out = tmp_path / f"{preset}.gguf"
        quantize(MODEL, out, preset, QuantizeOptions(imatrix=work / "imatrix.gguf"), threads=1)
        assert out.read_bytes() == (cooked / f"out/moe-{preset}.gguf").read_bytes()
        found = kld(out, work / "base.logits", threads=1).sums.kld.mean.value
        assert found == json.loads((work / f"checks/{preset}.json").read_text())["kld"]["value"]


@pytest.mark.parametrize(
    ("tables", "runs"),
    [
        ({}, ""),
        ({"threads": 2}, ""),
        ({"imatrix": {"chunks": 3}}, "imatrix, quantize Q4_K_M, check Q4_K_M, quantize IQ4_XS, check IQ4_XS"),
        ({"check": {"chunks": 1}}, "base, check Q4_K_M, check IQ4_XS"),
        ({"targets": ["IQ4_XS"]}, ""),
        ({"targets": ["IQ4_XS", "Q8_0"]}, "quantize Q8_0, check Q8_0"),
        (
            {"quantize": {"tensor_type": ["attn_v=Q8_0"]}},
            "quantize Q4_K_M, check Q4_K_M, quantize IQ4_XS, check IQ4_XS",
        ),
        ({"target": [{"target": "Q4_K_M", "max_kld": 0.5}], "targets": []}, ""),
        (
            {"imatrix": {"file": str(DATA / "tiny-moe-imatrix.gguf")}},
            "quantize Q4_K_M, check Q4_K_M, quantize IQ4_XS, check IQ4_XS",
        ),
        ({"merge_up_gate": True}, "quantize Q4_K_M, check Q4_K_M, quantize IQ4_XS, check IQ4_XS"),
        (
            {"calibration": {"evaluation": str(DATA / "tiny-moe-evaluation-whole.txt")}},
            "texts, base, check Q4_K_M, check IQ4_XS",
        ),
        (
            {"calibration": {"text": str(DATA / "tiny-moe-evaluation-whole.txt")}},
            "imatrix, quantize Q4_K_M, check Q4_K_M, quantize IQ4_XS, check IQ4_XS",
        ),
        ({"sensitivity": {"chunks": 5}, "search": {"candidates": 1}}, ""),
    ],
)
def test_which_steps_a_change_makes_run(
    cooked: Path, monkeypatch: pytest.MonkeyPatch, tables: dict[str, Any], runs: str
) -> None:
    monkeypatch.chdir(cooked)
    before = {path: path.stat().st_mtime_ns for path in cooked.rglob("*")}
    planned = plan_cook(small(**tables))
    assert [d.step.name for d in planned.decisions if not d.up_to_date] == (runs.split(", ") if runs else [])
    assert {path: path.stat().st_mtime_ns for path in cooked.rglob("*")} == before


class Killer(NullObserver):
    """Kills a cook at one moment of one step, or where the next one starts."""

    def __init__(self, step: str, moment: str) -> None:
        self.step, self.moment, self.now, self.seen = step, moment, "", False

    def skip(self, number: int, count: int, decision: Decision) -> None:
        self.seen |= decision.step.name == self.step

    def start(self, number: int, count: int, decision: Decision) -> None:
        self.now = decision.step.name
        self._meet("started")

    def progress(self, done: float, total: float, text: str) -> None:
        self._meet("progress")

    def finish(self, number: int, count: int, step: Step, record: StepRecord) -> None:
        self._meet("finished")

    def _meet(self, moment: str) -> None:
        if (self.now, moment) == (self.step, self.moment) or (self.seen and self.now != self.step):
            raise KeyboardInterrupt
        self.seen |= self.now == self.step


def test_a_killed_cook_goes_on_to_the_same_bytes(cooked: Path, here: Path) -> None:
    """Killed at the start, within and at the end of every step in turn, each run going on where the last one was."""
    config = small()
    killed = list[str]()
    for step in [step.name for step in plan_cook(config).steps]:
        for moment in ("started", "progress", "finished"):
            try:
                cook(config, observer=Killer(step, moment))
            except KeyboardInterrupt:
                killed.append(f"{moment} {step}")
    assert len(killed) >= 18
    assert cook(config).executed == ()
    assert made(here) == made(cooked)
    assert not [path for path in here.rglob("*") if path.suffix in (".part", ".journal", ".state")]


def test_a_change_after_a_kill_starts_over(cooked: Path, here: Path) -> None:
    """What was half done with other options is thrown away."""
    other = small(imatrix={"chunks": 3}, quantize={"tensor_type": ["ffn_down=Q8_0"]})
    for step in ("imatrix", "base", "quantize Q4_K_M", "check Q4_K_M"):
        with pytest.raises(KeyboardInterrupt):
            cook(other, observer=Killer(step, "progress"))
    cook(small())
    assert made(here) == made(cooked)


def test_what_is_in_the_way(here: Path) -> None:
    (here / "out").mkdir()
    mine = here / "out/moe-IQ4_XS.gguf"
    mine.write_bytes(b"mine")
    with pytest.raises(ResourceError, match="quantkit cook did not make it"):
        cook(small(check={"run": False}))
    assert mine.read_bytes() == b"mine"
    assert (here / "out/moe-Q4_K_M.gguf").exists()


def test_a_goal_is_searched_and_met(here: Path) -> None:
    """A size is kept to the byte, by a recipe that quantize takes; another goal searches anew and measures nothing."""
    most = 5_200_000
    config = small(["5.2M"], search={"candidates": 2, "same": ["up,gate"]}, merge_up_gate=True)
    result = cook(config)
    assert result.executed == (
        *("texts", "imatrix", "base", "sensitivity", "candidates", "search 5.2M", "quantize 5.2M", "check 5.2M"),
    )
    assert 0.9 * most < result.targets[0].nbytes <= most
    found = json.loads((here / "out/work/recipes/5.2M.json").read_text())
    assert found["nbytes"] == result.targets[0].nbytes
    assert found["candidates"] == 2
    other = cook(small(["4.5bpw"], search={"candidates": 2, "same": ["up,gate"]}, merge_up_gate=True))
    assert other.executed == ("search 4.5bpw", "quantize 4.5bpw", "check 4.5bpw")


def test_a_search_needs_its_extra(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ResourceError, match=r"gguf-quantkit\[search\]"):
        cook(small(["4bpw"]))
    assert not list(here.iterdir())
    assert cook(small(["Q8_0"], imatrix={"run": False}, check={"run": False})).executed == ("quantize Q8_0",)


def test_files_in_parts(here: Path) -> None:
    """Shards are known when they are planned; fewer of them do not leave the check of more behind."""
    first = cook(small(["Q8_0"], quantize={"split_max_size": "4M"}))
    assert [path.name for path in sorted((here / "out").glob("*.gguf"))] == [
        f"moe-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)
    ]
    assert first.targets[0].nbytes > 9 << 20
    assert cook(small(["Q8_0"], quantize={"split_max_size": "4M"})).executed == ()
    again = cook(small(["Q8_0"], quantize={"split_max_size": "6M"}))
    assert again.executed == ("quantize Q8_0", "check Q8_0")
    assert again.targets[0].path.name == "moe-Q8_0-00001-of-00002.gguf"
    assert again.targets[0].kld == first.targets[0].kld


def test_one_cook_at_a_time(here: Path) -> None:
    class Second(NullObserver):
        def start(self, number: int, count: int, decision: Decision) -> None:
            with pytest.raises(ResourceError, match="another cook is at work there"):
                cook(small())
            raise Killed

    with pytest.raises(Killed):
        cook(small(), observer=Second())


def test_a_gate_fails_when_everything_is_made(cooked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cooked)
    with pytest.raises(QualityGate, match="above 0.0001"):
        cook(small([], target=[{"target": "Q4_K_M", "max_kld": 1e-4}]))


@pytest.mark.parametrize(
    ("tables", "error", "said"),
    [
        ({"model": "missing.gguf"}, ResourceError, "there is no such model"),
        ({"model": str(DATA / "tiny-moe-imatrix.gguf")}, QuantkitError, "no general.architecture"),
        ({"calibration": {"text": "missing.txt"}}, ResourceError, "missing.txt: there is no such file"),
        ({"calibration": {"text": []}}, RecipeError, "no text to calibrate on"),
        ({"quantize": {"tensor_type": ["attn_v=Q99"]}}, QuantkitError, "Q99"),
        ({"quantize": {"recipe": "missing.recipe"}}, QuantkitError, "missing.recipe"),
        ({"imatrix": {"run": False}, "targets": ["IQ2_XXS"]}, QuantkitError, "IQ2_XXS: "),
        ({"output": str(MODEL)}, RecipeError, "must be different paths"),
        ({"output": str(MODEL / "x")}, ResourceError, "is a file"),
    ],
)
def test_nothing_begins_that_cannot_end(here: Path, tables: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        cook(small(**tables))
    assert not list(here.iterdir())


def test_no_text_says_what_needs_one(here: Path) -> None:
    config = config_from({"model": str(MODEL), "targets": "Q4_K_M"}, "cook.toml", Path())
    with pytest.raises(RecipeError, match=r"the importance matrix, the check need one: give some MB of what the model"):
        plan_cook(config)
    without = {"imatrix": {"run": False}, "check": {"run": False}, "report": {"run": False}}
    planned = plan_cook(config_from({"model": str(MODEL), "targets": "Q4_K_M", **without}, "cook.toml", Path()))
    assert [step.name for step in planned.steps] == ["quantize Q4_K_M"]


def test_the_report_comes_last_and_stands(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(["Q8_0", "Q4_0"], imatrix={"run": False}, report={"run": True})
    monkeypatch.setattr(import_module("quantkit.report.measure"), "kld", None)  # checks have measured it
    found = cook(config)
    assert found.executed[-1] == "report"
    assert [path.name for path in found.reports] == ["report.html", "README.md"]
    numbers = read_data(here / "out/work/report.json")
    checked = [json.loads((here / f"out/work/checks/{name}.json").read_bytes()) for name in ("Q8_0", "Q4_0")]
    assert [f.quality.kld.value for f in numbers.files if f.quality and f.quality.kld] == pytest.approx(
        [each["kld"]["value"] for each in checked]
    )
    assert all(f.quality.quantiles for f in numbers.files if f.quality)
    assert cook(config).executed == ()
    assert cook(replace(config, targets=config.targets[:1])).executed == ("report",)
    (here / "out/README.md").write_text("by hand")
    with pytest.raises(ResourceError, match="changed since"):
        cook(config)


def test_a_calibrated_target_takes_the_chunks_of_the_importance_matrix(here: Path) -> None:
    planned = plan_cook(small(["Q2_K+calibrate"]))
    step = next(step for step in planned.steps if step.name == "quantize Q2_K-calibrate")
    assert (step.options["calibrate_ctx"], step.options["calibrate_chunks"]) == (64, 2)


def test_a_corpus_of_folders(here: Path) -> None:
    (here / "src").mkdir()
    text = (DATA / "tiny-moe-calibration.txt").read_text()
    for i in range(4):
        (here / f"src/{i}.txt").write_text(text[i * 20000 : (i + 1) * 20000])
    corpus = {"calibration": {"text": "src", "evaluation": None, "size": "60K", "heldout": "20%"}}
    corpus["calibration"].pop("evaluation")
    config = replace(
        small(), calibration=config_from({"model": "m", "targets": "Q8_0", **corpus}, "x", Path()).calibration
    )
    cook(config)
    texts = here / "out/work/texts"
    assert sorted(path.name for path in texts.iterdir()) == [
        *("calibration.txt", "check.txt", "evaluation.txt", "manifest.json", "sensitivity.txt")
    ]
    assert (texts / "sensitivity.txt").read_bytes() + (texts / "check.txt").read_bytes() == (
        texts / "evaluation.txt"
    ).read_bytes()
    with pytest.raises(RecipeError, match="whose files are the text"):
        plan_cook(replace(config, output=Path("src/out")))


@pytest.mark.parametrize("what", ["pipe", "zero"])
@pytest.mark.parametrize("at", ["calibration.text", "calibration.chat", "calibration.evaluation", "imatrix.file"])
def test_what_is_read_is_a_file(here: Path, at: str, what: str) -> None:
    os.mkfifo("pipe")
    Path("zero").symlink_to("/dev/zero")
    top: dict[str, Any] = {"model": str(MODEL), "targets": "Q8_0", "calibration": {"text": str(MODEL)}}
    table, key = at.split(".")
    top[table] = {**top.get(table, {}), key: str(here / what)}
    with pytest.raises(ResourceError, match=f"{what}: not a regular file"):
        plan_cook(config_from(top, "cook.toml", Path()))


def test_a_checkpoint_is_converted_once(here: Path) -> None:
    checkpoint = write_checkpoint("qwen3-moe", here)
    text = here / "text.txt"
    text.write_text("one two three four five\n\n" * 400)
    shared = {"calibration": {"text": str(text), "evaluation": str(text)}, **SMALL}
    top = {"model": str(checkpoint), "targets": "Q8_0", "output": "out", "threads": 1, **shared}
    top |= {"imatrix": {"run": False}, "check": {"run": False}}
    with pytest.raises(QuantkitError, match=r"\[convert\] pre"):
        plan_cook(config_from(top, "cook.toml", Path()))
    config = config_from({**top, "convert": {"pre": "qwen2"}}, "cook.toml", Path())
    assert cook(config).executed == ("convert", "quantize Q8_0")
    assert cook(config).executed == ()
    assert cook(replace(config, name="other")).executed == ("quantize Q8_0",)


# ---------------------------------------------------------------- the command


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, ["cook", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_line(cooked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cook that stands, by options and by a file: the same steps; nothing is written by --dry-run."""
    monkeypatch.chdir(cooked)
    texts = ["-f", str(DATA / "tiny-moe-calibration.txt"), "--evaluation", str(DATA / "tiny-moe-evaluation.txt")]
    said = run(str(MODEL), "Q4_K_M", "3.5bpw", *texts, "--no-report", "-o", "out", "--dry-run")
    assert "dry run: nothing was written" in said
    assert "changed: chunks, ctx" in said
    planned = json.loads(run(str(MODEL), "Q8_0", *texts, "--no-report", "-o", "new", "--dry-run", "--json"))
    assert [step["name"] for step in planned["steps"]] == ["texts", "imatrix", "base", "quantize Q8_0", "check Q8_0"]
    assert not Path("new").exists()
    assert "--threads" in run("cook.toml", "-t", "3", code=2)
    assert "did you mean Q4_K_M" in run(str(MODEL), "Q4_KM", code=2)
    assert "nothing to cook" in run(str(MODEL), code=2)


def test_init_writes_a_file_that_runs(here: Path) -> None:
    assert "wrote cook.toml" in run("init", "-m", str(MODEL))
    assert "exists" in run("init", code=1)
    assert "wrote other.toml" in run("init", "other.toml")
    assert "ends with .toml" in run("init", str(MODEL), code=2)
    assert "--threads is no option of init" in run("init", "x.toml", "-t", "2", code=2)
    assert "--output is no option of init" in run("init", "x.toml", "-o", "x", code=2)
    assert '"path/to/texts"' in (here / "cook.toml").read_text()
    texts, more = (str(DATA / f"tiny-moe-{kind}.txt") for kind in ("calibration", "evaluation"))
    run("init", "-m", str(MODEL), "-f", texts, "-f", more, "--overwrite")
    assert f'text = ["{texts}", "{more}"]' in (here / "cook.toml").read_text()
    run("init", "-m", str(MODEL), "-f", texts, "--evaluation", more, "--overwrite")
    settings = tomllib.loads((here / "cook.toml").read_text())["calibration"]
    assert settings == {"text": [texts], "evaluation": more}
    said = run("cook.toml", "Q8_0", "--dry-run")
    assert "quantize Q8_0" in said
    (texts := here / ("f" * 200)).write_text("text")
    run("init", "-m", str(MODEL), "-f", str(texts), "--evaluation", more, "--overwrite")
    assert tomllib.loads((here / "cook.toml").read_text())["calibration"]["text"] == [texts.name]


def test_the_command_reports_and_is_interrupted_cleanly(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["imatrix = {ctx = 64, chunks = 2}", "check = {ctx = 64, chunks = 2}", "report = {run = false}"]
    texts = f'calibration = {{text = "{DATA}/tiny-moe-calibration.txt", evaluation = "{DATA}/tiny-moe-evaluation.txt"}}'
    (here / "c.toml").write_text("\n".join([f'model = "{MODEL}"', 'targets = "Q8_0"', "threads = 1", texts, *lines]))
    with monkeypatch.context() as patched:
        patched.setattr(target_steps, "run_quantize", interrupt)
        said = run("c.toml", code=130)
    assert "interrupted in quantize Q8_0; the same command continues from there" in said
    said = run("c.toml")
    assert PLUS_MINUS in said
    assert "[2/5] imatrix: up to date" in said
    assert "[4/5] quantize Q8_0: tiny-moe-Q8_0.gguf (was interrupted)" in said
    assert "2 steps ran" in said
    found = json.loads(run("c.toml", "--json"))
    assert found["ran"] == []
    assert 0 < found["files"][0]["kld"] < 0.01


def interrupt(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt
