"""A GGUF file as the source of a checkpoint's tensors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from quantkit.checkpoint.class_defaults import with_defaults
from quantkit.checkpoint.config import Config, Json, unify_text_config
from quantkit.checkpoint.export.biases import set_biases
from quantkit.checkpoint.export.card import card_files
from quantkit.checkpoint.export.classes import find_class, tensor_names_of
from quantkit.checkpoint.export.comparison import compare_keys
from quantkit.checkpoint.export.config import check_keys, make_config, nest_text_config, text_config_of, token_ids
from quantkit.checkpoint.export.encoders import find_encoders
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata, plain
from quantkit.checkpoint.export.tensor_values import EncodedTensor, read_tensors
from quantkit.checkpoint.export.tokenizer import tokenizer_files
from quantkit.checkpoint.expressions import (
    F32,
    PIECE,
    TYPE_BF16,
    TYPE_F16,
    TYPE_F32,
    Expression,
    as_f32,
    cast,
    from_f32,
    read_f32,
    size_of,
    value_bytes,
    values_in,
)
from quantkit.checkpoint.fusions import split_tensors
from quantkit.checkpoint.general import SAMPLING
from quantkit.checkpoint.policy import OUTTYPES, type_of
from quantkit.checkpoint.pooling import pooling_files
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.tensor_names import TensorNames
from quantkit.checkpoint.tensors import (
    Context,
    InverseContext,
    Tensor,
    apply_rules,
    invert_rules,
    named_tensors,
    text_name,
)
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError, TypeNotSupported, os_error_code
from quantkit.formats.gguf import Field, GGUFFile, TensorInfo
from quantkit.formats.gguf.mmproj import check_language_model
from quantkit.formats.gguf.rules import short
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType

#: Values of --outtype, by the dtype of transformers.
DTYPES = {"f32": ("float32", TYPE_F32), "f16": ("float16", TYPE_F16), "bf16": ("bfloat16", TYPE_BF16)}
#: Prefixes of layers' tensors; T5 has two stacks.
_IN_LAYER = re.compile(r"(enc\.|dec\.)?blk\.(\d+)\.")
#: Renames in every checkpoint (the inverse of ``tensors.text_name``).
_RENAMED = ((r"e_score_correction\.bias$", "e_score_correction_bias"),)


@dataclass
class ExportSource:
    """An open export: the ``expressions`` of its tensors, and the text ``files`` beside the weights.

    ``origins``: the file's tensors that each is computed from; none if it is metadata in the file.
    """

    model: GGUFFile
    architecture: str
    dtype: str
    expressions: dict[str, Expression]
    origins: dict[str, tuple[StoredTensor, ...]]
    files: dict[str, bytes]
    notes: list[str] = field(default_factory=list)
    mmproj: GGUFFile | None = None

    def __post_init__(self) -> None:
        self.paths: tuple[Path, ...] = (*self.model.paths, *(() if self.mmproj is None else self.mmproj.paths))
        #: A checkpoint has no metadata of this kind.
        self.fields: dict[str, Field] = {}
        self.tensors = {
            name: TensorInfo(name, x.shape[::-1] or (1,), x.type, value_bytes(x.type, size_of(x)), 0, 0)
            for name, x in self.expressions.items()
        }

    @property
    def inputs(self) -> tuple[Path, ...]:
        """See ``pipeline.source``."""
        return (*self.model.inputs, *(() if self.mmproj is None else self.mmproj.inputs))

    def get(self, key: str, default: Any = None) -> Any:
        """Return ``default``: a checkpoint has no metadata of this kind."""
        return default

    def read(self, tensor: TensorInfo, out: U8, offset: int, readahead: int = 0) -> None:
        """Fill ``out`` from byte ``offset`` of a tensor on. See ``pipeline.source``."""
        self.expressions[tensor.name].read(values_in(tensor.type, offset), out, readahead)
        if tensor.type is TYPE_F16 and not np.isfinite(out.view(np.float16)).all():
            raise FormatError(
                f"{self.where(tensor)}: tensor {short(tensor.name)} has values that exceed float16, or are not "
                "finite: use --outtype bf16 or f32",
                "QK-E305",
            )

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        """Return the place of a tensor's bytes, or None if it is computed."""
        x = self.expressions[tensor.name]
        return (x.path, x.info.offset) if isinstance(x, EncodedTensor) and x.info.nbytes == tensor.nbytes else None

    def stored_tensor(self, tensor: TensorInfo) -> TensorInfo:
        """Return the tensor unchanged."""
        return tensor

    def where(self, tensor: TensorInfo) -> str:
        """Return the file that a tensor is computed from."""
        part = next(self.expressions[tensor.name].parts(), None)
        return str(self.paths[0] if part is None else part.path)

    def fingerprint(self) -> str:
        """Return a SHA-256 over the GGUF file and the exported files."""
        digest = hashlib.sha256(self.model.fingerprint().encode())
        digest.update(f"{self.architecture} {self.dtype}".encode())
        if self.mmproj is not None:
            digest.update(self.mmproj.fingerprint().encode())
        for name, data in self.files.items():
            digest.update(name.encode() + data)
        return digest.hexdigest()


