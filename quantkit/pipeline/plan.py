"""The plan: all decisions about an output, made before its first byte is written.

The type of each tensor and its reason, the header, every offset, the exact size of every shard. A dry run only prints
the plan; a run executes it without further decisions.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError, ResourceError, TypeNotSupported
from quantkit.formats.gguf import (
    Field,
    GGUFFile,
    Layout,
    layout_gguf,
    parse_split_path,
    split_fields,
    split_path,
)
from quantkit.formats.gguf.header import padding_field
from quantkit.formats.gguf.reader import read_shard
from quantkit.formats.gguf.rules import PADDING_KEY, n_dims
from quantkit.formats.remote import URL
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.kernels.tensor_scale import check_rows
from quantkit.names import span
from quantkit.pipeline.custom_encoder import CustomEncoder
from quantkit.pipeline.row_slices import PlannedPart, PlannedTensor, RowSlice, plan_part
from quantkit.pipeline.source import Source
from quantkit.types import TensorType
from quantkit.units import format_size


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the output, not yet placed: its source rows, its type, and the reason for the type."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    reason: str
    parts: tuple[RowSlice, ...]
    fallback_from: TensorType | None = None
    #: Its encoder: see ``PlannedTensor``.
    encoder: str = ""
    #: A user's encoder instead.
    custom: CustomEncoder | None = None
    #: Whether blocks that lie on the type's grid are encoded exactly.
    keeps_grid: bool = False

    @property
    def nbytes(self) -> int:
        return self.type.tensor_bytes(self.shape)

    @property
    def is_whole(self) -> bool:
        """True if it is one whole tensor of the source."""
        return len(self.parts) == 1 and self.parts[0].is_whole

    def planned_parts(self) -> tuple[PlannedPart, ...]:
        """Decide how each part is encoded."""
        return tuple(plan_part(part, self.type, self.encoder, self.custom, self.keeps_grid) for part in self.parts)


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One file of the output: its final path and its layout."""

    path: Path
    layout: Layout


@dataclass(frozen=True)
class Plan(HtmlTable):
    """A whole output: ``tensors`` in the order of writing, ``notes`` for the user."""

    source: Source
    title: str
    shards: tuple[PlannedShard, ...]
    tensors: tuple[PlannedTensor, ...]
    notes: tuple[str, ...]
    #: Identifies source, output and everything that decides the bytes; --resume requires the same one.
    fingerprint: str
    #: Other files that the plan was made from: importance matrix, rules.
    reads: tuple[Path, ...] = ()
    #: The project whose rules chose the types, "mainline" or "ik"; "" if none.
    rules: str = ""
    #: Executor factory for plans with dependent jobs (--calibrate); None: any executor.
    executor: Callable[[Any], Any] | None = None
    #: The metadata of the output, in order.
    fields: tuple[Field, ...] = ()
    #: Tensors encoded without feedback in a plan with feedback, and the reasons.
    without_feedback: tuple[tuple[str, str], ...] = ()
    #: The notes about error feedback.
    feedback_notes: tuple[str, ...] = ()
    #: Whether numbers are written in this order.
    big_endian: bool = False

    @property
    def custom_encoders(self) -> tuple[CustomEncoder, ...]:
        """The users' encoders that some tensors are encoded by."""
        encodings = (part.encoding for tensor in self.tensors for part in tensor.parts)
        return tuple(dict.fromkeys(encoding.custom for encoding in encodings if encoding.custom is not None))

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.layout.nbytes for shard in self.shards)

    @property
    def n_values(self) -> int:
        return sum(tensor.n_values for tensor in self.tensors)

    @property
    def entries(self) -> tuple[tuple[str, TensorType, tuple[int, ...]], ...]:
        """Name, type and shape of each tensor."""
        return tuple((t.name, t.type, t.shape) for t in self.tensors)

    @property
    def bpw(self) -> float:
        """Bits per weight of the tensor data."""
        return 8 * sum(tensor.nbytes for tensor in self.tensors) / max(1, self.n_values)

    def as_table(self) -> Table:
        """Return tensors, weights, bytes and bits per weight by type."""
        groups: dict[TensorType, list[PlannedTensor]] = {}
        for tensor in self.tensors:
            groups.setdefault(tensor.type, []).append(tensor)
        rows = list[tuple[str, int, int, int, float]]()
        for t, group in groups.items():
            values, nbytes = sum(p.n_values for p in group), sum(p.nbytes for p in group)
            rows.append((str(t), len(group), values, nbytes, 8 * nbytes / max(1, values)))
        rows.sort(key=lambda row: -row[3])
        caption = f"{self.title}: {format_size(self.nbytes)}, {self.bpw:.3f} bits per weight"
        return table_of("type, tensors, weights, bytes, bpw", rows, caption)


