"""Measure `quantkit convert --vocab-only` of published vocabularies (tests/lib/real_files.py).

    benchmarks/bench_vocabularies.py [NAME ..] --rounds 5

Runs are processes, timed from start to exit, in turns over the vocabularies; medians are reported. Every output must
have the SHA-256 of the reference's file (tests/data/real-vocabularies.json); `scripts/make_convert_goldens.py
vocabularies` prints the reference's seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from processes import machine, quantkit, run, sha256, work_folder
from results import parse_options, record_output

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/lib")]

import real_files  # noqa: E402

EXPECTED = json.loads((ROOT / "tests/data/real-vocabularies.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="vocabularies; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each  [default: 5]")
    options = parse_options(parser)
    if missing := real_files.missing():
        sys.exit(f"missing: {', '.join(missing)}; run python tests/lib/real_files.py")
    names = options.names or list(real_files.VOCABULARIES)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    print(machine())
    with work_folder(None) as folder:
        sources = {name: real_files.write_vocabulary(name, folder) for name in names}
        for _ in range(options.rounds + 1):  # warms the page cache and compiles
            for name, source in sources.items():
                output = folder / f"{name}.gguf"
                outcome = run(quantkit("convert", source, output, "--vocab-only", "--overwrite")).checked(name)
                seconds[name].append(outcome.seconds)
        different = [name for name in names if sha256(folder / f"{name}.gguf") != EXPECTED[name]["sha256"]]
    print("| vocabulary | median | least | most |\n|---|---|---|---|")
    for name, runs in seconds.items():
        results = runs[1:]
        print(f"| {name} | {statistics.median(results):.2f} s | {min(results):.2f} s | {max(results):.2f} s |")
    if different:
        sys.exit(f"not the reference's bytes: {', '.join(different)}")


if __name__ == "__main__":
    record_output(main)
