#!/usr/bin/env python
"""Kill edit, split, join, stitch and prune-experts (SIGKILL) at many moments; compare the files, and resumed output.

    scripts/check_kills.py [MOMENTS] [FOLDER]

In a FOLDER on btrfs or XFS, "edit in a clone" has real clones; elsewhere copies stand in for them. Before quantkit
restores a header, gguf-py and, where they are installed, llama.cpp and ik_llama.cpp read the file.
tests/verbs/test_kills.py does the same at five moments, tests/formats/test_header_writes.py at all of an edit in place.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/lib")]

from kills import COMMANDS, check_kills  # noqa: E402

from verdicts import libraries  # noqa: E402


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    parent = sys.argv[2] if len(sys.argv) > 2 else None
    runtimes = libraries()
    print(f"other programs: gguf-py{''.join(f', {name}' for name in runtimes)}", flush=True)
    for name, command in COMMANDS.items():
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            model = ROOT / "tests/data/tiny-moe-bf16.gguf"
            moments, incomplete = check_kills(command, model, Path(folder), count, tuple(runtimes.values()))
        result = f"killed at {moments} moments, {incomplete} with work incomplete; all resumed to the same bytes"
        print(f"{name}: {result}", flush=True)


if __name__ == "__main__":
    main()
