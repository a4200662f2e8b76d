"""Enter the reference's bytes of a type in tests/data/golden-*.npz, for tests of encoders and decoders.

    scripts/make_golden_bytes.py TYPE --lib DIR

Bytes of llama.cpp's types are those of llama.cpp b11434, bytes of ik_llama.cpp's own types those of ik_llama.cpp
8337e4cd3, built without FMA. A type of both projects that ik_llama.cpp encodes by another search has both: --tree ik
enters the differing bytes. The rows and the importance matrix are in golden-mainline.npz. All other entries are
unchanged.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.interleave import is_interleaved
from quantkit.types import TensorType, type_by_name

DATA = Path(__file__).parents[1] / "tests" / "data"
U8 = npt.NDArray[np.uint8]
#: The library of each project that has ggml_quantize_chunk.
LIBRARIES = {"mainline": "libggml-base.so", "ik": "libggml.so"}


def file_of(t: TensorType, tree: str) -> Path:
    """Return the file with a type's bytes as encoded by a project."""
    if is_interleaved(t):
        return DATA / "golden-interleaved.npz"
    if tree == "ik" and t.trees == "both":
        return DATA / "golden-ik-shared.npz"
    return DATA / f"golden-{tree}.npz"


def encode(library: ctypes.CDLL, t: TensorType, x: Any, importance: Any) -> U8:
    """Return the bytes of ggml_quantize_chunk; ik_llama.cpp's has an additional argument."""
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, i64, i64, i64, pointer, pointer]
    out = np.zeros((len(x), t.row_bytes(x.shape[1])), np.uint8)
    weights = None if importance is None else importance.ctypes.data
    library.ggml_quantize_chunk(t.id, x.ctypes.data, out.ctypes.data, 0, *x.shape, weights, None)
    return out


def changed_entries(data: dict[str, U8], entries: dict[str, U8]) -> dict[str, U8]:
    """Return the data whose key or bytes are not among the entries."""
    return {k: v for k, v in data.items() if k not in entries or not np.array_equal(entries[k], v)}


def enter(t: TensorType, tree: str, folder: Path) -> dict[str, U8]:
    """Enter the bytes of a type, and return the new and changed entries."""
    library = ctypes.CDLL(str(folder / LIBRARIES[tree]))
    with np.load(DATA / "golden-mainline.npz") as mainline:
        mainline_bytes = dict(mainline)
    x, importance = np.ascontiguousarray(mainline_bytes["x"]), np.ascontiguousarray(mainline_bytes["imatrix"])
    new_bytes = {f"{t.name}+imatrix": encode(library, t, x, importance)}
    if not t.needs_imatrix and t.imatrix != "required":
        new_bytes[t.name] = encode(library, t, x, None)
    path = file_of(t, tree)
    with np.load(path) as file:
        entries = dict(file)
    if path.name == "golden-ik-shared.npz":
        new_bytes = changed_entries(new_bytes, mainline_bytes)
    changed = changed_entries(new_bytes, entries)
    if changed:
        np.savez_compressed(path, allow_pickle=False, **entries | changed)
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("type", type=type_by_name, metavar="TYPE")
    parser.add_argument("--lib", type=Path, required=True, help=f"directory of {' or '.join(LIBRARIES.values())}")
    parser.add_argument("--tree", choices=list(LIBRARIES), help="project whose search is used, if both have the type")
    options = parser.parse_args()
    t, tree = options.type, options.tree or ("ik" if options.type.trees == "ik" else "mainline")
    if not t.is_in(tree):
        sys.exit(f"{t} is not a type of {tree}: no reference bytes")
    changed = enter(t, tree, options.lib)
    print(f"{file_of(t, tree).name}: {', '.join(changed) or 'nothing changed'}")


if __name__ == "__main__":
    main()
