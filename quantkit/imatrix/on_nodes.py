"""A collection on the nodes of a cluster: each records batches of passes, and their sums are added up.

Sums include their rounding errors (kernels/cpu/observe.py), so the file does not depend on how chunks are divided. The
length of a batch is chosen so that sending its sums takes a small share of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quantkit.evaluate.on_nodes import SECONDS, NodeModel, Pass
from quantkit.evaluate.passes import F32, I32, LoadOptions, run_windows, text_windows
from quantkit.imatrix.nextn import HiddenRows, Predictor
from quantkit.model.backends.accumulators import Accumulator, NotFinite
from quantkit.model.engine import Model, load
from quantkit.model.ops import Graph

#: Bytes of sums sent and added per second, and the factor by which a batch should take longer than that.
_BYTES_A_SECOND, _TIMES = 1e8, 20

#: Adds observing operations to a model's graph; for that of a prediction layer, given whether it has its own output.
Rewrite = Callable[[Graph], Graph]
Observe = Callable[[Graph, bool], Graph]


@dataclass(frozen=True)
class Recording:
    """Settings of a recording on nodes. ``prediction``: the file of an MTP layer."""

    model: NodeModel
    rewrite: Rewrite
    observe: Observe
    prediction: NodeModel | None
    n_ctx: int
    n_batch: int
    n_seq: int
    #: The first position whose logits are needed, and whether likelihoods are computed.
    first: int
    ppl: bool
    bos: int | None


@dataclass(frozen=True)
class PassSums:
    """The result of a batch of passes. ``sequence`` of the values that are not finite counts its windows."""

    sums: dict[str, Accumulator]
    nll: dict[int, npt.NDArray[np.float64]]
    not_finite: list[NotFinite]


class PassRunner:
    """A model ready to run passes, with its prediction layer if that is recorded."""

    def __init__(self, recording: Recording, options: LoadOptions) -> None:
        self.recording = recording
        hidden = None if recording.prediction is None else HiddenRows()
        self.model: Model = load(
            recording.model.path, n_ctx=recording.n_ctx, rewrite=recording.rewrite, observer=hidden, **options
        )
        self.session = self.model.session(recording.n_ctx, recording.n_seq)
        self.predictor: Predictor | None = None
        if recording.prediction is not None and hidden is not None:
            n_ctx, n_seq = recording.n_ctx, recording.n_seq
            self.predictor = Predictor(recording.prediction.path, hidden, n_ctx, n_seq, recording.observe, **options)
        self.threads = options.get("threads")

    @property
    def accumulators(self) -> dict[str, Accumulator]:
        return self.session.accumulators | ({} if self.predictor is None else self.predictor.accumulators)

    def run(self, passes: list[Pass]) -> PassSums:
        """Run passes and return their sums alone."""
        for parts in self.accumulators.values():
            for array in parts.values():
                array[...] = 0
        nll: dict[int, npt.NDArray[np.float64]] = {}
        not_finite: list[NotFinite] = []
        for batch in passes:
            self._run(batch.windows, batch.begin - passes[0].begin, nll, not_finite)
        sums = {
            accumulator: {name: array.copy() for name, array in parts.items()}
            for accumulator, parts in self.accumulators.items()
        }
        return PassSums(sums, nll, not_finite)

    def _run(
        self, windows: I32, begin: int, nll: dict[int, npt.NDArray[np.float64]], not_finite: list[NotFinite]
    ) -> None:
        recording = self.recording

        def score(window: int, row: int, logits: F32, following: I32) -> None:
            if recording.ppl:
                note_likelihoods(nll, begin + window, recording.n_ctx, row, logits, following)

        run_windows(
            self.model,
            text_windows(windows, recording.first),
            score,
            lambda begin, end: None,
            n_batch=recording.n_batch,
            bos=recording.bos,
            threads=self.threads,
            session=self.session,
        )
        places = self.session.take_not_finite()
        if self.predictor is not None:
            places += [replace(where, position=where.position + 1) for where in self.predictor.run(windows)]
        not_finite += [replace(where, sequence=begin + where.sequence) for where in places]


def note_likelihoods(
    nll: dict[int, npt.NDArray[np.float64]], chunk: int, n_ctx: int, row: int, logits: F32, following: I32
) -> None:
    """Store the likelihoods of some rows of a chunk; NaN where logits are not finite."""
    from quantkit.evaluate.scores import nll_of, softmax

    chunk_nll = nll.setdefault(chunk, np.full(n_ctx - 1 - n_ctx // 2, np.nan))
    if np.isfinite(logits.max(axis=1)).all():
        chunk_nll[row : row + len(logits)] = nll_of(logits, softmax(logits), following)


def begin_recording(shared: Recording, threads: int) -> Callable[[list[Pass]], PassSums]:
    """Load the model in a worker process; return a function that records passes."""
    if shared.prediction is not None:
        shared.prediction.check()
    return PassRunner(shared, shared.model.load_options(threads)).run


def batch_seconds(accumulators: Mapping[str, Accumulator]) -> float:
    """Return the time that a batch should take, in seconds, so that sending its sums takes little of it."""
    nbytes = sum(array.nbytes for parts in accumulators.values() for array in parts.values())
    return max(SECONDS, _TIMES * nbytes / _BYTES_A_SECOND)


def add_sums(target: Accumulator, sums: Accumulator, *, columns: bool) -> None:
    """Add sums of other rows. ``columns``: sums of SumColumns, whose low parts accumulate rounding errors."""
    for name, array in sums.items():
        if not columns or name != "sums":
            target[name] += array
            continue
        for high, low in ((0, 1), (2, 3)):
            a, b = target[name][:, high], array[:, high]
            total = a + b
            difference = total - a
            target[name][:, low] += array[:, low] + ((a - (total - difference)) + (b - difference))
            target[name][:, high] = total
