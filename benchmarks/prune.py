"""Compare fewer experts with fewer bits: divergence from the full-precision model at the pruned_rules bytes.

    benchmarks/prune.py MODEL.gguf CALIBRATION EVALUATION [--keep 75%] [--type Q4_K] [--lower IQ3_S,IQ3_XXS]
        [--by reap,frequency] [--seeds 2] [--chunks N] [--evaluation-chunks N] [--threads N] [--calibrate]
        [--work FOLDER]

The model without a quarter of its experts, by REAP, by frequency and at random, with experts of --type; and with all
experts in the types --lower: all tensors of experts have the first one, and as many as needed the second, for a file
that is not larger. All other tensors have the same types. Every file has an importance matrix of the model that it is
quantized from; with --calibrate, error feedback instead. The mean KL divergence on a held-out text is printed with its
standard error; ratios are to all experts, token by token, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
from feedback_kld import Measurement, ratio
from processes import machine, work_folder
from results import parse_options, record_output

import quantkit
from quantkit.evaluate.sinks import SaveLogits
from quantkit.formats.gguf import open_model
from quantkit.imatrix import ImatrixOptions, imatrix
from quantkit.prune import Criterion, plan_prune_experts, prune_experts
from quantkit.quantize import QuantizeOptions, plan_quantize, run_quantize


class Files:
    """Models with all and with fewer experts, and their quantized files, in a folder."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.out = args, folder, folder / "out.gguf"
        text, settings = args.evaluation.read_bytes(), {"n_ctx": args.ctx, "chunks": args.evaluation_chunks}
        if not (folder / "base").exists():
            base = SaveLogits(folder / "base")
            quantkit.perplexity(args.model, text, **settings, save_logits=base, threads=args.threads)
        self.collect(args.model, folder / "all.imatrix")

    def collect(self, model: Path, path: Path) -> Path:
        """Collect an importance matrix with saliency."""
        options = ImatrixOptions(n_ctx=self.args.ctx, chunks=self.args.chunks, ppl=False, saliency=True, resume=True)
        imatrix(model, [self.args.calibration], path, options=options, threads=self.args.threads)
        return path

    def prune(self, criterion: str, seed: int = 0) -> Path:
        """Return the unquantized model without some experts."""
        path, matrix = self.folder / f"{criterion}-{seed}.gguf", self.folder / "all.imatrix"
        experts = None
        if path.exists():
            return path
        if criterion == "random":
            plan = plan_prune_experts(self.args.model, path, self.args.keep, criterion="frequency", imatrix=matrix)
            rng = np.random.default_rng(seed)
            experts = {
                layer: sorted(rng.permutation(plan.n_expert)[: len(experts_left)].tolist())
                for layer, experts_left in plan.experts.items()
            }
        if experts is None:
            prune_experts(self.args.model, path, self.args.keep, criterion=cast(Criterion, criterion), imatrix=matrix)
        else:
            prune_experts(self.args.model, path, experts=experts)
        self.collect(path, path.with_suffix(".imatrix"))
        return path

    def options(self, matrix: Path, rules: tuple[str, ...]) -> QuantizeOptions:
        args = self.args
        if not args.calibrate:
            return QuantizeOptions(imatrix=matrix, tensor_type=rules)
        return QuantizeOptions(
            tensor_type=rules, calibrate=(args.calibration,), calibrate_ctx=args.ctx, calibrate_chunks=args.chunks
        )

    def quantize(self, model: Path, matrix: Path, rules: tuple[str, ...]) -> int:
        """Write ``out``, and return its bytes."""
        plan = plan_quantize(model, self.out, self.args.type, self.options(matrix, rules))
        run_quantize(plan, overwrite=True, threads=self.args.threads)
        return plan.nbytes

    def measure(self, path: Path) -> Measurement:
        """Compare a file with the full-precision model."""
        sums = quantkit.kld(path, self.folder / "base", threads=self.args.threads).sums
        return Measurement(np.concatenate(sums.klds), sums.same_top_p.value, sums.nll.ppl.value, math.nan)

    def rules(self, limit: int) -> tuple[str, ...]:
        """Return rules that give the experts of the whole model the types --lower, for at most ``limit`` bytes."""
        high, low = self.args.lower.split(",")
        with open_model(self.args.model) as model:
            names = [name for name in model.tensors if "_exps.weight" in name]
        order = [name for part in ("gate", "up", "down") for name in names if f"ffn_{part}_exps" in name]
        for n in range(len(order) + 1):
            rules = tuple(
                f"^{name.replace('.', chr(92) + '.')}$={low if i < n else high}" for i, name in enumerate(order)
            )
            options = self.options(self.folder / "all.imatrix", rules)
            if plan_quantize(self.args.model, self.out, self.args.type, options).nbytes <= limit:
                return rules
        raise SystemExit(f"{self.args.lower}: larger than {limit} bytes")


