"""Lowering of products to launches of a CUDA device: dense, by head, by expert; the twin of that part of cpu/ops.py.

Each has a kernel for few rows (mat_vec*.py) and one for many (mat_mat.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quantkit.kernels.cuda.core.kernel import Shape
from quantkit.kernels.cuda.layer import glu, route
from quantkit.kernels.cuda.matmul import activations, mat_mat, mat_vec, mat_vec_same_input, mat_vec_shared_expert
from quantkit.kernels.parameters import Activation
from quantkit.model import ops
from quantkit.model.backends import slots as common_slots
from quantkit.model.backends.arena import Buffer, BufferOffset, Slot
from quantkit.model.backends.cuda import cublas
from quantkit.model.backends.cuda.fuse.formats import MulMatHeadsWithFormat, UpGateIdWithFormat, UpGateWithFormat
from quantkit.model.backends.cuda.fuse.per_head import MulMatHeadsStrided
from quantkit.model.backends.cuda.fuse.same_input import MulMatsRoute
from quantkit.model.backends.cuda.fuse.shared_expert import SharedExpert
from quantkit.model.backends.cuda.lowering import FEW_ROWS, CUDALowering, KernelEntry
from quantkit.model.backends.lowering import expert_bytes_of, row_bytes_of
from quantkit.model.ops import Matrix, Op, OpTable, Value
from quantkit.types import TensorType

LOWER = OpTable("the cuda backend")


def emit_glu(
    b: CUDALowering, activation: Activation, out: Value, gate: Buffer, gate_width: int, up: Slot
) -> KernelEntry:
    """Emit out = activation(gate) * up."""
    width = out.width
    return b.emit(
        lambda rows: glu.glu(activation, width, rows),
        out,
        out=b.buffer(out),
        gate=gate,
        up=up,
        width=width,
        gate_width=gate_width,
        **glu.limits(activation),
    )


@dataclass(frozen=True)
class _Product:
    """out = scale * (weight x) + bias"""

    out: Value
    weight: Matrix
    bias: Matrix | None
    scale: Matrix | None

    def type_name(self) -> str:
        return self.weight.tensor.type.name

    def slots(self, b: CUDALowering) -> dict[str, Slot]:
        return {
            "w": b.weight(self.weight),
            "n_out": self.weight.n_out,
            "out": b.buffer(self.out),
            "bias": b.vector(self.bias),
            "scale": b.vector(self.scale),
        }


def _multiply(
    b: CUDALowering, x: Value, products: Sequence[_Product], first: int = 1, router: ops.Route | None = None
) -> None:
    """Emit products of ``first`` rows or more by weights of types that one kernel takes: one launch for few rows.

    router: chooses experts by the logits of one of the products, in the same launch.
    """
    is_fused = len(products) > 1 or router is not None
    capability = b.device.capability
    n_in = products[0].weight.n_in
    activations, stride = b.activations(x, products[0].weight)
    common: dict[str, Slot] = {"x": activations, "x_stride": stride, "n_in": n_in}
    product_slots, weights = [product.slots(b) for product in products], tuple(product.weight for product in products)
    types = [weight.tensor.type for weight in weights]
    if is_fused:
        n_outs = [weight.n_out for weight in weights]

        def same_input(rows: int) -> Shape | None:
            if rows > FEW_ROWS:
                return None
            if router is None:
                return mat_vec_same_input.mul_mats(types, n_in, n_outs, rows)
            return mat_vec_same_input.mul_mats_route(types, n_in, n_outs, router.routing, rows)

        slots = {**common, **mat_vec_same_input.slots(product_slots), "n_first": types.count(types[0])}
        slots |= {"row_bytes": row_bytes_of(weights[0]), "other_row_bytes": row_bytes_of(weights[-1])}
        if router is not None:
            slots |= {**common_slots.route(b, router), "counter": b.counters(1)}
        b.emit(same_input, x, **slots).weights = weights
    for product, t, slots in zip(products, types, product_slots, strict=True):
        by_cublas = cublas.uses_cublas(b, product.weight)

        def choose(
            rows: int, t: TensorType = t, n_out: int = product.weight.n_out, use_cublas: bool = by_cublas
        ) -> Shape | None:
            if rows > FEW_ROWS:
                if use_cublas:
                    return None
                return mat_mat.mul_mat(t, n_in, n_out, rows, capability)
            return None if is_fused or rows < first else mat_vec.mul_mat(t, n_in, n_out, rows)

        slots |= {"row_bytes": row_bytes_of(product.weight), "out_stride": 4 * product.out.width, **common}
        b.emit(choose, x, **slots).weights = (product.weight,)
        if by_cublas:
            cublas.multiply(b, x, product.out, product.weight, slots["w"], product.bias, product.scale)


@LOWER.register(ops.MulMat)
def _mul_mat(b: CUDALowering, op: ops.MulMat) -> None:
    _multiply(b, op.x, [_Product(op.out, op.weight, op.bias, op.scale)])


@LOWER.register(ops.MulMats, MulMatsRoute)
def _mul_mats(b: CUDALowering, op: ops.MulMats) -> None:
    """Emit products in groups: a launch takes weights of one family, of at most two types."""
    router = op.route if isinstance(op, MulMatsRoute) else None
    groups: list[list[_Product]] = []
    open_ones: dict[str, list[_Product]] = {}
    for product in sorted(map(_Product, op.outs, op.weights, op.biases, op.scales), key=_Product.type_name):
        family = mat_vec_same_input.family(product.weight.tensor.type)
        group = open_ones.get(family, [])
        types = {member.type_name() for member in (*group, product)}
        if not group or len(group) == mat_vec_same_input.MAX_MATRICES or len(types) > 2:
            group = open_ones[family] = []
            groups.append(group)
        group.append(product)
    for group in groups:
        routes = router is not None and any(product.out is router.logits for product in group)
        _multiply(b, op.x, group, router=router if routes else None)
    if router is not None:
        _launch_route(b, router, FEW_ROWS + 1)


def _format_slots(b: CUDALowering, op: Op, out: Value, rows: int) -> dict[str, Slot]:
    """Return the slots of the format that an operation also writes, for ``rows`` at once."""
    form = getattr(op, "format", "")
    if not form:
        return {}
    counters = b.counters(rows * -(-out.width // 256))
    return {"format": activations.KINDS.index(form), "quantized": b.activation_buffer(out, form), "counters": counters}


def _convert_format(
    b: CUDALowering, op: Op, out: Value, format_slots: Mapping[str, Slot], is_written: Callable[[int], bool]
) -> None:
    """Emit the conversion to the format, except where the operation's own launch writes it (is_written(rows))."""
    buffer = format_slots.get("quantized")
    if isinstance(buffer, Buffer):
        b.convert_activations(out, getattr(op, "format", ""), out.width, buffer, is_written)


