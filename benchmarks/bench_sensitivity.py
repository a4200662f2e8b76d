"""Time ``quantkit sensitivity`` beside one ``quantize`` and ``kld`` per pair of a group and a type, in turns.

    python benchmarks/bench_sensitivity.py MODEL TEXT [--imatrix FILE] [--types A,B] [-c N] [--chunks N] [--pairs N]
        [--full-runs N] [--rounds N] [--threads N]

A few pairs are measured with separate commands: a file with only that group in that type, then its divergence from
existing base logits. In each round half of them run before the run over all pairs, and half after it, so that other
load affects both. Prints seconds per pair, their ratio per round and overall, the largest difference of the two
divergences where a pair ran in full, the error of estimates, and the rank correlation of proxies with the measurements.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from processes import machine
from results import parse_options, record_output

from quantkit.evaluate import SaveLogits, kld, perplexity
from quantkit.quantize import QuantizeOptions, quantize
from quantkit.search.predict import Predictor
from quantkit.sensitivity import Cost, Sensitivity, SensitivityOptions, sensitivity


@dataclass
class SeparateRuns:
    """Pairs that were measured with separate commands: seconds of both steps, and the divergences."""

    both: float = 0.0
    measuring: float = 0.0
    divergences: list[tuple[Cost, float]] = field(default_factory=list)

    @property
    def n(self) -> int:
        return len(self.divergences)


class Bench:
    """A model, its base logits, and a folder of files."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.options = SensitivityOptions(
            types=tuple(args.types.split(",")),
            imatrix=args.imatrix,
            n_ctx=args.n_ctx,
            chunks=args.chunks,
            full_runs=args.full_runs,
            threads=args.threads,
            overwrite=True,
        )
        text = args.text.read_bytes().removesuffix(b"\n")
        saved = SaveLogits(folder / "base", "compact", top_k=1 << 20, residual=0)
        settings = {"n_ctx": args.n_ctx, "chunks": args.chunks, "threads": args.threads}
        perplexity(args.model, text, **settings, save_logits=saved)

    def measure_all_pairs(self) -> tuple[Sensitivity, float]:
        """Return the result of a run over all pairs, and its seconds per pair."""
        began = time.perf_counter()
        result = sensitivity(self.args.model, self.folder / "S.json", [self.args.text], options=self.options)
        return result, (time.perf_counter() - began) / len(result.costs)

    def measure_separately(self, result: Sensitivity, costs: Sequence[Cost], totals: SeparateRuns) -> None:
        """Quantize each group separately, and measure the file."""
        for cost in costs:
            group = next(g for g in result.groups if g.name == cost.group)
            rules = tuple(f"^{name.replace('.', '[.]')}$={cost.type}" for name in group.tensors)
            out, options = self.folder / "q.gguf", QuantizeOptions(imatrix=self.args.imatrix, tensor_type=rules)
            began = time.perf_counter()
            quantize(self.args.model, out, "COPY", options, overwrite=True, threads=self.args.threads)
            quantized = time.perf_counter()
            divergence = kld(out, self.folder / "base", threads=self.args.threads).sums.kld.mean.value
            end = time.perf_counter()
            totals.both += end - began
            totals.measuring += end - quantized
            totals.divergences.append((cost, divergence))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--types", default="Q2_K,Q4_K,Q6_K")
    parser.add_argument("-c", dest="n_ctx", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=8, help="pairs measured with separate commands in a round")
    parser.add_argument("--full-runs", type=int, metavar="N", help="types of a group that run to the end of the model")
    parser.add_argument("--rounds", type=int, default=1, metavar="N")
    parser.add_argument("--threads", type=int)
    args = parse_options(parser)
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        bench.options = replace(bench.options, chunks=min(args.chunks, 4096 // args.n_ctx), together=False)
        result, _ = bench.measure_all_pairs()  # kernels are compiled, files are read
        bench.options = replace(bench.options, chunks=args.chunks, together=True)
        step = max(1, len(result.costs) // (args.pairs * args.rounds))
        costs = result.costs[step // 2 :: step][: args.pairs * args.rounds]
        bench.measure_separately(result, costs[:1], SeparateRuns())
        totals, seconds_per_pair = SeparateRuns(), []
        for number in range(args.rounds):
            before, now = totals.measuring, costs[number :: args.rounds]
            bench.measure_separately(result, now[: len(now) // 2], totals)
            result, seconds = bench.measure_all_pairs()
            seconds_per_pair.append(seconds)
            bench.measure_separately(result, now[len(now) // 2 :], totals)
            long = (totals.measuring - before) / len(now)
            print(f"round {number + 1}: {seconds:.3f} and {long:.3f} s a pair, {long / seconds:.2f}x", flush=True)
    _report(result, sum(seconds_per_pair) / len(seconds_per_pair), totals)


def _report(result: Sensitivity, seconds_per_pair: float, separate_runs: SeparateRuns) -> None:
    full = {(c.group, c.type): c.kld for c in result.costs if c.kld is not None}
    print(
        f"sensitivity: {len(result.costs)} pairs, {len(full)} in full, {seconds_per_pair:.3f} s a pair, "
        f"{seconds_per_pair * len(result.costs):.1f} s in all"
    )
    for label, seconds in (("kld alone", separate_runs.measuring), ("quantize and kld", separate_runs.both)):
        print(
            f"{label}: {seconds / separate_runs.n:.3f} s per pair, {seconds / separate_runs.n / seconds_per_pair:.2f}x"
        )
    differences = [
        abs(divergence - full[c.group, c.type])
        for c, divergence in separate_runs.divergences
        if (c.group, c.type) in full
    ]
    print(f"divergences of {len(differences)} pairs in full differ by {max(differences, default=math.nan):.2e} at most")
    guesses, off = Predictor(result), []
    for cost, divergence in separate_runs.divergences:
        guess = guesses.kld(cost.group, cost.type)
        if (cost.group, cost.type) not in full and guess and divergence > 0:
            off.append(math.log(guess / divergence))
    if off:
        root = math.sqrt(math.fsum(x * x for x in off) / len(off))
        print(f"{len(off)} guesses are off by a factor of {math.exp(root):.2f}, in the root mean square of logarithms")
    for name, value in result.settings["rank_correlation"].items():
        print(f"{name}: rank correlation {value:.3f}")


if __name__ == "__main__":
    record_output(main)
