"""Measure a layer of experts, fused and unfused, merged and split, against ggml's MUL_MAT_ID on the same cores.

    benchmarks/bench_moe.py [--types Q4_K IQ4_XS Q8_0] [--tokens 1 512] [--threads 2] [--rounds 7]

The shapes are those of Qwen3-30B-A3B: 128 experts, 8 used, 2048 wide, 768 rows each of gate and up. Weights and ids are
random, from a seed; for one token, four draws run in sequence so that weights come from memory. All take turns, and
medians are reported. The time covers gate, up, their activation and down, including quantization of activations;
``combine`` is shown separately. Results are compared with ggml's before anything is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from ctypes import POINTER, Structure, c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
from processes import llama_bin
from results import parse_options, record_output

from quantkit.kernels import quantize
from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.layer.glu import glu, limits
from quantkit.kernels.cpu.layer.route import combine
from quantkit.kernels.cpu.matmul.activations import quantize as quantize_activations
from quantkit.kernels.cpu.matmul.activations import row_bytes
from quantkit.kernels.cpu.matmul.moe import (
    bucket,
    mul_mat_id,
    plan_bytes,
    products_of,
    scratch_bytes,
    up_gate_id,
)
from quantkit.kernels.formats import activation_format
from quantkit.model.ops import Activation
from quantkit.types import BY_NAME, TensorType

N_EXPERT, N_USED, WIDTH, N_FF = 128, 8, 2048, 768
SILU = Activation("silu")
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


def experts(t: TensorType, n_out: int, n_in: int, seed: int) -> U8:
    """Return weights [N_EXPERT, n_out, row_bytes]: two encoded experts, repeated with shifted rows."""
    w = np.random.default_rng(seed).normal(0, 0.02, (n_out, n_in)).astype(np.float32)
    rows = quantize(w, t, np.ones(n_in, np.float32))
    return np.stack([np.roll(rows, 7 * e, axis=0) for e in range(N_EXPERT)])


def space(nbytes: int) -> U8:
    """Return zeroed bytes, 64-byte aligned."""
    data = np.zeros(nbytes + 64, np.uint8)
    return data[-address_of(data) % 64 :][:nbytes]


class Layer:
    """The experts of one layer, and tapes that run them for the given ids [runs, tokens, N_USED]."""

    def __init__(self, t: TensorType, team: Team, x: F32, ids: I32, weights: tuple[U8, U8, U8]) -> None:
        self.t, self.team, self.x, self.ids = t, team, x, ids
        self.gate, self.up, self.down = weights
        tokens, pairs = len(x), len(x) * N_USED
        self.batch = Batch(team, tokens)
        self.batch.set(np.zeros(tokens, np.int32))
        self.kind = activation_format(t)
        self.x_stride, self.h_stride = row_bytes(self.kind, WIDTH), row_bytes(self.kind, N_FF)
        self.plan = space(plan_bytes(N_EXPERT, N_USED, tokens))
        self.quantized_x, self.quantized_h = space(tokens * self.x_stride), space(pairs * self.h_stride)
        self.gates, self.ups, self.h = (np.zeros((pairs, N_FF), np.float32) for _ in range(3))
        self.both = np.zeros((pairs, 2 * N_FF), np.float32)
        self.y, self.out = np.zeros((pairs, WIDTH), np.float32), np.zeros((tokens, WIDTH), np.float32)
        self.weights = np.full((tokens, N_USED), 1 / N_USED, np.float32)
        self.scratch_bytes = max(scratch_bytes(t, WIDTH), scratch_bytes(t, N_FF))
        self.scratch = space(team.threads * self.scratch_bytes)

    def entry(self, op: Any, **slots: float) -> tuple[Any, npt.NDArray[np.int64]]:
        all_slots = {"batch": self.batch.address, "rows_of": 0, **slots}
        return op, op.block(**{name: all_slots[name] for name in op.slots})

    def product(self, w: U8, n_in: int, out: F32) -> tuple[Any, npt.NDArray[np.int64]]:
        down = n_in == N_FF
        return self.entry(
            mul_mat_id, out=address_of(out), products=products_of(self.t), w=address_of(w), row_bytes=w.strides[1],
            expert_bytes=w.strides[0], n_out=w.shape[1], bias=0, bias_stride=0, scale=0, **self.common(down),
        )  # fmt: skip

    def common(self, down: bool) -> dict[str, int]:
        return {
            "x": address_of(self.quantized_h if down else self.quantized_x),
            "x_stride": self.h_stride if down else self.x_stride,
            "x_per": 1 if down else N_USED,
            "n_in": N_FF if down else WIDTH,
            "plan": address_of(self.plan),
            "n_expert": N_EXPERT,
            "n_used": N_USED,
            "scratch": address_of(self.scratch),
            "scratch_bytes": self.scratch_bytes,
        }

    def gated(self, form: str, merged: U8) -> list[tuple[Any, npt.NDArray[np.int64]]]:
        if form == "fused" or form == "fused merged":
            half = N_FF * merged.strides[1]
            is_merged = form == "fused merged"
            return [
                self.entry(
                    up_gate_id(SILU), out=address_of(self.h), products=products_of(self.t), n_out=N_FF,
                    gate=address_of(merged if is_merged else self.gate),
                    up=address_of(merged) + half if is_merged else address_of(self.up),
                    row_bytes=merged.strides[1], gate_expert_bytes=(merged if is_merged else self.gate).strides[0],
                    up_expert_bytes=(merged if is_merged else self.up).strides[0],
                    **dict.fromkeys(("up_bias", "gate_bias", "up_bias_stride", "gate_bias_stride"), 0),
                    up_scale=0, gate_scale=0, **self.common(False), **limits(SILU),
                )
            ]  # fmt: skip
        if form == "merged":
            products, gate, up = [self.product(merged, WIDTH, self.both)], self.both, 0
        else:
            products = [self.product(self.gate, WIDTH, self.gates), self.product(self.up, WIDTH, self.ups)]
            gate, up = self.gates, address_of(self.ups)
        tail = self.entry(
            glu(SILU), out=address_of(self.h), gate=address_of(gate), up=up, width=N_FF, gate_width=N_FF,
            per=N_USED, **limits(SILU),
        )  # fmt: skip
        return [*products, tail]

    def tape(self, form: str, merged: U8, with_combine: bool = False) -> Tape:
        entries = []
        for run in self.ids:
            entries += [
                self.entry(
                    quantize_activations(self.kind), x=address_of(self.x), out=address_of(self.quantized_x), n=WIDTH,
                    per=1,
                ),
                self.entry(bucket, plan=address_of(self.plan), ids=address_of(run), n_expert=N_EXPERT, n_used=N_USED),
                *self.gated(form, merged),
                self.entry(
                    quantize_activations(self.kind), x=address_of(self.h), out=address_of(self.quantized_h), n=N_FF,
                    per=N_USED,
                ),
                self.product(self.down, N_FF, self.y),
            ]  # fmt: skip
            if with_combine:
                entries.append(
                    self.entry(
                        combine, out=address_of(self.out), x=address_of(self.y), weights=address_of(self.weights),
                        width=WIDTH, n_used=N_USED,
                    )
                )  # fmt: skip
        return Tape(self.team, self.batch, entries)


# ---------------------------------------------------------------- ggml


class InitParams(Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class Plan(Structure):
    _fields_ = [
        ("work_size", c_size_t), ("work_data", c_void_p), ("n_threads", c_int), ("threadpool", c_void_p),
        ("abort_callback", c_void_p), ("abort_callback_data", c_void_p), ("use_ref", c_bool),
    ]  # fmt: skip


class Ggml:
    """The same layer as a ggml graph: MUL_MAT_ID of up and gate, SWIGLU, MUL_MAT_ID of down."""

    def __init__(self, layer: Layer, threads: int) -> None:
        folder = llama_bin()
        if folder is None:
            raise SystemExit("llama.cpp's libraries not found: run scripts/peers, or set QUANTKIT_LLAMA_BIN")
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        for name in ("ggml_init", "ggml_new_tensor_2d", "ggml_new_tensor_3d", "ggml_mul_mat_id", "ggml_swiglu_split",
                     "ggml_new_graph", "ggml_get_data", "ggml_reshape_3d"):  # fmt: skip
            getattr(self.base, name).restype = c_void_p
        self.cpu.ggml_graph_plan.restype = Plan
        self.cpu.ggml_cpu_init()
        arrays = [layer.gate, layer.up, layer.down]
        size = sum(a.nbytes for a in arrays) + 4 * len(layer.x) * N_USED * (3 * N_FF + 2 * WIDTH) * len(layer.ids)
        self.context = c_void_p(self.base.ggml_init(InitParams(size + (64 << 20), None, False)))
        t, tokens = layer.t, len(layer.x)
        gate, up, down = (self.tensor(a, t.id, n, a.shape[1], N_EXPERT) for a, n in
                          zip(arrays, (WIDTH, WIDTH, N_FF), strict=True))  # fmt: skip
        x = self.tensor(layer.x, 0, WIDTH, 1, tokens)
        self.graph = c_void_p(self.base.ggml_new_graph(self.context))
        for run in layer.ids:
            ids = c_void_p(self.base.ggml_new_tensor_2d(self.context, c_int(26), c_int64(N_USED), c_int64(tokens)))
            self.fill(ids, run)
            products = [c_void_p(self.base.ggml_mul_mat_id(self.context, w, x, ids)) for w in (up, gate)]
            h = c_void_p(self.base.ggml_swiglu_split(self.context, products[1], products[0]))
            y = c_void_p(self.base.ggml_mul_mat_id(self.context, down, h, ids))
            self.base.ggml_build_forward_expand(self.graph, y)
        self.y = y
        self.shape = (tokens * N_USED, WIDTH)
        self.plan = self.cpu.ggml_graph_plan(self.graph, c_int(threads), None)
        self.work = space(self.plan.work_size + 64)
        self.plan.work_data = address_of(self.work)

    def tensor(self, data: npt.NDArray[Any], kind: int, *ne: int) -> c_void_p:
        tensor = c_void_p(self.base.ggml_new_tensor_3d(self.context, c_int(kind), *map(c_int64, ne)))
        self.fill(tensor, data)
        return tensor

    def fill(self, tensor: c_void_p, data: npt.NDArray[Any]) -> None:
        ctypes.memmove(self.base.ggml_get_data(tensor), data.ctypes.data, data.nbytes)

    def run(self) -> None:
        if self.cpu.ggml_graph_compute(self.graph, ctypes.byref(self.plan)) != 0:
            raise SystemExit("ggml_graph_compute failed")

    def result(self) -> F32:
        data = ctypes.cast(self.base.ggml_get_data(self.y), POINTER(c_float))
        return np.ctypeslib.as_array(data, self.shape).copy()


# ---------------------------------------------------------------- runs in turns


def medians(runs: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Run all in turns and return the median milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            start = clock()
            run()
            times[name].append((clock() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def bench(t: TensorType, tokens: int, threads: int, rounds: int, peer: bool) -> None:
    rng = np.random.default_rng(tokens)
    weights = (experts(t, N_FF, WIDTH, 1), experts(t, N_FF, WIDTH, 2), experts(t, WIDTH, N_FF, 3))
    merged = np.concatenate(weights[:2], axis=1)
    repeats = 4 if tokens < 8 else 1
    ids = np.array([[rng.permutation(N_EXPERT)[:N_USED] for _ in range(tokens)] for _ in range(repeats)], np.int32)
    layer = Layer(t, Team(threads), rng.standard_normal((tokens, WIDTH)).astype(np.float32), ids, weights)
    hows = ("fused", "fused merged", "merged", "separate")
    tapes = {form: layer.tape(form, merged) for form in hows}
    runs: dict[str, Callable[[], object]] = {form: tape.run for form, tape in tapes.items()}
    if peer:
        ggml = Ggml(layer, threads)
        ggml.run()
        want = ggml.result()
        runs["ggml"] = ggml.run
        for form, tape in tapes.items():
            tape.run()
            nmse = np.sum((layer.y.astype(np.float64) - want) ** 2) / np.sum(want.astype(np.float64) ** 2)
            if not nmse < 1e-6:
                raise SystemExit(f"{t.name} {form}: NMSE against ggml is {nmse:.2g}")
    # One thread is measured in CPU time, which other programs affect less.
    ms = medians(runs, rounds, time.thread_time if threads == 1 else time.perf_counter)
    touched = sum(len(np.unique(run)) for run in ids) * sum(w[0].nbytes for w in weights)
    work = 2 * repeats * tokens * N_USED * 3 * WIDTH * N_FF
    timed = layer.tape("fused", merged, with_combine=True)
    timed.run_timed()
    parts = timed.run_timed().reshape(repeats, -1).sum(axis=0) / 1e6
    print(f"{t.name}, {tokens} tokens, {threads} threads")
    for name, value in ms.items():
        against = f"{ms['ggml'] / value:6.2f}x ggml" if peer else ""
        speeds = f"{touched / value / 1e6:8.1f} GB/s {work / value / 1e6:8.0f} GFLOP/s"
        print(f"  {name:13} {value:9.3f} ms {speeds} {against}")
    print(f"  fused is {ms['separate'] / ms['fused']:.3f}x separate, merged {ms['separate'] / ms['merged']:.3f}x")
    names = ("quantize x", "bucket", "up gate", "quantize h", "down", "combine")
    print("  " + ", ".join(f"{name} {part:.3f}" for name, part in zip(names, parts, strict=True)) + " ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=["Q4_K", "IQ4_XS", "Q8_0"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-peer", action="store_true", help="without ggml")
    options = parse_options(parser)
    for name in options.types:
        for tokens in options.tokens:
            bench(BY_NAME[name], tokens, options.threads, options.rounds, not options.no_peer)


if __name__ == "__main__":
    record_output(main)