@LOWER.register(ops.UpGate, UpGateWithFormat)
def _up_gate(b: CUDALowering, op: ops.UpGate) -> None:
    if b.cublas:  # cuBLAS writes to memory: three steps
        up, gate = (Value(f"{op.out.name} {part}", op.up.n_out, op.x.per, op.x.outputs) for part in ("up", "gate"))
        _multiply(b, op.x, [_Product(up, op.up, op.up_bias, op.up_scale)])
        _multiply(b, op.x, [_Product(gate, op.gate, op.gate_bias, op.gate_scale)])
        emit_glu(b, op.activation, op.out, b.buffer(gate), gate.width, b.buffer(up))
        return
    format_slots = _format_slots(b, op, op.out, 1)
    _launch_up_gate(b, op, _up_gate_slots(b, op), format_slots)
    _convert_format(b, op, op.out, format_slots, lambda rows: rows == 1)


def _up_gate_slots(b: CUDALowering, op: ops.UpGate) -> dict[str, Slot]:
    activations, stride = b.activations(op.x, op.up)
    return {
        "x": activations,
        "x_stride": stride,
        "up": b.weight(op.up),
        "gate": b.weight(op.gate),
        "row_bytes": row_bytes_of(op.up),
        "n_in": op.up.n_in,
        "n_out": op.up.n_out,
        "out": b.buffer(op.out),
        "out_stride": 4 * op.out.width,
        "up_bias": b.vector(op.up_bias),
        "gate_bias": b.vector(op.gate_bias),
        "up_scale": b.vector(op.up_scale),
        "gate_scale": b.vector(op.gate_scale),
        **glu.limits(op.activation),
    }


