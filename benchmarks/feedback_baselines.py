"""Compare files quantized by other programs with quantkit's of the same types: divergence from the full-precision
model.

    benchmarks/feedback_baselines.py MODEL.gguf CALIBRATION EVALUATION NAME=FILE.gguf ..

Every tensor gets the type that it has in FILE (`quantize --like`), with an importance matrix, `--feedback` and
`--calibrate` on the same text. Ratios are to FILE, token by token, with 95 % intervals.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from feedback_kld import Comparison, arguments, ratio
from processes import machine, work_folder
from results import parse_options, record_output


def main() -> None:
    p = arguments()
    p.add_argument("files", nargs="+", metavar="NAME=FILE.gguf")
    p.set_defaults(tensor_type=[])
    args = parse_options(p)
    print(machine(), flush=True)
    with work_folder(None) as folder:
        compared = Comparison(args, folder)
        variants = compared.variants()
        print("| file | made by | KLD | ratio | same top token | PPL |\n|---|---|---|---|---|---|")
        for name, path in (pair.split("=", 1) for pair in args.files):
            baseline = compared.measure(Path(path))
            print(f"| {name} | | {baseline.text} | | {100 * baseline.same_top:.1f} | {baseline.ppl:.3f} |", flush=True)
            for variant, options in variants.items():
                result = compared.make("LIKE", replace(options, like=Path(path)))
                cells = f"{result.text} | {ratio(result, baseline)} | {100 * result.same_top:.1f} | {result.ppl:.3f}"
                print(f"| | {variant} | {cells} |", flush=True)


if __name__ == "__main__":
    record_output(main)
