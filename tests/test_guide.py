"""The guides and maps of the tree are those of the tree: CONTRIBUTING.md, ARCHITECTURE.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from guide import GUIDES, ROOT, step, steps

TESTS = Path(__file__).parent
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
#: A name in angle brackets, as <type>, which stands for any file of a folder.
PLACEHOLDER = re.compile(r"<\w+>|\bNAME\b")


def places(cell: str) -> list[str]:
    """Return the paths in a cell of a table, with * for names in angle brackets."""
    return [PLACEHOLDER.sub("*", text) for text in re.findall(r"`([\w./<>*-]+)`", cell) if "/" in text or "." in text]


def quoted(title: str) -> set[int]:
    """Return the steps of a guide that some test quotes: ``step(title, 1)``, or ``guide_step(1)``."""
    numbers: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        quoted_title = re.escape(title)
        numbers |= {int(n) for n in re.findall(rf"""step\(["']{quoted_title}["'], (\d+)""", text)}
        if re.search(rf"""step[(,] ?["']{quoted_title}["']""", text):
            numbers |= {int(n) for n in re.findall(r"\bguide_step\(\s*(\d+)", text)}
    return numbers


@pytest.mark.parametrize("title", GUIDES)
def test_places_of_a_guide_exist(title: str) -> None:
    assert list(steps(title)) == list(range(1, len(steps(title)) + 1))
    for place, action in steps(title).values():
        assert places(place), place
        for name in places(place) + [name for name in places(action) if "/" in name]:
            assert any(ROOT.glob(name)), name


@pytest.mark.parametrize("title", GUIDES)
def test_every_step_is_quoted_by_a_test(title: str) -> None:
    """One that is forgotten fails that test."""
    assert quoted(title) == steps(title).keys()


def test_layers_have_every_part() -> None:
    table = ARCHITECTURE.split("\n## Layers\n")[1].split("\n\n`kernels/cpu`")[0]
    parts = {p.name for p in (ROOT / "quantkit").glob("[a-z]*.py")}
    parts |= {f"{p.parent.name}/" for p in (ROOT / "quantkit").glob("*/__init__.py")}
    missing = parts - set(places(table))
    assert not missing, f"{missing}: {step('Add a command', 8)}"


def test_places_of_answers_exist() -> None:
    """In the table of ARCHITECTURE.md, paths of the package."""
    table = ARCHITECTURE.split("\n## Where is ..?\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| [^|]+ \| (.+) \|$", table, re.MULTILINE)
    paths = [name for cell in cells for name in re.findall(r"`([\w./]+/[\w.]*)", cell)]
    assert len(paths) > len(cells) > 5
    assert not [name for name in paths if not (ROOT / "quantkit" / name).exists()]


def tree() -> dict[str, str]:
    """Return the folders of ARCHITECTURE.md's tree, by path, each with what is said of it."""
    block = ARCHITECTURE.split("\n## The tree\n\n```\n")[1].split("```")[0]
    folders: dict[str, str] = {}
    above: list[str] = []
    for line in block.splitlines():
        indent, name, text = re.match(r"( *)(\S+/) +(.+)", line).groups()  # type: ignore[union-attr]
        above[len(indent) // 2 :] = [name]
        folders["".join(above)] = text
    return folders


def test_the_tree_is_complete() -> None:
    """All folders at the top, and all packages of quantkit; of those within packages some."""
    folders = {"quantkit/", "benchmarks/", "docs/", "scripts/", "tests/"}
    packages = {f"quantkit/{p.parent.name}/" for p in (ROOT / "quantkit").glob("*/__init__.py")}
    assert tree().keys() >= folders | packages
    assert not [name for name in tree() if not (ROOT / name).is_dir()]
