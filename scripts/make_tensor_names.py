"""Write quantkit/checkpoint/tensor_kinds.json and tensor_names.json from gguf-py (llama.cpp b11434).

    scripts/make_tensor_names.py LLAMA_CPP [OUT]

LLAMA_CPP is a source tree of llama.cpp. tensor_kinds.json (MODEL_TENSORS) has a line for each existing architecture,
and for each of ``--add``: its kinds, in the order of the constants. Kinds with equal names are distinguished by a
suffix after a colon. tensor_names.json (TensorNameMap) has a line for each of these kinds: its names in checkpoints, in
the order of the map, because the later of two kinds gets a name that both have.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "quantkit/checkpoint"
#: Kinds with the names of others, and their suffixes; with an architecture, only there.
SUFFIXES = {
    (None, "FFN_PRE_NORM"): ":pre",
    (None, "ATTN_KV_NORM"): ":kv",
    ("arctic", "FFN_NORM"): ":residual",
    ("qwen4exp", "INDEXER_Q_NORM"): ":qsa",
    ("qwen4exp", "INDEXER_K_NORM"): ":qsa",
}


def kind_of(constants: Mapping[str, Any], tensor: Any, arch: str | None) -> str:
    """Return the name of a kind of tensor in an architecture; ``*`` is the layer's number."""
    suffix = SUFFIXES.get((None, tensor.name), SUFFIXES.get((arch, tensor.name), ""))
    name: str = constants["TENSOR_NAMES"][tensor]
    return name.replace("blk.{bid}.", "*").replace("{bid}", "*") + suffix


def kinds_of(constants: Mapping[str, Any], arch: str) -> str:
    """Return the kinds of an architecture."""
    number = next(key for key, name in constants["MODEL_ARCH_NAMES"].items() if name == arch)
    return " ".join(kind_of(constants, tensor, arch) for tensor in constants["MODEL_TENSORS"][number])


def names_of(constants: Mapping[str, Any], names: Any, kinds: Iterable[str]) -> dict[str, str]:
    """Return the names in checkpoints of each of ``kinds``, by TensorNameMap; the prefix language_model. is dropped."""
    of_archs = {None: {**names.mappings_cfg, **names.block_mappings_cfg}} | {
        constants["MODEL_ARCH_NAMES"][number]: row for number, row in names.arch_block_mappings_cfg.items()
    }
    rows = {
        kind_of(constants, tensor, arch): patterns for arch, row in of_archs.items() for tensor, patterns in row.items()
    }
    kind_set = set(kinds)
    patterns_of = {kind: rows[kind] for kind in rows if kind in kind_set} | dict.fromkeys(
        sorted(kind_set - rows.keys()), ()
    )
    return {
        kind: " ".join(dict.fromkeys(p.replace("language_model.", "").replace("{bid}", "*") for p in row))
        for kind, row in patterns_of.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, metavar="LLAMA_CPP")
    parser.add_argument("out", type=Path, nargs="?", default=TARGET, metavar="OUT", help="a directory")
    parser.add_argument("--add", action="append", default=[], metavar="ARCH", help="a new architecture")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.tree / "gguf-py"))
    constants, names = vars(import_module("gguf.constants")), import_module("gguf.tensor_mapping").TensorNameMap
    archs = sorted({*json.loads((TARGET / "tensor_kinds.json").read_text()), *arguments.add})
    kinds = {arch: kinds_of(constants, arch) for arch in archs}
    patterns = names_of(constants, names, (kind for row in kinds.values() for kind in row.split()))
    for file, value in (("tensor_kinds.json", kinds), ("tensor_names.json", patterns)):
        (arguments.out / file).write_text(json.dumps(value, indent=0) + "\n")


if __name__ == "__main__":
    main()
