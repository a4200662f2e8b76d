"""The operations of cuda_joins.py as launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quantkit.kernels.cuda import activations, glu, norms, parts, rope, stage
from quantkit.model.backends.arena import Slot, Within
from quantkit.model.backends.cuda_parts import Goal, Parts
from quantkit.model.backends.cuda_stages import Stage
from quantkit.model.backends.cuda_trace import Columns, Part
from quantkit.model.ops import Norm, Op, Value

if TYPE_CHECKING:
    from quantkit.model.backends.cuda_lowering import CUDALowering


def _norm(b: CUDALowering, op: Norm | None, prefix: str) -> dict[str, Slot]:
    if op is None:
        return {}
    vectors = b.norm_vectors(op)
    slots: dict[str, Slot] = {"kind": norms.KINDS.index(op.kind), "eps": op.eps}
    slots |= {name: vectors[name] for name in ("weight", "bias")}
    return {f"{prefix}{name}": slot for name, slot in slots.items()}


def _stage(b: CUDALowering, op: Stage) -> None:
    def place(value: Value | None, *, written: bool = True) -> Slot:
        return 0 if value is None or not written else b.buffer(value)

    slots: dict[str, Slot] = {
        **stage.NOTHING,
        "x": b.buffer(op.x),
        "weights": place(op.weights),
        "n_used": op.n_used,
        "plus": place(op.plus),
        "plus_too": place(op.plus_too),
        "gate": place(op.gate),
        "selected": int(op.selected),
        "by": op.by,
        "sum": place(op.y, written=op.y in op.plain),
        "normed": place(op.z, written=op.z in op.plain),
        **_norm(b, op.post, "post_"),
        **_norm(b, op.norm, ""),
    }
    if op.format:
        slots |= {"format": stage.format_of(op.format), "quantized": b.made_activations(op.last, op.format)}
    width = op.last.width
    entry = b.emit(lambda rows: stage.stage(width, rows), op.last, width=width, **slots)
    # A lane reads all of its columns before it writes them.
    first = next((value for value in (op.y, op.z) if value in op.plain), None)
    source = op.plus_too or op.plus or (op.x if not op.n_used else None)
    if first is not None and source is not None and not op.selected:
        b.may_overwrite(entry, first, source)


def _place(columns: Columns, prefix: str = "") -> dict[str, Slot]:
    return {f"{prefix}each": columns.each, f"{prefix}step": columns.step}


def _at(b: CUDALowering, value: Value, start: int) -> Slot:
    return Within(b.buffer(value), 4 * start) if start else b.buffer(value)


def _steps(b: CUDALowering, part: Part) -> dict[str, Slot]:
    """Return the slots of what happens to a part."""
    slots: dict[str, Slot] = {}
    if part.by is not None:
        slots |= {"by": b.buffer(part.by), "repeat": part.by.width}
    for name, matrix in (("plus", part.plus), ("times", part.times)):
        if matrix is not None:
            slots |= {name: b.vector(matrix), f"n_{name}": len(b.vector_values(matrix))}
    if part.activation is not None:
        slots["activation"] = glu.ACTIVATIONS[part.activation.kind]
    if part.norm is not None:
        slots |= {"norm": part.when, "kind": norms.KINDS.index(part.norm.kind), "group": part.norm.group}
        slots |= {"eps": part.norm.eps, **b.norm_vectors(part.norm)}
    if part.rope is not None:
        config = part.rope.config
        slots |= {"table": b.buffer(part.rope.table), "head": part.head, "start": part.rope_start}
        slots |= {"n_rot": config.n_rot, "neox": rope.KINDS.index(config.kind)}
    if part.by_position is not None:
        slots |= {name: float(getattr(part.by_position, name)) for name in ("floor_scale", "alpha", "offset")}
    if part.gate is not None and part.gating is not None:
        slots |= {"gating": glu.ACTIVATIONS[part.gating.kind], "gate": _at(b, part.gate, part.gate_columns.start)}
        slots |= {"gate_stride": part.gate.width, **_place(part.gate_columns, "gate_")}
    return slots


def _ends(b: CUDALowering, goal: Goal, part: Part) -> dict[str, Slot]:
    """Return the slots of where a part goes."""
    slots: dict[str, Slot] = {}
    if goal.cache is not None:
        keys, values, _ = b.cache(goal.cache)
        slots |= {"cache": keys if goal.keys else values, "cache_start": part.to.start, **_place(part.to, "cache_")}
        slots["cache_width"] = goal.cache.k_width if goal.keys else goal.cache.v_width
    if goal.plain:
        slots |= {"out": _at(b, goal.value, part.to.start), "out_stride": goal.value.width, **_place(part.to, "out_")}
    if goal.format:
        slots |= {"quantized": b.made_activations(goal.value, goal.format, goal.q_width), "q_width": goal.q_width}
        slots["format"] = activations.KINDS.index(goal.format)
    return slots


def _parts(b: CUDALowering, op: Parts) -> None:
    some: list[dict[str, Slot]] = []
    for (goal, part), n in zip(op.parts, op.cuts, strict=True):
        slots: dict[str, Slot] = {"width": part.columns.width, "n": n, "x": _at(b, part.x, part.columns.start)}
        slots |= {"stride": part.x.width, **_place(part.columns), **_steps(b, part), **_ends(b, goal, part)}
        some.append(slots)
    kind, sizes = b.limits.kv_type, [(part.columns.width, n) for (_, part), n in zip(op.parts, op.cuts, strict=True)]
    b.emit(lambda rows: parts.parts(kind, rows, sizes), op.parts[0][0].value, **parts.slots(some))


LOWER: Mapping[type[Op], Callable[[CUDALowering, Any], None]] = {Stage: _stage, Parts: _parts}
