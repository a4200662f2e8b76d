"""Compare files that others quantized with quantkit's of the same types: divergence from the full-precision model.

    benchmarks/feedback_baselines.py MODEL.gguf CALIBRATION EVALUATION NAME=FILE.gguf ..

Every tensor gets the type that it has in FILE (`quantize --like`), with an importance matrix, `--feedback` and
`--calibrate` on the same text. Ratios are to FILE, token by token, with intervals of 95 %.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from feedback_kld import Comparison, arguments, ratio
from processes import machine, work_folder


def main() -> None:
    p = arguments()
    p.add_argument("files", nargs="+", metavar="NAME=FILE.gguf")
    p.set_defaults(tensor_type=[])
    given = p.parse_args()
    print(machine(), flush=True)
    with work_folder(None) as folder:
        compared = Comparison(given, folder)
        ways = compared.ways()
        print("| file | made by | KLD | ratio | same top token | PPL |\n|---|---|---|---|---|---|")
        for name, path in (pair.split("=", 1) for pair in given.files):
            theirs = compared.measured(Path(path))
            print(f"| {name} | | {theirs.text} | | {100 * theirs.same_top:.1f} | {theirs.ppl:.3f} |", flush=True)
            for way, options in ways.items():
                ours = compared.made("LIKE", replace(options, like=Path(path)))
                print(f"| | {way} | {ours.text} | {ratio(ours, theirs)} | {100 * ours.same_top:.1f} | {ours.ppl:.3f} |",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
