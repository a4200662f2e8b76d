"""Measure prompts and generation against llama.cpp and ik_llama.cpp, in turns on the same cores and files.

    benchmarks/bench_engine.py --types Q4_K_M,IQ4_XS,Q8_0
    benchmarks/bench_engine.py --types IQ4_KS,IQ3_K,IQ2_KL,Q4_K_R4 --work FOLDER
    benchmarks/bench_engine.py --types IQ2_KT --layers 1 --work FOLDER     trellis types take minutes to encode

Every turn is a new process that loads the model, warms up and measures once; the median of the turns counts. A peer is
run with each of its settings of PEER_SETTINGS, and for every row the faster counts, which the table names. A model that
a peer cannot run has "-", with the reason below the table.

The MoE is that of make_moe.py: shapes of Qwen3-30B-A3B (2048 wide, 128 experts of 768, 8 used), 3 layers, and
tiny-moe's vocabulary, so that the output head does not dominate. --types are types and presets of `quantkit quantize`.
--fusion also runs bench_fusion.py on the first, with its router in Q8_0 and in F32.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from processes import Outcome, llama_bin, machine, make_moe, package_folder, quantkit, run, work_folder

TYPES = "Q4_K_M,IQ4_XS,Q8_0"
TESTS = ("pp", "tg")
#: What is in the line of a log that says why a program ended.
TELLING = re.compile("error|invalid|unsupported|unknown|assert|fatal", re.IGNORECASE)
REPACKED = ["--set", "repack_tensors=1", "use_mmap=0"]
#: How each peer is set, in turn: what the table says, and the options. Flash attention is on in all.
PEER_SETTINGS: dict[str, dict[str, list[str]]] = {
    "llama.cpp": {"plain": ["--repack", "0", "-fa", "on"], "repacked": ["--repack", "1", "-fa", "on"]},
    "ik_llama.cpp": {
        "plain": [],
        "repacked": REPACKED,
        "repacked, merged": [*REPACKED, "merge_qkv=1", "merge_up_gate_exps=1"],
    },
}


@dataclass
class Runner:
    """One way to run a model: an engine with a setting, and what it measured."""

    engine: str
    setting: str
    program: Sequence[str | Path]
    options: Sequence[str]
    samples: dict[str, list[float]] = field(default_factory=dict)
    reason: str = ""  #: why it cannot run the model

    def turn(self, model: Path, threads: int, prompt: int, gen: int) -> None:
        """Run once, in a new process; a failure is noted, and the last turn."""
        if self.reason:
            return
        numbers = {"-p": prompt, "-n": gen, "-t": threads}
        given = [text for name, number in numbers.items() for text in (name, str(number))]
        outcome = run([*self.program, "-m", model, *given, *self.options])
        if outcome.returncode != 0:
            self.reason = reason_of(outcome)
            return
        for row in json.loads(outcome.stdout):
            self.samples.setdefault("pp" if row["n_prompt"] else "tg", []).append(row["avg_ts"])

    def speed(self, test: str) -> float:
        """Return the median of a test's tokens a second; 0 if it cannot run."""
        return 0.0 if self.reason else statistics.median(self.samples[test])


def reason_of(outcome: Outcome) -> str:
    """Return the line in which a program that failed says why, or what it died of."""
    lines = [line.strip() for line in (outcome.stdout + outcome.stderr).splitlines() if line.strip()]
    if telling := next((line for line in lines if TELLING.search(line)), None):
        return telling
    if outcome.returncode < 0:
        return f"died of {signal.Signals(-outcome.returncode).name}"
    return lines[-1] if lines else f"ended with {outcome.returncode}"


def programs() -> dict[str, list[str | Path]]:
    """Return the command line of every engine that is here, quantkit's first."""
    found: dict[str, list[str | Path]] = {"quantkit": [*quantkit("bench"), "-r", "1", "-o", "json"]}
    if (folder := llama_bin()) is not None:
        found["llama.cpp"] = [folder / "llama-bench", "-r", "1", "-o", "json"]
    if package_folder("ik_llama_cpp") is not None:
        found["ik_llama.cpp"] = [sys.executable, Path(__file__).with_name("ik_bench.py")]
    return found


