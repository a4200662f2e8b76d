"""The first run: what no cache holds is compiled by several processes, once, with a word, and beside the clock."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest

from quantkit.kernels import first_run
from quantkit.kernels.first_run import compilation, compile_in_order, working_seconds


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run, "_STATE", first_run._Compiling())
    monkeypatch.setattr(first_run, "available_cpus", lambda: 3)


def kernel(path: Path, parent: int, *, dies: bool = False) -> None:
    """Stand for a kernel: load it from its file, or else compile it."""
    if path.exists():
        return
    with compilation():
        time.sleep(0.1)
        if dies and os.getpid() != parent:
            os._exit(1)
        with path.open("a") as file:
            file.write(f"{os.getpid()}\n")


def test_processes_share_uncached_compilations(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / str(i) for i in range(9)]
    paths[0].write_text("there\n")
    jobs = [partial(kernel, path, os.getpid()) for path in paths]
    compile_in_order(jobs)
    assert paths[0].read_text() == "there\n"
    compilers = [path.read_text() for path in paths[1:]]
    assert len(set(compilers)) == 3
    assert all(text.count("\n") == 1 for text in compilers)
    assert capfd.readouterr().err == "compiling kernels (first use on this machine)\n"
    compile_in_order(jobs)
    assert capfd.readouterr().err == ""


def test_kernels_of_an_ended_process_are_compiled_here(tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(5)]
    compile_in_order([partial(kernel, path, os.getpid(), dies=True) for path in paths])
    assert {path.read_text() for path in paths} == {f"{os.getpid()}\n"}


def children() -> set[str]:
    """Return the processes that this one has started and not waited for."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def test_errors_are_raised_here_and_no_process_remains(tmp_path: Path) -> None:
    def wrong() -> None:
        with compilation():
            raise ValueError("does not compile")

    before = children()  # other tests of this process may keep some
    with pytest.raises(ValueError, match="does not compile"):
        compile_in_order([wrong, *(partial(kernel, tmp_path / str(i), os.getpid()) for i in range(4))])
    assert children() <= before


def test_the_clock_is_paused_during_compilation() -> None:
    began = working_seconds()
    time.sleep(0.05)
    with compilation():
        during = working_seconds()
        time.sleep(0.2)
        assert working_seconds() == during
    time.sleep(0.05)
    assert 0.1 <= working_seconds() - began < 0.25
