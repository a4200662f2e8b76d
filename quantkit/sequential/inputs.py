"""What a tensor multiplies, as the stage before it gave it: summed up when one of its matrices is encoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.kernels.cpu.feedback.metric import Metric, metric
from quantkit.kernels.cpu.feedback.products import Products, times_inverse
from quantkit.kernels.cpu.feedback.tiles import pack_columns
from quantkit.kernels.levels import Grouping
from quantkit.pipeline.feedback import ROUTER, damping_of
from quantkit.sequential.spill import Spill
from quantkit.sequential.streams import Seen

if TYPE_CHECKING:
    from quantkit.kernels.cuda.feedback.carrier import Carrier
    from quantkit.kernels.cuda.feedback.making import Sums
    from quantkit.kernels.cuda.feedback.metric import DeviceMetric

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

#: Tokens whose rows are read at a time: where sums in float32 end, so that bytes depend on it.
_TOKENS = 4096
#: What is added to the diagonal, in means of it, where targets are corrected; the share of what is wrong with the
#: residual stream that a product added to it is to make up for.
TARGET_DAMPING, RESIDUAL = 0.05, 0.5
#: What is added to the diagonal of sums, in means of it, for texts of other kinds: of columns as the model has them;
#: and to that of a metric, of columns as they are rounded, which may be balanced.
DAMPING, METRIC_DAMPING = 0.1, 0.02


@dataclass(frozen=True)
class _Ready:
    """An input in the files, of how many tokens, and for experts which (t, j) are rows of each."""

    seen: Seen
    spill: Spill
    tokens: int
    pairs: tuple[npt.NDArray[np.int64], ...] | None


@dataclass(eq=False)
class StageInputs:
    """The input of some tensors. ``ready`` fills it in when its stage has run; before, it knows its size only.

    factors: what the quantized stream's columns have been multiplied by, float32 [matrices or 1, n]; None: by 1.
    """

    entry: str
    n: int
    matrices: int
    factors: F32 | None = None
    is_alike, corrects = False, True
    #: Tokens of each matrix, when the stage has run.
    tokens: tuple[int, ...] | None = None
    _ready: _Ready | None = field(default=None, repr=False)
    _importance: dict[int, F32] = field(default_factory=dict, repr=False)

    def ready(self, seen: Seen, spill: Spill, tokens: int) -> None:
        """Take over what the stage left in files: rows of ``tokens`` tokens."""
        if seen.ids is None:
            self.tokens, self._ready = (tokens,) * self.matrices, _Ready(seen, spill, tokens, None)
            return
        ids = np.asarray(spill.all(seen.ids, tokens)).reshape(-1)
        order = np.argsort(ids, kind="stable")
        ends = np.searchsorted(ids[order], np.arange(self.matrices + 1))
        pairs = tuple(order[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True))
        self.tokens, self._ready = tuple(map(len, pairs)), _Ready(seen, spill, tokens, pairs)

    def drop(self) -> None:
        """Forget the stage: its files go."""
        self._ready = None
        self._importance.clear()

    @property
    def metric_bytes(self) -> int:
        """The bytes that a metric takes while it is made, with the sums; a quarter stays.

        What a residual stream lacks may have several times as many columns as the inputs of an expert.
        """
        columns = self.n if self._ready is None else self._columns
        return 48 * self.n**2 + 16 * self.n * columns

    def damping(self, matrix: int) -> float | None:
        """Return the damping of a matrix; None if its tokens are too few for feedback."""
        return self.damping_by(self._count(matrix))

    def damping_by(self, tokens: int) -> float | None:
        """Return the damping of a matrix that saw so many tokens; None if they are too few for feedback."""
        return None if damping_of(tokens, self.n) is None else DAMPING

    def made(self, matrix: int, threads: int, grouping: Grouping | None = None) -> Metric:
        """Return the metric of a matrix, with the correction of targets."""
        sums = Products(self.n, self._columns, threads)
        self._add_up(sums, matrix)
        if not np.isfinite(sums.square).all() or not np.isfinite(sums.cross).all():
            raise self._not_finite()
        try:
            np.fill_diagonal(sums.square, self._damped(np.diagonal(sums.square), matrix))
            correction = times_inverse(sums.cross, sums.square, TARGET_DAMPING, threads)
            found = metric(sums.square, METRIC_DAMPING, threads, grouping)
        except np.linalg.LinAlgError as e:
            raise self._no_covariance(matrix, e) from None
        offset = correction[self.n :].astype(np.float32) if len(correction) > self.n else None
        importance = (np.diagonal(sums.square) / max(1, self._count(matrix))).astype(np.float32)
        packed = pack_columns(correction[: self.n])
        return replace(found, correction=packed, offset=offset, importance=importance)

    def made_on(self, carrier: Carrier, matrix: int, grouping: Grouping | None = None) -> DeviceMetric:
        """Return the same on a card: its sums, too, are made there, of rows that the host reads."""
        from quantkit.kernels.cuda.feedback.making import Sums

        with carrier.rooms() as rooms:
            sums = Sums(carrier, rooms, self.n, self._columns)
            self._add_up(sums, matrix)
            if not sums.is_finite:
                raise self._not_finite()
            try:
                diagonal = self._damped(sums.diagonal(), matrix)
                return sums.metric(diagonal, self._count(matrix), METRIC_DAMPING, TARGET_DAMPING, grouping)
            except np.linalg.LinAlgError as e:
                raise self._no_covariance(matrix, e) from None

    def importance(self, matrix: int) -> F32 | None:
        """Return the mean square of each column, float32 [n], as an importance matrix has it; None without tokens."""
        if matrix not in self._importance and self._count(matrix):
            total = sum(np.square(x, dtype=np.float64).sum(axis=0) for x, *_ in self._rows(matrix))
            self._importance[matrix] = (total / self._count(matrix)).astype(np.float32)
        return self._importance.get(matrix)

    def _count(self, matrix: int) -> int:
        assert self.tokens is not None
        return self.tokens[matrix]

    def digest(self) -> str | None:
        return None

    @property
    def _columns(self) -> int:
        """The columns of what goes wrong: in the inputs, and in the residual stream if a product is added to it."""
        assert self._ready is not None
        return self.n + _width(self._ready.seen)

    def _add_up(self, sums: Products | Sums, matrix: int) -> None:
        for x, plain, tokens, share in self._rows(matrix):
            seen = x if self.entry.endswith(ROUTER) else rounded_inputs(x)
            rest, counts = self._rest(tokens)
            sums.add(seen * counts, np.concatenate([plain - seen, rest * share], axis=1) * counts)
        sums.finish()

    def _damped(self, diagonal: F64, matrix: int) -> F64:
        """Return a diagonal of sums with as much added to every column as the model has it."""
        by = self._factors_of(matrix)
        squares = np.ones(self.n) if by is None else np.square(by, dtype=np.float64)
        damped: F64 = diagonal + DAMPING * (diagonal / squares).mean() * squares
        return damped

    def _factors_of(self, matrix: int) -> F32 | None:
        return None if self.factors is None else self.factors[matrix % len(self.factors)]

    def _not_finite(self) -> FormatError:
        return FormatError(f"the inputs of {self.entry} are not finite: leave out what text makes them so")

    def _no_covariance(self, matrix: int, e: np.linalg.LinAlgError) -> FormatError:
        return FormatError(
            f"the inputs of {self.entry}, matrix {matrix}, have no covariance that can be used ({e}): calibrate on "
            "another text"
        )

    def _rows(self, matrix: int) -> Iterator[tuple[F32, F32, npt.NDArray[np.int64], F32]]:
        """Yield rows of a matrix in both streams, their tokens, and each one's share of its token, some at a time."""
        by = self._factors_of(matrix)
        for x, plain, tokens, share in self._read(matrix):
            yield x, plain if by is None else plain * by, tokens, share

    def _read(self, matrix: int) -> Iterator[tuple[F32, F32, npt.NDArray[np.int64], F32]]:
        r = self._ready
        assert r is not None
        columns = slice(0, self.n) if r.seen.heads == 1 else slice(matrix * self.n, (matrix + 1) * self.n)
        if r.pairs is None:
            for token in range(0, r.tokens, _TOKENS):
                count = min(_TOKENS, r.tokens - token)
                x, plain = (r.spill.read(place, token, count)[:, columns] for place in (r.seen.x, r.seen.plain))
                yield x, plain, np.arange(token, token + count), np.ones((count, 1), np.float32)
            return
        pairs = r.pairs[matrix]
        used = r.seen.ids.width if r.seen.ids is not None else 1
        weights = None if r.seen.weights is None else r.spill.all(r.seen.weights, r.tokens).reshape(-1)
        for begin in range(0, len(pairs), _TOKENS):
            some = pairs[begin : begin + _TOKENS]
            at = some if r.seen.x.per > 1 else some // used
            rows = [r.spill.all(place, r.tokens)[at][:, columns] for place in (r.seen.x, r.seen.plain)]
            if weights is not None:
                rows = [a * np.asarray(weights[some])[:, None] for a in rows]
            share = np.full((len(some), 1), 1 / used, np.float32)
            if weights is not None:
                squares = np.square(weights.reshape(-1, used)[some // used])
                share = (np.square(weights[some]) / squares.sum(axis=1))[:, None]
            yield rows[0], rows[1], some // used, share

    def _rest(self, tokens: npt.NDArray[np.int64]) -> tuple[F32, F32]:
        """Return what products of some tokens are to make up for, float32 [tokens, rows of the matrix], perhaps 0; and
        how much their errors count, float32 [tokens, 1].

        A norm divides what they are added to by its size, and the error by as much.
        """
        r = self._ready
        assert r is not None
        total, squares = np.zeros((len(tokens), _width(r.seen)), np.float32), np.zeros((len(tokens), 1))
        for place, plain, factor in r.seen.added_to:
            right = r.spill.all(plain, r.tokens)[tokens]
            total += (right - r.spill.all(place, r.tokens)[tokens]) * np.float32(RESIDUAL / factor)
            squares += np.square(right, dtype=np.float64).mean(axis=1, keepdims=True)
        counts = 1 / np.sqrt(np.where(squares > 0, squares, 1))
        return total, counts.astype(np.float32)


def rounded_inputs(x: F32) -> F32:
    """Return rows as runtimes on CPUs multiply them: of 8 bits, with one scale for 256 columns, or 32."""
    of = 256 if x.shape[1] % 256 == 0 else 32
    blocks = x.reshape(len(x), -1, of)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore"):  # what is not finite is refused with the sums
        rounded: F32 = np.rint(blocks / np.where(scale > 0, scale, np.float32(1))) * scale
    return rounded.reshape(x.shape)


def _width(seen: Seen) -> int:
    return seen.added_to[0][0].width if seen.added_to else 0
