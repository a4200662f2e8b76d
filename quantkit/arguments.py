"""Arguments of verbs and fields of options, checked against their annotations before any work is done.

A ``TensorType`` is accepted as a name, text as a ``Path``; a single text or path is never a sequence. Annotations that
only type checkers understand (protocols, arrays, names imported for them alone) are not checked.
"""

from __future__ import annotations

import inspect
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache, wraps
from pathlib import Path
from typing import Any, ForwardRef, TypeVar, Union, cast, get_args, get_origin, is_typeddict

from quantkit.errors import ArgumentError
from quantkit.types import TensorType

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of an option, the single source of its command line option, cook.toml key and help (``option``).

    Attributes:
        help: one sentence.
        group: the heading of --help.
        kind: how its text is parsed, if the annotation does not determine it: "type", "rules", "size", "layers", or "".
        choices: the allowed values.
        least: the least number.
        metavar: how --help writes the value.
        flags: its names on the command line, where they are not --NAME alone.
        example: a value, as TOML, for cook.toml; None: cook sets this option itself.
    """

    help: str
    group: str
    kind: str = ""
    choices: tuple[str, ...] = ()
    least: int = 0
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    example: str | None = None


def option(default: Any, help: str, group: str, **declaration: Any) -> Any:  # noqa: A002
    """Return a field of a dataclass of options, with its ``Option`` as metadata."""
    return field(default=default, metadata={"option": Option(help=help, group=group, **declaration)})


def declarations(options: Any) -> dict[str, Option]:
    """Return the declarations of a dataclass of options, by name, in the order of its fields."""
    return {f.name: f.metadata["option"] for f in fields(options) if "option" in f.metadata}


def changed_options(options: Any) -> dict[str, Any]:
    """Return the values of a dataclass of options that are not the defaults, by name."""
    return {f.name: getattr(options, f.name) for f in fields(options) if getattr(options, f.name) != f.default}


class Options:
    """Base of dataclasses of options, whose values are checked and converted to the types of their fields on
    construction.

    Raises ArgumentError.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, kind in _fields(cast(Any, type(self))).items():
            value = getattr(self, name)
            accepted = accept(value, kind, f"{type(self).__name__}: {name}")
            if accepted is not value:
                object.__setattr__(self, name, accepted)


def checked(function: F) -> F:
    """Decorate a verb to raise ArgumentError for unknown arguments and wrong types, also in its ``**options``.

    The error suggests a similar name and is raised before any work is done.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kinds, options, signature = _parameters(function)
        for name, (parameter, record) in _record_fields(function).items():
            if name in kwargs and name not in kinds and name not in options:
                raise ArgumentError(
                    f"{function.__name__}: {name!r} belongs to {parameter}: "
                    f"{function.__name__}(.., {parameter}={record}({name}=..))"
                )
        check_names(kwargs, {**kinds, **options}, function.__name__)
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if name in kinds:
                bound.arguments[name] = accept(value, kinds[name], f"{function.__name__}: {name}")
            else:  # the options
                bound.arguments[name] = {
                    key: accept(option, options[key], f"{function.__name__}: {key}") for key, option in value.items()
                }
        return function(*bound.args, **bound.kwargs)

    return cast(F, call)


def check_names(names: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raise ArgumentError for the first unknown name."""
    for name in names:
        if name not in allowed:
            close = get_close_matches(name, list(allowed), 1)
            raise ArgumentError(f"{where} has no argument {name!r}{f'; did you mean {close[0]!r}?' if close else ''}")


