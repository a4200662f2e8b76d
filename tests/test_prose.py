"""The English of documents, helps, messages and comments: each rule finds its example, in each kind of place."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lint_prose import RULES, Rule, check_file, files, read_rules

RULE_TABLES = tomllib.loads(RULES.read_text(encoding="utf-8"))["rule"]
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rules() -> list[Rule]:
    """The project's rules."""
    return read_rules()


@pytest.mark.parametrize("table", RULE_TABLES, ids=[table["example"] for table in RULE_TABLES])
def test_every_rule_finds_its_example(table: dict[str, str]) -> None:
    assert re.search(table["pattern"], table["example"].lower())
    assert set(table.get("places", ())) <= {"document", "help", "message", "docstring", "comment"}


#: A file with one bad phrase in each kind of place, and the line of it.
PLANTED = {
    "README.md": ("# Title\n\nA long\nparagraph: `as ever` is code, but leave the\nswitch away.\n", [4]),
    "CHANGELOG.md": ("- An item,\n  as ever.\n\n```\nas ever\n```\n", [2]),
    "docs/reference/files.md": ("| a | b |\n|---|---|\n| x | in order to |\n", [3]),
    "docs/explanation/glossary.md": ("| term | meaning | not |\n|---|---|---|\n| **x** | y | as ever |\n", []),
    "quantkit/cli/quantize.py": (
        'import click\n\n\n@click.command()\n@click.option("-x", help="Write it "\n    "anew.")\n'
        'def command(x: str) -> None:\n    """Quantize a model.\n\n    This is simply a copy.\n    """\n',
        [6, 10],
    ),
    "quantkit/options/quantize.py": ('OPTION = option(\n    "Whole numbers are read",\n)\n', [2]),
    "quantkit/pipeline/run.py": (
        "def run(path: str) -> None:\n    # The state is kept, as ever.\n    raise QuantkitError(\n"
        '        f"{path} exists: "\n        f"{path!r} is no file; "\n        "please remove it"\n    )\n',
        [2, 5, 6],
    ),
    "quantkit/names.py": (
        '"""Tensor names."""\n\n\ndef base_name() -> str:\n    """Say what it is."""\n    x = 1 \x20# as ever\n',
        [5, 6],
    ),
    "quantkit/kernels/cuda/encode/encode.cu": ("// out = x,\n//     as ever\nint a = 1;  // by turns\n", [3]),
    "tests/test_docs.py": ('"""Test names, as ever."""\n\nX = "data, as ever"\n', [1]),
}


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with the planted files."""
    for name, (text, _) in PLANTED.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def findings(root: Path, rules: list[Rule]) -> Iterator[tuple[str, int]]:
    """Yield file and line of each finding."""
    for path in files(root):
        yield from ((finding.path, finding.line) for finding in check_file(root, path, rules))


def test_findings_have_the_right_lines(planted: Path, rules: list[Rule]) -> None:
    expected = {(name, line) for name, (_, lines) in PLANTED.items() for line in lines}
    assert set(findings(planted, rules)) == expected


def test_a_finding_names_file_line_and_remedy(planted: Path, rules: list[Rule]) -> None:
    (first, *_) = check_file(planted, planted / "README.md", rules)
    assert str(first) == 'README.md:4: "leave the switch away": omit'


def test_spelling_is_checked(tmp_path: Path) -> None:
    misspelled = "occ" + "ured"  # in two parts: codespell reads this file, too
    (tmp_path / "page.md").write_text(f"A tensor is\nqauntized and {misspelled}.\n", encoding="utf-8")
    command = [sys.executable, "-m", "codespell_lib", "--toml", ROOT / "pyproject.toml", tmp_path / "page.md"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode
    assert f"page.md:2: {misspelled} ==> occurred" in result.stdout
