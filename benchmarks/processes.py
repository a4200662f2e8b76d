"""Run a program as a process and measure it: wall time, peak memory, exit status.

Peak memory is the kernel's count for that process (wait4's ru_maxrss). It starts with the memory of the parent, so a
benchmark must stay small: models are generated in a separate process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@dataclass(frozen=True)
class Outcome:
    """The result of a process; ``returncode`` is negative for a signal."""

    seconds: float
    peak_rss: int
    returncode: int
    stdout: str
    stderr: str
    #: CPU seconds of all threads, in user and kernel mode.
    cpu_seconds: float = 0.0

    def checked(self, label: str) -> Outcome:
        """Return self, or exit with the output of the process."""
        if self.returncode != 0:
            sys.exit(f"{label} failed with {self.returncode}:\n{self.stdout[-2000:]}{self.stderr[-4000:]}")
        return self


def run(argv: Sequence[str | Path], *, watch: Callable[[subprocess.Popen[bytes]], None] | None = None) -> Outcome:
    """Run a program to its end; ``watch`` may act on it in the meantime."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        process = subprocess.Popen([str(a) for a in argv], stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        try:
            if watch is not None:
                watch(process)
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    cpu = usage.ru_utime + usage.ru_stime
    return Outcome(seconds, usage.ru_maxrss * 1024, process.returncode, texts[0], texts[1], cpu)


def quantkit(*arguments: str | Path) -> list[str]:
    """Return the command line of `quantkit ARGUMENTS` with this Python."""
    return [sys.executable, "-m", "quantkit", *map(str, arguments)]


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def llama_bin() -> Path | None:
    """Return the folder of llama.cpp's programs and libraries, built by scripts/peers."""
    default = Path.home() / ".cache/quantkit/peers/llama-b11434/bin"
    folder = Path(os.environ.get("QUANTKIT_LLAMA_BIN") or default)
    return folder if (folder / "llama-quantize").exists() else None


def make_moe(path: Path, *arguments: str, script: str = "make_moe.py") -> Path:
    """Write a model with a script, in a separate process."""
    outcome = run([sys.executable, SCRIPTS / script, path, *arguments]).checked(script)
    print(outcome.stdout.strip(), flush=True)
    return path


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def work_folder(path: Path | None) -> Iterator[Path]:
    """Yield a folder for large files: the given one, which is kept, or a temporary one."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="quantkit-") as folder:
        yield Path(folder)


def machine() -> str:
    """Describe the machine: processor, CPUs available to this process, Python."""
    model = "unknown processor"
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    return f"{model}, {len(os.sched_getaffinity(0))} CPUs, Python {sys.version.split()[0]}"
