"""Models larger than memory: which weights stay, and whose pages are dropped as soon as a stage has used them.

Weights are pages of mapped files; the system reads one when it is touched, and ``madvise`` takes it away again. A run
reads all weights in order, once, so keeping the most recent ones would not help: the first stages stay as
far as the budget goes, the rest streams, the next stage being read ahead (into the system's cache, which it gives
back when it is short) while this one computes. A stage is a layer, or single operations where a layer is too large.
What stays, and the largest stage that streams, fit the budget; only the weights of one operation may exceed it.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.core.tape import address_of
from quantkit.model.ops import Embed, Op

View = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Stage:
    """Operations first..end of a program, and the weights that they read."""

    first: int
    end: int
    tensors: tuple[str, ...]
    nbytes: int


def stages(ops: Sequence[Op], budget: int) -> list[Stage]:
    """Cut operations into stages: a layer each, or an operation where a layer takes more than half the budget."""
    made: list[Stage] = []
    first = 0
    for i in range(1, len(ops) + 1):
        if i < len(ops) and ops[i].layer == ops[first].layer:
            continue
        whole = _stage(ops, first, i)
        made += [whole] if 2 * whole.nbytes <= budget else _by_weights(ops, first, i)
        first = i
    return made


def _by_weights(ops: Sequence[Op], first: int, end: int) -> list[Stage]:
    """One stage for every operation with weights, the operations after it included."""
    cuts = [i for i in range(first, end) if ops[i].matrices()]
    bounds = [first, *cuts[1:], end] if cuts else [first, end]
    return [_stage(ops, a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def _stage(ops: Sequence[Op], first: int, end: int) -> Stage:
    tensors = {m.tensor.name: m.tensor.nbytes for op in ops[first:end] for m in op.matrices()}
    # Of embeddings only the rows of the tokens are read.
    rows = {m.tensor.name for op in ops[first:end] if isinstance(op, Embed) for m in op.matrices()}
    return Stage(first, end, tuple(tensors), sum(n for name, n in tensors.items() if name not in rows))


def streamed(plan: Sequence[Stage], budget: int) -> list[bool]:
    """Return for each stage whether its weights are dropped after use: none if all fit, else all but the first ones."""
    if sum(stage.nbytes for stage in plan) <= budget:
        return [False] * len(plan)
    left = budget - max(stage.nbytes for stage in plan)
    goes = []
    for stage in plan:
        left -= stage.nbytes
        goes.append(left < 0)
    return goes


def pages(view: View) -> tuple[mmap.mmap, int, int] | None:
    """Return the mapped file a weight lies in, and the first byte and length of its pages; None if in none."""
    base = view.base
    mapping = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapping, mmap.mmap) or not view.size:
        return None
    start = address_of(view) - address_of(np.frombuffer(mapping, np.uint8))
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    return mapping, first, start + view.size - first
