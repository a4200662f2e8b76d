"""Encoders in CUDA C++: ``struct Encode<TYPE>`` in the file of the type's family.

Where a type has another search, one of ``SEARCHES``, that is ``struct Encode<TYPE>_<SEARCH>``: ik_llama.cpp's for a
common type, the symmetric one of Q4_0.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from quantkit.kernels.cuda.core.kernel import SOURCES
from quantkit.kernels.formats import SYMMETRIC
from quantkit.types import TensorType


class Rows(NamedTuple):
    """Rows of float32 to encode, by addresses: x f32 [rows, n], out uint8 [rows, row bytes].

    importance: f32 [n], or 0 for none, which is ignored for a type that does not use one. work: room for
    ``working_bytes``, 16-byte aligned.
    """

    x: int
    rows: int
    n: int
    out: int
    importance: int = 0
    work: int = 0


#: The encoder: that of the type's own project, or another.
SEARCHES = ("", "ik", SYMMETRIC)


@cache
def _structs() -> dict[str, str]:
    files = sorted((SOURCES / "encode").glob("*.cuh"))
    pattern = re.compile(r"^struct Encode(\w+)", re.MULTILINE)
    return {name: f.name for f in files for name in pattern.findall(f.read_text())}


@cache
def encoders(search: str = "") -> dict[str, str]:
    """Return the types that can be encoded by a search, each with the file its encoder is in."""
    of_another = tuple(_suffix(search_name) for search_name in SEARCHES if search_name and search_name != search)
    files = {name: file for name, file in _structs().items() if name.endswith(_suffix(search))}
    return {name.removesuffix(_suffix(search)): f for name, f in files.items() if not name.endswith(of_another)}


def struct_of(t: TensorType, search: str = "") -> str:
    """Return the name of a type's encoder."""
    return f"Encode{t.name}{_suffix(search)}"


def _suffix(search: str) -> str:
    return f"_{search.upper()}" if search else ""


def weighs(t: TensorType) -> bool:
    """Return whether a type's bytes depend on the importance of columns."""
    return t.imatrix != "ignored"
