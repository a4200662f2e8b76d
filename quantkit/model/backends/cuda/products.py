"""Lowers products to launches of a CUDA device: dense, of heads, by expert; the twin of that part of cpu/ops.py.

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
from quantkit.model.backends.arena import Buffer, Slot, Within
from quantkit.model.backends.cuda import cublas
from quantkit.model.backends.cuda.fuse.formats import MulMatHeadsTo, UpGateIdTo, UpGateTo
from quantkit.model.backends.cuda.fuse.per_head import MulMatHeadsInto
from quantkit.model.backends.cuda.fuse.same_input import MulMatsRoute
from quantkit.model.backends.cuda.fuse.shared_expert import SharedExpert
from quantkit.model.backends.cuda.lowering import FEW_ROWS, CUDALowering, KernelEntry
from quantkit.model.backends.lowering import expert_bytes_of, row_bytes_of
from quantkit.model.op_table import OpTable
from quantkit.model.ops import Matrix, Op, Value
from quantkit.types import TensorType

LOWER = OpTable("the cuda backend")


def gated(b: CUDALowering, activation: Activation, out: Value, gate: Buffer, gate_width: int, up: Slot) -> KernelEntry:
    """out = activation(gate) * up, element by element."""
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
    """Multiply ``first`` rows or more by weights of types that one kernel takes: in one launch for few rows.

    router: chooses experts by the logits of one of the products, in the same launch.
    """
    together, card, n_in = len(products) > 1 or router is not None, b.device.capability, products[0].weight.n_in
    activations, stride = b.activations(x, products[0].weight)
    common: dict[str, Slot] = {"x": activations, "x_stride": stride, "n_in": n_in}
    each, weights = [product.slots(b) for product in products], tuple(product.weight for product in products)
    types = [weight.tensor.type for weight in weights]
    if together:
        n_outs = [weight.n_out for weight in weights]

        def same_input(rows: int) -> Shape | None:
            if rows > FEW_ROWS:
                return None
            if router is None:
                return mat_vec_same_input.mul_mats(types, n_in, n_outs, rows)
            return mat_vec_same_input.mul_mats_route(types, n_in, n_outs, router.routing, rows)

        slots = {**common, **mat_vec_same_input.slots(each), "n_first": types.count(types[0])}
        slots |= {"row_bytes": row_bytes_of(weights[0]), "other_row_bytes": row_bytes_of(weights[-1])}
        if router is not None:
            slots |= {**common_slots.route(b, router), "counter": b.counters(1)}
        b.emit(same_input, x, **slots).weights = weights
    for product, t, slots in zip(products, types, each, strict=True):
        by_cublas = cublas.by_cublas(b, product.weight)

        def choose(
            rows: int, t: TensorType = t, n_out: int = product.weight.n_out, by_cublas: bool = by_cublas
        ) -> Shape | None:
            if rows > FEW_ROWS:
                if by_cublas:
                    return None
                return mat_mat.mul_mat(t, n_in, n_out, rows, card)
            return None if together or rows < first else mat_vec.mul_mat(t, n_in, n_out, rows)

        slots |= {"row_bytes": row_bytes_of(product.weight), "out_stride": 4 * product.out.width, **common}
        b.emit(choose, x, **slots).weights = (product.weight,)
        if by_cublas:
            cublas.multiply(b, x, product.out, product.weight, slots["w"], product.bias, product.scale)


@LOWER.of(ops.MulMat)
def _mul_mat(b: CUDALowering, op: ops.MulMat) -> None:
    _multiply(b, op.x, [_Product(op.out, op.weight, op.bias, op.scale)])


@LOWER.of(ops.MulMats, MulMatsRoute)
def _mul_mats(b: CUDALowering, op: ops.MulMats) -> None:
    """A launch takes weights of a family, of no more than two types."""
    router = op.route if isinstance(op, MulMatsRoute) else None
    groups: list[list[_Product]] = []
    open_ones: dict[str, list[_Product]] = {}
    for product in sorted(map(_Product, op.outs, op.weights, op.biases, op.scales), key=_Product.type_name):
        family = mat_vec_same_input.family(product.weight.tensor.type)
        group = open_ones.get(family, [])
        types = {other.type_name() for other in (*group, product)}
        if not group or len(group) == mat_vec_same_input.MAX_MATRICES or len(types) > 2:
            group = open_ones[family] = []
            groups.append(group)
        group.append(product)
    for group in groups:
        routes = router is not None and any(product.out is router.logits for product in group)
        _multiply(b, op.x, group, router=router if routes else None)
    if router is not None:
        _launch_route(b, router, FEW_ROWS + 1)


def _to(b: CUDALowering, op: Op, out: Value, rows: int) -> dict[str, Slot]:
    """Return the slots of the format that an operation also writes, ``rows`` at once."""
    form = getattr(op, "format", "")
    if not form:
        return {}
    counters = b.counters(rows * -(-out.width // 256))
    return {"format": activations.KINDS.index(form), "quantized": b.made_activations(out, form), "counters": counters}


def _remade(b: CUDALowering, op: Op, out: Value, to: Mapping[str, Slot], by: Callable[[int], bool]) -> None:
    """Make the format in another launch, except for token counts where ``by`` says the operation's own makes it."""
    made = to.get("quantized")
    if isinstance(made, Buffer):
        b.remade(out, getattr(op, "format", ""), out.width, made, by)


