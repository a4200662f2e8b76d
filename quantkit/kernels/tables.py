"""Codebooks and grids of the types that store indices.

Those in tables.npz are written by scripts/make_tables.py from PyPI ``gguf`` and loaded at first use; those of
ik_llama.cpp's types, which ``gguf`` lacks, are listed here. Read-only.

============== ======= ========== ==================================================================
name           dtype   shape      meaning
============== ======= ========== ==================================================================
kvalues_iq4nl  int8    [16]       IQ4_NL, IQ4_XS, IQ4_K, IQ4_KS, IQ4_KSS: levels by 4-bit index; IQ1_KT, IQ2_KT: scales
kvalues_fp4    int8    [16]       MXFP4, NVFP4: twice the E2M1 value of each 4-bit code
ksigns         uint8   [128]      IQ2_XXS, IQ2_XS, IQ3_XXS: 7 signs; the 8th (bit 7) makes their parity even
iq1s_grid      int8    [2048, 8]  IQ1_S, IQ1_M: 8 values of -1, 0, 1
iq2xxs_grid    uint8   [256, 8]   8 magnitudes of 8, 25, 43
iq2xs_grid     uint8   [512, 8]   the same for IQ2_XS
iq2s_grid      uint8   [1024, 8]  the same for IQ2_S
iq3xxs_grid    uint8   [256, 4]   4 magnitudes of 4, 12, 20, 28, 36, 44, 52, 62
iq3s_grid      uint8   [512, 4]   4 magnitudes of 1, 3, 5, ... 15
kvalues_iq2nl  int8    [4]        IQ2_K, IQ2_KS: the level of each 2-bit index
kvalues_iq3nl  int8    [8]        IQ3_K, IQ3_KS: the level of each 3-bit index
kvalues_iq5nl  int8    [32]       IQ5_K, IQ5_KS: the level of each 5-bit index
kvalues_iq6nl  int8    [64]       IQ6_K: the level of each 6-bit index
iq2kl_grid     int8    [32, 2]    IQ2_KL: two levels of IQ3_K for each 5-bit index
============== ======= ========== ==================================================================
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PATH = Path(__file__).parent / "tables.npz"
_IQ3NL = np.array([-63, -40, -23, -10, 1, 13, 28, 47], np.int8)
#: Of each pair of IQ2_KL, the 3-bit indices of its levels as two octal digits.
_IQ2KL = """02 05 10 13 15 17 21 22 24 25 26 30 34 35 37 42
            43 44 45 46 51 52 53 54 55 60 62 64 66 67 72 75"""
# fmt: off
IK = {
    "kvalues_iq2nl": np.array([-31, -13, 1, 17], np.int8),
    "kvalues_iq3nl": _IQ3NL,
    "kvalues_iq5nl": np.array([
        -126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
        -1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121,
    ], np.int8),
    "kvalues_iq6nl": np.array([
        -127, -121, -115, -109, -104, -98, -93, -88, -84, -79, -74, -70, -66, -62, -58, -54,
        -51, -47, -44, -40, -37, -34, -31, -28, -25, -22, -19, -16, -13, -11, -8, -5,
        -2, 0, 3, 6, 9, 12, 14, 17, 20, 23, 27, 30, 33, 36, 40, 44,
        47, 51, 55, 59, 63, 68, 72, 77, 82, 87, 92, 98, 103, 109, 115, 121,
    ], np.int8),
    "iq2kl_grid": np.array([[_IQ3NL[int(digit)] for digit in pair] for pair in _IQ2KL.split()], np.int8),
}
# fmt: on


@cache
def table(name: str) -> npt.NDArray[Any]:
    """Return the table called ``name`` (see above), read-only. Raises KeyError if there is none."""
    with np.load(PATH) as npz:
        values: npt.NDArray[Any] = IK[name] if name in IK else npz[name]
    values.flags.writeable = False
    return values
