"""Compare the noise of rounded activations with llama.cpp's: files measured against their own decoded copies.

    benchmarks/runtime_noise.py MODEL.gguf.. [--llama BIN] [--text FILE] [--types Q8_0,Q4_K] [--chunks 16]

All matrices of a model in one type (--pure), and a copy of the file decoded to F32, whose logits by llama.cpp are the
base. The first table has the divergence of quantkit's F32 (exact activations) from the base, the floor of the
comparison; of the file in quantkit with the runtime's activations, in llama.cpp (--no-repack), and with the matrices
that it repacks by default; and by how much each changes the perplexity.

The second table has ratios to llama.cpp --no-repack, with 95 % intervals over the same tokens: of divergences, and of
the mean squared error of log-probabilities that the base has above e^-13, which depends less on single tokens. -fa off
sums attention in another order: that ratio is what chance alone does to llama.cpp. The last row of a model has the
means over all types, each relative to that of --no-repack.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
from compare_perplexity import llama
from feedback_kld import ratio_of_means
from processes import llama_bin, machine, work_folder
from results import parse_options, print_table, record_output

import quantkit
from quantkit.activations import EXACT, RUNTIME
from quantkit.evaluate import SaveLogits
from quantkit.evaluate.scores import F64
from quantkit.formats.logits import CompactLogits, LlamaLogits, open_logits
from quantkit.quantize import QuantizeOptions

COLUMNS = (
    "model", "type", "floor", "quantkit", "llama.cpp --no-repack", "llama.cpp", "perplexity, quantkit",
    "perplexity, --no-repack", "perplexity, llama.cpp",
)  # fmt: skip
RATIO_COLUMNS = (
    "model", "type", "KLD, quantkit", "KLD, repacked", "KLD, -fa off", "error, quantkit", "error, repacked",
    "error, -fa off",
)  # fmt: skip
#: Tokens less probable than this in the base have no part in the error of log-probabilities.
LEAST_LOG_P = -13


class Noise(NamedTuple):
    """Distance of each token's prediction from the base's, f64 [n], and the ratio of the perplexity to the base's."""

    klds: F64
    errors: F64
    ppl_ratio: float


def open_llama_logits(path: Path) -> LlamaLogits:
    """Open logits that llama-perplexity wrote."""
    file = open_logits(path)
    assert not isinstance(file, CompactLogits)
    return file


def noise_of(path: Path, base_path: Path) -> Noise:
    """Measure logits against others; both in llama.cpp's format.

    They have log-probabilities down to 16 nats below the top. Those below are raised to that: a sum of exponentials
    over the vocabulary would include them, so nothing is normalized.
    """
    file, base = open_llama_logits(path), open_llama_logits(base_path)
    text = base.chunks
    klds, errors, rises = [], [], []
    for window in range(text.n_chunks):
        following = text.tokens[window, text.first + 1 :]
        for row in range(0, text.rows, 16):
            end = min(text.rows, row + 16)
            log_p, log_q = base.rows(window, row, end).log_probs(), file.rows(window, row, end).log_probs()
            differences = (log_p - log_q).astype(np.float64)
            p = np.where(log_p > -16, np.exp(log_p), 0)
            klds.append((p * differences).sum(axis=1))
            errors.append(np.square(differences).mean(axis=1, where=log_p > LEAST_LOG_P))
            rises.append(differences[np.arange(end - row), following[row:end]])
    return Noise(np.concatenate(klds), np.concatenate(errors), float(np.exp(np.concatenate(rises).mean())))


