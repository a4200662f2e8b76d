"""Measure prompts and generation against llama.cpp and ik_llama.cpp, in turns on the same cores and files.

    benchmarks/bench_engine.py --types Q4_K_M,IQ4_XS,Q8_0
    benchmarks/bench_engine.py --types IQ4_KS,IQ3_K,IQ2_KL,Q4_K_R4 --work FOLDER
    benchmarks/bench_engine.py --types IQ2_KT --layers 1 --work FOLDER     trellis types take minutes to encode

Every engine, with each of its settings, is a process that loads the model (engine_worker.py) and waits. In a round each
runs the test once, for a fraction of a second, in rotated order, so that other load affects all alike. The table shows
an engine's faster setting, by the median, and names it; ratios are medians over the ratios within a round. For a model
that a peer cannot run it shows "-", with the reason below the table. "read" is the share of the read bandwidth,
measured in the same rounds, that generation uses.

The MoE is that of make_moe.py: shapes of Qwen3-30B-A3B (2048 wide, 128 experts of 768, 8 used), 3 layers, and
tiny-moe's vocabulary, so that the output head does not dominate. --types are types and presets of `quantkit quantize`.
--fusion also runs bench_fusion.py on the first, with its router in Q8_0 and in F32.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from processes import llama_bin, machine, make_moe, package_folder, quantkit, run, work_folder
from results import parse_options, record_output

TYPES = "Q4_K_M,IQ4_XS,Q8_0"
TESTS = ("pp", "tg")
#: Words in the line of a log that gives the reason why a program ended.
TELLING = re.compile("error|invalid|unsupported|unknown|assert|fatal", re.IGNORECASE)
REPACKED = ["repack_tensors=1", "use_mmap=0"]
#: Settings of each engine, in turn: the table's label, and the arguments of engine_worker.py. quantkit comes first.
SETTINGS: dict[str, dict[str, list[str]]] = {
    "quantkit": {"mapped": [], "copied": ["mmap=0"]},
    "llama.cpp": {"plain": ["use_extra_bufts=0"], "repacked": ["use_extra_bufts=1"]},
    "ik_llama.cpp": {
        "plain": [],
        "repacked": REPACKED,
        "repacked, merged": [*REPACKED, "merge_qkv=1", "merge_up_gate_exps=1"],
    },
}
#: Peers' threads continue to spin for a moment.
PAUSE = 0.03


@dataclass
class Runner:
    """An engine with a setting: its process, and the seconds of each test, round by round."""

    engine: str
    setting: str
    process: subprocess.Popen[str]
    log: IO[str]
    samples: dict[str, list[float]] = field(default_factory=dict)
    reason: str = ""  #: reason why it cannot run the model

    def ready(self) -> None:
        """Wait until the model is loaded."""
        while not self.reason and self._line() != "ready":
            pass

    def turn(self, test: str, n: int, *, timed: bool = True) -> None:
        """Run a test once, timed or not; a failure is recorded and ends the runner's turns."""
        if self.reason:
            return
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(test, n, file=self.process.stdin, flush=True)
        line = self._line()
        if timed and not self.reason:
            self.samples.setdefault(test, []).append(float(line))
        time.sleep(PAUSE)

    def _line(self) -> str:
        """Return the next line of the process; at its end, record the reason."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            self.reason = reason_of(self.process.wait(), self.log.read())
        return line.strip()

    def seconds(self, test: str) -> float:
        """Return the median of a test's seconds; infinite if it cannot run."""
        return float("inf") if self.reason else statistics.median(self.samples[test])


