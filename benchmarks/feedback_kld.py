"""What error feedback gains: divergence from the full-precision model, of the same types and size, made in three ways.

    benchmarks/feedback_kld.py MODEL.gguf CALIBRATION EVALUATION [--presets Q4_K_M,IQ4_XS,..] [--chunks N]

Every preset is quantized with an importance matrix, with `--feedback` and the covariances of the same text, and with
`--calibrate`; the mean KL divergence on a text that is in none of them is printed with its standard error. Ratios are
to the importance matrix, token by token: their interval, of 95 %, is that of a ratio of two means over the same tokens.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from processes import machine, work_folder

import quantkit
from quantkit.evaluate.likelihood import SaveLogits
from quantkit.imatrix import ImatrixOptions, imatrix
from quantkit.imatrix.covariance import covariance
from quantkit.quantize import QuantizeOptions, quantize

PRESETS = "Q4_K_M,IQ4_XS,MXFP4,Q3_K_M,Q2_K,IQ3_XXS,IQ2_XXS,IQ2_KS,IQ4_KS"


@dataclass(frozen=True)
class Measured:
    """A file: divergence of each token, f32 [n], the share of equal top tokens, seconds to make it."""

    klds: npt.NDArray[np.float32]
    same_top: float
    ppl: float
    seconds: float

    @property
    def text(self) -> str:
        mean, error = self.klds.mean(dtype=np.float64), self.klds.std(dtype=np.float64) / math.sqrt(len(self.klds))
        return f"{mean:.5f} ± {error:.5f}"


def ratio(of: Measured, to: Measured) -> str:
    """Return the ratio of two means over the same tokens, with its interval of 95 %."""
    a, b = of.klds.astype(np.float64), to.klds.astype(np.float64)
    value = a.mean() / b.mean()
    error = (a - value * b).std() / b.mean() / math.sqrt(len(a))
    return f"{value:.3f} ± {1.96 * error:.3f}"


def made(given: argparse.Namespace, folder: Path, preset: str, options: QuantizeOptions) -> Measured:
    """Quantize and compare."""
    began = time.perf_counter()
    quantize(given.model, folder / "out.gguf", preset, options, overwrite=True, threads=given.threads)
    seconds = time.perf_counter() - began
    sums = quantkit.kld(folder / "out.gguf", folder / "base", threads=given.threads).sums
    return Measured(np.concatenate(sums.klds), sums.same_top_p.value, sums.nll.ppl.value, seconds)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("calibration", type=Path)
    p.add_argument("evaluation", type=Path)
    p.add_argument("--presets", default=PRESETS)
    p.add_argument("--ctx", type=int, default=256)
    p.add_argument("--chunks", type=int, metavar="N", help="of the text that is calibrated on")
    p.add_argument("--tensor-type", action="append", default=[], metavar="RE=TYPE")
    p.add_argument("--threads", type=int)
    given = p.parse_args()
    print(machine(), flush=True)
    with work_folder(None) as folder:
        text = ImatrixOptions(n_ctx=given.ctx, chunks=given.chunks, process_output=True)
        imatrix(given.model, [given.calibration], folder / "im.gguf", options=replace(text, ppl=False))
        covariance(given.model, [given.calibration], folder / "cov.gguf", options=text)
        base = SaveLogits(folder / "base")
        quantkit.perplexity(given.model, given.evaluation.read_bytes(), n_ctx=given.ctx, save_logits=base)
        plain = QuantizeOptions(imatrix=folder / "im.gguf", tensor_type=tuple(given.tensor_type))
        ways = {
            "feedback": replace(plain, feedback=folder / "cov.gguf"),
            "calibrate": replace(
                plain, calibrate=(given.calibration,), calibrate_ctx=given.ctx, calibrate_chunks=given.chunks
            ),
        }
        print("| preset | imatrix | `--feedback` | ratio | `--calibrate` | ratio | same top token | PPL | seconds |")
        print("|---|---|---|---|---|---|---|---|---|")
        for preset in given.presets.split(","):
            first = made(given, folder, preset, plain)
            others = {way: made(given, folder, preset, options) for way, options in ways.items()}
            both = [first, *others.values()]
            cells = [c for m in others.values() for c in (m.text, ratio(m, first))]
            top = " / ".join(f"{100 * m.same_top:.1f}" for m in both)
            ppl, took = (
                " / ".join(f"{v:.{d}f}" for v in vs)
                for vs, d in (([m.ppl for m in both], 3), ([m.seconds for m in both], 0))
            )
            print(f"| {preset} | {first.text} | {' | '.join(cells)} | {top} | {ppl} | {took} |", flush=True)


if __name__ == "__main__":
    main()
