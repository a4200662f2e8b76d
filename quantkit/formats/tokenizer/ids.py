"""Explicit token ids, for files without a tokenizer and for exact comparisons: "1,2,3" or "@FILE.i32".

FILE.i32 holds raw little-endian int32 values.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.outputs import read_whole

_FORMS = 'write token ids as "1,2,3" or "@FILE.i32" (raw little-endian int32)'


def read_token_ids(spec: str) -> npt.NDArray[np.int32]:
    """Return the ids, int32 [n], given as "1,2,3" or "@FILE.i32"; there is at least one, and all are >= 0.

    Raises:
        RecipeError: the specification is invalid; the message names the part.
        FormatError: the file cannot be read, or is not an array of ids; the message names the byte.
    """
    return _from_file(spec[1:]) if spec.startswith("@") else _from_list(spec)


def _from_list(spec: str) -> npt.NDArray[np.int32]:
    ids = []
    for number, item in enumerate(spec.split(","), 1):
        if not re.fullmatch(r"\s*[0-9]+\s*", item, re.ASCII):
            raise RecipeError(
                f"token id {number} of {spec[:60]!r} is {item.strip()[:20]!r}, not a number; {_FORMS}", "QK-E203"
            )
        if len(item.strip().lstrip("0")) > 10 or int(item) > np.iinfo(np.int32).max:
            raise RecipeError(
                f"token id {number} of {spec[:60]!r} is {item.strip()[:20]}, too large for an int32", "QK-E203"
            )
        ids.append(int(item))
    return np.array(ids, np.int32)


def _from_file(name: str) -> npt.NDArray[np.int32]:
    if not name:
        raise RecipeError(f"no file after the @; {_FORMS}", "QK-E203")
    data = read_whole(name)
    if len(data) % 4 or not data:
        raise FormatError(f"{name}: its {len(data)} bytes are not one or more int32 ids; {_FORMS}")
    ids = np.frombuffer(data, "<i4").astype(np.int32)
    if (ids < 0).any():
        position = int(np.argmax(ids < 0))
        raise FormatError(
            f"{name}: the id at byte {4 * position} is {ids[position]}; ids must not be negative. {_FORMS}"
        )
    return ids
