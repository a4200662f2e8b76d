"""Contents of a GGUF file: ``quantkit inspect``. Reads headers, and of BF16, F16 and F32 tensors a sample of rows.

Every group has the same totals; n values in b bytes have 8 b / n bits per weight.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.arguments import checked
from quantkit.errors import RecipeError
from quantkit.formats.gguf import Field, GGUFFile, TensorInfo, ValueType, open_gguf
from quantkit.formats.gguf.mmproj import CLIP
from quantkit.formats.gguf.projectors import image_tokens, text_width
from quantkit.formats.gguf.rules import PADDING_KEY
from quantkit.formats.remote import locate
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.names import tensor_class
from quantkit.patterns import Pattern
from quantkit.pipeline.grid import KEEP_GRID, grid_note, matrices_of
from quantkit.pipeline.presets import FTYPE_UNKNOWN, PRESETS, is_target, preset_by_name
from quantkit.pipeline.runtimes import Runtime, runtimes
from quantkit.types import TYPES
from quantkit.units import format_size, round_up

#: Labels of the facts by which an mmproj file fits a text model.
EMBEDDING_LENGTH, TEXT_EMBEDDING_LENGTH = "embedding length", "text embedding length"
#: Facts about a model, in order: label, and key without the architecture.
MODEL_FACTS: tuple[tuple[str, str], ...] = (
    ("layers", "block_count"),
    ("context length", "context_length"),
    (EMBEDDING_LENGTH, "embedding_length"),
    ("feed-forward length", "feed_forward_length"),
    ("heads", "attention.head_count"),
    ("KV heads", "attention.head_count_kv"),
    ("key length", "attention.key_length"),
    ("value length", "attention.value_length"),
    ("sliding window", "attention.sliding_window"),
    ("experts", "expert_count"),
    ("experts used", "expert_used_count"),
    ("shared experts", "expert_shared_count"),
    ("expert feed-forward length", "expert_feed_forward_length"),
    ("leading dense layers", "leading_dense_block_count"),
    ("prediction layers", "nextn_predict_layers"),
    ("RoPE base", "rope.freq_base"),
)
#: Facts about any file: label and whole key.
OTHER_FACTS: tuple[tuple[str, str], ...] = (
    ("tokenizer", "tokenizer.ggml.model"),
    ("pre-tokenizer", "tokenizer.ggml.pre"),
    ("calibration data", "imatrix.datasets"),
    ("chunks", "imatrix.chunk_count"),
    ("chunk size", "imatrix.chunk_size"),
)
#: Prefixes of keys that record where a file comes from.
PROVENANCE = ("quantkit.", "quantize.", "general.quantized_by", "general.source.", "general.base_model.")

#: Arrays up to this length are per-layer values, shown as distinct values with counts.
_MAX_PER_LAYER = 4096
#: The bit that llama.cpp sets in a guessed file type; alone it is FTYPE_UNKNOWN.
_GUESSED = 1024
#: The same of an mmproj file.
MMPROJ_FACTS = (
    ("projector", "clip.projector_type"),
    ("vision projector", "clip.vision.projector_type"),
    ("audio projector", "clip.audio.projector_type"),
    ("vision layers", "clip.vision.block_count"),
    ("vision width", "clip.vision.embedding_length"),
    ("image size", "clip.vision.image_size"),
    ("patch size", "clip.vision.patch_size"),
    ("audio layers", "clip.audio.block_count"),
    ("audio width", "clip.audio.embedding_length"),
    ("mel bins", "clip.audio.num_mel_bins"),
)


#: The same of a draft model: label, and key without the architecture.
DRAFT_FACTS = (
    ("target layers", "target_layers"),
    ("target embedding length", "target_hidden_size"),
    ("block size", "block_size"),
)
#: Architecture and a tensor of draft models -> their kind; the first whose tensor is present.
_DRAFT_KINDS = {
    ("eagle3", "fc.weight"): "EAGLE-3",
    ("dflash", "markov_w1.weight"): "DSpark",
    ("dflash", "selector_hidden.weight"): "DFlash 2",
    ("dflash", "fc.weight"): "DFlash",
}


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """One file of a model."""

    path: Path
    nbytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about the model: a scalar, or an array's distinct values with their counts."""

    label: str
    key: str
    value: Any
    counts: tuple[tuple[Any, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors counted together."""

    name: str
    #: Names of their types, largest first.
    types: tuple[str, ...]
    tensors: int
    values: int
    nbytes: int

    @property
    def bpw(self) -> float:
        """Bits per weight."""
        return 8 * self.nbytes / max(1, self.values)


@dataclass(frozen=True)
class Inspection(HtmlTable):
    """The contents of a file, or of all shards of a split one; ``tensors`` and totals cover the selected tensors."""

    path: Path
    shards: tuple[ShardFacts, ...]
    version: int
    alignment: int
    #: general.type ("model", "imatrix", ...), "" if missing.
    kind: str
    architecture: str
    name: str
    #: general.file_type, None if missing.
    file_type: int | None
    file_type_name: str
    facts: tuple[Fact, ...]
    provenance: tuple[tuple[str, Any], ...]
    fields: tuple[Field, ...] = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    #: Tensors of the whole model, selected or not.
    n_tensors: int
    #: Weights of the whole model that are active per token; experts count by the share in use.
    active_values: int | None
    #: Layers whose up and gate experts are merged, and layers where they are separate.
    merged_layers: int
    unmerged_layers: int
    by_type: tuple[Group, ...]
    by_class: tuple[Group, ...]
    runtimes: tuple[Runtime, ...]
    big_endian: bool = False
    #: The types on whose grid the weights lie, in words, if they do: see `quantize --keep-grid`.
    grid: str = ""

    @property
    def file_bytes(self) -> int:
        """Bytes of all shards together."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def total(self) -> Group:
        """All of ``tensors``."""
        return _group("total", self.tensors)

    def as_table(self) -> Table:
        """Return tensors, weights, bytes and bits per weight by class."""
        groups = (*self.by_class, self.total)
        rows = ((g.name, ", ".join(g.types), g.tensors, g.values, g.nbytes, g.bpw) for g in groups)
        caption = f"{self.path.name}: {self.architecture}, {self.file_type_name}, {format_size(self.file_bytes)}"
        return table_of("class, types, tensors, weights, bytes, bpw", rows, caption)


@checked
def inspect(path: str | Path, *, tensors: str | None = None, header_only: bool = False) -> Inspection:
    """Read the contents of a GGUF file; of its tensor data only a sample, to find grids, and only on this machine.

    Args:
        path: a file, or any shard of a split model.
        tensors: a regular expression; only tensors whose names it matches are listed and counted.
        header_only: accept a file whose tensor data is missing or truncated.

    Raises:
        FormatError: the file is damaged; the message names file and byte.
        RecipeError: ``tensors`` is not a regular expression, or matches no name.
    """
    with open_gguf(path, header_only=header_only) as file:
        everything = tuple(file.tensors.values())
        selected = everything if tensors is None else _match(tensors, everything, locate(path))
        architecture, ftype = _text(file, "general.architecture"), file.get("general.file_type")
        file_type = ftype if isinstance(ftype, int) and not isinstance(ftype, bool) else None
        merged, unmerged = _up_gate_layers(everything)
        return Inspection(
            path=locate(path),
            shards=_shards(file),
            version=file.version,
            alignment=file.alignment,
            kind=_text(file, "general.type"),
            architecture=architecture,
            name=_text(file, "general.name"),
            file_type=file_type,
            file_type_name="" if file_type is None else file_type_name(file_type),
            facts=tuple(_facts(file, architecture)),
            provenance=tuple((f.key, f.value) for f in file.fields.values() if _is_provenance(f)),
            fields=tuple(file.fields.values()),
            tensors=selected,
            n_tensors=len(everything),
            active_values=_active_values(file, architecture, everything),
            merged_layers=merged,
            unmerged_layers=unmerged,
            by_type=_group_by(selected, lambda t: t.type.name),
            by_class=_group_by(selected, lambda t: tensor_class(t.name)),
            runtimes=_verdicts(file, everything),
            big_endian=file.big_endian,
            grid="" if header_only else grid_note(file, matrices_of(file), KEEP_GRID),
        )


def _verdicts(file: GGUFFile, tensors: Sequence[TensorInfo]) -> tuple[Runtime, ...]:
    """Return the verdicts of the runtimes on a machine like this one, which does not load big-endian files."""
    verdicts = runtimes(file.fields, ((t.name, t.type, t.shape) for t in tensors), displaced=_find_displaced(file))
    if not file.big_endian:
        return verdicts
    problem = "big-endian, for machines such as s390x (quantkit quantize IN OUT COPY writes it little-endian)"
    return tuple(replace(runtime, problems=(problem, *runtime.problems)) for runtime in verdicts)


def _find_displaced(file: GGUFFile) -> str:
    """Return the name of the first tensor whose data does not follow that of the previous tensor, "" if all do."""
    ends: dict[int, int] = {}
    for tensor in file.tensors.values():
        if tensor.offset != ends.get(tensor.shard, tensor.offset):
            return tensor.name
        ends[tensor.shard] = tensor.offset + round_up(tensor.nbytes, file.alignment)
    return ""


def file_type_name(ftype: int) -> str:
    """Return the name of a general.file_type in llama.cpp and ik_llama.cpp, or "unknown"."""
    if ftype == FTYPE_UNKNOWN:
        return "a mix of types without a preset number"
    names = " or ".join(_file_type_names().get(ftype & ~_GUESSED, ("unknown",)))
    return f"{names}, guessed" if ftype & _GUESSED else names


@cache
def _file_type_names() -> dict[int, tuple[str, ...]]:
    """Number -> names: presets, then types with a number but no preset."""
    names: dict[int, tuple[str, ...]] = {}
    for preset in PRESETS:
        if preset.base is not None:
            names[preset.ftype] = (*names.get(preset.ftype, ()), preset.name)
    for t in TYPES:
        if is_target(t) and (ftype := preset_by_name(t.name).ftype) != FTYPE_UNKNOWN:
            names.setdefault(ftype, (t.name,))
    return names


def first_items(item: Field, count: int) -> list[Any]:
    """Return the first ``count`` items of an array without decoding the rest."""
    if item.item_type is not ValueType.STRING:
        values: list[Any] = item.array[:count].tolist()
        return values
    strings, offset = [], 12
    for _ in range(min(count, item.count)):
        start = offset + 8
        offset = start + struct.unpack_from("<Q", item.raw, offset)[0]
        strings.append(str(item.raw[start:offset], "utf-8", "surrogateescape"))
    return strings


def _text(file: GGUFFile, key: str) -> str:
    item = file.fields.get(key)
    return str(item.value) if item is not None and item.type is ValueType.STRING else ""


def _match(pattern: str, tensors: Sequence[TensorInfo], path: Path) -> tuple[TensorInfo, ...]:
    regex = Pattern(pattern, "--tensors")
    matches = tuple(t for t in tensors if regex.search(t.name))
    if not matches:
        raise RecipeError(f"{path}: {pattern!r} matches none of the {len(tensors)} tensor names", "QK-E206")
    return matches


def _shards(file: GGUFFile) -> tuple[ShardFacts, ...]:
    counts = [0] * len(file.paths)
    for tensor in file.tensors.values():
        counts[tensor.shard] += 1
    return tuple(ShardFacts(p, p.stat().st_size, n) for p, n in zip(file.paths, counts, strict=True))


def _is_provenance(item: Field) -> bool:
    return item.key.startswith(PROVENANCE) and (item.item_type is None or item.count <= _MAX_PER_LAYER)


def _facts(file: GGUFFile, architecture: str) -> Iterator[Fact]:
    if architecture == CLIP:
        yield from _mmproj_facts(file)
        return
    keys = [(label, f"{architecture}.{key}") for label, key in MODEL_FACTS] + list(OTHER_FACTS)
    for label, key in keys:
        item = file.fields.get(key)
        if item is None:
            continue
        if item.item_type is None:
            yield Fact(label, key, item.value)
        elif item.count <= _MAX_PER_LAYER:
            yield Fact(label, key, None, tuple(Counter(item.value).items()))
    if file.room:
        yield Fact("room for edits", PADDING_KEY, file.room)
    vocabulary = file.fields.get("tokenizer.ggml.tokens")
    if vocabulary is not None:
        yield Fact("vocabulary", vocabulary.key, vocabulary.count)
    yield from _draft_facts(file, architecture)


def _draft_facts(file: GGUFFile, architecture: str) -> Iterator[Fact]:
    """Yield the facts about a draft model, and about the target that it fits."""
    kinds = (kind for (arch, tensor), kind in _DRAFT_KINDS.items() if arch == architecture and tensor in file.tensors)
    if (kind := next(kinds, None)) is None:
        return
    yield Fact("draft model", "general.architecture", kind)
    for label, name in DRAFT_FACTS:
        value = file.get(key := f"{architecture}.{name}")
        if isinstance(value, list):
            yield Fact(label, key, None, tuple((layer, 1) for layer in value[:_MAX_PER_LAYER]))
        elif value is not None:
            yield Fact(label, key, value)
        elif name == "target_hidden_size" and (width := file.get(f"{architecture}.embedding_length")) is not None:
            yield Fact(label, f"{architecture}.embedding_length", width)
    if (mask := file.get("tokenizer.ggml.mask_token_id")) is not None:
        yield Fact("mask token", "tokenizer.ggml.mask_token_id", mask)
    if (ids := file.tensors.get("d2t")) is not None:
        yield Fact("draft vocabulary", "d2t", ids.shape[0])


def _mmproj_facts(file: GGUFFile) -> Iterator[Fact]:
    """Yield the facts about the encoders of an mmproj file, and the embedding length of the text models it fits."""
    for label, key in MMPROJ_FACTS:
        if (value := file.get(key)) is not None:
            yield Fact(label, key, value)
    metadata = {key: field.value for key, field in file.fields.items() if key.startswith((f"{CLIP}.", "general."))}
    if (tokens := image_tokens(metadata, file.tensors)) is not None:
        yield Fact("tokens per image", "clip.vision.image_size", tokens)
    if (width := text_width(metadata, file.tensors)) is not None:
        yield Fact(TEXT_EMBEDDING_LENGTH, "clip.vision.projection_dim", width)


def _up_gate_layers(tensors: Sequence[TensorInfo]) -> tuple[int, int]:
    names = [t.name for t in tensors]
    merged = sum(name.endswith("ffn_gate_up_exps.weight") for name in names)
    return merged, sum(name.endswith("ffn_gate_exps.weight") for name in names)


def _active_values(file: GGUFFile, architecture: str, tensors: Sequence[TensorInfo]) -> int | None:
    """Return the weights active per token; None without experts, or without the metadata."""
    n, used = file.get(f"{architecture}.expert_count"), file.get(f"{architecture}.expert_used_count")
    if not isinstance(n, int) or not isinstance(used, int) or not 0 < used <= n:
        return None
    routed = sum(_n_values(t) for t in tensors if "_exps." in t.name)
    return sum(map(_n_values, tensors)) - routed + routed * used // n


def _n_values(tensor: TensorInfo) -> int:
    return math.prod(tensor.shape)


def _group_by(tensors: Iterable[TensorInfo], key: Callable[[TensorInfo], str]) -> tuple[Group, ...]:
    """Group tensors, largest group first."""
    members: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        members.setdefault(key(tensor), []).append(tensor)
    groups = [_group(name, group) for name, group in members.items()]
    return tuple(sorted(groups, key=lambda g: (-g.nbytes, g.name)))


def _group(name: str, tensors: Sequence[TensorInfo]) -> Group:
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    types = tuple(sorted(sizes, key=lambda t: -sizes[t]))
    return Group(name, types, len(tensors), sum(map(_n_values, tensors)), sum(t.nbytes for t in tensors))
