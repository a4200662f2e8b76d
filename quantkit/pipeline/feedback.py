"""Error feedback (GPTQ): the tensors that have it, their covariances, and the metrics that workers share.

Rows of token embeddings are read one at a time and not multiplied, so the effect of a column's error is unknown and all
columns have equal weights. With this metric, no error moves to another column, but scales and levels are still chosen
together. (Token frequencies would only weight rows against each other, and rows do not share bits. The squared weights
of the norms that read the embedding are no better, nor are the covariances of the weights after the first norm: see
docs/explanation/error-feedback.md.) Embeddings that are also the output have the covariance of the output.

A metric costs n^3 operations and 8 n^2 bytes, and 24 n^2 more while it is computed, so workers share metrics, and only
as many are kept as memory allows.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.covariance import Covariances
from quantkit.formats.gguf import Field, ValueType
from quantkit.kernels.levels import Grouping, all_levels
from quantkit.names import span
from quantkit.pipeline.importance import ALIASES, matrices_of
from quantkit.pipeline.source import Source
from quantkit.types import TensorType

if TYPE_CHECKING:
    from quantkit.kernels.cpu.feedback import Rounding
    from quantkit.kernels.cpu.feedback.metric import Metric
    from quantkit.kernels.cuda.feedback.metric import DeviceMetric
    from quantkit.kernels.cuda.feedback.pinned_transfer import PinnedTransfer

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
#: A metric, on the CPU or a GPU.
M = TypeVar("M")

#: Damping, in means of the diagonal: less from ``TOKENS_PER_COLUMN`` tokens per column. With fewer tokens than columns
#: a covariance does not have full rank, and feedback increases the error.
DAMPING = 0.02
FEW_TOKENS_DAMPING = 0.1
TOKENS_PER_COLUMN = 4
#: The version of the method, stored in files; incremented when the bytes change.
METHOD = 4
#: Extra rounds of a calibrated matrix: _EXTRA_ROUND_COLUMNS // columns, between 1 and ``_MAX_EXTRA_ROUNDS``.
_EXTRA_ROUND_COLUMNS, _MAX_EXTRA_ROUNDS = 1024, 3
EMBEDDING, ROUTER = "token_embd.weight", ".ffn_gate_inp.weight"
#: Values of a row that are chosen together if all columns have equal weights.
_UNIFORM_COLUMNS = 256
_NO_COVARIANCE = "no covariance"


def damping_of(tokens: int, n: int) -> float | None:
    """Return the damping of a covariance of n columns; None if it has too few tokens for feedback."""
    if tokens < n:
        return None
    return DAMPING if tokens >= TOKENS_PER_COLUMN * n else FEW_TOKENS_DAMPING


class Inputs(Protocol):
    """The inputs of a tensor: a metric for each of its matrices, available when its tokens are known."""

    @property
    def entry(self) -> str:
        """The name that tensors with the same inputs share, "" if all columns have equal weights."""

    @property
    def n(self) -> int:
        """The number of columns; with equal weights, each run of n values is a separate row."""

    @property
    def matrices(self) -> int: ...

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """Tokens of each matrix; None as long as they are unknown."""

    @property
    def is_uniform(self) -> bool:
        """True if all columns have the same weight, because no column is multiplied."""

    @property
    def corrects(self) -> bool:
        """Whether targets are corrected for errors of the inputs, which also yields the importance of columns."""

    @property
    def metric_bytes(self) -> int:
        """The bytes of a metric while it is computed; a quarter remains afterwards."""

    def damping(self, matrix: int) -> float | None:
        """Return the damping of a matrix; None if its tokens are too few for feedback."""

    def damping_by(self, tokens: int) -> float | None:
        """Return the damping for this number of tokens; None if too few for feedback."""

    def build_metric(self, matrix: int, threads: int, grouping: Grouping | None = None) -> Metric:
        """Return the metric of a matrix for types with this grouping of columns.

        Raises FormatError if its covariance is not positive definite.
        """

    def metric_on(self, carrier: PinnedTransfer, matrix: int, grouping: Grouping | None = None) -> DeviceMetric:
        """Return the metric of a matrix, computed on a GPU.

        Raises FormatError as ``build_metric``, ResourceError if the GPU has not enough memory, or fails.
        """

    def importance(self, matrix: int) -> F32 | None:
        """Return the importance of the columns of a matrix without feedback, for use without an importance matrix, or
        None.

        The importance of a matrix with feedback is in its metric.
        """

    def digest(self) -> str | None:
        """Return the SHA-256 of a row's inputs other than its values and the code; None if unknown."""