def rows(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Yield the rows of the table."""
    files, pruned_rules = Files(args, folder), (f"_exps={args.type}",)
    pruned = {criterion: files.prune(criterion) for criterion in args.by.split(",") if criterion}
    pruned |= {f"random {seed}": files.prune("random", seed) for seed in range(1, args.seeds + 1)}
    matrix = folder / "all.imatrix"
    first = next(iter(pruned.values()))
    options = files.options(first.with_suffix(".imatrix"), pruned_rules)
    limit = plan_quantize(first, files.out, args.type, options).nbytes
    lower = files.rules(limit)
    keep = f"{args.keep} of the experts"
    rounding = "error feedback" if args.calibrate else "importance matrix"
    base: Measurement | None = None
    models = [("all experts", args.lower.replace(",", ", "), args.model, matrix, lower)]
    models += [
        (f"{keep}, {criterion}", args.type, path, path.with_suffix(".imatrix"), pruned_rules)
        for criterion, path in pruned.items()
    ]
    models += [("all experts, larger file", args.type, args.model, matrix, pruned_rules)]
    for name, types, model, its_matrix, rules in models:
        nbytes = files.quantize(model, its_matrix, rules)
        measurement = files.measure(files.out)
        base = base or measurement
        compared = "1" if measurement is base else ratio(measurement, base)
        top = f"{100 * measurement.same_top:.2f}"
        yield f"| {name} | {types} | {rounding} | {nbytes} | {measurement.text} | {compared} | {top} |"
    for criterion, path in pruned.items():
        measurement = files.measure(path)
        top = f"{100 * measurement.same_top:.2f}"
        yield f"| {keep}, {criterion} | BF16 | none | {path.stat().st_size} | {measurement.text} | - | {top} |"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("calibration", type=Path)
    p.add_argument("evaluation", type=Path)
    p.add_argument("--keep", default="75%")
    p.add_argument("--type", default="Q4_K")
    p.add_argument("--lower", default="IQ3_S,IQ3_XXS")
    p.add_argument("--by", default="reap,frequency")
    p.add_argument("--seeds", type=int, default=2)
    p.add_argument("--ctx", type=int, default=256)
    p.add_argument("--chunks", type=int, metavar="N", help="chunks of the calibration text")
    p.add_argument("--evaluation-chunks", type=int, metavar="N", help="chunks of the evaluation text")
    p.add_argument("--threads", type=int)
    p.add_argument("--calibrate", action="store_true")
    p.add_argument("--work", type=Path, metavar="FOLDER", help="keep logits, matrices and models here, and use them")
    args = parse_options(p)
    print(machine())
    print("| experts | their types | rounding | bytes | KL divergence | ratio | same top token, % |")
    print("|---|---|---|---:|---:|---:|---:|")
    with work_folder(args.work) as folder:
        for row in rows(args, folder):
            print(row, flush=True)


if __name__ == "__main__":
    record_output(main)
