"""Measure matrix products against ggml's, in one run on the same cores: GB/s of one row, GFLOP/s of many.

    benchmarks/bench_matmul.py                          one thread: one row (from DRAM) and 512 rows, every type
    benchmarks/bench_matmul.py --threads 2 --types Q4_K,Q8_0

ggml computes graphs of one mul_mat on its CPU backend, with plain weights and, where it has one, its repacked layout;
the faster counts. Both sides quantize the activations as part of the product. They take turns, --rounds times; the best
of each counts, since on shared machines the rest is noise. One thread is measured in CPU time, to exclude other
programs. Results are compared first (NMSE).
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import c_bool, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from processes import llama_bin

from quantkit.kernels import quantize
from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.matmul import activations
from quantkit.kernels.cpu.matmul.matmul import activation_format, mul_mat, products_of, row_bytes, scratch_bytes
from quantkit.kernels.formats import FORMATS, has_encoder
from quantkit.types import BY_NAME, TensorType

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from blocks import random_rows  # noqa: E402

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
REPACKED = ("Q4_0", "Q2_K", "Q4_K", "IQ4_NL", "MXFP4")
N_IN, N_OUT = 2048, 1024


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    made = getattr(library, name)
    made.restype, made.argtypes = result, arguments
    return made  # type: ignore[no-any-return]


class Ggml:
    """The part of libggml-cpu that a mul_mat needs, through ctypes."""

    def __init__(self) -> None:
        folder = llama_bin()
        if folder is None:
            raise SystemExit("llama.cpp's libraries are not here: run scripts/peers, or set QUANTKIT_LLAMA_BIN")
        base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)
        p = c_void_p
        self.init = _function(base, "ggml_init", p, _InitParams)
        self.tensor = _function(base, "ggml_new_tensor_2d", p, p, c_int, c_int64, c_int64)
        self.mul_mat = _function(base, "ggml_mul_mat", p, p, p, p)
        self.new_graph = _function(base, "ggml_new_graph", p, p)
        self.expand = _function(base, "ggml_build_forward_expand", None, p, p)
        self.allocate = _function(base, "ggml_backend_alloc_ctx_tensors_from_buft", p, p, p)
        self.free_buffer = _function(base, "ggml_backend_buffer_free", None, p)
        self.set = _function(base, "ggml_backend_tensor_set", None, p, p, c_size_t, c_size_t)
        self.get = _function(base, "ggml_backend_tensor_get", None, p, p, c_size_t, c_size_t)
        self.compute = _function(base, "ggml_backend_graph_compute", c_int, p, p)
        self.backend = _function(cpu, "ggml_backend_cpu_init", p)()
        self.threads = _function(cpu, "ggml_backend_cpu_set_n_threads", None, p, c_int)
        self.plain = _function(base, "ggml_backend_cpu_buffer_type", p)
        self.repacked = _function(cpu, "_Z35ggml_backend_cpu_repack_buffer_typev", p)


class Graph:
    """A mul_mat in ggml."""

    def __init__(self, ggml: Ggml, t: TensorType, w: U8, x: F32, repacked: bool) -> None:
        self.ggml, self.shape = ggml, (len(x), len(w))
        context = [ggml.init(_InitParams(1 << 20, None, True)) for _ in range(2)]
        weight = ggml.tensor(context[0], t.id, x.shape[1], len(w))
        self.buffers = [ggml.allocate(context[0], (ggml.repacked if repacked else ggml.plain)())]
        ggml.set(weight, address_of(w), 0, w.nbytes)
        operand = ggml.tensor(context[1], 0, x.shape[1], len(x))
        self.out = ggml.mul_mat(context[1], weight, operand)
        self.graph = ggml.new_graph(context[1])
        ggml.expand(self.graph, self.out)
        self.buffers.append(ggml.allocate(context[1], ggml.plain()))
        ggml.set(operand, address_of(x), 0, x.nbytes)

    def run(self) -> None:
        if self.ggml.compute(self.ggml.backend, self.graph):
            raise SystemExit("ggml could not compute a mul_mat")

    def result(self) -> F32:
        out = np.empty(self.shape, np.float32)
        self.ggml.get(self.out, address_of(out), 0, out.nbytes)
        return out

    def free(self) -> None:
        for buffer in self.buffers:
            self.ggml.free_buffer(buffer)


class Ours:
    """The same as a tape of two operations."""

    def __init__(self, team: Team, t: TensorType, w: U8, x: F32) -> None:
        kind, n_in = activation_format(t), x.shape[1]
        batch = Batch(team, len(x))
        batch.set(np.zeros(len(x), np.int32))
        stride, each = row_bytes(kind, n_in), -(-scratch_bytes(t, n_in) // 64) * 64
        self.out = np.empty((len(x), len(w)), np.float32)
        rows = x if kind == "f32" else _aligned(stride * len(x))
        scratch = _aligned(each * team.threads)
        product = mul_mat.block(
            batch=batch.address, x=address_of(rows), x_stride=stride, w=address_of(w), row_bytes=w.shape[1],
            products=products_of(t), n_in=n_in, n_out=len(w), out=address_of(self.out), out_stride=4 * len(w),
            rows_of=0, per=1, bias=0, scale=0, scratch=address_of(scratch), scratch_bytes=each,
        )  # fmt: skip
        entries = [(mul_mat, product)]
        if kind != "f32":
            made = activations.quantize(kind)
            block = made.block(batch=batch.address, x=address_of(x), out=address_of(rows), n=n_in, rows_of=0, per=1)
            entries.insert(0, (made, block))
        self.tape, self._keep = Tape(team, batch, entries), (w, x, rows, scratch)

    def run(self) -> None:
        self.tape.run()


def _aligned(n: int) -> U8:
    space = np.zeros(n + 64, np.uint8)
    start = -address_of(space) % 64
    return space[start : start + n]


def weights(t: TensorType, n_out: int, n_in: int) -> U8:
    """Return rows of a type: encoded normal values, tiled, or without an encoder random bytes with small scales."""
    rng = np.random.default_rng(1)
    rows = min(n_out, 256)
    if has_encoder(t):
        some = quantize(rng.normal(0, 0.02, (rows, n_in)).astype(np.float32), t, np.ones(n_in, np.float32))
    else:
        some = random_rows(t, rows, n_in, scale=(0.005, 0.02))
    return np.ascontiguousarray(np.resize(some, (n_out, some.shape[1])))


def measure(ggml: Ggml, team: Team, t: TensorType, count: int, megabytes: int, rounds: int) -> str:
    """Return a table row: the speed of quantkit and ggml with ``count`` rows of activations."""
    n_out = (megabytes << 20) // t.row_bytes(N_IN) if count == 1 else N_OUT
    w = weights(t, n_out // 32 * 32, N_IN)
    x = np.random.default_rng(2).standard_normal((count, N_IN)).astype(np.float32)
    ours = Ours(team, t, w, x)
    graphs = [Graph(ggml, t, w, x, False)]
    if t.name in REPACKED:
        graphs.append(Graph(ggml, t, w, x, True))
    clock = time.thread_time if team.threads == 1 else time.perf_counter
    runs: Sequence[Ours | Graph] = (ours, *graphs)
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for i, run in enumerate(runs):
            began = clock()
            run.run()
            best[i] = min(best[i], clock() - began)
    theirs = graphs[0].result()
    error = np.mean((ours.out - theirs) ** 2, dtype=np.float64) / np.mean(theirs**2, dtype=np.float64)
    for graph in graphs:
        graph.free()
    work = w.nbytes / 1e9 if count == 1 else 2 * count * w.shape[0] * N_IN / 1e9
    speeds = [work / seconds for seconds in best]
    form = " repacked" if len(speeds) > 2 and speeds[2] > speeds[1] else ""
    fastest = max(speeds[1:])
    return f"| {t.name} | {speeds[0]:.1f} | {fastest:.1f}{form} | {speeds[0] / fastest:.2f} | {error:.0e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(FORMATS), help="comma-separated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,512", help="rows of activations, comma-separated")
    parser.add_argument("--megabytes", type=int, default=96, help="size of the weights for one row of activations")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    ggml, team = Ggml(), Team(options.threads)
    ggml.threads(ggml.backend, options.threads)
    for count in map(int, options.rows.split(",")):
        unit = "GB/s" if count == 1 else "GFLOP/s"
        print(f"\n{count} rows of {N_IN}, {options.threads} threads, {unit}\n")
        print("| type | quantkit | ggml | ratio | NMSE |\n|---|---|---|---|---|")
        for name in options.types.split(","):
            print(measure(ggml, team, BY_NAME[name], count, options.megabytes, options.rounds), flush=True)


if __name__ == "__main__":
    main()
