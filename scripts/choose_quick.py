"""Enter in tests/quick.json the cheapest test that runs each module of quantkit, for `pytest -m quick`.

    scripts/choose_quick.py [TEST ..]    files or tests to choose from; by default, the current tests are run again

Modules that none of these runs keep their test; modules without one are printed. A test counts if it passes within
--limit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/lib")]

from quick import COMPILED, ELSEWHERE, PACKAGE, TARGET, modules, quick_test_of  # noqa: E402

#: Modules that count only if Python calls them in the process of a test.
MODULES = set(modules()) - COMPILED.keys() - ELSEWHERE.keys()


class Recorder:
    """A pytest plugin that records the modules whose functions each test calls, and its seconds."""

    def __init__(self, limit: float) -> None:
        self.limit, self.prefix = limit, f"{PACKAGE}/"
        self.modules: dict[str, set[str]] = {}
        self.seconds: dict[str, float] = {}
        self._files: set[str] = set()
        self._failures: set[str] = set()

    def _record(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._files.add(frame.f_code.co_filename)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record a test and the setup of its fixtures."""
        self._files.clear()
        began = time.perf_counter()
        threading.setprofile(self._record)
        sys.setprofile(self._record)
        try:
            result = yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        seconds = time.perf_counter() - began
        if seconds <= self.limit and item.nodeid not in self._failures:
            self.modules[item.nodeid] = {f.removeprefix(self.prefix) for f in self._files if f.startswith(self.prefix)}
            self.seconds[item.nodeid] = seconds
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Drop failed and skipped tests."""
        if not report.passed:
            self._failures.add(report.nodeid)


def choose_tests(recorder: Recorder, entries: dict[str, str]) -> dict[str, str]:
    """Return a test for each module: few tests, and cheap ones; a module keeps its test if that was not run."""
    tests = {module: test for module, test in entries.items() if module in MODULES and test not in recorder.modules}
    left = MODULES - tests.keys()
    while left:
        gains = {test: len(modules & left) for test, modules in recorder.modules.items() if modules & left}
        if not gains:
            break
        best = max(gains, key=lambda test: gains[test] / (recorder.seconds[test] + 0.05))
        tests |= dict.fromkeys(recorder.modules[best] & left, best)
        left -= recorder.modules[best]
    return tests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="TEST")
    parser.add_argument("--limit", type=float, default=3, help="seconds that a test may take  [default: 3]")
    options = parser.parse_args()
    os.chdir(ROOT)
    recorder, entries = Recorder(options.limit), quick_test_of()
    pytest.main(["-q", "-m", "not peer and not gpu", *(options.tests or sorted(set(entries.values())))], [recorder])
    tests = choose_tests(recorder, entries)
    TARGET.write_text(json.dumps(tests, indent=0, sort_keys=True) + "\n")
    print(f"{len(tests)} modules, {len(set(tests.values()))} tests; without one: {sorted(MODULES - tests.keys())}")


if __name__ == "__main__":
    main()