#: Errors of class-specific functions on metadata of unexpected types, shapes or lengths.
_METADATA_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError)


def open_export(
    model: GGUFFile,
    *,
    outtype: str = "auto",
    architecture: str | None = None,
    tokenizer: bool = True,
    mmproj: GGUFFile | None = None,
) -> ExportSource:
    """Read a GGUF file as the checkpoint it may come from.

    Args:
        model: an open file.
        outtype: f32, f16, bf16, or auto: the type of the first matrix that is one of them, else bf16.
        architecture: the transformers class, if an architecture has several.
        tokenizer: also write the files of the tokenizer.
        mmproj: the open file of its encoders, to export the whole model.

    Raises:
        FormatError: the file is damaged, or contradicts its metadata.
        TypeNotSupported: an architecture, key, tensor, type or vocabulary that cannot be exported, with the reason.
    """
    if outtype not in (*DTYPES, "auto"):
        raise RecipeError(f"--outtype {outtype}: choose one of {', '.join(DTYPES)}, auto", "QK-E203")
    try:
        return _open(model, outtype, architecture, mmproj, tokenizer=tokenizer)
    except _METADATA_ERRORS as e:
        reason = short(f"{type(e).__name__}: {e}")
        raise FormatError(
            f"{model.paths[0]}: its metadata is not valid for its architecture: {reason}", "QK-E123"
        ) from e


def _open(
    model: GGUFFile, outtype: str, architecture: str | None, mmproj: GGUFFile | None, *, tokenizer: bool
) -> ExportSource:
    """Read a GGUF file; arguments and errors as for ``open_export``, except those of wrong metadata."""
    arch = model.get("general.architecture")
    if not isinstance(arch, str):
        raise FormatError(f"{model.paths[0]}: not a model: it has no general.architecture", "QK-E123")
    meta = ModelMetadata(model, arch)
    check_language_model(model)
    encoders = None if mmproj is None else find_encoders(mmproj, meta, architecture)
    if encoders is None:
        name, row, hf_class = find_class(meta, architecture)
    else:
        name, row, hf_class = encoders.name, replace(encoders.row, arch=meta.arch), encoders.hf.text
    dtype, target_type = DTYPES[_first_matrix_type(model) if outtype == "auto" else outtype]
    values = nest_text_config(make_config(meta, name, row, hf_class, dtype), hf_class)
    preprocessor = {} if encoders is None else {"preprocessor_config.json": _json(encoders.files(values))}
    files = {
        **preprocessor,
        "config.json": _json(values),
        "generation_config.json": _json(_generation_config(model)),
        **pooling_files(meta),
    }
    files |= card_files(model)
    notes = [hf_class.note] * bool(hf_class.note)
    if encoders is None and (hf_class.outer_type or "vision_config" in values):
        notes.append(
            f"{name} also has a vision tower, which GGUF files of text models do not contain: only the text model is "
            "written, and transformers initializes a small tower randomly; --mmproj FILE adds the tower"
        )
    vocabulary_notes: list[str] = []
    if tokenizer:
        vocabulary_files, vocabulary_notes = tokenizer_files(model)
        files |= vocabulary_files
    with _temporary_folder(files, model) as folder:
        config = Config(folder / "config.json", unify_text_config(with_defaults(values)))
        row = replace(row.dispatch(config) or row, arch=meta.arch)
        row.patch_config(config)
        names = TensorNames(row.arch, row.layers(config))
        kinds = tensor_names_of(row, hf_class)
        parts, options = split_tensors(read_tensors(model, kinds), kinds, hf_class.names, config)
        tensors = _tensors(meta, parts, row, hf_class, Context(config, names))
        f32_names, as_stored = _check_round_trip(parts, row, tensors, Context(config, names), target_type)
        set_biases(text_config_of(values, hf_class), name, tensors, meta.path)
        files["config.json"] = _json(values)
        notes += check_keys(model, row, config)  # last, because rules also replace values that are keys
        notes += compare_keys(model, folder, row, config, tokenizer=tokenizer)
        tower = {} if encoders is None else encoders.tensors(folder, tensors)
    if options:
        notes.append(f"fused tensors are split; to fuse them again, convert with {' '.join(options)}")
    expressions: dict[str, Expression] = {}
    origins: dict[str, tuple[StoredTensor, ...]] = {}
    for tensor_name, x in sorted(tensors.items()):
        origins[tensor_name] = tuple(dict.fromkeys(x.parts()))
        expressions[tensor_name] = x if _keeps_type(x, as_stored) else _cast_tensor(x, target_type, f32_names)
    for tensor_name, x in sorted(tower.items()):
        origins[tensor_name] = tuple(dict.fromkeys(x.parts()))
        expressions[tensor_name] = _cast_tower(x, target_type)
    if mmproj is not None and (narrow := _f16_tensors(mmproj, tower)):
        notes.append(
            f"{', '.join(narrow)}: F16 in {mmproj.paths[0]}, as in mmproj files of every type: values below 2^-14 have "
            "fewer bits than in the original"
        )
    return ExportSource(model, name, dtype, expressions, origins, files, notes + vocabulary_notes, mmproj)


