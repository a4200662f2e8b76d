"""Frozen records as arguments of kernels: their fields are compile-time constants.

numba compiles a function anew for each record that it is called with, as for each type of an argument, and LLVM sees
the fields as numbers: it decides branches and unrolls loops as if they stood in the source. A field may also be a
compiled function, or another record. At run time a record is nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any, TypeVar

from numba import types
from numba.core import typing
from numba.core.imputils import lower_constant, lower_getattr_generic
from numba.extending import models, register_model, typeof_impl

from quantkit.kernels.cpu.core.specialize import content

T = TypeVar("T")


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
