"""Measure `quantize --keep-grid`: exact weights and divergence of QAT-like models, round trips, and the cost.

    benchmarks/keep_grid.py MODEL.gguf EVALUATION [--chunks N] [--rounds N]

MODEL is made QAT-like by Q4_0 with levels -7 to 7, decoded to BF16. Round trips: a type's own bytes of Gaussian
weights, decoded, stored in a float type, encoded again. Times are of one thread on 64 rows of 2048 BF16 weights in
memory: the minimum of the rounds, with and without the search in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from processes import machine, work_folder
from results import parse_options, record_output

import quantkit
from quantkit import QuantizeOptions
from quantkit.evaluate import SaveLogits
from quantkit.kernels import dequantize
from quantkit.kernels import quantize as encode
from quantkit.kernels.cpu.encode import encoder
from quantkit.kernels.cpu.encode.lattice_rows import keep_exact_blocks
from quantkit.kernels.lattices import lattice_of
from quantkit.pipeline.exactness import exact_tensors
from quantkit.types import BY_NAME, TYPES, TensorType

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/lib"))
from grids import as_stored, gaussian, qat_weights  # noqa: E402

#: Rows and columns of made weights.
ROWS, N = 64, 2048


def divergences(args: argparse.Namespace, folder: Path) -> None:
    """Print sizes, exact weights and divergences of a QAT-like model."""
    model, base = folder / "qat.gguf", folder / "base"
    quantkit.quantize(args.model, folder / "q.gguf", "Q4_0", QuantizeOptions(pure=True, symmetric_q40=True))
    quantkit.quantize(folder / "q.gguf", model, "BF16", QuantizeOptions(pure=True, allow_requantize=True))
    text = args.evaluation.read_bytes()
    quantkit.perplexity(model, text, chunks=args.chunks, save_logits=SaveLogits(base), activations="runtime")
    print("| TYPE | options | bytes | exact weights, % | mean KLD |\n|---|---|---:|---:|---:|")
    for type_name in ("Q4_0", "Q4_K_M", "Q6_K"):
        for options in (QuantizeOptions(), QuantizeOptions(keep_grid=True)):
            out = folder / "out.gguf"
            result = quantkit.quantize(model, out, type_name, options, overwrite=True)
            tensors = exact_tensors(result.plan, result.run.sums)
            share = 100 * sum(t.exact for t in tensors) / sum(t.values for t in tensors) if tensors else None
            kld = quantkit.kld(out, base, activations="runtime").sums.kld.mean
            cells = ["" if share is None else f"{share:.2f}", f"{kld.value:.6f} ± {kld.error:.6f}"]
            flags = "--keep-grid" if options.keep_grid else ""
            print(f"| {type_name} | {flags} | {out.stat().st_size} | {' | '.join(cells)} |", flush=True)


def qat_shares() -> None:
    """Print the exact blocks of Q4_0 for the scales of QAT checkpoints."""
    print("\n| scale | source | group | exact, plain, % | exact, --keep-grid, % |\n|---|---|---:|---:|---:|")
    t = BY_NAME["Q4_0"]
    for divisor, scale in ((7, "amax / 7"), (7.5, "amax / 7.5"), (8, "amax / 8"), (-8, "max / -8")):
        for source in ("BF16", "F16"):
            for group in (32, 128):
                x = qat_weights(ROWS, N, divisor, group, source)
                rows = encode(x, t)
                plain = (as_stored(dequantize(rows, t, N), source) == x).reshape(-1, 32).all(axis=1).mean()
                exact = keep_exact_blocks(t, BY_NAME[source], x, rows).values / x.size
                print(f"| {scale} | {source} | {group} | {100 * plain:.2f} | {100 * exact:.2f} |", flush=True)


def round_trips() -> None:
    """Print how many blocks come back, by type and float type."""
    print("\n| type | stored as | exact, plain, % | exact, % | identical blocks, % |\n|---|---|---:|---:|---:|")
    for t in TYPES:
        if lattice_of(t) is None:
            continue
        before = encode(gaussian(ROWS, N), t, None if t.imatrix == "ignored" else np.ones(N, np.float32))
        y = dequantize(before, t, N)
        for source in ("F32", "F16", "BF16"):
            x = as_stored(y, source)
            rows = encode(x, t)
            plain = (as_stored(dequantize(rows, t, N), source) == x).reshape(-1, t.block).all(axis=1).mean()
            exact = keep_exact_blocks(t, BY_NAME[source], x, rows).values / x.size
            blocks = [data.reshape(-1, t.block_bytes) for data in (before, rows)]
            equal = (blocks[0] == blocks[1]).all(axis=1).mean()
            print(f"| {t} | {source} | {100 * plain:.2f} | {100 * exact:.2f} | {100 * equal:.2f} |", flush=True)


def seconds(t: TensorType, x: np.ndarray, rounds: int) -> tuple[float, float]:
    """Return the shortest time of the encoder alone, and with the search."""
    out, encode_rows = np.zeros((ROWS, t.row_bytes(N)), np.uint8), encoder(t)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for keeps_grid in (False, True):
            begin = time.perf_counter()
            encode_rows(x, np.zeros(0, np.float32), out, 0, ROWS)
            if keeps_grid:
                keep_exact_blocks(t, BY_NAME["BF16"], x, out)
            times[keeps_grid].append(time.perf_counter() - begin)
    return min(times[0][1:]), min(times[1][1:])


def costs(rounds: int) -> None:
    """Print the cost of the search where all blocks, and where none, are on the grid."""
    print("\n| type | weights | encoder, M weights/s | with the search | ratio |\n|---|---|---:|---:|---:|")
    for name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K"):
        t, plain = BY_NAME[name], as_stored(gaussian(ROWS, N), "BF16")
        on_grid = as_stored(dequantize(encode(plain, t), t, N), "BF16")
        for kind, x in (("on the grid", on_grid), ("off the grid", plain)):
            without, with_search = (x.size / s / 1e6 for s in seconds(t, x, rounds))
            print(f"| {name} | {kind} | {without:.0f} | {with_search:.0f} | {without / with_search:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("evaluation", type=Path, metavar="EVALUATION")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    args = parse_options(parser)
    print(f"{machine()}\n")
    with work_folder(None) as folder:
        divergences(args, folder)
    qat_shares()
    round_trips()
    costs(args.rounds)


if __name__ == "__main__":
    record_output(main)
