"""The checkpoint itself: a source whose tensors are made while they are read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from quantkit.checkpoint.config import Config, read_config
from quantkit.checkpoint.expressions import (
    TYPE_BF16,
    TYPE_F16,
    TYPE_F32,
    Expression,
    Shaped,
    Stored,
    as_floats,
    cast,
    size_of,
    value_bytes,
    values_in,
)
from quantkit.checkpoint.fusions import fuse_tensors
from quantkit.checkpoint.general import General, ParameterCount, read_general
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.lora.merge import AdapterSpec, identity, merge_adapters, notes_of, read_adapters
from quantkit.checkpoint.nextn import ONLY, WITH, WITHOUT, check_nextn, is_nextn_tensor, is_selected
from quantkit.checkpoint.policy import OutType, find_outtype, type_of, type_of_float8
from quantkit.checkpoint.quantized import DecodedTensors, decode_tensors, weights_only
from quantkit.checkpoint.quantized.scale_tensors import add_scale_tensors
from quantkit.checkpoint.registry import find_architecture
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensor_names import TensorNames
from quantkit.checkpoint.tensors import Context, Tensor, named_tensors, text_name, text_tensors
from quantkit.checkpoint.vocab.check import check_ids
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf import Field, TensorInfo
from quantkit.formats.gguf.rules import GGML_DIMS, short
from quantkit.formats.ranges import U8, both_ends
from quantkit.formats.remote import located
from quantkit.formats.safetensors import StoredTensor, read_checkpoint
from quantkit.process import no_collection
from quantkit.types import TensorType
from quantkit.units import round_up

P = ParamSpec("P")

_FLOATS = (TYPE_F32, TYPE_F16, TYPE_BF16)
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
#: Bytes hashed at each end of every stored tensor for the fingerprint.
_SAMPLE = 4096
#: Files beside the weights that decide metadata.
_OTHER_FILES = (
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
)

#: Classes of expressions that have another name in fingerprints, which stay the same when a class is renamed.
_FINGERPRINT_NAMES = {
    "Centered": "AroundZero",
    "Concatenated": "Joined",
    "EncodedTensor": "Encoded",
    "ExpertTable": "Table",
}


@dataclass(frozen=True)
class ConvertedTensor:
    """A converted tensor: its info, its expression, its source name and its target type."""

    info: TensorInfo
    expr: Expression
    #: Its name in the checkpoint.
    source_name: str
    #: The type that a file of the chosen type gives it.
    target_type: TensorType


class Checkpoint:
    """An open checkpoint. ``outtype``: the type of files it is opened for; ``general``: the values of general.*.

    ``kind`` is "vocab" or "mtp" if it is opened for that part of the model only.

    ``tensors`` have the type in which ``read`` gives them; ``converted`` has the expression of each, and the type that
    it is to have.
    """

    def __init__(
        self,
        folder: Path,
        files: tuple[Path, ...],
        fields: dict[str, Field],
        converted: list[ConvertedTensor],
        outtype: OutType,
        identity: str = "",
    ) -> None:
        self.paths: tuple[Path, ...] = (folder,)
        self.files = files
        self.fields = fields
        self.converted: dict[str, ConvertedTensor] = {item.info.name: item for item in converted}
        self.tensors: dict[str, TensorInfo] = {item.info.name: item.info for item in converted}
        self.outtype = outtype
        #: What decides its bytes and cannot be told from metadata and stored tensors.
        self.identity = identity
        self.general = General({}, {})
        self.kind = ""
        #: What is worth saying about it.
        self.notes: tuple[str, ...] = ()
        #: What its files say and a GGUF file cannot.
        self.omissions: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[Path, ...]:
        """See ``pipeline.source``."""
        return self.files

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key, or ``default`` if there is none."""
        field = self.fields.get(key)
        return default if field is None else field.value

    def read(self, tensor: TensorInfo, out: U8, offset: int, readahead: int = 0) -> None:
        """Fill ``out`` from byte ``offset`` of a tensor on; both must be whole values. See ``pipeline.source``."""
        self.converted[tensor.name].expr.read(values_in(tensor.type, offset), out, readahead)

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        """Return the place of a tensor's bytes, or None if it is computed."""
        x = self.converted[tensor.name].expr
        return (x.tensor.path, x.tensor.offset) if isinstance(x, Stored) and x.tensor.nbytes == tensor.nbytes else None

    def stored(self, tensor: TensorInfo) -> TensorInfo:
        """Return the tensor unchanged."""
        return tensor

    def where(self, tensor: TensorInfo) -> str:
        """Return the file that a tensor, or the first part of it, is in."""
        part = next(self.converted[tensor.name].expr.parts(), None)
        return str(self.paths[0] if part is None else part.path)

    def fingerprint(self) -> str:
        """Return a SHA-256 over metadata, names and types, and both ends of every stored tensor."""
        digest = hashlib.sha256(self.identity.encode())
        for item in self.fields.values():
            digest.update(item.encode())
        parts: dict[tuple[Path, int], StoredTensor] = {}
        for tensor in self.converted.values():
            t = tensor.info
            expression = type(tensor.expr).__name__
            expression = _FINGERPRINT_NAMES.get(expression, expression)
            digest.update(f"{t.name} {t.shape} {t.type.id} {tensor.target_type.id} {expression}".encode())
            for part in tensor.expr.parts():
                parts.setdefault((part.path, part.offset), part)
        files: dict[Path, list[StoredTensor]] = {}
        for part in parts.values():
            files.setdefault(part.path, []).append(part)
        for path, stored in files.items():
            ends = both_ends(path, ((part.offset, part.nbytes) for part in stored), _SAMPLE)
            for part, sample in zip(stored, ends, strict=True):
                digest.update(f"{part.name} {part.dtype} {part.shape}".encode())
                digest.update(sample)
        return digest.hexdigest()


