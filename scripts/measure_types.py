"""Measure types with an encoder (has_encoder) and enter them in the table; all others are unchanged.

    scripts/measure_types.py TYPE ..
    scripts/measure_types.py --all

The sample and the table are in quantkit/pipeline/quality.py. Run it on an idle machine: speeds are those of one core.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quantkit.kernels.cpu.encode import encoder
from quantkit.kernels.formats import has_encoder
from quantkit.pipeline import quality
from quantkit.types import TYPES, TensorType, type_by_name

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


def measure(t: TensorType) -> quality.Quality:
    """Measure a type."""
    rate = mweights_per_second(t)
    print(f"{t.name:10} {rate:8.1f} Mweights/s", file=sys.stderr, flush=True)
    speed = next(name for name, least in quality.SPEEDS.items() if rate >= least)
    return quality.Quality(quality.weighted_error(t), speed)


def with_figures(text: str, figures: Mapping[str, quality.Quality]) -> str:
    """Return the source of the table with new lines for these types, in the order of ``TYPES``."""
    match = re.search(r"(?<=QUALITY: dict\[str, Quality\] = \{\n).*?(?=\}\n)", text, re.DOTALL)
    assert match is not None
    lines = {line.split('"')[1]: line for line in match[0].splitlines(keepends=True)}
    lines |= {name: f'    "{name}": Quality({q.error:.4g}, "{q.speed}"),\n' for name, q in figures.items()}
    table = "".join(lines[t.name] for t in TYPES if t.name in lines)
    return text[: match.start()] + table + text[match.end() :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", type=type_by_name, metavar="TYPE")
    parser.add_argument("--all", action="store_true", help="every type with an encoder")
    options = parser.parse_args()
    if bool(options.types) == options.all:
        parser.error("give types, or --all")
    if missing := [t.name for t in options.types if not has_encoder(t)]:
        parser.error(f"no encoder for {', '.join(missing)}")
    types = options.types or [t for t in TYPES if has_encoder(t)]
    TARGET.write_text(with_figures(TARGET.read_text(), {t.name: measure(t) for t in types}))


if __name__ == "__main__":
    main()
