"""Lowering of observing operations: sums are kernels, everything else is numpy between two tapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quantkit.kernels.cpu import observe
from quantkit.kernels.cpu.core.tape import address_of
from quantkit.model import ops
from quantkit.model.backends.accumulators import covariance, similarity
from quantkit.model.backends.arena import Entry, Slot
from quantkit.model.ops import OpTable

if TYPE_CHECKING:
    from quantkit.model.backends.cpu.lowering import CPULowering

LOWER = OpTable("the cpu backend")


@LOWER.register(ops.Observe)
def _observe(b: CPULowering, op: ops.Observe) -> None:
    observer, view = b.observer, b.view
    if observer is None:
        return

    def look() -> None:
        observer(op.label, view(op.x), None if op.ids is None else view(op.ids))

    values = (op.x,) if op.ids is None else (op.x, op.ids)
    b.entries.append(Entry(op, call=look, uses=tuple(b.buffer(value) for value in values)))


@LOWER.register(ops.SumColumns)
def _sum_columns(b: CPULowering, op: ops.SumColumns) -> None:
    accumulator, bad = b.accumulator(op), np.zeros(b.threads, np.int64)
    common: dict[str, Slot] = {"x": b.buffer(op.x), "width": op.x.width, "sums": address_of(accumulator["sums"])}
    common |= {"bad": b.array(bad)}
    if op.ids is None:
        entry = b.emit(
            observe.sum_columns,
            count=address_of(accumulator["counts"]),
            rows_of=int(op.x.outputs),
            per=op.x.per,
            **common,
        )
        entry.independent = True  # it has no outputs
        b.watched.append((op, bad, op.x.per))
        return
    plan = b.plan(op.ids, op.n_mat)
    per = op.ids.width if op.x.per == 1 else 1
    counts = address_of(accumulator["counts"])
    entry = b.emit(observe.sum_columns_id, x_per=per, plan=plan, n_expert=op.n_mat, counts=counts, **common)
    entry.independent = True
    b.watched.append((op, bad, op.ids.width))


@LOWER.register(ops.CountUp)
def _count_up(b: CPULowering, op: ops.CountUp) -> None:
    out = b.buffer(op.out)
    b.emit(observe.count_up, out=out, first=op.first, n_used=op.out.width, rows_of=int(op.out.outputs))


@LOWER.register(ops.Covariance)
def _covariance(b: CPULowering, op: ops.Covariance) -> None:
    accumulator = b.accumulator(op)
    view = b.view
    report = b.report

    def look() -> None:
        ids, weights = (None if value is None else view(value) for value in (op.ids, op.weights))
        covariance(op, accumulator, view(op.x), ids, weights, report)

    b.entries.append(Entry(op, call=look, uses=tuple(b.buffer(value) for value in op.inputs())))


@LOWER.register(ops.Similarity)
def _similarity(b: CPULowering, op: ops.Similarity) -> None:
    accumulator = b.accumulator(op)
    view = b.view
    report = b.report

    def look() -> None:
        similarity(op, accumulator, view(op.a), view(op.b), report)

    b.entries.append(Entry(op, call=look, uses=tuple(b.buffer(value) for value in op.inputs())))
