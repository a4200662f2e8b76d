"""Measure the types that can be encoded (quality.is_measured) and write the table.

The sample, and the table, are in quantkit/pipeline/quality.py. Run it on a machine where nothing else runs: speeds are
of one core.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import numpy as np

from quantkit.kernels.cpu.encode import encoder
from quantkit.pipeline import quality
from quantkit.types import TYPES, TensorType

TARGET = Path(quality.__file__)


def mweights_per_second(t: TensorType) -> float:
    """Return the speed of one core: the best of several calls."""
    x, importance = quality.sample()
    weights = importance if t.imatrix != "ignored" else np.empty(0, np.float32)
    out = np.empty((len(x), t.row_bytes(x.shape[1])), np.uint8)
    encoder(t)(x, weights, out, 0, t.interleave)  # compiled
    best, end = np.inf, time.perf_counter() + 1.0
    while time.perf_counter() < end:
        began = time.perf_counter()
        encoder(t)(x, weights, out, 0, len(x))
        best = min(best, time.perf_counter() - began)
    return x.size / best / 1e6


def line(t: TensorType) -> str:
    """Return a type's line of the table."""
    rate = mweights_per_second(t)
    speed = next(name for name, least in quality.SPEEDS.items() if rate >= least)
    print(f"{t.name:10} {rate:8.1f} Mweights/s", file=sys.stderr, flush=True)
    return f'    "{t.name}": Quality({quality.weighted_error(t):.4g}, "{speed}"),\n'


def main() -> None:
    """Rewrite the table."""
    table = "".join(line(t) for t in TYPES if quality.is_measured(t))
    table_pattern = re.compile(r"(QUALITY: dict\[str, Quality\] = \{\n).*?(\}\n)", re.DOTALL)
    TARGET.write_text(table_pattern.sub(lambda m: m[1] + table + m[2], TARGET.read_text()))


if __name__ == "__main__":
    main()
