"""Steps of this script once more under NVIDIA's compute-sanitizer: reads where nothing is, and races for shared memory.

Each goes on in a process of its own, with memory from the driver, not from CuPy's pool: what lies behind an array is
then no one's. Programs take ten times as long and more: the commonest types and models come first, then all, as far as
there is time (`scripts/gpu_check sanitize --minutes 60`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from gpu.run import NOT_RUN, Run

#: Tools, and the line in which each says what it found.
TOOLS = {
    "memcheck": re.compile(r"^=+ ERROR SUMMARY: (\d+) errors?", re.M),
    "racecheck": re.compile(r"^=+ RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?.*\)", re.M),
}
STEPS = ("products", "zoo", "encoding")
#: Where it is where it is not on PATH: with NVIDIA's compiler, or as the wheel nvidia-cuda-sanitizer-api.
PLACES = ("/usr/local/cuda/bin", *(f"{path}/nvidia/cu13/bin" for path in sys.path))
#: The most lines of a report that are shown, and the seconds between two signs of life.
MAX_LINES, SIGN = 16, 20.0


def sanitizer(run: Run) -> None:
    """Products, zoo models and encoders, watched by memcheck and racecheck."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=":".join(PLACES))
    parts = [f"{tool} {step}{suffix}" for suffix in ("", ", all") for step in STEPS for tool in TOOLS]
    if not run.todo("sanitizer", parts):
        return
    if program is None:
        run.say(f"{NOT_RUN}: sanitizer: compute-sanitizer is not here: pip install nvidia-cuda-sanitizer-api")
        return
    run.for_each("sanitizer", parts, lambda part: _watched(run, program, part), needs=60)


def _watched(run: Run, program: str, part: str) -> None:
    tool, step = part.removesuffix(", all").split()
    folder = run.folder / part.replace(" ", "-").replace(",", "")
    folder.mkdir()
    command = [program, "--tool", tool, "--print-limit", "4", sys.executable, str(Path(__file__).with_name("check.py"))]
    command += ["--work", str(folder), "--out", str(folder / "out.md"), "--until", str(run.until), "--only", step]
    command += ["--types", *run.types, "--sanitized", *([] if part.endswith(", all") else ["--first"])]
    began, log = time.monotonic(), folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None and run.left > -30:
            run.moves(f"{part}: {time.monotonic() - began:.0f} s")
            try:
                process.wait(SIGN)
            except subprocess.TimeoutExpired:
                continue
    finally:
        returncode = process.poll()
        process.kill()
        process.wait()
    _report(run, part, returncode, log.read_text(errors="replace"), time.monotonic() - began)
    shutil.rmtree(folder)


def _report(run: Run, part: str, returncode: int | None, log: str, seconds: float) -> None:
    """Print the outcome of a run: passed, failed, or not run."""
    report = [line for line in log.splitlines() if line.startswith("=====")]
    match = TOOLS[part.split()[0]].search(log)
    if returncode is None:
        run.say(f"{NOT_RUN} to the end, no time left: sanitizer: {part}")
    elif match is None:
        last = (report or log.splitlines() or [""])[-1]
        run.say(f"{NOT_RUN}: sanitizer: {part}: it ended with {returncode}: {last}")
    elif int(match[1]) or returncode:
        wrong = [line for line in log.splitlines() if line.startswith("FAILED")]
        run.fail(f"sanitizer: {part}: {match[0]}; the process ended with {returncode}")
        run.say("\n".join([*wrong, *report][:MAX_LINES]))
    else:
        run.say(f"sanitizer: {part}: nothing found, {seconds:.0f} s")
