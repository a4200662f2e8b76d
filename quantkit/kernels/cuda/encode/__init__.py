"""Encoders in CUDA C++: ``struct Encode<TYPE>`` in the file of the type's family."""

from __future__ import annotations

import re
from functools import cache

from quantkit.kernels.cuda.core.kernel import SOURCES
from quantkit.types import TensorType


@cache
def encoders() -> dict[str, str]:
    """Return the types that can be encoded, each with the file its encoder is in."""
    files = sorted((SOURCES / "encode").glob("*.cuh"))
    found = [(name, f.name) for f in files for name in re.findall(r"^struct Encode(\w+)", f.read_text(), re.MULTILINE)]
    return dict(found)


def weighs(t: TensorType) -> bool:
    """Return whether a type's bytes depend on the importance of columns."""
    return t.imatrix != "ignored"
