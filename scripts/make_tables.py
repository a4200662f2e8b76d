"""Write quantkit/kernels/tables.npz from the tables of PyPI ``gguf``, and tables.cuh from these: always the same bytes.

The arrays are stored, not compressed: compressed bytes would depend on the zlib at hand. Names, shapes and meaning
are listed in quantkit/kernels/tables.py. The header for CUDA kernels holds them as its unpackers read them, 4 bytes an
entry: ``packed_grids`` says how.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import quants

KERNELS = Path(__file__).parent.parent / "quantkit/kernels"
TARGET, HEADER = KERNELS / "tables.npz", KERNELS / "cuda/unpack/tables.cuh"


def grid(quant: Any, dtype: type[np.integer[Any]]) -> npt.NDArray[Any]:
    """Return the grid of one of gguf's classes as integers [entries, values]."""
    quant.init_grid()
    return quant.grid.reshape(quant.grid_shape).astype(dtype)  # type: ignore[no-any-return]


def tables() -> dict[str, npt.NDArray[Any]]:
    """Return every table by name."""
    return {
        "kvalues_iq4nl": np.array(quants.IQ4_NL.kvalues, np.int8),
        "kvalues_fp4": np.array(quants.MXFP4.kvalues, np.int8),
        "ksigns": np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8),
        "iq1s_grid": grid(quants.IQ1_S, np.int8),
        "iq2xxs_grid": grid(quants.IQ2_XXS, np.uint8),
        "iq2xs_grid": grid(quants.IQ2_XS, np.uint8),
        "iq2s_grid": grid(quants.IQ2_S, np.uint8),
        "iq3xxs_grid": grid(quants.IQ3_XXS, np.uint8),
        "iq3s_grid": grid(quants.IQ3_S, np.uint8),
    }


#: The value of each nibble of an entry, where that is another order.
ORDERS = {name: [0, 4, 1, 5, 2, 6, 3, 7] for name in ("iq2xxs_grid", "iq2xs_grid")}
ORDERS["iq2s_grid"] = [3, 7, 2, 6, 1, 5, 0, 4]

HEADER_TEXT = """\
// Codebooks and grids of the types that store an index instead of a number. Written by scripts/make_tables.py from
// quantkit/kernels/tables.npz: not to be edited.
//
// Codebooks: 16 int8 levels in four words. Grids: an entry is one word. Of 8 values, these are 8 nibbles that select
// bytes: iq1s 0, 1, 2 for -1, 0, 1; iq2 0, 1, 2 for 8, 25, 43, in the order of values that signs are spread in
// (i_quants.cuh): 0 4 1 5 2 6 3 7 of iq2xxs and iq2xs, 3 7 2 6 1 5 0 4 of iq2s, whose entries are one bit to the left.
// Of 4 values, these are 4 bytes: iq3xxs the magnitudes, iq3s the magnitudes less one. They are templates so that a
// module holds only those it reads: iq1s_grid<0>.
#pragma once
#include "device.cuh"
"""


def packed_grids(of: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.uint32]]:
    """Return the grids as words: 8 values of three as nibbles 0, 1, 2, some shuffled; 4 as bytes, iq3s less one."""
    grids = {}
    for name in ("iq1s_grid", "iq2xxs_grid", "iq2xs_grid", "iq2s_grid"):
        levels, rank = np.unique(of[name], return_inverse=True)
        assert len(levels) == 3, name
        ranks = rank.reshape(of[name].shape)[:, ORDERS.get(name, range(8))].astype(np.uint32)
        grids[name] = np.bitwise_or.reduce(ranks << np.arange(0, 32, 4, dtype=np.uint32), axis=1)
    grids["iq2s_grid"] <<= np.uint32(1)
    grids["iq3xxs_grid"] = of["iq3xxs_grid"].view("<u4")[:, 0]
    grids["iq3s_grid"] = (of["iq3s_grid"] - np.uint8(1)).view("<u4")[:, 0]
    return grids


def header(of: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return the text of tables.cuh."""
    text = [HEADER_TEXT]
    for name in ("kvalues_iq4nl", "kvalues_fp4"):
        words = ", ".join(f"{n} = {w:#010x}u" for n, w in zip("ABCD", of[name].view("<u4"), strict=True))
        text.append(f"struct {name} {{\n    static const uint32_t {words};\n}};\n")
    for name, entries in packed_grids(of).items():
        lines = [", ".join(f"{w:#010x}" for w in entries[i : i + 9]) for i in range(0, len(entries), 9)]
        body = ",\n    ".join(lines)
        text.append(f"template <int> static __device__ const uint32_t {name}[{len(entries)}] = {{\n    {body},\n}};\n")
    return "\n".join(text)


def main(npz: Path = TARGET, cuda: Path = HEADER) -> None:
    """Write both files."""
    np.savez(npz, allow_pickle=False, **tables())
    cuda.write_text(header(tables()), encoding="utf-8")
    for path in (npz, cuda):
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
