"""Kill a cook at random moments, run it again, and compare: every file must be the same.

    benchmarks/kill_cook.py MODEL CALIBRATION EVALUATION --trials 10

MODEL (a checkpoint or a GGUF file) is cooked once without interruption, which is the reference; then TRIALS times into
an empty folder, killed with SIGKILL after a random part of the reference's time, up to --kills times in a row, and
completed by the same command. All files are compared, except the state of the cook and of its tensor cache (times,
sizes), and seconds in JSON files. A trial also fails if a run fails, or leaves files of a killed one behind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kill_resume import MAX_KILLS, kill_after
from processes import machine, quantkit, run, sha256, work_folder
from results import kills_table, parse_options, record_output

TARGETS = "Q4_K_M,IQ4_XS+feedback,Q3_K_M+calibrate,3.5bpw"
#: Names of files that a killed step leaves, and the next run removes.
UNFINISHED = (".part", ".journal", ".state", ".lock", ".activations")
CONFIG = """\
model = {model}
name = "killed"
output = "out"
targets = {targets}
threads = {threads}

[calibration]
text = [{calibration}]
evaluation = {evaluation}

[imatrix]
ctx = 256
chunks = 8

[check]
ctx = 256
chunks = 4

[sensitivity]
ctx = 256
chunks = 2
types = ["Q2_K", "Q4_K", "Q6_K"]

[search]
candidates = 2
"""


@dataclass(frozen=True)
class Reference:
    """The uninterrupted cook: its command, its folder, and a digest of every file by name."""

    command: Sequence[str | Path]
    folder: Path
    files: dict[str, str]
    seconds: float


def files_of(folder: Path) -> dict[str, str]:
    """Return a digest of every file of a cook except its state; of its tensor cache, only of the entries."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    cache = "work/tensors/"
    return {
        name: digest(path)
        for name, path in files.items()
        if path.name != "cook.json" and (not name.startswith(cache) or name.startswith(f"{cache}entries/"))
    }


def digest(path: Path) -> str:
    """Return the SHA-256 of a file; of JSON, without measured seconds."""
    if path.suffix != ".json":
        return sha256(path)
    return hashlib.sha256(json.dumps(without_seconds(json.loads(path.read_bytes()))).encode()).hexdigest()


def without_seconds(data: Any) -> Any:
    """Return JSON data without seconds."""
    if isinstance(data, dict):
        return {key: without_seconds(value) for key, value in data.items() if key != "seconds"}
    return [without_seconds(value) for value in data] if isinstance(data, list) else data


def config_of(args: argparse.Namespace) -> str:
    """Return the configuration of the cook."""
    names = {name: json.dumps(str(getattr(args, name).resolve())) for name in ("model", "calibration", "evaluation")}
    return CONFIG.format(**names, targets=json.dumps(args.targets.split(",")), threads=args.threads)


def reference(args: argparse.Namespace, folder: Path) -> Reference:
    """Cook without interruption, after a cook that compiles the kernels if necessary."""
    config, out = folder / "cook.toml", folder / "out"
    config.write_text(config_of(args))
    command = quantkit("cook", config)
    for label in ("the reference",) if args.compiled else ("the first cook", "the reference"):
        shutil.rmtree(out, ignore_errors=True)
        outcome = run(command).checked(label)
    return Reference(command, out, files_of(out), outcome.seconds)


def trial(expected: Reference, rng: random.Random, most: int) -> tuple[list[float], str]:
    """Kill a cook, continue, compare; return the seconds of each run before its kill, and the problems."""
    shutil.rmtree(expected.folder)
    delays: list[float] = []
    times = rng.randint(1, most)
    for _ in range(times):
        delay = rng.uniform(0, expected.seconds * min(1, 2 / times))
        outcome = run(expected.command, watch=kill_after(delay))
        if outcome.returncode == 0:
            break
        if outcome.returncode != -9:
            return delays, f"ended with {outcome.returncode} before its kill: {outcome.stderr.strip()[-500:]}"
        delays.append(delay)
    outcome = run(expected.command)
    if outcome.returncode != 0:
        return delays, f"the last run ended with {outcome.returncode}: {outcome.stderr.strip()[-500:]}"
    files = files_of(expected.folder)
    if left := [name for name in files if Path(name).suffix in UNFINISHED]:
        return delays, f"left behind: {', '.join(left)}"
    names = sorted(files.keys() | expected.files.keys())
    differences = [name for name in names if files.get(name) != expected.files.get(name)]
    return delays, f"other files: {', '.join(differences)}" if differences else ""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("calibration", type=Path)
    p.add_argument("evaluation", type=Path)
    p.add_argument("--targets", default=TARGETS)
    p.add_argument("--threads", type=int, default=0, help="of the cook (default: 0, all CPUs)")
    p.add_argument("--trials", type=int, default=10)
    p.add_argument("--kills", type=int, default=MAX_KILLS, help="most kills in a trial")
    p.add_argument("--compiled", action="store_true", help="kernels are already compiled: skip the first cook")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the files (default: a temporary one)")
    args = parse_options(p)
    rng, wrong, kills = random.Random(args.seed), 0, 0
    with work_folder(args.work) as folder:
        expected = reference(args, folder)
        print(f"{machine()}\nreference: {expected.seconds:.1f} s, {len(expected.files)} files", flush=True)
        for number in range(1, args.trials + 1):
            delays, why = trial(expected, rng, args.kills)
            wrong, kills = wrong + bool(why), kills + len(delays)
            after = ", ".join(f"{delay:.1f} s" for delay in delays) or "no kill: the run had ended"
            print(f"{number:4d}  killed after {after}; {f'WRONG: {why}' if why else 'same files'}", flush=True)
    print(f"\n{kills_table('cook', args.trials, kills, args.trials - wrong, None)}")
    sys.exit(1 if wrong or not kills else 0)


if __name__ == "__main__":
    record_output(main)
