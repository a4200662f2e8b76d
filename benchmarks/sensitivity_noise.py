"""Compare sensitivities with the runtime's activations and with exact ones, on two halves of a text.

    benchmarks/sensitivity_noise.py MODEL.gguf TEXT [--imatrix IM.gguf] [--types Q6_K,Q5_K,Q4_K,Q3_K] [--chunks 16]

Every type of every group runs to the end of the model, on both halves of the first --chunks chunks, with both. Columns:
for each type the rank correlation (Spearman) over groups of the costs on the two halves, with both kinds of
activations: how far a measurement agrees with another; and of the costs with runtime's and with exact ones, on all
chunks; and the median cost with both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
from processes import machine, work_folder
from results import parse_options, record_output

import quantkit
from quantkit.activations import ACTIVATIONS, EXACT, RUNTIME
from quantkit.formats.gguf import open_model
from quantkit.formats.tokenizer import Tokenizer
from quantkit.sensitivity import SensitivityOptions

COLUMNS = (
    "type", "groups", "halves, runtime", "halves, exact", "runtime and exact", "median KLD, runtime",
    "median KLD, exact",
)  # fmt: skip
F64 = npt.NDArray[np.float64]


def rank_correlation(a: F64, b: F64) -> float:
    """Return Spearman's correlation of two rows of values without ties."""
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--types", default="Q8_0,Q6_K,Q5_K,Q4_K,Q3_K")
    parser.add_argument("--groups", default="class-layer")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    args = parse_options(parser)
    with open_model(args.model) as model:
        tokens = Tokenizer.from_gguf(model).encode(args.text.read_text(encoding="utf-8"))
    half = args.chunks // 2 * args.ctx
    parts = {"first": tokens[:half], "second": tokens[half : 2 * half]}
    types = tuple(args.types.split(","))
    costs: dict[tuple[str, str, str], F64] = {}
    with work_folder(None) as folder:
        for mode in ACTIVATIONS:
            for part, ids in parts.items():
                options = SensitivityOptions(
                    types=types, groups=args.groups, imatrix=args.imatrix, full_runs=-1, together=False,
                    n_ctx=args.ctx, activations=mode, threads=args.threads, cache=folder / "cache",
                )  # fmt: skip
                result = quantkit.sensitivity(args.model, folder / f"{mode}-{part}.json", tokens=ids, options=options)
                for name in types:
                    rows = {c.group: c.kld for c in result.costs if c.type.name == name}
                    costs[mode, part, name] = np.array([rows[group] for group in sorted(rows)], np.float64)
    print(f"{args.chunks // 2} chunks of {args.ctx} tokens a half; {machine()}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name in types:
        halves = {mode: [costs[mode, part, name] for part in parts] for mode in ACTIVATIONS}
        means = {mode: np.mean(halves[mode], axis=0) for mode in ACTIVATIONS}
        agreements = [rank_correlation(*halves[mode]) for mode in (RUNTIME, EXACT)]
        agreements.append(rank_correlation(means[RUNTIME], means[EXACT]))
        medians = [float(np.median(means[mode])) for mode in (RUNTIME, EXACT)]
        figures = [*(f"{x:.3f}" for x in agreements), *(f"{x:.6f}" for x in medians)]
        print(f"| {' | '.join((name, str(len(means[EXACT])), *figures))} |")


if __name__ == "__main__":
    record_output(main)
