"""The tables of loaders: sections of rows, compiled on the first use of an architecture.

A section is ``[arch arch ..]``. Its lines, in the order of the loader:

    key FIELD = KEY: KIND [optional] [when CONDITION]     a key that is read into a field
    set FIELD = EXPRESSION [when CONDITION]               a field that is computed
    let NAME = EXPRESSION                                 a name for an expression
    fail [when CONDITION]                                 the loader refuses
    swa_pattern PERIOD, DENSE_FIRST                       the layers with a sliding window
    tensors                                               from here on the vocabulary is known
    NAME: [SHAPE] [or [SHAPE]] [optional [CONDITION]] [reshape] [when CONDITION]

``for VARIABLE in ITERABLE`` repeats the indented lines below it. Expressions are Python's; the name of a tensor is an
f-string.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import CodeType
from typing import Any

#: File of each runtime's table.
FILES = {"llama.cpp": "llama_cpp.table", "ik_llama.cpp": "ik_llama_cpp.table"}

_TENSOR = re.compile(
    r"(?P<name>[^:]+): (?P<shape>\[.*?\])(?: or (?P<other>\[.*?\]))?(?P<reshape> reshape)?"
    r"(?P<optional> optional(?: (?P<condition>.+))?)?"
)
_KEY = re.compile(r"key (?P<field>\S+) = (?P<key>\S+): (?P<kind>.+?)(?P<optional> optional)?")
_SET = re.compile(r"(?:set|let) (?P<field>\w+)(?:\[(?P<index>.+?)\])? = (?P<value>.+)")


@dataclass(frozen=True, slots=True)
class Loop:
    """A variable and the range of its values."""

    variable: str
    over: CodeType


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key; one that begins with a dot belongs to the architecture."""

    field: str
    key: str
    kind: str
    required: bool
    when: CodeType | None


@dataclass(frozen=True, slots=True)
class SetRow:
    """A field, or one item of it, that is computed."""

    field: str
    index: CodeType | None
    value: CodeType
    when: CodeType | None


@dataclass(frozen=True, slots=True)
class FailRow:
    """A condition under which the loader refuses."""

    condition: str
    when: CodeType | None


@dataclass(frozen=True, slots=True)
class PatternRow:
    """The period of layers with a sliding window, unless a key lists them."""

    period: CodeType
    dense_first: CodeType
    when: CodeType | None


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A requested tensor: the shapes in ggml's order that it may have."""

    name: CodeType | str
    shapes: tuple[CodeType, ...]
    reshape: bool
    #: True, False, or the condition under which it is.
    optional: CodeType | bool
    when: CodeType | None


Row = KeyRow | SetRow | FailRow | PatternRow | TensorRow


@dataclass(frozen=True, slots=True)
class Block:
    """Rows under the same loops."""

    loops: tuple[Loop, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of an architecture: those of keys, then those of tensors."""

    keys: tuple[Block, ...]
    tensors: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A runtime's table; sections are compiled by ``section``."""

    constants: dict[str, Any]
    defaults: dict[str, Any]
    pre_tokenizers: frozenset[str]
    #: Architectures of the runtime that the table does not describe.
    unchecked: frozenset[str]
    lines: dict[str, tuple[str, ...]]

    @property
    def architectures(self) -> frozenset[str]:
        """The architectures that have a section."""
        return frozenset(self.lines) - {"common", "scales"}


@cache
def table(runtime: str) -> Table:
    """Return the table of "llama.cpp" or "ik_llama.cpp"."""
    text = resources.files("quantkit.loaders").joinpath(FILES[runtime]).read_text("utf-8")
    lines: dict[str, tuple[str, ...]] = {}
    for part in text.split("\n\n"):
        head, _, body = part.strip().partition("\n")
        names, rows = head.strip("[]").split(), tuple(body.splitlines())
        lines |= dict.fromkeys(names, rows)
    constants = {"INFINITY": math.inf, **_values(lines.pop("constants"), {})}
    defaults = _values(lines.pop("defaults"), constants)
    pre_tokenizers, unchecked = (frozenset(lines.pop(name)) for name in ("pre-tokenizers", "unchecked"))
    return Table(constants, defaults, pre_tokenizers, unchecked, lines)


def _values(lines: tuple[str, ...], names: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for line in lines:
        name, _, value = line.partition(" = ")
        values[name] = eval(value, {"__builtins__": {}}, {**names, **values})
    return values


@cache
def section(runtime: str, name: str) -> Section:
    """Return the compiled rows of an architecture, or of "common" or "scales"."""
    keys: list[Block] = []
    tensors: list[Block] = []
    blocks = tensors if name == "scales" else keys
    loops: list[Loop] = []
    for line in table(runtime).lines[name]:
        depth = (len(line) - len(line.lstrip())) // 2
        body, loops = line.strip(), loops[:depth]
        if body.startswith("for "):
            variable, _, over = body.removeprefix("for ").partition(" in ")
            loops = [*loops, Loop(variable, _compile(over))]
        elif body == "tensors":
            blocks = tensors
        elif blocks and blocks[-1].loops == tuple(loops):
            blocks[-1] = Block(tuple(loops), (*blocks[-1].rows, _row(body)))
        else:
            blocks.append(Block(tuple(loops), (_row(body),)))
    return Section(tuple(keys), tuple(tensors))


def _row(line: str) -> Row:
    body, _, condition = line.partition(" when ")
    when = _compile(condition) if condition else None
    if match := _KEY.fullmatch(body):
        return KeyRow(match["field"], match["key"], match["kind"], not match["optional"], when)
    if match := _SET.fullmatch(body):
        index = None if match["index"] is None else _compile(match["index"])
        return SetRow(match["field"], index, _compile(match["value"]), when)
    if body == "fail":
        return FailRow(condition, when)
    if body.startswith("swa_pattern "):
        period, dense_first = body.removeprefix("swa_pattern ").rsplit(", ", 1)
        return PatternRow(_compile(period), _compile(dense_first), when)
    match = _TENSOR.fullmatch(body)
    if match is None:
        raise ValueError(f"not a row of a loader's table: {line}")
    name, shapes = match["name"], [match["shape"], match["other"]]
    optional = _compile(match["condition"]) if match["condition"] else bool(match["optional"])
    return TensorRow(
        _compile(f"f{name!r}") if "{" in name else name,
        tuple(_compile(shape) for shape in shapes if shape),
        bool(match["reshape"]),
        optional,
        when,
    )


@cache
def _compile(expression: str) -> CodeType:
    return compile(expression, "loader table", "eval")
