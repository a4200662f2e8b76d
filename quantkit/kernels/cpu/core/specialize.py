"""One function, many kernels: copies with other globals, named after their bindings, and records as arguments.

numba names machine code and cache files after a function's qualified name. So that one name always means the same code,
regardless of process and order of compilation, a copy's name ends with a hash of its bindings, recursively.
Everything else is source code, whose hash names the cache folder.

Frozen records may be arguments: their fields are compile-time constants. numba compiles a function for each record that
it is called with, as for each type of an argument, and LLVM sees the fields as numbers: it resolves branches and
unrolls loops as if they were in the source. A field may also be a compiled function, or another record. A record has no
cost at run time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
from numba import types
from numba.core import typing
from numba.core.dispatcher import Dispatcher
from numba.core.imputils import lower_constant, lower_getattr_generic
from numba.core.types import Type
from numba.extending import intrinsic, models, register_model, typeof_impl

T = TypeVar("T")


def rebind(function: Callable[..., Any], suffix: str, /, **bound: Any) -> FunctionType:
    """Return a copy of a plain function with other globals, named ``function_suffix``.

    Raises ValueError if its module has no such global: a misspelt name would have no effect. Raises TypeError for a
    value without content to hash.
    """
    outer: dict[str, Any] = function.__globals__
    if unknown := bound.keys() - outer.keys():
        names = ", ".join(sorted(unknown))
        raise ValueError(f"{function.__name__}: {names}: no such global in {outer['__name__']}")
    name = f"{function.__name__}_{suffix}"
    copy = FunctionType(function.__code__, {**outer, **bound}, name, function.__defaults__)
    parts = [content(function), *(f"{key}={content(value)}" for key, value in sorted(bound.items()))]
    copy.__qualname__ = f"{name}_{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"
    return copy


def content(value: Any) -> str:
    """Return a string that differs between values that compile to different code."""
    if isinstance(value, Dispatcher):
        return f"{value.targetoptions} {content(value.py_func)}"
    if isinstance(value, _INTRINSIC):
        return content(value._defn)
    if isinstance(value, FunctionType):
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
    raise TypeError(f"{value!r} cannot be bound: nothing identifies the code it compiles to")


_INTRINSIC: Any = type(intrinsic(lambda context: None))


class ConstantsType(types.Type):
    """The numba type of a record, named after its content: machine code of that name means that content."""

    def __init__(self, record: Any) -> None:
        self.record = record
        digest = hashlib.sha256(content(record).encode()).hexdigest()[:12]
        super().__init__(f"{type(record).__name__}_{digest}")


register_model(ConstantsType)(models.OpaqueModel)


def constants(record: type[T]) -> type[T]:
    """Register a frozen dataclass, so that kernels take its records as arguments."""
    typeof_impl.register(record)(lambda value, _: ConstantsType(value))
    return record


@typing.templates.infer_getattr
class _Fields(typing.templates.AttributeTemplate):
    key = ConstantsType

    def generic_resolve(self, t: ConstantsType, name: str) -> Any:
        if name not in {field.name for field in fields(t.record)}:
            return None
        return self.context.resolve_value_type(getattr(t.record, name))


@lower_getattr_generic(ConstantsType)
def _field(context: Any, builder: Any, t: ConstantsType, record: Any, name: str) -> Any:
    value = getattr(t.record, name)
    return context.get_constant_generic(builder, context.typing_context.resolve_value_type(value), value)


@lower_constant(ConstantsType)
def _record(context: Any, builder: Any, t: ConstantsType, record: Any) -> Any:
    return context.get_dummy_value()
