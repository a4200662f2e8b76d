"""Measure the gain of each fusion, of merging and of a quantized router: in turns in one process, to share the noise.

    benchmarks/bench_fusion.py MOE-WITH-ROUTER-Q8_0.gguf MOE-WITH-ROUTER-F32.gguf

Every round runs a prompt and some single tokens with each variant, in rotated order; a gain is the median over rounds
of a variant's time relative to the first one's in the same round. The share of bytes that a switch saves is shown with
the gain: fusion saves traffic of activations, not of weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from processes import machine
from results import parse_options, record_output

from quantkit.model.cost import token_cost
from quantkit.model.engine import Session, load
from quantkit.model.fusion import Fusion


def variants(quantized_router: Path, plain_router: Path | None) -> dict[str, dict[str, Any]]:
    """Return the options of every variant; the first is the baseline."""
    base: dict[str, Any] = {"path": quantized_router}
    settings: dict[str, dict[str, Any]] = {
        "all fused": base,
        "MoE up+gate not fused": base | {"fusion": Fusion(moe=False)},
        "q/k/v not fused": base | {"fusion": Fusion(qkv=False)},
        "nothing fused": base | {"fusion": Fusion.none()},
        "merged at load, fused": base | {"merge_up_gate": True},
        "merged at load, not fused": base | {"merge_up_gate": True, "fusion": Fusion(moe=False)},
    }
    if plain_router is not None:
        settings["router as in the other file"] = {"path": plain_router}
    return settings


def once(session: Session, prompt: Any, single: Any) -> tuple[float, float]:
    """Return the seconds of a prompt and of the single tokens after it."""
    session.clear()
    mask = np.zeros(len(prompt), bool)
    mask[-1] = True
    began = time.perf_counter()
    session.decode(prompt, outputs=mask)
    middle = time.perf_counter()
    for token in single:
        session.decode(token[None])
    return middle - began, time.perf_counter() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("other", type=Path, nargs="?", help="the same model with its router in F32")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=48)
    options = parse_options(parser)
    names = variants(options.model, options.other)
    sessions = {n: load(**o).session(options.prompt + options.gen) for n, o in names.items()}
    rng = np.random.default_rng(1)
    vocabulary = next(iter(sessions.values())).model.n_vocab
    times: dict[str, list[tuple[float, float]]] = {n: [] for n in names}
    for turn in range(options.rounds + 1):
        tokens = rng.integers(0, vocabulary, options.prompt + options.gen).astype(np.int32)
        order = list(names)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            seconds = once(sessions[name], tokens[: options.prompt], tokens[options.prompt :])
            if turn:  # the first round compiles and reads
                times[name].append(seconds)
    report(options, sessions, times)


def report(options: Any, sessions: dict[str, Session], times: dict[str, list[tuple[float, float]]]) -> None:
    base = next(iter(times))
    cost = {n: token_cost(s.model.graph, "f16", options.prompt).bytes for n, s in sessions.items()}
    print(f"{options.model.name}, median of {options.rounds} rounds in one process; {machine()}\n")
    print(
        f"| variant | pp{options.prompt} t/s | tg{options.gen} t/s | bytes per token "
        "| first row is faster: prompt | tg |"
    )
    print("|---|---|---|---|---|---|")
    for name, runs in times.items():
        prompt, gen = (statistics.median(r[k] for r in runs) for k in (0, 1))
        gains = [statistics.median(r[k] / b[k] for r, b in zip(runs, times[base], strict=True)) - 1 for k in (0, 1)]
        share = cost[name] / cost[base] - 1
        print(
            f"| {name} | {options.prompt / prompt:.1f} | {options.gen / gen:.1f} | {share:+.1%} | {gains[0]:+.1%} | "
            f"{gains[1]:+.1%} |"
        )


if __name__ == "__main__":
    record_output(main)
