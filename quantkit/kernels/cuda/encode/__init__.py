"""Encoders in CUDA C++: ``struct Encode<TYPE>`` in the file of the type's family.

Where ik_llama.cpp encodes a type of both trees by a search of its own, that is ``struct Encode<TYPE>_IK``.
"""

from __future__ import annotations

import re
from functools import cache

from quantkit.kernels.cuda.core.kernel import SOURCES
from quantkit.types import TensorType

_IK = "_IK"


@cache
def _structs() -> dict[str, str]:
    files = sorted((SOURCES / "encode").glob("*.cuh"))
    found = [(name, f.name) for f in files for name in re.findall(r"^struct Encode(\w+)", f.read_text(), re.MULTILINE)]
    return dict(found)


@cache
def encoders(ik: bool = False) -> dict[str, str]:
    """Return the types that can be encoded, each with the file its encoder is in; ``ik``: by a search of ik's own."""
    return {name.removesuffix(_IK): file for name, file in _structs().items() if name.endswith(_IK) == ik}


def struct_of(t: TensorType, ik: bool = False) -> str:
    """Return the name of a type's encoder."""
    return f"Encode{t.name}{_IK * ik}"


def weighs(t: TensorType) -> bool:
    """Return whether a type's bytes depend on the importance of columns."""
    return t.imatrix != "ignored"
