"""Lowering of the operations that fuse/ produces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quantkit.kernels.cuda.layer import glu, norms_rope, per_head, row_epilogue
from quantkit.kernels.cuda.matmul import activations
from quantkit.model.backends.arena import BufferOffset, Slot
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
    slots: dict[str, Slot] = {"kind": norms_rope.NORM_KINDS.index(op.kind), "eps": op.eps}
    slots |= {name: vectors[name] for name in ("weight", "bias")}
    return {f"{prefix}{name}": slot for name, slot in slots.items()}


def _row_epilogue(b: CUDALowering, op: RowEpilogue) -> None:
    def slot(value: Value | None, *, stored: bool = True) -> Slot:
        return 0 if value is None or not stored else b.buffer(value)

    slots: dict[str, Slot] = {
        **row_epilogue.NOTHING,
        "x": b.buffer(op.x),
        "weights": slot(op.weights),
        "n_used": op.n_used,
        "plus": slot(op.addend),
        "plus_too": slot(op.residual),
        "gate": slot(op.gate),
        "selected": int(op.selected),
        "by": op.scale,
        "sum": slot(op.sum_value, stored=op.sum_value in op.plain),
        "normed": slot(op.normed_value, stored=op.normed_value in op.plain),
        **_norm(b, op.post_norm, "post_"),
        **_norm(b, op.norm, ""),
    }
    if op.format:
        slots |= {"format": row_epilogue.format_of(op.format), "quantized": b.activation_buffer(op.last, op.format)}
    width = op.last.width
    entry = b.emit(lambda rows: row_epilogue.row_epilogue(width, rows), op.last, width=width, **slots)
    # A lane reads all its columns before it writes them.
    first = next((value for value in (op.sum_value, op.normed_value) if value in op.plain), None)
    source = op.residual or op.addend or (op.x if not op.n_used else None)
    if first is not None and source is not None and not op.selected:
        b.may_overwrite(entry, first, source)


def _column_slots(columns: Columns, prefix: str = "") -> dict[str, Slot]:
    return {f"{prefix}each": columns.chunk, f"{prefix}step": columns.stride}


def _offset_slot(b: CUDALowering, value: Value, start: int) -> Slot:
    return BufferOffset(b.buffer(value), 4 * start) if start else b.buffer(value)


def _step_slots(b: CUDALowering, chain: ColumnChain) -> dict[str, Slot]:
    """Return the slots of a chain's steps."""
    slots: dict[str, Slot] = {}
    if chain.row_weights is not None:
        slots |= {"by": b.buffer(chain.row_weights), "repeat": chain.row_weights.width}
    for name, matrix in (("plus", chain.bias), ("times", chain.scale)):
        if matrix is not None:
            slots |= {name: b.vector(matrix), f"n_{name}": len(b.vector_values(matrix))}
    if chain.activation is not None:
        slots["activation"] = glu.ACTIVATIONS[chain.activation.kind]
    if chain.norm is not None:
        slots |= {
            "norm": chain.norm_step,
            "kind": norms_rope.NORM_KINDS.index(chain.norm.kind),
            "group": chain.norm.group,
        }
        slots |= {"eps": chain.norm.eps, **b.norm_vectors(chain.norm)}
    if chain.rope is not None:
        config = chain.rope.config
        slots |= {"table": b.buffer(chain.rope.table), "head": chain.head, "start": chain.rope_start}
        slots |= {"n_rot": config.n_rot, "neox": norms_rope.ROPE_KINDS.index(config.kind)}
    if chain.by_position is not None:
        slots |= {name: float(getattr(chain.by_position, name)) for name in ("floor_scale", "alpha", "offset")}
    if chain.gate is not None and chain.gating is not None:
        slots |= {
            "gating": glu.ACTIVATIONS[chain.gating.kind],
            "gate": _offset_slot(b, chain.gate, chain.gate_columns.start),
        }
        slots |= {"gate_stride": chain.gate.width, **_column_slots(chain.gate_columns, "gate_")}
    return slots


def _target_slots(b: CUDALowering, target: Target, chain: ColumnChain) -> dict[str, Slot]:
    """Return the slots of a chain's targets."""
    slots: dict[str, Slot] = {}
    if target.cache is not None:
        keys, values, _ = b.cache(target.cache)
        slots |= {
            "cache": keys if target.keys else values,
            "cache_start": chain.out_columns.start,
            **_column_slots(chain.out_columns, "cache_"),
        }
        slots["cache_width"] = target.cache.k_width if target.keys else target.cache.v_width
    if target.plain:
        slots |= {
            "out": _offset_slot(b, target.value, chain.out_columns.start),
            "out_stride": target.value.width,
            **_column_slots(chain.out_columns, "out_"),
        }
    if target.format:
        slots |= {
            "quantized": b.activation_buffer(target.value, target.format, target.q_width),
            "q_width": target.q_width,
        }
        slots["format"] = activations.KINDS.index(target.format)
    return slots


def _per_head(b: CUDALowering, op: PerHead) -> None:
    chain_slots: list[dict[str, Slot]] = []
    for (target, chain), n in zip(op.chains, op.piece_widths, strict=True):
        slots: dict[str, Slot] = {
            "width": chain.columns.width,
            "n": n,
            "x": _offset_slot(b, chain.x, chain.columns.start),
        }
        slots |= {
            "stride": chain.x.width,
            **_column_slots(chain.columns),
            **_step_slots(b, chain),
            **_target_slots(b, target, chain),
        }
        chain_slots.append(slots)
    kind, sizes = (
        b.limits.kv_type,
        [(chain.columns.width, n) for (_, chain), n in zip(op.chains, op.piece_widths, strict=True)],
    )
    b.emit(lambda rows: per_head.per_head(kind, rows, sizes), op.chains[0][0].value, **per_head.slots(chain_slots))


LOWER: Mapping[type[Op], Callable[[CUDALowering, Any], None]] = {RowEpilogue: _row_epilogue, PerHead: _per_head}
