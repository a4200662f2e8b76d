"""Measure NVFP4 with scales of tensors: the error by size of the weights, and the divergence of a model.

    benchmarks/nvfp4.py MODEL.gguf EVALUATION [--imatrix FILE] [--calibrate TEXT] [--chunks N]

Errors are relative, in percent, of 512 rows of 1024 weights: Gaussian, or with heavy tails (Student's t, 3 degrees of
freedom). Weighted ones have weights like those of an importance matrix (a gamma distribution), and compare the encoder
without and with them. Divergences are of all matrices in one type (--pure), with exact activations.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from processes import machine, work_folder
from results import parse_options, record_output

import quantkit
from quantkit import QuantizeOptions
from quantkit.evaluate import SaveLogits
from quantkit.formats.gguf import TensorInfo
from quantkit.kernels import dequantize
from quantkit.kernels import quantize as encode
from quantkit.kernels.formats import SCALED
from quantkit.pipeline.row_slices import whole_tensor
from quantkit.pipeline.scaled_source import find_scale
from quantkit.types import BY_NAME

F32 = npt.NDArray[np.float32]

ROWS, N = 512, 1024
SIZES = (0.2, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002)
NVFP4 = BY_NAME["NVFP4"]


class Rows:
    """A source of one tensor in memory."""

    def __init__(self, x: F32) -> None:
        self._data = x.reshape(-1).view(np.uint8)
        self.tensor = TensorInfo("rows", (N, len(x)), BY_NAME["F32"], x.nbytes, 0, 0)

    def read(self, tensor: TensorInfo, out: npt.NDArray[np.uint8], offset: int, readahead: int = 0) -> None:
        out[...] = self._data[offset : offset + out.size]


def store_scaled(x: F32, weights: F32 | None = None) -> F32:
    """Return rows as NVFP4 with a scale of the tensor stores them."""
    source = Rows(x)
    scale = find_scale(source, whole_tensor(source.tensor), 0)  # type: ignore[arg-type]
    return dequantize(encode(x / scale, NVFP4, weights, SCALED), NVFP4, N) * scale


def store(x: F32, type_name: str = "NVFP4") -> F32:
    """Return rows as a type stores them."""
    return dequantize(encode(x, type_name), type_name, N)


def error(x: F32, y: F32, weights: F32 | None = None) -> str:
    """Return a relative error in percent."""
    w = np.ones(N) if weights is None else weights.astype(np.float64)
    difference = y.astype(np.float64) - x
    return f"{100 * np.sqrt((w * difference**2).sum() / (w * x.astype(np.float64) ** 2).sum()):.2f}"


def errors() -> None:
    """Print errors by standard deviation and distribution."""
    columns = "without scale | with scale | weighted, plain search | weighted, weighted search | Q4_0 | IQ4_NL"
    print(f"| weights | standard deviation | {columns} |\n|---|---:|---:|---:|---:|---:|---:|---:|")
    for kind in ("Gaussian", "heavy-tailed"):
        rng = np.random.default_rng(1)
        unit = rng.standard_normal((ROWS, N)) if kind == "Gaussian" else rng.standard_t(3, (ROWS, N)) / np.sqrt(3)
        weights = rng.gamma(0.5, size=N).astype(np.float32)
        for size in SIZES:
            x = (unit * size).astype(np.float32)
            cells = [error(x, store(x)), error(x, store_scaled(x))]
            cells += [error(x, store_scaled(x), weights), error(x, store_scaled(x, weights), weights)]
            cells += [error(x, store(x, name)) for name in ("Q4_0", "IQ4_NL")]
            print(f"| {kind} | {size:g} | {' | '.join(cells)} |", flush=True)


def variants(args: argparse.Namespace) -> Iterator[tuple[str, str, QuantizeOptions]]:
    """Yield a type, its options as text, and the options."""
    yield from ((name, "", QuantizeOptions(pure=True)) for name in ("MXFP4", "Q4_0", "IQ4_NL", "Q4_K"))
    yield "NVFP4", "--no-tensor-scales", QuantizeOptions(pure=True, tensor_scales=False)
    yield "NVFP4", "", QuantizeOptions(pure=True)
    if args.imatrix is not None:
        for name in ("IQ4_NL", "Q4_K", "NVFP4"):
            yield name, "--imatrix", QuantizeOptions(pure=True, imatrix=args.imatrix)
    if args.calibrate is not None:
        options = QuantizeOptions(pure=True, calibrate=(args.calibrate,), calibrate_chunks=64)
        yield "NVFP4", "--calibrate", options
        if args.imatrix is not None:
            options = QuantizeOptions(pure=True, calibrate=(args.calibrate,), calibrate_chunks=64, imatrix=args.imatrix)
            yield "NVFP4", "--calibrate --imatrix", options


def divergences(args: argparse.Namespace, folder: Path) -> None:
    """Print sizes and divergences of a model."""
    base = folder / "base"
    quantkit.perplexity(args.model, args.evaluation.read_bytes(), chunks=args.chunks, save_logits=SaveLogits(base))
    print("\n| TYPE | options | bytes | mean KLD | same top token, % |\n|---|---|---:|---:|---:|")
    for type_name, text, options in variants(args):
        out = folder / "out.gguf"
        quantkit.quantize(args.model, out, type_name, options, overwrite=True)
        sums = quantkit.kld(out, base, activations="exact").sums
        kld = sums.kld.mean
        top = 100 * sums.same_top_p.value
        print(
            f"| {type_name} | {text} | {out.stat().st_size} | {kld.value:.6f} ± {kld.error:.6f} | {top:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("evaluation", type=Path, metavar="EVALUATION")
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--calibrate", type=Path, metavar="TEXT")
    parser.add_argument("--chunks", type=int, default=8)
    args = parse_options(parser)
    print(f"{machine()}\n")
    errors()
    with work_folder(None) as folder:
        divergences(args, folder)


if __name__ == "__main__":
    record_output(main)
