"""Progress of all long commands: a bar where the terminal has a size, lines where it has none, nothing in a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quantkit.cli import _progress, cli

#: A line of progress: a share of the work, or a tensor or step of all.
LINE = re.compile(r"^ *\d+ %|^\[ *\d+(/\d+| %)\]|^q\.gguf: ", re.MULTILINE)

COMMANDS = {
    "quantize": "quantize m.gguf out.gguf Q4_0",
    "merge-up-gate": "merge-up-gate m.gguf out.gguf",
    "export": "export m.gguf checkpoint",
    "convert": "convert exported --pre gpt-2 --outfile out.gguf",
    "compare": "compare m.gguf q.gguf",
    "perplexity": "perplexity -m m.gguf -f text.txt -c 64 --chunks 2",
    "kld": "kld -m q.gguf --base base",
    "logits": "logits -m m.gguf -p one -o out.npy",
    "imatrix": "imatrix -m m.gguf -f text.txt -c 64 --chunks 2 --no-ppl -o out.gguf",
    "covariance": "imatrix -m m.gguf -f text.txt -c 64 --chunks 2 -o out.gguf --covariance cov.gguf",
    "sensitivity": "sensitivity -m m.gguf -f text.txt -c 64 --chunks 2 --types Q4_0,Q8_0 -o out.json",
    "search": "search -s s.json --target-bpw 12",
    "front": "search -s s.json --front front.csv --points 3",
    "calibration": "calibration -o corpus --size 20K --heldout 0 text.txt",
    "bench": "bench -m m.gguf -p 4 -n 1 -r 1",
    "sweep-bench": "sweep-bench -m m.gguf -c 40 -ub 16 -n 1",
    "cache": "cache verify cache",
    "report": "report out.html q.gguf --base m.gguf",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, data: Path, tiny_moe: Path) -> Path:
    """Inputs of all commands."""
    path = tmp_path_factory.mktemp("progress")
    (path / "m.gguf").symlink_to(tiny_moe)
    (path / "text.txt").symlink_to(data / "tiny-moe-calibration.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for line in (
            "quantize m.gguf q.gguf Q8_0 --cache cache",
            "perplexity -m m.gguf -f text.txt -c 64 --chunks 2 --save-all-logits base",
            COMMANDS["sensitivity"].replace("out.json", "s.json"),
            "export m.gguf exported",
        ):
            assert invoke(line).exit_code == 0, line
    return path


def invoke(line: str) -> Result:
    return CliRunner().invoke(cli, line.split(), prog_name="quantkit")


def run(line: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    """Run a command in a folder with links to the inputs."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    result = invoke(line)
    assert result.exit_code == (1 if line.startswith("compare") else 0), result.output
    return result


@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_without_a_size_gets_lines(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "_is_terminal", lambda: True)
    monkeypatch.setattr(_progress, "_terminal_size", lambda: (0, 0))
    result = run(COMMANDS[command], folder, tmp_path, monkeypatch)
    assert LINE.search(result.stderr), result.stderr
    assert "\r" not in result.stderr


@pytest.mark.parametrize("command", ["compare", "front", "bench", "calibration", "quantize"])
def test_a_terminal_with_a_size_gets_a_bar(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "_is_terminal", lambda: True)
    monkeypatch.setattr(_progress, "_terminal_size", lambda: (80, 24))
    result = run(COMMANDS[command], folder, tmp_path, monkeypatch)
    assert "\r" in result.stderr
    assert not LINE.search(result.stderr)


@pytest.mark.parametrize("command", ["compare", "search", "bench", "calibration"])
def test_a_file_gets_no_progress(command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(COMMANDS[command], folder, tmp_path, monkeypatch)
    assert not LINE.search(result.stderr)
    assert "\r" not in result.stderr
