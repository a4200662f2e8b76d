"""Records of benchmarks, the pages made of them, and how a benchmark writes one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs/benchmarks").glob("*.md"))
DATA = ROOT / "docs/benchmarks/data"


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module that makes the pages."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import make_benchmark_pages

    return make_benchmark_pages


@pytest.fixture
def results(pages: Any) -> Any:
    """Return the module that writes records."""
    import results

    return results


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_pages_match_the_records(pages: Any, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert pages.page_text(text, pages.read_records()) == text, "run scripts/make_benchmark_pages.py"


def test_every_record_is_on_a_page_and_has_an_origin(pages: Any) -> None:
    records = pages.read_records()
    names = set().union(*(pages.records_of(path.read_text(encoding="utf-8")) for path in PAGES))
    assert names - {"gpu"} == records.keys() - {"gpu"}
    for record in records.values():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", record.date)
        assert re.fullmatch(r"[0-9a-f]{7,}\+?|unknown", record.commit)
        assert record.machine
        assert record.tables or record.lines


def test_the_summary_matches_its_records(pages: Any) -> None:
    """Twice the time of llama-quantize doubles the ratio, which no page has by hand."""
    records = pages.read_records()
    table = records["quantize-file"].tables[0]
    seconds = {name: float(time.split()[0]) for name, time, *_ in table.rows}
    ratio = seconds["llama-quantize"] / seconds["quantkit"]
    assert f"{ratio:.1f}x llama-quantize" in pages.summary(records)
    rows = tuple(
        (name, f"{2 * float(time.split()[0]):.2f} s" if name == "llama-quantize" else time, *cells)
        for name, time, *cells in table.rows
    )
    changed = replace(records["quantize-file"], tables=(replace(table, rows=rows),))
    assert f"{2 * ratio:.1f}x llama-quantize" in pages.summary({**records, "quantize-file": changed})


def test_the_summary_names_the_run_of_each_result(pages: Any) -> None:
    records = pages.read_records()
    table, runs = pages.summary(records).split("\n\nRuns:\n\n")
    numbers = [line.split(" | ")[-1].strip(" |") for line in table.splitlines()[2:]]
    origins = dict(line.split(". ", 1) for line in runs.splitlines())
    assert len(numbers) == len(pages.SUMMARY)
    for number, result in zip(numbers, pages.SUMMARY, strict=True):
        record = records[result.record]
        assert all(text in origins[number] for text in (record.command, record.machine, record.date, record.commit))


def test_ratios_in_the_readme_are_in_a_record(pages: Any) -> None:
    assert pages.unknown_ratios((ROOT / "README.md").read_text(encoding="utf-8"), pages.read_records()) == []


def test_an_unrecorded_ratio_is_named(pages: Any) -> None:
    assert pages.unknown_ratios("It is 12345.6x as fast, 9.0x, and 98765 times", pages.read_records()) == [
        "12345.6x",
        "98765 times",
    ]


BENCHMARK = """
import argparse, sys
from results import parse_options, record_output

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--end", type=int)
    options = parse_options(parser)
    print("a line")
    print("| type | ratio |\\n|---|---:|")
    for i in range(options.rounds):
        print(f"| Q{i} | {i}.5x |", flush=True)
    if options.end is not None:
        sys.exit(options.end)

record_output(main)
"""


def run_benchmark(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "bench_x.py"
    script.write_text(BENCHMARK)
    environment = {"PYTHONPATH": str(ROOT / "benchmarks"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, cwd=folder)


def test_a_benchmark_records_its_output(results: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    plain = run_benchmark(tmp_path, "--rounds", "2")
    result = run_benchmark(tmp_path, "--rounds", "2", "--json", str(file), "--end", "0")
    assert (result.returncode, result.stdout) == (0, plain.stdout)
    record = results.read_record(file)
    assert record.tables == (results.Table(("type", "ratio"), (("Q0", "0.5x"), ("Q1", "1.5x"))),)
    assert record.lines == ("a line",)
    assert record.command == "bench_x.py --rounds 2 --end 0"  # no folders, and nothing of --json
    assert record.machine == results.machine()
    assert results.Record(**{**vars(record)}).to_json() == file.read_text()


def test_a_failing_benchmark_records_nothing(tmp_path: Path) -> None:
    assert run_benchmark(tmp_path, "--rounds", "1", "--end", "3", "--json", str(tmp_path / "x.json")).returncode == 3
    assert not (tmp_path / "x.json").exists()


def test_every_benchmark_with_options_has_json() -> None:
    """All but the parts of others, and what only writes texts."""
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "ArgumentParser" in text and path.name not in ("results.py", "engine_worker.py"):
            assert "parse_options(" in text, path.name
            assert "record_output(main)" in text, path.name


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"tables": []}', '{"tables": [{"columns": ["a"], "rows": [["1", "2"]]}]}']
)
def test_a_damaged_record_is_named(results: Any, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(damage)
    with pytest.raises(ValueError, match="broken.json"):
        results.read_record(path)


def test_records_round_trip(results: Any) -> None:
    for path in DATA.glob("*.json"):
        assert results.read_record(path).to_json() == path.read_text(encoding="utf-8")
        assert json.loads(path.read_text(encoding="utf-8"))["tables"]


def test_kills_of_several_runs_form_one_table(pages: Any, results: Any) -> None:
    (table,), _ = results.tables_of(results.kills_table("cook", 20, 24, 20, None))
    assert table.columns == results.KILLS
    records = {name: record for name, record in pages.read_records().items() if name.startswith("kills-")}
    rows = pages.rows_of(list(records.values()))
    assert rows.columns == (*results.KILLS, "run")
    assert [row[-1] for row in rows.rows] == [str(i + 1) for i in range(len(records))]
    assert len(rows.rows) == len(records)