def runners() -> list[Runner]:
    """Return a runner for each setting of each engine."""
    return [
        Runner(engine, setting, program, options)
        for engine, program in programs().items()
        for setting, options in PEER_SETTINGS.get(engine, {"": []}).items()
    ]


def measure(model: Path, options: argparse.Namespace) -> list[Runner]:
    """Run all in turns, in rotated order, and return them with their samples."""
    found = runners()
    for turn in range(options.rounds):
        for i in range(len(found)):
            found[(turn + i) % len(found)].turn(model, options.threads, options.prompt, options.gen)
    return found


def header(engines: Sequence[str]) -> str:
    """Return the head of the table."""
    names = ["model", "test", "quantkit t/s", *(cell for e in engines[1:] for cell in (f"{e} t/s", f"/ {e}"))]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def row(name: str, test: str, n: int, measured: Sequence[Runner]) -> str:
    """Return a row of the table: of every peer its faster setting."""
    ours, *peers = [[r for r in measured if r.engine == e] for e in dict.fromkeys(r.engine for r in measured)]
    mine = ours[0].speed(test)
    cells = [name, f"{test}{n}", f"{mine:.1f}" if mine else "-"]
    for peer in peers:
        best = max(peer, key=lambda r: r.speed(test))
        speed = best.speed(test)
        cells += [f"{speed:.1f} {best.setting}" if speed else "-", f"{mine / speed:.2f}x" if mine and speed else "-"]
    return f"| {' | '.join(cells)} |"


def compare(models: Sequence[tuple[str, Path]], options: argparse.Namespace) -> None:
    """Print the table, row by row, and why cells are empty."""
    print(header(list(programs())))
    reasons: dict[str, None] = {}
    for name, model in models:
        measured = measure(model, options)
        for test, n in zip(TESTS, (options.prompt, options.gen), strict=True):
            if n:
                print(row(name, test, n, measured), flush=True)
        reasons |= dict.fromkeys(f"{r.engine}, {name}: {r.reason}" for r in measured if r.reason)
    print("\n" + "\n".join(reasons) if reasons else "")


def quantized(options: argparse.Namespace, folder: Path, kind: str, router: str | None = None) -> Path:
    """Return the MoE in a type or preset, its router in F32 or another type; made if the folder has none yet."""
    out = folder / f"moe-{options.layers}-{kind}{f'-router-{router}' if router else ''}.gguf"
    if out.exists():
        return out
    source, imatrix = folder / f"moe-{options.layers}-F16.gguf", folder / f"moe-{options.layers}-imatrix.gguf"
    if not source.exists() or not imatrix.exists():
        make_moe(source, "--layers", str(options.layers), "--imatrix", str(imatrix))
    given = ["--ffn-gate-inp-type", router] if router else []
    made = run(quantkit("quantize", "--imatrix", imatrix, *given, source, out, kind)).checked("quantize")
    print(f"{out}: {made.seconds:.0f} s", flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--types", default=TYPES, metavar="LIST", help=f"types or presets of the MoE (default: {TYPES})"
    )
    parser.add_argument("--models", type=Path, nargs="*", default=[], metavar="GGUF", help="other models")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--prompt", type=int, default=512, metavar="N")
    parser.add_argument("--gen", type=int, default=64, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--layers", type=int, default=3, metavar="N")
    parser.add_argument("--fusion", action="store_true", help="also run bench_fusion.py")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the models, kept if given")
    options = parser.parse_args()
    with work_folder(options.work) as folder:
        kinds = [kind for kind in options.types.split(",") if kind]
        models = [(f"MoE {kind}", quantized(options, folder, kind)) for kind in kinds]
        models += [(path.stem, path) for path in options.models]
        print(f"\nmedian of {options.rounds}; {options.threads} threads; {machine()}\n")
        compare(models, options)
        if options.fusion:
            routers = [quantized(options, folder, kinds[0], router) for router in ("q8_0", None)]
            gains: list[str | Path] = [sys.executable, Path(__file__).with_name("bench_fusion.py"), *routers]
            print(run(gains).checked("bench_fusion").stdout)


if __name__ == "__main__":
    main()
