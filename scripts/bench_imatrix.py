"""Measure what observing costs: prompt speed without fusion, plain and while an importance matrix is collected.

    scripts/bench_imatrix.py MODEL [--text FILE] [--ctx 512] [--chunks 8] [--threads 2] [--rounds 5]

Both runs take turns, a chunk at a time, and the medians count. ``plain`` is the prompt as ``quantkit bench`` measures
it, whose last layer goes on with the last token only; ``every token`` is the same graph with all tokens in all layers,
which a collection needs. llama-imatrix (--no-ppl) stands beside them, if it is there, its time of loading taken off.
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
from bench_quantize import llama_bin

from quantkit.model.engine import Model, Session, load
from quantkit.model.fusion import Fusion
from quantkit.model.observers import every_token, observe
from quantkit.model.ops import Graph

REWRITES: dict[str, Callable[[Graph], Graph] | None] = {"plain": None, "every token": every_token, "observed": observe}


def prompt(session: Session, chunk: npt.NDArray[np.int32], last: bool) -> float:
    """Return the seconds of a chunk; its last token's logits are wanted, or none."""
    wanted = np.zeros(len(chunk), bool)
    wanted[-1] = last
    session.clear()
    start = time.perf_counter()
    session.decode(chunk, outputs=wanted)
    return time.perf_counter() - start


def ours(models: dict[str, Model], chunks: npt.NDArray[np.int32], rounds: int) -> dict[str, float]:
    """Return tokens per second of every kind of run."""
    sessions = {name: model.session(chunks.shape[1]) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for turn in range(rounds + 1):  # the first compiles
        for chunk in chunks:
            for name, session in sessions.items():
                took = prompt(session, chunk, name == "plain")
                if turn:
                    seconds[name].append(took)
    held = sum(a.nbytes for parts in sessions["observed"].accumulators.values() for a in parts.values())
    print(f"sums: {held / 2**20:.1f} MiB")
    return {name: chunks.shape[1] / statistics.median(times) for name, times in seconds.items()}


def theirs(program: Path, model: Path, text: Path, n_ctx: int, chunks: int, threads: int) -> float:
    """Return llama-imatrix's tokens per second: what more chunks take longer."""
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
    parser.add_argument("--text", type=Path, help="for llama-imatrix; without it, random tokens and ours only")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    models = {
        name: load(given.model, n_ctx=given.ctx, threads=given.threads, fusion=Fusion.none(), rewrite=rewrite)
        for name, rewrite in REWRITES.items()
    }
    n = given.ctx * given.chunks
    if given.text is not None:
        ids = models["plain"].tokenizer.encode(given.text.read_bytes())[:n]
    else:
        ids = np.random.default_rng(1).integers(0, models["plain"].n_vocab, n).astype(np.int32)
    speed = ours(models, ids[: len(ids) // given.ctx * given.ctx].reshape(-1, given.ctx), given.rounds)
    for name, tokens in speed.items():
        print(f"{name:<12} {tokens:9.1f} t/s   {tokens / speed['plain']:.3f} of plain")
    program = llama_bin()
    if given.text is not None and program is not None and (program / "llama-imatrix").exists():
        other = theirs(program / "llama-imatrix", given.model, given.text, given.ctx, given.chunks, given.threads)
        print(f"llama-imatrix {other:8.1f} t/s   observed is {speed['observed'] / other:.2f}x")


if __name__ == "__main__":
    main()
