"""Measure encoders against ggml, libgguf and ik_llama.cpp, in one run on the same CPUs.

    benchmarks/bench_quantize.py                       Mweights/s of every type, with and without importance
    benchmarks/bench_quantize.py --encoder ik          ik's searches, for the types where they differ from llama.cpp's
    benchmarks/bench_quantize.py --whole-file          a model of 2 GB: `quantkit quantize` against llama-quantize

Encoders: a matrix of normal weights with lognormal column scales, in memory. Each encoder gets enough rows for a call
of about --seconds; all take turns, --rounds times, and medians are reported. One thread is pinned to one CPU; several
threads take slabs of rows, for quantkit and the peers alike. quantkit's bytes are compared with ggml's before anything
is timed. The last rows are bounds by memory bandwidth: reading the matrix while writing 0, 1, 2 or 4 bytes per weight.

Whole file: both programs as processes, from start to exit, in turns; medians are reported. A warm-up turn brings the
input into the page cache and compiles quantkit's kernels. quantkit also flushes its output to disk (fsync).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from processes import Outcome, llama_bin, machine, make_moe, package_folder, quantkit, run, work_folder
from results import parse_options, record_output

from quantkit.cpus import available_cpus
from quantkit.formats.gguf import GGUFFile, open_gguf
from quantkit.types import BY_NAME, TYPES, TensorType
from quantkit.units import format_size

#: encode(x [rows, n], weights [n] or empty, out [rows, row_bytes], first row, end row)
Encode = Callable[[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.uint8], int, int], None]

PEERS = ("ggml", "libgguf", "ik")


class Output:
    """Prints text, and stores it for --append."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, text: str, end: str = "\n") -> None:
        print(text, end=end, flush=True)
        self.text += text + end


# --- libraries ---

#: Calls get whole groups of this many rows, the most that a type interleaves.
GROUP = 16


@dataclass
class Library:
    """An implementation: its description, and its encoder of a type (None if it has none)."""

    name: str
    description: str
    encoder: Callable[[TensorType], Encode | None]


def quantkit_library(encoder_name: str | None) -> Library:
    """quantkit's kernels."""
    from quantkit.kernels.cpu.encode import encoder

    return Library(
        "quantkit",
        f"quantkit's kernels, --encoder {encoder_name}" if encoder_name else "quantkit's kernels",
        lambda t: encoder(t, encoder_name),
    )


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def through_ctypes(name: str, description: str, path: Path, trees: tuple[str, ...]) -> Library:
    """Return ggml_quantize_chunk of a libggml; ctypes releases the GIL while it runs."""
    library = ctypes.CDLL(str(path))
    # Fills the f16 tables of versions that still have them.
    library.ggml_init.argtypes, library.ggml_init.restype = [_InitParams], ctypes.c_void_p
    library.ggml_init(_InitParams(1 << 20, None, False))
    chunk = library.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def encoder(t: TensorType) -> Encode | None:
        if t.trees not in trees or library.ggml_blck_size(t.id) == 0:  # the type is newer than the library
            return None

        def encode(x: Any, weights: Any, out: Any, row0: int, row1: int) -> None:
            n = x.shape[1]
            importance = weights.ctypes.data if weights.size else None
            chunk(t.id, x.ctypes.data, out.ctypes.data, row0 * n, row1 - row0, n, importance)

        return encode

    return Library(name, description, encoder)


def libgguf() -> Library:
    """libgguf's encoders on the CPU."""
    module = importlib.import_module("libgguf")

    def encoder(t: TensorType) -> Encode | None:
        if not t.is_quantized or module.row_size(t.id, t.block) <= 0:
            return None

        def encode(x: Any, weights: Any, out: Any, row0: int, row1: int) -> None:
            importance = weights if weights.size else None
            module.quantize_rows_into_raw(t.id, x[row0:row1], out[row0:row1], row1 - row0, x.shape[1], importance)

        return encode

    return Library("libgguf", "libgguf 0.2.2, its C++ encoders on the CPU", encoder)


