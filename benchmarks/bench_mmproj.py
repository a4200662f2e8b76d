"""Measure `quantkit convert DIR OUT TYPE --mmproj`, text and encoders in one run, against the text alone.

    benchmarks/bench_mmproj.py --rounds 5

A generated checkpoint (a mixture of experts in BF16 beside a vision encoder of 0.6 GB) is converted in turns: the text
alone, text and encoders, the encoders alone. A warm-up turn brings the input into the page cache and compiles the
kernels. Reading is the time to read as many bytes of the checkpoint as the encoders have, after the turn. The ratio is
that of one run to the text alone plus reading, of each turn; the median is reported.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from processes import Outcome, machine, make_moe, quantkit, run, work_folder
from results import parse_options, record_output

from quantkit.cpus import available_cpus
from quantkit.units import format_size, parse_size

#: Required: the ratio, and the bytes of a process beyond --max-ram.
RATIO, ALLOWANCE = 1.1, 300 * 1000**2
TEXT, BOTH, ENCODERS = "text alone", "text and encoders", "encoders alone"
CHUNK = 1 << 22


def read_seconds(model: Path, nbytes: int) -> float:
    """Return the seconds to read ``nbytes`` of the checkpoint's files."""
    began, buffer = time.perf_counter(), bytearray(CHUNK)
    for path in sorted(model.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while nbytes > 0 and (n := file.readinto(buffer)):
                nbytes -= n
    return time.perf_counter() - began


def commands(options: argparse.Namespace, work: Path, model: Path) -> dict[str, list[str]]:
    """Return the commands of a turn, in order, by name."""
    run_options = ["--pre", "qwen2", "--overwrite", "--max-ram", options.max_ram, "-j", str(options.threads)]
    text, mmproj = work / "text.gguf", work / "mmproj.gguf"
    return {
        TEXT: quantkit("convert", model, text, options.to, *run_options),
        BOTH: quantkit("convert", model, text, options.to, "--mmproj", mmproj, *run_options),
        ENCODERS: quantkit("convert", model, mmproj, "--mmproj-only", *run_options),
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--to", default="Q4_K_M", metavar="TYPE", help="type of the text (default: Q4_K_M)")
    p.add_argument("--size", default="4G", help="minimum size of the text model (default: 4G)")
    p.add_argument("--vision", default="24", metavar="N", help="layers of the vision encoder (default: 24)")
    p.add_argument("--max-ram", default="512M", metavar="SIZE", help="--max-ram of all runs (default: 512M)")
    p.add_argument("--threads", type=int, default=available_cpus(), metavar="N")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the large files (default: a temporary one)")
    return p


def main() -> None:
    options = parse_options(parser())
    outcomes: dict[str, list[Outcome]] = {TEXT: [], BOTH: [], ENCODERS: []}
    readings, ratios = [], []
    with work_folder(options.work) as work:
        shape = ("--size", options.size, "--vision", options.vision)
        model = make_moe(work / "Model", *shape, script="make_moe_checkpoint.py")
        for turn in range(options.rounds + 1):
            outcome = {name: run(argv).checked(name) for name, argv in commands(options, work, model).items()}
            nbytes = (work / "mmproj.gguf").stat().st_size
            reading = read_seconds(model, nbytes)
            if turn:
                for name, result in outcome.items():
                    outcomes[name].append(result)
                readings.append(reading)
                ratios.append(outcome[BOTH].seconds / (outcome[TEXT].seconds + reading))
        total = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    print(f"\n{format_size(total)}, encoders {format_size(nbytes)}, text to {options.to}; {machine()}\n")
    print("| run | wall time | all runs | peak RSS |\n|---|---|---|---|")
    for name, results in outcomes.items():
        seconds, peak = [o.seconds for o in results], max(o.peak_rss for o in results)
        texts = ", ".join(f"{s:.2f}" for s in seconds)
        print(f"| {name} | {statistics.median(seconds):.2f} s | {texts} | {format_size(peak)} |")
    texts = ", ".join(f"{s:.2f}" for s in readings)
    print(f"| reading the encoders' bytes | {statistics.median(readings):.2f} s | {texts} | |")
    ratio, peak = statistics.median(ratios), max(o.peak_rss for o in outcomes[BOTH])
    print("\n| one run / (text alone + reading) | all turns |\n|---|---|")
    print(f"| {ratio:.2f} | {', '.join(f'{r:.2f}' for r in ratios)} |")
    if ratio > RATIO or peak > parse_size(options.max_ram) + ALLOWANCE:
        sys.exit(f"required: at most {RATIO} times the time, and --max-ram + {format_size(ALLOWANCE)}")


if __name__ == "__main__":
    record_output(main)
