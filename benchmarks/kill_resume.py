"""Kill a quantization at random moments, resume it, and compare: every output must be the same file.

    benchmarks/kill_resume.py --trials 100
    benchmarks/kill_resume.py --trials 50 --convert     the conversion of a checkpoint, quantized in the same pass
    benchmarks/kill_resume.py --trials 30 --mmproj      the same of a checkpoint with a vision encoder, to two files
    benchmarks/kill_resume.py --trials 50 --export      the export of a model as a checkpoint of several files
    benchmarks/kill_resume.py --trials 50 --model M.gguf --calibrate TEXT       layer by layer; with --no-balance, too

A model of 1.1 GB is generated and quantized once without interruption (the reference), then TRIALS times: the run is
killed with SIGKILL after a random part of the reference's time, sometimes killed again while resuming, and then resumed
to its end. A trial fails if a run does not end, its SHA-256 differs, or files are left behind; for an export also if a
killed run has left an incomplete file under a final name, or config.json without all weights. A run that ends before
its kill is repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from processes import Outcome, machine, make_moe, quantkit, run, sha256, work_folder
from results import kills_table, parse_options, record_output

#: Most kills of one trial, including those of resumes.
MAX_KILLS = 3


@dataclass(frozen=True)
class Case:
    """A command to kill, and its expected result."""

    command: Sequence[str]
    output: Path
    sha256: str
    tensors: int
    #: Seconds of an uninterrupted run.
    seconds: float

    @property
    def complete(self) -> bool:
        """Return whether the run is complete: the output has its name, and the journal is removed."""
        return self.output.exists() and not self.output.with_name(self.output.name + ".journal").exists()

    def leftovers(self) -> list[str]:
        """Return the names of the files that belong to this output, other than itself."""
        return [p.name for p in self.output.parent.glob(self.output.name + ".*")]

    def clear(self) -> None:
        """Remove the output and the files that belong to it."""
        for path in self.output.parent.glob(self.output.name + "*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def result(self) -> str:
        """Return the SHA-256 of the output."""
        return sha256(self.output)

    def damage(self) -> str:
        """Return the problems of a killed run's files; a single file has its name only when it is complete."""
        return ""


@dataclass(frozen=True)
class Folder(Case):
    """An export: the output is a directory; ``files`` has the SHA-256 of each expected file."""

    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return hashes(self.output).keys() == self.files.keys()

    def leftovers(self) -> list[str]:
        return sorted(hashes(self.output).keys() - self.files.keys())

    def clear(self) -> None:
        shutil.rmtree(self.output, ignore_errors=True)

    def result(self) -> str:
        return folder_digest(self.output)

    def damage(self) -> str:
        """Return the file that is incomplete, or that weights are missing beside config.json."""
        digests = hashes(self.output)
        wrong = [name for name, digest in self.files.items() if digests.get(name, digest) != digest]
        weights = [name for name in self.files if name.endswith(".safetensors")]
        if "config.json" in digests and any(name not in digests for name in weights):
            wrong.append("config.json without all weights")
        return f"under a final name: {', '.join(wrong)}" if wrong else ""


