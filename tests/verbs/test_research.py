"""The notebooks of docs/research run, and their pages are what they give: scripts/run_notebooks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/research"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run notebooks, in a process of their own: Jupyter's libraries warn."""
    command = [sys.executable, ROOT / "scripts/run_notebooks.py", "--check", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200, check=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name: str) -> None:
    result = check(name)
    assert result.returncode == 0, result.stderr


def test_the_overview_links_to_every_notebook() -> None:
    overview = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert len(NAMES) == 3
    assert all(f"]({name}.md)" in overview for name in NAMES)
    assert all(f"]({name}.ipynb)" in (FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in NAMES)
