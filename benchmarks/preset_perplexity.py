"""Perplexity of tiny-moe at every preset of both trees: quantized with its imatrix, evaluated on the CPU engine.

    benchmarks/preset_perplexity.py --text evaluation.txt --chunks 40 --llama BIN --plot docs/presets.svg

Each preset follows the rules of its tree. Beside it: llama.cpp's own perplexity of the same file, with --no-repack, for
types that it has. The plot shows bits per weight of the whole file against the rise of log perplexity over BF16.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

from compare_perplexity import llama_perplexity
from processes import machine

import quantkit
from quantkit.cli.plot import Points, Scatter, draw
from quantkit.inspect import inspect
from quantkit.kernels.formats import has_encoder
from quantkit.pipeline.presets import PRESETS, Preset

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests/data"
BF16 = DATA / "tiny-moe-bf16.gguf"


def evaluate(path: Path, given: argparse.Namespace) -> tuple[float, float]:
    """Return our perplexity, and llama.cpp's (NaN where it does not load the file)."""
    text = given.text.read_bytes()
    ours = quantkit.perplexity(path, text, n_ctx=given.ctx, chunks=given.chunks).ppl.value
    loads = given.llama is not None and inspect(path).runtimes[0].loads
    llama = (given.llama, path, given.text, given.ctx, given.chunks, "--no-repack")
    theirs = llama_perplexity(*llama) if loads else math.nan
    return ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=DATA / "tiny-moe-evaluation.txt")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=15)
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--presets", nargs="*", help="only these")
    parser.add_argument("--plot", type=Path, help="draw size against perplexity: .svg, .png, .pdf")
    given = parser.parse_args()
    print(machine())
    base, llamas = evaluate(BF16, given)
    print(f"BF16: {base:.4f}, llama.cpp {llamas:.4f}; {given.text.name}, -c {given.ctx} --chunks {given.chunks}\n")
    print("| preset | tree | bits per weight | perplexity | rise, % | llama.cpp |\n|---|---|---:|---:|---:|---:|")
    found: list[tuple[Preset, float, float]] = []
    options = quantkit.QuantizeOptions(imatrix=DATA / "tiny-moe-imatrix.gguf", no_provenance=True)
    chosen = [p for p in PRESETS if p.base is not None and p.base.is_quantized and has_encoder(p.base)]
    for preset in chosen:
        if given.presets and preset.name not in given.presets:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            quantkit.quantize(BF16, path, preset.name, options)
            bits = inspect(path).total.bpw
            ours, theirs = evaluate(path, given)
        found.append((preset, bits, ours))
        peer = "" if math.isnan(theirs) else f"{theirs:.4f}"
        rise = 100 * (ours / base - 1)
        print(f"| {preset.name} | {preset.trees} | {bits:.3f} | {ours:.4f} | {rise:+.2f} | {peer} |", flush=True)
    if given.plot:
        given.plot.parent.mkdir(exist_ok=True)
        given.plot.write_bytes(draw(figure(found, base), given.plot.suffix[1:]))


def figure(found: list[tuple[Preset, float, float]], base: float) -> Scatter:
    """Return size against the rise of log perplexity; interleaved presets, which equal their base, are left out."""
    kinds = []
    for name, trees in (("both trees", "both"), ("llama.cpp", "mainline"), ("ik_llama.cpp", "ik")):
        some = [
            (bits, max(math.log(ppl / base), 1e-4), preset.name)
            for preset, bits, ppl in found
            if preset.trees == trees and preset.base is not None and preset.base.interleave == 1
        ]
        if some:
            x, y, labels = zip(*some, strict=True)
            kinds.append(Points(name, x, y, labels))
    title = "tiny-moe at every preset, with its importance matrix"
    return Scatter(title, "bits per weight of the file", "rise of log perplexity over BF16", kinds)


if __name__ == "__main__":
    main()
