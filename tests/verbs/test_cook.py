"""quantkit cook: what can be asked for, which steps are up to date, and that a killed cook is resumed with equal
bytes."""

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
from refusals import check_refused, refuses

import task_files
from checkpoints import write_checkpoint
from quantkit.cli import cli
from quantkit.cook import Config, config_from, cook, parse_target, plan_cook, read_config, starter, target_steps
from quantkit.cook import config as config_module
from quantkit.cook.engine import Decision, Facts, NullObserver, Step, StepProgress, decide, run_steps
from quantkit.cook.state import STATE, State, StepRecord
from quantkit.cook.tables import keys_of
from quantkit.cook.texts import split_text
from quantkit.errors import FormatError, QualityGate, QuantkitError, RecipeError, ResourceError
from quantkit.evaluate import kld
from quantkit.fit import FitOptions, fit
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
        ("fit=24G, 64GiB", ("fit", 24e9 + (64 << 30)), "fit24G-64GiB"),
        ("IQ2_M+feedback", None, "IQ2_M-feedback"),
        ("Q2_K+calibrate", None, "Q2_K-calibrate"),
    ],
)
def test_targets(text: str, goal: tuple[str, float] | None, part: str) -> None:
    target = parse_target(text)
    assert (target.goal is None) == (goal is None)
    if target.goal is not None and goal is not None:
        assert (target.goal.kind, target.goal.value) == pytest.approx(goal)
    assert target.file_suffix == part
    assert (target.feedback, target.calibrate) == ("+feedback" in text, "+calibrate" in text)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("Q4_KM", "QK-E301 Q4_K_M"),
        ("12", "QK-E203 12G 12bpw"),
        ("0G", "QK-E203 0G"),
        ("fit=24G,0", "QK-E203 fit=24G,0"),
        ("fit=many", "QK-E203 fit=many"),
        ("99bpw", "QK-E203 32"),
        ("Q4_K_M+feedbak", "QK-E203 Q4_K_M+feedbak"),
        ("Q4_K_M+feedback+calibrate", "QK-E201 Q4_K_M+feedback+calibrate"),
        ("COPY", "QK-E203 COPY Q4_K_M"),
        ("", "QK-E301 Q4_K_M 12.3G"),
    ],
)
def test_invalid_targets_are_refused(text: str, refusal: str) -> None:
    with refuses(RecipeError, refusal):
        parse_target(text)


@given(st.text(max_size=20) | st.from_regex(r"\A(kld=?|)[\d.e+-]*(bpw|[KMGT]i?B?|)(\+\w+)*\Z"))
@settings(max_examples=100, deadline=None)
def test_no_target_crashes_the_parser(text: str) -> None:
    try:
        target = parse_target(text)
    except RecipeError:
        return
    assert (target.preset is None) != (target.goal is None)
    assert "/" not in target.file_suffix


def configured(**top: Any) -> Config:
    return config_from({"model": "m.gguf", "targets": "Q4_K_M", **top}, "cook.toml", Path("folder"))


def test_defaults_and_paths() -> None:
    config = configured(calibration={"text": ["a.txt", "/b"]}, imatrix={"chunks": "all"}, check={"chunks": 7})
    assert config.model == Path("folder/m.gguf")
    assert (config.output, config.work) == (Path("folder/m-cooked"), Path("folder/m-cooked/work"))
    assert config.calibration.text == (Path("folder/a.txt"), Path("/b"))
    assert (config.imatrix.chunks, config.check.chunks, config.name) == (None, 7, "m")
    assert configured(model="Qwen3-30B-bf16-00001-of-00002.gguf").name == "Qwen3-30B"


