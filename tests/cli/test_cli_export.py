"""The command line of export: what it takes, prints and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from test_convert_goldens import options_of
from tiny_checkpoints import write_checkpoint

import checkpoints
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert
from quantkit.formats.safetensors import read_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    convert(write_checkpoint(folder / "Small-Moe"), folder / "x.gguf", None, ConvertOptions(pre="gpt-2"))
    return folder / "x.gguf"


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, args)])


def test_a_dry_run_groups_equal_tensors(model: Path, tmp_path: Path) -> None:
    result = run(model, tmp_path / "back", "--dry-run")
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stdout.splitlines() if "experts.*.down_proj" in line)
    assert line.split()[-3:-1] == ["from", "blk.*.ffn_down_exps.weight"]
    assert "will be a checkpoint of Qwen3MoeForCausalLM" in result.stdout
    assert "beside it: config.json, generation_config.json, README.md, tokenizer.json" in result.stdout
    assert result.stdout.splitlines()[-1] == "dry run: nothing was written"
    assert not (tmp_path / "back").exists()


def test_a_dry_run_reports_the_runs_refusal(model: Path, tmp_path: Path) -> None:
    assert "no such directory; create it first" in run(model, tmp_path / "a" / "b", "--dry-run").stdout
    (tmp_path / "config.json").touch()
    assert "exists; choose another name, or use --overwrite" in run(model, tmp_path, "--dry-run").stdout
    assert json.loads(run(model, tmp_path, "--dry-run", "--json").stdout)["refused"] is not None


def test_stdout_is_only_json(model: Path, tmp_path: Path) -> None:
    """It says what is written as safetensors has it, and of which tensors of the file."""
    result = run("--json", model, tmp_path / "back")
    output = json.loads(result.stdout)
    assert all(line.startswith("note: ") for line in result.stderr.splitlines())
    assert output["class"] == "Qwen3MoeForCausalLM"
    assert output["dtype"] == "bfloat16"
    assert {Path(file["path"]).name: file["bytes"] for file in output["files"]} == {
        path.name: path.stat().st_size for path in (tmp_path / "back").iterdir()
    }
    (stored,) = read_checkpoint(tmp_path / "back")
    assert {t["name"]: (tuple(t["shape"]), t["dtype"], t["offset"]) for t in output["tensors"]} == {
        name: (t.shape, t.dtype, t.offset) for name, t in stored.items()
    }
    sources = {t["name"]: t["sources"] for t in output["tensors"]}
    assert sources["model.layers.0.mlp.experts.1.up_proj.weight"] == ["blk.0.ffn_up_exps.weight"]


def test_progress_and_summary(model: Path, tmp_path: Path) -> None:
    result = run(model, tmp_path / "back", "--max-shard-size", "300K", "-t", 2)
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert 0 < len(lines) <= 101
    assert lines[-1].startswith("[100 %]")
    assert "files, " in result.stdout  # of many shards one line
    assert "on 2 threads" in result.stdout
    assert result.stdout.splitlines()[-1] == f"{tmp_path / 'back'} is a checkpoint of Qwen3MoeForCausalLM"


def test_errors_are_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    for arguments in ((tmp_path,), (tmp_path / "a" / "b",), (tmp_path / "c", "--class", "LlamaForCausalLM")):
        result = run(model, *arguments)
        assert result.exit_code == 1
        lines = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
        assert len(lines) == 1
        assert lines[0].startswith("Error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "mine"


def test_an_export_of_only_the_text_model_is_noted(tmp_path: Path) -> None:
    """A class that also has a vision tower: it is in no file, and a note says so."""
    checkpoint = checkpoints.write_checkpoint("qwen3-vl", tmp_path)
    convert(checkpoint, tmp_path / "x.gguf", None, options_of(checkpoints.describe("qwen3-vl")))
    result = run(tmp_path / "x.gguf", tmp_path / "back", "--dry-run")
    assert "also has a vision tower" in result.stderr
    notes = json.loads(run(tmp_path / "x.gguf", tmp_path / "back", "--dry-run", "--json").stdout)["notes"]
    assert any("only the text model is written" in note for note in notes)


def test_list() -> None:
    result = run("--list")
    assert result.exit_code == 0
    assert "Qwen3MoeForCausalLM" in result.stdout
