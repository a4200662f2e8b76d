"""Measure `quantize --keep-grid`: exact weights and divergence of QAT-like models, round trips, and the cost.

    benchmarks/keep_grid.py MODEL.gguf EVALUATION [--chunks N] [--rounds N]

MODEL is made QAT-like: quantized, by Q4_0 with levels -7 to 7, by Q4_K_M, and by a recipe, then decoded to BF16. Round
trips: a type's own bytes of Gaussian
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
from quantkit.formats.gguf import Field, write_gguf
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


#: How models are made QAT-like: a name, the TYPE and options of quantize, and the types that such a model is made into.
RECIPE = ("attn_=Q5_K", "ffn_down=Q6_K", "token_embd=Q8_0", "output=Q8_0")
QAT = (
    ("Q4_0", "Q4_0", QuantizeOptions(pure=True, symmetric_q40=True), ("Q4_0", "Q4_K_M", "Q6_K")),
    ("Q4_K_M", "Q4_K_M", QuantizeOptions(), ("Q4_K_M",)),
    ("recipe", "Q4_K_M", QuantizeOptions(tensor_type=RECIPE), ("Q4_K_M",)),
)


def divergences(args: argparse.Namespace, folder: Path) -> None:
    """Print sizes, exact weights and divergences of QAT-like models; one made by a recipe is quantized by it again."""
    columns = "made by | TYPE | options | bytes | exact weights, % | mean KLD | mean KLD, activations of llama.cpp"
    print(f"| {columns} |\n|---|---|---|---:|---:|---:|---:|")
    for name, qat_type, qat_options, type_names in QAT:
        model, quantized = folder / f"{name}.bf16.gguf", folder / f"{name}.gguf"
        quantkit.quantize(args.model, quantized, qat_type, qat_options)
        quantkit.quantize(quantized, model, "BF16", QuantizeOptions(pure=True, allow_requantize=True))
        text = args.evaluation.read_bytes()
        bases = {activations: folder / f"{name}.{activations}" for activations in ("exact", "runtime")}
        for activations, base in bases.items():
            quantkit.perplexity(model, text, chunks=args.chunks, save_logits=SaveLogits(base), activations=activations)
        for type_name in type_names:
            for keep_grid in (False, True):
                out = folder / "out.gguf"
                options = QuantizeOptions(keep_grid=keep_grid, tensor_type=qat_options.tensor_type)
                result = quantkit.quantize(model, out, type_name, options, overwrite=True)
                tensors = exact_tensors(result.plan, result.run.sums)
                share = 100 * sum(t.exact for t in tensors) / sum(t.values for t in tensors) if tensors else None
                klds = [quantkit.kld(out, base, activations=a).sums.kld.mean for a, base in bases.items()]
                cells = ["" if share is None else f"{share:.2f}", *(f"{k.value:.6f} ± {k.error:.6f}" for k in klds)]
                flags = "--keep-grid" if keep_grid else ""
                print(f"| {name} | {type_name} | {flags} | {out.stat().st_size} | {' | '.join(cells)} |", flush=True)


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
    columns = "type | stored as | exact, plain, % | exact, % | identical blocks, % | ambiguous blocks, %"
    print(f"\n| {columns} |\n|---|---|---:|---:|---:|---:|")
    for t in TYPES:
        if lattice_of(t) is None:
            continue
        before = encode(gaussian(ROWS, N), t, None if t.imatrix == "ignored" else np.ones(N, np.float32))
        y = dequantize(before, t, N)
        for source in ("F32", "F16", "BF16"):
            x = as_stored(y, source)
            rows = encode(x, t, np.ones(N, np.float32) if t.imatrix == "required" else None)
            plain = (as_stored(dequantize(rows, t, N), source) == x).reshape(-1, t.block).all(axis=1).mean()
            exact = keep_exact_blocks(t, BY_NAME[source], x, rows)
            blocks = [data.reshape(-1, t.block_bytes) for data in (before, rows)]
            equal = (blocks[0] == blocks[1]).all(axis=1).mean()
            shares = (plain, exact.values / x.size, equal, exact.ambiguous_blocks / len(blocks[0]))
            print(f"| {t} | {source} | {' | '.join(f'{100 * share:.2f}' for share in shares)} |", flush=True)


def seconds(t: TensorType, x: np.ndarray, rounds: int) -> tuple[float, float]:
    """Return the shortest time of the encoder alone, and with the search."""
    out, encode_rows = np.zeros((ROWS, t.row_bytes(N)), np.uint8), encoder(t)
    importance = np.ones(N if t.imatrix == "required" else 0, np.float32)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for keeps_grid in (False, True):
            begin = time.perf_counter()
            encode_rows(x, importance, out, 0, ROWS)
            if keeps_grid:
                keep_exact_blocks(t, BY_NAME["BF16"], x, out)
            times[keeps_grid].append(time.perf_counter() - begin)
    return min(times[0][1:]), min(times[1][1:])


def costs(rounds: int) -> None:
    """Print the cost of the search where all blocks, and where none, are on the grid."""
    print("\n| type | weights | encoder, M weights/s | with the search | ratio |\n|---|---|---:|---:|---:|")
    for t in TYPES:
        if lattice_of(t) is None:
            continue
        plain = as_stored(gaussian(ROWS, N), "BF16")
        importance = None if t.imatrix == "ignored" else np.ones(N, np.float32)
        on_grid = as_stored(dequantize(encode(gaussian(ROWS, N), t, importance), t, N), "BF16")
        for kind, x in (("on the grid", on_grid), ("off the grid", plain)):
            without, with_search = (x.size / s / 1e6 for s in seconds(t, x, rounds))
            print(f"| {t} | {kind} | {without:.0f} | {with_search:.0f} | {without / with_search:.2f} |", flush=True)


def run_times(folder: Path, rounds: int) -> None:
    """Print the seconds of whole runs, file to file, on a QAT-like model of larger matrices."""
    model = folder / "large.gguf"
    data = [
        (f"blk.{i}.ffn_up.weight", (4096, 4096), BY_NAME["BF16"], encode(x, "BF16").tobytes())
        for i in range(8)
        for x in (qat_weights(4096, 4096, 7, 32, "BF16", i),)
    ]
    write_gguf(model, [Field.of("general.architecture", "llama")], data)
    print("\n| TYPE | threads | plain, s | --keep-grid, s | ratio |\n|---|---:|---:|---:|---:|")
    for type_name in ("Q4_0", "Q4_K", "Q6_K"):
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(max(3, rounds // 4)):
            for keep_grid in (False, True):
                options = QuantizeOptions(pure=True, keep_grid=keep_grid)
                result = quantkit.quantize(model, folder / "o.gguf", type_name, options, threads=2, overwrite=True)
                times[keep_grid].append(result.run.seconds)
        plain, keep = min(times[0]), min(times[1])
        print(f"| {type_name} | 2 | {plain:.2f} | {keep:.2f} | {keep / plain:.2f} |", flush=True)


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
        run_times(folder, args.rounds)
    qat_shares()
    round_trips()
    costs(args.rounds)


if __name__ == "__main__":
    record_output(main)
