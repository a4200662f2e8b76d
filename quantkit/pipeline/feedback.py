"""Which tensors are encoded with error feedback, by which covariance, and the metrics that a run shares.

A metric costs n^3 operations and 8 n^2 bytes, 24 n^2 more while it is made, so that workers share those they need, and
no more are held than memory allows.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quantkit.errors import FormatError
from quantkit.formats.covariance import Covariances
from quantkit.kernels.levels import Grouping, all_levels, levels_of
from quantkit.pipeline.importance import ALIASES
from quantkit.types import TensorType

if TYPE_CHECKING:
    from quantkit.kernels.cpu.feedback.rounding import Metric

#: What is added to the diagonal, in means of it: less from ``ENOUGH`` tokens a column on. With fewer tokens than
#: columns a covariance is not of full rank, and feedback does harm.
DAMPING, FEW_DAMPING, ENOUGH = 0.02, 0.1, 4


@dataclass(frozen=True, eq=False)
class Inputs:
    """The covariance of what a tensor multiplies; one for each of its matrices."""

    tensor: str
    entry: str
    n: int
    #: Tokens of each matrix.
    tokens: tuple[int, ...]
    weighted: bool
    covariances: Covariances = field(repr=False)
    #: How the tensor's type groups columns, if it does.
    grouping: Grouping | None = None

    @property
    def metric_bytes(self) -> int:
        """The bytes that a metric takes while it is made; a quarter stays."""
        return 32 * self.n**2

    def damping(self, matrix: int) -> float | None:
        """Return the damping of a matrix; None if its tokens are too few for feedback."""
        tokens = self.tokens[matrix]
        if tokens < self.n:
            return None
        return DAMPING if tokens >= ENOUGH * self.n else FEW_DAMPING

    def made(self, matrix: int, threads: int) -> Metric:
        """Return the metric of a matrix. Raises FormatError if its covariance is not positive definite."""
        from quantkit.kernels.cpu.feedback.rounding import metric

        damping = self.damping(matrix)
        assert damping is not None
        try:
            return metric(self.covariances.matrix(self.entry, matrix), damping, threads, self.grouping)
        except np.linalg.LinAlgError as e:
            raise FormatError(
                f"{self.covariances.path}: matrix {matrix} of {self.entry} is no covariance ({e}): record it again"
            ) from None


class Feedback:
    """A file of covariances as quantization uses it: looked up tensor by tensor, with what there is to say about it."""

    def __init__(self, path: str | Path) -> None:
        self.covariances = Covariances(path)
        self._found: list[Inputs] = []
        self._missing: list[str] = []
        self._other: dict[str, list[str]] = {}

    def lookup(self, tensor: str, name: str, shape: Sequence[int], target: TensorType) -> Inputs | None:
        """Return the inputs of a tensor that becomes ``target``; ``name`` is that of the source.

        Raises FormatError if its entry has another size.
        """
        entry = self._entry(name)
        if entry is None:
            self._missing.append(tensor)
            return None
        if target.name not in all_levels():
            self._other.setdefault(target.name, []).append(tensor)
            return None
        n, matrices = self.covariances.shape(entry)
        if (n, matrices) != (shape[0], math.prod(shape[2:])):
            raise FormatError(
                f"{self.covariances.path}: entry {entry} has {matrices} matrices of {n} columns, tensor {tensor} needs "
                f"{math.prod(shape[2:])} of {shape[0]}: it was recorded on another model"
            )
        tokens = tuple(int(t) for t in self.covariances.tokens(entry))
        weighted, grouping = self.covariances.is_weighted(entry), levels_of(target).grouping
        inputs = Inputs(tensor, entry, n, tokens, weighted, self.covariances, grouping)
        self._found.append(inputs)
        return inputs

    def _entry(self, name: str) -> str | None:
        entries = self.covariances.entries
        if name in entries:
            return entries[name]
        prefix, dot, kind = name.removesuffix(".weight").rpartition(".")
        for alias in ALIASES:
            if alias.kind == kind and alias.exact and (other := f"{prefix}{dot}{alias.source}.weight") in entries:
                return entries[other]
        return None

    def notes(self) -> list[str]:
        """Return what the user should know: what is encoded with feedback, and what is not, and why."""
        if not self._found:
            raise FormatError(
                f"{self.covariances.path}: it has no covariance for a tensor that is encoded, or only for types whose "
                f"levels are not chosen one by one ({', '.join(self._other) or 'none'})"
            )
        pairs = [(inputs, e) for inputs in self._found for e in range(len(inputs.tokens))]
        few = sum(i.damping(e) == FEW_DAMPING for i, e in pairs)
        none = sum(i.damping(e) is None for i, e in pairs)
        what = f"{len(pairs)} matrices of {len(self._found)} tensors" if len(pairs) > len(self._found) else None
        lines = [f"error feedback for {what or f'{len(self._found)} tensors'}, by {self.covariances.path}"]
        lines += [f"{none} of {len(pairs)} matrices saw fewer tokens than they have columns: encoded without feedback; "
                  "calibrate on more text"] * bool(none)  # fmt: skip
        lines += [f"{few} of {len(pairs)} matrices saw fewer than {ENOUGH} tokens a column: damped more; calibrate on "
                  "more text"] * bool(few)  # fmt: skip
        lines += [f"without feedback: {_names(names)}: levels of {of} are not chosen one by one in this version"
                  for of, names in self._other.items()]  # fmt: skip
        lines += [f"without feedback: {_names(self._missing)}: no covariance"] * bool(self._missing)
        return lines


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} tensors)"


# ---------------------------------------------------------------- of a run


#: An entry, one of its matrices, and how columns are grouped.
_Key = tuple[str, int, Grouping | None]


class Metrics:
    """Metrics made on demand, each once, as many at a time as ``limit`` bytes allow, but one in any case."""

    def __init__(self, limit: int, threads: int) -> None:
        self.limit, self.threads = limit, threads
        self._ready: OrderedDict[_Key, tuple[Metric, int]] = OrderedDict()
        self._users: dict[_Key, int] = {}
        self._making: dict[_Key, int] = {}
        self._changed = threading.Condition()

    @contextmanager
    def held(self, inputs: Inputs, matrix: int) -> Iterator[Metric]:
        """Yield the metric of a matrix, made now unless somebody has made it."""
        key = (inputs.entry, matrix, inputs.grouping)
        metric = self._wait(key, inputs.metric_bytes)
        if metric is None:
            try:
                metric = inputs.made(matrix, self.threads if len(inputs.tokens) == 1 else 1)
            finally:
                with self._changed:
                    del self._making[key]
                    if metric is not None:
                        self._ready[key] = (metric, inputs.metric_bytes // 4)
                    else:
                        self._leave(key)
                    self._changed.notify_all()
        try:
            yield metric
        finally:
            with self._changed:
                self._leave(key)
                self._changed.notify_all()

    def _leave(self, key: _Key) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]

    def _wait(self, key: _Key, need: int) -> Metric | None:
        """Return a metric, or None once there is room to make it; it has a user from now on."""
        with self._changed:
            while True:
                if key in self._ready:
                    self._users[key] = self._users.get(key, 0) + 1
                    self._ready.move_to_end(key)
                    return self._ready[key][0]
                if key not in self._making and self._has_room(need):
                    self._making[key] = need
                    self._users[key] = self._users.get(key, 0) + 1
                    return None
                self._changed.wait()

    def _has_room(self, need: int) -> bool:
        for old in [key for key in self._ready if key not in self._users]:
            if self._taken() + need <= self.limit:
                break
            del self._ready[old]
        return not self._making and not self._ready or self._taken() + need <= self.limit

    def _taken(self) -> int:
        return sum(nbytes for _, nbytes in self._ready.values()) + sum(self._making.values())