def _launch_up_gate(
    b: CUDALowering, op: ops.UpGate, slots: Mapping[str, Slot], format_slots: Mapping[str, Slot], first: int = 1
) -> None:
    """Emit up and gate of ``first`` rows or more; format_slots: of the format of one row."""
    t = op.up.tensor.type
    n_in = op.up.n_in
    n_out = op.up.n_out
    activation = op.activation

    def choose(rows: int) -> Shape | None:
        if rows < first:
            return None
        if rows <= FEW_ROWS:
            return mat_vec.up_gate(t, activation, n_in, n_out, rows)
        return mat_mat.up_gate(t, activation, n_in, n_out, rows, b.device.capability)

    if format_slots:
        one = mat_vec.up_gate_to(t, activation, n_in, n_out)
        b.emit(lambda rows: one if rows == first == 1 else None, op.x, **slots, **format_slots).weights = (
            op.up,
            op.gate,
        )
    b.emit(lambda rows: None if format_slots and rows == 1 else choose(rows), op.x, **slots).weights = (op.up, op.gate)


@LOWER.register(ops.MulMatHeads, MulMatHeadsStrided, MulMatHeadsWithFormat)
def _mul_mat_heads(b: CUDALowering, op: ops.MulMatHeads) -> None:
    """Emit products by head; results are side by side, unless op has another start and step."""
    start, step = (op.start, op.step) if isinstance(op, MulMatHeadsStrided) else (0, op.weight.n_out)
    weight, heads = op.weight, op.x.width // op.weight.n_in
    t = weight.tensor.type
    n_in = weight.n_in
    n_out = weight.n_out
    activations, stride = b.activations(op.x, weight)
    format_slots = _format_slots(b, op, op.out, 1)
    one = mat_vec.mul_mat_heads_to(t, n_in, n_out, heads) if format_slots else None

    def choose(rows: int) -> Shape | None:
        if rows == 1 and one is not None:
            return None
        if rows <= FEW_ROWS:
            return mat_vec.mul_mat_heads(t, n_in, n_out, rows, heads)
        return mat_mat.mul_mat_heads(t, n_in, n_out, rows, heads, b.device.capability)

    slots: dict[str, Slot] = {
        "x": activations,
        "x_stride": stride * heads,
        "x_head_bytes": stride,
        "w": b.weight(weight),
        "row_bytes": row_bytes_of(weight),
        "head_bytes": expert_bytes_of(weight),
        "heads": heads,
        "n_in": n_in,
        "n_out": n_out,
        "out": BufferOffset(b.buffer(op.out), 4 * start),
        "out_stride": 4 * op.out.width,
        "out_head_bytes": 4 * step,
    }
    if one is not None:
        b.emit(lambda rows: one if rows == 1 else None, op.x, **slots, **format_slots).weights = (weight,)
    b.emit(choose, op.x, **slots).weights = (weight,)
    _convert_format(b, op, op.out, format_slots, lambda rows: rows == 1 and one is not None)


# ---------------------------------------------------------------- experts


def _expert_slots(b: CUDALowering, out: Value, x: Value, ids: Value, weight: Matrix) -> dict[str, Slot]:
    return common_slots.expert_slots(b, out, x, ids, weight) | {"ids": b.buffer(ids)}


@LOWER.register(ops.MulMatId)
def _mul_mat_id(b: CUDALowering, op: ops.MulMatId) -> None:
    _launch_mul_mat_id(b, op, _mul_mat_id_slots(b, op))


