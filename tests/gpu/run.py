"""Let scripts/gpu_check survive crashes and hangs of a GPU: a process starts each part of a step once.

A kernel that reads where it may not leaves its process without a GPU, and one that never ends without hope. So one
process does the work and notes each part as it begins it; another one looks on, ends it when it is lost or has not
moved for long, says at which part, and starts the next one, which continues with the remaining parts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.units import format_size

EXPECTED = Path(__file__).resolve().parents[1] / "data/gpu-expected.npz"

#: The exit code of a process whose card no longer answers. One that came to the end has 0, whatever it found.
EXIT_LOST = 3

#: Seconds without a new part or line after which a process hangs.
PATIENCE = 120.0

#: What is noted when a step begins, and when a process was lost before a part of it began.
_BEFORE, _WITHOUT = "before ", "without "

FAIL_MARK, NOT_RUN = "FAILED", "NOT RUN"

#: What the CPU's kernels need; images of GPUs have all sorts.
NUMBA = (0, 68)

#: Parts that are named where many were not run.
MAX_NAMES = 6


class Run:
    """What a process of the work knows: where results go, what has been begun, when time is up.

    work: a folder for models, and for the list of what has been begun. until: by time.time().
    """

    def __init__(self, out: Path, work: Path, until: float, types: Sequence[str]) -> None:
        self.file = out.open("a", encoding="utf-8")
        self.folder, self.until, self.types = work, until, types
        self.begun_file = work / "begun"
        before = self.begun_file.read_text().splitlines() if self.begun_file.exists() else []
        self.started_steps, self.n_failed = set(before), 0
        #: The parts of each step that are done now, where not all of them are (check.FIRST).
        self.only: Mapping[str, Sequence[str]] = {}
        self.expected: Any = np.load(EXPECTED) if EXPECTED.exists() else {}
        if before and before[-1].startswith(_BEFORE):
            step = before[-1].removeprefix(_BEFORE)
            self._note(f"{_WITHOUT}{step}")
            self.say(f"{NOT_RUN}: what is left of {step}")

    @property
    def left(self) -> float:
        """Seconds until time is up."""
        return self.until - time.time()

    def say(self, line: str = "") -> None:
        """Write a line to the screen and to the file, now."""
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()

    def fail(self, label: str) -> None:
        """Record a failure."""
        self.n_failed += 1
        self.say(f"{FAIL_MARK} {label}")

    def check(self, label: str, value: float, bound: float) -> bool:
        """Note a failure if a value is beyond its bound, or no number."""
        good = bool(value <= bound)
        if not good:
            self.fail(f"{label}: {value:.3g}, bound {bound:g}")
        return good

    def moves(self, line: str) -> None:
        """Show that something goes on, on the screen only."""
        print(line, flush=True)
        self.begun_file.touch()

    @contextmanager
    def growing(self, path: Path, period: float = 5.0) -> Iterator[None]:
        """Show that a file grows on the disk, as long as it does."""
        finish = threading.Event()

        def look() -> None:
            blocks = 0
            while not finish.wait(period):
                if path.exists() and path.stat().st_blocks > blocks:
                    blocks = path.stat().st_blocks
                    self.moves(f"{path.name}: {format_size(512 * blocks)}")

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            finish.set()
            thread.join()

    def do(self, step: str, work: Callable[[], None]) -> None:
        """Do a step, unless a process was lost in what it does before its parts; what breaks there is a failure."""
        if f"{_WITHOUT}{step}" in self.started_steps:
            return
        self._note(f"{_BEFORE}{step}")
        try:
            work()
        except Exception as e:
            self._broke(step, e)

    def _note(self, line: str) -> None:
        self.started_steps.add(line)
        with self.begun_file.open("a") as file:
            file.write(line + "\n")

    def _broke(self, label: str, why: Exception) -> None:
        """Record a failure; another process continues if the GPU is lost."""
        self.fail(f"{label} broke: {type(why).__name__}: {why}")
        self.say("".join(traceback.format_exception(why, limit=8)).rstrip())
        if not gpu_answers():
            self.say("the card no longer answers: a new process goes on")
            raise SystemExit(EXIT_LOST) from None

    def lacks_numba(self, label: str) -> bool:
        """Return whether the CPU's kernels cannot run here, and print once which checks are skipped."""
        why = why_no_numba()
        if why is not None and f"{label}: {why}" not in self.started_steps:
            self.started_steps.add(f"{label}: {why}")
            self.say(f"{NOT_RUN}, {why}: {label}")
        return why is not None

    def todo(self, step: str, names: Iterable[str]) -> list[str]:
        """Return the parts of a step that are to be done now and have not been begun."""
        names_chosen = [name for name in names if name in self.only.get(step, [name])]
        return [name for name in names_chosen if f"{step}: {name}" not in self.started_steps]

    def for_each(self, step: str, names: Iterable[str], work: Callable[[str], None], needs: float = 10) -> None:
        """Do the parts of a step that have not been begun; ``needs``: seconds that must be left for one.

        A part that breaks is a failure, and the next one follows, if there still is a GPU.
        """
        names_left = []
        for name in self.todo(step, names):
            key = f"{step}: {name}"
            if self.left < needs:
                names_left.append(name)
                continue
            self._note(key)
            try:
                work(name)
            except Exception as e:  # whatever it is, the rest is to be measured
                self._broke(key, e)
        if names_left:
            suffix = f" and {len(names_left) - MAX_NAMES} more" if len(names_left) > MAX_NAMES else ""
            self.say(f"{NOT_RUN}, no time left: {step}: {', '.join(names_left[:MAX_NAMES])}{suffix}")


