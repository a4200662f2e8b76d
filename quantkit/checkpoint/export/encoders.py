"""The encoders of an mmproj file as tensors and settings of the checkpoint that its text model is exported to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import Json, read_config
from quantkit.checkpoint.encoders import encoder_tensors
from quantkit.checkpoint.export.clip_metadata import ClipMetadata, without_null
from quantkit.checkpoint.export.config import text_config_of
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata, plain
from quantkit.checkpoint.export.tensor_values import EncodedTensor
from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.hf_encoders import NOT_EXPORTED, HfEncoders
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.mmproj import Mmproj, MmprojConfig
from quantkit.checkpoint.registry import ARCHITECTURES, HF_ENCODERS, find_mmproj
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensor_names import KINDS, PATTERNS, TensorNames
from quantkit.checkpoint.tensors import Context, InverseContext, Tensor, invert_rules, named_tensors
from quantkit.errors import FormatError, RecipeError, TypeNotSupported
from quantkit.formats.gguf import GGUFFile
from quantkit.formats.gguf.mmproj import CLIP, is_mmproj, projectors
from quantkit.formats.gguf.projectors import text_width
from quantkit.formats.gguf.rules import short

#: Keys that no conversion sets, or that follow from the file.
_OF_FILE = ("general.", "quantkit.", "quantize.")
#: Beginnings of the names of tensors of layers, and of keys.
_PARTS = {"v": "vision", "a": "audio"}
#: The end of the name of a range of clipped activations.
_RANGE = r"\.(?:in|out)put_m(?:ax|in)"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Encoders:
    """The encoders of a file, and the class of the whole, ``name``."""

    name: str
    hf: HfEncoders
    meta: ClipMetadata

    @property
    def row(self) -> Architecture:
        """The conversion of the text model."""
        return ARCHITECTURES[self.hf.text_class or self.name]

    def files(self, config: Json) -> Json:
        """Complete the settings of the text model, nested already; return preprocessor_config.json."""
        config["architectures"] = [self.hf.architecture or self.name]
        self.hf.set_config(self.meta, config)
        if self.hf.text_class:
            text_config_of(config, self.hf.text).setdefault("architectures", [self.hf.text_class])
        return without_null(self.hf.preprocessor(self.meta))

    def tensors(self, folder: Path, text: Mapping[str, Expression]) -> dict[str, Expression]:
        """Return the tensors of the encoders by their names in a checkpoint.

        Args:
            folder: config.json and preprocessor_config.json of the whole.
            text: the tensors of the text model in the checkpoint.

        Raises:
            FormatError: the files contradict each other.
            TypeNotSupported: converting the checkpoint would not give the tensors and keys of the file again.
        """
        model = read_config(folder)
        row = find_mmproj(model)
        config = MmprojConfig(model, row)
        row.patch_config(config)
        names = TensorNames(CLIP, row.layers(config))
        parts = {
            info.name: EncodedTensor(self.meta.model.paths[info.shard], info)
            for info in self.meta.model.tensors.values()
        }
        tensors = self._invert(parts, row, InverseContext(config, names, fused=True))
        if twice := tensors.keys() & text.keys():
            raise FormatError(f"{self.meta.path}: {short(min(twice))} is also a tensor of the text model", "QK-E107")
        self._check_tensors({**text, **tensors}, row, Context(config, names))
        self._check_keys(row, config)
        self._check_layers()
        return tensors

    def _check_layers(self) -> None:
        """Raise FormatError if a layer lacks a tensor that another has; with experts, feed-forward layers differ."""
        layers: dict[tuple[str, str], set[int]] = {}
        has_experts = any("_exps." in name for name in self.meta.model.tensors)
        for name in self.meta.model.tensors:
            if has_experts and re.match(r"v\.blk\.\d+\.(ffn_|exp_)", name):
                continue
            if match := re.fullmatch(r"([va])\.blk\.(\d{1,9})\.(.*)", name):
                layers.setdefault((match[1], match[3]), set()).add(int(match[2]))
        for (part, kind), numbers in layers.items():
            if absent := set(range(self.meta.number(f".{_PARTS[part]}.block_count"))) - numbers:
                raise FormatError(
                    f"{self.meta.path}: {part}.blk.{min(absent)}.{kind} is missing, which other layers have", "QK-E105"
                )

    def _invert(self, parts: Mapping[str, Expression], row: Mmproj, context: InverseContext) -> dict[str, Expression]:
        extra = {tensor.name_in_file or tensor.name for tensor in row.synthetic(_encoders_of(context))}
        kinds = _names_of(self.hf)
        tensors: dict[str, Expression] = {}
        for name, x in parts.items():
            if name in extra:
                continue
            tensor = Tensor(self._checkpoint_name(name, kinds), x, None)
            if tensor.name in extra:
                continue
            for original in invert_rules((*row.stored, *row.rules), tensor, context):
                if original.name in tensors:
                    raise context.fail(original, f"{original.name} would occur twice", "QK-E107")
                tensors[original.name] = original.x
        if context.waiting:
            _, joined_name = next(iter(context.waiting))
            raise FormatError(f"{self.meta.path}: a part of {joined_name} is missing", "QK-E105")
        return tensors

    def _checkpoint_name(self, name: str, kinds: Mapping[str, str]) -> str:
        """Return the checkpoint's name of a file's tensor, before rules are inverted."""
        match = re.fullmatch(rf"(.*?)((?:\.weight|\.bias)(?:\.\d+)?|{_RANGE})?", name)
        assert match is not None
        stem, suffix = match[1], match[2] or ""
        number = _NUMBER.search(stem)
        numbered = "" if number is None else re.sub(r"blk\.\d+\.", "*", stem, count=1)
        if number is not None and numbered == stem:
            numbered = _NUMBER.sub("#", stem, count=1)
        pattern = kinds.get(stem) or kinds.get(numbered)
        if pattern is None:
            raise TypeNotSupported(
                f"{self.meta.path}: tensor {short(name)} cannot be stored in a checkpoint of {self.name}", "QK-E305"
            )
        return (pattern if number is None else pattern.replace("*", number[0])) + suffix

    def _check_tensors(self, tensors: Mapping[str, Expression], row: Mmproj, context: Context) -> None:
        """Convert the tensors again and require the names and shapes of the file."""
        stored = encoder_tensors(sorted(tensors.items()), row, context)
        converted = named_tensors(stored, row.rules, context, row.synthetic(_encoders_of(context)))
        shapes = {name: _shape(tensor.x.shape[::-1]) for name, tensor in converted}
        have = {info.name: _shape(info.shape) for info in self.meta.model.tensors.values()}
        for name in (*have, *shapes):
            if have.get(name) != shapes.get(name):
                raise TypeNotSupported(
                    f"{self.meta.path}: tensor {short(name)}: {have.get(name) or 'missing'} in the file, but "
                    f"{shapes.get(name) or 'missing'} after converting the checkpoint back",
                    "QK-E305",
                )

    def _check_keys(self, row: Mmproj, config: MmprojConfig) -> None:
        """Convert the settings again and require the keys of the file."""
        keys = Keys(CLIP, config.path)
        for write in (*row.first, *row.base_keys, *row.keys):
            write(keys, config)
        have, converted = (
            {key: plain(field.value) for key, field in fields.items() if not key.startswith(_OF_FILE)}
            for fields in (self.meta.model.fields, keys.fields)
        )
        for key in (*have, *converted):
            if have.get(key) != converted.get(key):
                raise TypeNotSupported(
                    f"{self.meta.path}: key {key} = {short(have.get(key))} would be {short(converted.get(key))} after "
                    f"converting the checkpoint of {self.name} back",
                    "QK-E305",
                )


def find_encoders(mmproj: GGUFFile, text: ModelMetadata, requested: str | None) -> Encoders:
    """Return the encoders of a file, and the class of the whole.

    Args:
        mmproj: the open mmproj file.
        text: the metadata of the text model.
        requested: the class, if several are possible.

    Raises:
        FormatError: not an mmproj file.
        RecipeError: it is of another model.
        TypeNotSupported: no class of this version has these encoders and this text model.
    """
    path = mmproj.paths[0]
    if not is_mmproj(mmproj):
        raise FormatError(f"{path}: not an mmproj file: --mmproj names the file of the encoders", "QK-E207")
    width, embedding = text_width(_values(mmproj), mmproj.tensors), text.get(".embedding_length")
    if width is not None and embedding is not None and width != embedding:
        raise RecipeError(
            f"{path}: fits text models of embedding length {width}, and that of {text.path} is {embedding}", "QK-E207"
        )
    meta, types = ClipMetadata(mmproj, text), projectors(mmproj)
    names = [
        name
        for name, row in HF_ENCODERS.items()
        if types in ((row.projector,), row.projectors)
        and ARCHITECTURES[row.text_class or name].arch == text.arch
        and row.matches(meta)
    ]
    possible = names
    if requested is not None:
        names = [name for name in names if requested in (name, HF_ENCODERS[name].architecture)]
    if not names:
        supported = f"; choose one of {', '.join(possible)}" if possible else ""
        places = [place for kind in types for place in (f"{kind} {text.arch}", kind)]
        reason = next((f" ({NOT_EXPORTED[place]})" for place in places if place in NOT_EXPORTED), "")
        request = "" if requested is None else f" as {short(requested)}"
        rows = [(name, row) for name, row in HF_ENCODERS.items() if row.projector in types]
        archs = sorted({ARCHITECTURES[row.text_class or name].arch for name, row in rows})
        if archs and text.arch not in archs and not reason:
            reason = f" (they belong to text models of {', '.join(archs)})"
        raise TypeNotSupported(
            f"{path}: encoders with the projector {', '.join(types) or 'unknown'} beside a text model of "
            f"{short(text.arch)} are not exported{reason}{request}{supported}; without --mmproj the text model is",
            "QK-E304",
        )
    name = names[0]
    return Encoders(name, HF_ENCODERS[name], meta)


def _values(mmproj: GGUFFile) -> dict[str, Any]:
    return {key: field.value for key, field in mmproj.fields.items() if key.startswith(f"{CLIP}.")}


def _names_of(hf: HfEncoders) -> dict[str, str]:
    """Return the name in a checkpoint of each kind of tensor, ``*`` for its number."""
    kinds: dict[str, str] = {}
    for kind in KINDS[CLIP].split():
        candidates = PATTERNS.get(kind, "").split()
        starts = (name for start in hf.names.split() for name in candidates if name.startswith(start))
        if (name := next(starts, None)) is not None:
            kinds[kind.partition(":")[0]] = name
    return kinds | hf.kinds


def _encoders_of(context: Context) -> MmprojConfig:
    assert isinstance(context.config, MmprojConfig)
    return context.config


def _shape(shape: Iterable[int]) -> list[int]:
    """Return a shape, innermost first, without dimensions of 1 at its end; [1] for that of a scalar."""
    extents = list(shape) or [1]
    while len(extents) > 1 and extents[-1] == 1:
        extents.pop()
    return extents