@contextmanager
def _temporary_folder(files: Mapping[str, bytes], model: GGUFFile) -> Iterator[Path]:
    """Yield a directory with the small files of the checkpoint, which conversion reads; errors name the GGUF file."""
    try:
        with TemporaryDirectory(prefix="quantkit-export-") as name:
            folder = Path(name)
            for file_name, data in files.items():
                (folder / file_name).parent.mkdir(exist_ok=True)
                (folder / file_name).write_bytes(data)
            try:
                yield folder
            except QuantkitError as e:
                message = e.message.replace(str(folder / "config.json"), str(model.paths[0]))
                raise type(e)(message.replace(str(folder), str(model.paths[0])), e.code) from None
    except OSError as e:
        raise ResourceError(
            f"a temporary directory for config.json and the tokenizer: {e.strerror or e}", os_error_code(e)
        ) from None


def _first_matrix_type(model: GGUFFile) -> str:
    """Return "bf16" if any matrix is quantized, else the first matrix type other than F32, else "f32"."""
    matrices = [t.type for t in model.tensors.values() if len(t.shape) > 1]
    if any(t not in (TYPE_F32, TYPE_F16, TYPE_BF16) for t in matrices):
        return "bf16"
    first = next((t for t in matrices if t is not TYPE_F32), TYPE_F32)
    return first.name.lower()


def _tensors(
    meta: ModelMetadata, parts: dict[str, Expression], row: Architecture, hf_class: HfClass, context: Context
) -> dict[str, Expression]:
    """Return the tensors of a checkpoint by name."""
    kinds = tensor_names_of(row, hf_class)
    inverse = InverseContext(context.config, context.names, fused=hf_class.fused)
    extra = {tensor.name_in_file or tensor.name for tensor in row.synthetic(context.config)}
    tensors: dict[str, Expression] = {}
    for name, x in parts.items():
        if name in extra:
            continue
        match = _IN_LAYER.match(name)
        file_tensor = Tensor(_checkpoint_name(context, name, kinds), x, int(match[2]) if match else None)
        for original in invert_rules((*row.stored, *row.rules), file_tensor, inverse):
            final = original.name
            for pattern, replacement in (*_RENAMED, *hf_class.renames):
                final = re.sub(pattern, replacement, final)
            final = hf_class.rename_last(context.config, final)
            if final in tensors:
                raise context.fail(original, f"{final} would occur twice", "QK-E107")
            tensors[final] = original.x
    tensors |= {extra_tensor.name: extra_tensor.x for extra_tensor in hf_class.synthetic(meta)}
    if inverse.waiting:
        _, joined_name = next(iter(inverse.waiting))
        raise FormatError(f"{context.config.path.parent}: a part of {joined_name} is missing", "QK-E105")
    return tensors


def _checkpoint_name(context: Context, name: str, kinds: dict[str, str]) -> str:
    """Return the checkpoint's name of a file's tensor, before rules are inverted."""
    layer = _IN_LAYER.match(name)
    stem = _IN_LAYER.sub(lambda match: f"{match[1] or ''}*", name)
    for suffix in ("", ".weight", ".bias"):
        pattern = kinds.get(stem.removesuffix(suffix)) if stem.endswith(suffix) else None
        if pattern is not None:
            return (pattern.replace("*", layer[2]) if layer else pattern) + suffix
    raise TypeNotSupported(
        f"{context.config.path.parent}: tensor {short(name)} cannot be stored in a checkpoint of "
        f"{context.config.architecture}",
        "QK-E305",
    )


