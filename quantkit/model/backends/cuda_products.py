"""Products as launches of a CUDA device: dense, of heads, by expert; the twin of the same part of cpu_ops.py.

Each has a kernel for few rows (mat_vec.py, mat_vec_several.py, mat_vec_beside.py) and one for many (mat_mat.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.kernels.cuda import (
    activations,
    glu,
    mat_mat,
    mat_vec,
    mat_vec_beside,
    mat_vec_several,
    route,
)
from quantkit.kernels.cuda.operation import Shape
from quantkit.kernels.parameters import Activation
from quantkit.model.backends import cuda_cublas
from quantkit.model.backends.arena import Buffer, Slot, Within
from quantkit.model.backends.cuda_formats import Beside, MulMatHeadsTo, UpGateIdTo, UpGateTo
from quantkit.model.backends.cuda_joins import MulMatsRoute
from quantkit.model.backends.cuda_lowering import FEW_ROWS, CUDALowering, KernelEntry
from quantkit.model.backends.cuda_parts import MulMatHeadsInto
from quantkit.model.backends.lowering import expert_bytes_of, row_bytes_of
from quantkit.model.ops import Matrix, MulMat, MulMatHeads, MulMatId, MulMats, Op, Route, UpGate, UpGateId, Value
from quantkit.types import TensorType


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
    b: CUDALowering, x: Value, products: Sequence[_Product], first: int = 1, router: Route | None = None
) -> None:
    """Multiply ``first`` rows or more by weights whose types go together: in one launch, if rows are few.

    router: chooses experts by what one of the products gives, in the same launch then.
    """
    together, card, n_in = len(products) > 1 or router is not None, b.device.capability, products[0].weight.n_in
    activations, stride = b.activations(x, products[0].weight)
    common: dict[str, Slot] = {"x": activations, "x_stride": stride, "n_in": n_in}
    each, weights = [product.slots(b) for product in products], tuple(product.weight for product in products)
    types = [weight.tensor.type for weight in weights]
    if together:
        n_outs = [weight.n_out for weight in weights]

        def several(rows: int) -> Shape | None:
            if rows > FEW_ROWS:
                return None
            if router is None:
                return mat_vec_several.mul_mats(types, n_in, n_outs, rows)
            return mat_vec_several.mul_mats_route(types, n_in, n_outs, router.routing, rows)

        slots = {**common, **mat_vec_several.slots(each), "n_first": types.count(types[0])}
        slots |= {"row_bytes": row_bytes_of(weights[0]), "other_row_bytes": row_bytes_of(weights[-1])}
        if router is not None:
            slots |= {**_route_slots(b, router), "counter": b.counters(1)}
        b.emit(several, x, **slots).weights = weights
    for product, t, slots in zip(products, types, each, strict=True):
        cublas = cuda_cublas.by_cublas(b, product.weight)

        def choose(
            rows: int, t: TensorType = t, n_out: int = product.weight.n_out, cublas: bool = cublas
        ) -> Shape | None:
            if rows > FEW_ROWS:
                if cublas:
                    return None
                return mat_mat.mul_mat(t, n_in, n_out, rows, card)
            return None if together or rows < first else mat_vec.mul_mat(t, n_in, n_out, rows)

        slots |= {"row_bytes": row_bytes_of(product.weight), "out_stride": 4 * product.out.width, **common}
        b.emit(choose, x, **slots).weights = (product.weight,)
        if cublas:
            cuda_cublas.multiply(b, x, product.out, product.weight, slots["w"], product.bias, product.scale)


def _mul_mat(b: CUDALowering, op: MulMat) -> None:
    _multiply(b, op.x, [_Product(op.out, op.weight, op.bias, op.scale)])


def _mul_mats(b: CUDALowering, op: MulMats) -> None:
    """Of a family as many go together as a launch takes, and of no more than two types."""
    router = op.route if isinstance(op, MulMatsRoute) else None
    groups: list[list[_Product]] = []
    open_ones: dict[str, list[_Product]] = {}
    for product in sorted(map(_Product, op.outs, op.weights, op.biases, op.scales), key=_Product.type_name):
        family = mat_vec_several.family(product.weight.tensor.type)
        group = open_ones.get(family, [])
        types = {other.type_name() for other in (*group, product)}
        if not group or len(group) == mat_vec_several.MAX_MATRICES or len(types) > 2:
            group = open_ones[family] = []
            groups.append(group)
        group.append(product)
    for group in groups:
        routes = router is not None and any(product.out is router.logits for product in group)
        _multiply(b, op.x, group, router=router if routes else None)
    if router is not None:
        _launch_route(b, router, FEW_ROWS + 1)


def _to(b: CUDALowering, op: Op, out: Value, rows: int) -> dict[str, Slot]:
    """Return the slots of the format that an operation makes of its result, so many rows of it at once."""
    form = getattr(op, "format", "")
    if not form:
        return {}
    counters = b.counters(rows * -(-out.width // 256))
    return {"format": activations.KINDS.index(form), "quantized": b.made_activations(out, form), "counters": counters}


def _remade(b: CUDALowering, op: Op, out: Value, to: Mapping[str, Slot], by: Callable[[int], bool]) -> None:
    """Let another launch make the format where the operation's own, of so many tokens, does not (``by``)."""
    made = to.get("quantized")
    if isinstance(made, Buffer):
        b.remade(out, getattr(op, "format", ""), out.width, made, by)


