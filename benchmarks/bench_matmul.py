"""Measure matrix products against ggml's, in one run on the same cores: GB/s of one row, GFLOP/s of many.

    benchmarks/bench_matmul.py                          one thread: one row (from DRAM) and 512 rows, every type
    benchmarks/bench_matmul.py --threads 2 --types Q4_K,Q8_0
    benchmarks/bench_matmul.py --peer ik --types IQ2_KT,IQ4_KS --rows 1,8,32 --shape 2048x768

ggml (llama.cpp's, or with --peer ik that of the wheel ik-llama-cpp-python) computes graphs of one mul_mat on its CPU
backend, with plain weights and, where it exists, an interleaved layout: llama.cpp's repacked one, ik's _R4 or _R8 type;
the faster is reported. For one row, the machine's bandwidth is shown too: a sum over the same bytes. Both sides
quantize the activations as part of the product. They take turns, --rounds times; the best of each is reported, because
on shared machines the rest is noise. One thread is measured in CPU time, to exclude other programs. Results are
compared first (NMSE).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import c_bool, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from processes import llama_bin, package_folder
from results import parse_options, record_output

from quantkit.kernels.cpu.core.jit import kernel
from quantkit.kernels.cpu.core.simd import i32x16, load, prefetch, splat, store
from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.interleave import interleave_rows
from quantkit.kernels.cpu.matmul import activations
from quantkit.kernels.cpu.matmul.matmul import (
    activation_format,
    cached_rows,
    mul_mat,
    products_of,
    row_bytes,
    scratch_bytes,
)
from quantkit.kernels.formats import FORMATS
from quantkit.kernels.interleave import interleaved_of
from quantkit.types import BY_NAME, TensorType

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("tests", "tests/lib")]

from blocks import random_rows  # noqa: E402

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
REPACKED = ("Q4_0", "Q2_K", "Q4_K", "IQ4_NL", "MXFP4")


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]


class Ggml:
    """The functions of libggml-cpu for a mul_mat, through ctypes."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        base, cpu = self._ik() if peer == "ik" else self._llama()
        p = c_void_p
        self.init = _function(base, "ggml_init", p, _InitParams)
        self.free_context = _function(base, "ggml_free", None, p)
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
        if peer == "llama":
            self.repacked = _function(cpu, "_Z35ggml_backend_cpu_repack_buffer_typev", p)

    @staticmethod
    def _llama() -> tuple[ctypes.CDLL, ctypes.CDLL]:
        folder = llama_bin()
        if folder is None:
            raise SystemExit("llama.cpp's libraries not found: run scripts/peers, or set QUANTKIT_LLAMA_BIN")
        base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        return base, ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)

    @staticmethod
    def _ik() -> tuple[ctypes.CDLL, ctypes.CDLL]:
        folder = package_folder("ik_llama_cpp")
        if folder is None:
            raise SystemExit("the wheel ik-llama-cpp-python is not installed: run scripts/test once")
        library = ctypes.CDLL(str(folder / "lib" / "libggml.so"), os.RTLD_DEEPBIND)
        return library, library

    def graphs(self, t: TensorType, w: U8, x: F32) -> dict[str, Graph]:
        """Return the graphs of a product, by the layout of the weights."""
        graphs_by_name = {"": Graph(self, t, w, x)}
        interleaved = interleaved_of(t)
        if self.peer == "llama" and t.name in REPACKED:
            graphs_by_name["repacked"] = Graph(self, t, w, x, self.repacked())
        elif self.peer == "ik" and interleaved is not None and interleaved.trees == "ik":
            rows = np.empty((len(w), interleaved.row_bytes(x.shape[1])), np.uint8)
            interleave_rows(interleaved, w, rows)
            graphs_by_name[interleaved.name] = Graph(self, interleaved, rows, x)
        return graphs_by_name


class Graph:
    """A mul_mat in ggml."""

    def __init__(self, ggml: Ggml, t: TensorType, w: U8, x: F32, buffer_type: Any = None) -> None:
        self.ggml, self.shape = ggml, (len(x), len(w))
        self.contexts = context = [ggml.init(_InitParams(1 << 20, None, True)) for _ in range(2)]
        weight = ggml.tensor(context[0], t.id, x.shape[1], len(w))
        self.buffers = [ggml.allocate(context[0], buffer_type or ggml.plain())]
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
        for context in self.contexts:
            self.ggml.free_context(context)