def _mul_mat_id_slots(b: CUDALowering, op: ops.MulMatId) -> dict[str, Slot]:
    expert_slots = {"w": b.weight(op.weight, op.ids), **_expert_slots(b, op.out, op.x, op.ids, op.weight)}
    return expert_slots | common_slots.expert_vector_slots(b, op.weight, op.bias, op.scale)


def _launch_mul_mat_id(b: CUDALowering, op: ops.MulMatId, slots: Mapping[str, Slot], first: int = 1) -> None:
    """Emit the product of ``first`` tokens or more."""
    t = op.weight.tensor.type
    n_in = op.weight.n_in
    n_out = op.weight.n_out
    n_used = op.ids.width
    n_expert = op.weight.n_matrices
    capability = b.device.capability
    use_cublas = cublas.uses_cublas(b, op.weight)

    def choose(rows: int) -> Shape | None:
        if rows < first:
            return None
        if rows <= FEW_ROWS:
            return mat_vec.mul_mat_id(t, n_in, n_out, rows, n_used)
        return None if use_cublas else mat_mat.mul_mat_id(t, n_in, n_out, rows, n_used, n_expert, capability)

    b.emit(choose, op.ids, **slots).weights = (op.weight,)
    if use_cublas:
        cublas.multiply_by_expert(b, op.x, op.ids, op.out, op.weight, slots["w"], op.bias, op.scale)


@LOWER.register(ops.UpGateId, UpGateIdWithFormat)
def _up_gate_id(b: CUDALowering, op: ops.UpGateId) -> None:
    if b.cublas:
        up, gate = (Value(f"{op.out.name} {part}", op.up.n_out, op.out.per, op.out.outputs) for part in ("up", "gate"))
        _mul_mat_id(b, ops.MulMatId(out=up, x=op.x, weight=op.up, ids=op.ids, bias=op.up_bias, scale=op.up_scale))
        _mul_mat_id(
            b, ops.MulMatId(out=gate, x=op.x, weight=op.gate, ids=op.ids, bias=op.gate_bias, scale=op.gate_scale)
        )
        emit_glu(b, op.activation, op.out, b.buffer(gate), gate.width, b.buffer(up))
        return
    format_slots = _format_slots(b, op, op.out, FEW_ROWS * op.ids.width)
    _launch_up_gate_id(b, op, _up_gate_id_slots(b, op), format_slots)
    _convert_format(b, op, op.out, format_slots, lambda rows: rows <= FEW_ROWS)


def _up_gate_id_slots(b: CUDALowering, op: ops.UpGateId) -> dict[str, Slot]:
    expert_slots = {"up": b.weight(op.up, op.ids), "gate": b.weight(op.gate, op.ids), **glu.limits(op.activation)}
    expert_slots |= _expert_slots(b, op.out, op.x, op.ids, op.up)
    expert_slots |= common_slots.expert_vector_slots(b, op.up, op.up_bias, op.up_scale, "up_")
    return expert_slots | common_slots.expert_vector_slots(b, op.gate, op.gate_bias, op.gate_scale, "gate_")


def _launch_up_gate_id(
    b: CUDALowering, op: ops.UpGateId, slots: Mapping[str, Slot], format_slots: Mapping[str, Slot], first: int = 1
) -> None:
    """Emit up and gate of ``first`` tokens or more; format_slots: of the format of few rows."""
    t = op.up.tensor.type
    n_in = op.up.n_in
    n_out = op.up.n_out
    n_used = op.ids.width
    n_expert = op.up.n_matrices
    capability = b.device.capability
    activation = op.activation
    mat_vec_kernel = mat_vec.up_gate_id_to if format_slots else mat_vec.up_gate_id

    def choose_mat_vec(rows: int) -> Shape | None:
        return mat_vec_kernel(t, activation, n_in, n_out, rows, n_used) if first <= rows <= FEW_ROWS else None

    def choose_mat_mat(rows: int) -> Shape | None:
        if rows <= FEW_ROWS:
            return None
        return mat_mat.up_gate_id(t, activation, n_in, n_out, rows, n_used, n_expert, capability)

    b.emit(choose_mat_vec, op.ids, **slots, **format_slots).weights = (op.up, op.gate)
    b.emit(choose_mat_mat, op.ids, **slots).weights = (op.up, op.gate)


