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
import hashlib
import json
import os
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/lib"), str(ROOT / "scripts")]

import checkpoints  # noqa: E402
from gguf_digests import differences, digests, split  # noqa: E402
from make_convert_goldens import converted, enter, load_reference  # noqa: E402
from resize import resize  # noqa: E402

Json = dict[str, Any]
OUTTYPES = ("f16", "q8_0")
SHA256 = ROOT / "tests" / "data" / "resized-sha256.json"
#: F32 tensors whose last bit depends on the CPU of the reference: torch's sqrt, softplus and exp.
ROUNDED = re.compile(r"\.(conv_norm(_var)?|per_dim_scale)\.(weight|bias)$|\.(ssm_a|alpha|beta)$")

#: A checkpoint of random sizes: its description, its folder, and that of its target.
Case = tuple[checkpoints.Description, Path, Path | None]
AGREEMENT = ("same", "same except for the last bits", "refused by both")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("reference", "compare"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--seeds", default="1-3", metavar="A-B", help="default: 1-3")
    parser.add_argument("--llama", type=Path, help="llama.cpp's tree")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--enter", action="store_true", help="enter what is the same in tests/data/resized-sha256.json")
    args = parser.parse_intermixed_args()
    # The order of named chat templates depends on the first, the last bit of some tensors on the second.
    fixed = {"PYTHONHASHSEED": "0", "ATEN_CPU_CAPABILITY": "avx2"}
    if args.what == "reference" and not fixed.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | fixed)
    first, _, last = args.seeds.partition("-")
    # A native checkpoint has no config.json whose sizes could change.
    names = args.names or [n for n in (*checkpoints.TOWERS, *checkpoints.DRAFTS) if "native" not in n]
    cases = [(name, seed) for name in names for seed in range(int(first), int(last or first) + 1)]
    sys.exit((convert_all if args.what == "reference" else compare_all)(cases, args))


def summary(path: Path) -> str:
    """Return a hash of a file without the tensors whose last bit depends on the CPU of the reference."""
    from quantkit.formats.gguf import open_gguf

    parts = digests(path)
    with open_gguf(path) as file:
        tensors = zip(file.tensors, split(parts["tensors"]), strict=True)
    text = [parts["metadata"], parts["infos"], *(crc for name, crc in tensors if not ROUNDED.search(name))]
    return hashlib.sha256("".join(text).encode()).hexdigest()


def jobs_of(name: str) -> list[tuple[str, list[str]]]:
    """Return the conversions of a checkpoint: a name, and options of convert_hf_to_gguf.py."""
    modes = [("", [])] if name in checkpoints.DRAFTS else [("text-", []), ("mmproj-", ["--mmproj"])]
    return [(f"{mode}{outtype}", [*options, "--outtype", outtype]) for mode, options in modes for outtype in OUTTYPES]


def write_case(name: str, seed: int, out: Path) -> Case:
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
    program = load_reference(args)
    for name, seed in cases:
        description, source, target = write_case(name, seed, args.out / "reference")
        rows: Json = {"checkpoint": checkpoints.digest(source)}
        for key, options in jobs_of(name):
            target_options = [] if target is None else ["--target-model-dir", str(target)]
            rows[key] = converted(program, description, source, args.out / "files", [*target_options, *options])
            if "file" in rows[key]:
                rows[key]["rounded"] = rounded_tensors(args.out / "files" / rows[key]["file"])
        (args.out / f"{name}.{seed}.json").write_text(json.dumps(rows))
        outcomes = [f"{key}: {rows[key].get('error', 'ok')}" for key, _ in jobs_of(name)]
        print(name, seed, *outcomes, sep="  ", flush=True)
    return 0


def rounded_tensors(path: Path) -> dict[str, list[int]]:
    """Return the bits of the tensors of a file whose last one depends on the CPU."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return {t.name: t.data.view(np.int32).reshape(-1).tolist() for t in tensors if ROUNDED.search(t.name)}


def compare_all(cases: list[tuple[str, int]], args: argparse.Namespace) -> int:
    """Convert with quantkit and compare; return 1 if something differs."""
    totals, entries = Counter[str](), dict[str, Json]()
    for name, seed in cases:
        record = args.out / f"{name}.{seed}.json"
        if not record.exists():
            continue
        rows = json.loads(record.read_text())
        case = write_case(name, seed, args.out / "own")
        if checkpoints.digest(case[1]) != rows["checkpoint"]:
            print("not the checkpoint of the reference", name, seed, sep="  ", flush=True)
            totals["not converted by the reference"] += 1
            continue
        for key, _ in jobs_of(name):
            outcome, why = compare(case, key, rows[key], args.out / "own/model.gguf")
            totals[outcome] += 1
            if args.enter and outcome in AGREEMENT:
                row = entries.setdefault(name, {"seed": seed})
                row[key] = "refused" if outcome == "refused by both" else summary(args.out / "own/model.gguf")
            if outcome not in AGREEMENT:
                print(outcome, name, seed, key, why, sep="  ", flush=True)
    if args.enter:
        enter(SHA256, entries)
    print(", ".join(f"{n} {outcome}" for outcome, n in sorted(totals.items())))
    return int(not totals.keys() <= set(AGREEMENT))


def convert_own(case: Case, key: str, out: Path) -> Path:
    """Convert a checkpoint with quantkit; return the file. Raises QuantkitError."""
    from quantkit.convert import ConvertOptions, convert, convert_mmproj

    description, source, target = case
    mode, _, outtype = key.rpartition("-")
    keywords = description.convert_keywords() | {"outtype": outtype, "allow_incomplete": True}
    if mode == "mmproj":
        options = ConvertOptions(outtype=outtype, allow_incomplete=True)
        return convert_mmproj(source, out, None, options, overwrite=True).paths[0]
    target_keywords = {} if target is None else {"target_model_dir": target}
    return convert(source, out, None, ConvertOptions(**keywords | target_keywords), overwrite=True).paths[0]


def compare(case: Case, key: str, row: Json, out: Path) -> tuple[str, str]:
    """Return the outcome of one conversion, and what differs."""
    from quantkit.errors import QuantkitError
    from quantkit.formats.gguf import open_gguf

    try:
        path = convert_own(case, key, out)
    except QuantkitError as e:
        return ("refused by both", "") if "error" in row else ("refused by quantkit", str(e))
    if "error" in row:
        return "refused by the reference", row["error"]
    with open_gguf(path) as file:
        difference = differences(row, digests(path), list(file.tensors))
        names = [part.removesuffix(" differs") for part in difference.split("; ")]
        if difference and all(name in row.get("rounded", {}) for name in names):
            bits = {name: file.data(name).view(np.int32).astype(np.int64) for name in names}
            largest = max(int(abs(bits[name].reshape(-1) - row["rounded"][name]).max()) for name in names)
            # A bit of the square root is up to two of the quotient, and more of an offset that nearly cancels.
            return ("same except for the last bits" if largest <= 4 else "different", difference)
    return ("different", difference) if difference else ("same", "")


if __name__ == "__main__":
    main()
