"""Operations that look on, in the cuda backend: sums on the device, from run to run; observers between launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quantkit.kernels.cuda import observers
from quantkit.model.backends.arena import Slot
from quantkit.model.ops import CountUp, Covariance, Observe, Op, Similarity, SumColumns, Value

if TYPE_CHECKING:
    from quantkit.model.backends.cuda_lowering import CUDALowering


def _observe(b: CUDALowering, op: Observe) -> None:
    observer, view = b.observer, b.view
    if observer is not None:
        b.call(
            lambda: observer(op.of, view(op.x), None if op.ids is None else view(op.ids)),
            [b.buffer(value) for value in op.inputs()],
        )


def _rows_of(b: CUDALowering, x: Value, ids: Value | None) -> dict[str, Slot]:
    """Return the slots that say which rows of x belong to which expert."""
    if ids is None:
        return {"ids": 0, "n_used": 1, "x_per": 1}
    return {"ids": b.buffer(ids), "n_used": ids.width, "x_per": ids.width if x.per == 1 else 1}


def _sum_columns(b: CUDALowering, op: SumColumns) -> None:
    to, width, n_mat = b.sums(op), op.x.width, op.n_mat
    slots: dict[str, Slot] = {"x": b.buffer(op.x), "width": width, "sums": to["sums"]}
    if op.ids is None:
        slots |= {"count": to["counts"], "bad": b.watch(op.of, op.x.per)}
        b.emit(lambda rows: observers.sum_columns(width), op.x, **slots)
        return
    slots |= {"counts": to["counts"], "bad": b.watch(op.of, op.ids.width), **_rows_of(b, op.x, op.ids)}
    b.emit(lambda rows: observers.sum_columns_id(width, n_mat), op.ids, **slots)


def _covariance(b: CUDALowering, op: Covariance) -> None:
    """Plain sums and weighted ones are a launch each; what is not finite is looked for by another."""
    to, width, first = b.sums(op), op.x.width, op.experts[0]
    n_mat = op.experts[1] - first
    over = op.x if op.ids is None else op.ids
    slots: dict[str, Slot] = {"x": b.buffer(op.x), "width": width, "first": first, **_rows_of(b, op.x, op.ids)}
    kinds: list[dict[str, Slot]] = []
    if op.plain:
        kinds.append({"weights": 0, "sums": to["sums"], "weight": 0})
    if op.weights is not None:
        kinds.append({"weights": b.buffer(op.weights), "sums": to["weighted"], "weight": to["weight"]})
    for i, kind in enumerate(kinds):
        counts = 0 if i else to["counts"]
        b.emit(lambda rows: observers.covariance(width, n_mat), over, counts=counts, **slots, **kind)
    bad = b.watch(op.of, op.x.per)
    b.emit(observers.not_finite, op.x, x=b.buffer(op.x), width=width, bad=bad)


def _similarity(b: CUDALowering, op: Similarity) -> None:
    to = b.sums(op)
    cosines = b.scratch(8 * b.limits.n_ubatch * op.a.per)
    slots: dict[str, Slot] = {"a": b.buffer(op.a), "b": b.buffer(op.b), "width": op.a.width, "cosines": cosines}
    b.emit(observers.similarity, op.a, bad=b.watch(op.of, op.a.per), **slots)
    b.emit(lambda rows: observers.add_cosines(), op.a, cosines=cosines, total=to["total"], count=to["counts"])


def _count_up(b: CUDALowering, op: CountUp) -> None:
    n_used = op.out.width
    b.emit(lambda rows: observers.count_up(n_used, rows), op.out, out=b.buffer(op.out), first=op.first, n_used=n_used)


LOWER: Mapping[type[Op], Callable[[CUDALowering, Any], None]] = {
    Observe: _observe,
    SumColumns: _sum_columns,
    Covariance: _covariance,
    Similarity: _similarity,
    CountUp: _count_up,
}
