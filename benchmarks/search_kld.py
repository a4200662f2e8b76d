"""Measure the gain of a recipe search: divergence from the full-precision model, at the size of each preset.

    benchmarks/search_kld.py MODEL.gguf S.json IMATRIX.gguf TEXT [--skip N] [--check N] [--feedback COV.gguf]
        [--calibrate TEXT] [--runtimes mainline,ik] [--no-weights] [--plot FILE]

Quantized with the same importance matrix, and measured on a text without its first N chunks (those of S.json, if it is
the same text): each preset; the result of `quantkit search` for the size of its file; and, for the same size, the
allocation of least squared error of the weights, weighted by the importance matrix and summed over all weights, the
criterion of llama.cpp's PR #15550 (--no-weights skips it). The solver and the types are the same for both. With
--check, the best few allocations of a search are measured on the first N chunks of the text, and the best of these is
used. --feedback searches by the costs with error feedback in S.json, and quantizes with it; --calibrate quantizes its
allocation again (without --feedback, the first one), calibrated layer by layer. --runtimes searches once for each:
"mainline" chooses among the types of llama.cpp, "ik" among the larger set of ik_llama.cpp. Ratios are paired token by
token, with 95 % intervals. Finally, the rank correlation and the error of the predictions over all of these files, and
some random ones, are printed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from feedback_kld import Measurement, ratio
from processes import machine, work_folder
from results import parse_options, record_output

import quantkit
from quantkit.cli._plot import Points, Scatter, check_plot, draw
from quantkit.compare import TensorComparison
from quantkit.evaluate import KldSums, SaveLogits
from quantkit.formats.gguf import open_model
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.recipe import Rule
from quantkit.quantize import QuantizeOptions, plan_quantize, run_quantize
from quantkit.search import Allocation, SearchOptions
from quantkit.search.finder import Finder
from quantkit.search.space import Space
from quantkit.search.sweep import predict_plan
from quantkit.sensitivity.file import Cost, Sensitivity, read_sensitivity
from quantkit.types import TensorType

FEEDBACK, CALIBRATED, WEIGHTS = "feedback", "calibrated", "error of weights"
PRESETS = "Q5_K_M,Q4_K_M,IQ4_XS,Q3_K_M,IQ3_XXS,Q2_K,IQ2_XXS"


@dataclass(frozen=True)
class Row:
    """A file: its kind, the predicted divergence, and the measured one."""

    kind: str
    nbytes: int
    predicted: float
    actual: Measurement

    @property
    def mean(self) -> float:
        return float(self.actual.klds.mean(dtype=np.float64))


class Runs:
    """Quantizes and measures files, one after another, in a folder with the base logits."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        with quantkit.load(args.model) as model:
            tokens = np.asarray(model.tokenizer.encode(args.text.read_bytes()))
        first, remainder = tokens[: args.skip * args.ctx], tokens[args.skip * args.ctx :]
        base = SaveLogits(folder / "base")
        quantkit.perplexity(args.model, tokens=remainder, n_ctx=args.ctx, chunks=args.chunks, save_logits=base)
        if args.check > 1:
            quantkit.perplexity(args.model, tokens=first, n_ctx=args.ctx, save_logits=SaveLogits(folder / "first"))

    def plan(self, type_name: str, options: QuantizeOptions) -> Plan:
        return plan_quantize(self.args.model, self.folder / "out.gguf", type_name, options)

    def sums(self, plan: Plan, base: str = "base") -> KldSums:
        """Quantize a file, and return its divergence on the text, or on its ``first`` chunks."""
        run_quantize(plan, overwrite=True, threads=self.args.threads, cache=self.folder / "cache")
        return quantkit.kld(self.folder / "out.gguf", self.folder / base, threads=self.args.threads).sums

    def best(self, finder: Finder, nbytes: int) -> Allocation | None:
        """Return the best allocation of a size; with --check, the best measured one."""
        if self.args.check < 2:
            return finder.best_for_size(nbytes)
        finder.options = replace(finder.options, target_size=nbytes)
        candidates = list(finder.best(self.args.check))
        return min(
            candidates,
            key=lambda candidate: self.sums(self.plan(candidate.type_name, candidate.options), "first").kld.mean.value,
        )

    def row(self, kind: str, plan: Plan, expected: float) -> Row:
        sums = self.sums(plan)
        measurement = Measurement(np.concatenate(sums.klds), sums.same_top_p.value, sums.nll.ppl.value, 0.0)
        return Row(kind, plan.nbytes, expected, measurement)