def plan_output(
    source: Source,
    output: Path,
    fields: Sequence[Field],
    outputs: Sequence[OutputTensor],
    *,
    title: str,
    rules: str = "",
    notes: Sequence[str] = (),
    shard_of: Sequence[int] | None = None,
    split_max_size: int | None = None,
    identity: str,
    reads: Sequence[Path] = (),
    all_dims: bool = False,
    empty_first: bool = False,
    pad_header: bool = True,
    big_endian: bool = False,
    reserve: int = 0,
    split_keys: Callable[[int, int, int], list[Field]] = split_fields,
) -> Plan:
    """Place the chosen tensors in one file, or in shards.

    Args:
        source: where the data comes from.
        output: the final path; for several shards, their common prefix plus ``.gguf``.
        fields: the metadata of the output, all in the first shard. split.* keys are set where needed.
        outputs: the tensors in order.
        title: a readable name of the result ("Q4_K_M").
        rules: the type rules that applied.
        notes: sentences for the user.
        shard_of: the shard of each chosen tensor, ascending; by default one shard (but see below).
        split_max_size: start a new shard before this many bytes of tensors are exceeded.
        identity: everything else that determines the bytes (hashes of source and imatrix), for the fingerprint.
        reads: other files that were read, which must not be replaced.
        empty_first: begin with a shard of metadata alone.
        all_dims: also write trailing dimensions of 1: see ``layout_gguf``.
        pad_header: False for a file without tensors that ends with its last key, as vocabularies do.
        split_keys: returns the keys of a shard, by its number, the number of shards and that of all tensors.
        big_endian: write numbers in this order.
        reserve: bytes of room for later edits of the metadata, in the header of the first file.

    Raises TypeNotSupported for types that have no such form.
    """
    groups: list[list[OutputTensor]] = [[] for _ in range(empty_first)]
    groups += _groups(outputs, shard_of, split_max_size)
    n = len(outputs)
    shards, tensors = [], []
    for no, group in enumerate(groups):
        # Existing split keys keep their place.
        entries = {field.key: field for field in (fields if no == 0 else ())}
        entries |= {field.key: field for field in (split_keys(no, len(groups), n) if len(groups) > 1 else ())}
        if reserve and no == 0:
            entries[PADDING_KEY] = padding_field(reserve)
        layout = layout_gguf(
            entries.values(),
            [(c.name, c.shape, c.type) for c in group],
            all_dims=all_dims,
            pad_header=pad_header,
            big_endian=big_endian,
        )
        shards.append(PlannedShard(_shard_path(output, no, len(groups)), layout))
        tensors += [_place(c, no, offset) for c, offset in zip(group, layout.offsets, strict=True)]
    digest = hashlib.sha256(identity.encode())
    digest.update(" ".join(c.encoder + "+grid" * c.keeps_grid for c in outputs).encode())
    for name in dict.fromkeys(f"{c.custom.type} = {c.custom}" for c in outputs if c.custom is not None):
        digest.update(name.encode())
    for shard in shards:
        digest.update(os.fsencode(shard.path.name) + shard.layout.header)
    if isinstance(source, GGUFFile) and source.big_endian and not big_endian:
        notes = [f"{source.paths[0]} is big-endian; the output is little-endian", *notes]
    notes = [*notes, *_leftovers(source, [shard.path for shard in shards])]
    return Plan(
        source, title, tuple(shards), tuple(tensors), tuple(notes), digest.hexdigest(), tuple(reads), rules,
        fields=tuple(fields), big_endian=big_endian,
    )  # fmt: skip


def _leftovers(source: Source, paths: Sequence[Path]) -> list[str]:
    """Return a note on files beside the output with names like its shards, probably from an earlier run."""

    def prefix(path: Path) -> str:
        match = parse_split_path(path)
        return match[0] if match is not None else str(path).removesuffix(".gguf")

    if isinstance(paths[0], URL):
        return []
    own_paths = {os.path.realpath(path) for path in (*source.paths, *paths)}
    try:
        files = sorted(path for path in paths[0].parent.glob("*.gguf") if prefix(path) == prefix(paths[0]))
    except OSError:  # no such folder, or no permission, which the run reports
        return []
    leftovers = [path.name for path in files if os.path.realpath(path) not in own_paths]
    if not leftovers:
        return []
    return [f"beside the output, but not part of it: {span(leftovers, 'files')}, possibly from an earlier run"]


