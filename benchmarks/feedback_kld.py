"""Measure the gain of error feedback: divergence from the full-precision model at the same types and size, in three
ways.

    benchmarks/feedback_kld.py MODEL.gguf CALIBRATION EVALUATION [--presets Q4_K_M,F32:ffn_down=Q2_K,..] [--chunks N]

Every preset is quantized with an importance matrix, with `--feedback` and the covariances of the same text, with
`--calibrate` alone and, given --no-balance, with `--calibrate --no-balance`; the mean KL divergence on a held-out text
is printed with its standard error. Ratios are to the importance matrix, token by token: their 95 % interval is that of
a ratio of two means over the same tokens. A preset may be followed by arguments of --tensor-type, each after a colon.

With --llama-cpp, a second table has the results of llama-perplexity --kl-divergence for the same files and text.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from compare_perplexity import llama
from processes import machine, work_folder
from results import parse_options, record_output

import quantkit
from quantkit.evaluate.sinks import SaveLogits
from quantkit.imatrix import ImatrixOptions, imatrix
from quantkit.imatrix.covariance import covariance
from quantkit.quantize import QuantizeOptions, quantize

PRESETS = "Q4_K_M,IQ4_XS,MXFP4,Q3_K_M,Q2_K,IQ3_XXS,IQ2_XXS,IQ2_KS,IQ4_KS"


@dataclass(frozen=True)
class Measurement:
    """A file: divergence of each token, f32 [n], the share of equal top tokens, seconds to quantize it."""

    klds: npt.NDArray[np.float32]
    same_top: float
    ppl: float
    seconds: float

    @property
    def text(self) -> str:
        mean, error = self.klds.mean(dtype=np.float64), self.klds.std(dtype=np.float64) / math.sqrt(len(self.klds))
        return f"{mean:.5f} ± {error:.5f}"


def ratio(measurement: Measurement, base: Measurement) -> str:
    """Return the ratio of two means over the same tokens, with its 95 % interval."""
    return ratio_of_means(measurement.klds.astype(np.float64), base.klds.astype(np.float64))


def ratio_of_means(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> str:
    """Return mean(a) / mean(b) with its 95 % interval; values of the same tokens are a pair."""
    value = a.mean() / b.mean()
    error = (a - value * b).std() / b.mean() / math.sqrt(len(a))
    return f"{value:.3f} ± {1.96 * error:.3f}"


class Comparison:
    """Files quantized from a model in several ways, and compared with it, in a folder."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.out = args, folder, folder / "out.gguf"
        self.text = ImatrixOptions(n_ctx=args.ctx, chunks=args.chunks, process_output=True)
        base = SaveLogits(folder / "base")
        text, settings = args.evaluation.read_bytes(), {"n_ctx": args.ctx, "chunks": args.evaluation_chunks}
        quantkit.perplexity(args.model, text, **settings, save_logits=base, threads=args.threads)

    def variants(self) -> dict[str, QuantizeOptions]:
        """Record an importance matrix and covariances; return the variants that use them."""
        args, folder = self.args, self.folder
        imatrix(args.model, [args.calibration], folder / "im.gguf", options=replace(self.text, ppl=False))
        covariance(args.model, [args.calibration], folder / "cov.gguf", options=self.text)
        plain = QuantizeOptions(allow_requantize=True, imatrix=folder / "im.gguf", tensor_type=tuple(args.tensor_type))
        chunks = {"calibrate_ctx": args.ctx, "calibrate_chunks": args.chunks}
        calibrate = replace(plain, imatrix=None, calibrate=(args.calibration,), **chunks)
        extra = {"calibrate --no-balance": replace(calibrate, balance=False)}
        return {
            "imatrix": plain,
            "feedback": replace(plain, feedback=folder / "cov.gguf"),
            "calibrate": calibrate,
            **(extra if getattr(args, "no_balance", False) else {}),
        }

    def make(self, preset: str, options: QuantizeOptions) -> Measurement:
        """Quantize a model and measure the result."""
        name, *types = preset.split(":")
        options = replace(options, tensor_type=(*options.tensor_type, *types))
        began = time.perf_counter()
        quantize(self.args.model, self.out, name, options, overwrite=True, threads=self.args.threads)
        return self.measure(self.out, time.perf_counter() - began)

    def measure(self, path: Path, seconds: float = math.nan) -> Measurement:
        """Compare a file with the full-precision model."""
        sums = quantkit.kld(path, self.folder / "base", threads=self.args.threads).sums
        return Measurement(np.concatenate(sums.klds), sums.same_top_p.value, sums.nll.ppl.value, seconds)


