"""One function, many kernels: copies with other globals, named after their bindings.

numba names machine code and cache files after a function's qualified name. So that one name always means the same
code, whatever the process and order of compilation, a copy's name ends with a hash of its bindings, and theirs in
turn. All else is source code, which names the cache folder.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher
from numba.core.types import Type
from numba.extending import intrinsic


def rebind(function: Callable[..., Any], suffix: str, /, **bound: Any) -> types.FunctionType:
    """Return a copy of a plain function with other globals, named ``function_suffix``.

    Raises ValueError if its module has no such global: a misspelt name would have no effect. Raises TypeError for a
    value without content to hash.
    """
    outer: dict[str, Any] = function.__globals__
    if unknown := bound.keys() - outer.keys():
        names = ", ".join(sorted(unknown))
        raise ValueError(f"{function.__name__}: {names}: no such global in {outer['__name__']}")
    name = f"{function.__name__}_{suffix}"
    copy = types.FunctionType(function.__code__, {**outer, **bound}, name, function.__defaults__)
    parts = [content(function), *(f"{key}={content(value)}" for key, value in sorted(bound.items()))]
    copy.__qualname__ = f"{name}_{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"
    return copy


def content(value: Any) -> str:
    """Return a string that differs between values that compile to different code."""
    if isinstance(value, Dispatcher):
        return f"{value.targetoptions} {content(value.py_func)}"
    if isinstance(value, _INTRINSIC):
        return content(value._defn)
    if isinstance(value, types.FunctionType):
        cells = [content(cell.cell_contents) for cell in value.__closure__ or ()]
        return f"{value.__module__}.{value.__qualname__}{cells}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}{[content(item) for item in value]}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    if is_dataclass(value) and not isinstance(value, type):
        values = [f"{field.name}={content(getattr(value, field.name))}" for field in fields(value)]
        return f"{type(value).__qualname__}({', '.join(values)})"
    if value is None or isinstance(value, (int, float, str, np.generic, Type)):
        return f"{type(value).__name__}:{value!r}"
    raise TypeError(f"{value!r} cannot be bound: what it compiles to has no name")


_INTRINSIC: Any = type(intrinsic(lambda context: None))