#: What functions of rows raise where a value of config.json is of another type than they take it for.
VALUE_ERRORS = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError)


def blame_config(function: Callable[P, Checkpoint]) -> Callable[P, Checkpoint]:
    """Return ``function`` with such mistakes as FormatErrors."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Checkpoint:
        try:
            return function(*args, **kwargs)
        except VALUE_ERRORS as e:
            path = located(str(args[0] if args else kwargs["folder"])) / "config.json"
            raise FormatError(f"{path}: a value is not what its architecture needs: {short(str(e))}", "QK-E112") from e

    return wrapper


@blame_config
def open_checkpoint(
    folder: str | os.PathLike[str],
    *,
    outtype: str = "auto",
    exact: bool = False,
    pre: str | None = None,
    model_name: str | None = None,
    metadata: Path | None = None,
    nextn: str = WITH,
    fuse: Collection[str] = (),
    fp8_as_q8: bool = False,
    vocab_only: bool = False,
    lossless: bool = False,
    adapters: Sequence[AdapterSpec] = (),
    allow_other_ids: bool = False,
    allow_incomplete: bool = False,
) -> Checkpoint:
    """Open the checkpoint in a directory.

    Args:
        folder: with config.json, model*.safetensors and the files of the tokenizer.
        outtype: f32, f16, bf16, q8_0, tq1_0, tq2_0 or auto: the types of tensors, as convert_hf_to_gguf.py has them.
        exact: give tensors as they are stored or computed, not rounded to ``outtype``; those that are always F32 are.
        pre: the name of the pre-tokenizer, where its hash is not known.
        model_name: general.name.
        metadata: a JSON file of keys that override what is found.
        nextn: layers that predict more tokens: ``with`` them, ``without``, or ``only`` them.
        fuse: options of ``fused.FUSIONS``.
        fp8_as_q8: matrices that are stored as float8 become Q8_0, whatever ``outtype`` is.
        vocab_only: metadata and vocabulary, no tensors.
        lossless: keep quantized weights as blocks wherever that changes no value.
        adapters: directories of LoRA adapters to merge into the weights, and by what their scales are multiplied.
        allow_other_ids: ``pre`` may make the file tokenize a text otherwise than the checkpoint does.
        allow_incomplete: shards may be missing.

    Raises:
        FormatError: a file is broken, missing or of another model; the message names file and tensor.
        TypeNotSupported: an architecture or a quantization that is not converted.
    """
    path = located(folder)
    config = read_config(path)
    row = find_architecture(config)
    check_nextn(nextn, row, config)
    without = vocab_only and not any(path.glob("model*.safetensors*"))
    indexed = [] if without else read_checkpoint(path, allow_incomplete=allow_incomplete or vocab_only)
    names = {name for tensors in indexed for name in tensors}
    row.patch_config(config)
    row.inspect_tensors(config, {name for name in names if is_selected(text_name(name) or "", nextn, config)})
    layers = config.layers if nextn == WITHOUT else row.layers(config)
    context = Context(config, TensorNames(row.arch, layers))
    stored = stored_tensors(indexed, row, context, nextn)
    if nextn == ONLY and not vocab_only and not any(is_nextn_tensor(name, config) for name in stored):
        raise FormatError(f"{path}: it has no layers that predict more tokens: omit --mtp", "QK-E206")
    output_type = find_outtype(outtype, stored.values())
    weights = DecodedTensors({}) if vocab_only else decode_tensors(stored, config, lossless=lossless)
    lora_adapters = read_adapters(adapters)
    if lora_adapters:
        weights = merge_adapters(weights, lora_adapters, row, context)
    weights = row.reorder(weights, config)
    converted: list[ConvertedTensor] = []
    if not vocab_only:
        named_parts = named_tensors(weights.tensors, row.rules, context, row.synthetic(config), weights.first)
        named_parts = add_scale_tensors(fuse_tensors(named_parts, fuse, weights.tensors, context))
        converted = converted_tensors(named_parts, context.names, output_type, exact, fp8_as_q8)
        output_type = _as_stored(output_type, converted)
    keys = Keys(row.arch, config.path)
    for write in () if vocab_only else row.head_keys:
        write(keys, config)
    count = ParameterCount.from_shapes((item.info.name, item.expr.shape) for item in converted)
    general = read_general(path, count, model_name=model_name, metadata=metadata)
    keys.text("general.type", "model")
    general.write(keys)
    row.base(keys, config, layers, output_type.file_type)
    for write in row.keys:
        write(keys, config)
    if nextn == WITHOUT:
        keys.remove(".nextn_predict_layers")
    keys.u32("general.quantization_version", 2)
    _set_precision(keys, config, converted)
    vocabulary = Vocabulary(path, config, keys, pre)
    with no_collection():
        row.vocab(vocabulary)
    files = [file for tensors in indexed for file in {t.path for t in tensors.values()}]
    files += [path / name for name in _OTHER_FILES if (path / name).is_file()] + ([metadata] if metadata else [])
    files += [file for adapter in lora_adapters for file in adapter.files]
    checkpoint = Checkpoint(path, tuple(files), keys.fields, converted, output_type, identity(lora_adapters))
    checkpoint.general = general
    if vocab_only:
        checkpoint.kind = "vocab"
    elif nextn == ONLY:
        checkpoint.kind = "mtp"
    checkpoint.omissions = tuple(keys.omissions)
    if weights.lossless_count and not lossless:
        checkpoint.notes = (
            f"{weights.lossless_count} weights are symmetric integers with scales of groups: --lossless keeps them as "
            "Q4_0 or Q8_0, with every value as it is",
        )
    checkpoint.notes += tuple(notes_of(lora_adapters, config))
    with no_collection():
        checkpoint.notes += check_ids(vocabulary, checkpoint, allow_other_ids)
    return checkpoint


#: Types of blocks in which tensors are kept -> llama.cpp's number of such files, their name.
_BLOCK_FILE_TYPES = {"NVFP4": (39, "NVFP4"), "MXFP4": (38, "MXFP4_MOE"), "Q4_0": (2, "Q4_0"), "Q8_0": (7, "Q8_0")}


def _as_stored(outtype: OutType, converted: list[ConvertedTensor]) -> OutType:
    """Return the type of a file that keeps some tensors as stored blocks."""
    types = {item.info.type.name for item in converted}
    block_type = next((file_type for name, file_type in _BLOCK_FILE_TYPES.items() if name in types), None)
    return (
        outtype
        if block_type is None or outtype.type not in _FLOATS
        else replace(outtype, file_type=block_type[0], name=block_type[1])
    )


def _set_precision(keys: Keys, config: Config, converted: list[ConvertedTensor]) -> None:
    """Set which tensors' inputs are not to be rounded to 4 bits."""
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
    """Return the stored tensors of the text model, by the names they have there."""
    stored: dict[str, Expression] = {}
    for tensors in indexed:
        for name, tensor in tensors.items():
            for text, x in text_tensors(row.stored, name, Stored(tensor), context):
                if not is_selected(text, nextn, context.config):
                    continue
                if text in stored:
                    raise FormatError(
                        f"{tensor.path}: tensor {short(name)}: two tensors are called {short(text)}", "QK-E107"
                    )
                stored[text] = x
    return stored


