"""How rows of a source tensor become rows of the output, decided once, when the tensor is planned.

Checks, jobs, workers, GPUs, cache keys and reports read the record and do not look types up again. Each part of a
tensor has one: halves of merged experts may come from two types.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quantkit.formats.gguf import TensorInfo
from quantkit.kernels.formats import FORMATS, INTERLEAVED_ENCODERS, SYMMETRIC, encoder_for, has_decoder, has_encoder
from quantkit.kernels.interleave import base_of, is_interleaved, repacks
from quantkit.kernels.levels import Grouping, all_levels
from quantkit.kernels.tensor_scale import decoded_as
from quantkit.pipeline.feedback import Inputs
from quantkit.types import TensorType

#: Values decoded and encoded at a time: 512 KiB of float32, half of a typical L2 cache.
PIECE = 1 << 17
#: Rows that are encoded together with feedback.
TILE = 64


class Action(Enum):
    """What a job does with rows: their bytes are copied, their bits move, or their values are encoded."""

    COPY = "copy"
    REPACK = "repack"
    ENCODE = "encode"


@dataclass(frozen=True, slots=True)
class RowEncoding:
    """The way of rows from one type to another."""

    source: TensorType
    target: TensorType
    action: Action
    #: Types of the single rows that source and target hold: their base types if they are interleaved.
    source_rows: TensorType
    target_rows: TensorType
    #: The type as which kernels decode the source, once its scale is in each row.
    decoded: TensorType
    #: The type that an encoder writes: single rows, which are then interleaved, or whole groups.
    encoded: TensorType
    #: Whose search encodes, one of ``ENCODERS`` or SYMMETRIC; "" if nothing is encoded.
    encoder: str
    #: Whether the type's own encoder is another.
    is_unusual: bool
    #: Whose search encodes ``encoded``, if that type has several; "": that of its own tree.
    search: str
    #: Rows that stay together, and rows that are encoded at a time: whole groups.
    group: int
    piece: int
    #: With inputs: whether levels are chosen with error feedback, or floats corrected; columns that share a level.
    has_feedback: bool
    grouping: Grouping | None
    #: Whether importance decides the bytes of ``encoded``, and whether the target has scales that must be finite.
    is_weighted: bool
    is_checked: bool
    #: Whether a copied tensor consists of rows alone; otherwise its bytes are copied as they lie.
    has_plain_rows: bool
    #: The function that this version lacks, "encoder" or "decoder"; "": none.
    missing: str

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the scale of the source lies behind its last row."""
        return self.decoded is not self.source

    @property
    def is_interleaved(self) -> bool:
        """Whether the target interleaves rows that kernels make one by one."""
        return self.target_rows is not self.target

    @property
    def is_cached(self) -> bool:
        """Whether the tensor cache may hold the rows: they are neither copied, nor repacked, nor merely rounded."""
        return self.action is Action.ENCODE and self.source is not self.target and self.target.block > 1


def whole_groups(rows: int, group: int) -> int:
    """Return ``rows`` rounded down to whole groups, at least one."""
    return max(group, rows // group * group)


def encoding_of(
    source: TensorInfo, target: TensorType, values: int, inputs: Inputs | None = None, encoder: str = ""
) -> RowEncoding:
    """Decide how rows of ``values`` values become rows of type ``target``.

    inputs: of rows that are encoded with feedback. encoder: whose search, one of ``ENCODERS`` or SYMMETRIC; "" for the
    type's own.
    """
    have, rows, decoded = source.type, base_of(target), decoded_as(source.type)
    action = _action(have, target, inputs)
    group, tile = max(have.interleave, target.interleave), 1 if inputs is None else TILE
    usual = encoder_for(target) if action is Action.ENCODE else ""
    chosen = encoder_for(target, encoder) if usual and encoder else usual
    has_several = chosen == "ik" and rows.name in FORMATS and FORMATS[rows.name].ik_encoder
    levels = None if inputs is None else all_levels().get(target.name)
    return RowEncoding(
        source=have,
        target=target,
        action=action,
        source_rows=base_of(have),
        target_rows=rows,
        decoded=decoded,
        encoded=target if target.name in INTERLEAVED_ENCODERS else rows,
        encoder=chosen,
        is_unusual=chosen != usual,
        search=chosen if chosen == SYMMETRIC or has_several else "",
        group=group,
        piece=whole_groups(max(1, PIECE // max(1, values)), max(group, tile)),
        has_feedback=levels is not None or inputs is not None and not target.is_quantized,
        grouping=None if levels is None else levels.grouping,
        is_weighted=rows.imatrix != "ignored",
        is_checked=bool(rows.scales),
        has_plain_rows=action is Action.COPY and _has_plain_rows(source, decoded is not have),
        missing=_missing_function(target, decoded) if action is Action.ENCODE else "",
    )


def _action(source: TensorType, target: TensorType, inputs: Inputs | None) -> Action:
    if source is target and inputs is None:
        return Action.COPY
    return Action.REPACK if repacks(source, target) else Action.ENCODE


def _has_plain_rows(source: TensorInfo, has_tensor_scale: bool) -> bool:
    t = source.type
    in_rows = (t.interleave == 1 or is_interleaved(t)) and not has_tensor_scale
    return in_rows and t.tensor_bytes(source.shape) == source.nbytes


def _missing_function(target: TensorType, decoded: TensorType) -> str:
    if not has_encoder(target):
        return "encoder"
    return "" if has_decoder(decoded) else "decoder"