@LOWER.of(ops.UpGate, UpGateTo)
def _up_gate(b: CUDALowering, op: ops.UpGate) -> None:
    if b.cublas:  # cuBLAS writes to memory: three steps
        up, gate = (Value(f"{op.out.name} {part}", op.up.n_out, op.x.per, op.x.outputs) for part in ("up", "gate"))
        _multiply(b, op.x, [_Product(up, op.up, op.up_bias, op.up_scale)])
        _multiply(b, op.x, [_Product(gate, op.gate, op.gate_bias, op.gate_scale)])
        gated(b, op.activation, op.out, b.buffer(gate), gate.width, b.buffer(up))
        return
    to = _to(b, op, op.out, 1)
    _launch_up_gate(b, op, _up_gate_slots(b, op), to)
    _remade(b, op, op.out, to, lambda rows: rows == 1)


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
    b: CUDALowering, op: ops.UpGate, slots: Mapping[str, Slot], to: Mapping[str, Slot], first: int = 1
) -> None:
    """Multiply ``first`` rows or more; to: slots of the format of one row."""
    t, n_in, n_out, activation = op.up.tensor.type, op.up.n_in, op.up.n_out, op.activation

    def choose(rows: int) -> Shape | None:
        if rows < first:
            return None
        if rows <= FEW_ROWS:
            return mat_vec.up_gate(t, activation, n_in, n_out, rows)
        return mat_mat.up_gate(t, activation, n_in, n_out, rows, b.device.capability)

    if to:
        one = mat_vec.up_gate_to(t, activation, n_in, n_out)
        b.emit(lambda rows: one if rows == first == 1 else None, op.x, **slots, **to).weights = (op.up, op.gate)
    b.emit(lambda rows: None if to and rows == 1 else choose(rows), op.x, **slots).weights = (op.up, op.gate)


@LOWER.of(ops.MulMatHeads, MulMatHeadsInto, MulMatHeadsTo)
def _mul_mat_heads(b: CUDALowering, op: ops.MulMatHeads) -> None:
    """The results of heads lie side by side, unless op says otherwise."""
    start, step = (op.start, op.step) if isinstance(op, MulMatHeadsInto) else (0, op.weight.n_out)
    weight, heads = op.weight, op.x.width // op.weight.n_in
    t, n_in, n_out = weight.tensor.type, weight.n_in, weight.n_out
    activations, stride = b.activations(op.x, weight)
    to = _to(b, op, op.out, 1)
    one = mat_vec.mul_mat_heads_to(t, n_in, n_out, heads) if to else None

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
        "out": Within(b.buffer(op.out), 4 * start),
        "out_stride": 4 * op.out.width,
        "out_head_bytes": 4 * step,
    }
    if one is not None:
        b.emit(lambda rows: one if rows == 1 else None, op.x, **slots, **to).weights = (weight,)
    b.emit(choose, op.x, **slots).weights = (weight,)
    _remade(b, op, op.out, to, lambda rows: rows == 1 and one is not None)


