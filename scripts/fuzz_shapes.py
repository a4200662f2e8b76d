"""Compare conversions of checkpoints of random sizes with those of llama.cpp's converter, byte by byte.

    TRANSFORMERS scripts/fuzz_shapes.py reference --llama DIR --out DIR [--seeds A-B] [NAME ...]
    PYTHON scripts/fuzz_shapes.py compare --out DIR [--seeds A-B] [NAME ...]

NAME: a checkpoint with encoders, or a draft model (tests/data/checkpoints/towers, drafts); without, all. Every seed
changes the number of layers, widths, patches, images, experts, tokens, the type and the number of shards of each
(tests/lib/resize.py). ``reference``, run with transformers 4.57.6, converts them with convert_hf_to_gguf.py: encoders
and text models to f16 and q8_0, draft models beside a target of the same sizes. ``compare``, run with quantkit's
PYTHON, does the same and prints every difference, then how many files are the same, refused by both, refused by one,
and different; it exits with 1 if some differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/lib")]

from resize import resize  # noqa: E402

import checkpoints  # noqa: E402
from gguf_digests import differences, digests  # noqa: E402

Json = dict[str, Any]
OUTTYPES = ("f16", "q8_0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("reference", "compare"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--seeds", default="1-3", metavar="A-B", help="default: 1-3")
    parser.add_argument("--llama", type=Path, help="llama.cpp's tree")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_intermixed_args()
    # The order of named chat templates depends on the first, the last bit of a softplus on the second.
    fixed = {"PYTHONHASHSEED": "0", "ATEN_CPU_CAPABILITY": "avx2"}
    if args.what == "reference" and not fixed.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | fixed)
    first, _, last = args.seeds.partition("-")
    # A native checkpoint has no config.json whose sizes could change.
    names = args.names or [n for n in (*checkpoints.TOWERS, *checkpoints.DRAFTS) if "native" not in n]
    cases = [(name, seed) for name in names for seed in range(int(first), int(last or first) + 1)]
    sys.exit((convert_all if args.what == "reference" else compare_all)(cases, args))


def jobs_of(name: str) -> list[tuple[str, list[str]]]:
    """Return the conversions of a checkpoint: a name, and options of convert_hf_to_gguf.py."""
    modes = [("", [])] if name in checkpoints.DRAFTS else [("text-", []), ("mmproj-", ["--mmproj"])]
    return [(f"{mode}{outtype}", [*options, "--outtype", outtype]) for mode, options in modes for outtype in OUTTYPES]


def write_case(name: str, seed: int, out: Path) -> tuple[checkpoints.Description, Path, Path | None]:
    """Write a checkpoint of random sizes and the target of a draft model; return its description and both folders."""
    shutil.rmtree(out, ignore_errors=True)
    description = resize(checkpoints.describe(name), seed)
    source, target = checkpoints.write_description(description, out), None
    if description.target is not None:
        target_description = resize(checkpoints.describe(description.target), seed)
        target = checkpoints.write_description(target_description, out)
        description = replace(description, vocab=target_description.vocab)
    return description, source, target


def convert_all(cases: list[tuple[str, int]], args: argparse.Namespace) -> int:
    """Convert with the reference, into a JSON file of digests a case."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from make_convert_goldens import converted, load_reference

    program = load_reference(args)
    for name, seed in cases:
        description, source, target = write_case(name, seed, args.out / "reference")
        rows: Json = {"checkpoint": checkpoints.digest(source)}
        for key, options in jobs_of(name):
            beside = [] if target is None else ["--target-model-dir", str(target)]
            rows[key] = converted(program, description, source, args.out / "files", [*beside, *options])
        (args.out / f"{name}.{seed}.json").write_text(json.dumps(rows))
        print(name, seed, *(f"{key}: {row.get('error', 'ok')}" for key, row in rows.items() if key in dict(jobs_of(name))),
              sep="  ", flush=True)  # fmt: skip
    return 0


def compare_all(cases: list[tuple[str, int]], args: argparse.Namespace) -> int:
    """Convert with quantkit and compare; return 1 if something differs."""
    totals = Counter[str]()
    for name, seed in cases:
        record = args.out / f"{name}.{seed}.json"
        if not record.exists():
            continue
        rows = json.loads(record.read_text())
        description, source, target = write_case(name, seed, args.out / "own")
        if checkpoints.digest(source) != rows["checkpoint"]:
            sys.exit(f"{name} of seed {seed} is another checkpoint than that of the reference")
        for key, _ in jobs_of(name):
            outcome, why = compare(description, source, target, key, rows[key], args.out / "own")
            totals[outcome] += 1
            if outcome not in ("same", "refused by both"):
                print(outcome, name, seed, key, why, sep="  ", flush=True)
    print(", ".join(f"{n} {outcome}" for outcome, n in sorted(totals.items())))
    return int(any(totals[outcome] for outcome in totals if outcome not in ("same", "refused by both")))


def compare(
    description: checkpoints.Description, source: Path, target: Path | None, key: str, row: Json, out: Path
) -> tuple[str, str]:
    """Return the outcome of one conversion, and what differs."""
    from quantkit.convert import ConvertOptions, convert, convert_mmproj
    from quantkit.errors import QuantkitError
    from quantkit.formats.gguf import open_gguf

    mode, _, outtype = key.rpartition("-")
    keywords = description.convert_keywords() | {"outtype": outtype, "allow_incomplete": True}
    try:
        if mode == "mmproj":
            native = {k: v for k, v in keywords.items() if k in ("outtype", "allow_incomplete", "mistral_format")}
            result = convert_mmproj(source, out / "model.gguf", None, ConvertOptions(**native), overwrite=True)
        else:
            beside = {} if target is None else {"target_model_dir": target}
            result = convert(source, out / "model.gguf", None, ConvertOptions(**keywords | beside), overwrite=True)
    except QuantkitError as e:
        return ("refused by both", "") if "error" in row else ("refused by quantkit", str(e))
    if "error" in row:
        return "refused by the reference", row["error"]
    (path,) = result.paths
    with open_gguf(path) as file:
        difference = differences(row, digests(path), list(file.tensors))
    return ("different", difference) if difference else ("same", "")


if __name__ == "__main__":
    main()
