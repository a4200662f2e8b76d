"""Measure `quantkit convert DIR OUT TYPE` against convert_hf_to_gguf.py followed by llama-quantize, in one run.

    benchmarks/bench_convert.py --llama LLAMA.CPP --python PYTHON

A generated checkpoint of 3 GB in BF16 (shapes of a Qwen3 mixture of experts, Qwen's vocabulary) is converted to Q4_K_M:
by quantkit in one pass, by the two programs through an intermediate file. LLAMA.CPP is the source tree of b11434;
PYTHON has torch and transformers 4.57.6; llama-quantize is built by scripts/peers. Programs run as processes, timed
from start to exit, in turns; medians are reported. A warm-up turn brings the input into the page cache and compiles
quantkit's kernels. The outputs must be identical, byte for byte. quantkit also flushes its output to disk (fsync).

Also measured: the conversion alone, BF16 to BF16, against the reference and against cp of the result; and a dry run,
the time until the first byte. --ours runs no program of llama.cpp.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from processes import SCRIPTS, Outcome, llama_bin, machine, quantkit, run, sha256, work_folder
from results import parse_options, record_output

from quantkit.cpus import available_cpus
from quantkit.units import format_size, parse_size

#: Bytes that a process may use beyond --max-ram, and the required speedup.
ALLOWANCE, N_PROBES = 300 * 1000**2, 8
QUANTKIT, CONVERT, QUANTIZE = "quantkit convert to {to}", "convert_hf_to_gguf.py", "llama-quantize to {to}"
COPY, COPY_OURS, DRY = "cp of the BF16 file", "quantkit convert to BF16", "quantkit convert --dry-run"


def commands(options: argparse.Namespace, work: Path, model: Path) -> dict[str, list[str]]:
    """Return the commands of a turn, in order, by name."""
    between, copy, threads = work / "between.gguf", work / "copy.gguf", str(options.threads)
    arguments = ["--overwrite", "--max-ram", options.max_ram, "-j", threads]
    first = {DRY: quantkit("convert", model, work / "ours.gguf", options.to, "--dry-run")}
    second = {
        QUANTKIT: quantkit("convert", model, work / "ours.gguf", options.to, "--no-provenance", *arguments),
        COPY_OURS: quantkit("convert", model, copy, *arguments),
    }
    folder = llama_bin()
    if options.ours:
        return first | second
    if folder is None:
        sys.exit("llama-quantize not found: run scripts/peers, set QUANTKIT_LLAMA_BIN, or give --ours")
    if options.llama is None:
        sys.exit("--llama or --ours is required")
    converter = [options.python, options.llama / "convert_hf_to_gguf.py", model, "--outfile", between]
    peer_commands = {
        CONVERT: [str(part) for part in converter],
        QUANTIZE: [
            str(part) for part in (folder / "llama-quantize", between, work / "theirs.gguf", options.to, threads)
        ],
        COPY: ["cp", str(between), str(work / "cp.gguf")],
    }
    return first | second | peer_commands


def measure(options: argparse.Namespace, work: Path, model: Path) -> dict[str, list[Outcome]]:
    """Run all in turns; the first turn warms up."""
    results: dict[str, list[Outcome]] = {}
    for turn in range(options.rounds + 1):
        for name, command in commands(options, work, model).items():
            os.sync()  # dirty pages of the previous program do not count
            outcome = run(command).checked(name)
            if turn:
                results.setdefault(name, []).append(outcome)
        (work / "cp.gguf").unlink(missing_ok=True)
    return results


def report(results: dict[str, list[Outcome]], options: argparse.Namespace) -> list[str]:
    """Print the tables; return the requirements that were missed."""
    seconds = {name: statistics.median(o.seconds for o in outcomes) for name, outcomes in results.items()}
    print("| program | wall time | all runs | peak RSS |\n|---|---|---|---|")
    for name, outcomes in results.items():
        runs, peak = ", ".join(f"{o.seconds:.2f}" for o in outcomes), max(o.peak_rss for o in outcomes)
        print(f"| {name.format(to=options.to)} | {seconds[name]:.2f} s | {runs} | {format_size(peak)} |")
    wrong = []
    beyond = max(o.peak_rss for name in (QUANTKIT, COPY_OURS) for o in results[name]) - parse_size(options.max_ram)
    print(f"\npeak RSS beyond --max-ram {options.max_ram}: {format_size(max(0, beyond))}")
    if beyond > ALLOWANCE:
        wrong.append(f"peak RSS is --max-ram + {format_size(beyond)}, more than + {format_size(ALLOWANCE)}")
    if CONVERT in seconds:
        ratio = (seconds[CONVERT] + seconds[QUANTIZE]) / seconds[QUANTKIT]
        alone, cp = seconds[CONVERT] / seconds[COPY_OURS], seconds[COPY_OURS] / seconds[COPY]
        print(f"in one pass {ratio:.2f} times as fast as the two programs")
        print(f"the conversion alone {alone:.2f} times as fast as convert_hf_to_gguf.py, {cp:.2f} times the time of cp")
        if ratio < N_PROBES:
            wrong.append(f"{ratio:.2f} times as fast as the two programs; {N_PROBES} are asked")
    return wrong


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--llama", type=Path, metavar="FOLDER", help="source tree of llama.cpp b11434")
    p.add_argument(
        "--python", default=sys.executable, metavar="PYTHON", help="Python with torch and transformers 4.57.6"
    )
    p.add_argument("--ours", action="store_true", help="run no program of llama.cpp")
    p.add_argument("--to", default="Q4_K_M", metavar="TYPE", help="default: Q4_K_M")
    p.add_argument("--size", default="3G", help="size of the generated checkpoint (default: 3G)")
    p.add_argument("--model", type=Path, metavar="DIR", help="use this checkpoint instead of generating one")
    p.add_argument("--max-ram", default="512M", metavar="SIZE", help="--max-ram of quantkit's runs (default: 512M)")
    p.add_argument("--threads", type=int, default=available_cpus(), metavar="N")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the large files (default: a temporary one)")
    return p


def main() -> None:
    options = parse_options(parser())
    with work_folder(options.work) as work:
        model = options.model or work / "Qwen3-Bench"
        if options.model is None and not (model / "config.json").exists():
            vocab = ["--vocab", options.llama / "models/ggml-vocab-qwen2.gguf"] if options.llama else []
            maker = [sys.executable, SCRIPTS / "make_moe_checkpoint.py", model, "--size", options.size, *vocab]
            print(run(maker).checked("make_moe_checkpoint").stdout.strip())
        total = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        print(f"\n{model.name}, {format_size(total)}, to {options.to}, {options.threads} threads, ", end="")
        print(f"median of {options.rounds} runs in turns; {machine()}\n", flush=True)
        wrong = report(measure(options, work, model), options)
        if not options.ours:
            for output, peer_output in (("ours.gguf", "theirs.gguf"), ("copy.gguf", "between.gguf")):
                if sha256(work / output) != sha256(work / peer_output):
                    wrong.append(f"{output} and {peer_output} differ")
            print("outputs: identical, byte for byte" if not any("differ" in text for text in wrong) else "")
        for name in ("ours", "theirs", "copy", "between"):
            (work / f"{name}.gguf").unlink(missing_ok=True)
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    record_output(main)
