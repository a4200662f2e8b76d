"""Measure the cost of observing: speed without fusion, plain and while collecting an importance matrix.

    benchmarks/bench_imatrix.py MODEL [--text FILE] [--ctx 512] [--chunks 8] [--threads 2] [--rounds 5] [--cpu]

All runs take turns, a chunk at a time; medians and ratios are reported::

    prompt        as ``quantkit bench -no-fug -no-fmoe``: one output, so the last layer's feed-forward runs for one
                  token only. A collection needs all: with two layers a quarter to a half of its work is missing here
    every token   the same with all tokens in all layers: the work of a collection, without its sums
    observed      a collection with --no-ppl

    perplexity    as ``quantkit perplexity -no-fug -no-fmoe``: the logits of the second half of a chunk
    observed+ppl  a collection that also computes these logits

llama-imatrix (--no-ppl), if found, is measured too, without its loading time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from processes import llama_bin
from results import parse_options, record_output

from quantkit.model.engine import Model, Session, load
from quantkit.model.fusion import Fusion
from quantkit.model.observers import every_token, fewest_rows, observe
from quantkit.model.ops import Graph

#: The change to the graph, and the tokens of n that need logits.
KINDS: dict[str, tuple[Callable[[Graph], Graph] | None, Callable[[int], slice]]] = {
    "prompt": (None, lambda n: slice(n - 1, n)),
    "every token": (every_token, lambda n: slice(0)),
    "observed": (lambda graph: fewest_rows(observe(graph)), lambda n: slice(0)),
    "perplexity": (None, lambda n: slice(n // 2, n - 1)),
    "observed+ppl": (lambda graph: fewest_rows(observe(graph)), lambda n: slice(n // 2, n - 1)),
}
#: Clock for quantkit's runs.
CLOCK: list[Callable[[], float]] = [time.perf_counter]
#: The ratios to report.
RATIOS = (("observed", "prompt"), ("observed", "every token"), ("observed+ppl", "perplexity"))


def seconds_of(session: Session, chunk: npt.NDArray[np.int32], outputs: slice) -> float:
    """Return the seconds of a chunk with the logits of ``outputs``."""
    mask = np.zeros(len(chunk), bool)
    mask[outputs] = True
    session.clear()
    start = CLOCK[0]()
    session.decode(chunk, outputs=mask, consume=lambda *_: None)
    return CLOCK[0]() - start


def measure_quantkit(models: dict[str, Model], chunks: npt.NDArray[np.int32], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every chunk, in order, for every kind of run."""
    sessions = {name: model.session(chunks.shape[1]) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for turn in range(rounds + 1):  # the first compiles
        for chunk in chunks:
            for name, session in sessions.items():
                took = seconds_of(session, chunk, KINDS[name][1](len(chunk)))
                if turn:
                    seconds[name].append(took)
    nbytes = sum(a.nbytes for parts in sessions["observed"].accumulators.values() for a in parts.values())
    print(f"sums: {nbytes / 2**20:.1f} MiB")
    return seconds


def measure_peer(program: Path, model: Path, text: Path, n_ctx: int, chunks: int, threads: int) -> float:
    """Return llama-imatrix's tokens per second, from the extra time of more chunks."""
    took = []
    with tempfile.TemporaryDirectory() as folder:
        for n in (2, 2 + chunks):
            command = [program, "-m", model, "-f", text, "-o", Path(folder) / "i.gguf", "--no-ppl", "-ofreq", "1000000"]
            sizes = ["-c", n_ctx, "-b", n_ctx, "-t", threads, "--chunks", n]
            start = time.perf_counter()
            subprocess.run([str(part) for part in (*command, *sizes)], check=True, capture_output=True)
            took.append(time.perf_counter() - start)
    return chunks * n_ctx / (took[1] - took[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, help="text for llama-imatrix; without it, random tokens and quantkit only")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="measure the CPU time of one thread, for a busy machine")
    args = parse_options(parser)
    if args.cpu:
        args.threads, CLOCK[0] = 1, time.process_time
    models = {
        name: load(args.model, n_ctx=args.ctx, threads=args.threads, fusion=Fusion.none(), rewrite=rewrite)
        for name, (rewrite, _) in KINDS.items()
    }
    n = args.ctx * args.chunks
    if args.text is not None:
        ids = models["prompt"].tokenizer.encode(args.text.read_bytes())[:n]
    else:
        ids = np.random.default_rng(1).integers(0, models["prompt"].n_vocab, n).astype(np.int32)
    took = measure_quantkit(models, ids[: len(ids) // args.ctx * args.ctx].reshape(-1, args.ctx), args.rounds)
    speed = {name: args.ctx / statistics.median(times) for name, times in took.items()}
    for name, tokens in speed.items():
        print(f"{name:<12} {tokens:9.1f} t/s")
    for name, baseline in RATIOS:
        # Both runs are adjacent in time, so that other load affects both.
        ratios = [b / a for a, b in zip(took[name], took[baseline], strict=True)]
        print(f"{name:<12} {statistics.median(ratios):6.3f}x of {baseline}")
    program = llama_bin()
    if args.text is not None and program is not None and (program / "llama-imatrix").exists():
        peer = measure_peer(program / "llama-imatrix", args.model, args.text, args.ctx, args.chunks, args.threads)
        print(f"llama-imatrix {peer:8.1f} t/s   observed is {speed['observed'] / peer:.2f}x")


if __name__ == "__main__":
    record_output(main)
