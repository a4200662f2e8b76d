"""Measure error feedback: seconds and GFLOP/s of each phase, memory, and the loss before and after.

    benchmarks/bench_feedback.py [--widths 2048,4096,8192,14336] [--types Q4_K] [--rows 512] [--threads 2]
                                 [--sweeps 1] [--covariance COV --model MODEL --tensor NAME [--matrix 0]]

Covariances are generated with the spectrum of inputs of trained models: eigenvalues fall as 1/i over three decades,
eigenvectors are spread over all columns, whose variances are log-normal, with some massive ones. --covariance uses the
tensor's own covariance, recorded by ``quantkit imatrix --covariance``, and its rows of MODEL.

Each width runs in a process of its own. Phases are CPU time of one thread, the best of --rounds; a multiplication with
an addition counts as two operations, and only the products over all columns are counted, so GFLOP/s include a phase's
other work as overhead. OpenBLAS is measured on the same shapes, and LAPACK's Cholesky decomposition, in the same
process on one thread. The last figures are wall-clock seconds on --threads, without the reference's encoder.
"""

from __future__ import annotations

import os

from results import parse_options, record_output

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import multiprocessing
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

DAMPING = 0.02
#: Timed functions of round_rows and metric, with operations per n^2 and row; of the decomposition per n^3.
PHASES = {"residuals": "loss before", "feed": "feedback", "refine": "levels and scales"}
OPERATIONS = {"residuals": 1, "feed": 1, "refine": 2}


def covariance(n: int, seed: int) -> F64:
    """Return a random covariance [n, n] in O(n^2 log n): eigenvalues rotated twice by fast transforms with random
    signs."""
    rng = np.random.default_rng(seed)

    def rotate(rows: F64) -> F64:
        signs = rng.choice([-1.0, 1.0], n)
        for _ in range(2):
            for i in range(0, n, 256):
                f = np.fft.fft(rows[i : i + 256] * signs)
                rows[i : i + 256] = (f.real - f.imag) / n**0.5  # Hartley transform: orthogonal and symmetric
            rows = np.ascontiguousarray(rows.T)
        return rows

    h = rotate(rotate(np.diag(np.maximum(1 / np.arange(1.0, n + 1), 1e-3))))
    scale = np.exp(0.4 * rng.standard_normal(n))
    scale[rng.choice(n, 4, replace=False)] *= 30
    h *= scale[:, None]
    h *= scale
    return h


def best(run: Callable[[], object], rounds: int = 3, clock: Callable[[], float] = time.thread_time) -> float:
    """Return the seconds of the fastest of several runs."""
    times = []
    for _ in range(rounds):
        begin = clock()
        run()
        times.append(clock() - begin)
    return min(times)


@contextmanager
def timed(module: Any, names: list[str], clock: Callable[[], float] = time.thread_time) -> Any:
    """Yield the CPU seconds, by name, of calls of a module's functions."""
    spent: dict[str, float] = defaultdict(float)

    def wrap(name: str, function: Any) -> Any:
        def run(*args: Any) -> Any:
            begin = clock()
            out = function(*args)
            spent[name] += clock() - begin
            return out

        return run

    functions = {name: getattr(module, name) for name in names}
    for name, function in functions.items():
        setattr(module, name, wrap(name, function))
    try:
        yield spent
    finally:
        for name, function in functions.items():
            setattr(module, name, function)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def line(label: str, seconds: float, operations: float = 0, suffix: str = "") -> None:
    rate = f"{operations / seconds / 1e9:8.1f} GFLOP/s" if operations else ""
    print(f"  {label:<24}{seconds:10.3f} s{rate}{suffix}", flush=True)


def inputs_of(args: argparse.Namespace, n: int) -> tuple[F64, F32]:
    """Return a covariance and rows."""
    if not args.covariance:
        return covariance(n, n), np.random.default_rng(1).standard_normal((args.rows, n), np.float32) / n**0.5
    from quantkit.formats.covariance import Covariances
    from quantkit.formats.gguf import open_model
    from quantkit.kernels.reference import decode_rows

    covariances, model = Covariances(args.covariance), open_model(args.model)
    tensor = model.tensors[args.tensor]
    raw = np.empty(tensor.nbytes, np.uint8)
    model.read(tensor, raw, 0)
    rows = raw.reshape(-1, tensor.type.row_bytes(tensor.shape[0]))
    first = args.matrix * tensor.shape[1]
    x = decode_rows(tensor.type, rows[first : first + min(args.rows, tensor.shape[1])])
    return covariances.matrix(covariances.entries[args.tensor], args.matrix), x.astype(np.float32)