@pytest.mark.parametrize(
    ("top", "refusal"),
    [
        ({"taragets": "Q4_K_M"}, "QK-E208 cook.toml"),
        ({"chunks": 3}, "QK-E208 [imatrix] [check] [sensitivity]"),
        ({"imatrx": {}}, "QK-E208 [imatrix]"),
        ({"imatrix": {"chunk": 3}}, "QK-E208 [imatrix]"),
        ({"imatrix": {"chunks": 0}}, "QK-E208 [imatrix] 0"),
        ({"imatrix": {"chunks": True}}, "QK-E208 [imatrix]"),
        ({"imatrix": 3}, "QK-E208 [imatrix]"),
        ({"calibration": {"heldout": "60%"}}, "QK-E208 [calibration] 60%"),
        ({"targets": []}, "QK-E214"),
        ({"targets": ["Q4_K_M", "q4_k_m"]}, "QK-E208 Q4_K_M"),
        ({"targets": ["Q4_K"] * 2 + ["x"]}, "QK-E208 Q4_K x"),
        ({"target": {"target": "Q8_0"}}, "QK-E208 [[target]"),
        ({"target": [{"name": "x"}]}, "QK-E208 [[target]"),
        ({"target": [{"target": "Q8_0", "name": "../x"}]}, "QK-E208 x 120"),
        ({"target": [{"target": "3bpw", "recipe": "x"}]}, "QK-E208 cook.toml"),
        ({"model": "hf://org/model"}, "QK-E208 model"),
        ({"runtime": "ollama"}, "QK-E208 llama.cpp ik_llama.cpp"),
        ({"name": "a\nb"}, "QK-E208 cook.toml"),
    ],
)
def test_errors_name_their_table(top: dict[str, Any], refusal: str) -> None:
    with refuses(RecipeError, refusal) as e:
        configured(**top)
    assert e.value.message.startswith("cook.toml: ")


TABLES = {name: list(keys_of(table)) for name, table in config_module.TABLES.items()}
TABLES["target"] = [*config_module.TARGET_KEYS, *keys_of(QuantizeOptions)]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(["1M", "5%"])
VALUES = st.recursive(
    SCALARS, lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values)
)


@given(st.sampled_from(sorted(TABLES)).flatmap(lambda t: st.tuples(st.just(t), st.sampled_from(TABLES[t]))), VALUES)
@settings(max_examples=100, deadline=None)
def test_hostile_values(place: tuple[str, str], value: Any) -> None:
    table, name = place
    inner = {name: value}
    try:
        config = configured(**{table: [{"target": "Q8_0", **inner}] if table == "target" else inner})
    except RecipeError as e:
        message = e.message
    else:
        assert all(config.options(target) is not None for target in config.targets)
        message = "cook.toml: "
    assert message.startswith("cook.toml: ")
    assert message.isprintable()


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
    uncommented = re.sub(r"(?m)^# ((\w+ = \S|\[\[).*)", r"\1", text)
    keys = tomllib.loads(uncommented)
    for table, table_type in config_module.TABLES.items():
        assert keys_of(table_type).keys() == keys[table].keys()
    assert keys_of(config_module.TopSettings).keys() == keys.keys() - config_module.TABLES.keys() - {"target"}
    config = config_from(keys, "cook.toml", tmp_path)
    assert (config.name, config.output, config.work) == (plain.name, plain.output, plain.work)
    for table in ("check", "sensitivity", "report", "runtime", "merge_up_gate", "threads"):
        default, table_values = getattr(plain, table), getattr(config, table)
        for example in ("types", "ctx", "base_model", "license", "texts", "score", "score_tasks"):
            table_values = (
                replace(table_values, **{example: getattr(default, example)})
                if hasattr(table_values, example)
                else table_values
            )
        assert table_values == default, table


def test_texts_are_split_at_blank_lines() -> None:
    text = b"\n\n".join(b"passage %d of some length" % i for i in range(20))
    first, second = split_text(text, 0.4)
    assert first + second == text
    assert first.endswith(b"\n\n")
    assert 0.2 < len(first) / len(text) <= 0.4
    for odd in (b"", b"x", "é".encode() * 50, b"word " * 50):
        assert b"".join(split_text(odd, 0.4)) == odd
        for part in split_text(odd, 0.4):
            part.decode()


def test_an_imatrix_may_read_only_conversations(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"messages": []}\n')
    off = {"run": False}
    keys = {"targets": "Q8_0", "calibration": {"chat": [str(chat)]}, "check": off, "report": off}
    cook_plan = plan_cook(config_from({"model": str(MODEL), **keys}, "cook.toml", tmp_path))
    (step,) = [step for step in cook_plan.steps if step.name == "imatrix"]
    assert set(step.inputs.values()) == {MODEL, chat}


# ---------------------------------------------------------------- which steps stand


