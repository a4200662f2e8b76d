"""Routing on the device: route.cu. Which experts, how much each counts; rows before and after the experts.

    route      ids weights logits bias rows n_expert n_used n_group n_group_used gating norm scale sum_floor
               bias: f32 [n_expert] or 0; ``route_block(routing)`` gives the slots from n_expert on
    repeat     x weights out width n_used rows
    combine    x weights out width n_used rows; weights 0: the plain sum

rows: tokens; ids int32 and weights f32 [tokens, n_used], rows of experts [tokens * n_used, width].
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.elementwise import over_rows
from quantkit.kernels.cuda.operation import Operation, Shape
from quantkit.kernels.parameters import Routing

FILE = "route.cu"
#: What shared memory has room for.
MAX_EXPERTS = 4096
#: Numbers of the kinds of gating, for the slot.
GATINGS = {"softmax": 0, "sigmoid": 1, "softmax_weight": 2}

#: Threads of a block, a warp to a token; one warp where experts are so many that shared memory has room for one token.
_THREADS, _FEW = 128, 32


def _route(threads: int) -> Operation:
    return Operation(FILE, "route").bind(THREADS=threads)


def route(routing: Routing, rows: int) -> Shape:
    """Return how to route so many tokens."""
    threads = _THREADS if routing.n_expert <= MAX_EXPERTS // 4 else _FEW
    warps = threads // 32
    return Shape(_route(threads), (max(1, -(-rows // warps)), 1, 1), warps * shared_of_token(routing))


def shared_of_token(routing: Routing) -> int:
    """Return the bytes of shared memory that a token takes."""
    return 4 * (2 * routing.n_expert + max(routing.n_used, routing.n_group))


def route_block(routing: Routing) -> dict[str, float]:
    """Return the slots of ``route`` that a Routing gives; ValueError for more experts than there is room for."""
    if not 0 < routing.n_used <= routing.n_expert <= MAX_EXPERTS:
        raise ValueError(f"{routing.n_used} of {routing.n_expert} experts: 1 to {MAX_EXPERTS} can be routed to")
    return {
        "n_expert": routing.n_expert,
        "n_used": routing.n_used,
        "n_group": routing.n_group,
        "n_group_used": routing.n_group_used,
        "gating": GATINGS[routing.gating],
        "norm": int(routing.norm),
        "scale": routing.scale,
        "sum_floor": routing.sum_floor,
    }


def repeat(width: int, n_used: int, rows: int) -> Shape:
    """Return how to weight the rows of so many tokens for every expert of theirs."""
    return over_rows(Operation(FILE, "repeat").bind(THREADS=_THREADS), width, rows * n_used)


def combine(width: int, rows: int) -> Shape:
    """Return how to add up the rows of the experts of so many tokens."""
    return over_rows(Operation(FILE, "combine").bind(THREADS=_THREADS), width, rows)


def operations() -> Iterator[Operation]:
    """Yield every operation of this file."""
    yield _route(_THREADS)
    yield _route(_FEW)
    yield repeat(1, 1, 1).operation
    yield combine(1, 1).operation
