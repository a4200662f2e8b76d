"""Open a checkpoint as the mmproj file of its vision and audio encoders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from quantkit.checkpoint.checkpoint import Checkpoint, converted_tensors
from quantkit.checkpoint.config import Config, read_config
from quantkit.checkpoint.expressions import Expression, Stored
from quantkit.checkpoint.general import ParameterCount, read_general
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.mmproj import CLIP, Mmproj, MmprojConfig, forced_type
from quantkit.checkpoint.open import OTHER_FILES, OpenOptions, blame_config, of_blocks
from quantkit.checkpoint.policy import OutType, find_outtype
from quantkit.checkpoint.quantized import block_type_of, decode_tensors
from quantkit.checkpoint.registry import find_mmproj
from quantkit.checkpoint.tensor_names import TensorNames
from quantkit.checkpoint.tensors import Context, Tensor, apply_rules, named_tensors
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.remote import located
from quantkit.formats.safetensors import StoredTensor, read_checkpoint

#: Files beside the weights that metadata is read from.
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")


def open_mmproj(folder: str | os.PathLike[str], options: OpenOptions | None = None) -> Checkpoint:
    """Open the encoders of the checkpoint in a directory, as ``open_checkpoint`` does its text model.

    Args:
        folder: config.json, model*.safetensors, preprocessor_config.json or processor_config.json.
        options: outtype, exact, model_name, metadata, allow_incomplete; the others are for text models.

    Raises:
        FormatError: a file is damaged, missing or belongs to another model; the message names file and tensor.
        TypeNotSupported: a class without encoders, or whose encoders are not converted.
    """
    options = options or OpenOptions()
    path = located(folder)
    with blame_config(path):
        model = _read_model(path)
        row = find_mmproj(model)
        config = MmprojConfig(model, row)
        row.patch_config(config)
    indexed = read_checkpoint(path, allow_incomplete=options.allow_incomplete)
    with blame_config(path):
        context = Context(config, TensorNames(CLIP, row.layers(config)))
        stored = _encoder_tensors(indexed, row, context)
        weights = decode_tensors(stored, config)
        outtype = find_outtype(options.outtype, stored.values())
        parts = named_tensors(weights.tensors, row.rules, context, row.synthetic(config), weights.first)
        tensors = converted_tensors(_forced(parts, row, outtype), context.names, outtype, options.exact, False)
        outtype = of_blocks(outtype, block_type_of(config))
        keys = Keys(CLIP, config.path, file_type=outtype.file_type)
        count = ParameterCount.from_shapes((item.info.name, item.expr.shape) for item in tensors)
        general = read_general(path, count, model_name=options.model_name, metadata=options.metadata)
        keys.text("general.type", "mmproj")
        general.write(keys)
        for write in row.first:
            write(keys, config)
        keys.u32("general.file_type", outtype.file_type)
        for write in (*row.base_keys, *row.keys):
            write(keys, config)
        keys.u32("general.quantization_version", 2)
    files = {file for shard in indexed for file in {t.path for t in shard.values()}}
    files |= {part.path for item in tensors for part in item.expr.parts()}
    metadata_files = [path / name for name in (*OTHER_FILES, *_PREPROCESSORS, *row.files) if (path / name).is_file()]
    metadata_files += [options.metadata] if options.metadata else []
    checkpoint = Checkpoint(path, (*sorted(files), *metadata_files), keys.fields, tensors, outtype)
    checkpoint.general, checkpoint.kind, checkpoint.omissions = general, "mmproj", tuple(keys.omissions)
    return checkpoint


def _read_model(path: Path) -> Config:
    """Return the configuration of a checkpoint; Pocket TTS has none, and is known by a tensor."""
    if (path / "config.json").exists() or not path.is_dir() or not list(path.glob("model*.safetensors")):
        return read_config(path)
    if not any("flow_lm.bos_emb" in shard for shard in read_checkpoint(path, allow_incomplete=True)):
        return read_config(path)
    return Config(path / "config.json", {"architectures": ["PocketTTSModel"]})


def _encoder_tensors(indexed: list[dict[str, StoredTensor]], row: Mmproj, context: Context) -> dict[str, Expression]:
    """Return the stored tensors of the encoders."""
    stored: dict[str, Expression] = {}
    pattern = re.compile(row.tensors)
    for shard in indexed:
        for name, tensor in shard.items():
            for renamed in apply_rules(row.stored, Tensor(name, Stored(tensor), None), context):
                if "language_model." in renamed.name or not pattern.search(renamed.name):
                    continue
                if renamed.name in stored:
                    raise FormatError(
                        f"{tensor.path}: tensor {short(name)}: two tensors are named {short(renamed.name)}", "QK-E107"
                    )
                stored[renamed.name] = renamed.x
    if not stored:
        raise FormatError(
            f"{context.config.path.parent}: its files have no tensors of the encoders that config.json describes",
            "QK-E105",
        )
    return stored


def _forced(parts: Iterator[tuple[str, Tensor]], row: Mmproj, outtype: OutType) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with the types that those of encoders have in all files."""
    for name, tensor in parts:
        file_type = tensor.file_type or forced_type(row, name, outtype.type)
        yield name, tensor if file_type is None else replace(tensor, file_type=file_type)
