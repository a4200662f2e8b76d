"""The mmproj files of a cook: made once, resumed, listed by the report and the card; and what no command can run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from refusals import check_refused, refuses

from checkpoints import write_checkpoint
from gguf_digests import digests
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert, convert_mmproj
from quantkit.cook import Config, Step, StepRecord, config_from, cook, plan_cook
from quantkit.cook.engine import NullObserver
from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.report import ReportOptions, read_data, report

pytestmark = pytest.mark.usefixtures("services_in_process")

EXPECTED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/mmproj-sha256.json").read_text())
NAME = "mm-qwen2-vl"
OFF = {"run": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(NAME, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def files(checkpoint: Path) -> dict[str, Path]:
    """The text model and the mmproj file of the checkpoint."""
    model, mmproj = (checkpoint.parent / name for name in ("model.gguf", "mmproj.gguf"))
    convert(checkpoint, model, None, ConvertOptions(pre="qwen2"))
    convert_mmproj(checkpoint, mmproj, "f16")
    return {"model.gguf": model, "mmproj.gguf": mmproj}


def config(model: Path, folder: Path, **top: Any) -> Config:
    """Return the settings of a cook that only quantizes."""
    tables = {"imatrix": OFF, "check": OFF, "report": OFF, "convert": {"pre": "qwen2"}}
    settings = {"model": str(model), "targets": "Q8_0", "output": "out", "name": "vl", "threads": 1}
    return config_from({**settings, **tables, **top}, "cook.toml", folder)


class Killer(NullObserver):
    """Kills a cook after the conversion of its encoders has begun, or when it has ended."""

    def __init__(self, *, at_end: bool) -> None:
        self.at_end = at_end
        self.now = ""

    def start(self, number: int, count: int, decision: Any) -> None:
        self.now = decision.step.name

    def progress(self, current: float, total: float, text: str) -> None:
        if not self.at_end and self.now == "mmproj F16":
            raise KeyboardInterrupt

    def finish(self, number: int, count: int, step: Step, record: StepRecord) -> None:
        if self.at_end and step.name == "mmproj F16":
            raise KeyboardInterrupt


def test_the_encoders_are_converted_once(checkpoint: Path, tmp_path: Path) -> None:
    settings = config(checkpoint, tmp_path)
    plan = plan_cook(settings)
    assert [step.name for step in plan.steps] == ["convert", "mmproj F16", "quantize Q8_0"]
    (file,) = plan.paths.mmproj
    assert (file.path.name, file.encoders, file.projectors) == ("mmproj-vl-F16.gguf", ("vision",), ("qwen2vl_merger",))
    assert plan.notes == tuple(note for note in plan.notes if note.startswith("Q8_0:"))
    assert not (tmp_path / "out").exists()
    for at_end in (False, True):
        with pytest.raises(KeyboardInterrupt):
            cook(settings, observer=Killer(at_end=at_end))
    result = cook(settings)
    assert result.executed == ("quantize Q8_0",)
    assert digests(result.mmproj[0].path)["sha256"] == EXPECTED[NAME]["f16"]["sha256"]
    assert result.mmproj[0].path.stat().st_size == file.nbytes == result.mmproj[0].nbytes
    assert cook(settings).executed == ()
    two_types = config(checkpoint, tmp_path, mmproj=["f16", "q8_0"])
    assert cook(two_types).executed == ("mmproj Q8_0",)
    assert digests(tmp_path / "out/mmproj-vl-Q8_0.gguf")["sha256"] == EXPECTED[NAME]["q8_0"]["sha256"]
    file.path.unlink()
    assert cook(two_types).executed == ("mmproj F16",)


@pytest.mark.parametrize(
    ("value", "steps"), [(False, []), ("BF16", ["BF16"]), ("Q6_K", ["Q6_K"]), (["auto", "q8_0"], ["AUTO", "Q8_0"])]
)
def test_types_of_mmproj_files(value: Any, steps: list[str], checkpoint: Path, tmp_path: Path) -> None:
    plan = plan_cook(config(checkpoint, tmp_path, mmproj=value))
    assert [s.name for s in plan.steps if "mmproj" in s.name] == [f"mmproj {name}" for name in steps]
    names = [file.path.name for file in plan.paths.mmproj]
    assert names == [f"mmproj-vl-{name.replace('AUTO', 'BF16')}.gguf" for name in steps]


def test_a_gguf_file_has_no_encoders(files: dict[str, Path], tmp_path: Path) -> None:
    model, mmproj = files.values()
    assert plan_cook(config(model, tmp_path)).paths.mmproj == ()
    with refuses(RecipeError, "QK-E202 model.gguf"):
        plan_cook(config(model, tmp_path, mmproj="f16"))
    with refuses(FormatError, "QK-E207 model.gguf"):
        plan_cook(config(model, tmp_path, mmproj=str(model)))
    with refuses(QuantkitError, "QK-E401 missing.gguf"):
        plan_cook(config(model, tmp_path, mmproj="missing.gguf"))
    plan = plan_cook(config(model, tmp_path, mmproj=str(mmproj), report={"run": True}))
    assert [step.name for step in plan.steps] == ["quantize Q8_0", "report"]
    assert mmproj in plan.steps[-1].inputs.values()


@pytest.mark.parametrize("value", [True, 3, [], [False], "F17", ["f16", "F16"], {"type": "f16"}])
def test_wrong_settings_are_refused(value: Any, tmp_path: Path) -> None:
    with refuses(RecipeError, "QK-E208 mmproj"):
        config(tmp_path, tmp_path, mmproj=value)


def test_encoders_that_cannot_be_converted_name_the_remedy(tmp_path: Path) -> None:
    model = write_checkpoint(NAME, tmp_path)
    (model / "preprocessor_config.json").unlink()
    with refuses(FormatError, "QK-E112 image_mean --no-mmproj"):
        plan_cook(config(model, tmp_path))
    assert plan_cook(config(model, tmp_path, mmproj=False)).paths.mmproj == ()


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(cli, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def test_the_command_and_its_report(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("cook", checkpoint, "Q8_0", "--pre", "qwen2", "--no-imatrix", "--no-check", "-o", "out")
    text = run(*command, "--dry-run")
    name = f"mmproj-{NAME}-F16.gguf"
    assert name in text
    assert "qwen2vl_merger" in text
    assert name not in run(*command, "--no-mmproj", "--dry-run")
    run(*command, "--no-mmproj", "--mmproj", "f16", code=2)
    result = json.loads(run(*command, "--json"))
    assert [(Path(file["path"]).name, file["type"]) for file in result["mmproj"]] == [(name, "F16")]
    (numbers,) = read_data(Path("out/work/report.json")).mmproj
    assert (numbers.name, numbers.encoders, numbers.nbytes) == (name, ("vision",), (Path("out") / name).stat().st_size)
    card, page = (Path("out", file).read_text() for file in ("README.md", "report.html"))
    assert f"-m {NAME}-Q8_0.gguf --mmproj {name}" in card
    assert "pipeline_tag: image-text-to-text" in card
    row = next(line for line in card.splitlines() if line.startswith("| mmproj-"))
    assert row.count("|") == next(line for line in card.splitlines() if line.startswith("| file")).count("|")
    assert "not measured" in row
    assert 'id="table-mmproj"' in page


def test_a_report_lists_encoders(files: dict[str, Path], tmp_path: Path) -> None:
    """Among its files or by --mmproj: the same numbers, and none is measured."""
    model, mmproj = files.values()
    result = report([model, mmproj], tmp_path / "a.html")
    by_option = report([model], tmp_path / "b.html", options=ReportOptions(mmproj=(mmproj,)))
    assert result.mmproj == by_option.mmproj
    assert [file.name for file in by_option.files] == ["model.gguf"]
    assert dict(by_option.mmproj[0].facts)["text embedding length"] == "64"
    with refuses(RecipeError, "QK-E207 model.gguf"):
        report([model], tmp_path / "c.html", options=ReportOptions(mmproj=(model,)))
    with refuses(QuantkitError, "QK-E207 64"):
        moe = Path(__file__).parents[1] / "data/tiny-moe-bf16.gguf"
        report([moe], tmp_path / "c.html", options=ReportOptions(mmproj=(mmproj,)))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".html", ".html", ".json", ".json"]


@pytest.mark.parametrize(
    "command",
    [
        "perplexity -m mmproj.gguf -f text.txt",
        "perplexity -m mmproj.gguf -p text",
        "kld -m mmproj.gguf --base base.logits",
        "logits -m mmproj.gguf -p text -o out",
        "imatrix -m mmproj.gguf -f text.txt -o out",
        "imatrix -m mmproj.gguf -f text.txt -o out --covariance out2",
        "bench -m mmproj.gguf",
        "sweep-bench -m mmproj.gguf",
        "sensitivity -m mmproj.gguf -f text.txt -o out",
        "search -s s.json -m mmproj.gguf --target-bpw 6 -o out",
        "report out mmproj.gguf",
        "report out model.gguf --base mmproj.gguf -f text.txt",
        "cook mmproj.gguf Q8_0 -f text.txt -o out",
        "quantize --calibrate text.txt mmproj.gguf out Q8_0",
    ],
)
def test_no_command_runs_encoders(
    command: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, path in files.items():
        Path(name).symlink_to(path)
    Path("text.txt").write_text("one two three\n" * 400)
    options = ("-m", "model.gguf", "-f", "text.txt", "-c", "64", "--chunks", "1")
    if "search" in command:
        run("sensitivity", *options, "--types", "Q8_0", "--proxies-only", "-o", "s.json")
    if "base.logits" in command:
        run("perplexity", *options, "--save-all-logits", "base.logits")
    before = set(tmp_path.iterdir())
    check_refused(run(*command.split(), code=1), "QK-E306 mmproj.gguf")
    assert set(tmp_path.iterdir()) == before
