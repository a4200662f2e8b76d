"""Imports flow one way, down the list in the design; two wings do not know each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "quantkit"

#: What each part may import, besides itself.
FLOOR = {"quantkit", "types", "errors", "helpers"}
ALLOWED = {
    "types": {"errors"},
    "errors": set(),
    "helpers": set(),
    "formats": FLOOR,
    "kernels": FLOOR,
    "pipeline": FLOOR | {"formats", "kernels"},
    "model": FLOOR | {"formats", "kernels"},
    "verbs": FLOOR | {"formats", "kernels", "pipeline", "model"},
    "cli": FLOOR | {"formats", "kernels", "pipeline", "model", "verbs"},
}
PACKAGES = ("formats", "kernels", "pipeline", "model", "cli")


def part_of(module: str) -> str:
    """Return the part a dotted name below quantkit belongs to."""
    names = module.split(".")
    if len(names) == 1:
        return "quantkit"
    first = names[1]
    if first in PACKAGES or first in ("types", "errors", "helpers"):
        return first
    verb = (ROOT / f"{first}.py").exists() or (ROOT / first / "__init__.py").exists()
    return "verbs" if verb else "quantkit"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {m for m in found if m.split(".")[0] == "quantkit"}


MODULES = sorted(p for p in ROOT.rglob("*.py") if p not in (ROOT / "__init__.py", ROOT / "__main__.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_flow_one_way(path: Path) -> None:
    dotted = ".".join(("quantkit", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    part = part_of(dotted)
    used = {part_of(module) for module in imports(path)} - {part}
    assert used <= ALLOWED[part], f"{dotted} imports {used - ALLOWED[part]}"
