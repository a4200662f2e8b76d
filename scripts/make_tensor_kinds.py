"""Write quantkit/checkpoint/tensor_kinds.json from gguf-py's MODEL_TENSORS (llama.cpp b11434).

    scripts/make_tensor_kinds.py LLAMA_CPP [OUT]

LLAMA_CPP is a tree of llama.cpp. The file has a line for each architecture that is there already, and for each that
``--add`` names: its kinds, in the order of the constants. Kinds that share a name with others are told apart by what
follows a colon.
"""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "quantkit/checkpoint/tensor_kinds.json"
#: Kinds whose names are those of others, and what tells them apart; with an architecture, only there.
SUFFIXES = {
    (None, "FFN_PRE_NORM"): ":pre",
    (None, "ATTN_KV_NORM"): ":kv",
    ("arctic", "FFN_NORM"): ":residual",
    ("qwen4exp", "INDEXER_Q_NORM"): ":qsa",
    ("qwen4exp", "INDEXER_K_NORM"): ":qsa",
}


def kinds_of(constants: dict[str, Any], arch: str) -> str:
    """Return the kinds of an architecture; ``*`` stands for a layer's number."""
    number = next(key for key, name in constants["MODEL_ARCH_NAMES"].items() if name == arch)
    return " ".join(
        constants["TENSOR_NAMES"][t].replace("blk.{bid}.", "*").replace("{bid}", "*")
        + SUFFIXES.get((None, t.name), SUFFIXES.get((arch, t.name), ""))
        for t in constants["MODEL_TENSORS"][number]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, metavar="LLAMA_CPP")
    parser.add_argument("out", type=Path, nargs="?", default=TARGET, metavar="OUT")
    parser.add_argument("--add", action="append", default=[], metavar="ARCH", help="an architecture that is new")
    arguments = parser.parse_args()
    constants = runpy.run_path(str(arguments.tree / "gguf-py/gguf/constants.py"))
    archs = sorted({*json.loads(TARGET.read_text()), *arguments.add})
    arguments.out.write_text(json.dumps({arch: kinds_of(constants, arch) for arch in archs}, indent=0) + "\n")


if __name__ == "__main__":
    main()
