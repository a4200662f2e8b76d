"""Measure the peak memory of `quantkit quantize` against its --max-ram, on a model with tensors of 1 GB.

    benchmarks/peak_rss.py

The bound: peak RSS <= --max-ram + 300 MB (Python, numba and the compiled kernels), for every --max-ram and number of
threads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from processes import machine, make_moe, quantkit, run, work_folder
from results import parse_options, record_output

from quantkit.cpus import available_cpus
from quantkit.units import format_size, parse_size

#: Bytes that a process may use beyond --max-ram.
ALLOWANCE = 300 * 1000**2


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--max-ram", nargs="+", default=["64MiB", "512MiB", "2GiB"], metavar="SIZE")
    p.add_argument("--threads", nargs="+", type=int, default=sorted({1, available_cpus()}), metavar="N")
    p.add_argument("--to", default="Q4_K_M", metavar="TYPE", help="default: Q4_K_M")
    p.add_argument("--model", type=Path, metavar="GGUF", help="use this model instead of generating one")
    p.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the large files (default: a temporary one)")
    return p


def main() -> None:
    options = parse_options(parser())
    too_much = 0
    with work_folder(options.work) as folder:
        # 256 experts of 1024 x 2048 in F16: an expert tensor has 1.07 GB.
        shape = ("--layers", "1", "--experts", "256", "--ff", "1024")
        model = options.model or make_moe(folder / "model.gguf", *shape)
        print(f"{machine()}\n\n| --max-ram | threads | peak RSS | beyond --max-ram | seconds |\n|---|---|---|---|---|")
        for text in options.max_ram:
            for threads in options.threads:
                command = quantkit("quantize", "--overwrite", "--max-ram", text, "--threads", str(threads))
                outcome = run([*command, model, folder / "out.gguf", options.to]).checked("quantize")
                beyond = outcome.peak_rss - parse_size(text)
                too_much += beyond > ALLOWANCE
                cells = (text, threads, format_size(outcome.peak_rss), format_size(beyond), f"{outcome.seconds:.1f}")
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if too_much:
        sys.exit(f"{too_much} runs took more than --max-ram + {format_size(ALLOWANCE)}")


if __name__ == "__main__":
    record_output(main)