@dataclass(frozen=True, eq=False)
class UniformInputs:
    """The metric of tensors that are read row by row: all columns have the same weight, ``n`` values a row."""

    n: int
    matrices: int
    entry = ""
    is_uniform, corrects = True, False

    @property
    def tokens(self) -> tuple[int, ...]:
        return (0,) * self.matrices

    @property
    def metric_bytes(self) -> int:
        return 32 * self.n**2

    def damping(self, matrix: int) -> float | None:
        return 0.0

    def damping_by(self, tokens: int) -> float | None:
        return 0.0

    def build_metric(self, matrix: int, threads: int, grouping: Grouping | None = None) -> Metric:
        from quantkit.kernels.cpu.feedback.metric import metric

        return metric(np.eye(self.n), 0.0, 1, grouping)

    def metric_on(self, carrier: PinnedTransfer, matrix: int, grouping: Grouping | None = None) -> DeviceMetric:
        from quantkit.kernels.cuda.feedback.metric import metric

        return metric(carrier, np.eye(self.n), 0.0, grouping)

    def importance(self, matrix: int) -> F32 | None:
        return None

    def digest(self) -> str | None:
        return _digest(covariance=None, n=self.n)


@dataclass(frozen=True, eq=False)
class RecordedInputs:
    """The covariance of a tensor's inputs, from a file."""

    entry: str
    n: int
    tokens: tuple[int, ...]
    weighted: bool
    covariances: Covariances = field(repr=False)
    is_uniform = corrects = False

    @property
    def matrices(self) -> int:
        return len(self.tokens)

    @property
    def metric_bytes(self) -> int:
        return 32 * self.n**2

    def damping(self, matrix: int) -> float | None:
        return self.damping_by(self.tokens[matrix])

    def damping_by(self, tokens: int) -> float | None:
        return damping_of(tokens, self.n)

    def build_metric(self, matrix: int, threads: int, grouping: Grouping | None = None) -> Metric:
        from quantkit.kernels.cpu.feedback.metric import metric

        return self._build(matrix, lambda covariance, damping: metric(covariance, damping, threads, grouping))

    def metric_on(self, carrier: PinnedTransfer, matrix: int, grouping: Grouping | None = None) -> DeviceMetric:
        from quantkit.kernels.cuda.feedback.metric import metric

        return self._build(matrix, lambda covariance, damping: metric(carrier, covariance, damping, grouping))

    def _build(self, matrix: int, make: Callable[[F64, float], M]) -> M:
        damping = self.damping(matrix)
        assert damping is not None
        try:
            return make(self.covariances.matrix(self.entry, matrix), damping)
        except np.linalg.LinAlgError as e:
            raise FormatError(
                f"{self.covariances.path}: matrix {matrix} of {self.entry} is not a valid covariance ({e}): record it "
                "again",
                "QK-E118",
            ) from None

    def importance(self, matrix: int) -> F32 | None:
        return None  # that of --imatrix, if any

    def digest(self) -> str | None:
        dampings = [self.damping(matrix) for matrix in range(self.matrices)]
        return _digest(covariance=self.covariances.digest(self.entry), n=self.n, damping=dampings)