def without_existing(plan: Plan) -> Plan:
    """Return a plan of the missing files; existing ones must be those that the plan would write.

    Only lengths, names, types and places are compared: metadata may differ. Raises ResourceError for other files.
    """
    missing = [no for no, shard in enumerate(plan.shards) if not shard.path.exists()]
    for no, shard in enumerate(plan.shards):
        if no not in missing and not _exists_as_planned(shard, [t for t in plan.tensors if t.shard == no]):
            raise ResourceError(
                f"{shard.path} exists, but differs from the shard to be written; remove or rename it", "QK-E402"
            )
    number = {no: i for i, no in enumerate(missing)}
    tensors = tuple(replace(t, shard=number[t.shard]) for t in plan.tensors if t.shard in number)
    fingerprint = hashlib.sha256(f"{plan.fingerprint} {missing}".encode()).hexdigest()
    return replace(plan, shards=tuple(plan.shards[no] for no in missing), tensors=tensors, fingerprint=fingerprint)


def _exists_as_planned(shard: PlannedShard, tensors: Sequence[PlannedTensor]) -> bool:
    try:
        infos = read_shard(shard.path, 0, header_only=True).tensors
    except FormatError:
        return False
    stored = [(t.name, t.shape[: n_dims(t.shape)], t.type, t.offset) for t in infos]
    expected = [(t.name, t.shape[: n_dims(t.shape)], t.type) for t in tensors]
    shifts = {info[3] - t.offset for info, t in zip(stored, tensors, strict=False)}  # other metadata shifts the data
    matches = [info[:3] for info in stored] == expected and len(shifts) <= 1
    return matches and shard.path.stat().st_size == shard.layout.nbytes + sum(shifts)


def check_kernels(tensors: Sequence[OutputTensor | PlannedTensor]) -> None:
    """Raise TypeNotSupported, before any work, for tensors that can be neither copied nor decoded and encoded."""
    for c in tensors:
        parts = c.planned_parts() if isinstance(c, OutputTensor) else c.parts
        for encoding in (part.encoding for part in parts if part.source.type is not c.type):
            if any(part.row_alignment % encoding.group for part in parts):
                raise TypeNotSupported(
                    f"tensor {c.name}: the rows of its parts are not multiples of {encoding.group}: from "
                    f"{encoding.source} to {c.type}",
                    "QK-E303",
                )
            if encoding.has_tensor_scale:
                check_rows(c.shape[0])
            if encoding.missing:
                raise TypeNotSupported(
                    f"tensor {c.name}: this version has no {encoding.missing} ({encoding.source} to {c.type}: "
                    f"{c.reason}); see `quantkit types`",
                    "QK-E302",
                )


def _place(c: OutputTensor, shard: int, offset: int) -> PlannedTensor:
    return PlannedTensor(
        c.name, c.shape, c.type, c.reason, c.fallback_from, c.planned_parts(), shard, offset, c.nbytes, c.encoder
    )


def _groups(
    tensors: Sequence[OutputTensor], shard_of: Sequence[int] | None, split_max_size: int | None
) -> list[list[OutputTensor]]:
    """Divide the tensors among shards."""
    if shard_of is not None:
        by_shard: dict[int, list[OutputTensor]] = {}
        for c, shard in zip(tensors, shard_of, strict=True):
            by_shard.setdefault(shard, []).append(c)
        return [by_shard[shard] for shard in sorted(by_shard)] or [[]]
    groups: list[list[OutputTensor]] = [[]]
    size = 0
    for c in tensors:
        if split_max_size is not None and groups[-1] and size + c.nbytes > split_max_size:
            groups.append([])
            size = 0
        groups[-1].append(c)
        size += c.nbytes
    return groups


def _shard_path(output: Path, no: int, count: int) -> Path:
    if count == 1:
        return output
    match = parse_split_path(output.name)
    prefix = match[0] if match is not None else output.name.removesuffix(".gguf")
    return output.with_name(split_path(prefix, no, count).name)
