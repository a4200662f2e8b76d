"""Codebooks and grids of the types that store indices.

Those in tables.npz are written by scripts/make_tables.py from PyPI ``gguf`` and loaded at first use; those of
ik_llama.cpp's types, which ``gguf`` lacks, are listed here. Read-only.

============== ======= ========== ==================================================================
name           dtype   shape      meaning
============== ======= ========== ==================================================================
kvalues_iq4nl  int8    [16]       IQ4_NL, IQ4_XS, IQ4_KS: the level of each 4-bit index; IQ1_KT, IQ2_KT: scales
kvalues_fp4    int8    [16]       MXFP4, NVFP4: twice the E2M1 value of each 4-bit code
ksigns         uint8   [128]      IQ2_XXS, IQ2_XS, IQ3_XXS: 7 signs; the 8th (bit 7) makes their parity even
iq1s_grid      int8    [2048, 8]  IQ1_S, IQ1_M: 8 values of -1, 0, 1
iq2xxs_grid    uint8   [256, 8]   8 magnitudes of 8, 25, 43
iq2xs_grid     uint8   [512, 8]   the same for IQ2_XS
iq2s_grid      uint8   [1024, 8]  the same for IQ2_S
iq3xxs_grid    uint8   [256, 4]   4 magnitudes of 4, 12, 20, 28, 36, 44, 52, 62
iq3s_grid      uint8   [512, 4]   4 magnitudes of 1, 3, 5, ... 15
kvalues_iq2nl  int8    [4]        IQ2_KS: the level of each 2-bit index
============== ======= ========== ==================================================================
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PATH = Path(__file__).parent / "tables.npz"
IK = {"kvalues_iq2nl": np.array([-31, -13, 1, 17], np.int8)}


@cache
def table(name: str) -> npt.NDArray[Any]:
    """Return the table called ``name`` (see above), read-only; KeyError if there is none."""
    with np.load(PATH) as npz:
        values: npt.NDArray[Any] = IK[name] if name in IK else npz[name]
    values.flags.writeable = False
    return values
