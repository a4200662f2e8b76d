"""What error feedback gains: divergence from the full-precision model, of the same types and size, made in three ways.

    benchmarks/feedback_kld.py MODEL.gguf CALIBRATION EVALUATION [--presets Q4_K_M,F32:ffn_down=Q2_K,..] [--chunks N]

Every preset is quantized with an importance matrix, with `--feedback` and the covariances of the same text, and with
`--calibrate` alone, with --no-balance also with `--calibrate --no-balance`; the mean KL divergence on a text that is in
none of them is printed with its standard error. Ratios are to the importance matrix, token by token:
their interval, of 95 %, is that of a ratio of two means over the same tokens.
A preset may be followed by types of tensors, as --tensor-type has them, each after a colon.

With --llama-cpp, a second table has what llama-perplexity --kl-divergence says of the full-precision file and the same
files, on the same text.
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


class Comparison:
    """Files made of a model in several ways, and compared with it, in a folder."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder, self.out = given, folder, folder / "out.gguf"
        self.text = ImatrixOptions(n_ctx=given.ctx, chunks=given.chunks, process_output=True)
        base = SaveLogits(folder / "base")
        text, how = given.evaluation.read_bytes(), {"n_ctx": given.ctx, "chunks": given.evaluation_chunks}
        quantkit.perplexity(given.model, text, **how, save_logits=base, threads=given.threads)

    def ways(self) -> dict[str, QuantizeOptions]:
        """Record an importance matrix and covariances; return what uses them."""
        given, folder = self.given, self.folder
        imatrix(given.model, [given.calibration], folder / "im.gguf", options=replace(self.text, ppl=False))
        covariance(given.model, [given.calibration], folder / "cov.gguf", options=self.text)
        plain = QuantizeOptions(allow_requantize=True, imatrix=folder / "im.gguf", tensor_type=tuple(given.tensor_type))
        chunks = {"calibrate_ctx": given.ctx, "calibrate_chunks": given.chunks}
        calibrate = replace(plain, imatrix=None, calibrate=(given.calibration,), **chunks)
        others = {"calibrate --no-balance": replace(calibrate, balance=False)}
        return {
            "imatrix": plain,
            "feedback": replace(plain, feedback=folder / "cov.gguf"),
            "calibrate": calibrate,
            **(others if getattr(given, "no_balance", False) else {}),
        }

    def made(self, preset: str, options: QuantizeOptions) -> Measured:
        """Quantize and compare."""
        name, *types = preset.split(":")
        options = replace(options, tensor_type=(*options.tensor_type, *types))
        began = time.perf_counter()
        quantize(self.given.model, self.out, name, options, overwrite=True, threads=self.given.threads)
        return self.measured(self.out, time.perf_counter() - began)

    def measured(self, path: Path, seconds: float = math.nan) -> Measured:
        """Compare a file with the full-precision model."""
        sums = quantkit.kld(path, self.folder / "base", threads=self.given.threads).sums
        return Measured(np.concatenate(sums.klds), sums.same_top_p.value, sums.nll.ppl.value, seconds)


class LlamaCpp:
    """What llama-perplexity says of the same files, on the same text."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.base = given, folder / "llama.cpp-base"
        self._run(given.model)

    def _run(self, model: Path, *options: str) -> str:
        given = self.given
        chunks = () if given.evaluation_chunks is None else ("--chunks", given.evaluation_chunks)
        threads = () if given.threads is None else ("-t", given.threads)
        return llama(
            given.llama_cpp, "llama-perplexity", "-m", model, "-f", given.evaluation, "-c", given.ctx,
            *chunks, *threads, "--kl-divergence-base", self.base, *options,
        )  # fmt: skip

    def said(self, model: Path) -> list[str]:
        """Return mean divergence, the share of equal top tokens and perplexity, as printed; "-" if it does not load."""
        if not quantkit.inspect(model).runtimes[0].loads:
            return ["-"] * 3
        text = self._run(model, "--kl-divergence")
        patterns = [r"Mean\s+KLD:\s*(\S+ ± +\S+)", r"Same top p:\s*(\S+)", r"Mean PPL\(Q\)\s*:\s*(\S+)"]
        found = [re.search(pattern, text) for pattern in patterns]
        return [re.sub(r" +", " ", m[1]) if m else "?" for m in found]


def arguments() -> argparse.ArgumentParser:
    """Return the arguments of what compares files."""
    p = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("model", type=Path)
    p.add_argument("calibration", type=Path)
    p.add_argument("evaluation", type=Path)
    p.add_argument("--presets", default=PRESETS)
    p.add_argument("--ctx", type=int, default=256)
    p.add_argument("--chunks", type=int, metavar="N", help="of the text that is calibrated on")
    p.add_argument("--evaluation-chunks", type=int, metavar="N", help="of the other text")
    p.add_argument("--threads", type=int)
    return p


def row(preset: str, of: Mapping[str, Measured]) -> str:
    """Return a row of the table."""
    first, *others = of.values()
    cells = [c for m in others for c in (m.text, ratio(m, first))]
    top = " / ".join(f"{100 * m.same_top:.1f}" for m in of.values())
    ppl = " / ".join(f"{m.ppl:.3f}" for m in of.values())
    seconds = " / ".join(f"{m.seconds:.0f}" for m in of.values())
    return f"| {preset} | {first.text} | {' | '.join(cells)} | {top} | {ppl} | {seconds} |"


def main() -> None:
    p = arguments()
    p.add_argument("--tensor-type", action="append", default=[], metavar="RE=TYPE")
    p.add_argument("--no-balance", action="store_true", help="also --calibrate --no-balance")
    p.add_argument("--llama-cpp", type=Path, metavar="BIN", help="folder of llama.cpp's programs")
    given = p.parse_args()
    print(machine(), flush=True)
    with work_folder(None) as folder:
        compared = Comparison(given, folder)
        theirs = LlamaCpp(given, folder) if given.llama_cpp else None
        said = []
        ways = compared.ways()
        others = "".join(f" `--{way}` | ratio |" for way in ways if way != "imatrix")
        print(f"| preset | imatrix |{others} same top token | PPL | seconds |")
        print("|---|---|" + "---|---|" * (len(ways) - 1) + "---|---|---|", flush=True)
        for preset in given.presets.split(","):
            found = {}
            for way, options in ways.items():
                found[way] = compared.made(preset, options)
                if theirs is not None:
                    ours = f"{found[way].text} | {100 * found[way].same_top:.2f} | {found[way].ppl:.3f}"
                    said.append(f"| {preset} | {way} | {ours} | {' | '.join(theirs.said(compared.out))} |")
            print(row(preset, found), flush=True)
        if said:
            print("\n| preset | | KLD, quantkit | same top token | PPL | KLD, llama.cpp | same top token | PPL |")
            print("|---|---|---|---|---|---|---|---|\n" + "\n".join(said))


if __name__ == "__main__":
    main()