def rounding_of(inputs: Inputs) -> Rounding:
    """Return the rounding options for a tensor with these inputs."""
    from quantkit.kernels.cpu.feedback import Rounding

    # With equal weights no error moves to another column, so more rounds gain almost nothing.
    if inputs.is_uniform:
        return Rounding(extra_rounds=0, neighbour_scales=False)
    return (
        Rounding(extra_rounds=max(1, min(_MAX_EXTRA_ROUNDS, _EXTRA_ROUND_COLUMNS // inputs.n)))
        if inputs.corrects
        else Rounding()
    )


def _digest(**fields: object) -> str:
    from quantkit.kernels.cpu.feedback import Rounding

    content = json.dumps({**fields, "rounding": asdict(Rounding())}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


class InputProvider(Protocol):
    """A provider of tensors' inputs: a file of covariances, or a run that will record them.

    name: for messages. notes: for the user. identity: a digest of the provider. entries: entry of each weight's inputs.
    corrects: targets are corrected for errors of the inputs, so that unquantized weights also change; inputs then also
    have the importance of columns for tensors without feedback.
    """

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path | None:
        """The file that is read throughout the run, if any."""

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def entries(self) -> Mapping[str, str]: ...

    @property
    def corrects(self) -> bool: ...

    @property
    def identity(self) -> str: ...

    def inputs(self, tensor: str, entry: str, shape: Sequence[int]) -> Inputs:
        """Return the inputs of a tensor. Raises FormatError if its entry has another size."""

    def source(self, source: Source, exclude: Collection[str] = ()) -> Source:
        """Return the source with equalized columns, if any; tensors in ``exclude`` are unchanged."""

    def widens(self, name: str) -> bool:
        """Return whether a tensor of fewer bits is read as F32, so that it is not copied."""

    def factors(self, name: str) -> F32 | None:
        """Return the factors of a tensor's input columns, float32 [matrices or 1, n]; None for 1."""

    def fields(self) -> dict[str, tuple[str | int | float, ValueType]]:
        """Return the provenance fields of a file encoded with it, without ``quantkit.feedback.``."""


class CovarianceFile:
    """A file of covariances."""

    corrects = False
    notes = ()

    def __init__(self, path: str | Path) -> None:
        self.covariances = Covariances(path)
        self.path, self.name = self.covariances.path, str(self.covariances.path)
        self.identity, self.entries = self.covariances.identity, self.covariances.entries
        self._tokens = 0

    def inputs(self, tensor: str, entry: str, shape: Sequence[int]) -> RecordedInputs:
        """Return the inputs of a tensor. Raises FormatError if its entry has another size."""
        n, matrices = self.covariances.shape(entry)
        if (n, matrices) != (shape[0], matrices_of(tensor, shape, n * matrices)):
            raise FormatError(
                f"{self.name}: entry {entry} has {matrices} matrices of {n} columns, but tensor {tensor} needs "
                f"{math.prod(shape[2:])} of {shape[0]}: it was recorded on another model",
                "QK-E119",
            )
        tokens = tuple(int(t) for t in self.covariances.tokens(entry))
        self._tokens = max(self._tokens, *tokens)
        return RecordedInputs(entry, n, tokens, self.covariances.is_weighted(entry), self.covariances)

    def source(self, source: Source, exclude: Collection[str] = ()) -> Source:
        """Return the source."""
        return source

    def widens(self, name: str) -> bool:
        """Return False: tensors are read as they are stored."""
        return False

    def factors(self, name: str) -> F32 | None:
        """Return None: columns are not equalized."""
        return None

    def fields(self) -> dict[str, tuple[str | int | float, ValueType]]:
        """Return the provenance fields of a file encoded with it."""
        return {
            "covariance.name": (self.covariances.path.name, ValueType.STRING),
            "covariance.fingerprint": (self.identity, ValueType.STRING),
            "tokens": (self._tokens, ValueType.UINT64),
        }


def entry_of(name: str, entries: Mapping[str, str]) -> str | None:
    """Return the entry of a tensor, or of another tensor with the same inputs; None if neither has one."""
    if name in entries:
        return entries[name]
    prefix, dot, kind = name.removesuffix(".weight").rpartition(".")
    for alias in ALIASES:
        if alias.kind == kind and alias.exact and (alias_name := f"{prefix}{dot}{alias.source}.weight") in entries:
            return entries[alias_name]
    return None


class Feedback:
    """The tensors that are encoded with error feedback, looked up one by one, and notes about them."""

    def __init__(self, provider: InputProvider) -> None:
        self.provider = provider
        #: Reasons why encoded tensors get no feedback, by name.
        self.without: dict[str, str] = {}
        self._inputs: list[Inputs] = []
        self._corrected: list[str] = []

    def lookup(self, tensor: str, name: str, shape: Sequence[int], target: TensorType) -> Inputs | None:
        """Return the inputs of a tensor that becomes ``target``; ``name`` is that of the source.

        Raises FormatError if its entry has another size.
        """
        entry = entry_of(name, self.provider.entries)
        if entry is None and not _is_read_by_row(name, target):
            self.without[tensor] = _NO_COVARIANCE
            return None
        if target.name not in all_levels():
            self.without[tensor] = f"this version has no error feedback for {target.name}"
            return self.provider.inputs(tensor, entry, shape) if self.provider.corrects and entry is not None else None
        if entry is None:
            width = min(shape[0], max(target.block, _UNIFORM_COLUMNS))
            n = width if shape[0] % width == 0 else target.block
            self._inputs.append(UniformInputs(n, math.prod(shape[2:])))
        else:
            self._inputs.append(self.provider.inputs(tensor, entry, shape))
        return self._inputs[-1]

    def lookup_corrected(self, tensor: str, name: str, shape: Sequence[int], target: TensorType) -> Inputs | None:
        """Return the inputs of a tensor that is not encoded, if it is to be corrected: a router."""
        entry = entry_of(name, self.provider.entries)
        if not self.provider.corrects or entry is None or not name.endswith(ROUTER) or target.name != "F32":
            return None
        self._corrected.append(tensor)
        return self.provider.inputs(tensor, entry, shape)

    def has_importance(self, name: str) -> bool:
        """Return whether the run computes the importance of a tensor's columns; ``name`` is that of the source."""
        return self.provider.corrects and entry_of(name, self.provider.entries) is not None

    def notes(self) -> list[str]:
        """Return notes for the user: tensors with feedback, those without, and the reasons."""
        if not self._inputs:
            reason = "; ".join(dict.fromkeys(self.without.values())) or "no covariance"
            raise FormatError(f"{self.provider.name}: applies to no tensor that is encoded: {reason}", "QK-E214")
        n, matrices = len(self._inputs), sum(i.matrices for i in self._inputs)
        subject = f"{matrices} matrices of {n} tensors" if matrices > n else f"{n} tensors"
        lines = [f"error feedback for {subject}, using {self.provider.name}", *few_tokens(self._inputs)]
        if self._corrected:
            lines.append(f"corrected for their inputs: {span(self._corrected)}")
        reasons: dict[str, list[str]] = {}
        for tensor, reason in self.without.items():
            reasons.setdefault(reason, []).append(tensor)
        lines += [f"without feedback: {span(names)}: {reason}" for reason, names in reasons.items()]
        lines += self.provider.notes
        if self.without.get("output.weight") == _NO_COVARIANCE:
            lines.append("to record a covariance of output.weight, use `imatrix --covariance --process-output`")
        return lines

    def fields(self) -> list[Field]:
        """Return the provenance fields known from the plan."""
        from quantkit.kernels.cpu.feedback import Rounding

        rounding = Rounding(extra_rounds=_MAX_EXTRA_ROUNDS) if self.provider.corrects else Rounding()
        values: dict[str, tuple[str | int | float, ValueType]] = {
            "method": (METHOD, ValueType.UINT32),
            "damping": (DAMPING, ValueType.FLOAT32),
            "damping.few_tokens": (FEW_TOKENS_DAMPING, ValueType.FLOAT32),
            **self.provider.fields(),
            **{f"rounding.{name}": (int(value), ValueType.UINT32) for name, value in asdict(rounding).items()},
            "matrices": (sum(i.matrices for i in self._inputs) - _count_insufficient(self._inputs), ValueType.UINT32),
            "tensors.without": (len(self.without), ValueType.UINT32),
        }
        if all(i.tokens is not None for i in self._inputs):
            values["matrices.without"] = (_count_insufficient(self._inputs), ValueType.UINT32)
        return [Field.of(f"quantkit.feedback.{key}", value, t) for key, (value, t) in values.items()]


def _is_read_by_row(name: str, target: TensorType) -> bool:
    """Return whether a tensor is only read row by row; a row scale remains as the reference chooses it."""
    return name == EMBEDDING and target.row_header == 0


def few_tokens(tensors: Sequence[Inputs]) -> list[str]:
    """Return notes about matrices with few or too few tokens, as far as known."""
    pairs = [(inputs, e) for inputs in tensors if inputs.tokens is not None for e in range(inputs.matrices)]
    n_few, n_none = (
        sum(i.n <= (i.tokens or ())[e] < TOKENS_PER_COLUMN * i.n for i, e in pairs),
        _count_insufficient(tensors),
    )
    lines = [f"{n_none} of {len(pairs)} matrices have fewer tokens than columns and are encoded without feedback; "
        "calibrate on more text"] * bool(n_none)  # fmt: skip
    lines += [f"{n_few} of {len(pairs)} matrices have fewer than {TOKENS_PER_COLUMN} tokens per column: "
        "calibrate on more text"] * bool(n_few)  # fmt: skip
    return lines


def _count_insufficient(tensors: Sequence[Inputs]) -> int:
    ready = [inputs for inputs in tensors if inputs.tokens is not None]
    return sum(inputs.damping(e) is None for inputs in ready for e in range(inputs.matrices))


# ---------------------------------------------------------------- of a run


#: An entry, one of its matrices, and the grouping of columns.
_Key = tuple[str, int, Grouping | None]


class MetricPool(Generic[M]):
    """Metrics computed on demand, each once; at most ``limit`` bytes at a time, but always one.

    drop: is called with each metric that is evicted.
    """

    def __init__(self, limit: int, drop: Callable[[M], None] = lambda metric: None) -> None:
        self.limit, self._drop = limit, drop
        self._ready: OrderedDict[_Key, tuple[M, int]] = OrderedDict()
        self._users: dict[_Key, int] = {}
        self._making: dict[_Key, int] = {}
        self._changed = threading.Condition()

    @contextmanager
    def lease(self, inputs: Inputs, matrix: int, grouping: Grouping | None, make: Callable[[], M]) -> Iterator[M]:
        """Yield the metric of a matrix, which is computed unless another thread has computed it."""
        key = (inputs.entry, matrix, grouping)
        metric = self._wait(key, inputs.metric_bytes)
        if metric is None:
            try:
                metric = make()
            finally:
                with self._changed:
                    del self._making[key]
                    if metric is not None:
                        self._ready[key] = (metric, inputs.metric_bytes // 4)
                    else:
                        self._release(key)
                    self._changed.notify_all()
        try:
            yield metric
        finally:
            with self._changed:
                self._release(key)
                self._changed.notify_all()

    def _release(self, key: _Key) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]

    def _wait(self, key: _Key, need: int) -> M | None:
        """Return a metric, or None once there is memory to compute it; counts a user."""
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
            if self._used_bytes() + need <= self.limit:
                break
            self._drop(self._ready.pop(old)[0])
        return not self._making and not self._ready or self._used_bytes() + need <= self.limit

    def _used_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._ready.values()) + sum(self._making.values())

    def close(self) -> None:
        """Drop all metrics; none is in use."""
        with self._changed:
            while self._ready:
                self._drop(self._ready.popitem()[1][0])


class CpuMetricPool(MetricPool["Metric"]):
    """The pool of metrics on the CPU, computed by ``threads`` threads."""

    def __init__(self, limit: int, threads: int) -> None:
        super().__init__(limit)
        self.threads = threads

    def acquire(self, inputs: Inputs, matrix: int, grouping: Grouping | None = None) -> AbstractContextManager[Metric]:
        """Return a context that holds the metric of a matrix."""
        threads = self.threads if inputs.matrices == 1 else 1
        return self.lease(inputs, matrix, grouping, lambda: inputs.build_metric(matrix, threads, grouping))
