"""Products of several matrices with the same 1 to 8 rows of activations, in one launch: mat_vec_several.cu.

    mul_mats    rows x x_stride row_bytes n_in w_0 ... w_3 n_out_0 ... out_0 ... bias_0 ... scale_0 ...

How a row is shared by lanes, and so the order of its sum, is that of one matrix with all the rows together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantkit.kernels.cuda import mat_vec
from quantkit.kernels.cuda.operation import Operation, Shape
from quantkit.types import BY_NAME, TensorType

#: Matrices of a launch.
MAX_MATRICES = 4


def mul_mats(t: TensorType, n_in: int, n_outs: Sequence[int], rows: int = 1) -> Shape:
    """Return how to multiply up to four matrices of n_outs rows with up to 8 rows of x."""
    like = mat_vec.mul_mat(t, n_in, sum(n_outs), rows).operation
    macros = dict(like.defines)
    of_block = int(macros["ROWS"]) * (like.threads // int(macros["LANES"]))
    return Shape(
        Operation("mat_vec_several.cu", "mul_mats", like.defines), (-(-max(n_outs) // of_block), len(n_outs), 1)
    )


def slots(matrices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the slots of matrices, each with its w, n_out, out, bias and scale."""
    missing = [dict.fromkeys(matrices[0], 0)] * (MAX_MATRICES - len(matrices))
    return {f"{name}_{i}": slot for i, matrix in enumerate([*matrices, *missing]) for name, slot in matrix.items()}


def operations() -> Iterator[Operation]:
    """Yield operations of every kind of type, for some sizes."""
    for name in ("F32", "BF16", "Q8_0", "Q4_K", "Q6_K", "IQ3_S"):
        for rows in (1, 8):
            for n_outs in ((4096, 512, 512), (512, 256, 256)):
                yield mul_mats(BY_NAME[name], 4096, n_outs, rows).operation