class Line:
    """A line of steps a -> b -> c over files, which write what they read, and an option."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.options, self.log = folder, {"a": 1, "b": 1, "c": 1}, list[str]()
        self.fails: Callable[[str, str], None] = lambda name, when: None
        (folder / "in").write_text("in")

    def steps(self) -> list[Step]:
        return [self.step("a", "in"), self.step("b", "a"), self.step("c", "b")]

    def step(self, name: str, key: str) -> Step:
        out = self.folder / name

        def run(tell: StepProgress) -> Facts:
            self.log.append(name)
            self.fails(name, "begun")
            (self.folder / f"{name}.part").write_text(
                (self.folder / key).read_text() + f" {name}{self.options[name] % 10}"
            )
            self.fails(name, "written")
            (self.folder / f"{name}.part").replace(out)
            self.fails(name, "renamed")
            return {}

        inputs = {key: self.folder / key}
        return Step(name, name, inputs, {"option": self.options[name]}, (out,), run, is_complete=lambda: True)

    def cook(self) -> list[str]:
        self.log.clear()
        run_steps(self.steps(), State(self.folder), NullObserver())
        return list(self.log)

    def standing(self) -> list[str]:
        return [d.step.name for d in decide(self.steps(), State(self.folder)) if d.up_to_date]


def test_only_steps_that_depend_on_a_change_run_again(tmp_path: Path) -> None:
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
def test_content_digests_cover_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Not only the ends of tensors; of a model in shards, of all of them; of a folder, of its files."""
    monkeypatch.setattr(content_module, "_PIECE", 1 << 12)
    paths = {"file": ["m.gguf"], "shard": [f"m-{no:05}-of-00003.gguf" for no in (1, 2, 3)], "folder": ["a/b", "a/c"]}
    files = [tmp_path / name for name in paths[place]]
    files[0].parent.mkdir(exist_ok=True)
    for file in files:
        file.write_bytes(bytes(10_000))
    path = tmp_path / "a" if place == "folder" else files[0]
    digests = {State(tmp_path).digest(path)}
    for offset in (0, 4095, 5000, 9999):
        with files[-1].open("r+b") as raw:
            raw.seek(offset)
            raw.write(b"x")
        digests.add(State(tmp_path).digest(path))
    assert len(digests) == 5
    for file in files:
        shutil.copy(file, tmp_path / "copy")
        (tmp_path / "copy").replace(file)
    assert State(tmp_path).digest(path) in digests


def test_a_plan_reads_only_declared_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run of a model of some hundred gigabytes is fast; the inputs of a step are identified by content."""
    (file := tmp_path / "m.gguf").write_bytes(bytes(100))
    state = State(tmp_path)
    state.record([file])
    state.save()
    file.write_bytes(bytes(101))
    assert State(tmp_path, planning=True).digest(file) == State(tmp_path).digest(file)
    (stranger := tmp_path / "n.gguf").write_bytes(bytes(100))
    monkeypatch.setattr(content_module, "content_digest", None)  # nothing may call it
    assert State(tmp_path, planning=True).digest(stranger)


def test_reasons_for_running_a_step(tmp_path: Path) -> None:
    line = Line(tmp_path)
    state = State(tmp_path)
    assert [d.reason for d in decide(line.steps(), state)] == ["not done yet", "after a", "after b"]
    line.cook()
    line.options["a"] = 2
    assert [d.reason for d in decide(line.steps(), State(tmp_path))] == ["changed: option", "after a", "after b"]
    line.options["a"] = 1
    (tmp_path / "c").unlink()
    assert [d.reason for d in decide(line.steps(), State(tmp_path))] == ["up to date", "up to date", "c is missing"]


class Killed(BaseException):
    """What kill -9 is to a test."""


@pytest.mark.parametrize("when", ["begun", "written", "renamed"])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_kill_at_any_point(tmp_path: Path, name: str, when: str) -> None:
    """In a first run, and in one that replaces what an earlier one made: never is an old file taken for a new one."""
    for value in (1, 2):
        line = Line(tmp_path)
        line.options = dict.fromkeys("abc", value)

        def fail(step: str, moment: str) -> None:
            if (step, moment) == (name, when):
                raise Killed

        line.fails = fail
        with pytest.raises(Killed):
            line.cook()
        line.fails = lambda name, when: None
        rerun = line.cook()
        after = ["a", "b", "c"][["a", "b", "c"].index(name) :]
        assert rerun == (after[1:] if when == "renamed" else after)
        assert (tmp_path / "c").read_text() == f"in a{value} b{value} c{value}"


def test_foreign_files_are_never_replaced(tmp_path: Path) -> None:
    line = Line(tmp_path)
    (tmp_path / "b").write_text("mine")
    with refuses(ResourceError, "QK-E402"):
        line.cook()
    assert (tmp_path / "b").read_text() == "mine"
    (tmp_path / "b").unlink()
    assert line.cook() == ["b", "c"]
    (tmp_path / "b").write_text("changed by hand")
    assert line.standing() == ["a"]
    with refuses(ResourceError, "QK-E402"):
        line.cook()
    assert (tmp_path / "b").read_text() == "changed by hand"


def test_a_damaged_state_is_an_error(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"kind": "quantkit.cook", "version": 1}', '{"kind": "quantkit.cook", "version": 2}'):
        (tmp_path / STATE).write_text(text)
        with refuses(QuantkitError, "QK-E122 cook.json"):
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
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in a folder of one's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files_of(folder: Path) -> dict[str, bytes]:
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
def cook_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished cook, which no test changes."""
    folder = tmp_path_factory.mktemp("cooked")
    with chdir(folder):
        result = cook(small())
    assert [target.path.name for target in result.targets] == ["moe-Q4_K_M.gguf", "moe-IQ4_XS.gguf"]
    assert all(target.kld is not None and 0 < target.kld < 1 for target in result.targets)
    assert len(result.executed) == 7
    assert not list(folder.rglob("*.lock"))
    return folder


