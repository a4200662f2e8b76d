"""Fusion of operations: the switches, and every decision with its reason.

``fuse`` rewrites a graph's list: gate, up and activation become one operation (dense layers, shared experts, experts,
merged or not), and matrices that read the same value become one pass (q, k and v). Backends may then fuse operations
into launches (backends/registry.py); these have the same switches and decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from quantkit.model.ops import Glu, Graph, Matrix, MulMat, MulMatId, MulMats, Op, UpGate, UpGateId, Value

#: Reasons that are the user's choice.
SWITCHED_OFF, CUBLAS = "switched off", "--cublas uses rows of bf16"

#: The kinds of fusion: of graphs, then of launches.
KINDS = {
    "up_gate": "up+gate",
    "moe": "MoE up+gate",
    "qkv": "q/k/v",
    "route": "router and selection",
    "per_head": "per-head operations",
    "row_epilogue": "row epilogues",
    "format": "activation formats",
    "shared_expert": "shared experts",
}


@dataclass(frozen=True)
class Fusion:
    """The switches: ``up_gate`` of dense layers, ``moe``, ``qkv``, and ``launches`` of a backend."""

    up_gate: bool = True
    moe: bool = True
    qkv: bool = True
    launches: bool = True

    @staticmethod
    def none() -> Fusion:
        """Return all switches off."""
        return Fusion(False, False, False, False)

    def for_observers(self) -> Fusion:
        """Return the switches of a run that observes activations: off where fusion hides them."""
        return replace(self, up_gate=False, moe=False, qkv=False)


@dataclass(frozen=True)
class Decision:
    """A decision for one place: kind (of KINDS), layer, and the reason if it is not fused."""

    kind: str
    layer: int
    fused: bool
    reason: str = ""

    @property
    def by_user(self) -> bool:
        """Whether the reason is the user's choice."""
        return self.reason in (SWITCHED_OFF, CUBLAS)


class Decisions(list[Decision]):
    """A list of decisions."""

    def decide(self, kind: str, layer: int, reason: str = "") -> bool:
        """Append a decision; ``reason``: why not to fuse. Return whether there is no reason."""
        self.append(Decision(kind, layer, not reason, reason))
        return not reason


#: Returns the device of an operation; only operations of one device are fused.
DeviceOf = Callable[[Op], str]


def fuse(graph: Graph, fusion: Fusion, device_of: DeviceOf = lambda op: "CPU") -> tuple[Graph, tuple[Decision, ...]]:
    """Return the graph with all fusions that the switches, types and devices allow, and every decision."""
    decisions = Decisions()
    ops = _fuse_gates(list(graph.ops), graph.leaves, fusion, device_of, decisions)
    ops = _fuse_same_input(ops, fusion, device_of, decisions)
    return replace(graph, ops=tuple(ops)), tuple(decisions)


def summary(decisions: Sequence[Decision]) -> list[str]:
    """Return a line for each kind: the number of fused layers, and reasons of the others."""
    lines = []
    for kind, name in KINDS.items():
        of_kind = [d for d in decisions if d.kind == kind]
        if not of_kind:
            continue
        reasons: dict[str, int] = {}
        for d in of_kind:
            if not d.fused:
                reasons[d.reason] = reasons.get(d.reason, 0) + 1
        text = "; ".join(f"{n} not: {reason}" for reason, n in reasons.items())
        n_fused = sum(d.fused for d in of_kind)
        lines.append(f"fused {name}: {n_fused} of {len(of_kind)}{f' ({text})' if text else ''}")
    return lines


def _fuse_gates(
    ops: list[Op], leaves: Sequence[Value], fusion: Fusion, device_of: DeviceOf, decisions: Decisions
) -> list[Op]:
    producers = {value: op for op in ops for value in op.outputs()}
    readers = Counter(leaves)
    for op in ops:
        readers.update(op.inputs())
    removed: set[int] = set()
    fused: dict[int, Op] = {}
    for op in ops:
        if not isinstance(op, Glu) or (op.up is not None and op.gate.width < op.up.width):
            continue
        parts = [producers.get(v) for v in (op.gate, op.up) if v is not None]
        kind = _kind(parts)
        if kind is None:
            continue
        on = fusion.moe if kind == "moe" else fusion.up_gate
        reason = SWITCHED_OFF if not on else _obstacle(op, parts, readers, device_of)
        if decisions.decide(kind, op.layer, reason):
            fused[id(op)] = _fuse_gate(op, parts)
            removed.update(id(part) for part in parts)
    return [fused.get(id(op), op) for op in ops if id(op) not in removed]


