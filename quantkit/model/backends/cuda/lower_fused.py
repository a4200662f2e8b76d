"""Lowers the operations that fuse/ makes of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quantkit.kernels.cuda.layer import glu, norms, per_head, rope, row_epilogue
from quantkit.kernels.cuda.matmul import activations
from quantkit.model.backends.arena import Slot, Within
from quantkit.model.backends.cuda.fuse.column_trace import ColumnChain, Columns
from quantkit.model.backends.cuda.fuse.per_head import PerHead, Target
from quantkit.model.backends.cuda.fuse.row_epilogue import RowEpilogue
from quantkit.model.ops import Norm, Op, Value

if TYPE_CHECKING:
    from quantkit.model.backends.cuda.lowering import CUDALowering


def _norm(b: CUDALowering, op: Norm | None, prefix: str) -> dict[str, Slot]:
    if op is None:
        return {}
    vectors = b.norm_vectors(op)
    slots: dict[str, Slot] = {"kind": norms.KINDS.index(op.kind), "eps": op.eps}
    slots |= {name: vectors[name] for name in ("weight", "bias")}
    return {f"{prefix}{name}": slot for name, slot in slots.items()}


def _row_epilogue(b: CUDALowering, op: RowEpilogue) -> None:
    def place(value: Value | None, *, written: bool = True) -> Slot:
        return 0 if value is None or not written else b.buffer(value)

    slots: dict[str, Slot] = {
        **row_epilogue.NOTHING,
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
        slots |= {"format": row_epilogue.format_of(op.format), "quantized": b.made_activations(op.last, op.format)}
    width = op.last.width
    entry = b.emit(lambda rows: row_epilogue.row_epilogue(width, rows), op.last, width=width, **slots)
    # A lane reads all of its columns before it writes them.
    first = next((value for value in (op.y, op.z) if value in op.plain), None)
    source = op.plus_too or op.plus or (op.x if not op.n_used else None)
    if first is not None and source is not None and not op.selected:
        b.may_overwrite(entry, first, source)


def _place(columns: Columns, prefix: str = "") -> dict[str, Slot]:
    return {f"{prefix}each": columns.each, f"{prefix}step": columns.step}


def _at(b: CUDALowering, value: Value, start: int) -> Slot:
    return Within(b.buffer(value), 4 * start) if start else b.buffer(value)


def _steps(b: CUDALowering, chain: ColumnChain) -> dict[str, Slot]:
    """Return the slots of a chain's steps."""
    slots: dict[str, Slot] = {}
    if chain.by is not None:
        slots |= {"by": b.buffer(chain.by), "repeat": chain.by.width}
    for name, matrix in (("plus", chain.plus), ("times", chain.times)):
        if matrix is not None:
            slots |= {name: b.vector(matrix), f"n_{name}": len(b.vector_values(matrix))}
    if chain.activation is not None:
        slots["activation"] = glu.ACTIVATIONS[chain.activation.kind]
    if chain.norm is not None:
        slots |= {"norm": chain.when, "kind": norms.KINDS.index(chain.norm.kind), "group": chain.norm.group}
        slots |= {"eps": chain.norm.eps, **b.norm_vectors(chain.norm)}
    if chain.rope is not None:
        config = chain.rope.config
        slots |= {"table": b.buffer(chain.rope.table), "head": chain.head, "start": chain.rope_start}
        slots |= {"n_rot": config.n_rot, "neox": rope.KINDS.index(config.kind)}
    if chain.by_position is not None:
        slots |= {name: float(getattr(chain.by_position, name)) for name in ("floor_scale", "alpha", "offset")}
    if chain.gate is not None and chain.gating is not None:
        slots |= {"gating": glu.ACTIVATIONS[chain.gating.kind], "gate": _at(b, chain.gate, chain.gate_columns.start)}
        slots |= {"gate_stride": chain.gate.width, **_place(chain.gate_columns, "gate_")}
    return slots


def _ends(b: CUDALowering, target: Target, chain: ColumnChain) -> dict[str, Slot]:
    """Return the slots of a chain's targets."""
    slots: dict[str, Slot] = {}
    if target.cache is not None:
        keys, values, _ = b.cache(target.cache)
        slots |= {"cache": keys if target.keys else values, "cache_start": chain.to.start, **_place(chain.to, "cache_")}
        slots["cache_width"] = target.cache.k_width if target.keys else target.cache.v_width
    if target.plain:
        slots |= {
            "out": _at(b, target.value, chain.to.start),
            "out_stride": target.value.width,
            **_place(chain.to, "out_"),
        }
    if target.format:
        slots |= {
            "quantized": b.made_activations(target.value, target.format, target.q_width),
            "q_width": target.q_width,
        }
        slots["format"] = activations.KINDS.index(target.format)
    return slots


def _per_head(b: CUDALowering, op: PerHead) -> None:
    some: list[dict[str, Slot]] = []
    for (target, chain), n in zip(op.chains, op.piece_widths, strict=True):
        slots: dict[str, Slot] = {"width": chain.columns.width, "n": n, "x": _at(b, chain.x, chain.columns.start)}
        slots |= {"stride": chain.x.width, **_place(chain.columns), **_steps(b, chain), **_ends(b, target, chain)}
        some.append(slots)
    kind, sizes = (
        b.limits.kv_type,
        [(chain.columns.width, n) for (_, chain), n in zip(op.chains, op.piece_widths, strict=True)],
    )
    b.emit(lambda rows: per_head.per_head(kind, rows, sizes), op.chains[0][0].value, **per_head.slots(some))


LOWER: Mapping[type[Op], Callable[[CUDALowering, Any], None]] = {RowEpilogue: _row_epilogue, PerHead: _per_head}
