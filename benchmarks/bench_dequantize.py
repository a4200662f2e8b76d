"""Measure decoders against ggml's dequantize_row and PyPI gguf, in one run on one CPU.

    benchmarks/bench_dequantize.py

Random blocks of every type with a decoder, in memory; decoders take turns, --rounds times, and medians are reported.
Results are compared with ggml's, bit for bit, before anything is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from processes import llama_bin
from results import parse_options, record_output

from quantkit.kernels import quantize
from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows
from quantkit.kernels.formats import has_decoder, has_encoder
from quantkit.types import TYPES, TensorType

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("tests", "tests/lib")]

from blocks import random_rows  # noqa: E402

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
Decode = Callable[[U8, F32], object]


def ggml_decoder(t: TensorType, library: ctypes.CDLL) -> Decode:
    """Return libggml-base's decoder of a type."""
    function = getattr(library, f"dequantize_row_{t.ggml_name.removesuffix('_g128')}")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return lambda data, out: function(data.ctypes.data, out.ctypes.data, out.size)


def gguf_decoder(t: TensorType) -> Decode | None:
    """Return PyPI gguf's decoder of a type, if it has one."""
    kind = gguf.GGMLQuantizationType.__members__.get(t.name)
    if kind is None or kind not in gguf.quants._type_traits or t.name in ("Q1_0", "Q2_0"):
        return None
    return lambda data, out: gguf.quants.dequantize(data, kind)


def blocks(t: TensorType, rows: int, n: int) -> U8:
    """Return rows of a type: encoded normal values, or random bytes with small scales if there is no encoder."""
    if has_encoder(t):
        rng = np.random.default_rng(1)
        return quantize(rng.normal(0, 0.02, (rows, n)).astype(np.float32), t, np.ones(n, np.float32))
    return random_rows(t, rows, n, scale=(0.005, 0.02))


def measure(t: TensorType, library: ctypes.CDLL, rounds: int, rows: int, n: int) -> str:
    """Return a table row: Mweights/s of quantkit's, ggml's and gguf's decoder."""
    data, out, peer_out = blocks(t, rows, n), np.empty((rows, n), np.float32), np.empty((rows, n), np.float32)
    decoders: dict[str, Decode | None] = {
        "quantkit": lambda d, o: dequantize_rows(t, d, o),
        "ggml": ggml_decoder(t, library),
        "gguf": gguf_decoder(t),
    }
    dequantize_rows(t, data, out)
    ggml_decoder(t, library)(data, peer_out)
    if not np.array_equal(out.view(np.uint32), peer_out.view(np.uint32)):
        raise SystemExit(f"{t}: quantkit's values differ from ggml's")
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(rounds):
        for name, decode in decoders.items():
            if decode is not None:
                began = time.perf_counter()
                decode(data, out)
                seconds[name].append(time.perf_counter() - began)
    rate = {name: data.shape[0] * n / 1e6 / statistics.median(s) if s else 0.0 for name, s in seconds.items()}
    cells = [f"{r:.0f}" if r else "-" for r in rate.values()]
    ratios = [f"{rate['quantkit'] / rate[p]:.1f}x" if rate[p] else "-" for p in ("ggml", "gguf")]
    return f"| {t} | {' | '.join(cells + ratios)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=4096)
    options = parse_options(parser)
    folder: Path | None = llama_bin()
    if folder is None:
        raise SystemExit("llama.cpp not found: run scripts/peers, or set QUANTKIT_LLAMA_BIN")
    library = ctypes.CDLL(str(folder / "libggml-base.so"))
    print("| type | quantkit | ggml | gguf | / ggml | / gguf |\n|---|---|---|---|---|---|")
    for t in TYPES:
        if has_decoder(t) and t.is_quantized:
            print(measure(t, library, options.rounds, options.rows, options.columns), flush=True)


if __name__ == "__main__":
    record_output(main)