class Comparison:
    """Both programs on a text, in a folder."""

    def __init__(self, args: argparse.Namespace, text: Path, folder: Path) -> None:
        self.args, self.text, self.folder = args, text, folder

    def run_llama(self, model: Path, out: Path, *options: str) -> None:
        """Save llama.cpp's logits."""
        args = self.args
        common = ("-f", self.text, "-c", args.ctx, "--chunks", args.chunks, "-t", args.threads)
        llama(args.llama, "llama-perplexity", "-m", model, *common, "--kl-divergence-base", out, *options)

    def run_engine(self, model: Path, out: Path, activations: str) -> None:
        """Save quantkit's logits."""
        args = self.args
        quantkit.perplexity(
            model, self.text.read_text(encoding="utf-8"), n_ctx=args.ctx, chunks=args.chunks, activations=activations,
            threads=args.threads, save_logits=SaveLogits(out, "llama.cpp", overwrite=True),
        )  # fmt: skip

    def measure(self, model: Path, name: str) -> dict[str, Noise]:
        """Return the noise of a type by program and options."""
        file, copy, base, logits = (self.folder / n for n in ("file.gguf", "copy.gguf", "base", "logits"))
        quantkit.quantize(model, file, name, QuantizeOptions(pure=True, allow_requantize=True), overwrite=True)
        quantkit.quantize(file, copy, "F32", QuantizeOptions(allow_requantize=True), overwrite=True)
        self.run_llama(copy, base)
        programs: dict[str, Callable[[], None]] = {
            "floor": lambda: self.run_engine(copy, logits, EXACT),
            "quantkit": lambda: self.run_engine(file, logits, RUNTIME),
            "llama.cpp": lambda: self.run_llama(file, logits, "--no-repack"),
            "repacked": lambda: self.run_llama(file, logits),
            "-fa off": lambda: self.run_llama(file, logits, "--no-repack", "-fa", "off"),
        }
        noises = {}
        for program, run in programs.items():
            run()
            noises[program] = noise_of(logits, base)
        return noises


def ratios(noises: dict[str, list[Noise]]) -> list[str]:
    """Return the cells of ratios: means over types, relative to llama.cpp's."""
    cells = []
    for field in ("klds", "errors"):
        values: dict[str, list[F64]] = {
            program: [getattr(noise, field) for noise in row] for program, row in noises.items()
        }
        scales = [of_type.mean() for of_type in values["llama.cpp"]]
        means = {
            program: np.mean([of_type / scale for of_type, scale in zip(row, scales, strict=True)], axis=0)
            for program, row in values.items()
        }
        cells += [ratio_of_means(means[program], means["llama.cpp"]) for program in ("quantkit", "repacked", "-fa off")]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--llama", type=Path, default=llama_bin(), help="folder of llama.cpp's programs")
    parser.add_argument("--text", type=Path, help="default: pydoc_data.topics of the standard library")
    parser.add_argument("--types", default="Q8_0,Q5_0,Q4_0,Q4_K,Q6_K,IQ4_XS")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    args = parse_options(parser)
    if args.llama is None:
        parser.error("llama.cpp is missing: scripts/peers builds it, or give --llama")
    print(f"{args.chunks} chunks of {args.ctx} tokens; {machine()}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    types, rows = args.types.split(","), []
    with work_folder(None) as folder:
        text = args.text
        if text is None:
            text = folder / "topics.txt"
            text.write_text("\n".join(topics[key] for key in sorted(topics)))
        comparison = Comparison(args, text, folder)
        for model in args.models:
            by_type = {}
            for name in types:
                noises = by_type[name] = comparison.measure(model, name)
                programs = [noises[program] for program in ("quantkit", "llama.cpp", "repacked")]
                klds = [f"{abs(noise.klds.mean()):.7f}" for noise in (noises["floor"], *programs)]
                changes = [f"{100 * (noise.ppl_ratio - 1):+.3f} %" for noise in programs]
                print(f"| {' | '.join((model.stem, name, *klds, *changes))} |", flush=True)
                rows.append((model.stem, name, *ratios({program: [noise] for program, noise in noises.items()})))
            rows.append((model.stem, "all", *ratios({w: [by_type[n][w] for n in types] for w in noises})))
    print()
    print_table(RATIO_COLUMNS, rows)


if __name__ == "__main__":
    record_output(main)
