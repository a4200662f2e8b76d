"""A GGUF file as the source of a checkpoint's tensors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from quantkit.checkpoint.back import families  # noqa: F401  what undoes rules of single families
from quantkit.checkpoint.back.classes import find_class, spelled_kinds
from quantkit.checkpoint.back.config import check_keys, make_config, nested, token_ids
from quantkit.checkpoint.back.encoded import Encoded, encoded_tensors
from quantkit.checkpoint.back.encoders import pooling_files
from quantkit.checkpoint.back.rules import Backward, all_undone
from quantkit.checkpoint.back.said import Said
from quantkit.checkpoint.back.spelling import Spelling
from quantkit.checkpoint.back.tokenizer import tokenizer_files
from quantkit.checkpoint.back.unfused import unfused
from quantkit.checkpoint.class_defaults import with_defaults
from quantkit.checkpoint.config import Config, Json, text_outside
from quantkit.checkpoint.expressions import (
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
from quantkit.checkpoint.policy import type_of
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensor_names import TensorNames
from quantkit.checkpoint.tensors import Context, Tensor, applied, named_tensors, text_name
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError, TypeNotSupported
from quantkit.formats.gguf import Field, GGUFFile, TensorInfo
from quantkit.formats.gguf.rules import short
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType

#: What --outtype takes, by the dtype of transformers.
DTYPES = {"f32": ("float32", TYPE_F32), "f16": ("float16", TYPE_F16), "bf16": ("bfloat16", TYPE_BF16)}
#: What tensors of layers begin with; T5 has two stacks of them.
_IN_LAYER = re.compile(r"(enc\.|dec\.)?blk\.(\d+)\.")
#: What is renamed in every checkpoint (``tensors.text_name`` backwards).
_RENAMED = ((r"e_score_correction\.bias$", "e_score_correction_bias"),)


@dataclass
class Exported:
    """An open export: ``made`` says what each tensor is made of, ``files`` what lies beside the weights, as text.

    ``origins``: of what tensors of the file each is made; of none if it is metadata there.
    """

    model: GGUFFile
    architecture: str
    dtype: str
    made: dict[str, Expression]
    origins: dict[str, tuple[StoredTensor, ...]]
    files: dict[str, bytes]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.paths: tuple[Path, ...] = self.model.paths
        #: A checkpoint has no metadata of this kind.
        self.fields: dict[str, Field] = {}
        self.tensors = {
            name: TensorInfo(name, x.shape[::-1] or (1,), x.type, value_bytes(x.type, size_of(x)), 0, 0)
            for name, x in self.made.items()
        }

    @property
    def inputs(self) -> tuple[Path, ...]:
        """See ``pipeline.source``."""
        return self.model.inputs

    def get(self, key: str, default: Any = None) -> Any:
        """Return ``default``: a checkpoint has no metadata of this kind."""
        return default

    def read(self, tensor: TensorInfo, into: U8, at: int, ahead: int = 0) -> None:
        """Fill ``into`` from byte ``at`` of a tensor on. See ``pipeline.source``."""
        self.made[tensor.name].read(values_in(tensor.type, at), into, ahead)
        if tensor.type is TYPE_F16 and not np.isfinite(into.view(np.float16)).all():
            raise FormatError(
                f"{self.where(tensor)}: tensor {short(tensor.name)} holds values beyond float16 or none at all: "
                "--outtype bf16 or f32 takes them, if they are finite"
            )

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        """Return where a tensor lies as it is, or None if it has to be made."""
        x = self.made[tensor.name]
        return (x.path, x.info.offset) if isinstance(x, Encoded) and x.info.nbytes == tensor.nbytes else None

    def stored(self, tensor: TensorInfo) -> TensorInfo:
        """Return the tensor: it is read as it is."""
        return tensor

    def where(self, tensor: TensorInfo) -> str:
        """Return the file that a tensor is made from."""
        part = next(self.made[tensor.name].parts(), None)
        return str(self.paths[0] if part is None else part.path)

    def fingerprint(self) -> str:
        """Return a SHA-256 over the file and what is made of it."""
        digest = hashlib.sha256(self.model.fingerprint().encode())
        digest.update(f"{self.architecture} {self.dtype}".encode())
        for name, data in self.files.items():
            digest.update(name.encode() + data)
        return digest.hexdigest()


#: What functions of single classes meet where a file's metadata is of other types, shapes or lengths than a model's.
_MISTAKEN = (ArithmeticError, LookupError, TypeError, ValueError)


def open_export(
    model: GGUFFile, *, outtype: str = "auto", architecture: str | None = None, tokenizer: bool = True
) -> Exported:
    """Read a GGUF file as the checkpoint it may come from.

    Args:
        model: an open file.
        outtype: f32, f16, bf16, or auto: the type of the first matrix that is one of them, else bf16.
        architecture: the class of transformers, where an architecture has several.
        tokenizer: also make the files of the tokenizer.

    Raises:
        FormatError: the file is broken, or not what its metadata says.
        TypeNotSupported: an architecture, a key, a tensor, a type or a vocabulary that cannot be exported; why.
    """
    if outtype not in (*DTYPES, "auto"):
        raise RecipeError(f"--outtype {outtype}: there are {', '.join(DTYPES)}, auto")
    try:
        return _opened(model, outtype, architecture, tokenizer=tokenizer)
    except _MISTAKEN as e:
        said = short(f"{type(e).__name__}: {e}")
        raise FormatError(f"{model.paths[0]}: its metadata is not that of a model of its architecture: {said}") from e


def _opened(model: GGUFFile, outtype: str, architecture: str | None, *, tokenizer: bool) -> Exported:
    """Read a GGUF file; arguments and errors as for ``open_export``, beside those of wrong metadata."""
    said = Said(model, str(model.get("general.architecture")))
    name, row, spelling = find_class(said, architecture)
    dtype, wanted = DTYPES[_found_type(model) if outtype == "auto" else outtype]
    values = nested(make_config(said, name, row, spelling, dtype), spelling)
    files = {"config.json": _json(values), "generation_config.json": _json(_generation(model)), **pooling_files(said)}
    notes = [spelling.note] * bool(spelling.note)
    if spelling.inside or "vision_config" in values:
        notes.append(
            f"{name} also has a vision tower, which is in no file of a text model: only the text model is written, and "
            "transformers makes a small tower of random numbers"
        )
    more: list[str] = []
    if tokenizer:
        made_files, more = tokenizer_files(model)
        files |= made_files
    with _lying_there(files, model) as folder:
        config = Config(folder / "config.json", text_outside(with_defaults(values)))
        row = replace(row.instead(config) or row, arch=said.arch)
        row.prepare(config)
        names = TensorNames(row.arch, row.layers(config))
        kinds = spelled_kinds(row, spelling)
        parts, options = unfused(encoded_tensors(model, kinds), kinds, spelling.names, config)
        tensors = _tensors(said, parts, row, spelling, Context(config, names))
        kept, as_stored = _check_return(parts, row, tensors, Context(config, names), wanted)
        notes += check_keys(model, row, config)  # last, for rules find values that are keys
    if options:
        notes.append(f"the file's fused tensors are apart here; to have them again convert with {' '.join(options)}")
    made: dict[str, Expression] = {}
    origins: dict[str, tuple[StoredTensor, ...]] = {}
    for each, x in sorted(tensors.items()):
        origins[each] = tuple(dict.fromkeys(x.parts()))
        made[each] = x if _stays(x, as_stored) else _typed(x, wanted, kept)
    return Exported(model, name, dtype, made, origins, files, notes + more)


@contextmanager
def _lying_there(files: Mapping[str, bytes], model: GGUFFile) -> Iterator[Path]:
    """Yield a directory with the small files of the checkpoint, which the way here reads; errors name the GGUF file."""
    try:
        with TemporaryDirectory(prefix="quantkit-export-") as name:
            folder = Path(name)
            for each, data in files.items():
                (folder / each).parent.mkdir(exist_ok=True)
                (folder / each).write_bytes(data)
            try:
                yield folder
            except QuantkitError as e:
                named = e.message.replace(str(folder / "config.json"), str(model.paths[0]))
                raise type(e)(named.replace(str(folder), str(model.paths[0]))) from None
    except OSError as e:
        raise ResourceError(f"a temporary directory for config.json and the tokenizer: {e.strerror or e}") from None


def _found_type(model: GGUFFile) -> str:
    """Return the type of the first matrix that is none of blocks."""
    matrices = [t.type for t in model.tensors.values() if len(t.shape) > 1]
    if any(t not in (TYPE_F32, TYPE_F16, TYPE_BF16) for t in matrices):
        return "bf16"
    found = next((t for t in matrices if t is not TYPE_F32), TYPE_F32)
    return found.name.lower()


def _tensors(
    said: Said, parts: dict[str, Expression], row: Architecture, spelling: Spelling, context: Context
) -> dict[str, Expression]:
    """Return the tensors of a checkpoint by name."""
    spelled, back = spelled_kinds(row, spelling), Backward(context, spelling.fused)
    extra = {tensor.name_in_file or tensor.name for tensor in row.extra(context.config)}
    found: dict[str, Expression] = {}
    for name, x in parts.items():
        if name in extra:
            continue
        match = _IN_LAYER.match(name)
        given = Tensor(_spelled(context, name, spelled), x, int(match[2]) if match else None)
        for made in all_undone((*row.stored, *row.rules), given, back):
            last = made.name
            for pattern, by in (*_RENAMED, *spelling.renamed):
                last = re.sub(pattern, by, last)
            last = spelling.last(context.config, last)
            if last in found:
                raise context.fail(made, f"{last} would be there twice")
            found[last] = made.x
    found |= {made.name: made.x for made in spelling.tensors(said)}
    waiting = next((whole for _, whole in back.held), None)
    if waiting is not None:
        raise FormatError(f"{context.config.path.parent}: a part of {waiting} is missing")
    return found


def _spelled(context: Context, name: str, spelled: dict[str, str]) -> str:
    """Return what a file's tensor is called in the checkpoint, before rules are undone."""
    layer = _IN_LAYER.match(name)
    stem = _IN_LAYER.sub(lambda match: f"{match[1] or ''}*", name)
    for suffix in ("", ".weight", ".bias"):
        found = spelled.get(stem.removesuffix(suffix)) if stem.endswith(suffix) else None
        if found is not None:
            return (found.replace("*", layer[2]) if layer else found) + suffix
    raise TypeNotSupported(
        f"{context.config.path.parent}: tensor {short(name)} has no place in a checkpoint of "
        f"{context.config.architecture}"
    )


