"""The checkpoint itself: a source whose tensors are made while they are read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from quantkit.checkpoint.architectures import find_architecture
from quantkit.checkpoint.config import Config, read_config
from quantkit.checkpoint.expressions import (
    TYPE_BF16,
    TYPE_F16,
    TYPE_F32,
    Expression,
    Shaped,
    Stored,
    cast,
    floats,
    size_of,
    value_bytes,
    values_in,
)
from quantkit.checkpoint.fused import fused
from quantkit.checkpoint.general import General, ParameterCount, read_general
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.lora.merged import Given, identity, merged, notes_of, read_adapters
from quantkit.checkpoint.nextn import ONLY, WITH, WITHOUT, check_nextn, is_taken, predicts
from quantkit.checkpoint.policy import OutType, find_outtype, type_of, type_of_float8
from quantkit.checkpoint.quantized import Decoded, decoded, weights_only
from quantkit.checkpoint.quantized.beside import with_scales
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensor_names import TensorNames
from quantkit.checkpoint.tensors import Context, Tensor, named_tensors, text_name, text_tensors
from quantkit.checkpoint.vocab import WRITERS
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf import Field, TensorInfo
from quantkit.formats.gguf.rules import MAX_DIMS, short
from quantkit.formats.ranges import U8, both_ends
from quantkit.formats.remote import located
from quantkit.formats.safetensors import StoredTensor, read_checkpoint
from quantkit.types import TensorType
from quantkit.units import round_up

P = ParamSpec("P")

_FLOATS = (TYPE_F32, TYPE_F16, TYPE_BF16)
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
#: Bytes hashed at each end of every stored tensor for the fingerprint.
_SAMPLE = 4096
#: Files beside the weights that decide metadata.
_OTHER_FILES = (
    *("config.json", "generation_config.json", "README.md", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("merges.txt", "vocab.json", "vocab.txt", "model.safetensors.index.json", "hf_quant_config.json", "modules.json"),
    *("spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "hy.tiktoken", "qwen.tiktoken", "tokenizer.jsonl"),
    *("rwkv_vocab_v20230424.txt", "tekken.json"),
)


@dataclass(frozen=True)
class Made:
    """A tensor of the source: its place in the list, what it is made of, where that lies."""

    info: TensorInfo
    x: Expression
    #: Its name in the checkpoint.
    origin: str
    #: The type that a file of the chosen type gives it.
    wanted: TensorType


class Checkpoint:
    """An open checkpoint. ``outtype``: the type of files it is opened for; ``general``: what the model is called.

    ``kind`` is "vocab" or "mtp" if it is opened for that part of the model only.

    ``tensors`` have the type in which ``read`` gives them; ``made`` says what each is made of, and what type it is to
    have.
    """

    def __init__(
        self,
        folder: Path,
        files: tuple[Path, ...],
        fields: dict[str, Field],
        made: list[Made],
        outtype: OutType,
        identity: str = "",
    ) -> None:
        self.paths: tuple[Path, ...] = (folder,)
        self.files = files
        self.fields = fields
        self.made: dict[str, Made] = {each.info.name: each for each in made}
        self.tensors: dict[str, TensorInfo] = {each.info.name: each.info for each in made}
        self.outtype = outtype
        #: What decides its bytes and cannot be told from metadata and stored tensors.
        self.identity = identity
        self.general = General({}, {})
        self.kind = ""
        #: What is worth saying about it.
        self.notes: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[Path, ...]:
        """See ``pipeline.source``."""
        return self.files

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key, or ``default`` if there is none."""
        found = self.fields.get(key)
        return default if found is None else found.value

    def read(self, tensor: TensorInfo, into: U8, at: int, ahead: int = 0) -> None:
        """Fill ``into`` from byte ``at`` of a tensor on; both must be whole values. See ``pipeline.source``."""
        self.made[tensor.name].x.read(values_in(tensor.type, at), into, ahead)

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        """Return where a tensor lies as it is, or None if it has to be made."""
        x = self.made[tensor.name].x
        return (x.tensor.path, x.tensor.offset) if isinstance(x, Stored) and x.tensor.nbytes == tensor.nbytes else None

    def stored(self, tensor: TensorInfo) -> TensorInfo:
        """Return the tensor: it is read as it is."""
        return tensor

    def where(self, tensor: TensorInfo) -> str:
        """Return the file that a tensor, or the first part of it, is in."""
        part = next(self.made[tensor.name].x.parts(), None)
        return str(self.paths[0] if part is None else part.path)

    def fingerprint(self) -> str:
        """Return a SHA-256 over metadata, names and types, and both ends of every stored tensor."""
        digest = hashlib.sha256(self.identity.encode())
        for item in self.fields.values():
            digest.update(item.encode())
        parts: dict[tuple[Path, int], StoredTensor] = {}
        for each in self.made.values():
            t = each.info
            digest.update(f"{t.name} {t.shape} {t.type.id} {each.wanted.id} {type(each.x).__name__}".encode())
            for part in each.x.parts():
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
_MISTAKEN = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError)


