"""The operations of cuda_joins.py as launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quantkit.kernels.cuda import heads, norms, rope, stage
from quantkit.model.backends.arena import Slot, Within
from quantkit.model.backends.cuda_joins import Heads, Part, Stage
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
    if first is not None and source is not None:
        b.may_overwrite(entry, first, source)


def _part(b: CUDALowering, part: Part, name: str) -> dict[str, Slot]:
    """Return the slots of some heads."""
    x = b.buffer(part.x)
    slots: dict[str, Slot] = {name: Within(x, 4 * part.start) if part.start else x}
    slots |= {f"{name}_stride": part.x.width, f"{name}_step": part.step}
    if part.norm is not None:
        vectors = b.norm_vectors(part.norm)
        slots |= {f"{name}_{slot}": vectors[slot] for slot in ("weight", "bias", "n_weight")}
        slots |= {f"{name}_norm": part.when, "kind": norms.KINDS.index(part.norm.kind), "eps": part.norm.eps}
    if part.rope is not None:
        config = part.rope.config
        slots |= {f"{name}_turn": 1, "neox": rope.KINDS.index(config.kind), "n_rot": config.n_rot}
        slots |= {"start": part.rope.start, "table": b.buffer(part.rope.table)}
    return slots


def _heads(b: CUDALowering, op: Heads) -> None:
    keys, values, kind = b.cache(op.cache)
    attention = op.attention
    counts = attention.n_head if op.q is not None else 0, attention.n_head_kv, attention.n_head_kv
    slots: dict[str, Slot] = {
        **heads.NOTHING,
        **_part(b, op.v, "v"),
        **_part(b, op.k, "k"),
        **({} if op.q is None else _part(b, op.q, "q")),
        "q_heads": counts[0],
        "k_heads": counts[1],
        "v_heads": counts[2],
        "q_out": 0 if op.q_out is None else b.buffer(op.q_out),
        "k_out": 0 if op.k_out is None else b.buffer(op.k_out),
        "k_cache": keys,
        "v_cache": values,
        "head": attention.head_k,
        "v_head": attention.head_v,
    }
    longest = max(attention.head_k, attention.head_v)
    b.emit(lambda rows: heads.heads(kind, rows, sum(counts), longest), op.k_x, **slots)


LOWER: Mapping[type[Op], Callable[[CUDALowering, Any], None]] = {Stage: _stage, Heads: _heads}