# ---------------------------------------------------------------- experts


def _by_expert(b: CUDALowering, out: Value, x: Value, ids: Value, weight: Matrix) -> dict[str, Slot]:
    return common_slots.by_expert(b, out, x, ids, weight) | {"ids": b.buffer(ids)}


@LOWER.of(ops.MulMatId)
def _mul_mat_id(b: CUDALowering, op: ops.MulMatId) -> None:
    _launch_mul_mat_id(b, op, _mul_mat_id_slots(b, op))


def _mul_mat_id_slots(b: CUDALowering, op: ops.MulMatId) -> dict[str, Slot]:
    given = {"w": b.weight(op.weight, op.ids), **_by_expert(b, op.out, op.x, op.ids, op.weight)}
    return given | common_slots.vectors_by_expert(b, op.weight, op.bias, op.scale)


def _launch_mul_mat_id(b: CUDALowering, op: ops.MulMatId, slots: Mapping[str, Slot], first: int = 1) -> None:
    """Multiply the rows of ``first`` tokens or more."""
    t, n_in, n_out, n_used = op.weight.tensor.type, op.weight.n_in, op.weight.n_out, op.ids.width
    n_expert, card, by_cublas = op.weight.n_matrices, b.device.capability, cublas.by_cublas(b, op.weight)

    def choose(rows: int) -> Shape | None:
        if rows < first:
            return None
        if rows <= FEW_ROWS:
            return mat_vec.mul_mat_id(t, n_in, n_out, rows, n_used)
        return None if by_cublas else mat_mat.mul_mat_id(t, n_in, n_out, rows, n_used, n_expert, card)

    b.emit(choose, op.ids, **slots).weights = (op.weight,)
    if by_cublas:
        cublas.multiply_by_expert(b, op.x, op.ids, op.out, op.weight, slots["w"], op.bias, op.scale)


@LOWER.of(ops.UpGateId, UpGateIdTo)
def _up_gate_id(b: CUDALowering, op: ops.UpGateId) -> None:
    if b.cublas:
        up, gate = (Value(f"{op.out.name} {part}", op.up.n_out, op.out.per, op.out.outputs) for part in ("up", "gate"))
        _mul_mat_id(b, ops.MulMatId(out=up, x=op.x, weight=op.up, ids=op.ids, bias=op.up_bias, scale=op.up_scale))
        _mul_mat_id(
            b, ops.MulMatId(out=gate, x=op.x, weight=op.gate, ids=op.ids, bias=op.gate_bias, scale=op.gate_scale)
        )
        gated(b, op.activation, op.out, b.buffer(gate), gate.width, b.buffer(up))
        return
    to = _to(b, op, op.out, FEW_ROWS * op.ids.width)
    _launch_up_gate_id(b, op, _up_gate_id_slots(b, op), to)
    _remade(b, op, op.out, to, lambda rows: rows <= FEW_ROWS)


def _up_gate_id_slots(b: CUDALowering, op: ops.UpGateId) -> dict[str, Slot]:
    given = {"up": b.weight(op.up, op.ids), "gate": b.weight(op.gate, op.ids), **glu.limits(op.activation)}
    given |= _by_expert(b, op.out, op.x, op.ids, op.up)
    given |= common_slots.vectors_by_expert(b, op.up, op.up_bias, op.up_scale, "up_")
    return given | common_slots.vectors_by_expert(b, op.gate, op.gate_bias, op.gate_scale, "gate_")


def _launch_up_gate_id(
    b: CUDALowering, op: ops.UpGateId, slots: Mapping[str, Slot], to: Mapping[str, Slot], first: int = 1
) -> None:
    """Multiply the rows of ``first`` tokens or more; to: slots of the format of few rows."""
    t, n_in, n_out, n_used = op.up.tensor.type, op.up.n_in, op.up.n_out, op.ids.width
    n_expert, card, activation = op.up.n_matrices, b.device.capability, op.activation
    few = mat_vec.up_gate_id_to if to else mat_vec.up_gate_id

    def choose(rows: int) -> Shape | None:
        return few(t, activation, n_in, n_out, rows, n_used) if first <= rows <= FEW_ROWS else None

    def many(rows: int) -> Shape | None:
        if rows <= FEW_ROWS:
            return None
        return mat_mat.up_gate_id(t, activation, n_in, n_out, rows, n_used, n_expert, card)

    b.emit(choose, op.ids, **slots, **to).weights = (op.up, op.gate)
    b.emit(many, op.ids, **slots).weights = (op.up, op.gate)


