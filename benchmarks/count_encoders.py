"""Count the instructions that CUDA encoders execute, and the rates that they allow on a GPU.

    benchmarks/count_encoders.py                            # every type, normal values, an H200
    benchmarks/count_encoders.py --types IQ4_KS Q6_0 --importance

Evidence without a GPU, beside benchmarks/count_instructions.py: kernels run as PTX on the CPU (tests/ptx), which counts
how often each thread runs each line. Encoders branch on values, so disassembly is not enough. Diverged lanes of a warp
run one after another, so a line counts as often as the lane that runs it most. PTX is not machine code: moves between
registers, which the assembler removes, are not counted, but divisions become several instructions. Per clock, a
multiprocessor starts four warp instructions, and one that loads, stores or shuffles; per two clocks, one that converts
or rounds a float, or approximates a reciprocal or a root. The bound is the rate of the busiest of these, without caches
and latency.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from results import parse_options, record_output

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent / "tests/lib")]

from device_memory import Memory  # noqa: E402
from ptx.count import instructions  # noqa: E402
from ptx.device import PTXDevice, library_of  # noqa: E402

from quantkit.kernels.cuda.core.device import Launch  # noqa: E402
from quantkit.kernels.cuda.encode.encode import Rows, encode_rows, encoders, weighs, working_bytes  # noqa: E402
from quantkit.types import BY_NAME, TensorType  # noqa: E402

#: Lines of a module that have counters (tests/ptx/machine.h).
LINES, CAPABILITY = 16384, 90
#: The matrix of libgguf's published times.
WEIGHTS = 11008 * 4096
#: Instructions of the pipe of loads, stores and shuffles.
LOADS = ("ld.", "st.", "shfl.", "redux.", "atom.")
#: Instructions of the pipe of conversions and approximations: 16 lanes per clock.
CONVERTS = re.compile(r"cvt\.[^ ]*\bf(16|32|64)\b|div\.rn\.f|rcp\.|sqrt\.|ex2\.")


class Counting(PTXDevice):
    """Counts the instructions that warps execute: all by kernel, and those that load, store or shuffle, or convert."""

    flags = ("-DCOUNTED",)

    def __init__(self) -> None:
        super().__init__(CAPABILITY)
        self._lines = np.empty((0, LINES), np.uint32)  # of each thread
        self.executed, self.loads, self.conversions = Counter[str](), 0.0, 0.0

    def launch(self, launch: Launch, order: int) -> None:
        library = library_of(launch.kernel, CAPABILITY, *self.flags)
        threads = launch.grid[0] * launch.kernel.threads
        if threads > len(self._lines):
            self._lines = np.empty((threads, LINES), np.uint32)
        ctypes.c_void_p.in_dll(library, "lines_run").value = self._lines.ctypes.data
        used = self._lines[:threads]
        used[:] = 0
        super().launch(launch, order)
        executed = used.reshape(-1, 32, LINES).max(1).sum(0, dtype=np.int64)
        text = instructions(launch.kernel, CAPABILITY)
        for line in np.flatnonzero(executed).tolist():
            if not text[line].startswith(("mov.", "cvta.")):
                self.executed[launch.kernel.name] += int(executed[line])
            if text[line].startswith(LOADS):
                self.loads += int(executed[line])
            if CONVERTS.match(text[line]):
                self.conversions += int(executed[line])


def count(t: TensorType, rows: int, n: int, weighted: bool) -> tuple[dict[str, float], float, float]:
    """Return the warp instructions per 32 weights in each kernel, and how many of them load or convert."""
    rng, memory = np.random.default_rng(0), Memory(device := Counting())
    x = rng.standard_normal((rows, n)).astype(np.float32)
    importance = memory.put(np.exp(rng.standard_normal(n)).astype(np.float32)) if weighted else 0
    out = memory.allocate((rows * t.row_bytes(n),), np.uint8)
    work = memory.allocate((working_bytes(t, rows, n),), np.uint8)
    encode_rows(device, t, Rows(memory.put(x), rows, n, out, importance, work))
    memory.close()
    parts = x.size / 32
    executed = {name: executed / parts for name, executed in device.executed.items()}
    return executed, device.loads / parts, device.conversions / parts


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--types", nargs="+", default=list(encoders()), metavar="TYPE")
    p.add_argument("--importance", action="store_true", help="with an importance, for types that use one")
    p.add_argument("--shape", type=int, nargs=2, default=(2, 4096), metavar=("ROWS", "N"))
    p.add_argument("--multiprocessors", type=int, default=132)
    p.add_argument("--clock", type=float, default=1.98, metavar="GHZ", help="under load (default: 1.98)")
    options = parse_options(p)
    rows, n = options.shape
    print(
        "| type | instructions per weight | of each kernel | loads | conversions | Gweights/s | ms for 11008 x 4096 |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in options.types:
        t = BY_NAME[name]
        by_kernel, loads, conversions = count(t, rows, n, (options.importance or t.imatrix == "required") and weighs(t))
        total = sum(by_kernel.values())
        rate = 32 * options.multiprocessors * options.clock / max(total / 4, loads, 2 * conversions)
        parts = (
            ", ".join(f"{kernel} {count_of_kernel:.0f}" for kernel, count_of_kernel in by_kernel.items())
            if len(by_kernel) > 1
            else ""
        )
        counts = f"{total:.0f} | {parts} | {loads:.0f} | {conversions:.0f}"
        print(f"| {name} | {counts} | {rate:.0f} | {WEIGHTS / rate / 1e6:.2f} |", flush=True)


if __name__ == "__main__":
    record_output(main)
