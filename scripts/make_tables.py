"""Write quantkit/kernels/tables.npz from the tables of PyPI ``gguf``, reproducibly.

The arrays are stored uncompressed: compressed bytes would depend on the zlib version. Names, shapes and meaning are
listed in quantkit/kernels/tables.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import quants

TARGET = Path(__file__).parent.parent / "quantkit/kernels/tables.npz"


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


def main(npz: Path = TARGET) -> None:
    """Write the file."""
    np.savez(npz, allow_pickle=False, **tables())
    print(f"{npz}: {npz.stat().st_size} bytes")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
