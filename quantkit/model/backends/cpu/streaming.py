"""Streaming of models larger than memory: resident weights, and weights whose pages are dropped after use.

Weights are pages of mapped files, which the system reads when they are touched and ``madvise`` drops. A run reads all
weights in order, once, so an LRU cache would not help: the first stages remain within the budget and the others stream;
the next stage is read ahead (into the page cache) while the current one computes. A stage is a layer, or single
operations if a layer is too large. The resident stages and the largest streamed one fit the budget; only the weights of
one operation may exceed it.
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
    """Return stages of operations: layers, or single operations if a layer takes more than half the budget."""
    plan: list[Stage] = []
    first = 0
    for i in range(1, len(ops) + 1):
        if i < len(ops) and ops[i].layer == ops[first].layer:
            continue
        layer = _stage(ops, first, i)
        plan += [layer] if 2 * layer.nbytes <= budget else _by_weights(ops, first, i)
        first = i
    return plan


def _by_weights(ops: Sequence[Op], first: int, end: int) -> list[Stage]:
    """Return a stage for every operation with weights and the operations that follow it."""
    cuts = [i for i in range(first, end) if ops[i].matrices()]
    bounds = [first, *cuts[1:], end] if cuts else [first, end]
    return [_stage(ops, a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def _stage(ops: Sequence[Op], first: int, end: int) -> Stage:
    tensors = {m.tensor.name: m.tensor.nbytes for op in ops[first:end] for m in op.matrices()}
    # Of embeddings, only the rows of the batch's tokens are read.
    rows = {m.tensor.name for op in ops[first:end] if isinstance(op, Embed) for m in op.matrices()}
    return Stage(first, end, tuple(tensors), sum(n for name, n in tensors.items() if name not in rows))


def mark_streamed(plan: Sequence[Stage], budget: int) -> list[bool]:
    """Return for each stage whether its weights are dropped after use: none if all fit, else all but the first."""
    if sum(stage.nbytes for stage in plan) <= budget:
        return [False] * len(plan)
    left = budget - max(stage.nbytes for stage in plan)
    is_streamed = []
    for stage in plan:
        left -= stage.nbytes
        is_streamed.append(left < 0)
    return is_streamed


def pages(view: View) -> tuple[mmap.mmap, int, int] | None:
    """Return the mapped file of a weight, and the offset and length of its pages; None if it is not mapped."""
    base = view.base
    mapping = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapping, mmap.mmap) or not view.size:
        return None
    start = address_of(view) - address_of(np.frombuffer(mapping, np.uint8))
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    return mapping, first, start + view.size - first