class LlamaCpp:
    """Results of llama-perplexity for the same files and text."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.base = args, folder / "llama.cpp-base"
        self._run(args.model)

    def _run(self, model: Path, *options: str) -> str:
        args = self.args
        chunks = () if args.evaluation_chunks is None else ("--chunks", args.evaluation_chunks)
        threads = () if args.threads is None else ("-t", args.threads)
        return llama(
            args.llama_cpp, "llama-perplexity", "-m", model, "-f", args.evaluation, "-c", args.ctx,
            *chunks, *threads, "--kl-divergence-base", self.base, *options,
        )  # fmt: skip

    def statistics(self, model: Path) -> list[str]:
        """Return mean divergence, the share of equal top tokens and perplexity, as printed; "-" if it does not load."""
        if not quantkit.inspect(model).runtimes[0].loads:
            return ["-"] * 3
        text = self._run(model, "--kl-divergence")
        patterns = [r"Mean\s+KLD:\s*(\S+ ± +\S+)", r"Same top p:\s*(\S+)", r"Mean PPL\(Q\)\s*:\s*(\S+)"]
        matches = [re.search(pattern, text) for pattern in patterns]
        return [re.sub(r" +", " ", m[1]) if m else "?" for m in matches]


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the arguments shared by comparisons."""
    p = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("model", type=Path)
    p.add_argument("calibration", type=Path)
    p.add_argument("evaluation", type=Path)
    p.add_argument("--presets", default=PRESETS)
    p.add_argument("--ctx", type=int, default=256)
    p.add_argument("--chunks", type=int, metavar="N", help="chunks of the calibration text")
    p.add_argument("--evaluation-chunks", type=int, metavar="N", help="chunks of the evaluation text")
    p.add_argument("--threads", type=int)
    return p


def row(preset: str, measurements: Mapping[str, Measurement]) -> str:
    """Return a row of the table."""
    first, *remainder = measurements.values()
    cells = [c for m in remainder for c in (m.text, ratio(m, first))]
    top = " / ".join(f"{100 * m.same_top:.1f}" for m in measurements.values())
    ppl = " / ".join(f"{m.ppl:.3f}" for m in measurements.values())
    seconds = " / ".join(f"{m.seconds:.0f}" for m in measurements.values())
    return f"| {preset} | {first.text} | {' | '.join(cells)} | {top} | {ppl} | {seconds} |"


def main() -> None:
    p = arguments()
    p.add_argument("--tensor-type", action="append", default=[], metavar="RE=TYPE")
    p.add_argument("--no-balance", action="store_true", help="also --calibrate --no-balance")
    p.add_argument("--llama-cpp", type=Path, metavar="BIN", help="folder of llama.cpp's programs")
    args = parse_options(p)
    print(machine(), flush=True)
    with work_folder(None) as folder:
        compared = Comparison(args, folder)
        peer = LlamaCpp(args, folder) if args.llama_cpp else None
        lines = []
        variants = compared.variants()
        header = "".join(f" `--{variant}` | ratio |" for variant in variants if variant != "imatrix")
        print(f"| preset | imatrix |{header} same top token | PPL | seconds |")
        print("|---|---|" + "---|---|" * (len(variants) - 1) + "---|---|---|", flush=True)
        for preset in args.presets.split(","):
            measurements = {}
            for variant, options in variants.items():
                measurements[variant] = result = compared.make(preset, options)
                if peer is not None:
                    cells = f"{result.text} | {100 * result.same_top:.2f} | {result.ppl:.3f}"
                    lines.append(f"| {preset} | {variant} | {cells} | {' | '.join(peer.statistics(compared.out))} |")
            print(row(preset, measurements), flush=True)
        if lines:
            print("\n| preset | | KLD, quantkit | same top token | PPL | KLD, llama.cpp | same top token | PPL |")
            print("|---|---|---|---|---|---|---|---|\n" + "\n".join(lines))


if __name__ == "__main__":
    record_output(main)
