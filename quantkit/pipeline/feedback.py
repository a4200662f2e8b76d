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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.covariance import Covariances
from quantkit.formats.gguf import Field, ValueType
from quantkit.kernels.levels import Grouping, all_levels
from quantkit.pipeline.importance import ALIASES, matrices_of
from quantkit.pipeline.source import Source
from quantkit.types import TensorType

if TYPE_CHECKING:
    from quantkit.kernels.cpu.feedback.metric import Metric
    from quantkit.kernels.cpu.feedback.options import Rounding
    from quantkit.kernels.cuda.feedback.carrier import Carrier
    from quantkit.kernels.cuda.feedback.metric import DeviceMetric

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
#: A metric, wherever it is.
M = TypeVar("M")

#: What is added to the diagonal, in means of it: less from ``ENOUGH`` tokens a column on. With fewer tokens than
#: columns a covariance is not of full rank, and feedback does harm.
DAMPING, FEW_DAMPING, ENOUGH = 0.02, 0.1, 4
#: The version of the method, in files: raised when other bytes come of it.
METHOD = 4
#: Columns of which a calibrated matrix is rounded once more; with fewer, the more often, up to ``_AGAIN`` times.
_FEW, _AGAIN = 1024, 3
EMBEDDING, ROUTER = "token_embd.weight", ".ffn_gate_inp.weight"
#: Values of a row that are chosen together where all columns count alike.
_ALIKE = 256
_NO_COVARIANCE = "no covariance"


def damping_of(tokens: int, n: int) -> float | None:
    """Return the damping of a covariance of n columns; None if so few tokens are too few for feedback."""
    if tokens < n:
        return None
    return DAMPING if tokens >= ENOUGH * n else FEW_DAMPING


class Inputs(Protocol):
    """What a tensor multiplies: a metric for each of its matrices, once its tokens are known."""

    @property
    def entry(self) -> str:
        """The name that tensors of the same inputs share, "" if all columns count alike."""

    @property
    def n(self) -> int:
        """Columns; where they count alike, each run of n values is a row of its own."""

    @property
    def matrices(self) -> int: ...

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """Tokens of each matrix; None as long as they are unknown."""

    @property
    def is_alike(self) -> bool:
        """True if all columns count alike, because none of them is multiplied."""

    @property
    def corrects(self) -> bool:
        """Whether targets are corrected, and it is known how much columns count."""

    @property
    def metric_bytes(self) -> int:
        """The bytes that a metric takes while it is made; a quarter stays."""

    def damping(self, matrix: int) -> float | None:
        """Return the damping of a matrix; None if its tokens are too few for feedback."""

    def damping_by(self, tokens: int) -> float | None:
        """Return the same for a matrix of so many tokens."""

    def made(self, matrix: int, threads: int, grouping: Grouping | None = None) -> Metric:
        """Return the metric of a matrix for types that group columns so.

        Raises FormatError if its covariance is not positive definite.
        """

    def made_on(self, carrier: Carrier, matrix: int, grouping: Grouping | None = None) -> DeviceMetric:
        """Return the same on a card, made there.

        Raises FormatError as ``made`` does, ResourceError if the card has no room, or fails.
        """

    def importance(self, matrix: int) -> F32 | None:
        """Return the importance of the columns of a matrix without feedback, if no importance matrix has it, or None.

        That of one with feedback is in its metric.
        """

    def digest(self) -> str | None:
        """Return the SHA-256 of all that decides what a row becomes, but the row and the code; None if unknown."""


class Refitted(NamedTuple):
    """What a norm's weight is multiplied by, float32 [n]; before and after, the sums of squares of what each column of
    its results lacks, as the weight is 1, float64 [n]."""

    factors: F32
    before: F64
    after: F64


class Refit(Protocol):
    """What a norm takes: its weight may be refit to it, once its tokens are known."""

    @property
    def entry(self) -> str: ...

    @property
    def n(self) -> int: ...

    @property
    def tokens(self) -> tuple[int] | None: ...

    def found(self) -> Refitted:
        """Return the factors of a weight that lacks least, and how much it lacks.

        Raises FormatError if what the norm takes is not finite.
        """


@dataclass(frozen=True, eq=False)
class Alike:
    """The metric of tensors that are read row by row: all columns count alike, ``n`` values a row."""

    n: int
    matrices: int
    entry = ""
    is_alike, corrects = True, False

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

    def made(self, matrix: int, threads: int, grouping: Grouping | None = None) -> Metric:
        from quantkit.kernels.cpu.feedback.metric import metric

        return metric(np.eye(self.n), 0.0, 1, grouping)

    def made_on(self, carrier: Carrier, matrix: int, grouping: Grouping | None = None) -> DeviceMetric:
        from quantkit.kernels.cuda.feedback.making import metric

        return metric(carrier, np.eye(self.n), 0.0, grouping)

    def importance(self, matrix: int) -> F32 | None:
        return None

    def digest(self) -> str | None:
        return _digest(covariance=None, n=self.n)


