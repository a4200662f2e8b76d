"""Kill workers, nodes and drivers of a Ray cluster at random moments: every output must be the same file.

    benchmarks/kill_ray.py --trials 50

Like kill_resume.py, on a cluster of two nodes on this machine (local_cluster.py) and a head, whose share the driver
computes itself. A trial kills a worker process, a node with all of its processes, which is restarted a little later, or
the driver; in the first two cases the run must end by itself with the right file. A killed driver is resumed, on the
cluster or, as often, by threads. Only kills during a run count: a trial whose program had ended, or that found no
worker, is repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kill_resume import Case, Trial, check, kill_after
from local_cluster import LocalCluster
from processes import machine, make_moe, quantkit, run, sha256, work_folder
from results import kills_table, parse_options, record_output

KINDS = ("worker", "node", "driver")


@dataclass(frozen=True)
class KillResult:
    """The result of a trial, and the kind of process that was killed."""

    kind: str
    trial: Trial
    #: Whether the run was still in progress.
    hit: bool


def trial(case: Case, cluster: LocalCluster, kind: str, rng: random.Random, threads: list[str]) -> KillResult:
    """Kill, resume if necessary, compare."""
    result, hit = Trial([rng.uniform(0, case.seconds)]), [False]
    case.clear()

    def watch(process: subprocess.Popen[bytes]) -> None:
        """Kill a worker, or a node, after some time; if no worker is busy, the next that is."""
        time.sleep(result.delays[0])
        if kind == "node":
            hit[0] = _is_alive(process.pid)
            number = cluster.kill_node(rng)
            time.sleep(rng.uniform(0, 3))
            cluster.restart(number)
        while kind == "worker" and _is_alive(process.pid) and not hit[0]:
            hit[0] = cluster.kill_worker(rng)
            time.sleep(0.02)

    outcome = run(case.command, watch=kill_after(result.delays[0]) if kind == "driver" else watch)
    if kind == "driver" and outcome.returncode == -9:
        hit[0] = True
        command = [*case.command, "--resume"] if rng.random() < 0.5 else [*threads, "--resume"]
        check(case, result, None if case.complete else run(command))
    else:
        check(case, result, outcome)
    if kind == "node":
        cluster.wait(len(cluster.cpus))
    return KillResult(kind, result, hit[0])


def _is_alive(pid: int) -> bool:
    """Return whether a process runs; it is not reaped, so that its usage can be read."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trials", type=int, default=50)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--size", default="500M", help="size of the generated model (default: 500M)")
    p.add_argument("--to", default="IQ3_S", metavar="TYPE", help="one that takes long (default: IQ3_S)")
    p.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the large files (default: a temporary one)")
    options = parse_options(p)
    rng = random.Random(options.seed)
    cpus = sorted(os.sched_getaffinity(0))
    halves = [cpus[: max(1, len(cpus) // 2)], cpus[len(cpus) // 2 :]]
    with work_folder(options.work) as folder, LocalCluster(folder, halves, head=halves[0]) as cluster:
        model = make_moe(folder / "model.gguf", "--size", options.size, "--experts", "16")
        output = folder / "killed.gguf"
        threads = quantkit("quantize", "--json", model, output, options.to)
        command = quantkit("quantize", "--json", "--ray", cluster.address, model, output, options.to)
        run([*threads, "--overwrite"]).checked("the reference")
        expected = sha256(output)
        run([*command, "--overwrite"]).checked("the first run on the cluster")
        outcome = run([*command, "--overwrite"]).checked("the second run on the cluster")
        tensors = len(json.loads(outcome.stdout)["tensors"])
        case = Case(command, output, expected, tensors, outcome.seconds)
        is_same = sha256(output) == expected
        print(f"{machine()}\nreference: {outcome.seconds:.2f} s on {len(halves)} nodes and the driver, ", end="")
        print(f"{tensors} tensors, ", end="")
        print("the bytes of threads" if is_same else "OTHER BYTES than threads", flush=True)
        killed: list[KillResult] = []
        missed = 0
        while len(killed) < options.trials:
            number = len(killed) + 1
            one = trial(case, cluster, KINDS[number % len(KINDS)], rng, threads)
            if not one.hit and not one.trial.wrong:
                missed += 1
                continue
            killed.append(one)
            verdict = f"WRONG: {one.trial.wrong}" if one.trial.wrong else "same bytes"
            print(
                f"{number:4d}  {one.kind} killed after {one.trial.delays[0]:.2f} s; reused {one.trial.reused}/{tensors}"
                f" tensors; {verdict}",
                flush=True,
            )
        case.clear()
    wrong = sum(bool(record.trial.wrong) for record in killed)
    kinds = ", ".join(f"{n} {kind}s" for kind, n in Counter(record.kind for record in killed).items())
    reused = [record.trial.reused / tensors for record in killed if record.kind == "driver"]
    print(f"killed: {kinds}; {missed} kills missed a run: not counted")
    share = sum(reused) / len(reused) if reused else None
    print(f"\n{kills_table('quantize --ray', len(killed), len(killed), len(killed) - wrong, share)}")
    sys.exit(1 if wrong or not is_same else 0)


if __name__ == "__main__":
    record_output(main)