def converted_tensors(
    tensors: Iterable[tuple[str, Tensor]], names: TensorNames, outtype: OutType, exact: bool, q8: bool
) -> list[ConvertedTensor]:
    """Return the tensors of the file in order; ``q8``: those of float8 are to be Q8_0."""
    converted: list[ConvertedTensor] = []
    offset = 0  # where it would lie in a file of its own: offsets only give the order
    for name, tensor in tensors:
        converted.append(_convert(name, tensor, names, outtype, exact, offset, q8))
        offset += round_up(converted[-1].info.nbytes, 32)
    return converted


def _convert(
    name: str, tensor: Tensor, names: TensorNames, outtype: OutType, exact: bool, offset: int, q8: bool
) -> ConvertedTensor:
    x = tensor.x
    if not x.shape:
        x = Shaped(x, (1,))
    target_type = type_of(name, x, tensor.layer, names, outtype.type, tensor.file_type)
    if q8 and tensor.file_type is None and x.type.block == 1 and any(part.dtype in _FLOAT8 for part in x.parts()):
        target_type = type_of_float8(name, x)
    if x.type.name in ("Q4_0", "Q8_0") and type_of(name, as_floats(x), tensor.layer, names, TYPE_F16) is TYPE_F32:
        x, target_type = as_floats(x), TYPE_F32  # a router, say
    stored_type = x.type
    if stored_type.block == 1:
        stored_type = target_type if (not exact and target_type in _FLOATS) or target_type is TYPE_F32 else x.type
        x = cast(x, stored_type)
    if len(x.shape) > GGML_DIMS or 0 in x.shape:
        part = next(x.parts(), None)
        where = part.path if part is not None else tensor.name
        raise FormatError(
            f"{where}: tensor {short(tensor.name)} has the shape {list(x.shape)}; no file holds that", "QK-E305"
        )
    nbytes = value_bytes(stored_type, size_of(x))
    return ConvertedTensor(TensorInfo(name, x.shape[::-1], stored_type, nbytes, offset, 0), x, tensor.name, target_type)
