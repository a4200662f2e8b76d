"""Which pairs every expert has, on the device: moe.cu, plan.cuh.

bucket    plan ids rows n_used n_expert runs      ids int32 [rows, n_used]; runs: bucket_runs; plan: plan_bytes, read by
          products by expert
gather    plan x out rows x_per width        rows: pairs; x f32, a row for x_per pairs; out bf16, in the plan's order
scatter   plan ids x out rows width bias bias_stride scale      x f32 rows in the plan's order, out f32 rows by pair
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.errors import ResourceError
from quantkit.kernels.cuda.core.kernel import Kernel, Shape, shared_of_block

#: Tokens per tile of a product.
TILES = (32, 128)
_WARPS = 16
_HEAD = 16


def most_tiles(pairs: int, n_expert: int, tokens: int) -> int:
    """Return the most tiles of ``tokens`` that ``pairs`` can need: each expert's last tile may be short."""
    used = min(pairs, n_expert)
    return (pairs - used) // tokens + used


def plan_bytes(n_expert: int, n_used: int, rows: int) -> int:
    """Return the bytes of a plan for up to ``rows`` tokens."""
    pairs = rows * n_used
    return 4 * (_HEAD + -(-pairs // 4) * 4) + 16 * sum(most_tiles(pairs, n_expert, t) for t in TILES)


def bucket_runs(n_expert: int, capability: int = 90) -> int:
    """Return the number of runs into which pairs are divided: as many warps with counters as shared memory holds.

    Raises:
        ResourceError: it does not hold one.
    """
    runs = min(_WARPS, shared_of_block(capability) // (4 * n_expert) - 1)
    if runs < 1:
        raise ResourceError(
            f"{n_expert} experts: this GPU has too little shared memory to sort tokens by expert", "QK-E306"
        )
    return runs


def bucket(n_expert: int, capability: int = 90) -> Shape:
    """Return the kernel and grid that make a plan."""
    return Shape(_KERNEL_OF, (1, 1, 1), 4 * (bucket_runs(n_expert, capability) + 1) * n_expert)


def gather(pairs: int) -> Shape:
    """Return the kernel and grid that gather rows of x, as bf16, into a plan's order."""
    return Shape(Kernel("matmul/moe.cu", "gather"), (max(1, pairs), 1, 1))


def scatter(pairs: int) -> Shape:
    """Return the kernel and grid that scatter rows back from a plan's order, with an expert's scale and bias."""
    return Shape(Kernel("matmul/moe.cu", "scatter"), (max(1, pairs), 1, 1))


_KERNEL_OF = Kernel("matmul/moe.cu", "bucket")


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for shape in (bucket(1), gather(1), scatter(1)):
        yield shape.kernel