def test_the_files_equal_those_of_the_commands(
    cook_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cook_folder)
    work = Path("out/work")
    by_hand = tmp_path / "imatrix.gguf"
    options = ImatrixOptions(n_ctx=64, chunks=2)
    imatrix(MODEL, [DATA / "tiny-moe-calibration.txt"], by_hand, options=options, threads=1)
    assert by_hand.read_bytes() == (work / "imatrix.gguf").read_bytes()
    for preset in ("Q4_K_M", "IQ4_XS"):
        out = tmp_path / f"{preset}.gguf"
        quantize(MODEL, out, preset, QuantizeOptions(imatrix=work / "imatrix.gguf"), threads=1)
        assert out.read_bytes() == (cook_folder / f"out/moe-{preset}.gguf").read_bytes()
        divergence = kld(out, work / "base.logits", threads=1).sums.kld.mean.value
        assert divergence == json.loads((work / f"checks/{preset}.json").read_text())["kld"]["value"]


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
def test_steps_that_a_change_reruns(
    cook_folder: Path, monkeypatch: pytest.MonkeyPatch, tables: dict[str, Any], runs: str
) -> None:
    monkeypatch.chdir(cook_folder)
    before = {path: path.stat().st_mtime_ns for path in cook_folder.rglob("*")}
    cook_plan = plan_cook(small(**tables))
    assert [d.step.name for d in cook_plan.decisions if not d.up_to_date] == (runs.split(", ") if runs else [])
    assert {path: path.stat().st_mtime_ns for path in cook_folder.rglob("*")} == before


class Killer(NullObserver):
    """Kills a cook at one moment of one step, or where the next one starts."""

    def __init__(self, step: str, moment: str) -> None:
        self.step, self.moment, self.now, self.has_reached = step, moment, "", False

    def skip(self, number: int, count: int, decision: Decision) -> None:
        self.has_reached |= decision.step.name == self.step

    def start(self, number: int, count: int, decision: Decision) -> None:
        self.now = decision.step.name
        self._meet("started")

    def progress(self, current: float, total: float, text: str) -> None:
        self._meet("progress")

    def finish(self, number: int, count: int, step: Step, record: StepRecord) -> None:
        self._meet("finished")

    def _meet(self, moment: str) -> None:
        if (self.now, moment) == (self.step, self.moment) or (self.has_reached and self.now != self.step):
            raise KeyboardInterrupt
        self.has_reached |= self.now == self.step


def test_a_killed_cook_is_resumed_with_equal_bytes(cook_folder: Path, work_folder: Path) -> None:
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
    assert files_of(work_folder) == files_of(cook_folder)
    assert not [path for path in work_folder.rglob("*") if path.suffix in (".part", ".journal", ".state")]


