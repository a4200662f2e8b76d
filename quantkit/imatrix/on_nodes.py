"""A collection on the nodes of a cluster: each records batches of passes; their sums are added up as if by one.

Sums keep what rounding takes from them (kernels/cpu/observe.py), so it makes no difference to the file how chunks are
divided. A batch is as long as sending its sums is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quantkit.evaluate.on_nodes import SECONDS, Pass, There
from quantkit.evaluate.passes import F32, I32, LoadOptions, run_windows
from quantkit.imatrix.nextn import Hidden, Predictor
from quantkit.model.backends.accumulators import Accumulator, NotFinite
from quantkit.model.engine import Model, load
from quantkit.model.ops import Graph

#: Bytes of sums that are sent and added in a second, and how much longer a batch is to take.
_BYTES_A_SECOND, _TIMES = 1e8, 20

#: Adds observing operations to a model's graph; to that of a prediction layer, told whether the output is its own.
Rewrite = Callable[[Graph], Graph]
Look = Callable[[Graph, bool], Graph]


@dataclass(frozen=True)
class Recording:
    """What nodes need to record; ``predicting``: the file of a prediction layer."""

    model: There
    rewrite: Rewrite
    look: Look
    predicting: There | None
    n_ctx: int
    n_batch: int
    n_seq: int
    #: The first position whose logits are needed, and whether likelihoods are wanted.
    first: int
    ppl: bool
    bos: int | None


@dataclass(frozen=True)
class Recorded:
    """What a batch of passes came to; ``sequence`` of what is not finite counts its windows."""

    sums: dict[str, Accumulator]
    nll: dict[int, npt.NDArray[np.float64]]
    not_finite: list[NotFinite]


class Recorder:
    """A model with its prediction layer, if that is recorded, ready to run passes."""

    def __init__(self, recording: Recording, options: LoadOptions) -> None:
        self.recording = recording
        hidden = None if recording.predicting is None else Hidden()
        self.model: Model = load(
            recording.model.path, n_ctx=recording.n_ctx, rewrite=recording.rewrite, observer=hidden, **options
        )
        self.session = self.model.session(recording.n_ctx, recording.n_seq)
        self.predictor: Predictor | None = None
        if recording.predicting is not None and hidden is not None:
            n_ctx, n_seq = recording.n_ctx, recording.n_seq
            self.predictor = Predictor(recording.predicting.path, hidden, n_ctx, n_seq, recording.look, **options)
        self.threads = options.get("threads")

    @property
    def accumulators(self) -> dict[str, Accumulator]:
        return self.session.accumulators | ({} if self.predictor is None else self.predictor.accumulators)

    def run(self, passes: list[Pass]) -> Recorded:
        """Run passes and return what they came to, they alone."""
        for parts in self.accumulators.values():
            for array in parts.values():
                array[...] = 0
        nll: dict[int, npt.NDArray[np.float64]] = {}
        found: list[NotFinite] = []
        for each in passes:
            self._run(each.windows, each.begin - passes[0].begin, nll, found)
        sums = {of: {name: array.copy() for name, array in parts.items()} for of, parts in self.accumulators.items()}
        return Recorded(sums, nll, found)

    def _run(self, windows: I32, begin: int, nll: dict[int, npt.NDArray[np.float64]], found: list[NotFinite]) -> None:
        how = self.recording

        def score(window: int, row: int, logits: F32, following: I32) -> None:
            if how.ppl:
                note_likelihoods(nll, begin + window, how.n_ctx, row, logits, following)

        run_windows(
            self.model,
            windows,
            how.first,
            score,
            lambda begin, end: None,
            n_batch=how.n_batch,
            bos=how.bos,
            threads=self.threads,
            session=self.session,
        )
        seen = self.session.take_not_finite()
        if self.predictor is not None:
            seen += [replace(where, position=where.position + 1) for where in self.predictor.run(windows)]
        found += [replace(where, sequence=begin + where.sequence) for where in seen]


def note_likelihoods(
    nll: dict[int, npt.NDArray[np.float64]], chunk: int, n_ctx: int, row: int, logits: F32, following: I32
) -> None:
    """Enter the likelihoods of some rows of a chunk; those that are not finite stay NaN."""
    from quantkit.evaluate.scores import nll_of, softmax

    of_chunk = nll.setdefault(chunk, np.full(n_ctx - 1 - n_ctx // 2, np.nan))
    if np.isfinite(logits.max(axis=1)).all():
        of_chunk[row : row + len(logits)] = nll_of(logits, softmax(logits), following)


def begin_recording(shared: Recording, threads: int) -> Callable[[list[Pass]], Recorded]:
    """Load the model in a worker process; return what records passes."""
    if shared.predicting is not None:
        shared.predicting.check()
    return Recorder(shared, shared.model.options_here(threads)).run


def worth(accumulators: Mapping[str, Accumulator]) -> float:
    """Return the seconds that a batch is to take, so that sending its sums takes little of them."""
    nbytes = sum(array.nbytes for parts in accumulators.values() for array in parts.values())
    return max(SECONDS, _TIMES * nbytes / _BYTES_A_SECOND)


def add(to: Accumulator, more: Accumulator, *, columns: bool) -> None:
    """Add sums of other rows; ``columns``: those of SumColumns, whose low parts get what rounding takes."""
    for name, array in more.items():
        if not columns or name != "sums":
            to[name] += array
            continue
        for high, low in ((0, 1), (2, 3)):
            a, b = to[name][:, high], array[:, high]
            total = a + b
            rest = total - a
            to[name][:, low] += array[:, low] + ((a - (total - rest)) + (b - rest))
            to[name][:, high] = total
