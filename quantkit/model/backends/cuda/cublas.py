"""Products by cuBLAS (--cublas): weights unpacked to bf16, activations rounded to it. The reference for our products.

Only for more rows than FEW_ROWS; F32 weights are strict and stay with our kernels, as heads do (mul_mat_heads). Experts
go one after another: their pairs lie side by side, in the order of the plan (plan.cuh), so each expert that has some
takes an unpacking and a GEMM of as many rows. The host needs to know how many: ids are read back once a layer,
which waits for the device. So prompts are never recorded as a CUDA graph with --cublas; single tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.core.kernel import Shape
from quantkit.kernels.cuda.layer import elementwise
from quantkit.kernels.cuda.matmul import moe
from quantkit.kernels.cuda.unpack import dequantize
from quantkit.model.backends.arena import Buffer, Slot
from quantkit.model.backends.cuda.lowering import FEW_ROWS, CUDALowering, Rows, WorkEntry
from quantkit.model.backends.lowering import expert_bytes_of, row_bytes_of
from quantkit.model.ops import Matrix, Value
from quantkit.types import BY_NAME

_BF16 = dequantize.OUTPUTS.index("bf16")


def by_cublas(b: CUDALowering, weight: Matrix) -> bool:
    """Return whether prompts go through cuBLAS with a weight."""
    return b.cublas and weight.tensor.type.name != "F32"


def _many(b: CUDALowering, of: Value, shape: Callable[[int], Shape], /, **slots: Slot | Rows) -> None:
    """Append a launch for more than FEW_ROWS rows of a value."""
    b.emit(lambda rows: shape(rows) if rows > FEW_ROWS else None, of, **slots)


def _work(b: CUDALowering, of: Value, work: Callable[[int, Mapping[str, int | float]], None], /, **slots: Slot) -> None:
    b.entries.append(WorkEntry(b.op, slots=slots, outputs=of.outputs, per=of.per, work=work))


def multiply(
    b: CUDALowering, x: Value, out: Value, weight: Matrix, w: Slot, bias: Matrix | None, scale: Matrix | None
) -> None:
    """Round x, and unpack the weight, which is at ``w``; multiply; scale and bias by themselves."""
    t, n_in, n_out, device = weight.tensor.type, weight.n_in, weight.n_out, b.device
    to: dict[str, Slot] = {"out_stride": 2 * n_in, "n": n_in, "to": _BF16}
    rounded, new = b.rows_for_cublas(x, n_in, x.per)
    if new:
        slots: dict[str, Slot] = {"w": b.buffer(x), "row_bytes": 4 * n_in, "out": rounded, **to}
        _many(b, x, lambda rows: dequantize.dequantize(BY_NAME["F32"], n_in, rows), **slots)
    unpacked, made = Buffer(f"{weight} (bf16)", 2 * n_out * n_in), b.buffer(out)
    slots = {"w": w, "row_bytes": row_bytes_of(weight), "rows": n_out, "out": unpacked, **to}
    _many(b, x, lambda rows: dequantize.dequantize(t, n_in, n_out, for_product=True), **slots)

    def work(rows: int, at: Mapping[str, int | float]) -> None:
        device.gemm_bf16(rows, n_out, n_in, int(at["x"]), int(at["w"]), int(at["out"]))

    _work(b, x, work, x=rounded, w=unpacked, out=made)
    then: dict[str, Slot] = {"x": made, "out": made, "width": n_out}
    if scale is not None:
        _many(b, x, lambda rows: elementwise.multiply_by(n_out, rows), vector=b.vector(scale), n=1, **then)
    if bias is not None:
        _many(b, x, lambda rows: elementwise.plus_vector(n_out, rows), vector=b.vector(bias), n=n_out, **then)


def multiply_by_expert(
    b: CUDALowering,
    x: Value,
    ids: Value,
    out: Value,
    weight: Matrix,
    w: Slot,
    bias: Matrix | None,
    scale: Matrix | None,
) -> None:
    """The same for the experts of ``ids``: gather rows by expert, multiply, and scatter the results."""
    n_in, n_out, n_used, pairs = weight.n_in, weight.n_out, ids.width, Rows(ids.width)
    plan, counts = b.plan(ids, weight.n_matrices), _counts(b, ids, weight.n_matrices)
    gathered, new = b.rows_for_cublas(x, n_in, n_used, ids)
    if new:
        slots: dict[str, Slot] = {"x": b.buffer(x), "x_per": n_used if x.per == 1 else 1, "width": n_in}
        _many(b, ids, lambda rows: moe.gather(rows * n_used), rows=pairs, plan=plan, out=gathered, **slots)
    unpacked = Buffer(f"{weight} (bf16)", 2 * n_out * n_in)
    products = Buffer(f"{out.name} (by expert)", 4 * n_out * n_used * b.limits.n_ubatch)
    _work(b, ids, Experts(b.device, weight, counts), x=gathered, w=w, unpacked=unpacked, out=products)
    slots = {"bias": b.vector(bias), "bias_stride": 4 * n_out, "scale": b.vector(scale), "plan": plan}
    slots |= {"ids": b.buffer(ids), "x": products, "out": b.buffer(out), "width": n_out}
    _many(b, ids, lambda rows: moe.scatter(rows * n_used), rows=pairs, **slots)


class Counts:
    """How many pairs each expert has in the batch that runs."""

    def __init__(self) -> None:
        self.of: list[int] = []


def _counts(b: CUDALowering, ids: Value, n_expert: int) -> Counts:
    """Return where the pairs of each expert are counted, from ids read back; made once for each ids."""
    counts, view = Counts(), b.view

    def work(rows: int, at: Mapping[str, int | float]) -> None:
        counts.of = np.bincount(view(ids).reshape(-1), minlength=n_expert).tolist()

    def make() -> Counts:
        _work(b, ids, work, ids=b.buffer(ids))
        return counts

    return b.once(("counts", ids), make)


class Experts:
    """The products of every expert that has pairs: its matrix unpacked, where the one before was, and multiplied."""

    def __init__(self, device: Device, weight: Matrix, counts: Counts) -> None:
        self.device, self.counts = device, counts
        self.n_in, self.n_out, self.each = weight.n_in, weight.n_out, expert_bytes_of(weight)
        self.shape = dequantize.dequantize(weight.tensor.type, weight.n_in, weight.n_out, for_product=True)
        self.fixed = {"row_bytes": row_bytes_of(weight), "rows": self.n_out, "n": self.n_in, "to": _BF16}
        self.fixed |= {"out_stride": 2 * self.n_in}

    def __call__(self, rows: int, at: Mapping[str, int | float]) -> None:
        operation, unpacked, first = self.shape.kernel, int(at["unpacked"]), 0
        for expert, count in enumerate(self.counts.of):
            if not count:
                continue
            arguments = operation.block(w=at["w"] + expert * self.each, out=unpacked, **self.fixed)
            self.device.run([Launch(operation, self.shape.grid, arguments, self.shape.shared)])
            x, out = int(at["x"]) + 2 * self.n_in * first, int(at["out"]) + 4 * self.n_out * first
            self.device.gemm_bf16(count, self.n_out, self.n_in, x, unpacked, out)
            first += count