def why_no_numba() -> str | None:
    """Return why the CPU's kernels cannot be run here; None if they can."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not here"
    version = importlib.metadata.version("numba")
    if tuple(map(int, version.split(".")[:2])) < NUMBA:
        return f"numba {version} is older than {'.'.join(map(str, NUMBA))}"
    return None


def gpu_answers() -> bool:
    """Return whether the first GPU still does what it is asked."""
    from quantkit.kernels.cuda.core.device import open_device

    try:
        open_device("CUDA0").synchronize()
    except Exception:
        return False
    return True


def watch(command: Sequence[str], out: Path, work: Path, until: float, patience: float = PATIENCE) -> None:
    """Start a process that does the work, again after each one that was lost, until one comes to the end."""
    begun_path = work / "begun"
    begun_path.touch()

    def say(line: str) -> None:
        print(line, flush=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    while True:
        before = begun_path.read_text()
        end_reason = _watched(command, (out, begun_path), until + 60, patience)
        if end_reason == "ended with 0":
            return
        key = begun_path.read_text().splitlines()[-1] if begun_path.read_text() != before else ""
        if end_reason != f"ended with {EXIT_LOST}":
            say(f"{FAIL_MARK} {key or 'before any new part'}: the process {end_reason}")
        if not key or key.startswith(_WITHOUT) or time.time() > until:
            say(f"{NOT_RUN}: what comes after it")
            return


def verdict(text: str) -> str:
    """Return the last line of results: what failed, and whether anything was left out."""
    lines = text.splitlines()
    n_failed, left_out = (sum(line.startswith(mark) for line in lines) for mark in (FAIL_MARK, NOT_RUN))
    if n_failed:
        return f"{n_failed} FAILED"
    return "what was run passed, NOT everything was run" if left_out else "all checks passed"


def _watched(command: Sequence[str], files: Sequence[Path], until: float, patience: float) -> str:
    """Run a process; return its exit code, or why it was ended."""
    process = subprocess.Popen(command)
    began = time.time()
    while True:
        try:
            code = process.wait(timeout=0.2)
            return f"ended with {code}" if code >= 0 else f"was ended by signal {-code}"
        except subprocess.TimeoutExpired:
            moved = max(began, *(file.stat().st_mtime for file in files))
            is_late = time.time() > until
            if is_late or time.time() - moved > patience:
                process.kill()
                process.wait()
                return "was out of time" if is_late else f"had not moved for {patience:.0f} s"
        except BaseException:
            process.kill()
            raise