def _check_round_trip(
    parts: dict[str, Expression],
    row: Architecture,
    tensors: dict[str, Expression],
    context: Context,
    target_type: TensorType,
) -> tuple[set[str], set[str]]:
    """Convert the exported tensors again and require the names and shapes of the GGUF file.

    Return the names of tensors that are also F32 in a file of type ``target_type``, and of those with their stored
    type.
    """
    stored: dict[str, Expression] = {}
    for name, x in sorted(tensors.items()):
        for item in apply_rules(row.stored, Tensor(name, x, None), context):
            if (text := text_name(item.name)) is not None:
                stored[text] = item.x
    converted = dict(named_tensors(stored, row.rules, context, row.synthetic(context.config)))
    converted_shapes = {name: t.x.shape for name, t in converted.items()}
    have = {name: x.shape for name, x in parts.items()}
    for name in (*have, *converted_shapes):
        if _drop_leading_ones(have.get(name)) != _drop_leading_ones(converted_shapes.get(name)):
            raise TypeNotSupported(
                f"{context.config.path.parent}: tensor {short(name)}: {_shape(have.get(name))} in the file, but "
                f"{_shape(converted_shapes.get(name))} after converting the checkpoint back",
                "QK-E305",
            )
    full = (
        n for n, t in converted.items() if type_of(n, t.x, t.layer, context.names, target_type, t.file_type) is TYPE_F32
    )
    stored_as = (n for n, t in converted.items() if isinstance(t.file_type, TensorType) and t.file_type is not TYPE_F32)
    return _origins(parts, full), _origins(parts, stored_as)


def _origins(parts: dict[str, Expression], names: Iterable[str]) -> set[str]:
    """Return the tensors of a file that an expression reads."""
    return {part.name for name in names for part in parts[name].parts()}


def _drop_leading_ones(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return a shape, outermost first, without dimensions of 1 in front, which llama-quantize drops."""
    return shape and tuple(dropwhile(lambda n: n == 1, shape))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _cast_tensor(x: Expression, target_type: TensorType, f32_names: set[str]) -> Expression:
    """Cast a tensor to ``target_type``; names in ``f32_names`` stay F32 if the cast would lose values."""
    part = next(x.parts(), None)
    if target_type is TYPE_F32 or x.type is not TYPE_F32 or part is not None and part.name not in f32_names:
        return cast(x, target_type)
    return cast(x, target_type) if _is_exact(x, target_type) else x


def _cast_tower(x: Expression, target_type: TensorType) -> Expression:
    """Cast a tensor of an encoder to ``target_type``, if that loses no values, or if it was quantized; not integers."""
    if x.type not in (TYPE_F32, TYPE_F16, TYPE_BF16):
        return x
    quantized = any(part.dtype not in ("F32", "F16", "BF16") for part in x.parts())
    return cast(x, target_type) if quantized or target_type is TYPE_F32 or _is_exact(x, target_type) else x


def _f16_tensors(mmproj: GGUFFile, tower: Mapping[str, Expression]) -> list[str]:
    """Return the tensors with values that an F16 part of a BF16 or F32 mmproj file cannot hold in full."""
    if mmproj.get("general.file_type") not in (OUTTYPES["bf16"].file_type, OUTTYPES["f32"].file_type):
        return []
    smallest = float(np.finfo(np.float16).smallest_normal)
    return [
        name
        for name, x in sorted(tower.items())
        if any(part.dtype == "F16" for part in x.parts())
        and any((np.abs(values) < smallest).any() for values in _pieces(x))
    ]


def _pieces(x: Expression) -> Iterator[F32]:
    """Yield all values of a tensor as float32, a part at a time."""
    for start in range(0, size_of(x), PIECE):
        yield read_f32(x, start, min(PIECE, size_of(x) - start))


def _keeps_type(x: Expression, as_stored: set[str]) -> bool:
    """Return whether a tensor keeps its type: integers, and floats already in the checkpoint's type."""
    part = next(x.parts(), None)
    return (
        x.type not in (TYPE_F32, TYPE_F16, TYPE_BF16)
        or x.type is TYPE_BF16
        and part is not None
        and part.name in as_stored
    )


def _is_exact(x: Expression, target_type: TensorType) -> bool:
    """Return whether a type holds all values exactly."""
    for values in _pieces(x):
        data = np.empty(value_bytes(target_type, values.size), np.uint8)
        from_f32(target_type, values, data)
        if not np.array_equal(as_f32(target_type, data), values):
            return False
    return True


def _generation_config(model: GGUFFile) -> Json:
    """Return generation_config.json: special tokens and sampling parameters."""
    values: Json = {name: number for name, number in token_ids(model).items() if number is not None}
    for key, names, _ in SAMPLING:
        if (value := model.get(f"general.sampling.{key}")) is not None:
            values |= {"do_sample": True, names[-1]: plain(value)}
    suppressed = model.get("tokenizer.ggml.suppress_tokens")
    return values if suppressed is None else values | {"suppress_tokens": suppressed}


def _json(value: Json) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
