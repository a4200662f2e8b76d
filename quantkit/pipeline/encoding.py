"""The encoding of a tensor's rows (copy, repack or quantize; types, encoder, piece size), set once by the plan.

Checks, jobs, workers, GPUs, cache keys and reports read the record and do not look types up again. Each part of a
tensor has one: halves of merged experts may come from two types.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quantkit.formats.gguf import TensorInfo
from quantkit.kernels.formats import (
    FORMATS,
    INTERLEAVED_ENCODERS,
    SCALED,
    SYMMETRIC,
    encoder_for,
    has_decoder,
    has_encoder,
)
from quantkit.kernels.interleave import base_of, is_interleaved, repacks
from quantkit.kernels.levels import Grouping, all_levels
from quantkit.kernels.tensor_scale import decoded_as
from quantkit.pipeline.custom_encoder import CustomEncoder
from quantkit.pipeline.feedback import Inputs
from quantkit.types import TensorType

#: Values decoded and encoded at a time: 512 KiB of float32, half of a typical L2 cache.
PIECE = 1 << 17
#: Rows that are encoded together with feedback.
TILE = 64


class Action(Enum):
    """The action of a job on rows: it copies bytes, moves bits, or encodes values."""

    COPY = "copy"
    REPACK = "repack"
    ENCODE = "encode"


@dataclass(frozen=True, slots=True)
class RowEncoding:
    """The conversion of rows from one type to another."""

    source: TensorType
    target: TensorType
    action: Action
    #: Types of single rows in source and target: the base types of interleaved types.
    source_rows: TensorType
    target_rows: TensorType
    #: The type from which kernels decode the source, once each row contains its scale.
    decoder_type: TensorType
    #: The type that an encoder writes: single rows, which are then interleaved, or whole groups.
    encoder_type: TensorType
    #: The encoder, one of ``ENCODERS``, SYMMETRIC or SCALED; "" if nothing is encoded.
    encoder: str
    #: Whether it differs from the type's default encoder.
    is_unusual: bool
    #: The project whose encoder is used for ``encoder_type``, if the type has several; "": that of its own project.
    search: str
    #: Number of rows that must stay together.
    group: int
    #: Rows that are encoded at a time: whole groups.
    piece: int
    #: Whether levels are chosen with error feedback, or floats are corrected.
    has_feedback: bool
    #: Columns that share a level, for the metric of error feedback.
    grouping: Grouping | None
    #: Whether importance decides the bytes of ``encoder_type``.
    is_weighted: bool
    #: Whether the target has scales that must be finite.
    is_checked: bool
    #: Whether a copied tensor consists of rows alone; otherwise its bytes are copied unchanged.
    has_plain_rows: bool
    #: The function that this version lacks, with its type, such as "encoder for Q4_0"; "": none.
    missing: str
    #: A user's encoder, which replaces quantkit's.
    custom: CustomEncoder | None = None
    #: Whether blocks that lie on the target's grid are encoded exactly (lattice_rows.py).
    keeps_grid: bool = False

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the source stores a tensor scale after its last row."""
        return self.decoder_type is not self.source

    @property
    def is_interleaved(self) -> bool:
        """Whether the target interleaves rows that kernels encode one by one."""
        return self.target_rows is not self.target

    @property
    def is_cached(self) -> bool:
        """Whether the tensor cache may hold the rows: they are neither copied, nor repacked, nor merely rounded."""
        return self.action is Action.ENCODE and self.source is not self.target and self.target.block > 1


def whole_groups(rows: int, group: int) -> int:
    """Return ``rows`` rounded down to whole groups, at least one."""
    return max(group, rows // group * group)


def encoding_of(
    source: TensorInfo,
    target: TensorType,
    values: int,
    inputs: Inputs | None = None,
    encoder: str = "",
    custom: CustomEncoder | None = None,
    keep_grid: bool = False,
) -> RowEncoding:
    """Decide how rows of ``values`` values become rows of type ``target``.

    inputs: of rows encoded with feedback. encoder: the encoder, one of ``ENCODERS``, SYMMETRIC or SCALED; "" for
    the type's own. custom: a user's encoder of the type, instead of these. keep_grid: encode blocks on the type's grid
    exactly.
    """
    have, decoder_type = source.type, decoded_as(source.type)
    rows = base_of(target)
    action = _action(have, target, inputs)
    group = max(have.interleave, target.interleave)
    tile = 1 if inputs is None else TILE
    default = encoder_for(target) if action is Action.ENCODE else ""
    encoder = encoder_for(target, encoder) if default and encoder else default
    has_several = encoder == "ik" and rows.name in FORMATS and FORMATS[rows.name].ik_encoder
    levels = None if inputs is None else all_levels().get(target.name)
    return RowEncoding(
        source=have,
        target=target,
        action=action,
        source_rows=base_of(have),
        target_rows=rows,
        decoder_type=decoder_type,
        encoder_type=target if target.name in INTERLEAVED_ENCODERS else rows,
        encoder=encoder,
        is_unusual=encoder != default,
        search=encoder if encoder in (SYMMETRIC, SCALED) or has_several else "",
        group=group,
        piece=whole_groups(max(1, PIECE // max(1, values)), max(group, tile)),
        has_feedback=levels is not None or inputs is not None and not target.is_quantized,
        grouping=None if levels is None else levels.grouping,
        is_weighted=rows.imatrix != "ignored" or encoder == SCALED,
        is_checked=bool(rows.scales),
        has_plain_rows=action is Action.COPY and _has_plain_rows(source, decoder_type is not have),
        missing=_missing_function(target, decoder_type) if action is Action.ENCODE else "",
        custom=custom if action is Action.ENCODE else None,
        keeps_grid=keep_grid and action is Action.ENCODE and custom is None and inputs is None,
    )


def _action(source: TensorType, target: TensorType, inputs: Inputs | None) -> Action:
    if source is target and inputs is None:
        return Action.COPY
    return Action.REPACK if repacks(source, target) else Action.ENCODE


def _has_plain_rows(source: TensorInfo, has_tensor_scale: bool) -> bool:
    t = source.type
    in_rows = (t.interleave == 1 or is_interleaved(t)) and not has_tensor_scale
    return in_rows and t.tensor_bytes(source.shape) == source.nbytes


def _missing_function(target: TensorType, decoder_type: TensorType) -> str:
    if not has_encoder(target):
        return f"encoder for {target}"
    unreadable = next((t for t in (decoder_type, decoded_as(target)) if not has_decoder(t)), None)
    return "" if unreadable is None else f"decoder for {unreadable}"
