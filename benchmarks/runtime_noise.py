"""Compare the noise of rounded activations with llama.cpp's: files measured against their own decoded copies.

    benchmarks/runtime_noise.py MODEL.gguf.. --llama BIN [--text FILE] [--types Q8_0,Q4_K] [--chunks 16]

All matrices of a model in one type (--pure), and a copy of the file decoded to F32, whose logits by llama.cpp are the
base. Columns: divergence of llama.cpp's F32 from quantkit's (exact activations; the floor of the comparison); of the
file in quantkit with the runtime's activations, in llama.cpp with --no-repack, and as it repacks by default; ratios of
quantkit's to both, with 95 % intervals over the same tokens; and by how much each changes the perplexity. The row of all types weights
them equally.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
from compare_perplexity import llama
from feedback_kld import ratio_of_means
from processes import llama_bin, machine, work_folder
from results import parse_options, record_output

import quantkit
from quantkit.activations import EXACT, RUNTIME
from quantkit.evaluate.scores import F64
from quantkit.formats.logits import CompactLogits, LlamaLogits, open_logits
from quantkit.quantize import QuantizeOptions

COLUMNS = (
    "model", "type", "floor", "quantkit", "llama.cpp --no-repack", "llama.cpp", "quantkit / --no-repack",
    "quantkit / llama.cpp", "perplexity, quantkit", "perplexity, --no-repack", "perplexity, llama.cpp",
)  # fmt: skip


class Divergence(NamedTuple):
    """Divergence of each token from the base, f64 [n], and the ratio of the perplexity to the base's."""

    klds: F64
    ppl_ratio: float


def from_engine(model: Path, base: Path, activations: str, threads: int) -> Divergence:
    """Measure a file in quantkit."""
    sums = quantkit.kld(model, base, activations=activations, threads=threads).sums
    return Divergence(np.concatenate(sums.klds).astype(np.float64), sums.ratio.value)


def open_llama_logits(path: Path) -> LlamaLogits:
    """Open logits that llama-perplexity wrote."""
    file = open_logits(path)
    assert not isinstance(file, CompactLogits)
    return file


def from_logits(path: Path, base_path: Path) -> Divergence:
    """Measure logits of llama-perplexity against others, with its formula.

    Both files have log-probabilities down to 16 nats below the top. Those below are raised to that: a sum of
    exponentials over the vocabulary would include them, so nothing is normalized.
    """
    file, base = open_llama_logits(path), open_llama_logits(base_path)
    text = base.chunks
    klds, rises = [], []
    for window in range(text.n_chunks):
        following = text.tokens[window, text.first + 1 :]
        for row in range(0, text.rows, 16):
            end = min(text.rows, row + 16)
            log_p, log_q = base.rows(window, row, end).log_probs(), file.rows(window, row, end).log_probs()
            p = np.where(log_p > -16, np.exp(log_p), 0)
            klds.append((p * (log_p - log_q)).sum(axis=1, dtype=np.float64))
            at = np.arange(end - row), following[row:end]
            rises.append(log_p[at].astype(np.float64) - log_q[at])
    return Divergence(np.concatenate(klds), float(np.exp(np.concatenate(rises).mean())))


def measure(args: argparse.Namespace, model: Path, text: Path, folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield a row for each type."""
    file, copy, base, logits = (folder / name for name in ("file.gguf", "copy.gguf", "base", "logits"))

    def save_logits(path: Path, out: Path, *options: str) -> None:
        common = ("-f", text, "-c", args.ctx, "--chunks", args.chunks, "-t", args.threads)
        llama(args.llama, "llama-perplexity", "-m", path, *common, "--kl-divergence-base", out, *options)

    relative: list[tuple[F64, ...]] = []
    for name in args.types.split(","):
        quantkit.quantize(model, file, name, QuantizeOptions(pure=True, allow_requantize=True), overwrite=True)
        quantkit.quantize(file, copy, "F32", QuantizeOptions(allow_requantize=True), overwrite=True)
        save_logits(copy, base)
        floor = from_engine(copy, base, EXACT, args.threads)
        engine = from_engine(file, base, RUNTIME, args.threads)
        peers = []
        for options in (("--no-repack",), ()):
            save_logits(file, logits, *options)
            peers.append(from_logits(logits, base))
        means = [f"{abs(d.klds.mean()):.7f}" for d in (floor, engine, *peers)]
        ratios = [ratio_of_means(engine.klds, peer.klds) for peer in peers]
        changes = [f"{100 * (d.ppl_ratio - 1):+.3f} %" for d in (engine, *peers)]
        relative.append(tuple(d.klds / peers[0].klds.mean() for d in (engine, *peers)))
        yield model.stem, name, *means, *ratios, *changes
    engine_klds, *peer_klds = (np.mean(klds, axis=0) for klds in zip(*relative, strict=True))
    yield model.stem, "all", *["-"] * 4, *(ratio_of_means(engine_klds, klds) for klds in peer_klds), *["-"] * 3


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
    with work_folder(None) as folder:
        text = args.text
        if text is None:
            text = folder / "topics.txt"
            text.write_text("\n".join(topics[key] for key in sorted(topics)))
        for model in args.models:
            for row in measure(args, model, text, folder):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    record_output(main)
