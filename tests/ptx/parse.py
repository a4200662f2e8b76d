"""PTX as a module of variables and functions, statement by statement; what is not understood is an error.

A statement knows its line. A scope in braces is a statement of its own, `{` or `}`; so is a label, `name:`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


class PTXError(Exception):
    """PTX that this translator does not know."""


@dataclass(frozen=True)
class Statement:
    """A statement without its semicolon: the line it begins at, its text, white space made single blanks."""

    line: int
    text: str


@dataclass(frozen=True)
class Variable:
    """A variable of some state space; count 0: an array whose size the launch gives. values: () if all zero."""

    space: str
    type: str
    name: str
    align: int
    count: int
    values: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return self.count * int(self.type[1:]) // 8


@dataclass
class Function:
    """A kernel (``entry``) or a function: parameters, what it returns, and its body."""

    name: str
    entry: bool
    parameters: list[Variable]
    returned: list[Variable]
    threads: int = 0
    body: list[Statement] = field(default_factory=list)


@dataclass
class Module:
    """All of a file: functions and variables by name; target: sm_90 ..."""

    target: str
    functions: dict[str, Function]
    variables: dict[str, Variable]


_VARIABLE = re.compile(
    r"(?:\.extern )?\.(global|const|shared|local|param) (?:\.align (\d+) )?\.([bsuf]\d+) ([\w$]+)"
    r"(?:\[(\d*)\])?(?: = (.*))?"
)
_LABEL = re.compile(r"[$\w]+:")
_HEADER = re.compile(
    r"(?:\.visible )?\.(entry|func) (?:\((?P<returned>[^)]*)\) )?(?P<name>[\w$]+) ?\((?P<parameters>[^)]*)\)"
    r"(?P<rest>[^{]*)"
)


def variable(text: str) -> Variable:
    """Return the declared variables."""
    match = _VARIABLE.fullmatch(text)
    if match is None:
        raise PTXError(f"not a declaration: {text[:120]}")
    space, align, kind, name, count, values = match.groups()
    size = int(kind[1:]) // 8
    numbers = tuple(v.strip() for v in values.strip("{} ").split(",")) if values else ()
    return Variable(space, kind, name, int(align or size), int(count or 0) if count is not None else 1, numbers)


def _blanks(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def statements(text: str, line: int) -> Iterator[Statement]:
    """Take a body apart, without its outer braces."""
    position = 0
    while True:
        space = re.match(r"\s*", text[position:])
        assert space is not None
        line += space[0].count("\n")
        position += len(space[0])
        if position == len(text):
            return
        label = _LABEL.match(text, position)
        if text[position] in "{}":
            end, mark = position + 1, text[position]
        elif label:
            end, mark = label.end(), label[0]
        else:
            end = text.find(";", position) + 1
            if not end:
                raise PTXError(f"line {line}: no semicolon")
            mark = _blanks(text[position : end - 1])
        if mark:
            yield Statement(line, mark)
        line += text[position:end].count("\n")
        position = end


def _end_of_body(text: str, start: int) -> int:
    """Return the place of the brace that closes the one at ``start``."""
    depth = 0
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if not depth:
            return start + match.start()
    raise PTXError("a brace is not closed")


def _variables(text: str) -> list[Variable]:
    return [variable(_blanks(part)) for part in text.split(",") if part.strip()]


def parse(text: str) -> Module:
    """Read a file of PTX."""
    text = re.sub(r"//[^\n]*", "", text)
    module, position = Module("", {}, {}), 0
    while match := re.compile(r"\s*(?=\S)").match(text, position):
        position = match.end()
        word = re.compile(r"\.version [\d.]+|\.target (\w+)|\.address_size 64").match(text, position)
        if word:
            module.target = word[1] or module.target
            position = word.end()
            continue
        semicolon, brace = text.find(";", position), text.find("{", position)
        if re.compile(r"(\.visible\s+)?\.(entry|func)\b").match(text, position):
            end = min(e for e in (semicolon, brace) if e >= 0)
            header = _HEADER.fullmatch(_blanks(text[position:end]))
            if header is None:
                raise PTXError(f"not the head of a function: {_blanks(text[position:end])}")
            position = end + 1
            if end == brace:
                function = _function(header)
                position = _end_of_body(text, brace) + 1
                line = text.count("\n", 0, brace + 1) + 1
                function.body = list(statements(text[brace + 1 : position - 1], line))
                module.functions[function.name] = function
        else:
            declared = variable(_blanks(text[position:semicolon]))
            module.variables[declared.name] = declared
            position = semicolon + 1
    return module


def _function(header: re.Match[str]) -> Function:
    suffix, threads = header["rest"], 0
    if match := re.search(r"\.maxntid (\d+), 1, 1", suffix):
        threads = int(match[1])
    unknown = re.sub(r"\.maxntid \d+, 1, 1|\.minnctapersm \d+|\s", "", suffix)
    if unknown:
        raise PTXError(f"unknown directives of {header['name']}: {unknown}")
    return Function(
        header["name"],
        header[1] == "entry",
        _variables(header["parameters"]),
        _variables(header["returned"] or ""),
        threads,
    )
