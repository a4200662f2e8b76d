"""Measure recurrent layers and attention: prompts in GFLOP/s of the f32 peak, generation in GB/s of the read bandwidth.

    benchmarks/bench_attention.py [--threads 1,2] [--rounds 15]

Peak and bandwidth are measured by the same threads: register tiles on data in L1, and a plain sum over 256 MB. A prompt
counts only the products that the causal mask keeps: 2 n (n + 1) / 2 per head and column of keys and values. The fastest
of several rounds is shown, in CPU time for one thread. KV caches of a few MB stay in the last-level cache, so rates can
exceed the memory's.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np
from numba.core import types
from results import parse_options, record_output

from quantkit.kernels.cpu.attention.attention import attention, scratch_bytes
from quantkit.kernels.cpu.attention.attention_tiles import outer, store_tile, zero_tile
from quantkit.kernels.cpu.core.simd import f32x16, hsum, load, prefetch, splat, store
from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of, arg, first_of, operation
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.layer.recurrent import convolve, delta_net, ssm_scan
from quantkit.kernels.parameters import MASKS
from quantkit.types import BY_NAME

#: n_head, n_head_kv, head_k, head_v; mla.
SHAPES = {
    "32/8 heads of 128": (32, 8, 128, 128, False),
    "32/4 heads of 128": (32, 4, 128, 128, False),
    "16/16 heads of 128": (16, 16, 128, 128, False),
    "9/3 heads of 64": (9, 3, 64, 64, False),
    "8/4 heads of 256": (8, 4, 256, 256, False),
    "MLA 16 heads of 576/512": (16, 1, 576, 512, True),
}
REPEATS = 200


@operation("batch x out")
def peak(args, tid, nth):
    """Accumulate into a tile from the same 16 KB repeatedly."""
    x = arg(args, 1) + 65536 * tid
    tile = zero_tile()
    for _ in range(REPEATS):
        for i in range(64):
            tile = outer(tile, x + 256 * i, 64, x + 4 * i, 256)
    store_tile(tile, arg(args, 2) + 4096 * tid, 256)


@operation("batch x n out")
def read(args, tid, nth):
    """Sum a whole buffer."""
    first, end = first_of(arg(args, 2) // 1024, tid, nth), first_of(arg(args, 2) // 1024, tid + 1, nth)
    total = splat(f32x16, 0.0)
    for i in range(first, end):
        for j in range(16):
            prefetch(arg(args, 1), 1024 * i + 64 * j + 8192)
            total = total + load(f32x16, arg(args, 1), 1024 * i + 64 * j)
    store(arg(args, 3), 64 * tid, types.float32(hsum(total)))


def fastest(run: Callable[[], None], rounds: int, threads: int) -> float:
    """Return the seconds of the fastest of several rounds, because other load only slows a round down."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    times = []
    run()
    for _ in range(rounds):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def measure_limits(team: Team, rounds: int) -> tuple[float, float]:
    """Return the GFLOP/s of register tiles and the read bandwidth in GB/s."""
    batch = Batch(team, 1)
    batch.set([0])
    x, out = np.ones(2**26, np.float32), np.zeros(2**16, np.float32)
    tile = Tape(team, batch, [(peak, peak.block(batch=batch.address, x=address_of(x), out=address_of(out)))] * 20)
    flops = 20 * REPEATS * 64 * 2 * 4 * 64 * team.threads
    block = read.block(batch=batch.address, x=address_of(x), n=x.nbytes, out=address_of(out))
    memory = Tape(team, batch, [(read, block)])
    return flops / fastest(tile.run, rounds, team.threads) / 1e9, x.nbytes / fastest(
        memory.run, rounds, team.threads
    ) / 1e9


