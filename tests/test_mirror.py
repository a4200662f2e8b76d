"""tests/ mirrors quantkit/: CONTRIBUTING says which folder has the tests of which part, and it is complete."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
#: Rows of the table: parts of quantkit, and the folder of their tests.
ROWS = re.findall(r"^\| (`quantkit/[^|]*) \| (`tests/[^|]*) \|", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M)


def paths(cell: str) -> set[str]:
    return set(re.findall(r"`([\w/.]+)`", cell))


def test_every_part_has_a_folder_of_tests() -> None:
    parts = {path for part, _ in ROWS for path in paths(part)}
    packages = {f"quantkit/{p.name}/" for p in (ROOT / "quantkit").iterdir() if (p / "__init__.py").is_file()}
    assert parts >= packages
    assert all((ROOT / path).exists() for path in parts)


def test_every_folder_of_tests_is_in_the_table() -> None:
    folders = {path for _, cell in ROWS for path in paths(cell)}
    assert folders == {f"tests/{path.parent.name}/" for path in TESTS.glob("*/test_*.py")}


def test_only_tests_of_the_whole_tree_are_at_the_top() -> None:
    names = {path.stem for path in TESTS.glob("test_*.py")}
    assert names == {
        f"test_{name}"
        for name in (
            "benchmarks",
            "docs",
            "examples",
            "glossary",
            "guide",
            "install",
            "layers",
            "mirror",
            "prose",
            "quick",
            "reasons",
            "scripts",
            "site",
            "site_browser",
        )
    }


def test_helpers_are_in_lib() -> None:
    assert {path.name for path in TESTS.glob("*.py") if not path.name.startswith("test_")} == {"conftest.py"}
    assert not list((TESTS / "lib").glob("test_*.py"))
