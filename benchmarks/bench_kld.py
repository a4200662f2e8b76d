"""Measure `quantkit kld --base-model` over several files beside llama-perplexity, which writes base logits and reads
them once for each file; whole processes in turns, with the same chunks.

    benchmarks/bench_kld.py BASE.gguf TEXT [--types Q8_0,Q5_K_M,..]

The files are quantized from BASE. "runtime" computes what llama.cpp does, with activations rounded to int8; "exact" is
the default.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from pathlib import Path

from processes import Outcome, llama_bin, machine, quantkit, run, work_folder
from results import parse_options, print_table, record_output

from quantkit.units import format_size


def write_files(base: Path, types: list[str], folder: Path) -> list[Path]:
    """Quantize the base to each type."""
    paths = []
    for name in types:
        path = folder / f"{base.stem}-{name}.gguf"
        run(quantkit("quantize", "--allow-requantize", base, path, name)).checked(name)
        paths.append(path)
    return paths


def run_llama(program: Path, base: Path, files: list[Path], common: list[str], logits: Path) -> tuple[float, list[str]]:
    """Return the seconds of all runs of llama-perplexity, and the mean divergences."""
    save: list[str | Path] = [program, "-m", base, *common, "--save-all-logits", logits]
    seconds = run(save).checked("llama-perplexity").seconds
    means = []
    for path in files:
        command: list[str | Path] = [program, "-m", path, *common, "--kl-divergence", "--kl-divergence-base", logits]
        outcome = run(command).checked(path.name)
        seconds += outcome.seconds
        # Its log may lose lines at the end of the process.
        while (match := re.search(r"Mean +KLD: +([\d.]+)", outcome.stdout)) is None:
            outcome = run(command).checked(path.name)
        means.append(match.group(1))
    return seconds, means


def mean_divergences(path: Path) -> list[str]:
    """Return the mean divergences in the JSON of quantkit."""
    return [f"{model['kld']['value']:.6f}" for model in json.loads(path.read_text())["models"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, metavar="BASE.gguf")
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("--types", default="Q8_0,Q6_K,Q5_K_M,Q4_K_M,Q3_K_M", help="types of the files")
    parser.add_argument("--chunks", default="8", help="chunks of 512 tokens (default: 8)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parse_options(parser)
    bin_folder = llama_bin()
    if bin_folder is None:
        sys.exit("llama.cpp's programs are needed: run scripts/peers")
    os.environ["LD_LIBRARY_PATH"] = str(bin_folder)
    types = options.types.split(",")
    print(f"{len(types)} files, {options.chunks} chunks of 512, median of {options.rounds}; {machine()}\n")
    with work_folder(None) as folder:
        files = write_files(options.base, types, folder)
        logits, results = folder / "base.logits", {name: folder / f"{name}.json" for name in ("runtime", "exact")}
        common = ["-f", str(options.text), "-c", "512", "--chunks", options.chunks]
        outcomes: dict[str, list[Outcome]] = {name: [] for name in results}
        peer_seconds, peer_means = list[float](), list[str]()
        for turn in range(options.rounds + 1):
            for name, path in results.items():
                arguments = ["--base-model", options.base, *common, "--activations", name, "--json", path]
                outcome = run(quantkit("kld", *files, *arguments, "--overwrite")).checked(name)
                outcomes[name] += [outcome] if turn else []  # the first round warms up
            seconds, peer_means = run_llama(bin_folder / "llama-perplexity", options.base, files, common, logits)
            peer_seconds += [seconds] if turn else []
        size = format_size(logits.stat().st_size)
        means = {name: mean_divergences(path) for name, path in results.items()}
    peer_time, passes = statistics.median(peer_seconds), str(len(files) + 1)
    rows = []
    for name, runs in outcomes.items():
        time = statistics.median(outcome.seconds for outcome in runs)
        memory = format_size(max(outcome.peak_rss for outcome in runs))
        rows.append((f"quantkit, {name}", passes, "none", f"{time:.1f}", memory, f"{peer_time / time:.2f}x"))
    rows.append(("llama-perplexity", passes, size, f"{peer_time:.1f}", "-", "1.00x"))
    print_table(("program", "passes", "base file", "seconds", "peak memory", "speed"), rows)
    print()
    columns = ("type", "KLD, exact", "KLD, runtime", "KLD, llama.cpp")
    print_table(columns, zip(types, means["exact"], means["runtime"], peer_means, strict=True))


if __name__ == "__main__":
    record_output(main)
