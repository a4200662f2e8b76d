"""Measure `quantkit score` beside llama-perplexity on the same files of tasks, as whole processes in turns.

    benchmarks/bench_score.py MODEL.gguf ...

The tasks are those of tests/lib/task_files.py. "equal answers" counts the tasks that both answer correctly or both
wrongly; quantized weights round activations, in each program in another order.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from processes import llama_bin, machine, quantkit, run, work_folder
from results import parse_options, print_table, record_output

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/lib"))
import task_files  # noqa: E402

FILES = {
    "hellaswag": task_files.hellaswag,
    "winogrande": task_files.winogrande,
    "multiple-choice": task_files.multiple_choice,
}


def peer_answers(text: str) -> list[bool]:
    """Return whether each answer of llama-perplexity is correct, from its running accuracies."""
    shares = [float(line.split()[1].rstrip("%")) for line in text.splitlines() if re.match(r"\d+\t", line)]
    sums = [round(share * (i + 1) / 100) for i, share in enumerate(shares)]
    return [bool(b - a) for a, b in zip([0, *sums], sums, strict=False)]


COLUMNS = (
    *("model", "tasks", "quantkit, %", "llama-perplexity, %", "equal answers"),
    *("quantkit, s", "llama-perplexity, s", "ratio"),
)


def measure(model: Path, kind: str, options: argparse.Namespace, programs: Path, folder: Path) -> tuple[str, ...]:
    """Return the row of a model and a kind of tasks; ``programs``: the folder of llama.cpp's."""
    # llama-perplexity drops a newline at the end, and with it the last task of WinoGrande.
    file, result = folder / f"{kind}.tasks", folder / "scores.json"
    file.write_bytes(FILES[kind](options.tasks) + b"\n" * (kind == "winogrande"))
    common: list[str | Path] = ["-m", model, "-bf", file, f"--{kind}", f"--{kind}-tasks", f"{options.tasks}"]
    commands: tuple[Sequence[str | Path], ...] = (
        quantkit("score", *common, "--json", result, "--overwrite"),
        [programs / "llama-perplexity", *common, "-np", "8"],
    )
    seconds: tuple[list[float], list[float]] = ([], [])
    answers: list[bool] = []
    for turn in range(options.rounds + 1):
        for program, command in enumerate(commands):
            outcome = run(command).checked(kind)
            if turn:  # the first round warms up
                seconds[program].append(outcome.seconds)
            if program:
                answers = peer_answers(outcome.stdout)
    correct = json.loads(result.read_text())["models"][0]["metrics"]["acc_norm"]["correct"]
    time, peer_time = (statistics.median(times) for times in seconds)
    shares = (f"{100 * sum(x) / len(x):.2f}" for x in (correct, answers))
    equal = sum(x == y for x, y in zip(correct, answers, strict=True))
    times = (f"{time:.2f}", f"{peer_time:.2f}", f"{peer_time / time:.2f}x")
    return (model.name, kind, *shares, f"{equal} of {len(answers)}", *times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--tasks", type=int, default=200, help="tasks of each kind (default: 200)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parse_options(parser)
    bin_folder = llama_bin()
    if bin_folder is None:
        sys.exit("llama.cpp's programs are needed: run scripts/peers")
    os.environ["LD_LIBRARY_PATH"] = str(bin_folder)
    print(f"{options.tasks} tasks, median of {options.rounds}; {machine()}\n")
    with work_folder(None) as folder:
        print_table(
            COLUMNS,
            (measure(model, kind, options, bin_folder, folder) for model in options.models for kind in FILES),
        )


if __name__ == "__main__":
    record_output(main)