def refusing(function: Callable[P, Checkpoint]) -> Callable[P, Checkpoint]:
    """Return ``function`` with such mistakes as FormatErrors."""

    @wraps(function)
    def refusing(*args: P.args, **kwargs: P.kwargs) -> Checkpoint:
        try:
            return function(*args, **kwargs)
        except _MISTAKEN as e:
            path = located(str(args[0] if args else kwargs["folder"])) / "config.json"
            raise FormatError(f"{path}: a value is not what its architecture needs: {short(str(e))}") from e

    return refusing


@refusing
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
    adapters: Sequence[Given] = (),
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

    Raises:
        FormatError: a file is broken, missing or of another model; the message names file and tensor.
        TypeNotSupported: an architecture or a quantization that is not converted.
    """
    path = located(folder)
    config = read_config(path)
    row = find_architecture(config)
    check_nextn(nextn, row, config)
    indexed = [] if vocab_only and not any(path.glob("model*.safetensors*")) else read_checkpoint(path)
    found = {name for tensors in indexed for name in tensors}
    row.prepare(config)
    row.look(config, {name for name in found if is_taken(text_name(name) or "", nextn, config)})
    layers = config.layers if nextn == WITHOUT else row.layers(config)
    context = Context(config, TensorNames(row.arch, layers))
    stored = stored_tensors(indexed, row, context, nextn)
    if nextn == ONLY and not vocab_only and not any(predicts(name, config) for name in stored):
        raise FormatError(f"{path}: it has no layers that predict more tokens: leave --mtp away")
    chosen = find_outtype(outtype, stored.values())
    meant = Decoded({}) if vocab_only else decoded(stored, config, lossless=lossless)
    tuned = read_adapters(adapters)
    if tuned:
        meant = merged(meant, tuned, row, context)
    meant = row.arrange(meant, config)
    made: list[Made] = []
    if not vocab_only:
        named = named_tensors(meant.tensors, row.rules, context, row.extra(config), meant.first)
        named = with_scales(fused(named, fuse, meant.tensors, context))
        made = all_made(named, context.names, chosen, exact, fp8_as_q8)
        chosen = _as_stored(chosen, made)
    keys = Keys(row.arch, config.path)
    for write in () if vocab_only else row.early:
        write(keys, config)
    count = ParameterCount.of((each.info.name, each.x.shape) for each in made)
    general = read_general(path, count, model_name=model_name, metadata=metadata)
    keys.text("general.type", "model")
    general.write(keys)
    row.base(keys, config, layers, chosen.file_type)
    for write in row.keys:
        write(keys, config)
    if nextn == WITHOUT:
        keys.remove(".nextn_predict_layers")
    keys.u32("general.quantization_version", 2)
    _set_precision(keys, config, made)
    WRITERS[row.vocab](Vocabulary(path, config, keys, pre))
    files = [each for tensors in indexed for each in {t.path for t in tensors.values()}]
    files += [path / name for name in _OTHER_FILES if (path / name).is_file()] + ([metadata] if metadata else [])
    files += [each for adapter in tuned for each in adapter.files]
    opened = Checkpoint(path, tuple(files), keys.fields, made, chosen, identity(tuned))
    opened.general = general
    opened.kind = "vocab" if vocab_only else "mtp" if nextn == ONLY else ""
    if meant.could and not lossless:
        opened.notes = (
            f"{meant.could} weights are symmetric integers with scales of groups: --lossless keeps them as Q4_0 or "
            "Q8_0, with every value as it is",
        )
    opened.notes += tuple(notes_of(tuned, config))
    return opened


#: Types of blocks in which tensors are kept -> llama.cpp's number of such files, their name.
_KEPT = {"NVFP4": (39, "NVFP4"), "MXFP4": (38, "MXFP4_MOE"), "Q4_0": (2, "Q4_0"), "Q8_0": (7, "Q8_0")}


def _as_stored(outtype: OutType, made: list[Made]) -> OutType:
    """Return what a file is called in which some tensors are kept as the blocks they are."""
    types = {each.info.type.name for each in made}
    kept = next((what for name, what in _KEPT.items() if name in types), None)
    return outtype if kept is None or outtype.type not in _FLOATS else replace(outtype, file_type=kept[0], name=kept[1])


def _set_precision(keys: Keys, config: Config, made: list[Made]) -> None:
    """Say of which tensors inputs are not to be rounded to 4 bits, too."""
    modules = weights_only(config)
    if not any(modules.values()):
        return
    names = []
    for each in (each for each in made if each.info.type.name == "NVFP4"):
        module = each.origin.removesuffix(".weight")
        while module and module not in modules:
            module = module.rpartition(".")[0]
        if modules[module]:
            names.append(each.info.name)
    keys.array("general.tensor_extra.name", sorted(names))
    keys.array("general.tensor_extra.prec_a4", [False] * len(names))


def stored_tensors(
    indexed: list[dict[str, StoredTensor]], row: Architecture, context: Context, nextn: str
) -> dict[str, Expression]:
    """Return the stored tensors of the text model, by the names they have there."""
    stored: dict[str, Expression] = {}
    for tensors in indexed:
        for name, tensor in tensors.items():
            for found, x in text_tensors(row.stored, name, Stored(tensor), context):
                if not is_taken(found, nextn, context.config):
                    continue
                if found in stored:
                    raise FormatError(f"{tensor.path}: tensor {short(name)}: two tensors are called {short(found)}")
                stored[found] = x
    return stored


def all_made(
    named: Iterable[tuple[str, Tensor]], names: TensorNames, outtype: OutType, exact: bool, q8: bool
) -> list[Made]:
    """Return the tensors of the file in order; ``q8``: those of float8 are to be Q8_0."""
    made: list[Made] = []
    at = 0  # where it would lie in a file of its own: offsets only give the order
    for name, tensor in named:
        made.append(_made(name, tensor, names, outtype, exact, at, q8))
        at += round_up(made[-1].info.nbytes, 32)
    return made


def _made(name: str, tensor: Tensor, names: TensorNames, outtype: OutType, exact: bool, at: int, q8: bool) -> Made:
    x = tensor.x
    if not x.shape:
        x = Shaped(x, (1,))
    wanted = type_of(name, x, tensor.layer, names, outtype.type, tensor.typed)
    if q8 and tensor.typed is None and x.type.block == 1 and any(part.dtype in _FLOAT8 for part in x.parts()):
        wanted = type_of_float8(name, x)
    if x.type.name in ("Q4_0", "Q8_0") and type_of(name, floats(x), tensor.layer, names, TYPE_F16) is TYPE_F32:
        x, wanted = floats(x), TYPE_F32  # a router, say
    given = x.type
    if given.block == 1:
        given = wanted if (not exact and wanted in _FLOATS) or wanted is TYPE_F32 else x.type
        x = cast(x, given)
    if len(x.shape) > MAX_DIMS or 0 in x.shape:
        part = next(x.parts(), None)
        where = part.path if part is not None else tensor.name
        raise FormatError(f"{where}: tensor {short(tensor.name)} has the shape {list(x.shape)}; no file holds that")
    nbytes = value_bytes(given, size_of(x))
    return Made(TensorInfo(name, x.shape[::-1], given, nbytes, at, 0), x, tensor.name, wanted)
