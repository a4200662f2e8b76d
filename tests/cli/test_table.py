"""Tables and lists fit the terminal; pipes get a line a row."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from quantkit.cli import cli
from quantkit.cli._table import columns, fold, table

HEADER = ["id", "name", "rel. error", "nothing", "shape", "why it is so"]
ROWS = [(7, "blk.0.attn_q.weight", "1.5 %", "-", "256 x 8", "a reason"), (8, "output", "", "", "64", "long words " * 3)]


def lines(monkeypatch: pytest.MonkeyPatch, room: str, **options: object) -> list[str]:
    monkeypatch.setenv("COLUMNS", room)
    rows = table(HEADER, ROWS, **{"left": (1, 5), **options}).splitlines()  # type: ignore[arg-type]
    assert all(len(line) <= int(room or 999) for line in rows)
    return rows


def test_a_table_without_a_terminal_has_one_line_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, "") == [
        "id  name                 rel. error    shape  why it is so",
        "--  -------------------  ----------  -------  ---------------------------------",
        " 7  blk.0.attn_q.weight       1.5 %  256 x 8  a reason",
        " 8  output                                64  long words long words long words",
    ]


def test_headings_and_text_fold_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, "62") == [
        "id  name                  rel.    shape  why it is so",
        "                         error",
        "--  -------------------  -----  -------  ---------------------",
        " 7  blk.0.attn_q.weight  1.5 %  256 x 8  a reason",
        " 8  output                           64  long words long words",
        "                                         long words",
    ]


def test_narrow_tables_drop_optional_columns_then_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "shape" not in " ".join(lines(monkeypatch, "54", droppable=(4,)))
    below = lines(monkeypatch, "50")
    assert [line.split() for line in below if line.startswith("id")] == [
        ["id", "name", "rel.", "error", "shape"],
        ["id", "name", "why", "it", "is", "so"],
    ]


def test_folded_lines_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert fold("  added  some-key: value", 9) == "  added  some-key:\n         value"
    monkeypatch.delenv("COLUMNS")
    assert columns() is None
    assert fold("x " * 200, 2) == "x " * 200


@pytest.mark.parametrize(
    "arguments",
    [
        "types --presets",
        "inspect {d}/tiny-moe-bf16.gguf",
        "compare --no-error {d}/tiny-moe-bf16.gguf {d}/tiny-moe-imatrix.gguf",
        "imatrix show --per-tensor -m {d}/tiny-moe-bf16.gguf {d}/tiny-moe-imatrix.gguf",
        "imatrix diff {d}/tiny-moe-imatrix.gguf {d}/tiny-moe-imatrix.gguf",
        "quantize --dry-run --imatrix {d}/tiny-moe-imatrix.gguf {d}/tiny-moe-bf16.gguf x.gguf Q4_K_M",
    ],
)
def test_commands_fit_80_columns(arguments: str, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(data)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(cli, arguments.format(d="data").split())
    assert result.exit_code == arguments.startswith("compare"), result.output
    assert not [line for line in result.output.splitlines() if len(line) > 80]
