"""Measure `quantkit quantize --ray` against the same on threads, in one run on the same CPUs.

    benchmarks/bench_ray.py                     a model of 3 GB, to Q4_K_M and IQ3_S

A cluster runs on this machine (local_cluster.py): first one node with all CPUs, then a node for every CPU. Commands are
processes, from start to exit, in turns; the median counts. All run once before, so that the input is in the page cache
and kernels are compiled. The outputs must be one file, byte for byte; both are flushed to the disk. What a cluster
costs once is told from what it costs by the byte: the seconds that are the same for every type are start-up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from local_cluster import LocalCluster
from processes import machine, make_moe, quantkit, run, sha256, work_folder

from quantkit.helpers import format_size


def measured(options: argparse.Namespace, model: Path, to: str, ways: dict[str, list[str]]) -> dict[str, list[float]]:
    """Return the seconds of each way; exits if their outputs differ."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    sums: dict[str, str] = {}
    for turn in range(options.rounds + 1):
        for name, extra in ways.items():
            output = options.folder / "out.gguf"
            os.sync()  # dirty pages of the program before do not count
            outcome = run(quantkit("quantize", "--json", "--overwrite", *extra, model, output, to)).checked(name)
            if turn:
                seconds[name].append(outcome.seconds)
            else:
                sums[name] = sha256(output)
            output.unlink()
    if len(set(sums.values())) != 1:
        sys.exit(f"outputs differ: {sums}")
    return seconds


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--size", default="3G", help="size of the generated model (default: 3G)")
    p.add_argument("--model", type=Path, metavar="GGUF", help="use this model instead of generating one")
    p.add_argument("--to", nargs="+", default=["Q4_K_M", "IQ3_S"], metavar="TYPE", help="default: Q4_K_M IQ3_S")
    p.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the large files (default: a temporary one)")
    options = p.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    print(machine())
    with work_folder(options.work) as folder:
        options.folder = folder
        model = options.model or make_moe(folder / "model.gguf", "--size", options.size)
        print(f"{model.name}: {format_size(model.stat().st_size)}", flush=True)
        print("| type | nodes | threads, s | Ray, s | / threads | more, s |\n|---|---|---|---|---|---|", flush=True)
        for layout in ([cpus], [[cpu] for cpu in cpus]):
            with LocalCluster(folder, layout) as cluster:
                ways = {"threads": ["--threads", str(len(cpus))], "Ray": ["--ray", cluster.address]}
                for to in options.to:
                    found = {name: statistics.median(s) for name, s in measured(options, model, to, ways).items()}
                    ours, theirs = found["Ray"], found["threads"]
                    print(
                        f"| {to} | {len(layout)} | {theirs:.2f} | {ours:.2f} | {ours / theirs:.2f} | "
                        f"{ours - theirs:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
