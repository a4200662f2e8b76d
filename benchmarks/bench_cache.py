"""Measure a second recipe with and without the tensor cache, in turns, as whole processes.

    benchmarks/bench_cache.py
    benchmarks/bench_cache.py --size 3G --to IQ4_XS --second=--attn-v-type=q8_0 --checkpoint

A mixture of experts of 3 GB and its importance matrix are generated. Runs: the first recipe, without a cache and with
an empty one (the cost of storing entries); a second recipe that changes one class of tensors (by default the down
projections of the experts, a third of the weights), without a cache and with the entries of the first; the same with
all entries present; and the second on a copy of the model, whose rows are digested first, as on another machine. A
warm-up turn brings the model into the page cache and compiles kernels; medians are reported. Outputs with and without
the cache must be identical, byte for byte; otherwise it exits with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from functools import partial
from pathlib import Path

from processes import Outcome, machine, make_moe, quantkit, run, sha256, work_folder
from results import parse_options, record_output

from quantkit.cpus import available_cpus
from quantkit.units import format_size

FIRST, KEEPING = "first recipe", "first recipe, empty cache"
SECOND, CACHED, REPEAT = "second recipe", "second recipe, cache of the first", "the same again"
COPIED = "the same of a copy, digested first"
#: Rows of the table, and the row that each is compared with.
ROWS = {FIRST: FIRST, KEEPING: FIRST, SECOND: SECOND, CACHED: SECOND, REPEAT: SECOND, COPIED: SECOND}


def entries(cache: Path) -> set[Path]:
    return {path for path in (cache / "entries").rglob("*") if path.is_file()}


class Bench:
    """The runs of a turn: before each, the cache entries that it needs are created or removed."""

    def __init__(self, options: argparse.Namespace, work: Path, model: Path, imatrix: Path | None) -> None:
        self.options, self.work, self.model, self.imatrix = options, work, model, imatrix
        self.cache = work / "cache"
        self.copy = model.with_name(f"copy-{model.name}")
        if not self.copy.exists():
            (shutil.copytree if model.is_dir() else shutil.copyfile)(model, self.copy)
        self.results: dict[str, list[Outcome]] = {name: [] for name in ROWS}
        self.hits_by_name: dict[str, str] = {}

    def run(self, name: str, *options: str, model: Path | None = None) -> Path:
        """Run a recipe under ``name`` with its options."""
        recipe = "second" if self.options.second[0] in options else "first"
        out = self.work / f"{recipe}{'-cached' * ('--cache' in options)}.gguf"
        verb = ["convert", "--pre", "qwen2"] if self.options.checkpoint else ["quantize"]
        imatrix_options = ["--imatrix", str(self.imatrix)] if self.imatrix else []
        imatrix_options += ["--overwrite", "--no-provenance", "--json", "-j", str(self.options.threads)]
        os.sync()  # dirty pages of the previous program do not count
        outcome = run(quantkit(*verb, *imatrix_options, *options, model or self.model, out, self.options.to)).checked(
            name
        )
        self.results[name].append(outcome)
        if use := json.loads(outcome.stdout).get("cache"):
            self.hits_by_name[name] = f"{use['taken']} of {use['tensors']}"
        return out

    def turn(self) -> list[str]:
        """Run each once; return the pairs of outputs that differ."""
        cache, second = ["--cache", str(self.cache)], self.options.second
        shutil.rmtree(self.cache, ignore_errors=True)
        one, two = self.run(FIRST), self.run(KEEPING, *cache)
        wrong = [FIRST] if sha256(one) != sha256(two) else []
        two.unlink()
        one.unlink()
        left = entries(self.cache)
        one, two = self.run(SECOND, *second), self.run(CACHED, *second, *cache)
        wrong += [SECOND] if sha256(one) != sha256(two) else []
        two.unlink()
        expected = sha256(one)
        for name, model in ((REPEAT, self.model), (COPIED, self.copy)):
            out = self.run(name, *second, *cache, model=model)
            wrong += [name] if sha256(out) != expected else []
            out.unlink()
            if name == REPEAT:
                for path in entries(self.cache) - left:  # the copy finds the entries of the first recipe
                    path.unlink()
                shutil.rmtree(self.cache / "sources")
        one.unlink()
        return wrong

    def report(self) -> None:
        seconds = {name: statistics.median(o.seconds for o in outcomes) for name, outcomes in self.results.items()}
        print("| run | wall time | all runs | peak RSS | tensors from the cache | ratio |\n|---|---|---|---|---|---|")
        for name, base in ROWS.items():
            outcomes = self.results[name]
            runs, peak = ", ".join(f"{o.seconds:.2f}" for o in outcomes), max(o.peak_rss for o in outcomes)
            ratio = f"{seconds[name] / seconds[base]:.2f}x"
            hits = self.hits_by_name.get(name, "")
            print(f"| {name} | {seconds[name]:.2f} s | {runs} | {format_size(peak)} | {hits} | {ratio} |")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--to", default="Q4_K_M", metavar="TYPE", help="default: Q4_K_M")
    p.add_argument(
        *("--second",),
        nargs=1,
        default=["--ffn-down-type=q5_K"],
        metavar="OPTION",
        help="additional option of the second recipe (default: --ffn-down-type=q5_K); with =",
    )
    p.add_argument("--checkpoint", action="store_true", help="convert a checkpoint, instead of quantizing a GGUF file")
    p.add_argument("--size", default="3G", help="size of the generated model (default: 3G)")
    p.add_argument("--model", type=Path, metavar="MODEL", help="use this model instead of generating one")
    p.add_argument("--imatrix", type=Path, metavar="FILE", help="importance matrix for --model")
    p.add_argument("--threads", type=int, default=available_cpus(), metavar="N")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the large files (default: a temporary one)")
    return p


def main() -> None:
    options = parse_options(parser())
    with work_folder(options.work) as work:
        model, imatrix = options.model, options.imatrix
        if model is None and options.checkpoint:
            model = work / "Model"
            if not model.exists():
                partial(make_moe, script="make_moe_checkpoint.py")(model, "--size", options.size)
        elif model is None:
            model, imatrix = work / "model.gguf", work / "imatrix.gguf"
            if not model.exists():
                make_moe(model, "--size", options.size, "--imatrix", str(imatrix))
        bench = Bench(options, work, model, imatrix)
        bench.turn()
        bench.results = {name: [] for name in ROWS}
        wrong = [name for _ in range(options.rounds) for name in bench.turn()]
        title = f"{model.name}, to {options.to}, then with {options.second[0]}"
        print(f"\n{title}, {options.threads} threads, ", end="")
        print(f"median of {options.rounds} runs in turns; {machine()}\n")
        bench.report()
        print(f"\noutputs with and without the cache: {'DIFFERENT' if wrong else 'identical, byte for byte'}")
    if wrong:
        sys.exit(f"different: {', '.join(wrong)}")


if __name__ == "__main__":
    record_output(main)