def test_a_change_after_a_kill_starts_over(cook_folder: Path, work_folder: Path) -> None:
    """What was half done with other options is thrown away."""
    config = small(imatrix={"chunks": 3}, quantize={"tensor_type": ["ffn_down=Q8_0"]})
    for step in ("imatrix", "base", "quantize Q4_K_M", "check Q4_K_M"):
        with pytest.raises(KeyboardInterrupt):
            cook(config, observer=Killer(step, "progress"))
    cook(small())
    assert files_of(work_folder) == files_of(cook_folder)


def test_existing_files_are_not_replaced(work_folder: Path) -> None:
    (work_folder / "out").mkdir()
    path = work_folder / "out/moe-IQ4_XS.gguf"
    path.write_bytes(b"mine")
    with refuses(ResourceError, "QK-E402 moe-IQ4_XS.gguf"):
        cook(small(check={"run": False}))
    assert path.read_bytes() == b"mine"
    assert (work_folder / "out/moe-Q4_K_M.gguf").exists()


@pytest.mark.parametrize(
    ("target", "extra", "preset"),
    [
        ("100G", {}, "Q8_0"),
        ("9bpw", {}, "Q8_0"),
        ("8bpw", {}, None),
        ("5M", {}, None),
        ("12bpw", {"search": {"at_most": ["_exps=Q4_K"]}}, None),
        ("8bpw", {"sensitivity": {"types": ["Q3_K", "Q4_K"]}}, "Q4_K"),
        ("kld=0.5", {}, None),
    ],
)
def test_a_target_that_the_largest_type_meets_is_not_searched(
    target: str, extra: dict[str, Any], preset: str | None, tmp_path: Path, data: Path
) -> None:
    text = {"text": [str(data / "tiny-moe-calibration.txt")]}
    settings = {"targets": [target], "output": str(tmp_path / "out"), "calibration": text, **extra}
    plan = plan_cook(config_from({"model": str(data / "tiny-moe-bf16.gguf"), **settings}, "test", tmp_path))
    (goal,) = plan.config.targets
    assert goal.target.preset == preset
    assert goal.label == parse_target(target).file_suffix
    steps = {step.name.partition(" ")[0] for step in plan.steps}
    assert ({"sensitivity", "search"} & steps == set()) == (preset is not None)
    assert any(note.startswith(f"warning: {goal.label}:") for note in plan.notes) == (preset is not None)


def test_a_goal_is_searched_for_and_met(work_folder: Path) -> None:
    """A size is met to the byte, by a recipe for quantize; another goal searches again without measuring."""
    most = 5_200_000
    config = small(["5.2M"], search={"candidates": 2, "same": ["up,gate"]}, merge_up_gate=True)
    result = cook(config)
    assert result.executed == (
        *("texts", "imatrix", "base", "sensitivity", "candidates", "search 5.2M", "quantize 5.2M", "check 5.2M"),
    )
    assert 0.9 * most < result.targets[0].nbytes <= most
    output = json.loads((work_folder / "out/work/recipes/5.2M.json").read_text())
    assert output["nbytes"] == result.targets[0].nbytes
    assert output["candidates"] == 2
    second = cook(small(["4.5bpw"], search={"candidates": 2, "same": ["up,gate"]}, merge_up_gate=True))
    assert second.executed == ("search 4.5bpw", "quantize 4.5bpw", "check 4.5bpw")
    settings = {"ctx": 256, "margin": 0}
    third = cook(small(["fit=14M,60M"], search={"candidates": 1, "same": ["up,gate"]}, fit=settings))
    assert third.executed == ("search fit14M-60M", "quantize fit14M-60M", "check fit14M-60M")
    devices = fit(third.targets[0].path, FitOptions(vram=(14_000_000,), ram=60_000_000, **settings)).devices
    assert [device.nbytes <= (device.limit or 0) for device in devices] == [True] * 2
    with refuses(RecipeError, "QK-E202 cook.toml fit14M-60M"):
        small(["fit=14M,60M"], fit={"aim": "speed"})


