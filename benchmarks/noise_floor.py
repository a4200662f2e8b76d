"""Measure the divergence of files from their own decoded copies: the noise of rounded activations, type by type.

    benchmarks/noise_floor.py MODEL.gguf TEXT [--imatrix IM.gguf] [--types Q8_0,Q4_K] [--plot docs/noise-floor.svg]
    benchmarks/noise_floor.py --record docs/benchmarks/data/noise-floor.json --plot docs/noise-floor.svg

All matrices in one type (--pure). Types that need an importance matrix need --imatrix with an entry of the output
(quantkit imatrix --process-output); their token embeddings, which have none, are Q2_K, as in llama.cpp's presets. The
copy has the same weights as F32, so any divergence between the two is that of activations. Columns: of the file from
its copy, with the runtime's activations (the floor) and with exact ones; of the file from the model, with both; base
logits are exact. A second table has tokens per second of a prompt of 512 tokens with both, in turns, medians
of --repetitions (--speed MODEL ..).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from processes import machine, work_folder
from results import parse_options, print_table, read_record, record_output

import quantkit
from quantkit.activations import ACTIVATIONS
from quantkit.cli._plot import Points, Scatter, check_plot, draw
from quantkit.evaluate import SaveLogits
from quantkit.formats.gguf import open_model
from quantkit.kernels.formats import FORMATS
from quantkit.quantize import QuantizeOptions
from quantkit.types import BY_NAME

DEFAULT = [name for name in FORMATS if BY_NAME[name].in_files]
#: Presets of types whose name is that of a preset with another type.
PRESETS = {"IQ2_S": "IQ2_M"}
COLUMNS = ("type", "bits per weight", "floor, runtime", "floor, exact", "KLD, runtime", "KLD, exact", "noise, %")


def check_type(path: Path, name: str) -> None:
    """Exit unless all matrices of the layers have a type."""
    with open_model(path) as model:
        types = {t.type.name for t in model.tensors.values() if t.name.startswith("blk.") and len(t.shape) > 1} - {name}
    if types - {"F32"}:  # routers
        sys.exit(f"{path}: matrices in {', '.join(sorted(types))}, not {name}")


def measure(args: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield a row for each type."""
    text = args.text.read_text(encoding="utf-8")

    def save_base(model: Path, path: Path) -> None:
        save = SaveLogits(path, "compact", top_k=1 << 20, residual=0, overwrite=True)
        quantkit.perplexity(model, text, n_ctx=args.ctx, chunks=args.chunks, save_logits=save)

    with work_folder(None) as folder:
        base, copy_base, file, copy = (folder / name for name in ("base", "copy-base", "file.gguf", "copy.gguf"))
        save_base(args.model, base)
        for name in args.types.split(","):
            embeddings = "Q2_K" if BY_NAME[name].imatrix == "required" else None
            options = QuantizeOptions(pure=True, imatrix=args.imatrix, token_embedding_type=embeddings)
            quantkit.quantize(args.model, file, PRESETS.get(name, name), options, overwrite=True)
            check_type(file, name)
            quantkit.quantize(file, copy, "F32", QuantizeOptions(allow_requantize=True), overwrite=True)
            save_base(copy, copy_base)
            klds = [
                quantkit.kld(file, logits, activations=mode).mean.value
                for logits in (copy_base, base)
                for mode in ACTIVATIONS
            ]
            floor, exact_floor, rounded, exact = klds
            share = f"{100 * (1 - exact / rounded):.0f}" if rounded > 0 else "-"
            figures = [f"{abs(x):.7f}" for x in (floor, exact_floor, rounded, exact)]
            yield name, f"{BY_NAME[name].bpw:.2f}", *figures, share


def time_prompts(models: list[Path], repetitions: int, threads: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each model: tokens per second of a prompt with both, and the ratio of their times."""
    n = 512
    tokens = np.random.default_rng(0).integers(10, 4000, n).astype(np.int32)
    last = np.arange(n) == n - 1
    for path in models:
        times: dict[str, list[float]] = {mode: [] for mode in ACTIVATIONS}
        opened = {mode: quantkit.load(path, threads=threads, activations=mode) for mode in ACTIVATIONS}
        sessions = {mode: model.session(n) for mode, model in opened.items()}
        for _ in range(repetitions + 1):
            for mode, session in sessions.items():
                session.clear()
                start = time.perf_counter()
                session.decode(tokens, outputs=last)
                times[mode].append(time.perf_counter() - start)
        runtime, exact = (statistics.median(times[mode][1:]) for mode in ACTIVATIONS)
        yield path.stem, f"{n / runtime:.0f}", f"{n / exact:.0f}", f"{exact / runtime:.2f}"
        for model in opened.values():
            model.close()


def figure(rows: list[tuple[str, ...]]) -> Scatter:
    """Return the plot: bits per weight against both divergences, and against the floor.

    Where the weights do not diverge, which a logarithmic axis cannot show, the floor has the type's name.
    """

    def points(name: str, column: str, labels: str) -> Points:
        """Return the positive values of a column; with names of those types that are positive in column ``labels``."""
        positive = [row for row in rows if float(row[COLUMNS.index(column)]) > 0]
        is_named = [(float(row[COLUMNS.index("KLD, exact")]) > 0) == (labels == "exact") for row in positive]
        names = [row[0] if has_name and labels else "" for row, has_name in zip(positive, is_named, strict=True)]
        x, y = ([float(row[i]) for row in positive] for i in (1, COLUMNS.index(column)))
        return Points(name, x, y, names)

    kinds = [
        points("divergence, exact activations", "KLD, exact", "exact"),
        points("divergence, the runtime's activations", "KLD, runtime", ""),
        points("of a file from its own decoded copy, the runtime's activations", "floor, runtime", "floor"),
    ]
    return Scatter("Divergence of types, and the noise of rounded activations", "bits per weight", "KLD, nats", kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--types", default=",".join(DEFAULT))
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--speed", type=Path, nargs="*", default=[])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", type=Path, help="do not measure, read this record of an earlier run")
    parser.add_argument("--plot", type=Path, help="draw the divergences by type: .svg, .png, .pdf")
    args = parse_options(parser)
    kind = check_plot(args.plot) if args.plot else ""
    if args.record:
        rows = [tuple(row) for row in read_record(args.record).tables[0].rows]
    else:
        if args.model is None or args.text is None:
            parser.error("give MODEL.gguf and TEXT, or --record")
        print(f"{args.chunks} chunks of {args.ctx} tokens; {machine()}\n")
        rows = [tuple(row) for row in print_table(COLUMNS, measure(args))]
    if args.speed:
        print()
        columns = ("model", "runtime, t/s", "exact, t/s", "time, exact / runtime")
        print_table(columns, time_prompts(args.speed, args.repetitions, args.threads))
    if args.plot:
        args.plot.write_bytes(draw(figure(rows), kind))


if __name__ == "__main__":
    record_output(main)
