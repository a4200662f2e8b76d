"""Profile a token: the time of every kind of entry of the CPU tape, and its rate of reading weights.

    benchmarks/profile_engine.py MODEL.gguf                  tokens one by one
    benchmarks/profile_engine.py MODEL.gguf --batch 512      prompts of 512 tokens

Every second step is run with a clock read after each entry (its barrier included), the others unchanged: the difference
of the two sums is the time between entries. Medians over the steps; tokens are random, because choosing experts is part
of the work.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from processes import machine
from results import parse_options, record_output

from quantkit.model.backends.cpu.backend import CPUProgram, Timing
from quantkit.model.batch import Batch
from quantkit.model.engine import load
from quantkit.model.ops import MulMatId, UpGateId


@dataclass
class Kind:
    """The entries of one name within operations of one kind."""

    entries: int = 0
    microseconds: float = 0.0
    weight_bytes: float = 0.0


def weight_bytes(timing: Timing, tokens: int) -> float:
    """Return the bytes of weights that an entry reads; for experts, an estimate for random tokens."""
    op = timing.op
    if not isinstance(op, UpGateId | MulMatId):
        return timing.weight_bytes
    n_expert = next(iter(op.matrices())).n_matrices
    return timing.weight_bytes * (1 - (1 - op.out.per / n_expert) ** tokens)


def kinds_of(timings: Sequence[Timing], microseconds: Sequence[float], tokens: int) -> dict[str, Kind]:
    """Return the sums over all entries of a kind, in the order of the tape."""
    kinds: dict[str, Kind] = {}
    for timing, duration in zip(timings, microseconds, strict=True):
        kind = kinds.setdefault(f"{type(timing.op).__name__}: {timing.name}", Kind())
        kind.entries += 1
        kind.microseconds += duration
        kind.weight_bytes += weight_bytes(timing, tokens)
    return kinds


def measure(program: CPUProgram, batches: Sequence[Batch]) -> tuple[list[Timing], Any, float]:
    """Return the entries, their median microseconds, and the median microseconds of whole steps."""
    runs, totals = [], []
    for batch, another in zip(batches[::2], batches[1::2], strict=True):  # a repeated token would hit caches
        began = time.perf_counter_ns()
        program.run(batch)
        totals.append((time.perf_counter_ns() - began) / 1e3)
        runs.append(program.profile(another))
    entries = np.median([[timing.nanoseconds for timing in run] for run in runs], axis=0) / 1e3
    return runs[0], entries, float(np.median(totals))


def batches_of(n_vocab: int, options: argparse.Namespace) -> list[Batch]:
    """Return two batches of random tokens for every step, each where the last one ended."""
    tokens = np.random.default_rng(1).integers(0, n_vocab, (2 * options.steps, options.batch)).astype(np.int32)
    outputs, sequences = np.array([options.batch - 1], np.int32), np.zeros(options.batch, np.int32)
    positions = np.arange(tokens.size, dtype=np.int32).reshape(tokens.shape)
    return [Batch(t, p, sequences, outputs) for t, p in zip(tokens, positions, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="tokens of a step (default: 1)")
    parser.add_argument("--steps", type=int, default=100, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--no-mmap", action="store_true", help="copy weights to memory")
    options = parse_options(parser)
    with load(options.model, threads=options.threads, n_ubatch=options.batch, mmap=not options.no_mmap) as model:
        batches = batches_of(model.n_vocab, options)
        (segment,) = model.segments
        limits = model.session(2 * options.batch * options.steps).limits
        program = model.backend(segment.device).compile(segment.ops, limits, segment.leaves)
        assert isinstance(program, CPUProgram)
        for batch in batches[:2]:
            program.run(batch)
        timings, microseconds, all_seconds = measure(program, batches)
    print(f"{options.model.name}, {options.steps} steps of {options.batch}, {options.threads} threads; {machine()}\n")
    print("| operation: entry | entries | us | share | GB/s |\n|---|---|---|---|---|")
    total = sum(microseconds)
    for name, kind in kinds_of(timings, microseconds, options.batch).items():
        speed = f"{kind.weight_bytes / kind.microseconds / 1e3:.1f}" if kind.weight_bytes else ""
        share = kind.microseconds / total
        print(f"| {name} | {kind.entries} | {kind.microseconds:.1f} | {share:.1%} | {speed} |")
    print(f"\nentries {total:.0f} us, a whole step {all_seconds:.0f} us")


if __name__ == "__main__":
    record_output(main)