@LOWER.of(ops.Route)
def _launch_route(b: CUDALowering, op: ops.Route, first: int = 1) -> None:
    """Choose the experts of ``first`` tokens or more."""
    routing, given = op.routing, common_slots.route(b, op) | common_slots.buffers(b, op, "chosen")
    b.emit(lambda rows: route.route(routing, rows) if rows >= first else None, op.logits, **given)


@LOWER.of(SharedExpert)
def _shared_expert(b: CUDALowering, op: SharedExpert) -> None:
    """One token in one launch; more by launches of their own."""
    if isinstance(op.by_expert, ops.UpGateId) and isinstance(op.dense, ops.UpGate):
        _up_gate_shared_expert(b, op.by_expert, op.dense)
    elif isinstance(op.by_expert, ops.MulMatId) and isinstance(op.dense, ops.MulMat):
        _mul_mat_shared_expert(b, op.by_expert, op.dense)


def _up_gate_shared_expert(b: CUDALowering, op: ops.UpGateId, dense: ops.UpGate) -> None:
    n_used, units = op.ids.width, [-(-out.width // 256) for out in (op.out, dense.out)]
    of_experts, of_dense = _up_gate_id_slots(b, op), _up_gate_slots(b, dense)
    to, dense_to = _to(b, op, op.out, FEW_ROWS * n_used), _to(b, dense, dense.out, 1)
    names = ("x", "up", "gate", "row_bytes", "n_out", "out", "up_bias", "gate_bias", "up_scale", "gate_scale")
    both: dict[str, Slot] = {**of_experts, **{f"dense_{name}": of_dense[name] for name in names}}
    for prefix, slots in (("", to), ("dense_", dense_to)):
        both |= {f"{prefix}format": slots.get("format", -1), f"{prefix}quantized": slots.get("quantized", 0)}
    both["counters"] = b.counters(n_used * units[0] + units[1])
    types, sizes = (op.up.tensor.type, dense.up.tensor.type), (op.up.n_in, op.up.n_out, n_used, dense.up.n_out)
    one = mat_vec_shared_expert.up_gate(*types, op.activation, *sizes)
    b.emit(lambda rows: one if rows == 1 else None, op.ids, **both).weights = (op.up, op.gate, dense.up, dense.gate)
    _launch_up_gate_id(b, op, of_experts, to, 2)
    _launch_up_gate(b, dense, of_dense, dense_to, 2)
    _remade(b, op, op.out, to, lambda rows: rows <= FEW_ROWS)
    _remade(b, dense, dense.out, dense_to, lambda rows: rows == 1)


def _mul_mat_shared_expert(b: CUDALowering, op: ops.MulMatId, dense: ops.MulMat) -> None:
    product = _Product(dense.out, dense.weight, dense.bias, dense.scale)
    of_experts, of_dense = _mul_mat_id_slots(b, op), product.slots(b)
    x, _ = b.activations(dense.x, dense.weight)
    both: dict[str, Slot] = {**of_experts, **{f"dense_{name}": slot for name, slot in of_dense.items()}}
    both |= {"dense_x": x, "dense_row_bytes": row_bytes_of(dense.weight), "dense_n_in": dense.weight.n_in}
    types = op.weight.tensor.type, dense.weight.tensor.type
    one = mat_vec_shared_expert.mul_mat(*types, op.weight.n_in, op.weight.n_out, op.ids.width, dense.weight.n_out)
    b.emit(lambda rows: one if rows == 1 else None, op.ids, **both).weights = (op.weight, dense.weight)
    _launch_mul_mat_id(b, op, of_experts, 2)
    _multiply(b, dense.x, [product], 2)