def _up_gate(b: CUDALowering, op: UpGate) -> None:
    if b.backend.cublas:  # its products end in memory: three steps
        up, gate = (Value(f"{op.out.name} {part}", op.up.n_out, op.x.per, op.x.outputs) for part in ("up", "gate"))
        _multiply(b, op.x, [_Product(up, op.up, op.up_bias, op.up_scale)])
        _multiply(b, op.x, [_Product(gate, op.gate, op.gate_bias, op.gate_scale)])
        gated(b, op.activation, op.out, b.buffer(gate), gate.width, b.buffer(up))
        return
    to = _to(b, op, op.out, 1)
    _launch_up_gate(b, op, _up_gate_slots(b, op), to)
    _remade(b, op, op.out, to, lambda rows: rows == 1)


def _up_gate_slots(b: CUDALowering, op: UpGate) -> dict[str, Slot]:
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
    b: CUDALowering, op: UpGate, slots: Mapping[str, Slot], to: Mapping[str, Slot], first: int = 1
) -> None:
    """Multiply ``first`` rows or more; to: slots of the format that one row is brought to."""
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


def _mul_mat_heads(b: CUDALowering, op: MulMatHeads) -> None:
    """What a head gives lies beside the next one's, unless told otherwise."""
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
    """Return the slots that both kinds of products by expert have."""
    activations, stride = b.activations(x, weight)
    return {
        "out": b.buffer(out),
        "x": activations,
        "x_stride": stride,
        "x_per": ids.width if x.per == 1 else 1,
        "ids": b.buffer(ids),
        "plan": b.plan(ids, weight.n_matrices),
        "n_expert": weight.n_matrices,
        "n_used": ids.width,
        "row_bytes": row_bytes_of(weight),
        "n_in": weight.n_in,
        "n_out": weight.n_out,
    }


def _mul_mat_id(b: CUDALowering, op: MulMatId) -> None:
    _launch_mul_mat_id(b, op, _mul_mat_id_slots(b, op))


def _mul_mat_id_slots(b: CUDALowering, op: MulMatId) -> dict[str, Slot]:
    return {
        "w": b.weight(op.weight, op.ids),
        **_by_expert(b, op.out, op.x, op.ids, op.weight),
        "expert_bytes": expert_bytes_of(op.weight),
        "bias": b.vector(op.bias),
        "bias_stride": 4 * op.weight.n_out,
        "scale": b.vector(op.scale),
    }


def _launch_mul_mat_id(b: CUDALowering, op: MulMatId, slots: Mapping[str, Slot], first: int = 1) -> None:
    """Multiply the rows of ``first`` tokens or more."""
    t, n_in, n_out, n_used = op.weight.tensor.type, op.weight.n_in, op.weight.n_out, op.ids.width
    n_expert, card, cublas = op.weight.n_matrices, b.device.capability, cuda_cublas.by_cublas(b, op.weight)

    def choose(rows: int) -> Shape | None:
        if rows < first:
            return None
        if rows <= FEW_ROWS:
            return mat_vec.mul_mat_id(t, n_in, n_out, rows, n_used)
        return None if cublas else mat_mat.mul_mat_id(t, n_in, n_out, rows, n_used, n_expert, card)

    b.emit(choose, op.ids, **slots).weights = (op.weight,)
    if cublas:
        cuda_cublas.multiply_by_expert(b, op.x, op.ids, op.out, op.weight, slots["w"], op.bias, op.scale)


def _up_gate_id(b: CUDALowering, op: UpGateId) -> None:
    if b.backend.cublas:
        up, gate = (Value(f"{op.out.name} {part}", op.up.n_out, op.out.per, op.out.outputs) for part in ("up", "gate"))
        _mul_mat_id(b, MulMatId(out=up, x=op.x, weight=op.up, ids=op.ids, bias=op.up_bias, scale=op.up_scale))
        _mul_mat_id(b, MulMatId(out=gate, x=op.x, weight=op.gate, ids=op.ids, bias=op.gate_bias, scale=op.gate_scale))
        gated(b, op.activation, op.out, b.buffer(gate), gate.width, b.buffer(up))
        return
    to = _to(b, op, op.out, FEW_ROWS * op.ids.width)
    _launch_up_gate_id(b, op, _up_gate_id_slots(b, op), to)
    _remade(b, op, op.out, to, lambda rows: rows <= FEW_ROWS)


