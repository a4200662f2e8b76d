"""Open a checkpoint as the mmproj file of its vision and audio encoders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from quantkit.checkpoint.checkpoint import Checkpoint, converted_tensors
from quantkit.checkpoint.encoder_settings import unsupported_encoder_settings
from quantkit.checkpoint.encoders import encoder_tensors, open_encoders
from quantkit.checkpoint.expressions import Stored
from quantkit.checkpoint.general import ParameterCount, read_general
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.lora.merge import identity, merge_adapters, notes_of, read_adapters
from quantkit.checkpoint.lora.parts import EncoderPart
from quantkit.checkpoint.mmproj import CLIP, Mmproj, forced_type
from quantkit.checkpoint.open import OTHER_FILES, OpenOptions, blame_config, of_blocks, prefix_of
from quantkit.checkpoint.policy import OutType, find_outtype
from quantkit.checkpoint.quantized import block_type_of, decode_tensors
from quantkit.checkpoint.tensors import Tensor, named_tensors
from quantkit.formats.gguf.mmproj import projectors
from quantkit.formats.remote import locate
from quantkit.formats.safetensors import read_checkpoint

#: Files beside the weights that metadata is read from.
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")


def open_mmproj(folder: str | os.PathLike[str], options: OpenOptions | None = None) -> Checkpoint:
    """Open the encoders of the checkpoint in a directory, as ``open_checkpoint`` does its text model.

    Args:
        folder: config.json, model*.safetensors, preprocessor_config.json or processor_config.json.
        options: outtype, exact, model_name, metadata, adapters, allow_incomplete; the others are for text models.

    Raises:
        FormatError: a file is damaged, missing or belongs to another model; the message names file and tensor.
        TypeNotSupported: a class without encoders, or whose encoders are not converted.
    """
    options = options or OpenOptions()
    path = locate(folder)
    with blame_config(path):
        encoders = open_encoders(path, options.mistral_format, options.base)
    row, config, context = encoders.row, encoders.config, encoders.context
    indexed = read_checkpoint(path, prefix_of(options), allow_incomplete=options.allow_incomplete)
    adapters = read_adapters(options.adapters)
    with blame_config(path):
        pairs = ((name, Stored(tensor)) for shard in indexed for name, tensor in shard.items())
        stored = encoder_tensors(pairs, row, context)
        weights = decode_tensors(stored, config)
        part = EncoderPart(encoders, {**weights.first, **weights.tensors})
        if adapters:
            weights = merge_adapters(weights, adapters, part)
        outtype = find_outtype(options.outtype, stored.values())
        parts = named_tensors(weights.tensors, row.rules, context, row.synthetic(config), weights.first)
        tensors = converted_tensors(_force_types(parts, row, outtype), context.names, outtype, options.exact, False)
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
    metadata_files += [file for adapter in adapters for file in adapter.files]
    checkpoint = Checkpoint(path, (*sorted(files), *metadata_files), keys.fields, tensors, outtype, identity(adapters))
    checkpoint.notes = tuple(notes_of(adapters, part))
    checkpoint.general, checkpoint.kind = general, "mmproj"
    checkpoint.omissions = tuple(unsupported_encoder_settings(config.vision, projectors(checkpoint)))
    return checkpoint


def _force_types(parts: Iterator[tuple[str, Tensor]], row: Mmproj, outtype: OutType) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with the types that those of encoders have in all files."""
    for name, tensor in parts:
        file_type = tensor.file_type or forced_type(row, name, outtype.type)
        yield name, tensor if file_type is None else replace(tensor, file_type=file_type)
