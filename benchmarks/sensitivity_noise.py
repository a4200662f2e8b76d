"""Compare sensitivities with the runtime's activations and with exact ones, on two halves of a text.

    benchmarks/sensitivity_noise.py MODEL.gguf TEXT [--imatrix IM.gguf] [--types Q6_K,Q5_K,Q4_K,Q3_K] [--chunks 16]
        [--bpw 6,5,4 --held-out 16]

Every type of every group runs to the end of the model, on both halves of the first --chunks chunks, with both. Columns:
for each type the rank correlation (Spearman) over groups of the costs on the two halves, with both kinds of
activations: how far a measurement agrees with another; and of the costs with runtime's and with exact ones, on all
chunks; and the median cost with both.

A second table has what `quantkit search` finds by the costs of each half, at each of --bpw: the divergence (exact
activations, with standard errors) of the quantized file on the next --held-out chunks of the text, and the mean over
both halves of the ratio of the searches by exact costs to those by the runtime's, with 95 % intervals over tokens.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from feedback_kld import ratio_of_means
from processes import machine, work_folder
from results import parse_options, print_table, record_output

import quantkit
from quantkit.activations import ACTIVATIONS, EXACT, RUNTIME
from quantkit.evaluate import SaveLogits
from quantkit.formats.gguf import open_model
from quantkit.formats.tokenizer import Tokenizer
from quantkit.search import SearchOptions
from quantkit.sensitivity import SensitivityOptions

COLUMNS = (
    "type", "groups", "halves, runtime", "halves, exact", "runtime and exact", "median KLD, runtime",
    "median KLD, exact",
)  # fmt: skip
SEARCH_COLUMNS = (
    "bits per weight", "runtime, first half", "runtime, second half", "exact, first half", "exact, second half",
    "exact / runtime",
)  # fmt: skip
PARTS = ("first", "second")
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]


def comma_separated(text: str) -> tuple[str, ...]:
    """Split names at commas."""
    return tuple(text.split(","))


def numbers(text: str) -> list[float]:
    """Parse numbers separated by commas."""
    return [float(part) for part in text.split(",")]


def rank_correlation(a: F64, b: F64) -> float:
    """Return Spearman's correlation of two rows of values without ties."""
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])


@dataclass(frozen=True)
class Measurement:
    """Sensitivities by kind of activations and half of the text, as files and as costs of each type."""

    files: dict[tuple[str, str], Path]
    costs: dict[tuple[str, str, str], F64]


def measure(args: argparse.Namespace, tokens: I32, folder: Path) -> Measurement:
    """Measure every type of every group on both halves of the first --chunks chunks, with both kinds of activations."""
    half = args.chunks // 2 * args.ctx
    parts = {"first": tokens[:half], "second": tokens[half : 2 * half]}
    measurement = Measurement({}, {})
    for mode in ACTIVATIONS:
        for part, ids in parts.items():
            options = SensitivityOptions(
                types=args.types, groups=args.groups, imatrix=args.imatrix, full_runs=-1, n_ctx=args.ctx,
                activations=mode, threads=args.threads, cache=folder / "cache",
            )  # fmt: skip
            path = measurement.files[mode, part] = folder / f"{mode}-{part}.json"
            result = quantkit.sensitivity(args.model, path, tokens=ids, options=options)
            for name in args.types:
                rows = {c.group: c.kld for c in result.costs if c.type.name == name}
                values = np.array([rows[group] for group in sorted(rows)], np.float64)
                measurement.costs[mode, part, name] = values
    return measurement


def correlations(args: argparse.Namespace, measurement: Measurement) -> Iterator[tuple[str, ...]]:
    """Yield a row for each type."""
    for name in args.types:
        halves = {mode: [measurement.costs[mode, part, name] for part in PARTS] for mode in ACTIVATIONS}
        means = {mode: np.mean(halves[mode], axis=0) for mode in ACTIVATIONS}
        agreements = [rank_correlation(*halves[mode]) for mode in (RUNTIME, EXACT)]
        agreements.append(rank_correlation(means[RUNTIME], means[EXACT]))
        medians = [float(np.median(means[mode])) for mode in (RUNTIME, EXACT)]
        figures = [*(f"{x:.3f}" for x in agreements), *(f"{x:.6f}" for x in medians)]
        yield name, str(len(means[EXACT])), *figures


def searches(
    args: argparse.Namespace, tokens: I32, measurement: Measurement, folder: Path
) -> Iterator[tuple[str, ...]]:
    """Yield a row for each size: the divergence on held-out text of what each set of costs chooses."""
    base, out = folder / "base", folder / "out.gguf"
    held_out = tokens[args.chunks * args.ctx :]
    quantkit.perplexity(
        args.model, tokens=held_out, n_ctx=args.ctx, chunks=args.held_out, save_logits=SaveLogits(base),
        threads=args.threads,
    )  # fmt: skip
    for bpw in args.bpw:
        klds: dict[tuple[str, str], F64] = {}
        for key, path in measurement.files.items():
            options = SearchOptions(target_bpw=bpw, imatrix=args.imatrix)
            choice = quantkit.search(path, args.model, options).best
            quantkit.quantize(args.model, out, choice.type_name, choice.options, overwrite=True)
            sums = quantkit.kld(out, base, threads=args.threads).sums
            klds[key] = np.concatenate(sums.klds).astype(np.float64)
        cells = [
            f"{k.mean():.5f} ± {k.std() / math.sqrt(len(k)):.5f}"
            for k in (klds[mode, part] for mode in (RUNTIME, EXACT) for part in PARTS)
        ]
        runtime, exact = (np.mean([klds[mode, part] for part in PARTS], axis=0) for mode in (RUNTIME, EXACT))
        yield f"{bpw:g}", *cells, ratio_of_means(exact, runtime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--types", type=comma_separated, default=comma_separated("Q8_0,Q6_K,Q5_K,Q4_K,Q3_K"))
    parser.add_argument("--groups", default="class-layer")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--bpw", type=numbers, default=[], help="bits per weight of searches: 6,5,4")
    parser.add_argument("--held-out", type=int, default=16, help="chunks after those of --chunks")
    parser.add_argument("--threads", type=int, default=1)
    args = parse_options(parser)
    with open_model(args.model) as model:
        tokens = np.asarray(Tokenizer.from_gguf(model).encode(args.text.read_text(encoding="utf-8")), np.int32)
    print(f"{args.chunks // 2} chunks of {args.ctx} tokens a half; {machine()}\n")
    with work_folder(None) as folder:
        measurement = measure(args, tokens, folder)
        print_table(COLUMNS, correlations(args, measurement))
        if args.bpw:
            print()
            print_table(SEARCH_COLUMNS, searches(args, tokens, measurement, folder))


if __name__ == "__main__":
    record_output(main)