def libraries(encoder_name: str = "mainline") -> tuple[dict[str, Library], dict[str, str]]:
    """Return the available libraries by name, and the reasons why others are missing; ``encoder_name``: quantkit's
    encoder."""
    available, missing = {"quantkit": quantkit_library(encoder_name)}, {}
    folder = llama_bin()
    if folder is not None:
        description = "llama.cpp b11434, ggml_quantize_chunk of libggml-base.so"
        available["ggml"] = through_ctypes("ggml", description, folder / "libggml-base.so", ("both", "mainline"))
    else:
        missing["ggml"] = "llama.cpp not found: run scripts/peers, or set QUANTKIT_LLAMA_BIN"
    if package_folder("libgguf") is not None:
        available["libgguf"] = libgguf()
    else:
        missing["libgguf"] = "the wheel libgguf is not installed: run scripts/test once"
    ik = package_folder("ik_llama_cpp")
    if ik is not None:
        description = "ik_llama.cpp, ggml_quantize_chunk of libggml.so in the wheel ik-llama-cpp-python 0.1.5"
        available["ik"] = through_ctypes("ik", description, ik / "lib" / "libggml.so", ("both", "ik"))
    else:
        missing["ik"] = "the wheel ik-llama-cpp-python is not installed: run scripts/test once"
    return available, missing


# --- one encoder ---


@dataclass
class EncoderRun:
    """One library's encoder of one type, and its measured rates in weights per second."""

    name: str
    encode: Encode
    rows: int = 0
    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


@dataclass(frozen=True)
class Bench:
    """The input of the encoders and the settings of a measurement."""

    x: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    rounds: int
    #: Duration of one call.
    seconds: float

    @property
    def total_rows(self) -> int:
        return len(self.x)


def matrix(rows: int, n: int, seed: int = 1) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return weights [rows, n] similar to those of models, and the importance [n] of their columns."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, n), np.float32)
    x *= (0.02 * np.exp(rng.normal(0, 0.3, n))).astype(np.float32)
    return x, np.exp(rng.normal(0, 1, n)).astype(np.float32)


@contextmanager
def pin(threads: int) -> Iterator[ThreadPoolExecutor | None]:
    """Pin the process to one CPU for one thread; yield a pool for several."""
    before = os.sched_getaffinity(0)
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
        return
    try:
        os.sched_setaffinity(0, {max(before)})
        yield None
    finally:
        os.sched_setaffinity(0, before)