def accept(value: Any, kind: Any, where: str) -> Any:
    """Convert a value to the type of its annotation. Raises ArgumentError, which begins with ``where``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(value, arguments, where)
    if origin is tuple:
        return _tuple(value, arguments, where)
    if isinstance(origin, type) and issubclass(origin, Iterable):
        if isinstance(value, (str, bytes, os.PathLike)) and not issubclass(origin, Mapping):
            raise ArgumentError(f"{where} must be a sequence, not {value!r}: give [{value!r}]")
        container = Mapping if issubclass(origin, Mapping) else Iterable
        return value if isinstance(value, container) else _refuse(value, origin.__name__, where)
    if is_typeddict(kind):
        kinds = _typed_dict(kind)
        check_names(value, kinds, where)
        return {name: accept(item, kinds[name], f"{where}: {name}") for name, item in value.items()}
    simple = _SIMPLE.get(kind)
    if simple is not None:
        return simple(value, where)
    if isinstance(kind, type) and not getattr(kind, "_is_protocol", False) and kind not in (Any, object):
        return value if isinstance(value, kind) else _refuse(value, kind.__name__, where)
    return value


def _refuse(value: Any, expected: str, where: str) -> Any:
    text = repr(value)
    text = text if len(text) <= 80 else f"{text[:79]}…"
    raise ArgumentError(f"{where} must be {expected}, not {text} ({type(value).__name__})")


def _one_of(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    errors = []
    for kind in kinds:
        try:
            return accept(value, kind, where)
        except ArgumentError as e:
            errors.append(e)
    names = [getattr(kind, "__name__", str(kind)) for kind in kinds if kind is not types.NoneType]
    raise errors[0] if len(names) == 1 else ArgumentError(f"{where} must be {' or '.join(names)}, not {value!r}")


def _tuple(value: Any, kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, os.PathLike, Mapping)) or not isinstance(value, Iterable):
        raise ArgumentError(f"{where} must be a sequence, not {value!r}: give ({value!r},)")
    values = tuple(value)
    if len(kinds) == 2 and kinds[1] is ...:
        kinds = kinds[:1] * len(values)
    if len(kinds) != len(values):
        raise ArgumentError(f"{where} must have {len(kinds)} values, not {len(values)}")
    accepted = tuple(
        accept(item, kind, f"{where}[{i}]") for i, (item, kind) in enumerate(zip(values, kinds, strict=True))
    )
    return value if isinstance(value, tuple) and all(map(operator.is_, accepted, value)) else accepted


def _text(value: Any, where: str) -> str:
    if isinstance(value, TensorType):
        return value.name
    return value if isinstance(value, str) else str(_refuse(value, "a name", where))


def _path(value: Any, where: str) -> Path:
    if isinstance(value, Path):
        return value
    return Path(value) if isinstance(value, (str, os.PathLike)) else Path(_refuse(value, "a path", where))


def _truth(value: Any, where: str) -> bool:
    if type(value).__name__ in ("bool", "bool_"):  # also numpy's
        return bool(value)
    return bool(_refuse(value, "True or False", where))


def _integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return int(_refuse(value, "an integer", where))
    return operator.index(value)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return float(_refuse(value, "a number", where))
    return cast(float, value)


def _none(value: Any, where: str) -> None:
    if value is not None:
        _refuse(value, "None", where)


_SIMPLE: dict[Any, Callable[[Any, str], Any]] = {
    str: _text,
    Path: _path,
    bool: _truth,
    int: _integer,
    float: _number,
    types.NoneType: _none,
    None: _none,
}


# ---------------------------------------------------------------- annotations


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return {f.name: _evaluate(f.type, kind.__module__) for f in fields(kind)}


@cache
def _typed_dict(kind: Any) -> dict[str, Any]:
    return {name: _evaluate(hint, kind.__module__) for name, hint in kind.__annotations__.items()}


@cache
def _parameters(function: Any) -> tuple[dict[str, Any], dict[str, Any], inspect.Signature]:
    """Return the parameter types by name, the types of ``**options``, and the signature."""
    signature = inspect.signature(function)
    kinds = dict[str, Any]()
    options = dict[str, Any]()
    for parameter in signature.parameters.values():
        kind = _evaluate(parameter.annotation, function.__module__)
        if parameter.kind is parameter.VAR_KEYWORD:
            options = _typed_dict(get_args(kind)[0])
        else:
            kinds[parameter.name] = kind
    return kinds, options, signature


@cache
def _record_fields(function: Any) -> dict[str, tuple[str, str]]:
    """Return the fields of a verb's option records: the parameter that takes each, and the record's name."""
    return {
        field_name: (name, kind.__name__)
        for name, annotation in _parameters(function)[0].items()
        for kind in get_args(annotation) or (annotation,)
        if isinstance(kind, type) and issubclass(kind, Options)
        for field_name in _fields(cast(Any, kind))
    }


def _evaluate(annotation: Any, module: str) -> Any:
    """Return an annotation as a type; Any if it has a name that exists only for type checkers."""
    if isinstance(annotation, ForwardRef):
        annotation, module = annotation.__forward_arg__, annotation.__forward_module__ or module
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(sys.modules[module]))  # noqa: S307 - quantkit's own source
    except NameError:
        return Any