def test_a_search_needs_its_extra(work_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with refuses(ResourceError, "QK-E410 gguf-quantkit[search]"):
        cook(small(["4bpw"]))
    assert not list(work_folder.iterdir())
    assert cook(small(["Q8_0"], imatrix={"run": False}, check={"run": False})).executed == ("quantize Q8_0",)


def test_split_files(work_folder: Path) -> None:
    """Shards are known when they are planned; fewer of them do not leave the check of more behind."""
    first = cook(small(["Q8_0"], quantize={"split_max_size": "4M"}))
    assert [path.name for path in sorted((work_folder / "out").glob("*.gguf"))] == [
        f"moe-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)
    ]
    assert first.targets[0].nbytes > 9 << 20
    assert cook(small(["Q8_0"], quantize={"split_max_size": "4M"})).executed == ()
    rerun = cook(small(["Q8_0"], quantize={"split_max_size": "6M"}))
    assert rerun.executed == ("quantize Q8_0", "check Q8_0")
    assert rerun.targets[0].path.name == "moe-Q8_0-00001-of-00002.gguf"
    assert rerun.targets[0].kld == first.targets[0].kld


def test_one_cook_at_a_time(work_folder: Path) -> None:
    class Second(NullObserver):
        def start(self, number: int, count: int, decision: Decision) -> None:
            with refuses(ResourceError, "QK-E404"):
                cook(small())
            raise Killed

    with pytest.raises(Killed):
        cook(small(), observer=Second())


def test_model_card_options_reach_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Config] = []

    def stop(config: Config) -> None:
        configs.append(config)
        raise RecipeError("planned", "QK-E202")

    monkeypatch.setattr(import_module("quantkit.cook"), "plan_cook", stop)
    command = ["cook", str(MODEL), "Q8_0", "--base-model", "org/base", "--license", "mit", "--dry-run"]
    check_refused(CliRunner().invoke(cli, command).output, "QK-E202")
    assert [(c.report.base_model, c.report.license) for c in configs] == [("org/base", "mit")]


def test_a_gate_fails_after_all_steps(cook_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cook_folder)
    with refuses(QualityGate, "QK-E500 0.0001"):
        cook(small([], target=[{"target": "Q4_K_M", "max_kld": 1e-4}]))


@pytest.mark.parametrize(
    ("tables", "error", "refusal"),
    [
        ({"model": "missing.gguf"}, ResourceError, "QK-E401 missing.gguf"),
        ({"model": str(DATA / "tiny-moe-imatrix.gguf")}, QuantkitError, "QK-E123 general.architecture"),
        ({"calibration": {"text": "missing.txt"}}, ResourceError, "QK-E401 missing.txt"),
        ({"report": {"texts": "missing"}}, ResourceError, "QK-E401 missing"),
        ({"report": {"score": "missing.txt"}}, ResourceError, "QK-E401 missing.txt"),
        ({"report": {"score": str(MODEL)}}, FormatError, "QK-E101 tiny-moe-bf16.gguf"),
        ({"calibration": {"text": []}}, RecipeError, "QK-E202 cook.toml"),
        ({"quantize": {"tensor_type": ["attn_v=Q99"]}}, QuantkitError, "QK-E301 Q99"),
        ({"quantize": {"recipe": "QK-E401 missing.recipe"}}, QuantkitError, "QK-E401 missing.recipe"),
        ({"imatrix": {"run": False}, "targets": ["IQ2_XXS"]}, QuantkitError, "QK-E212 IQ2_XXS"),
        ({"output": str(MODEL)}, RecipeError, "QK-E403 cook.toml"),
        ({"output": str(MODEL / "x")}, ResourceError, "QK-E405 tiny-moe-bf16.gguf"),
    ],
)
def test_impossible_cooks_do_not_start(
    work_folder: Path, tables: dict[str, Any], error: type[Exception], refusal: str
) -> None:
    with refuses(error, refusal):
        cook(small(**tables))
    assert not list(work_folder.iterdir())


def test_a_missing_text_names_its_step(work_folder: Path) -> None:
    config = config_from({"model": str(MODEL), "targets": "Q4_K_M"}, "cook.toml", Path())
    with refuses(RecipeError, "QK-E202 MB"):
        plan_cook(config)
    without = {"imatrix": {"run": False}, "check": {"run": False}, "report": {"run": False}}
    cook_plan = plan_cook(config_from({"model": str(MODEL), "targets": "Q4_K_M", **without}, "cook.toml", Path()))
    assert [step.name for step in cook_plan.steps] == ["quantize Q4_K_M"]


