"""Count the instructions that error feedback executes on a GPU, and the rates that they allow.

    benchmarks/count_feedback.py                            # some types, rows of 2048 values, an H200
    benchmarks/count_feedback.py --types Q4_K --n 1024 --show

Evidence without a GPU, with the method and bounds of benchmarks/count_encoders.py: the rows of one tile are rounded by
the kernels as compiled by NVRTC, as PTX on the CPU. Counts are per column of the tile, a warp of 32 rows each.
"""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np
from count_encoders import Counting
from device_memory import Memory
from results import parse_options, record_output

from edge_rows import encode
from quantkit.kernels.cpu.feedback import Rounding
from quantkit.kernels.cpu.feedback.metric import metric
from quantkit.kernels.cuda.feedback.metric import upload
from quantkit.kernels.cuda.feedback.rounding import round_rows, working_bytes
from quantkit.kernels.cuda.feedback.rows import RowAddresses
from quantkit.kernels.levels import levels_of
from quantkit.types import BY_NAME, TensorType

#: Rows of the counted tile.
ROWS = 32


def count(t: TensorType, n: int) -> tuple[Counter[str], float, float]:
    """Return the warp instructions of a tile in each kernel, and how many of them load or convert."""
    rng, memory = np.random.default_rng(0), Memory(device := Counting())
    inputs = rng.standard_normal((2 * n, n)) * np.exp(0.5 * rng.standard_normal(n))
    device_metric = upload(device, metric(inputs.T @ inputs, 0.02, grouping=levels_of(t).grouping))
    x = rng.standard_normal((ROWS, n)).astype(np.float32)
    data = encode(t, x, np.ones(n if t.imatrix == "required" else 0, np.float32))
    address, target = memory.put(data), memory.put(x)
    before, after = (memory.allocate((ROWS,), np.float64) for _ in range(2))
    work = memory.allocate((working_bytes(t, ROWS, n),), np.uint8)
    round_rows(device, t, RowAddresses(ROWS, target, address, address, before, after), device_metric, Rounding(), work)
    device_metric.close()
    memory.close()
    return device.executed, device.loads, device.conversions


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--types", nargs="+", default=["Q4_K", "Q2_K", "IQ4_XS", "Q6_K"], metavar="TYPE")
    p.add_argument("--n", type=int, default=2048)
    p.add_argument("--multiprocessors", type=int, default=132)
    p.add_argument("--clock", type=float, default=1.98, metavar="GHZ", help="under load (default: 1.98)")
    options = parse_options(p)
    print("| type | instructions a column | of each kernel | loads | Gweights/s |\n|---|---|---|---|---|")
    for name in options.types:
        executed, loads, conversions = count(BY_NAME[name], options.n)
        n = options.n
        total = sum(executed.values())
        rate = ROWS * n * options.multiprocessors * options.clock / max(total / 4, loads, 2 * conversions)
        parts = ", ".join(f"{kernel} {n_executed / n:.0f}" for kernel, n_executed in executed.items())
        print(f"| {name} | {total / n:.0f} | {parts} | {loads / n:.0f} | {rate:.2f} |", flush=True)


if __name__ == "__main__":
    record_output(main)
