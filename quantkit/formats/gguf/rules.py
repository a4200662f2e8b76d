"""Rules for every GGUF file, shared by reader and writer: limits, names, shapes, sizes."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.errors import FormatError, RecipeError
from quantkit.types import TensorType

MAGIC = b"GGUF"
#: Takes the place of the magic while a header is replaced that other programs must not read.
EDIT_MAGIC = b"EDIT"
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
#: A key whose text, spaces, keeps room for later edits: a header has no other place for them. Not metadata of a model.
PADDING_KEY = "quantkit.pad"

#: Longest key or tensor name in bytes: the specification's bound for keys.
MAX_NAME = 65535
#: Maximum alignment: padding must remain small compared with a model.
MAX_ALIGNMENT = 1 << 24
#: Maximum number of strings in an array (vocabularies have up to a few 100k), to bound the time of a walk over them.
MAX_STRINGS = 1 << 26
#: Maximum dimensions of a tensor that is read or copied: convolutions of video models have five.
MAX_DIMS = 8
#: Maximum dimensions of a tensor that ggml computes with.
GGML_DIMS = 4

#: Maximum number of keys and of tensors in a file (models have up to some thousands), to bound the memory for objects.
MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 18


def short(value: object) -> str:
    """Return ``value`` for a message: its shortened repr."""
    try:
        text = repr(value[:80] if isinstance(value, (str, bytes, list)) else value)
    except (RecursionError, ValueError):  # deeply nested, or a number of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 90 else text[:87] + "..."


def check_key(key: str, kind: str = "key", error: type[FormatError | RecipeError] = RecipeError) -> bytes:
    """Return a key or tensor name as the file's bytes; raise ``error`` if it is invalid."""
    code = "QK-E203" if error is RecipeError else "QK-E107"
    try:
        data = key.encode()
    except UnicodeEncodeError:
        raise error(f"{kind} {short(key)} is not valid Unicode", code) from None
    if not data or len(data) > MAX_NAME or 0 in data:
        raise error(f"{kind} {short(key)} must have 1 to {MAX_NAME} bytes and no NUL", code)
    return data


def n_dims(shape: Sequence[int]) -> int:
    """Return the number of dimensions without trailing ones, at least 1, as ggml_n_dims does."""
    return max((i + 1 for i, ne in enumerate(shape) if ne != 1), default=1)


def checked_bytes(tensor_type: TensorType, shape: Sequence[int]) -> int:
    """Return a tensor's bytes. Raises ValueError for an invalid shape, TypeNotSupported for one that the type cannot
    have.

    A scalar has no dimensions, an empty tensor one of 0.
    """
    if len(shape) > MAX_DIMS:
        raise ValueError(f"{len(shape)} dimensions; up to {MAX_DIMS} are allowed")
    n = 1
    for ne in shape:
        if ne < 0:
            raise ValueError(f"shape {list(shape)} has a dimension below 0")
        n *= max(ne, 1)
    if n >= 1 << 63:
        raise ValueError(f"shape {list(shape)} has more values than 63 bits can count")
    nbytes = tensor_type.tensor_bytes(shape)
    if nbytes >= 1 << 63:
        raise ValueError(f"shape {list(shape)} needs more bytes than 63 bits can count")
    return nbytes
