"""README's install line: a clone, installed with its extras into a fresh environment, has what its commands need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

from examples import ROOT, blocks_of


def run(command: list[str], folder: Path, variables: Mapping[str, str]) -> str:
    """Run a command in a folder; return its output. It fails if the command does."""
    process = subprocess.run(
        command,
        **{"cwd": folder, "env": variables, "timeout": 900, "text": True, "check": False},
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables of a fresh environment, whose pip reaches a package index."""
    if not (ROOT / ".git").exists():
        pytest.skip("the checkout is not a git clone")
    index = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--ignore-installed", "click"]
    if "CI" not in os.environ and subprocess.run(index, check=False, capture_output=True).returncode:
        pytest.skip("pip cannot reach a package index")
    venv.create(tmp_path / "environment", with_pip=True)
    # Packages that are imported once need no compiled modules beside them.
    variables = {**os.environ, "PATH": f"{tmp_path}/environment/bin:{os.environ['PATH']}", "PIP_NO_COMPILE": "1"}
    return {name: value for name, value in variables.items() if name != "PYTHONPATH"}


def test_the_install_line_of_the_readme(environment: dict[str, str], tmp_path: Path) -> None:
    (block,) = [b for b in blocks_of(ROOT / "README.md") if "pip install" in b.text]
    assert "<this repository>" in block.text
    run(["bash", "-euc", block.text.replace("<this repository>", f"'{ROOT}'")], tmp_path, environment)
    assert run(["quantkit", "--version"], tmp_path, environment).startswith("quantkit, version ")
    assert json.loads(run(["quantkit", "doctor", "--json"], tmp_path, environment))["exit_code"] == 0
    run(["python", "-c", "from quantkit.extras import *; check_extras(*ALL)"], tmp_path, environment)
