"""Lowering of observing operations: sums stay on the device from run to run; observers run between launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.kernels.cuda import observe
from quantkit.model import ops
from quantkit.model.backends.arena import Slot
from quantkit.model.ops import OpTable, Value

if TYPE_CHECKING:
    from quantkit.model.backends.cuda.lowering import CUDALowering

LOWER = OpTable("the cuda backend")


@LOWER.register(ops.Observe)
def _observe(b: CUDALowering, op: ops.Observe) -> None:
    observer, view = b.observer, b.view
    if observer is not None:
        b.call(
            lambda: observer(op.label, view(op.x), None if op.ids is None else view(op.ids)),
            [b.buffer(value) for value in op.inputs()],
        )


def _rows_of(b: CUDALowering, x: Value, ids: Value | None) -> dict[str, Slot]:
    """Return the slots of the experts of rows of x."""
    if ids is None:
        return {"ids": 0, "n_used": 1, "x_per": 1}
    return {"ids": b.buffer(ids), "n_used": ids.width, "x_per": ids.width if x.per == 1 else 1}


@LOWER.register(ops.SumColumns)
def _sum_columns(b: CUDALowering, op: ops.SumColumns) -> None:
    addresses = b.sums(op)
    width = op.x.width
    n_mat = op.n_mat
    slots: dict[str, Slot] = {"x": b.buffer(op.x), "width": width, "sums": addresses["sums"]}
    if op.ids is None:
        slots |= {"count": addresses["counts"], "bad": b.watch(op.label, op.x.per)}
        b.emit(lambda rows: observe.sum_columns(width), op.x, **slots)
        return
    slots |= {"counts": addresses["counts"], "bad": b.watch(op.label, op.ids.width), **_rows_of(b, op.x, op.ids)}
    b.emit(lambda rows: observe.sum_columns_id(width, n_mat), op.ids, **slots)


@LOWER.register(ops.Covariance)
def _covariance(b: CUDALowering, op: ops.Covariance) -> None:
    """Emit a launch for plain and for weighted sums, and one that detects values that are not finite."""
    addresses = b.sums(op)
    width = op.x.width
    first = op.experts[0]
    n_mat = op.experts[1] - first
    over = op.x if op.ids is None else op.ids
    slots: dict[str, Slot] = {"x": b.buffer(op.x), "width": width, "first": first, **_rows_of(b, op.x, op.ids)}
    kinds: list[dict[str, Slot]] = []
    if op.plain:
        kinds.append({"weights": 0, "sums": addresses["sums"], "weight": 0})
    if op.weights is not None:
        kinds.append({"weights": b.buffer(op.weights), "sums": addresses["weighted"], "weight": addresses["weight"]})
    for i, kind in enumerate(kinds):
        counts = 0 if i else addresses["counts"]
        b.emit(lambda rows: observe.covariance(width, n_mat), over, counts=counts, **slots, **kind)
    bad = b.watch(op.label, op.x.per)
    b.emit(observe.not_finite, op.x, x=b.buffer(op.x), width=width, bad=bad)


@LOWER.register(ops.Similarity)
def _similarity(b: CUDALowering, op: ops.Similarity) -> None:
    addresses = b.sums(op)
    cosines = b.scratch(8 * b.limits.n_ubatch * op.a.per)
    slots: dict[str, Slot] = {"a": b.buffer(op.a), "b": b.buffer(op.b), "width": op.a.width, "cosines": cosines}
    b.emit(observe.similarity, op.a, bad=b.watch(op.label, op.a.per), **slots)
    b.emit(
        lambda rows: observe.add_cosines(), op.a, cosines=cosines, total=addresses["total"], count=addresses["counts"]
    )


@LOWER.register(ops.CountUp)
def _count_up(b: CUDALowering, op: ops.CountUp) -> None:
    n_used = op.out.width
    b.emit(lambda rows: observe.count_up(n_used, rows), op.out, out=b.buffer(op.out), first=op.first, n_used=n_used)