def layer(team: Team, shape: tuple[int, int, int, int, bool], kind: str, n_ctx: int, n_max: int) -> tuple[Batch, Tape]:
    n_head, n_head_kv, head_k, head_v, mla = shape
    rng, t = np.random.default_rng(1), BY_NAME[kind]
    batch = Batch(team, n_max, n_ctx)

    def cache(width: int) -> np.ndarray:
        if kind == "Q8_0":
            data = rng.integers(0, 256, (n_ctx, width // 32, 34), np.uint8)
            data[:, :, 1] = 0x20
            return data
        return rng.normal(0, 1, (n_ctx, width)).astype(np.float32 if kind == "F32" else np.float16)

    keep = [cache(n_head_kv * head_k), cache(n_head_kv * head_v)]
    keep += [
        rng.normal(0, 1, (n_max, n_head * head_k)).astype(np.float32),
        np.zeros((n_max, n_head * head_v), np.float32),
    ]
    keep += [np.zeros(scratch_bytes(head_k, head_v, team.threads) + 64, np.uint8)]
    k, v, q, out, scratch = map(address_of, keep)
    block = attention.block(
        batch=batch.address,
        q=q,
        out=out,
        k_cache=k,
        v_cache=0 if mla else v,
        k_type=t.id,
        v_type=t.id,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_k=head_k,
        head_v=head_v,
        scale=head_k**-0.5,
        softcap=0.0,
        sinks=0,
        mask=MASKS.index("causal"),
        window=0,
        alibi=0.0,
        selected=0,
        n_selected=0,
        ratio=0,
        scratch=-(-scratch // 64) * 64,
    )
    tape = Tape(team, batch, [(attention, block)])
    tape.keep = keep  # type: ignore[attr-defined]
    return batch, tape


def prompts(team: Team, top: float, rounds: int, only: str) -> None:
    for name, shape in SHAPES.items():
        if only not in name:
            continue
        for kind in ("F32", "F16", "Q8_0"):
            batch, tape = layer(team, shape, kind, 2048, 2048)
            cells = []
            for n in (128, 512, 2048):
                batch.set(np.zeros(n))
                flops = 2 * shape[0] * (shape[2] + shape[3]) * n * (n + 1) / 2
                rate = flops / fastest(tape.run, rounds, team.threads) / 1e9
                cells.append(f"{rate:6.1f} ({rate / top:4.0%})")
            print(f"{team.threads}T prompt {name:25} {kind:5} " + " ".join(cells), flush=True)


def generation(team: Team, bandwidth: float, rounds: int, only: str) -> None:
    for name, shape in SHAPES.items():
        if only not in name:
            continue
        for kind in ("F32", "F16", "Q8_0"):
            batch, tape = layer(team, shape, kind, 8192, 16)
            per_key = BY_NAME[kind].row_bytes(shape[1] * (shape[2] + (0 if shape[4] else shape[3])))
            cells = []
            for depth in (16, 512, 2048, 8191):
                batch.set([0], [depth])
                seconds = fastest(tape.run, 5 * rounds, team.threads)
                rate = per_key * (depth + 1) / seconds / 1e9
                cells.append(f"{seconds * 1e6:7.1f} us {rate:5.1f} ({rate / bandwidth:4.0%})")
            print(f"{team.threads}T 1 token {name:25} {kind:5} " + " ".join(cells), flush=True)


def recurrent(team: Team, rounds: int) -> None:
    """Measure Qwen3-Next's gated delta net (16 key, 32 value heads, 128 x 128) and convolution (8192 wide), and the
    scan of Granite 4 H Tiny (48 heads of 64, a state of 128).
    """
    rng, n_max = np.random.default_rng(1), 512
    batch = Batch(team, n_max)
    q, k, v, x, out = (rng.normal(0, 0.05, (n_max, w)).astype(np.float32) for w in (2048, 2048, 4096, 8192, 8192))
    g, beta = np.full((n_max, 32), -0.1, np.float32), np.full((n_max, 32), 0.5, np.float32)
    state, taps, weight = (
        np.zeros(32 * 128 * 128, np.float32),
        np.zeros((3, 8192), np.float32),
        np.ones((8192, 4), np.float32),
    )
    arrays_by_name = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "out": out, "state": state}
    shape = {"n_k_head": 16, "n_v_head": 32, "head_k": 128, "head_v": 128, "scale": 128**-0.5, "tiled": 0}
    delta = delta_net.block(batch=batch.address, **{name: address_of(a) for name, a in arrays_by_name.items()}, **shape)
    arrays_by_name = {"x": x, "out": out, "weight": weight, "state": taps}
    addresses = {name: address_of(a) for name, a in arrays_by_name.items()}
    conv = convolve.block(batch=batch.address, **addresses, bias=0, taps=4, width=8192)
    a, d, bias = np.full(48, -1.0, np.float32), np.ones(48, np.float32), np.full(48, -2.0, np.float32)
    arrays_by_name = {
        "x": x,
        "z": v,
        "b": q,
        "c": k,
        "dt": np.ones((n_max, 48), np.float32),
        "dt_bias": bias,
        "a": a,
        "d": d,
    }
    arrays_by_name |= {"out": out, "state": np.zeros(48 * 128 * 64, np.float32)}
    addresses = {name: address_of(array) for name, array in arrays_by_name.items()}
    scan = ssm_scan.block(batch=batch.address, **addresses, n_head=48, n_group=1, head=64, d_state=128)
    flops = {delta_net: 32 * 128 * 128 * 7, ssm_scan: 48 * 128 * 64 * 5}
    for n in (1, n_max):
        batch.set(np.zeros(n), np.arange(n) + 1)
        for operation_, block in ((delta_net, delta), (convolve, conv), (ssm_scan, scan)):
            seconds = fastest(Tape(team, batch, [(operation_, block)]).run, rounds, team.threads)
            rate = f", {n * flops[operation_] / seconds / 1e9:.0f} GFLOP/s" if operation_ in flops else ""
            print(
                f"{team.threads}T {operation_.name:9} {n:4} tokens: {seconds / n * 1e6:7.1f} us a token{rate}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", default=f"1,{len(os.sched_getaffinity(0))}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="only shapes whose names contain this")
    options = parse_options(parser)
    for threads in map(int, options.threads.split(",")):
        team = Team(threads)
        top, bandwidth = measure_limits(team, options.rounds)
        print(f"{threads}T: register tiles {top:.0f} GFLOP/s, reading {bandwidth:.1f} GB/s")
        print("prompt: GFLOP/s and share of the tiles' rate, of 128, 512, 2048 tokens")
        prompts(team, top, options.rounds, options.only)
        print("one token: time, GB/s and share of reading, at depths 16, 512, 2048, 8191")
        generation(team, bandwidth, options.rounds, options.only)
        recurrent(team, options.rounds)


if __name__ == "__main__":
    record_output(main)
