"""Perplexity of tiny-moe at every preset of both trees: quantized with its imatrix, evaluated on the CPU engine.

    benchmarks/preset_perplexity.py --chunks 60 --llama BIN --plot docs/presets.svg
    benchmarks/preset_perplexity.py --table BENCHMARKS.md --plot docs/presets.svg

Each preset follows the rules of its tree; --rules ik: presets of both by ik_llama.cpp's. Beside it: llama.cpp's own
perplexity of the same file, with --no-repack, for types that it has. The plot shows bits per weight of the whole file
against the rise of perplexity over BF16; with --table it is drawn from a table that was printed before, and nothing is
measured.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compare_perplexity import llama_perplexity
from processes import machine

import quantkit
from quantkit.cli._plot import Points, Scatter, check_plot, draw
from quantkit.inspect import inspect
from quantkit.kernels.formats import has_encoder
from quantkit.pipeline.presets import PRESETS, Preset, preset_by_name

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests/data"
BF16 = DATA / "tiny-moe-bf16.gguf"
#: Rises below it, in percent, are noise of the text; they are drawn here.
LEAST = 0.03


@dataclass(frozen=True)
class Measured:
    """A row of the table: bits per weight of the file, our perplexity, its rise over BF16 in percent, llama.cpp's.

    rules: "by ik" if they are not those of the preset's tree.
    """

    preset: Preset
    bits: float
    ours: float
    rise: float
    theirs: float
    rules: str = ""

    def __str__(self) -> str:
        peer = "" if math.isnan(self.theirs) else f"{self.theirs:.4f} | {self.ours / self.theirs - 1:+.3%}"
        tree = self.rules or self.preset.trees
        head = f"| {self.preset.name} | {tree} | {self.bits:.3f} | {self.ours:.4f} | {self.rise:+.2f}"
        return f"{head} | {peer or ' | '} |"


def evaluate(path: Path, given: argparse.Namespace) -> tuple[float, float]:
    """Return our perplexity, and llama.cpp's (NaN where it does not load the file)."""
    text = given.text.read_bytes()
    ours = quantkit.perplexity(path, text, n_ctx=given.ctx, chunks=given.chunks).ppl.value
    loads = given.llama is not None and inspect(path).runtimes[0].loads
    llama = (given.llama, path, given.text, given.ctx, given.chunks, "--no-repack", "-t", str(given.threads))
    theirs = llama_perplexity(*llama) if loads else math.nan
    return ours, theirs


def measure(given: argparse.Namespace) -> Iterator[Measured]:
    """Quantize and evaluate the chosen presets, and print the table."""
    print(machine())
    base, llamas = evaluate(BF16, given)
    print(f"BF16: {base:.4f}, llama.cpp {llamas:.4f}; {given.text.name}, -c {given.ctx} --chunks {given.chunks}\n")
    print("| preset | tree | bits per weight | perplexity | rise, % | llama.cpp | ours / its |")
    print("|---|---|---:|---:|---:|---:|---:|")
    imatrix = DATA / "tiny-moe-imatrix.gguf"
    options = quantkit.QuantizeOptions(imatrix=imatrix, no_provenance=True, rules=given.rules)
    for preset in PRESETS:
        if preset.base is None or not preset.base.is_quantized or not has_encoder(preset.base):
            continue
        if given.presets and preset.name not in given.presets:
            continue
        if given.rules and preset.trees != "both":
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            quantkit.quantize(BF16, path, preset.name, options)
            bits = inspect(path).total.bpw
            ours, theirs = evaluate(path, given)
        row = Measured(preset, bits, ours, 100 * (ours / base - 1), theirs, "by ik" if given.rules else "")
        print(row, flush=True)
        yield row


def read_table(path: Path) -> Iterator[Measured]:
    """Yield the rows of a table that was printed before."""
    number = r" *([-+]?[0-9.]+) *\|"
    row = re.compile(rf"\| (\w+) \| (?:both|mainline|ik) \|{number}{number}{number}")
    for name, *numbers in row.findall(path.read_text()):
        bits, ours, rise = map(float, numbers)
        yield Measured(preset_by_name(name), bits, ours, rise, math.nan)


def _same_place(one: Measured, other: Measured) -> bool:
    return abs(one.bits - other.bits) < 0.002 and abs(one.rise - other.rise) < 0.025


def figure(found: list[Measured]) -> Scatter:
    """Return size against the rise of perplexity; interleaved presets only where they are not those of single rows."""
    plain = [m for m in found if m.preset.base is not None and m.preset.base.interleave == 1]
    shown = plain + [m for m in found if m not in plain and not any(_same_place(m, other) for other in plain)]
    place = {m: (m.bits, max(m.rise, LEAST)) for m in shown}
    best: list[tuple[float, float]] = []
    for bits, rise in sorted(place.values()):
        if not best or rise < best[-1][1]:
            best.append((bits, rise))
    x, y = zip(*best, strict=True)
    kinds = [Points("no smaller one is better", x, y, is_line=True)]
    for name, trees in (("both trees", "both"), ("llama.cpp", "mainline"), ("ik_llama.cpp", "ik")):
        some = [m for m in shown if m.preset.trees == trees]
        if some:
            x, y = zip(*(place[m] for m in some), strict=True)
            kinds.append(Points(name, x, y, [m.preset.name for m in some]))
    title = "Size and quality of tiny-moe, a small mixture of experts, at every preset"
    note = "the further down and left, the better"
    return Scatter(title, "bits per weight of the file", "rise of perplexity over BF16, %", kinds, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=DATA / "tiny-moe-evaluation-whole.txt")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--presets", nargs="*", help="only these")
    parser.add_argument("--rules", choices=["ik"], help="presets of both trees by ik_llama.cpp's rules")
    parser.add_argument("--table", type=Path, help="do not measure, read the table in this file")
    parser.add_argument("--plot", type=Path, help="draw size against perplexity: .svg, .png, .pdf")
    given = parser.parse_args()
    kind = check_plot(given.plot) if given.plot else ""
    found = list(read_table(given.table) if given.table else measure(given))
    if given.plot:
        given.plot.parent.mkdir(exist_ok=True)
        given.plot.write_bytes(draw(figure(found), kind))


if __name__ == "__main__":
    main()
