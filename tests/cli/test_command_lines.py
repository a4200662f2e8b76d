"""Command lines of guides run as they are, or are answered with what to type instead."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from click.testing import CliRunner
from tiny_checkpoints import write_checkpoint

from adapters import write_adapter, write_base
from object_store import hub
from quantkit.cli import COMMANDS, cli
from quantkit.cli._compat_options import _IGNORED, _REFUSED, _parse
from quantkit.cli._guesses import ALIASES, ANSWERS, answer
from quantkit.cli._options import is_compatible_only
from quantkit.quantize import quantize
from task_files import hellaswag

DATA = Path(__file__).parents[1] / "data"


class Line(NamedTuple):
    """A command line, its exit status, and what its error says."""

    status: int
    command: str
    text: str


def _line(text: str) -> Line:
    status, command, *answers = (part.strip() for part in text.split(" | "))
    return Line(int(status), command, answers[0] if answers else "")


LINES = [
    _line(text) for text in (DATA / "command-lines.txt").read_text().splitlines() if text and not text.startswith("#")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the lines name."""
    place = tmp_path_factory.mktemp("lines")
    for name in ("ggml-model-f16.gguf", "input-model-f32.gguf"):
        shutil.copy(DATA / "tiny-moe-bf16.gguf", place / name)
    for name, source in (("imatrix.gguf", "imatrix.gguf"), ("imatrix.dat", "imatrix.dat")):
        shutil.copy(DATA / f"tiny-moe-{source}", place / name)
    # A line without --chunks reads all of it.
    (place / "wiki.test.raw").write_bytes((DATA / "tiny-moe-evaluation-whole.txt").read_bytes()[:30000])
    shutil.copy(DATA / "tiny-moe-calibration.txt", place / "calibration-data.txt")
    (place / "tt.txt").write_text("attn_v=q8_0\n")
    (place / "meta.json").write_text('{"general.name": "Tiny"}')
    (place / "hellaswag.txt").write_bytes(hellaswag(3))
    write_checkpoint(place / "Model")
    write_adapter("llama", place / "ad")
    write_base("llama", place / "tiny")
    quantize(place / "ggml-model-f16.gguf", place / "ggml-model-Q4_K_M.gguf", "Q4_K_M")
    shutil.copy(place / "ggml-model-Q4_K_M.gguf", place / "a1.gguf")
    return place


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.command)
def test_a_command_line_runs_or_gets_advice(line: Line, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    program, *arguments = shlex.split(line.command.replace("$(nproc)", "2"))
    assert program == "quantkit"
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == line.status, result.stderr
    assert line.text in result.stderr
    assert "--overwrite" not in result.stderr or "exists" in result.stderr
    ignored = [text for text in result.stderr.splitlines() if re.match(r"note: -.* (has|have) no effect: ", text)]
    assert len(ignored) <= 1


def _commands() -> dict[str, click.Command]:
    context = click.Context(cli)
    return {name: command for name in COMMANDS if (command := cli.get_command(context, name)) is not None}


@pytest.mark.parametrize("name", ["perplexity", "kld", "logits", "imatrix", "bench", "sweep-bench", "report"])
def test_commands_that_run_a_model_share_options(name: str) -> None:
    options = {n for p in _commands()[name].params for n in (*p.opts, *p.secondary_opts)}
    missing = {n for table in (_IGNORED, _REFUSED) for names, _, _ in _parse(table) for n in names} - options
    assert not missing


def test_a_name_belongs_to_one_option() -> None:
    for name, command in _commands().items():
        names = [n for p in command.params if isinstance(p, click.Option) for n in (*p.opts, *p.secondary_opts)]
        assert len(names) == len(set(names)), (name, {n for n in names if names.count(n) > 1})


@pytest.mark.parametrize("name", ["--verbosity", "--overwrit", "--over-write", "--overwrite-all", "--delete-splits"])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_suggestion_is_destructive(command: str, name: str) -> None:
    result = CliRunner().invoke(cli, [command, name])
    assert not any("mean" in line and "--overwrite" in line for line in result.stderr.splitlines())


def test_advised_names_are_not_commands() -> None:
    assert not (ALIASES.keys() | ANSWERS.keys()) & COMMANDS.keys()
    assert ALIASES.keys().isdisjoint(ANSWERS)
    assert set(ALIASES.values()) <= COMMANDS.keys()
    for name in ANSWERS:
        assert len(answer(name, [], list(COMMANDS))) > len(f"No such command '{name}'; type: ")


def test_ignored_options_are_only_in_the_long_help() -> None:
    short, long = (CliRunner().invoke(cli, ["kld", option]).stdout for option in ("--help", "--help-all"))
    names = [p.opts[0] for p in _commands()["kld"].params if hasattr(p, "note")]
    assert len(names) > 60
    assert all(name in long for name in names)
    assert "--numa" not in short
    assert all(not p.help for p in _commands()["kld"].params if is_compatible_only(p) and isinstance(p, click.Option))


def test_a_model_from_a_hub(folder: Path, tmp_path: Path) -> None:
    """-hf downloads once, the file of the type, in a process of its own: the Hub's address is read once."""
    repository = tmp_path / "Tiny-GGUF"
    repository.mkdir()
    shutil.copy(folder / "ggml-model-Q4_K_M.gguf", repository / "Tiny-Q4_K_M.gguf")
    shutil.copy(folder / "ggml-model-f16.gguf", repository / "Tiny-BF16.gguf")
    (repository / "mmproj-Q4_K_M.gguf").touch()
    program = """if True:
        import sys
        from pathlib import Path
        from click.testing import CliRunner
        from quantkit.cli import cli
        from quantkit.formats import hub
        hub.default_spool = lambda: Path(sys.argv[2]) / "spool"  # not $QUANTKIT_CACHE, which has the kernels
        for name in ("org/Tiny-GGUF", "org/Tiny-GGUF:BF16", "org/Tiny-GGUF", "org/Tiny-GGUF:Q9"):
            arguments = ["logits", "-hf", name, "--tokens", "1,2", "-o", sys.argv[1], "--overwrite", "--json"]
            result = CliRunner().invoke(cli, arguments)
            print(result.exit_code, "downloading" in result.stderr, result.output)
    """
    with hub(repository) as address:
        command = [sys.executable, "-c", program, str(tmp_path / "logits.npy"), str(tmp_path / "cache")]
        environment = {
            **os.environ,
            "HF_ENDPOINT": address,
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    heads = [line for line in process.stdout.splitlines() if line[:2] in ("0 ", "1 ")]
    assert [head.split()[:2] for head in heads] == [["0", "True"], ["0", "True"], ["0", "False"], ["1", "False"]], (
        process.stdout + process.stderr
    )
    cached = tmp_path / "cache/models/org/Tiny-GGUF"
    assert {path.name for path in cached.iterdir()} == {"Tiny-Q4_K_M.gguf", "Tiny-BF16.gguf"}
    assert "QK-E210" in process.stdout


def test_json_to_a_file_keeps_the_text(folder: Path, tmp_path: Path) -> None:
    def run(*arguments: Any) -> Any:
        return CliRunner().invoke(cli, [*map(str, arguments)])

    model, file = folder / "ggml-model-f16.gguf", tmp_path / "a.json"
    plain, dash, both = (run("inspect", model, *json) for json in (("--json",), ("--json", "-"), ("--json", file)))
    assert plain.stdout == dash.stdout == file.read_text()
    assert both.stdout == run("inspect", model).stdout
    assert run("inspect", "--json", model).stdout == plain.stdout  # the model is not the argument of --json
    repeated = run("inspect", model, "--json", file)
    assert repeated.exit_code == 1
    assert "QK-E402" in repeated.stderr
    assert run("inspect", model, "--json", file, "--overwrite").exit_code == 0


def test_a_file_instead_of_a_checkpoint_suggests_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name, text in (("ggml-model-f16.gguf", "quantkit quantize"), ("Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B")):
        result = CliRunner().invoke(cli, ["convert", name, "x.gguf"])
        assert result.exit_code == 1
        assert text in result.stderr
        assert "QK-E401" in result.stderr
