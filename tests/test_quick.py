"""`pytest -m quick` runs each module of quantkit: quick.json has the test, which scripts/choose_quick.py enters."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

from quick import COMPILED, ELSEWHERE, ROOT, modules, quick_test_of

MODULES = modules()


def test_every_module_has_a_quick_test() -> None:
    missing = sorted(set(MODULES) - quick_test_of().keys() - COMPILED.keys() - ELSEWHERE.keys())
    assert not missing, f"{missing}: scripts/choose_quick.py TEST enters a test that takes little time and runs them"


def test_quick_tests_belong_to_existing_modules() -> None:
    assert not quick_test_of().keys() - set(MODULES), "scripts/choose_quick.py drops them"
    assert {*COMPILED, *ELSEWHERE} <= set(MODULES), "tests/lib/quick.py lists them"


def test_quick_tests_exist() -> None:
    """conftest.py refuses to collect a table with tests that are missing; parameters count, too."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-n", "0", "-m", "quick"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]


def test_every_module_is_imported() -> None:
    for module in MODULES:
        if module != "__main__.py":
            import_module(f"quantkit.{module.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__"))
