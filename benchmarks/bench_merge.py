"""Measure merge-up-gate on a large model against `cp --reflink=never` of the same file, in turns, as whole processes.

    benchmarks/bench_merge.py

The input is in the page cache. quantkit flushes its output to disk before renaming it, so cp is shown alone and
followed by a sync of its output.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

from processes import machine, make_moe, quantkit, run, work_folder
from results import parse_options, record_output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="3.1G", help="size of the generated model (default: 3.1G)")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="use this model instead of generating one")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="folder of large files (default: a temporary one)")
    options = parse_options(parser)
    with work_folder(options.work) as folder:
        model = options.model or make_moe(folder / "model.gguf", "--size", options.size)
        out = folder / "out.gguf"
        commands = {
            "cp": ["cp", "--reflink=never", str(model), str(out)],
            "cp and sync": ["sh", "-c", f'cp --reflink=never "{model}" "{out}" && sync "{out}"'],
            "merge-up-gate": quantkit("merge-up-gate", "--overwrite", model, out),
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        rss = dict.fromkeys(commands, 0)
        for turn in range(options.rounds + 1):
            order = list(commands)
            # Rotated, because each program leaves the disk in a state that affects the next.
            for name in order[turn % 3 :] + order[: turn % 3]:
                command = commands[name]
                out.unlink(missing_ok=True)
                os.sync()  # dirty pages of the previous program do not count for this one
                outcome = run(command).checked(name)
                if turn:  # the first round warms up
                    seconds[name].append(outcome.seconds)
                    rss[name] = max(rss[name], outcome.peak_rss)
        print(f"{model.stat().st_size / 2**30:.2f} GiB, median of {options.rounds}; {machine()}\n")
        print("| program | wall time | all runs | peak RSS | / cp |\n|---|---|---|---|---|")
        base = statistics.median(seconds["cp"])
        for name, runs in seconds.items():
            median, times = statistics.median(runs), ", ".join(f"{s:.2f}" for s in runs)
            print(f"| {name} | {median:.2f} s | {times} | {rss[name] / 2**20:.0f} MiB | {median / base:.2f}x |")


if __name__ == "__main__":
    record_output(main)
