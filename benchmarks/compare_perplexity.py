"""Compare perplexity with llama.cpp's: SmolLM2 and tiny-moe in several types, on the same text and files.

    benchmarks/compare_perplexity.py --chunks 20

The text is pydoc_data.topics of the standard library, available on every machine. Files are quantized by quantkit, or
for types without an encoder by llama-quantize with its own importance matrix. llama.cpp repacks some types at load and
then multiplies with different rounding, so it is measured with and without repacking (--no-repack).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

from processes import machine, work_folder
from results import parse_options, record_output

import quantkit

ROOT = Path(__file__).resolve().parent.parent
TYPES = ("F16", "Q8_0", "Q4_K_M", "IQ4_XS", "IQ2_XXS")


def llama(folder: Path, program: str, *args: object) -> str:
    process = subprocess.run(
        [folder / program, *map(str, args)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if process.returncode != 0:
        sys.exit(f"{program} failed:\n{process.stdout[-2000:]}{process.stderr[-4000:]}")
    return process.stdout + process.stderr


def llama_perplexity(folder: Path, model: Path, text: Path, ctx: int, chunks: int, *options: str) -> float:
    for _ in range(8):  # the program may end before its log is written
        output = llama(folder, "llama-perplexity", "-m", model, "-f", text, "-c", ctx, "--chunks", chunks, *options)
        match = re.search(r"Final estimate: PPL = ([0-9.]+)", output)
        if match:
            return float(match[1])
    sys.exit(f"llama-perplexity never printed its estimate for {model}")


def make(folder: Path, llama_bin: Path, source: Path, name: str, text: Path) -> Path:
    """Return ``source`` quantized to type ``name``."""
    out = folder / f"{source.stem}-{name}.gguf"
    if name != "IQ2_XXS":
        quantkit.quantize(source, out, name, quantkit.QuantizeOptions(allow_requantize=True), overwrite=True)
        return out
    imatrix = folder / f"{source.stem}-imatrix.gguf"
    llama(llama_bin, "llama-imatrix", "-m", source, "-f", text, "-o", imatrix, "--chunks", 20, "--no-ppl")
    llama(llama_bin, "llama-quantize", "--allow-requantize", "--imatrix", imatrix, source, out, name)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--smollm2", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--tiny-moe", type=Path, default=ROOT / "tests" / "data" / "tiny-moe-bf16.gguf")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    options = parse_options(parser)
    with work_folder(None) as folder:
        text = folder / "topics.txt"
        text.write_text("\n".join(topics[key] for key in sorted(topics)))
        print(f"{options.chunks} chunks of {options.ctx} tokens; {machine()}\n")
        print("| model | type | quantkit | llama.cpp --no-repack | llama.cpp | difference | difference |")
        print("|---|---|---|---|---|---|---|")
        for source in (options.smollm2, options.tiny_moe):
            for name in options.types:
                model = make(folder, options.llama, source, name, text)
                ppl = quantkit.perplexity(model, text.read_text(), n_ctx=options.ctx, chunks=options.chunks).ppl.value
                plain, usual = (
                    llama_perplexity(options.llama, model, text, options.ctx, options.chunks, *extra)
                    for extra in (("--no-repack",), ())
                )
                shares = f"{ppl / plain - 1:+.3%} | {ppl / usual - 1:+.3%}"
                print(f"| {source.stem} | {name} | {ppl:.4f} | {plain:.4f} | {usual:.4f} | {shares} |", flush=True)
                model.unlink()


if __name__ == "__main__":
    record_output(main)