def test_the_report_is_last_and_stays_up_to_date(work_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"run": True, "base_model": "org/base", "license": "mit"}
    config = small(["Q8_0", "Q4_0"], imatrix={"run": False}, report=settings)
    monkeypatch.setattr(import_module("quantkit.report.measure"), "kld", None)  # checks have measured it
    result = cook(config)
    assert result.executed[-1] == "report"
    assert [path.name for path in result.reports] == ["report.html", "README.md"]
    numbers = read_data(work_folder / "out/work/report.json")
    checked = [json.loads((work_folder / f"out/work/checks/{name}.json").read_bytes()) for name in ("Q8_0", "Q4_0")]
    assert [f.quality.kld.value for f in numbers.files if f.quality and f.quality.kld] == pytest.approx(
        [check["kld"]["value"] for check in checked]
    )
    assert all(f.quality.quantiles for f in numbers.files if f.quality)
    assert {"base_model: org/base", "license: mit"} <= set((work_folder / "out/README.md").read_text().splitlines())
    assert cook(config).executed == ()
    (work_folder / "mmlu.bin").write_bytes(task_files.multiple_choice(2))
    texts = work_folder / "texts"
    texts.mkdir()
    (texts / "code.txt").write_text("def f(x):\n    return x\n" * 300)
    changes = {"license": "apache-2.0", "score": (work_folder / "mmlu.bin",), "score_tasks": 1, "texts": (texts,)}
    config = replace(config, report=replace(config.report, **changes))
    assert cook(config).executed == ("report",)
    scores = [s for f in read_data(work_folder / "out/work/report.json").files for s in f.scores]
    assert [(s.tasks, s.accuracy.n, s.difference is None) for s in scores] == [("mmlu.bin", 1, False)] * 2
    by_text = [[q.text for q in f.by_text] for f in read_data(work_folder / "out/work/report.json").files]
    assert by_text == [["code.txt"]] * 2
    assert cook(config).executed == ()
    (texts / "prose.txt").write_text("A river runs to the sea.\n" * 300)
    assert cook(config).executed == ("report",)
    assert cook(replace(config, targets=config.targets[:1])).executed == ("report",)
    (work_folder / "out/README.md").write_text("by hand")
    with refuses(ResourceError, "QK-E402 README.md"):
        cook(config)


def test_a_calibrated_target_uses_the_imatrix_chunks(work_folder: Path) -> None:
    cook_plan = plan_cook(small(["Q2_K+calibrate"]))
    step = next(step for step in cook_plan.steps if step.name == "quantize Q2_K-calibrate")
    assert (step.options["calibrate_ctx"], step.options["calibrate_chunks"]) == (64, 2)


def test_a_corpus_of_folders(work_folder: Path) -> None:
    (work_folder / "src").mkdir()
    text = (DATA / "tiny-moe-calibration.txt").read_text()
    for i in range(4):
        (work_folder / f"src/{i}.txt").write_text(text[i * 20000 : (i + 1) * 20000])
    corpus = {"calibration": {"text": "src", "evaluation": None, "size": "60K", "heldout": "20%"}}
    corpus["calibration"].pop("evaluation")
    config = replace(
        small(), calibration=config_from({"model": "m", "targets": "Q8_0", **corpus}, "x", Path()).calibration
    )
    cook(config)
    texts = work_folder / "out/work/texts"
    assert sorted(path.name for path in texts.iterdir()) == [
        *("calibration.txt", "check.txt", "evaluation.txt", "manifest.json", "sensitivity.txt")
    ]
    assert (texts / "sensitivity.txt").read_bytes() + (texts / "check.txt").read_bytes() == (
        texts / "evaluation.txt"
    ).read_bytes()
    with refuses(RecipeError, "QK-E403"):
        plan_cook(replace(config, output=Path("src/out")))


@pytest.mark.parametrize("message", ["pipe", "zero"])
@pytest.mark.parametrize("place", ["calibration.text", "calibration.chat", "calibration.evaluation", "imatrix.file"])
def test_inputs_must_be_files(work_folder: Path, place: str, message: str) -> None:
    os.mkfifo("pipe")
    Path("zero").symlink_to("/dev/zero")
    top: dict[str, Any] = {"model": str(MODEL), "targets": "Q8_0", "calibration": {"text": str(MODEL)}}
    table, key = place.split(".")
    top[table] = {**top.get(table, {}), key: str(work_folder / message)}
    with refuses(ResourceError, "QK-E120", message):
        plan_cook(config_from(top, "cook.toml", Path()))