def timed(c: EncoderRun, bench: Bench, weights: Any, out: Any, pool: ThreadPoolExecutor | None, threads: int) -> float:
    """Encode the contestant's rows once; return the seconds."""
    edges = [c.rows // GROUP * i // threads * GROUP for i in range(threads + 1)]
    began = time.perf_counter()
    if pool is None:
        c.encode(bench.x, weights, out, 0, c.rows)
    else:
        slabs = zip(edges, edges[1:], strict=False)
        for future in [pool.submit(c.encode, bench.x, weights, out, a, b) for a, b in slabs]:
            future.result()
    return time.perf_counter() - began


def fit_rows(c: EncoderRun, bench: Bench, weights: Any, out: Any) -> None:
    """Choose the rows of a call so that it takes about bench.seconds; also warms up."""
    c.rows = min(32, bench.total_rows)
    timed(c, bench, weights, out, None, 1)
    while c.rows < bench.total_rows:
        seconds = timed(c, bench, weights, out, None, 1)
        if seconds >= bench.seconds / 2:
            break
        factor = min(16.0, bench.seconds / max(seconds, 1e-6))
        c.rows = min(bench.total_rows, max(c.rows + GROUP, int(c.rows * factor) // GROUP * GROUP))


def differing_rows(t: TensorType, bench: Bench, weights: Any, a: Encode, b: Encode, rows: int = 64) -> int:
    """Return the number of the first rows that differ between two encoders."""
    rows = min(rows, bench.total_rows)
    outs = [np.zeros((rows, t.row_bytes(bench.x.shape[1])), np.uint8) for _ in range(2)]
    for encode, out in zip((a, b), outs, strict=True):
        encode(bench.x[:rows], weights, out, 0, rows)
    return int((outs[0] != outs[1]).any(axis=1).sum())


def measure_type(
    t: TensorType, bench: Bench, weights: Any, available: dict[str, Library], threads: int
) -> dict[str, EncoderRun]:
    """Run all encoders of type ``t`` in turns."""
    everybody = {name: library.encoder(t) for name, library in available.items()}
    contestants = {name: EncoderRun(name, encode) for name, encode in everybody.items() if encode is not None}
    out = np.empty((bench.total_rows, t.row_bytes(bench.x.shape[1])), np.uint8)
    out.fill(0)  # touches the pages, which would slow the first encoder down
    with pin(threads) as pool:
        for c in contestants.values():
            fit_rows(c, bench, weights, out)
        for _ in range(bench.rounds):
            for c in contestants.values():
                seconds = timed(c, bench, weights, out, pool, threads)
                c.rates.append(c.rows * bench.x.shape[1] / seconds)
    return contestants


def memory_rates(bench: Bench, threads: int) -> dict[str, float]:
    """Return the weights per second that memory bandwidth allows: reading the matrix, also while writing 1, 2 or 4
    bytes.

    Values are only combined by OR, less work than in any encoder. 4 bytes is numpy's copy.
    """
    from quantkit.kernels.cpu.core.peak import read_stream, read_while_writing

    row_bytes, target = 4 * bench.x.shape[1], bench.x.copy()

    def read(x: Any, weights: Any, out: Any, row0: int, row1: int) -> None:
        read_stream(x.ctypes.data + row_bytes * row0, row_bytes * (row1 - row0), out[row0].ctypes.data)

    def write(of_four: int, x: Any, weights: Any, out: Any, row0: int, row1: int) -> None:
        size = row_bytes * (row1 - row0)
        read_while_writing(x[row0].ctypes.data, size, out[row0].ctypes.data, of_four)

    def copy(x: Any, weights: Any, out: Any, row0: int, row1: int) -> None:
        np.copyto(target[row0:row1], x[row0:row1])

    works: dict[str, Encode] = {
        "reading the float32 matrix": read,
        "reading it, writing 1 byte a weight": partial(write, 1),
        "reading it, writing 2 bytes a weight": partial(write, 2),
        "copy of the float32 matrix": copy,
    }
    contestants = [EncoderRun(name, work, bench.total_rows) for name, work in works.items()]
    out = np.zeros((bench.total_rows, row_bytes // 2), np.uint8)
    with pin(threads) as pool:
        for _ in range(bench.rounds + 1):
            for c in contestants:
                c.rates.append(bench.x.size / timed(c, bench, None, out, pool, threads))
    return {c.name: statistics.median(c.rates[1:]) for c in contestants}


# --- the table of types ---


def ratio(c: dict[str, EncoderRun], peer: str) -> str:
    return f"{c['quantkit'].median / c[peer].median:.1f}x" if peer in c else "-"


def row(t: TensorType, with_imatrix: bool, threads: int, c: dict[str, EncoderRun]) -> str:
    """Return one line of the table."""
    rates = [f"{c[name].median / 1e6:.1f}" if name in c else "-" for name in ("quantkit", *PEERS)]
    ratios = [ratio(c, peer) for peer in PEERS]
    return "| " + " | ".join([t.name, "yes" if with_imatrix else "no", str(threads), *rates, *ratios]) + " |"


def bench_types(options: argparse.Namespace, write: Output) -> None:
    """Print the table; exit with 1 if quantkit's bytes differ from ggml's."""
    available, missing = libraries(options.encoder)
    x, weights = matrix(options.rows, options.columns)
    bench, none = Bench(x, weights, options.rounds, options.seconds), np.empty(0, np.float32)
    write(f"Mweights/s, median of {options.rounds} rounds; {options.rows} x {options.columns} float32; {machine()}\n")
    for library in available.values():
        write(f"- {library.name}: {library.description}")
    for name, why in missing.items():
        write(f"- {name}: MISSING, its columns are empty ({why})")
    write("\n| type | imatrix | threads | quantkit | ggml | libgguf | ik | / ggml | / libgguf | / ik |")
    write("|---|---|---|---|---|---|---|---|---|---|")
    problems = []
    for t in options.types:
        for with_imatrix in {"ignored": (False,), "required": (True,)}.get(t.imatrix, (False, True)):
            importance = weights if with_imatrix else none
            label = t.name + (" with imatrix" if with_imatrix else "")
            try:
                if options.encoder != "ik":
                    problems += compare_bytes(t, label, bench, importance, available)
                for threads in options.threads:
                    write(row(t, with_imatrix, threads, measure_type(t, bench, importance, available, threads)))
            except (ImportError, AttributeError) as e:
                problems.append(f"{label}: quantkit's encoder cannot be loaded: {e}")
    for threads in options.threads:
        for rate_name, rate in memory_rates(bench, threads).items():
            write(f"| {rate_name} | - | {threads} | {rate / 1e6:.1f} | | | | | | |")
    if problems:
        sys.exit("\n".join(problems))


def compare_bytes(t: TensorType, label: str, bench: Bench, weights: Any, available: dict[str, Library]) -> list[str]:
    """Return the differences of quantkit's bytes from ggml's."""
    reference = available["ggml"].encoder(t) if "ggml" in available else None
    encoder = available["quantkit"].encoder(t)
    if reference is None or encoder is None:
        return []
    wrong = differing_rows(t, bench, weights, encoder, reference)
    return [f"{label}: {wrong} of 64 rows differ from ggml's"] if wrong else []


def type_list(text: str) -> list[TensorType]:
    """Parse --types."""
    try:
        return [BY_NAME[name.strip().upper()] for name in text.split(",")]
    except KeyError as e:
        raise argparse.ArgumentTypeError(f"unknown tensor type {e}") from None


def all_types(encoder_name: str | None) -> list[TensorType]:
    """Return every type with an encoder, except floats that are a plain copy; for ik, the types that it encodes
    differently."""
    from quantkit.kernels.formats import FORMATS, has_encoder

    if encoder_name == "ik":
        return [f.type for f in FORMATS.values() if f.ik_encoder]
    return [t for t in TYPES if has_encoder(t) and t.name != "F32"]


# --- whole files ---


def same_tensors(a: GGUFFile, b: GGUFFile) -> str:
    """Return the difference between the tensors of two files, or ""; reads in pieces, to bound memory."""
    if list(a.tensors) != list(b.tensors):
        return "other tensors, or another order"
    for name, tensor in a.tensors.items():
        peer_tensor = b.tensors[name]
        if (tensor.type, tensor.shape) != (peer_tensor.type, peer_tensor.shape):
            return f"{name}: {tensor.type} {tensor.shape} against {peer_tensor.type} {peer_tensor.shape}"
        if not np.array_equal(a.data(tensor), b.data(peer_tensor)):
            return f"{name}: other bytes"
        a.forget(tensor)
        b.forget(peer_tensor)
    return ""


def whole_file(options: argparse.Namespace, write: Output) -> None:
    """Print the comparison of both programs; exit with 1 if their tensors differ."""
    folder = llama_bin()
    with work_folder(options.work) as work:
        source, imatrix = work / "model.gguf", work / "imatrix.gguf"
        if options.model:
            source, imatrix_options = options.model, ["--imatrix", str(options.imatrix)] if options.imatrix else []
        else:
            make_moe(source, "--size", options.size, "--imatrix", str(imatrix))
            imatrix_options = ["--imatrix", str(imatrix)] if options.with_imatrix else []
        threads = str(max(options.threads))
        outputs = {"quantkit": work / "ours.gguf", "llama-quantize": work / "theirs.gguf"}
        commands = {
            "quantkit": quantkit("quantize", *imatrix_options, "-j", threads, source, outputs["quantkit"], options.to)
        }
        if folder is not None:
            peer_command = [
                folder / "llama-quantize",
                *imatrix_options,
                source,
                outputs["llama-quantize"],
                options.to,
                threads,
            ]
            commands["llama-quantize"] = [str(a) for a in peer_command]
        results = run_in_turns(commands, outputs, options.rounds)
        write(f"\n{source.name}, {format_size(source.stat().st_size)}, to {options.to}, {threads} threads, ", end="")
        write(f"{'with' if imatrix_options else 'no'} imatrix, median of {options.rounds} runs in turns; {machine()}\n")
        report(results, write)
        if folder is None:
            write("\nllama-quantize: MISSING, so nothing is compared: run scripts/peers, or set QUANTKIT_LLAMA_BIN")
            return
        with open_gguf(outputs["quantkit"]) as a, open_gguf(outputs["llama-quantize"]) as b:
            difference = same_tensors(a, b)
        for output in outputs.values():
            output.unlink()
    write(f"\ntensor data: {difference or 'identical, every byte of every tensor'}")
    if difference:
        sys.exit(1)


def run_in_turns(commands: dict[str, list[str]], outputs: dict[str, Path], rounds: int) -> dict[str, list[Outcome]]:
    """Run the programs in turns; the first turn warms up."""
    results: dict[str, list[Outcome]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, command in commands.items():
            outputs[name].unlink(missing_ok=True)
            os.sync()  # dirty pages of the previous program do not count
            outcome = run(command).checked(name)
            if turn:
                results[name].append(outcome)
    return results


def report(results: dict[str, list[Outcome]], write: Output) -> None:
    """Print the table of the runs."""
    seconds = {name: statistics.median(o.seconds for o in outcomes) for name, outcomes in results.items()}
    write("| program | wall time | all runs | peak RSS |\n|---|---|---|---|")
    for name, outcomes in results.items():
        runs = ", ".join(f"{o.seconds:.2f}" for o in outcomes)
        peak = max(o.peak_rss for o in outcomes)
        write(f"| {name} | {seconds[name]:.2f} s | {runs} | {format_size(peak)} |")
    if len(seconds) == 2:
        write(f"\nquantkit is {seconds['llama-quantize'] / seconds['quantkit']:.2f} times as fast")


# --- the command ---


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--types", type=type_list, metavar="T,T,..", help="default: all with an encoder")
    p.add_argument("--encoder", choices=("mainline", "ik"), help="default: that of the type's own project")
    p.add_argument("--threads", type=int, nargs="+", default=sorted({1, available_cpus()}), metavar="N")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=0.2, help="duration of one call with one thread (default: 0.2)")
    p.add_argument("--rows", type=int, default=4096)
    p.add_argument("--columns", type=int, default=4096)
    p.add_argument("--append", type=Path, metavar="FILE", help="also append the output to this Markdown file")
    w = p.add_argument_group("whole file")
    w.add_argument("--whole-file", action="store_true")
    w.add_argument("--size", default="2G", help="size of the generated model (default: 2G)")
    w.add_argument("--model", type=Path, metavar="GGUF", help="use this model instead of generating one")
    w.add_argument("--imatrix", type=Path, metavar="FILE", help="importance matrix for --model")
    w.add_argument("--with-imatrix", action="store_true", help="use the importance matrix generated with the model")
    w.add_argument("--to", default="Q4_K_M", metavar="TYPE", help="default: Q4_K_M")
    w.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the large files (default: a temporary one)")
    return p


def main() -> None:
    options = parse_options(parser())
    options.types = options.types or all_types(options.encoder)
    write = Output()
    try:
        (whole_file if options.whole_file else bench_types)(options, write)
    finally:
        if options.append and write.text:
            with open(options.append, "a") as file:
                file.write(f"\n`benchmarks/bench_quantize.py {' '.join(sys.argv[1:])}`\n\n{write.text}")


if __name__ == "__main__":
    record_output(main)