@dataclass(frozen=True, eq=False)
class RecordedInputs:
    """The covariance of what a tensor multiplies, as a file has it."""

    entry: str
    n: int
    tokens: tuple[int, ...]
    weighted: bool
    covariances: Covariances = field(repr=False)
    is_alike = corrects = False

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

    def made(self, matrix: int, threads: int, grouping: Grouping | None = None) -> Metric:
        from quantkit.kernels.cpu.feedback.metric import metric

        return self._made(matrix, lambda covariance, damping: metric(covariance, damping, threads, grouping))

    def made_on(self, carrier: Carrier, matrix: int, grouping: Grouping | None = None) -> DeviceMetric:
        from quantkit.kernels.cuda.feedback.making import metric

        return self._made(matrix, lambda covariance, damping: metric(carrier, covariance, damping, grouping))

    def _made(self, matrix: int, make: Callable[[F64, float], M]) -> M:
        damping = self.damping(matrix)
        assert damping is not None
        try:
            return make(self.covariances.matrix(self.entry, matrix), damping)
        except np.linalg.LinAlgError as e:
            raise FormatError(
                f"{self.covariances.path}: matrix {matrix} of {self.entry} is no covariance ({e}): record it again"
            ) from None

    def importance(self, matrix: int) -> F32 | None:
        return None  # what --imatrix gives, or nothing

    def digest(self) -> str | None:
        dampings = [self.damping(matrix) for matrix in range(self.matrices)]
        return _digest(covariance=self.covariances.digest(self.entry), n=self.n, damping=dampings)