def _kind(parts: Sequence[Op | None]) -> str | None:
    if all(isinstance(part, MulMatId) for part in parts):
        return "moe"
    # Dense tensors that contain gate and up are already one multiplication; products of two inputs cannot be fused.
    dense = [part for part in parts if isinstance(part, MulMat)]
    return "up_gate" if len(dense) == len(parts) == 2 and dense[0].x is dense[1].x else None


def _obstacle(glu: Glu, parts: Sequence[Op | None], readers: Mapping[Value, int], device_of: DeviceOf) -> str:
    """Return the reason why these cannot be fused; "" if they can."""
    products = [part for part in parts if isinstance(part, MulMat | MulMatId)]
    if len({(part.x, getattr(part, "ids", None)) for part in products}) > 1:
        return "gate and up read different inputs"
    if any(readers[part.out] > 1 for part in products):
        return "another operation also reads gate or up"
    types = [part.weight.tensor.type.name for part in products]
    devices = {device_of(part) for part in products} | {device_of(glu)}
    # Only the CPU fuses dense matrices of two types.
    if len(set(types)) > 1 and (isinstance(products[0], MulMatId) or any(d.startswith("CUDA") for d in devices)):
        return f"gate is {types[0]}, up {types[1]}"
    if len(products) == 2 and products[0].weight.n_out != products[1].weight.n_out:
        return "gate and up differ in size"
    if len(devices) > 1:
        return f"gate and up are on {' and '.join(sorted(devices))}"
    return ""


def _fuse_gate(glu: Glu, parts: Sequence[Op | None]) -> Op:
    products = [part for part in parts if isinstance(part, MulMat | MulMatId)]
    gate, up = products[0], products[-1]
    gate_weight, up_weight = gate.weight, up.weight
    gate_bias, up_bias = gate.bias, up.bias
    if len(products) == 1:
        half = gate.weight.n_out // 2
        gate_weight = Matrix(gate.weight.tensor, (0, half))
        up_weight = Matrix(gate.weight.tensor, (half, 2 * half))
        if gate.bias is not None:
            gate_bias = Matrix(gate.bias.tensor, columns=(0, half))
            up_bias = Matrix(gate.bias.tensor, columns=(half, 2 * half))
    common = {
        "layer": glu.layer,
        "out": glu.out,
        "x": gate.x,
        "gate": gate_weight,
        "up": up_weight,
        "gate_bias": gate_bias,
        "up_bias": up_bias,
        "gate_scale": gate.scale,
        "up_scale": up.scale,
        "activation": glu.activation,
    }
    if isinstance(gate, MulMatId):
        return UpGateId(ids=gate.ids, **common)  # type: ignore[arg-type]
    return UpGate(**common)  # type: ignore[arg-type]


def _fuse_same_input(ops: list[Op], fusion: Fusion, device_of: DeviceOf, decisions: Decisions) -> list[Op]:
    """Replace neighbouring products of one value by one operation."""
    out: list[Op] = []
    index = 0
    while index < len(ops):
        run = _same_input_run(ops, index)
        if len(run) < 2:
            out.append(ops[index])
            index += 1
            continue
        devices = {device_of(op) for op in run}
        reason = "" if fusion.qkv else SWITCHED_OFF
        if not reason and len(devices) > 1:
            reason = f"its matrices are on {' and '.join(sorted(devices))}"
        out += [merge_products(run)] if decisions.decide("qkv", run[0].layer, reason) else run
        index += len(run)
    return out


def _same_input_run(ops: Sequence[Op], index: int) -> list[MulMat]:
    run: list[MulMat] = []
    for op in ops[index:]:
        if not isinstance(op, MulMat) or (run and op.x is not run[0].x):
            break
        run.append(op)
    return run


def merge_products(run: Sequence[MulMat]) -> MulMats:
    """Return products of one value as one operation."""
    return MulMats(
        layer=run[0].layer,
        outs=tuple(op.out for op in run),
        x=run[0].x,
        weights=tuple(op.weight for op in run),
        biases=tuple(op.bias for op in run),
        scales=tuple(op.scale for op in run),
    )
