"""Run a loader's table over a file's header and collect the problems that it would refuse.

The order is the loader's: keys, vocabulary, tensors. A contradiction in one stage makes the next meaningless, so the
first stage with problems is the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from quantkit.formats.gguf import Field
from quantkit.loaders.hyperparameters import Hyperparameters, OutOfRange
from quantkit.loaders.metadata import WrongKind, read_key
from quantkit.loaders.problems import Problem, ProblemKind
from quantkit.loaders.table import (
    Block,
    FailRow,
    KeyRow,
    Loop,
    PatternRow,
    Row,
    SetRow,
    Table,
    TensorRow,
    section,
    table,
)
from quantkit.loaders.vocabulary import Vocabulary, read_vocabulary

#: Keys that are read before the architecture's.
_GENERAL = {"general.name": "str", "general.file_type": "u32"}
#: Limit of a table's loops: layers or experts, of which loaders accept at most 1024.
_MAX_TURNS = 4096
#: Number of dimensions of ggml's tensors.
_MAX_DIMS = 4


def architectures(runtime: str) -> frozenset[str]:
    """Return the architectures that a runtime has."""
    rows = table(runtime)
    return rows.architectures | rows.unchecked


def load(runtime: str, fields: Mapping[str, Field], tensors: Mapping[str, Sequence[int]]) -> tuple[Problem, ...] | None:
    """Return the problems that keep a runtime from loading a model; empty if it loads.

    Args:
        runtime: "llama.cpp" or "ik_llama.cpp".
        fields: the metadata of the file.
        tensors: shapes by name, in ggml's order.

    Returns:
        None if the table does not describe the architecture.
    """
    name = fields.get("general.architecture")
    arch = str(name.value) if name is not None else ""
    rows = table(runtime)
    if arch not in rows.architectures:
        return None
    return tuple(_Loader(runtime, rows, arch, fields, tensors).problems())


class _Loader:
    """A loader applied to one file."""

    def __init__(
        self,
        runtime: str,
        rows: Table,
        arch: str,
        fields: Mapping[str, Field],
        tensors: Mapping[str, Sequence[int]],
    ) -> None:
        self.runtime = runtime
        self.arch = arch
        self.fields = fields
        self.tensors = tensors
        self.names = Hyperparameters(runtime, arch, {**rows.constants, **rows.defaults})
        self.names.update(has=tensors.__contains__, known=self._has_key, ne=self._dimension)
        self.requested: set[str] = set()

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of the first stage that has some."""
        rows = section(self.runtime, self.arch)
        stages: tuple[Callable[[], Iterator[Problem]], ...] = (
            self._general,
            lambda: self._run(section(self.runtime, "common").keys),
            lambda: self._run(rows.keys),
            self._vocabulary,
            lambda: self._tensors((*rows.tensors, *section(self.runtime, "scales").tensors)),
        )
        for stage in stages:
            problems = list(stage())
            yield from problems
            if problems:
                return

    # Stages

    def _general(self) -> Iterator[Problem]:
        for key, kind in _GENERAL.items():
            try:
                read_key(self.fields, key, kind, None)
            except WrongKind as e:
                yield Problem(ProblemKind.KEY, key, str(e))

    def _vocabulary(self) -> Iterator[Problem]:
        vocabulary: Vocabulary = read_vocabulary(self.runtime, self.arch, self.fields)
        self.names.update(n_token_types=vocabulary.n_token_types)
        yield from vocabulary.problems
        size = self.names.setdefault("n_vocab", vocabulary.n_tokens)
        if size != vocabulary.n_tokens and not vocabulary.absent:
            yield Problem(
                ProblemKind.VOCABULARY,
                self._full_name(".vocab_size"),
                f"{size}, but there are {vocabulary.n_tokens} tokens",
            )

    def _tensors(self, blocks: Sequence[Block]) -> Iterator[Problem]:
        yield from self._run(blocks)
        for name in self.tensors:
            if name not in self.requested:
                yield Problem(ProblemKind.UNKNOWN, name)

    # Rows

    def _run(self, blocks: Iterable[Block]) -> Iterator[Problem]:
        try:
            for block in blocks:
                for row in block.rows:
                    for _ in self._repeat(block.loops):
                        yield from self._row(row)
        except ZeroDivisionError:
            yield Problem(ProblemKind.KEY, "", "hyperparameters of 0 that the runtime divides by")
        except (OutOfRange, IndexError):
            yield Problem(ProblemKind.KEY, "", "hyperparameters of a layer that does not exist")

    def _repeat(self, loops: Sequence[Loop]) -> Iterator[None]:
        if not loops:
            yield
            return
        values = self._value(loops[0].over)
        if len(values) > _MAX_TURNS:
            raise OutOfRange(f"{len(values)} layers")
        for value in values:
            self.names[loops[0].variable] = value
            yield from self._repeat(loops[1:])

    def _row(self, row: Row) -> Iterator[Problem]:
        if row.when is not None and not self._value(row.when):
            return
        match row:
            case TensorRow():
                yield from self._tensor(row)
            case KeyRow():
                yield from self._key(row)
            case SetRow():
                self._set(row)
            case PatternRow():
                yield from self._pattern(row)
            case FailRow():
                yield Problem(ProblemKind.KEY, "", _refusal(row.condition))

    def _tensor(self, row: TensorRow) -> Iterator[Problem]:
        name = row.name if isinstance(row.name, str) else self._value(row.name)
        shape = self.tensors.get(name)
        if shape is None:
            optional = row.optional if isinstance(row.optional, bool) else self._value(row.optional)
            if not optional and name not in self.requested:
                self.requested.add(name)
                yield Problem(ProblemKind.MISSING, name)
            return
        self.requested.add(name)
        shapes = [self._value(dims) for dims in row.shapes]
        measure = math.prod if row.reshape else _pad
        if measure(shape) not in map(measure, shapes):
            yield Problem(ProblemKind.SHAPE, name, f"has shape {list(shape)}, not {' or '.join(map(str, shapes))}")

    def _key(self, row: KeyRow) -> Iterator[Problem]:
        key = self._full_name(row.key)
        length = self._value(_length(row.kind)) if "[" in row.kind else None
        try:
            value = read_key(self.fields, key, row.kind, length)
        except WrongKind as e:
            yield Problem(ProblemKind.KEY, key, str(e))
            return
        if value is not None:
            self.names[row.field] = value
        elif row.required:
            yield Problem(ProblemKind.KEY, key, "missing")

    def _set(self, row: SetRow) -> None:
        value = self._value(row.value)
        if row.index is None:
            self.names[row.field] = list(value) if isinstance(value, list) else value
        else:
            self.names[row.field][self._value(row.index)] = value

    def _pattern(self, row: PatternRow) -> Iterator[Problem]:
        """Read the layers with a sliding window: a list, or a period."""
        key = self._full_name(".attention.sliding_window_pattern")
        try:
            layers = read_key(self.fields, key, "u32 array", None)
            period = None if layers is not None else read_key(self.fields, key, "u32", None)
        except WrongKind as e:
            yield Problem(ProblemKind.KEY, key, str(e))
            return
        if layers is None:
            period = self._value(row.period) if period is None else period
            layers = self.names["pattern"](period, self._value(row.dense_first))
        self.names["is_swa_impl"] = layers

    # Expressions

    def _value(self, code: CodeType) -> Any:
        return eval(code, _GLOBALS, self.names)

    def _full_name(self, key: str) -> str:
        return f"{self.arch}{key}" if key.startswith(".") else key

    def _has_key(self, key: str) -> bool:
        return self._full_name(key) in self.fields

    def _dimension(self, name: str, axis: int) -> int:
        shape = self.tensors.get(name, ())
        return shape[axis] if axis < len(shape) else 1


def _refusal(condition: str) -> str:
    """Return the reason for which a condition of a table makes the loader refuse."""
    if "has(" in condition:
        return "tensors that do not match each other"
    return f"hyperparameters that the runtime refuses ({condition})" if condition else "hyperparameters are refused"


_GLOBALS: dict[str, Any] = {"__builtins__": {}}
_LENGTHS: dict[str, CodeType] = {}


def _length(kind: str) -> CodeType:
    """Return the expression between the brackets of a kind."""
    if kind not in _LENGTHS:
        _LENGTHS[kind] = compile(kind[kind.index("[") + 1 : kind.rindex("]")], "loader table", "eval")
    return _LENGTHS[kind]


def _pad(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape, *(1 for _ in range(_MAX_DIMS - len(shape))))