def test_a_checkpoint_is_converted_once(work_folder: Path) -> None:
    checkpoint = write_checkpoint("qwen3-moe", work_folder)
    text = work_folder / "text.txt"
    text.write_text("one two three four five\n\n" * 400)
    shared = {"calibration": {"text": str(text), "evaluation": str(text)}, **SMALL}
    top = {"model": str(checkpoint), "targets": "Q8_0", "output": "out", "threads": 1, **shared}
    top |= {"imatrix": {"run": False}, "check": {"run": False}}
    with refuses(QuantkitError, "QK-E115 [convert]"):
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


def test_the_command_line(cook_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An up-to-date cook, by options and by a file, has the same steps; --dry-run writes nothing."""
    monkeypatch.chdir(cook_folder)
    texts = ["-f", str(DATA / "tiny-moe-calibration.txt"), "--evaluation", str(DATA / "tiny-moe-evaluation.txt")]
    text = run(str(MODEL), "Q4_K_M", "3.5bpw", *texts, "--no-report", "-o", "out", "--dry-run")
    assert "dry run: nothing was written" in text
    assert "changed: chunks, ctx" in text
    output = json.loads(run(str(MODEL), "Q8_0", *texts, "--no-report", "-o", "new", "--dry-run", "--json"))
    assert [step["name"] for step in output["steps"]] == ["texts", "imatrix", "base", "quantize Q8_0", "check Q8_0"]
    assert not Path("new").exists()
    assert "--threads" in run("cook.toml", "-t", "3", code=2)
    check_refused(run(str(MODEL), "Q4_KM", code=2), "QK-E301 Q4_K_M")
    check_refused(run(str(MODEL), code=2), "QK-E214")


def test_init_writes_a_file_that_runs(work_folder: Path) -> None:
    assert "wrote cook.toml" in run("init", "-m", str(MODEL))
    check_refused(run("init", code=1), "QK-E402 cook.toml --overwrite")
    assert "wrote other.toml" in run("init", "other.toml")
    assert "must end in .toml" in run("init", str(MODEL), code=2)
    assert "--threads is not an option of init" in run("init", "x.toml", "-t", "2", code=2)
    assert "--output is not an option of init" in run("init", "x.toml", "-o", "x", code=2)
    assert '"path/to/texts"' in (work_folder / "cook.toml").read_text()
    texts, evaluation = (str(DATA / f"tiny-moe-{kind}.txt") for kind in ("calibration", "evaluation"))
    run("init", "-m", str(MODEL), "-f", texts, "-f", evaluation, "--overwrite")
    assert f'text = ["{texts}", "{evaluation}"]' in (work_folder / "cook.toml").read_text()
    run("init", "-m", str(MODEL), "-f", texts, "--evaluation", evaluation, "--overwrite")
    settings = tomllib.loads((work_folder / "cook.toml").read_text())["calibration"]
    assert settings == {"text": [texts], "evaluation": evaluation}
    text = run("cook.toml", "Q8_0", "--dry-run")
    assert "quantize Q8_0" in text
    (texts := work_folder / ("f" * 200)).write_text("text")
    run("init", "-m", str(MODEL), "-f", str(texts), "--evaluation", evaluation, "--overwrite")
    assert tomllib.loads((work_folder / "cook.toml").read_text())["calibration"]["text"] == [texts.name]


def test_the_command_handles_interruption(work_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["imatrix = {ctx = 64, chunks = 2}", "check = {ctx = 64, chunks = 2}", "report = {run = false}"]
    texts = f'calibration = {{text = "{DATA}/tiny-moe-calibration.txt", evaluation = "{DATA}/tiny-moe-evaluation.txt"}}'
    (work_folder / "c.toml").write_text(
        "\n".join([f'model = "{MODEL}"', 'targets = "Q8_0"', "threads = 1", texts, *lines])
    )
    with monkeypatch.context() as patched:
        patched.setattr(target_steps, "run_quantize", interrupt)
        text = run("c.toml", code=130)
    assert "interrupted in quantize Q8_0; the same command continues from there" in text
    text = run("c.toml")
    assert PLUS_MINUS in text
    assert "[2/5] imatrix: up to date" in text
    assert "[4/5] quantize Q8_0: tiny-moe-Q8_0.gguf (was interrupted)" in text
    assert "2 steps ran" in text
    output = json.loads(run("c.toml", "--json"))
    assert output["ran"] == []
    assert 0 < output["files"][0]["kld"] < 0.01


def interrupt(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt
