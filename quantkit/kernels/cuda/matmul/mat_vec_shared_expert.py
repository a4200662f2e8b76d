"""Products of one token with its experts' matrices and a dense matrix, in one launch: mat_vec_shared_expert.cu.

    mul_mat    as mat_vec.mul_mat_id, and dense_x dense_w dense_row_bytes dense_n_in dense_n_out dense_out dense_bias
               dense_scale
    up_gate    as mat_vec.up_gate_id, and dense_x dense_up dense_gate dense_row_bytes dense_n_out dense_out
               dense_up_bias dense_gate_bias dense_up_scale dense_gate_scale
               format dense_format quantized dense_quantized counters

Types of experts and of the dense matrix are of one family (mat_vec_same_input.py). How a row is shared by lanes is that
of one matrix with all the rows together, and the experts' n_in.

"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.matmul import mat_vec
from quantkit.kernels.parameters import Activation
from quantkit.types import BY_NAME, TensorType


def mul_mat(t: TensorType, dense: TensorType, n_in: int, n_out: int, n_used: int, dense_n_out: int) -> Shape:
    """Return the kernel and grid that multiply a token's rows with n_used experts' matrices and a dense one."""
    n_outs = n_used * n_out + dense_n_out
    like = mat_vec.mul_mat(_larger(t, dense), n_in, n_outs).kernel
    return _shape("mul_mat_shared_expert", like, t, dense, n_used, max(n_out, dense_n_out))


def up_gate(
    t: TensorType, dense: TensorType, activation: Activation, n_in: int, n_out: int, n_used: int, dense_n_out: int
) -> Shape:
    """Return the kernel and grid that compute activation(gate x) * (up x) of a token: n_used experts, a dense one."""
    n_outs = n_used * n_out + dense_n_out
    like = mat_vec.up_gate(_larger(t, dense), activation, n_in, n_outs).kernel
    return _shape("up_gate_shared_expert", like, t, dense, n_used, max(n_out, dense_n_out))


def _larger(t: TensorType, second: TensorType) -> TensorType:
    return max(t, second, key=lambda t: t.block_bytes / t.block)


def _shape(name: str, like: Kernel, t: TensorType, dense: TensorType, n_used: int, longest: int) -> Shape:
    kernel = Kernel("matmul/mat_vec_shared_expert.cu", name, like.defines).bind(TYPE=t.name)
    if dense.name != t.name:
        kernel = kernel.bind(OTHER=dense.name)
    return Shape(kernel, (-(-longest // mat_vec.rows_of_block(like)), n_used + 1, 1))


def kernels() -> Iterator[Kernel]:
    """Yield kernels of every kind of type, for some sizes."""
    pairs = [(name, name) for name in ("F32", "BF16", "Q8_0", "Q4_K", "IQ3_S", "IQ1_KT", "IQ3_KT")]
    for first, second in (*pairs, ("Q4_K", "Q6_K"), ("IQ4_XS", "Q5_K")):
        t, dense = BY_NAME[first], BY_NAME[second]
        for n_in, n_out, dense_n_out in ((2048, 768, 768), (4096, 16384, 4096)):
            yield mul_mat(t, dense, n_in, n_out, 8, dense_n_out).kernel
            yield up_gate(t, dense, Activation("silu"), n_in, n_out, 8, dense_n_out).kernel