def reason_of(returncode: int, log: str) -> str:
    """Return the line of a failed program's log that gives the reason, or the signal that ended it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if telling := next((line for line in lines if TELLING.search(line)), None):
        return telling
    if returncode < 0:
        return f"died of {signal.Signals(-returncode).name}"
    return lines[-1] if lines else f"ended with {returncode}"


def engines() -> list[str]:
    """Return the installed engines, quantkit first."""
    available = {"quantkit": True, "llama.cpp": llama_bin() is not None, "ik_llama.cpp": package_folder("ik_llama_cpp")}
    return [engine for engine in SETTINGS if available[engine]]


def start(engine: str, setting: str, model: Path, options: argparse.Namespace) -> Runner:
    """Start a process that loads a model."""
    settings = SETTINGS[engine][setting]
    worker = [sys.executable, Path(__file__).with_name("engine_worker.py"), engine, "-m", model]
    worker += [
        "-t",
        options.threads,
        "-c",
        max(options.prompt, options.gen),
        *(["--set", *settings] if settings else []),
    ]
    log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - the runner reads it
    pipe = subprocess.PIPE
    process = subprocess.Popen([str(w) for w in worker], stdin=pipe, stdout=pipe, stderr=log, text=True)
    return Runner(engine, setting, process, log)


def measure(model: Path, options: argparse.Namespace) -> list[Runner]:
    """Run all in turns, in rotated order, and return them with their samples."""
    runners = [start(engine, setting, model, options) for engine in engines() for setting in SETTINGS[engine]]
    tests = [(test, n) for test, n in zip(TESTS, (options.prompt, options.gen), strict=True) if n]
    for runner in runners:
        runner.ready()
        for test, n in tests:
            runner.turn(test, n, timed=False)
    for turn in range(options.rounds):
        for test, n in tests:
            for i in range(len(runners)):
                runners[(turn + i) % len(runners)].turn(test, n)
        if options.gen:
            runners[0].turn("read", options.gen)
    for runner in runners:
        runner.process.kill()
    return runners


def header(names: Sequence[str]) -> str:
    """Return the header of the table."""
    cells = ["model", "test", "quantkit t/s", "read", *(cell for e in names[1:] for cell in (f"{e} t/s", f"/ {e}"))]
    return f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}"


def ratio(test: str, runner: Runner, peer: Runner, peer_test: str = "") -> float:
    """Return a runner's speedup over another, the median over rounds; ``peer_test``: the other's test."""
    pairs = zip(runner.samples[test], peer.samples[peer_test or test], strict=True)
    return statistics.median(peer_seconds / seconds for seconds, peer_seconds in pairs)


def row(name: str, test: str, n: int, runners: Sequence[Runner]) -> str:
    """Return a row of the table: the faster setting of every engine."""
    by_engine = [[r for r in runners if r.engine == e] for e in dict.fromkeys(r.engine for r in runners)]
    fastest, *peers = [min(settings, key=lambda r: r.seconds(test)) for settings in by_engine]
    read = f"{ratio(test, fastest, runners[0], 'read'):.0%}" if test == "tg" else ""
    cells = [name, f"{test}{n}", f"{n / fastest.seconds(test):.1f} {fastest.setting}", read]
    for peer in peers:
        cells += ["-", "-"] if peer.reason else [f"{n / peer.seconds(test):.1f} {peer.setting}"]
        cells += [] if peer.reason else [f"{ratio(test, fastest, peer):.2f}x"]
    return f"| {' | '.join(cells)} |"


def compare(models: Sequence[tuple[str, Path]], options: argparse.Namespace) -> None:
    """Print the table, row by row, and the reasons for empty cells."""
    print(header(engines()))
    reasons: dict[str, None] = {}
    for name, model in models:
        runners = measure(model, options)
        if runners[0].reason:
            sys.exit(f"quantkit, {name}: {runners[0].reason}")
        for test, n in zip(TESTS, (options.prompt, options.gen), strict=True):
            if n:
                print(row(name, test, n, runners), flush=True)
        reasons |= dict.fromkeys(f"{r.engine}, {name}: {r.reason}" for r in runners if r.reason)
    print("\n" + "\n".join(reasons) if reasons else "")


def quantize_model(options: argparse.Namespace, folder: Path, kind: str, router: str | None = None) -> Path:
    """Return the MoE in a type or preset, its router in F32 or another type; quantize it if the folder has none yet."""
    out = folder / f"moe-{options.layers}-{kind}{f'-router-{router}' if router else ''}.gguf"
    if out.exists():
        return out
    source, imatrix = folder / f"moe-{options.layers}-F16.gguf", folder / f"moe-{options.layers}-imatrix.gguf"
    if not source.exists() or not imatrix.exists():
        make_moe(source, "--layers", str(options.layers), "--imatrix", str(imatrix))
    router_options = ["--ffn-gate-inp-type", router] if router else []
    outcome = run(quantkit("quantize", "--imatrix", imatrix, *router_options, source, out, kind)).checked("quantize")
    print(f"{out}: {outcome.seconds:.0f} s", flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--types", default=TYPES, metavar="LIST", help=f"types or presets of the MoE (default: {TYPES})"
    )
    parser.add_argument("--models", type=Path, nargs="*", default=[], metavar="GGUF", help="other models")
    parser.add_argument("--rounds", type=int, default=15, metavar="N")
    parser.add_argument("--prompt", type=int, default=512, metavar="N")
    parser.add_argument("--gen", type=int, default=64, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--layers", type=int, default=3, metavar="N")
    parser.add_argument("--fusion", action="store_true", help="also run bench_fusion.py")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the models, kept if given")
    options = parse_options(parser)
    with work_folder(options.work) as folder:
        kinds = [kind for kind in options.types.split(",") if kind]
        models = [(f"MoE {kind}", quantize_model(options, folder, kind)) for kind in kinds]
        models += [(path.stem, path) for path in options.models]
        print(f"\nmedian of {options.rounds}; {options.threads} threads; {machine()}\n")
        compare(models, options)
        if options.fusion:
            routers = [quantize_model(options, folder, kinds[0], router) for router in ("q8_0", None)]
            gains: list[str | Path] = [sys.executable, Path(__file__).with_name("bench_fusion.py"), *routers]
            print(run(gains).checked("bench_fusion").stdout)


if __name__ == "__main__":
    record_output(main)