def by_error_of_weights(measured_costs: Sensitivity, args: argparse.Namespace, folder: Path) -> Sensitivity:
    """Return weighted squared errors of weights as costs, summed over each group."""
    costs, owner = [], {name: group.name for group in measured_costs.groups for name in group.tensors}
    types: dict[TensorType, list[str]] = {}
    for cost in measured_costs.costs:
        types.setdefault(cost.type, []).append(cost.group)
    for t, groups in types.items():
        sums = dict.fromkeys(groups, 0.0)
        for compared in _compared(t, [n for n, g in owner.items() if g in sums], args, folder):
            if compared.error is not None and compared.name in owner:
                error_sums = compared.error.sums
                sums[owner[compared.name]] += error_sums.weighted_error if compared.error.weighted else error_sums.error
        # Scaled to be small: the divergence of a group is less than a nat.
        costs += [Cost(group, t, total * 1e-9, 0.0, None, None) for group, total in sums.items()]
    return replace(measured_costs, costs=tuple(costs), settings={})


def _compared(
    t: TensorType, names: Sequence[str], args: argparse.Namespace, folder: Path
) -> Iterator[TensorComparison]:
    path, rules = folder / "out.gguf", tuple(Rule(f"^{name}$", t, "benchmark") for name in names)
    options = QuantizeOptions(ready_rules=rules, imatrix=args.imatrix)
    run_quantize(plan_quantize(args.model, path, "COPY", options), overwrite=True, cache=folder / "cache")
    yield from quantkit.compare(args.model, path, metadata=False, imatrix=args.imatrix).tensors or ()


def random_allocations(space: Space, count: int) -> Iterator[tuple[int, ...]]:
    """Yield random allocations, each around some number of bits."""
    rng = np.random.default_rng(1)
    bits = [np.array([c.footprint.data for c in unit.choices], float) for unit in space.choice_groups]
    for goal in np.linspace(0.05, 0.95, count):
        picks = []
        for row in bits:
            place = (row - row.min()) / max(float(np.ptp(row)), 1.0)
            weight = np.exp(-(((place - goal) / 0.15) ** 2))
            picks.append(int(rng.choice(len(row), p=weight / weight.sum())))
        yield tuple(picks)


