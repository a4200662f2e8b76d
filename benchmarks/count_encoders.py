"""Count the instructions that CUDA encoders run, and the time they take at least.

    benchmarks/count_encoders.py                       # every type, an H200
    benchmarks/count_encoders.py --types IQ2_XS --ghz 1.7 --multiprocessors 82

Evidence without a GPU: NVRTC's PTX for sm_90 runs on the CPU (tests/ptx), on weights drawn from a normal distribution,
with an importance of columns for types that use one (--plain: that require one), and every thread counts how often it
runs each line. Lanes of a warp take turns where they part, so a line counts as often as the lane that runs it most;
moves between registers do not count. A multiprocessor starts 4 instructions of warps per clock, and one that loads,
stores or shuffles. The time is that of the busier of both; neither caches nor waiting are in it.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from device_memory import Memory  # noqa: E402
from ptx.count import instructions  # noqa: E402
from ptx.device import PTXDevice, library_of  # noqa: E402

from quantkit.kernels.cuda.encode.encode import encode, encode_rows, encoders, weighs  # noqa: E402
from quantkit.kernels.formats import format_of  # noqa: E402
from quantkit.types import BY_NAME, TensorType  # noqa: E402

THREADS, LINES = 128, 16384
#: The matrix that peers give times for.
WEIGHTS = 11008 * 4096
#: What goes through the pipe of loads, stores and shuffles.
LOADS = ("ld.", "st.", "shfl.", "redux.", "atom.")


class Counting(PTXDevice):
    """Counts lines of the kernels that it runs."""

    more = (f"-DCOUNTED={THREADS}",)


def counted(t: TensorType, launches: int, seed: int, plain: bool = False) -> tuple[float, float]:
    """Return how many instructions of a warp 32 weights take, and how many of them load, store or shuffle."""
    n, weighted = THREADS * format_of(t).span, t.imatrix == "required" if plain else weighs(t)
    rng, device = np.random.default_rng(seed), Counting(90)
    kernel = encode(t, 1, n, weighted).kernel
    lines = (ctypes.c_uint * (THREADS * LINES)).in_dll(library_of(kernel, 90, *Counting.more), "lines_run")
    memory, found = Memory(device), np.zeros(LINES)
    for _ in range(launches):  # a block of threads each
        x, w = 0.02 * rng.standard_normal(n), np.exp(rng.standard_normal(n))
        importance = memory.put(w.astype(np.float32)) if weighted else 0
        ctypes.memset(lines, 0, ctypes.sizeof(lines))
        out, squares = memory.room((t.row_bytes(n),), np.uint8), memory.room((1,))
        encode_rows(device, t, memory.put(x.astype(np.float32)), 1, n, out, importance, squares)
        found += np.ctypeslib.as_array(lines).reshape(-1, 32, LINES).max(1).sum(0)
    memory.close()
    text = instructions(kernel, 90)
    counts = {line: found[line] / (launches * n / 32) for line in np.flatnonzero(found).tolist() if line in text}
    all_of = sum(count for line, count in counts.items() if not text[line].startswith(("mov.", "cvta.")))
    return float(all_of), float(sum(count for line, count in counts.items() if text[line].startswith(LOADS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="*", default=list(encoders()))
    parser.add_argument("--plain", action="store_true", help="no importance of columns, where a type can do without")
    parser.add_argument("--launches", type=int, default=2, help="blocks of threads of each type")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--multiprocessors", type=int, default=132)
    parser.add_argument("--ghz", type=float, default=1.98)
    a = parser.parse_args()
    print(f"{'type':8} {'instructions':>12} {'loads':>8} {'ms':>8}   a warp's, of 32 weights; 11008 x 4096 weights")
    for name in a.types:
        all_of, loads = counted(BY_NAME[name], a.launches, a.seed, a.plain)
        clocks = max(all_of / 4, loads) * WEIGHTS / 32 / a.multiprocessors
        print(f"{name:8} {all_of:12.0f} {loads:8.0f} {clocks / a.ghz / 1e6:8.2f}", flush=True)


if __name__ == "__main__":
    main()