def rounding_of(inputs: Inputs) -> Rounding:
    """Return what is done for rows of a tensor with such inputs."""
    from quantkit.kernels.cpu.feedback.options import Rounding

    # Where columns count alike, no error has another column to go to, and more rounds find next to nothing.
    if inputs.is_alike:
        return Rounding(again=0, beside=False)
    return Rounding(again=max(1, min(_AGAIN, _FEW // inputs.n))) if inputs.corrects else Rounding()


def _digest(**what: object) -> str:
    from quantkit.kernels.cpu.feedback.options import Rounding

    content = json.dumps({**what, "rounding": asdict(Rounding())}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


class Known(Protocol):
    """What knows the inputs of tensors: a file of covariances, or a run that will record them.

    name: for messages. notes: what the user should know. identity: tells it from others. entries: for every weight the
    one whose name its inputs have.
    corrects: targets are corrected for what is wrong with the inputs, so that weights that are not quantized change,
    too; inputs then also say how much columns count, where there is no feedback.
    """

    @property
    def name(self) -> str: ...

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

    def refit(self, name: str) -> Refit | None:
        """Return what refits a tensor of the source, if it is a norm's weight and is to be."""

    def source(self, source: Source, but: Collection[str] = ()) -> Source:
        """Return a source as it is to be read: its columns balanced, perhaps, ``but`` not those of some tensors."""

    def widens(self, name: str) -> bool:
        """Tell whether a tensor is read as F32, having had fewer bits, so that it should not be kept as it is."""

    def factors(self, name: str) -> F32 | None:
        """Return what the inputs of a tensor are multiplied by, float32 [matrices or 1, n]; None: by 1."""

    def fields(self) -> dict[str, tuple[str | int | float, ValueType]]:
        """Return what a file that is made with it says of it, without ``quantkit.feedback.``."""


class Recorded:
    """A file of covariances."""

    corrects = False
    notes = ()

    def __init__(self, path: str | Path) -> None:
        self.covariances = Covariances(path)
        self.name, self.identity, self.entries = str(path), self.covariances.identity, self.covariances.entries
        self._tokens = 0

    def inputs(self, tensor: str, entry: str, shape: Sequence[int]) -> RecordedInputs:
        """Return the inputs of a tensor. Raises FormatError if its entry has another size."""
        n, matrices = self.covariances.shape(entry)
        if (n, matrices) != (shape[0], matrices_of(tensor, shape, n * matrices)):
            raise FormatError(
                f"{self.name}: entry {entry} has {matrices} matrices of {n} columns, tensor {tensor} needs "
                f"{math.prod(shape[2:])} of {shape[0]}: it was recorded on another model"
            )
        tokens = tuple(int(t) for t in self.covariances.tokens(entry))
        self._tokens = max(self._tokens, *tokens)
        return RecordedInputs(entry, n, tokens, self.covariances.is_weighted(entry), self.covariances)

    def refit(self, name: str) -> Refit | None:
        """Return what refits a tensor: nothing does."""
        return None

    def source(self, source: Source, but: Collection[str] = ()) -> Source:
        """Return the source."""
        return source

    def widens(self, name: str) -> bool:
        """Tell whether a tensor is read as F32, having had fewer bits."""
        return False

    def factors(self, name: str) -> F32 | None:
        """Return what the inputs of a tensor are multiplied by."""
        return None

    def fields(self) -> dict[str, tuple[str | int | float, ValueType]]:
        """Return what a file that is made with it says of it."""
        return {
            "covariance.name": (self.covariances.path.name, ValueType.STRING),
            "covariance.fingerprint": (self.identity, ValueType.STRING),
            "tokens": (self._tokens, ValueType.UINT64),
        }


def entry_of(name: str, entries: Mapping[str, str]) -> str | None:
    """Return the entry of a tensor, perhaps under the name of one that has the same inputs; None if there is none."""
    if name in entries:
        return entries[name]
    prefix, dot, kind = name.removesuffix(".weight").rpartition(".")
    for alias in ALIASES:
        if alias.kind == kind and alias.exact and (other := f"{prefix}{dot}{alias.source}.weight") in entries:
            return entries[other]
    return None


class Feedback:
    """What quantization encodes with feedback: looked up tensor by tensor, with what there is to say about it."""

    def __init__(self, known: Known) -> None:
        self.known = known
        #: Why tensors that are encoded get no feedback, by name.
        self.without: dict[str, str] = {}
        self._found: list[Inputs] = []
        self._corrected: list[str] = []
        self._refit: list[str] = []

    def lookup(self, tensor: str, name: str, shape: Sequence[int], target: TensorType) -> Inputs | None:
        """Return the inputs of a tensor that becomes ``target``; ``name`` is that of the source.

        Raises FormatError if its entry has another size.
        """
        entry = entry_of(name, self.known.entries)
        if entry is None and not _is_read_by_row(name, target):
            self.without[tensor] = _NO_COVARIANCE
            return None
        if target.name not in all_levels():
            self.without[tensor] = f"levels of {target.name} are not chosen one by one in this version"
            return self.known.inputs(tensor, entry, shape) if self.known.corrects and entry is not None else None
        if entry is None:
            width = min(shape[0], max(target.block, _ALIKE))
            n = width if shape[0] % width == 0 else target.block
            self._found.append(Alike(n, math.prod(shape[2:])))
        else:
            self._found.append(self.known.inputs(tensor, entry, shape))
        return self._found[-1]

    def corrected(self, tensor: str, name: str, shape: Sequence[int], target: TensorType) -> Inputs | None:
        """Return the inputs of a tensor that is not encoded, if it is to be corrected: a router."""
        entry = entry_of(name, self.known.entries)
        if not self.known.corrects or entry is None or not name.endswith(ROUTER) or target.name != "F32":
            return None
        self._corrected.append(tensor)
        return self.known.inputs(tensor, entry, shape)

    def refit(self, tensor: str, name: str, target: TensorType) -> Refit | None:
        """Return what refits a tensor, if it is a norm's weight in F32 and is to be; ``name`` is that of the source."""
        found = self.known.refit(name) if target.name == "F32" else None
        self._refit += [tensor] * (found is not None)
        return found

    def shows(self, name: str) -> bool:
        """Tell whether the importance of a tensor's columns will be known; ``name`` is that of the source."""
        return self.known.corrects and entry_of(name, self.known.entries) is not None

    def notes(self) -> list[str]:
        """Return what the user should know: what is encoded with feedback, and what is not, and why."""
        if not self._found:
            why = "; ".join(dict.fromkeys(self.without.values())) or "there is none"
            raise FormatError(f"{self.known.name}: it helps no tensor that is encoded: {why}")
        n, matrices = len(self._found), sum(i.matrices for i in self._found)
        what = f"{matrices} matrices of {n} tensors" if matrices > n else f"{n} tensors"
        lines = [f"error feedback for {what}, by {self.known.name}", *few_tokens(self._found)]
        if self._corrected:
            lines.append(f"corrected for their inputs: {_names(self._corrected)}")
        if self._refit:
            lines.append(f"refit to what they take: {_names(self._refit)}")
        reasons: dict[str, list[str]] = {}
        for tensor, why in self.without.items():
            reasons.setdefault(why, []).append(tensor)
        lines += [f"without feedback: {_names(names)}: {why}" for why, names in reasons.items()]
        lines += self.known.notes
        if self.without.get("output.weight") == _NO_COVARIANCE:
            lines.append("output.weight has a covariance if `imatrix --covariance` is given --process-output")
        return lines

    def fields(self) -> list[Field]:
        """Return what a file says of its making, as far as a plan knows it."""
        from quantkit.kernels.cpu.feedback.options import Rounding

        how = Rounding(again=_AGAIN) if self.known.corrects else Rounding()
        values: dict[str, tuple[str | int | float, ValueType]] = {
            "method": (METHOD, ValueType.UINT32),
            "damping": (DAMPING, ValueType.FLOAT32),
            "damping.few_tokens": (FEW_DAMPING, ValueType.FLOAT32),
            **self.known.fields(),
            **{f"rounding.{name}": (int(value), ValueType.UINT32) for name, value in asdict(how).items()},
            "matrices": (sum(i.matrices for i in self._found) - _too_few(self._found), ValueType.UINT32),
            "tensors.without": (len(self.without), ValueType.UINT32),
        }
        if all(i.tokens is not None for i in self._found):
            values["matrices.without"] = (_too_few(self._found), ValueType.UINT32)
        return [Field.of(f"quantkit.feedback.{key}", value, t) for key, (value, t) in values.items()]


def _is_read_by_row(name: str, target: TensorType) -> bool:
    """Tell whether a tensor is only read row by row; a scale of the whole row is left as the reference has it."""
    return name == EMBEDDING and target.row_header == 0


def few_tokens(found: Sequence[Inputs]) -> list[str]:
    """Return how many matrices saw few tokens, or too few, as far as that is known."""
    pairs = [(inputs, e) for inputs in found if inputs.tokens is not None for e in range(inputs.matrices)]
    few, none = sum(i.n <= (i.tokens or ())[e] < ENOUGH * i.n for i, e in pairs), _too_few(found)
    lines = [f"{none} of {len(pairs)} matrices saw fewer tokens than they have columns: encoded without feedback; "
             "calibrate on more text"] * bool(none)  # fmt: skip
    lines += [f"{few} of {len(pairs)} matrices saw fewer than {ENOUGH} tokens a column: calibrate on more "
              "text"] * bool(few)  # fmt: skip
    return lines


def _too_few(found: Sequence[Inputs]) -> int:
    known = [inputs for inputs in found if inputs.tokens is not None]
    return sum(inputs.damping(e) is None for inputs in known for e in range(inputs.matrices))


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} tensors)"


# ---------------------------------------------------------------- of a run


#: An entry, one of its matrices, and how columns are grouped.
_Key = tuple[str, int, Grouping | None]


class Shared(Generic[M]):
    """Metrics made on demand, each once, as many at a time as ``limit`` bytes allow, but one in any case.

    drop: is given those that go.
    """

    def __init__(self, limit: int, drop: Callable[[M], None] = lambda metric: None) -> None:
        self.limit, self._drop = limit, drop
        self._ready: OrderedDict[_Key, tuple[M, int]] = OrderedDict()
        self._users: dict[_Key, int] = {}
        self._making: dict[_Key, int] = {}
        self._changed = threading.Condition()

    @contextmanager
    def shared(self, inputs: Inputs, matrix: int, grouping: Grouping | None, make: Callable[[], M]) -> Iterator[M]:
        """Yield the metric of a matrix, made now unless somebody has made it."""
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

    def _wait(self, key: _Key, need: int) -> M | None:
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
            self._drop(self._ready.pop(old)[0])
        return not self._making and not self._ready or self._taken() + need <= self.limit

    def _taken(self) -> int:
        return sum(nbytes for _, nbytes in self._ready.values()) + sum(self._making.values())

    def close(self) -> None:
        """Drop all; nobody uses one any more."""
        with self._changed:
            while self._ready:
                self._drop(self._ready.popitem()[1][0])


class Metrics(Shared["Metric"]):
    """Those of the CPU, made by ``threads`` threads."""

    def __init__(self, limit: int, threads: int) -> None:
        super().__init__(limit)
        self.threads = threads

    def held(self, inputs: Inputs, matrix: int, grouping: Grouping | None = None) -> AbstractContextManager[Metric]:
        """Hold the metric of a matrix."""
        threads = self.threads if inputs.matrices == 1 else 1
        return self.shared(inputs, matrix, grouping, lambda: inputs.made(matrix, threads, grouping))