@dataclass(frozen=True)
class Pair(Case):
    """A conversion to a text model, ``output``, and its mmproj, ``second``."""

    second: Path = Path()
    second_sha256: str = ""

    @property
    def parts(self) -> tuple[tuple[Case, str], ...]:
        """The two files as cases of their own, and their names."""
        second = Case(self.command, self.second, self.second_sha256, 0, self.seconds)
        return ((Case(self.command, self.output, self.sha256, 0, self.seconds), "text"), (second, "mmproj"))

    @property
    def complete(self) -> bool:
        return all(part.complete for part, _ in self.parts)

    def leftovers(self) -> list[str]:
        return [name for part, _ in self.parts for name in part.leftovers()]

    def clear(self) -> None:
        for part, _ in self.parts:
            part.clear()

    def result(self) -> str:
        """Return the SHA-256 of the text model, or which of the two files differs."""
        wrong = [name for part, name in self.parts if part.result() != part.sha256]
        return f"of other {' and '.join(wrong)}" if wrong else self.sha256


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a directory."""
    return {str(path.relative_to(folder)): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def folder_digest(folder: Path) -> str:
    """Return one SHA-256 over the names and bytes of all files."""
    return hashlib.sha256(json.dumps(hashes(folder), sort_keys=True).encode()).hexdigest()


@dataclass
class Trial:
    """One run with its kills and its resume."""

    delays: list[float]
    reused: int = 0
    wrong: str = ""


def kill_after(delay: float) -> Callable[[subprocess.Popen[bytes]], None]:
    """Return a watcher that kills the process after ``delay`` seconds."""

    def watch(process: subprocess.Popen[bytes]) -> None:
        time.sleep(delay)
        # Not process.kill(), which reaps an ended process and so hides its usage from run().
        os.kill(process.pid, signal.SIGKILL)

    return watch


def trial(case: Case, rng: random.Random, resume_share: float) -> Trial:
    """Kill, resume, compare."""
    result = Trial([])
    arguments: list[str] = []
    case.clear()
    while not result.delays or (len(result.delays) < MAX_KILLS and not case.complete and rng.random() < resume_share):
        delay = rng.uniform(0, case.seconds)
        outcome = run([*case.command, *arguments], watch=kill_after(delay))
        if outcome.returncode == 0:
            if result.delays:
                check(case, result, outcome)
                return result
            case.clear()
            continue
        if outcome.returncode != -9:
            result.wrong = f"ended with {outcome.returncode} before its kill: {outcome.stderr.strip()[-500:]}"
            return result
        result.delays.append(delay)
        if wrong := case.damage():
            result.wrong = wrong
            return result
        arguments = ["--resume"]
    check(case, result, None if case.complete else run([*case.command, "--resume"]))
    return result


def check(case: Case, result: Trial, resume: Outcome | None) -> None:
    """Compare the result of the last resume with the expected one."""
    if resume is not None and resume.returncode != 0:
        result.wrong = f"the resume ended with {resume.returncode}: {resume.stderr.strip()[-500:]}"
        return
    result.reused = case.tensors if resume is None else json.loads(resume.stdout)["resumed_tensors"]
    text = case.result()
    if text != case.sha256:
        result.wrong = f"SHA-256 {text}, not {case.sha256}"
    elif case.leftovers():
        result.wrong = f"left behind: {', '.join(case.leftovers())}"


def reference(model: Path, output: Path, options: argparse.Namespace) -> Case:
    """Run once without interruption, after a run that compiles the kernels."""
    extra = ["--threads", str(options.threads)] if options.threads else []
    verb = ("convert", "--pre", "qwen2") if options.convert or options.mmproj else ("quantize",)
    second = output.with_name("mmproj.gguf")
    extra += ["--mmproj", str(second)] if options.mmproj else []
    extra += ["--calibrate", str(options.calibrate), "--calibrate-chunks", "40"] if options.calibrate else []
    extra += ["--no-balance"] if options.no_balance else []
    command = quantkit(*verb, "--json", *extra, model, output, options.to)
    if options.export:
        command = quantkit("export", "--json", "--max-shard-size", "100M", *extra, model, output)
    run([*command, "--overwrite"]).checked("the first run")
    outcome = run([*command, "--overwrite"]).checked("the reference run")
    tensors = len(json.loads(outcome.stdout)["tensors"])
    if options.export:
        return Folder(command, output, folder_digest(output), tensors, outcome.seconds, hashes(output))
    if options.mmproj:
        return Pair(command, output, sha256(output), tensors, outcome.seconds, second, sha256(second))
    return Case(command, output, sha256(output), tensors, outcome.seconds)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trials", type=int, default=100)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--size", default="1.1G", help="size of the generated model (default: 1.1G)")
    p.add_argument("--convert", action="store_true", help="convert a checkpoint, instead of quantizing a GGUF file")
    p.add_argument("--mmproj", action="store_true", help="convert a checkpoint with a vision encoder, to two files")
    p.add_argument("--export", action="store_true", help="export a GGUF file as a checkpoint")
    p.add_argument("--calibrate", type=Path, metavar="TEXT", help="with error feedback, calibrated on 40 chunks of it")
    p.add_argument("--no-balance", action="store_true", help="with --calibrate: columns are not balanced first")
    p.add_argument("--model", type=Path, metavar="GGUF", help="use this model instead of generating one")
    p.add_argument("--to", default="Q4_K_M", metavar="TYPE", help="default: Q4_K_M")
    p.add_argument("--again", type=float, default=0.3, metavar="P", help="probability of killing a resume (0.3)")
    p.add_argument("--threads", type=int)
    p.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the large files (default: a temporary one)")
    return p


def main() -> None:
    options = parse_options(parser())
    rng = random.Random(options.seed)
    with work_folder(options.work) as folder:
        # 16 experts, for many tensors of moderate size that a resume may find done or not.
        shape = ["--size", options.size, "--experts", "16"]
        convert = options.convert or options.mmproj
        shape += ["--vision", "12"] if options.mmproj else []
        make = partial(make_moe, script="make_moe_checkpoint.py") if convert else make_moe
        model = options.model or make(folder / ("Model" if convert else "model.gguf"), *shape)
        case = reference(model, folder / ("killed" if options.export else "killed.gguf"), options)
        print(
            f"{machine()}\nreference: {case.seconds:.2f} s, {case.tensors} tensors, SHA-256 {case.sha256}", flush=True
        )
        trials = []
        for number in range(1, options.trials + 1):
            result = trial(case, rng, options.again)
            trials.append(result)
            delays = ", ".join(f"{delay:.2f} s" for delay in result.delays)
            verdict = f"WRONG: {result.wrong}" if result.wrong else "same bytes"
            print(
                f"{number:4d}  killed after {delays}; reused {result.reused}/{case.tensors} tensors; {verdict}",
                flush=True,
            )
        case.clear()
    wrong = sum(bool(t.wrong) for t in trials)
    kills = sum(len(t.delays) for t in trials)
    reused = sum(t.reused for t in trials) / max(1, len(trials) * case.tensors)
    name = (
        "convert --mmproj"
        if options.mmproj
        else "convert"
        if options.convert
        else "export"
        if options.export
        else "quantize"
    )
    name += " --calibrate" if options.calibrate else ""
    print(f"\n{kills_table(name, len(trials), kills, len(trials) - wrong, reused)}")
    sys.exit(1 if wrong or not trials else 0)


if __name__ == "__main__":
    record_output(main)