class Quantkit:
    """The same mul_mat as a tape of two operations."""

    def __init__(self, team: Team, t: TensorType, w: U8, x: F32) -> None:
        kind, n_in = activation_format(t), x.shape[1]
        batch = Batch(team, len(x))
        batch.set(np.zeros(len(x), np.int32))
        stride, scratch_size = row_bytes(kind, n_in), -(-scratch_bytes(t, n_in) // 64) * 64
        self.out = np.empty((len(x), len(w)), np.float32)
        rows = x if kind == "f32" else _aligned(stride * len(x))
        scratch = _aligned(scratch_size * team.threads)
        product = mul_mat.block(
            batch=batch.address, x=address_of(rows), x_stride=stride, w=address_of(w), row_bytes=w.shape[1],
            products=products_of(t), n_in=n_in, n_out=len(w), out=address_of(self.out), out_stride=4 * len(w),
            rows_of=0, per=1, bias=0, scale=0, scratch=address_of(scratch), scratch_bytes=scratch_size,
            at_once=cached_rows(stride),
        )  # fmt: skip
        entries = [(mul_mat, product)]
        if kind != "f32":
            quantizer = activations.quantize(kind)
            block = quantizer.block(
                batch=batch.address, x=address_of(x), out=address_of(rows), n=n_in, rows_of=0, per=1
            )
            entries.insert(0, (quantizer, block))
        self.tape, self._keep = Tape(team, batch, entries), (w, x, rows, scratch)

    def run(self) -> None:
        self.tape.run()


def _aligned(n: int) -> U8:
    space = np.zeros(n + 64, np.uint8)
    start = -address_of(space) % 64
    return space[start : start + n]


def weights(t: TensorType, n_out: int, n_in: int) -> U8:
    """Return rows of a type: random bytes with small scales, tiled."""
    sample = random_rows(t, min(n_out, 256), n_in, scale=(0.005, 0.02))
    return np.ascontiguousarray(np.resize(sample, (n_out, sample.shape[1])))


@kernel
def read_all(data: int, n: int, out: int) -> None:
    """Sum n bytes, as dwords."""
    a = b = c = d = splat(i32x16, 0)
    for offset in range(0, n - 255, 256):
        for line in range(4):
            prefetch(data, offset + 4096 + 64 * line)
        a, b = a + load(i32x16, data, offset), b + load(i32x16, data, offset + 64)
        c, d = c + load(i32x16, data, offset + 128), d + load(i32x16, data, offset + 192)
    store(out, 0, a + b + c + d)


class Bandwidth:
    """A thread that reads the same bytes."""

    def __init__(self, w: U8) -> None:
        self.w, self.out = w, np.empty(64, np.uint8)

    def run(self) -> None:
        read_all(address_of(self.w), self.w.nbytes, address_of(self.out))


def measure(ggml: Ggml, team: Team, t: TensorType, shape: tuple[int, int], count: int, rounds: int) -> str:
    """Return a table row: the speed of quantkit and ggml with ``count`` rows of activations."""
    n_in, n_out = shape
    w = weights(t, n_out // 32 * 32, n_in)
    x = np.random.default_rng(2).standard_normal((count, n_in)).astype(np.float32)
    product, reader = Quantkit(team, t, w, x), Bandwidth(w)
    graphs = ggml.graphs(t, w, x)
    clock = time.thread_time if team.threads == 1 else time.perf_counter
    runs: Sequence[Quantkit | Graph | Bandwidth] = (product, reader, *graphs.values())
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for i, run in enumerate(runs):
            began = clock()
            run.run()
            best[i] = min(best[i], clock() - began)
    expected = graphs[""].result()
    error = np.mean((product.out - expected) ** 2, dtype=np.float64) / np.mean(expected**2, dtype=np.float64)
    for graph in graphs.values():
        graph.free()
    work = w.nbytes / 1e9 if count == 1 else 2 * count * w.shape[0] * n_in / 1e9
    speed, bandwidth, *speeds = (work / seconds for seconds in best)
    fastest = max(range(len(speeds)), key=speeds.__getitem__)
    form, ratio = f" {list(graphs)[fastest]}".rstrip(), speed / speeds[fastest]
    suffix = f" {w.shape[0] * n_in / best[0] / 1e9:.1f} | {bandwidth:.1f} |" if count == 1 else ""
    return f"| {t.name} | {speed:.1f} | {speeds[fastest]:.1f}{form} | {ratio:.2f} |{suffix} {error:.0e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="comma-separated; default: all types of the peer")
    parser.add_argument("--peer", choices=("llama", "ik"), default="llama")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,512", help="rows of activations, comma-separated")
    parser.add_argument("--shape", default="2048x1024", help="values of a row, and rows, of the weights")
    parser.add_argument("--megabytes", type=int, default=96, help="size of the weights for one row of activations")
    parser.add_argument("--rounds", type=int, default=7)
    options = parse_options(parser)
    ggml, team = Ggml(options.peer), Team(options.threads)
    ggml.threads(ggml.backend, options.threads)
    tree = "ik" if options.peer == "ik" else "mainline"
    types = options.types.split(",") if options.types else [n for n in FORMATS if BY_NAME[n].trees in ("both", tree)]
    n_in, n_out = map(int, options.shape.split("x"))
    for count in map(int, options.rows.split(",")):
        unit, columns = ("GB/s", " Gweights/s | bandwidth |") if count == 1 else ("GFLOP/s", "")
        print(f"\n{count} rows of {n_in}, {options.threads} threads, {unit}\n")
        print(f"| type | quantkit | {options.peer} | ratio |{columns} NMSE |\n|" + "---|" * (7 if columns else 5))
        for t in (BY_NAME[name] for name in types):
            rows = (options.megabytes << 20) // t.row_bytes(n_in) if count == 1 else n_out
            print(measure(ggml, team, t, (n_in, rows), count, options.rounds), flush=True)


if __name__ == "__main__":
    record_output(main)
