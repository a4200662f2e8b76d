"""Routing on the device (route.cu): experts, their weights, and the rows before and after them.

    route      ids weights logits bias chosen rows n_expert n_used n_group n_group_used gating norm share scale
               sum_floor
               bias: f32 [n_expert] or 0; chosen: i32 as ids, or 0; ``Routing.slots`` gives the slots from n_expert on
    repeat     x weights out width n_used rows
    combine    x weights out width n_used rows; weights 0: the plain sum

rows: tokens; ids int32 and weights f32 [tokens, n_used], rows of experts [tokens * n_used, width].
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.layer.elementwise import over_rows
from quantkit.kernels.parameters import MAX_EXPERTS, Routing

FILE = "layer/route.cu"
#: Threads of a block, one warp per token; a single warp if the experts leave shared memory for only one token.
_THREADS, _FEW_THREADS = 128, 32


def _route(threads: int) -> Kernel:
    return Kernel(FILE, "route").bind(THREADS=threads)


def route(routing: Routing, rows: int) -> Shape:
    """Return the kernel and grid that route ``rows`` tokens."""
    threads = _THREADS if routing.n_expert <= MAX_EXPERTS // 4 else _FEW_THREADS
    warps = threads // 32
    return Shape(_route(threads), (max(1, -(-rows // warps)), 1, 1), warps * shared_of_token(routing))


def shared_of_token(routing: Routing) -> int:
    """Return the shared memory of a token in bytes."""
    return 4 * (2 * routing.n_expert + max(routing.n_used, routing.n_group))


def repeat(width: int, n_used: int, rows: int) -> Shape:
    """Return the kernel and grid that weight the rows of tokens, once per expert chosen for them."""
    return over_rows(Kernel(FILE, "repeat").bind(THREADS=_THREADS), width, rows * n_used)


def combine(width: int, rows: int) -> Shape:
    """Return the kernel and grid that sum the experts' rows of each token."""
    return over_rows(Kernel(FILE, "combine").bind(THREADS=_THREADS), width, rows)


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield _route(_THREADS)
    yield _route(_FEW_THREADS)
    yield repeat(1, 1, 1).kernel
    yield combine(1, 1).kernel