def spearman(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Return the correlation of the ranks."""
    first, second = (np.argsort(np.argsort(np.asarray(values))) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def picture(rows: Sequence[Row]) -> Scatter:
    """Return predicted against measured divergence, both on logarithmic axes, with the line where they are equal."""
    kinds = []
    for kind in dict.fromkeys(row.kind for row in rows):
        rows_of_kind = [row for row in rows if row.kind == kind]
        kinds.append(Points(kind, [row.predicted for row in rows_of_kind], [row.mean for row in rows_of_kind]))
    both = [value for row in rows for value in (row.predicted, row.mean)]
    ends = [min(both), max(both)]
    kinds.append(Points("equal", ends, ends, is_line=True))
    axes = "predicted divergence (nats)", "measured divergence (nats)"
    return Scatter("Predicted and measured divergence", *axes, kinds, log_x=True)


def columns_of(label: str, args: argparse.Namespace) -> list[str]:
    """Return the columns of a search: its files, and the calibrated ones if requested."""
    best = label.endswith(FEEDBACK) if args.feedback is not None else label != WEIGHTS
    return (
        [label, f"{label.removesuffix(f', {FEEDBACK}')}, {CALIBRATED}"]
        if best and args.calibrate is not None
        else [label]
    )


def options_of(column: str, allocation: Allocation, args: argparse.Namespace) -> QuantizeOptions:
    """Return the options with which the file of a column is quantized."""
    if not column.endswith(CALIBRATED):
        return allocation.options
    calibration = {"calibrate_ctx": args.ctx, "calibrate_chunks": args.calibrate_chunks}
    return replace(allocation.options, feedback=None, calibrate=(args.calibrate,), **calibration)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("sensitivity", type=Path)
    p.add_argument("imatrix", type=Path)
    p.add_argument("text", type=Path)
    p.add_argument("--feedback", type=Path, metavar="COV.gguf", help="also search and quantize with error feedback")
    p.add_argument("--calibrate", type=Path, metavar="TEXT", help="also calibrate on this text, layer by layer")
    p.add_argument("--calibrate-chunks", type=int, metavar="N", help="only the first N chunks of it")
    p.add_argument(
        "--runtimes", default="", help="runtimes whose types a search may choose: mainline, ik; by default any"
    )
    p.add_argument("--no-weights", action="store_true", help="skip the allocation of least weight error")
    p.add_argument("--check", type=int, default=1, metavar="N", help="measure the best N of a search, use the best")
    p.add_argument("--skip", type=int, default=0, metavar="N", help="skip the first N chunks of the text")
    p.add_argument("--presets", default=PRESETS)
    p.add_argument("--random", type=int, default=12, metavar="N", help="number of random allocations")
    p.add_argument("--ctx", type=int, default=256)
    p.add_argument("--chunks", type=int, metavar="N")
    p.add_argument("--threads", type=int)
    p.add_argument("--plot", type=Path, metavar="FILE")
    args = parse_options(p)
    kind = None if args.plot is None else check_plot(args.plot)
    print(machine(), flush=True)
    costs = read_sensitivity(args.sensitivity)
    fed_costs = any(cost.feedback for cost in costs.costs)
    with work_folder(None) as folder, open_model(args.model) as source:
        runs = Runs(args, folder)
        spaces: dict[str, Space] = {}
        for runtime in args.runtimes.split(","):
            options = SearchOptions(imatrix=args.imatrix, runtime=runtime or None)
            label = f"searched, {runtime}" if runtime else "searched"
            spaces[label] = Space(costs, source, options)
            if args.feedback is not None:
                spaces[f"{label}, {FEEDBACK}"] = Space(costs, source, replace(options, feedback=args.feedback))
        space = next(iter(spaces.values()))
        if not args.no_weights:
            spaces[WEIGHTS] = Space(by_error_of_weights(costs, args, folder), source, space.options)
        columns = [column for label in spaces for column in columns_of(label, args)]
        rows: list[Row] = []
        print(f"| preset | bytes | its divergence | {' | ratio | '.join(columns)} | ratio |")
        print(f"|---|---|---|{'---|---|' * len(columns)}")
        for name in args.presets.split(","):
            plan = runs.plan(name, QuantizeOptions(imatrix=args.imatrix))
            first = runs.row("preset", plan, predict_plan(space, plan) or math.nan)
            rows.append(first)
            cells = [name, str(plan.nbytes), first.actual.text]
            for label, space_of_label in spaces.items():
                allocation = runs.best(Finder(space_of_label), plan.nbytes)
                if allocation is None:
                    cells += ["-", "-"] * len(columns_of(label, args))
                    continue
                for column in columns_of(label, args):
                    plan_of = runs.plan(allocation.type_name, options_of(column, allocation, args))
                    plain = column == label and not label.endswith(FEEDBACK)
                    known_by = space if label == WEIGHTS else space_of_label  # its own costs are not divergences
                    expected = predict_plan(known_by, plan_of) if plain or column == label and fed_costs else None
                    rows.append(runs.row(column, plan_of, expected or math.nan))
                    cells += [rows[-1].actual.text, ratio(rows[-1].actual, first.actual)]
                    print(f"{name}, {column}: {cells[-2]}, {cells[-1]}", file=sys.stderr, flush=True)
            print(f"| {' | '.join(cells)} |", flush=True)
        for picks in random_allocations(space, args.random):
            title = space.main_type(picks)
            plan = runs.plan(title, space.quantize_options(title, space.rules(picks)))
            rows.append(runs.row("random", plan, space.kld(picks)))
    rows = [row for row in rows if math.isfinite(row.predicted)]
    figures = [row.predicted for row in rows], [row.mean for row in rows]
    off = np.log(figures[1]) - np.log(figures[0])
    print(f"\n{len(rows)} files: rank correlation of predicted and measured {spearman(*figures):.4f};")
    print(f"measured / predicted {math.exp(off.mean()):.3f}, spread of that a factor of {math.exp(off.std()):.3f}")
    if kind is not None:
        args.plot.write_bytes(draw(picture(rows), kind))


if __name__ == "__main__":
    record_output(main)
