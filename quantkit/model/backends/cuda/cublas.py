"""Products by cuBLAS (--cublas): weights unpacked to bf16, activations rounded to bf16. The reference for quantkit's
products.

Only for more rows than FEW_ROWS; F32 weights, which are strict, and products by head remain with quantkit's kernels.
Experts are computed one after another: their pairs are gathered in the order of the plan (plan.cuh), and each expert
with pairs needs an unpacking and a GEMM. The host reads the ids back once per layer, which waits for the device, so
prompts are not recorded as a CUDA graph with --cublas; single tokens are.
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


def uses_cublas(b: CUDALowering, weight: Matrix) -> bool:
    """Return whether prompts are multiplied by a weight with cuBLAS."""
    return b.cublas and weight.tensor.type.name != "F32"


def _emit_many_rows(b: CUDALowering, value: Value, shape: Callable[[int], Shape], /, **slots: Slot | Rows) -> None:
    """Append a launch for more than FEW_ROWS rows of a value."""
    b.emit(lambda rows: shape(rows) if rows > FEW_ROWS else None, value, **slots)


def _emit_work(
    b: CUDALowering, value: Value, work: Callable[[int, Mapping[str, int | float]], None], /, **slots: Slot
) -> None:
    b.entries.append(WorkEntry(b.op, slots=slots, outputs=value.outputs, per=value.per, work=work))


def multiply(
    b: CUDALowering, x: Value, out: Value, weight: Matrix, w: Slot, bias: Matrix | None, scale: Matrix | None
) -> None:
    """Emit rounding of x, unpacking of the weight at ``w``, the product, scale and bias."""
    t = weight.tensor.type
    n_in = weight.n_in
    n_out = weight.n_out
    device = b.device
    bf16_slots: dict[str, Slot] = {"out_stride": 2 * n_in, "n": n_in, "to": _BF16}
    rounded, new = b.rows_for_cublas(x, n_in, x.per)
    if new:
        slots: dict[str, Slot] = {"w": b.buffer(x), "row_bytes": 4 * n_in, "out": rounded, **bf16_slots}
        _emit_many_rows(b, x, lambda rows: dequantize.dequantize(BY_NAME["F32"], n_in, rows), **slots)
    weight_bf16, result = Buffer(f"{weight} (bf16)", 2 * n_out * n_in), b.buffer(out)
    slots = {"w": w, "row_bytes": row_bytes_of(weight), "rows": n_out, "out": weight_bf16, **bf16_slots}
    _emit_many_rows(b, x, lambda rows: dequantize.dequantize(t, n_in, n_out, for_product=True), **slots)

    def work(rows: int, addresses: Mapping[str, int | float]) -> None:
        device.gemm_bf16(rows, n_out, n_in, int(addresses["x"]), int(addresses["w"]), int(addresses["out"]))

    _emit_work(b, x, work, x=rounded, w=weight_bf16, out=result)
    epilogue_slots: dict[str, Slot] = {"x": result, "out": result, "width": n_out}
    if scale is not None:
        _emit_many_rows(
            b, x, lambda rows: elementwise.multiply_by(n_out, rows), vector=b.vector(scale), n=1, **epilogue_slots
        )
    if bias is not None:
        _emit_many_rows(
            b, x, lambda rows: elementwise.plus_vector(n_out, rows), vector=b.vector(bias), n=n_out, **epilogue_slots
        )


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
    """Emit the product by expert: gather rows by expert, multiply, and scatter the results."""
    n_in = weight.n_in
    n_out = weight.n_out
    n_used = ids.width
    pairs = Rows(ids.width)
    plan, counts = b.plan(ids, weight.n_matrices), _counts(b, ids, weight.n_matrices)
    gathered, new = b.rows_for_cublas(x, n_in, n_used, ids)
    if new:
        slots: dict[str, Slot] = {"x": b.buffer(x), "x_per": n_used if x.per == 1 else 1, "width": n_in}
        _emit_many_rows(b, ids, lambda rows: moe.gather(rows * n_used), rows=pairs, plan=plan, out=gathered, **slots)
    weight_bf16 = Buffer(f"{weight} (bf16)", 2 * n_out * n_in)
    products = Buffer(f"{out.name} (by expert)", 4 * n_out * n_used * b.limits.n_ubatch)
    _emit_work(b, ids, ExpertProducts(b.device, weight, counts), x=gathered, w=w, unpacked=weight_bf16, out=products)
    slots = {"bias": b.vector(bias), "bias_stride": 4 * n_out, "scale": b.vector(scale), "plan": plan}
    slots |= {"ids": b.buffer(ids), "x": products, "out": b.buffer(out), "width": n_out}
    _emit_many_rows(b, ids, lambda rows: moe.scatter(rows * n_used), rows=pairs, **slots)


class ExpertCounts:
    """The number of pairs of each expert in the current batch."""

    def __init__(self) -> None:
        self.per_expert: list[int] = []


def _counts(b: CUDALowering, ids: Value, n_expert: int) -> ExpertCounts:
    """Return the counts of pairs by expert, from ids read back; computed once for each ids."""
    counts, view = ExpertCounts(), b.view

    def work(rows: int, addresses: Mapping[str, int | float]) -> None:
        counts.per_expert = np.bincount(view(ids).reshape(-1), minlength=n_expert).tolist()

    def make() -> ExpertCounts:
        _emit_work(b, ids, work, ids=b.buffer(ids))
        return counts

    return b.once(("counts", ids), make)


class ExpertProducts:
    """The products of all experts with pairs; their matrices are unpacked into one buffer, one after the other."""

    def __init__(self, device: Device, weight: Matrix, counts: ExpertCounts) -> None:
        self.device, self.counts = device, counts
        self.n_in = weight.n_in
        self.n_out = weight.n_out
        self.expert_bytes = expert_bytes_of(weight)
        self.shape = dequantize.dequantize(weight.tensor.type, weight.n_in, weight.n_out, for_product=True)
        self.fixed = {"row_bytes": row_bytes_of(weight), "rows": self.n_out, "n": self.n_in, "to": _BF16}
        self.fixed |= {"out_stride": 2 * self.n_in}

    def __call__(self, rows: int, addresses: Mapping[str, int | float]) -> None:
        operation = self.shape.kernel
        weight_bf16 = int(addresses["unpacked"])
        first = 0
        for expert, count in enumerate(self.counts.per_expert):
            if not count:
                continue
            arguments = operation.block(w=addresses["w"] + expert * self.expert_bytes, out=weight_bf16, **self.fixed)
            self.device.run([Launch(operation, self.shape.grid, arguments, self.shape.shared)])
            x, out = int(addresses["x"]) + 2 * self.n_in * first, int(addresses["out"]) + 4 * self.n_out * first
            self.device.gemm_bf16(count, self.n_out, self.n_in, x, weight_bf16, out)
            first += count