def bench_decomposition(h: F64, threads: int) -> Any:
    """Print the cost of a metric, and return the metric."""
    from quantkit.kernels.cpu.feedback import factor
    from quantkit.kernels.cpu.feedback import metric as metrics

    n, operations = len(h), len(h) ** 3 / 3
    factor.cholesky(np.eye(64))  # compiles
    before = peak_mib()
    with timed(metrics, ["cholesky"], time.process_time) as spent:
        begin = time.process_time()
        metric = metrics.metric(h, DAMPING)
        cpu_seconds = time.process_time() - begin
    print(f"  a metric takes {8 * n * n / 2**20:.0f} MiB, its computation {peak_mib() - before:.0f} MiB more")
    damped = h + DAMPING * np.diagonal(h).mean() * np.eye(n)
    lapack = best(lambda: np.linalg.cholesky(damped), 1)
    line("Cholesky", spent["cholesky"], operations, f"   LAPACK {operations / lapack / 1e9:.1f}")
    line("rest of the metric", cpu_seconds - spent["cholesky"])
    if threads > 1:
        line(f"metric, {threads} threads", best(lambda: metrics.metric(h, DAMPING, threads), 1, time.perf_counter))
    return metric


def products_of_blas(h: F64, x: F32) -> float:
    """Return OpenBLAS's GFLOP/s for the product that a phase computes for a tile of rows."""
    a, b = h.astype(np.float32), np.ascontiguousarray(x.T)
    return 2 * a.size * len(x) / best(lambda: a @ b, 5) / 1e9


def all_of(pool: ThreadPoolExecutor, run: Callable[[slice], object], shares: list[slice]) -> None:
    list(pool.map(run, shares))


def bench_width(args: argparse.Namespace, n: int) -> None:
    """Print the figures of a width."""
    from quantkit.kernels.cpu.encode import encoder
    from quantkit.kernels.cpu.feedback import Rounding, rounding
    from quantkit.types import BY_NAME

    h, x = inputs_of(args, n)
    rows, n = x.shape
    variances = np.percentile(np.diagonal(h), [0, 50, 99, 100])
    print(f"\n{n} columns, {rows} rows; variances: {', '.join(f'{v:.2g}' for v in variances)}", flush=True)
    blas = products_of_blas(h, x[:64])
    metric, options = bench_decomposition(h, args.threads), Rounding(sweeps=args.sweeps, max_sweeps=args.sweeps)
    weights = np.diagonal(h).astype(np.float32)
    del h
    for name in args.types.split(","):
        t = BY_NAME[name]
        plain = np.zeros((rows, t.row_bytes(n)), np.uint8)
        encoder(t)(x, weights, plain, 0, rows)

        def rounded(share: slice, t: Any = t, plain: U8 = plain) -> Any:
            return rounding.round_rows(t, x[share], lambda _, out: np.copyto(out, plain[share]), metric, options)

        result = rounded(slice(None))  # compiles
        with timed(rounding, list(PHASES)) as spent:
            fastest, by_phase = 1e9, dict(spent)
            for _ in range(args.rounds):
                spent.clear()
                now = best(partial(rounded, slice(None)), 1)
                if now < fastest:
                    fastest, by_phase = now, dict(spent)
        before, after, share_improved = result.before.sum(), result.after.sum(), (result.after < result.before).mean()
        print(
            f"  {name}: loss {before:.4g} to {after:.4g} ({after / before:.3f}), better in {share_improved:.1%} of rows"
        )
        for phase, label in PHASES.items():
            passes = args.sweeps if phase == "refine" else 1
            line(label, by_phase[phase], passes * OPERATIONS[phase] * n * n * rows, f"   BLAS {blas:.1f}")
        line("unpacking and packing", fastest - sum(by_phase.values()))
        rows_of_thread = -(-rows // args.threads // 64) * 64
        shares = [slice(i, min(i + rows_of_thread, rows)) for i in range(0, rows, rows_of_thread)]
        with ThreadPoolExecutor(args.threads) as pool:
            clock = best(partial(all_of, pool, rounded, shares), args.rounds, time.perf_counter)
        millions = rows * n / 1e6
        print(f"  {name}: {fastest / millions:.4f} s of one thread, {clock / millions:.4f} s on {args.threads} threads "
              f"for a million weights; peak memory {peak_mib():.0f} MiB", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="2048,4096,8192,14336")
    parser.add_argument("--types", default="Q4_K")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sweeps", type=int, default=1)
    for name in ("covariance", "model", "tensor"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--matrix", type=int, default=0)
    args = parse_options(parser)
    widths = [0] if args.covariance else [int(n) for n in args.widths.split(",")]
    for n in widths:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            process.submit(bench_width, args, n).result()


if __name__ == "__main__":
    record_output(main)