@LOWER.register(ops.Route)
def _launch_route(b: CUDALowering, op: ops.Route, first: int = 1) -> None:
    """Emit the routing of ``first`` tokens or more."""
    routing, route_slots = op.routing, common_slots.route(b, op) | common_slots.given_ids(b, op)
    b.emit(lambda rows: route.route(routing, rows) if rows >= first else None, op.logits, **route_slots)


@LOWER.register(SharedExpert)
def _shared_expert(b: CUDALowering, op: SharedExpert) -> None:
    """Emit one launch for one token, and separate launches for more."""
    if isinstance(op.by_expert, ops.UpGateId) and isinstance(op.dense, ops.UpGate):
        _up_gate_shared_expert(b, op.by_expert, op.dense)
    elif isinstance(op.by_expert, ops.MulMatId) and isinstance(op.dense, ops.MulMat):
        _mul_mat_shared_expert(b, op.by_expert, op.dense)


def _up_gate_shared_expert(b: CUDALowering, op: ops.UpGateId, dense: ops.UpGate) -> None:
    n_used, units = op.ids.width, [-(-out.width // 256) for out in (op.out, dense.out)]
    of_experts, of_dense = _up_gate_id_slots(b, op), _up_gate_slots(b, dense)
    format_slots, dense_format_slots = (
        _format_slots(b, op, op.out, FEW_ROWS * n_used),
        _format_slots(b, dense, dense.out, 1),
    )
    names = ("x", "up", "gate", "row_bytes", "n_out", "out", "up_bias", "gate_bias", "up_scale", "gate_scale")
    fused_slots: dict[str, Slot] = {**of_experts, **{f"dense_{name}": of_dense[name] for name in names}}
    for prefix, slots in (("", format_slots), ("dense_", dense_format_slots)):
        fused_slots |= {f"{prefix}format": slots.get("format", -1), f"{prefix}quantized": slots.get("quantized", 0)}
    fused_slots["counters"] = b.counters(n_used * units[0] + units[1])
    types, sizes = (op.up.tensor.type, dense.up.tensor.type), (op.up.n_in, op.up.n_out, n_used, dense.up.n_out)
    one = mat_vec_shared_expert.up_gate(*types, op.activation, *sizes)
    b.emit(lambda rows: one if rows == 1 else None, op.ids, **fused_slots).weights = (
        op.up,
        op.gate,
        dense.up,
        dense.gate,
    )
    _launch_up_gate_id(b, op, of_experts, format_slots, 2)
    _launch_up_gate(b, dense, of_dense, dense_format_slots, 2)
    _convert_format(b, op, op.out, format_slots, lambda rows: rows <= FEW_ROWS)
    _convert_format(b, dense, dense.out, dense_format_slots, lambda rows: rows == 1)


def _mul_mat_shared_expert(b: CUDALowering, op: ops.MulMatId, dense: ops.MulMat) -> None:
    product = _Product(dense.out, dense.weight, dense.bias, dense.scale)
    of_experts, of_dense = _mul_mat_id_slots(b, op), product.slots(b)
    x, _ = b.activations(dense.x, dense.weight)
    fused_slots: dict[str, Slot] = {**of_experts, **{f"dense_{name}": slot for name, slot in of_dense.items()}}
    fused_slots |= {"dense_x": x, "dense_row_bytes": row_bytes_of(dense.weight), "dense_n_in": dense.weight.n_in}
    types = op.weight.tensor.type, dense.weight.tensor.type
    one = mat_vec_shared_expert.mul_mat(*types, op.weight.n_in, op.weight.n_out, op.ids.width, dense.weight.n_out)
    b.emit(lambda rows: one if rows == 1 else None, op.ids, **fused_slots).weights = (op.weight, dense.weight)
    _launch_mul_mat_id(b, op, of_experts, 2)
    _multiply(b, dense.x, [product], 2)