def _check_return(
    parts: dict[str, Expression],
    row: Architecture,
    tensors: dict[str, Expression],
    context: Context,
    wanted: TensorType,
) -> tuple[set[str], set[str]]:
    """Go the way here over what was made: the same tensors, with the same shapes, must come out.

    Return the names of what is F32 in a file of type ``wanted``, too, and of what has the type it is stored in.
    """
    stored: dict[str, Expression] = {}
    for name, x in sorted(tensors.items()):
        for item in applied(row.stored, Tensor(name, x, None), context):
            if (text := text_name(item.name)) is not None:
                stored[text] = item.x
    made = dict(named_tensors(stored, row.rules, context, row.extra(context.config)))
    back = {name: t.x.shape for name, t in made.items()}
    have = {name: x.shape for name, x in parts.items()}
    for name in (*have, *back):
        if have.get(name) != back.get(name):
            raise TypeNotSupported(
                f"{context.config.path.parent}: tensor {short(name)}: {_shape(have.get(name))} in the file, "
                f"{_shape(back.get(name))} after converting the checkpoint: it would not be this model"
            )
    full = (n for n, t in made.items() if type_of(n, t.x, t.layer, context.names, wanted, t.typed) is TYPE_F32)
    stored_as = (n for n, t in made.items() if isinstance(t.typed, TensorType) and t.typed is not TYPE_F32)
    return _origins(parts, full), _origins(parts, stored_as)


