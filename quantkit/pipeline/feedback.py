"""Which tensors are encoded with error feedback, by which covariance, and the metrics that a run shares.

Rows of token embeddings are read one at a time and multiplied by nothing: what a column's error does is not known, so
all columns count alike. With such a metric no error has another column to go to, but scales and levels are still chosen
together. (How often a token occurs weighs the rows against each other, and no row gives bits to another. The squares of
the weights of all norms that read the embedding are no better measure, nor are the covariances of the weights behind
the first norm: see docs/error-feedback.md.) Embeddings that are the output as well have the covariance of the output.

A metric costs n^3 operations and 8 n^2 bytes, 24 n^2 more while it is made, so that workers share those they need, and
no more are held than memory allows.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quantkit.errors import FormatError
from quantkit.formats.covariance import Covariances
from quantkit.formats.gguf import Field, ValueType
from quantkit.kernels.levels import all_levels
from quantkit.pipeline.importance import ALIASES
from quantkit.types import TensorType

if TYPE_CHECKING:
    from quantkit.kernels.cpu.feedback.rounding import Metric

#: What is added to the diagonal, in means of it: less from ``ENOUGH`` tokens a column on. With fewer tokens than
#: columns a covariance is not of full rank, and feedback does harm.
DAMPING, FEW_DAMPING, ENOUGH = 0.02, 0.1, 4
#: The version of the method, in files: raised when other bytes come of it.
METHOD = 1
EMBEDDING = "token_embd.weight"
#: Values of a row that are chosen together where all columns count alike.
_ALIKE = 256
_NO_COVARIANCE = "no covariance"


@dataclass(frozen=True, eq=False)
class Inputs:
    """The covariance of what a tensor multiplies; one for each of its matrices.

    Without an entry all columns count alike: each run of ``n`` values is then a row of its own.
    """

    tensor: str
    entry: str
    n: int
    #: Tokens of each matrix.
    tokens: tuple[int, ...]
    weighted: bool
    covariances: Covariances = field(repr=False)

    @property
    def is_alike(self) -> bool:
        """True if all columns count alike, because none of them is multiplied."""
        return not self.entry

    @property
    def metric_bytes(self) -> int:
        """The bytes that a metric takes while it is made; a quarter stays."""
        return 32 * self.n**2

    def damping(self, matrix: int) -> float | None:
        """Return the damping of a matrix; None if its tokens are too few for feedback."""
        tokens = self.tokens[matrix]
        if self.is_alike:
            return 0.0
        if tokens < self.n:
            return None
        return DAMPING if tokens >= ENOUGH * self.n else FEW_DAMPING

    def made(self, matrix: int, threads: int) -> Metric:
        """Return the metric of a matrix. Raises FormatError if its covariance is not positive definite."""
        from quantkit.kernels.cpu.feedback.rounding import metric

        damping = self.damping(matrix)
        assert damping is not None
        if self.is_alike:
            return metric(np.eye(self.n), 0.0)
        try:
            return metric(self.covariances.matrix(self.entry, matrix), damping, threads)
        except np.linalg.LinAlgError as e:
            raise FormatError(
                f"{self.covariances.path}: matrix {matrix} of {self.entry} is no covariance ({e}): record it again"
            ) from None

    def digest(self) -> str:
        """Return the SHA-256 of all that decides what a row becomes, but the row and the code."""
        from quantkit.kernels.cpu.feedback.rounding import Rounding

        dampings = [self.damping(matrix) for matrix in range(len(self.tokens))]
        content = None if self.is_alike else self.covariances.digest(self.entry)
        what = {"covariance": content, "n": self.n, "damping": dampings, "rounding": asdict(Rounding())}
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


class Feedback:
    """A file of covariances as quantization uses it: looked up tensor by tensor, with what there is to say about it."""

    def __init__(self, path: str | Path) -> None:
        self.covariances = Covariances(path)
        #: Why tensors that are encoded get no feedback, by name.
        self.without: dict[str, str] = {}
        self._found: list[Inputs] = []

    def lookup(self, tensor: str, name: str, shape: Sequence[int], target: TensorType) -> Inputs | None:
        """Return the inputs of a tensor that becomes ``target``; ``name`` is that of the source.

        Raises FormatError if its entry has another size.
        """
        entry = self._entry(name)
        if entry is None and not self._is_read_by_row(name, target):
            self.without[tensor] = _NO_COVARIANCE
            return None
        if target.name not in all_levels():
            self.without[tensor] = f"levels of {target.name} are not chosen one by one in this version"
            return None
        if entry is None:
            width = min(shape[0], max(target.block, _ALIKE))
            n = width if shape[0] % width == 0 else target.block
            inputs = Inputs(tensor, "", n, (0,) * math.prod(shape[2:]), False, self.covariances)
            self._found.append(inputs)
            return inputs
        n, matrices = self.covariances.shape(entry)
        if (n, matrices) != (shape[0], math.prod(shape[2:])):
            raise FormatError(
                f"{self.covariances.path}: entry {entry} has {matrices} matrices of {n} columns, tensor {tensor} needs "
                f"{math.prod(shape[2:])} of {shape[0]}: it was recorded on another model"
            )
        tokens = tuple(int(t) for t in self.covariances.tokens(entry))
        inputs = Inputs(tensor, entry, n, tokens, self.covariances.is_weighted(entry), self.covariances)
        self._found.append(inputs)
        return inputs

    def _is_read_by_row(self, name: str, target: TensorType) -> bool:
        """Tell whether a tensor is only read row by row; a scale of the whole row is left as the reference has it."""
        return name == EMBEDDING and target.row_header == 0

    def _entry(self, name: str) -> str | None:
        entries = self.covariances.entries
        if name in entries:
            return entries[name]
        prefix, dot, kind = name.removesuffix(".weight").rpartition(".")
        for alias in ALIASES:
            if alias.kind == kind and alias.exact and (other := f"{prefix}{dot}{alias.source}.weight") in entries:
                return entries[other]
        return None

    @property
    def matrices(self) -> tuple[int, int]:
        """How many matrices are encoded with feedback, and how many of the same tensors are not, for lack of tokens."""
        dampings = [inputs.damping(e) for inputs in self._found for e in range(len(inputs.tokens))]
        return len(dampings) - dampings.count(None), dampings.count(None)

    @property
    def tokens(self) -> int:
        """The tokens of the text: the most that any matrix has seen."""
        return max((max(inputs.tokens) for inputs in self._found), default=0)

    def notes(self) -> list[str]:
        """Return what the user should know: what is encoded with feedback, and what is not, and why."""
        if not self._found:
            why = "; ".join(dict.fromkeys(self.without.values())) or "there is none"
            raise FormatError(f"{self.covariances.path}: it helps no tensor that is encoded: {why}")
        pairs = [(inputs, e) for inputs in self._found for e in range(len(inputs.tokens))]
        few, none = sum(i.damping(e) == FEW_DAMPING for i, e in pairs), self.matrices[1]
        what = f"{len(pairs)} matrices of {len(self._found)} tensors" if len(pairs) > len(self._found) else None
        lines = [f"error feedback for {what or f'{len(self._found)} tensors'}, by {self.covariances.path}"]
        lines += [f"{none} of {len(pairs)} matrices saw fewer tokens than they have columns: encoded without feedback; "
                  "calibrate on more text"] * bool(none)  # fmt: skip
        lines += [f"{few} of {len(pairs)} matrices saw fewer than {ENOUGH} tokens a column: damped more; calibrate on "
                  "more text"] * bool(few)  # fmt: skip
        reasons: dict[str, list[str]] = {}
        for tensor, why in self.without.items():
            reasons.setdefault(why, []).append(tensor)
        lines += [f"without feedback: {_names(names)}: {why}" for why, names in reasons.items()]
        if self.without.get("output.weight") == _NO_COVARIANCE:
            lines.append("output.weight has a covariance if `imatrix --covariance` is given --process-output")
        return lines


def feedback_fields(feedback: Feedback) -> list[Field]:
    """Return what a file says of its making, as far as a plan knows it."""
    from quantkit.kernels.cpu.feedback.rounding import Rounding

    how, (fed, without) = Rounding(), feedback.matrices
    values: dict[str, tuple[str | int | float, ValueType]] = {
        "method": (METHOD, ValueType.UINT32),
        "covariance.name": (feedback.covariances.path.name, ValueType.STRING),
        "covariance.fingerprint": (feedback.covariances.identity, ValueType.STRING),
        "tokens": (feedback.tokens, ValueType.UINT64),
        "damping": (DAMPING, ValueType.FLOAT32),
        "damping.few_tokens": (FEW_DAMPING, ValueType.FLOAT32),
        **{f"rounding.{name}": (int(value), ValueType.UINT32) for name, value in asdict(how).items()},
        "matrices": (fed, ValueType.UINT32),
        "matrices.without": (without, ValueType.UINT32),
        "tensors.without": (len(feedback.without), ValueType.UINT32),
    }
    return [Field.of(f"quantkit.feedback.{key}", value, t) for key, (value, t) in values.items()]


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} tensors)"


# ---------------------------------------------------------------- of a run


class Metrics:
    """Metrics made on demand, each once, as many at a time as ``limit`` bytes allow, but one in any case."""

    def __init__(self, limit: int, threads: int) -> None:
        self.limit, self.threads = limit, threads
        self._ready: OrderedDict[tuple[str, int], tuple[Metric, int]] = OrderedDict()
        self._users: dict[tuple[str, int], int] = {}
        self._making: dict[tuple[str, int], int] = {}
        self._changed = threading.Condition()

    @contextmanager
    def held(self, inputs: Inputs, matrix: int) -> Iterator[Metric]:
        """Yield the metric of a matrix, made now unless somebody has made it."""
        key = (inputs.entry, matrix)
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

    def _leave(self, key: tuple[str, int]) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]

    def _wait(self, key: tuple[str, int], need: int) -> Metric | None:
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
