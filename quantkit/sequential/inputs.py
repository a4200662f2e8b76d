"""Inputs of a tensor as the previous stage computed them, accumulated when one of its matrices is encoded."""

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
from quantkit.sequential.streams import SpilledInput

if TYPE_CHECKING:
    from quantkit.kernels.cuda.feedback.metric import DeviceMetric, DeviceSums
    from quantkit.kernels.cuda.feedback.pinned_transfer import PinnedTransfer

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

#: Tokens per batch. Sums in float32 end with a batch, so bytes depend on it.
_TOKENS = 4096
#: Damping of the target correction, in means of the diagonal; the share of the residual stream's error that a product
#: added to it corrects.
TARGET_DAMPING, RESIDUAL = 0.05, 0.5
#: Damping, in means of the diagonal, against overfitting to the text: of the sums, in the model's columns; and of the
#: metric, in the columns that are rounded, which may be equalized.
DAMPING, METRIC_DAMPING = 0.1, 0.02


@dataclass(frozen=True)
class _StageRows:
    """An input in the files: its tokens, and for experts the (token, slot) pairs of each."""

    source: SpilledInput
    spill: Spill
    tokens: int
    pairs: tuple[npt.NDArray[np.int64], ...] | None


@dataclass(eq=False)
class StageInputs:
    """The input of some tensors. Only its size is known before ``attach``, which is called after its stage.

    factors: equalization factors of the quantized stream's columns, float32 [matrices or 1, n]; None for 1.
    """

    entry: str
    n: int
    matrices: int
    factors: F32 | None = None
    is_uniform, corrects = False, True
    #: Tokens of each matrix, once the stage has run.
    tokens: tuple[int, ...] | None = None
    _stage: _StageRows | None = field(default=None, repr=False)
    _importance: dict[int, F32] = field(default_factory=dict, repr=False)

    def attach(self, source: SpilledInput, spill: Spill, tokens: int) -> None:
        """Attach the rows of ``tokens`` tokens that the stage wrote to files."""
        if source.ids is None:
            self.tokens, self._stage = (tokens,) * self.matrices, _StageRows(source, spill, tokens, None)
            return
        ids = np.asarray(spill.map_rows(source.ids, tokens)).reshape(-1)
        order = np.argsort(ids, kind="stable")
        ends = np.searchsorted(ids[order], np.arange(self.matrices + 1))
        pairs = tuple(order[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True))
        self.tokens, self._stage = tuple(map(len, pairs)), _StageRows(source, spill, tokens, pairs)

    def drop(self) -> None:
        """Release the stage, whose files are removed."""
        self._stage = None
        self._importance.clear()

    @property
    def metric_bytes(self) -> int:
        """The memory that computing a metric takes, in bytes; a quarter of it remains.

        The residual's correction may have several times as many columns as the inputs of an expert.
        """
        columns = self.n if self._stage is None else self._columns
        return 48 * self.n**2 + 16 * self.n * columns

    def damping(self, matrix: int) -> float | None:
        """Return the damping of a matrix; None if its tokens are too few for feedback."""
        return self.damping_by(self._count(matrix))

    def damping_by(self, tokens: int) -> float | None:
        """Return the damping for a number of tokens; None if they are too few for feedback."""
        return None if damping_of(tokens, self.n) is None else DAMPING

    def build_metric(self, matrix: int, threads: int, grouping: Grouping | None = None) -> Metric:
        """Return the metric of a matrix, with the correction of targets."""
        sums = Products(self.n, self._columns, threads)
        self._add_up(sums, matrix)
        if not np.isfinite(sums.square).all() or not np.isfinite(sums.cross).all():
            raise self._not_finite()
        try:
            np.fill_diagonal(sums.square, self._damp(np.diagonal(sums.square), matrix))
            correction = times_inverse(sums.cross, sums.square, TARGET_DAMPING, threads)
            result = metric(sums.square, METRIC_DAMPING, threads, grouping)
        except np.linalg.LinAlgError as e:
            raise self._no_covariance(matrix, e) from None
        offset = correction[self.n :].astype(np.float32) if len(correction) > self.n else None
        importance = (np.diagonal(sums.square) / max(1, self._count(matrix))).astype(np.float32)
        columns = pack_columns(correction[: self.n])
        return replace(result, correction=columns, offset=offset, importance=importance)

    def metric_on(self, carrier: PinnedTransfer, matrix: int, grouping: Grouping | None = None) -> DeviceMetric:
        """Return the metric on a GPU, which also accumulates the sums from rows that the host reads."""
        from quantkit.kernels.cuda.feedback.metric import DeviceSums

        with carrier.allocations() as allocations:
            sums = DeviceSums(carrier, allocations, self.n, self._columns)
            self._add_up(sums, matrix)
            if not sums.is_finite:
                raise self._not_finite()
            try:
                diagonal = self._damp(sums.diagonal(), matrix)
                return sums.metric(diagonal, self._count(matrix), METRIC_DAMPING, TARGET_DAMPING, grouping)
            except np.linalg.LinAlgError as e:
                raise self._no_covariance(matrix, e) from None

    def importance(self, matrix: int) -> F32 | None:
        """Return the mean square of each column, float32 [n], as in an importance matrix; None without tokens."""
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
        """The number of error columns: of the inputs, and of the residual stream if the product is added to it."""
        assert self._stage is not None
        return self.n + _width(self._stage.source)

    def _add_up(self, sums: Products | DeviceSums, matrix: int) -> None:
        for x, plain, tokens, share in self._rows(matrix):
            rounded = x if self.entry.endswith(ROUTER) else rounded_inputs(x)
            targets, counts = self._targets(tokens)
            sums.add(rounded * counts, np.concatenate([plain - rounded, targets * share], axis=1) * counts)
        sums.finish()

    def _damp(self, diagonal: F64, matrix: int) -> F64:
        """Return a diagonal of sums with damping equal for all columns of the unequalized model."""
        factors = self._factors_of(matrix)
        squares = np.ones(self.n) if factors is None else np.square(factors, dtype=np.float64)
        damped: F64 = diagonal + DAMPING * (diagonal / squares).mean() * squares
        return damped

    def _factors_of(self, matrix: int) -> F32 | None:
        return None if self.factors is None else self.factors[matrix % len(self.factors)]

    def _not_finite(self) -> FormatError:
        return FormatError(f"the inputs of {self.entry} are not finite: remove the text that causes this", "QK-E108")

    def _no_covariance(self, matrix: int, e: np.linalg.LinAlgError) -> FormatError:
        return FormatError(
            f"the inputs of {self.entry}, matrix {matrix}, have no usable covariance ({e}): calibrate on another text",
            "QK-E108",
        )

    def _rows(self, matrix: int) -> Iterator[tuple[F32, F32, npt.NDArray[np.int64], F32]]:
        """Yield batches of a matrix: its rows in both streams, their tokens, and each row's share of its token."""
        factors = self._factors_of(matrix)
        for x, plain, tokens, share in self._read(matrix):
            yield x, plain if factors is None else plain * factors, tokens, share

    def _read(self, matrix: int) -> Iterator[tuple[F32, F32, npt.NDArray[np.int64], F32]]:
        r = self._stage
        assert r is not None
        columns = slice(0, self.n) if r.source.heads == 1 else slice(matrix * self.n, (matrix + 1) * self.n)
        if r.pairs is None:
            for token in range(0, r.tokens, _TOKENS):
                count = min(_TOKENS, r.tokens - token)
                x, plain = (r.spill.read(place, token, count)[:, columns] for place in (r.source.x, r.source.plain))
                yield x, plain, np.arange(token, token + count), np.ones((count, 1), np.float32)
            return
        pairs = r.pairs[matrix]
        n_used = r.source.ids.width if r.source.ids is not None else 1
        weights = None if r.source.weights is None else r.spill.map_rows(r.source.weights, r.tokens).reshape(-1)
        for begin in range(0, len(pairs), _TOKENS):
            selection = pairs[begin : begin + _TOKENS]
            indices = selection if r.source.x.per > 1 else selection // n_used
            rows = [r.spill.map_rows(place, r.tokens)[indices][:, columns] for place in (r.source.x, r.source.plain)]
            if weights is not None:
                rows = [a * np.asarray(weights[selection])[:, None] for a in rows]
            share = np.full((len(selection), 1), 1 / n_used, np.float32)
            if weights is not None:
                squares = np.square(weights.reshape(-1, n_used)[selection // n_used])
                share = (np.square(weights[selection]) / squares.sum(axis=1))[:, None]
            yield rows[0], rows[1], selection // n_used, share

    def _targets(self, tokens: npt.NDArray[np.int64]) -> tuple[F32, F32]:
        """Return residual corrections, float32 [tokens, rows of the matrix or 0], and token weights, [tokens, 1].

        The next norm divides the residual stream by its size, and the error with it.
        """
        r = self._stage
        assert r is not None
        total, squares = np.zeros((len(tokens), _width(r.source)), np.float32), np.zeros((len(tokens), 1))
        for place, plain, factor in r.source.added_to:
            original = r.spill.map_rows(plain, r.tokens)[tokens]
            total += (original - r.spill.map_rows(place, r.tokens)[tokens]) * np.float32(RESIDUAL / factor)
            squares += np.square(original, dtype=np.float64).mean(axis=1, keepdims=True)
        counts = 1 / np.sqrt(np.where(squares > 0, squares, 1))
        return total, counts.astype(np.float32)


def rounded_inputs(x: F32) -> F32:
    """Return rows as CPU runtimes multiply them: rounded to 8 bits, one scale per 256 columns, or 32."""
    block = 256 if x.shape[1] % 256 == 0 else 32
    blocks = x.reshape(len(x), -1, block)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore"):  # infinite values are an error when the sums are used
        rounded: F32 = np.rint(blocks / np.where(scale > 0, scale, np.float32(1))) * scale
    return rounded.reshape(x.shape)


def _width(source: SpilledInput) -> int:
    return source.added_to[0][0].width if source.added_to else 0
