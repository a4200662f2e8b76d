"""Compare the dry run of `quantkit convert` with its output: every checkpoint, with four types.

    PYTHON scripts/check_dry_run.py [NAME ...]

A dry run reads only headers: its size must be that of the file, and the same if all weights are holes (zeros), except
for the few whose tensors or keys depend on values. Prints the differences, and the checkpoints that a type cannot be
used for.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/lib"), str(ROOT / "tests/checkpoint")]

from test_convert_goldens import options_of  # noqa: E402

import checkpoints  # noqa: E402
from quantkit.cli._run_report import DryRunReport  # noqa: E402
from quantkit.convert import ConvertOptions, convert, plan_convert  # noqa: E402
from quantkit.errors import QuantkitError  # noqa: E402

#: TYPE of the command line; None: --outtype f16.
TYPE_NAMES = (None, "Q4_K_M", "IQ4_XS", "MXFP4_MOE")
#: An output head equal to the embeddings, unused tokens, scales of one: the output depends on values.
BY_VALUES = {"falcon-mamba", "minimax-m1", "qwen3-nvfp4-trivial"}


def planned_bytes(folder: Path, out: Path, type_name: str | None, options: ConvertOptions) -> int:
    """Return the number of bytes that a dry run prints."""
    report = DryRunReport(plan_convert(folder, out, type_name, options), None).as_dict()
    files: list[dict[str, int]] = report["files"]
    return sum(file["bytes"] for file in files)


def empty(folder: Path) -> None:
    """Replace all weights by holes; headers and lengths are unchanged."""
    for path in folder.rglob("*.safetensors"):
        size = path.stat().st_size
        with path.open("r+b") as file:
            begins = 8 + struct.unpack("<Q", file.read(8))[0]
            file.truncate(begins)
            file.truncate(size)


def check(name: str, folder: Path) -> list[str]:
    """Return the problems of a checkpoint."""
    description = checkpoints.describe(name)
    checkpoint = checkpoints.write_checkpoint(name, folder)
    names = ("pre", "no_nextn", "fuse_gate_up_exps", "fuse_qkv", "allow_incomplete")
    options = ConvertOptions(**{name: getattr(options_of(description), name) for name in names})
    wrong, sizes = [], {}
    for type_name in TYPE_NAMES:
        checked_options = (
            options if type_name else replace(options, outtype="f16", fuse_gate_up_exps=False, fuse_qkv=False)
        )
        try:
            sizes[type_name] = planned_bytes(checkpoint, folder / "a.gguf", type_name, checked_options)
            paths = convert(checkpoint, folder / "a.gguf", type_name, checked_options, overwrite=True).paths
        except QuantkitError as e:
            print(f"    {name} {type_name or 'f16'}: {str(e)[:120]}")
            sizes.pop(type_name, None)
            continue
        nbytes = sum(path.stat().st_size for path in paths)
        if nbytes != sizes[type_name]:
            wrong.append(f"{type_name or 'f16'}: {sizes[type_name]} said, {nbytes} written")
        for path in paths:
            path.unlink()
    empty(checkpoint)
    for type_name, size in sizes.items():
        checked_options = (
            options if type_name else replace(options, outtype="f16", fuse_gate_up_exps=False, fuse_qkv=False)
        )
        try:
            in_folder = planned_bytes(checkpoint, folder / "a.gguf", type_name, checked_options)
        except QuantkitError as e:
            print(f"    {name} {type_name or 'f16'} without weights: {str(e)[:120]}")
            continue
        if in_folder != size and name not in BY_VALUES:
            wrong.append(f"{type_name or 'f16'}: {size}, but {in_folder} without weights")
    return wrong


def main() -> None:
    n_failed = 0
    for name in sys.argv[1:] or checkpoints.NAMES:
        with tempfile.TemporaryDirectory() as folder:
            if wrong := check(name, Path(folder)):
                n_failed += 1
                print(f"{name}: {'; '.join(wrong)}", flush=True)
    print(f"{n_failed} differ")
    sys.exit(n_failed > 0)


if __name__ == "__main__":
    main()
