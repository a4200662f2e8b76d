"""Products of several matrices with the same 1 to 8 rows of activations, in one launch: mat_vec_same_input.cu.

    mul_mats    rows x x_stride n_in row_bytes other_row_bytes n_first
                w_0 ... n_out_0 ... out_0 ... bias_0 ... scale_0 ...
    mul_mats_route    the same, and ids weights logits bias counter and Routing.slots's: one of them is a router

All of one type, or the first n_first of one and the others of another: types of one ``family``. How a row is shared by
lanes, and so the order of its sum, is that of one matrix with all the rows together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.layer import route
from quantkit.kernels.cuda.matmul import mat_vec
from quantkit.kernels.formats import format_of
from quantkit.kernels.parameters import Routing
from quantkit.types import BY_NAME, TensorType

#: Maximum number of matrices of a launch.
MAX_MATRICES = 4


def family(t: TensorType) -> str:
    """Return a name shared by types that can be in one launch: the same activations, little shared memory."""
    return format_of(t).launch_group or t.name


def mul_mats(types: Sequence[TensorType], n_in: int, n_outs: Sequence[int], rows: int = 1) -> Shape:
    """Return the kernel and grid that multiply up to 8 rows of x by up to four matrices, adjacent if of one type."""
    names = list(dict.fromkeys(t.name for t in types))
    largest = max(types, key=lambda t: t.block_bytes / t.block)
    like = mat_vec.mul_mat(largest, n_in, sum(n_outs), rows).kernel
    macros = dict(like.defines)
    of_block = int(macros["ROWS"]) * like.threads // int(macros["LANES"])
    kernel = Kernel("matmul/mat_vec_same_input.cu", "mul_mats", like.defines).bind(TYPE=names[0])
    if len(names) > 1:
        kernel = kernel.bind(OTHER=names[1])
    return Shape(kernel, (-(-max(n_outs) // of_block), len(n_outs), 1))


def mul_mats_route(
    types: Sequence[TensorType], n_in: int, n_outs: Sequence[int], routing: Routing, rows: int = 1
) -> Shape:
    """Return the shape of ``mul_mats`` with the router among the matrices."""
    shape = mul_mats(types, n_in, n_outs, rows)
    kernel = Kernel(shape.kernel.file, "mul_mats_route", shape.kernel.defines).bind(ROUTE=1)
    return Shape(kernel, shape.grid, route.shared_of_token(routing))


def slots(matrices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the slots of matrices, each with its w, n_out, out, bias and scale."""
    missing = [dict.fromkeys(matrices[0], 0)] * (MAX_MATRICES - len(matrices))
    return {f"{name}_{i}": slot for i, matrix in enumerate([*matrices, *missing]) for name, slot in matrix.items()}


def kernels() -> Iterator[Kernel]:
    """Yield kernels of every kind of type, for some sizes."""
    kinds = [(name, name) for name in ("F32", "BF16", "Q8_0", "Q4_K", "IQ3_S", "IQ1_KT", "IQ3_KT")]
    kinds += [("Q4_K", "Q6_K"), ("IQ4_XS", "Q5_K"), ("Q2_K", "Q3_K"), ("Q6_K", "Q5_K")]
    for first, second in kinds:
        types = BY_NAME[first], BY_NAME[first], BY_NAME[second]
        for rows in (1, 8):
            for n_outs in ((4096, 512, 512), (512, 256, 256)):
                yield mul_mats(types, 4096, n_outs, rows).kernel
        yield mul_mats_route(types[:1], 4096, (128,), Routing(n_expert=128, n_used=8)).kernel
