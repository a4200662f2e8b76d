"""Measure `quantkit quantize --ray` against threads on the same CPUs, and the cost model in docs/explanation/cluster.md
against both.

    benchmarks/bench_ray.py                     a model of 3 GB, to Q4_K_M, IQ4_XS and IQ3_S

A cluster runs on this machine (local_cluster.py): first one node with all CPUs, on which the driver is the only worker;
then a node for every CPU beside the driver. The cluster is started before the clock, but each command starts its own
workers. Commands run as processes, timed from start to exit, in turns; medians are reported. A warm-up turn brings the
input into the page cache and compiles kernels. The outputs must be identical, byte for byte; both are flushed to disk.
CPU seconds, which other programs affect less, are those of the command and, with Ray, of its workers and of Ray's own
processes during the run.

Then the cost model: the start-up S is the time for a model of 100 MB with Ray and on threads, because its own work is
small; the work W of a type is the time on threads, without their start-up. From these two, and the constants in
docs/explanation/cluster.md, the wall time with Ray is predict.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from local_cluster import LocalCluster
from processes import machine, make_moe, quantkit, run, sha256, work_folder
from results import parse_options, record_output

from quantkit.units import format_size

#: docs/explanation/cluster.md: seconds per batch, those of the driver and Ray per batch, of a flush and of a job.
BATCH, BETWEEN, FLUSH, DRIVER_BATCH, DRIVER_JOB = 3.0, 0.004, 0.015, 0.0014, 20e-6
#: Values of a job, and bytes of a value of the generated model.
JOB, VALUE = 1 << 20, 2


@dataclass(frozen=True)
class Measurement:
    """Medians of wall time and CPU time, in seconds."""

    wall: float
    cpu: float


def measure(
    options: argparse.Namespace, cluster: LocalCluster, model: Path, type_name: str, executors: Mapping[str, list[str]]
) -> dict[str, Measurement]:
    """Return the seconds of each executor; exits if their outputs differ."""
    results: dict[str, list[Measurement]] = {name: [] for name in executors}
    sums: dict[str, str] = {}
    for turn in range(options.rounds + 1):
        for name, extra in executors.items():
            output = options.folder / "out.gguf"
            os.sync()  # dirty pages of the previous program do not count
            before = cluster.cpu_seconds()
            outcome = run(quantkit("quantize", "--json", "--overwrite", *extra, model, output, type_name)).checked(name)
            cluster_seconds = cluster.cpu_seconds() - before if "--ray" in extra else 0.0
            if turn:
                results[name].append(Measurement(outcome.seconds, outcome.cpu_seconds + cluster_seconds))
            else:
                sums[name] = sha256(output)
            output.unlink()
    if len(set(sums.values())) != 1:
        sys.exit(f"outputs differ: {sums}")
    return {
        name: Measurement(
            statistics.median(m.wall for m in measurements), statistics.median(m.cpu for m in measurements)
        )
        for name, measurements in results.items()
    }


def predict(nbytes: int, threads: float, start: Mapping[str, float], *, batches: bool) -> float:
    """Return T = S + max(W / (n c e), driver) + E.

    ``start``: S + E, with Ray and on threads. The time on threads includes reading and writing. The driver's own node
    has no ``batches``.
    """
    work, jobs = max(0.0, threads - start["threads"]), nbytes / VALUE / JOB
    share = BATCH / (BATCH + BETWEEN + FLUSH) if batches else 1.0
    driver = jobs * DRIVER_JOB + work / BATCH * DRIVER_BATCH * batches
    return start["Ray"] + max(work / share, driver)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--size", default="3G", help="size of the generated model (default: 3G)")
    p.add_argument("--model", type=Path, metavar="GGUF", help="use this model instead of generating one")
    p.add_argument("--to", nargs="+", default=["Q4_K_M", "IQ4_XS", "IQ3_S"], metavar="TYPE")
    p.add_argument("--one-node", action="store_true", help="skip the cluster with a node for every CPU")
    p.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the large files (default: a temporary one)")
    options = parse_options(p)
    cpus = sorted(os.sched_getaffinity(0))
    print(machine())
    with work_folder(options.work) as folder:
        options.folder = folder
        small = make_moe(folder / "small.gguf", "--size", "100M", "--experts", "4")
        model = options.model or make_moe(folder / "model.gguf", "--size", options.size)
        nbytes = model.stat().st_size
        print(f"{model.name}: {format_size(nbytes)}; the cluster runs already, workers start with each command\n")
        print("| type | nodes | threads, s | Ray, s | / threads | CPU, s | Ray: CPU, s | predict, s | off by |")
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        starts = []
        for layout in [[]] if options.one_node else [[], [[cpu] for cpu in cpus]]:
            with LocalCluster(folder, layout, head=[] if layout else cpus) as cluster:
                executors = {"threads": ["--threads", str(len(cpus))], "Ray": ["--ray", cluster.address]}
                start = {name: m.wall for name, m in measure(options, cluster, small, "Q4_0", executors).items()}
                nodes = len(layout) or 1
                starts.append(f"{nodes} node{'s' * (nodes > 1)}: {start['Ray']:.2f} s")
                for type_name in options.to:
                    results = measure(options, cluster, model, type_name, executors)
                    ray, local = results["Ray"], results["threads"]
                    guess = predict(nbytes, local.wall, start, batches=bool(layout))
                    print(
                        f"| {type_name} | {nodes} | {local.wall:.2f} | {ray.wall:.2f} | {ray.wall / local.wall:.2f} "
                        f"| {local.cpu:.1f} | {ray.cpu:.1f} | {guess:.2f} | {100 * (guess / ray.wall - 1):+.0f} % |",
                        flush=True,
                    )
        print(f"\na model of 100 MB: {start['threads']:.2f} s on threads; with Ray on {', on '.join(starts)}")


if __name__ == "__main__":
    record_output(main)
