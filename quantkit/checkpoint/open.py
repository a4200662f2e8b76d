"""Open a checkpoint: configuration, stored tensors, weights, the tensors of the file, metadata, vocabulary.

``open_checkpoint`` runs these steps in turn; each returns a record or values that later ones read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint import dense_modules
from quantkit.checkpoint.adapter_model import AdapterConfig
from quantkit.checkpoint.checkpoint import FLOATS, Checkpoint, ConvertedTensor, converted_tensors
from quantkit.checkpoint.config import NATIVE_FILE, Config, read_json
from quantkit.checkpoint.draft import DraftConfig, Target, check_target, target_notes
from quantkit.checkpoint.expressions import Expression, Stored
from quantkit.checkpoint.fusions import fuse_tensors
from quantkit.checkpoint.general import General, ParameterCount, read_general
from quantkit.checkpoint.key_rows import write_rows
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.lora.merge import AdapterSpec, identity, merge_adapters, notes_of, read_adapters
from quantkit.checkpoint.lora.parts import TextPart
from quantkit.checkpoint.lora.peft import Adapter, read_adapter
from quantkit.checkpoint.nextn import ONLY, WITH, WITHOUT, check_nextn, is_nextn_tensor, is_selected
from quantkit.checkpoint.policy import OutType, find_outtype
from quantkit.checkpoint.quantized import DecodedTensors, decode_tensors, weights_only
from quantkit.checkpoint.quantized.scale_tensors import add_scale_tensors
from quantkit.checkpoint.registry import find_architecture, has_encoders, read_model
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensor_names import TensorNames
from quantkit.checkpoint.tensors import Context, named_tensors, text_name, text_tensors
from quantkit.checkpoint.vocab.check import check_ids
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf.rules import short
from quantkit.formats.remote import locate
from quantkit.formats.safetensors import StoredTensor, read_checkpoint
from quantkit.process import no_collection

#: Files beside the weights that metadata is read from.
OTHER_FILES = (
    "config.json",
    "generation_config.json",
    "README.md",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "vocab.json",
    "vocab.txt",
    "model.safetensors.index.json",
    "hf_quant_config.json",
    "modules.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "hy.tiktoken",
    "qwen.tiktoken",
    "tokenizer.jsonl",
    "rwkv_vocab_v20230424.txt",
    "tekken.json",
    NATIVE_FILE,
    "mask_embedding.pt",
    "calibration.json",
    "training_config.json",
    "schema_config.json",
)

#: Errors of row functions on values of config.json that have an unexpected type.
VALUE_ERRORS = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError)


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """Options of ``open_checkpoint``."""

    #: f32, f16, bf16, q8_0, tq1_0, tq2_0 or auto: the types of tensors, as convert_hf_to_gguf.py has them.
    outtype: str = "auto"
    #: Return tensors as stored or computed, not rounded to ``outtype``, except those that are always F32.
    exact: bool = False
    #: Name of the pre-tokenizer, where its hash is not known.
    pre: str | None = None
    #: ``pre`` may give other token ids than the checkpoint's tokenizer.
    allow_other_ids: bool = False
    #: general.name.
    model_name: str | None = None
    #: A JSON file of keys that override those of the model card.
    metadata: Path | None = None
    #: Prediction layers (MTP): ``with`` them, ``without``, or ``only`` them.
    nextn: str = WITH
    #: The checkpoint of the model that a draft guesses for.
    target_model_dir: Path | None = None
    #: Of a model that is an adapter, the checkpoint of its base; None for the one that it names.
    base: Path | None = None
    #: Only the draft model (DSpark) among the tensors of DeepSeek V4.
    dspark: bool = False
    #: Options of ``fusions.FUSIONS``.
    fuse: Collection[str] = ()
    #: Matrices that are stored as float8 become Q8_0, regardless of ``outtype``.
    fp8_as_q8: bool = False
    #: Metadata and vocabulary, no tensors.
    vocab_only: bool = False
    #: Keep quantized weights as blocks if that changes no value.
    lossless: bool = False
    #: Directories of LoRA adapters to merge into the weights, and the factors of their scales.
    adapters: Sequence[AdapterSpec] = ()
    #: Shards may be missing.
    allow_incomplete: bool = False
    #: The checkpoint is in Mistral's own format: params.json, consolidated*.safetensors, tekken.json.
    mistral_format: bool = False
    #: Dense layers after the pooling of an embedding model are in the file.
    dense_modules: bool = False
    #: Of Mistral's format: no chat template but the checkpoint's own.
    disable_mistral_community_chat_template: bool = False

    @property
    def kind(self) -> str:
        """The part of the text model in the file: "vocab", "mtp", or "" for all of it."""
        if self.vocab_only:
            return "vocab"
        return "mtp" if self.nextn == ONLY else ""


@dataclass(frozen=True)
class _Model:
    """The text model: its configuration, its row of the registry, its tensors by their names in it."""

    path: Path
    config: Config
    row: Architecture
    layers: int
    context: Context
    stored: dict[str, Expression]
    #: The files of the tensors.
    files: tuple[Path, ...]


def open_checkpoint(folder: str | os.PathLike[str], options: OpenOptions | None = None) -> Checkpoint:
    """Open the checkpoint in a directory with config.json, model*.safetensors and the files of the tokenizer.

    Raises:
        FormatError: a file is damaged, missing or belongs to another model; the message names file and tensor.
        TypeNotSupported: an architecture or a quantization that is not converted.
    """
    options = options or OpenOptions()
    path = locate(folder)
    with blame_config(path):
        config, row = _read_config(path, options)
    weights_folder = config.path.parent if isinstance(config, AdapterConfig) else path
    indexed = _read_headers(weights_folder, options)
    adapters = read_adapters(options.adapters)
    if isinstance(config, AdapterConfig):
        adapters.insert(0, read_adapter(config.adapter))
    with blame_config(weights_folder):
        model = _select_tensors(path, config, row, indexed, options)
        weights = _weights(model, adapters, options)
        tensors, outtype = _convert_tensors(model, weights, options)
        keys, general = _metadata(model, tensors, outtype, options)
        outtype = _as_named(outtype, keys)
        if isinstance(config, DraftConfig) and not (options.vocab_only or options.allow_incomplete):
            check_target(config, keys, {item.info.name: item.expr.shape for item in tensors})
        vocabulary = _vocabulary(config, keys, options)
        vocabulary.community_template = not options.disable_mistral_community_chat_template
        with no_collection():
            row.vocab(vocabulary)
    folders = dict.fromkeys((path, vocabulary.folder))
    files = [folder / name for folder in folders for name in OTHER_FILES if (folder / name).is_file()]
    files += [options.metadata] if options.metadata else []
    files += [file for adapter in adapters for file in adapter.files]
    parts = dict.fromkeys(part.path for item in tensors for part in item.expr.parts())
    files += [part for part in parts if part not in {*model.files, *files}]
    checkpoint = Checkpoint(path, (*model.files, *files), keys.fields, tensors, outtype, identity(adapters))
    checkpoint.general, checkpoint.kind, checkpoint.omissions = general, options.kind, tuple(keys.omissions)
    checkpoint.has_encoders = has_encoders(config)
    with no_collection():
        ids = check_ids(vocabulary, checkpoint, options.allow_other_ids)
    adapter_notes = notes_of(adapters, TextPart(model.row, model.context))
    omission = None if options.kind else dense_modules.omission_of(config, checkpoint.files, row.dense_modules)
    if omission is not None:
        checkpoint.omissions = (*checkpoint.omissions, omission)
    draft_notes = target_notes(config, keys) if isinstance(config, DraftConfig) else []
    checkpoint.notes = (*_lossless_note(weights, options), *adapter_notes, *ids, *draft_notes)
    return checkpoint


def _read_config(path: Path, options: OpenOptions) -> tuple[Config, Architecture]:
    """Return the configuration of a checkpoint, of a draft with its target, and its row."""
    base = None if options.base is None else locate(options.base)
    config = read_model(path, options.mistral_format, base)
    row = find_architecture(config)
    if base is not None and not isinstance(config, AdapterConfig):
        raise RecipeError(
            f"{path}: {config.architecture} is a whole model, not an adapter of a base: omit --base", "QK-E216"
        )
    if options.dspark:
        if row.dspark is None:
            raise RecipeError(f"{path}: {config.architecture} has no draft model (DSpark): omit --dspark", "QK-E206")
        row = row.dspark
    check_nextn(options.nextn, row, config)
    config.values[dense_modules.OPTION] = options.dense_modules and row.dense_modules
    if not row.draft:
        if options.target_model_dir is not None:
            raise RecipeError(f"{path}: {config.architecture} is no draft model: omit --target-model-dir", "QK-E215")
        return config, row
    if options.target_model_dir is None:
        raise RecipeError(
            f"{path}: {config.architecture} is a draft model, which has the vocabulary of its target: give "
            "--target-model-dir DIR, the checkpoint of the model that it guesses for",
            "QK-E215",
        )
    folder = locate(options.target_model_dir)
    with blame_config(folder):
        target = read_model(folder)
        target_row = find_architecture(target)
        if target_row.draft:
            raise FormatError(f"{folder}: {target.architecture} is a draft model itself, not a target", "QK-E207")
        raw = read_json(folder / "config.json")
        arch = (target_row.dispatch(target) or target_row).arch
        return DraftConfig(config, Target(folder, target, raw, target_row.vocab, arch)), row


def _vocabulary(config: Config, keys: Keys, options: OpenOptions) -> Vocabulary:
    """Return the tokenizer of a model, of a draft that of its target."""
    if not isinstance(config, DraftConfig):
        return Vocabulary(config.path.parent, config, keys, options.pre)
    return Vocabulary(config.target.folder, config, keys, options.pre, config.target.config)


@contextmanager
def blame_config(folder: Path) -> Iterator[None]:
    """Convert errors of values with unexpected types to FormatErrors."""
    try:
        yield
    except VALUE_ERRORS as e:
        path = folder / "config.json"
        raise FormatError(f"{path}: a value is invalid for its architecture: {short(str(e))}", "QK-E112") from e


def prefix_of(options: OpenOptions) -> str:
    """Return the beginning of the names of the files with tensors."""
    return "consolidated" if options.mistral_format else "model"


def _read_headers(path: Path, options: OpenOptions) -> list[dict[str, StoredTensor]]:
    prefix = prefix_of(options)
    if options.vocab_only and not any(path.glob(f"{prefix}*.safetensors*")):
        return []
    return read_checkpoint(path, prefix, allow_incomplete=options.allow_incomplete or options.vocab_only)


def _select_tensors(
    path: Path, config: Config, row: Architecture, indexed: list[dict[str, StoredTensor]], options: OpenOptions
) -> _Model:
    """Return the model with the stored tensors of the file."""
    names = {name for tensors in indexed for name in tensors}
    row.patch_config(config)
    row.inspect_tensors(config, {name for name in names if is_selected(text_name(name) or "", options.nextn, config)})
    layers = config.layers if options.nextn == WITHOUT else row.layers(config)
    name_layers = layers if row.name_layers is None else row.name_layers(config)
    context = Context(config, TensorNames(row.arch, name_layers))
    stored = stored_tensors(indexed, row, context, options.nextn)
    if options.kind == "mtp" and not any(is_nextn_tensor(name, config) for name in stored):
        raise FormatError(f"{path}: has no prediction layers (MTP): omit --mtp", "QK-E206")
    files = tuple(file for tensors in indexed for file in {t.path for t in tensors.values()})
    return _Model(path, config, row, layers, context, stored, files)


def _weights(model: _Model, adapters: Sequence[Adapter], options: OpenOptions) -> DecodedTensors:
    """Return the weights: decoded if quantized, with the adapters merged, in the order of the row."""
    weights = DecodedTensors({})
    if options.vocab_only:
        return weights
    weights = decode_tensors(model.stored, model.config, lossless=options.lossless)
    if adapters:
        weights = merge_adapters(weights, adapters, TextPart(model.row, model.context))
    weights = model.row.reorder(weights, model.config)
    return replace(weights, tensors=weights.tensors | model.row.extra(model.config))


def _convert_tensors(
    model: _Model, weights: DecodedTensors, options: OpenOptions
) -> tuple[list[ConvertedTensor], OutType]:
    """Return the tensors of the file in order, and its type."""
    outtype = find_outtype(options.outtype, model.stored.values())
    if options.vocab_only:
        return [], outtype
    row, context = model.row, model.context
    parts = named_tensors(weights.tensors, row.rules, context, row.synthetic(model.config), weights.first)
    parts = add_scale_tensors(fuse_tensors(parts, options.fuse, weights.tensors, context))
    converted = converted_tensors(parts, context.names, outtype, options.exact, options.fp8_as_q8)
    return converted, _as_stored(outtype, converted)


def _metadata(
    model: _Model, tensors: list[ConvertedTensor], outtype: OutType, options: OpenOptions
) -> tuple[Keys, General]:
    """Return the keys of the file except those of the vocabulary, and those of general.* as a record."""
    row, config = model.row, model.config
    keys = Keys(row.arch, config.path, model.layers, outtype.file_type)
    write_rows(row.first_keys, keys, config)
    if not options.vocab_only:
        write_rows(row.head_keys, keys, config)
    count = ParameterCount.from_shapes((item.info.name, item.expr.shape) for item in tensors)
    general = read_general(model.path, count, model_name=options.model_name, metadata=options.metadata)
    keys.text("general.type", "model")
    general.write(keys)
    write_rows((*row.base, *row.keys), keys, config)
    if options.vocab_only and "general.file_type" in keys.fields:
        keys.u32("general.file_type", outtype.file_type)  # also where experts stored as blocks name the type
    if options.nextn == WITHOUT:
        keys.remove(".nextn_predict_layers")
    keys.u32("general.quantization_version", 2)
    _set_precision(keys, config, tensors)
    return keys, general


def _lossless_note(weights: DecodedTensors, options: OpenOptions) -> list[str]:
    if options.lossless or not weights.lossless_count:
        return []
    return [
        f"{weights.lossless_count} weights are symmetric integers with group scales: use --lossless to store them "
        "exactly, as Q4_0 or Q8_0"
    ]


#: Types of blocks in which tensors are kept -> llama.cpp's number of such files, their name.
_BLOCK_FILE_TYPES = {"NVFP4": (39, "NVFP4"), "MXFP4": (38, "MXFP4_MOE"), "Q4_0": (2, "Q4_0"), "Q8_0": (7, "Q8_0")}


def _as_stored(outtype: OutType, converted: list[ConvertedTensor]) -> OutType:
    """Return the type of a file that keeps some tensors as stored blocks."""
    types = {item.info.type.name for item in converted}
    return of_blocks(outtype, next((name for name in _BLOCK_FILE_TYPES if name in types), None))


def of_blocks(outtype: OutType, block_type: str | None) -> OutType:
    """Return the type of a file of floats whose checkpoint has blocks of a type; None: it has none."""
    if block_type is None or outtype.type not in FLOATS:
        return outtype
    file_type, name = _BLOCK_FILE_TYPES[block_type]
    return replace(outtype, file_type=file_type, name=name)


def _as_named(outtype: OutType, keys: Keys) -> OutType:
    """Return the type of a file whose architecture has experts as stored blocks in files of all types (DeepSeek V4)."""
    names = dict(_BLOCK_FILE_TYPES.values())
    file_type = keys.fields["general.file_type"].value if "general.file_type" in keys.fields else outtype.file_type
    return outtype if file_type == outtype.file_type else replace(outtype, name=names.get(file_type, outtype.name))


def _set_precision(keys: Keys, config: Config, converted: list[ConvertedTensor]) -> None:
    """Set the tensors whose inputs must not be rounded to 4 bits."""
    modules = weights_only(config)
    if not any(modules.values()):
        return
    names = []
    for tensor in (tensor for tensor in converted if tensor.info.type.name == "NVFP4"):
        module = tensor.source_name.removesuffix(".weight")
        while module and module not in modules:
            module = module.rpartition(".")[0]
        if modules[module]:
            names.append(tensor.info.name)
    keys.array("general.tensor_extra.name", sorted(names))
    keys.array("general.tensor_extra.prec_a4", [False] * len(names))


def stored_tensors(
    indexed: list[dict[str, StoredTensor]], row: Architecture, context: Context, nextn: str
) -> dict[str, Expression]:
    """Return the stored tensors of the text model, by their names in it."""
    stored: dict[str, Expression] = {}
    for tensors in indexed:
        for name, tensor in tensors.items():
            for text, x in text_tensors(row.stored, name, Stored(tensor), context):
                if not is_selected(text, nextn, context.config):
                    continue
                if text in stored:
                    raise FormatError(
                        f"{tensor.path}: tensor {short(name)}: two tensors are named {short(text)}", "QK-E107"
                    )
                stored[text] = x
    return stored