def _origins(parts: dict[str, Expression], names: Iterable[str]) -> set[str]:
    """Return the tensors of a file that parts of it are made of."""
    return {part.name for name in names for part in parts[name].parts()}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _typed(x: Expression, wanted: TensorType, kept: set[str]) -> Expression:
    """Return a tensor in the wanted type; one of what files keep in F32 stays so if values would be lost."""
    part = next(x.parts(), None)
    if wanted is TYPE_F32 or x.type is not TYPE_F32 or part is not None and part.name not in kept:
        return cast(x, wanted)
    return cast(x, wanted) if _fits(x, wanted) else x


def _stays(x: Expression, as_stored: set[str]) -> bool:
    """Tell whole numbers, and floats whose type in a file is that of the checkpoint."""
    part = next(x.parts(), None)
    return (
        x.type not in (TYPE_F32, TYPE_F16, TYPE_BF16)
        or x.type is TYPE_BF16
        and part is not None
        and part.name in as_stored
    )


def _fits(x: Expression, wanted: TensorType) -> bool:
    """Tell whether all values are ones of a type."""
    for at in range(0, size_of(x), PIECE):
        values = read_f32(x, at, min(PIECE, size_of(x) - at))
        data = np.empty(value_bytes(wanted, values.size), np.uint8)
        from_f32(wanted, values, data)
        if not np.array_equal(as_f32(wanted, data), values):
            return False
    return True


def _generation(model: GGUFFile) -> Json:
    """Return generation_config.json: special tokens, and how to sample."""
    made: Json = {name: number for name, number in token_ids(model).items() if number is not None}
    for key, name in (
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("temp", "temperature"),
        ("penalty_repeat", "repetition_penalty"),
    ):
        if (value := model.get(f"general.sampling.{key}")) is not None:
            made |= {"do_sample": True, name: float(str(np.float32(value))) if isinstance(value, float) else int(value)}
    silent = model.get("tokenizer.ggml.suppress_tokens")
    return made if silent is None else made | {"suppress_tokens": silent}


def _json(value: Json) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