def _up_gate_id_slots(b: CUDALowering, op: UpGateId) -> dict[str, Slot]:
    return {
        "up": b.weight(op.up, op.ids),
        "gate": b.weight(op.gate, op.ids),
        **_by_expert(b, op.out, op.x, op.ids, op.up),
        "up_expert_bytes": expert_bytes_of(op.up),
        "gate_expert_bytes": expert_bytes_of(op.gate),
        "up_bias": b.vector(op.up_bias),
        "gate_bias": b.vector(op.gate_bias),
        "up_bias_stride": 4 * op.up.n_out,
        "gate_bias_stride": 4 * op.gate.n_out,
        "up_scale": b.vector(op.up_scale),
        "gate_scale": b.vector(op.gate_scale),
        **glu.limits(op.activation),
    }


def _launch_up_gate_id(
    b: CUDALowering, op: UpGateId, slots: Mapping[str, Slot], to: Mapping[str, Slot], first: int = 1
) -> None:
    """Multiply the rows of ``first`` tokens or more; to: slots of the format that few are brought to."""
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


def _route_slots(b: CUDALowering, op: Route) -> dict[str, Slot]:
    slots: dict[str, Slot] = {"ids": b.buffer(op.ids), "weights": b.buffer(op.weights), "logits": b.buffer(op.logits)}
    return {**slots, "bias": b.vector(op.bias), **route.route_block(op.routing)}


def _launch_route(b: CUDALowering, op: Route, first: int = 1) -> None:
    """Choose the experts of ``first`` tokens or more."""
    routing = op.routing
    b.emit(lambda rows: route.route(routing, rows) if rows >= first else None, op.logits, **_route_slots(b, op))


def _beside(b: CUDALowering, op: Beside) -> None:
    """Of one token together, of more by themselves."""
    if isinstance(op.by_expert, UpGateId) and isinstance(op.dense, UpGate):
        _up_gates_beside(b, op.by_expert, op.dense)
    elif isinstance(op.by_expert, MulMatId) and isinstance(op.dense, MulMat):
        _mul_mats_beside(b, op.by_expert, op.dense)


def _up_gates_beside(b: CUDALowering, op: UpGateId, dense: UpGate) -> None:
    n_used, units = op.ids.width, [-(-out.width // 256) for out in (op.out, dense.out)]
    of_experts, of_dense = _up_gate_id_slots(b, op), _up_gate_slots(b, dense)
    to, dense_to = _to(b, op, op.out, FEW_ROWS * n_used), _to(b, dense, dense.out, 1)
    names = ("x", "up", "gate", "row_bytes", "n_out", "out", "up_bias", "gate_bias", "up_scale", "gate_scale")
    both: dict[str, Slot] = {**of_experts, **{f"dense_{name}": of_dense[name] for name in names}}
    for prefix, slots in (("", to), ("dense_", dense_to)):
        both |= {f"{prefix}format": slots.get("format", -1), f"{prefix}quantized": slots.get("quantized", 0)}
    both["counters"] = b.counters(n_used * units[0] + units[1])
    types, sizes = (op.up.tensor.type, dense.up.tensor.type), (op.up.n_in, op.up.n_out, n_used, dense.up.n_out)
    one = mat_vec_beside.up_gate(*types, op.activation, *sizes)
    b.emit(lambda rows: one if rows == 1 else None, op.ids, **both).weights = (op.up, op.gate, dense.up, dense.gate)
    _launch_up_gate_id(b, op, of_experts, to, 2)
    _launch_up_gate(b, dense, of_dense, dense_to, 2)
    _remade(b, op, op.out, to, lambda rows: rows <= FEW_ROWS)
    _remade(b, dense, dense.out, dense_to, lambda rows: rows == 1)


def _mul_mats_beside(b: CUDALowering, op: MulMatId, dense: MulMat) -> None:
    product = _Product(dense.out, dense.weight, dense.bias, dense.scale)
    of_experts, of_dense = _mul_mat_id_slots(b, op), product.slots(b)
    x, _ = b.activations(dense.x, dense.weight)
    both: dict[str, Slot] = {**of_experts, **{f"dense_{name}": slot for name, slot in of_dense.items()}}
    both |= {"dense_x": x, "dense_row_bytes": row_bytes_of(dense.weight), "dense_n_in": dense.weight.n_in}
    types = op.weight.tensor.type, dense.weight.tensor.type
    one = mat_vec_beside.mul_mat(*types, op.weight.n_in, op.weight.n_out, op.ids.width, dense.weight.n_out)
    b.emit(lambda rows: one if rows == 1 else None, op.ids, **both).weights = (op.weight, dense.weight)
    _launch_mul_mat_id(b, op, of_experts, 2)
    _multiply(b, dense.x, [product], 2)


LOWER: Mapping[type[Op], Callable[[CUDALowering, Any], None]] = {
    MulMat: _mul_mat,
    MulMats: _mul_mats,
    MulMatsRoute: _mul_mats,
    Route: _launch_route,
    UpGate: _up_gate,
    UpGateTo: _up_gate,
    MulMatHeads: _mul_mat_heads,
    MulMatHeadsInto: _mul_mat_heads,
    MulMatHeadsTo: _mul_mat_heads,
    MulMatId: _mul_mat_id,
    UpGateId: _up_gate_id,
    UpGateIdTo: _up_gate_id,
    Beside: _beside,
}
