"""bench and sweep-bench: every format, every combination, sensible figures; speed itself is no test's matter."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from refusals import refuses

from quantkit.bench import BenchProgress, Setting, SweepProgress, bench, sweep_bench
from quantkit.bench import Test as Timed
from quantkit.cli import cli
from quantkit.errors import RecipeError


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def test_json_has_llama_benchs_fields_and_own_ones(tiny_moe: Path) -> None:
    result = run("bench", "-m", tiny_moe, "-p", "16", "-n", "2", "-d", "0,8", "-r", "2", "-o", "json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"]) for r in rows] == [(16, 0, 0), (0, 2, 0), (16, 0, 8), (0, 2, 8)]
    for row in rows:
        assert len(row["samples_ns"]) == 2
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
        assert row["model_type"] == "qwen3moe"
        assert (row["gb_s"] > 0) == (row["n_prompt"] == 0)
        assert row["peak_share"] > 0
        assert row["backends"] == "CPU"


def test_switches_are_combined_and_shown(tiny_moe: Path) -> None:
    result = run("bench", "-m", tiny_moe, "-p", "4", "-n", "0", "-pg", "4,1", "-r", "1", "-fmoe", "0,1", "-muge", "0-1")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("| tiny")]
    assert "| fmoe | muge | test |" in result.stdout
    assert [line.split("|")[6].strip() + line.split("|")[7].strip() for line in lines[::2]] == ["00", "01", "10", "11"]
    assert [line.split("|")[8].strip() for line in lines[:2]] == ["pp4", "pp4+tg1"]
    assert "measured here" in result.stdout


def test_json_is_alone_on_stdout_or_in_a_file_beside_the_table(tiny_moe: Path, tmp_path: Path) -> None:
    alone = run("bench", "-m", tiny_moe, "-p", "4", "-n", "1", "-r", "1", "--json")
    assert alone.exit_code == 0, alone.output
    path = tmp_path / "bench.json"
    result = run("bench", "-m", tiny_moe, "-p", "4", "-n", "1", "-r", "1", "--json", path)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("| model |")
    rows = [json.loads(text) for text in (alone.stdout, path.read_text())]
    assert [[(r["n_prompt"], r["n_gen"]) for r in result] for result in rows] == 2 * [[(4, 0), (0, 1)]]
    assert rows[0][0].keys() == rows[1][0].keys() >= {"samples_ns", "avg_ts", "model_filename"}
    assert run("bench", "-m", tiny_moe, "-p", "4", "--json", path).exit_code == 1


def test_json_of_a_sweep_has_its_rows(tiny_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    result = run("sweep-bench", "-m", tiny_moe, "-c", "40", "-ub", "16", "-n", "2", "--json", path)
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert (record["model"], record["n_ctx"], record["n_ubatch"]) == (tiny_moe.name, 40, 16)
    assert [(r["pp"], r["tg"], r["n_kv"]) for r in record["rows"]] == [(16, 2, 0), (16, 2, 16)]
    assert all(r["speed_pp"] == r["pp"] / r["t_pp"] for r in record["rows"])


def test_results_come_by_progress_and_as_tables(tiny_moe: Path) -> None:
    steps: list[BenchProgress] = []
    settings = [Setting(fused_moe=False), Setting()]
    results = bench(tiny_moe, [Timed(4, 0), Timed(0, 1)], settings, repetitions=2, progress=steps.append)
    assert [step.result for step in steps if step.result is not None] == list(results)
    assert [step.current for step in steps] == sorted(step.current for step in steps)
    assert (steps[-1].current, steps[-1].total) == (12, 12)
    table = results.as_table()
    assert [row[table.header.index("fused_moe")] for row in table.rows] == ["False", "False", "True", "True"]
    assert "n_batch" not in table.header  # all alike
    assert "pp4" in results._repr_html_()
    rows: list[SweepProgress] = []
    sweep = sweep_bench(tiny_moe, 40, Setting(n_ubatch=16), n_gen=1, progress=rows.append)
    assert [now.row for now in rows if now.row is not None] == list(sweep)
    assert (rows[-1].current, rows[-1].total) == (2, 2)
    assert [row[2] for row in sweep.as_table().rows] == [0, 16]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_one_line_per_test(tiny_moe: Path, form: str) -> None:
    result = run("bench", "-m", tiny_moe, "-p", "4,8", "-n", "0", "-r", "1", "-o", form)
    assert result.exit_code == 0, result.output
    if form == "csv":
        rows = list(csv.DictReader(io.StringIO(result.stdout)))
    else:
        rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [int(r["n_prompt"]) for r in rows] == [4, 8]


@pytest.mark.parametrize("form", ["md", "jsonl"])
def test_a_sweep_fills_the_context(tiny_moe: Path, form: str) -> None:
    result = run(
        "sweep-bench", "-m", tiny_moe, "-c", "40", "-ub", "16", "-n", "2", "-nrep", "2", "--output-format", form
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    if form == "md":
        assert [line.split("|")[3].strip() for line in lines] == ["N_KV", "--------", "0", "16"]
    else:
        assert [(r["pp"], r["tg"], r["n_kv"]) for r in map(json.loads, lines)] == [(16, 2, 0), (16, 2, 16)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "x"), "write 512"),
        (("-p", "1-8*1"), "write 512"),
        (("-pg", "4"), "write PP,TG"),
        (("-ctk", "q4_9"), "q4_9"),
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("-ot", "x=CUDA0"), "no device CUDA0"),
    ],
)
def test_wrong_options_are_refused(tiny_moe: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run("bench", "-m", tiny_moe, *arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output


def test_invalid_arguments_are_refused(tiny_moe: Path) -> None:
    with refuses(RecipeError, "QK-E214"):
        bench(tiny_moe, [])
    with refuses(RecipeError, "QK-E203 16 4"):
        sweep_bench(tiny_moe, 16, Setting(n_ubatch=16))
    assert str(Timed(8, 2, 4)) == "pp8+tg2 @ d4"


def test_a_narrow_terminal_gets_a_narrow_table(tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / f"{'long-name' * 9}\n.gguf").symlink_to(tiny_moe)
    result = run("bench", "-m", next(tmp_path.iterdir()), "-p", "0", "-n", "2", "-r", "1", "-fqkv", "0,1")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "| long-namelong-namel… | CPU |" in result.stdout
