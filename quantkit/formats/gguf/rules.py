"""Rules for every GGUF file, shared by reader and writer: limits, names, shapes, sizes."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.errors import FormatError, RecipeError
from quantkit.types import TensorType

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"

#: Longest key or tensor name in bytes: the specification's bound for keys.
MAX_NAME = 65535
#: Largest alignment: padding must stay small compared with a model.
MAX_ALIGNMENT = 1 << 24
#: Most strings in one array (vocabularies have up to a few 100k): bounds the time to walk them.
MAX_STRINGS = 1 << 26
MAX_DIMS = 4

#: Most keys and tensors in one file (models have up to some thousands): bounds the memory for objects.
MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 18


def short(value: object) -> str:
    """Return ``value`` for a message: its repr, cut."""
    text = repr(value[:80] if isinstance(value, (str, bytes, list)) else value)
    return text if len(text) <= 90 else text[:87] + "..."


def check_key(key: str, what: str = "key", error: type[FormatError | RecipeError] = RecipeError) -> bytes:
    """Return a key or tensor name as the file's bytes; raise ``error`` if it cannot be one."""
    try:
        data = key.encode()
    except UnicodeEncodeError:
        raise error(f"{what} {short(key)} is not valid Unicode") from None
    if not data or len(data) > MAX_NAME or 0 in data:
        raise error(f"{what} {short(key)} must have 1 to {MAX_NAME} bytes and no NUL")
    return data


def checked_bytes(tensor_type: TensorType, shape: Sequence[int]) -> int:
    """Return a tensor's bytes; raise ValueError for a shape ggml cannot hold, TypeNotSupported for the type's."""
    if not 1 <= len(shape) <= MAX_DIMS:
        raise ValueError(f"{len(shape)} dimensions; 1 to {MAX_DIMS} are allowed")
    n = 1
    for ne in shape:
        if ne < 1:
            raise ValueError(f"shape {list(shape)} has a dimension below 1")
        n *= ne
    if n >= 1 << 63:
        raise ValueError(f"shape {list(shape)} has more values than 63 bits count")
    nbytes = tensor_type.tensor_bytes(shape)
    if nbytes >= 1 << 63:
        raise ValueError(f"shape {list(shape)} takes more bytes than 63 bits count")
    return nbytes
