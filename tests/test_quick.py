"""`pytest -m quick` runs each module of quantkit: quick.json has the test, which scripts/choose_quick.py enters."""

from __future__ import annotations

from importlib import import_module

import pytest

from quick import COMPILED, ELSEWHERE, ROOT, modules, quick_test_of, quick_tests

MODULES = modules()


def test_every_module_has_a_quick_test() -> None:
    missing = sorted(set(MODULES) - quick_test_of().keys() - COMPILED.keys() - ELSEWHERE.keys())
    assert not missing, f"{missing}: scripts/choose_quick.py TEST enters a test that takes little time and runs them"


def test_quick_tests_belong_to_existing_modules() -> None:
    assert not quick_test_of().keys() - set(MODULES), "scripts/choose_quick.py drops them"
    assert {*COMPILED, *ELSEWHERE} <= set(MODULES), "tests/lib/quick.py lists them"


@pytest.mark.parametrize("path", sorted({test.partition("::")[0] for test in quick_tests()}))
def test_quick_tests_exist(path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    names = {test.split("::")[1].partition("[")[0] for test in quick_tests() if test.startswith(f"{path}::")}
    missing = [name for name in names if f"def {name}(" not in source]
    assert not missing, f"{missing}: scripts/choose_quick.py chooses others"


def test_every_module_is_imported() -> None:
    for module in MODULES:
        if module != "__main__.py":
            import_module(f"quantkit.{module.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__"))
