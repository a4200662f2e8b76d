"""Measure the perplexity of tiny-moe at every preset of both projects: quantized with its imatrix, run by quantkit.

    benchmarks/preset_perplexity.py --chunks 60 --llama BIN --plot docs/presets.svg
    benchmarks/preset_perplexity.py --record docs/benchmarks/data/presets.json --plot docs/presets.svg

Each preset follows the rules of its project; --rules ik: presets of both by ik_llama.cpp's. llama.cpp's perplexity of
the same file, with --no-repack, is shown beside it for types that it supports. The plot shows bits per weight of the
whole file against the rise of perplexity over BF16; with --record it is drawn from the record of an earlier run,
without a measurement.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compare_perplexity import llama_perplexity
from processes import machine
from results import parse_options, read_record, record_output

import quantkit
from quantkit.cli._plot import Points, Scatter, check_plot, draw
from quantkit.inspect import inspect
from quantkit.kernels.formats import has_encoder
from quantkit.pipeline.presets import PRESETS, Preset, preset_by_name

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests/data"
BF16 = DATA / "tiny-moe-bf16.gguf"
#: Smaller rises, in percent, are noise of the text; they are drawn at this value.
LEAST = 0.03
TREES = (("llama.cpp and ik_llama.cpp", "both"), ("llama.cpp only", "mainline"), ("ik_llama.cpp only", "ik"))


@dataclass(frozen=True)
class Measurement:
    """A row of the table: bits per weight of the file, quantkit's perplexity, its rise over BF16 in percent,
    llama.cpp's.

    rules: "by ik" if they are not those of the preset's project.
    """

    preset: Preset
    bits: float
    ppl: float
    rise: float
    peer_ppl: float
    rules: str = ""

    def __str__(self) -> str:
        peer = "" if math.isnan(self.peer_ppl) else f"{self.peer_ppl:.4f} | {self.ppl / self.peer_ppl - 1:+.3%}"
        tree = self.rules or self.preset.trees
        head = f"| {self.preset.name} | {tree} | {self.bits:.3f} | {self.ppl:.4f} | {self.rise:+.2f}"
        return f"{head} | {peer or ' | '} |"


def evaluate(path: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Return quantkit's perplexity, and llama.cpp's (NaN if it does not load the file)."""
    text = args.text.read_bytes()
    ppl = quantkit.perplexity(path, text, n_ctx=args.ctx, chunks=args.chunks).ppl.value
    loads = args.llama is not None and inspect(path).runtimes[0].loads
    llama = (args.llama, path, args.text, args.ctx, args.chunks, "--no-repack", "-t", str(args.threads))
    peer_ppl = llama_perplexity(*llama) if loads else math.nan
    return ppl, peer_ppl


def measure(args: argparse.Namespace) -> Iterator[Measurement]:
    """Quantize and evaluate the chosen presets, and print the table."""
    print(machine())
    base, llamas = evaluate(BF16, args)
    print(f"BF16: {base:.4f}, llama.cpp {llamas:.4f}; {args.text.name}, -c {args.ctx} --chunks {args.chunks}\n")
    print("| preset | tree | bits per weight | perplexity | rise, % | llama.cpp | difference |")
    print("|---|---|---:|---:|---:|---:|---:|")
    imatrix = DATA / "tiny-moe-imatrix.gguf"
    options = quantkit.QuantizeOptions(imatrix=imatrix, no_provenance=True, rules=args.rules)
    for preset in PRESETS:
        if preset.base is None or not preset.base.is_quantized or not has_encoder(preset.base):
            continue
        if args.presets and preset.name not in args.presets:
            continue
        if args.rules and preset.trees != "both":
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            quantkit.quantize(BF16, path, preset.name, options)
            bits = inspect(path).total.bpw
            ppl, peer_ppl = evaluate(path, args)
        row = Measurement(preset, bits, ppl, 100 * (ppl / base - 1), peer_ppl, "by ik" if args.rules else "")
        print(row, flush=True)
        yield row


def read_measurements(path: Path) -> Iterator[Measurement]:
    """Yield the rows of a record."""
    (table,) = read_record(path).tables
    columns = (table.column(name) for name in ("preset", "bits per weight", "perplexity", "rise, %"))
    for name, *numbers in zip(*columns, strict=True):
        bits, ppl, rise = map(float, numbers)
        yield Measurement(preset_by_name(name), bits, ppl, rise, math.nan)


def _same_place(one: Measurement, second: Measurement) -> bool:
    return abs(one.bits - second.bits) < 0.002 and abs(one.rise - second.rise) < 0.025


def figure(measurements: list[Measurement]) -> Scatter:
    """Return the plot of size against the rise of perplexity; interleaved presets only where they differ from single
    rows."""
    plain = [m for m in measurements if m.preset.base is not None and m.preset.base.interleave == 1]
    points = plain + [m for m in measurements if m not in plain and not any(_same_place(m, second) for second in plain)]
    place = {m: (m.bits, max(m.rise, LEAST)) for m in points}
    best: list[tuple[float, float]] = []
    for bits, rise in sorted(place.values()):
        if not best or rise < best[-1][1]:
            best.append((bits, rise))
    x, y = zip(*best, strict=True)
    kinds = [Points("best perplexity at each size", x, y, is_line=True)]
    for name, trees in TREES:
        points_of_tree = [m for m in points if m.preset.trees == trees]
        if points_of_tree:
            x, y = zip(*(place[m] for m in points_of_tree), strict=True)
            kinds.append(Points(name, x, y, [m.preset.name for m in points_of_tree]))
    title = "Perplexity of tiny-moe, a small mixture of experts, at every preset"
    note = "lower left is better"
    return Scatter(title, "bits per weight of the file", "rise of perplexity over BF16, %", kinds, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=DATA / "tiny-moe-evaluation-whole.txt")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--presets", nargs="*", help="only these")
    parser.add_argument("--rules", choices=["ik"], help="presets of both projects by ik_llama.cpp's rules")
    parser.add_argument("--record", type=Path, help="do not measure, read this record of an earlier run")
    parser.add_argument("--plot", type=Path, help="draw size against perplexity: .svg, .png, .pdf")
    args = parse_options(parser)
    kind = check_plot(args.plot) if args.plot else ""
    measurements = list(read_measurements(args.record) if args.record else measure(args))
    if args.plot:
        args.plot.parent.mkdir(exist_ok=True)
        args.plot.write_bytes(draw(figure(measurements), kind))


if __name__ == "__main__":
    record_output(main)
